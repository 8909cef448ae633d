//! Translates failures of the Redis client for people who know this service and not the client.

use fred::error::{Error, ErrorKind};

#[cfg(feature = "tls")]
use super::tls;
use crate::node::Remedy;
use crate::node::link::{LinkError, LinkErrorKind, quoted};

impl From<Error> for LinkError {
    fn from(error: Error) -> Self {
        let text = &*quoted(error.details());
        let word = text.split_whitespace().next().unwrap_or_default();
        let (kind, detail) = match (error.kind(), word) {
            (_, "NOSCRIPT") => (
                LinkErrorKind::NoScript,
                "the node was restarted or its scripts were flushed".to_owned(),
            ),
            (_, "NOAUTH" | "WRONGPASS" | "NOPERM" | "LOADING" | "BUSY" | "MASTERDOWN") => {
                (LinkErrorKind::Refused, text.to_owned())
            }
            (ErrorKind::Timeout, _) => (LinkErrorKind::Broken, "no answer in time".to_owned()),
            (ErrorKind::Unknown | ErrorKind::InvalidArgument | ErrorKind::InvalidCommand, _)
                if word.chars().all(|c| c.is_ascii_uppercase()) =>
            {
                (LinkErrorKind::Error, text.to_owned())
            }
            (ErrorKind::IO, _) => (LinkErrorKind::Broken, translated_io_error(text)),
            (ErrorKind::Protocol, _) => (LinkErrorKind::Broken, invalid_reply(text)),
            (kind, _) => (LinkErrorKind::Broken, format!("{}: {text}", kind.to_str())),
        };
        let remedy = match word {
            "NOPERM" => Some(Remedy::AllowCommands),
            "NOAUTH" | "WRONGPASS" => Some(Remedy::GiveCredentials),
            "OOM" => Some(Remedy::RaiseMaxMemory),
            "MISCONF" => Some(Remedy::MendDisk),
            "WRONGTYPE" => Some(Remedy::ChangeKeyPrefix),
            #[cfg(feature = "tls")]
            _ => tls::remedy(text),
            #[cfg(not(feature = "tls"))]
            _ => None,
        };
        Self { kind, detail, remedy }
    }
}

/// Describes bytes that a node sent in place of a reply.
fn invalid_reply(text: &str) -> String {
    let why = text.trim_start_matches("Decode Error: ");
    format!("the node's answer is not a Redis reply: {why}")
}

/// Translates an error of the system or of TLS. The client keeps only Rust's debug text of it.
fn translated_io_error(text: &str) -> String {
    const CERTIFICATES: [(&str, &str); 8] = [
        ("NotValidForName", "the node's certificate does not name this host"),
        ("UnknownIssuer", "the node's certificate comes from an authority that is not trusted"),
        (
            "CaUsedAsEndEntity",
            "the node's certificate is an authority's own, and not one of a server",
        ),
        ("Expired", "the node's certificate has expired"),
        ("NotValidYet", "the node's certificate is not valid yet"),
        ("BadSignature", "the node's certificate is not signed by an authority that is trusted"),
        ("InvalidContentType", "the node does not speak TLS"),
        ("InvalidCertificate(", "the node's certificate is not accepted"),
    ];
    if let Some((_, words)) = CERTIFICATES.iter().find(|(word, _)| text.contains(word)) {
        return (*words).to_owned();
    }
    let quoted = ["message: \"", "error: \""]
        .iter()
        .find_map(|before| text.split(before).nth(1)?.split('"').next());
    quoted.map_or_else(|| text.to_owned(), str::to_lowercase)
}

/// Adds a remedy to a failed connection. A server that speaks TLS resets a connection without TLS.
pub(super) fn on_connecting(error: LinkError, is_tls: bool) -> LinkError {
    let differs = if is_tls {
        error.detail.contains("does not speak TLS")
    } else {
        error.detail.contains("reset by peer")
    };
    if differs { LinkError { remedy: Some(Remedy::MatchTls), ..error } } else { error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_translated() {
        for (text, words) in [
            (
                r#"Os { code: 111, kind: ConnectionRefused, message: "Connection refused" }"#,
                "connection refused",
            ),
            (
                r#"Custom { kind: Uncategorized, error: "failed to lookup address information: Name or service not known" }"#,
                "failed to lookup address information: name or service not known",
            ),
            (
                "Custom { kind: InvalidData, error: InvalidCertificate(NotValidForNameContext { expected: DnsName(\"a\") }) }",
                "the node's certificate does not name this host",
            ),
            (
                "Custom { kind: InvalidData, error: InvalidCertificate(Revoked) }",
                "the node's certificate is not accepted",
            ),
            ("something else", "something else"),
        ] {
            let error = LinkError::from(Error::new(ErrorKind::IO, text.to_owned()));
            assert_eq!((error.kind, error.detail.as_str()), (LinkErrorKind::Broken, words));
        }
    }

    #[test]
    fn a_reset_suggests_tls_only_without_tls() {
        let reset = || LinkError::broken("connection reset by peer");
        assert_eq!(on_connecting(reset(), false).remedy, Some(Remedy::MatchTls));
        assert_eq!(on_connecting(reset(), true).remedy, None);
        assert_eq!(
            on_connecting(LinkError::broken("the node does not speak TLS"), true).remedy,
            Some(Remedy::MatchTls)
        );
    }
}
