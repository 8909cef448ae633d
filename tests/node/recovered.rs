//! Recovery of a master's lost locks, and the listing of its stored locks. A real server and the
//! memory node must give the same answers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redlock_core::clock::SystemClock;
use redlock_core::node::link::{Put, RecoveryAnswer, RecoveryBatch, Session, Stored};
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::{Keys, Node, Record};

use crate::support::harness::RedisServer;
use crate::support::nodes::{
    PREFIX, extended, kept_free_record, name, node_settings, record, remote_node,
};
use crate::support::resp::Resp;

const MARKER: &str = "of a quarantine";
const T: u64 = 1_763_725_165_000_000;
/// The life of a lock. No lock ends while a test runs.
const LIFE: Duration = Duration::from_secs(3_600);
const LIFE_MS: &str = "3600000";

/// The longest life of a lock.
const LONGEST: Duration = Duration::from_secs(24 * 3_600);

/// A master of each kind, both with the same content.
struct Both {
    server: RedisServer,
    session: Box<dyn Session>,
    memory: MemoryNode,
}

impl Both {
    async fn start() -> Self {
        let server = RedisServer::start();
        let link = remote_node(&server.url()).link().expect("a route to the master");
        let session = link.connect().await.expect("the address is listed");
        let memory = MemoryNode::new("n", Arc::new(SystemClock), node_settings());
        memory.wipe();
        assert!(memory.swap_marker(None, MARKER));
        server.cmd(&["SET", &format!("{{{PREFIX}}}:marker"), MARKER]);
        Self { server, session, memory }
    }

    fn set(&self, key: &[u8], value: &[u8]) {
        self.server.cmd(&[b"SET".as_slice(), key, value, b"PX", LIFE_MS.as_bytes()]);
        self.memory.set_foreign(key, value, Some(LIFE));
    }

    async fn recover(&self, marker: &str, lock: &str, put: Put) -> RecoveryAnswer {
        let recovery = RecoveryBatch { marker: marker.into(), puts: vec![(name(lock), put)] };
        let in_memory = self.memory.recover(PREFIX, &recovery);
        let on_redis = self.session.recover(recovery).await.expect("an answer");
        assert_eq!(in_memory, Some(on_redis));
        on_redis
    }

    /// All locks, without how long they will still live.
    async fn stored(&self) -> BTreeMap<String, Record> {
        let mut cursor = None;
        let mut stored = Vec::new();
        loop {
            let page = self.session.stored(cursor, LONGEST).await.expect("an answer");
            stored.extend(page.stored);
            cursor = page.next;
            if cursor.is_none() {
                break;
            }
        }
        let texts = |stored: Vec<Stored>| -> BTreeMap<_, _> {
            assert!(
                stored.iter().all(|lock| lock.expires_in <= LIFE && lock.expires_in > LIFE / 2),
                "{stored:?}"
            );
            stored.into_iter().map(|lock| (lock.name.as_str().to_owned(), lock.record)).collect()
        };
        let stored = texts(stored);
        assert_eq!(stored, texts(self.memory.stored(PREFIX)));
        stored
    }

    fn fence(&self, lock: &str) -> Option<String> {
        let fence = Keys::new(PREFIX, &name(lock)).fence;
        match self.server.cmd(&[b"GET".as_slice(), &fence]) {
            Resp::Nil => None,
            text => Some(text.text()),
        }
    }
}

fn put(record: Record, fence: Option<String>) -> Put {
    Put { record, expires_in: LIFE, fence: fence.map(Bytes::from) }
}

#[tokio::test]
async fn a_scan_reports_locks_and_skips_other_keys() {
    let both = Both::start().await;
    both.set(b"lock:ours", record(1, T).as_bytes());
    both.set(b"lock:theirs", b"a-uuid");
    both.set(b"{lock:ours}:fence", T.to_string().as_bytes());
    both.set(b"lock:no name", b"x");
    both.set(b"other:ours", b"x");
    both.server.cmd(&["SET", "lock:for-ever", "x"]);
    both.server.cmd(&["LPUSH", "lock:list", "x"]);
    let stored = both.stored().await;
    assert_eq!(stored.keys().collect::<Vec<_>>(), ["ours", "theirs"]);
    assert_eq!(stored["ours"], record(1, T));
    for n in 0..2_000 {
        both.set(format!("lock:many-{n}").as_bytes(), record(1, T + n).as_bytes());
    }
    assert_eq!(both.stored().await.len(), 2_002, "over several pages");
}

#[tokio::test]
async fn a_value_longer_than_any_lock_counts_as_a_foreign_lock() {
    let server = RedisServer::start();
    let session = remote_node(&server.url())
        .link()
        .expect("a route to the master")
        .connect()
        .await
        .expect("the address is listed");
    // The key begins like one of our locks.
    let long = format!("{T}:{}:{}", "a".repeat(40), "x".repeat(20_000));
    server.cmd(&["SET", "lock:stray", &long, "PX", LIFE_MS]);
    server.cmd(&["SET", "lock:for-ever", &long]);
    server.cmd(&[
        b"SET".as_slice(),
        b"lock:ours",
        record(1, T).as_bytes(),
        b"PX",
        LIFE_MS.as_bytes(),
    ]);
    let mut reported = session.stored(None, LONGEST).await.expect("an answer").stored;
    reported.sort_by_key(|lock| lock.name.as_str().to_owned());
    let reported: Vec<_> =
        reported.iter().map(|lock| (lock.name.as_str(), lock.record.as_bytes().len())).collect();
    assert_eq!(reported, [("ours", 58), ("stray", 8_448)]);
}

/// The longer life of the stored lock stays, because an extension may have promised that life.
#[tokio::test]
async fn an_unbounded_lock_is_reported_with_the_longest_life() {
    let both = Both::start().await;
    for (lock, owner, command) in
        [("persisted", 1, ["PERSIST", ""]), ("prolonged", 2, ["PEXPIRE", "300000000000000"])]
    {
        let key = format!("{PREFIX}{lock}");
        both.server.cmd(&[
            b"SET".as_slice(),
            key.as_bytes(),
            record(owner, T).as_bytes(),
            b"PX",
            LIFE_MS.as_bytes(),
        ]);
        let [word, argument] = command;
        both.server.cmd(
            &[word, &key, argument].into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>(),
        );
    }
    both.server.cmd(&["SET", &format!("{PREFIX}foreign"), "of another client, for ever"]);
    let mut reported = both.session.stored(None, LONGEST).await.expect("an answer").stored;
    reported.sort_by_key(|lock| lock.name.as_str().to_owned());
    let reported: Vec<_> =
        reported.iter().map(|lock| (lock.name.as_str(), lock.expires_in)).collect();
    assert_eq!(reported, [("persisted", LONGEST), ("prolonged", LONGEST)]);
}

#[tokio::test]
async fn recovery_writes_lock_and_watermark_only_in_its_quarantine() {
    let both = Both::start().await;
    let back = || put(extended(1, T), Some(format!("{T}+")));
    assert_eq!(both.recover("another", "a", back()).await, RecoveryAnswer::OtherMarker);
    assert!(both.stored().await.is_empty());
    assert_eq!(both.recover(MARKER, "a", back()).await, RecoveryAnswer::Done);
    let theirs = Record::foreign(Bytes::from_static(b"a-uuid"));
    assert_eq!(both.recover(MARKER, "b", put(theirs, None)).await, RecoveryAnswer::Done);
    assert_eq!(
        both.stored().await,
        BTreeMap::from([
            ("a".to_owned(), extended(1, T)),
            ("b".to_owned(), Record::foreign(Bytes::from_static(b"a-uuid"))),
        ])
    );
    assert_eq!((both.fence("a"), both.fence("b")), (Some(format!("{T}+")), None));
    // A client of another library does not know the quarantine and relies on its own key. So the
    // key stays.
    assert_eq!(both.recover(MARKER, "b", back()).await, RecoveryAnswer::OtherClient);
    assert_eq!(both.stored().await["b"], Record::foreign(Bytes::from_static(b"a-uuid")));
    both.server.cmd(&["SET", "lock:c", "for ever"]);
    both.memory.set_foreign(b"lock:c", b"for ever", None);
    assert_eq!(both.recover(MARKER, "c", back()).await, RecoveryAnswer::OtherClient);
}

/// A release needs no marker, so it can reach a master in quarantine.
#[tokio::test]
async fn recovery_keeps_a_released_lock_free() {
    let both = Both::start().await;
    for (at, (fence, lock, comes_back)) in [
        (None, None, true),
        (Some((T - 1).to_string()), None, true),
        (Some(format!("{T}+")), None, true),
        (Some(format!("{T}+@4000000000")), None, true),
        (Some(T.to_string()), Some(record(1, T)), true),
        (Some(T.to_string()), None, false),
        (Some(format!("{T}@4000000000")), None, false),
        (Some(T.to_string()), Some(record(2, T)), false),
        (Some((T + 1).to_string()), None, false),
    ]
    .into_iter()
    .enumerate()
    {
        let keys = Keys::new(PREFIX, &name(&format!("job-{at}")));
        for (key, value) in [
            (&keys.fence, fence.map(Bytes::from)),
            (&keys.lock, lock.map(|lock| lock.as_bytes().clone())),
        ] {
            if let Some(value) = value {
                both.set(key, &value);
            }
        }
        let before = both.fence(&format!("job-{at}"));
        assert_eq!(
            both.recover(MARKER, &format!("job-{at}"), put(record(1, T), Some(T.to_string())))
                .await,
            RecoveryAnswer::Done
        );
        let stands = both.stored().await[&format!("job-{at}")].clone();
        assert_eq!(
            stands,
            if comes_back { record(1, T) } else { kept_free_record(T) },
            "case {at}"
        );
        let fence = both.fence(&format!("job-{at}"));
        assert_eq!(fence, if comes_back { Some(T.to_string()) } else { before }, "case {at}");
    }
}
