//! The schedule of a waiter in a queue: it makes an attempt when it is first in the queue and the
//! lock was released, or may have been.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::attempt::{AcquireParams, Attempt, AttemptError};
use super::attempts::{MAX_SPLIT_TRIES, RetrySchedule};
use super::backoff::Backoff;
use crate::error::{HeldBy, LockError};
use crate::model::validity::Lease;
use crate::node::HandoffRoute;
use crate::shared::Shared;
use crate::wait::places::PlacePermit;
use crate::wait::queue::Cause;
use crate::wait::ticket::{MayTry, Step, Success, WaitTicket};

/// Pauses are computed as if a round took at least this long.
const SHORTEST_ROUND: Duration = Duration::from_micros(500);
/// How long an attempt in flight may go on after the end of the wait.
const GRACE: Duration = Duration::from_millis(10);

pub(super) struct Queued<'a, F> {
    pub(super) shared: &'a Arc<Shared>,
    pub(super) params: AcquireParams,
    pub(super) ticket: WaitTicket<AcquireParams, Attempt>,
    /// The earliest time of the first attempt. Until then, waiters at other gateways may try.
    pub(super) first_try: Instant,
    pub(super) deadline: Instant,
    /// Called when the request begins to wait, which takes a slot.
    pub(super) on_wait: Option<F>,
    /// Whether the request has just arrived. A new request gets one whole attempt, however short
    /// its patience.
    pub(super) is_new: bool,
    /// Whether the request has made an attempt.
    pub(super) has_tried: bool,
    /// Whether an attempt has shown that the owner did not hold the lock. An attempt without a quorum
    /// shows nothing.
    pub(super) is_no_holder: bool,
    /// Attempts in a row that split the votes.
    pub(super) splits: u32,
    /// Attempts in a row that found a part of an earlier grant of this request.
    pub(super) parts: u32,
    pub(super) reason: WakeReason,
    /// The error of the last attempt for an earlier grant ([`WakeReason::OwnGrant`]).
    pub(super) own_error: Option<LockError>,
    /// Whether the request has asked for its own grant at the end of its wait.
    pub(super) asked_at_end: bool,
    /// Whether a newer request supersedes this one, which has left the queue.
    pub(super) is_superseded: bool,
}

/// Why the last attempt was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WakeReason {
    /// The lock was handed over.
    Handed,
    /// The waiter was first in its queue.
    First(Cause),
    /// An earlier request of the owner appears to have the lock, or may have it. The waiter asks
    /// without waiting for its turn.
    OwnGrant,
}

/// Whether no majority has answered.
fn is_undecided(error: &LockError) -> bool {
    matches!(error, LockError::NoQuorum(_) | LockError::Unknown(_))
}

/// Waits until the waiter is signalled, or until this time.
async fn signalled(ticket: &WaitTicket<AcquireParams, Attempt>, until: Instant) {
    let _ = timeout_at(until, poll_fn(|context| ticket.poll_signalled(context))).await;
}

impl<F> Queued<'_, F> {
    fn backoff(&self) -> Backoff<'_> {
        Backoff(self.shared.env.entropy.as_ref())
    }
}

impl<F: FnOnce() -> Result<T, LockError>, T: Into<PlacePermit>> Queued<'_, F> {
    /// Begins to wait, if a slot is free. If no slot is free, returns the error of the slot. But if
    /// an earlier attempt found no quorum, returns that error instead.
    fn take_slot(&mut self, now: Instant) -> Result<(), LockError> {
        let Some(on_wait) = self.on_wait.take() else { return Ok(()) };
        let full = match self.ticket.take_slot().and_then(|()| on_wait()) {
            Ok(permit) => {
                self.ticket.may_keep(permit.into());
                self.ticket.supersede_older(now);
                let is_useful = || {
                    self.splits == 0
                        && self.shared.fairness.others_wait(&self.params.keys.lock, now)
                        && self.shared.nodes.iter().any(|node| node.is_subscribed())
                };
                self.ticket.announce(now, is_useful);
                return Ok(());
            }
            Err(full) => full,
        };
        match self.last_error(now) {
            error if self.has_tried && is_undecided(&error) => Err(error),
            _ => Err(full),
        }
    }

    /// Ends the wait without a grant. Returns the queue's last refusal, with the place of this
    /// waiter. If that refusal names the waiter's own owner as the holder, or if the waiter has
    /// asked for its own grant since the end of its wait, returns the error of that attempt instead.
    fn end(&mut self, now: Instant) -> LockError {
        if self.params.owner_is_shared {
            // The place of a request that is too impatient to wait for a slot is kept, too.
            let _ = self.take_slot(now);
        }
        let error = self.last_error(now);
        let is_holder = self.ticket.owner_is_holder();
        let place = self.ticket.end(now);
        let error = match error {
            // The refusal is about the waiter's own grant and says nothing about other clients. An
            // earlier request may have got that grant, so nothing is certain without a quorum.
            LockError::Held(by) if is_holder || self.is_own(&by) => match self.own_error.take() {
                Some(LockError::NoQuorum(reports)) => LockError::Unknown(reports),
                Some(error) => error,
                None => LockError::Unknown(Vec::new()),
            },
            error @ LockError::NoQuorum(_) if self.has_tried => error,
            error @ (LockError::Held(_) | LockError::NoQuorum(_)) if self.asked_at_end => {
                match self.own_error.take() {
                    Some(LockError::NoQuorum(reports) | LockError::Unknown(reports)) => {
                        LockError::Unknown(reports)
                    }
                    Some(newer @ LockError::Held(_)) => newer,
                    _ => error,
                }
            }
            error => error,
        };
        match error {
            LockError::Held(by) => LockError::Held(HeldBy { line: place.map(Box::new), ..by }),
            error => error,
        }
    }

    /// Whether the waiter must read the lock before it is refused. The queue's last refusal may be too
    /// old: since then another gateway may have granted the lock to an earlier request of the owner.
    fn must_read(&self, now: Instant) -> bool {
        let is_unknown_anyway = self.has_tried && is_undecided(&self.last_error(now));
        self.params.owner_is_shared
            && !self.is_no_holder
            && !self.asked_at_end
            && !is_unknown_anyway
    }

    /// The error of a superseded waiter. Without a quorum, an earlier request of the owner may have
    /// the lock.
    fn superseded(&mut self, now: Instant) -> LockError {
        let own = self.own_error.take().filter(|_| self.asked_at_end);
        let last = || Some(self.last_error(now)).filter(|_| self.has_tried);
        match own.or_else(last).filter(|_| self.params.owner_is_shared) {
            Some(LockError::NoQuorum(reports) | LockError::Unknown(reports)) => {
                LockError::Unknown(reports)
            }
            _ => LockError::Superseded,
        }
    }

    fn ask_for_own(&mut self) -> Attempt {
        self.reason = WakeReason::OwnGrant;
        Attempt::new(self.shared, self.params.for_attempt()).for_own()
    }

    fn is_own(&self, by: &HeldBy) -> bool {
        let owner = Some(self.params.owner);
        let is_holder = by.owner == owner || by.holders().iter().any(|it| it.by.owner == owner);
        self.params.owner_is_shared && is_holder
    }

    fn last_error(&self, now: Instant) -> LockError {
        match self.ticket.last_refusal(now) {
            Some((LockError::Held(mut by), ago)) => {
                by.expires_in = by.expires_in.map(|left| left.saturating_sub(ago));
                LockError::Held(by)
            }
            Some((error, _)) => error,
            // Nobody in this queue was refused since the last grant, so an earlier request has the
            // lock, or is asking for it.
            None => LockError::Held(Default::default()),
        }
    }
}

impl<F: FnOnce() -> Result<T, LockError> + Send, T: Into<PlacePermit>> RetrySchedule
    for Queued<'_, F>
{
    async fn next(&mut self) -> Result<(Attempt, Option<Instant>), LockError> {
        loop {
            let now = Instant::now();
            if self.is_superseded {
                return Err(self.superseded(now));
            }
            // A request that has not asked yet asks once before it is refused, if it is first in line:
            // the lock may have been released since the last attempt of its queue.
            let may_try = if now < self.deadline {
                MayTry::InOrder
            } else if self.has_tried || now < self.first_try {
                MayTry::No
            } else if self.is_new {
                MayTry::Now
            } else {
                MayTry::AtEnd
            };
            let attempt = match self.ticket.step(now, may_try) {
                Step::Handed(attempt) => {
                    self.reason = WakeReason::Handed;
                    attempt
                }
                Step::AskForOwn => self.ask_for_own(),
                Step::Superseded => {
                    // It keeps nobody from the lock meanwhile.
                    self.ticket.end(now);
                    self.is_superseded = true;
                    if !self.must_read(now) {
                        return Err(self.superseded(now));
                    }
                    self.asked_at_end = true;
                    self.ask_for_own()
                }
                Step::Attempt(cause) => {
                    self.reason = WakeReason::First(cause);
                    let polls = self.ticket.standing().polls();
                    let newest = self.ticket.newest();
                    let fairness = &self.shared.fairness;
                    let hint = fairness.waiting(&self.params.keys.lock, polls, newest);
                    Attempt::new(self.shared, self.params.for_attempt()).announcing(hint)
                }
                // Waiters at other gateways may try first for a moment, even if this request's
                // patience is shorter.
                Step::WaitUntil(next)
                    if now < self.first_try
                        && !self.has_tried
                        && (now >= self.deadline || self.is_new && next == self.first_try) =>
                {
                    signalled(&self.ticket, self.first_try).await;
                    continue;
                }
                Step::Wait | Step::WaitUntil(_) | Step::Defer(_)
                    if now >= self.deadline && self.must_read(now) =>
                {
                    self.asked_at_end = true;
                    self.ask_for_own()
                }
                Step::Wait | Step::WaitUntil(_) | Step::Defer(_) if now >= self.deadline => {
                    return Err(self.end(now));
                }
                // The request stays new, so that it makes its attempt at its deadline at the latest.
                Step::Defer(until) => {
                    self.take_slot(now)?;
                    signalled(&self.ticket, until.min(self.deadline)).await;
                    continue;
                }
                later @ (Step::Wait | Step::WaitUntil(_)) => {
                    // After split votes the next attempt follows at once, without a slot.
                    if !(matches!(later, Step::WaitUntil(_))
                        && (1..=MAX_SPLIT_TRIES).contains(&self.splits))
                    {
                        self.take_slot(now)?;
                    }
                    let until = if let Step::WaitUntil(next) = later {
                        next.min(self.deadline)
                    } else {
                        self.deadline
                    };
                    signalled(&self.ticket, until).await;
                    self.is_new = false;
                    continue;
                }
            };
            // An attempt for the request's own grant gets its full time. So does the first attempt
            // of an owner that may have a grant. A cut-off attempt would not show whether the owner has
            // the lock. The only attempt of a request, made at the end of its wait, gets one round.
            let may_have_grant = self.params.owner_is_shared && !self.is_no_holder;
            let cut_off = if self.is_new || may_have_grant || self.reason == WakeReason::OwnGrant {
                now + self.params.ttl.duration()
            } else if may_try == MayTry::AtEnd {
                now + self.shared.round_limits(self.params.ttl).quorum + GRACE
            } else {
                self.deadline.max(now) + GRACE
            };
            return Ok((attempt, Some(cut_off)));
        }
    }

    fn failed(
        &mut self,
        failed: AttemptError,
        round: Duration,
        now: Instant,
    ) -> Result<(), LockError> {
        if let error @ LockError::HeldTooLong { .. } = failed.error {
            return Err(error);
        }
        // Another lock of the set is held. The request leaves this queue, so that the waiters
        // behind it can have this lock, and waits for the other lock. Or a part of an earlier
        // grant of this very request is held. The request must not wait for that part. A few
        // attempts first show that the part is not just being released.
        let held = if let LockError::Held(by) = &failed.error { Some(by) } else { None };
        let is_part = held.is_some_and(|by| by.is_part_of_own_set);
        self.parts = if is_part { self.parts + 1 } else { 0 };
        let is_tried = !failed.split || self.parts > MAX_SPLIT_TRIES;
        if held.is_some_and(|by| by.lock_of_set != 0) || is_part && is_tried {
            return Err(failed.error);
        }
        // The waiter has asked for its owner's grant beside the queue, so the queue does not
        // change.
        if self.reason == WakeReason::OwnGrant {
            self.is_new = false;
            // An earlier attempt may have found no grant of this owner. But another gateway may have
            // granted the owner the lock since then.
            self.is_no_holder &= !is_undecided(&failed.error);
            self.own_error = Some(failed.error);
            // The lock may have been handed over meanwhile, so `next` decides what follows.
            return Ok(());
        }
        (self.is_new, self.has_tried) = (false, true);
        // A handoff of a slot asks for that slot only. So its refusal does not show whether the
        // owner holds another slot.
        let looked_for_own = self.reason != WakeReason::Handed || self.params.slotted.is_none();
        if looked_for_own {
            self.is_no_holder |= !is_undecided(&failed.error);
            self.own_error = None;
        }
        self.splits = if failed.split { self.splits + 1 } else { 0 };
        let standing = self.ticket.standing();
        let round = round.max(SHORTEST_ROUND);
        // The queue shows its last refusal to every waiter, but the part is this request's own.
        let error = match failed.error {
            LockError::Held(by) if by.is_part_of_own_set => {
                self.own_error = Some(LockError::Held(by.clone()));
                LockError::Held(HeldBy { is_part_of_own_set: false, ..by })
            }
            error => error,
        };
        self.ticket
            .refused(now, self.backoff().after_refusal(error, standing, self.splits, round, now));
        Ok(())
    }

    fn cut_off(&mut self, now: Instant) -> LockError {
        // No attempt has shown that the owner lacks the lock, so the outcome is unknown.
        if self.params.owner_is_shared && !self.is_no_holder {
            (self.asked_at_end, self.own_error) = (true, Some(LockError::Unknown(Vec::new())));
        }
        self.end(now)
    }

    fn granted(self, lease: &mut Lease, round: Duration, now: Instant) {
        lease.ticket = self.ticket.number();
        let observer = &self.shared.env.observer;
        match self.reason {
            WakeReason::Handed | WakeReason::First(Cause::Release) => {
                observer.handed_over(HandoffRoute::Local)
            }
            WakeReason::First(Cause::Hint) => observer.handed_over(HandoffRoute::Remote),
            WakeReason::First(Cause::Poll) => {}
            // The waiter got its owner's grant beside the queue, so the queue does not change.
            WakeReason::OwnGrant => return self.ticket.served(now),
        }
        if matches!(self.reason, WakeReason::First(Cause::Hint | Cause::Poll)) {
            self.shared.fairness.quota_begins(&self.params.keys.lock, now);
        }
        let ends = self.backoff().after_expiry(now + self.params.ttl.duration());
        let shared_owner = self.params.owner_is_shared.then_some(self.params.owner);
        let round = round.max(SHORTEST_ROUND);
        self.ticket.granted(now, Success { shared_owner, ends, round });
    }
}
