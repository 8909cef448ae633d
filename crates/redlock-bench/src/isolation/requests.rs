//! Requests as text, with a key where there are keys.

use std::fmt::Write as _;

/// What is empty is left out.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Parts<'a> {
    pub(super) key: &'a str,
    pub(super) token: &'a str,
    pub(super) body: &'a str,
}

pub(super) fn request(method: &str, path: &str, Parts { key, token, body }: Parts<'_>) -> Vec<u8> {
    let mut text = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n");
    let mut header = |name: &str, value: &str| {
        if !value.is_empty() {
            write!(text, "{name}{value}\r\n").expect("a String takes everything");
        }
    };
    header("authorization: Bearer ", key);
    header("lock-token: ", token);
    if !body.is_empty() {
        header("content-type: application/json\r\ncontent-length: ", &body.len().to_string());
    }
    text.push_str("\r\n");
    text.push_str(body);
    text.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_empty_is_left_out() {
        let text = |parts| String::from_utf8(request("GET", "/a", parts)).unwrap();
        assert_eq!(text(Parts::default()), "GET /a HTTP/1.1\r\nhost: localhost\r\n\r\n");
        let all = text(Parts { key: "k", token: "t", body: "{}" });
        assert!(all.contains("\r\nauthorization: Bearer k\r\nlock-token: t\r\ncontent-type: "), "{all}");
        assert!(all.ends_with("\r\ncontent-length: 2\r\n\r\n{}"), "{all}");
    }
}
