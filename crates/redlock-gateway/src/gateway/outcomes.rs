//! Counts how operations end.

use std::time::{Duration, Instant};

use redlock_core::node::Reason;
use redlock_core::{LockError, NodeAnswer};

use crate::telemetry::{LockCounters, Operation, OutcomeLabel, WaitEnd};

/// Counts an acquire. `result` has the time that the deciding attempt took; `elapsed` is the time
/// of the whole request, with the wait for the lock.
pub(super) fn count_acquire(
    telemetry: LockCounters<'_>,
    result: Result<Duration, &LockError>,
    waits: bool,
    elapsed: Duration,
) {
    let outcome = outcome_of(result, OutcomeLabel::Granted);
    match (result, waits) {
        (_, false) => telemetry.acquire(outcome, elapsed),
        (Ok(decided_in), true) => {
            telemetry.acquire(outcome, decided_in);
            telemetry.waited(WaitEnd::Granted, elapsed);
        }
        (Err(LockError::Held(_)), true) => {
            telemetry.operation(Operation::Acquire, outcome);
            telemetry.waited(WaitEnd::TimedOut, elapsed);
        }
        (Err(LockError::NoQuorum(_) | LockError::Unknown(_)), true) => {
            telemetry.operation(Operation::Acquire, outcome);
            telemetry.waited(WaitEnd::NoQuorum, elapsed);
        }
        (Err(_), true) => telemetry.operation(Operation::Acquire, outcome),
    }
    result.err().into_iter().for_each(|error| count_failures(telemetry, Operation::Acquire, error));
}

/// Counts the failures of nodes that cost an operation its majority.
pub(super) fn count_failures(telemetry: LockCounters<'_>, operation: Operation, error: &LockError) {
    let (LockError::NoQuorum(reports) | LockError::Unknown(reports)) = error else { return };
    for report in reports {
        match &report.answer {
            NodeAnswer::Failed(failure) => telemetry.quorum_failure(operation, failure.reason),
            NodeAnswer::Agreed | NodeAnswer::Refused(_) | NodeAnswer::Pending => {}
        }
    }
    if reports.is_empty() {
        telemetry.quorum_failure(operation, Reason::Timeout);
    }
}

/// Whether an acquire that ended with this error has left nothing on the masters.
pub(super) fn leaves_nothing(error: &LockError) -> bool {
    use LockError::*;
    match error {
        Held(_)
        | HeldTooLong { .. }
        | TtlTooLong { .. }
        | TtlTooShort { .. }
        | TooManyWaiters { .. }
        | Superseded => true,
        NoQuorum(_) | Unknown(_) | Lost | NotHolder(_) => false,
    }
}

pub(super) fn outcome_of<T>(result: Result<T, &LockError>, success: OutcomeLabel) -> OutcomeLabel {
    match result {
        Ok(_) => success,
        Err(LockError::Held(_)) => OutcomeLabel::Held,
        Err(LockError::NoQuorum(_)) => OutcomeLabel::NoQuorum,
        Err(LockError::Lost) => OutcomeLabel::Lost,
        Err(LockError::NotHolder(_)) => OutcomeLabel::NotHolder,
        Err(LockError::Unknown(_)) => OutcomeLabel::Unknown,
        Err(LockError::HeldTooLong { .. } | LockError::TtlTooLong { .. }) => OutcomeLabel::Refused,
        Err(LockError::TtlTooShort { .. } | LockError::TooManyWaiters { .. }) => {
            OutcomeLabel::Refused
        }
        Err(LockError::Superseded) => OutcomeLabel::Refused,
    }
}

/// Guard that counts an acquire as cancelled if the client goes away before the decision.
pub(super) struct Cancelled<'a> {
    telemetry: LockCounters<'a>,
    started: Instant,
    waits: bool,
    is_armed: bool,
}

impl<'a> Cancelled<'a> {
    /// Makes the guard. It counts a cancelled acquire if it is dropped before [`Cancelled::ended`]
    /// is called.
    pub(super) fn unless_ended(telemetry: LockCounters<'a>, started: Instant, waits: bool) -> Self {
        Self { telemetry, started, waits, is_armed: true }
    }

    pub(super) fn ended(mut self) -> LockCounters<'a> {
        self.is_armed = false;
        self.telemetry
    }
}

impl Drop for Cancelled<'_> {
    fn drop(&mut self) {
        if !self.is_armed {
            return;
        }
        if self.waits {
            self.telemetry.operation(Operation::Acquire, OutcomeLabel::Cancelled);
            self.telemetry.waited(WaitEnd::Cancelled, self.started.elapsed());
        } else {
            self.telemetry.acquire(OutcomeLabel::Cancelled, self.started.elapsed());
        }
    }
}
