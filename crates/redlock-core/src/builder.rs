//! Builds a [`Redlock`] from addresses. All settings are checked before anything is started.

use std::sync::Arc;
use std::time::Duration;

use crate::model::types::Ttl;
use crate::node::Node;
#[cfg(feature = "redis")]
use crate::node::eligibility::ClusterConfig;
use crate::node::memory::MemoryNode;
#[cfg(feature = "tls")]
use crate::node::redis::TlsSettings;
#[cfg(feature = "redis")]
use crate::node::redis::{RedisNode, RedisUrl};
use crate::redlock::Redlock;
use crate::settings::{Env, Settings, SettingsError};

/// Makes a [`Redlock`], see [`Redlock::builder`].
#[must_use = "nothing is connected before `connect`"]
#[derive(Default)]
pub struct RedlockBuilder {
    nodes: Nodes,
    embedded_memory: Option<u64>,
    settings: Settings,
    env: Env,
    #[cfg(feature = "redis")]
    bootstrap: bool,
    #[cfg(feature = "tls")]
    tls: TlsSettings,
}

enum Nodes {
    Given(Vec<Arc<dyn Node>>),
    Embedded(usize),
    #[cfg(feature = "redis")]
    Redis(Vec<String>),
}

impl Default for Nodes {
    fn default() -> Self {
        Self::Given(Vec::new())
    }
}

impl Redlock {
    /// Begins with the default [`Settings`] and no nodes.
    pub fn builder() -> RedlockBuilder {
        RedlockBuilder::default()
    }
}

impl RedlockBuilder {
    /// Redis masters by their addresses: `redis://[[user]:password@]host[:port][/database]`, or
    /// `rediss://…` for TLS. Use 3 or 5 masters that share no machine. All processes must give the
    /// same hosts and ports, because these identify the cluster. A process refuses a master that
    /// bears the marker of another configuration.
    #[cfg(feature = "redis")]
    pub fn redis(self, urls: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { nodes: Nodes::Redis(urls.into_iter().map(Into::into).collect()), ..self }
    }

    /// The given number of masters inside this process. No other process sees their locks, and the
    /// locks end when this process ends.
    pub fn embedded(self, count: usize) -> Self {
        Self { nodes: Nodes::Embedded(count), ..self }
    }

    /// Limits the memory that the keys of each embedded master take, in bytes. There is no limit by
    /// default.
    pub fn embedded_memory(self, bytes: u64) -> Self {
        Self { embedded_memory: Some(bytes), ..self }
    }

    /// Uses nodes that the caller has made. They must have been made with the settings of this
    /// builder.
    pub fn nodes(self, nodes: Vec<Arc<dyn Node>>) -> Self {
        Self { nodes: Nodes::Given(nodes), ..self }
    }

    /// Replaces all settings.
    pub fn settings(self, settings: Settings) -> Self {
        Self { settings, ..self }
    }

    /// The longest TTL anybody may ask for, 5 minutes by default. A master that lost its data does
    /// not vote for max(`max_ttl`, `max_clock_skew`) + `max_clock_skew` + 3 s. It votes earlier if
    /// its locks have been recovered from the other masters.
    pub fn max_ttl(mut self, max_ttl: Ttl) -> Self {
        self.settings.max_ttl = max_ttl;
        self
    }

    /// The text before every lock name in its Redis key, `lock:` by default.
    pub fn key_prefix(mut self, key_prefix: impl Into<String>) -> Self {
        self.settings.key_prefix = key_prefix.into();
        self
    }

    /// How long a round waits for the other nodes once a majority has answered, 50 ms by default. For
    /// the answers of a majority it waits for 800 ms, or for this long if that is longer. A round
    /// never waits longer than a tenth of its TTL.
    pub fn node_timeout(mut self, node_timeout: Duration) -> Self {
        self.settings.node_timeout = node_timeout;
        self
    }

    /// Replaces the clocks, the random generator and the observer.
    pub fn env(self, env: Env) -> Self {
        Self { env, ..self }
    }

    /// Declares that the masters have never been used. New masters begin in quarantine, in which
    /// they do not vote, and [`Redlock::bootstrap`] can end the quarantine only with this
    /// declaration. Use it for the very first start of a cluster only.
    #[cfg(feature = "redis")]
    pub fn expecting_bootstrap(self, bootstrap: bool) -> Self {
        Self { bootstrap, ..self }
    }

    /// Certificates for `rediss://`. By default the system's certificate authorities are used.
    #[cfg(feature = "tls")]
    pub fn tls(self, tls: TlsSettings) -> Self {
        Self { tls, ..self }
    }

    /// Starts the nodes and returns at once, see [`Redlock::ready`]. Must be called on a tokio
    /// runtime.
    ///
    /// # Errors
    /// [`SettingsError`] names the setting or address, its value (never a password) and the allowed
    /// values. If this returns an error, nothing was started.
    pub fn connect(self) -> Result<Redlock, SettingsError> {
        let Self { settings, env, .. } = self;
        let nodes = match self.nodes {
            Nodes::Given(nodes) => nodes,
            Nodes::Embedded(count) => {
                let node = |n| {
                    let node =
                        MemoryNode::new(format!("embedded-{n}"), env.clock.clone(), settings.node);
                    match self.embedded_memory {
                        Some(bytes) => node.with_max_memory(bytes),
                        None => node,
                    }
                };
                (1..=count).map(|n| Arc::new(node(n)) as Arc<dyn Node>).collect()
            }
            #[cfg(feature = "redis")]
            Nodes::Redis(urls) => {
                let parse = |(at, url): (usize, &String)| {
                    RedisUrl::parse(url)
                        .map_err(|error| SettingsError::NodeUrl { number: at + 1, error })
                };
                let urls = urls.iter().enumerate().map(parse).collect::<Result<Vec<_>, _>>()?;
                settings.check(urls.iter().map(RedisUrl::name))?;
                let cluster = ClusterConfig::cluster_of_nodes(urls.iter().map(RedisUrl::name));
                let mut of_masters = settings.of_masters(&cluster, urls.len());
                of_masters.bootstrap = self.bootstrap;
                #[cfg(feature = "tls")]
                {
                    of_masters.tls = self.tls;
                }
                let start = |url| {
                    Arc::new(RedisNode::start(url, of_masters.clone(), env.clone()))
                        as Arc<dyn Node>
                };
                urls.into_iter().map(start).collect()
            }
        };
        Redlock::new(nodes, settings, env)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn errors_name_the_bad_value_and_the_allowed_ones() {
        let said = |builder: RedlockBuilder| builder.connect().err().expect("refused").to_string();
        assert_eq!(said(Redlock::builder()), "0 nodes given; allowed are 1 to 32");
        assert_eq!(said(Redlock::builder().embedded(33)), "33 nodes given; allowed are 1 to 32");
        let prefix = said(Redlock::builder().embedded(1).key_prefix("a{b"));
        assert!(prefix.contains("\"a{b\"") && prefix.contains("255 bytes"), "{prefix}");
        let timeout = said(Redlock::builder().embedded(1).node_timeout(Duration::ZERO));
        assert!(timeout.contains("0ns") && timeout.contains("1 ms"), "{timeout}");
    }

    #[cfg(feature = "redis")]
    #[tokio::test]
    async fn a_bad_address_is_named_by_its_number_without_password() {
        let said = |urls: &[&str]| {
            Redlock::builder().redis(urls.iter().copied()).connect().err().expect("refused")
        };
        let bad = said(&["redis://one", "http://:hunter2@two"]).to_string();
        assert!(bad.starts_with("node number 2: ") && bad.contains("expected redis://"), "{bad}");
        assert!(!bad.contains("hunter2"), "{bad}");
        assert_eq!(
            said(&["redis://one", "redis://one:6379/1"]),
            SettingsError::DuplicateNode("one:6379".into())
        );
    }
}
