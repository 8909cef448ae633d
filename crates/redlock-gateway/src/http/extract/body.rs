//! The complete body of a request, up to a size limit.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;

use super::super::error::{
    ApiError, BODY_TOO_LARGE, INVALID_BODY, INVALID_PARAMETER, REQUEST_TIMEOUT,
    UNSUPPORTED_MEDIA_TYPE,
};
use crate::auth::holds_secret;
use crate::config::show;
use crate::transport::rest::read_rest;

/// Limit on a body, in bytes. Legal bodies are far smaller. The largest has a label and 1 KiB of
/// metadata, with every character escaped.
const MAX_BODY: usize = 16 * 1024;
/// Time limit for a body to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the gateway reads the rest of a body that is too large.
const REST_TIMEOUT: Duration = Duration::from_secs(1);
/// Limit on the description of an error in a body, in characters.
const LONGEST_ERROR: usize = 500;

/// A JSON object, or the default when there is no body.
pub(crate) struct Json<T, const MAX: usize = MAX_BODY>(pub(crate) T);

impl<T: DeserializeOwned + Default, S: Send + Sync, const MAX: usize> FromRequest<S>
    for Json<T, MAX>
{
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        Self::read(request, |_| Ok(())).await
    }
}

impl<T: DeserializeOwned + Default, const MAX: usize> Json<T, MAX> {
    /// Reads a body. `grows` is called with the size that the body will have, before each part of it is
    /// kept. An error of `grows` is the result.
    pub(crate) async fn read(
        request: Request,
        grows: impl FnMut(usize) -> Result<(), ApiError>,
    ) -> Result<Self, ApiError> {
        let (parts, mut body) = request.into_parts();
        if http_body::Body::is_end_stream(&body) {
            return Ok(Self(T::default()));
        }
        let collected = collected(&mut body, MAX, grows);
        let bytes = match tokio::time::timeout(BODY_TIMEOUT, collected).await {
            Err(_) => {
                let limit = show(BODY_TIMEOUT);
                return Err(REQUEST_TIMEOUT
                    .because(format!("the request body did not arrive within {limit}")));
            }
            Ok(Err(error @ NotCollected::BrokeOff)) => return Err(error.into_refusal(MAX)),
            Ok(Err(error)) => {
                // Without this, the gateway would close the connection while the client still
                // sends. The client would get a reset and never see the answer. The future is
                // boxed, because it would make the future of every request larger.
                Box::pin(read_rest(body, REST_TIMEOUT)).await;
                return Err(error.into_refusal(MAX));
            }
            Ok(Ok(bytes)) => bytes,
        };
        check_codings(&parts.headers)?;
        // Some generated clients cannot omit a body.
        if matches!(bytes.trim_ascii(), b"" | b"null") {
            return Ok(Self(T::default()));
        }
        let mut content_types = parts.headers.get_all(header::CONTENT_TYPE).iter();
        let content_type = content_types.next().map(HeaderValue::as_bytes);
        if content_types.next().is_some() {
            return Err(UNSUPPORTED_MEDIA_TYPE.because("two content types are given; send one"));
        }
        if !content_type.is_some_and(is_json) {
            let found = content_type
                .map_or("missing".into(), |text| format!("{:?}", String::from_utf8_lossy(text)));
            let detail = format!(
                "the content type is {found}; send application/json (curl: -H 'content-type: application/json' -d '{{…}}', or --json since 7.82)"
            );
            return Err(UNSUPPORTED_MEDIA_TYPE.because(detail));
        }
        // This check is needed because a derived `Deserialize` also accepts an array with the
        // values of the fields.
        if !bytes.trim_ascii_start().starts_with(b"{") {
            return Err(INVALID_BODY.because("the body is not a JSON object: it must begin with {"));
        }
        serde_json::from_slice(&bytes)
            .map(Self)
            .map_err(|error| INVALID_BODY.because(described(&error)))
    }
}

/// Refuses a body that would have to be decoded, and an expectation that is not met.
fn check_codings(headers: &HeaderMap) -> Result<(), ApiError> {
    let others = |name: &HeaderName, allowed: &str| {
        let values = headers.get_all(name).iter().map(HeaderValue::as_bytes);
        let mut others = values.filter(|value| !value.eq_ignore_ascii_case(allowed.as_bytes()));
        let other = String::from_utf8_lossy(others.next()?);
        Some(format!("{name} is {other:?}; allowed is {allowed}"))
    };
    if let Some(detail) = others(&header::CONTENT_ENCODING, "identity") {
        return Err(UNSUPPORTED_MEDIA_TYPE.because(detail));
    }
    for (name, allowed) in
        [(header::TRANSFER_ENCODING, "chunked"), (header::EXPECT, "100-continue")]
    {
        if let Some(detail) = others(&name, allowed) {
            return Err(INVALID_PARAMETER.because(detail));
        }
    }
    Ok(())
}

/// Why a body was not collected.
enum NotCollected {
    BrokeOff,
    TooLarge,
    Refused(ApiError),
}

impl NotCollected {
    fn into_refusal(self, max: usize) -> ApiError {
        match self {
            Self::BrokeOff => INVALID_BODY.because("the body broke off"),
            Self::TooLarge => {
                BODY_TOO_LARGE.because(format!("the request body is larger than {max} bytes"))
            }
            Self::Refused(error) => error,
        }
    }
}

/// Collects the body of at most `max` bytes. Chunks are copied, because each chunk keeps its whole read
/// buffer in memory. If a client sends its body byte by byte, that would be 8 KB for each byte.
async fn collected(
    body: &mut Body,
    max: usize,
    mut grows: impl FnMut(usize) -> Result<(), ApiError>,
) -> Result<Vec<u8>, NotCollected> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        if let Ok(chunk) = frame.map_err(|_| NotCollected::BrokeOff)?.into_data() {
            let size = bytes.len() + chunk.len();
            if size > max {
                return Err(NotCollected::TooLarge);
            }
            grows(size).map_err(NotCollected::Refused)?;
            bytes.extend_from_slice(&chunk);
        }
    }
    Ok(bytes)
}

/// Describes why a body could not be read. The parser's error may quote any part of the body. So an
/// error with a secret is replaced by another text, and a long error is cut.
fn described(error: &serde_json::Error) -> String {
    use serde_json::error::Category;
    let (text, line, column) = (error.to_string(), error.line(), error.column());
    let place = format!(" at line {line} column {column}");
    let text = text.strip_suffix(&place).unwrap_or(&text);
    let error = match error.classify() {
        Category::Eof => format!("the body is not JSON: it ends too early{place}"),
        Category::Syntax | Category::Io => format!("the body is not JSON: {text}{place}"),
        Category::Data => match elsewhere(text) {
            Some(advice) => advice.into(),
            None => match text.rsplit_once("`, expected ") {
                Some((what, allowed)) if text.starts_with("unknown field `") => {
                    let allowed = allowed.trim_start_matches("one of ");
                    let verb = if allowed.contains(',') { "are" } else { "is" };
                    format!("{what}`; allowed {verb} {allowed}{place}")
                }
                _ => format!("{text}{place}"),
            },
        },
    };
    if holds_secret(&error) {
        return "there is an API key or a lock token in the wrong place of the body".into();
    }
    match error.char_indices().nth(LONGEST_ERROR) {
        Some((end, _)) => format!("{}…", &error[..end]),
        None => error,
    }
}

/// Says where a known field belongs that this body may not have.
fn elsewhere(error: &str) -> Option<&'static str> {
    // Of all bodies, only that of a deferred request may have `callback_url`.
    let is_deferred = error.contains("`callback_url`");
    match error.strip_prefix("unknown field `")?.split_once('`')?.0 {
        "callback_url" => Some(
            "callback_url belongs to POST /requests, which waits for a lock without a connection",
        ),
        "ttl_ms" | "hold_at_least_ms" if is_deferred => {
            Some("ttl_ms and hold_at_least_ms belong to the POST that claims the lock")
        }
        _ => None,
    }
}

fn is_json(content_type: &[u8]) -> bool {
    let essence = content_type.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    essence.eq_ignore_ascii_case(b"application/json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_types_with_parameters_are_json_and_others_are_not() {
        assert!(is_json(b"application/json") && is_json(b"Application/JSON ; charset=utf-8"));
        assert!(!is_json(b"application/x-www-form-urlencoded") && !is_json(b""));
    }
}
