//! Masters that have lost locks, or may have lost some, do not vote until every such lock has
//! ended. Real servers lose their data in every known way, while real locks are held.
//!
//! Lower bounds are exact: no master votes before the whole quarantine has passed since the loss.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::node::eligibility::NAME_MOVES_WITHIN;
use redlock_core::node::{Effect, Node, NodeState, Reason, Remedy, SafetyRules, Vote};
use redlock_core::{AcquireOptions, LockError, Redlock, Ttl};
use tokio::time::{Instant, timeout};

use crate::support::cluster::{
    ClusterSettings, OUTLASTING_MS, decided, first_vote, granted, marker, repeated, until_some,
    voted,
};
use crate::support::harness::{
    DeadPort, RedisOptions, RedisServer, daily_or_long, eventually, masters,
};
use crate::support::measure::measured;
use crate::support::nodes::{
    LONG_MS, Lock, ask, assert_extended, assert_failed, in_state, name, now,
};
use crate::support::resp::Resp;

pub(super) const BLANK: &str = "it is new, or all its data was lost";
const RESTARTED: &str = "it was restarted and may have lost locks";
pub(super) const RETURNED: &str = "it was restarted with its data";
const COPIED: &str = "its data came from another node";
const EVICTED: &str = "it has evicted keys";

fn options(args: &[&str]) -> RedisOptions {
    RedisOptions {
        args: args.iter().map(|arg| (*arg).to_owned()).collect(),
        ..RedisOptions::default()
    }
}

pub(super) fn append_only(args: &[&str]) -> RedisOptions {
    RedisOptions { append_only: true, ..options(args) }
}

#[derive(Debug, Clone, Copy)]
enum Loss {
    Restart,
    Flush,
}

/// A first client reaches three of five masters and gets the lock on them. Two of these three lose
/// everything. Another gateway, which reaches all five masters, asks for the lock until it gets the
/// lock. Returns whether it got the lock while the first client still held it. `None` if this
/// machine was too slow to tell.
async fn granted_twice(cluster: &ClusterSettings, loss: Loss) -> Option<bool> {
    let mut servers = masters(5);
    let dead = [DeadPort::new(), DeadPort::new()];
    cluster.mark(&servers).await;
    let reach = servers[..3].iter().map(RedisServer::url).chain(dead.iter().map(DeadPort::url));
    let holder =
        cluster.redlock(reach.map(|url| cluster.remote_node(&url) as Arc<dyn Node>).collect());
    let remotes = cluster.remote_nodes(&servers);
    for remote in &remotes {
        in_state(remote.as_ref(), NodeState::Admitted).await;
    }
    let other = cluster.redlock(remotes);
    let lock = name("job");
    let ttl = Ttl::from_duration(cluster.max_ttl).unwrap();
    let acquire =
        async |locks: &Redlock| locks.acquire(&lock, ttl, AcquireOptions::default()).await;
    let lease = eventually("the first holder", async || acquire(&holder).await.ok()).await;
    for server in &mut servers[1..3] {
        match loss {
            Loss::Restart => server.restart(),
            Loss::Flush => drop(server.cmd(&["FLUSHALL"])),
        }
    }
    if holder.validity(&lease).is_none_or(|left| left < cluster.max_ttl / 4) {
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

/// Locks last longer than two restarts.
const FORGETFUL: ClusterSettings =
    ClusterSettings { max_ttl: Duration::from_secs(3), ..ClusterSettings::SHORT_QUARANTINE };

/// Repeats the scenario with a rule off, until there is a second holder.
fn has_a_second_holder(off: &ClusterSettings, loss: Loss) {
    let scenario = async || granted_twice(off, loss).await.filter(|is_second| *is_second);
    until_some("a second holder without the rule", 4, scenario);
}

#[test]
fn a_lock_lost_by_two_of_three_restarts_is_not_granted_again() {
    let since = Instant::now();
    let outcomes =
        repeated(daily_or_long(8, 24), 8, async || granted_twice(&FORGETFUL, Loss::Restart).await);
    assert_eq!(count(&outcomes, Some(true)), 0, "two holders at once");
    println!(
        "{} repetitions, {} of them in time; {:?}",
        outcomes.len(),
        count(&outcomes, Some(false)),
        since.elapsed()
    );
    // Without a quarantine, the locks may last so long that the machine is fast enough.
    let rules = SafetyRules { quarantine_is_waited: false, ..SafetyRules::ALL };
    let off = ClusterSettings { rules, ..ClusterSettings::ENDLESS_QUARANTINE };
    has_a_second_holder(&off, Loss::Restart);
}

#[test]
fn a_lock_lost_by_two_of_three_flushalls_is_not_granted_again() {
    let outcomes =
        repeated(daily_or_long(5, 10), 5, async || granted_twice(&FORGETFUL, Loss::Flush).await);
    assert_eq!(count(&outcomes, Some(true)), 0, "two holders at once");
    println!("{} of {} in time", count(&outcomes, Some(false)), outcomes.len());
    // The other gateway has just probed these masters. So it can detect the loss only by the marker
    // in each call.
    let rules = SafetyRules { marker_is_checked: false, ..SafetyRules::ALL };
    has_a_second_holder(&ClusterSettings { rules, ..FORGETFUL }, Loss::Flush);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_flushed_master_does_not_vote_during_its_quarantine() {
    let cluster = ClusterSettings::SHORT_QUARANTINE;
    let server = RedisServer::start();
    let remote = cluster.admitted(&server.url()).await;
    let lost = Instant::now();
    server.cmd(&["FLUSHALL"]);
    let seen = cluster.waits_out(remote.as_ref(), lost, BLANK).await;
    assert!(!seen.is_bootstrapping && seen.remedy == Some(Remedy::Wait), "{seen:?}");
    assert_eq!(seen.restarts, 0, "the master was not restarted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_quick_empty_restart_is_noticed() {
    let cluster = ClusterSettings::SHORT_QUARANTINE;
    let mut server = RedisServer::start();
    let remote = cluster.admitted(&server.url()).await;
    // A restart may be slow on a busy machine. Then it shows less, and another one follows.
    for restarts in 1..=3 {
        server.kill();
        let lost = Instant::now();
        server.restart();
        let gap = lost.elapsed();
        let seen = cluster.waits_out(remote.as_ref(), lost, BLANK).await;
        assert_eq!(seen.restarts, restarts);
        if gap < Duration::from_millis(150) {
            println!("the gap was {gap:?}");
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_old_snapshot_with_its_marker_is_quarantined() {
    let cluster = ClusterSettings::SHORT_QUARANTINE;
    let mut server = RedisServer::start();
    let remote = cluster.admitted(&server.url()).await;
    let before = Lock::new("before");
    let after = Lock::new("after");
    let acquire = async |lock: Lock| voted(remote.as_ref(), |t| lock.acquire(1, t, LONG_MS)).await;
    assert_eq!(acquire(before).await, Vote::Granted);
    server.cmd(&["SAVE"]);
    let stood = marker(&server);
    assert_eq!(acquire(after).await, Vote::Granted);
    server.kill();
    let lost = Instant::now();
    server.restart();
    let kept: Vec<bool> = ["lock:before", "lock:after"]
        .iter()
        .map(|key| server.cmd(&["GET", key]) != Resp::Nil)
        .collect();
    assert_eq!(kept, [true, false], "the snapshot is older than the lock");
    let seen = cluster.waits_out(remote.as_ref(), lost, RESTARTED).await;
    assert!(
        seen.detail.contains("appendonly no") && seen.remedy == Some(Remedy::WaitThenMakeDurable),
        "{seen:?}"
    );
    assert!(!seen.is_bootstrapping && seen.restarts == 1, "{seen:?}");
    assert!(stood.is_some() && marker(&server) != stood, "the marker belongs to this process");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_former_replica_of_another_master_is_quarantined() {
    let cluster = ClusterSettings::SHORT_QUARANTINE;
    let [source, server] = [RedisServer::start(), RedisServer::start()];
    cluster.mark_by(&source.url()).await;
    source.cmd(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
    let remote = cluster.admitted(&server.url()).await;
    let mine = marker(&server);
    server.cmd(&["REPLICAOF", "127.0.0.1", &source.port().to_string()]);
    let refused = in_state(remote.as_ref(), NodeState::Refused).await;
    assert!(
        refused.detail.contains("slave") && refused.remedy == Some(Remedy::MakeMaster),
        "{refused:?}"
    );
    assert_failed(
        ask(remote.as_ref(), Lock::new("a").acquire(1, now(), LONG_MS)).await,
        Reason::Refused,
        Effect::None,
    );
    eventually("the master has the other one's data", async || {
        (marker(&server) == marker(&source)).then_some(())
    })
    .await;
    assert_ne!(marker(&server), mine);
    let lost = Instant::now();
    server.cmd(&["REPLICAOF", "NO", "ONE"]);
    let seen = cluster.waits_out(remote.as_ref(), lost, COPIED).await;
    assert_eq!(seen.restarts, 0);
    assert!(marker(&server) != marker(&source), "each master has its own marker");
}

/// A replica missed the newest locks. Its data replaces that of the master, and with it the marker
/// of this very process returns.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_restored_from_its_replica_is_quarantined() {
    let cluster = ClusterSettings::SHORT_QUARANTINE;
    let [replica, server] = [RedisServer::start(), RedisServer::start()];
    for server in [&replica, &server] {
        server.cmd(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
    }
    let remote = cluster.admitted(&server.url()).await;
    replica.cmd(&["REPLICAOF", "127.0.0.1", &server.port().to_string()]);
    eventually("the replica has the data", async || {
        (marker(&replica) == marker(&server)).then_some(())
    })
    .await;
    replica.cmd(&["REPLICAOF", "NO", "ONE"]);
    let newest = Lock::new("newest");
    assert_eq!(voted(remote.as_ref(), |t| newest.acquire(1, t, LONG_MS)).await, Vote::Granted);
    let stood = marker(&server).expect("the master is admitted");
    server.cmd(&["REPLICAOF", "127.0.0.1", &replica.port().to_string()]);
    in_state(remote.as_ref(), NodeState::Refused).await;
    eventually("the newest lock is gone", async || {
        (server.cmd(&["GET", "lock:newest"]) == Resp::Nil).then_some(())
    })
    .await;
    assert!(
        marker(&server).is_some_and(|marker| marker == stood),
        "the marker came back with the data"
    );
    let lost = Instant::now();
    server.cmd(&["REPLICAOF", "NO", "ONE"]);
    cluster.waits_out(remote.as_ref(), lost, COPIED).await;
}

async fn refused_for_eviction(remote: &dyn Node, policy: &str) {
    let refused = in_state(remote, NodeState::Refused).await;
    assert!(refused.detail.contains(policy), "{refused:?}");
    assert!(refused.remedy == Some(Remedy::ForbidEvictions), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_evicting_master_is_refused_until_fixed_then_quarantined() {
    let cluster = ClusterSettings::SHORT_QUARANTINE;
    let server = RedisServer::start_with(options(&["--maxmemory-policy", "allkeys-lru"]));
    let remote = cluster.remote_node(&server.url());
    refused_for_eviction(remote.as_ref(), "allkeys-lru").await;
    assert_eq!(marker(&server), None, "nothing is written on a node that is refused");
    let fixed = Instant::now();
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    cluster.waits_out(remote.as_ref(), fixed, BLANK).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_fixed_master_that_evicted_nothing_is_admitted_at_once() {
    let cluster = ClusterSettings::ENDLESS_QUARANTINE;
    let server = RedisServer::start();
    let remote = cluster.admitted(&server.url()).await;
    let stood = marker(&server);
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    refused_for_eviction(remote.as_ref(), "allkeys-lru").await;
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    in_state(remote.as_ref(), NodeState::Admitted).await;
    first_vote(remote.as_ref()).await;
    assert_eq!(marker(&server), stood);
}

/// Fills a server with keys, with or without an expiry, until the server has evicted some.
fn fill(server: &RedisServer, policy: &str) {
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", policy]);
    let text = server.cmd(&["INFO", "memory"]).text();
    let used =
        text.lines().find_map(|line| line.strip_prefix("used_memory:")).expect("used_memory");
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
async fn a_master_that_evicted_while_refused_is_quarantined() {
    // The first policy evicts keys with an expiry, such as locks. The second may evict the marker,
    // too.
    for (policy, why) in [("volatile-lru", EVICTED), ("allkeys-lru", "")] {
        let cluster = ClusterSettings::SHORT_QUARANTINE;
        let server = RedisServer::start();
        let remote = cluster.admitted(&server.url()).await;
        server.cmd(&["CONFIG", "SET", "maxmemory-policy", policy]);
        refused_for_eviction(remote.as_ref(), policy).await;
        fill(&server, policy);
        let fixed = Instant::now();
        server.cmd(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
        cluster.waits_out(remote.as_ref(), fixed, why).await;
        assert!(remote.status().borrow().evicted_keys > 0);
    }
}

/// The policy changes and changes back between two probes. Only the number of evicted keys shows
/// it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_that_evicted_unseen_is_quarantined_when_noticed() {
    let cluster = ClusterSettings::SHORT_QUARANTINE;
    let server = RedisServer::start();
    let remote = cluster.admitted(&server.url()).await;
    fill(&server, "volatile-lru");
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    let seen = in_state(remote.as_ref(), NodeState::Quarantined).await;
    assert!(seen.detail.contains(EVICTED), "{seen:?}");
    in_state(remote.as_ref(), NodeState::Admitted).await;
    // The master has evicted keys, and is quarantined for that only once.
    // A probe every second would show the evictions again.
    assert!(
        timeout(cluster.quarantine(), in_state(remote.as_ref(), NodeState::Quarantined))
            .await
            .is_err()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn durable_masters_keep_locks_and_vote_after_names_move() {
    let cluster = ClusterSettings::ENDLESS_QUARANTINE;
    let mut servers: Vec<_> = (0..3).map(|_| RedisServer::start_with(append_only(&[]))).collect();
    cluster.mark(&servers).await;
    let remotes = cluster.remote_nodes(&servers);
    for remote in &remotes {
        in_state(remote.as_ref(), NodeState::Admitted).await;
    }
    let locks = cluster.redlock(remotes.clone());
    let lock = name("job");
    let options = AcquireOptions::default;
    let lease = granted(&locks, &lock, OUTLASTING_MS, options).await;
    let ttl = lease.ttl;
    locks.drained().await;
    let stood: Vec<_> = servers.iter().map(marker).collect();
    let began = Instant::now();
    for (server, stood) in servers.iter_mut().zip(&stood) {
        assert!(stood.as_ref().is_some_and(|marker| marker.contains(":durable.")), "{stood:?}");
        server.kill();
        server.restart();
    }
    let extended = eventually("the lock can be extended", async || {
        let status = |remote: &Arc<dyn Node>| remote.status().borrow().clone();
        for waiting in
            remotes.iter().map(status).filter(|status| status.state == NodeState::Quarantined)
        {
            assert!(
                waiting.detail.contains(RETURNED) && waiting.remedy == Some(Remedy::Wait),
                "{waiting:?}"
            );
            let wait =
                Duration::from_micros(waiting.until_micros.expect("an end") - waiting.since_micros);
            assert!(wait <= NAME_MOVES_WITHIN, "{waiting:?}");
        }
        locks.extend(&lock, &lease.token, ttl).await.ok()
    })
    .await;
    assert!(began.elapsed() >= NAME_MOVES_WITHIN, "a vote {:?} after a restart", began.elapsed());
    assert_eq!(extended.token, lease.token);
    for (remote, server) in remotes.iter().zip(&servers) {
        in_state(remote.as_ref(), NodeState::Admitted).await;
        assert_eq!(remote.status().borrow().restarts, 1);
        assert!(marker(server).is_some_and(|marker| marker.contains(":durable.")));
    }
    let second = decided(async || locks.acquire(&lock, ttl, options()).await).await;
    assert!(matches!(second, Err(LockError::Held(_))), "{second:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_with_everysec_is_quarantined_after_a_crash() {
    for (settings, why) in [
        (["--appendfsync", "everysec"], "appendfsync is not always"),
        (["--no-appendfsync-on-rewrite", "yes"], "no-appendfsync-on-rewrite is not no"),
    ] {
        let cluster = ClusterSettings::SHORT_QUARANTINE;
        let mut server = RedisServer::start_with(append_only(&settings));
        let remote = cluster.admitted(&server.url()).await;
        server.kill();
        let lost = Instant::now();
        server.restart();
        let seen = cluster.waits_out(remote.as_ref(), lost, RESTARTED).await;
        assert!(seen.detail.contains(why), "{seen:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_weakened_at_run_time_is_quarantined() {
    let cluster = ClusterSettings::SHORT_QUARANTINE;
    let mut server = RedisServer::start_with(append_only(&[]));
    let remote = cluster.admitted(&server.url()).await;
    server.cmd(&["CONFIG", "SET", "appendfsync", "everysec"]);
    eventually("the marker has the new reason", async || {
        marker(&server).filter(|marker| marker.contains(":volatile."))
    })
    .await;
    server.kill();
    let lost = Instant::now();
    server.restart();
    assert_eq!(
        server.cmd(&["CONFIG", "GET", "appendfsync"]),
        Resp::List(["appendfsync", "always"].map(|word| Resp::Bytes(word.into())).into())
    );
    cluster.waits_out(remote.as_ref(), lost, RESTARTED).await;
    // From here on the master behaves like any other.
    eventually("the master counts as durable again", async || {
        marker(&server).filter(|text| text.contains(":durable."))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_master_replaced_by_an_empty_one_is_quarantined() {
    let cluster = ClusterSettings::SHORT_QUARANTINE;
    let mut server = RedisServer::start_with(append_only(&[]));
    let remote = cluster.admitted(&server.url()).await;
    server.kill_and_wipe();
    let lost = Instant::now();
    server.restart();
    cluster.waits_out(remote.as_ref(), lost, BLANK).await;
}

/// A user with the rights that managed services give: all commands except some.
fn limited(rights: &'static str) -> (RedisServer, String) {
    let server = RedisServer::start_with(append_only(&[
        "--user", "gate", "on", ">pw", "~*", "&*", "+@all", rights,
    ]));
    let url = server.url_as("gate:pw@", "127.0.0.1");
    (server, url)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn without_config_get_every_restart_is_a_quarantine() {
    let cluster = ClusterSettings::SHORT_QUARANTINE;
    let (mut server, url) = limited("-config");
    let remote = cluster.admitted(&url).await;
    let lock = Lock::new("job");
    let t = eventually("the lock is granted", async || {
        let t = now();
        (ask(remote.as_ref(), lock.acquire(1, t, LONG_MS)).await == Vote::Granted).then_some(t)
    })
    .await;
    server.kill();
    let lost = Instant::now();
    server.restart();
    let seen = cluster.waits_out(remote.as_ref(), lost, RESTARTED).await;
    assert!(
        seen.detail.contains("durability unknown") && seen.detail.contains("NOPERM"),
        "{seen:?}"
    );
    assert_extended(&ask(remote.as_ref(), lock.extend(1, t, LONG_MS)).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn without_info_a_master_is_refused_with_the_cure() {
    let cluster = ClusterSettings::SHORT_QUARANTINE;
    let (server, url) = limited("-info");
    let remote = cluster.remote_node(&url);
    let seen_refused = eventually("the status shows why the master does not vote", async || {
        let status = remote.status().borrow().clone();
        (status.detail.contains("NOPERM") || status.detail.contains("INFO")).then_some(status)
    })
    .await;
    assert_failed(
        ask(remote.as_ref(), Lock::new("a").acquire(1, now(), LONG_MS)).await,
        Reason::Refused,
        Effect::None,
    );
    assert_eq!(seen_refused.state, NodeState::Refused, "{seen_refused:?}");
    assert!(seen_refused.remedy == Some(Remedy::AllowInfo), "{seen_refused:?}");
    // The operator's fix works without any restart.
    server.cmd(&["ACL", "SETUSER", "gate", "+info"]);
    in_state(remote.as_ref(), NodeState::Admitted).await;
}

mod measured {
    use super::*;

    /// The longest time between the end of a quarantine and a vote.
    const SOON: Duration = Duration::from_secs(6);

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_master_votes_soon_after_its_quarantine() {
        measured("the time until a master votes again", async || {
            let cluster = ClusterSettings::SHORT_QUARANTINE;
            let limit = cluster.quarantine() + SOON;
            for loss in [Loss::Flush, Loss::Restart] {
                let mut server = RedisServer::start();
                let remote = cluster.admitted(&server.url()).await;
                let lost = Instant::now();
                match loss {
                    Loss::Flush => drop(server.cmd(&["FLUSHALL"])),
                    Loss::Restart => server.restart(),
                }
                in_state(remote.as_ref(), NodeState::Quarantined).await;
                let waited = first_vote(remote.as_ref()).await - lost;
                if waited > limit {
                    return Err(format!("{loss:?}: {waited:?}, but the limit is {limit:?}"));
                }
            }
            Ok(())
        })
        .await;
    }
}
