//! Origins of web pages and of callbacks, in the form that browsers send.

use http::Uri;

/// `scheme://host[:port]`, in lower case and without the scheme's default port: the only form that
/// browsers send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin(String);

/// Why a text is no origin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OriginError {
    #[error("a star would stand for every page that anybody here opens; name each origin once")]
    Star,
    #[error("expected an exact origin, such as https://ops.example.com or http://localhost:3000")]
    Malformed,
    #[error("write it as {0}")]
    Other(String),
}

impl Origin {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn parse(text: &str) -> Result<Self, OriginError> {
        if text.contains('*') {
            return Err(OriginError::Star);
        }
        // `Uri` reports no port if the port is not a number. Such a port shows because the
        // authority then differs from the host.
        let has_port = |uri: &Uri| {
            uri.port().is_some() || uri.authority().map(|all| all.as_str()) == uri.host()
        };
        let uri = text.parse::<Uri>().ok().filter(has_port);
        let uri = uri.filter(|uri| !text.contains('@') && text.is_ascii() && uri.query().is_none());
        let parts = uri
            .as_ref()
            .and_then(|uri| Some((uri.scheme_str()?, uri.host()?, uri.port_u16(), uri.path())));
        let Some((scheme @ ("http" | "https"), host, port, "/")) = parts else {
            return Err(OriginError::Malformed);
        };
        let port = match (scheme, port) {
            ("http", Some(80)) | ("https", Some(443)) | (_, None) => String::new(),
            (_, Some(port)) => format!(":{port}"),
        };
        let sent = format!("{scheme}://{}{port}", host.to_ascii_lowercase());
        // Origins are compared byte by byte, so any other form would never match.
        if sent == text { Ok(Self(sent)) } else { Err(OriginError::Other(sent)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_has_exactly_the_form_that_browsers_send() {
        for good in [
            "https://ops.example.com",
            "http://localhost:3000",
            "http://[::1]:8080",
            "https://10.0.0.1:8443",
        ] {
            assert_eq!(Origin::parse(good).map(|origin| origin.0), Ok(good.to_owned()));
        }
        for (bad, word) in [
            ("*", "every page"),
            ("https://*.example.com", "every page"),
            ("null", "exact origin"),
            ("ops.example.com", "exact origin"),
            ("//ops.example.com", "exact origin"),
            ("ftp://ops.example.com", "exact origin"),
            ("https://ops.example.com/page", "exact origin"),
            ("https://user@ops.example.com", "exact origin"),
            ("https://ops.example.com?a", "exact origin"),
            ("https://ops example.com", "exact origin"),
            ("https://öps.example.com", "exact origin"),
            ("https://ops.example.com:99999", "exact origin"),
            ("https://", "exact origin"),
            ("https://ops.example.com/", "as https://ops.example.com"),
            ("https://Ops.Example.com", "as https://ops.example.com"),
            ("https://ops.example.com:443", "as https://ops.example.com"),
        ] {
            let error = Origin::parse(bad).unwrap_err().to_string();
            assert!(error.contains(word), "{bad:?}: {error}");
        }
    }
}
