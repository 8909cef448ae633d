//! The Rust client over real gateways and masters. These scenarios are the same as those of the
//! guards in all other languages.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use redlock_client::{Client, Error, Guard, Loss, LossReason, ProblemCode, Queue, Waiting};
use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::http::keys::{HOLDER, file, key, with_keys};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{DeadPort, PATIENCE, RedisServer, eventually, masters};
use crate::support::waiters::patient;

/// A TTL of locks that guards extend. A guard extends its lock after a third of this time. It loses
/// the lock only if the machine stands still for most of the rest.
const TTL: Duration = Duration::from_secs(6);
/// A TTL that outlasts the test. So if the lock is free, it was released.
const HOUR: Duration = Duration::from_secs(3_600);
/// A wait without an end.
const FOREVER: Duration = Duration::MAX;

fn over(servers: &[RedisServer]) -> Launch {
    Launch::over(servers).flag("--node-timeout", "6s")
}

fn url(gateway: &Gateway) -> String {
    format!("http://{}", gateway.address())
}

fn client(gateways: &[&Gateway]) -> Client {
    gateways
        .iter()
        .fold(Client::builder(), |client, gateway| client.url(url(gateway)))
        .build()
        .expect("these are URLs")
}

/// Waits until this many further extensions have been confirmed.
async fn extended(guard: &Guard, times: usize) {
    let mut deadlines = guard.deadlines();
    for _ in 0..times {
        timeout(PATIENCE, deadlines.changed())
            .await
            .expect("the lock is extended")
            .expect("the lock is held");
    }
}

#[tokio::test]
async fn a_dropped_guard_releases_and_a_refusal_names_the_holder() {
    let gateway = patient(Launch::embedded()).ready().await;
    let client = client(&[&gateway]);
    let guard = client.lock("a").ttl(HOUR).owner("alice").acquire().await.unwrap();
    let refused = client.lock("a").acquire().await.unwrap_err();
    assert!(
        matches!(&refused, Error::Held { holder: Some(holder), .. } if holder == "alice"),
        "{refused}"
    );
    let next = timeout(PATIENCE, client.lock("a").wait(FOREVER).acquire());
    let (next, ()) = tokio::join!(next, async { drop(guard) });
    next.expect("the guard releases").unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_guard_reports_a_lock_released_by_another() {
    let gateway = Launch::embedded().ready().await;
    let guard = client(&[&gateway]).lock("a").ttl(TTL).acquire().await.unwrap();
    let message = guard.cancellation();
    assert_eq!(gateway.delete("a", guard.token()).await.status, 204);
    let loss = timeout(PATIENCE, guard.lost()).await.expect("at the next extension");
    assert!(matches!(loss.reason, LossReason::Gone { .. }), "{loss}");
    assert!(message.is_cancelled() && matches!(guard.check(), Err(Error::Lost(_))));
    guard.release().await.expect("a release after the loss succeeds");
}

#[tokio::test]
async fn work_under_a_lost_lock_is_cancelled() {
    let gateway = Launch::embedded().ready().await;
    let held = client(&[&gateway]).lock("a").ttl(TTL);
    let result = held
        .hold(async |guard| {
            gateway.delete("a", guard.token()).await;
            std::future::pending::<()>().await;
        })
        .await;
    assert!(
        matches!(result, Err(Error::Lost(Loss { reason: LossReason::Gone { .. }, .. }))),
        "{result:?}"
    );
}

#[tokio::test]
async fn a_guard_survives_a_killed_gateway_and_a_hung_one() {
    let servers = masters(3);
    let [killed, hung, last] =
        [over(&servers).ready().await, over(&servers).ready().await, over(&servers).ready().await];
    let guard = client(&[&killed, &hung, &last]).lock("a").ttl(TTL).acquire().await.unwrap();
    hung.signal(Signal::STOP);
    drop(killed);
    extended(&guard, 3).await;
    guard.check().unwrap();
    assert_eq!(last.inspect("a").await["fencing_token"], guard.fencing_token());
    guard.release().await.unwrap();
    hung.signal(Signal::CONT);
}

/// A proxy in front of a gateway. It swallows the answers to the first requests.
async fn swallowing_proxy(to: SocketAddr, limit: usize) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let lost_responses = Arc::new(AtomicUsize::new(0));
    let count = lost_responses.clone();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let count = count.clone();
            tokio::spawn(async move {
                let mut gateway = TcpStream::connect(to).await.unwrap();
                if count.load(Ordering::SeqCst) >= limit {
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut gateway).await;
                    return;
                }
                let mut buffer = vec![0; 65_536];
                let read = client.read(&mut buffer).await.unwrap();
                gateway.write_all(&buffer[..read]).await.unwrap();
                assert_ne!(gateway.read(&mut buffer).await.unwrap(), 0, "an answer");
                count.fetch_add(1, Ordering::SeqCst);
            });
        }
    });
    (address, lost_responses)
}

#[tokio::test]
async fn retries_after_lost_answers_get_the_same_grant() {
    let gateway = Launch::embedded().ready().await;
    let (address, lost_responses) = swallowing_proxy(gateway.address(), 2).await;
    let client = Client::new(format!("http://{address}")).unwrap();
    let guard = client.lock("a").wait(FOREVER).acquire().await.unwrap();
    assert_eq!(lost_responses.load(Ordering::SeqCst), 2);
    let status = gateway.inspect("a").await;
    assert_eq!(
        (&status["state"], &status["fencing_token"]),
        (&"held".into(), &guard.fencing_token().into())
    );
    guard.release().await.unwrap();
    assert_eq!(gateway.inspect("a").await["state"], "free");
}

#[tokio::test]
async fn every_gateway_is_asked_again_after_each_failed_once() {
    let gateway = Launch::embedded().ready().await;
    let (address, lost_responses) = swallowing_proxy(gateway.address(), 2).await;
    let client = Client::builder()
        .url("http://127.0.0.1:1")
        .url(format!("http://{address}"))
        .build()
        .unwrap();
    client.lock("a").wait(FOREVER).acquire().await.unwrap().release().await.unwrap();
    assert_eq!(lost_responses.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn twenty_contenders_under_a_lock_lose_no_count() {
    const EACH: usize = 5;
    let servers = masters(3);
    let gateways = [over(&servers).ready().await, over(&servers).ready().await];
    let counter = Arc::new(AtomicUsize::new(0));
    let contenders: Vec<_> = (0..20)
        .map(|n| {
            let client = client(&[&gateways[n % 2]]);
            let counter = counter.clone();
            tokio::spawn(async move {
                for _ in 0..EACH {
                    let guard = client.lock("counter").wait(FOREVER).acquire().await.unwrap();
                    let before = counter.load(Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    counter.store(before + 1, Ordering::SeqCst);
                    guard.check().unwrap();
                    // A release is tried for 5 s. If no majority confirms it on a busy machine, the
                    // lock ends with its TTL.
                    let released = guard.release().await;
                    let is_late = matches!(released, Err(Error::Unavailable { .. }));
                    assert!(released.is_ok() || is_late, "{released:?}");
                }
            })
        })
        .collect();
    for contender in contenders {
        contender.await.unwrap();
    }
    assert_eq!(counter.load(Ordering::SeqCst), 20 * EACH);
}

#[tokio::test]
async fn a_refusal_names_its_reason_or_the_limit() {
    let holder = key("jobs", HOLDER, "jobs/*").await;
    let keys = file(&[&holder]);
    let gateway = with_keys(&keys).start().await;
    let of = |secret: &str| Client::builder().url(url(&gateway)).key(secret).build().unwrap();
    let error = async |client: &Client, name: &str, ttl| {
        client.lock(name).ttl(ttl).acquire().await.unwrap_err().to_string()
    };
    let minute = Duration::from_secs(60);
    let known = of(&holder.text);
    for (message, what) in [
        (error(&of("rlk_nonsense"), "jobs/a", minute).await, "unauthenticated"),
        (error(&known, "other/a", minute).await, "acquire"),
        (error(&known, "jobs/ä", minute).await, "invalid_name"),
        (error(&known, "..", minute).await, "is not a name of a lock"),
        (error(&known, "jobs/a", minute * 60).await, "300000"),
    ] {
        assert!(message.contains(what), "{message}");
    }
    known.lock("jobs/a").acquire().await.unwrap().release().await.unwrap();
    assert!(
        Client::new("http://127.0.0.1:1")
            .unwrap()
            .status("a")
            .await
            .unwrap_err()
            .to_string()
            .contains("refused")
    );
}

#[tokio::test]
async fn waiting_acquire_reports_place_holder_and_gateway() {
    let gateway = Launch::embedded().flag("--max-wait", "300ms").ready().await;
    let client = client(&[&gateway]);
    let guard = client.lock("a").owner("alice").acquire().await.unwrap();
    let first = client.lock("a").wait(FOREVER).acquire();
    let (seen, mut told) = unbounded_channel();
    let second = client.lock("a").wait(FOREVER).on_waiting(move |waiting| {
        let _ = seen.send(waiting.clone());
    });
    let watched = async {
        // On a busy machine the first one may be between two requests when the lock is released.
        // Then the second one gets the lock before the first one.
        let first = tokio::spawn(async { first.await.unwrap().release().await.unwrap() });
        eventually("the first one waits", async || {
            (gateway.inspect("a").await["waiters_total"] == 1).then_some(())
        })
        .await;
        let second = tokio::spawn(second.acquire());
        for _ in 0..4 {
            let waiting = told.recv().await.expect("it waits");
            assert_eq!((&*waiting.name, waiting.position), ("a", Some(2)), "{waiting:?}");
            assert_eq!((waiting.gateway, waiting.trouble), (url(&gateway), None));
            assert_eq!(waiting.holder.as_deref(), Some("alice"));
            assert!(waiting.acquired_at.is_some_and(|at| at.ends_with('Z')));
        }
        guard.release().await.unwrap();
        (first, second.await.unwrap().unwrap())
    };
    let (first, guard) = timeout(PATIENCE, watched).await.expect("the second one is served");
    let owner = gateway.inspect("a").await["owner"].as_str().unwrap().to_owned();
    assert!(owner.contains(&format!(":{} black_box", std::process::id())), "{owner}");
    guard.release().await.unwrap();
    timeout(PATIENCE, first).await.expect("the first one is served").unwrap();
}

#[tokio::test]
async fn a_guard_shows_waiters_and_the_newest_replaces_the_older() {
    let gateway = Launch::embedded().ready().await;
    let client = client(&[&gateway]);
    let guard = client.lock("a").ttl(TTL).acquire().await.unwrap();
    assert_eq!(guard.waiters(), None, "nothing is extended yet");
    extended(&guard, 1).await;
    assert_eq!(guard.waiters(), Some(0));
    let newest = || client.lock("a").wait(FOREVER).priority(9).queue(Queue::Newest);
    let older = tokio::spawn(newest().acquire());
    eventually("the guard shows one waiter", async || (guard.waiters() == Some(1)).then_some(()))
        .await;
    assert_eq!(gateway.inspect("a").await["waiters"][0]["priority"], 9);
    let newer = tokio::spawn(newest().acquire());
    let superseded = older.await.unwrap().unwrap_err();
    let Error::Refused { problem, .. } = &superseded else { panic!("{superseded:?}") };
    assert_eq!(problem.known_code(), Some(ProblemCode::Superseded));
    guard.release().await.unwrap();
    newer.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn guards_share_the_slots_of_a_lock() {
    let gateway = Launch::embedded().start().await;
    let client = client(&[&gateway]);
    let lock = |take| client.lock("pool").ttl(TTL).slots(3, take);
    let heavy = lock(2).acquire().await.unwrap();
    let light = lock(1).acquire().await.unwrap();
    let mut all = [heavy.slots(), light.slots()].concat();
    all.sort_unstable();
    assert_eq!(all, [1, 2, 3]);
    assert!(matches!(lock(1).acquire().await, Err(Error::Held { .. })));
    // Both are extended beyond their TTL, together.
    extended(&heavy, 4).await;
    extended(&light, 1).await;
    let waits = tokio::spawn(lock(1).wait(FOREVER).acquire());
    eventually("it waits", async || {
        (gateway.inspect("pool").await["waiters_total"] == 1).then_some(())
    })
    .await;
    heavy.release().await.unwrap();
    let next = waits.await.unwrap().unwrap();
    // A slot is taken away by force, so its guard is lost.
    client.force_release_slot("pool", next.slots()[0]).await.unwrap();
    let loss = timeout(PATIENCE, next.lost()).await.expect("the loss is noticed");
    assert!(matches!(loss.reason, LossReason::Gone { .. }), "{loss}");
    drop(next);
    light.release().await.unwrap();
    eventually("all slots are free", async || {
        (gateway.inspect("pool").await["state"] == "free").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_guard_of_several_locks_is_lost_with_any_of_them() {
    let gateway = Launch::embedded().start().await;
    let client = client(&[&gateway]);
    let both = || client.lock("env/a").also("env+b").ttl(TTL);
    let guard = both().owner("deploy").acquire().await.unwrap();
    assert_eq!(guard.name(), "env/a,env+b");
    extended(&guard, 4).await;
    for name in ["env/a", "env+b"] {
        assert_eq!(gateway.inspect(name).await["owner"], "deploy");
        assert!(matches!(client.lock(name).ttl(TTL).acquire().await, Err(Error::Held { .. })));
    }
    guard.release().await.unwrap();
    for name in ["env/a", "env+b"] {
        assert_eq!(gateway.inspect(name).await["state"], "free");
    }

    let single = client.lock("env+b").ttl(TTL).acquire().await.unwrap();
    let refused = both().acquire().await.unwrap_err();
    assert!(matches!(refused, Error::Held { .. }), "{refused}");
    single.release().await.unwrap();

    let guard = both().acquire().await.unwrap();
    client.force_release("env+b").await.unwrap();
    let loss = timeout(PATIENCE, guard.lost()).await.expect("the loss is noticed");
    assert!(loss.to_string().contains("env+b: "), "{loss}");
    drop(guard);
    eventually("the other lock is free", async || {
        (gateway.inspect("env/a").await["state"] == "free").then_some(())
    })
    .await;
}

const WAITERS: usize = 20;

/// Waiters for one lock, in the order of their numbers. Each waits in turns of half a second, and
/// releases the lock at once.
struct Line {
    told: UnboundedReceiver<(usize, Waiting)>,
    served: UnboundedReceiver<usize>,
    /// How many turns of each waiter have passed.
    turns: [usize; WAITERS],
    waiters: Vec<JoinHandle<()>>,
}

impl Line {
    /// All waiters ask the first of these gateways.
    async fn join(gateways: &[&Gateway], name: &str) -> Self {
        let client = client(gateways);
        let (seen, told) = unbounded_channel();
        let (done, served) = unbounded_channel();
        let mut waiters = Vec::new();
        for n in 0..WAITERS {
            let (seen, done) = (seen.clone(), done.clone());
            let lock = client.lock(name).wait(FOREVER);
            let lock = lock.on_waiting(move |waiting| drop(seen.send((n, waiting.clone()))));
            waiters.push(tokio::spawn(async move {
                let guard = lock.acquire().await.unwrap();
                done.send(n).unwrap();
                guard.release().await.unwrap();
            }));
            eventually("one more waits", async || {
                (gateways[0].inspect(name).await["waiters_total"] == n + 1).then_some(())
            })
            .await;
        }
        Self { told, served, turns: [0; WAITERS], waiters }
    }

    /// Waits until this many turns of each waiter have passed. Each keeps its place in every turn.
    async fn pass(&mut self, turns: usize) {
        while self.turns.iter().any(|passed| *passed < turns) {
            let told = timeout(PATIENCE, self.told.recv()).await;
            let (who, Waiting { position, trouble, .. }) =
                told.expect("a turn ends").expect("they wait");
            assert_eq!((position, trouble), (Some(who as u64 + 1), None));
            self.turns[who] += 1;
        }
    }

    /// The order in which the waiters get the lock.
    async fn order(mut self) -> Vec<usize> {
        let mut order = Vec::new();
        for _ in 0..WAITERS {
            let next = timeout(PATIENCE, self.served.recv()).await.expect("somebody is served");
            order.push(next.expect("they wait"));
        }
        for waiter in self.waiters {
            waiter.await.unwrap();
        }
        order
    }
}

#[tokio::test]
async fn twenty_waiters_keep_their_places_over_five_turns() {
    let servers = masters(3);
    let short = || over(&servers).flag("--max-wait", "500ms");
    let gateways = [short().ready().await, short().ready().await];
    for count in [1, 2] {
        let gateways: Vec<_> = gateways.iter().take(count).collect();
        let held = client(&gateways).lock("a").acquire().await.unwrap();
        let mut line = Line::join(&gateways, "a").await;
        line.pass(5).await;
        held.release().await.unwrap();
        let mut served = line.order().await;
        // On a busy machine, a waiter may be between two turns when the lock is free.
        served.sort_unstable();
        assert_eq!(served, (0..WAITERS).collect::<Vec<_>>(), "{count} gateways");
    }
}

/// Calls to gateways, none of which can be reached. Returns how long they took.
async fn calls_without_a_listener() -> Duration {
    let dead = [DeadPort::new(), DeadPort::new()];
    let urls = dead.each_ref().map(|dead| format!("http://127.0.0.1:{}", dead.port()));
    let client = Client::builder().url(&*urls[0]).url(&*urls[1]).build().unwrap();
    let begin = Instant::now();
    let second = Duration::from_secs(1);
    for error in [
        client.lock("a").acquire().await.unwrap_err(),
        client.lock("a").wait(FOREVER).needs_gateway().acquire().await.unwrap_err(),
        client.status("a").await.unwrap_err(),
        client.extend("a", "t", second).await.unwrap_err(),
        client.release("a", "t").await.unwrap_err(),
    ] {
        assert!(matches!(error, Error::Unavailable { is_unreachable: true, .. }), "{error}");
        let error = error.to_string();
        assert!(error.starts_with("a: ") && urls.iter().all(|url| error.contains(url)), "{error}");
    }
    let took = begin.elapsed();
    let begin = Instant::now();
    client.lock("a").wait(second).acquire().await.unwrap_err();
    let waited = begin.elapsed();
    assert!(waited >= second, "{waited:?}");
    took.max(waited - second)
}

#[tokio::test]
async fn without_a_listener_every_call_fails() {
    timeout(PATIENCE, calls_without_a_listener()).await.expect("every call ends");
}

/// The limit in a message about a gateway that did not answer, in seconds.
fn limit_in(message: &str) -> Option<f64> {
    let (_, rest) = message.split_once("did not answer within ")?;
    rest.split_once(" s")?.0.parse().ok()
}

/// Calls with a timeout of a second. Returns how long they took, or why the figure is not fair.
async fn calls_with_a_timeout() -> Result<Duration, String> {
    let gateway = patient(Launch::embedded()).ready().await;
    let second = Duration::from_secs(1);
    let client = Client::builder().url(url(&gateway)).timeout(second).build().unwrap();
    let held = gateway.acquire_for("held", HOUR.as_millis() as u64).await;
    let begin = Instant::now();
    let refused = client.lock("held").wait(FOREVER).acquire().await;
    let is_late = matches!(refused, Err(Error::Unavailable { .. }));
    assert!(is_late || matches!(refused, Err(Error::Held { .. })), "{refused:?}");
    gateway.signal(Signal::STOP);
    let hung = client.lock("a").wait(FOREVER).acquire().await;
    let status = client.status("a").await.map(|_| ());
    let took = begin.elapsed();
    gateway.signal(Signal::CONT);
    let [hung, status] = [hung.map(|_| ()), status].map(|hung| hung.unwrap_err().to_string());
    // On a busy machine, the time may be over before the first request is sent.
    let is_over = hung.contains("the time limit was over");
    assert!(is_over || limit_in(&hung).is_some_and(|limit| limit <= 1.0), "{hung}");
    // Without a timeout, the limit is 2 s.
    assert!(limit_in(&status).is_some_and(|limit| limit <= 1.0), "{status}");
    assert_eq!(gateway.delete("held", &held.token).await.status, 204);
    if is_late { Err(format!("a held lock was answered late: {refused:?}")) } else { Ok(took) }
}

#[tokio::test]
async fn timeout_bounds_every_call() {
    let took = timeout(PATIENCE, calls_with_a_timeout()).await.expect("every call ends");
    println!("{took:?}");
}

#[tokio::test]
async fn a_wait_beyond_the_gateways_limit_is_split() {
    let gateway = patient(Launch::embedded()).flag("--max-wait", "600ms").ready().await;
    gateway.acquire_for("held", HOUR.as_millis() as u64).await;
    let lease = gateway.acquire_for("a", 2_500).await;
    let client = client(&[&gateway]);
    let short = client.lock("held").wait(Duration::from_millis(100)).acquire().await;
    assert!(matches!(short, Err(Error::Held { .. })), "{short:?}");
    let guard = timeout(PATIENCE, client.lock("a").wait(FOREVER).acquire());
    let guard = guard.await.expect("the first one expires").expect("after that");
    assert!(guard.fencing_token() > lease.fencing);
    eventually("the guard holds the lock", async || {
        (gateway.inspect("a").await["state"] == "held").then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_unanswered_acquire_leaves_no_lock() {
    let gateway = patient(Launch::embedded()).ready().await;
    let (address, _) = swallowing_proxy(gateway.address(), usize::MAX).await;
    let client = Client::new(format!("http://{address}")).unwrap();
    let is_free = async |name: &str| {
        eventually("the lock is free", async || {
            (gateway.inspect(name).await["state"] == "free").then_some(())
        })
        .await;
    };
    let unanswered = client.lock("unanswered").ttl(HOUR).acquire().await;
    assert!(matches!(unanswered, Err(Error::Unavailable { .. })), "{unanswered:?}");
    is_free("unanswered").await;

    let given_up = client.lock("given-up").ttl(HOUR).acquire();
    assert!(timeout(Duration::from_secs(1), given_up).await.is_err());
    is_free("given-up").await;
}

#[tokio::test]
async fn extensions_reuse_the_connection() {
    let gateway = Launch::embedded().ready().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = Client::new(format!("http://{}", listener.local_addr().unwrap())).unwrap();
    let to = gateway.address();
    // The proxy accepts no second connection, as if the gateway's name could no longer be resolved.
    tokio::spawn(async move {
        let (mut client, _) = listener.accept().await.unwrap();
        drop(listener);
        let mut gateway = TcpStream::connect(to).await.unwrap();
        tokio::io::copy_bidirectional(&mut client, &mut gateway).await
    });
    // A try that takes a quarter of the TTL would end its connection.
    let ttl = Duration::from_secs(60);
    let guard = client.lock("a").ttl(ttl).acquire().await.unwrap();
    extended(&guard, 2).await;
    guard.check().unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn debug_output_shows_no_secret() {
    let known = key("known", HOLDER, "a").await;
    let gateway = with_keys(&file(&[&known])).start().await;
    let client = Client::builder().url(url(&gateway)).key(&known.text).build().unwrap();
    let guard = client.lock("a").acquire().await.unwrap();
    let shown = format!("{guard:?} {client:?} {guard:#?}");
    assert!(shown.contains("fencing_token"), "{shown}");
    assert!(!shown.contains(guard.token()) && !shown.contains(&known.text), "{shown}");
}

mod measured {
    use super::*;
    use crate::support::measure::measured;

    /// Well below the 5 s for which a failed request is repeated.
    const AT_ONCE: Duration = Duration::from_secs(3);

    fn within(limit: Duration, took: Duration) -> Result<(), String> {
        if took < limit { Ok(()) } else { Err(format!("it took {took:?}")) }
    }

    /// Names of locks, each of which is used in one run.
    fn fresh_names() -> impl FnMut() -> String {
        let mut number = 0;
        move || {
            number += 1;
            format!("jobs/{number}")
        }
    }

    #[tokio::test]
    async fn a_guard_extends_for_five_ttls_and_leaves_nothing() {
        const TTL: Duration = Duration::from_secs(1);
        let servers = masters(3);
        let gateway = over(&servers).ready().await;
        let client = client(&[&gateway]);
        let mut fresh = fresh_names();
        measured("a guard over five TTLs", async || {
            let name = fresh();
            let guard = client.lock(&*name).ttl(TTL).owner("host-7").acquire().await;
            let guard = guard.map_err(|error| error.to_string())?;
            let begin = guard.deadline();
            let mut deadlines = guard.deadlines();
            while guard.deadline().since(begin) < TTL * 5 {
                tokio::select! {
                    changed = deadlines.changed() => changed.expect("the guard lives"),
                    loss = guard.lost() => return Err(loss.to_string()),
                }
                let status = gateway.inspect(&name).await;
                guard.check().map_err(|error| error.to_string())?;
                assert_eq!(
                    (&status["owner"], &status["fencing_token"]),
                    (&"host-7".into(), &guard.fencing_token().into())
                );
            }
            guard.release().await.map_err(|error| error.to_string())?;
            assert_eq!(gateway.inspect(&name).await["state"], "free");
            Ok(())
        })
        .await;
    }

    #[tokio::test]
    async fn a_guard_without_masters_is_lost_before_its_deadline() {
        let servers = masters(3);
        let gateway = Launch::over(&servers).flag("--node-timeout", "50ms").ready().await;
        let client = client(&[&gateway]);
        let mut fresh = fresh_names();
        measured("the notice of a loss", async || {
            let guard = client.lock(fresh()).ttl(Duration::from_secs(4)).acquire().await;
            let guard = guard.map_err(|error| error.to_string())?;
            let mut deadlines = guard.deadlines();
            tokio::select! {
                changed = deadlines.changed() => changed.expect("the guard lives"),
                loss = guard.lost() => return Err(loss.to_string()),
            }
            servers[..2].iter().for_each(|server| server.stop());
            let loss = timeout(PATIENCE, guard.lost()).await.expect("the guard reports the loss");
            let left = guard.deadline().left();
            servers[..2].iter().for_each(|server| server.cont());
            gateway.all_nodes_admitted().await;
            let is_unconfirmed = matches!(loss.reason, LossReason::Unconfirmed { .. })
                && loss.to_string().contains("outcome_unknown");
            // A tenth of the TTL is 400 ms.
            let is_early = left > Duration::from_millis(100);
            let found = format!("{left:?} before the deadline: {loss}");
            if is_unconfirmed && is_early { Ok(()) } else { Err(found) }
        })
        .await;
    }

    #[tokio::test]
    async fn twenty_waiters_keep_their_order_over_five_turns() {
        let servers = masters(3);
        let short = || over(&servers).flag("--max-wait", "500ms");
        let gateways = [short().ready().await, short().ready().await];
        for count in [1, 2] {
            let gateways: Vec<_> = gateways.iter().take(count).collect();
            let mut fresh = fresh_names();
            measured("the order of waiters", async || {
                let name = fresh();
                let held = client(&gateways).lock(&*name).acquire().await.unwrap();
                let mut line = Line::join(&gateways, &name).await;
                line.pass(5).await;
                held.release().await.unwrap();
                let order = line.order().await;
                let is_kept = order.is_sorted();
                if is_kept { Ok(()) } else { Err(format!("{count} gateways: {order:?}")) }
            })
            .await;
        }
    }

    #[tokio::test]
    async fn without_a_listener_every_call_fails_at_once() {
        measured("calls without a listener", async || {
            within(AT_ONCE, calls_without_a_listener().await)
        })
        .await;
    }

    #[tokio::test]
    async fn calls_with_a_timeout_end_in_time() {
        measured("calls with a timeout", async || {
            // The acquire may have been granted. So its release takes up to 2 s more.
            within(Duration::from_secs(8), calls_with_a_timeout().await?)
        })
        .await;
    }

    #[tokio::test]
    async fn a_release_without_a_gateway_ends_after_5_s() {
        let gateway = patient(Launch::embedded()).ready().await;
        let client = client(&[&gateway]);
        let mut fresh = fresh_names();
        measured("a release without a gateway", async || {
            let guard = client.lock(fresh()).ttl(HOUR).acquire().await.unwrap();
            gateway.signal(Signal::STOP);
            let begin = Instant::now();
            let released = guard.release().await;
            let took = begin.elapsed();
            gateway.signal(Signal::CONT);
            assert!(matches!(released, Err(Error::Unavailable { .. })), "{released:?}");
            within(Duration::from_secs(8), took)
        })
        .await;
    }
}
