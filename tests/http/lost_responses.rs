//! Clients whose answers are lost, while masters and gateways hang and connections break. Once an
//! answer has made a promise, every repetition of the request must keep it, at any gateway, whether
//! or not the client has received that answer.
//!
//! Some clients speak HTTP/2. They lose an answer by resetting its stream, and continue on the same
//! connection.
//!
//! Every run draws new clients and faults, and prints its seed. `SWALLOWED_SEED=<seed>` repeats the
//! run.

mod history;
mod order;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use h2::Reason;
use http::{HeaderMap, HeaderName, Method};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use self::history::{Denial, History, Hold, Life};
use self::order::{Order, Run, TTL_MS as ORDER_TTL_MS};
use super::http2::Stage;
use crate::support::chance::{Chance, seed};
use crate::support::client::{Answer, Lease, lock_path};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{PATIENCE, RedisServer, daily_or_long, eventually, masters};
use crate::support::http2::Http2;
use crate::support::measure::measured;

const ORDERS: usize = 1_000;
const CLIENTS: usize = 24;
const LOCKS: usize = 48;
/// Orders over HTTP/2, and the clients that carry them out.
const RESET_ORDERS: usize = 320;
const RESET_CLIENTS: usize = 8;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_after_a_lost_answer_gets_the_same_grant() {
    let parts = daily_or_long(4, 1);
    let (history, faults) = carried_out(ORDERS / parts, RESET_ORDERS / parts).await;
    assert_something_was_met(&history, faults, parts);
}

/// Lets clients carry out this many orders over HTTP/1.1 and over HTTP/2. Returns what they saw,
/// and the number of faults. Panics if they saw a violation.
async fn carried_out(orders: usize, reset_orders: usize) -> (History, usize) {
    let seed = seed("SWALLOWED_SEED");
    let servers = masters(5);
    // Searching a log of trace level for a thousand keys would take too long.
    let launch = || {
        let launch = Launch::over(&servers).flag("--node-timeout", "500ms").env("RUST_LOG", "info");
        launch.flag("--max-ttl", "2h")
    };
    let mut gateways = Vec::new();
    for _ in 0..3 {
        gateways.push(launch().ready().await);
    }
    let mut stages = Vec::new();
    for _ in 0..2 {
        let stage = Stage::with(|_| launch()).await;
        stage.open().await.all_nodes_admitted().await;
        stages.push(stage);
    }
    let (began, done) = (Instant::now(), AtomicUsize::new(0));
    let run = Run { gateways, orders, reset_orders, locks: LOCKS, seed, began, done };
    let run = Arc::new(run);
    let mut clients: Vec<_> =
        (0..CLIENTS).map(|first| tokio::spawn(share(run.clone(), first))).collect();
    for first in 0..RESET_CLIENTS {
        let mut connections = Vec::new();
        for stage in &stages {
            connections.push(stage.open().await);
        }
        clients.push(tokio::spawn(share_over_http2(run.clone(), connections, first)));
    }
    let of_stages = stages.iter().map(|stage| &stage.gateway);
    let all_gateways: Vec<_> = run.gateways.iter().chain(of_stages).collect();
    let over = || clients.iter().all(|client| client.is_finished());
    let faults = faults(&servers, &all_gateways, &run, over).await;
    let mut history = History::default();
    for client in clients {
        history.add(client.await.unwrap_or_else(|_| panic!("replay with SWALLOWED_SEED={seed}")));
    }
    let took = run.began.elapsed();
    let plain = history.plain_denials();
    let orders = orders + reset_orders;
    println!("{orders} orders in {took:.1?} with {faults} faults: {:#?}", history.counts);
    println!(
        "{plain} of {} denials while another client knowingly held the lock",
        history.denials.len()
    );
    let wrong = history.judged();
    assert!(
        wrong.is_empty(),
        "{} violations: {}",
        wrong.len(),
        wrong[..wrong.len().min(9)].join("\n\n")
    );
    for gateway in &run.gateways {
        eventually("no lock is left behind", async || {
            let page = gateway.get("/locks?prefix=stock%2F&limit=1000").await.json();
            page["locks"].as_array()?.is_empty().then_some(())
        })
        .await;
    }
    (history, faults)
}

/// Carries out every n-th order of the run, beginning with `first`, one after another, until a
/// client notices a violation.
async fn share(run: Arc<Run>, first: usize) -> History {
    let mut history = History::default();
    for number in (first..run.orders).step_by(CLIENTS) {
        history.add(Order::new(&run, number).carried_out().await);
        run.done.fetch_add(1, Ordering::Relaxed);
        if !history.wrong.is_empty() {
            break;
        }
    }
    history
}

/// Carries out every n-th order over HTTP/2 in the same way.
async fn share_over_http2(run: Arc<Run>, connections: Vec<Http2>, first: usize) -> History {
    let mut history = History::default();
    for number in (first..run.reset_orders).step_by(RESET_CLIENTS) {
        history.add(ResetOrder::new(&run, &connections, number).carried_out().await);
        run.done.fetch_add(1, Ordering::Relaxed);
        if !history.wrong.is_empty() {
            break;
        }
    }
    history
}

/// If no answer was lost, refused or broken, the run would show nothing.
/// Checks that each situation has occurred. `parts`: the run had one of this many parts of all orders.
/// So in the daily form, a rare situation may be missing by chance.
fn assert_something_was_met(history: &History, faults: usize, parts: usize) {
    let (orders, reset_orders) = (ORDERS / parts, RESET_ORDERS / parts);
    let of = |what: &str| history.how_often(what);
    assert_eq!(history.holds.len(), orders + reset_orders);
    assert_eq!(of("read and lost") + of("closed without reading"), orders);
    assert_eq!(of("PATCH: 200"), orders);
    assert_eq!(of("HTTP/2: PATCH done"), reset_orders);
    for (what, least) in [
        ("read and lost", orders / 3),
        ("closed without reading", orders / 3),
        ("repeated: the same grant", orders / 3),
        ("first answer: the grant of a lost request", 10 / parts),
        ("first answer: a new grant after a lost request", 10 / parts),
        ("POST: 409 lock_held", 10 / parts),
        ("POST: 503 quorum_unavailable", 1 / parts),
        ("HTTP/2: reset before the answer", reset_orders / 3),
        ("HTTP/2: reset within the answer", reset_orders / 9),
        ("HTTP/2: repeated: the same grant", reset_orders),
        ("HTTP/2: the grant of a reset request", 5 / parts),
        ("HTTP/2: a new grant after a reset request", 5 / parts),
    ] {
        assert!(of(what) >= least, "{what}: {}, of at least {least}", of(what));
    }
    assert!(faults >= 5 / parts, "{faults}");
}

/// Causes one period of faults after another, until `over`. In each period two of the five masters
/// hang and lose connections. Sometimes a gateway hangs at the same time. Then the connections to
/// all masters break at once, and all parties get time to come back. No master loses data.
async fn faults(
    servers: &[RedisServer],
    gateways: &[&Gateway],
    run: &Run,
    over: impl Fn() -> bool,
) -> usize {
    let mut chance = Chance::of(run.seed, ORDERS);
    let mut count = 0;
    while !over() {
        let first = chance.below(servers.len());
        let apart = 1 + chance.below(servers.len() - 1);
        let pair = [&servers[first], &servers[(first + apart) % servers.len()]];
        for _ in 0..4 {
            hang(&pair, gateways, &mut chance).await;
            count += 1;
        }
        servers.iter().for_each(cut);
        count += 1;
        let enough = run.done.load(Ordering::Relaxed) + CLIENTS + RESET_CLIENTS;
        sleep(COMES_BACK).await;
        eventually("orders are carried out", async || {
            (over() || run.done.load(Ordering::Relaxed) >= enough).then_some(())
        })
        .await;
    }
    count
}

/// The least time without faults at the end of a period. A gateway waits up to a second before it
/// connects again. After that, a refused client waits up to another second before it asks again.
/// The rest is for their work. On a busy machine, the period lasts until they have done some.
const COMES_BACK: Duration = Duration::from_millis(2_500);

async fn hang(pair: &[&RedisServer], gateways: &[&Gateway], chance: &mut Chance) {
    let stopped = &pair[..chance.below(pair.len() + 1)];
    let gateway = chance.one_in(2).then(|| gateways[chance.below(gateways.len())]);
    pair[stopped.len()..].iter().copied().for_each(cut);
    stopped.iter().for_each(|server| server.stop());
    gateway.inspect(|gateway| gateway.signal(Signal::STOP));
    sleep(Duration::from_millis(10 + chance.below(200) as u64)).await;
    stopped.iter().for_each(|server| server.cont());
    gateway.inspect(|gateway| gateway.signal(Signal::CONT));
    sleep(Duration::from_millis(50 + chance.below(300) as u64)).await;
}

/// Breaks all connections to a server, except those that receive hints.
fn cut(server: &RedisServer) {
    server.cmd(&["CLIENT", "KILL", "TYPE", "normal"]);
}

/// The order of a client that speaks HTTP/2. The client resets its first requests. Then it asks any
/// gateway for its grant, and extends and releases the lock. It records what an [`Order`] records.
struct ResetOrder<'a> {
    run: &'a Run,
    /// A connection to each gateway that speaks HTTP/2.
    connections: &'a [Http2],
    chance: Chance,
    /// The label that the client sends to all gateways.
    label: String,
    lock: String,
    body: Value,
    /// The grant, and the time when the first answer with it arrived.
    known: Option<(Lease, Duration)>,
    seen: History,
}

impl<'a> ResetOrder<'a> {
    fn new(run: &'a Run, connections: &'a [Http2], number: usize) -> Self {
        let mut chance = Chance::of(run.seed, ORDERS + 1 + number);
        let label = format!("reset-order-{number}");
        let lock = format!("stock/{}", chance.below(run.locks));
        let wait_ms = if chance.one_in(3) { 2_000 } else { 0 };
        let body = json!({ "ttl_ms": ORDER_TTL_MS, "wait_ms": wait_ms, "owner": label });
        let seen = History::default();
        Self { run, connections, chance, label, lock, body, known: None, seen }
    }

    /// Carries out the whole order.
    async fn carried_out(mut self) -> History {
        let from = self.run.began.elapsed();
        for _ in 0..=self.chance.below(2) {
            self.ask_and_reset().await;
        }
        // Each answer must be as good as the first.
        for _ in 0..2 {
            self.repeat_until_granted().await;
            sleep(Duration::from_millis(self.chance.below(60) as u64)).await;
        }
        self.with_token(Method::PATCH, 200).await;
        let held_until = self.run.began.elapsed();
        self.with_token(Method::DELETE, 204).await;
        let until = self.run.began.elapsed();
        let Self { label: order, lock, known, mut seen, .. } = self;
        if let Some((Lease { fencing, .. }, from)) = known {
            let (order, lock) = (order.clone(), lock.clone());
            seen.holds.push(Hold { order, lock, fencing, from, until: held_until });
        }
        seen.lives.push(Life { order, lock, from, until, closed: true });
        seen
    }

    fn count(&mut self, what: &str) {
        self.seen.count(format!("HTTP/2: {what}"));
    }

    fn wrong(&mut self, what: &str) {
        let Self { run, label, lock, known, .. } = self;
        let at = run.began.elapsed();
        let wrong = format!("{label} on {lock} after {at:.3?}: {what}; knows {known:?}");
        self.seen.wrong.push(wrong);
    }

    fn key(&self) -> String {
        format!("{:016x}/{}", self.run.seed, self.label)
    }

    /// Sends the request and resets its stream. Sometimes the head of the answer has come by then.
    /// Otherwise the moment lies anywhere between the gateway's reading of the request and its
    /// writing of the answer.
    async fn ask_and_reset(&mut self) {
        let connection = &self.connections[self.chance.below(self.connections.len())];
        let headers = one_header("idempotency-key", &self.key());
        let path = lock_path(&self.lock);
        let (answer, mut stream) =
            connection.begin(Method::POST, &path, &headers, &self.body).await;
        if self.chance.one_in(3) {
            let _head = timeout(PATIENCE, answer).await.expect("an answer").expect("no error");
            stream.send_reset(Reason::CANCEL);
            self.count("reset within the answer");
        } else {
            sleep(Duration::from_micros(self.chance.below(8_000) as u64)).await;
            stream.send_reset(Reason::CANCEL);
            self.count("reset before the answer");
        }
    }

    /// Sends a request with one header to any gateway, over HTTP/2 or HTTP/1.1.
    async fn send(
        &mut self,
        method: Method,
        (name, value): (&'static str, &str),
        body: &Value,
    ) -> Answer {
        let path = lock_path(&self.lock);
        let at = self.chance.below(self.connections.len() + self.run.gateways.len());
        if let Some(connection) = self.connections.get(at) {
            return connection.call(method, &path, &one_header(name, value), body).await;
        }
        let gateway = &self.run.gateways[at - self.connections.len()];
        let call = gateway.call(method, path).header(name, value);
        let call = if body.is_null() { call } else { call.json(body) };
        call.send().await
    }

    async fn repeat_until_granted(&mut self) {
        let began = Instant::now();
        while self.seen.wrong.is_empty() && !self.ask().await {
            assert!(began.elapsed() < PATIENCE, "{} is never granted", self.label);
        }
    }

    /// Asks for the lock. Returns whether the client has it. If not, the client has already waited
    /// until it may ask again.
    async fn ask(&mut self) -> bool {
        let sent = self.run.began.elapsed();
        let (key, body) = (self.key(), self.body.clone());
        let answer = self.send(Method::POST, ("idempotency-key", &key), &body).await;
        match answer.status {
            201 => self.is_granted(&answer),
            409 => {
                let problem = answer.problem(409, "lock_held");
                self.count("409 lock_held");
                if self.known.is_some() {
                    self.wrong(&format!("refused because of its own lock: {problem}"));
                }
                let (order, lock) = (self.label.clone(), self.lock.clone());
                let holder = problem["holder"].as_str().map(Into::into);
                let answered = self.run.began.elapsed();
                self.seen.denials.push(Denial { order, lock, holder, sent, answered });
                sleep(Duration::from_millis(10 + self.chance.below(30) as u64)).await;
            }
            _ => self.pause(&answer, &["quorum_unavailable", "outcome_unknown"]).await,
        }
        answer.status == 201
    }

    fn is_granted(&mut self, answer: &Answer) {
        let lease = Lease::from(answer);
        let is_replayed = answer.header("idempotency-replayed") == "true";
        match &self.known {
            Some((known, _)) if *known == lease && is_replayed => {
                self.count("repeated: the same grant");
            }
            Some(_) => self.wrong(&format!("another grant: {lease:?}, replayed: {is_replayed}")),
            None => {
                self.count(if is_replayed {
                    "the grant of a reset request"
                } else {
                    "a new grant after a reset request"
                });
                self.known = Some((lease, self.run.began.elapsed()));
            }
        }
    }

    /// Waits after a refusal, for as long as the refusal says. Panics if the refusal has none of
    /// these codes.
    async fn pause(&mut self, answer: &Answer, codes: &[&str]) {
        let code = answer.json()["code"].as_str().unwrap_or_default().to_owned();
        assert!(codes.contains(&code.as_str()), "{}: {answer:?}", self.label);
        let problem = answer.problem(503, &code);
        self.count(&format!("503 {code}"));
        let pause = problem["retry_after_ms"].as_u64().expect("when to try again");
        sleep(Duration::from_millis(pause)).await;
    }

    /// Repeats a request with the token until its outcome is known. The outcome must be `done`. A
    /// release whose first outcome is unknown may find that the lock has gone.
    async fn with_token(&mut self, method: Method, done: u16) {
        let Some((Lease { token, .. }, _)) = self.known.clone() else { return };
        let is_release = method == Method::DELETE;
        let body = if is_release { Value::Null } else { json!({ "ttl_ms": ORDER_TTL_MS }) };
        let (began, mut is_unknown) = (Instant::now(), false);
        loop {
            let answer = self.send(method.clone(), ("lock-token", &token), &body).await;
            match answer.status {
                503 => {
                    self.pause(&answer, &["outcome_unknown"]).await;
                    is_unknown = true;
                    assert!(began.elapsed() < PATIENCE, "the outcome stays unknown: {answer:?}");
                    continue;
                }
                status if status == done => {}
                404 | 409 if is_release && is_unknown => {}
                _ => self.wrong(&format!("{method} of a promised grant: {answer:?}")),
            }
            break;
        }
        self.count(&format!("{method} done"));
    }
}

fn one_header(name: &'static str, value: &str) -> HeaderMap {
    HeaderMap::from_iter([(HeaderName::from_static(name), value.parse().expect("a value"))])
}

const KEY: &str = "reservation-4711";
const TTL: Duration = Duration::from_secs(2);
const HOLD: Duration = Duration::from_secs(3);

async fn keyed(gateway: &Gateway, name: &str) -> Answer {
    let call = gateway.call(Method::POST, lock_path(name)).header("idempotency-key", KEY);
    call.json(&json!({ "ttl_ms": TTL.as_millis() as u64 })).decided().await
}

/// A lock that a client has kept by repeating its request.
struct Kept {
    lease: Lease,
    /// A time before its TTL began for the last time.
    prolonged: Instant,
    refused: Answer,
}

impl Kept {
    /// Repeats the request at both gateways in turn, until one refuses it because the lock has been
    /// held for `max_hold`. Every answer before that must have the same grant. On a busy machine,
    /// the lock may expire between two repetitions, or be refused too soon. Then this begins again.
    async fn by_repeating(gateways: [&Gateway; 2], name: &str) -> Self {
        let mut first: Option<(Lease, Instant)> = None;
        let mut prolonged = Instant::now();
        let mut repetitions = 0;
        eventually("one of several repetitions is refused", async || {
            let sent = Instant::now();
            let answer = keyed(gateways[repetitions % 2], name).await;
            if answer.status != 201 {
                let (lease, _) = first.take().filter(|_| repetitions > 2)?;
                return Some(Self { lease, prolonged, refused: answer });
            }
            let lease = Lease::from(&answer);
            match &first {
                Some((known, at)) if *known == lease => {
                    repetitions += 1;
                    assert_eq!(answer.header("idempotency-replayed"), "true");
                    assert!(sent < *at + HOLD, "repeated {:?} after the grant", sent - *at);
                }
                known => {
                    let may_have_expired = known.is_none() || prolonged.elapsed() >= TTL;
                    assert!(may_have_expired, "{answer:?} after {known:?}");
                    first = Some((lease, answer.at));
                    repetitions = 1;
                }
            }
            prolonged = sent;
            None
        })
        .await
    }
}

/// The lock then ends: by a release if `released`, otherwise by its expiry.
async fn held_for_too_long(gateways: [&Gateway; 2], name: &str, released: bool) {
    let Kept { lease, prolonged, refused } = Kept::by_repeating(gateways, name).await;
    let problem = refused.problem(409, "max_hold_reached");
    assert_eq!(problem["title"], "The lock has been held for too long");
    let detail = problem["detail"].as_str().expect("a text");
    assert!(detail.contains("a lock may be held for 3s (--max-hold"), "{detail}");
    assert_eq!(refused.header("idempotency-replayed"), "");

    // A refusal neither ends the lock nor prolongs it.
    let other = gateways[0].call(Method::POST, lock_path(name)).decided().await;
    let release = async |lease: &Lease| {
        let call = gateways[1].call(Method::DELETE, lock_path(name));
        let answer = call.header("lock-token", &lease.token).decided().await;
        assert!([204, 404].contains(&answer.status), "{answer:?}");
    };
    if other.status == 201 {
        assert!(prolonged.elapsed() >= TTL, "{other:?}");
        release(&Lease::from(&other)).await;
    } else {
        other.problem(409, "lock_held");
        if released {
            release(&lease).await;
        }
    }
    let next = eventually("the key competes again", async || {
        let answer = keyed(gateways[0], name).await;
        if answer.status == 201 {
            return Some(answer);
        }
        answer.problem(409, "max_hold_reached");
        assert!(!released, "the lock was released");
        None
    })
    .await;
    assert_eq!(next.header("idempotency-replayed"), "");
    assert!(Lease::from(&next).fencing > lease.fencing);
}

#[tokio::test]
async fn repeating_a_request_does_not_keep_a_lock_beyond_max_hold() {
    let servers = masters(3);
    let launch = || {
        let times = [("--max-ttl", "2s"), ("--default-ttl", "2s"), ("--max-hold", "3s")];
        times
            .into_iter()
            .fold(Launch::over(&servers), |launch, (flag, time)| launch.flag(flag, time))
    };
    let gateways = [&launch().ready().await, &launch().ready().await];
    tokio::join!(
        held_for_too_long(gateways, "released", true),
        held_for_too_long(gateways, "left-alone", false)
    );
}

mod measured {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_request_of_a_client_that_left_ends_soon() {
        measured("the end of requests whose clients have left", async || {
            let (history, _) = carried_out(ORDERS / 4, RESET_ORDERS / 4).await;
            let late = history.late();
            if late.is_empty() { Ok(()) } else { Err(late.join("\n\n")) }
        })
        .await;
    }
}
