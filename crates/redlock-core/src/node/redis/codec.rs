//! Operations to script arguments and replies to votes; see `node/locks.lua` for both formats.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fred::types::{Key, Value};

use crate::node::link::Answer;
use crate::node::{Effect, Failure, Holding, NodeSettings, Op, Reason, Record, ReleaseScope, Vote};
use crate::types::FencingToken;

/// What is equal in every call of a session.
pub(super) struct Header {
    marker_key: Bytes,
    channel: Value,
    marker: Value,
    max_offset: Value,
    fence_grace: Value,
}

impl Header {
    pub(super) fn new(marker_key: String, marker: String, channel: String, settings: &NodeSettings) -> Self {
        let number = |number: u128| text(Bytes::from(number.to_string()));
        Self {
            marker_key: marker_key.into(),
            marker: text(marker.into()),
            channel: text(channel.into()),
            max_offset: number(settings.max_clock_offset.as_micros()),
            fence_grace: number(settings.fence_grace.as_millis()),
        }
    }
}

fn text(bytes: Bytes) -> Value {
    Value::Bytes(bytes)
}

/// One call for many operations.
pub(super) fn encode<'a>(header: &Header, ops: impl ExactSizeIterator<Item = &'a Arc<Op>>) -> (Vec<Key>, Vec<Value>) {
    let mut keys: Vec<Key> = Vec::with_capacity(1 + 2 * ops.len());
    let mut arguments = Vec::with_capacity(3 + 3 * ops.len());
    keys.push(header.marker_key.clone().into());
    arguments.extend([header.marker.clone(), header.max_offset.clone(), header.fence_grace.clone()]);
    for op in ops {
        let (of, word): (_, &'static [u8]) = match op.as_ref() {
            Op::Acquire { keys, tell, .. } => (keys, if tell.is_some() { b"W" } else { b"A" }),
            Op::Heal { keys, .. } => (keys, b"H"),
            Op::Extend { keys, .. } => (keys, b"E"),
            Op::Release { keys, scope, tell, .. } => match (scope, tell.is_some()) {
                (ReleaseScope::Try, true) => (keys, b"V"),
                (ReleaseScope::Try, false) => (keys, b"U"),
                // Nobody waits for what had no majority.
                (ReleaseScope::Grant, _) => (keys, b"X"),
                (ReleaseScope::Holder, true) => (keys, b"N"),
                (ReleaseScope::Holder, false) => (keys, b"R"),
            },
            Op::Inspect { keys } => (keys, b"I"),
        };
        keys.push(of.lock.clone().into());
        arguments.push(text(Bytes::from_static(word)));
        match op.as_ref() {
            Op::Acquire { record, ttl, .. } | Op::Heal { record, ttl, .. } => {
                keys.push(of.fence.clone().into());
                arguments.push(text(record.as_bytes().clone()));
                arguments.push(Value::Integer(ttl.millis().into()));
                if let Op::Heal { began_micros, .. } = op.as_ref() {
                    arguments.push(Value::Integer(i64::try_from(*began_micros).unwrap_or(i64::MAX)));
                }
            }
            Op::Extend { record, ttl, .. } => {
                keys.push(of.fence.clone().into());
                arguments.push(text(record.grant()));
                arguments.push(Value::Integer(ttl.millis().into()));
            }
            Op::Release { record, .. } => {
                keys.push(of.fence.clone().into());
                arguments.push(text(record.grant()));
            }
            Op::Inspect { .. } => {}
        }
        let tells = !matches!(op.as_ref(), Op::Release { scope: ReleaseScope::Grant, .. });
        if let Op::Acquire { tell: Some(hint), .. } | Op::Release { tell: Some(hint), .. } = op.as_ref()
            && tells
        {
            arguments.push(header.channel.clone());
            arguments.push(text(hint.as_bytes().clone()));
        }
    }
    (keys, arguments)
}

/// What the script says to one call of so many operations; `None` when it does not say whether the marker stands.
pub(super) fn answer(operations: usize, replies: Vec<Value>) -> Option<Answer> {
    let mut replies = replies.into_iter();
    let time_micros = replies.next()?.as_i64();
    let is_admitted = replies.next()?.as_i64() == Some(1);
    let write_error = if operations == 0 { replies.next().and_then(|error| error.as_string()) } else { None };
    Some(Answer { votes: replies.map(decode).collect(), time_micros, is_admitted, write_error })
}

/// One reply of the script.
pub(super) fn decode(reply: Value) -> Vote {
    let (code, mut rest) = match reply {
        Value::Integer(code) => (code, Vec::new()),
        Value::Array(parts) => {
            let mut parts = parts.into_iter();
            // A number as the script says it: a text or a list that could be read as one is no vote.
            let code = if let Some(Value::Integer(code)) = parts.next() { code } else { 0 };
            (code, parts.collect())
        }
        _ => (0, Vec::new()),
    };
    match (code, rest.as_mut_slice()) {
        (1, []) => Vote::Granted,
        (2, [left, record]) => Vote::Held(holding(left, record)),
        (11, [left, record]) => Vote::Yours(holding(left, record)),
        // Perhaps with the mark of an extension after it.
        (3, [fence]) => {
            match fence.as_bytes().and_then(|text| FencingToken::parse(text.get(..FencingToken::TEXT_LEN)?)) {
                Some(fence) => Vote::Stale { fence },
                None => failed(Reason::Error, Effect::None, "the fence holds no fencing token"),
            }
        }
        (4, []) => Vote::Extended,
        (5, []) => Vote::Released,
        (6, []) => Vote::Missing,
        (7, [left, record]) => Vote::Found(holding(left, record)),
        (8, []) => failed(Reason::Quarantined, Effect::None, "the node's marker is missing or differs"),
        (9, []) => failed(Reason::Clock, Effect::None, "the fencing token is too far from the node's own time"),
        // The script stops at the first error of an operation and undoes what it set before, with one exception that
        // only a broken disk can cause; so the careful word.
        (10, [detail]) => failed(
            Reason::Error,
            Effect::Possible,
            &detail.as_string().unwrap_or_else(|| "an error without text".into()),
        ),
        _ => failed(Reason::Error, Effect::Possible, "the script gave an answer it does not have"),
    }
}

fn failed(reason: Reason, effect: Effect, detail: &str) -> Vote {
    Vote::Failed(Failure::new(reason, effect, detail))
}

fn holding(left: &Value, record: &mut Value) -> Holding {
    let record = match std::mem::replace(record, Value::Null) {
        Value::Bytes(bytes) => bytes,
        Value::String(text) => text.into_inner(),
        _ => Bytes::new(),
    };
    // -1 is a key without expiry; a key that is gone between two reads of one script cannot be.
    let expires_in = left.as_i64().and_then(|left| u64::try_from(left).ok()).map(Duration::from_millis);
    Holding { record: Record::foreign(record), expires_in }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// Whatever a node could send, and often what is nearly a vote.
    fn any_reply() -> impl Strategy<Value = Value> {
        let code = prop_oneof![0..13i64, any::<i64>()];
        let leaf = prop_oneof![
            4 => code.clone().prop_map(Value::Integer),
            2 => code.prop_map(|code| Value::String(code.to_string().into())),
            1 => "[0-9]{14,18}[+!]{0,2}".prop_map(|text| Value::String(text.into())),
            1 => vec(any::<u8>(), 0..70).prop_map(|bytes| Value::Bytes(bytes.into())),
            1 => any::<f64>().prop_map(Value::Double),
            1 => any::<bool>().prop_map(Value::Boolean),
            1 => Just(Value::Null),
            1 => Just(Value::Queued),
        ];
        leaf.prop_recursive(3, 16, 4, |inner| vec(inner, 0..4).prop_map(Value::Array))
    }

    /// What the script says when it says yes.
    fn says(reply: &Value, code: i64) -> bool {
        match reply {
            Value::Integer(said) => *said == code,
            Value::Array(parts) => matches!(parts.as_slice(), [Value::Integer(said)] if *said == code),
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn garbage_is_no_vote_that_somebody_acts_on(reply in any_reply()) {
            let code = match decode(reply.clone()) {
                Vote::Granted => 1,
                Vote::Extended => 4,
                Vote::Released => 5,
                Vote::Missing => 6,
                Vote::Held(_) | Vote::Yours(_) | Vote::Found(_) | Vote::Stale { .. } | Vote::Failed(_) => return Ok(()),
            };
            prop_assert!(says(&reply, code), "{reply:?} was taken for {code}");
        }
    }

    #[test]
    fn every_shape_of_reply_becomes_a_vote_and_none_panics() {
        assert_eq!(decode(Value::Integer(1)), Vote::Granted);
        assert!(matches!(decode(Value::Array(vec![3.into(), "1763725165000000".into()])), Vote::Stale { .. }));
        let held = decode(Value::Array(vec![2.into(), (-1).into(), "x".into()]));
        assert!(matches!(held, Vote::Held(Holding { expires_in: None, .. })));
        for odd in [
            Value::Null,
            Value::Integer(2),
            Value::Integer(99),
            Value::Array(vec![]),
            Value::Array(vec![Value::Null]),
            Value::Array(vec![3.into(), "x".into()]),
            Value::Array(vec![1.into(), 2.into()]),
        ] {
            assert!(matches!(decode(odd), Vote::Failed(_)));
        }
    }
}
