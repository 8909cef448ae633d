//! A proxy in front of a master. It passes everything on to a real server until a test switches it
//! to nonsense.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;

use crate::support::harness::RedisServer;

/// Bytes that replace a reply: `first` is sent once, then `rest` for as long as the other side
/// reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Nonsense {
    first: Vec<u8>,
    rest: Vec<u8>,
}

impl Nonsense {
    pub(crate) fn once(first: impl Into<Vec<u8>>) -> Self {
        Self { first: first.into(), rest: Vec::new() }
    }

    pub(crate) fn endless(first: impl Into<Vec<u8>>, rest: impl AsRef<[u8]>) -> Self {
        let rest = rest.as_ref();
        Self { first: first.into(), rest: rest.repeat((64 * 1024 / rest.len()).max(1)) }
    }
}

type NonsenseReceiver = watch::Receiver<Option<Arc<Nonsense>>>;

pub(crate) struct FaultyMaster {
    /// The proxy has its own runtime, so that a flood of bytes does not delay the test's
    /// measurements.
    runtime: Option<Runtime>,
    port: u16,
    nonsense: watch::Sender<Option<Arc<Nonsense>>>,
    nonsense_count: Arc<AtomicUsize>,
}

impl FaultyMaster {
    /// Starts a proxy in front of a server.
    pub(crate) fn before(server: &RedisServer) -> Self {
        let runtime =
            Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("the listener is bound").port();
        listener.set_nonblocking(true).expect("a socket");
        let (nonsense, switch) = watch::channel(None);
        let nonsense_count = Arc::<AtomicUsize>::default();
        let master = server.port();
        let counter = nonsense_count.clone();
        runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).expect("a runtime is here");
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(serve(client, master, switch.clone(), counter.clone()));
            }
        });
        Self { runtime: Some(runtime), port, nonsense, nonsense_count }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// From now on every connection gets these bytes as a reply, including connections that are
    /// open already.
    pub(crate) fn start_nonsense(&self, nonsense: Nonsense) {
        self.nonsense.send_replace(Some(Arc::new(nonsense)));
    }

    /// The proxy passes everything on again. It closes the connections that got nonsense.
    pub(crate) fn stop_nonsense(&self) {
        self.nonsense.send_replace(None);
    }

    /// The number of connections that got nonsense so far.
    pub(crate) fn nonsense_count(&self) -> usize {
        self.nonsense_count.load(Ordering::SeqCst)
    }
}

impl Drop for FaultyMaster {
    fn drop(&mut self) {
        // A runtime must not be shut down from inside another one.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn serve(
    mut client: TcpStream,
    master: u16,
    mut switch: NonsenseReceiver,
    nonsense_count: Arc<AtomicUsize>,
) {
    if switch.borrow_and_update().is_none() {
        let Ok(mut master) = TcpStream::connect(("127.0.0.1", master)).await else { return };
        let _ = (client.set_nodelay(true), master.set_nodelay(true));
        tokio::select! {
            _ = copy_bidirectional(&mut client, &mut master) => return,
            changed = switch.changed() => if changed.is_err() { return },
        }
    }
    let Some(nonsense) = switch.borrow_and_update().clone() else { return };
    let mut request = [0; 4096];
    // The bytes pretend to be an answer, so they are sent only after a request.
    if !matches!(client.read(&mut request).await, Ok(1..)) {
        return;
    }
    nonsense_count.fetch_add(1, Ordering::SeqCst);
    let flood = async {
        client.write_all(&nonsense.first).await?;
        while !nonsense.rest.is_empty() {
            client.write_all(&nonsense.rest).await?;
        }
        while client.read(&mut request).await? > 0 {}
        std::io::Result::Ok(())
    };
    tokio::select! {
        _ = flood => {}
        _ = switch.changed() => {}
    }
}
