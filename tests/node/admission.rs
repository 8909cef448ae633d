//! Masters that have forgotten locks, or may have, do not vote until every such lock has ended: by real servers that lose
//! their data in every way we know of, in the middle of real locks.
//!
//! A lower bound is exact: nobody votes before the quarantine has passed since the moment of the loss. An upper bound is
//! generous, because the machine is busy.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::node::{Effect, Node, NodeState, Reason, Remedy, Rules, Vote};
use redlock_core::{AcquireOptions, Bootstrap, LockError, Redlock, Ttl};
use tokio::time::{Instant, timeout};

use crate::harness::{DeadPort, PATIENCE, RedisOptions, RedisServer, Resp, eventually};
use crate::nodes::{LONG_MS, Lock, ask, assert_failed, in_state, name, now};
use crate::terms::{Terms, first_vote, marker, repeated};

const BLANK: &str = "it is new, or all its data was lost";
const RESTARTED: &str = "it was restarted and may have forgotten locks";
const COPIED: &str = "its data came from another node";
const EVICTED: &str = "it has evicted keys";

fn options(args: &[&str]) -> RedisOptions {
    RedisOptions { args: args.iter().map(|arg| (*arg).to_owned()).collect(), ..RedisOptions::default() }
}

fn append_only(args: &[&str]) -> RedisOptions {
    RedisOptions { append_only: true, ..options(args) }
}

fn servers(count: usize) -> Vec<RedisServer> {
    (0..count).map(|_| RedisServer::start()).collect()
}

#[derive(Debug, Clone, Copy)]
enum Loss {
    Restart,
    Flush,
}

/// One holder reaches three of five masters and gets the lock on them. Two of the three lose everything. Another gateway,
/// which reaches all five, asks for the lock until it gets it. Answers whether that was while the first one held it;
/// `None` when this machine took so long that nothing could be seen.
async fn granted_twice(terms: &Terms, loss: Loss) -> Option<bool> {
    let (mut servers, dead) = (servers(5), [DeadPort::new(), DeadPort::new()]);
    terms.mark(&servers).await;
    let reach = servers[..3].iter().map(RedisServer::url).chain(dead.iter().map(DeadPort::url));
    let holder = terms.redlock(reach.map(|url| terms.lane(&url) as Arc<dyn Node>).collect());
    let lanes = terms.lanes(&servers);
    for lane in &lanes {
        in_state(lane.as_ref(), NodeState::Admitted).await;
    }
    let (other, lock) = (terms.redlock(lanes), name("job"));
    let ttl = Ttl::from_duration(terms.max_ttl).unwrap();
    let acquire = async |locks: &Redlock| locks.acquire(&lock, ttl, AcquireOptions::default()).await;
    let lease = eventually("the first holder", async || acquire(&holder).await.ok()).await;
    for server in &mut servers[1..3] {
        match loss {
            Loss::Restart => server.restart(),
            Loss::Flush => drop(server.cmd(&["FLUSHALL"])),
        }
    }
    if holder.validity(&lease).is_none_or(|left| left < terms.max_ttl / 4) {
        return None;
    }
    Some(
        eventually("the lock is granted again", async || match acquire(&other).await {
            Ok(_) => Some(holder.validity(&lease).is_some()),
            Err(LockError::Held(_) | LockError::NoQuorum(_)) => None,
            Err(error) => panic!("{error}"),
        })
        .await,
    )
}

fn count(outcomes: &[Option<bool>], of: Option<bool>) -> usize {
    outcomes.iter().filter(|outcome| **outcome == of).count()
}

/// A quarantine of a second and a half, and locks long enough for two restarts on a busy machine.
const FORGETFUL: Terms = Terms { max_ttl: Duration::from_millis(1_200), ..Terms::SHORT };

#[test]
fn a_lock_that_two_of_its_three_masters_forgot_in_a_restart_is_not_granted_again() {
    let since = Instant::now();
    let outcomes = repeated(50, 8, async || granted_twice(&FORGETFUL, Loss::Restart).await);
    assert_eq!(count(&outcomes, Some(true)), 0, "two holders at a time");
    assert!(count(&outcomes, Some(false)) >= 25, "this machine is too slow to see anything: {outcomes:?}");
    let off = Terms { rules: Rules { quarantine_is_waited: false, ..Rules::ALL }, ..FORGETFUL };
    let without = repeated(8, 8, async || granted_twice(&off, Loss::Restart).await);
    assert!(count(&without, Some(true)) > 0, "without the quarantine nothing is worse: {without:?}");
    println!(
        "{} repetitions, {} of them in time; without quarantine {} of {} had a second holder; {:?}",
        outcomes.len(),
        count(&outcomes, Some(false)),
        count(&without, Some(true)),
        without.len(),
        since.elapsed()
    );
}

#[test]
fn a_lock_that_two_of_its_three_masters_forgot_in_a_flushall_is_not_granted_again() {
    let outcomes = repeated(10, 5, async || granted_twice(&FORGETFUL, Loss::Flush).await);
    assert_eq!(count(&outcomes, Some(true)), 0, "two holders at a time");
    assert!(count(&outcomes, Some(false)) > 0, "this machine is too slow to see anything: {outcomes:?}");
    // The other gateway has looked at these masters a moment ago: only the marker in each call tells it.
    let off = Terms { rules: Rules { marker_is_checked: false, ..Rules::ALL }, ..FORGETFUL };
    let without = repeated(5, 5, async || granted_twice(&off, Loss::Flush).await);
    assert!(count(&without, Some(true)) > 0, "without the marker nothing is worse: {without:?}");
    println!("without the marker {} of {} had a second holder", count(&without, Some(true)), without.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_that_was_flushed_gives_no_vote_before_the_end_of_its_quarantine() {
    let (terms, server) = (Terms::SHORT, RedisServer::start());
    let lane = terms.admitted(&server.url()).await;
    let lost = Instant::now();
    server.cmd(&["FLUSHALL"]);
    let seen = terms.waits_out(lane.as_ref(), lost, BLANK).await;
    assert!(!seen.is_bootstrapping && seen.remedy == Some(Remedy::WaitOrBootstrap), "{seen:?}");
    assert_eq!(seen.restarts, 0, "it was not restarted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_that_is_back_within_50_ms_without_its_data_is_noticed() {
    let (terms, mut server) = (Terms::SHORT, RedisServer::start());
    let lane = terms.admitted(&server.url()).await;
    for restarts in 1.. {
        assert!(restarts < 20, "no restart here takes less than 50 ms");
        server.kill();
        let lost = Instant::now();
        server.restart();
        let gap = lost.elapsed();
        let seen = terms.waits_out(lane.as_ref(), lost, BLANK).await;
        assert_eq!(seen.restarts, restarts);
        if gap < Duration::from_millis(50) {
            println!("the gap was {gap:?}");
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_that_kept_an_old_snapshot_is_quarantined_although_its_marker_survived() {
    let (terms, mut server) = (Terms::SHORT, RedisServer::start());
    let lane = terms.admitted(&server.url()).await;
    let (before, after) = (Lock::new("before"), Lock::new("after"));
    let t = now();
    assert_eq!(ask(lane.as_ref(), before.acquire(1, t, LONG_MS)).await, Vote::Granted);
    server.cmd(&["SAVE"]);
    let stood = marker(&server);
    assert_eq!(ask(lane.as_ref(), after.acquire(1, t + 1, LONG_MS)).await, Vote::Granted);
    server.kill();
    let lost = Instant::now();
    server.restart();
    let kept: Vec<bool> =
        ["lock:before", "lock:after"].iter().map(|key| server.cmd(&["GET", key]) != Resp::Nil).collect();
    assert_eq!(kept, [true, false], "a snapshot keeps what was there when it was made");
    let seen = terms.waits_out(lane.as_ref(), lost, RESTARTED).await;
    assert!(seen.detail.contains("appendonly no") && seen.remedy == Some(Remedy::WaitThenMakeDurable), "{seen:?}");
    assert!(!seen.is_bootstrapping && seen.restarts == 1, "{seen:?}");
    assert!(stood.is_some() && marker(&server) != stood, "the admission is of this process");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_whose_data_is_another_masters_is_refused_as_a_replica_and_quarantined_afterwards() {
    let (terms, [source, server]) = (Terms::SHORT, [RedisServer::start(), RedisServer::start()]);
    terms.mark_by(&source.url()).await;
    source.cmd(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
    let lane = terms.admitted(&server.url()).await;
    let mine = marker(&server);
    server.cmd(&["REPLICAOF", "127.0.0.1", &source.port().to_string()]);
    let refused = in_state(lane.as_ref(), NodeState::Refused).await;
    assert!(refused.detail.contains("slave") && refused.remedy == Some(Remedy::MakeMaster), "{refused:?}");
    assert_failed(
        ask(lane.as_ref(), Lock::new("a").acquire(1, now(), LONG_MS)).await,
        Reason::Quarantined,
        Effect::None,
    );
    eventually("the data is the other's", async || (marker(&server) == marker(&source)).then_some(())).await;
    assert_ne!(marker(&server), mine);
    let lost = Instant::now();
    server.cmd(&["REPLICAOF", "NO", "ONE"]);
    let seen = terms.waits_out(lane.as_ref(), lost, COPIED).await;
    assert_eq!(seen.restarts, 0);
    assert!(marker(&server) != marker(&source), "each has a marker of its own");
}

/// Its own marker, of this very process, comes back with the data of a replica that missed the newest locks.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_that_took_its_data_back_from_its_own_replica_is_quarantined() {
    let (terms, [replica, server]) = (Terms::SHORT, [RedisServer::start(), RedisServer::start()]);
    for server in [&replica, &server] {
        server.cmd(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
    }
    let lane = terms.admitted(&server.url()).await;
    replica.cmd(&["REPLICAOF", "127.0.0.1", &server.port().to_string()]);
    eventually("the replica has the data", async || (marker(&replica) == marker(&server)).then_some(())).await;
    replica.cmd(&["REPLICAOF", "NO", "ONE"]);
    assert_eq!(ask(lane.as_ref(), Lock::new("newest").acquire(1, now(), LONG_MS)).await, Vote::Granted);
    let stood = marker(&server).expect("it is admitted");
    server.cmd(&["REPLICAOF", "127.0.0.1", &replica.port().to_string()]);
    in_state(lane.as_ref(), NodeState::Refused).await;
    eventually("the newest lock is gone", async || (server.cmd(&["GET", "lock:newest"]) == Resp::Nil).then_some(()))
        .await;
    assert!(marker(&server).is_some_and(|marker| marker == stood), "its marker came back with the data");
    let lost = Instant::now();
    server.cmd(&["REPLICAOF", "NO", "ONE"]);
    terms.waits_out(lane.as_ref(), lost, COPIED).await;
}

async fn refused_for_eviction(lane: &dyn Node, policy: &str) {
    let refused = in_state(lane, NodeState::Refused).await;
    assert!(refused.detail.contains(policy), "{refused:?}");
    assert!(refused.remedy == Some(Remedy::ForbidEvictions), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_that_may_evict_is_refused_until_it_is_mended_and_waits_like_any_new_one() {
    let terms = Terms::SHORT;
    let server = RedisServer::start_with(options(&["--maxmemory-policy", "allkeys-lru"]));
    let lane = terms.lane(&server.url());
    refused_for_eviction(lane.as_ref(), "allkeys-lru").await;
    assert_eq!(marker(&server), None, "nothing is written on a node that is refused");
    let mended = Instant::now();
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    terms.waits_out(lane.as_ref(), mended, BLANK).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_that_could_have_evicted_and_did_not_is_admitted_at_once_when_mended() {
    let (terms, server) = (Terms::ENDLESS, RedisServer::start());
    let lane = terms.admitted(&server.url()).await;
    let stood = marker(&server);
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    refused_for_eviction(lane.as_ref(), "allkeys-lru").await;
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    in_state(lane.as_ref(), NodeState::Admitted).await;
    first_vote(lane.as_ref()).await;
    assert_eq!(marker(&server), stood);
}

/// Fills a server until it has thrown keys away, with keys that expire or not.
fn fill(server: &RedisServer, policy: &str) {
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", policy]);
    let text = server.cmd(&["INFO", "memory"]).text();
    let used = text.lines().find_map(|line| line.strip_prefix("used_memory:")).expect("used_memory");
    let limit = used.trim().parse::<u64>().expect("a number") + 1_000_000;
    server.cmd(&["CONFIG", "SET", "maxmemory", &limit.to_string()]);
    for n in 0..3_000 {
        server.cmd(&["SET", &format!("ballast-{n}"), &"x".repeat(1_000), "PX", "60000"]);
    }
    let stats = server.cmd(&["INFO", "stats"]).text();
    assert!(!stats.contains("evicted_keys:0\r\n"), "nothing was evicted");
    server.cmd(&["CONFIG", "SET", "maxmemory", "0"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_that_evicted_keys_while_it_was_refused_is_quarantined_when_mended() {
    // The one throws away whatever expires, such as locks, and the other the marker too.
    for (policy, why) in [("volatile-lru", EVICTED), ("allkeys-lru", "")] {
        let (terms, server) = (Terms::SHORT, RedisServer::start());
        let lane = terms.admitted(&server.url()).await;
        server.cmd(&["CONFIG", "SET", "maxmemory-policy", policy]);
        refused_for_eviction(lane.as_ref(), policy).await;
        fill(&server, policy);
        let mended = Instant::now();
        server.cmd(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
        terms.waits_out(lane.as_ref(), mended, why).await;
        assert!(lane.status().borrow().evicted_keys > 0);
    }
}

/// Between two looks at the policy: only the number of evicted keys tells.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_that_evicted_keys_unseen_is_quarantined_when_that_shows() {
    let (terms, server) = (Terms::SHORT, RedisServer::start());
    let lane = terms.admitted(&server.url()).await;
    fill(&server, "volatile-lru");
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    let seen = in_state(lane.as_ref(), NodeState::Quarantined).await;
    assert!(seen.detail.contains(EVICTED), "{seen:?}");
    in_state(lane.as_ref(), NodeState::Admitted).await;
    // It is held against it once.
    assert!(timeout(terms.quarantine() * 6, in_state(lane.as_ref(), NodeState::Quarantined)).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn gateways_of_other_configurations_are_refused_and_told_both() {
    let (terms, server) = (Terms::ENDLESS, RedisServer::start());
    let lane = terms.admitted(&server.url()).await;
    let stood = marker(&server);
    let longer = Terms { max_ttl: terms.max_ttl * 2, ..terms };
    let other_set = Terms { cluster: "other nodes", ..terms };
    let set_of = |terms: &Terms| terms.settings().generation.node_set().to_owned();
    for other in [&longer, &other_set] {
        let strange = other.lane(&server.url());
        let refused = in_state(strange.as_ref(), NodeState::Refused).await;
        for terms in [&terms, other] {
            let told = format!("node set {}, max_ttl {} ms", set_of(terms), terms.max_ttl.as_millis());
            assert!(refused.detail.contains(&told), "no {told:?} in {refused:?}");
        }
        assert!(refused.remedy == Some(Remedy::Reconfigure), "{refused:?}");
    }
    assert_ne!(set_of(&terms), set_of(&other_set));
    assert_eq!(marker(&server), stood, "a foreign marker is left alone");
    first_vote(lane.as_ref()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn masters_that_sync_every_write_are_admitted_at_once_after_a_crash_and_keep_their_locks() {
    let terms = Terms::ENDLESS;
    let mut servers: Vec<_> = (0..3).map(|_| RedisServer::start_with(append_only(&[]))).collect();
    terms.mark(&servers).await;
    let lanes = terms.lanes(&servers);
    for lane in &lanes {
        in_state(lane.as_ref(), NodeState::Admitted).await;
    }
    let (locks, lock) = (terms.redlock(lanes.clone()), name("job"));
    let ttl = Ttl::from_millis(LONG_MS).unwrap();
    let lease = locks.acquire(&lock, ttl, AcquireOptions::default()).await.unwrap();
    locks.drained().await;
    let stood: Vec<_> = servers.iter().map(marker).collect();
    for (server, stood) in servers.iter_mut().zip(&stood) {
        assert!(stood.as_ref().is_some_and(|marker| marker.contains(":durable.")), "{stood:?}");
        server.kill();
        server.restart();
    }
    let extended = eventually("the lock can be extended", async || {
        let status = |lane: &Arc<dyn Node>| lane.status().borrow().clone();
        let waiting = lanes.iter().map(status).find(|status| status.state == NodeState::Quarantined);
        assert!(waiting.is_none(), "{waiting:?}");
        locks.extend(&lock, &lease.token, ttl).await.ok()
    })
    .await;
    assert_eq!(extended.token, lease.token);
    for (lane, server) in lanes.iter().zip(&servers) {
        in_state(lane.as_ref(), NodeState::Admitted).await;
        assert_eq!(lane.status().borrow().restarts, 1);
        assert!(marker(server).is_some_and(|marker| marker.contains(":durable.")));
    }
    assert!(matches!(locks.acquire(&lock, ttl, AcquireOptions::default()).await, Err(LockError::Held(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_that_syncs_every_second_is_quarantined_after_a_crash() {
    for (settings, why) in [
        (["--appendfsync", "everysec"], "appendfsync is not always"),
        (["--no-appendfsync-on-rewrite", "yes"], "no-appendfsync-on-rewrite is not no"),
    ] {
        let (terms, mut server) = (Terms::SHORT, RedisServer::start_with(append_only(&settings)));
        let lane = terms.admitted(&server.url()).await;
        server.kill();
        let lost = Instant::now();
        server.restart();
        let seen = terms.waits_out(lane.as_ref(), lost, RESTARTED).await;
        assert!(seen.detail.contains(why), "{seen:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_that_was_weakened_at_run_time_is_quarantined_although_both_starts_were_with_always() {
    let (terms, mut server) = (Terms::SHORT, RedisServer::start_with(append_only(&[])));
    let lane = terms.admitted(&server.url()).await;
    server.cmd(&["CONFIG", "SET", "appendfsync", "everysec"]);
    eventually("the marker says so", async || marker(&server).filter(|marker| marker.contains(":volatile."))).await;
    server.kill();
    let lost = Instant::now();
    server.restart();
    assert_eq!(
        server.cmd(&["CONFIG", "GET", "appendfsync"]),
        Resp::List(["appendfsync", "always"].map(|word| Resp::Bytes(word.into())).into())
    );
    terms.waits_out(lane.as_ref(), lost, RESTARTED).await;
    // From here on it is as good as any other.
    eventually("it counts as durable again", async || marker(&server).filter(|text| text.contains(":durable."))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_replaced_by_an_empty_one_waits_however_durable_both_are() {
    let (terms, mut server) = (Terms::SHORT, RedisServer::start_with(append_only(&[])));
    let lane = terms.admitted(&server.url()).await;
    server.kill_and_wipe();
    let lost = Instant::now();
    server.restart();
    terms.waits_out(lane.as_ref(), lost, BLANK).await;
}

/// A user as managed services give: all but some commands.
fn limited(rights: &'static str) -> (RedisServer, String) {
    let server = RedisServer::start_with(append_only(&["--user", "gate", "on", ">pw", "~*", "&*", "+@all", rights]));
    let url = server.url_as("gate:pw@", "127.0.0.1");
    (server, url)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn where_config_is_forbidden_locks_work_and_a_restart_is_a_quarantine_whatever_is_on_disk() {
    let (terms, (mut server, url)) = (Terms::SHORT, limited("-config"));
    let lane = terms.admitted(&url).await;
    let (lock, t) = (Lock::new("job"), now());
    assert_eq!(ask(lane.as_ref(), lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
    server.kill();
    let lost = Instant::now();
    server.restart();
    let seen = terms.waits_out(lane.as_ref(), lost, RESTARTED).await;
    assert!(seen.detail.contains("durability unknown") && seen.detail.contains("NOPERM"), "{seen:?}");
    assert_eq!(ask(lane.as_ref(), lock.extend(1, t, LONG_MS)).await, Vote::Extended, "it had not forgotten anything");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn where_info_is_forbidden_the_master_is_refused_with_what_to_do() {
    let (terms, (server, url)) = (Terms::SHORT, limited("-info"));
    let lane = terms.lane(&url);
    let told = eventually("it says why it does not vote", async || {
        let status = lane.status().borrow().clone();
        (status.detail.contains("NOPERM") || status.detail.contains("INFO")).then_some(status)
    })
    .await;
    assert_failed(
        ask(lane.as_ref(), Lock::new("a").acquire(1, now(), LONG_MS)).await,
        Reason::Quarantined,
        Effect::None,
    );
    assert_eq!(told.state, NodeState::Refused, "{told:?}");
    assert!(told.remedy == Some(Remedy::AllowInfo), "{told:?}");
    // Mended without a restart of anybody.
    server.cmd(&["ACL", "SETUSER", "gate", "+info"]);
    in_state(lane.as_ref(), NodeState::Admitted).await;
}

#[test]
fn two_gateways_that_admit_one_master_at_the_same_time_agree() {
    let terms = Terms::SHORT;
    repeated(12, 6, async || {
        let (server, since) = (RedisServer::start(), Instant::now());
        let (a, b) = (terms.lane(&server.url()), terms.lane(&server.url()));
        let votes = tokio::join!(first_vote(a.as_ref()), first_vote(b.as_ref()));
        for voted in [votes.0, votes.1] {
            assert!(voted - since >= terms.quarantine(), "{:?}", voted - since);
        }
        let stood = marker(&server);
        assert!(stood.as_ref().is_some_and(|marker| marker.contains(":volatile.")), "{stood:?}");
        let lock = Lock::new("job");
        assert_eq!(ask(a.as_ref(), lock.acquire(1, now(), LONG_MS)).await, Vote::Granted);
        assert!(matches!(ask(b.as_ref(), lock.acquire(2, now(), LONG_MS)).await, Vote::Held(_)));
        assert_eq!(marker(&server), stood, "neither undoes what the other did");
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_gateway_restarted_during_a_quarantine_counts_from_its_own_start() {
    let (terms, server) = (Terms::SHORT, RedisServer::start());
    let first = terms.lane(&server.url());
    in_state(first.as_ref(), NodeState::Quarantined).await;
    let stood = marker(&server);
    tokio::time::sleep(terms.quarantine() / 2).await;
    drop(first);
    let since = Instant::now();
    let second = terms.lane(&server.url());
    in_state(second.as_ref(), NodeState::Quarantined).await;
    assert_eq!(marker(&server), stood, "it waits for the same loss");
    terms.waits_out(second.as_ref(), since, BLANK).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_gateway_that_would_wait_longer_follows_one_that_has_waited() {
    let (terms, server) = (Terms::SHORT, RedisServer::start());
    let since = Instant::now();
    let early = terms.lane(&server.url());
    // This one would wait for hours.
    let late = Terms { skew: Duration::from_secs(3_600), ..terms }.lane(&server.url());
    let waits = in_state(late.as_ref(), NodeState::Quarantined).await;
    assert!(waits.until_micros.unwrap() - waits.since_micros >= 7_200_000_000, "{waits:?}");
    let votes = tokio::join!(first_vote(early.as_ref()), first_vote(late.as_ref()));
    assert!(votes.0 - since >= terms.quarantine() && votes.1 - since >= terms.quarantine());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_second_loss_during_the_quarantine_starts_the_count_anew() {
    let (terms, server) = (Terms { max_ttl: Duration::from_secs(2), ..Terms::SHORT }, RedisServer::start());
    let lane = terms.lane(&server.url());
    let first = in_state(lane.as_ref(), NodeState::Quarantined).await;
    tokio::time::sleep(terms.quarantine() / 2).await;
    let lost = Instant::now();
    server.cmd(&["FLUSHALL"]);
    assert!(now() < first.until_micros.unwrap(), "this machine is too slow: the first quarantine is over");
    let voted = first_vote(lane.as_ref()).await;
    assert!(voted - lost >= terms.quarantine(), "a vote {:?} after the second loss", voted - lost);
}

/// The first of two gateways admits a master and a lock is granted; then the master loses everything. The second one's
/// count began a little later, has not ended, and it has looked at nothing since. It must begin anew: the marker that it
/// saw standing is gone.
#[test]
fn a_count_that_began_before_a_loss_admits_nobody_after_it() {
    let terms = Terms::SHORT;
    let in_time = repeated(8, 4, async || {
        let server = RedisServer::start();
        let first = terms.lane(&server.url());
        in_state(first.as_ref(), NodeState::Quarantined).await;
        tokio::time::sleep(terms.quarantine() / 3).await;
        let second = terms.lane(&server.url());
        let counts = in_state(second.as_ref(), NodeState::Quarantined).await;
        in_state(first.as_ref(), NodeState::Admitted).await;
        assert_eq!(ask(first.as_ref(), Lock::new("job").acquire(1, now(), 700)).await, Vote::Granted);
        let lost = Instant::now();
        server.cmd(&["FLUSHALL"]);
        let in_time = now() < counts.until_micros.unwrap();
        assert!(!in_time || second.status().borrow().state == NodeState::Quarantined);
        let votes = tokio::join!(first_vote(first.as_ref()), first_vote(second.as_ref()));
        for voted in [votes.0, votes.1] {
            assert!(voted - lost >= terms.quarantine(), "a vote {:?} after the loss", voted - lost);
        }
        in_time
    });
    assert!(in_time.contains(&true), "this machine is too slow: the second count had always ended before the loss");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn one_process_under_two_names_votes_once() {
    let (terms, server) = (Terms::SHORT, RedisServer::start());
    let first = terms.admitted(&server.url()).await;
    let second = terms.lane(&server.url_as("", "localhost"));
    let refused = in_state(second.as_ref(), NodeState::Refused).await;
    assert!(refused.detail.contains("admitted as another node"), "{refused:?}");
    assert!(refused.remedy == Some(Remedy::NameEachNodeOnce), "{refused:?}");
    first_vote(first.as_ref()).await;
    assert_eq!(second.status().borrow().state, NodeState::Refused);
}

/// At least this long nothing happens that must not; what makes it happen would take a few milliseconds.
const FOR_A_WHILE: Duration = Duration::from_millis(700);

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_brand_new_cluster_is_admitted_when_its_last_node_has_come_and_the_word_counts_once() {
    let (terms, mut servers) = (Terms::ENDLESS, servers(3));
    servers[2].kill();
    let lanes = terms.lanes_told_new(&servers);
    let locks = terms.redlock(lanes.clone());
    for lane in &lanes[..2] {
        in_state(lane.as_ref(), NodeState::Quarantined).await;
    }
    assert!(timeout(FOR_A_WHILE, locks.bootstrap()).await.is_err(), "one node has not said anything");
    for lane in &lanes[..2] {
        assert_eq!(lane.status().borrow().state, NodeState::Quarantined);
    }
    let (word, ()) = tokio::join!(timeout(PATIENCE, locks.bootstrap()), async { servers[2].restart() });
    assert_eq!(word, Ok(Bootstrap::Confirmed));
    for lane in &lanes {
        in_state(lane.as_ref(), NodeState::Admitted).await;
    }
    let ttl = Ttl::from_millis(LONG_MS).unwrap();
    assert!(locks.acquire(&name("job"), ttl, AcquireOptions::default()).await.is_ok());

    servers.iter().for_each(|server| drop(server.cmd(&["FLUSHALL"])));
    for lane in &lanes {
        in_state(lane.as_ref(), NodeState::Quarantined).await;
    }
    assert!(!locks.has_quorum());
    let refused = locks.acquire(&name("job"), ttl, AcquireOptions::default()).await;
    assert!(matches!(refused, Err(LockError::NoQuorum(_))), "{refused:?}");
    tokio::time::sleep(FOR_A_WHILE).await;
    assert!(lanes.iter().all(|lane| lane.status().borrow().state == NodeState::Quarantined));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_word_that_a_cluster_is_brand_new_is_refuted_by_one_marker() {
    let (terms, servers) = (Terms::ENDLESS, servers(3));
    terms.mark_by(&servers[1].url()).await;
    let before: Vec<_> = servers.iter().map(marker).collect();
    let lanes = terms.lanes_told_new(&servers);
    let locks = terms.redlock(lanes.clone());
    let word = timeout(PATIENCE, locks.bootstrap()).await;
    assert_eq!(word, Ok(Bootstrap::Refuted(lanes[1].name().to_owned())));
    in_state(lanes[1].as_ref(), NodeState::Admitted).await;
    assert_eq!(marker(&servers[1]), before[1]);
    for at in [0, 2] {
        in_state(lanes[at].as_ref(), NodeState::Quarantined).await;
    }
    tokio::time::sleep(FOR_A_WHILE).await;
    for at in [0, 2] {
        assert_eq!(lanes[at].status().borrow().state, NodeState::Quarantined);
    }
}

/// The word still stands in some configuration when everything is lost, and a gateway is restarted then.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_word_that_a_cluster_is_brand_new_is_refuted_by_a_gateway_that_saw_the_loss() {
    let (terms, servers) = (Terms::ENDLESS, servers(3));
    terms.mark(&servers).await;
    let witness = terms.lane(&servers[0].url());
    in_state(witness.as_ref(), NodeState::Admitted).await;
    servers.iter().for_each(|server| drop(server.cmd(&["FLUSHALL"])));
    in_state(witness.as_ref(), NodeState::Quarantined).await;
    let lanes = terms.lanes_told_new(&servers);
    let word = timeout(PATIENCE, terms.redlock(lanes.clone()).bootstrap()).await;
    assert_eq!(word, Ok(Bootstrap::Refuted(lanes[0].name().to_owned())));
    for lane in &lanes {
        in_state(lane.as_ref(), NodeState::Quarantined).await;
    }
}
