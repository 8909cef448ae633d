//! Simulated clients. They ask for a lock, use it and release it, in all the ways that real clients
//! do.
//!
//! A client counts its deadline on its own clock, from the validity in the answer. It may be slow,
//! forget its lock, or come back after its deadline and try to go on. It may ask again for the same
//! owner through another gateway, let an old copy of its request arrive, or disconnect. Its writes
//! always carry the fencing token, so a client never uses a lock past its deadline without that
//! token. It may ask for two locks as a set, or for slots of a lock. It then uses and releases each of
//! them by itself. Each slot counts as a lock of its own, which has one holder at a time.
//!
//! About half of all clients wait in queues. They lose patience or disconnect. Some repeat a
//! request with the same idempotency key while the first copy still waits. The gateways that they
//! wait at may die.

pub mod deferred;
mod eager;
mod young;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use redlock_core::{
    AcquireOptions, Info, Lease, LockError, LockSet, LockToken, Owner, OwnerChoice, RetryPolicy,
    SlotSet, Slots, Ttl,
};
use tokio::time::Instant;

use crate::chance::Chance;
use crate::gateway::Gateway;
use crate::history::{Answer, Grant, Recorder, Request, Waited};
use crate::master::{FIRST_SLOT, lock_name, lock_names};
use crate::seen::grant;
use crate::time::SimClock;

/// How many slots the lock with slots has.
pub const SLOTS: u8 = 3;

/// The resources that the locks protect. Each is a register that refuses a token smaller than the
/// largest it has seen.
#[derive(Default)]
pub struct Registers(Mutex<BTreeMap<u8, u64>>);

impl Registers {
    fn write(&self, name: u8, fencing: u64) -> bool {
        let mut largest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = largest.entry(name).or_default();
        let accepted = fencing >= *seen;
        *seen = fencing.max(*seen);
        accepted
    }
}

pub struct Client {
    pub index: u8,
    pub clock: SimClock,
    pub chance: Chance,
    pub gateways: Arc<[Gateway]>,
    /// The number of locks that the client chooses from.
    pub names: u8,
    /// The client sends no new request after this moment.
    pub until: Instant,
    pub recorder: Arc<Recorder>,
    /// The resources that the client writes to.
    pub registers: Arc<Registers>,
    /// The client's behaviour.
    pub habits: Habits,
    /// Percentage of requests that name an owner, as requests with an idempotency key do.
    pub keyed_percent: u64,
    /// How many copies of a request with an owner may follow before it is answered. With 1, only
    /// waiting requests have a copy.
    pub copies: u64,
    /// Percentage of requests that ask for two locks as a set.
    pub set_percent: u64,
    /// Percentage of requests that ask for slots of the lock with slots.
    pub slots_percent: u64,
    /// Percentage of requests that are answered before they are granted.
    pub deferred_percent: u64,
    /// A fault for a test: at the end of its window, a gateway releases a deferred grant by its token,
    /// whether the client has claimed it or not.
    pub releases_unclaimed: bool,
    /// Percentage of requests after which the lock is kept for a least time.
    pub hold_percent: u64,
    /// The longest TTL that the client may ask for.
    pub longest_ttl: Duration,
    /// Percentage of requests that wait in the queue.
    pub waiting_percent: u64,
    /// Percentage of requests whose TTL is too short for the way to the masters.
    pub hasty_percent: u64,
}

/// The behaviour of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Habits {
    /// The client behaves in all ways that clients do.
    Any,
    /// The client keeps one lock from the beginning to the end, and extends it in time.
    Keeps,
    /// The client leaves many locks alone for most of their TTL, and then extends each of them
    /// once.
    Leaves,
    /// The client waits in the queue, and mostly releases the lock soon.
    Eager,
}

/// A lock that the client was granted.
#[derive(Clone, Copy)]
struct Hold {
    name: u8,
    token: LockToken,
    grant: Grant,
    until: Instant,
}

/// How a client asks for a lock.
#[derive(Clone, Copy)]
struct Wish {
    name: u8,
    /// The other lock of a set.
    other: Option<u8>,
    /// The slots to take. The name is then that of slot 1.
    slots: Option<Slots>,
    hold_at_least: Duration,
    ttl: Ttl,
    owner: Option<Chosen>,
    how: How,
    /// How long after the request the client disconnects; `None` if it stays.
    hangs_up: Option<Duration>,
}

#[derive(Clone, Copy)]
enum How {
    Once,
    /// Attempts with backoff in between, outside the queue.
    Polling,
    /// In the queue, for at most this time.
    Waiting(Duration),
}

/// An owner that a client has chosen, and the first half of its bytes, which identifies the owner
/// in histories.
#[derive(Clone, Copy)]
struct Chosen(Owner, u64);

enum Kept {
    Yes,
    Unknown,
    No,
}

impl Client {
    /// The client's life until the history ends.
    pub async fn live(mut self) {
        match self.habits {
            Habits::Keeps => return self.keep().await,
            Habits::Leaves => return self.leave_alone().await,
            Habits::Eager => return self.queue_up().await,
            Habits::Any => {}
        }
        while Instant::now() < self.until {
            let think = self.chance.gap(Duration::from_millis(50));
            tokio::time::sleep(think).await;
            self.once().await;
        }
    }

    async fn keep(mut self) {
        let ttl = Ttl::from_millis(2_000).expect("within the limits");
        while Instant::now() < self.until {
            let how = How::Polling;
            let hold_at_least = Duration::ZERO;
            let wish = Wish {
                name: 0,
                other: None,
                slots: None,
                hold_at_least,
                ttl,
                owner: None,
                how,
                hangs_up: None,
            };
            let Some(mut hold) = self.acquire(0, wish).await else {
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            };
            while Instant::now() < self.until {
                let pause = self.chance.millis(200, 400);
                tokio::time::sleep(pause).await;
                let gateway = self.any_gateway();
                if let Kept::No = self.extend(gateway, &mut hold, ttl).await {
                    break;
                }
                self.write(&hold);
            }
        }
    }

    /// A random request. The client disconnects in `hang_up_percent` of a hundred cases.
    fn wish(&mut self, hang_up_percent: u64) -> Wish {
        let owner = self.chance.percent(self.keyed_percent).then(|| self.owner());
        let how = self.how();
        let name = self.chance.below(u64::from(self.names)) as u8;
        // No draw without sets, so that the seeds of other scenarios keep their histories.
        let is_set =
            self.set_percent > 0 && self.names > 1 && self.chance.percent(self.set_percent);
        let other = is_set.then(|| {
            let step = self.chance.between(1, u64::from(self.names) - 1);
            ((u64::from(name) + step) % u64::from(self.names)) as u8
        });
        let slots = (self.slots_percent > 0 && self.chance.percent(self.slots_percent))
            .then(|| Slots::new(SLOTS.into(), self.chance.pick(&[1, 1, 1, 2, 3])).expect("slots"));
        let (name, other) = match slots {
            Some(_) => (FIRST_SLOT, None),
            None => (name, other),
        };
        let is_kept = self.hold_percent > 0 && self.chance.percent(self.hold_percent);
        Wish {
            name,
            other,
            slots,
            hold_at_least: if is_kept { self.chance.millis(10, 2_000) } else { Duration::ZERO },
            ttl: self.asked_ttl(),
            owner,
            how,
            hangs_up: self.chance.percent(hang_up_percent).then(|| self.hangs_up(how)),
        }
    }

    async fn once(&mut self) {
        if self.deferred_percent > 0 && self.chance.percent(self.deferred_percent) {
            return self.defer().await;
        }
        let mut gateway = self.home();
        let wish = self.wish(15);
        let mut held = self.acquire_and_repeat(gateway, wish).await;
        // A client that names its owner asks again, through any gateway, if it got no answer.
        for _ in 0..2 {
            if held.is_none() && wish.owner.is_some() && self.chance.percent(60) {
                gateway = self.any_gateway();
                let pause = self.chance.millis(0, 80);
                tokio::time::sleep(pause).await;
                held = self.acquire(gateway, Wish { hangs_up: None, ..wish }).await;
            }
        }
        if let Some(hold) = held {
            self.use_all(hold, wish).await;
        }
    }

    /// Uses and releases a lock, and each part of a set or of slots by itself.
    async fn use_all(&mut self, hold: Hold, wish: Wish) {
        if let Some(other) = wish.other {
            let first = self.chance.percent(50);
            let (first, second) = if first { (hold.name, other) } else { (other, hold.name) };
            let single = |name| Wish { name, other: None, owner: None, ..wish };
            self.write(&Hold { name: second, ..hold });
            self.hold(Hold { name: first, ..hold }, single(first)).await;
            self.hold(Hold { name: second, ..hold }, single(second)).await;
            return;
        }
        if wish.slots.is_some() {
            // Each slot is used and released by itself. The token of one slot asks for no other.
            let slots = hold.token.slots();
            for slot in slots.iter() {
                let token = hold.token.on_slots(SlotSet::new([slot]).expect("a slot"));
                let hold = Hold { name: FIRST_SLOT + slot as u8 - 1, token, ..hold };
                self.write(&hold);
                self.hold(hold, Wish { owner: None, ..wish }).await;
            }
            return;
        }
        self.hold(hold, wish).await;
    }

    async fn hold(&mut self, mut hold: Hold, wish: Wish) {
        for _ in 0..self.chance.between(0, 5) {
            let left = hold.until.saturating_duration_since(Instant::now()).as_millis() as u64;
            let pause = self.chance.millis(1, (left / 2).max(2));
            tokio::time::sleep(pause).await;
            if Instant::now() < hold.until {
                self.write(&hold);
            }
            match self.chance.below(10) {
                0..=4 => {
                    let gateway = self.any_gateway();
                    let ttl = if self.chance.percent(70) { wish.ttl } else { self.ttl() };
                    if let Kept::No = self.extend(gateway, &mut hold, ttl).await {
                        break;
                    }
                }
                5..=7 if wish.owner.is_some() => hold = self.ask_again(hold, wish).await,
                _ => {}
            }
        }
        self.end_hold(hold, wish).await;
    }

    /// Asks once more for the same owner. While the grant stands, the answer is that grant. If the
    /// answer is another grant, the client goes on with the new one.
    async fn ask_again(&mut self, hold: Hold, wish: Wish) -> Hold {
        let gateway = self.any_gateway();
        let hangs_up = self.chance.percent(25).then(|| self.chance.millis(1, 40));
        let Some(again) = self.acquire(gateway, Wish { hangs_up, ..wish }).await else {
            return hold;
        };
        if again.grant != hold.grant && self.chance.percent(40) {
            let gateway = self.any_gateway();
            self.release(gateway, &hold, 1).await;
        }
        again
    }

    async fn end_hold(&mut self, mut hold: Hold, wish: Wish) {
        let gateway = if self.chance.percent(60) { self.home() } else { self.any_gateway() };
        match self.chance.below(20) {
            // The client has forgotten the lock.
            0..=2 => {}
            // The client sleeps past its deadline and goes on.
            3..=6 => {
                let left = hold.until.saturating_duration_since(Instant::now());
                let late = self.chance.millis(0, 2_500);
                tokio::time::sleep(left + late).await;
                self.write(&hold);
                if self.chance.percent(60)
                    && matches!(self.extend(gateway, &mut hold, wish.ttl).await, Kept::Yes)
                {
                    self.write(&hold);
                }
                self.release(gateway, &hold, 1).await;
            }
            _ => {
                self.write(&hold);
                self.release(gateway, &hold, 3).await;
            }
        }
    }

    /// Asks for a lock. Sometimes copies of the request follow before the first is answered, with
    /// the same idempotency key and through any gateway. If several are granted, the client goes on
    /// with the largest token.
    async fn acquire_and_repeat(&mut self, gateway: u8, wish: Wish) -> Option<Hold> {
        let is_waiting = matches!(wish.how, How::Waiting(_));
        let likely = if self.copies > 1 { 70 } else { 40 };
        if wish.owner.is_none() || !is_waiting && self.copies == 1 || !self.chance.percent(likely) {
            return self.acquire(gateway, wish).await;
        }
        let count = if self.copies > 1 { self.chance.between(1, self.copies) } else { 1 };
        let copies: Vec<_> = (0..count).map(|_| self.copy_of(wish)).collect();
        let copies = copies.into_iter().map(async |(gateway, pause, copy)| {
            tokio::time::sleep(pause).await;
            self.acquire(gateway, copy).await
        });
        let (first, others) = tokio::join!(biased; self.acquire(gateway, wish), join_all(copies));
        first.into_iter().chain(others.into_iter().flatten()).max_by_key(|hold| hold.grant.fencing)
    }

    /// A copy of a request, its gateway, and how long after the request it is sent.
    fn copy_of(&mut self, wish: Wish) -> (u8, Duration, Wish) {
        let other = self.any_gateway();
        let pause = self.chance.millis(0, 200);
        let how = match wish.how {
            How::Waiting(_) => How::Waiting(self.chance.millis(50, 800)),
            How::Once | How::Polling => wish.how,
        };
        let hangs_up = self.chance.percent(30).then(|| self.chance.millis(1, 600));
        (other, pause, Wish { how, hangs_up, ..wish })
    }

    async fn acquire(&self, gateway: u8, wish: Wish) -> Option<Hold> {
        let Wish { name, other, slots, hold_at_least, ttl, owner, how, hangs_up } = wish;
        // A request for slots may get any of them.
        let more = slots.map_or(0, |slots| slots.count() as u8 - 1);
        let names: Vec<_> =
            std::iter::once(name).chain(other).chain((1..=more).map(|slot| name + slot)).collect();
        let info = Info::new(format!("c{}", self.index)).unwrap_or_default();
        let work = move |redlock: redlock_core::Redlock| async move {
            let name = lock_name(name);
            let options = AcquireOptions {
                info,
                hold_at_least,
                slots,
                owner: owner.map_or(OwnerChoice::Fresh, |chosen| OwnerChoice::Shared(chosen.0)),
                ..AcquireOptions::default()
            };
            if let Some(other) = other {
                let set = LockSet::new(vec![name, lock_name(other)]).expect("two names");
                let patience = if let How::Waiting(patience) = how { Some(patience) } else { None };
                return redlock.acquire_set(&set, ttl, options, patience, |_| Ok(())).await;
            }
            match how {
                How::Once => redlock.acquire(&name, ttl, options).await,
                How::Polling => {
                    redlock.acquire_with_retry(&name, ttl, options, &RetryPolicy::default()).await
                }
                How::Waiting(patience) => {
                    redlock.acquire_within(&name, ttl, options, patience, || Ok(())).await
                }
            }
        };
        let mut task = self.gateway(gateway).request(work)?;
        let patience_ms = match how {
            // A set has no fixed place in a queue, and a waiter for slots may be one of several that
            // are served at once. So nothing is demanded of their waits.
            _ if other.is_some() || slots.is_some() => None,
            How::Waiting(patience) => Some(patience.as_millis() as u64),
            How::Once | How::Polling => None,
        };
        let owner = owner.map(|chosen| chosen.1);
        let request = Request::Acquire { owner, ttl_ms: u64::from(ttl.millis()), patience_ms };
        let numbers: Vec<_> = names
            .iter()
            .map(|name| self.recorder.begin(self.index, self.through(gateway), *name, request))
            .collect();
        let end = |answer: Answer| {
            numbers.iter().for_each(|number| self.recorder.end(*number, answer));
        };
        let forever = Duration::from_secs(3_600);
        let outcome = match tokio::time::timeout(hangs_up.unwrap_or(forever), &mut task).await {
            Ok(outcome) => outcome,
            Err(_) => {
                task.abort();
                // The gateway grants the lock at the moment of the disconnect, so it has no client
                // to answer.
                if let Ok(Ok(lease)) = task.await
                    && let Some(redlock) = self.gateway(gateway).redlock()
                {
                    // The token knows its slots.
                    let names = if slots.is_some() { &names[..1] } else { &names };
                    redlock.abandon(&lock_names(names), &lease);
                }
                end(Answer::Cancelled);
                return None;
            }
        };
        let lease = match outcome {
            Ok(Ok(lease)) => lease,
            Ok(Err(error)) => {
                end(answer(&error));
                return None;
            }
            Err(_) => {
                end(Answer::GatewayDied);
                return None;
            }
        };
        let held_for = self.held_for(gateway, &lease);
        let grant = grant(&lease.token);
        let granted = Answer::Granted { grant, held_for, replayed: lease.replayed };
        for (number, name) in numbers.iter().zip(&names) {
            let slot = u16::from(name - FIRST_SLOT.min(*name)) + 1;
            // Nothing is known about the slots that were not granted.
            let is_granted = slots.is_none() || lease.token.slots().has(slot);
            self.recorder.end(*number, if is_granted { granted } else { Answer::Held });
        }
        if patience_ms.is_some() {
            self.recorder.waited(numbers[0], Waited { ticket: lease.ticket, rounds: lease.rounds });
        }
        Some(Hold { name, token: lease.token, grant, until: Instant::now() + held_for })
    }

    async fn extend(&mut self, gateway: u8, hold: &mut Hold, ttl: Ttl) -> Kept {
        let Hold { name, token, grant, .. } = *hold;
        let lock = lock_name(name).lock_and_slot().0;
        let work = move |redlock: redlock_core::Redlock| async move {
            redlock.extend(&lock, &token, ttl).await
        };
        let Some(task) = self.gateway(gateway).request(work) else { return Kept::Unknown };
        let request = Request::Extend { grant, ttl_ms: u64::from(ttl.millis()) };
        let number = self.recorder.begin(self.index, self.through(gateway), name, request);
        if matches!(self.habits, Habits::Keeps | Habits::Leaves) {
            self.recorder.must_keep(number);
        }
        match task.await {
            Ok(Ok(lease)) => {
                let held_for = self.held_for(gateway, &lease);
                self.recorder.end(number, Answer::Extended { held_for });
                hold.until = hold.until.max(Instant::now() + held_for);
                Kept::Yes
            }
            Ok(Err(error)) => {
                self.recorder.end(number, answer(&error));
                if matches!(error, LockError::Unknown(_)) { Kept::Unknown } else { Kept::No }
            }
            Err(_) => {
                self.recorder.end(number, Answer::GatewayDied);
                Kept::Unknown
            }
        }
    }

    /// Releases the lock. If the outcome is unknown, the client asks again through any gateway.
    async fn release(&mut self, mut gateway: u8, hold: &Hold, tries: u32) {
        let Hold { name, token, grant, .. } = *hold;
        for _ in 0..tries {
            let lock = lock_name(name).lock_and_slot().0;
            let work = move |redlock: redlock_core::Redlock| async move {
                redlock.release(&lock, &token).await
            };
            if let Some(task) = self.gateway(gateway).request(work) {
                let number = self.recorder.begin(
                    self.index,
                    self.through(gateway),
                    name,
                    Request::Release { grant },
                );
                let outcome = match task.await {
                    Ok(Ok(())) => Answer::Released,
                    Ok(Err(error)) => answer(&error),
                    Err(_) => Answer::GatewayDied,
                };
                self.recorder.end(number, outcome);
                if !matches!(outcome, Answer::Unknown | Answer::GatewayDied) {
                    return;
                }
            }
            gateway = self.any_gateway();
            let pause = self.chance.millis(10, 100);
            tokio::time::sleep(pause).await;
        }
    }

    fn write(&self, hold: &Hold) {
        let accepted = self.registers.write(hold.name, hold.grant.fencing);
        self.recorder.write(hold.name, hold.grant, accepted);
    }

    /// How long the client believes in a lease that it receives now, in true time.
    fn held_for(&self, gateway: u8, lease: &Lease) -> Duration {
        // The gateway may have died at this very moment. Its answer reaches the client
        // nevertheless.
        let redlock = self.gateway(gateway).redlock();
        redlock
            .and_then(|redlock| redlock.validity(lease))
            .map_or(Duration::ZERO, |left| self.clock.true_duration(left))
    }

    fn gateway(&self, index: u8) -> &Gateway {
        &self.gateways[usize::from(index)]
    }

    fn through(&self, gateway: u8) -> (u8, u16) {
        (gateway, self.gateway(gateway).process())
    }

    fn home(&self) -> u8 {
        self.index % self.gateways.len() as u8
    }

    fn any_gateway(&mut self) -> u8 {
        self.chance.below(self.gateways.len() as u64) as u8
    }

    fn how(&mut self) -> How {
        if self.chance.percent(self.waiting_percent) {
            let longest = self.chance.pick(&[200, 1_000, 5_000]);
            How::Waiting(self.chance.millis(50, longest))
        } else if self.chance.percent(40) {
            How::Polling
        } else {
            How::Once
        }
    }

    fn hangs_up(&mut self, how: How) -> Duration {
        match how {
            How::Waiting(patience) => self.chance.millis(1, patience.as_millis() as u64),
            How::Once | How::Polling => self.chance.millis(1, 60),
        }
    }

    fn ttl(&mut self) -> Ttl {
        let millis = match self.longest_ttl {
            longest if longest > Duration::from_secs(3) && self.chance.percent(25) => {
                self.chance.between(8_000, longest.as_millis() as u64)
            }
            _ => self.chance.pick(&[300, 500, 800, 1_200, 2_000, 3_000]),
        };
        Ttl::from_millis(millis).expect("within the limits")
    }

    /// A random owner, as an idempotency key would give it. `Owner::derive` itself is not
    /// simulated.
    fn owner(&mut self) -> Chosen {
        let mut raw = [0; Owner::LEN];
        for byte in &mut raw {
            *byte = self.chance.below(256) as u8;
        }
        let half = raw.iter().take(8).fold(0, |half, byte| half << 8 | u64::from(*byte));
        Chosen(Owner::from_bytes(raw), half)
    }
}

fn answer(error: &LockError) -> Answer {
    match error {
        LockError::Held(_) => Answer::Held,
        LockError::Lost => Answer::Lost,
        LockError::NotHolder(_) => Answer::NotHolder,
        LockError::NoQuorum(_) | LockError::TtlTooLong { .. } => Answer::NoQuorum,
        LockError::TtlTooShort { .. } | LockError::TooManyWaiters { .. } => Answer::NoQuorum,
        LockError::HeldTooLong { .. } | LockError::Superseded => Answer::Held,
        LockError::Unknown(_) => Answer::Unknown,
    }
}
