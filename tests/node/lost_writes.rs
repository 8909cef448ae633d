//! A master that syncs every write restarts with a file that lacks confirmed writes. Gateways notice
//! that by the number of their last call, and quarantine the master.

use std::fs;
use std::path::PathBuf;

use redlock_core::node::codec::NUMBER_KEPT_MS;
use redlock_core::node::{Node, NodeState, Remedy, SafetyRules, Vote};

use super::eligibility::append_only;
use crate::support::cluster::{ClusterSettings, first_vote};
use crate::support::harness::{RedisOptions, RedisServer};
use crate::support::nodes::{LONG_MS, Lock, ask, in_state, now};
use crate::support::resp::Resp;

const LOCK: &str = "held";

/// The file to which a server appends its writes.
fn appended_file(server: &RedisServer) -> PathBuf {
    let folder = server.dir().join("appendonlydir");
    let files = fs::read_dir(folder).expect("the folder of the append-only files");
    let mut files = files.map(|file| file.expect("a file").path());
    files.find(|path| path.to_string_lossy().ends_with(".incr.aof")).expect("an appended file")
}

fn position(bytes: &[u8], part: &[u8]) -> Option<usize> {
    bytes.windows(part.len()).position(|at| at == part)
}

/// Cuts the file off where the call that set the lock begins, or `more` bytes after that.
fn cut(server: &RedisServer, more: usize) {
    const CALL: &[u8] = b"*1\r\n$5\r\nMULTI\r\n";
    let path = appended_file(server);
    let mut bytes = fs::read(&path).expect("the server has written it");
    let set = position(&bytes, format!("lock:{LOCK}").as_bytes()).expect("the lock is in the file");
    let before = &bytes[..set];
    let call = before.windows(CALL.len()).rposition(|at| at == CALL).expect("a transaction");
    assert!(call + more < set, "the lock itself is cut off");
    bytes.truncate(call + more);
    fs::write(path, bytes).expect("the server has ended");
}

/// The keys of the gateways' numbers.
fn number_keys(server: &RedisServer) -> Vec<String> {
    match server.cmd(&["KEYS", "{lock:}:number:*"]) {
        Resp::List(keys) => keys.iter().map(Resp::text).collect(),
        other => panic!("{other:?}"),
    }
}

/// The largest number that the master keeps for a gateway.
pub(super) fn largest_number(server: &RedisServer) -> u64 {
    let number = |key: String| server.cmd(&["GET", &key]).text().parse().expect("a number");
    number_keys(server).into_iter().map(number).max().expect("a gateway")
}

/// A durable master grants a lock, ends, and starts again. `before` works with the master before its
/// end, and `change` changes its file. Returns the master and its node.
async fn restarted(
    native: bool,
    rules: SafetyRules,
    before: impl AsyncFnOnce(&RedisServer, &dyn Node),
    change: impl FnOnce(&RedisServer),
) -> (RedisServer, impl Node) {
    let cluster = ClusterSettings { rules, ..ClusterSettings::ENDLESS_QUARANTINE };
    let options = RedisOptions { native: Some(native), ..append_only(&[]) };
    let mut server = RedisServer::start_with(options);
    cluster.mark_by(&server.url()).await;
    let node = cluster.remote_node(&server.url());
    in_state(node.as_ref(), NodeState::Admitted).await;
    let granted = ask(node.as_ref(), Lock::new(LOCK).acquire(1, now(), LONG_MS)).await;
    assert_eq!(granted, Vote::Granted);
    before(&server, node.as_ref()).await;
    server.kill();
    in_state(node.as_ref(), NodeState::Connecting).await;
    change(&server);
    server.restart();
    (server, std::sync::Arc::into_inner(node).expect("nobody else has the node"))
}

#[tokio::test]
async fn a_durable_master_whose_file_was_cut_is_quarantined() {
    for (native, more) in [(false, 0), (false, 20), (true, 0), (true, 20)] {
        let (_server, node) =
            restarted(native, SafetyRules::ALL, async |_, _| (), |server| cut(server, more)).await;
        let seen = in_state(&node, NodeState::Quarantined).await;
        assert!(
            seen.detail.contains("calls that another process has answered")
                && seen.remedy == Some(Remedy::WaitWithOneProcess),
            "{seen:?}"
        );
    }
}

#[tokio::test]
async fn a_durable_master_with_its_whole_file_votes_again() {
    for native in [false, true] {
        let is_kept = async |server: &RedisServer, _: &dyn Node| {
            for key in number_keys(server) {
                let left = server.cmd(&["PTTL", &key]).integer() as u64;
                assert!((NUMBER_KEPT_MS - 600_000..=NUMBER_KEPT_MS).contains(&left), "{left}");
            }
        };
        let (_server, node) = restarted(native, SafetyRules::ALL, is_kept, |_| ()).await;
        first_vote(&node).await;
        let again = ask(&node, Lock::new(LOCK).acquire(2, now(), LONG_MS)).await;
        assert!(matches!(again, Vote::Held(_)), "{again:?}");
    }
}

/// A master out of memory still releases locks and answers readings, but cannot store a number.
#[tokio::test]
async fn a_durable_master_that_was_out_of_memory_votes_again() {
    for native in [false, true] {
        let is_full = async |server: &RedisServer, node: &dyn Node| {
            let other = Lock::new("other");
            let t = now();
            assert_eq!(ask(node, other.acquire(1, t, LONG_MS)).await, Vote::Granted);
            server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
            assert!(matches!(ask(node, other.inspect()).await, Vote::Found(_)));
            assert_eq!(ask(node, other.release(1, t)).await, Vote::Released);
            let refused = ask(node, other.acquire(1, now(), LONG_MS)).await;
            assert!(matches!(refused, Vote::Failed(_)), "{refused:?}");
            assert!(matches!(ask(node, Lock::new(LOCK).inspect()).await, Vote::Found(_)));
        };
        let (_server, node) = restarted(native, SafetyRules::ALL, is_full, |_| ()).await;
        first_vote(&node).await;
    }
}

#[tokio::test]
async fn without_the_rule_a_master_grants_again_what_its_file_lost() {
    let off = SafetyRules { answered_calls_are_known: false, ..SafetyRules::ALL };
    let (_server, node) = restarted(false, off, async |_, _| (), |server| cut(server, 0)).await;
    first_vote(&node).await;
    let again = ask(&node, Lock::new(LOCK).acquire(2, now(), LONG_MS)).await;
    assert_eq!(again, Vote::Granted);
}
