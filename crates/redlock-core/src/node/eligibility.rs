//! Whether a connected master may vote. Pure but for chance: what was seen goes in, one step comes out; the driver of a
//! master's worker (`node/driver.rs`) looks and acts, and a simulation can do the same with a node in memory.
//!
//! The canonical text asks operators to delay the return of a crashed master by the longest TTL, because a master that
//! forgot its locks helps to grant them a second time. Here that is done for them. A master is *fit* when it is a master,
//! is new enough and never evicts keys. Its *marker*, a key without expiry, says for which configuration, for which node
//! and for which process it was admitted. Lock operations are refused by the scripts unless exactly this marker stands,
//! which catches FLUSHALL, an empty restart, a data set that came from elsewhere, and gateways that are configured with
//! another node set or maximum TTL. Then:
//!
//! 1. the marker is of this very process: admitted;
//! 2. the marker is of an earlier process of this node, which synced every write to disk, and the new process does so
//!    too, with the file that it loaded: admitted [`NAME_MOVES_WITHIN`] after this gateway first saw the process. By then
//!    no gateway talks to the earlier process any more. A gateway that finds both alive *contests* the new process, which
//!    is then quarantined: its file may lack what the earlier process granted after the new one had read it;
//! 3. otherwise the node's memory of locks is suspect, and it is *quarantined* until every lock that it may have
//!    lost has ended ([`quarantine`]), or the other masters have told it which those are.
//!
//! A quarantine is written on the node: a marker with a nonce, that admits nobody. At its end exactly this marker is
//! replaced by the admitting one, in one step that also checks the run_id. So whatever else happened to the node in the
//! meantime (a second loss of data, an eligibility by another gateway and a loss after it) leaves another marker or none,
//! and the count starts anew. A gateway counts by its own monotonic clock what it has itself seen standing. The marker also
//! says when it was put, by the node's clock and by the gateway's: what both say has passed, and agree on within D, a gateway
//! that comes later need not wait again. So short-lived processes do not keep a node out for ever.
//!
//! A marker of another configuration is never overwritten: the node is refused, and an operator decides.
//!
//! What cannot be seen: a process that loaded its append-only file while the earlier one still granted locks, when the
//! earlier one ended before any gateway saw the two; a backup of an append-only file that was put back; a replica that was promoted in the place of a
//! durable master and restarted before anybody looked at it (Redis forgets that it was one); what is done and undone
//! between two looks, a second apart, or while no gateway runs (a failover and back, evictions, durability that was
//! weakened and then a crash, a clock that jumps forward, which ends locks early, and back again).

mod facts;
mod marker;

use std::time::Duration;

pub use self::facts::{Durability, Facts, SETTINGS};
pub use self::marker::{
    ClusterConfig, NodeIdentity, Suspicion, caught_up_key, database_key, marker_key,
};
use self::marker::{ParsedMarker, State, short};
use crate::model::clock::{Clock, Entropy};
use crate::node::status::{Diagnosis, Remedy};

/// How often a name is followed again, over a connection of its own, to see that it still leads to the process that votes.
pub const NAME_IS_FOLLOWED_EVERY: Duration = Duration::from_secs(2);
/// What takes longer is noticed late, and logged.
pub const NAME_IS_FOLLOWED_WITHIN: Duration = Duration::from_secs(1);
/// After so long every gateway has left the process that a name led to before.
pub const NAME_MOVES_WITHIN: Duration =
    Duration::from_secs(NAME_IS_FOLLOWED_EVERY.as_secs() + NAME_IS_FOLLOWED_WITHIN.as_secs());

/// How long a node whose memory is suspect gives no votes: the longest lock it may have lost, and S, the skew
/// between gateways' clocks, for the fencing tokens it has lost too. A token may also be ahead of its own gateway's
/// clock by as much as D, which is S here, so a short maximum TTL does not shorten the wait below 2 S. And another gateway may
/// still talk to the process that had the name before.
pub fn quarantine(max_ttl: Duration, max_clock_skew: Duration) -> Duration {
    max_ttl.max(max_clock_skew) + max_clock_skew + NAME_MOVES_WITHIN
}

/// When something was seen.
#[derive(Debug, Clone, Copy, Default)]
pub struct Moment {
    /// On this gateway's monotonic clock.
    pub monotonic: Duration,
    /// By its wall clock, in microseconds since 1970.
    pub wall_micros: u64,
}

impl Moment {
    /// Now.
    pub fn of(clock: &dyn Clock) -> Self {
        Self { monotonic: clock.monotonic(), wall_micros: clock.wall_micros() }
    }
}

/// Why a quarantine need not be waited to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EarlyEnd {
    /// The operator's word that the cluster is new, confirmed by looking at all nodes: for a new node.
    BrandNew,
    /// The node was given back what it had lost.
    RecoveryAnswer,
}

/// What to do next with a node that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextStep {
    /// It must not vote. Look again after a while.
    Refuse(Diagnosis),
    /// If the process is still the one that was looked at: put one marker in the place of another (or of none), in one
    /// step. Then look again, whatever came of it.
    Put {
        /// What must stand there; nothing when `None`.
        from: Option<String>,
        /// What stands there afterwards.
        to: String,
    },
    /// It is in quarantine. Look again from time to time, at the latest when it ends.
    Wait {
        /// When it ends, on the clock that `look` was given.
        until: Duration,
        /// What makes its memory suspect.
        suspicion: Suspicion,
        /// What for, in words.
        diagnosis: Diagnosis,
    },
    /// It votes, as long as exactly this marker stands.
    Admit {
        /// The marker that every call has to show.
        marker: String,
    },
}

/// The eligibility of one node by one gateway.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Eligibility {
    identity: NodeIdentity,
    quarantine: Duration,
    /// D.
    max_clock_skew: Duration,
    expects_bootstrap: bool,
    /// How long a process that came back with its data waits from first sight.
    returns_after: Duration,
    /// The wait that is counted.
    seen: Option<RunningWait>,
    /// The marker that admitted the node when it was last looked at.
    admitted_by: Option<String>,
    /// Its clock ran ahead while this marker stood, or none.
    distrusted: Option<Option<String>>,
    /// Two processes were seen alive under the node's name.
    is_contested: bool,
}

/// A wait that has begun.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct RunningWait {
    /// The marker that stood, and the process that showed it.
    marker: String,
    run_id: String,
    /// When the wait ends, on this gateway's monotonic clock.
    until: Duration,
}

impl Eligibility {
    /// `quarantine` is how long a suspect node waits: [`quarantine`]; `max_clock_skew` is D.
    pub fn new(identity: NodeIdentity, quarantine: Duration, max_clock_skew: Duration) -> Self {
        Self {
            identity,
            quarantine,
            max_clock_skew,
            expects_bootstrap: false,
            returns_after: NAME_MOVES_WITHIN,
            seen: None,
            admitted_by: None,
            distrusted: None,
            is_contested: false,
        }
    }

    /// A process that came back with its data waits so long, where names move faster or never.
    pub fn returning_after(self, returns_after: Duration) -> Self {
        Self { returns_after, ..self }
    }

    /// The longest TTL of the configuration that nodes are admitted for.
    pub fn max_ttl(&self) -> Duration {
        self.identity.cluster_config().max_ttl()
    }

    /// With an operator's word that the cluster is brand-new. It counts until the node is admitted for the first time: what
    /// is blank after that has lost its data.
    pub fn expecting_bootstrap(self, expects_bootstrap: bool) -> Self {
        Self { expects_bootstrap, ..self }
    }

    /// Its clock ran ahead while this marker stood, so that locks may have ended early: from now on it is quarantined.
    pub fn distrust(&mut self, stood: Option<String>) {
        self.distrusted = Some(stood);
    }

    /// Its earlier process and the present one were alive at once. The present one may lack what the earlier one granted.
    pub fn contest(&mut self) {
        self.is_contested = true;
    }

    /// The step that follows from what a node said and which marker stood there. `now` was read after the answers came.
    /// `early` is what was said of exactly this marker's quarantine.
    pub fn look(
        &mut self,
        facts: &Facts,
        marker: Option<&str>,
        now: Moment,
        early: Option<EarlyEnd>,
        entropy: &dyn Entropy,
    ) -> NextStep {
        if let Some(diagnosis) = facts.ineligible() {
            return NextStep::Refuse(diagnosis);
        }
        // Whatever else stands has come since: a quarantine that comes back with some copy of the data is not the same one.
        let is_other = |seen: &RunningWait| {
            Some(seen.marker.as_str()) != marker || seen.run_id != facts.run_id
        };
        if self.seen.as_ref().is_some_and(is_other) {
            self.seen = None;
        }
        let put = |to: String| NextStep::Put { from: marker.map(str::to_owned), to };
        let admit = || put(self.identity.admitting(facts, nonce(entropy)));
        let suspect = |suspicion| {
            put(self.identity.quarantining(facts, suspicion, now.wall_micros, nonce(entropy)))
        };
        let Some(stands) = marker else {
            return suspect(if self.expects_bootstrap { Suspicion::New } else { Suspicion::Blank });
        };
        let Some(rest) = stands.strip_prefix(self.identity.cluster_config().marker_prefix()) else {
            return NextStep::Refuse(self.identity.cluster_config().conflict(stands));
        };
        let Some(parsed) = ParsedMarker::parse(rest) else { return suspect(Suspicion::Unreadable) };
        let same_node = self.identity.is(parsed.node);
        if parsed.run_id != facts.run_id {
            let synced = facts.durability == Durability::Durable && !facts.rewritten;
            // With the file switched off, a change of the marker did not reach the disk.
            let is_newest = self.admitted_by.as_deref().is_none_or(|newest| newest == stands);
            return match parsed.state {
                _ if !same_node || facts.was_replica => suspect(Suspicion::Copied),
                _ if facts.evicted_keys > 0 => suspect(Suspicion::Evicted),
                State::Admitted { durable: true, .. } if synced && is_newest => {
                    if self.is_contested {
                        return suspect(Suspicion::Contested);
                    }
                    let until = now.monotonic + self.returns_after;
                    let begun = || RunningWait {
                        marker: stands.to_owned(),
                        run_id: facts.run_id.clone(),
                        until,
                    };
                    let until = self.seen.get_or_insert_with(begun).until;
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
                "this very process is admitted as another node of the cluster; a quorum needs independent masters",
                Remedy::NameEachNodeOnce,
            ));
        }
        if let Some(stood) = &self.distrusted {
            let is_admitted = matches!(parsed.state, State::Admitted { .. });
            if is_admitted || stood.as_deref() == Some(stands) {
                return suspect(Suspicion::RanAhead);
            }
            // A quarantine that began since.
            self.distrusted = None;
        }
        if self.is_contested {
            if matches!(parsed.state, State::Admitted { .. }) {
                return suspect(Suspicion::Contested);
            }
            // A quarantine covers what this process may lack.
            self.is_contested = false;
        }
        match parsed.state {
            State::Admitted { evicted_keys, .. } if evicted_keys < facts.evicted_keys => {
                suspect(Suspicion::Evicted)
            }
            // CONFIG RESETSTAT.
            State::Admitted { evicted_keys, .. } if evicted_keys > facts.evicted_keys => admit(),
            // Made a replica and a master again, as by a failover and back: its data came from elsewhere, this marker too.
            State::Admitted { replication_id, .. }
                if replication_id != short(&facts.replication_id) =>
            {
                // A master that was left by its replicas an hour ago also takes a new id.
                if facts.was_replica { suspect(Suspicion::Copied) } else { admit() }
            }
            State::Admitted { durable, .. } => match (&facts.durability, durable) {
                // Where this gateway cannot see the durability, the marker stands on the word of one that could.
                (Durability::Volatile(_), true) | (Durability::Durable, false) => admit(),
                (Durability::Durable | Durability::Settling | Durability::Unknown(_), _)
                | (Durability::Volatile(_), false) => {
                    self.expects_bootstrap = false;
                    self.admitted_by = Some(stands.to_owned());
                    NextStep::Admit { marker: stands.to_owned() }
                }
            },
            // Another gateway was told that the node is new. This one was not, or has admitted it before.
            State::Quarantined { suspicion: Suspicion::New, .. } if !self.expects_bootstrap => {
                suspect(Suspicion::Blank)
            }
            // It came with the data of another.
            State::Quarantined { replication_id, .. }
                if facts.was_replica && replication_id != short(&facts.replication_id) =>
            {
                suspect(Suspicion::Copied)
            }
            State::Quarantined { suspicion, since, .. } => {
                let passed = || {
                    since
                        .passed(facts.time_micros, now.wall_micros, self.max_clock_skew)
                        .min(self.quarantine)
                };
                let begun = || RunningWait {
                    marker: stands.to_owned(),
                    run_id: facts.run_id.clone(),
                    until: now.monotonic + self.quarantine - passed(),
                };
                let until = self.seen.get_or_insert_with(begun).until;
                let ends_early = match early {
                    Some(EarlyEnd::RecoveryAnswer) => true,
                    Some(EarlyEnd::BrandNew) => suspicion == Suspicion::New,
                    None => false,
                };
                if now.monotonic >= until || ends_early {
                    admit()
                } else {
                    NextStep::Wait {
                        until,
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

    /// A gateway whose wall clock began at 1,000,000 s.
    fn moment(at: u64) -> Moment {
        Moment { monotonic: Duration::from_secs(at), wall_micros: (1_000_000 + at) * 1_000_000 }
    }

    /// One gateway's eligibility of node a, and a marker that obeys it.
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

        fn look(&mut self, facts: &Facts, at: u64) -> NextStep {
            self.eligibility.look(facts, self.marker.as_deref(), moment(at), None, &OsEntropy)
        }

        /// Looks and puts markers until there is something else to do.
        fn settle(&mut self, facts: &Facts, at: u64) -> NextStep {
            for _ in 0..4 {
                match self.look(facts, at) {
                    NextStep::Put { from, to } => {
                        assert_eq!(
                            from, self.marker,
                            "a marker is put only in the place of the one that was looked at"
                        );
                        self.marker = Some(to);
                    }
                    step => return step,
                }
            }
            panic!("no end to putting markers");
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
    fn memory_is_read_from_info_and_is_0_where_unsaid() {
        let said = Facts::new(
            "used_memory:1500\r\nused_memory_rss:9\r\nmaxmemory:2000\r\nmaxmemory_policy:x\r\n",
            Ok(&[]),
        );
        assert_eq!((said.used_memory, said.max_memory), (1500, 2000));
        assert_eq!((volatile().used_memory, volatile().max_memory), (0, 0));
    }

    #[test]
    fn a_plain_master_is_fit_and_each_defect_alone_makes_it_unfit() {
        assert_eq!(volatile().ineligible(), None);
        for (defect, word) in [
            (Facts { run_id: String::new(), ..volatile() }, "run_id"),
            (Facts { version: "6.2.7".into(), ..volatile() }, "too old"),
            (Facts { role: "slave".into(), ..volatile() }, "REPLICAOF NO ONE"),
            (Facts { role: String::new(), ..volatile() }, "no role"),
            (Facts { policy: "allkeys-lru".into(), ..volatile() }, "allkeys-lru"),
            (Facts { policy: String::new(), ..volatile() }, "maxmemory-policy"),
        ] {
            let diagnosis = defect.ineligible().expect("ineligible");
            assert!(
                diagnosis.to_string().contains(word) && diagnosis.remedy.is_some(),
                "{diagnosis}"
            );
            assert_eq!(
                admitted(&volatile()).look(&defect, 0),
                NextStep::Refuse(diagnosis),
                "whatever the marker says"
            );
        }
    }

    #[test]
    fn only_a_file_synced_with_every_write_is_durable_and_what_is_not_shown_is_unknown() {
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
    fn the_policy_may_come_from_either_answer() {
        let info = INFO.replace("maxmemory_policy:noeviction\r\n", "");
        let policy = [("maxmemory-policy".to_owned(), "noeviction".to_owned())];
        assert_eq!(Facts::new(&info, Ok(&policy)).ineligible(), None);
        assert!(Facts::new(&info, Err("NOPERM")).ineligible().is_some());
    }

    #[test]
    fn a_blank_node_waits_and_is_admitted_at_the_end_and_not_before() {
        let mut node = Bench::new(None);
        node.assert_waits(&volatile(), 10, 315, Suspicion::Blank);
        node.assert_waits(&volatile(), 314, 315, Suspicion::Blank);
        assert!(node.is_admitted(&volatile(), 315));
        assert!(node.is_admitted(&volatile(), 400), "and stays so");
    }

    #[test]
    fn the_word_of_an_operator_admits_a_new_node_and_no_other() {
        let told = |node: &mut Bench| {
            node.eligibility.look(
                &volatile(),
                node.marker.as_deref(),
                Moment::default(),
                Some(EarlyEnd::BrandNew),
                &OsEntropy,
            )
        };
        let mut new = Bench::new(None);
        new.eligibility = new.eligibility.expecting_bootstrap(true);
        new.assert_waits(&volatile(), 0, 305, Suspicion::New);
        let step = told(&mut new);
        assert!(
            matches!(&step, NextStep::Put { from, to } if *from == new.marker && to.contains(":volatile.")),
            "{step:?}"
        );
        assert!(new.is_admitted(&volatile(), 305));
        new.marker = None;
        new.assert_waits(&volatile(), 306, 611, Suspicion::Blank);

        // A gateway without that word puts it right.
        let mut witness = Bench::new(None);
        witness.eligibility = witness.eligibility.expecting_bootstrap(true);
        witness.assert_waits(&volatile(), 0, 305, Suspicion::New);
        witness.eligibility = witness.eligibility.expecting_bootstrap(false);
        witness.assert_waits(&volatile(), 1, 306, Suspicion::Blank);

        // Seen blank by a gateway without that word first.
        let mut seen = Bench::new(None);
        seen.assert_waits(&volatile(), 0, 305, Suspicion::Blank);
        seen.eligibility = seen.eligibility.expecting_bootstrap(true);
        assert!(matches!(told(&mut seen), NextStep::Wait { .. }));

        let mut restarted = admitted(&volatile());
        let next = Facts { run_id: NEXT_RUN.into(), ..volatile() };
        restarted.assert_waits(&next, 0, 305, Suspicion::Restarted);
        let step = restarted.eligibility.look(
            &next,
            restarted.marker.as_deref(),
            Moment::default(),
            Some(EarlyEnd::BrandNew),
            &OsEntropy,
        );
        assert!(matches!(step, NextStep::Wait { .. }), "{step:?}");
    }

    #[test]
    fn a_process_that_was_admitted_is_admitted_by_every_gateway_at_once() {
        assert!(admitted(&volatile()).is_admitted(&volatile(), 0));
    }

    #[test]
    fn a_restart_waits_unless_both_processes_synced_every_write() {
        let next = |facts: Facts| Facts { run_id: NEXT_RUN.into(), ..facts };
        admitted(&durable()).assert_waits(&next(durable()), 5, 8, Suspicion::Returned);
        // Then the file may hold what came from an old snapshot.
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
    fn a_marker_that_came_from_another_node_waits_however_durable_both_are() {
        let copied = cluster_config().identity("b:2").admitting(&durable(), 0);
        let other = Facts { run_id: NEXT_RUN.into(), ..durable() };
        Bench::new(Some(copied)).assert_waits(&other, 0, 305, Suspicion::Copied);
    }

    #[test]
    fn a_failover_and_back_waits_although_the_marker_came_back_too() {
        let mut node = admitted(&durable());
        let back = Facts { replication_id: "b".repeat(40), was_replica: true, ..durable() };
        node.assert_waits(&back, 0, 305, Suspicion::Copied);
        assert!(node.is_admitted(&back, 305), "and not again for the same one");
        let alone = Facts { replication_id: "b".repeat(40), ..durable() };
        assert!(
            admitted(&durable()).is_admitted(&alone, 0),
            "a new id because its replicas have left means nothing"
        );
    }

    #[test]
    fn one_process_under_two_names_is_refused_under_the_second() {
        let step = Bench::new(Some(cluster_config().identity("b:2").admitting(&durable(), 0)))
            .look(&durable(), 0);
        assert!(
            matches!(&step, NextStep::Refuse(diagnosis) if diagnosis.reason.contains("another node")),
            "{step:?}"
        );
    }

    #[test]
    fn a_change_of_durability_changes_the_marker_of_an_admitted_node() {
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
        // Another process begins another wait; so does another gateway, which has seen nothing yet.
        first.assert_waits(&next("d"), 12, 15, Suspicion::Returned);
        let mut second = Bench::new(first.marker.clone());
        second.assert_waits(&next("d"), 14, 17, Suspicion::Returned);
        assert!(first.is_admitted(&next("d"), 15));
        second.marker = first.marker;
        assert!(second.is_admitted(&next("d"), 15), "the first one has waited for both");
    }

    #[test]
    fn a_process_seen_beside_its_former_one_is_quarantined_once() {
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
        assert!(node.is_admitted(&evicted, 305), "with what it had evicted by then");
    }

    #[test]
    fn a_durable_node_that_evicted_keys_since_its_restart_waits() {
        let evicted = Facts { evicted_keys: 1, run_id: NEXT_RUN.into(), ..durable() };
        admitted(&durable()).assert_waits(&evicted, 0, 305, Suspicion::Evicted);
    }

    #[test]
    fn counting_evictions_from_zero_again_is_no_eviction() {
        let evicted = Facts { evicted_keys: 5, ..volatile() };
        assert!(admitted(&evicted).is_admitted(&volatile(), 0));
    }

    /// CONFIG SET appendonly no: the marker that says so is not in the file, and the next process loads the old one.
    #[test]
    fn an_older_marker_than_the_last_one_seen_is_not_believed() {
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
    fn a_quarantine_that_comes_back_after_an_admission_starts_anew() {
        let mut node = Bench::new(None);
        node.assert_waits(&volatile(), 0, 305, Suspicion::Blank);
        let quarantine = node.marker.clone();
        assert!(node.is_admitted(&volatile(), 305));
        node.marker = quarantine;
        node.assert_waits(&volatile(), 306, 611, Suspicion::Blank);
    }

    #[test]
    fn a_second_loss_during_the_quarantine_starts_the_count_anew_also_after_an_admission_by_others()
    {
        let mut first = Bench::new(None);
        first.assert_waits(&volatile(), 0, 305, Suspicion::Blank);
        // Another gateway, which had seen the node earlier, admits it; then all data is lost again. The first gateway has
        // looked at nothing in the meantime.
        first.marker = None;
        first.assert_waits(&volatile(), 303, 608, Suspicion::Blank);
    }

    #[test]
    fn a_gateway_that_was_restarted_counts_from_the_beginning_when_the_node_does_not_tell_the_time()
    {
        let mut before = Bench::new(None);
        before.assert_waits(&volatile(), 0, 305, Suspicion::Blank);
        Bench::new(before.marker).assert_waits(&volatile(), 300, 605, Suspicion::Blank);
    }

    /// Each in a process of its own, which lives for a minute; their machines' clocks differ by a second.
    #[test]
    fn processes_too_short_lived_to_count_a_quarantine_end_it_together() {
        let says = |at: u64| Facts { time_micros: (999_999 + at) * 1_000_000, ..volatile() };
        let mut first = Bench::new(None);
        first.assert_waits(&says(0), 0, 305, Suspicion::Blank);
        let marker = first.marker;
        for at in (60..=300).step_by(60) {
            Bench::new(marker.clone()).assert_waits(&says(at), at, 305, Suspicion::Blank);
        }
        assert!(!Bench::new(marker.clone()).is_admitted(&says(304), 304));
        assert!(Bench::new(marker.clone()).is_admitted(&says(305), 305));

        // What only one of the clocks says has not passed, and a jump of both after the first look is none of it.
        Bench::new(marker.clone()).assert_waits(&says(308), 300, 605, Suspicion::Blank);
        Bench::new(marker.clone()).assert_waits(&says(0), 400, 705, Suspicion::Blank);
        let mut jumped = Bench::new(marker.clone());
        jumped.assert_waits(&says(10), 10, 305, Suspicion::Blank);
        jumped.assert_waits(&says(500), 20, 305, Suspicion::Blank);

        let copied = Facts { replication_id: "b".repeat(40), was_replica: true, ..says(400) };
        Bench::new(marker).assert_waits(&copied, 400, 705, Suspicion::Copied);
    }

    #[test]
    fn a_marker_nobody_can_read_waits_and_one_of_another_configuration_is_refused() {
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
                    Bench::new(Some(foreign.to_owned())).look(&volatile(), 0),
                    NextStep::Refuse(_)
                ),
                "{foreign}"
            );
        }
    }

    #[test]
    fn the_wait_covers_what_tokens_may_be_ahead_however_short_locks_are() {
        let s = Duration::from_secs(2);
        assert_eq!(quarantine(MAX_TTL, s), Duration::from_secs(305));
        assert_eq!(quarantine(Duration::from_millis(100), s), s * 2 + NAME_MOVES_WITHIN);
    }

    #[test]
    fn generations_differ_in_nodes_max_ttl_and_skew_not_in_node_order() {
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
        assert!(
            conflict.contains("max_ttl 600000 ms") && conflict.contains("max_ttl 300000 ms"),
            "{conflict}"
        );
    }

    #[test]
    fn a_marker_without_clock_skew_is_refused_and_read_for_a_change() {
        let ours = cluster_config();
        let node = ours.identity("a:1").admitting(&volatile(), 0);
        let node = node.strip_prefix(ours.marker_prefix()).expect("its beginning");
        let older = format!("v1:{}:{}:{node}", ours.node_set(), MAX_TTL.as_millis());
        let NextStep::Refuse(why) = Bench::new(Some(older.clone())).look(&volatile(), 0) else {
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
