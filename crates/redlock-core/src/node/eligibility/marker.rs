//! The texts of incarnation markers: writing them and reading them. `eligibility.rs` decides what
//! follows from them.

use std::fmt;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::facts::{Durability, Facts};
use crate::node::status::{Diagnosis, Remedy};

/// The two lengths of TTLs that a marker states. `limit` is at most `bound`.
///
/// While `max_ttl` is raised, `bound` rises first on every master, and only then `limit`. So if a
/// marker has a limit, every master has at least that bound, unless it has lost its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TtlBounds {
    /// The longest TTL that a gateway may grant with this master's vote.
    pub limit: Duration,
    /// The longest TTL that a quarantine waits for.
    pub bound: Duration,
}

impl TtlBounds {
    /// The same length for both.
    pub const fn both(ttl: Duration) -> Self {
        Self { limit: ttl, bound: ttl }
    }

    /// Of each length the larger one.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self { limit: self.limit.max(other.limit), bound: self.bound.max(other.bound) }
    }

    fn parse(text: &str) -> Option<Self> {
        let millis = |text: &str| text.parse().ok().map(Duration::from_millis);
        let (limit, bound) = text.split_once('-').unwrap_or((text, text));
        Some(Self { limit: millis(limit)?, bound: millis(bound)? })
            .filter(|bounds| bounds.limit <= bounds.bound)
    }
}

impl fmt::Display for TtlBounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (limit, bound) = (self.limit.as_millis(), self.bound.as_millis());
        if limit == bound { write!(f, "{limit}") } else { write!(f, "{limit}-{bound}") }
    }
}

/// The configuration that every gateway of one cluster must share, as the marker states it. Only
/// the maximum TTL of a gateway may be smaller than the limit in the marker.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ClusterConfig {
    config: String,
}

impl ClusterConfig {
    /// `cluster` names the node set. Gateways that differ in cluster or clock skew never vote side
    /// by side.
    pub fn new(cluster: &str, max_ttl: Duration, max_clock_skew: Duration) -> Self {
        Self { config: prefix(&hash(cluster, 8), TtlBounds::both(max_ttl), max_clock_skew) }
    }

    /// The name of the set of these nodes, in any order.
    pub fn cluster_of_nodes<'a>(nodes: impl IntoIterator<Item = &'a str>) -> String {
        let mut nodes: Vec<_> = nodes.into_iter().collect();
        nodes.sort_unstable();
        nodes.join(",")
    }

    /// The prefix of a marker whose bounds both are this `max_ttl`.
    pub fn marker_prefix(&self) -> &str {
        &self.config
    }

    fn prefix_with(&self, bounds: TtlBounds) -> String {
        prefix(self.node_set(), bounds, self.max_clock_skew())
    }

    /// The bounds in a marker of this node set and clock skew; `None` for every other marker.
    pub fn bounds_in(&self, marker: &str) -> Option<TtlBounds> {
        self.parse(marker).map(|config| config.bounds)
    }

    /// The same marker with bounds at least as large as these. Calls name only the
    /// [incarnation](incarnation_of), so running sessions go on. `None` if the marker is not of
    /// this node set and clock skew.
    pub fn raised(&self, marker: &str, bounds: TtlBounds) -> Option<String> {
        let config = self.parse(marker)?;
        Some(self.prefix_with(config.bounds.max(bounds)) + config.rest)
    }

    pub(super) fn parse<'a>(&self, marker: &'a str) -> Option<ParsedConfig<'a>> {
        ParsedConfig::parse(marker).filter(|config| {
            !config.is_under_way
                && config.node_set == self.node_set()
                && config.max_clock_skew == Some(self.max_clock_skew())
        })
    }

    /// One node in this configuration. All gateways must use the same `name` for a node. This is
    /// the node's address. If the cluster has a name of its own, it is the node's position in the
    /// list.
    pub fn identity(&self, name: &str) -> NodeIdentity {
        NodeIdentity { cluster_config: self.clone(), node: hash(name, 4) }
    }

    /// The longest TTL that this gateway grants.
    pub fn max_ttl(&self) -> Duration {
        Self::max_ttl_of(&self.config).unwrap_or_default()
    }

    /// The maximum difference between clocks.
    pub fn max_clock_skew(&self) -> Duration {
        Self::clock_skew_of(&self.config).unwrap_or_default()
    }

    /// The hash of the node set, as in markers.
    pub fn node_set(&self) -> &str {
        Self::node_set_of(&self.config).unwrap_or_default()
    }

    /// The marker during a change to this configuration. This marker belongs to no node set, so no
    /// gateway accepts it. It contains the node set that the change leaves (`left`), and the larger
    /// maximum TTL and clock skew of the two configurations. The nonce identifies one run of the
    /// change.
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

    /// Whether a change that is under way leads to this configuration; `None` when the marker shows
    /// no change under way.
    pub fn is_target_of(&self, marker: &str) -> Option<bool> {
        let config = ParsedConfig::parse(marker).filter(|config| config.is_under_way)?;
        let target = config.rest.split(':').next()?;
        let ours = self.as_target();
        let without_skew = ours.rsplit_once('-').map_or("", |(without_skew, _)| without_skew);
        // Markers of older versions contain no clock skew.
        Some(target == if config.max_clock_skew.is_some() { &ours } else { without_skew })
    }

    /// Whether a marker admits a node to this node set, whatever the maximum TTL and clock skew.
    pub fn has_admitted(&self, marker: &str) -> bool {
        let Some(config) = ParsedConfig::parse(marker) else { return false };
        let parsed = || ParsedMarker::parse(config.rest);
        let is_ours = !config.is_under_way && config.node_set == self.node_set();
        is_ours && parsed().is_some_and(|marker| matches!(marker.state, State::Admitted { .. }))
    }

    /// The node set of a marker; during a change, the node set that the change leaves.
    pub fn node_set_of(marker: &str) -> Option<&str> {
        ParsedConfig::parse(marker).map(|config| config.node_set)
    }

    /// Why a node's marker keeps it from voting; names both configurations.
    pub fn conflict(&self, marker: &str) -> Diagnosis {
        let stands = describe(marker)
            .unwrap_or_else(|| format!("{marker:?}, which is not a marker of this program"));
        let ours = describe(&self.config).unwrap_or_default();
        let why = format!(
            "its marker is of another configuration: the marker has {stands}, this gateway has \
             {ours}"
        );
        let remedy = match ParsedConfig::parse(marker) {
            None => Remedy::ChangeKeyPrefix,
            Some(config) if config.is_under_way => Remedy::FinishChange,
            Some(config) if config.node_set == self.node_set() => Remedy::Reconfigure,
            Some(_) => Remedy::NameNodesAlike,
        };
        Diagnosis::new(why, remedy)
    }

    /// The longest TTL that a marker permits.
    pub fn max_ttl_of(marker: &str) -> Option<Duration> {
        Self::bounds_of(marker).map(|bounds| bounds.limit)
    }

    /// The longest TTL that a lock on a node with this marker may have. Other gateways may grant
    /// longer TTLs than this one.
    pub fn ttl_bound_of(marker: &str) -> Option<Duration> {
        Self::bounds_of(marker).map(|bounds| bounds.bound)
    }

    /// Both lengths in a marker, whatever its node set.
    pub fn bounds_of(marker: &str) -> Option<TtlBounds> {
        ParsedConfig::parse(marker).map(|config| config.bounds)
    }

    /// The clock skew in a marker; `None` in markers of older versions (`v1`).
    pub fn clock_skew_of(marker: &str) -> Option<Duration> {
        ParsedConfig::parse(marker)?.max_clock_skew
    }
}

fn prefix(node_set: &str, bounds: TtlBounds, max_clock_skew: Duration) -> String {
    format!("v2:{node_set}:{bounds}:{}:", max_clock_skew.as_millis())
}

/// The part of a marker that names the node, the process and its admission or quarantine. It stays
/// the same when the bounds are raised.
pub fn incarnation_of(marker: &str) -> &str {
    ParsedConfig::parse(marker).map_or(marker, |config| config.rest)
}

/// The part of a marker before its incarnation.
pub(super) struct ParsedConfig<'a> {
    node_set: &'a str,
    /// Whether a change of configuration is under way. Then `node_set` is the set that the change
    /// leaves.
    is_under_way: bool,
    pub(super) bounds: TtlBounds,
    max_clock_skew: Option<Duration>,
    pub(super) rest: &'a str,
}

impl<'a> ParsedConfig<'a> {
    fn parse(marker: &'a str) -> Option<Self> {
        let millis = |text: &str| text.parse().ok().map(Duration::from_millis);
        let (version, rest) = marker.split_once(':')?;
        let (set, rest) = rest.split_once(':')?;
        let (bounds, rest) = rest.split_once(':')?;
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
        let bounds = TtlBounds::parse(bounds)?;
        Some(Self { node_set, is_under_way, bounds, max_clock_skew, rest })
    }
}

fn hash(text: &str, bytes: usize) -> String {
    Sha256::digest(text.as_bytes())[..bytes].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Enough of a replication id to distinguish two.
pub(super) fn short(id: &str) -> &str {
    id.get(..8).unwrap_or(id)
}

/// Precedes the hash of a node set that a change of configuration leaves.
const UNDER_WAY: &str = "leaving-";

fn describe(marker: &str) -> Option<String> {
    let config = ParsedConfig::parse(marker)?;
    if config.is_under_way {
        return Some("a change of configuration under way that has not ended".into());
    }
    let skew = config.max_clock_skew.map_or_else(
        || "no clock_skew (written by an older version)".into(),
        |skew| format!("clock_skew {} ms", skew.as_millis()),
    );
    let max_ttl = config.bounds.limit.as_millis();
    Some(format!("node set {}, max_ttl {max_ttl} ms, {skew}", config.node_set))
}

/// The marker's key under a prefix. The braces keep it apart from every lock key.
pub fn marker_key(prefix: &str) -> String {
    format!("{{{prefix}}}:marker")
}

/// The key of the note that a node has caught up. Its value is the incarnation of the marker that
/// stood then.
pub fn caught_up_key(prefix: &str) -> String {
    format!("{{{prefix}}}:caught-up")
}

/// The key of the number that a node stores for one process of a gateway. For what the number says,
/// see [`Session::call`](crate::node::link::Session::call).
pub fn number_key(prefix: &str, gateway: u64) -> String {
    format!("{{{prefix}}}:number:{gateway:016x}")
}

/// Whether this marker, or its incarnation, admits a process that syncs every write.
pub fn admits_durable(marker: &str) -> bool {
    let state = marker.rsplit(':').next().unwrap_or_default();
    state.starts_with("durable.")
}

/// The key, in database 0, that names the database of a marker's cluster.
pub fn database_key(prefix: &str, marker: &str) -> String {
    format!("{{{prefix}}}:database:{}", ClusterConfig::node_set_of(marker).unwrap_or_default())
}

/// One node in one configuration, as its markers name it.
///
/// A marker is `v2:<node set>:<max_ttl_ms>:<clock_skew_ms>:<node>:<run_id>:<state>`. If the limit
/// of [`TtlBounds`] is smaller than the bound, both stand in place of the maximum TTL:
/// `<limit>-<bound>`. The state has fields with dots between:
///
/// - admitted: `durable` or `volatile`, evicted keys at the admission, replication id, nonce;
/// - quarantined: the name of a [`Suspicion`], nonce, replication id, and the start in milliseconds
///   since 1970, by the node's clock and by the gateway's.
///
/// Numbers are hexadecimal, but for the TTL and the skew.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NodeIdentity {
    cluster_config: ClusterConfig,
    node: String,
}

impl NodeIdentity {
    pub(super) fn is(&self, node: &str) -> bool {
        self.node == node
    }

    /// The part that all nodes of the cluster share.
    pub fn cluster_config(&self) -> &ClusterConfig {
        &self.cluster_config
    }

    /// The marker that admits the process with these facts. The nonce makes this marker differ from
    /// all others of the same process. So a command from before a loss of data cannot find its
    /// marker standing again after the next admission.
    pub fn admitting(&self, facts: &Facts, nonce: u64) -> String {
        self.admitting_with(facts, TtlBounds::both(self.cluster_config.max_ttl()), nonce)
    }

    pub(super) fn admitting_with(&self, facts: &Facts, bounds: TtlBounds, nonce: u64) -> String {
        let durable = if facts.durability == Durability::Durable { "durable" } else { "volatile" };
        format!("{}.{nonce:x}", self.text(facts, bounds, durable, facts.evicted_keys))
    }

    pub(super) fn quarantining(
        &self,
        facts: &Facts,
        bound: Duration,
        suspicion: Suspicion,
        wall_micros: u64,
        nonce: u64,
    ) -> String {
        let node_ms = facts.time_micros / 1_000;
        let wall_ms = wall_micros / 1_000;
        // A quarantined master permits nothing, so its limit means nothing.
        let text = self.text(facts, TtlBounds::both(bound), suspicion.name(), nonce);
        format!("{text}.{node_ms:x}.{wall_ms:x}")
    }

    fn text(&self, facts: &Facts, bounds: TtlBounds, state: &str, number: u64) -> String {
        let config = self.cluster_config.prefix_with(bounds);
        let node = &self.node;
        let run_id = &facts.run_id;
        format!("{config}{node}:{run_id}:{state}.{number:x}.{}", short(&facts.replication_id))
    }
}

/// What makes a node's memory of locks suspect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Suspicion {
    /// The node had no marker, and an operator declared the cluster new.
    New,
    /// The node had no marker: it is new, or lost all its data.
    Blank,
    /// The node was restarted, and may have lost its newest writes.
    Restarted,
    /// The data came from another node, or the node was a replica.
    Copied,
    /// The node has evicted keys since its admission.
    Evicted,
    /// The node's clock ran ahead, so locks ended early.
    RanAhead,
    /// The process lacks, or may lack, calls that another process has answered.
    Contested,
    /// The marker could not be read.
    Unreadable,
    /// The node was restarted with its data, and another gateway may still talk to its earlier
    /// process. No marker contains this suspicion: each gateway counts the wait from when it first
    /// saw the new process.
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

    fn name(self) -> &'static str {
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
                "it has no marker, and an operator declared the cluster new",
                Remedy::ReachAllNodes,
            ),
            Self::Blank => ("it had no marker: it is new, or all its data was lost", Remedy::Wait),
            Self::Restarted => match durability {
                Durability::Durable | Durability::Settling => (
                    "it was restarted and may have lost locks: not every write was synced to disk \
                     before",
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
                "its clock ran ahead by more than the drift factor allows, so locks ended early",
                Remedy::WaitWithSteadyClock,
            ),
            Self::Contested => (
                "its process lacks, or may lack, calls that another process has answered, and the \
                 locks granted by them",
                Remedy::WaitWithOneProcess,
            ),
            Self::Unreadable => ("its marker could not be read", Remedy::Wait),
            Self::Returned => (
                "it was restarted with its data; it votes when no gateway can still talk to its \
                 earlier process",
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

/// When a quarantine began, in milliseconds since 1970; 0 when unknown.
#[derive(Debug, Clone, Copy)]
pub(super) struct Since {
    node_ms: u64,
    wall_ms: u64,
}

impl Since {
    /// How much of the quarantine has certainly passed: both clocks show it, and agree within
    /// `max_clock_skew`.
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
        let do_agree = u128::from(node.abs_diff(wall)) <= max_clock_skew.as_millis();
        if do_agree { Duration::from_millis(node.min(wall)) } else { Duration::ZERO }
    }
}

impl<'a> ParsedMarker<'a> {
    pub(super) fn parse(rest: &'a str) -> Option<Self> {
        let mut parts = rest.split(':');
        let node = parts.next()?;
        let run_id = parts.next()?;
        let state = parts.next()?;
        let mut fields = state.split('.');
        let name = fields.next()?;
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let number = hex(fields.next()?)?;
        let replication_id = fields.next()?;
        let last = hex(fields.next()?)?;
        let state = match (name, fields.next()) {
            ("durable" | "volatile", None) => {
                State::Admitted { durable: name == "durable", evicted_keys: number, replication_id }
            }
            (_, Some(wall)) => {
                let suspicion =
                    Suspicion::ALL.into_iter().find(|suspicion| suspicion.name() == name)?;
                State::Quarantined {
                    suspicion,
                    replication_id,
                    since: Since { node_ms: last, wall_ms: hex(wall)? },
                }
            }
            (_, None) => return None,
        };
        if fields.next().is_some() {
            return None;
        }
        parts.next().is_none().then_some(Self { node, run_id, state })
    }
}
