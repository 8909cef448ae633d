//! Encoded calls and answers decode to the same values; malformed ones are refused as a whole.

#![cfg(test)]

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::model::types::{Info, LockName, LockToken, Nonce, Owner};

fn record() -> impl Strategy<Value = Record> {
    let t = FencingToken::MIN.get()..FencingToken::MAX.get();
    (t, any::<[u8; 16]>(), any::<[u8; 4]>(), vec(any::<u8>(), 0..300)).prop_map(
        |(t, owner, nonce, info)| {
            let token = LockToken::new(
                Owner::from_bytes(owner),
                Nonce::from_bytes(nonce),
                FencingToken::new(t).unwrap(),
            );
            Record::new(&token, &Info::new(info).unwrap())
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let single = || {
        "[A-Za-z0-9._:@/+~-]{1,255}".prop_filter_map("a lock's name", |name| {
            Some(Keys::new("lock:", &name.parse::<LockName>().ok()?))
        })
    };
    let keys = (single(), vec(single(), 0..4)).prop_map(|(first, others)| first.with(others));
    let ttl = (10..86_400_000u64).prop_map(|millis| Ttl::from_millis(millis).unwrap());
    let tell =
        prop::option::of(vec(any::<u8>(), 0..300).prop_map(|text| Hint::received(text.into())));
    let scope = prop_oneof![
        Just(ReleaseScope::Holder),
        Just(ReleaseScope::Grant),
        Just(ReleaseScope::Proposal),
        any::<u64>().prop_map(|began_micros| ReleaseScope::HolderKeeping {
            life: Ttl::from_millis(700).unwrap(),
            began_micros
        })
    ];
    (0..5, keys, record(), ttl, tell, scope, any::<u64>()).prop_map(
        |(kind, keys, record, ttl, tell, scope, began_micros)| match kind {
            // A repair has no form for a set.
            2 if keys.others.is_some() => Op::Acquire { keys, record, ttl, tell },
            0 => Op::Acquire { keys, record, ttl, tell },
            1 => Op::Extend { keys, record, ttl, began_micros },
            2 => Op::Repair { keys, record, ttl, began_micros },
            3 => Op::Release { keys, record, scope, tell },
            _ => Op::Inspect { keys },
        },
    )
}

/// The part of an operation that a call contains. Where a node compares only the grant, the rest of
/// the record is left out. Where no waiter needs a hint, the hint is left out.
fn encoded_part(op: &Op) -> Op {
    let grant = |record: &Record| Record::foreign(Bytes::copy_from_slice(record.grant()));
    match op.clone() {
        Op::Extend { keys, record, ttl, began_micros } => {
            Op::Extend { keys, record: grant(&record), ttl, began_micros }
        }
        Op::Release { keys, record, scope, tell } => {
            let tells = matches!(scope, ReleaseScope::Holder | ReleaseScope::Proposal);
            let tell = tell.filter(|_| tells);
            Op::Release { keys, record: grant(&record), scope, tell }
        }
        op @ (Op::Acquire { .. } | Op::Repair { .. } | Op::Inspect { .. }) => op,
    }
}

fn header() -> Header {
    Header::new(
        "{lock:}:node",
        "1 a-marker",
        "{lock:}:hints",
        "{lock:}:number",
        &NodeSettings::default(),
    )
}

fn packed(ops: &[Op]) -> Vec<u8> {
    let ops: Vec<_> = ops.iter().cloned().map(Arc::new).collect();
    pack_call(&header(), 7, ops.iter())
}

fn vote() -> impl Strategy<Value = Vote> {
    let each = vec(vote_on_one(), 0..4).prop_map(Vote::Each);
    prop_oneof![9 => any_vote(), 1 => each]
}

/// A vote about one lock. It does not say which lock of a set it is about.
fn vote_on_one() -> impl Strategy<Value = Vote> {
    any_vote().prop_filter("on one lock", |vote| {
        vote.lock_of_set() == 0 && !matches!(vote, Vote::FoundOfSet(_))
    })
}

fn any_vote() -> impl Strategy<Value = Vote> {
    let time = || (0..86_400_000u64).prop_map(Duration::from_millis);
    let holding = (vec(any::<u8>(), 0..300), prop::option::of(time()), any::<u8>()).prop_map(
        |(value, expires_in, at)| Holding { record: Record::foreign(value.into()), expires_in, at },
    );
    let stand = vec(holding.clone(), 0..4);
    (0..11, holding, stand, time(), FencingToken::MIN.get()..FencingToken::MAX.get()).prop_map(
        |(kind, holding, stand, time, t)| match kind {
            0 => Vote::Granted,
            9 => Vote::FoundOfSet(stand),
            1 => Vote::Held(holding),
            2 => Vote::Yours(holding),
            3 => Vote::Found(holding),
            4 => Vote::Released,
            5 => Vote::Missing,
            6 => Vote::Extended { expires_in: time },
            7 => Vote::Stale { fence: FencingToken::new(t).unwrap() },
            8 => Vote::Failed(Failure::new(
                Reason::Error,
                Effect::Possible,
                "OOM command not allowed",
            )),
            _ => Vote::Failed(Failure::new(
                Reason::Clock,
                Effect::None,
                "the operation's time is too far from the node's own time",
            )),
        },
    )
}

fn answer(votes: &[Vote]) -> Vec<u8> {
    let mut answer = AnswerPacker::new(1_763_725_165_123_456, true);
    votes.iter().for_each(|vote| answer.vote(vote));
    answer.finish()
}

proptest! {
    #[test]
    fn a_call_decodes_to_the_same_values(ops in vec(op(), 0..20)) {
        let call = unpack_call(packed(&ops).into()).unwrap();
        prop_assert_eq!((&call.marker_key[..], &call.marker[..]), (&b"{lock:}:node"[..], &b"1 a-marker"[..]));
        prop_assert_eq!(&call.channel[..], b"{lock:}:hints");
        prop_assert_eq!(call.settings.max_clock_skew, NodeSettings::default().max_clock_skew);
        prop_assert_eq!(call.settings.fence_grace, NodeSettings::default().fence_grace);
        let wanted: Vec<_> = ops.iter().map(encoded_part).collect();
        prop_assert_eq!(format!("{:?}", call.ops), format!("{wanted:?}"));
    }

    #[test]
    fn a_call_cut_short_or_too_long_is_refused(ops in vec(op(), 0..4), at: prop::sample::Index, more in vec(any::<u8>(), 1..9)) {
        let whole = packed(&ops);
        prop_assert!(unpack_call(Bytes::copy_from_slice(&whole[..at.index(whole.len())])).is_err());
        let longer = [whole, more].concat();
        prop_assert!(unpack_call(longer.into()).is_err());
    }

    #[test]
    fn random_bytes_panic_no_decoder(noise in vec(any::<u8>(), 0..2_000), operations in 0..200usize) {
        for version in [noise.first().copied().unwrap_or(0), VERSION] {
            let mut bytes = noise.clone();
            if let Some(first) = bytes.first_mut() {
                *first = version;
            }
            let _ = unpack_call(bytes.clone().into());
            let _ = unpack_answer(operations, bytes.into());
        }
    }

    #[test]
    fn flipped_bytes_in_a_call_do_not_panic(ops in vec(op(), 1..4), flips in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let mut call = packed(&ops);
        for (at, byte) in flips {
            let at = at.index(call.len());
            call[at] = byte;
        }
        let _ = unpack_call(call.into());
    }

    #[test]
    fn an_answer_decodes_to_the_same_votes(votes in vec(vote(), 1..20)) {
        let read = unpack_answer(votes.len(), answer(&votes).into()).unwrap();
        prop_assert_eq!((read.time_micros, read.is_admitted), (Some(1_763_725_165_123_456), true));
        prop_assert_eq!(read.votes, votes);
    }

    /// Even if the first votes are whole, it is unknown which operations ran.
    #[test]
    fn an_answer_of_another_length_or_vote_count_is_refused(votes in vec(vote(), 1..5), at: prop::sample::Index) {
        let whole = answer(&votes);
        prop_assert!(unpack_answer(votes.len(), Bytes::copy_from_slice(&whole[..at.index(whole.len())])).is_none());
        prop_assert!(unpack_answer(votes.len() + 1, whole.clone().into()).is_none());
        prop_assert!(unpack_answer(votes.len() - 1, whole.clone().into()).is_none() || votes.len() == 1);
        prop_assert!(unpack_answer(votes.len(), [whole, vec![0]].concat().into()).is_none());
    }

    #[test]
    fn an_unknown_vote_code_is_refused(code in (0u8..).prop_filter("no vote", |code| !(1..=11).contains(code))) {
        let mut bytes = AnswerPacker::new(1, true).finish();
        bytes.push(code);
        prop_assert!(unpack_answer(1, bytes.into()).is_none());
    }
}

#[test]
fn another_version_is_named_in_the_error() {
    let mut call = packed(&[]);
    call[0] = 7;
    assert_eq!(
        unpack_call(call.into()).unwrap_err().to_string(),
        "the call has version 7 and not 6"
    );
}

#[test]
fn a_heartbeat_answer_carries_the_write_error() {
    for (error, wanted) in [("OOM", Some("OOM".to_owned())), ("", None)] {
        let mut answer = AnswerPacker::new(1, true);
        answer.write_error(error);
        assert_eq!(unpack_answer(0, answer.finish().into()).unwrap().write_error, wanted);
    }
}

/// Another client may have stored any value: a vote must not carry megabytes.
#[test]
fn a_long_value_is_cut_in_a_vote() {
    let holding =
        Holding { record: Record::foreign(vec![b'x'; 5_000_000].into()), expires_in: None, at: 0 };
    let read = unpack_answer(1, answer(&[Vote::Held(holding)]).into()).unwrap();
    assert!(
        matches!(&read.votes[0], Vote::Held(held) if held.record.as_bytes().len() == LONGEST_VALUE)
    );
}
