//! Accepts connections, speaks HTTP/1.1 or HTTP/2 on each, and ends them at a shutdown.
//!
//! A TLS connection speaks the protocol that the handshake agreed on (ALPN, RFC 7301). A plain
//! connection speaks HTTP/1.1 only: browsers speak HTTP/2 only over TLS. The gateway does not detect
//! the protocol from the first bytes, because the library waits for them without a time limit.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::overload::capacity;
use crate::transport::connection::{Accept, Accepted, Application, Connection, Protocol};
use crate::transport::connections::{ConnectionSlot, Connections};
use crate::transport::frames::CountedFrames;
use crate::transport::streams::{self, StreamTasks, Streams};

/// Buffer of one connection, in bytes. A request head that does not fit is answered 431.
const CONNECTION_BUFFER: usize = capacity::HEAD;
/// Pause after a connection could not be accepted, for example for want of a file descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves all connections to one listener.
pub(crate) struct Server<A> {
    pub(crate) app: A,
    pub(crate) connections: Arc<Connections>,
    /// How long a connection may be idle, or take to send the head of a request.
    pub(crate) idle_timeout: Duration,
}

impl<A: Application> Server<A> {
    /// Accepts connections until the sender of `end` is dropped. Then ends each connection after
    /// its requests under way, and returns when none is left. If the returned future is dropped,
    /// all connections are cut soon after.
    ///
    /// # Errors
    /// The listener cannot be used.
    pub(crate) async fn serve<C: Accept>(
        self,
        listener: std::net::TcpListener,
        acceptor: C,
        mut end: watch::Receiver<()>,
    ) -> io::Result<()> {
        let listener = TcpListener::from_std(listener)?;
        let http1 = Arc::new(self.http1());
        let server = Arc::new(self);
        let mut tasks = JoinSet::new();
        loop {
            let (stream, address) = tokio::select! {
                // Biased: new connections delay neither the end nor the removal of ended tasks.
                biased;
                _ = end.changed() => break,
                Some(_) = tasks.join_next() => continue,
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(_) => {
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                },
            };
            let Some(slot) = server.connections.enter(address.ip()).await else { continue };
            let (server, acceptor, http1) = (server.clone(), acceptor.clone(), http1.clone());
            let end = end.clone();
            tasks
                .spawn(async move { server.connection(stream, slot, acceptor, &http1, end).await });
        }
        // From now on, the system refuses new connections.
        drop(listener);
        while tasks.join_next().await.is_some() {}
        Ok(())
    }

    fn http1(&self) -> http1::Builder {
        let mut http1 = http1::Builder::new();
        http1
            .timer(TokioTimer::new())
            // One buffer per answer: answers are short.
            .writev(false)
            // The library starts this time at the end of the previous request, so it also bounds
            // how long a connection may be idle.
            .header_read_timeout(self.idle_timeout)
            .max_buf_size(CONNECTION_BUFFER);
        http1
    }

    /// Serves one connection. Errors end the connection, and the client sees its end.
    async fn connection<C: Accept>(
        &self,
        stream: TcpStream,
        slot: Arc<ConnectionSlot>,
        acceptor: C,
        http1: &http1::Builder,
        mut end: watch::Receiver<()>,
    ) {
        let accepted = tokio::select! {
            accepted = acceptor.accept(stream, slot) => accepted,
            _ = end.changed() => return,
        };
        let Ok(Accepted { stream, peer, speaks_http2 }) = accepted else { return };
        if speaks_http2 {
            let streams = Arc::new(Streams::new(peer.slot().clone()));
            let protocol = Protocol::Http2(streams.clone());
            let flooded = streams.clone();
            let is_of_proxy = peer.slot().is_of_proxy();
            let begun = streams.begun_requests();
            let pool = peer.slot().table_pool();
            let counted = CountedFrames::new(stream, begun, (is_of_proxy, pool), move |how| {
                flooded.flooded(how);
            });
            let io = TokioIo::new(counted);
            let connection = Connection::new(self.app.clone(), peer, protocol);
            let mut http2 = http2::Builder::new(StreamTasks(streams.clone()));
            streams::bound(&mut http2);
            let connection = http2.serve_connection(io, connection);
            return streams::drive(connection, &streams, self.idle_timeout, end).await;
        }
        let io = TokioIo::new(stream);
        let protocol = Protocol::http1(self.idle_timeout);
        let connection = Connection::new(self.app.clone(), peer, protocol);
        let mut connection = pin!(http1.serve_connection(io, connection));
        tokio::select! {
            biased;
            _ = end.changed() => connection.as_mut().graceful_shutdown(),
            _ = connection.as_mut() => return,
        }
        drop(connection.await);
    }
}
