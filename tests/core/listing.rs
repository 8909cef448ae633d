//! The majority's view of one lock, and of all locks with a given prefix.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use redlock_core::node::{Effect, Keys, Node, NodeState, Reason};
use redlock_core::{ListCursor, LockError, LockName, LockState, NodeAnswer, NodeView, Redlock};
use tokio::time::timeout;

use crate::core::locks::{LONG, acquire, key, labelled};
use crate::support::harness::{PATIENCE, RedisServer, eventually};
use crate::support::nodes::{
    Cluster, NODE_TIMEOUT, PREFIX, in_state, intercepted, name, redlock, ttl,
};

#[tokio::test]
async fn an_inspection_follows_the_majority() {
    let mut cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let lock = name("job");
    assert_eq!(locks.inspect(&lock).await.state, LockState::Free);
    // A foreign key on a minority does not hold the lock.
    cluster.servers[0].cmd(&["SET", &key(&lock), "their-uuid"]);
    let minority = locks.inspect(&lock).await;
    assert_eq!(minority.state, LockState::Free, "{minority:?}");
    cluster.servers[0].cmd(&["DEL", &key(&lock)]);

    let lease = locks.acquire(&lock, ttl(LONG), labelled("me")).await.unwrap();
    let seen = locks.inspect(&lock).await;
    let LockState::Held(by) = seen.state else { panic!("{seen:?}") };
    assert_eq!((&*by.info, by.fencing), (&b"me"[..], Some(lease.token.fencing())));
    assert!(by.expires_in.unwrap() <= Duration::from_millis(LONG));
    assert_eq!(seen.nodes.len(), 3);
    assert!(
        seen.nodes.iter().filter(|(_, view)| *view == NodeView::Held).count() >= 2,
        "{:?}",
        seen.nodes
    );

    cluster.servers[0].kill();
    in_state(cluster.nodes[0].as_ref(), NodeState::Connecting).await;
    assert!(matches!(locks.inspect(&lock).await.state, LockState::Held(_)));
    cluster.servers[1].kill();
    in_state(cluster.nodes[1].as_ref(), NodeState::Connecting).await;
    let unknown = locks.inspect(&lock).await;
    assert_eq!(unknown.state, LockState::Unknown);
    assert!(matches!(unknown.nodes[0].1, NodeView::Failed(_)), "{unknown:?}");
    let extended = locks.extend(&lock, &lease.token, ttl(LONG)).await;
    assert!(
        matches!(&extended, Err(error @ LockError::Unknown(_)) if error.effect() == Effect::Possible),
        "{extended:?}"
    );
    let released = locks.release(&lock, &lease.token).await;
    assert!(matches!(released, Err(LockError::Unknown(_))), "{released:?}");
}

#[tokio::test]
async fn three_values_without_a_majority_name_no_holder() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let lock = name("job");
    for (index, server) in cluster.servers.iter().enumerate() {
        server.cmd(&["SET", &key(&lock), &format!("client-{index}"), "PX", "3600000"]);
    }
    assert_eq!(locks.inspect(&lock).await.state, LockState::Free);
    assert!(
        matches!(acquire(&locks, &lock, LONG).await, Err(LockError::Held(_))),
        "nobody else can get the lock either"
    );
}

async fn list_all(locks: &Redlock, prefix: &str, limit: usize) -> (Vec<String>, usize) {
    let mut found = Vec::new();
    let mut pages = 0;
    let mut cursor = ListCursor::default();
    loop {
        let page = locks.list(prefix, limit, cursor, PATIENCE, |_| true).await.unwrap();
        let held = |(_, state): &(LockName, LockState)| matches!(state, LockState::Held(_));
        assert!(page.locks.len() <= limit, "{} locks on a page of {limit}", page.locks.len());
        found.extend(page.locks.into_iter().filter(held).map(|(lock, _)| lock.to_string()));
        pages += 1;
        match page.next {
            // A client receives and returns the cursor as text.
            Some(next) => cursor = next.to_string().parse::<ListCursor>().unwrap(),
            None => return (found, pages),
        }
    }
}

fn assert_once_each(found: Vec<String>, wanted: &[LockName]) {
    let set: BTreeSet<_> = found.iter().cloned().collect();
    assert_eq!(set, wanted.iter().map(ToString::to_string).collect());
    assert_eq!(set.len(), found.len(), "names were listed more than once");
}

async fn acquire_all(locks: &Redlock, names: impl Iterator<Item = String>) -> Vec<LockName> {
    let names: Vec<_> = names.map(|text| name(&text)).collect();
    for lock in &names {
        acquire(locks, lock, LONG).await.unwrap();
    }
    names
}

#[tokio::test]
async fn a_listing_returns_every_held_lock_of_its_prefix_once() {
    let mut cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let wanted = acquire_all(&locks, (0..130).map(|n| format!("a/{n}"))).await;
    acquire_all(&locks, (0..10).map(|n| format!("b/{n}"))).await;
    // A key on a minority does not hold the lock.
    cluster.servers[0].cmd(&["SET", "lock:a/minority", "their-uuid"]);
    for limit in [1, 7, 20, 1_000] {
        let (found, pages) = list_all(&locks, "a/", limit).await;
        assert_once_each(found, &wanted);
        assert!(limit > 130 || pages >= 130 / limit, "{pages} pages of {limit}");
    }
    assert_eq!(list_all(&locks, "c/", 20).await.0, Vec::<String>::new());
    assert_eq!(list_all(&locks, "", 1_000).await.0.len(), 140);

    for dead in [1, 2] {
        cluster.servers[dead].kill();
        in_state(cluster.nodes[dead].as_ref(), NodeState::Connecting).await;
        match dead {
            1 => assert_once_each(list_all(&locks, "a/", 20).await.0, &wanted),
            _ => {
                let refused =
                    locks.list("a/", 1_000, ListCursor::default(), PATIENCE, |_| true).await;
                assert!(matches!(refused, Err(LockError::NoQuorum(_))), "{refused:?}");
            }
        }
    }
}

#[tokio::test]
async fn a_listing_finds_locks_that_its_first_node_lacks() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let wanted = acquire_all(&locks, (0..40).map(|n| format!("a/{n}"))).await;
    for lock in &wanted[..20] {
        cluster.servers[0].cmd(&["DEL", &key(lock)]);
    }
    assert_once_each(list_all(&locks, "a/", 10).await.0, &wanted);
}

#[tokio::test]
async fn a_listing_returns_each_lock_once_beside_a_hung_master() {
    let mut cluster = Cluster::start(3).await;
    let wanted = acquire_all(&cluster.redlock(), (0..130).map(|n| format!("a/{n}"))).await;
    eventually("every master has the last lock", async || {
        (cluster.stored_on(&wanted[129], |_| true).len() == 3).then_some(())
    })
    .await;
    let patient = cluster.nodes.clone();
    for hung in 0..3 {
        cluster.nodes = patient.clone();
        cluster.make_hasty(hung).await;
        let locks = cluster.redlock();
        // Listings must also get past connections that they had opened before the master hung.
        assert_once_each(list_all(&locks, "a/", 1_000).await.0, &wanted);
        cluster.servers[hung].stop();
        for limit in [20, 1_000] {
            assert_once_each(list_all(&locks, "a/", limit).await.0, &wanted);
        }
        cluster.servers[hung].cont();
        in_state(cluster.nodes[hung].as_ref(), NodeState::Admitted).await;
        in_state(patient[hung].as_ref(), NodeState::Admitted).await;
    }
}

fn connections(server: &RedisServer) -> BTreeSet<String> {
    let id = |line: &str| line.split([' ', '=']).nth(1).expect("id=N").to_owned();
    // The connection on which CLIENT LIST runs does not count.
    server
        .cmd(&["CLIENT", "LIST"])
        .text()
        .lines()
        .filter(|line| !line.contains("cmd=client"))
        .map(id)
        .collect()
}

/// A master may close connections, for example because of the option `timeout`. The listing must
/// use that master again.
#[tokio::test]
async fn a_listing_is_complete_after_its_connections_closed() {
    let cluster = Cluster::start(3).await;
    // So far only the workers have connections. The gateway that starts next also opens the readers'
    // connections, because it lets the masters catch up.
    let of_workers: Vec<_> = cluster.servers.iter().map(connections).collect();
    let locks = cluster.redlock();
    let wanted = acquire_all(&locks, (0..20).map(|n| format!("a/{n}"))).await;
    for node in &cluster.nodes {
        let read = node.reader().read(vec![Keys::new(PREFIX, &wanted[0])]).await;
        assert!(read.is_ok(), "{} {:?}: {read:?}", node.name(), *node.status().borrow());
    }
    for (server, of_worker) in cluster.servers.iter().zip(&of_workers) {
        let others: Vec<_> = connections(server).difference(of_worker).cloned().collect();
        assert!(!others.is_empty(), "the reader has no connection");
        for id in others {
            server.cmd(&["CLIENT", "KILL", "ID", &id]);
        }
    }
    assert_once_each(list_all(&locks, "a/", 100).await.0, &wanted);
}

/// Votes have connections of their own, which listings do not use.
#[tokio::test]
async fn a_listing_bypasses_the_vote_queues() {
    let cluster = Cluster::start(3).await;
    let wanted = acquire_all(&cluster.redlock(), (0..130).map(|n| format!("a/{n}"))).await;
    let failing = |node: &Arc<dyn Node>| {
        intercepted(node.clone(), |_, task| panic!("a listing asked {:?}", task.op))
    };
    let locks = redlock(cluster.nodes.iter().map(failing).collect(), NODE_TIMEOUT);
    assert_once_each(list_all(&locks, "a/", 20).await.0, &wanted);
}

#[tokio::test]
async fn a_listing_without_time_reports_that_it_read_nothing() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    cluster.servers.iter().for_each(RedisServer::stop);
    let refused = locks.list("", 10, ListCursor::default(), Duration::from_millis(50), |_| true);
    let refused = timeout(PATIENCE, refused).await.expect("the listing ends in time");
    cluster.servers.iter().for_each(RedisServer::cont);
    let Err(LockError::NoQuorum(reports)) = refused else { panic!("{refused:?}") };
    assert!(
        matches!(&reports[0].answer, NodeAnswer::Failed(failure) if failure.reason == Reason::Timeout)
    );
}

/// A gateway refuses a cursor that is longer than the limit. This one has as many names as a cursor
/// may have, of locks that have ended, and the page ends within a scan.
#[tokio::test]
async fn a_cursor_full_of_locks_shown_and_ended_stays_valid() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    acquire_all(&locks, (0..60).map(|n| format!("a/{n}"))).await;
    let ended: String = (0..256).map(|n| format!("{n:016x}")).collect();
    let full: ListCursor = format!("0-0--10-{ended}").parse().unwrap();
    let page = locks.list("a/", 1, full.clone(), PATIENCE, |_| true).await.unwrap();
    let next = page.next.unwrap();
    assert_eq!(next.to_string().parse(), Ok(next.clone()), "the cursor is too long");
    assert_eq!(next.to_string().len(), full.to_string().len());
    // The oldest name has gone.
    assert!(!next.to_string().contains(&ended[..16]), "{next}");
}
