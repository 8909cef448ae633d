//! How many requests are under way, for whom, and when none is.
//!
//! A place is taken when a request is whole, so nobody has one who does not even send its body. A client may have as many
//! places as are still free ([the dynamic threshold of shared buffers](https://doi.org/10.1109/90.664262)): alone it gets half
//! of them, beside k others as greedy as itself `1 / (k + 2)`, and as much stays free for whoever comes next. What keeps or ends
//! a lock that is held goes before what asks for one: a quarter of the places is for it alone.
//!
//! Of those who have a place only so many of one client are with the masters at the same time, so that what another one asks
//! comes soon after, and a burst of thousands does not keep every master busy for longer than a round may take. Beside others it
//! is 16 for each millisecond that a round takes at least, and 256 at most: 16,000 requests a second of a kind where masters are up
//! to 16 ms away, and 256 for each round where they are farther.
//!
//! No semaphore over all: waiting for all of its permits would take them from the requests that may still be served while draining.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit};

use crate::overload::clients::{Client, Concurrency, ContentionTracker, Counter, Place};

/// What a request is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestClass {
    /// A lock that the caller may hold: extending or releasing it.
    Held,
    /// Anything else.
    Other,
}

/// All requests of a gateway.
pub(crate) struct Requests {
    limit: usize,
    /// Those that do not wait.
    in_flight_acquires: Counter,
    /// Those of them that are not about a lock which the caller may hold.
    others: Counter,
    contention: ContentionTracker,
    rounds: MinRoundTrip,
    all: Arc<All>,
}

/// How long a round takes at least.
#[derive(Debug)]
struct MinRoundTrip {
    micros: AtomicU64,
    /// Whether there was one since it was looked at last.
    is_known: AtomicBool,
}

impl MinRoundTrip {
    const BESIDE_OTHERS_PER_MILLI: u64 = 16;
    const MAX_MICROS: u64 = 1_000 * Concurrency::MAX as u64 / Self::BESIDE_OTHERS_PER_MILLI;

    /// Of one client beside others.
    fn concurrent_limit(&self) -> usize {
        (self.micros.load(Ordering::Relaxed).max(1_000) * Self::BESIDE_OTHERS_PER_MILLI / 1_000)
            as usize
    }

    fn record_round(&self, round: Duration) {
        let micros = round.as_micros() as u64;
        self.is_known.store(true, Ordering::Relaxed);
        if micros < self.micros.load(Ordering::Relaxed) {
            self.micros.fetch_min(micros, Ordering::Relaxed);
        }
    }

    /// What was measured long ago says little: until a round tells otherwise, it takes twice as long now. Without any round
    /// nothing changes: a flood of other requests must not gain by it.
    fn decay(&self) {
        if !self.is_known.swap(false, Ordering::Relaxed) {
            return;
        }
        let twice = |micros: u64| Some((2 * micros).clamp(1_000, Self::MAX_MICROS));
        let _ = self.micros.fetch_update(Ordering::Relaxed, Ordering::Relaxed, twice);
    }
}

#[derive(Default)]
struct All {
    active: AtomicUsize,
    none_left: Notify,
}

/// A place among the requests being worked on, or among those that wait. Given back when it is dropped.
pub struct InFlight {
    /// Of all, of its kind, and of the client.
    in_flight_acquires: Option<(Place, Option<Place>, Place)>,
    running: Option<OwnedSemaphorePermit>,
}

impl Requests {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
            in_flight_acquires: Counter::default(),
            others: Counter::default(),
            contention: ContentionTracker::default(),
            rounds: MinRoundTrip {
                micros: AtomicU64::new(MinRoundTrip::MAX_MICROS),
                is_known: AtomicBool::new(false),
            },
            all: Arc::default(),
        }
    }

    /// `None` when too many are being worked on, or too many of this client.
    pub(crate) async fn enter(&self, work: RequestClass, client: &Client) -> Option<InFlight> {
        let in_flight_acquires = Some(self.place(work, client)?);
        let running = match work {
            RequestClass::Held => &client.running_held,
            RequestClass::Other => &client.running_acquires,
        };
        let is_alone = self.contention.is_sole_client(client);
        let concurrent_limit =
            if is_alone { Concurrency::MAX } else { self.rounds.concurrent_limit() };
        Some(InFlight { in_flight_acquires, running: running.begin(concurrent_limit).await })
    }

    /// A round has taken so long.
    pub(crate) fn record_round(&self, round: Duration) {
        self.rounds.record_round(round);
    }

    /// To be called every few seconds.
    pub(crate) fn upkeep(&self) {
        self.rounds.decay();
    }

    fn place(&self, work: RequestClass, client: &Client) -> Option<(Place, Option<Place>, Place)> {
        let free = self.limit.saturating_sub(self.in_flight_acquires.count());
        Some(match work {
            RequestClass::Held => {
                let of_client = client
                    .in_flight_held
                    .take(free.saturating_sub(client.in_flight_acquires.count()))?;
                (self.in_flight_acquires.take(self.limit)?, None, of_client)
            }
            RequestClass::Other => {
                // One at least.
                let limit = (self.limit * 3).div_ceil(4);
                let free = free.min(limit.saturating_sub(self.others.count()));
                let of_client = client
                    .in_flight_acquires
                    .take(free.saturating_sub(client.in_flight_held.count()))?;
                (
                    self.in_flight_acquires.take(self.limit)?,
                    Some(self.others.take(limit)?),
                    of_client,
                )
            }
        })
    }

    /// A request that is being served from now on, whole or not.
    pub(crate) fn begin(&self) -> Active {
        self.all.active.fetch_add(1, Ordering::AcqRel);
        Active(self.all.clone())
    }

    /// How many are being worked on, without those that wait.
    pub(crate) fn count(&self) -> usize {
        self.in_flight_acquires.count()
    }

    /// Resolves when there is no request.
    pub(crate) async fn none_left(&self) {
        loop {
            // Before the number is looked at, or the last one to leave between the two would not be noticed.
            let none_left = self.all.none_left.notified();
            if self.all.active.load(Ordering::Acquire) == 0 {
                return;
            }
            none_left.await;
        }
    }
}

impl InFlight {
    /// Gives the place to others: a request that waits is no work, and there is a bound of its own for those.
    pub(crate) fn wait(&mut self) {
        (self.in_flight_acquires, self.running) = (None, None);
    }
}

/// A request that is being served; until it is dropped.
pub struct Active(Arc<All>);

impl Drop for Active {
    fn drop(&mut self) {
        if self.0.active.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.none_left.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    /// How many a client gets that takes all it can.
    fn all(
        requests: &Requests,
        work: RequestClass,
        client: &Client,
    ) -> Vec<(Place, Option<Place>, Place)> {
        std::iter::from_fn(|| requests.place(work, client)).collect()
    }

    #[test]
    fn a_client_that_takes_all_it_can_leaves_as_much_to_the_next_one() {
        let requests = Requests::new(4096);
        let [greedy, other, third] = Default::default();
        let first = all(&requests, RequestClass::Other, &greedy);
        let second = all(&requests, RequestClass::Other, &other);
        assert_eq!((first.len(), second.len()), (1536, 768));
        assert_eq!(all(&requests, RequestClass::Other, &third).len(), 384);
        drop(first);
        assert_eq!(all(&requests, RequestClass::Other, &third).len(), 1152);
    }

    #[test]
    fn those_who_ask_for_locks_leave_room_for_those_who_hold_them() {
        let requests = Requests::new(4096);
        let clients: Vec<_> = (0..100).map(|_| Client::default()).collect();
        let asking: Vec<_> =
            clients.iter().flat_map(|client| all(&requests, RequestClass::Other, client)).collect();
        assert!(asking.len() <= 3072);
        assert!(all(&requests, RequestClass::Held, &Client::default()).len() >= 512);
    }

    #[test]
    fn a_flood_of_both_kinds_leaves_as_much_as_one_of_one_kind() {
        let requests = Requests::new(4096);
        let [greedy, other, third] = Default::default();
        let asking = all(&requests, RequestClass::Other, &greedy);
        let in_flight_held = all(&requests, RequestClass::Held, &greedy);
        assert_eq!((asking.len(), in_flight_held.len()), (1536, 512));
        assert_eq!(all(&requests, RequestClass::Other, &other).len(), 768);
        drop((asking, in_flight_held));
        let _keeping = [
            all(&requests, RequestClass::Held, &greedy),
            all(&requests, RequestClass::Held, &other),
        ];
        assert_eq!(all(&requests, RequestClass::Other, &third).len(), 512);
    }

    #[test]
    fn one_place_serves_one_request() {
        let requests = Requests::new(1);
        let client = Client::default();
        let place = requests.place(RequestClass::Other, &client);
        assert!(place.is_some() && requests.place(RequestClass::Held, &client).is_none());
        drop(place);
        assert!(requests.place(RequestClass::Held, &client).is_some());
    }

    #[tokio::test]
    async fn a_client_runs_fewer_at_a_time_beside_others_and_what_it_holds_does_not_wait_for_what_it_asks()
     {
        let requests = Requests::new(4096);
        let [greedy, other] = <[Client; 2]>::default();
        let begin = async |work, client| {
            timeout(Duration::ZERO, requests.enter(work, client)).await.ok().flatten()
        };
        let all = async |work, client| {
            let mut begun = Vec::new();
            while let Some(one) = begin(work, client).await {
                begun.push(one);
            }
            begun
        };
        let alone = all(RequestClass::Other, &greedy).await;
        assert_eq!(alone.len(), 256);
        assert_eq!(requests.in_flight_acquires.count(), 256, "who gave up in line has no place");
        assert!(begin(RequestClass::Other, &other).await.is_some());
        assert!(
            begin(RequestClass::Other, &greedy).await.is_none(),
            "they are more than it may have now"
        );
        drop(alone);
        requests.record_round(Duration::from_millis(1));
        let mut beside = all(RequestClass::Other, &greedy).await;
        assert_eq!(beside.len(), 16);
        assert!(begin(RequestClass::Held, &greedy).await.is_some());
        beside[0].wait();
        assert!(
            begin(RequestClass::Other, &greedy).await.is_some(),
            "who waits for a lock does not run"
        );
    }

    #[test]
    fn as_many_more_run_together_as_rounds_take_longer_and_no_more_once_they_are_quick() {
        let rounds = Requests::new(1).rounds;
        let mut seen = Vec::new();
        for _ in 0..6 {
            seen.push(rounds.concurrent_limit());
            rounds.record_round(Duration::from_micros(9_500));
            rounds.decay();
        }
        assert_eq!(seen, [256; 6], "it may take twice as long");
        rounds.record_round(Duration::from_micros(9_500));
        assert_eq!(rounds.concurrent_limit(), 152);
        rounds.record_round(Duration::from_micros(300));
        assert_eq!(rounds.concurrent_limit(), 16);
        (0..9).for_each(|_| rounds.decay());
        assert_eq!(rounds.concurrent_limit(), 16, "nobody knows better");
    }
}
