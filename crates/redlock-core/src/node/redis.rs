//! The link to a real master. This file and those below it are the only ones that name the Redis client.

mod codec;
#[cfg(feature = "bench-internals")]
#[doc(hidden)]
pub mod internals;
mod scripts;
mod session;
#[cfg(feature = "tls")]
mod tls;
mod url;

use std::sync::Arc;
use std::time::Duration;

use self::session::RedisLink;
#[cfg(feature = "tls")]
pub use self::tls::{TlsError, TlsIdentity, TlsSettings};
pub use self::url::{RedisUrl, RedisUrlError};
use super::admission::{Admission, ClusterConfig, Facts, NodeIdentity, Step, quarantine};
use super::link::{LinkError, Look, Session};
use super::worker::{DriverSettings, RemoteNode};
use super::{Diagnosis, NodeSettings, Seams};
use crate::clock::{Clock, Entropy};

/// Operations waiting for one node.
const QUEUE: usize = 8192;
/// A question or call that takes longer, or longer than twice the node time-out, ends the session: rounds have given up
/// by then.
const CALL_DEADLINE: Duration = Duration::from_secs(1);
/// A node whose quickest answer took longer is a far one. In one data centre it is less.
const FAR: Duration = Duration::from_micros(500);

/// What the link and the worker of a master need to know, from [`Settings::of_masters`](crate::Settings::of_masters): what
/// masters and locks must agree on stands there once.
#[derive(Clone)]
#[non_exhaustive]
pub struct RedisSettings {
    /// What the scripts need.
    pub(crate) node: NodeSettings,
    /// Prefix of all keys; also names the marker.
    pub(crate) key_prefix: String,
    /// What the marker must say.
    pub(crate) cluster_config: ClusterConfig,
    /// How long rounds wait for the node.
    pub(crate) node_timeout: Duration,
    /// What all gateways call the node in its marker; its address when `None`.
    pub node_name: Option<String>,
    /// Whether an operator says that the cluster is brand-new, see [`Redlock::bootstrap`](crate::Redlock::bootstrap).
    pub bootstrap: bool,
    /// For nodes whose URL wants TLS.
    #[cfg(feature = "tls")]
    pub tls: TlsSettings,
}

impl RedisSettings {
    /// What the marker must say.
    pub fn cluster_config(&self) -> &ClusterConfig {
        &self.cluster_config
    }

    /// With quarantines that end at once.
    #[cfg(feature = "mutation-testing")]
    #[doc(hidden)]
    pub fn without_quarantine(mut self) -> Self {
        self.node = self.node.with_rules(super::Rules { quarantine_is_waited: false, ..self.node.rules() });
        self
    }

    fn call_deadline(&self) -> Duration {
        CALL_DEADLINE.max(self.node_timeout * 2)
    }

    fn identity(&self, url: &RedisUrl) -> NodeIdentity {
        self.cluster_config.identity(self.node_name.as_deref().unwrap_or(url.name()))
    }

    fn quarantine(&self) -> Duration {
        if self.node.rules().quarantine_is_waited {
            quarantine(self.cluster_config.max_ttl(), self.node.max_clock_offset)
        } else {
            Duration::ZERO
        }
    }
}

/// A real master.
pub struct RedisNode;

impl RedisNode {
    /// Starts the worker of a master; must be called on a tokio runtime.
    pub fn start(url: RedisUrl, settings: RedisSettings, seams: Seams) -> RemoteNode {
        let admission =
            Admission::new(settings.identity(&url), settings.quarantine()).expecting_bootstrap(settings.bootstrap);
        let driver = DriverSettings {
            call_deadline: settings.call_deadline(),
            max_clock_offset: settings.node.max_clock_offset,
            overlap_above: FAR,
        };
        let name = url.name().to_owned();
        RemoteNode::start(&name, Arc::new(RedisLink::new(url, settings)), admission, QUEUE, driver, seams)
    }
}

/// What `check` wants to know of one node.
#[derive(Debug, Clone)]
pub struct Probe {
    /// What it said about itself.
    pub facts: Facts,
    /// The marker that stands there.
    pub marker: Option<String>,
    /// What a gateway that started now would make of it.
    pub verdict: Verdict,
    /// Its clock minus ours, in microseconds.
    pub clock_offset_micros: i64,
}

/// What a gateway that starts now would do with a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Let it vote.
    Admitted,
    /// Let it vote after so long, counted from the gateway's start.
    Quarantined(Duration, Diagnosis),
    /// Not let it vote.
    Refused(Diagnosis),
}

/// Looks at a node without changing anything.
pub async fn probe(
    url: &RedisUrl,
    settings: &RedisSettings,
    seams: (&dyn Clock, &dyn Entropy),
) -> Result<Probe, String> {
    let (clock, entropy) = seams;
    bounded(settings, async {
        let session = RedisLink::new(url.clone(), settings.clone()).open(false).await?;
        let Look { facts, marker } = session.look().await?;
        let before = clock.wall_micros() as i64;
        let node = session.time_micros().await?;
        let clock_offset_micros = node - (before + clock.wall_micros() as i64) / 2;
        let verdict = verdict(settings, url, &facts, marker.clone(), entropy);
        Ok(Probe { facts, marker, verdict, clock_offset_micros })
    })
    .await
}

/// Several questions, each within a deadline of its own if the node is there at all.
async fn bounded<T>(settings: &RedisSettings, work: impl Future<Output = Result<T, LinkError>>) -> Result<T, String> {
    match tokio::time::timeout(settings.call_deadline() * 2, work).await {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(_) => Err("no answer in time".into()),
    }
}

/// Plays the admission through without a node.
fn verdict(
    settings: &RedisSettings,
    url: &RedisUrl,
    facts: &Facts,
    mut marker: Option<String>,
    entropy: &dyn Entropy,
) -> Verdict {
    let mut admission = Admission::new(settings.identity(url), settings.quarantine());
    loop {
        match admission.look(facts, marker.as_deref(), Duration::ZERO, false, entropy) {
            Step::Put { to, .. } => marker = Some(to),
            Step::Admit { .. } => return Verdict::Admitted,
            Step::Wait { until, diagnosis, .. } => return Verdict::Quarantined(until, diagnosis),
            Step::Refuse(diagnosis) => return Verdict::Refused(diagnosis),
        }
    }
}

/// What [`overwrite_marker`] writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewMarker<'a> {
    /// A marker that no gateway accepts. It keeps the longest TTL that locks on the node can have, for whoever takes an
    /// interrupted change up again.
    UnderWay {
        /// That TTL.
        longest_ttl: Duration,
        /// The hash of the node set that is being left.
        left: &'a str,
    },
    /// The marker of the settings.
    Final,
}

/// Puts a marker on a node, whatever stands there: the operator's step after a change of configuration.
pub async fn overwrite_marker(url: &RedisUrl, settings: &RedisSettings, new: NewMarker<'_>) -> Result<(), String> {
    bounded(settings, async {
        let session = RedisLink::new(url.clone(), settings.clone()).open(false).await?;
        let marker = match new {
            NewMarker::Final => {
                // Every marker is another one: the node's time serves as the nonce.
                let nonce = session.time_micros().await?.unsigned_abs();
                settings.identity(url).admitting(&session.look().await?.facts, nonce)
            }
            NewMarker::UnderWay { longest_ttl, left } => ClusterConfig::marker_under_way(left, longest_ttl),
        };
        session.set_marker(marker).await
    })
    .await
}
