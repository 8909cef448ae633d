//! Sends signed POSTs to URLs that clients choose, in the form of Standard Webhooks
//! (<https://www.standardwebhooks.com>).
//!
//! A client must not reach through the gateway what it cannot reach itself. Therefore:
//! - A URL must have one of the origins that the operator allows.
//! - The address in a URL is checked with the request. The addresses of a name are checked at each
//!   lookup, and the gateway connects only to those. So a name that changes its address gains
//!   nothing.
//! - Redirects are not followed, and proxies from the environment are not used.
//! - Of the answer, only the status is used.
//!
//! This module does not know locks.

mod address;
mod secret;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use redlock_api::headers::{WEBHOOK_ID, WEBHOOK_SIGNATURE, WEBHOOK_TIMESTAMP};
use reqwest::redirect::Policy;
use reqwest::{Client as HttpClient, Url};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use self::address::CheckedResolver;
pub use self::address::Forbidden;
pub use self::address::Networks;
use self::secret::{Secrets, SecretsError};
use crate::origin::Origin;
use crate::overload::clients::Client;
use crate::overload::shares::{CALLBACKS, CALLBACKS_OF_ONE};
use crate::reload::{Reload, Watched, read_one};

/// Limit on the length of a URL, in bytes.
const MAX_URL: usize = 2_048;
/// Time limit of connecting.
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
    #[error("it must not have a user name or password; verify the signature instead")]
    Credentials,
    #[error("its origin is not allowed; allowed are {0}")]
    Origin(String),
    #[error("{0}")]
    Address(#[from] Forbidden),
}

/// Why a callback was not received.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallbackError {
    /// Another status than 200 to 299.
    #[error("the receiver answered {0}")]
    Status(u16),
    /// The receiver cannot be reached. The text has the reason.
    #[error("{0}")]
    Unreachable(String),
    #[error("the receiver sent no answer in time")]
    TimedOut,
    /// The callback was not sent.
    #[error("too many callbacks were under way")]
    Busy,
    /// The callback was not sent.
    #[error("there is nothing to announce any more")]
    NotNeeded,
}

/// Why callbacks cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum CallbacksError {
    #[error("--callback-secret-file: {0}")]
    Secrets(#[from] SecretsError),
    #[error("callbacks: {0}")]
    Client(#[from] reqwest::Error),
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
        Ok(Self { http, origins, networks, secrets, running: Semaphore::new(CALLBACKS) })
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

    /// Sends a callback once. It waits while too many are under way, of all clients or of this one,
    /// for up to half of `limit`. Then it takes at most `limit`. `id` is the same for all attempts, so
    /// a receiver notices repetitions. `body` is called when the callback is sent, and returns `None`
    /// if there is nothing to announce any more.
    ///
    /// # Errors
    /// The receiver did not confirm it.
    pub async fn send(
        &self,
        client: &Client,
        CallbackUrl(url): &CallbackUrl,
        id: &str,
        body: impl Fn() -> Option<String>,
        limit: Duration,
    ) -> Result<(), CallbackError> {
        let permits = async {
            let of_client = client.callbacks.begin(CALLBACKS_OF_ONE).await;
            (of_client, self.running.acquire().await)
        };
        let _permits = timeout(limit / 2, permits).await.map_err(|_| CallbackError::Busy)?;
        let body = body().ok_or(CallbackError::NotNeeded)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let signatures = self.secrets.load().sign(id, now, &body);
        let request = self
            .http
            .post(url.clone())
            .header(http::header::CONTENT_TYPE, "application/json")
            .header(WEBHOOK_ID.clone(), id)
            .header(WEBHOOK_TIMESTAMP.clone(), now)
            .header(WEBHOOK_SIGNATURE.clone(), signatures)
            .body(body);
        let answer = timeout(limit, request.send()).await;
        let answer = answer.map_err(|_| CallbackError::TimedOut)?.map_err(|error| {
            // Without the URL, which may have a secret in its path.
            CallbackError::Unreachable(causes(&error.without_url()))
        })?;
        let status = answer.status();
        if status.is_success() { Ok(()) } else { Err(CallbackError::Status(status.as_u16())) }
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

mod tests;
