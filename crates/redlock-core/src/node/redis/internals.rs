//! The batch codec as benchmarks reach it. The Redis client's types stay inside.

use std::sync::Arc;

use bytes::Bytes;
use fred::types::{Key, Value};

use super::codec::{self, Header};
use crate::node::admission::marker_key;
use crate::node::calls;
use crate::node::{NodeSettings, Op, Record, Vote, hint};

/// What turns operations into one call, and its replies into votes.
pub struct Codec(Header);

/// One call, ready to be sent.
pub struct Call {
    keys: Vec<Key>,
    arguments: Vec<Value>,
}

/// What a node answered to one call.
#[derive(Clone, Default)]
pub struct Replies(Vec<Value>);

impl Codec {
    /// For nodes that share this prefix and show this marker.
    pub fn new(prefix: &str, marker: &str) -> Self {
        let channel = hint::channel(prefix, None);
        Self(Header::new(marker_key(prefix), marker.into(), channel, &NodeSettings::default()))
    }

    /// Weighs the operations as the worker does, and makes one call of them.
    pub fn encode(&self, ops: &[Arc<Op>]) -> (usize, Call) {
        let weight = ops.iter().map(|op| calls::weight(op)).sum();
        let (keys, arguments) = codec::encode(&self.0, ops.iter());
        (weight, Call { keys, arguments })
    }

    pub fn decode(&self, replies: Replies) -> impl Iterator<Item = Vote> {
        replies.0.into_iter().map(codec::decode)
    }
}

impl Call {
    /// How many keys and arguments it carries.
    pub fn size(&self) -> (usize, usize) {
        (self.keys.len(), self.arguments.len())
    }
}

impl Replies {
    /// One more operation was granted.
    pub fn granted(&mut self) {
        self.0.push(Value::Integer(1));
    }

    /// One more was refused, for this lock.
    pub fn held(&mut self, record: &Record, left_ms: i64) {
        let parts = vec![Value::Integer(2), Value::Integer(left_ms), Value::Bytes(Bytes::clone(record.as_bytes()))];
        self.0.push(Value::Array(parts));
    }

    /// One more lock was released.
    pub fn released(&mut self) {
        self.0.push(Value::Integer(5));
    }
}
