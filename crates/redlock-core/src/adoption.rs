//! Back in seconds: a master that has forgotten its locks is given back those that count, by the masters that remember
//! them, instead of waiting until all of them have ended.
//!
//! It may be done when so many others are admitted that none of the majorities which counted a forgotten vote can have
//! missed them all: `N - quorum + 1`, for such a majority has `quorum - 1` votes on the other `N - 1`. And not before no
//! such majority can still come about ([`wait`]): then every lock that rests on a forgotten vote stands on one of them, or has
//! ended. An extension that comes later moves a majority that does not need the forgotten vote. Fences are not read: after
//! that wait the master itself refuses every T that it may have forgotten as too old.
//!
//! Any gateway may do it, several at once: each writes only while the quarantine stands that it has seen, and what one reads
//! contains all that another has to know. Where too few remember, or something changes meanwhile, the full quarantine
//! stands.

mod plan;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until, timeout};

use crate::bootstrap::any_changed;
use crate::node::admission::NAME_MOVES_WITHIN;
use crate::node::link::{Adoption, LinkError, Look, Session, Stored};
use crate::node::{Node, NodeSettings, NodeState, Seams};
use crate::quorum::Quorum;
use crate::settings::Settings;
use crate::types::FencingToken;
use crate::validity::longest_round;

/// What is done in one step on a connection takes no longer.
const STEP: Duration = Duration::from_secs(5);
/// After a failure.
const PAUSE: Duration = Duration::from_secs(3);
/// Locks that are read of one master; with more, the full quarantine is waited.
const MAX_LOCKS: usize = 200_000;
/// Locks that are given back in one step.
const CHUNK: usize = 256;

/// From the first sight of the loss until the others are read. Until then
///
/// - another gateway may still talk to the process that forgot nothing: [`NAME_MOVES_WITHIN`];
/// - an acquire that counts on a forgotten vote may land elsewhere. The master gave that for a T at most D ahead of its clock,
///   and another refuses T when it is D behind its own: `2 × D + S`, where S is D;
/// - an extension may, in a round that counts no answer after as long ([`longest_round`]).
fn wait(max_clock_offset: Duration) -> Duration {
    longest_round(max_clock_offset) + NAME_MOVES_WITHIN
}

/// Ends when dropped.
pub(crate) struct Adoptions(Option<AbortHandle>);

impl Drop for Adoptions {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

/// Gives every master that has forgotten its locks back what the others know. Must be called on a tokio runtime.
pub(crate) fn start(nodes: &[Arc<dyn Node>], quorum: Quorum, settings: &Settings, seams: &Seams) -> Adoptions {
    // Of masters in this process there is nobody to ask.
    let linked = nodes.iter().all(|node| node.link().is_some());
    let others = nodes.len() - 1;
    // A quarantine that is short by itself is simply waited.
    let full = settings.node.quarantine(settings.max_ttl.duration());
    let is_worth_it = full >= wait(settings.node.max_clock_offset) * 2;
    let task = (linked && others >= quorum.blocking() && is_worth_it).then(|| {
        let sights = nodes.iter().map(|_| None).collect();
        let adopter = Adopter { nodes: nodes.to_vec(), quorum, settings: settings.node, seams: seams.clone(), sights };
        tokio::spawn(adopter.run()).abort_handle()
    });
    Adoptions(task)
}

struct Adopter {
    nodes: Vec<Arc<dyn Node>>,
    quorum: Quorum,
    settings: NodeSettings,
    seams: Seams,
    /// The quarantine in which each node was last seen.
    sights: Vec<Option<Sight>>,
}

struct Sight {
    marker: String,
    /// The largest T that the node may have forgotten.
    newest: FencingToken,
    due: Instant,
}

impl Adopter {
    async fn run(mut self) {
        let mut statuses: Vec<_> = self.nodes.iter().map(|node| node.status()).collect();
        loop {
            for (at, status) in statuses.iter_mut().enumerate() {
                let status = status.borrow_and_update().clone();
                if status.state == NodeState::Quarantined && !status.is_bootstrapping {
                    self.see(at, &status.marker);
                }
            }
            let waits = |at: &usize| self.nodes[*at].status().borrow().state == NodeState::Quarantined;
            let due = |at: usize| self.sights[at].as_ref().map(|sight| (sight.due, at));
            match (0..self.nodes.len()).filter(waits).filter_map(due).min() {
                Some((due, at)) if due <= Instant::now() => self.adopt(at).await,
                Some((due, _)) => {
                    tokio::select! {
                        biased;
                        () = any_changed(&mut statuses) => {}
                        () = sleep_until(due) => {}
                    }
                }
                None => any_changed(&mut statuses).await,
            }
        }
    }

    /// Also of a node whose connection broke meanwhile: what counts is the quarantine that stands on it.
    fn see(&mut self, at: usize, marker: &str) {
        if self.sights[at].as_ref().is_some_and(|sight| sight.marker == marker) {
            return;
        }
        // Its clock was within S of ours, and T within D of it.
        let ahead = (self.settings.max_clock_offset * 3).as_micros() as u64;
        let newest = FencingToken::new(self.seams.clock.wall_micros().saturating_add(ahead));
        let due = Instant::now() + wait(self.settings.max_clock_offset);
        self.sights[at] = newest.ok().map(|newest| Sight { marker: marker.to_owned(), newest, due });
    }

    async fn adopt(&mut self, at: usize) {
        let Some(sight) = &self.sights[at] else { return };
        let node = self.nodes[at].name();
        match self.try_adopt(at, sight).await {
            Ok(locks) => {
                tracing::info!(node, locks, "the other masters have told the node what it forgot: its quarantine ends");
                self.nodes[at].adopted(&sight.marker);
            }
            Err(why) => tracing::info!(node, %why, "the node's quarantine cannot be shortened for now"),
        }
        if let Some(sight) = &mut self.sights[at] {
            sight.due = Instant::now() + PAUSE;
        }
    }

    async fn try_adopt(&self, at: usize, sight: &Sight) -> Result<usize, LinkError> {
        let others = (0..self.nodes.len()).filter(|other| *other != at);
        let read = join_all(others.map(|other| self.read(other))).await;
        let (read, failures): (Vec<_>, Vec<_>) = read.into_iter().partition(Result::is_ok);
        let (enough, failed) = (self.quorum.blocking(), failures.into_iter().find_map(Result::err));
        if read.len() < enough {
            let first = failed.map_or_else(String::new, |error| format!(": {error}"));
            let text = format!("{} other masters remember their locks, and {enough} are needed{first}", read.len());
            return Err(LinkError::broken(text));
        }
        if !self.settings.rules().forgotten_is_given_back {
            return Ok(0);
        }
        let mut plan = plan::plan(self.quorum, sight.newest, read.into_iter().flatten().collect());
        let locks = plan.len();

        let session = self.connect(at).await?;
        let stands = in_time(session.look()).await?.marker;
        if stands.as_ref() != Some(&sight.marker) {
            return Err(LinkError::broken("another marker stands there by now"));
        }
        let (session, stored) = all_of(session).await?;
        let mut changes = Vec::with_capacity(locks);
        for Stored { name, record, .. } in stored {
            match plan.get(&name) {
                Some(put) if record.is_grant_of(&put.record) || record.parse().is_some() => {}
                // It was told nothing of us, and has voted already: its vote must not be taken from it.
                Some(_) => return Err(LinkError::broken(format!("another client holds {name} there"))),
                None if record.parse().is_some() => changes.push((name, None)),
                None => {}
            }
        }
        while let Some((name, put)) = plan.pop_first() {
            changes.push((name, Some(put)));
        }
        for chunk in changes.chunks(CHUNK) {
            let adoption = Adoption { marker: sight.marker.clone(), changes: chunk.to_vec() };
            if !in_time(session.adopt(adoption)).await? {
                return Err(LinkError::broken("another marker stands there by now"));
            }
        }
        Ok(locks)
    }

    /// All locks of a master that has forgotten nothing from before until after it was read.
    async fn read(&self, at: usize) -> Result<Vec<Stored>, LinkError> {
        let node = &self.nodes[at];
        let admitted_by = || {
            let status = node.status();
            let status = status.borrow();
            (status.state == NodeState::Admitted).then(|| status.marker.clone())
        };
        let not_admitted = || LinkError::broken(format!("{} is not admitted", node.name()));
        let before = admitted_by().ok_or_else(not_admitted)?;
        let session = self.connect(at).await?;
        let Look { facts, marker } = in_time(session.look()).await?;
        let (session, stored) = all_of(session).await?;
        let after = in_time(session.look()).await?;
        let same = facts.same_history(&after.facts) && marker == after.marker;
        if !same || marker.as_ref() != Some(&before) || admitted_by() != marker {
            return Err(LinkError::broken(format!("{} has changed while it was read", node.name())));
        }
        Ok(stored)
    }

    async fn connect(&self, at: usize) -> Result<Box<dyn Session>, LinkError> {
        let link = self.nodes[at].link().ok_or_else(|| LinkError::broken("there is no way to it"))?;
        in_time(link.connect()).await
    }
}

async fn all_of(session: Box<dyn Session>) -> Result<(Box<dyn Session>, Vec<Stored>), LinkError> {
    let (mut all, mut cursor) = (Vec::new(), None);
    loop {
        let page = in_time(session.stored(cursor)).await?;
        all.extend(page.stored);
        if all.len() > MAX_LOCKS {
            return Err(LinkError::broken(format!("more than {MAX_LOCKS} locks are too many to tell it")));
        }
        cursor = page.next;
        if cursor.is_none() {
            return Ok((session, all));
        }
    }
}

async fn in_time<T>(step: impl Future<Output = Result<T, LinkError>>) -> Result<T, LinkError> {
    timeout(STEP, step).await.unwrap_or_else(|_| Err(LinkError::broken("no answer in time")))
}
