//! The calls of one session that are under way. The node runs them in the order in which they were sent, and answers in
//! it, so the lane's promise of order holds whatever their number.
//!
//! To a near node there is one at a time: what takes long there is the work, and the work of a fuller call is less. To a
//! far one the time is spent on the wire, and what comes in would wait for a round trip before it begins its own.

use std::collections::VecDeque;
use std::time::Duration;

use fred::types::Value;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesOrdered, StreamExt};
use tokio::time::Instant;

use super::codec;
use super::gate::Open;
use super::session::SessionError;
use super::{Job, Op, Vote, scan};

/// Calls under way to a far node.
const DEPTH: usize = 4;
/// A node whose quickest answer took longer is a far one. In one data centre it is less.
const FAR: Duration = Duration::from_micros(500);

pub(super) struct Calls<'a> {
    open: &'a Open,
    answers: FuturesOrdered<BoxFuture<'a, Answer>>,
    sent: VecDeque<Sent>,
    operations: usize,
    /// The quickest so far.
    round_trip: Duration,
}

/// A call and when it was sent.
pub(super) struct Sent {
    pub(super) jobs: Vec<Job>,
    pub(super) at: Instant,
}

pub(super) enum Answer {
    /// Of the script.
    Replies(Result<Vec<Value>, SessionError>),
    /// Of a scan, which goes alone.
    Page(Result<Vote, SessionError>),
}

impl<'a> Calls<'a> {
    pub(super) fn new(open: &'a Open) -> Self {
        Self { open, answers: FuturesOrdered::new(), sent: VecDeque::new(), operations: 0, round_trip: Duration::MAX }
    }

    pub(super) fn none(&self) -> bool {
        self.sent.is_empty()
    }

    /// Whether another call could go out before one of these has come back.
    pub(super) fn room(&self) -> bool {
        let far = self.round_trip >= FAR && self.round_trip < Duration::MAX;
        // A call without operations takes no place.
        self.operations == 0 || far && self.sent.len() < DEPTH
    }

    /// Whether so many operations should go out as one now. A share of what is under way at least, or the places would be
    /// taken by small calls, and many operations wait for the first of them to come back.
    pub(super) fn takes(&self, operations: usize) -> bool {
        operations > 0 && self.room() && operations * (DEPTH - 1) >= self.operations
    }

    /// To be followed by [`Calls::next`], which does the sending.
    pub(super) fn send(&mut self, jobs: Vec<Job>) {
        let at = Instant::now();
        self.operations += jobs.len();
        let open = self.open;
        let answer: BoxFuture<'a, Answer> = match jobs.first().map(|job| job.op.clone()) {
            Some(op) if matches!(*op, Op::Scan { .. }) => {
                Box::pin(async move { Answer::Page(scan(&open.session, &op).await) })
            }
            _ => {
                let (keys, arguments) = codec::encode(&open.header, jobs.iter().map(|job| &job.op));
                Box::pin(async move { Answer::Replies(open.session.call(&open.script, keys, arguments).await) })
            }
        };
        self.answers.push_back(answer);
        self.sent.push_back(Sent { jobs, at });
    }

    /// The next call that is answered; never, when none is under way. May be dropped and called again.
    pub(super) async fn next(&mut self) -> (Sent, Answer) {
        let Some(answer) = self.answers.next().await else { return std::future::pending().await };
        let sent = self.sent.pop_front().expect("one for each answer");
        self.operations -= sent.jobs.len();
        // A scan may be refused before it is sent.
        if let Answer::Replies(Ok(_)) = answer {
            self.round_trip = self.round_trip.min(sent.at.elapsed());
        }
        (sent, answer)
    }

    /// What is not answered.
    pub(super) fn give_up(self) -> Vec<Job> {
        self.sent.into_iter().flat_map(|sent| sent.jobs).collect()
    }
}
