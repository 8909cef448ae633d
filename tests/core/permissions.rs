//! The Redis user of gateways: the rights that the page about servers lists are enough for every
//! kind of operation.

use std::sync::Arc;

use redlock_core::node::{Engine, Node, NodeState, NodeStatus};
use redlock_core::{AcquireOptions, ListCursor, LockState, Redlock};

use crate::core::repair::granted_by_all;
use crate::core::waiting::start_waiting;
use crate::support::cluster::{ClusterSettings, OUTLASTING_MS, decided, granted};
use crate::support::gateway::source_root;
use crate::support::harness::{PATIENCE, RedisOptions, RedisServer};
use crate::support::nodes::{LONG_MS, in_state, name, ttl};
use crate::support::resp::Resp;

const CLUSTER: ClusterSettings = ClusterSettings::ENDLESS_QUARANTINE;
const PAGE: &str = "crates/redlock-gateway/docs/servers.md";

/// The words after `ACL SETUSER gateway` on the page.
fn documented_rights() -> Vec<String> {
    let page = std::fs::read_to_string(source_root().join(PAGE)).expect("the page");
    let (_, rest) = page.split_once("ACL SETUSER gateway ").expect("the page has the command");
    let (command, _) = rest.split_once("```").expect("the command is in a block");
    let words = command.split_whitespace().filter(|word| *word != "\\");
    words.map(|word| word.trim_matches('\'').to_owned()).collect()
}

/// A server with the user. Without the module it does not know the module's command, and would not
/// start with a right to it.
fn server(rights: &[String], native: bool) -> RedisServer {
    let mut args = vec!["--user".to_owned(), "gateway".to_owned()];
    args.extend(rights.iter().filter(|right| native || *right != "+redlock.call").cloned());
    RedisServer::start_with(RedisOptions { native: Some(native), args, ..RedisOptions::default() })
}

/// The commands, keys and channels that the server has denied to anybody.
fn denied(server: &RedisServer) -> Vec<String> {
    let Resp::List(entries) = server.cmd(&["ACL", "LOG"]) else { panic!("ACL LOG is a list") };
    let object = |entry: &Resp| match entry {
        Resp::List(fields) => {
            let mut values =
                fields.iter().skip_while(|field| **field != Resp::Bytes("object".into()));
            values.nth(1).map(Resp::text)
        }
        _ => None,
    };
    entries.iter().map(|entry| object(entry).expect("an entry names an object")).collect()
}

/// A gateway that logs in to every master as the Redis user of the page.
async fn gateway(urls: &[String]) -> (Vec<Arc<dyn Node>>, Redlock) {
    let nodes: Vec<Arc<dyn Node>> =
        urls.iter().map(|url| CLUSTER.remote_node(url) as Arc<dyn Node>).collect();
    for node in &nodes {
        in_state(node.as_ref(), NodeState::Admitted).await;
    }
    (nodes.clone(), CLUSTER.redlock(nodes))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn documented_rights_of_the_redis_user_suffice() {
    let rights = documented_rights();
    assert!(rights.len() > 10 && rights.contains(&"-@all".to_owned()), "{rights:?}");
    let natives = [true, false, false];
    let mut servers = natives.map(|native| server(&rights, native));
    let urls = servers.each_ref().map(|server| server.url_as("gateway:PASSWORD@", "127.0.0.1"));
    for url in &urls {
        CLUSTER.mark_by(url).await;
    }
    let (nodes, locks) = gateway(&urls).await;
    let (_others, other) = gateway(&urls).await;
    for (node, native) in nodes.iter().zip(natives) {
        let engine = if native { Engine::Native } else { Engine::Lua };
        assert_eq!(node.status().borrow().engine, Some(engine), "{}", node.name());
    }

    let (lock, kept) = (name("job"), name("kept"));
    let options = AcquireOptions::default;
    let held = granted(&locks, &lock, LONG_MS, options).await;
    let extend = async || locks.extend(&lock, &held.token, ttl(LONG_MS)).await;
    decided(extend).await.expect("the lock is held");
    let waiter = start_waiting(&other, &lock).await;
    locks.release(&lock, &held.token).await.expect("the lock is held");
    let (lease, _) = waiter.await.expect("no panic");
    let page = locks.list("", 10, ListCursor::default(), PATIENCE, |_| true).await;
    assert_eq!(page.expect("a majority is read").locks.len(), 1);
    locks.force_release(&lock, |_| {}).await.expect("the lock is held");
    assert!(other.release(&lock, &lease.token).await.is_err(), "the lock was taken away");
    assert_eq!(locks.inspect(&lock).await.state, LockState::Free);

    // The restarted master lost its data. It gets its locks from the others.
    let lasting = granted_by_all(&locks, &servers, &kept, ttl(OUTLASTING_MS), options).await;
    // A restart clears this log.
    let before_restart = servers.each_ref().map(denied);
    let before = nodes[2].status().borrow().marker.clone();
    servers[2].kill();
    servers[2].restart();
    let is_back = |status: &NodeStatus| {
        status.state == NodeState::Admitted && !status.marker.is_empty() && status.marker != before
    };
    let mut status = nodes[2].status();
    let back = tokio::time::timeout(PATIENCE, status.wait_for(is_back)).await;
    assert!(back.is_ok(), "{:?}", nodes[2].status().borrow());
    drop(back);
    let extend = async || locks.extend(&kept, &lasting.token, ttl(OUTLASTING_MS)).await;
    decided(extend).await.expect("the lock is held");
    assert!(servers[2].cmd(&["EXISTS", "lock:kept"]).integer() == 1, "the master has the lock");

    let missing = before_restart.into_iter().chain(servers.each_ref().map(denied)).flatten();
    assert_eq!(missing.collect::<Vec<_>>(), Vec::<String>::new(), "rights that the user lacks");
}
