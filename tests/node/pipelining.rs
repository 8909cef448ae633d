//! A far master: a new operation waits neither for the answers to earlier operations nor for a
//! probe.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::Settings;
use redlock_core::node::worker::RemoteNode;
use redlock_core::node::{NoObserver, NodeState, Vote};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::support::harness::{PATIENCE, RedisServer};
use crate::support::nodes::{
    LONG_MS, Lock, ask, in_state, node_settings, now, remote_node_with, submit,
};

/// Makes the node count as a far one, and is short enough for a fast test.
const DELAY: Duration = Duration::from_millis(3);

/// A proxy between a worker and its master. It delays answers, or holds them back.
struct SlowProxy {
    url: String,
    asked: watch::Receiver<Asked>,
    open: watch::Sender<bool>,
}

/// Counts of the requests that have passed the proxy on their way to the master.
#[derive(Default, Clone, Copy)]
struct Asked {
    calls: usize,
    looks: usize,
}

impl SlowProxy {
    async fn to(server: &RedisServer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("redis://{}", listener.local_addr().expect("the listener is bound"));
        let (counter, asked) = watch::channel(Asked::default());
        let (open, gate) = watch::channel(true);
        let port = server.port();
        tokio::spawn(async move {
            while let Ok((remote, _)) = listener.accept().await {
                let master =
                    TcpStream::connect(("127.0.0.1", port)).await.expect("the master listens");
                for stream in [&remote, &master] {
                    stream.set_nodelay(true).expect("a TCP socket");
                }
                let (from_worker, to_worker) = remote.into_split();
                let (from_master, to_master) = master.into_split();
                tokio::spawn(pass_requests(from_worker, to_master, counter.clone()));
                tokio::spawn(pass_answers(from_master, to_worker, gate.clone()));
            }
        });
        Self { url, asked, open }
    }

    fn asked(&self) -> Asked {
        *self.asked.borrow()
    }

    async fn until(&mut self, what: &str, wanted: impl Fn(&Asked) -> bool) {
        let seen = timeout(PATIENCE, self.asked.wait_for(wanted)).await;
        seen.unwrap_or_else(|_| panic!("never seen: {what}"))
            .expect("the proxy lasts as long as the test");
    }
}

async fn pass_requests(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    counter: watch::Sender<Asked>,
) {
    // A command may arrive in two pieces, so this collects the text.
    let mut text = Vec::new();
    let mut chunk = [0; 4096];
    while let Ok(got @ 1..) = from.read(&mut chunk).await {
        text.extend_from_slice(&chunk[..got]);
        let count = |word: &[u8]| text.windows(word.len()).filter(|found| *found == word).count();
        counter.send_replace(Asked {
            calls: count(b"\r\nEVALSHA\r\n") + count(b"\r\nREDLOCK.CALL\r\n"),
            looks: count(b"\r\nINFO\r\n"),
        });
        if to.write_all(&chunk[..got]).await.is_err() {
            return;
        }
    }
}

async fn pass_answers(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut gate: watch::Receiver<bool>,
) {
    let mut chunk = [0; 4096];
    while let Ok(got @ 1..) = from.read(&mut chunk).await {
        tokio::time::sleep(DELAY).await;
        if gate.wait_for(|open| *open).await.is_err() || to.write_all(&chunk[..got]).await.is_err()
        {
            return;
        }
    }
}

/// A worker that has already measured how far its master is.
async fn node_through(proxy: &SlowProxy) -> Arc<RemoteNode> {
    // The node timeout is long, so that answers which are held back do not end the session.
    let settings = Settings {
        node_timeout: Duration::from_secs(3_600),
        node: node_settings(),
        ..Settings::default()
    };
    let node = remote_node_with(&proxy.url, settings.of_masters("tests", 1), Arc::new(NoObserver));
    in_state(node.as_ref(), NodeState::Admitted).await;
    assert_eq!(
        ask(node.as_ref(), Lock::new("first").acquire(1, now(), LONG_MS)).await,
        Vote::Granted
    );
    node
}

#[tokio::test]
async fn calls_to_a_far_node_are_pipelined_in_order() {
    let server = RedisServer::start();
    let mut proxy = SlowProxy::to(&server).await;
    let node = node_through(&proxy).await;

    proxy.open.send_replace(false);
    let before = proxy.asked().calls;
    let lock = Lock::new("a");
    let t = now();
    let acquire = submit(node.as_ref(), lock.acquire(1, t, LONG_MS));
    proxy.until("a call", |asked| asked.calls > before).await;
    // If the release had run first, the answer would be "missing".
    let release = submit(node.as_ref(), lock.release(1, t));
    proxy
        .until("a second call before the first is answered", |asked| asked.calls > before + 1)
        .await;
    let again = submit(node.as_ref(), lock.acquire(2, t + 1, LONG_MS));
    proxy.open.send_replace(true);

    assert_eq!(acquire.vote().await, Vote::Granted);
    assert_eq!(release.vote().await, Vote::Released);
    assert_eq!(again.vote().await, Vote::Granted);
}

#[tokio::test]
async fn locks_do_not_wait_for_a_probe_of_the_node() {
    let server = RedisServer::start();
    let mut proxy = SlowProxy::to(&server).await;
    let node = node_through(&proxy).await;

    proxy.open.send_replace(false);
    let Asked { calls, looks } = proxy.asked();
    proxy.until("the probe of every second", |asked| asked.looks > looks).await;
    let acquire = submit(node.as_ref(), Lock::new("a").acquire(1, now(), LONG_MS));
    let release = submit(node.as_ref(), Lock::new("b").release(1, now()));
    proxy.until("a call before the probe is answered", |asked| asked.calls > calls).await;
    proxy.open.send_replace(true);
    assert_eq!(acquire.vote().await, Vote::Granted);
    assert_eq!(release.vote().await, Vote::Missing);
}
