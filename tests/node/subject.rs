//! A node under test. It is in memory or on a real redis-server, behind the same interface.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::clock::SystemClock;
use redlock_core::node::Engine;
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::{Holding, NoObserver, Node, NodeSettings, NodeState, Op, Record, Vote};

use crate::support::harness::{RedisOptions, RedisServer};
use crate::support::nodes::{Lock, ask, in_state, node_settings, redis_settings, remote_node_with};

#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    Memory,
    /// A redis-server, called through the script.
    Redis,
    /// A redis-server, called through the module.
    Native,
}

/// A node under test, with direct access to its data.
pub(crate) struct Subject {
    pub(crate) node: Arc<dyn Node>,
    backing: Backing,
}

enum Backing {
    Memory(Arc<MemoryNode>),
    Redis(RedisServer),
}

impl Kind {
    pub(crate) async fn subject(self) -> Subject {
        self.subject_with(node_settings()).await
    }

    pub(crate) async fn subject_with(self, settings: NodeSettings) -> Subject {
        match self {
            Self::Memory => {
                let node = Arc::new(MemoryNode::new("memory", Arc::new(SystemClock), settings));
                Subject { node: node.clone(), backing: Backing::Memory(node) }
            }
            Self::Redis | Self::Native => {
                let native = matches!(self, Self::Native);
                let server = RedisServer::start_with(RedisOptions {
                    native: Some(native),
                    ..RedisOptions::default()
                });
                let node =
                    remote_node_with(&server.url(), redis_settings(settings), Arc::new(NoObserver));
                let status = in_state(node.as_ref(), NodeState::Admitted).await;
                assert!(!native || status.engine == Some(Engine::Native), "{status:?}");
                Subject { node, backing: Backing::Redis(server) }
            }
        }
    }
}

impl Subject {
    pub(crate) async fn ask(&self, op: Op) -> Vote {
        ask(self.node.as_ref(), op).await
    }

    /// Sets a key as another client would.
    pub(crate) fn set_foreign(&self, key: &[u8], value: &[u8], life: Option<Duration>) {
        match &self.backing {
            Backing::Memory(node) => drop(node.set_foreign(key, value, life)),
            Backing::Redis(server) => {
                let _ = match life {
                    None => server.cmd(&[b"SET", key, value]),
                    Some(life) => server.cmd(&[
                        b"SET",
                        key,
                        value,
                        b"PX",
                        life.as_millis().to_string().as_bytes(),
                    ]),
                };
            }
        }
    }

    /// Deletes all data, including the marker.
    pub(crate) fn wipe(&self) {
        match &self.backing {
            Backing::Memory(node) => node.wipe(),
            Backing::Redis(server) => drop(server.cmd(&["FLUSHALL"])),
        }
    }

    /// The stored record and its remaining life.
    pub(crate) async fn stored(&self, lock: &Lock) -> Option<(Record, Option<Duration>)> {
        match self.ask(lock.inspect()).await {
            Vote::Found(Holding { record, expires_in, .. }) => Some((record, expires_in)),
            Vote::Missing => None,
            other => panic!("not an inspection's answer: {other:?}"),
        }
    }

    /// The remaining life of the watermark.
    pub(crate) async fn fence_life(&self, lock: &Lock) -> Option<Duration> {
        self.watermark(lock).await?.1
    }

    /// The text of the watermark and its remaining life.
    pub(crate) async fn watermark(&self, lock: &Lock) -> Option<(String, Option<Duration>)> {
        match self.ask(lock.inspect_fence()).await {
            Vote::Found(holding) => {
                let text = std::str::from_utf8(holding.record.as_bytes()).expect("a text");
                Some((text.to_owned(), holding.expires_in))
            }
            Vote::Missing => None,
            other => panic!("not an inspection's answer: {other:?}"),
        }
    }

    /// The token of the watermark, without its mark.
    pub(crate) async fn fence(&self, lock: &Lock) -> Option<u64> {
        let (text, _) = self.watermark(lock).await?;
        Some(text[..16].parse().expect("digits"))
    }
}
