//! The address of a master and the login, parsed once. Errors, names and debug output never contain
//! the password.

use std::fmt;

use url::Url;

/// `redis://` or `rediss://` (TLS), with optional user, password and database.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) tls: bool,
    pub(super) username: Option<String>,
    pub(super) password: Option<String>,
    pub(super) database: Option<u8>,
    name: String,
}

/// Why a text is no node URL. Contains nothing of the text between scheme and host, which may be a
/// password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}; expected redis://[[user]:password@]host[:port][/database] or rediss://… for TLS")]
pub struct RedisUrlError(&'static str);

impl RedisUrl {
    /// Parses a node URL. The port defaults to 6379.
    ///
    /// # Errors
    /// The text is no such URL, or needs TLS in a build without TLS.
    pub fn parse(text: &str) -> Result<Self, RedisUrlError> {
        let url = Url::parse(text.trim()).map_err(|_| RedisUrlError("not a URL"))?;
        let tls = match url.scheme() {
            "redis" => false,
            "rediss" if cfg!(feature = "tls") => true,
            "rediss" => return Err(RedisUrlError("this program was built without TLS")),
            _ => return Err(RedisUrlError("the scheme is neither redis nor rediss")),
        };
        let host =
            url.host_str().filter(|host| !host.is_empty()).ok_or(RedisUrlError("no host"))?;
        if url.query().is_some() || url.fragment().is_some() {
            return Err(RedisUrlError("a query or fragment has no meaning here"));
        }
        let database = match url.path().trim_matches('/') {
            "" => None,
            number => Some(
                number
                    .parse()
                    .map_err(|_| RedisUrlError("the database is not a number from 0 to 255"))?,
            ),
        };
        let decode = |text: &str| {
            percent_decode(text).ok_or(RedisUrlError("bad percent-encoding in the credentials"))
        };
        let username = Some(decode(url.username())?).filter(|name| !name.is_empty());
        let password = url.password().map(decode).transpose()?;
        let port = url.port().unwrap_or(6379);
        let name = format!("{host}:{port}");
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        Ok(Self { host, port, tls, username, password, database, name })
    }

    /// Whether it is `rediss://`.
    pub fn is_tls(&self) -> bool {
        self.tls
    }

    /// User and password, if the URL has them.
    pub fn credentials(&self) -> (Option<&str>, Option<&str>) {
        (self.username.as_deref(), self.password.as_deref())
    }

    /// Replaces the password.
    pub fn with_password(self, password: &str) -> Self {
        Self { password: Some(password.to_owned()), ..self }
    }

    /// `host:port`, for logs and metrics.
    pub fn name(&self) -> &str {
        &self.name
    }
}

fn percent_decode(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte == b'%' {
            let digits = [bytes.next()?, bytes.next()?];
            out.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
        } else {
            out.push(byte);
        }
    }
    String::from_utf8(out).ok()
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisUrl({})", self.name)
    }
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_have_host_port_credentials_and_database() {
        let url = RedisUrl::parse("rediss://us%65r:p%40ss@redis.example:7000/3").unwrap();
        assert_eq!((url.host.as_str(), url.port, url.tls), ("redis.example", 7000, true));
        assert_eq!(
            (url.username.as_deref(), url.password.as_deref()),
            (Some("user"), Some("p@ss"))
        );
        assert_eq!((url.database, url.name()), (Some(3), "redis.example:7000"));
        let url = RedisUrl::parse("redis://[::1]").unwrap();
        assert_eq!((url.host.as_str(), url.name()), ("::1", "[::1]:6379"));
    }

    #[test]
    fn neither_errors_nor_debug_output_show_the_password() {
        let url = RedisUrl::parse("redis://:hunter2@h:1").unwrap();
        assert!(!format!("{url:?} {url}").contains("hunter2"));
        for bad in [
            "http://:hunter2@h",
            "redis://:hunter2@",
            "redis://:hunter2@h:1/x",
            "redis://:hunter2@h?db=1",
            "hunter2",
        ] {
            let error = RedisUrl::parse(bad).unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
