//! Detects whether a client is still there.
//!
//! The HTTP library notices a hung-up client when it reads from the connection. It does not read
//! while it has bytes of a next request, or just a stray newline, that it cannot use yet. A request
//! that waits for a lock would then wait for a client that is gone. Such a request would be granted
//! the lock, and nobody else could get the lock until it expires. So the stream is shared with
//! [`Peer`], which asks the system whether the client has closed the connection.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;

use crate::overload::clients::{Client, Permit};
use crate::proxies::ClientAddress;
use crate::transport::connections::{ConnectionSlot, NoSlot};
use crate::transport::tls::ClientCertificate;

/// How often the connection of a waiting client is checked.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// How long sent bytes may stay unacknowledged by the client's system before the connection is
/// given up.
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);

/// The other end of a connection.
#[derive(Clone)]
pub(crate) struct Peer {
    stream: Arc<TcpStream>,
    address: SocketAddr,
    certificate: Option<Arc<ClientCertificate>>,
    slot: Arc<ConnectionSlot>,
    /// The client that the other end, a trusted proxy, names for this request.
    behind: Option<(ClientAddress, Arc<Client>)>,
    /// Why the request is to be refused, although its connection has a slot.
    refused: Option<NoSlot>,
}

impl Peer {
    /// The address of the client. A proxy that is not trusted counts as the client.
    pub(crate) fn address(&self) -> ClientAddress {
        self.behind.as_ref().map_or(self.address.into(), |(address, _)| *address)
    }

    /// The trusted proxy that speaks for the client.
    pub(crate) fn proxy(&self) -> Option<SocketAddr> {
        self.behind.as_ref().map(|_| self.address)
    }

    /// The client that requests are charged to, on a gateway without keys. The connection itself is
    /// charged to the address at its other end, which may be a proxy.
    pub(crate) fn client(&self) -> &Arc<Client> {
        self.behind.as_ref().map_or(self.slot.client(), |(_, client)| client)
    }

    /// Returns the peer for one request, which this peer sent on behalf of `client`.
    pub(crate) fn speaking_for(&self, client: ClientAddress) -> Self {
        let is_other = client != self.address.into();
        let behind = is_other.then(|| (client, self.slot.client_at(client.ip)));
        Self { behind, ..self.clone() }
    }

    /// Counts the connection for the client behind the proxy, if there is one, until the permit is
    /// dropped. Without a permit the request is to be refused.
    pub(crate) fn take_share(&mut self) -> Option<Permit> {
        let (_, client) = self.behind.as_ref()?;
        let permit = self.slot.lend_to(client);
        self.refuse(permit.is_none().then_some(NoSlot::Client));
        permit
    }

    /// Refuses the request if there is a reason.
    pub(crate) fn refuse(&mut self, why: Option<NoSlot>) {
        self.refused = self.refused.or(why);
    }

    /// Why the request is to be refused, if it is.
    pub(crate) fn refused(&self) -> Option<NoSlot> {
        self.refused
    }

    /// The slot of the connection.
    pub(crate) fn slot(&self) -> &Arc<ConnectionSlot> {
        &self.slot
    }

    /// Adds the client's certificate.
    pub(crate) fn with_certificate(self, certificate: Option<ClientCertificate>) -> Self {
        Self { certificate: certificate.map(Arc::new), ..self }
    }

    pub(crate) fn certificate(&self) -> Option<&ClientCertificate> {
        self.certificate.as_deref()
    }

    /// Waits until the client has closed its side of the connection.
    pub(crate) async fn gone(&self) {
        while !self.is_gone() {
            tokio::time::sleep(CHECK_EVERY).await;
        }
    }

    /// Whether the system has reported the end of the stream. There may still be bytes before this
    /// end that nobody has read.
    fn is_gone(&self) -> bool {
        let readiness = pin!(self.stream.ready(Interest::READABLE));
        match readiness.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(readiness)) => readiness.is_read_closed(),
            Poll::Ready(Err(_)) => true,
            Poll::Pending => false,
        }
    }
}

/// The stream of a connection, shared with its [`Peer`].
pub(crate) struct SharedStream {
    stream: Arc<TcpStream>,
    slot: Arc<ConnectionSlot>,
    /// Bytes that may still be read.
    left: usize,
}

impl SharedStream {
    pub(crate) fn new(stream: TcpStream, slot: Arc<ConnectionSlot>) -> io::Result<(Self, Peer)> {
        let address = stream.peer_addr()?;
        rustix::net::sockopt::set_tcp_user_timeout(&stream, UNACKNOWLEDGED.as_millis() as u32)?;
        let stream = Arc::new(stream);
        if !slot.attach(&stream) {
            return Err(io::Error::other("the connection was closed for another one"));
        }
        let peer = Peer {
            stream: stream.clone(),
            address,
            certificate: None,
            slot: slot.clone(),
            behind: None,
            refused: None,
        };
        Ok((Self { stream, slot, left: usize::MAX }, peer))
    }

    /// Limits the bytes that may be read from now on.
    pub(crate) fn limit(&mut self, left: usize) {
        self.left = left;
    }
}

impl AsyncRead for SharedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            std::task::ready!(self.stream.poll_read_ready(context))?;
            // The connection was closed for another one. Bytes that came since then may be a
            // request. Its answer could not be sent, so the request must not be carried out.
            if self.slot.is_evicted() {
                return Poll::Ready(Ok(()));
            }
            let room = buffer.remaining();
            let mut drained = false;
            // A read that leaves room in the buffer has taken all bytes there were. `WouldBlock`
            // reports that to the runtime, and so saves the next read, which would find nothing.
            // Tokio's own reader does the same.
            let read = self.stream.try_io(Interest::READABLE, || {
                let got = self.stream.try_read_buf(buffer)?;
                drained = 0 < got && got < room;
                if drained { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
            });
            let got = room - buffer.remaining();
            if got > self.left {
                return Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the client sent too many bytes in its handshake",
                )));
            }
            self.left -= got;
            match read {
                _ if drained => return Poll::Ready(Ok(())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read),
            }
        }
    }
}

impl SharedStream {
    fn poll_io<T>(
        &self,
        context: &mut Context<'_>,
        work: impl Fn(&TcpStream) -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        loop {
            std::task::ready!(self.stream.poll_write_ready(context))?;
            match work(&self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done),
            }
        }
    }
}

impl AsyncWrite for SharedStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_io(context, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_io(context, |stream| stream.try_write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.slot.flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match rustix::net::shutdown(&*self.stream, rustix::net::Shutdown::Write) {
            Ok(()) | Err(rustix::io::Errno::NOTCONN) => Poll::Ready(Ok(())),
            Err(error) => Poll::Ready(Err(error.into())),
        }
    }
}
