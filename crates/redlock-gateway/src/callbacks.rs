//! Announces to a client, by a signed POST to a URL of the client's choice, that it has something to
//! fetch. The form is that of Standard Webhooks (<https://www.standardwebhooks.com>).
//!
//! No client may use the gateway to reach what the client itself cannot reach. So:
//! - A URL must have one of the origins that the operator allows.
//! - Every address is checked: one in the URL when the URL is given, and those of a name when the
//!   gateway connects. The gateway connects to exactly the addresses that it has checked, so a name
//!   that changes its address gains nothing.
//! - Redirects are not followed, and proxies from the environment are not used.
//! - Nothing of the answer but its status is read.
//!
//! This module does not know locks.

mod address;
mod secret;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use redlock_api::headers::{WEBHOOK_ID, WEBHOOK_SIGNATURE, WEBHOOK_TIMESTAMP};
use reqwest::redirect::Policy;
use reqwest::{Client as HttpClient, Url};
use tokio::sync::Semaphore;

pub use self::address::Networks;
use self::address::{CheckedResolver, Forbidden};
use self::secret::{Secrets, SecretsError};
use crate::config::Origin;
use crate::overload::clients::Client;
use crate::reload::{Reload, Watched, read_one};

/// Limit on the length of a URL, in bytes.
const MAX_URL: usize = 2_048;
/// Limit on the callbacks under way, of all clients together.
const MAX_RUNNING: usize = 256;
/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(1);

/// What the operator allows.
#[derive(Debug, Clone)]
pub struct CallbackSettings {
    pub origins: Vec<Origin>,
    pub networks: Networks,
    pub secret_file: PathBuf,
}

/// A URL that a callback may be sent to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallbackUrl(Url);

/// Why no callback may be sent to a URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallbackUrlError {
    #[error("this gateway sends no callbacks; the operator allows origins with --callback-origin")]
    Off,
    #[error("it has {0} bytes; allowed are {MAX_URL}")]
    TooLong(usize),
    #[error("expected a URL such as https://hooks.example.com/locks")]
    Malformed,
    #[error(
        "it has a user name or a password; a signature shows that the gateway sent the callback"
    )]
    Credentials,
    #[error("its origin is not allowed; allowed are {0}")]
    Origin(String),
    #[error("{0}")]
    Address(#[from] Forbidden),
}

/// Why a callback was not received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallbackError {
    /// The receiver answered with another status than 200 to 299.
    Status(u16),
    /// The receiver cannot be reached, or sent no answer in time. The text has the reason, for the
    /// log.
    Unreachable(String),
}

impl fmt::Display for CallbackError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "the receiver answered {status}"),
            Self::Unreachable(why) => f.write_str(why),
        }
    }
}

/// Why callbacks cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum CallbacksError {
    #[error("--callback-secret-file: {0}")]
    Secrets(#[from] SecretsError),
    #[error("callbacks: {0}")]
    Client(#[from] reqwest::Error),
}

/// A callback with its id. All attempts have the same id, so a receiver notices repetitions.
#[derive(Debug, Clone)]
pub struct Message {
    pub id: String,
    pub body: String,
}

/// Sends callbacks.
pub struct Callbacks {
    http: HttpClient,
    origins: Vec<Origin>,
    networks: Networks,
    secrets: Arc<ArcSwap<Secrets>>,
    running: Semaphore,
}

/// Checks that the files of these settings can be used.
///
/// # Errors
/// As [`Callbacks::start`].
pub fn check(settings: &CallbackSettings) -> Result<(), CallbacksError> {
    let path = &settings.secret_file;
    Ok(Secrets::read(path, &read_one(path)).map(drop)?)
}

impl Callbacks {
    /// Reads the secrets, and follows their file. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The file has no usable secret.
    pub fn start(
        settings: &CallbackSettings,
        reload: &Reload,
        failures: metrics::Counter,
    ) -> Result<Self, CallbacksError> {
        let path = &settings.secret_file;
        let secrets = Arc::new(ArcSwap::from_pointee(Secrets::read(path, &read_one(path))?));
        let resolver = CheckedResolver::of_system(settings.networks.clone());
        let callbacks = Self::new(settings, secrets.clone(), resolver)?;
        tokio::spawn(follow(
            path.clone(),
            Watched::new(vec![path.clone()], reload),
            secrets,
            failures,
        ));
        Ok(callbacks)
    }

    fn new(
        settings: &CallbackSettings,
        secrets: Arc<ArcSwap<Secrets>>,
        resolver: CheckedResolver,
    ) -> Result<Self, CallbacksError> {
        let http = HttpClient::builder()
            .user_agent(concat!("redlock-gateway/", env!("CARGO_PKG_VERSION")))
            .redirect(Policy::none())
            .no_proxy()
            .dns_resolver(Arc::new(resolver))
            .connect_timeout(CONNECT)
            // Each callback has a connection of its own, so that each connection is to an address
            // that was checked for this callback.
            .pool_max_idle_per_host(0)
            .http1_only()
            .build()?;
        let CallbackSettings { origins, networks, .. } = settings.clone();
        Ok(Self { http, origins, networks, secrets, running: Semaphore::new(MAX_RUNNING) })
    }

    /// Checks a URL as far as possible without looking up its name.
    ///
    /// # Errors
    /// What is wrong, and what is allowed.
    pub fn check(&self, text: &str) -> Result<CallbackUrl, CallbackUrlError> {
        if text.len() > MAX_URL {
            return Err(CallbackUrlError::TooLong(text.len()));
        }
        let url = Url::parse(text).map_err(|_| CallbackUrlError::Malformed)?;
        if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
            return Err(CallbackUrlError::Malformed);
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(CallbackUrlError::Credentials);
        }
        let origin = url.origin().ascii_serialization();
        if !self.origins.iter().any(|allowed| allowed.as_str() == origin) {
            let allowed: Vec<_> = self.origins.iter().map(Origin::as_str).collect();
            return Err(CallbackUrlError::Origin(allowed.join(", ")));
        }
        // The HTTP library does not resolve an address, so it is checked here.
        let host = url.host_str().unwrap_or_default();
        if let Ok(address) = host.trim_matches(['[', ']']).parse() {
            self.networks.check(address)?;
        }
        Ok(CallbackUrl(url))
    }

    /// Sends a callback once. A callback waits while too many are under way, of all clients or of
    /// this one. The whole attempt takes at most `limit`.
    ///
    /// # Errors
    /// The receiver did not confirm it.
    pub async fn send(
        &self,
        client: &Client,
        url: &CallbackUrl,
        message: &Message,
        limit: Duration,
    ) -> Result<(), CallbackError> {
        let late = |_| CallbackError::Unreachable("the receiver sent no answer in time".into());
        tokio::time::timeout(limit, self.send_once(client, url, message)).await.map_err(late)?
    }

    async fn send_once(
        &self,
        client: &Client,
        CallbackUrl(url): &CallbackUrl,
        Message { id, body }: &Message,
    ) -> Result<(), CallbackError> {
        let _of_client = client.callbacks.begin().await;
        let _of_all = self.running.acquire().await;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let signatures = self.secrets.load().sign(id, now, body);
        let request = self
            .http
            .post(url.clone())
            .header(http::header::CONTENT_TYPE, "application/json")
            .header(WEBHOOK_ID.clone(), id)
            .header(WEBHOOK_TIMESTAMP.clone(), now)
            .header(WEBHOOK_SIGNATURE.clone(), signatures)
            .body(body.clone());
        let answer = request.send().await.map_err(|error| {
            // Without the URL, which may have a secret in its path.
            CallbackError::Unreachable(causes(&error.without_url()))
        })?;
        let status = answer.status();
        if status.is_success() { Ok(()) } else { Err(CallbackError::Status(status.as_u16())) }
    }
}

impl CallbackUrl {
    /// Scheme, host and port.
    pub fn origin(&self) -> String {
        self.0.origin().ascii_serialization()
    }
}

/// An error with its causes.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// Uses the new secrets when the file changes. If they cannot be used, the old ones stay.
async fn follow(
    path: PathBuf,
    mut file: Watched,
    secrets: Arc<ArcSwap<Secrets>>,
    failures: metrics::Counter,
) {
    loop {
        file.changed().await;
        match Secrets::read(&path, &file.contents()[0]) {
            Ok(new) => {
                tracing::info!("--callback-secret-file: read again");
                secrets.store(Arc::new(new));
            }
            Err(error) => {
                failures.increment(1);
                tracing::error!(%error, "--callback-secret-file: the old secrets stay");
            }
        }
    }
}

/// The error of a look-up, for the HTTP library.
type LookupError = Box<dyn std::error::Error + Send + Sync>;

impl From<Forbidden> for io::Error {
    fn from(error: Forbidden) -> Self {
        Self::new(io::ErrorKind::PermissionDenied, error)
    }
}

#[cfg(test)]
mod tests;
