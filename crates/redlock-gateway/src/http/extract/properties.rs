//! Properties of the parsers of headers, for arbitrary values.

use proptest::collection::vec;
use proptest::prelude::*;

use http::{HeaderName, HeaderValue};

use super::*;

fn value() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        4 => "[< ]{0,2}[12]\\.[0-9]{15,17}\\.[0-9a-fA-F]{39,41}[> ]{0,2}".prop_map(String::into_bytes),
        2 => "[!-~]{0,40}".prop_map(String::into_bytes),
        2 => "[a-z,; ]{0,6}[wW]ait ?= ?\"?[0-9+-]{0,22}\"?[,;]?".prop_map(String::into_bytes),
        1 => vec(any::<u8>(), 0..300),
    ]
}

fn headers(name: &HeaderName, values: &[Vec<u8>]) -> HeaderMap {
    let values = values.iter().filter_map(|value| HeaderValue::from_bytes(value).ok());
    values.map(|value| (name.clone(), value)).collect()
}

proptest! {
    #[test]
    fn a_parsed_token_is_the_one_in_the_header(values in vec(value(), 0..3)) {
        let headers = headers(&LOCK_TOKEN, &values);
        match lock_token(&headers) {
            Ok(token) => {
                prop_assert_eq!(headers.len(), 1);
                let text = headers[&LOCK_TOKEN].to_str().expect("tokens are ASCII").trim();
                let token = token.expose();
                prop_assert!(text == token || text == format!("<{token}>"), "{text:?}");
            }
            Err(error) => {
                let expected = if headers.is_empty() { "missing_token" } else { "invalid_token" };
                prop_assert_eq!(error.problem().code, expected);
            }
        }
    }

    #[test]
    fn a_parsed_idempotency_key_is_the_one_in_the_header(values in vec(value(), 0..3)) {
        let headers = headers(&IDEMPOTENCY_KEY, &values);
        match idempotency_key(&headers) {
            Ok(None) => prop_assert_eq!(headers.len(), 0),
            Ok(Some(key)) => {
                prop_assert_eq!((headers.len(), headers[&IDEMPOTENCY_KEY].as_bytes()), (1, key.as_bytes()));
                prop_assert!((16..=255).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic()));
            }
            Err(error) => prop_assert_eq!(error.problem().code, "invalid_parameter"),
        }
    }

    #[test]
    fn a_preference_is_refused_or_within_the_limit(values in vec(value(), 0..3)) {
        let limits = super::tests::limits();
        let wait = preferred_wait(&headers(&PREFER, &values), &limits)
            .and_then(|seconds| seconds.map(|seconds| preferred_time(seconds, &limits)).transpose());
        match wait {
            Ok(wait) => prop_assert!(wait.is_none_or(|wait| wait <= limits.max_wait)),
            Err(error) => prop_assert_eq!(error.problem().code, "invalid_wait"),
        }
    }
}
