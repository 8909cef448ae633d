//! The model's node gives the same answers as the core's node.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use redlock_core::clock::Clock;
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::rules::fence_grace;
use redlock_core::node::{
    Holding, Keys, NodeSettings, Op, Reason, Record, ReleaseScope, Vote as CoreVote,
};
use redlock_core::{Info, LockName, LockToken, Ttl};
use redlock_model::node::{FAR, Lock, Mark, Node, Owner, Token, Vote, Window};
use redlock_model::rules::Rules;

const NOW: u64 = 1_763_725_165_000_000;
const HOUR: u64 = 3_600_000_000;
const TTL_MS: u64 = 10;

/// A clock whose wall side stands still while its monotonic side advances.
struct Fixed(AtomicU64);

impl Clock for Fixed {
    fn monotonic(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }
    fn wall_micros(&self) -> u64 {
        NOW
    }
}

const SCOPES: [ReleaseScope; 3] =
    [ReleaseScope::Holder, ReleaseScope::Grant, ReleaseScope::Proposal];

/// Owner, T and nonce.
type Grant = (Owner, Token, u8);

#[derive(Debug, Clone, Copy)]
enum Event {
    Acquire(Grant),
    Extend(Grant),
    /// An owner's record. The flag says whether it has the mark of an extension.
    Repair(Grant, bool),
    /// A record of nobody with this T. It replaces any lock.
    KeepFree(Token),
    Release(Grant, ReleaseScope),
    Expire,
    /// Ends the lock and the watermark together, because the core's node keeps a watermark longer
    /// than its lock.
    EndWatermark,
    Wipe,
    Admit,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let owner = || prop_oneof![Just(Owner::A), Just(Owner::B)];
    let token = || prop_oneof![8 => 1..=6u8, 1 => Just(FAR)];
    let grant = || (owner(), token(), 0..2u8);
    let event = prop_oneof![
        6 => grant().prop_map(Event::Acquire),
        4 => grant().prop_map(Event::Extend),
        3 => (grant(), any::<bool>()).prop_map(|(grant, extended)| Event::Repair(grant, extended)),
        1 => (1..=6u8).prop_map(Event::KeepFree),
        6 => (grant(), 0..3usize).prop_map(|(grant, scope)| Event::Release(grant, SCOPES[scope])),
        1 => Just(Event::Expire),
        1 => Just(Event::EndWatermark),
        1 => Just(Event::Wipe),
        2 => Just(Event::Admit),
    ];
    prop::collection::vec(event, 1..60)
}

/// Microseconds for a token. Tokens up to `oldest` are an hour old, [`FAR`] is an hour ahead, and
/// all other tokens are from now.
fn micros(token: Token, oldest: Token) -> u64 {
    match token {
        FAR => NOW + HOUR,
        token if token <= oldest => NOW - HOUR + u64::from(token),
        token => NOW + u64::from(token),
    }
}

fn record((owner, token, nonce): Grant, oldest: Token) -> Record {
    let digit = match owner {
        Owner::A => "a",
        Owner::B => "b",
        Owner::Nobody => "0",
    };
    let text = format!("1.{}.{}{nonce:08x}", micros(token, oldest), digit.repeat(32));
    Record::new(&text.parse::<LockToken>().expect("a token"), &Info::default())
}

/// A record. With the mark of an extension it has `;` instead of `:` after the owner.
fn marked(grant: Grant, extended: bool, oldest: Token) -> Record {
    let mut text = record(grant, oldest).as_bytes().to_vec();
    if extended {
        text[16 + 1 + 40] = b';';
    }
    Record::foreign(text.into())
}

fn translate(vote: Vote, oldest: Token) -> String {
    let held = |lock: Lock| {
        format!("held by {:?}", marked((lock.owner, lock.token, lock.nonce), lock.extended, oldest))
    };
    match vote {
        Vote::Granted => "granted".into(),
        Vote::Yours(lock) => format!("of its own, {}", held(lock)),
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
        CoreVote::Yours(Holding { record, .. }) => format!("of its own, held by {record:?}"),
        CoreVote::Held(Holding { record, .. }) => format!("held by {record:?}"),
        CoreVote::Stale { fence } => format!("stale {}", fence.get()),
        CoreVote::Extended { .. } => "extended".into(),
        CoreVote::Released => "released".into(),
        CoreVote::Missing => "missing".into(),
        CoreVote::Failed(failure) if failure.reason == Reason::Quarantined => "quarantined".into(),
        CoreVote::Failed(failure) if failure.reason == Reason::Clock => "clock".into(),
        other => format!("{other:?}"),
    }
}

/// A node of the core, with its clock.
struct Code {
    clock: Arc<Fixed>,
    node: MemoryNode,
}

impl Code {
    fn new() -> Self {
        let clock = Arc::new(Fixed(AtomicU64::new(0)));
        Self { node: MemoryNode::new("n", clock.clone(), NodeSettings::default()), clock }
    }
}

/// Applies the event to both nodes and compares their answers.
fn apply_to_both(
    event: Event,
    model: &mut Node,
    code: &Code,
    oldest: Token,
) -> Result<(), TestCaseError> {
    let keys = Keys::new("lock:", &"a".parse::<LockName>().expect("a name"));
    let ttl = Ttl::from_millis(TTL_MS).expect("a TTL");
    let asked = |(owner, token, nonce)| Lock { owner, token, nonce, extended: false, guards: 0 };
    let rules = &Rules::ALL;
    let window = Window::from(oldest);
    let (answer, op) = match event {
        Event::Acquire(grant) => {
            let op = Op::Acquire { keys, record: record(grant, oldest), ttl, tell: None };
            (model.acquire(rules, window, asked(grant)), op)
        }
        Event::Extend(grant) => {
            let record = record(grant, oldest);
            let op = Op::Extend { keys, record, ttl, began_micros: NOW };
            (model.extend(rules, window, asked(grant)), op)
        }
        Event::Repair(grant, extended) => {
            let op = Op::Repair {
                keys,
                record: marked(grant, extended, oldest),
                ttl,
                began_micros: NOW,
            };
            (model.repair(rules, window, Lock { extended, ..asked(grant) }), op)
        }
        Event::KeepFree(token) => {
            model.lock = Some(Lock::blocker(token, 0));
            let record = record((Owner::Nobody, token, 0), oldest);
            let life = Some(Duration::from_millis(TTL_MS));
            prop_assert!(code.node.set_foreign(&keys.lock, record.as_bytes(), life));
            return Ok(());
        }
        Event::Release(grant, scope) => {
            let op = Op::Release { keys, record: record(grant, oldest), scope, tell: None };
            (model.release(rules, window, asked(grant), scope), op)
        }
        Event::Expire => {
            model.expire();
            code.clock.0.fetch_add(TTL_MS + 1, Ordering::Relaxed);
            return Ok(());
        }
        Event::EndWatermark => {
            model.expire();
            model.end_watermark();
            // The end of a restored watermark is rounded up to seconds.
            let rounded = Duration::from_secs(2);
            let life =
                Duration::from_millis(TTL_MS + 1) + fence_grace(Duration::from_secs(2)) + rounded;
            code.clock.0.fetch_add(life.as_millis() as u64, Ordering::Relaxed);
            return Ok(());
        }
        Event::Wipe => {
            model.wipe();
            code.node.wipe();
            return Ok(());
        }
        Event::Admit => {
            model.admitted = true;
            code.node.admit();
            return Ok(());
        }
    };
    prop_assert_eq!(translate(answer, oldest), read(code.node.run(&op)), "{:?}", event);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nodes_agree_on_random_histories(events in events(), oldest in prop_oneof![Just(0u8), Just(2u8)]) {
        let mut model = Node::default();
        let code = Code::new();
        for event in events {
            apply_to_both(event, &mut model, &code, oldest)?;
        }
    }
}

/// Tries every event in every state that three tokens allow. A random search would miss some
/// histories, for example an extension, an expiry, a failed proposal and the undo of that proposal.
#[test]
fn nodes_agree_in_every_small_state() {
    let mut events = vec![Event::Expire, Event::EndWatermark, Event::Wipe, Event::Admit];
    events.extend([1, 2, 3].map(Event::KeepFree));
    for (owner, nonce) in [(Owner::A, 0), (Owner::A, 1), (Owner::B, 0)] {
        for token in [1, 2, 3, FAR] {
            let grant = (owner, token, nonce);
            events.extend([Event::Acquire(grant), Event::Extend(grant)]);
            events.extend([false, true].map(|extended| Event::Repair(grant, extended)));
            events.extend(SCOPES.map(|scope| Event::Release(grant, scope)));
        }
    }
    let code = Code::new();
    let now = || code.clock.0.load(Ordering::Relaxed);
    for oldest in [0, 1] {
        let mut seen = HashSet::from([Node::default()]);
        code.node.wipe();
        code.node.admit();
        let mut next = vec![(Node::default(), code.node.snapshot(), now())];
        while let Some((node, snapshot, at)) = next.pop() {
            for event in &events {
                code.node.restore(snapshot.clone());
                code.clock.0.store(at, Ordering::Relaxed);
                let mut model = node;
                apply_to_both(*event, &mut model, &code, oldest)
                    .unwrap_or_else(|why| panic!("{node:?}: {why}"));
                if seen.insert(model) {
                    next.push((model, code.node.snapshot(), now()));
                }
            }
        }
        let taken_back = |node: &Node| matches!(node.mark, Mark::Provisional(Some(_)));
        assert!(seen.iter().any(taken_back), "{} states", seen.len());
    }
}
