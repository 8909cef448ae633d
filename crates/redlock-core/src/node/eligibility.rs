//! Decides whether a connected master may vote. Facts and marker of the master go in, one step
//! comes out. Nothing is read or written here; only nonces are drawn at random. The driver
//! (`node/driver.rs`) probes and acts; a simulation can do the same with a node in memory.
//!
//! The canonical Redlock text asks operators to delay the return of a crashed master by the longest
//! TTL. Otherwise a master that lost its locks would help to grant them again. This module delays
//! the return for the operators. A node is *eligible* when it is a master, runs Redis 7.0 or newer,
//! and never evicts keys. Its *incarnation marker*, a key without expiry, names the configuration,
//! the node and the process for which it was admitted. The scripts refuse acquires, extensions and
//! repairs unless exactly this marker stands. So votes stop after FLUSHALL, after a restart without
//! data, and when a data set from elsewhere was loaded. They also stop for gateways with another
//! node set, maximum TTL or clock skew. What follows depends on the marker that a probe finds:
//!
//! 1. The marker admits this process, and the facts show no loss since then (for example an
//!    eviction): the node is admitted.
//! 2. The marker admits an earlier process of this node. Both processes synced every write to disk,
//!    and the new one has not rewritten the append-only file that it loaded. The node is admitted
//!    [`NAME_MOVES_WITHIN`] after this gateway first saw the new process. By then no gateway talks
//!    to the earlier process any more. If the new process lacks, or may lack, calls that the
//!    earlier one has answered to a gateway, that gateway *contests* the new one. The new one is
//!    then quarantined.
//! 3. Otherwise the node's memory of locks is suspect, and the node is *quarantined*. The
//!    quarantine lasts until every lock that the node may have lost has ended ([`quarantine`]), or
//!    until recovery restores those locks from the other masters.
//!
//! A quarantine is a marker on the node that contains a nonce and admits nobody. At the end of the
//! quarantine, the admitting marker replaces exactly this marker, in one step that also checks the
//! run_id. A second loss of data in between leaves another marker or none, and so does a loss after
//! another gateway's admission. Then the replacement fails and the wait starts again.
//!
//! A gateway measures by its own monotonic clock how long it has seen the quarantine marker. The
//! marker also contains the start of the quarantine, once by the node's clock and once by the wall
//! clock of the gateway that put the marker. A gateway that first sees the marker later need not
//! wait the full time. It subtracts the time that has passed since that start, if the two clocks
//! agree about this time within `max_clock_skew`. So gateways that are restarted often cannot keep
//! a node out for ever.
//!
//! A marker of another configuration is never overwritten: the node is refused, and an operator
//! decides.
//!
//! Not detected:
//!
//! - lost calls, if every gateway that received their answers has ended;
//! - bits of an append-only file that were changed, if Redis still loads the file;
//! - a replica that replaced a durable master and restarted before any probe (Redis forgets that it
//!   was a replica);
//! - a change that leaves no trace for the next probe, because it is over between two probes (a
//!   second apart) or while no gateway runs. Examples: a failover and back; evictions before the
//!   count of evicted keys was reset; weakened durability and then a crash; a clock that jumps
//!   forward and back, which ends locks early.

mod facts;
mod marker;

use std::time::Duration;

pub use self::facts::{Durability, Facts, SETTINGS};
pub use self::marker::{
    ClusterConfig, NodeIdentity, Suspicion, TtlBounds, admits_durable, caught_up_key, database_key,
    incarnation_of, marker_key, number_key,
};
use self::marker::{ParsedMarker, State, short};
use crate::model::clock::{Clock, Entropy};
use crate::node::status::{Diagnosis, Remedy};

/// How often a node's name is followed. To follow a name, the gateway resolves it again for a
/// separate connection, and checks that it leads to the process that votes.
pub const NAME_IS_FOLLOWED_EVERY: Duration = Duration::from_secs(2);
/// If following a name takes longer than this, a move of the name may be noticed too late. The log
/// then contains a warning.
pub const NAME_IS_FOLLOWED_WITHIN: Duration = Duration::from_secs(1);
/// If a name moves to another process, every gateway has left the earlier process after this time.
pub const NAME_MOVES_WITHIN: Duration =
    Duration::from_secs(NAME_IS_FOLLOWED_EVERY.as_secs() + NAME_IS_FOLLOWED_WITHIN.as_secs());

/// How long a node with a suspect memory must not vote: max(`max_ttl`, `max_clock_skew`) +
/// `max_clock_skew` + [`NAME_MOVES_WITHIN`].
///
/// The first term covers the longest lock that the node may have lost. The second term is needed
/// because the node lost its watermarks too. Without it, a gateway whose clock is behind could get
/// a smaller T than a lost one. A T may also be `max_clock_skew` ahead of its own gateway's clock.
/// So even with a short maximum TTL the wait is never below twice the skew. The last term covers
/// other gateways, which may still talk to the process that had the name before.
pub fn quarantine(max_ttl: Duration, max_clock_skew: Duration) -> Duration {
    max_ttl.max(max_clock_skew) + max_clock_skew + NAME_MOVES_WITHIN
}

/// A time, on both clocks of this gateway.
#[derive(Debug, Clone, Copy, Default)]
pub struct Moment {
    /// On this gateway's monotonic clock.
    pub monotonic: Duration,
    /// By this gateway's wall clock, in microseconds since 1970.
    pub wall_micros: u64,
}

impl Moment {
    /// Now.
    pub fn of(clock: &dyn Clock) -> Self {
        Self { monotonic: clock.monotonic(), wall_micros: clock.wall_micros() }
    }
}

/// Why a quarantine may end early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EarlyEnd {
    /// The operator declared the cluster new, and probes of all nodes confirmed that. Only for a
    /// node quarantined as new.
    BrandNew,
    /// Recovery restored the locks that the node had lost.
    Recovered,
}

/// The rules about the TTLs in markers, see `SafetyRules` in `node/rules.rs`. All are on, except in
/// tests that switch one off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BoundRules {
    /// A quarantine lasts by the largest TTL bound that the gateway has seen in a marker.
    pub larger_bound_is_waited: bool,
    /// A quarantine ends only when the gateway has probed a majority of the nodes since it began.
    pub majority_is_probed: bool,
    /// A node votes only for gateways whose `max_ttl` is within the limit of its marker.
    pub limit_is_checked: bool,
}

impl Default for BoundRules {
    fn default() -> Self {
        Self { larger_bound_is_waited: true, majority_is_probed: true, limit_is_checked: true }
    }
}

/// Another node of the cluster, as this gateway last probed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// When the probe was sent, on this gateway's monotonic clock.
    pub probed: Duration,
    /// The limit of the marker that admits the node's process; `None` if no marker does.
    pub limit: Option<Duration>,
    /// The bound of the last marker that this gateway saw there. It outlives a loss of data.
    pub bound: Duration,
}

/// The other nodes of the cluster, as far as this gateway has probed them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Peers<'a> {
    /// The probed nodes.
    pub seen: &'a [Peer],
    /// How many of them make a majority together with the node in question.
    pub needed: usize,
}

impl Peers<'_> {
    fn since(&self, moment: Duration) -> impl Iterator<Item = &Peer> {
        self.seen.iter().filter(move |peer| peer.probed >= moment)
    }

    /// The largest bound that this gateway has seen.
    fn bound(&self) -> Duration {
        self.seen.iter().map(|peer| peer.bound).max().unwrap_or_default()
    }
}

/// The next step for a probed node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextStep {
    /// The node must not vote. Probe it again later.
    Refuse(Diagnosis),
    /// Replace one marker (or none) by another in one step, if the process is still the probed one.
    /// Then probe again, whatever the result.
    Put {
        /// The marker that must stand; `None` for no marker.
        from: Option<String>,
        /// The new marker.
        to: String,
    },
    /// The node must wait. Probe it again from time to time, at the latest when the wait ends.
    Wait {
        /// When the wait ends, on the monotonic clock of `now`.
        until: Duration,
        /// What makes the node's memory suspect.
        suspicion: Suspicion,
        /// The reason, for people.
        diagnosis: Diagnosis,
    },
    /// The node votes, as long as exactly this marker stands.
    Admit {
        /// The marker that every call must contain.
        marker: String,
    },
}

/// One gateway's view of one node's eligibility.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Eligibility {
    identity: NodeIdentity,
    quarantine: Duration,
    max_clock_skew: Duration,
    expects_bootstrap: bool,
    /// How long a process that restarted with its data waits, from when this gateway first saw it.
    returns_after: Duration,
    /// The wait under way.
    wait: Option<RunningWait>,
    /// The marker that admitted the node at the latest probe.
    admitted_by: Option<String>,
    /// `Some` if the node's clock ran ahead; the inner value is the marker that stood then, if any.
    distrusted: Option<Option<String>>,
    /// Whether the present process lacks, or may lack, calls that another process has answered.
    is_contested: bool,
    rules: BoundRules,
}

/// A wait under way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct RunningWait {
    /// The incarnation that stood when the wait began. `run_id` is the process that had it.
    incarnation: String,
    run_id: String,
    /// When the wait began, on this gateway's monotonic clock.
    began: Duration,
    /// How much of it had passed by then.
    passed: Duration,
}

/// How soon a node is probed again whose wait has ended, while too few other nodes were probed.
const PEERS_PAUSE: Duration = Duration::from_secs(1);

impl Eligibility {
    /// `quarantine` is how long a suspect node waits for the `max_ttl` of this gateway, see
    /// [`quarantine`]. If a marker shows a larger bound, the node waits longer by the difference.
    pub fn new(identity: NodeIdentity, quarantine: Duration, max_clock_skew: Duration) -> Self {
        Self {
            identity,
            quarantine,
            max_clock_skew,
            expects_bootstrap: false,
            returns_after: NAME_MOVES_WITHIN,
            wait: None,
            admitted_by: None,
            distrusted: None,
            is_contested: false,
            rules: BoundRules::default(),
        }
    }

    /// Sets the rules that are on: all of them, except in tests that switch one off.
    pub fn with_rules(self, rules: BoundRules) -> Self {
        Self { rules, ..self }
    }

    /// What a probe shows to the other nodes' eligibilities. `None` if the marker belongs to
    /// another configuration. `earlier` is the bound that was seen on this node before.
    pub fn as_peer(
        &self,
        facts: &Facts,
        marker: Option<&str>,
        probed: Duration,
        earlier: Duration,
    ) -> Option<Peer> {
        let Some(marker) = marker else {
            return Some(Peer { probed, limit: None, bound: earlier });
        };
        let config = self.identity.cluster_config().parse(marker)?;
        let admits = |marker: &ParsedMarker<'_>| {
            matches!(marker.state, State::Admitted { .. })
                && self.identity.is(marker.node)
                && marker.run_id == facts.run_id
        };
        let is_admitted = ParsedMarker::parse(config.rest).as_ref().is_some_and(admits);
        let limit = is_admitted.then_some(config.bounds.limit);
        Some(Peer { probed, limit, bound: config.bounds.bound })
    }

    /// Sets how long a process that restarted with its data waits. Without this call it waits
    /// [`NAME_MOVES_WITHIN`]; where names move faster or never, less is enough.
    pub fn returning_after(self, returns_after: Duration) -> Self {
        Self { returns_after, ..self }
    }

    /// How long a suspect node waits, as far as the peers' markers show.
    pub fn full_quarantine(&self, peers: Peers<'_>) -> Duration {
        self.quarantine + peers.bound().saturating_sub(self.max_ttl())
    }

    /// The longest TTL that this gateway grants.
    pub fn max_ttl(&self) -> Duration {
        self.identity.cluster_config().max_ttl()
    }

    /// Sets whether an operator declared the cluster brand-new. The declaration counts until the
    /// first admission of the node: a node without a marker after that has lost its data.
    pub fn expecting_bootstrap(self, expects_bootstrap: bool) -> Self {
        Self { expects_bootstrap, ..self }
    }

    /// Reports that the node's clock ran ahead while this marker stood, so locks may have ended
    /// early. The node will be quarantined.
    pub fn distrust(&mut self, stood: Option<String>) {
        self.distrusted = Some(stood);
    }

    /// Reports that the present process lacks, or may lack, calls that another process has answered,
    /// and perhaps their grants.
    pub fn contest(&mut self) {
        self.is_contested = true;
    }

    /// The step that follows from a node's facts and marker. `now` must be read after facts and
    /// marker arrived. The caller passes `early` only if it is about the quarantine of exactly this
    /// marker.
    pub fn next_step(
        &mut self,
        facts: &Facts,
        marker: Option<&str>,
        now: Moment,
        peers: Peers<'_>,
        early: Option<EarlyEnd>,
        entropy: &dyn Entropy,
    ) -> NextStep {
        if let Some(diagnosis) = facts.ineligible() {
            return NextStep::Refuse(diagnosis);
        }
        // A marker or process other than that of the wait is newer, so the wait is dropped. A
        // quarantine marker that returns later with a copy of the data then begins a new wait.
        let is_other = |wait: &RunningWait| {
            Some(wait.incarnation.as_str()) != marker.map(incarnation_of)
                || wait.run_id != facts.run_id
        };
        if self.wait.as_ref().is_some_and(is_other) {
            self.wait = None;
        }
        let own = TtlBounds::both(self.max_ttl());
        let stated = marker.and_then(|marker| self.identity.cluster_config().bounds_in(marker));
        let stated = stated.unwrap_or(own);
        // A gateway with a smaller `max_ttl` may be the first to reach the node. So it counts the
        // largest bound that it has seen anywhere.
        let bound = if self.rules.larger_bound_is_waited {
            own.bound.max(stated.bound).max(peers.bound())
        } else {
            own.bound
        };
        let put = |to: String| NextStep::Put { from: marker.map(str::to_owned), to };
        let admit_with = |bounds| put(self.identity.admitting_with(facts, bounds, nonce(entropy)));
        let admit = || admit_with(stated);
        let suspect = |suspicion| {
            put(self.identity.quarantining(
                facts,
                bound,
                suspicion,
                now.wall_micros,
                nonce(entropy),
            ))
        };
        let Some(stands) = marker else {
            return suspect(if self.expects_bootstrap { Suspicion::New } else { Suspicion::Blank });
        };
        let Some(config) = self.identity.cluster_config().parse(stands) else {
            return NextStep::Refuse(self.identity.cluster_config().conflict(stands));
        };
        let incarnation = config.rest;
        let begin_wait = |passed| RunningWait {
            incarnation: incarnation.to_owned(),
            run_id: facts.run_id.clone(),
            began: now.monotonic,
            passed,
        };
        let Some(parsed) = ParsedMarker::parse(incarnation) else {
            return suspect(Suspicion::Unreadable);
        };
        let same_node = self.identity.is(parsed.node);
        if parsed.run_id != facts.run_id {
            let synced = facts.durability == Durability::Durable && !facts.rewritten;
            // While the append-only file is off, a new marker does not reach the disk. So a process
            // that loads an older marker than this gateway saw has loaded an outdated file.
            let is_newest = self.admitted_by.as_deref().is_none_or(|newest| newest == incarnation);
            return match parsed.state {
                _ if !same_node || facts.was_replica => suspect(Suspicion::Copied),
                _ if facts.evicted_keys > 0 => suspect(Suspicion::Evicted),
                State::Admitted { durable: true, .. } if synced && is_newest => {
                    if self.is_contested {
                        return suspect(Suspicion::Contested);
                    }
                    let wait = self.wait.get_or_insert_with(|| begin_wait(Duration::ZERO));
                    let until = wait.began + self.returns_after;
                    if now.monotonic >= until {
                        return admit();
                    }
                    let suspicion = Suspicion::Returned;
                    NextStep::Wait {
                        until,
                        suspicion,
                        diagnosis: suspicion.diagnosis(&facts.durability),
                    }
                }
                State::Admitted { .. } | State::Quarantined { .. } => suspect(Suspicion::Restarted),
            };
        }
        if !same_node {
            return NextStep::Refuse(Diagnosis::new(
                "this very process is admitted as another node of the cluster; a quorum needs \
                 independent masters",
                Remedy::NameEachNodeOnce,
            ));
        }
        if let Some(stood) = &self.distrusted {
            let is_admitted = matches!(parsed.state, State::Admitted { .. });
            if is_admitted || stood.as_deref().map(incarnation_of) == Some(incarnation) {
                return suspect(Suspicion::RanAhead);
            }
            // This quarantine began after the clock ran ahead, so it covers the locks that ended
            // early.
            self.distrusted = None;
        }
        if self.is_contested {
            if matches!(parsed.state, State::Admitted { .. }) {
                return suspect(Suspicion::Contested);
            }
            // The quarantine covers any grants that this process may lack.
            self.is_contested = false;
        }
        match parsed.state {
            State::Admitted { evicted_keys, .. } if evicted_keys < facts.evicted_keys => {
                suspect(Suspicion::Evicted)
            }
            // The count shrank, so somebody ran CONFIG RESETSTAT.
            State::Admitted { evicted_keys, .. } if evicted_keys > facts.evicted_keys => admit(),
            // The replication id has changed. A node that was a replica and became a master again,
            // as in a failover and back, has its data and this marker from elsewhere.
            State::Admitted { replication_id, .. }
                if replication_id != short(&facts.replication_id) =>
            {
                // A master also takes a new id an hour after its last replica left. Such a master
                // was no replica itself.
                if facts.was_replica { suspect(Suspicion::Copied) } else { admit() }
            }
            State::Admitted { durable, .. } => match (&facts.durability, durable) {
                // A gateway that cannot see the durability keeps the marker of a gateway that
                // could.
                (Durability::Volatile(_), true) | (Durability::Durable, false) => admit(),
                (Durability::Durable | Durability::Settling | Durability::Unknown(_), _)
                | (Durability::Volatile(_), false) => {
                    if own.limit > stated.limit && self.rules.limit_is_checked {
                        return NextStep::Refuse(self.identity.cluster_config().conflict(stands));
                    }
                    self.expects_bootstrap = false;
                    self.admitted_by = Some(incarnation.to_owned());
                    NextStep::Admit { marker: stands.to_owned() }
                }
            },
            // Another gateway expects a new cluster and put this marker. This gateway does not
            // expect one, or has admitted the node before, so it replaces the marker.
            State::Quarantined { suspicion: Suspicion::New, .. } if !self.expects_bootstrap => {
                suspect(Suspicion::Blank)
            }
            // The marker came with another node's data, so its wait does not count.
            State::Quarantined { replication_id, .. }
                if facts.was_replica && replication_id != short(&facts.replication_id) =>
            {
                suspect(Suspicion::Copied)
            }
            State::Quarantined { suspicion, since, .. } => {
                let passed =
                    || since.passed(facts.time_micros, now.wall_micros, self.max_clock_skew);
                let wait = self.wait.get_or_insert_with(|| begin_wait(passed()));
                let began = wait.began;
                let full = self.quarantine + bound.saturating_sub(own.bound);
                let until = began + full.saturating_sub(wait.passed);
                let ends_early = match early {
                    Some(EarlyEnd::Recovered) => true,
                    Some(EarlyEnd::BrandNew) => suspicion == Suspicion::New,
                    None => false,
                };
                // Every lost lock was granted by a majority. So one of its markers, seen after the
                // loss, shows a bound that covers the lock.
                let knows_bound =
                    peers.since(began).count() >= peers.needed || !self.rules.majority_is_probed;
                if knows_bound && (now.monotonic >= until || ends_early) {
                    let limit = peers.since(began).filter_map(|peer| peer.limit).max();
                    let limit = limit.unwrap_or(own.limit);
                    admit_with(TtlBounds { limit, bound: bound.max(limit) })
                } else {
                    NextStep::Wait {
                        until: if knows_bound {
                            until
                        } else {
                            until.max(now.monotonic + PEERS_PAUSE)
                        },
                        suspicion,
                        diagnosis: suspicion.diagnosis(&facts.durability),
                    }
                }
            }
        }
    }
}

pub(crate) fn nonce(entropy: &dyn Entropy) -> u64 {
    let mut raw = [0; 8];
    entropy.fill(&mut raw);
    u64::from_le_bytes(raw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::clock::OsEntropy;

    const NEXT_RUN: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";
    const MAX_TTL: Duration = Duration::from_secs(300);
    const SKEW: Duration = Duration::from_secs(2);

    const INFO: &str = "# Server\r\nredis_version:7.0.15\r\nrun_id:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n# Replication\r\n\
        role:master\r\nmaster_replid:cccccccccccccccccccccccccccccccccccccccc\r\nmaster_replid2:0000000000000000000000000000000000000000\r\nmaxmemory_policy:noeviction\r\n\
        evicted_keys:0\r\naof_rewrite_in_progress:0\r\naof_rewrite_scheduled:0\r\naof_last_bgrewrite_status:ok\r\naof_rewrites:0\r\n";

    fn settings(appendonly: &str, appendfsync: &str, on_rewrite: &str) -> Vec<(String, String)> {
        let pairs = [
            ("appendonly", appendonly),
            ("appendfsync", appendfsync),
            ("no-appendfsync-on-rewrite", on_rewrite),
        ];
        pairs.map(|(key, value)| (key.into(), value.into())).into()
    }

    fn volatile() -> Facts {
        Facts::new(INFO, Ok(&settings("no", "everysec", "no")))
    }

    fn durable() -> Facts {
        Facts::new(INFO, Ok(&settings("yes", "always", "no")))
    }

    fn cluster_config() -> ClusterConfig {
        ClusterConfig::new("a:1,b:2,c:3", MAX_TTL, SKEW)
    }

    /// A time at a gateway whose wall clock started at 1,000,000 s.
    fn moment(at: u64) -> Moment {
        Moment { monotonic: Duration::from_secs(at), wall_micros: (1_000_000 + at) * 1_000_000 }
    }

    /// One gateway's eligibility of node a, and the marker on that node.
    struct Bench {
        eligibility: Eligibility,
        marker: Option<String>,
    }

    impl Bench {
        fn new(marker: Option<String>) -> Self {
            Self {
                eligibility: Eligibility::new(
                    cluster_config().identity("a:1"),
                    quarantine(MAX_TTL, SKEW),
                    SKEW,
                ),
                marker,
            }
        }

        fn next_step(&mut self, facts: &Facts, at: u64) -> NextStep {
            self.eligibility.next_step(
                facts,
                self.marker.as_deref(),
                moment(at),
                Peers::default(),
                None,
                &OsEntropy,
            )
        }

        /// Probes and puts markers until another step follows.
        fn settle(&mut self, facts: &Facts, at: u64) -> NextStep {
            for _ in 0..4 {
                match self.next_step(facts, at) {
                    NextStep::Put { from, to } => {
                        assert_eq!(from, self.marker, "a marker replaces only the probed one");
                        self.marker = Some(to);
                    }
                    step => return step,
                }
            }
            panic!("markers are put without end");
        }

        fn is_admitted(&mut self, facts: &Facts, at: u64) -> bool {
            let step = self.settle(facts, at);
            matches!(&step, NextStep::Admit { marker } if Some(marker) == self.marker.as_ref())
        }

        #[track_caller]
        fn assert_waits(&mut self, facts: &Facts, at: u64, until: u64, what_for: Suspicion) {
            match self.settle(facts, at) {
                NextStep::Wait { until: end, suspicion, .. } => {
                    assert_eq!((end, suspicion), (Duration::from_secs(until), what_for));
                }
                step => panic!("{step:?}"),
            }
        }
    }

    fn admitted(facts: &Facts) -> Bench {
        Bench::new(Some(cluster_config().identity("a:1").admitting(facts, 0)))
    }

    #[test]
    fn memory_is_read_from_info_and_defaults_to_0() {
        let facts = Facts::new(
            "used_memory:1500\r\nused_memory_rss:9\r\nmaxmemory:2000\r\nmaxmemory_policy:x\r\n",
            Ok(&[]),
        );
        assert_eq!((facts.used_memory, facts.max_memory), (1500, 2000));
        assert_eq!((volatile().used_memory, volatile().max_memory), (0, 0));
    }

    #[test]
    fn a_server_is_named_with_its_own_version() {
        assert_eq!(volatile().server, "Redis 7.0.15");
        let compatible = "redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:9.1.2\r\n";
        let valkey = Facts::new(&INFO.replace("redis_version:7.0.15\r\n", compatible), Ok(&[]));
        assert_eq!((valkey.server.as_str(), valkey.ineligible()), ("Valkey 9.1.2", None));
    }

    #[test]
    fn each_defect_alone_makes_a_master_ineligible() {
        assert_eq!(volatile().ineligible(), None);
        for (defect, word) in [
            (Facts { run_id: String::new(), ..volatile() }, "run_id"),
            (Facts { version: "6.2.7".into(), ..volatile() }, "too old"),
            (Facts { role: "slave".into(), ..volatile() }, "REPLICAOF NO ONE"),
            (Facts { role: String::new(), ..volatile() }, "no role"),
            (Facts { cluster_slots: Some("0-5460".into()), ..volatile() }, "0-5460"),
            (Facts { cluster_slots: Some(String::new()), ..volatile() }, "no slot"),
            (Facts { policy: "allkeys-lru".into(), ..volatile() }, "allkeys-lru"),
            (Facts { policy: String::new(), ..volatile() }, "maxmemory-policy"),
        ] {
            let diagnosis = defect.ineligible().expect("ineligible");
            assert!(
                diagnosis.to_string().contains(word) && diagnosis.remedy.is_some(),
                "{diagnosis}"
            );
            assert_eq!(
                admitted(&volatile()).next_step(&defect, 0),
                NextStep::Refuse(diagnosis),
                "whatever the marker is"
            );
        }
    }

    #[test]
    fn only_a_file_synced_with_every_write_is_durable() {
        assert_eq!(durable().durability, Durability::Durable);
        let rewriting = INFO.replace("aof_rewrite_in_progress:0", "aof_rewrite_in_progress:1");
        assert_eq!(
            Facts::new(&rewriting, Ok(&settings("yes", "always", "no"))).durability,
            Durability::Settling
        );
        for (appendonly, appendfsync, on_rewrite) in [
            ("no", "always", "no"),
            ("yes", "everysec", "no"),
            ("yes", "no", "no"),
            ("yes", "always", "yes"),
        ] {
            let facts = Facts::new(INFO, Ok(&settings(appendonly, appendfsync, on_rewrite)));
            assert!(matches!(facts.durability, Durability::Volatile(_)), "{facts:?}");
        }
        for unknown in [Facts::new(INFO, Err("NOPERM")), Facts::new(INFO, Ok(&[]))] {
            assert!(matches!(unknown.durability, Durability::Unknown(_)), "{unknown:?}");
        }
    }

    #[test]
    fn the_policy_is_read_from_info_or_config() {
        let info = INFO.replace("maxmemory_policy:noeviction\r\n", "");
        let policy = [("maxmemory-policy".to_owned(), "noeviction".to_owned())];
        assert_eq!(Facts::new(&info, Ok(&policy)).ineligible(), None);
        assert!(Facts::new(&info, Err("NOPERM")).ineligible().is_some());
    }

    #[test]
    fn a_blank_node_is_admitted_after_its_quarantine() {
        let mut node = Bench::new(None);
        node.assert_waits(&volatile(), 10, 315, Suspicion::Blank);
        node.assert_waits(&volatile(), 314, 315, Suspicion::Blank);
        assert!(node.is_admitted(&volatile(), 315));
        assert!(node.is_admitted(&volatile(), 400), "the node stays admitted");
    }

    #[test]
    fn a_confirmed_bootstrap_admits_only_new_nodes() {
        let confirmed = |node: &mut Bench| {
            node.eligibility.next_step(
                &volatile(),
                node.marker.as_deref(),
                Moment::default(),
                Peers::default(),
                Some(EarlyEnd::BrandNew),
                &OsEntropy,
            )
        };
        let mut new = Bench::new(None);
        new.eligibility = new.eligibility.expecting_bootstrap(true);
        new.assert_waits(&volatile(), 0, 305, Suspicion::New);
        let step = confirmed(&mut new);
        assert!(
            matches!(&step, NextStep::Put { from, to } if *from == new.marker && to.contains(":volatile.")),
            "{step:?}"
        );
        assert!(new.is_admitted(&volatile(), 305));
        new.marker = None;
        new.assert_waits(&volatile(), 306, 611, Suspicion::Blank);

        // A gateway that does not expect a new cluster replaces the marker.
        let mut witness = Bench::new(None);
        witness.eligibility = witness.eligibility.expecting_bootstrap(true);
        witness.assert_waits(&volatile(), 0, 305, Suspicion::New);
        witness.eligibility = witness.eligibility.expecting_bootstrap(false);
        witness.assert_waits(&volatile(), 1, 306, Suspicion::Blank);

        // The first marker says blank, because the gateway does not expect a new cluster yet.
        let mut seen = Bench::new(None);
        seen.assert_waits(&volatile(), 0, 305, Suspicion::Blank);
        seen.eligibility = seen.eligibility.expecting_bootstrap(true);
        assert!(matches!(confirmed(&mut seen), NextStep::Wait { .. }));

        let mut restarted = admitted(&volatile());
        let next = Facts { run_id: NEXT_RUN.into(), ..volatile() };
        restarted.assert_waits(&next, 0, 305, Suspicion::Restarted);
        let step = restarted.eligibility.next_step(
            &next,
            restarted.marker.as_deref(),
            Moment::default(),
            Peers::default(),
            Some(EarlyEnd::BrandNew),
            &OsEntropy,
        );
        assert!(matches!(step, NextStep::Wait { .. }), "{step:?}");
    }

    #[test]
    fn an_admitted_process_is_admitted_by_every_gateway() {
        assert!(admitted(&volatile()).is_admitted(&volatile(), 0));
    }

    #[test]
    fn a_restart_waits_unless_both_processes_synced_every_write() {
        let next = |facts: Facts| Facts { run_id: NEXT_RUN.into(), ..facts };
        admitted(&durable()).assert_waits(&next(durable()), 5, 8, Suspicion::Returned);
        // A rewritten file may contain an old snapshot.
        let rewritten = Facts { rewritten: true, ..next(durable()) };
        admitted(&durable()).assert_waits(&rewritten, 5, 310, Suspicion::Restarted);
        admitted(&durable()).assert_waits(&next(volatile()), 5, 310, Suspicion::Restarted);
        admitted(&volatile()).assert_waits(&next(durable()), 5, 310, Suspicion::Restarted);
        let unknown = Facts { durability: Durability::Unknown("NOPERM".into()), ..next(durable()) };
        admitted(&durable()).assert_waits(&unknown, 5, 310, Suspicion::Restarted);
        let promoted = Facts { was_replica: true, ..next(durable()) };
        admitted(&durable()).assert_waits(&promoted, 5, 310, Suspicion::Copied);
    }

    #[test]
    fn another_nodes_marker_waits_however_durable_both_are() {
        let copied = cluster_config().identity("b:2").admitting(&durable(), 0);
        let other = Facts { run_id: NEXT_RUN.into(), ..durable() };
        Bench::new(Some(copied)).assert_waits(&other, 0, 305, Suspicion::Copied);
    }

    #[test]
    fn a_failover_and_back_waits_even_with_the_marker() {
        let mut node = admitted(&durable());
        let back = Facts { replication_id: "b".repeat(40), was_replica: true, ..durable() };
        node.assert_waits(&back, 0, 305, Suspicion::Copied);
        assert!(node.is_admitted(&back, 305), "one failover causes only one wait");
        let alone = Facts { replication_id: "b".repeat(40), ..durable() };
        assert!(
            admitted(&durable()).is_admitted(&alone, 0),
            "a new id because its replicas have left means nothing"
        );
    }

    #[test]
    fn one_process_under_two_names_is_refused_as_the_second() {
        let step = Bench::new(Some(cluster_config().identity("b:2").admitting(&durable(), 0)))
            .next_step(&durable(), 0);
        assert!(
            matches!(&step, NextStep::Refuse(diagnosis) if diagnosis.reason.contains("another node")),
            "{step:?}"
        );
    }

    #[test]
    fn a_change_of_durability_changes_the_marker() {
        let mut node = admitted(&durable());
        assert!(node.is_admitted(&volatile(), 0));
        node.assert_waits(
            &Facts { run_id: NEXT_RUN.into(), ..durable() },
            1,
            306,
            Suspicion::Restarted,
        );
        let mut node = admitted(&volatile());
        let settling = Facts { durability: Durability::Settling, ..durable() };
        assert!(node.is_admitted(&settling, 0));
        assert!(node.marker.as_ref().is_some_and(|marker| marker.contains("volatile")), "not yet");
        assert!(node.is_admitted(&durable(), 0));
        node.assert_waits(
            &Facts { run_id: NEXT_RUN.into(), ..durable() },
            1,
            4,
            Suspicion::Returned,
        );
    }

    #[test]
    fn a_restarted_durable_master_waits_until_names_have_moved() {
        let next = |run: &str| Facts { run_id: run.repeat(40), ..durable() };
        let mut first = admitted(&durable());
        first.assert_waits(&next("b"), 10, 13, Suspicion::Returned);
        first.assert_waits(&next("b"), 12, 13, Suspicion::Returned);
        // Another process begins another wait, and so does another gateway, which has seen neither
        // process.
        first.assert_waits(&next("d"), 12, 15, Suspicion::Returned);
        let mut second = Bench::new(first.marker.clone());
        second.assert_waits(&next("d"), 14, 17, Suspicion::Returned);
        assert!(first.is_admitted(&next("d"), 15));
        second.marker = first.marker;
        assert!(second.is_admitted(&next("d"), 15), "the first gateway has waited for both");
    }

    #[test]
    fn a_contested_process_is_quarantined_once() {
        let next = Facts { run_id: NEXT_RUN.into(), ..durable() };
        for admitted_meanwhile in [false, true] {
            let marker = if admitted_meanwhile { &next } else { &durable() };
            let mut node = admitted(marker);
            node.eligibility.contest();
            node.assert_waits(&next, 10, 315, Suspicion::Contested);
            assert!(node.is_admitted(&next, 315) && node.is_admitted(&next, 316));
        }
        let mut blank = Bench::new(None);
        blank.eligibility.contest();
        blank.assert_waits(&volatile(), 10, 315, Suspicion::Blank);
        assert!(blank.is_admitted(&volatile(), 315));
    }

    #[test]
    fn a_node_that_evicted_keys_waits() {
        let evicted = Facts { evicted_keys: 1, ..volatile() };
        let mut node = admitted(&volatile());
        node.assert_waits(&evicted, 0, 305, Suspicion::Evicted);
        assert!(node.is_admitted(&evicted, 305), "its marker has the new count");
    }

    #[test]
    fn a_durable_node_that_evicted_keys_since_its_restart_waits() {
        let evicted = Facts { evicted_keys: 1, run_id: NEXT_RUN.into(), ..durable() };
        admitted(&durable()).assert_waits(&evicted, 0, 305, Suspicion::Evicted);
    }

    #[test]
    fn a_reset_of_the_eviction_count_is_no_eviction() {
        let evicted = Facts { evicted_keys: 5, ..volatile() };
        assert!(admitted(&evicted).is_admitted(&volatile(), 0));
    }

    /// After CONFIG SET appendonly no, the file lacks the newer marker, and the next process loads
    /// the old one.
    #[test]
    fn an_older_marker_than_the_newest_seen_is_suspect() {
        let mut node = admitted(&durable());
        assert!(node.is_admitted(&durable(), 0));
        let in_file = node.marker.clone();
        assert!(node.is_admitted(&volatile(), 1));
        node.marker = in_file;
        node.assert_waits(
            &Facts { run_id: NEXT_RUN.into(), ..durable() },
            2,
            307,
            Suspicion::Restarted,
        );
    }

    #[test]
    fn a_quarantine_marker_that_returns_starts_a_new_wait() {
        let mut node = Bench::new(None);
        node.assert_waits(&volatile(), 0, 305, Suspicion::Blank);
        let quarantine = node.marker.clone();
        assert!(node.is_admitted(&volatile(), 305));
        node.marker = quarantine;
        node.assert_waits(&volatile(), 306, 611, Suspicion::Blank);
    }

    #[test]
    fn a_second_loss_of_data_starts_a_new_wait() {
        let mut first = Bench::new(None);
        first.assert_waits(&volatile(), 0, 305, Suspicion::Blank);
        // Another gateway, which saw the node earlier, admits it; then all data is lost again. The
        // first gateway has not probed the node in between.
        first.marker = None;
        first.assert_waits(&volatile(), 303, 608, Suspicion::Blank);
    }

    #[test]
    fn a_new_gateway_waits_fully_if_the_node_shows_no_time() {
        let mut before = Bench::new(None);
        before.assert_waits(&volatile(), 0, 305, Suspicion::Blank);
        Bench::new(before.marker).assert_waits(&volatile(), 300, 605, Suspicion::Blank);
    }

    /// Every gateway process lives for a minute; the machines' clocks differ by a second.
    #[test]
    fn short_lived_processes_end_a_quarantine_together() {
        let facts_at = |at: u64| Facts { time_micros: (999_999 + at) * 1_000_000, ..volatile() };
        let mut first = Bench::new(None);
        first.assert_waits(&facts_at(0), 0, 305, Suspicion::Blank);
        let marker = first.marker;
        for at in (60..=300).step_by(60) {
            Bench::new(marker.clone()).assert_waits(&facts_at(at), at, 305, Suspicion::Blank);
        }
        assert!(!Bench::new(marker.clone()).is_admitted(&facts_at(304), 304));
        assert!(Bench::new(marker.clone()).is_admitted(&facts_at(305), 305));

        // Time that only one clock shows does not count as passed. After the first probe only the
        // monotonic clock counts, so a jump of the other two changes nothing.
        Bench::new(marker.clone()).assert_waits(&facts_at(308), 300, 605, Suspicion::Blank);
        Bench::new(marker.clone()).assert_waits(&facts_at(0), 400, 705, Suspicion::Blank);
        let mut jumped = Bench::new(marker.clone());
        jumped.assert_waits(&facts_at(10), 10, 305, Suspicion::Blank);
        jumped.assert_waits(&facts_at(500), 20, 305, Suspicion::Blank);

        let copied = Facts { replication_id: "b".repeat(40), was_replica: true, ..facts_at(400) };
        Bench::new(marker).assert_waits(&copied, 400, 705, Suspicion::Copied);
    }

    #[test]
    fn unreadable_markers_wait_and_foreign_ones_are_refused() {
        for rest in [
            "",
            "x",
            "x:y",
            "x:y:volatile",
            "x:y:volatile.g.a.0",
            "x:y:volatile.0",
            "x:y:odd.0",
            "x:y:volatile.0.a",
            "x:y:volatile.0.a.0:z",
            "x:y:blank.0.a",
            "x:y:blank.0.a.0",
            "x:y:blank.0.a.0.g",
            "x:y:blank.0.a.0.0.0",
        ] {
            let marker = format!("{}{rest}", cluster_config().marker_prefix());
            Bench::new(Some(marker)).assert_waits(&volatile(), 0, 305, Suspicion::Unreadable);
        }
        let other =
            ClusterConfig::new("a:1", MAX_TTL, SKEW).identity("a:1").admitting(&volatile(), 0);
        for foreign in
            [&other, "", "hello", &cluster_config().marker_under_way("x", MAX_TTL, SKEW, 1)]
        {
            assert!(
                matches!(
                    Bench::new(Some(foreign.to_owned())).next_step(&volatile(), 0),
                    NextStep::Refuse(_)
                ),
                "{foreign}"
            );
        }
    }

    #[test]
    fn the_quarantine_covers_tokens_ahead_of_their_clock() {
        let skew = Duration::from_secs(2);
        assert_eq!(quarantine(MAX_TTL, skew), Duration::from_secs(305));
        assert_eq!(quarantine(Duration::from_millis(100), skew), skew * 2 + NAME_MOVES_WITHIN);
    }

    #[test]
    fn configurations_differ_in_nodes_max_ttl_and_skew() {
        let nodes = ClusterConfig::cluster_of_nodes(["b:2", "a:1"]);
        assert_eq!(nodes, ClusterConfig::cluster_of_nodes(["a:1", "b:2"]));
        let base = ClusterConfig::new(&nodes, MAX_TTL, SKEW);
        let other_ttl = ClusterConfig::new(&nodes, MAX_TTL * 2, SKEW);
        assert_ne!(base, other_ttl);
        let other_skew = ClusterConfig::new(&nodes, MAX_TTL, SKEW * 6);
        assert_ne!(base, other_skew);
        let conflict =
            base.conflict(&other_skew.identity("a:1").admitting(&volatile(), 0)).to_string();
        assert!(
            conflict.contains("clock_skew 12000 ms") && conflict.contains("clock_skew 2000 ms"),
            "{conflict}"
        );
        assert_ne!(base, ClusterConfig::new("a:1", MAX_TTL, SKEW));
        let conflict =
            base.conflict(&other_ttl.identity("a:1").admitting(&volatile(), 0)).to_string();
        let under_way = base.marker_under_way(base.node_set(), MAX_TTL * 3, SKEW * 2, 1);
        assert_eq!(ClusterConfig::clock_skew_of(&under_way), Some(SKEW * 2));
        let targets =
            [&base, &other_ttl, &other_skew].map(|config| config.is_target_of(&under_way));
        assert_eq!(targets, [Some(true), Some(false), Some(false)]);
        assert_eq!(ClusterConfig::node_set_of(&under_way), Some(base.node_set()));
        assert_eq!(ClusterConfig::max_ttl_of(&under_way), Some(MAX_TTL * 3));
        assert!(base.conflict(&under_way).reason.contains("under way"));
        for (marker, remedy) in [
            (under_way.as_str(), Remedy::FinishChange),
            ("not a marker", Remedy::ChangeKeyPrefix),
            ("v3:00000000:1:1:x", Remedy::ChangeKeyPrefix),
        ] {
            assert_eq!(base.conflict(marker).remedy, Some(remedy), "{marker}");
        }
        assert!(
            conflict.contains("max_ttl 600000 ms") && conflict.contains("max_ttl 300000 ms"),
            "{conflict}"
        );
    }

    #[test]
    fn a_marker_without_clock_skew_is_refused_but_readable() {
        let ours = cluster_config();
        let node = ours.identity("a:1").admitting(&volatile(), 0);
        let node = node.strip_prefix(ours.marker_prefix()).expect("its beginning");
        let older = format!("v1:{}:{}:{node}", ours.node_set(), MAX_TTL.as_millis());
        let NextStep::Refuse(why) = Bench::new(Some(older.clone())).next_step(&volatile(), 0)
        else {
            panic!("{older}")
        };
        assert!(
            why.reason.contains("no clock_skew") && why.remedy == Some(Remedy::Reconfigure),
            "{why}"
        );
        assert!(ours.has_admitted(&older) && ours.is_target_of(&older).is_none());
        assert_eq!(ClusterConfig::node_set_of(&older), Some(ours.node_set()));
        assert_eq!(ClusterConfig::max_ttl_of(&older), Some(MAX_TTL));
        assert_eq!(ClusterConfig::clock_skew_of(&older), None);
        let under_way =
            format!("v1:leaving-x:600000:{}-{}:1", ours.node_set(), MAX_TTL.as_millis());
        assert_eq!(ours.is_target_of(&under_way), Some(true));
        assert_eq!(ClusterConfig::max_ttl_of(&under_way), Some(MAX_TTL * 2));
    }
}
