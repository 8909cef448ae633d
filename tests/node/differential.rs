//! Compares the memory node with a real redis-server, and with a server that has the module. For
//! any sequence of operations on locks and sets of locks, both give the same answers, store the same keys, and publish the
//! same hints. The simulation and the gateway's embedded nodes rely on this.
//!
//! Remaining lives are compared within a tolerance, so most lives are long. A few are as short as a
//! TTL may be. After such a step the test waits until the key is gone on both nodes. Tokens are
//! well within `max_clock_skew` of the node's time, or well beyond.
//!
//! Every run draws new sequences, and prints their seed if one fails. `PROPTEST_RNG_SEED=<seed>`
//! repeats the run. `PROPTEST_CASES=<number>` sets how many sequences a run has.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestRunner};
use redlock_core::clock::{Entropy, OsEntropy, SystemClock};
use redlock_core::node::Engine;
use redlock_core::node::ReleaseScope;
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::{Hint, Holding, Keys, Listener, Node, NodeSettings, NodeState, Op, Vote};

use crate::support::harness::{PATIENCE, RedisOptions, RedisServer, Subscription, daily_or_long};
use crate::support::nodes::{
    AGAIN, LONG_MS, Lock, PREFIX, ask, in_state, kept_free_record, now, record, redis_settings,
    remote_node_with, telling,
};

const SCOPES: [ReleaseScope; 3] =
    [ReleaseScope::Holder, ReleaseScope::Grant, ReleaseScope::Proposal];
const STEPS: usize = 30;
const NAMES: u8 = 3;
const OWNERS: u8 = 3;
/// Two reads of the same remaining life may differ by this much.
const TOLERANCE: Duration = Duration::from_millis(LONG_MS / 3);
/// Lives that outlast every case. Any two differ by more than the tolerance, so a life that becomes
/// shorter shows.
const LIVES_MS: [u64; 3] = [LONG_MS, 2 * LONG_MS, 3 * LONG_MS];
const SHORT_MS: u64 = 15;
/// The clock skew of the nodes.
const D: Duration = Duration::from_secs(600);

/// Values of other clients. The one of zeros has owner 0's text at the place where a record has its
/// owner.
const TEXTS: &[&[u8]] = &[b"", b"uuid-of-another-client", b"1", &[b'0'; 57], &[b'7'; 90]];

fn settings() -> NodeSettings {
    NodeSettings::default().with_max_clock_skew(D)
}

/// One step on one lock. `t` is an offset in microseconds from the start of the case.
#[derive(Debug, Clone)]
enum Step {
    Acquire {
        owner: u8,
        t: i64,
        life_ms: u64,
        tell: Tell,
    },
    Extend {
        owner: u8,
        life_ms: u64,
        late_ms: u64,
    },
    Repair {
        owner: u8,
        t: i64,
        life_ms: u64,
        /// Whether the repair is that of a catch-up, for a lock that was never extended.
        catches_up: bool,
    },
    Release {
        owner: u8,
        t: i64,
        scope: ReleaseScope,
        tell: Tell,
    },
    /// The release of a holder that keeps the lock free for a while.
    Keep {
        owner: u8,
        t: i64,
        life_ms: u64,
        late_ms: u64,
    },
    /// Another client sets the key with SET.
    Foreign {
        value: Value,
        life_ms: Option<u64>,
    },
    /// Sets the watermark to an invalid value.
    BadFence,
    /// Deletes the watermark, as if it had expired.
    NoFence,
}

/// To which of the two nodes the operation carries a hint. Neither answers nor stored data may
/// depend on that.
#[derive(Debug, Clone, Copy)]
struct Tell {
    memory: bool,
    redis: bool,
}

#[derive(Debug, Clone)]
enum Value {
    Text(&'static [u8]),
    /// A value like one of our locks. Only a test would write it.
    Record {
        owner: u8,
        t: i64,
    },
    /// A kept-free record, as recovery writes it.
    KeptFree(i64),
}

fn any_t() -> impl Strategy<Value = i64> {
    prop_oneof![
        8 => 0i64..6,
        2 => 400_000i64..400_003,
        2 => -400_003i64..-400_000,
        1 => Just(2_400_000_000i64),
        1 => Just(-2_400_000_000i64),
    ]
}

fn any_life() -> impl Strategy<Value = u64> {
    prop_oneof![30 => proptest::sample::select(&LIVES_MS[..]), 1 => Just(SHORT_MS)]
}

/// How long the node stood still before it runs the operation. After the first delay, lives keep their
/// length. After the second, long lives are shorter by more than the tolerance. After the third, no life
/// is left.
fn any_delay() -> impl Strategy<Value = u64> {
    let skew = D.as_millis() as u64;
    prop_oneof![4 => Just(0), 1 => Just(skew + LONG_MS / 2), 1 => Just(skew + 4 * LONG_MS)]
}

fn any_tell() -> impl Strategy<Value = Tell> {
    proptest::arbitrary::any::<(bool, bool)>().prop_map(|(memory, redis)| Tell { memory, redis })
}

fn any_step() -> impl Strategy<Value = Step> {
    let owner = (0..OWNERS, proptest::bool::ANY)
        .prop_map(|(owner, again)| if again { owner | AGAIN } else { owner });
    let text = proptest::sample::select(TEXTS);
    let value = prop_oneof![
        text.prop_map(Value::Text),
        (owner.clone(), any_t()).prop_map(|(owner, t)| Value::Record { owner, t }),
        any_t().prop_map(Value::KeptFree),
    ];
    prop_oneof![
        9 => (owner.clone(), any_t(), any_life(), any_tell())
            .prop_map(|(owner, t, life_ms, tell)| Step::Acquire { owner, t, life_ms, tell }),
        4 => (owner.clone(), any_life(), any_delay())
            .prop_map(|(owner, life_ms, late_ms)| Step::Extend { owner, life_ms, late_ms }),
        4 => (owner.clone(), any_t(), any_life(), proptest::bool::ANY)
            .prop_map(|(owner, t, life_ms, catches_up)| Step::Repair { owner, t, life_ms, catches_up }),
        4 => (owner.clone(), any_t(), any_life(), any_delay())
            .prop_map(|(owner, t, life_ms, late_ms)| Step::Keep { owner, t, life_ms, late_ms }),
        9 => (owner, any_t(), proptest::sample::select(&SCOPES[..]), any_tell())
            .prop_map(|(owner, t, scope, tell)| Step::Release { owner, t, scope, tell }),
        1 => (value, proptest::option::of(any_life())).prop_map(|(value, life_ms)| Step::Foreign { value, life_ms }),
        1 => Just(Step::BadFence),
        1 => Just(Step::NoFence),
    ]
}

/// How many other locks a step is about, if it can be about a set.
fn any_others() -> impl Strategy<Value = u8> {
    prop_oneof![2 => Just(0), 1 => 1..NAMES]
}

struct Pair {
    memory: Arc<MemoryNode>,
    redis: Arc<dyn Node>,
    server: RedisServer,
    /// The hints that the node in memory has published.
    memory_hints: Arc<HintLog>,
    /// The hints that the server has published.
    redis_hints: RefCell<Subscription>,
}

#[derive(Default)]
struct HintLog(Mutex<Vec<String>>);

impl Listener for HintLog {
    fn on_hint(&self, hint: &Hint) {
        self.0.lock().unwrap().push(text(hint));
    }
}

fn text(hint: &Hint) -> String {
    String::from_utf8_lossy(hint.as_bytes()).into_owned()
}

/// The hints that a node must publish for this answer.
fn required_hints(op: &Op, vote: &Vote) -> Vec<String> {
    op.hint_for(vote).map(text).into_iter().collect()
}

fn differ(what: &str, memory: impl std::fmt::Debug, redis: impl std::fmt::Debug) -> TestCaseError {
    TestCaseError::fail(format!("{what}\n  memory: {memory:?}\n  redis:  {redis:?}"))
}

fn are_alike(memory: &Holding, redis: &Holding) -> bool {
    let is_near = match (memory.expires_in, redis.expires_in) {
        (None, None) => true,
        (Some(memory), Some(redis)) => memory.abs_diff(redis) < TOLERANCE,
        _ => false,
    };
    is_near && are_same(&memory.record, &redis.record) && memory.at == redis.at
}

/// Whether both are the same text. The end in a watermark is in seconds, and the two nodes read
/// their clocks one after the other.
fn are_same(memory: &redlock_core::node::Record, redis: &redlock_core::node::Record) -> bool {
    let ends = |record: &redlock_core::node::Record| -> Option<(String, u64)> {
        let text = std::str::from_utf8(record.as_bytes()).ok()?;
        let (start, end) = text.rsplit_once('@')?;
        Some((start.to_owned(), end.parse().ok()?))
    };
    match (ends(memory), ends(redis)) {
        (Some(memory), Some(redis)) => memory.0 == redis.0 && memory.1.abs_diff(redis.1) <= 1,
        _ => memory == redis,
    }
}

/// Whether two votes about one lock are equal, apart from the time between them.
fn are_equal(memory: &Vote, redis: &Vote) -> bool {
    match (memory, redis) {
        (Vote::Held(memory), Vote::Held(redis))
        | (Vote::Yours(memory), Vote::Yours(redis))
        | (Vote::Found(memory), Vote::Found(redis)) => are_alike(memory, redis),
        (Vote::Extended { expires_in: memory }, Vote::Extended { expires_in: redis }) => {
            memory.abs_diff(*redis) < TOLERANCE
        }
        // If an operation fails with an error, the script reports that it may have had an effect. It
        // says so even if there was none.
        (Vote::Failed(memory), Vote::Failed(redis)) => memory.reason == redis.reason,
        (memory, redis) => memory == redis,
    }
}

impl Pair {
    async fn start(native: bool) -> Self {
        let server = RedisServer::start_with(RedisOptions {
            native: Some(native),
            ..RedisOptions::default()
        });
        let observer = Arc::new(redlock_core::node::NoObserver);
        let redis = remote_node_with(&server.url(), redis_settings(settings()), observer);
        let status = in_state(redis.as_ref(), NodeState::Admitted).await;
        assert!(!native || status.engine == Some(Engine::Native), "{status:?}");
        let memory = Arc::new(MemoryNode::new("memory", Arc::new(SystemClock), settings()));
        let memory_hints = Arc::new(HintLog::default());
        let redis_hints = RefCell::new(server.subscribe(&format!("{{{PREFIX}}}:hints")));
        let listener: Arc<dyn Listener> = memory_hints.clone();
        memory.listen(Arc::downgrade(&listener));
        Self { memory, redis, server, memory_hints, redis_hints }
    }

    /// Asks both nodes, with a hint to publish on one of them, on both or on none. Demands the same
    /// answer from both, and exactly the hints that the answer requires.
    async fn both_telling(&self, op: Op, tell: Tell) -> Result<Vote, TestCaseError> {
        let given = |tells| if tells { telling(op.clone(), "so and so") } else { op.clone() };
        let on_memory = given(tell.memory);
        let on_redis = given(tell.redis);
        let vote = self.both_of(on_memory.clone(), on_redis.clone()).await?;
        let memory_hints = std::mem::take(&mut *self.memory_hints.0.lock().unwrap());
        let redis_hints = self.server.messages(&mut self.redis_hints.borrow_mut());
        if (&memory_hints, &redis_hints)
            == (&required_hints(&on_memory, &vote), &required_hints(&on_redis, &vote))
        {
            Ok(vote)
        } else {
            Err(differ(
                &format!("hints of {op:?}, which was answered {vote:?}"),
                memory_hints,
                redis_hints,
            ))
        }
    }

    /// Asks both nodes and demands the same answer from them.
    async fn both(&self, op: Op) -> Result<Vote, TestCaseError> {
        self.both_of(op.clone(), op).await
    }

    async fn both_of(&self, op: Op, op_on_redis: Op) -> Result<Vote, TestCaseError> {
        let memory = ask(self.memory.as_ref(), op.clone()).await;
        let redis = ask(self.redis.as_ref(), op_on_redis).await;
        let equal = match (&memory, &redis) {
            (Vote::FoundOfSet(memory), Vote::FoundOfSet(redis)) => {
                memory.len() == redis.len()
                    && memory.iter().zip(redis).all(|(memory, redis)| are_alike(memory, redis))
            }
            (Vote::Each(memory), Vote::Each(redis)) => {
                memory.len() == redis.len()
                    && memory.iter().zip(redis).all(|(memory, redis)| are_equal(memory, redis))
            }
            (memory, redis) => are_equal(memory, redis),
        };
        if equal { Ok(redis) } else { Err(differ(&format!("{op:?}"), memory, redis)) }
    }

    fn set(&self, key: &[u8], value: &[u8], life_ms: Option<u64>) {
        self.memory.set_foreign(key, value, life_ms.map(Duration::from_millis));
        let life = life_ms.map(|life| life.to_string());
        let mut words = vec![b"SET", key, value];
        if let Some(life) = &life {
            words.extend([b"PX", life.as_bytes()]);
        }
        self.server.cmd(&words);
    }

    async fn step(&self, lock: &Lock, base: u64, step: Step) -> Result<(), TestCaseError> {
        let at = |offset: i64| base.strict_add_signed(offset);
        match step {
            Step::Acquire { owner, t, life_ms, tell } => {
                self.both_telling(lock.acquire(owner, at(t), life_ms), tell).await?;
            }
            Step::Extend { owner, life_ms, late_ms } => {
                let began = now() - late_ms * 1_000;
                drop(self.both(lock.extend_late(owner, at(0), life_ms, began)).await?)
            }
            Step::Repair { owner, t, life_ms, catches_up } => {
                let repair = if catches_up { Lock::catch_up } else { Lock::repair };
                drop(self.both(repair(lock, owner, at(t), life_ms)).await?);
            }
            Step::Release { owner, t, scope, tell } => {
                let release = match scope {
                    ReleaseScope::Holder => lock.release(owner, at(t)),
                    ReleaseScope::Proposal => lock.undo(owner, at(t)),
                    ReleaseScope::HolderKeeping { .. } => unreachable!("a step of its own"),
                    // A release with this scope publishes no hint.
                    ReleaseScope::Grant => {
                        return self.both(lock.release_exactly(owner, at(t))).await.map(drop);
                    }
                };
                self.both_telling(release, tell).await?;
            }
            Step::Keep { owner, t, life_ms, late_ms } => {
                let began = now() - late_ms * 1_000;
                self.both(lock.release_keeping_late(owner, at(t), life_ms, began)).await?;
            }
            Step::Foreign { value: Value::Text(text), life_ms } => {
                self.set(&lock.keys.lock, text, life_ms)
            }
            Step::Foreign { value: Value::Record { owner, t }, life_ms } => {
                self.set(&lock.keys.lock, record(owner, at(t)).as_bytes(), life_ms);
            }
            Step::Foreign { value: Value::KeptFree(t), life_ms } => {
                self.set(&lock.keys.lock, kept_free_record(at(t)).as_bytes(), life_ms);
            }
            Step::BadFence => self.set(&lock.keys.fence, b"no fence", None),
            Step::NoFence => {
                // The node in memory has no call to delete a key. A release of a lock whose name is
                // the key does the same.
                let unused = Bytes::from_static(b"unused");
                let fence = Keys { lock: lock.keys.fence.clone(), fence: unused, others: None };
                self.set(&fence.lock, record(0, base).as_bytes(), None);
                self.both(Op::Release {
                    keys: fence,
                    record: record(0, base),
                    scope: ReleaseScope::Holder,
                    tell: None,
                })
                .await?;
            }
        }
        for keys in lock.keys.each() {
            let lock = Lock { keys: Keys { others: None, ..keys.clone() } };
            self.settle(&lock).await?;
            self.both(lock.inspect_fence()).await?;
        }
        // Now no lock of the set is about to expire.
        self.both(lock.inspect()).await?;
        Ok(())
    }

    /// Demands that both nodes store the same lock. A lock that is about to expire must do so on
    /// both nodes, at about the same time.
    async fn settle(&self, lock: &Lock) -> Result<(), TestCaseError> {
        let short = |vote: &Vote| match vote {
            Vote::Found(holding) => {
                holding.expires_in.is_some_and(|left| left <= Duration::from_millis(SHORT_MS))
            }
            vote => *vote == Vote::Missing,
        };
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let memory = self.memory.run(&lock.inspect());
            let redis = ask(self.redis.as_ref(), lock.inspect()).await;
            match (&memory, &redis) {
                (Vote::Missing, Vote::Missing) => return Ok(()),
                (memory, redis) if short(memory) && short(redis) => {}
                (Vote::Found(memory), Vote::Found(redis)) if are_alike(memory, redis) => {
                    return Ok(());
                }
                (memory, redis) => return Err(differ("stored after it", memory, redis)),
            }
            if tokio::time::Instant::now() >= deadline {
                return Err(differ("still not expired", memory, redis));
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    async fn run(&self, case: u32, steps: Vec<(u8, u8, Step)>) -> Result<(), TestCaseError> {
        let base = now();
        let locks: Vec<_> = (0..NAMES).map(|n| Lock::new(&format!("{case}/{n}"))).collect();
        for (index, (name, others, step)) in steps.into_iter().enumerate() {
            let what = format!("step {index}, lock {name} and {others} others, {step:?}");
            let lock = &locks[usize::from(name)];
            let others: Vec<_> = (1..=others)
                .map(|other| locks[usize::from((name + other) % NAMES)].clone())
                .collect();
            let is_of_sets = matches!(
                step,
                Step::Acquire { .. }
                    | Step::Extend { .. }
                    | Step::Release { .. }
                    | Step::Keep { .. }
            );
            let lock = if is_of_sets { lock.with(&others) } else { lock.clone() };
            self.step(&lock, base, step).await.map_err(|error| match error {
                TestCaseError::Fail(why) => TestCaseError::fail(format!("{what}: {why}")),
                reject => reject,
            })?;
        }
        Ok(())
    }
}

#[test]
fn a_memory_node_answers_and_stores_as_redis_does() {
    compare(false);
}

#[test]
fn the_module_answers_and_stores_as_a_memory_node_does() {
    compare(true);
}

fn compare(native: bool) {
    let mut config = Config { failure_persistence: None, ..Config::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = daily_or_long(100, 400);
    }
    let seed = match config.rng_seed {
        RngSeed::Fixed(seed) => seed,
        RngSeed::Random => {
            let mut seed = [0; 8];
            OsEntropy.fill(&mut seed);
            u64::from_le_bytes(seed)
        }
    };
    config.rng_seed = RngSeed::Fixed(seed);

    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let pair = runtime.block_on(Pair::start(native));
    // Each case has its own locks, even while proptest shrinks a failing case.
    let case = Cell::new(0);
    let steps = proptest::collection::vec((0..NAMES, any_others(), any_step()), 1..STEPS);
    let outcome = TestRunner::new(config).run(&steps, |steps| {
        case.set(case.get() + 1);
        runtime.block_on(pair.run(case.get(), steps))
    });
    if let Err(error) = outcome {
        panic!("{error}\nreplay with PROPTEST_RNG_SEED={seed}");
    }
}
