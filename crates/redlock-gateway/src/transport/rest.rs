//! Reads the part of a request's body that a handler did not read. Otherwise some clients lose the
//! answer.
//!
//! A handler may answer before it has read the body. For example, it refuses a request without a key
//! by its head. HTTP/2 then ends the stream by RST_STREAM with NO_ERROR (RFC 9113, section 8.1).
//! Some clients report that as a failure and lose the answer, curl 7.88 among them.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::oneshot;

/// How many bytes of an unread part are read at most.
const MAX_REST: usize = 1024 * 1024;

/// Reads and discards the unread part of a body, but no more than [`MAX_REST`] bytes, and for no
/// longer than `limit`.
pub(crate) async fn read_rest<B: Body<Data = Bytes> + Unpin>(mut body: B, limit: Duration) {
    let rest = async {
        let mut left = MAX_REST;
        while let Some(Ok(frame)) = body.frame().await {
            let count = frame.into_data().map_or(0, |chunk| chunk.len());
            let Some(less) = left.checked_sub(count) else { return };
            left = less;
        }
    };
    let _ = tokio::time::timeout(limit, rest).await;
}

/// Wraps the body of a request. When the handler drops the body, the receiver gets the unread part.
/// An empty body gets no receiver, nor does the body of a client that waits for "100 Continue".
pub(crate) fn returning(
    request: http::Request<Incoming>,
) -> (http::Request<Returning>, Option<oneshot::Receiver<Incoming>>) {
    let (head, body) = request.into_parts();
    // A client that waits for "100 Continue" sends no body before the answer.
    let has_rest = !body.is_end_stream() && !head.headers.contains_key(http::header::EXPECT);
    let (sender, rest) = has_rest.then(oneshot::channel).unzip();
    (http::Request::from_parts(head, Returning { body: Some(body), rest: sender }), rest)
}

/// A request's body that is handed back when the handler drops it before its end.
pub(crate) struct Returning {
    /// `None` only while this value is dropped.
    body: Option<Incoming>,
    rest: Option<oneshot::Sender<Incoming>>,
}

impl Body for Returning {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(Body::size_hint).unwrap_or_default()
    }
}

impl Drop for Returning {
    fn drop(&mut self) {
        if let (Some(body), Some(rest)) = (self.body.take(), self.rest.take())
            && !body.is_end_stream()
        {
            // Nobody waits for the rest if the request was cancelled.
            let _ = rest.send(body);
        }
    }
}
