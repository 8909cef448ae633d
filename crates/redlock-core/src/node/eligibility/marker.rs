//! The texts of markers.

use std::time::Duration;

use sha2::{Digest, Sha256};

use super::facts::{Durability, Facts};
use crate::node::status::{Diagnosis, Remedy};

/// What every gateway of one cluster agrees on, as the marker states it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ClusterConfig {
    config: String,
}

impl ClusterConfig {
    /// `cluster` names the node set. Two gateways that differ in cluster, maximum TTL or clock skew never vote side by side.
    pub fn new(cluster: &str, max_ttl: Duration, max_clock_skew: Duration) -> Self {
        Self {
            config: format!(
                "v2:{}:{}:{}:",
                hash(cluster, 8),
                max_ttl.as_millis(),
                max_clock_skew.as_millis()
            ),
        }
    }

    /// The name of a node set: the given nodes, in any order.
    pub fn cluster_of_nodes<'a>(nodes: impl IntoIterator<Item = &'a str>) -> String {
        let mut nodes: Vec<_> = nodes.into_iter().collect();
        nodes.sort_unstable();
        nodes.join(",")
    }

    /// The beginning of the marker, which is equal on all nodes.
    pub fn marker_prefix(&self) -> &str {
        &self.config
    }

    /// One node in this configuration. `name` is what all gateways call the node: its address, or its
    /// position in the list when a name stands for the list.
    pub fn identity(&self, name: &str) -> NodeIdentity {
        NodeIdentity { cluster_config: self.clone(), node: hash(name, 4) }
    }

    /// The longest TTL that its locks can have.
    pub fn max_ttl(&self) -> Duration {
        Self::max_ttl_of(&self.config).unwrap_or_default()
    }

    /// How far clocks may differ.
    pub fn max_clock_skew(&self) -> Duration {
        Self::clock_skew_of(&self.config).unwrap_or_default()
    }

    /// The hash of the node set, as markers have it.
    pub fn node_set(&self) -> &str {
        Self::node_set_of(&self.config).unwrap_or_default()
    }

    /// The marker that stands while a change to this configuration is under way. It is of no node set, so nobody accepts
    /// it. It names the node set that is being left, and the longest TTL and clock skew of both. The nonce is that of one run.
    pub fn marker_under_way(
        &self,
        left: &str,
        longest_ttl: Duration,
        longest_skew: Duration,
        nonce: u64,
    ) -> String {
        let longest_ttl = longest_ttl.as_millis();
        let longest_skew = longest_skew.as_millis();
        format!("v2:{UNDER_WAY}{left}:{longest_ttl}:{longest_skew}:{}:{nonce:x}", self.as_target())
    }

    fn as_target(&self) -> String {
        format!(
            "{}-{}-{}",
            self.node_set(),
            self.max_ttl().as_millis(),
            self.max_clock_skew().as_millis()
        )
    }

    /// Whether a marker tells of a change under way, and whether that is one to this configuration.
    pub fn is_target_of(&self, marker: &str) -> Option<bool> {
        let config = ParsedConfig::parse(marker).filter(|config| config.is_under_way)?;
        let target = config.rest.split(':').next()?;
        let ours = self.as_target();
        let without_skew = ours.rsplit_once('-').map_or("", |(without_skew, _)| without_skew);
        // An older version named no clock skew.
        Some(target == if config.max_clock_skew.is_some() { &ours } else { without_skew })
    }

    /// Whether a marker has admitted a node to this node set, whatever the maximum TTL and clock skew.
    pub fn has_admitted(&self, marker: &str) -> bool {
        let Some(config) = ParsedConfig::parse(marker) else { return false };
        let parsed = || ParsedMarker::parse(config.rest);
        let is_ours = !config.is_under_way && config.node_set == self.node_set();
        is_ours && parsed().is_some_and(|marker| matches!(marker.state, State::Admitted { .. }))
    }

    /// The node set that a marker was written for; of a change under way, the one that is being left.
    pub fn node_set_of(marker: &str) -> Option<&str> {
        ParsedConfig::parse(marker).map(|config| config.node_set)
    }

    /// Why a marker that stands on a node keeps it from voting, naming both configurations.
    pub fn conflict(&self, marker: &str) -> Diagnosis {
        let stands = describe(marker)
            .unwrap_or_else(|| format!("{marker:?}, which is no marker of this program"));
        let ours = describe(&self.config).unwrap_or_default();
        let why = format!(
            "its marker is of another configuration: it has {stands}, this gateway has {ours}"
        );
        Diagnosis::new(why, Remedy::Reconfigure)
    }

    /// The maximum TTL that a marker was written for.
    pub fn max_ttl_of(marker: &str) -> Option<Duration> {
        ParsedConfig::parse(marker).map(|config| config.max_ttl)
    }

    /// The clock skew that a marker was written for. Those of older versions (`v1`) do not name it.
    pub fn clock_skew_of(marker: &str) -> Option<Duration> {
        ParsedConfig::parse(marker)?.max_clock_skew
    }
}

/// The part of a marker that is equal on all nodes.
struct ParsedConfig<'a> {
    node_set: &'a str,
    /// The node set is being left.
    is_under_way: bool,
    max_ttl: Duration,
    max_clock_skew: Option<Duration>,
    rest: &'a str,
}

impl<'a> ParsedConfig<'a> {
    fn parse(marker: &'a str) -> Option<Self> {
        let millis = |text: &str| text.parse().ok().map(Duration::from_millis);
        let (version, rest) = marker.split_once(':')?;
        let (set, rest) = rest.split_once(':')?;
        let (max_ttl, rest) = rest.split_once(':')?;
        let (max_clock_skew, rest) = match version {
            "v1" => (None, rest),
            "v2" => {
                let (max_clock_skew, rest) = rest.split_once(':')?;
                (Some(millis(max_clock_skew)?), rest)
            }
            _ => return None,
        };
        let left = set.strip_prefix(UNDER_WAY);
        let node_set = left.unwrap_or(set);
        let is_under_way = left.is_some();
        Some(Self { node_set, is_under_way, max_ttl: millis(max_ttl)?, max_clock_skew, rest })
    }
}

fn hash(text: &str, bytes: usize) -> String {
    Sha256::digest(text.as_bytes())[..bytes].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Enough of a replication id to tell two apart.
pub(super) fn short(id: &str) -> &str {
    id.get(..8).unwrap_or(id)
}

/// Before the hash of a node set that is being left.
const UNDER_WAY: &str = "leaving-";

fn describe(marker: &str) -> Option<String> {
    let config = ParsedConfig::parse(marker)?;
    if config.is_under_way {
        return Some(
            "a change of configuration under way, which was started and has not ended".into(),
        );
    }
    let skew = config.max_clock_skew.map_or_else(
        || "no clock_skew (an older version has written it)".into(),
        |skew| format!("clock_skew {} ms", skew.as_millis()),
    );
    Some(format!("node set {}, max_ttl {} ms, {skew}", config.node_set, config.max_ttl.as_millis()))
}

/// The marker key under a prefix. The braces keep it apart from every lock key.
pub fn marker_key(prefix: &str) -> String {
    format!("{{{prefix}}}:marker")
}

/// The key that says under which marker a node has caught up: it has the text of that marker.
pub fn caught_up_key(prefix: &str) -> String {
    format!("{{{prefix}}}:caught-up")
}

/// The key, in database 0, that says which database the cluster of a marker uses.
pub fn database_key(prefix: &str, marker: &str) -> String {
    format!("{{{prefix}}}:database:{}", ClusterConfig::node_set_of(marker).unwrap_or_default())
}

/// One node in one configuration: what its markers say.
///
/// `v2:<node set>:<max_ttl_ms>:<clock_skew_ms>:<node>:<run_id>:<state>`; the state is `durable` or `volatile` with the number of evicted keys
/// at eligibility, the replication id and a nonce, with dots between; or the word of a [`Suspicion`] with a nonce, the replication
/// id, and when it was put in milliseconds since 1970, by the node's clock and by the gateway's.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NodeIdentity {
    cluster_config: ClusterConfig,
    node: String,
}

impl NodeIdentity {
    pub(super) fn is(&self, node: &str) -> bool {
        self.node == node
    }

    /// What all nodes of the cluster have in their markers.
    pub fn cluster_config(&self) -> &ClusterConfig {
        &self.cluster_config
    }

    /// The marker that admits the process with these facts. The nonce sets it apart from all others of the same process:
    /// a command from before a loss of data must not find its marker standing again.
    pub fn admitting(&self, facts: &Facts, nonce: u64) -> String {
        let durable = if facts.durability == Durability::Durable { "durable" } else { "volatile" };
        format!("{}.{nonce:x}", self.text(facts, durable, facts.evicted_keys))
    }

    pub(super) fn quarantining(
        &self,
        facts: &Facts,
        suspicion: Suspicion,
        wall_micros: u64,
        nonce: u64,
    ) -> String {
        let node_ms = facts.time_micros / 1_000;
        let wall_ms = wall_micros / 1_000;
        format!("{}.{node_ms:x}.{wall_ms:x}", self.text(facts, suspicion.word(), nonce))
    }

    fn text(&self, facts: &Facts, state: &str, number: u64) -> String {
        let config = &self.cluster_config.config;
        let node = &self.node;
        let run_id = &facts.run_id;
        format!("{config}{node}:{run_id}:{state}.{number:x}.{}", short(&facts.replication_id))
    }
}

/// What makes a node's memory of locks suspect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Suspicion {
    /// It had no marker, and an operator says that the cluster is new.
    New,
    /// It had no marker: it is new, or all its data was lost.
    Blank,
    /// It was restarted, and may have lost its newest writes.
    Restarted,
    /// Its data was another node's, or it was a replica.
    Copied,
    /// It has evicted keys since it was admitted.
    Evicted,
    /// Its clock ran ahead, so that locks ended early.
    RanAhead,
    /// Its earlier process and this one were alive at once.
    Contested,
    /// Its marker could not be read.
    Unreadable,
    /// It was restarted with its data, and another gateway may still talk to its earlier process. No marker names this:
    /// each gateway counts from its own first sight.
    Returned,
}

impl Suspicion {
    /// Every suspicion that a marker can name.
    pub const ALL: [Self; 8] = [
        Self::New,
        Self::Blank,
        Self::Restarted,
        Self::Copied,
        Self::Evicted,
        Self::RanAhead,
        Self::Contested,
        Self::Unreadable,
    ];

    fn word(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Blank => "blank",
            Self::Restarted => "restarted",
            Self::Copied => "copied",
            Self::Evicted => "evicted",
            Self::RanAhead => "ran-ahead",
            Self::Contested => "contested",
            Self::Unreadable => "unreadable",
            Self::Returned => "returned",
        }
    }

    pub(super) fn diagnosis(self, durability: &Durability) -> Diagnosis {
        let (reason, remedy) = match self {
            Self::New => (
                "it has no marker, and an operator says that the cluster is new",
                Remedy::ReachAllNodes,
            ),
            Self::Blank => {
                ("it had no marker: it is new, or all its data was lost", Remedy::WaitOrBootstrap)
            }
            Self::Restarted => match durability {
                Durability::Durable | Durability::Settling => (
                    "it was restarted and may have lost locks: not every write was synced to disk before",
                    Remedy::WaitThenMakeDurable,
                ),
                Durability::Volatile(_) | Durability::Unknown(_) => {
                    let reason = format!("it was restarted and may have lost locks; {durability}");
                    return Diagnosis::new(reason, Remedy::WaitThenMakeDurable);
                }
            },
            Self::Copied => ("its data came from another node, or it was a replica", Remedy::Wait),
            Self::Evicted => ("it has evicted keys, perhaps locks", Remedy::WaitWithoutEvictions),
            Self::RanAhead => (
                "its clock ran ahead of what was promised, so that locks ended early",
                Remedy::WaitWithSteadyClock,
            ),
            Self::Contested => (
                "its earlier process still answered while this one ran, so it may lack locks granted there",
                Remedy::WaitWithOneProcess,
            ),
            Self::Unreadable => ("its marker could not be read", Remedy::Wait),
            Self::Returned => (
                "it was restarted with its data; it votes when no gateway can still talk to its earlier process",
                Remedy::Wait,
            ),
        };
        Diagnosis::new(reason, remedy)
    }
}

/// The part of a marker after the configuration.
pub(super) struct ParsedMarker<'a> {
    pub(super) node: &'a str,
    pub(super) run_id: &'a str,
    pub(super) state: State<'a>,
}

pub(super) enum State<'a> {
    Admitted { durable: bool, evicted_keys: u64, replication_id: &'a str },
    Quarantined { suspicion: Suspicion, replication_id: &'a str, since: Since },
}

/// When a quarantine began, in milliseconds since 1970; 0 is unknown.
#[derive(Debug, Clone, Copy)]
pub(super) struct Since {
    node_ms: u64,
    wall_ms: u64,
}

impl Since {
    /// How much of it has passed for certain: both clocks say so, and agree within D.
    pub(super) fn passed(
        self,
        node_micros: u64,
        wall_micros: u64,
        max_clock_skew: Duration,
    ) -> Duration {
        let by = |began: u64, now: u64| Some(now / 1_000).filter(|_| began > 0)?.checked_sub(began);
        let node = by(self.node_ms, node_micros);
        let wall = by(self.wall_ms, wall_micros);
        let (Some(node), Some(wall)) = (node, wall) else { return Duration::ZERO };
        let agree = u128::from(node.abs_diff(wall)) <= max_clock_skew.as_millis();
        if agree { Duration::from_millis(node.min(wall)) } else { Duration::ZERO }
    }
}

impl<'a> ParsedMarker<'a> {
    pub(super) fn parse(rest: &'a str) -> Option<Self> {
        let mut parts = rest.split(':');
        let node = parts.next()?;
        let run_id = parts.next()?;
        let state = parts.next()?;
        let mut words = state.split('.');
        let word = words.next()?;
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let number = hex(words.next()?)?;
        let replication_id = words.next()?;
        let last = hex(words.next()?)?;
        let state = match (word, words.next()) {
            ("durable" | "volatile", None) => {
                State::Admitted { durable: word == "durable", evicted_keys: number, replication_id }
            }
            (_, Some(wall)) => {
                let suspicion =
                    Suspicion::ALL.into_iter().find(|suspicion| suspicion.word() == word)?;
                State::Quarantined {
                    suspicion,
                    replication_id,
                    since: Since { node_ms: last, wall_ms: hex(wall)? },
                }
            }
            (_, None) => return None,
        };
        if words.next().is_some() {
            return None;
        }
        parts.next().is_none().then_some(Self { node, run_id, state })
    }
}
