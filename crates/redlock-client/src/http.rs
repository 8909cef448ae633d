//! One request to one gateway, and whether its failure may be retried.

use std::time::Duration;

use redlock_api::Problem;
use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Method, RequestBuilder, Response, StatusCode, Url};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

/// The codes of answers that are no gateway's.
const FROM_PROXY: &str = "proxy";
const NOT_A_GATEWAY: &str = "not_a_gateway";
/// The media type of a stream of events.
const EVENT_STREAM: &str = "text/event-stream";

/// A request, independent of the gateway.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    /// The name of the lock, for messages.
    pub(crate) name: Option<String>,
    pub(crate) method: Method,
    /// The path below the gateway's URL, percent-encoded.
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Option<serde_json::Value>,
    /// An error status whose body is an answer too.
    answer_status: Option<u16>,
}

/// Why a request brought no answer.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// The gateway answered with a problem.
    Problem(Box<Problem>),
    /// The effect is unknown: no answer, or none from a gateway.
    Unclear(String),
    /// Nothing was sent: no connection could be made.
    Unreachable(String),
}

/// A name as a part of a path or of a query.
pub(crate) fn encoded(name: &str) -> String {
    // Invalid characters are encoded too, so that the gateway reports them.
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._:@+~-".contains(&byte);
    let encode = |byte: u8| {
        if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }
    };
    name.bytes().map(encode).collect()
}

impl Call {
    pub(crate) fn new(method: Method, path: impl Into<String>) -> Self {
        Self {
            name: None,
            method,
            path: path.into(),
            headers: HeaderMap::new(),
            body: None,
            answer_status: None,
        }
    }

    /// Makes a request about a lock. In names, only `/` would end a path segment.
    pub(crate) fn of_lock(method: Method, name: &str) -> Result<Self, crate::Error> {
        if matches!(name, "" | "." | "..") {
            return Err(crate::Error::Setup(format!(
                "{name:?} is not a name of a lock: a URL path cannot contain it"
            )));
        }
        let path = format!("locks/{}", encoded(name));
        Ok(Self::new(method, path).about(name))
    }

    /// Gives messages the name of the lock.
    pub(crate) fn about(self, name: &str) -> Self {
        Self { name: Some(name.to_owned()), ..self }
    }

    pub(crate) fn with_answer(self, status: u16) -> Self {
        Self { answer_status: Some(status), ..self }
    }

    pub(crate) fn header(mut self, name: &HeaderName, value: HeaderValue) -> Self {
        self.headers.insert(name.clone(), value);
        self
    }

    /// Adds a token or key, which no log may show.
    pub(crate) fn secret(self, name: &HeaderName, value: &str) -> Result<Self, crate::Error> {
        Ok(self.header(name, secret(name, value)?))
    }

    pub(crate) fn body(mut self, body: &impl Serialize) -> Self {
        self.body = Some(json!(body));
        self
    }

    /// Sends the request to one gateway, and waits for its answer for `limit` at most.
    pub(crate) async fn send<T: DeserializeOwned>(
        &self,
        http: &reqwest::Client,
        url: &Url,
        limit: Duration,
    ) -> Result<Option<T>, Failure> {
        let request = self.request(http, url)?.timeout(limit);
        let response = request.send().await.map_err(|error| failed(url, error, limit))?;
        let status = response.status();
        if status == StatusCode::NO_CONTENT {
            return Ok(None);
        }
        if !status.is_success() && self.answer_status != Some(status.as_u16()) {
            return Err(refused(url, response, limit).await);
        }
        let text = response.bytes().await.map_err(|error| failed(url, error, limit))?;
        let body = serde_json::from_slice(&text);
        body.map(Some)
            .map_err(|error| Failure::Unclear(format!("{url} answered {status}: {error}")))
    }

    /// Sends the request to one gateway, and waits for `limit` at most until a stream of events
    /// begins. The stream itself has no limit.
    pub(crate) async fn open(
        &self,
        http: &reqwest::Client,
        url: &Url,
        limit: Duration,
    ) -> Result<Response, Failure> {
        let request = self.request(http, url)?.header(ACCEPT, EVENT_STREAM);
        let begin = async {
            let response = request.send().await.map_err(|error| failed(url, error, limit))?;
            let status = response.status();
            if !status.is_success() {
                return Err(refused(url, response, limit).await);
            }
            let kind = response.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes);
            match kind.is_some_and(|kind| kind.starts_with(EVENT_STREAM.as_bytes())) {
                true => Ok(response),
                false => Err(not_a_gateway(
                    status,
                    format!("{url} answered without a stream of events; is it an older gateway?"),
                )),
            }
        };
        let is_late = |_| Failure::Unclear(no_answer_within(url, limit));
        tokio::time::timeout(limit, begin).await.map_err(is_late)?
    }

    fn request(&self, http: &reqwest::Client, url: &Url) -> Result<RequestBuilder, Failure> {
        let to = url
            .join(&self.path)
            .map_err(|error| Failure::Unclear(format!("{url}{}: {error}", self.path)))?;
        let request = http.request(self.method.clone(), to).headers(self.headers.clone());
        Ok(match &self.body {
            Some(body) => request.json(body),
            None => request,
        })
    }
}

fn failed(url: &Url, error: reqwest::Error, limit: Duration) -> Failure {
    match error.is_connect() {
        true => Failure::Unreachable(describe(url, error, limit)),
        false => Failure::Unclear(describe(url, error, limit)),
    }
}

/// The failure in an answer with an error status.
async fn refused(url: &Url, response: Response, limit: Duration) -> Failure {
    let (status, headers) = (response.status(), response.headers().clone());
    match response.bytes().await {
        Ok(text) => match serde_json::from_slice::<Problem>(&text) {
            Ok(problem) => Failure::Problem(Box::new(problem)),
            // A proxy's own page. Some proxies send Retry-After.
            Err(_) => of_proxy(url, status, &headers),
        },
        Err(error) => failed(url, error, limit),
    }
}

fn not_a_gateway(status: StatusCode, detail: String) -> Failure {
    Failure::Problem(Box::new(Problem {
        status: status.as_u16(),
        code: NOT_A_GATEWAY.into(),
        detail,
        ..Problem::default()
    }))
}

/// The value of a header that no log may show.
pub(crate) fn secret(name: &HeaderName, value: &str) -> Result<HeaderValue, crate::Error> {
    let mut value = HeaderValue::try_from(value).map_err(|_| {
        crate::Error::Setup(format!(
            "the value for {name} has characters that an HTTP header cannot contain"
        ))
    })?;
    value.set_sensitive(true);
    Ok(value)
}

fn of_proxy(url: &Url, status: StatusCode, headers: &HeaderMap) -> Failure {
    let detail = format!("{url} answered {status}, and the body is not a gateway's");
    let seconds =
        headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    match (status.as_u16(), seconds) {
        (status @ (408 | 429 | 502..=504), Some(seconds)) => Failure::Problem(Box::new(Problem {
            status,
            code: FROM_PROXY.into(),
            detail,
            retry_after_ms: Some(seconds.saturating_mul(1000)),
            ..Problem::default()
        })),
        (408 | 429 | 502..=504, None) => Failure::Unclear(detail),
        _ => not_a_gateway(status, detail),
    }
}

/// Describes an error by its innermost cause: the library's own text ends at "error sending
/// request".
fn describe(url: &Url, error: reqwest::Error, limit: Duration) -> String {
    if error.is_timeout() && !error.is_connect() {
        return no_answer_within(url, limit);
    }
    format!("{url}: {}", innermost(&error))
}

fn no_answer_within(url: &Url, limit: Duration) -> String {
    format!("{url} did not answer within {:.1} s", limit.as_secs_f64())
}

/// The innermost cause of an error.
pub(crate) fn innermost(mut cause: &dyn std::error::Error) -> &dyn std::error::Error {
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause
}

impl Failure {
    /// Whether the request certainly changed nothing: a gateway refused it, or it was not sent. A
    /// page of a proxy leaves that open.
    pub(crate) fn changed_nothing(&self) -> bool {
        match self {
            Self::Unclear(_) => false,
            Self::Unreachable(_) => true,
            Self::Problem(problem) => {
                (400..500).contains(&problem.status)
                    && !matches!(&*problem.code, FROM_PROXY | NOT_A_GATEWAY)
            }
        }
    }

    /// The failure with the URL of its gateway.
    pub(crate) fn at(&self, url: &Url) -> String {
        match self {
            Self::Problem(problem) => format!("{url}: {problem}"),
            Self::Unclear(what) | Self::Unreachable(what) => what.clone(),
        }
    }

    /// How long to wait before a retry; `None` when it would be refused again.
    pub(crate) fn pause(&self) -> Option<Duration> {
        match self {
            Self::Unclear(_) | Self::Unreachable(_) => Some(Duration::ZERO),
            Self::Problem(problem) => match problem.status {
                408 | 429 | 502..=504 => {
                    Some(Duration::from_millis(problem.retry_after_ms.unwrap_or(0)))
                }
                // The next gateway may not have the defect.
                500 => Some(Duration::ZERO),
                _ => None,
            },
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Problem(problem) => problem.fmt(f),
            Self::Unclear(what) | Self::Unreachable(what) => f.write_str(what),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_one_path_segment() {
        let path = |name| Call::of_lock(Method::POST, name).unwrap().path;
        assert_eq!(path("reports/nightly+a@b:c~d"), "locks/reports%2Fnightly+a@b:c~d");
        assert_eq!(path("../livez?x#y %2F é"), "locks/..%2Flivez%3Fx%23y%20%252F%20%C3%A9");
    }

    #[test]
    fn only_failures_that_may_pass_are_retried() {
        let problem = |status, code: &str| {
            Failure::Problem(Box::new(Problem {
                status,
                code: code.into(),
                retry_after_ms: Some(7),
                ..Problem::default()
            }))
        };
        let soon = Some(Duration::from_millis(7));
        assert_eq!(problem(503, "outcome_unknown").pause(), soon);
        assert_eq!(problem(503, "of_a_newer_gateway").pause(), soon);
        assert_eq!(problem(429, "rate_limited").pause(), soon);
        for refused in [
            problem(400, "invalid_ttl"),
            problem(401, "unauthenticated"),
            problem(409, "lock_held"),
        ] {
            assert_eq!(refused.pause(), None);
        }
        assert_eq!(Failure::Unclear("no answer".into()).pause(), Some(Duration::ZERO));
    }
}
