//! Bounds the requests in flight, in all and for each client, and notices when none is left.
//!
//! A request takes its permits when it is complete, so a client cannot hold one without sending its
//! body. One kind of permit is taken earlier: that of a request that extends many locks, because
//! its body is large. A client that sends no body holds that permit until the time limit of the
//! body. A client may hold as many permits as are still free ([the dynamic threshold of shared
//! buffers](https://doi.org/10.1109/90.664262)). A sole greedy client gets half of the permits. If
//! there are k other greedy clients, each gets `1 / (k + 2)` of the permits, and the same share
//! stays free for newcomers. A quarter of the permits is reserved for [`RequestClass::Held`],
//! because requests that keep or end a held lock matter more than those that ask for one.
//!
//! Only some of a client's requests in flight are with the masters at once; the others wait for
//! their turn. So another client's request is served soon, and a burst of thousands does not keep
//! every master busy for longer than a round may take. A request that changes several locks or
//! slots counts once for each, because it costs the masters as much as that many requests. A `GET`
//! counts once for every 16 slots that it reads. While there are several clients, a client may have
//! 16 requests of each class with the masters for each millisecond of the shortest recent round,
//! but at most 256. For example, a round of 2 ms allows 32 requests. With rounds up to 16 ms, that
//! gives 16,000 requests a second for each class; with longer rounds, 256 in each round. A request
//! that counts more than may run at once is delayed by 1 ms for each further 16, and then runs
//! alone.
//!
//! No semaphore covers all requests. A drain would have to take all permits of such a semaphore,
//! and extensions and releases, which are still served during a drain, would get none.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit};

use crate::overload::clients::{Client, Concurrency, ContentionTracker, Counter, Permit};
use crate::overload::shares::LEASES_PART;

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestClass {
    /// Extending or releasing a lock that the caller may hold.
    Held,
    /// Any other request.
    Other,
}

/// The requests of a gateway.
pub(crate) struct Requests {
    limit: usize,
    /// Requests in flight; those that wait for a lock are not counted.
    in_flight: Counter,
    /// Those requests in flight that are of [`RequestClass::Other`].
    acquires: Counter,
    contention: ContentionTracker,
    min_round_trip: MinRoundTrip,
    active: Arc<ActiveCount>,
}

/// The shortest recent round.
#[derive(Debug)]
struct MinRoundTrip {
    micros: AtomicU64,
    /// Whether a round was recorded since the last decay.
    has_new_round: AtomicBool,
}

impl MinRoundTrip {
    const CONTENDED_PER_MILLI: u64 = 16;
    const MAX_MICROS: u64 = 1_000 * Concurrency::MAX as u64 / Self::CONTENDED_PER_MILLI;

    /// How many requests of one client may run at once while there are several clients.
    fn concurrent_limit(&self) -> usize {
        (self.micros.load(Ordering::Relaxed).max(1_000) * Self::CONTENDED_PER_MILLI / 1_000)
            as usize
    }

    fn record_round(&self, round: Duration) {
        let micros = round.as_micros() as u64;
        self.has_new_round.store(true, Ordering::Relaxed);
        if micros < self.micros.load(Ordering::Relaxed) {
            self.micros.fetch_min(micros, Ordering::Relaxed);
        }
    }

    /// Doubles the estimate, because an old measurement says little about the present. If no round
    /// was recorded since the last call, the estimate stays. Otherwise a flood of requests that
    /// record no round, such as inspections, would raise its own limit.
    fn decay(&self) {
        if !self.has_new_round.swap(false, Ordering::Relaxed) {
            return;
        }
        let twice = |micros: u64| Some((2 * micros).clamp(1_000, Self::MAX_MICROS));
        let _ = self.micros.fetch_update(Ordering::Relaxed, Ordering::Relaxed, twice);
    }
}

#[derive(Default)]
struct ActiveCount {
    count: AtomicUsize,
    none_left: Notify,
}

/// Three permits: of the limit for all requests, of the limit for [`RequestClass::Other`], and of
/// the client.
type Permits = (Permit, Option<Permit>, Permit);

/// A request in flight. Dropping it returns the permits.
pub struct InFlight {
    /// `None` while the request waits for a lock.
    permits: Option<Permits>,
    running: Option<OwnedSemaphorePermit>,
    /// How many permits to run one lock takes.
    share: usize,
    /// The place among the client's leases that are in flight. Set only for a lease of a request
    /// that extends many locks.
    _lease_permit: Option<OwnedSemaphorePermit>,
}

impl Requests {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
            in_flight: Counter::default(),
            acquires: Counter::default(),
            contention: ContentionTracker::default(),
            min_round_trip: MinRoundTrip {
                micros: AtomicU64::new(MinRoundTrip::MAX_MICROS),
                has_new_round: AtomicBool::new(false),
            },
            active: Arc::default(),
        }
    }

    /// Takes the permits, then waits until the request may run. `None` when too many requests are
    /// in flight, in all or of this client.
    pub(crate) async fn enter(&self, class: RequestClass, client: &Client) -> Option<InFlight> {
        let permits = Some(self.take_permits(class, client)?);
        let running = match class {
            RequestClass::Held => &client.running_held,
            RequestClass::Other => &client.running_acquires,
        };
        let is_alone = self.contention.is_sole_client(client);
        let concurrent_limit =
            if is_alone { Concurrency::MAX } else { self.min_round_trip.concurrent_limit() };
        let running = running.begin(concurrent_limit).await;
        let share = running.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        Some(InFlight { permits, running, share, _lease_permit: None })
    }

    /// Enters one lease of a request that extends many locks, as [`RequestClass::Held`]. All such
    /// leases of a client share few places, see [`LEASES_PART`]. A lease waits for a place before it
    /// takes permits. So no lease is refused because of other leases of its client.
    pub(crate) async fn enter_lease(&self, client: &Client) -> Option<InFlight> {
        let _lease_permit = client.extend_many_leases.begin(self.limit / LEASES_PART).await;
        Some(InFlight { _lease_permit, ..self.enter(RequestClass::Held, client).await? })
    }

    /// Records the duration of a round.
    pub(crate) fn record_round(&self, round: Duration) {
        self.min_round_trip.record_round(round);
    }

    /// Ages the estimate of the shortest round. To be called every few seconds.
    pub(crate) fn upkeep(&self) {
        self.min_round_trip.decay();
    }

    fn take_permits(&self, class: RequestClass, client: &Client) -> Option<Permits> {
        let free = self.limit.saturating_sub(self.in_flight.count());
        Some(match class {
            RequestClass::Held => {
                let of_client = client
                    .in_flight_held
                    .take(free.saturating_sub(client.in_flight_acquires.count()))?;
                (self.in_flight.take(self.limit)?, None, of_client)
            }
            RequestClass::Other => {
                // Rounded up, so that the limit is at least one.
                let limit = (self.limit * 3).div_ceil(4);
                let free = free.min(limit.saturating_sub(self.acquires.count()));
                let of_client = client
                    .in_flight_acquires
                    .take(free.saturating_sub(client.in_flight_held.count()))?;
                (self.in_flight.take(self.limit)?, Some(self.acquires.take(limit)?), of_client)
            }
        })
    }

    /// Counts a request that is being served, complete or not.
    pub(crate) fn begin(&self) -> Active {
        self.active.count.fetch_add(1, Ordering::AcqRel);
        Active(self.active.clone())
    }

    /// Requests in flight, without those that wait.
    pub(crate) fn count(&self) -> usize {
        self.in_flight.count()
    }

    /// Waits until no request is being served.
    pub(crate) async fn none_left(&self) {
        loop {
            // The waiter registers before it reads the count. In the other order, it would miss the
            // last drop if that came between the two steps.
            let none_left = self.active.none_left.notified();
            if self.active.count.load(Ordering::Acquire) == 0 {
                return;
            }
            none_left.await;
        }
    }
}

impl InFlight {
    /// Lets the request change `locks` locks or slots. Beside other clients, it is delayed first if
    /// it may not change so many at once. Then it waits until few enough of its client's requests
    /// run. Until then it holds no permit to run. Otherwise two such requests could wait for each
    /// other, and a delayed request would keep its client's small ones out.
    pub(crate) async fn widen(&mut self, client: &Client, locks: usize) {
        let Some(running) = self.running.take_if(|_| locks > 1) else { return };
        let permits = running.semaphore().clone();
        drop(running);
        let excess = locks.saturating_sub(Concurrency::MAX / self.share.max(1));
        if self.share > 1 && excess > 0 {
            let delay =
                Duration::from_millis(excess as u64) / MinRoundTrip::CONTENDED_PER_MILLI as u32;
            // Boxed, because an unboxed timer would make the future of every request larger.
            Box::pin(async {
                let _alone = client.wide.begin(1).await;
                tokio::time::sleep(delay).await;
            })
            .await;
        }
        let count = self.share.saturating_mul(locks).min(Concurrency::MAX);
        self.running = permits.acquire_many_owned(count as u32).await.ok();
    }

    /// Returns the permits while the request waits for a lock: waiters have a limit of their own.
    pub(crate) fn wait(&mut self) {
        self.permits = None;
        self.running = None;
    }
}

/// A request that is being served, until this is dropped.
pub struct Active(Arc<ActiveCount>);

impl Drop for Active {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.none_left.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    /// Takes all permits that a client can get.
    fn all(requests: &Requests, class: RequestClass, client: &Client) -> Vec<Permits> {
        std::iter::from_fn(|| requests.take_permits(class, client)).collect()
    }

    #[test]
    fn a_greedy_client_leaves_half_to_the_next_one() {
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
    fn acquires_leave_permits_for_extends_and_releases() {
        let requests = Requests::new(4096);
        let clients: Vec<_> = (0..100).map(|_| Client::default()).collect();
        let asking: Vec<_> =
            clients.iter().flat_map(|client| all(&requests, RequestClass::Other, client)).collect();
        assert!(asking.len() <= 3072);
        assert!(all(&requests, RequestClass::Held, &Client::default()).len() >= 512);
    }

    #[test]
    fn a_flood_of_both_classes_leaves_as_much_as_one() {
        let requests = Requests::new(4096);
        let [greedy, other, third] = Default::default();
        let asking = all(&requests, RequestClass::Other, &greedy);
        let in_flight_held = all(&requests, RequestClass::Held, &greedy);
        assert_eq!((asking.len(), in_flight_held.len()), (1536, 512));
        assert_eq!(all(&requests, RequestClass::Other, &other).len(), 768);
        drop((asking, in_flight_held));
        let _held = [
            all(&requests, RequestClass::Held, &greedy),
            all(&requests, RequestClass::Held, &other),
        ];
        assert_eq!(all(&requests, RequestClass::Other, &third).len(), 512);
    }

    #[tokio::test]
    async fn leases_of_one_client_never_refuse_each_other() {
        for limit in [1, 64, 4096] {
            let requests = Requests::new(limit);
            let client = Client::default();
            let lease = async || {
                let entered = requests.enter_lease(&client).await;
                tokio::task::yield_now().await;
                entered.is_some()
            };
            let all = futures_util::future::join_all((0..1_000).map(|_| lease())).await;
            assert!(all.iter().all(|entered| *entered), "with a limit of {limit}");
        }
    }

    #[test]
    fn one_permit_serves_one_request() {
        let requests = Requests::new(1);
        let client = Client::default();
        let permits = requests.take_permits(RequestClass::Other, &client);
        assert!(permits.is_some() && requests.take_permits(RequestClass::Held, &client).is_none());
        drop(permits);
        assert!(requests.take_permits(RequestClass::Held, &client).is_some());
    }

    #[tokio::test]
    async fn a_contending_client_runs_fewer_and_its_classes_are_apart() {
        let requests = Requests::new(4096);
        let [greedy, other] = <[Client; 2]>::default();
        let begin = async |class, client| {
            timeout(Duration::ZERO, requests.enter(class, client)).await.ok().flatten()
        };
        let all = async |class, client| {
            let mut begun = Vec::new();
            while let Some(one) = begin(class, client).await {
                begun.push(one);
            }
            begun
        };
        let alone = all(RequestClass::Other, &greedy).await;
        assert_eq!(alone.len(), 256);
        assert_eq!(requests.in_flight.count(), 256, "a request that gave up holds no permit");
        assert!(begin(RequestClass::Other, &other).await.is_some());
        assert!(
            begin(RequestClass::Other, &greedy).await.is_none(),
            "more run than a contending client may have"
        );
        drop(alone);
        requests.record_round(Duration::from_millis(1));
        let mut beside = all(RequestClass::Other, &greedy).await;
        assert_eq!(beside.len(), 16);
        assert!(begin(RequestClass::Held, &greedy).await.is_some());
        beside[0].wait();
        assert!(begin(RequestClass::Other, &greedy).await.is_some(), "a waiter does not run");
    }

    #[tokio::test]
    async fn a_request_for_many_slots_counts_once_for_each() {
        let requests = Requests::new(4096);
        let client = Client::default();
        let begin = async |slots| {
            let entered = async {
                let mut entered = requests.enter(RequestClass::Held, &client).await?;
                entered.widen(&client, slots).await;
                Some(entered)
            };
            timeout(Duration::ZERO, entered).await.ok().flatten()
        };
        let half = begin(128).await.expect("the first may run");
        let other_half = begin(128).await.expect("the second may run");
        assert!(begin(1).await.is_none(), "256 run");
        drop(half);
        assert!(begin(129).await.is_none());
        drop(other_half);
        let all = begin(300).await.expect("a request beyond the limit runs alone");
        assert!(begin(1).await.is_none());
        drop(all);
        let mut both = Vec::new();
        for _ in 0..2 {
            both.extend(requests.enter(RequestClass::Held, &client).await);
        }
        let begun = both.into_iter().map(async |mut entered| entered.widen(&client, 256).await);
        let begun = timeout(Duration::from_secs(600), futures_util::future::join_all(begun));
        assert_eq!(begun.await.expect("neither waits for the other").len(), 2);
    }

    /// The client may have 16 requests with the masters for each millisecond.
    #[tokio::test(start_paused = true)]
    async fn a_request_for_many_slots_takes_its_time_beside_other_clients() {
        let requests = Requests::new(4096);
        let [greedy, other] = <[Client; 2]>::default();
        requests.record_round(Duration::from_millis(1));
        let run = async |slots| {
            let _other = requests.enter(RequestClass::Other, &other).await;
            let mut entered = requests.enter(RequestClass::Held, &greedy).await.expect("a permit");
            let began = tokio::time::Instant::now();
            entered.widen(&greedy, slots).await;
            began.elapsed().as_millis()
        };
        assert_eq!([run(1).await, run(16).await], [0, 0]);
        assert!((15..=16).contains(&run(256).await));
        // The second waits for the first, and small requests wait for neither.
        let both = futures_util::future::join(run(256), run(256));
        let small = async {
            tokio::task::yield_now().await;
            run(1).await
        };
        let ((_, second), small) = tokio::join!(both, small);
        assert!((30..=32).contains(&second) && small == 0, "{second} and {small} ms");
    }

    #[test]
    fn concurrency_follows_the_shortest_recent_round() {
        let min_round_trip = Requests::new(1).min_round_trip;
        let mut seen = Vec::new();
        for _ in 0..6 {
            seen.push(min_round_trip.concurrent_limit());
            min_round_trip.record_round(Duration::from_micros(9_500));
            min_round_trip.decay();
        }
        assert_eq!(seen, [256; 6], "a round may take twice as long");
        min_round_trip.record_round(Duration::from_micros(9_500));
        assert_eq!(min_round_trip.concurrent_limit(), 152);
        min_round_trip.record_round(Duration::from_micros(300));
        assert_eq!(min_round_trip.concurrent_limit(), 16);
        (0..9).for_each(|_| min_round_trip.decay());
        assert_eq!(min_round_trip.concurrent_limit(), 16, "no newer round");
    }
}
