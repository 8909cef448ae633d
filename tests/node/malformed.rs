//! Malformed calls: cut off, with wrong lengths, or mere noise. A master refuses such a call before
//! any part of it runs.
//!
//! `MALFORMED_SEED=<seed>` repeats a run.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::node::NodeSettings;
use redlock_core::node::Op;
use redlock_core::node::codec::{Header, pack_call, unpack_call};

use crate::support::chance::{Chance, seed};
use crate::support::harness::{RedisOptions, RedisServer};
use crate::support::nodes::{LONG_MS, Lock, telling};
use crate::support::resp::Resp;

const SCRIPT: &str = include_str!("../../crates/redlock-core/src/node/locks.lua");
const MARKER_KEY: &str = "{lock:}:marker";
const MARKER: &str = "1 a-marker";
const CALLS: usize = 3_000;
const MOST_NOISE: usize = 64 * 1024;
/// The fencing token of every operation here. It is fixed, so that a seed repeats every byte of a
/// run. The calls set a clock skew that allows such an old token. The last digit is 2, because then
/// the token is still a number in the allowed range if the digit before it becomes an `e`:
/// 17000000000000e2 is 1.7e15.
const T: u64 = 1_700_000_000_000_002;

/// Bytes other than digits that some number parsers accept.
const IN_NUMBERS: &[u8] = b"eE.+-xX_ ";

type Run = fn(&RedisServer, &[u8]) -> Result<Resp, String>;

fn by_script(server: &RedisServer, call: &[u8]) -> Result<Resp, String> {
    server.answer(&[b"EVAL", SCRIPT.as_bytes(), b"0", call])
}

fn by_module(server: &RedisServer, call: &[u8]) -> Result<Resp, String> {
    server.answer(&[b"REDLOCK.CALL", info(server, "server", "run_id").as_bytes(), call])
}

fn info(server: &RedisServer, section: &str, field: &str) -> String {
    let info = server.cmd(&["INFO", section]).text().to_owned();
    let line = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {field}")).to_owned()
}

/// The number of changes to keys, as the server counts them.
fn changes(server: &RedisServer) -> String {
    info(server, "persistence", "rdb_changes_since_last_save")
}

fn whole(chance: &mut Chance, round: usize) -> Vec<u8> {
    let lock = |n: usize| Lock::new(&format!("{round}/{n}"));
    let op = |chance: &mut Chance, lock: &Lock| -> Op {
        let owner = chance.below(3) as u8;
        let set = lock.with(&[Lock::new("stock")]);
        // A repair has no form for a set.
        let lock = if chance.one_in(3) { &set } else { lock };
        let op = match chance.below(8) {
            0 => lock.extend(owner, T, LONG_MS),
            1 if lock.keys.others.is_none() => lock.repair_of(owner, T, LONG_MS, T),
            1 | 2 => lock.release(owner, T),
            3 => lock.undo(owner, T),
            4 => lock.release_exactly(owner, T),
            5 => lock.inspect(),
            6 => lock.release_keeping(owner, T, LONG_MS),
            _ => lock.acquire(owner, T, LONG_MS),
        };
        let may_tell = matches!(op, Op::Acquire { .. } | Op::Release { .. });
        if may_tell && chance.one_in(2) { telling(op, "so and so") } else { op }
    };
    let count = 1 + chance.below(6);
    let ops: Vec<_> = (0..count).map(|n| Arc::new(op(chance, &lock(n)))).collect();
    packed(&ops)
}

fn packed(ops: &[Arc<Op>]) -> Vec<u8> {
    let any_clock = NodeSettings::default().with_max_clock_skew(Duration::from_micros(T));
    pack_call(
        &Header::new(MARKER_KEY, MARKER, "{lock:}:hints", "{lock:}:number:1", &any_clock),
        7,
        ops.iter(),
    )
}

/// A call as a bug in another program may damage it.
fn mangled(chance: &mut Chance, mut call: Vec<u8>) -> Vec<u8> {
    match chance.below(5) {
        0 => call.truncate(chance.below(call.len())),
        1 => call.extend((0..1 + chance.below(40)).map(|_| 0)),
        2 => {
            // The changed byte may be part of a code, of a length or of a text.
            let at = chance.below(call.len());
            call[at] = if chance.one_in(2) {
                IN_NUMBERS[chance.below(IN_NUMBERS.len())]
            } else {
                chance.next() as u8
            };
        }
        3 => {
            let at = chance.below(call.len());
            call.remove(at);
        }
        _ => {
            call.truncate(chance.below(call.len()));
            for _ in 0..=chance.below(MOST_NOISE) {
                call.push(chance.next() as u8);
            }
        }
    }
    call
}

#[test]
fn the_script_refuses_a_malformed_call_and_changes_nothing() {
    refuses(&RedisServer::start(), by_script);
}

#[test]
fn the_module_refuses_a_malformed_call_and_changes_nothing() {
    refuses(
        &RedisServer::start_with(RedisOptions { native: Some(true), ..RedisOptions::default() }),
        by_module,
    );
}

/// A parser of floating-point numbers reads 17000000000000e2 as 1.7e15, and one of hexadecimal numbers
/// reads 0x060a24181e4002. Both values are in the range of tokens.
#[test]
fn a_token_written_as_anything_but_16_digits_is_malformed() {
    let script = RedisServer::start();
    let module =
        RedisServer::start_with(RedisOptions { native: Some(true), ..RedisOptions::default() });
    for server in [&script, &module] {
        server.cmd(&["SET", MARKER_KEY, MARKER]);
    }
    let lock = Lock::new("orders");
    let digits = T.to_string();
    for written in ["17000000000000e2", "17000000000000E2", "1700000000000e03", "0x060a24181e4002"]
    {
        for op in [
            lock.acquire(1, T, LONG_MS),
            lock.repair_of(1, T, LONG_MS, T),
            lock.release(1, T),
            lock.undo(1, T),
            lock.release_exactly(1, T),
            lock.release_keeping(1, T, LONG_MS),
            lock.with(&[Lock::new("stock")]).acquire(1, T, LONG_MS),
        ] {
            let mut call = packed(&[Arc::new(op)]);
            let at = call.windows(digits.len()).position(|part| part == digits.as_bytes());
            let at = at.expect("a T in the call");
            call[at..at + written.len()].copy_from_slice(written.as_bytes());
            assert!(unpack_call(call.clone().into()).is_err(), "{written}");
            for (server, run) in [(&script, by_script as Run), (&module, by_module)] {
                let answer = run(server, &call);
                assert!(answer.is_err(), "{written} was taken: {answer:?}: {call:02x?}");
            }
        }
    }
}

fn refuses(server: &RedisServer, run: Run) {
    server.cmd(&["SET", MARKER_KEY, MARKER]);
    let mut chance = Chance::of(seed("MALFORMED_SEED"), 0);
    let mut refused = 0;
    let mut taken = 0;
    for round in 0..CALLS {
        let call = whole(&mut chance, round);
        let call = if chance.one_in(10) { call } else { mangled(&mut chance, call) };
        let is_call = unpack_call(call.clone().into());
        let before = changes(server);
        let answer = run(server, &call);
        match (is_call, answer) {
            (Ok(_), Ok(Resp::Bytes(_))) => taken += 1,
            (Err(why), Err(error)) => {
                assert_eq!(changes(server), before, "{why}: {error}: {call:02x?}");
                refused += 1;
            }
            (is_call, answer) => {
                panic!("expected {is_call:?}, but the master answered {answer:?}: {call:02x?}")
            }
        }
    }
    // Many changes are inside a text, where any byte is valid, so those calls run. One change is
    // the marker that the test itself has set.
    assert!(changes(server) != "1", "no call has set anything");
    assert!(refused > CALLS / 2 && taken > CALLS / 10, "{refused} refused, {taken} taken");
}
