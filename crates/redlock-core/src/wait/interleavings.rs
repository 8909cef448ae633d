//! The queues under many interleavings. `queue.rs`, `ticket.rs`, `newest.rs` and `handoff.rs` are compiled again
//! with the locks and atomics of `shuttle`. At each use of a lock or an atomic, shuttle decides
//! which task continues.
//!
//! The nodes are one cell behind a mutex. Polls and quick attempts are never due. So a waiter
//! continues only on a signal, and if a signal is missing, shuttle reports a deadlock. Time is a
//! counter one hour ahead of the machine's clock, so the times that the queues read from that clock
//! are always past. A waker that is woken or dropped, and an attempt that is dropped, locks a shard
//! of the queues. If the caller still holds that shard's lock, shuttle reports the mistake.
//!
//! Every run explores the same schedules; another [`SEED`] explores others. A failure prints its
//! schedule, for `shuttle::replay(body, "…")` in place of `explore`.

mod sync {
    pub(super) use shuttle::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
    pub(super) use shuttle::sync::{Arc, Mutex, MutexGuard};
}

// Compiled twice on purpose: outside of this test, these modules use the locks and atomics of the
// standard library.
#[allow(dead_code, clippy::duplicate_mod)]
#[path = "handoff.rs"]
mod handoff;
#[allow(dead_code, clippy::duplicate_mod)]
#[path = "newest.rs"]
mod newest;
#[allow(dead_code, clippy::duplicate_mod)]
#[path = "queue.rs"]
mod queue;
#[allow(dead_code, clippy::duplicate_mod)]
#[path = "ticket.rs"]
mod ticket;

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use bytes::Bytes;
use shuttle::future::{JoinHandle, block_on, spawn, yield_now};
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::Mutex;
use shuttle::{Config, Runner};
use tokio::time::Instant;

use self::handoff::Next;
use self::queue::{Bounds, Pause, WaitQueues};
use self::ticket::{MayTry, PlaceTerms, Refusal, Step, Success, WaitTicket};
use crate::error::{LockError, WaitLimit};
use crate::model::types::Owner;
use crate::wait::order::{Priority, QueueMode};
use crate::wait::places::PlacePermit;
use crate::wait::{order, places, polls};

const SEED: u64 = 17;
const ROUND: Duration = Duration::from_millis(1);
const NEVER: Duration = Duration::from_secs(1_000_000);

/// The holder before the first waiter gets the lock: a client here, or one elsewhere.
const HOLDER: u64 = u64::MAX;
const ELSEWHERE: u64 = u64::MAX - 1;

/// Waiters with this number or a higher one give their rounds too little time.
const HASTY: u64 = 100;

type Queues = WaitQueues<u64, Asked>;
type Ticket = WaitTicket<u64, Asked>;

struct World {
    queues: sync::Arc<Queues>,
    base: Instant,
    ticks: AtomicU64,
    /// In how many of ten releases the handoff quota is used up, at random.
    over: u32,
    /// In how many of ten handoffs the plan is dropped without a handoff, at random.
    unused: u32,
    gap: Gap,
    nodes: Mutex<Nodes>,
    elsewhere: Mutex<Vec<JoinHandle<bool>>>,
    prepared: AtomicUsize,
    taken: AtomicUsize,
    given_back: AtomicUsize,
    this: Weak<World>,
}

#[derive(Default)]
struct Nodes {
    holder: Option<u64>,
    asked: u64,
    /// The tickets that have held the lock, in order.
    grants: Vec<u64>,
    /// The number of holders that believe they have the lock now.
    inside: usize,
    released: u64,
}

/// An attempt that was asked. If it is dropped before it is taken, it is undone.
struct Asked {
    world: Arc<World>,
    number: u64,
    waiter: u64,
    granted: bool,
    taken: bool,
    handed: bool,
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.world.look();
        if self.handed {
            let ended = if self.taken { &self.world.taken } else { &self.world.given_back };
            ended.fetch_add(1, Ordering::Relaxed);
        }
        if !self.taken {
            self.world.free(self.number);
        }
    }
}

/// A waker that must not be woken or dropped while a shard is locked.
struct Watching(Waker, Arc<World>);

impl Wake for Watching {
    fn wake(self: Arc<Self>) {
        self.1.look();
        self.0.wake_by_ref();
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.1.look();
    }
}

/// When a waiter gives up.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Stays,
    /// After this many steps of waiting, signalled or not.
    Impatient(u32),
    /// During its own attempt, which is in flight.
    Competing,
    /// After an attempt was handed to the waiter, and the waiter has taken it.
    Handed,
}

/// What a first waiter does with a free lock that it leaves to a waiter between two turns.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Gap {
    /// It waits for that waiter, however long the gap is.
    Waits,
    /// The gap is over at once.
    Ends,
}

fn terms(shared_owner: Option<Owner>, round_limit: Duration) -> PlaceTerms {
    let priority = Priority::default();
    PlaceTerms { shared_owner, round_limit, priority, mode: QueueMode::All, is_slotted: false }
}

fn lock() -> Bytes {
    Bytes::from_static(b"lock:a")
}

fn world(holder: Option<u64>, bounds: Bounds, over: u32, unused: u32) -> Arc<World> {
    world_with(Gap::Ends, holder, bounds, over, unused)
}

fn world_with(gap: Gap, holder: Option<u64>, bounds: Bounds, over: u32, unused: u32) -> Arc<World> {
    static BASE: OnceLock<Instant> = OnceLock::new();
    Arc::new_cyclic(|this| World {
        queues: WaitQueues::new(bounds),
        base: *BASE.get_or_init(|| Instant::now() + Duration::from_secs(3600)),
        ticks: AtomicU64::new(0),
        over,
        unused,
        gap,
        nodes: Mutex::new(Nodes { holder, ..Nodes::default() }),
        elsewhere: Mutex::new(Vec::new()),
        prepared: AtomicUsize::new(0),
        taken: AtomicUsize::new(0),
        given_back: AtomicUsize::new(0),
        this: this.clone(),
    })
}

const MANY: Bounds = Bounds { total: 100, per_lock: 100 };
/// Nobody waits elsewhere.
const ALONE: u32 = 0;

impl World {
    fn now(&self) -> Instant {
        self.base + Duration::from_nanos(self.ticks.fetch_add(1, Ordering::Relaxed))
    }

    fn look(&self) {
        if !std::thread::panicking() {
            self.queues.is_waited_for(&lock());
        }
    }

    fn nodes(&self) -> shuttle::sync::MutexGuard<'_, Nodes> {
        self.nodes.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn enter(&self, id: u64) -> Ticket {
        self.enter_with(id, ROUND)
    }

    fn enter_with(&self, id: u64, round_limit: Duration) -> Ticket {
        self.enter_on(id, terms(None, round_limit))
    }

    fn enter_on(&self, id: u64, terms: PlaceTerms) -> Ticket {
        let now = self.now();
        let ticket = self.queues.enter(lock(), id, terms, (now, now, now + NEVER));
        ticket.take_slot().expect("there is room");
        if terms.shared_owner.is_some() {
            ticket.may_keep(PlacePermit::counted(()));
        }
        ticket.supersede_older(now);
        ticket
    }

    /// Asks for the lock, in the call that releases the grant `releasing`.
    fn ask(&self, waiter: u64, releasing: Option<u64>) -> Asked {
        let mut nodes = self.nodes();
        nodes.asked += 1;
        let number = nodes.asked;
        if releasing.is_some() && nodes.holder == releasing {
            nodes.holder = None;
        }
        let granted = nodes.holder.is_none();
        if granted {
            nodes.holder = Some(number);
        }
        drop(nodes);
        let world = self.this.upgrade().expect("the world is there");
        Asked { world, number, waiter, granted, taken: false, handed: releasing.is_some() }
    }

    fn free(&self, number: u64) {
        let mut nodes = self.nodes();
        if nodes.holder == Some(number) {
            nodes.holder = None;
        }
    }

    /// Releases the grant `number` as `release_and_hand_off` does.
    fn release(&self, number: u64) {
        let pause = (thread_rng().gen_range(0..10) < self.over).then_some(Pause {
            rounds: 1.0,
            least: ROUND,
            most: ROUND,
        });
        let plan = self.queues.release(&lock(), self.now(), pause);
        match &plan.next {
            Next::Nobody | Next::Competing | Next::Away => self.free(number),
            Next::Yielded => {
                self.free(number);
                let world = self.this.upgrade().expect("the world is there");
                let elsewhere = spawn(async move {
                    world.hold_elsewhere();
                    true
                });
                self.elsewhere.lock().expect("the mutex is sound").push(elsewhere);
            }
            Next::First { .. } if thread_rng().gen_range(0..10) < self.unused => self.free(number),
            Next::First { params, .. } => {
                let asked = self.ask(**params, Some(number));
                assert!(asked.granted, "a lock released and asked for in one call is granted");
                self.prepared.fetch_add(1, Ordering::Relaxed);
                plan.hand(asked);
            }
        }
    }

    /// Another gateway takes the lock if it is free, and announces its release.
    fn hold_elsewhere(&self) {
        let mut asked = self.ask(ELSEWHERE, None);
        if asked.granted {
            asked.taken = true;
            self.release_elsewhere(asked.number);
        }
    }

    fn release_elsewhere(&self, number: u64) {
        self.free(number);
        let mut nodes = self.nodes();
        nodes.released += 1;
        let t = nodes.released;
        drop(nodes);
        // Each of two nodes publishes the hint.
        (0..2).for_each(|_| self.queues.wake(&lock(), t, self.now()));
    }

    /// Waits as `acquire::queued` does. Returns whether the lock was granted.
    async fn wait(self: Arc<Self>, id: u64, ticket: Ticket, fate: Fate) -> bool {
        loop {
            let now = self.now();
            let (mut asked, cause) = match ticket.step(now, MayTry::InOrder) {
                Step::Handed(asked) => (asked, None),
                Step::Attempt(cause) => (self.ask(id, None), Some(cause)),
                Step::AskForOwn => unreachable!("no two waiters have one owner here"),
                Step::Superseded => return self.leaves(ticket),
                // The queue pauses after it yields. The test's clock moves on past the pause.
                Step::WaitUntil(then) | Step::Defer(then)
                    if then < self.base + NEVER / 2
                        && (self.gap == Gap::Ends || then < now + places::GAP / 2) =>
                {
                    yield_now().await;
                    let ahead = then.saturating_duration_since(self.base).as_nanos() as u64;
                    self.ticks.fetch_max(ahead, Ordering::Relaxed);
                    continue;
                }
                Step::Wait | Step::WaitUntil(_) | Step::Defer(_) => match fate {
                    Fate::Impatient(0) => return false,
                    Fate::Impatient(steps) => {
                        self.signalled(&ticket, Some(steps)).await;
                        return self.leaves(ticket);
                    }
                    _ => {
                        self.signalled(&ticket, None).await;
                        continue;
                    }
                },
            };
            assert_eq!(asked.waiter, id, "handed over to somebody else");
            match (fate, cause) {
                (Fate::Competing, Some(_)) | (Fate::Handed, None) => {
                    yield_now().await;
                    drop(asked);
                    return self.leaves(ticket);
                }
                _ => {}
            }
            yield_now().await;
            let now = self.now();
            // A round with too little time finds no quorum, whoever has the lock. Its grants are
            // undone at once.
            if id >= HASTY {
                drop(asked);
                self.refused(&ticket, now, true);
                continue;
            }
            if !asked.granted {
                asked.taken = true;
                self.refused(&ticket, now, false);
                continue;
            }
            asked.taken = true;
            self.goes_in(ticket.number().expect("it stands in the queue"));
            ticket.granted(now, Success { shared_owner: None, ends: now + NEVER, round: ROUND });
            yield_now().await;
            self.nodes().inside -= 1;
            let number = asked.number;
            drop(asked);
            self.release(number);
            return true;
        }
    }

    fn refused(&self, ticket: &Ticket, now: Instant, without_quorum: bool) {
        let never = now + NEVER;
        let error = LockError::Held(Default::default());
        // A queue without a quorum tries again after a while.
        let (retry, error) = if without_quorum {
            (now + ROUND, LockError::Unknown(Vec::new()))
        } else {
            (never, error)
        };
        ticket.refused(
            now,
            Refusal { error, retry, quick: retry, poll_due: never, round: ROUND, without_quorum },
        );
    }

    fn goes_in(&self, ticket: u64) {
        let mut nodes = self.nodes();
        nodes.grants.push(ticket);
        nodes.inside += 1;
        assert_eq!(nodes.inside, 1, "two hold the lock");
    }

    fn leaves(&self, mut ticket: Ticket) -> bool {
        if thread_rng().gen_range(0..2) == 0 {
            ticket.end(self.now());
        }
        drop(ticket);
        false
    }

    /// Waits in turns: after each of these turns the waiter leaves, and comes back for the next
    /// one. It stays in the last turn, if `stays`.
    async fn wait_in_turns(
        self: Arc<Self>,
        id: u64,
        mode: QueueMode,
        turns: Vec<u32>,
        stays: bool,
    ) -> bool {
        let owner = Owner::from_bytes([id as u8; Owner::LEN]);
        let enter = || self.enter_on(id, PlaceTerms { mode, ..terms(Some(owner), ROUND) });
        for steps in turns {
            let ticket = enter();
            // The turn ends while the waiter waits, and never during its attempt.
            if self.clone().wait(id, ticket, Fate::Impatient(steps)).await {
                return true;
            }
            yield_now().await;
        }
        stays && self.clone().wait(id, enter(), Fate::Stays).await
    }

    /// Waits until signalled, or for `steps` steps.
    async fn signalled(self: &Arc<Self>, ticket: &Ticket, mut steps: Option<u32>) {
        poll_fn(|context| {
            let watching = Waker::from(Arc::new(Watching(context.waker().clone(), self.clone())));
            if ticket.poll_signalled(&Context::from_waker(&watching)).is_ready() && steps.is_none()
            {
                return Poll::Ready(());
            }
            match &mut steps {
                Some(0) => return Poll::Ready(()),
                Some(left) => {
                    *left -= 1;
                    context.waker().wake_by_ref();
                }
                None => {}
            }
            Poll::Pending
        })
        .await;
    }

    /// Checks that nothing is left after all waiters have left.
    fn is_as_before(&self) {
        finish(std::mem::take(&mut *self.elsewhere.lock().expect("the mutex is sound")));
        assert_eq!(self.queues.count(), (0, 0), "a queue or a ticket is left");
        let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        let ended = count(&self.taken) + count(&self.given_back);
        assert_eq!(
            count(&self.prepared),
            ended,
            "a prepared attempt was neither taken nor given back"
        );
        assert_eq!(self.nodes().holder, None, "somebody still has the lock");
    }
}

impl World {
    /// Checks that the places of waiters that did not come back end.
    fn places_end(&self) {
        self.queues.end_places(self.now() + places::KEPT + places::CHARGED);
        assert_eq!(self.queues.kept(), 0, "a place is left");
    }
}

fn finish(tasks: Vec<JoinHandle<bool>>) -> Vec<bool> {
    tasks.into_iter().map(|task| block_on(task).expect("a waiter ends")).collect()
}

/// Random schedules find races that need many switches between tasks; schedules with few
/// preemptions find the other races.
fn explore(times: usize, body: impl Fn() + Send + Sync + Clone + 'static) {
    let random = RandomScheduler::new_from_seed(SEED, times);
    Runner::new(random, Config::default()).run(body.clone());
    let few_preemptions = PctScheduler::new_from_seed(SEED, 3, times);
    Runner::new(few_preemptions, Config::default()).run(body);
}

#[test]
fn every_waiter_is_served_in_the_order_of_the_tickets() {
    explore(4_000, || {
        let world = world(Some(HOLDER), MANY, ALONE, 0);
        let waiters = (0..4).map(|id| {
            let world = world.clone();
            spawn(async move {
                let ticket = world.enter(id);
                world.wait(id, ticket, Fate::Stays).await
            })
        });
        let waiters: Vec<_> = waiters.collect();
        world.release(HOLDER);
        assert_eq!(finish(waiters), [true; 4]);
        let grants = std::mem::take(&mut world.nodes().grants);
        assert!(grants.is_sorted() && grants.len() == 4, "out of order: {grants:?}");
        world.is_as_before();
    });
}

#[test]
fn staying_waiters_are_served_and_no_prepared_attempt_is_lost() {
    explore(10_000, || {
        let world = world(Some(HOLDER), MANY, ALONE, 1);
        let fates: Vec<_> = (0..4)
            .map(|_| match thread_rng().gen_range(0..5) {
                0 => Fate::Impatient(thread_rng().gen_range(0..6)),
                1 => Fate::Competing,
                2 => Fate::Handed,
                3 => Fate::Impatient(thread_rng().gen_range(0..20)),
                _ => Fate::Stays,
            })
            .collect();
        let waiters = fates.iter().enumerate().map(|(id, fate)| {
            let world = world.clone();
            let fate = *fate;
            let id = id as u64;
            spawn(async move {
                let ticket = world.enter(id);
                world.wait(id, ticket, fate).await
            })
        });
        let waiters: Vec<_> = waiters.collect();
        world.release(HOLDER);
        for (served, fate) in finish(waiters).into_iter().zip(fates) {
            assert!(served || fate != Fate::Stays, "a waiter that stays is not served");
        }
        world.is_as_before();
    });
}

#[test]
fn a_hint_during_an_attempt_leads_to_another_one() {
    explore(6_000, || {
        let world = world(Some(ELSEWHERE), MANY, ALONE, 0);
        let waiters = (0..2).map(|id| {
            let ticket = world.enter(id);
            spawn(world.clone().wait(id, ticket, Fate::Stays))
        });
        let waiters: Vec<_> = waiters.collect();
        world.release_elsewhere(ELSEWHERE);
        world.hold_elsewhere();
        assert_eq!(finish(waiters), [true; 2]);
        world.is_as_before();
    });
}

#[test]
fn after_dropped_plans_all_waiters_try_by_themselves() {
    explore(4_000, || {
        let world = world(Some(HOLDER), MANY, ALONE, 10);
        let waiters = (0..3).map(|id| {
            let ticket = world.enter(id);
            spawn(world.clone().wait(id, ticket, Fate::Stays))
        });
        let waiters: Vec<_> = waiters.collect();
        world.release(HOLDER);
        assert_eq!(finish(waiters), [true; 3]);
        world.is_as_before();
    });
}

#[test]
fn a_used_up_quota_lets_others_have_the_lock_and_renews() {
    explore(6_000, || {
        let world = world(Some(HOLDER), MANY, 5, 1);
        let waiters = (0..4).map(|id| {
            let world = world.clone();
            let fate =
                if id == 1 { Fate::Impatient(thread_rng().gen_range(0..20)) } else { Fate::Stays };
            spawn(async move {
                let ticket = world.enter(id);
                world.wait(id, ticket, fate).await
            })
        });
        let waiters: Vec<_> = waiters.collect();
        world.release(HOLDER);
        let served = finish(waiters);
        assert!(served[0] && served[2] && served[3], "{served:?}");
        world.is_as_before();
    });
}

#[test]
fn waiters_with_short_rounds_block_nobody_and_change_no_order() {
    explore(6_000, || {
        let world = world(Some(HOLDER), MANY, ALONE, 1);
        let waiter = |id: u64| {
            let world = world.clone();
            // Three round limits, none of which is enough.
            let limit = if id < HASTY { ROUND * 8 } else { ROUND * (id - HASTY + 1) as u32 };
            let fate = if id < HASTY {
                Fate::Stays
            } else {
                Fate::Impatient(thread_rng().gen_range(0..20))
            };
            spawn(async move {
                let ticket = world.enter_with(id, limit);
                world.wait(id, ticket, fate).await
            })
        };
        let waiters: Vec<_> = [HASTY, 0, HASTY + 1, 1, HASTY + 2].into_iter().map(waiter).collect();
        world.release(HOLDER);
        assert_eq!(finish(waiters), [false, true, false, true, false]);
        let grants = std::mem::take(&mut world.nodes().grants);
        assert!(grants.is_sorted() && grants.len() == 2, "out of order: {grants:?}");
        world.is_as_before();
    });
}

#[test]
fn waiters_in_turns_are_served_in_the_order_of_their_first() {
    explore(10_000, || {
        let world = world_with(Gap::Waits, Some(HOLDER), MANY, ALONE, 1);
        let waiter = |id| {
            let world = world.clone();
            let turns =
                (0..thread_rng().gen_range(0..3)).map(|_| thread_rng().gen_range(0..6)).collect();
            spawn(world.wait_in_turns(id, QueueMode::All, turns, true))
        };
        let waiters: Vec<_> = (0..3).map(waiter).collect();
        world.release(HOLDER);
        assert_eq!(finish(waiters), [true; 3]);
        let grants = std::mem::take(&mut world.nodes().grants);
        assert!(grants.is_sorted() && grants.len() == 3, "out of order: {grants:?}");
        assert_eq!(world.queues.kept(), 0, "a place of a waiter that was served is left");
        world.is_as_before();
    });
}

#[test]
fn waiters_that_do_not_come_back_block_nobody() {
    explore(6_000, || {
        let world = world(Some(HOLDER), MANY, 2, 1);
        let waiter = |id: u64| {
            let world = world.clone();
            let turns =
                (0..thread_rng().gen_range(1..3)).map(|_| thread_rng().gen_range(0..6)).collect();
            // Two copies of one request leave and come back independently.
            spawn(world.wait_in_turns(id / 2, QueueMode::All, turns, id == 0))
        };
        let mut waiters: Vec<_> = (0..4).map(waiter).collect();
        let stays = world.clone();
        waiters.push(spawn(async move {
            let ticket = stays.enter(9);
            stays.wait(9, ticket, Fate::Stays).await
        }));
        world.release(HOLDER);
        let served = finish(waiters);
        assert!(served[0] && served[4], "{served:?}");
        world.is_as_before();
        world.places_end();
    });
}

#[test]
fn waiters_are_served_by_priority_and_then_by_arrival() {
    explore(6_000, || {
        let world = world(Some(HOLDER), MANY, ALONE, 1);
        // All enter before the first attempt, because an attempt in flight may get the lock before a
        // higher priority that enters later.
        let tickets = (0..4).map(|id| {
            let value = thread_rng().gen_range(0..10);
            let priority = Priority::new(value).expect("0 to 9 are priorities");
            (id, world.enter_on(id, PlaceTerms { priority, ..terms(None, ROUND) }))
        });
        let tickets: Vec<_> = tickets.collect();
        let waiters = tickets.into_iter().map(|(id, ticket)| {
            let fate =
                if id == 1 { Fate::Impatient(thread_rng().gen_range(0..20)) } else { Fate::Stays };
            spawn(world.clone().wait(id, ticket, fate))
        });
        let waiters: Vec<_> = waiters.collect();
        world.release(HOLDER);
        let served = finish(waiters);
        assert!(served[0] && served[2] && served[3], "{served:?}");
        let grants = std::mem::take(&mut world.nodes().grants);
        assert!(grants.is_sorted(), "out of order: {grants:?}");
        world.is_as_before();
    });
}

/// Priorities change while waiters let others pass, leave and come back.
#[test]
fn waiters_with_any_priority_block_nobody() {
    explore(6_000, || {
        let world = world(Some(HOLDER), MANY, 2, 1);
        let waiter = |id: u64| {
            let world = world.clone();
            let limit = if id < HASTY { ROUND * 8 } else { ROUND * (id - HASTY + 1) as u32 };
            let priority = Priority::new(thread_rng().gen_range(0..10)).expect("it is allowed");
            let fate = match id {
                0 | 1 => Fate::Stays,
                2 => Fate::Handed,
                _ => Fate::Impatient(thread_rng().gen_range(0..20)),
            };
            spawn(async move {
                let terms = PlaceTerms { priority, ..terms(None, limit) };
                let ticket = world.enter_on(id, terms);
                world.wait(id, ticket, fate).await
            })
        };
        let waiters: Vec<_> = [HASTY, 0, HASTY + 1, 2, 1].into_iter().map(waiter).collect();
        world.release(HOLDER);
        let served = finish(waiters);
        assert!(served[1] && served[4], "{served:?}");
        world.is_as_before();
    });
}

#[test]
fn the_newest_waiter_is_served_and_others_are_not_touched() {
    explore(10_000, || {
        let world = world(Some(HOLDER), MANY, 2, 1);
        let first = world.enter(0);
        let ordinary = spawn(world.clone().wait(0, first, Fate::Stays));
        let newest = (1..4).map(|id| {
            let world = world.clone();
            let turns =
                (0..thread_rng().gen_range(0..2)).map(|_| thread_rng().gen_range(0..6)).collect();
            spawn(world.wait_in_turns(id, QueueMode::Newest, turns, true))
        });
        let newest: Vec<_> = newest.collect();
        world.release(HOLDER);
        assert!(block_on(ordinary).expect("a waiter ends"), "an ordinary waiter is superseded");
        let served = finish(newest);
        assert!(served.iter().any(|served| *served), "all are superseded");
        world.is_as_before();
        world.places_end();
    });
}

#[test]
fn waiters_stay_within_the_bounds_and_slots_are_returned() {
    explore(4_000, || {
        let world = world(None, Bounds { total: 3, per_lock: 2 }, ALONE, 0);
        let enter = |name: &'static [u8]| {
            let world = world.clone();
            spawn(async move {
                let now = world.now();
                let ticket = world.queues.enter(
                    Bytes::from_static(name),
                    0,
                    terms(None, ROUND),
                    (now, now, now + NEVER),
                );
                let placed = ticket.take_slot().is_ok();
                let (waiters, _) = world.queues.count();
                assert!(waiters <= 3, "{waiters} wait");
                let inside = world.prepared.fetch_add(usize::from(placed), Ordering::Relaxed);
                assert!(inside + usize::from(placed) <= 3, "{inside} were let in before");
                yield_now().await;
                world.prepared.fetch_sub(usize::from(placed), Ordering::Relaxed);
                drop(ticket);
                placed
            })
        };
        let entered = finish([&b"a"[..], b"a", b"a", b"b", b"b"].into_iter().map(enter).collect());
        assert!(entered.iter().filter(|entered| **entered).count() >= 2, "{entered:?}");
        assert_eq!(world.queues.count(), (0, 0));
        let now = world.now();
        let tickets: Vec<_> = (0..3)
            .map(|id| world.queues.enter(lock(), id, terms(None, ROUND), (now, now, now + NEVER)))
            .collect();
        let slots: Vec<_> = tickets.iter().map(Ticket::take_slot).collect();
        assert!(slots[0].is_ok() && slots[1].is_ok());
        assert_eq!(slots[2], Err(LockError::TooManyWaiters { max: 2, limit: WaitLimit::OfLock }));
        assert_eq!(world.queues.count(), (2, 1));
    });
}
