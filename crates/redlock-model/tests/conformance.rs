//! The model's node answers as the code's node does, whatever it is asked.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use redlock_core::clock::Clock;
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::{Holding, Keys, NodeSettings, Op, Reason, Record, Vote as CoreVote};
use redlock_core::{Info, LockName, LockToken, Ttl};
use redlock_model::node::{FAR, Lock, Node, Owner, Token, Vote, Window};
use redlock_model::rules::Rules;

const NOW: u64 = 1_763_725_165_000_000;
const HOUR: u64 = 3_600_000_000;
const TTL_MS: u64 = 10;

/// The wall clock stands still; time passes on the other.
struct Fixed(AtomicU64);

impl Clock for Fixed {
    fn monotonic(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }
    fn wall_micros(&self) -> u64 {
        NOW
    }
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Acquire(Owner, Token),
    Extend(Owner, Token),
    Heal(Owner, Token),
    Release(Owner, Token),
    Expire,
    Wipe,
    Admit,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let owner = || prop_oneof![Just(Owner::A), Just(Owner::B), Just(Owner::Nobody)];
    let token = || prop_oneof![8 => 1..=6u8, 1 => Just(FAR)];
    let event = prop_oneof![
        6 => (owner(), token()).prop_map(|(owner, token)| Event::Acquire(owner, token)),
        4 => (owner(), token()).prop_map(|(owner, token)| Event::Extend(owner, token)),
        3 => (owner(), token()).prop_map(|(owner, token)| Event::Heal(owner, token)),
        4 => (owner(), token()).prop_map(|(owner, token)| Event::Release(owner, token)),
        1 => Just(Event::Expire),
        1 => Just(Event::Wipe),
        2 => Just(Event::Admit),
    ];
    prop::collection::vec(event, 1..60)
}

/// Tokens up to `oldest` are an hour old, the others are of now, and [`FAR`] is an hour ahead.
fn micros(token: Token, oldest: Token) -> u64 {
    match token {
        FAR => NOW + HOUR,
        token if token <= oldest => NOW - HOUR + u64::from(token),
        token => NOW + u64::from(token),
    }
}

fn record(owner: Owner, token: Token, oldest: Token) -> Record {
    let digit = match owner {
        Owner::A => "a",
        Owner::B => "b",
        Owner::Nobody => "0",
    };
    let text = format!("1.{}.{}", micros(token, oldest), digit.repeat(40));
    Record::new(&text.parse::<LockToken>().expect("a token"), &Info::default())
}

fn translate(vote: Vote, oldest: Token) -> String {
    let held = |lock: Lock| {
        // An extension marks the record: ';' for ':' after the owner.
        let mut text = record(lock.owner, lock.token, oldest).as_bytes().to_vec();
        if lock.extended {
            text[16 + 1 + 40] = b';';
        }
        format!("held by {:?}", Record::foreign(text.into()))
    };
    match vote {
        Vote::Granted => "granted".into(),
        Vote::GrantedAgain => "granted again".into(),
        Vote::Held(lock) => held(lock),
        Vote::Stale(fence) => format!("stale {}", micros(fence, oldest)),
        Vote::Extended => "extended".into(),
        Vote::Released => "released".into(),
        Vote::Missing => "missing".into(),
        Vote::Quarantined => "quarantined".into(),
        Vote::Clock => "clock".into(),
    }
}

fn read(vote: CoreVote) -> String {
    match vote {
        CoreVote::Granted => "granted".into(),
        CoreVote::GrantedAgain => "granted again".into(),
        CoreVote::Held(Holding { record, .. }) => format!("held by {record:?}"),
        CoreVote::Stale { fence } => format!("stale {}", fence.get()),
        CoreVote::Extended => "extended".into(),
        CoreVote::Released => "released".into(),
        CoreVote::Missing => "missing".into(),
        CoreVote::Failed(failure) if failure.reason == Reason::Quarantined => "quarantined".into(),
        CoreVote::Failed(failure) if failure.reason == Reason::Clock => "clock".into(),
        other => format!("{other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn both_nodes_give_the_same_answers(events in events(), oldest in prop_oneof![Just(0u8), Just(2u8)]) {
        let clock = Arc::new(Fixed(AtomicU64::new(0)));
        let code = MemoryNode::new("n", clock.clone(), NodeSettings::default());
        let mut model = Node::default();
        let keys = Keys::new("lock:", &"a".parse::<LockName>().expect("a name"));
        let ttl = Ttl::from_millis(TTL_MS).expect("a TTL");
        for event in events {
            let (answer, wanted) = match event {
                Event::Acquire(owner, token) => {
                    let op = Op::Acquire { keys: keys.clone(), record: record(owner, token, oldest), ttl, tell: None };
                    let asked = Lock { owner, token, extended: false, guards: 0 };
                    (model.acquire(&Rules::ALL, Window { oldest }, asked), code.run(&op))
                }
                Event::Extend(owner, token) => {
                    let op = Op::Extend { keys: keys.clone(), record: record(owner, token, oldest), ttl };
                    (model.extend(&Rules::ALL, Lock { owner, token, extended: false, guards: 0 }), code.run(&op))
                }
                Event::Heal(owner, token) => {
                    let op = Op::Heal { keys: keys.clone(), record: record(owner, token, oldest), ttl };
                    let asked = Lock { owner, token, extended: false, guards: 0 };
                    (model.heal(&Rules::ALL, Window { oldest }, asked), code.run(&op))
                }
                Event::Release(owner, token) => {
                    let op = Op::Release { keys: keys.clone(), record: record(owner, token, oldest), failed_try: false, tell: None };
                    (model.release(&Rules::ALL, owner, token), code.run(&op))
                }
                Event::Expire => {
                    model.expire();
                    clock.0.fetch_add(TTL_MS + 1, Ordering::Relaxed);
                    continue;
                }
                Event::Wipe => {
                    model.wipe();
                    code.wipe();
                    continue;
                }
                Event::Admit => {
                    model.admitted = true;
                    code.admit();
                    continue;
                }
            };
            prop_assert_eq!(translate(answer, oldest), read(wanted), "{:?}", event);
        }
    }
}
