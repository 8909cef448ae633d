//! The Redis module apart from its answers: the data that it writes, and how it is loaded.

use std::collections::BTreeMap;
use std::sync::Arc;

use redlock_core::node::Engine;
use redlock_core::node::{Node, Vote};

use crate::support::chance::{Chance, seed};
use crate::support::gateway::module;
use crate::support::harness::{PATIENCE, RedisOptions, RedisServer, eventually};
use crate::support::nodes::{LONG_MS, Lock, ask, assert_extended, now, remote_node, submit, votes};
use crate::support::resp::Resp;

fn options(native: bool, args: &[&str]) -> RedisOptions {
    let args = args.iter().map(ToString::to_string).collect();
    RedisOptions { native: Some(native), append_only: true, args, ..RedisOptions::default() }
}

/// Waits until the node votes through this engine: script or module.
async fn votes_by(node: &dyn Node, engine: Engine) {
    let mut status = node.status();
    let voting = |status: &redlock_core::node::NodeStatus| {
        status.state.is_admitted() && status.engine == Some(engine)
    };
    let seen = tokio::time::timeout(PATIENCE, status.wait_for(voting)).await;
    assert!(seen.is_ok(), "{:?}", node.status().borrow());
}

/// Every key, with its value and its expiry.
fn stored(server: &RedisServer) -> BTreeMap<String, (Resp, i64)> {
    let Resp::List(keys) = server.cmd(&["KEYS", "*"]) else { panic!("a list of keys") };
    let entry = |key: &Resp| {
        let key = key.text().to_owned();
        let stored = (server.cmd(&["GET", &key]), server.cmd(&["PEXPIRETIME", &key]).integer());
        (key, stored)
    };
    keys.iter().map(entry).collect()
}

/// Runs operations with every kind of effect.
async fn effects(node: &dyn Node) {
    let [held, extended, released, tombstoned, undone, repaired] =
        ["a", "b", "c", "d", "e", "f"].map(Lock::new);
    let t = now();
    for lock in [&held, &extended, &released, &undone] {
        assert_eq!(ask(node, lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
    }
    assert_extended(&ask(node, extended.extend(1, t, 2 * LONG_MS)).await);
    assert_eq!(ask(node, released.release(1, t)).await, Vote::Released);
    assert_eq!(ask(node, tombstoned.release(1, t)).await, Vote::Missing);
    assert_eq!(ask(node, undone.undo(1, t)).await, Vote::Released);
    assert_eq!(ask(node, repaired.repair(1, t, LONG_MS)).await, Vote::Granted);
}

#[tokio::test]
async fn data_written_with_the_module_loads_without_it_and_back() {
    for native in [true, false] {
        let mut server = RedisServer::start_with(options(native, &[]));
        let node = remote_node(&server.url());
        votes_by(node.as_ref(), if native { Engine::Native } else { Engine::Lua }).await;
        effects(node.as_ref()).await;
        drop(node);
        let before = stored(&server);
        // Three locks are stored. Five have a watermark: these three, the released one, and the one
        // with only a tombstone. The other three keys are the marker, its database, and the number
        // of the last call.
        assert_eq!(before.len(), 3 + 5 + 3, "{before:#?}");
        server.restart_as(!native);
        assert_eq!(stored(&server), before, "native: {native}");
    }
}

/// How far a server is in the stream of the master's writes, by the offset that it reports.
fn offset(server: &RedisServer, field: &str) -> u64 {
    let info = server.cmd(&["INFO", "replication"]).text();
    let value = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{field} in {info}"))
}

#[tokio::test]
async fn a_replica_without_the_module_follows_a_master_with_it() {
    let master = RedisServer::start_with(options(true, &[]));
    let replica = RedisServer::start_with(options(
        false,
        &["--replicaof", "127.0.0.1", &master.port().to_string()],
    ));
    eventually("the worker is connected", async || {
        replica.cmd(&["INFO", "replication"]).text().contains("master_link_status:up").then_some(())
    })
    .await;
    let node = remote_node(&master.url());
    votes_by(node.as_ref(), Engine::Native).await;
    effects(node.as_ref()).await;
    // WAIT would not help: it covers only writes of its own connection, and this one has written
    // nothing.
    let written = offset(&master, "master_repl_offset");
    eventually("the replica has read all of it", async || {
        (offset(&replica, "slave_repl_offset") >= written).then_some(())
    })
    .await;
    assert_eq!(stored(&replica), stored(&master));
}

#[tokio::test]
async fn loading_the_module_loses_no_lock() {
    let server = RedisServer::start_with(options(false, &["--enable-module-command", "local"]));
    let node = remote_node(&server.url());
    votes_by(node.as_ref(), Engine::Lua).await;
    let held = Lock::new("a");
    let t = now();
    assert_eq!(ask(node.as_ref(), held.acquire(1, t, LONG_MS)).await, Vote::Granted);
    server.cmd(&["MODULE", "LOAD", module().to_str().unwrap()]);
    server.cmd(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    votes_by(node.as_ref(), Engine::Native).await;
    assert_extended(&ask(node.as_ref(), held.extend(1, t, LONG_MS)).await);
    // Redis 8.2.3 would crash at the next call of a module that was unloaded.
    let refused = server.answer(&["MODULE", "UNLOAD", "redlock"]).expect_err("it stays loaded");
    assert!(refused.contains("unloading module"), "{refused}");
    assert_eq!(ask(node.as_ref(), held.release(1, t)).await, Vote::Released);
    assert_eq!(node.status().borrow().engine, Some(Engine::Native));
    assert_eq!(node.status().borrow().restarts, 0);
}

/// A client that tracks or watches keys is notified only of writes. The script behaves the same
/// way.
#[tokio::test]
async fn key_watchers_get_events_for_changes_and_not_for_reads() {
    for native in [true, false] {
        let server = RedisServer::start_with(options(native, &[]));
        let node = remote_node(&server.url());
        votes_by(node.as_ref(), if native { Engine::Native } else { Engine::Lua }).await;
        let lock = Lock::new("a");
        let t = now();
        let ask = async |op| ask(node.as_ref(), op).await;
        let watch = || server.cmd(&[&b"WATCH"[..], &lock.keys.lock, &lock.keys.fence]);
        let was_changed = || {
            server.cmd(&["MULTI"]);
            server.cmd(&["EXEC"]) == Resp::Nil
        };
        watch();
        assert_eq!(ask(lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
        assert!(was_changed(), "native: {native}");
        watch();
        assert!(matches!(ask(lock.acquire(2, t + 1, LONG_MS)).await, Vote::Held(_)));
        assert!(matches!(ask(lock.inspect()).await, Vote::Found(_)));
        assert!(!was_changed(), "native: {native}");
        watch();
        assert_extended(&ask(lock.extend(1, t, 2 * LONG_MS)).await);
        assert!(was_changed(), "native: {native}");
        watch();
        assert_eq!(ask(lock.release(1, t)).await, Vote::Released);
        assert!(was_changed(), "native: {native}");
    }
}

/// Two kinds of users are served by the script: one without the right to the module's command, and
/// one whose rights were set before the module existed.
#[tokio::test]
async fn the_module_applies_the_callers_permissions() {
    let server = RedisServer::start_with(options(true, &[]));
    server.cmd(&["ACL", "SETUSER", "older", "on", ">pw", "~*", "&*", "+@all", "-redlock.call"]);
    server.cmd(&[
        "ACL",
        "SETUSER",
        "narrow",
        "on",
        ">pw",
        "~{lock:}:*",
        "~lock:mine*",
        "~{lock:mine*",
        "&*",
        "+@all",
    ]);
    let at = |user: &str| remote_node(&format!("redis://{user}:pw@127.0.0.1:{}", server.port()));
    let older = at("older");
    votes_by(older.as_ref(), Engine::Lua).await;
    assert_eq!(ask(older.as_ref(), Lock::new("a").acquire(1, now(), LONG_MS)).await, Vote::Granted);
    let narrow = at("narrow");
    votes_by(narrow.as_ref(), Engine::Native).await;
    assert_eq!(
        ask(narrow.as_ref(), Lock::new("mine").acquire(1, now(), LONG_MS)).await,
        Vote::Granted
    );
    let theirs = ask(narrow.as_ref(), Lock::new("theirs").acquire(1, now(), LONG_MS)).await;
    assert!(
        matches!(&theirs, Vote::Failed(failure) if failure.detail.contains("NOPERM")),
        "{theirs:?}"
    );
    assert_eq!(server.cmd(&["EXISTS", "lock:theirs"]), Resp::Integer(0));
}

/// With `appendfsync always`, every answered operation is on disk. `MODULE_SEED=<seed>` repeats a
/// run with the same moments.
#[tokio::test]
async fn a_kill_at_any_moment_loses_nothing_answered() {
    let mut chance = Chance::of(seed("MODULE_SEED"), 0);
    let mut server = RedisServer::start_with(options(true, &[]));
    for round in 0..5 {
        let node: Arc<dyn Node> = remote_node(&server.url());
        votes_by(node.as_ref(), Engine::Native).await;
        let t = now();
        let mut granted = Vec::new();
        let enough = 20 + chance.below(200);
        let mut pid = Some(&mut server);
        for batch in 0.. {
            let locks: Vec<_> =
                (0..16).map(|n| Lock::new(&format!("{round}/{batch}/{n}"))).collect();
            let pending = locks
                .iter()
                .map(|lock| submit(node.as_ref(), lock.acquire(1, t, LONG_MS)))
                .collect();
            if granted.len() >= enough
                && let Some(server) = pid.take()
            {
                server.kill();
            }
            let answers = votes(pending).await;
            let all = answers.iter().all(|vote| *vote == Vote::Granted);
            granted.extend(
                locks
                    .into_iter()
                    .zip(answers)
                    .filter(|(_, vote)| *vote == Vote::Granted)
                    .map(|(lock, _)| lock),
            );
            if !all {
                break;
            }
        }
        server.restart();
        for lock in &granted {
            for key in [&lock.keys.lock, &lock.keys.fence] {
                let stands = server.cmd(&[b"EXISTS", &key[..]]);
                assert_eq!(
                    stands,
                    Resp::Integer(1),
                    "round {round}: {key:?} of {} was granted",
                    granted.len()
                );
            }
        }
        assert!(granted.len() >= enough);
    }
}
