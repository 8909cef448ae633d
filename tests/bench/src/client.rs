//! An HTTP client with one request in flight. A connection has no task of its own: the task that
//! sends a request also drives hyper's connection. So a connection closes when it is dropped.

use std::fmt::Display;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::sleep;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

const SETTLE_TRIES: u32 = 10;
const SETTLE_PAUSE: Duration = Duration::from_millis(100);

/// Where requests go, and with which credentials.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) address: SocketAddr,
    /// The value of the Authorization header, for gateways that need an API key.
    pub(crate) key: Option<HeaderValue>,
    pub(crate) tls: Option<TlsConnector>,
}

/// One keep-alive connection.
pub(crate) struct Connection {
    sender: SendRequest<Full<Bytes>>,
    /// Moves the bytes of the connection. `None` once the connection has ended.
    driver: Option<Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>>,
    key: Option<HeaderValue>,
}

#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) lock_token: Option<String>,
    pub(crate) body: Bytes,
}

impl Answer {
    /// The token of the lock, if this answer grants one.
    pub(crate) fn granted(&self) -> Option<&str> {
        self.lock_token.as_deref().filter(|_| self.status == 201)
    }

    pub(crate) fn describe(&self) -> String {
        let body: String = String::from_utf8_lossy(&self.body).chars().take(300).collect();
        format!("{} {body}", self.status)
    }
}

impl Target {
    pub(crate) fn plain(address: SocketAddr) -> Self {
        Self { address, key: None, tls: None }
    }

    /// Adds a Bearer key to every request.
    pub(crate) fn with_key(mut self, key: &str) -> Self {
        self.key = Some(HeaderValue::try_from(format!("Bearer {key}")).expect("keys are ASCII"));
        self
    }

    pub(crate) async fn open(&self) -> Result<Connection, String> {
        let fault = |error: &dyn Display| format!("cannot connect to {}: {error}", self.address);
        let stream = TcpStream::connect(self.address).await.map_err(|error| fault(&error))?;
        stream.set_nodelay(true).map_err(|error| fault(&error))?;
        let key = self.key.clone();
        let Some(tls) = &self.tls else {
            let (sender, driver) =
                handshake(TokioIo::new(stream)).await.map_err(|error| fault(&error))?;
            return Ok(Connection { sender, driver: Some(Box::pin(driver)), key });
        };
        let stream = tls
            .connect(ServerName::from(self.address.ip()), stream)
            .await
            .map_err(|error| fault(&error))?;
        let (sender, driver) =
            handshake(TokioIo::new(stream)).await.map_err(|error| fault(&error))?;
        Ok(Connection { sender, driver: Some(Box::pin(driver)), key })
    }
}

impl Connection {
    /// Sends a request and waits for its answer. An empty token or body is left out. After an error
    /// the connection cannot be used again.
    pub(crate) async fn ask(
        &mut self,
        method: Method,
        path: &str,
        token: &str,
        body: &str,
    ) -> Result<Answer, String> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, HeaderValue::from_static("localhost"));
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, key);
        }
        if !token.is_empty() {
            request = request.header("lock-token", token);
        }
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        let request =
            request.body(Full::from(body.to_owned())).map_err(|error| error.to_string())?;
        self.exchange(request).await.map_err(|error| format!("no answer: {error}"))
    }

    async fn exchange(&mut self, request: Request<Full<Bytes>>) -> hyper::Result<Answer> {
        let Self { sender, driver, .. } = self;
        let mut answer = pin!(async {
            sender.ready().await?;
            let (head, body) = sender.send_request(request).await?.into_parts();
            let token = head.headers.get("lock-token").and_then(|token| token.to_str().ok());
            let status = head.status.as_u16();
            let lock_token = token.map(str::to_owned);
            Ok(Answer { status, lock_token, body: body.collect().await?.to_bytes() })
        });
        poll_fn(|context| {
            if let Poll::Ready(answer) = answer.as_mut().poll(context) {
                return Poll::Ready(answer);
            }
            if let Some(connection) = driver
                && connection.as_mut().poll(context).is_ready()
            {
                *driver = None;
            }
            answer.as_mut().poll(context)
        })
        .await
    }

    pub(crate) async fn get(&mut self, path: &str) -> Result<Answer, String> {
        self.ask(Method::GET, path, "", "").await
    }

    pub(crate) async fn acquire(&mut self, lock: u64, body: &str) -> Result<Answer, String> {
        self.ask(Method::POST, &path(lock), "", body).await
    }

    pub(crate) async fn release(&mut self, lock: u64, token: &str) -> Result<Answer, String> {
        self.ask(Method::DELETE, &path(lock), token, "").await
    }

    /// Acquires a free lock. If the answer is 503, it repeats the request, because on a busy
    /// machine a master may miss its time-out.
    pub(crate) async fn settled_acquire(
        &mut self,
        lock: u64,
        body: &str,
    ) -> Result<String, String> {
        for _ in 0..SETTLE_TRIES {
            let answer = self.acquire(lock, body).await?;
            match answer.granted() {
                Some(token) => return Ok(token.to_owned()),
                None if answer.status == 503 => sleep(SETTLE_PAUSE).await,
                None => return Err(format!("POST was answered with {}", answer.describe())),
            }
        }
        Err("POST was answered with 503 on every attempt".into())
    }

    /// Releases a lock and repeats the request after a 503. A lock that stayed until the end of its
    /// TTL would stall all its waiters. A repeated request may find the lock gone or held by the
    /// next client. The first request may not.
    pub(crate) async fn settled_release(&mut self, lock: u64, token: &str) -> Result<(), String> {
        for tries in 0..SETTLE_TRIES {
            match self.release(lock, token).await? {
                Answer { status: 204, .. } => return Ok(()),
                Answer { status: 404 | 409, .. } if tries > 0 => return Ok(()),
                Answer { status: 503, .. } => sleep(SETTLE_PAUSE).await,
                other => return Err(format!("DELETE was answered with {}", other.describe())),
            }
        }
        Err("DELETE was answered with 503 on every attempt".into())
    }

    /// One figure of a gateway's metrics. For a name without labels it is the sum over all series
    /// with that name. `None` if there is no such series.
    pub(crate) async fn metric(&mut self, series: &str) -> Result<Option<f64>, String> {
        let answer = self.get("/metrics").await?;
        Ok(metric(&String::from_utf8_lossy(&answer.body), series))
    }
}

/// The path of a lock.
pub(crate) fn path(lock: u64) -> String {
    format!("/locks/bench-{lock:016x}")
}

fn metric(text: &str, series: &str) -> Option<f64> {
    text.lines()
        .filter_map(|line| line.strip_prefix(series))
        .filter(|rest| rest.starts_with([' ', '{']))
        .filter_map(|rest| rest.rsplit(' ').next()?.parse::<f64>().ok())
        .reduce(|sum, value| sum + value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_found_by_its_whole_name() {
        let text = "# TYPE waiters gauge\nwaiters_max 9\nwaiters 12\nkinds{kind=\"a\"} 3\nkinds{kind=\"b\"} 4\n";
        assert_eq!(
            [metric(text, "waiters"), metric(text, "kinds"), metric(text, "wait")],
            [Some(12.0), Some(7.0), None]
        );
        assert_eq!(metric(text, "kinds{kind=\"b\"}"), Some(4.0));
    }
}
