//! Tests the checker with handwritten histories: one without a violation, and one for each
//! violation.

use super::*;
use crate::history::{Execution, Leftover, Operation, Reach, Remaining, Waited, Write};

fn moment(at_ms: u64) -> Moment {
    Moment { seq: at_ms, at: Duration::from_millis(at_ms) }
}

fn grant(owner: u64, fencing: u64) -> Grant {
    Grant { owner, fencing, nonce: 0 }
}

/// A history of lock 0 and client 0, with at most one event in each millisecond.
#[derive(Default)]
struct Script(History);

impl Script {
    fn ask(mut self, start: u64, end: u64, request: Request, answer: Answer) -> Self {
        self.0.operations.push(Operation {
            start: moment(start),
            end: Some(moment(end)),
            client: 0,
            gateway: 0,
            process: 1,
            name: 0,
            request,
            keeps: true,
            answer: Some(answer),
            waited: None,
        });
        self
    }

    fn waits(self, start: u64, end: u64, patience: u64, answer: Answer) -> Self {
        self.ask(
            start,
            end,
            Request::Acquire { owner: None, ttl_ms: 1_000, patience_ms: Some(patience) },
            answer,
        )
    }

    /// A grant to a client that waited in the queue.
    fn served(self, start: u64, end: u64, ticket: u64, grant: Grant) -> Self {
        let held_for = Duration::from_millis(5);
        let mut script =
            self.waits(start, end, 5_000, Answer::Granted { grant, held_for, replayed: false });
        let waited = Waited { ticket: Some(ticket), rounds: 1 };
        script
            .0
            .operations
            .iter_mut()
            .last()
            .into_iter()
            .for_each(|last| last.waited = Some(waited));
        script
    }

    fn granted(self, start: u64, end: u64, grant: Grant, for_ms: u64) -> Self {
        let held_for = Duration::from_millis(for_ms);
        let request = Request::Acquire { owner: None, ttl_ms: for_ms, patience_ms: None };
        self.ask(start, end, request, Answer::Granted { grant, held_for, replayed: false })
    }

    fn extended(self, start: u64, end: u64, grant: Grant, for_ms: u64) -> Self {
        let held_for = Duration::from_millis(for_ms);
        self.ask(
            start,
            end,
            Request::Extend { grant, ttl_ms: for_ms },
            Answer::Extended { held_for },
        )
    }

    fn released(self, start: u64, end: u64, grant: Grant) -> Self {
        self.ask(start, end, Request::Release { grant }, Answer::Released)
    }

    fn writes(mut self, at: u64, grant: Grant, accepted: bool) -> Self {
        self.0.writes.push(Write { moment: moment(at), name: 0, grant, accepted });
        self
    }

    fn lands(
        mut self,
        at: u64,
        master: u8,
        kind: OpKind,
        grant: Grant,
        vote_kind: VoteKind,
    ) -> Self {
        self.0.executions.push(Execution {
            moment: moment(at),
            master,
            gateway: 0,
            late: false,
            name: 0,
            kind,
            grant: Some(grant),
            ahead_micros: 0,
            vote_kind,
        });
        self
    }

    fn left(mut self, master: u8, grant: Grant) -> Self {
        self.0.leftovers.push(Leftover {
            master,
            name: 0,
            grant,
            expires_in: Duration::from_millis(100),
        });
        self
    }

    /// Ends the history at `end`. Gateway 0 has run since `started` and has let master 0 vote since
    /// `admitted`.
    fn ends(mut self, end: u64, started: u64, admitted: u64) -> Self {
        let [end, started, admitted] = [end, started, admitted].map(Duration::from_millis);
        self.0.end = end;
        self.0.reaches.push(Reach { gateway: 0, master: 0, started, admitted });
        self
    }

    #[track_caller]
    fn finds(self, demands: &[Demand]) {
        let found = check(&self.0);
        let kinds: Vec<Demand> = found.iter().map(|violation| violation.demand).collect();
        assert_eq!(kinds, demands, "{found:#?}");
    }
}

const A: u64 = 1 << 60;
const B: u64 = 2 << 60;

#[test]
fn a_good_history_passes() {
    Script::default()
        .granted(1, 10, grant(A, 5), 100)
        .writes(20, grant(A, 5), true)
        .extended(50, 60, grant(A, 5), 100)
        .released(70, 80, grant(A, 5))
        .lands(75, 0, OpKind::Release, grant(A, 5), VoteKind::Released)
        .granted(71, 90, grant(B, 6), 50)
        .writes(100, grant(B, 6), true)
        .writes(101, grant(A, 5), false)
        // No client releases the lock: the next grant follows the end of the hold.
        .granted(120, 140, grant(A, 7), 50)
        .lands(141, 0, OpKind::Acquire, grant(A, 7), VoteKind::Granted)
        .left(0, grant(A, 7))
        .finds(&[]);
}

#[test]
fn two_holders_at_one_time() {
    let first = || Script::default().granted(1, 10, grant(A, 5), 100);
    first().granted(50, 109, grant(B, 6), 50).finds(&[Demand::Exclusion]);
    first().granted(50, 110, grant(B, 6), 50).finds(&[]);
    first().granted(50, 109, grant(A, 6), 50).finds(&[]);
    first()
        .extended(90, 100, grant(A, 5), 100)
        .granted(120, 150, grant(B, 6), 50)
        .finds(&[Demand::Exclusion]);
    first()
        .granted(2, 60, grant(B, 6), 50)
        .released(61, 70, grant(A, 5))
        .finds(&[Demand::Exclusion]);
}

#[test]
fn sent_release_ends_its_hold_but_not_a_newer_grants() {
    let again =
        || Script::default().granted(1, 10, grant(A, 5), 100).granted(20, 30, grant(A, 7), 100);
    again()
        .released(40, 45, grant(A, 5))
        .granted(46, 60, grant(B, 8), 50)
        .finds(&[Demand::Exclusion]);
    again().released(40, 45, grant(A, 7)).granted(46, 60, grant(B, 8), 50).finds(&[]);
    let late = again().released(40, 50, grant(A, 7)).extended(39, 51, grant(A, 7), 100);
    late.granted(52, 60, grant(B, 8), 50).finds(&[]);
}

#[test]
fn lapsed_hold_has_a_gap_before_its_extension() {
    let lapsed =
        || Script::default().granted(1, 10, grant(A, 5), 20).extended(40, 50, grant(A, 5), 20);
    lapsed().granted(51, 71, grant(B, 6), 5).finds(&[]);
    lapsed().granted(31, 35, grant(B, 6), 5).finds(&[Demand::Extension]);
}

#[test]
fn tokens_that_do_not_grow() {
    let first = || Script::default().granted(1, 10, grant(A, 5), 5);
    first().granted(20, 30, grant(B, 5), 5).finds(&[Demand::Fencing]);
    first().granted(20, 30, grant(B, 4), 5).finds(&[Demand::Fencing]);
    first().granted(20, 30, grant(A, 5), 5).finds(&[Demand::Fencing]);
    // The second request was sent before the first was answered, so their tokens may have any
    // order.
    first().granted(9, 30, grant(B, 4), 5).finds(&[]);
    first()
        .granted(9, 30, grant(B, 4), 5)
        .granted(31, 40, grant(A, 5), 5)
        .finds(&[Demand::Fencing]);
}

#[test]
fn registers_that_take_stale_writes_or_refuse_the_holder() {
    let two = || Script::default().granted(1, 10, grant(A, 7), 5).granted(2, 20, grant(B, 6), 50);
    two().writes(30, grant(B, 6), true).writes(31, grant(A, 7), true).finds(&[Demand::Register]);
    two().writes(16, grant(A, 7), true).writes(31, grant(B, 6), false).finds(&[Demand::Register]);
    two().writes(31, grant(A, 7), false).finds(&[]);
}

#[test]
fn released_locks_that_come_back() {
    let reached =
        |vote_kind| Script::default().lands(10, 0, OpKind::Release, grant(A, 5), vote_kind);
    for vote_kind in [VoteKind::Released, VoteKind::Missing, VoteKind::Held] {
        reached(vote_kind)
            .lands(20, 0, OpKind::Acquire, grant(A, 5), VoteKind::Granted)
            .finds(&[Demand::Orphan]);
    }
    reached(VoteKind::Missing)
        .lands(20, 0, OpKind::Acquire, grant(A, 4), VoteKind::Granted)
        .finds(&[Demand::Orphan]);
    reached(VoteKind::Missing)
        .lands(20, 0, OpKind::Repair, grant(A, 5), VoteKind::Granted)
        .finds(&[Demand::Orphan]);
    reached(VoteKind::Missing).left(0, grant(A, 5)).finds(&[Demand::Orphan]);
    let mut lost = reached(VoteKind::Missing).left(0, grant(A, 5));
    lost.0.losses.push((moment(15), 0));
    lost.finds(&[]);
    reached(VoteKind::Missing)
        .lands(20, 0, OpKind::Acquire, grant(A, 5), VoteKind::Stale)
        .finds(&[]);
    reached(VoteKind::Missing)
        .lands(20, 0, OpKind::Acquire, grant(A, 6), VoteKind::Granted)
        .finds(&[]);
    reached(VoteKind::Missing)
        .lands(20, 0, OpKind::Acquire, grant(B, 4), VoteKind::Granted)
        .finds(&[]);
    reached(VoteKind::Missing)
        .lands(20, 1, OpKind::Acquire, grant(A, 5), VoteKind::Granted)
        .left(1, grant(A, 5))
        .finds(&[]);
    reached(VoteKind::Clock)
        .lands(20, 0, OpKind::Acquire, grant(A, 5), VoteKind::Granted)
        .finds(&[]);
}

#[test]
fn releases_delivered_too_late() {
    let sent = |left| {
        Script::default()
            .granted(1, 10, grant(A, 5), 100)
            .released(20, 30, grant(A, 5))
            .left(0, left)
    };
    sent(grant(A, 5)).ends(2_500, 0, 100).finds(&[Demand::Orphan]);
    sent(grant(A, 4)).ends(2_500, 0, 100).finds(&[Demand::Orphan]);
    sent(grant(A, 6)).ends(2_500, 0, 100).finds(&[]);
    sent(grant(B, 5)).ends(2_500, 0, 100).finds(&[]);
    // Three reasons why an undelivered release is no violation: the master was admitted only just
    // now, the gateway with the release has died, or the release was sent too short a time ago.
    sent(grant(A, 5)).ends(2_500, 0, 600).finds(&[]);
    sent(grant(A, 5)).ends(2_500, 25, 100).finds(&[]);
    sent(grant(A, 5)).ends(2_310, 0, 0).finds(&[]);
}

#[test]
fn an_extension_across_another_grant() {
    Script::default()
        .granted(1, 10, grant(A, 5), 20)
        .granted(30, 35, grant(B, 6), 2)
        .extended(40, 50, grant(A, 5), 20)
        .finds(&[Demand::Extension]);
}

#[test]
fn a_lock_that_was_extended_in_time_and_lost() {
    let asked = Request::Extend { grant: grant(A, 5), ttl_ms: 100 };
    let first = || Script::default().granted(1, 10, grant(A, 5), 100);
    first().ask(20, 30, asked, Answer::Lost).finds(&[Demand::Kept, Demand::Promised]);
    first().ask(20, 30, asked, Answer::NotHolder).finds(&[Demand::Kept, Demand::Promised]);
    first().ask(20, 30, asked, Answer::Unknown).finds(&[]);
}

#[test]
fn a_repetition_of_the_holder_that_is_refused() {
    let of = |owner| Request::Acquire { owner: Some(owner), ttl_ms: 100, patience_ms: None };
    let first = || Script::default().granted(1, 10, grant(A, 5), 100);
    first().ask(20, 30, of(A), Answer::Held).finds(&[Demand::Promised]);
    first().ask(20, 30, of(B), Answer::Held).finds(&[]);
    first().ask(20, 30, of(A), Answer::Unknown).finds(&[]);
    // The lock was not held all the time.
    first().ask(5, 30, of(A), Answer::Held).finds(&[]);
    first().ask(20, 120, of(A), Answer::Held).finds(&[]);
}

#[test]
fn a_waiter_that_is_overtaken_in_its_own_queue() {
    let two = |first, second| Script::default().served(1, 20, 1, first).served(2, 40, 2, second);
    two(grant(A, 5), grant(B, 6)).finds(&[]);
    two(grant(A, 6), grant(B, 5)).finds(&[Demand::Order]);
    let mut elsewhere = two(grant(A, 6), grant(B, 5));
    elsewhere.0.operations[1].process = 2;
    elsewhere.finds(&[]);
    let mut keyed = two(grant(A, 6), grant(B, 5));
    keyed.0.operations[1].request =
        Request::Acquire { owner: Some(B), ttl_ms: 100, patience_ms: Some(5_000) };
    keyed.finds(&[]);
}

#[test]
fn a_waiter_that_is_stuck() {
    let late = |end| Script::default().waits(1, end, 10_000, Answer::Held);
    // The answer may come one round and 15 ms after the end of the wait.
    late(10_116).finds(&[]);
    late(10_117).finds(&[Demand::Answered]);
    // An attempt for the owner's own grant may begin just before the wait ends.
    let keyed = |end| {
        let mut keyed = late(end);
        keyed.0.operations[0].request =
            Request::Acquire { owner: Some(A), ttl_ms: 1_000, patience_ms: Some(10_000) };
        keyed
    };
    keyed(11_016).finds(&[]);
    keyed(11_017).finds(&[Demand::Answered]);
    // A request gets one whole attempt, even if the attempt takes longer than the patience.
    Script::default().waits(1, 400, 100, Answer::Held).finds(&[]);
    let mut never = late(10_015).ends(20_000, 0, 0);
    (never.0.operations[0].end, never.0.operations[0].answer) = (None, None);
    never.finds(&[Demand::Answered]);
    let mut left = Script::default();
    left.0.remaining.push(Remaining { gateway: 0, waiters: 1, locks: 1 });
    left.finds(&[Demand::Answered]);
}

#[test]
fn a_lock_that_stays_free_while_a_client_waits() {
    let held =
        || Script::default().granted(1, 10, grant(A, 5), 500).released(100, 110, grant(A, 5));
    held().served(50, 1_250, 1, grant(B, 6)).finds(&[]);
    held().served(50, 1_251, 1, grant(B, 6)).finds(&[Demand::Idle]);
    held().waits(50, 1_400, 1_400, Answer::Held).ends(1_500, 0, 0).finds(&[Demand::Idle]);
    held()
        .waits(50, 1_100, 1_050, Answer::Held)
        .waits(1_101, 2_100, 1_000, Answer::Held)
        .ends(2_200, 0, 0)
        .finds(&[]);
    held().granted(700, 710, grant(B, 6), 5).served(50, 1_400, 1, grant(A, 7)).finds(&[]);
    let mut broken = held().served(50, 1_400, 1, grant(B, 6));
    broken.0.faults.push(moment(90));
    broken.finds(&[]);
}

#[test]
fn a_lock_that_no_client_was_granted() {
    let set = |at| {
        Script::default()
            .lands(at, 0, OpKind::Acquire, grant(A, 5), VoteKind::Granted)
            .left(0, grant(A, 5))
    };
    set(100).ends(2_500, 0, 50).finds(&[Demand::Orphan]);
    set(100).ends(2_500, 0, 300).finds(&[]);
    set(100).ends(2_500, 110, 120).finds(&[]);
    set(300).ends(2_500, 0, 50).finds(&[]);
    set(100).granted(90, 120, grant(A, 5), 100).ends(2_500, 0, 50).finds(&[]);
}

#[test]
fn the_summary_counts() {
    let script = Script::default()
        .granted(1, 10, grant(A, crate::time::EPOCH_MICROS + 3_000), 5)
        .granted(20, 500, grant(B, crate::time::EPOCH_MICROS + 9_000), 5);
    let summary = Summary::of(&script.0);
    assert_eq!((summary.grants, summary.longest_gap), (2, Duration::from_millis(490)));
    assert_eq!(summary.tokens, Some((3_000, 9_000)));

    let line = Script::default()
        .granted(1, 10, grant(A, 5), 500)
        .released(100, 110, grant(A, 5))
        .served(50, 130, 1, grant(B, 6))
        .waits(60, 80, 20, Answer::Held);
    let summary = Summary::of(&line.0);
    assert_eq!((summary.waits.granted, summary.waits.held, summary.rounds.count()), (1, 1, 1));
    assert_eq!(summary.idle.per_mille(500), Some(30));
}
