//! Sets an extended lock again on nodes that lost it, after a majority has proved who holds it.
//! Without repair, a lock that is extended for a long time could lose its majority, when nodes
//! restart empty one after the other.
//!
//! A repair sets the *same* T, however old the lock is. A node's watermark refuses a repair if the
//! node has granted a later T meanwhile, or if a release of this T has reached the node. So a late
//! repair does not bring a released lock back while that watermark lives. After that, the age of
//! the repair protects the lock: a repair carries the time at which its extension began, and a node
//! refuses a repair if that time is more than `max_clock_skew` from its own clock. The watermark of
//! a release lives longer than that.
//!
//! If a node's watermark equals T, the node accepts the repair only if the watermark has the flag
//! of an extension. A release removes that flag. A watermark without the flag shows that the lock
//! was on this node and has ended there, by a release or at the end of its TTL. For example, a
//! master that keeps its data was down for longer than the TTL. If the master went down before the
//! first extension of the lock, it stays without the lock until its watermark ends.

use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::model::clock::Clock;
use crate::model::types::{Info, LockToken, Ttl};
use crate::model::validity;
use crate::node::{Keys, Node, Observer, Op, Record, Reply, Vote, Voter};

/// What all repairs of this process share.
pub(crate) struct Repairs {
    pub(crate) nodes: Arc<[Arc<dyn Node>]>,
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) drift_factor: f64,
}

/// When an extension began.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Began {
    /// On tokio's clock.
    pub(crate) at: Instant,
    /// On the clock of leases.
    pub(crate) monotonic: Duration,
    /// By the wall clock.
    pub(crate) wall_micros: u64,
}

impl Repairs {
    /// Makes the repair that follows an extension. Returns `None` for other operations.
    pub(super) fn after(&self, extension: &Op, began: Began) -> Option<Arc<Repair>> {
        let Op::Extend { keys, record, ttl, .. } = extension else { return None };
        let (token, _) = record.parse()?;
        let drift = validity::drift(ttl.duration(), self.drift_factor);
        Some(Arc::new(Repair {
            nodes: self.nodes.clone(),
            observer: self.observer.clone(),
            keys: Keys { others: None, ..keys.clone() },
            token,
            ttl: *ttl,
            began_micros: began.wall_micros,
            not_after: began.at + ttl.duration(),
            until: began.monotonic + ttl.duration().saturating_sub(drift),
            clock: self.clock.clone(),
            progress: Mutex::default(),
        }))
    }
}

pub(super) struct Repair {
    nodes: Arc<[Arc<dyn Node>]>,
    observer: Arc<dyn Observer>,
    keys: Keys,
    token: LockToken,
    ttl: Ttl,
    /// When the extension began, by the wall clock.
    began_micros: u64,
    /// A node must not begin a repair after this time.
    not_after: Instant,
    /// The end of the extension's own lease, on the clock that includes suspend. The extension
    /// proves nothing beyond that time, so no later vote may trigger a repair.
    until: Duration,
    clock: Arc<dyn Clock>,
    progress: Mutex<Progress>,
}

/// The record that a repair sets includes the text for people. The holder does not send that text
/// with an extension. So a node that has the lock, the witness, is asked for the record.
#[derive(Default)]
enum Progress {
    #[default]
    Nothing,
    /// These nodes wait for the record.
    Asking(Vec<usize>),
    Known(Arc<Op>),
}

impl Repair {
    /// Repairs nodes. `missing` has the indices of nodes that do not store the lock. `witness` is
    /// the index of a node that has extended the lock. If a later vote shows another node without
    /// the lock, the round calls this again.
    pub(super) fn missing(self: Arc<Self>, missing: Vec<usize>, witness: usize) {
        let mut progress = self.progress();
        match &mut *progress {
            Progress::Nothing => {
                *progress = Progress::Asking(missing);
                drop(progress);
                let question = Op::Inspect { keys: self.keys.clone() };
                let reply = Reply::new(Arc::new(Witness(self.clone())), witness);
                self.nodes[witness].submit(Arc::new(question), self.not_after, reply);
            }
            Progress::Asking(waiting) => waiting.extend(missing),
            Progress::Known(op) => {
                let op = op.clone();
                drop(progress);
                self.set_again(&missing, &op);
            }
        }
    }

    fn set_again(self: &Arc<Self>, missing: &[usize], op: &Arc<Op>) {
        if self.clock.monotonic() >= self.until {
            return;
        }
        for index in missing {
            let reply = Reply::new(Arc::new(Repaired(self.clone())), *index);
            self.nodes[*index].submit(op.clone(), self.not_after, reply);
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock()
    }
}

struct Witness(Arc<Repair>);

impl Voter for Witness {
    fn vote(&self, _: usize, vote: Vote) {
        let repair = &self.0;
        let record = match vote {
            Vote::Found(holding)
                if holding.record.parse().is_some_and(|(token, _)| token == repair.token) =>
            {
                holding.record
            }
            // The witness has lost the lock by now, or did not answer. A majority has still proved
            // who holds the lock, and a lock without its text is better than none.
            _ => Record::new(&repair.token, &Info::default()),
        };
        let record = record.extended();
        let op = Arc::new(Op::Repair {
            keys: repair.keys.clone(),
            record,
            ttl: repair.ttl,
            began_micros: repair.began_micros,
        });
        let before = std::mem::replace(&mut *repair.progress(), Progress::Known(op.clone()));
        if let Progress::Asking(waiting) = before {
            repair.set_again(&waiting, &op);
        }
    }
}

struct Repaired(Arc<Repair>);

impl Voter for Repaired {
    fn vote(&self, node: usize, vote: Vote) {
        self.0.observer.vote(node, &vote);
        if matches!(vote, Vote::Granted) {
            self.0.observer.repaired(node);
        }
    }
}
