//! Calls to a real redis-server that carry many operations. The tests check how many calls there
//! are, the order of the operations, and the result of each.

use std::mem::discriminant;
use std::sync::Arc;
use std::time::Duration;

use redlock_core::Info;
use redlock_core::node::{Effect, Node, Op, Reason, Record, Vote};
use tokio::time::Instant;

use crate::node::redis::redis_node;
use crate::support::harness::{RedisServer, eventually};
use crate::support::nodes::{
    LONG_MS, Lock, Pending, ask, assert_extended, assert_failed, failure, now, submit,
    submit_until, task, token, ttl, votes,
};
use crate::support::resp::Resp;

/// Submits all operations while the server is stopped. So each call after the first collects
/// several operations.
async fn submit_while_stopped(server: &RedisServer, node: &dyn Node, ops: Vec<Op>) -> Vec<Vote> {
    server.stop();
    let mut pending: Vec<Pending> = Vec::new();
    for op in ops {
        pending.push(submit(node, op));
        tokio::task::yield_now().await;
    }
    server.cont();
    votes(pending).await
}

#[tokio::test]
async fn operations_that_arrive_during_a_call_share_the_next() {
    let (server, node, calls) = redis_node().await;
    let t = now();
    let count = 100;
    let ops = (0..count).map(|n| Lock::new(&format!("n{n}")).acquire(1, t, LONG_MS)).collect();
    let answers = submit_while_stopped(&server, node.as_ref(), ops).await;
    assert!(answers.iter().all(|vote| *vote == Vote::Granted), "{answers:?}");
    let calls = calls.take_calls();
    assert_eq!(calls.iter().sum::<usize>(), count);
    // On a busy machine the node seems to be far away, so up to four calls are in flight. The rest
    // is in a fifth call.
    assert!(calls.len() <= 5, "{count} operations in {} calls: {calls:?}", calls.len());
}

#[tokio::test]
async fn a_key_of_another_type_fails_only_its_own_operation() {
    let (server, node, calls) = redis_node().await;
    let t = now();
    let bad = Lock::new("n5");
    server.cmd(&[b"RPUSH", &bad.keys.lock[..], b"x"]);
    let locks: Vec<_> = (0..20).map(|n| Lock::new(&format!("n{n}"))).collect();
    let ops = |make: &dyn Fn(&Lock) -> Op| locks.iter().map(make).collect::<Vec<_>>();
    for (what, op, good) in [
        ("acquire", ops(&|lock| lock.acquire(1, t, LONG_MS)), Vote::Granted),
        (
            "extend",
            ops(&|lock| lock.extend(1, t, LONG_MS)),
            Vote::Extended { expires_in: Duration::from_millis(LONG_MS) },
        ),
        ("release", ops(&|lock| lock.release(1, t)), Vote::Released),
        ("inspect", ops(&|lock| lock.inspect()), Vote::Missing),
    ] {
        calls.take_calls();
        let answers = submit_while_stopped(&server, node.as_ref(), op).await;
        // On a busy machine the node seems to be far away, so up to four calls are in flight. The
        // rest of the 20 operations is in a fifth call.
        assert!(
            calls.take_calls().iter().any(|operations| *operations >= 4),
            "{what} did not share a call"
        );
        for (index, vote) in answers.into_iter().enumerate() {
            if index == 5 {
                let failure = failure(vote);
                assert_eq!(failure.reason, Reason::Error);
                assert!(failure.detail.contains("WRONGTYPE"), "{what}: {}", failure.detail);
            } else {
                assert_eq!(
                    discriminant(&vote),
                    discriminant(&good),
                    "{what} of lock {index}: {vote:?}"
                );
            }
        }
    }
    assert!(node.status().borrow().state.is_admitted());
    assert_eq!(
        server.cmd(&[b"LLEN", &bad.keys.lock[..]]),
        Resp::Integer(1),
        "what is not a lock is left alone"
    );
}

#[tokio::test]
async fn a_call_has_at_most_128_operations_all_answered() {
    let (server, node, calls) = redis_node().await;
    let t = now();
    let count = 1_000;
    let ops = (0..count).map(|n| Lock::new(&format!("n{n}")).acquire(1, t, LONG_MS)).collect();
    let answers = submit_while_stopped(&server, node.as_ref(), ops).await;
    assert!(answers.iter().all(|vote| *vote == Vote::Granted));
    let calls = calls.take_calls();
    assert_eq!((calls.iter().sum::<usize>(), calls.iter().max()), (count, Some(&128)), "{calls:?}");
}

#[tokio::test]
async fn operations_submitted_together_run_in_order() {
    let (server, node, calls) = redis_node().await;
    let t = now();
    let lock = Lock::new("a");
    let mut pending = Vec::new();
    let mut task = |op| {
        let (task, vote) = task(op);
        pending.push(vote);
        task
    };
    let mine = (0..150).flat_map(|n| [lock.acquire(1, t + n, LONG_MS), lock.release(1, t + n)]);
    let mine = mine.map(&mut task).collect();
    calls.take_calls();
    server.stop();
    node.submit_all(mine);
    let other = submit(node.as_ref(), lock.acquire(2, t + 200, LONG_MS));
    server.cont();
    for (n, vote) in votes(pending).await.into_iter().enumerate() {
        let expected = if n % 2 == 0 { Vote::Granted } else { Vote::Released };
        assert_eq!(vote, expected, "operation {n}");
    }
    assert_eq!(other.vote().await, Vote::Granted);
    let calls = calls.take_calls();
    assert_eq!((calls.iter().sum::<usize>(), calls.iter().max()), (301, Some(&128)), "{calls:?}");
}

#[tokio::test]
async fn a_call_is_split_by_size_and_records_arrive_whole() {
    let (server, node, calls) = redis_node().await;
    let t = now();
    let info = Info::new(vec![b'i'; Info::MAX_LEN]).unwrap();
    let record = Record::new(&token(1, t), &info);
    let locks: Vec<_> = (0..100).map(|n| Lock::new(&format!("n{n}"))).collect();
    let acquire = |lock: &Lock| Op::Acquire {
        keys: lock.keys.clone(),
        record: record.clone(),
        ttl: ttl(LONG_MS),
        tell: None,
    };
    let answers =
        submit_while_stopped(&server, node.as_ref(), locks.iter().map(acquire).collect()).await;
    assert!(answers.iter().all(|vote| *vote == Vote::Granted));
    let calls = calls.take_calls();
    assert!(
        calls.iter().all(|operations| *operations <= 64),
        "256 KiB hold 64 records of 4 KiB: {calls:?}"
    );
    for lock in &locks {
        let stored = server.cmd(&[b"STRLEN", &lock.keys.lock[..]]).integer();
        assert_eq!(stored as usize, record.as_bytes().len());
    }
}

#[tokio::test]
async fn an_operation_past_its_time_is_not_run_except_a_release() {
    let (server, node, _) = redis_node().await;
    let free = Lock::new("a");
    let held = Lock::new("b");
    let t = now();
    assert_eq!(ask(node.as_ref(), held.acquire(1, t, LONG_MS)).await, Vote::Granted);
    // Drops the vote, because only the stored data counts here.
    struct Discarded;
    impl redlock_core::node::Voter for Discarded {
        fn vote(&self, _: usize, _: Vote) {}
    }
    let past = Instant::now() - Duration::from_secs(1);
    for op in [free.acquire(1, t, LONG_MS), held.release(1, t)] {
        node.submit(Arc::new(op), past, redlock_core::node::Reply::new(Arc::new(Discarded), 0));
    }
    assert_eq!(ask(node.as_ref(), held.inspect()).await, Vote::Missing);
    assert_eq!(
        server.cmd(&[b"EXISTS", &free.keys.lock[..], &free.keys.fence[..]]),
        Resp::Integer(0)
    );
}

/// The operations that wait. Panics unless these are the first `room` ones, and all later ones were
/// refused at once.
#[track_caller]
fn queued(pending: Vec<Pending>, room: usize) -> Vec<Pending> {
    let mut queued = Vec::new();
    for (index, one) in pending.into_iter().enumerate() {
        match one.at_once() {
            Ok(vote) => {
                assert!(index >= room, "refused as number {index}");
                assert_failed(vote, Reason::Overloaded, Effect::None);
            }
            Err(one) => queued.push(one),
        }
    }
    assert_eq!(queued.len(), room);
    queued
}

#[tokio::test]
async fn operations_beyond_8192_waiting_ones_are_refused_at_once() {
    let (server, node, _) = redis_node().await;
    server.stop();
    let lock = Lock::new("a");
    // Between the submissions nothing is awaited, so the worker cannot take operations out of its
    // queue.
    let pending = (0..9_000).map(|_| submit(node.as_ref(), lock.inspect())).collect();
    let queued = queued(pending, 8_192);
    server.cont();
    for vote in votes(queued).await {
        assert_eq!(vote, Vote::Missing);
    }
}

#[tokio::test]
async fn operations_submitted_together_count_one_by_one_in_the_queue() {
    let (server, node, _) = redis_node().await;
    server.stop();
    let lock = Lock::new("a");
    let mut pending = Vec::new();
    for _ in 0..90 {
        let (tasks, votes): (Vec<_>, Vec<_>) = (0..100).map(|_| task(lock.inspect())).unzip();
        node.submit_all(tasks);
        pending.extend(votes);
    }
    // The queue has no room for all operations of the 82nd job. It takes all of them or none.
    let mut queued = queued(pending, 8_100);
    // An acquire is refused too, but another single operation still fits.
    let refused = submit(node.as_ref(), lock.acquire(1, now(), LONG_MS)).at_once();
    assert_failed(refused.ok().expect("a vote"), Reason::Overloaded, Effect::None);
    queued.push(submit(node.as_ref(), lock.inspect()));
    server.cont();
    for vote in votes(queued).await {
        assert_eq!(vote, Vote::Missing);
    }
}

#[tokio::test]
async fn a_flood_of_acquires_leaves_room_for_extends_and_releases() {
    let (server, node, _) = redis_node().await;
    let held = Lock::new("held");
    let lock = Lock::new("a");
    let t = now();
    assert_eq!(ask(node.as_ref(), held.acquire(1, t, LONG_MS)).await, Vote::Granted);
    server.stop();
    let flood: Vec<_> =
        (0..9_000).map(|n| submit(node.as_ref(), lock.acquire(2, t + n, LONG_MS))).collect();
    let extended = submit(node.as_ref(), held.extend(1, t, LONG_MS));
    let released = submit(node.as_ref(), held.release(1, t));
    let refused = flood.into_iter().filter_map(|one| one.at_once().ok()).count();
    assert!(refused >= 9_000 - 8_192 * 3 / 4, "{refused}");
    server.cont();
    assert_extended(&extended.vote().await);
    assert_eq!(released.vote().await, Vote::Released);
}

#[tokio::test]
async fn operations_take_effect_in_submission_order() {
    let (server, node, _) = redis_node().await;
    let lock = Lock::new("a");
    let t = now();
    let ops =
        (0..300).flat_map(|n| [lock.acquire(1, t + n, LONG_MS), lock.release(1, t + n)]).collect();
    for (index, vote) in
        submit_while_stopped(&server, node.as_ref(), ops).await.into_iter().enumerate()
    {
        assert_eq!(
            vote,
            if index % 2 == 0 { Vote::Granted } else { Vote::Released },
            "operation {index}"
        );
    }
}

#[tokio::test]
async fn a_late_operation_does_not_delay_those_behind_it() {
    let (server, node, _) = redis_node().await;
    let lock = Lock::new("a");
    let t = now();
    let began = Instant::now();
    // If the late operations blocked the call, the next heartbeat would send the operation behind
    // them. Every heartbeat comes with a probe, which asks for INFO. On a busy machine a heartbeat may
    // be due meanwhile.
    eventually("the operation is answered before a heartbeat", async || {
        let before = server.calls_of("info");
        // A whole call of operations, all of which are past their time.
        let late: Vec<_> = (0..128)
            .map(|_| submit_until(node.as_ref(), lock.acquire(1, t, LONG_MS), began))
            .collect();
        let behind = submit(node.as_ref(), lock.inspect());
        for vote in votes(late).await {
            assert_failed(vote, Reason::Timeout, Effect::None);
        }
        assert_eq!(behind.vote().await, Vote::Missing);
        // The last count asked for INFO once.
        (server.calls_of("info") == before + 1).then_some(())
    })
    .await;
}
