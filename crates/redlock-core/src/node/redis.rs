//! The link to a real master. Only this file and those below it use the Redis client.

mod failure;
mod scripts;
mod session;
mod settings;
mod stored;
#[cfg(feature = "tls")]
mod tls;
mod url;

use std::sync::Arc;
use std::time::Duration;

use self::session::RedisLink;
pub use self::settings::RedisSettings;
#[cfg(feature = "tls")]
pub use self::tls::{TlsError, TlsIdentity, TlsSettings};
pub use self::url::{RedisUrl, RedisUrlError};
use super::Env;
use super::eligibility::Eligibility;
use super::probe::Master;
use super::worker::{DriverSettings, RemoteNode};

/// The limit of operations that may wait for one node.
const QUEUE: usize = 8192;
/// A node whose quickest answer takes at least this long counts as far. Nodes in the gateway's own
/// data centre are quicker.
const FAR: Duration = Duration::from_micros(500);

/// A Redis master behind the core's worker.
pub struct RedisNode;

impl RedisNode {
    /// Starts the worker of a master; must be called on a tokio runtime.
    pub fn start(url: RedisUrl, settings: RedisSettings, env: Env) -> RemoteNode {
        let expects_bootstrap = settings.bootstrap;
        let drift_factor = settings.drift_factor;
        let node_registry = settings.node_registry.clone();
        let Master { name, identity, settings, call_deadline, link } = Self::master(url, settings);
        let quarantine = settings.quarantine(identity.cluster_config().max_ttl());
        let eligibility = Eligibility::new(identity, quarantine, settings.max_clock_skew)
            .returning_after(settings.returns_after())
            .with_rules(settings.bound_rules())
            .expecting_bootstrap(expects_bootstrap);
        let max_clock_skew = settings.max_clock_skew;
        let driver = DriverSettings {
            call_deadline,
            // A probe takes three requests, each within the call deadline. Connecting may take that
            // deadline twice: to read the certificate files, and to open the connection.
            question_deadline: call_deadline * 3,
            max_clock_skew,
            overlap_above: FAR,
            drift_factor,
            rules: settings.rules(),
            node_registry,
        };
        RemoteNode::start(&name, link, eligibility, QUEUE, driver, env)
    }

    /// A master for an operator's command. Does not connect yet.
    pub fn master(url: RedisUrl, settings: RedisSettings) -> Master {
        Master {
            name: url.name().to_owned(),
            identity: settings
                .cluster_config
                .identity(settings.node_name.as_deref().unwrap_or(url.name())),
            settings: settings.node,
            call_deadline: settings.call_deadline(),
            link: Arc::new(RedisLink::new(url, settings)),
        }
    }
}
