//! Extends locks. After a majority has extended a lock, a repair sets it again on nodes that lost
//! it, see [`crate::round::repair`].
//!
//! An extension begins by asking all nodes, and ends with its outcome. Many extensions may begin
//! before the first outcome is awaited. They then share calls to the nodes. One task awaits them
//! all, so most of them need no timer and no wake-up of their own.

use std::convert::identity;
use std::sync::Arc;

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::error::LockError;
use crate::model::quorum::Decision;
use crate::model::slots::SlotSet;
use crate::model::types::{Info, LockName, LockToken, Owner, Ttl};
use crate::model::validity::Lease;
use crate::node::{Keys, Op, Record, ReleaseScope, Vote};
use crate::round::pending_releases::ReleaseAccount;
use crate::round::repair::Began;
use crate::round::votes::not_held;
use crate::round::{PreparedRound, PreparedRounds, Round};
use crate::shared::{ALL_NODES, Shared};

/// The rounds of extensions that begin together.
struct Rounds {
    began: Began,
    prepared: PreparedRounds,
}

impl Rounds {
    fn begin(shared: &Shared) -> Self {
        let clock = &shared.env.clock;
        let began = Began {
            monotonic: clock.monotonic(),
            at: Instant::now(),
            wall_micros: clock.wall_micros(),
        };
        Self { began, prepared: PreparedRounds::new() }
    }

    /// Prepares the extension of one lock, or of all locks of a set. `ask` says in which parts.
    fn prepare(
        &mut self,
        shared: &Shared,
        keys: Keys,
        token: &LockToken,
        ttl: Ttl,
        ask: impl FnOnce(PreparedRound) -> PreparedRound,
    ) -> OfEachLock<OneExtension> {
        let began = self.began;
        let repairs = shared.repairs.clone().map(|repairs| (repairs, began));
        let record = Record::new(token, &Info::default());
        let op = Op::Extend { keys, record, ttl, began_micros: began.wall_micros };
        let limits = shared.round_limits(ttl);
        let prepared = Round::prepare(shared.quorum, op, limits, &shared.env.observer, repairs);
        let prepared = ask(prepared);
        let one =
            |round: &Arc<Round>| OneExtension { token: *token, ttl, began, round: round.clone() };
        let each = prepared.rounds().map(one).collect();
        self.prepared.push(prepared);
        each
    }

    fn ask(self, shared: &Shared) {
        PreparedRound::ask_all(self.prepared, &shared.nodes);
    }
}

/// One `T` for each lock of an operation, in the order of [`Keys::each`]. Most operations are on one
/// lock.
pub(crate) type OfEachLock<T> = SmallVec<[T; 1]>;

/// The extension of a lock, or of every slot that its token has. All nodes have been asked.
pub(crate) enum Extension {
    Refused(LockError),
    One(OneExtension),
    Slots(SlotSet, OfEachLock<OneExtension>),
}

impl Extension {
    pub(crate) fn begin(shared: &Shared, name: &LockName, token: &LockToken, ttl: Ttl) -> Self {
        let mut rounds = Rounds::begin(shared);
        let extension = Self::prepare(shared, (name, token), ttl, &mut rounds);
        rounds.ask(shared);
        extension
    }

    /// Begins many extensions. Each node gets all questions together, and puts as many into one
    /// call as fit.
    pub(crate) fn begin_many(
        shared: &Shared,
        leases: &[(&LockName, &LockToken)],
        ttl: Ttl,
    ) -> Vec<Self> {
        let mut rounds = Rounds::begin(shared);
        rounds.prepared.reserve(leases.len());
        let prepare =
            |lease: &(&LockName, &LockToken)| Self::prepare(shared, *lease, ttl, &mut rounds);
        let extensions = leases.iter().map(prepare).collect();
        rounds.ask(shared);
        extensions
    }

    fn prepare(
        shared: &Shared,
        (name, token): (&LockName, &LockToken),
        ttl: Ttl,
        rounds: &mut Rounds,
    ) -> Self {
        // Recovery stores records that keep a lock free after a loss of data. They have this owner,
        // and anybody can make a token with it.
        if *token.owner() == Owner::NOBODY {
            return Self::Refused(LockError::Lost);
        }
        if let Err(error) = shared.check_ttl(ttl) {
            return Self::Refused(error);
        }
        let keys = shared.keys_of_grant(std::slice::from_ref(name), token.slots());
        let mut each = rounds.prepare(shared, keys, token, ttl, PreparedRound::in_parts);
        match each.len() {
            1 => Self::One(each.remove(0)),
            _ => Self::Slots(token.slots(), each),
        }
    }

    /// The lease. That of slots ends with the first of them.
    ///
    /// # Errors
    /// If a slot is lost, the lease is lost with it. `on_unused` is then called with the slots that
    /// this call has extended, because nobody will use them. For the other slots the token may be
    /// invented.
    pub(crate) async fn outcome(
        self,
        shared: &Shared,
        on_unused: impl Fn(SlotSet) + Send,
    ) -> Result<Lease, LockError> {
        match self {
            Self::Refused(error) => Err(error),
            Self::One(one) => one.outcome(shared).await,
            // Boxed, because an unboxed future would make every extension larger.
            Self::Slots(slots, begun) => {
                Box::pin(outcome_of_slots(shared, slots, begun, on_unused)).await
            }
        }
    }
}

async fn outcome_of_slots(
    shared: &Shared,
    slots: SlotSet,
    begun: OfEachLock<OneExtension>,
    on_unused: impl Fn(SlotSet) + Send,
) -> Result<Lease, LockError> {
    let mut first: Option<Lease> = None;
    let (mut lost, mut unknown, mut extended) = (None, None, Vec::new());
    for (slot, one) in slots.iter().zip(begun) {
        match one.outcome(shared).await {
            Ok(lease) => {
                extended.push(slot);
                let ends_first = first.as_ref().is_none_or(|first| lease.ends_before(first));
                first = if ends_first { Some(lease) } else { first };
            }
            Err(error @ (LockError::Lost | LockError::NotHolder(_))) => lost = Some(error),
            Err(error) => unknown = Some(error),
        }
    }
    // A lost slot is certain. An unknown outcome is not.
    if let Some(lost) = lost {
        SlotSet::new(extended).into_iter().for_each(on_unused);
        return Err(lost);
    }
    match (unknown, first) {
        (None, Some(lease)) => Ok(lease),
        (unknown, _) => Err(unknown.unwrap_or(LockError::Lost)),
    }
}

/// Extends each lock of a set.
pub(crate) async fn extend_each(
    shared: &Shared,
    keys: &Keys,
    token: &LockToken,
    ttl: Ttl,
) -> OfEachLock<Result<Lease, LockError>> {
    let mut rounds = Rounds::begin(shared);
    let begun = rounds.prepare(shared, keys.clone(), token, ttl, identity);
    rounds.ask(shared);
    let mut results = OfEachLock::with_capacity(begun.len());
    for one in begun {
        results.push(one.outcome(shared).await);
    }
    results
}

/// Extends each lock of a set. In the same call, each node first gets the undo of the grant, which
/// spares a lock that is marked as extended.
///
/// # Errors
/// A refusal is final only at a node that has carried out the undo. Any other node may still grant
/// an acquire of this grant that arrives late. If too few refusals are final, the outcome is
/// unknown.
pub(crate) async fn extend_after_undo(
    shared: &Shared,
    keys: &Keys,
    token: &LockToken,
    ttl: Ttl,
    client: &ReleaseAccount,
) -> OfEachLock<Result<Lease, LockError>> {
    let mut rounds = Rounds::begin(shared);
    let begun = rounds.prepare(shared, keys.clone(), token, ttl, identity);
    let undo = Op::Release {
        keys: keys.clone(),
        record: Record::new(token, &Info::default()),
        scope: ReleaseScope::Proposal,
        tell: None,
    };
    let undo = shared.release_round(Arc::new(undo), client);
    let extension = rounds.prepared.pop().expect("one was prepared");
    let undo = undo.ask_before(&shared.nodes, ALL_NODES, extension);
    let mut results = OfEachLock::with_capacity(begun.len());
    for one in begun {
        let round = one.round.clone();
        let mut result = one.outcome(shared).await;
        if let Err(LockError::Lost | LockError::NotHolder(_)) = &result {
            // A node's vote on the undo comes before its vote on the extension.
            let undone = undo.read(<[_]>::to_vec);
            let refused = round.read(<[_]>::to_vec);
            let is_final = |(undone, refused): &(Option<Vote>, Option<Vote>)| {
                !matches!(undone, None | Some(Vote::Failed(_)))
                    && matches!(refused, Some(Vote::Held(_) | Vote::Missing))
            };
            let refused = undone.into_iter().zip(refused).filter(is_final).count();
            if refused < shared.quorum.blocking() {
                let outcome = round.outcome_of(Decision::Neither);
                result = Err(LockError::Unknown(shared.reports(&outcome)));
            }
        }
        results.push(result);
    }
    results
}

/// The extension of one lock or slot.
pub(crate) struct OneExtension {
    token: LockToken,
    ttl: Ttl,
    began: Began,
    round: Arc<Round>,
}

impl OneExtension {
    async fn outcome(self, shared: &Shared) -> Result<Lease, LockError> {
        let Self { token, ttl, began, round } = self;
        let started = began.monotonic;
        match round.decided().await {
            Decision::Yes => {
                let lease = round.read(|votes| shared.lease(token, ttl, started, votes));
                // A majority has extended the lock. But if the answers took too long, nothing can
                // be promised.
                let now = shared.env.clock.monotonic();
                let left = lease.validity(now);
                left.filter(|_| shared.counts(started, now)).map(|_| lease).ok_or_else(|| {
                    LockError::Unknown(shared.reports(&round.outcome_of(Decision::Yes)))
                })
            }
            Decision::No => Err(not_held(shared.quorum, &shared.clear_votes(&round).await)),
            open @ (Decision::Neither | Decision::Open) => {
                Err(LockError::Unknown(shared.reports(&round.outcome_of(open))))
            }
        }
    }
}
