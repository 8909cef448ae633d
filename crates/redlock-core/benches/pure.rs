//! The cost of a request in the core, without its nodes: parsing, minting tokens, writing records,
//! counting votes, encoding batches. Times depend on the machine and the moment; allocations do
//! not.
//!
//! `cargo bench -p redlock-core` runs all, `cargo bench -p redlock-core -- record` those that
//! match.

use std::sync::Arc;
use std::time::Duration;

use divan::counter::ItemsCount;
use divan::{AllocProfiler, Bencher, black_box};
use redlock_core::clock::{HybridClock, SystemClock};
use redlock_core::internals::{packed_answer, tally, unpacked_answer};
use redlock_core::node::codec::{Header, pack_call};
use redlock_core::node::{Hint, Holding, Keys, NodeSettings, Op, Record, ReleaseScope, Vote};
use redlock_core::quorum::Quorum;
use redlock_core::validity::{drift, validity};
use redlock_core::{FencingToken, Info, LockName, LockToken, Owner, Ttl};

#[global_allocator]
static ALLOCATIONS: AllocProfiler = AllocProfiler::system();

const TOKEN: &str = "1.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b";
const INFO: &[u8] = br#"{"owner":"nightly-report on host-7"}"#;
const NAMES: [&str; 2] = ["a", "reports/nightly/2026-11-21@eu-west-1"];

fn main() {
    divan::main();
}

fn name(text: &str) -> LockName {
    text.parse::<LockName>().expect("a lock's name")
}

fn token() -> LockToken {
    TOKEN.parse::<LockToken>().expect("a token")
}

fn ttl() -> Ttl {
    Ttl::from_millis(30_000).expect("within the limits of a Ttl")
}

fn info() -> Info {
    Info::new(INFO).expect("short enough")
}

fn keys() -> Keys {
    Keys::new("lock:", &name(NAMES[1]))
}

fn acquire() -> Op {
    Op::Acquire { keys: keys(), record: Record::new(&token(), &info()), ttl: ttl(), tell: None }
}

fn held() -> Vote {
    Vote::Held(Holding {
        record: Record::new(&token(), &info()),
        expires_in: Some(Duration::from_secs(20)),
        at: 0,
    })
}

mod words {
    use super::*;

    #[divan::bench(args = NAMES)]
    fn lock_name(text: &str) -> LockName {
        name(text)
    }

    #[divan::bench]
    fn token_parsed() -> Result<LockToken, redlock_core::InvalidToken> {
        black_box(TOKEN).parse::<LockToken>()
    }

    #[divan::bench]
    fn token_shown(bencher: Bencher) {
        let token = token();
        bencher.bench(|| black_box(&token).expose());
    }

    #[divan::bench]
    fn owner_of_an_idempotency_key(bencher: Bencher) {
        let name = name(NAMES[1]);
        bencher.bench(|| {
            Owner::derive("cluster", "anonymous", black_box(&name), "9f86d081884c7d659a2f")
        });
    }
}

mod storage {
    use super::*;

    #[divan::bench(args = NAMES)]
    fn keys_of(bencher: Bencher, text: &str) {
        let name = name(text);
        bencher.bench(|| Keys::new(black_box("lock:"), black_box(&name)));
    }

    #[divan::bench]
    fn record_written(bencher: Bencher) {
        let token = token();
        let info = info();
        bencher.bench(|| Record::new(black_box(&token), black_box(&info)));
    }

    #[divan::bench]
    fn record_read(bencher: Bencher) {
        let record = Record::new(&token(), &info());
        bencher.bench(|| black_box(&record).parse().is_some());
    }
}

mod decisions {
    use super::*;

    #[divan::bench]
    fn token_minted(bencher: Bencher) {
        let clock = HybridClock::new(Arc::new(SystemClock), Duration::from_secs(2));
        bencher.bench(|| clock.mint());
    }

    #[divan::bench]
    fn token_observed(bencher: Bencher) {
        let clock = HybridClock::new(Arc::new(SystemClock), Duration::from_secs(2));
        let seen = FencingToken::new(1_763_725_165_123_456).expect("a token");
        bencher.bench(|| clock.observe(black_box(seen)));
    }

    #[divan::bench]
    fn validity_left() -> Option<Duration> {
        let ttl = black_box(ttl()).duration();
        validity(ttl, black_box(Duration::from_millis(1)), drift(ttl, black_box(0.01)))
    }

    /// As at the deciding vote: the other votes are outstanding.
    #[divan::bench]
    fn votes_for(bencher: Bencher) {
        let quorum = Quorum::new(5).expect("five nodes");
        let op = acquire();
        let votes = [Some(Vote::Granted), Some(Vote::Granted), Some(Vote::Granted), None, None];
        bencher.bench(|| quorum.decide(tally(black_box(&op), black_box(&votes))));
    }

    #[divan::bench]
    fn votes_against(bencher: Bencher) {
        let quorum = Quorum::new(5).expect("five nodes");
        let op = acquire();
        let votes = [Some(held()), Some(held()), Some(held()), None, None];
        bencher.bench(|| quorum.decide(tally(black_box(&op), black_box(&votes))));
    }
}

/// Half of the operations acquire and half release; every fourth acquire is refused. Per operation.
mod batch {
    use super::*;

    const SIZES: [usize; 4] = [1, 8, 32, 128];

    fn release() -> Op {
        let hint = Hint::received("1 r 0123456789abcdef 1763725165123456 lock:a".into());
        Op::Release {
            keys: keys(),
            record: Record::new(&token(), &Info::default()),
            scope: ReleaseScope::Holder,
            tell: Some(hint),
        }
    }

    fn is_acquire(at: &usize) -> bool {
        at.is_multiple_of(2)
    }

    #[divan::bench(args = SIZES)]
    fn encoded(bencher: Bencher, size: usize) {
        let header = Header::new(
            "{lock:}:node",
            "1 a-marker",
            "{lock:}:hints",
            "{lock:}:number",
            &NodeSettings::default(),
        );
        let ops: Vec<_> = (0..size)
            .map(|at| Arc::new(if is_acquire(&at) { acquire() } else { release() }))
            .collect();
        bencher
            .counter(ItemsCount::new(size))
            .bench(|| pack_call(&header, 0, black_box(&ops).iter()));
    }

    #[divan::bench(args = SIZES)]
    fn decoded(bencher: Bencher, size: usize) {
        let vote = |at: usize| match at {
            at if !is_acquire(&at) => Vote::Released,
            at if at % 8 == 6 => held(),
            _ => Vote::Granted,
        };
        let answer = packed_answer(&(0..size).map(vote).collect::<Vec<_>>());
        bencher
            .counter(ItemsCount::new(size))
            .bench(|| unpacked_answer(size, black_box(answer.clone())));
    }
}
