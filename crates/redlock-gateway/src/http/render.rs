//! Renders answers as JSON. If nobody receives the answer with a grant, the grant is released.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use http_body::{Frame, SizeHint};
use serde::Serialize;

use super::error::ApiError;
use super::wire::json_line;
use crate::gateway::GrantGuard;
use crate::overload::large_messages::{COVERED, bounded};

pub(super) fn header_value(text: String) -> Result<HeaderValue, ApiError> {
    HeaderValue::try_from(text).map_err(ApiError::internal)
}

pub(super) fn json_response(
    status: StatusCode,
    body: &impl Serialize,
) -> Result<Response, ApiError> {
    let mut line = json_line(body).map_err(ApiError::internal)?;
    // The client may read a large answer slowly.
    if line.len() > COVERED {
        line.shrink_to_fit();
    }
    let headers = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    Ok((status, headers, Body::from(line)).into_response())
}

/// A large answer as JSON. `permits` bound how much memory such answers take. They are kept until the
/// connection has sent the answer, however slowly the client reads.
pub(super) fn large_response(
    status: StatusCode,
    json: impl AsRef<[u8]> + Send + 'static,
    permits: impl Send + 'static,
) -> Response {
    let headers = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    (status, headers, Body::from(bounded(json, permits))).into_response()
}

/// The answer with a lease. No cache may store it.
pub(super) fn grant_response(
    status: StatusCode,
    lease: &impl Serialize,
    guard: Option<GrantGuard>,
) -> Result<Response, ApiError> {
    let bytes = Some(json_line(lease).map_err(ApiError::internal)?.into());
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ];
    Ok((status, headers, Body::new(GrantBody { bytes, guard })).into_response())
}

/// The body of the answer to an acquire. When the client is gone, the body is dropped before the
/// connection takes it, and the guard releases the lock. Once the connection has taken the body,
/// the network may still lose the answer. The gateway cannot notice that; the lock then ends with
/// its TTL.
struct GrantBody {
    bytes: Option<Bytes>,
    guard: Option<GrantGuard>,
}

impl http_body::Body for GrantBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(guard) = self.guard.take() {
            guard.delivered();
        }
        Poll::Ready(self.bytes.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, Bytes::len) as u64)
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;
    use crate::overload::clients::Counter;

    #[tokio::test]
    async fn a_large_answer_keeps_its_permits_until_it_is_sent() {
        let counter = Counter::default();
        let permit = counter.take(1);
        let response = large_response(StatusCode::OK, "[1,2]\n", permit);
        let mut body = response.into_body();
        let frame = body.frame().await.expect("a frame").expect("no error");
        drop(body);
        assert_eq!(counter.count(), 1, "the connection has the bytes, and has not sent them");
        let bytes = frame.into_data().expect("data");
        assert_eq!(bytes, "[1,2]\n");
        drop(bytes);
        assert_eq!(counter.count(), 0);
    }
}
