//! The state that all operations of one process share: nodes, quorum, settings, token clock,
//! pending releases. Beside it stand the steps that several operations use: ask every node, send a
//! release, report the nodes' answers.

use std::sync::Arc;
use std::time::Duration;

use crate::cluster::schedule::Scheduled;
use crate::cluster::{catch_up, recovery};
use crate::error::{LockError, NodeAnswer, NodeReport};
use crate::model::clock::HybridClock;
use crate::model::quorum::Quorum;
use crate::model::slots::SlotSet;
use crate::model::types::{LockName, LockToken, Ttl};
use crate::model::validity::{self, Lease};
use crate::node::{Effect, Failure, Keys, Node, Op, Reason, Vote};
use crate::round::pending_releases::{PendingReleases, ReleaseAccount};
use crate::round::repair::Repairs;
use crate::round::times::RoundTimes;
use crate::round::votes::{self, can_hold, holds};
use crate::round::{PreparedRound, Round, RoundLimits, RoundOutcome};
use crate::settings::{Env, Settings, SettingsError};
use crate::wait::fairness::Fairness;

/// The bits of all nodes, for the `mask` of [`Shared::release_on`].
pub(crate) const ALL_NODES: u32 = u32::MAX;
/// How long a round waits for the answers of a quorum, or a tenth of its TTL if that is less. On a
/// busy disk, one write (fsync) may take some hundred milliseconds. The wait ends before a node
/// loses its connection, which happens when a call has no answer for a second.
const QUORUM_PATIENCE: Duration = Duration::from_millis(800);

pub(crate) struct Shared {
    pub(crate) nodes: Arc<[Arc<dyn Node>]>,
    pub(crate) quorum: Quorum,
    pub(crate) settings: Settings,
    pub(crate) env: Env,
    pub(crate) tokens: HybridClock,
    pub(crate) pending: Arc<PendingReleases>,
    pub(crate) fairness: Arc<Fairness>,
    pub(crate) round_times: RoundTimes,
    /// Repairs extended locks. `None` in tests that switch the repair off.
    pub(crate) repairs: Option<Arc<Repairs>>,
    /// The background tasks of recovery and of catching up. `None` unless all nodes have links to
    /// Redis masters.
    _scheduled: [Option<Scheduled>; 2],
}

impl Shared {
    /// Must be called on a tokio runtime.
    pub(crate) fn new(
        nodes: Vec<Arc<dyn Node>>,
        settings: Settings,
        env: Env,
    ) -> Result<Arc<Self>, SettingsError> {
        let quorum = settings.check(nodes.iter().map(|node| node.name()))?;
        let of_locks = settings.max_ttl.duration();
        for node in &nodes {
            if let Some(of_node) = node.max_ttl().filter(|of_node| *of_node != of_locks) {
                return Err(SettingsError::MaxTtl {
                    node: node.name().to_owned(),
                    of_node,
                    of_locks,
                });
            }
        }
        let pending = PendingReleases::start(
            &nodes,
            env.observer.clone(),
            of_locks,
            settings.node.max_clock_skew,
            settings.max_pending_release_bytes,
        );
        let tokens = HybridClock::new(env.clock.clone(), settings.node.max_clock_skew);
        let fairness = Arc::new(Fairness::new(env.entropy.as_ref()));
        let _scheduled = [
            recovery::start(&nodes, quorum, &settings, &env),
            catch_up::start(&nodes, quorum, &settings, &env),
        ];
        let nodes: Arc<[Arc<dyn Node>]> = nodes.into();
        let repairs = settings.node.rules().missing_is_repaired.then(|| {
            Arc::new(Repairs {
                nodes: nodes.clone(),
                observer: env.observer.clone(),
                clock: env.clock.clone(),
                drift_factor: settings.drift_factor,
            })
        });
        Ok(Arc::new(Self {
            nodes,
            quorum,
            settings,
            env,
            tokens,
            pending,
            fairness,
            round_times: RoundTimes::default(),
            repairs,
            _scheduled,
        }))
    }

    /// The keys of these slots of each of these locks.
    pub(crate) fn keys_of_grant(&self, names: &[LockName], slots: SlotSet) -> Keys {
        if let ([name], SlotSet::FIRST) = (names, slots) {
            return self.keys(name);
        }
        let of_name = |name| slots.iter().map(move |slot| self.keys_of_slot((name, slot)));
        let mut all = names.iter().flat_map(of_name);
        let first = all.next().expect("a grant has a lock");
        first.with(all)
    }

    /// The keys of one slot of a lock.
    pub(crate) fn keys_of_slot(&self, (name, slot): (&LockName, u16)) -> Keys {
        if slot == 1 { self.keys(name) } else { self.keys(&name.of_slot(slot)) }
    }

    pub(crate) fn keys(&self, name: &LockName) -> Keys {
        Keys::new(&self.settings.key_prefix, name)
    }

    pub(crate) fn check_ttl(&self, asked: Ttl) -> Result<(), LockError> {
        let max = self.settings.max_ttl;
        if asked > max { Err(LockError::TtlTooLong { asked, max }) } else { Ok(()) }
    }

    /// Refuses a TTL of which a tenth is too short for a round at the present speed of rounds.
    pub(crate) fn check_rounds(&self, asked: Ttl) -> Result<(), LockError> {
        let limit = asked.duration() / 10;
        // With such a TTL, a round already gets its full time.
        if limit >= self.untimed_limits().quorum {
            return Ok(());
        }
        match self.round_times.too_long_for(limit, || self.env.clock.monotonic()) {
            Some((round, least)) if least <= self.settings.max_ttl => {
                Err(LockError::TtlTooShort { asked, round, least })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// The time limits of a round: at most a tenth of the TTL, so that a round with hung nodes
    /// leaves most of the lease.
    pub(crate) fn round_limits(&self, ttl: Ttl) -> RoundLimits {
        let RoundLimits { rest, quorum } = self.untimed_limits();
        let tenth = ttl.duration() / 10;
        RoundLimits { rest: rest.min(tenth), quorum: quorum.min(tenth) }
    }

    /// The time limits of a round that uses up no lease.
    pub(crate) fn untimed_limits(&self) -> RoundLimits {
        let rest = self.settings.node_timeout;
        RoundLimits { rest, quorum: rest.max(QUORUM_PATIENCE) }
    }

    /// Whether answers to a request that began at `started` still count at `now`. Recovery makes
    /// later answers unsafe, see [`validity::longest_round`].
    pub(crate) fn counts(&self, started: Duration, now: Duration) -> bool {
        let longest = validity::longest_round(self.settings.node.max_clock_skew);
        now.saturating_sub(started) <= longest
    }

    /// Asks all nodes what they store for a lock.
    pub(crate) fn inspect(&self, keys: Keys, limits: RoundLimits) -> Arc<Round> {
        Round::prepare(self.quorum, Op::Inspect { keys }, limits, &self.env.observer, None)
            .ask(&self.nodes, ALL_NODES)
    }

    /// The votes of a refused round, once they show whether one holder has a majority. If the
    /// refusals name different holders, the outstanding votes decide, so this waits for them.
    pub(crate) async fn clear_votes(&self, round: &Round) -> Vec<Option<Vote>> {
        let clear =
            |votes: &[Option<Vote>]| holds(self.quorum, votes) || !can_hold(self.quorum, votes);
        round.votes_until(clear).await
    }

    /// Sends a release to the nodes whose bit is set.
    pub(crate) fn release_on(&self, op: Arc<Op>, mask: u32, client: &ReleaseAccount) -> Arc<Round> {
        self.release_round(op, client).ask(&self.nodes, mask)
    }

    /// A release that is not sent yet.
    pub(crate) fn release_round(&self, op: Arc<Op>, client: &ReleaseAccount) -> PreparedRound {
        // A node grants a T up to max_clock_skew ahead of its clock, but sets a tombstone only for
        // a T up to half of that ahead. So the release of a T in between fails at first, and stays
        // pending until the node's clock has come closer to T. No node has granted a T further
        // ahead than max_clock_skew, so the release of such a T does not stay pending.
        let (t, is_of_holder) = match op.as_ref() {
            Op::Release { record, scope, .. } => (record.fencing(), scope.is_of_holder()),
            _ => (None, false),
        };
        let owe_clock = t.is_some_and(|t| self.tokens.is_credible(t));
        // A release is useful even if it arrives late, so nodes may run it for as long as a lock
        // may live.
        let limits = (self.untimed_limits(), self.settings.max_ttl.duration());
        let round = Round::prepare_release(
            self.quorum,
            op,
            limits,
            &self.env.observer,
            (&self.pending, client),
            owe_clock,
        );
        if is_of_holder { round.in_parts() } else { round }
    }

    pub(crate) fn lease(
        &self,
        token: LockToken,
        ttl: Ttl,
        started: Duration,
        votes: &[Option<Vote>],
    ) -> Lease {
        let agreed = |vote: &Vote| matches!(vote, Vote::Granted | Vote::Extended { .. });
        // Nothing is promised beyond `max_ttl`, even if nodes keep the key for longer. A master
        // that lost its data votes again after a quarantine that covers only `max_ttl`.
        let life = votes::life(self.quorum, ttl, votes).min(self.settings.max_ttl.duration());
        Lease {
            token,
            ttl,
            nodes_granted: votes::count(votes, agreed),
            nodes_total: self.nodes.len(),
            rounds: 1,
            ticket: None,
            replayed: false,
            started,
            drift: validity::drift(life, self.settings.drift_factor),
            life,
        }
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = String> {
        self.nodes.iter().map(|node| node.name().to_owned())
    }

    pub(crate) fn reports(&self, outcome: &RoundOutcome) -> Vec<NodeReport> {
        let answers = outcome.votes.iter().map(|vote| votes::answer(vote.as_ref()));
        self.names().zip(answers).map(|(node, answer)| NodeReport { node, answer }).collect()
    }

    /// The reports of a round that could not be begun, all with the same failure.
    pub(crate) fn reports_of(&self, reason: Reason, detail: &str) -> Vec<NodeReport> {
        let failure = || NodeAnswer::Failed(Failure::new(reason, Effect::None, detail));
        self.names().map(|node| NodeReport { node, answer: failure() }).collect()
    }
}
