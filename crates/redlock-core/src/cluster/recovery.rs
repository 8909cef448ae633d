//! Recovery: a master that lost its locks gets back those that may still be held, read from the
//! other masters. The master then votes again within seconds instead of waiting until all lost
//! locks have ended.
//!
//! Recovery needs `N - quorum + 1` other admitted masters. A majority that counted a lost vote has
//! `quorum - 1` votes on the other `N - 1` masters. So at least one of its members is among the
//! masters that are read. Recovery also waits until no such majority can still come about
//! ([`wait`]). By then every lock whose majority counts a lost vote is stored on a master that is
//! read, or has ended. If such a lock is extended during the quarantine, a majority without this
//! master votes for the extension. So the extended lock no longer needs the lost vote.
//!
//! Watermarks are not read. After the wait the master's own clock check refuses every T that the
//! master may have lost, because such a T is too old.
//!
//! A master that loaded an old file may store locks. If enough others store such a lock too,
//! recovery writes the lock or a kept-free record over it. Otherwise the lock stays as it is: too few
//! masters store it for a majority.
//!
//! Any gateway may recover a master, even several at once. Each gateway reads everything that it
//! needs itself, and writes only while the quarantine marker that it saw stands. If too few masters
//! have kept their locks, or a master changes while it is read, the gateway tries again later.
//! Without a success the quarantine takes its full time.

mod plan;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::task::yield_now;
use tokio::time::timeout;

use self::plan::Planner;
use crate::cluster::schedule::{self, Attempt, Pause, Scheduled, Sighting, Work};
use crate::model::quorum::Quorum;
use crate::model::types::{FencingToken, LockName};
use crate::model::validity::longest_round;
use crate::node::eligibility::{ClusterConfig, NAME_MOVES_WITHIN, incarnation_of};
use crate::node::link::{
    LinkError, ProbeReply, Put, RecoveryAnswer, RecoveryBatch, Session, Stored,
};
use crate::node::{Env, Holding, Keys, Node, NodeSettings, NodeState, Vote};
use crate::settings::Settings;

/// The time limit of one step on a connection.
const STEP: Duration = Duration::from_secs(5);
/// How far two clocks run apart over the whole wait if their rates differ by 5 %.
const CLOCKS_RUN_APART: Duration = Duration::from_millis(500);
/// A gateway begins after a random delay of at most this length, so that gateways do not all begin
/// at once.
const SPREAD: Duration = Duration::from_secs(2);
/// The pause after each page read from a master, so that the master's votes come first.
const PAGE_PAUSE: Duration = Duration::from_millis(1);
/// The limit of one reading of a master, in bytes of names, records and bookkeeping. This is enough
/// for about 300,000 locks with names of 30 bytes and labels of 20 bytes. With more, the quarantine
/// takes its full time.
const MAX_READ: usize = 64 << 20;
/// Locks given back in one step.
const CHUNK: usize = 256;

/// The time from when this gateway first sees the loss until it reads the other masters. During
/// this time:
///
/// - another gateway may still talk to the master's earlier process, which has lost nothing:
///   [`NAME_MOVES_WITHIN`];
/// - an acquire that counts a lost vote may still arrive at other masters. The master gave the lost
///   vote only for a T at most `max_clock_skew` ahead of its own clock. Another master refuses T
///   once T is more than `max_clock_skew` behind its own clock. The two clocks differ by at most
///   `max_clock_skew`. So the acquire can arrive for at most 3 × `max_clock_skew`;
/// - an extension that counts a lost vote may still arrive at other masters. Its round counts only
///   if it ends within [`longest_round`]. This time is at least 3 × `max_clock_skew`, so it covers
///   the acquire too.
fn wait(max_clock_skew: Duration) -> Duration {
    longest_round(max_clock_skew) + NAME_MOVES_WITHIN + CLOCKS_RUN_APART
}

/// Starts to recover every master that lost its locks. Must be called on a tokio runtime.
pub(crate) fn start(
    nodes: &[Arc<dyn Node>],
    quorum: Quorum,
    settings: &Settings,
    env: &Env,
) -> Option<Scheduled> {
    // Masters inside this process have no link, so they cannot be read.
    let linked = nodes.iter().all(|node| node.link().is_some());
    let others = nodes.len() - 1;
    // A short quarantine needs no recovery.
    let full = settings.node.quarantine(settings.max_ttl.duration());
    let is_worth_it = full >= wait(settings.node.max_clock_skew) * 2;
    (linked && others >= quorum.blocking() && is_worth_it).then(|| {
        let recoverer = Recoverer {
            nodes: nodes.to_vec(),
            quorum,
            settings: settings.node,
            key_prefix: settings.key_prefix.clone(),
            longest_life: settings.max_ttl.duration(),
            env: env.clone(),
        };
        schedule::start(nodes.to_vec(), env.clone(), recoverer)
    })
}

struct Recoverer {
    nodes: Vec<Arc<dyn Node>>,
    quorum: Quorum,
    settings: NodeSettings,
    key_prefix: String,
    longest_life: Duration,
    env: Env,
}

fn too_few(with_locks: usize, enough: usize, why: &str) -> LinkError {
    let masters = match with_locks {
        0 => "no other master has kept its locks".to_owned(),
        1 => "only 1 other master has kept its locks".to_owned(),
        _ => format!("only {with_locks} other masters have kept their locks"),
    };
    LinkError::broken(format!("{masters}, {enough} are needed{why}"))
}

/// The reading of one master.
struct MasterLocks {
    node: usize,
    /// The marker that stood before, during and after the reading.
    marker: String,
    /// The longest life of a lock of ours there.
    longest_life: Duration,
    stored: Vec<Stored>,
    /// The master's clock when the loss was seen, in microseconds.
    then_micros: u64,
}

impl Work for Recoverer {
    /// Includes nodes that an operator has declared to be new. If other nodes are admitted, the
    /// declaration is wrong: such a node has lost its data.
    const STATE: NodeState = NodeState::Quarantined;
    const PAUSE: (Duration, Duration) = (Duration::from_secs(3), Duration::from_secs(60));
    const FAILURE: &'static str = "the node's quarantine cannot be shortened for now";

    fn delay(&self) -> Duration {
        // The random part keeps gateways from beginning together.
        wait(self.settings.max_clock_skew) + SPREAD.mul_f64(self.env.entropy.unit())
    }

    async fn attempt(&self, master: &Sighting) -> Attempt {
        let enough = self.quorum.blocking();
        let others = (0..self.nodes.len()).filter(|other| *other != master.at);
        let admitted = others.filter(|other| self.admitted_by(*other).is_some()).count();
        if admitted < enough {
            // This attempt has read nothing from any master, so the pause need not grow.
            let failure = Some(too_few(admitted, enough, "").to_string());
            return Attempt { failure, pause: Pause::Same, not_before: None };
        }
        let failure = match self.try_recover(master).await {
            Ok(None) => None,
            Ok(Some(locks)) => {
                let node = &self.nodes[master.at];
                tracing::info!(
                    node = node.name(),
                    locks,
                    "the node has recovered its locks from the other masters: its quarantine ends"
                );
                node.recovered(&master.marker);
                None
            }
            Err(error) => Some(error.to_string()),
        };
        Attempt { failure, pause: Pause::Longer, not_before: None }
    }
}

impl Recoverer {
    /// Returns the number of locks given back, or `None` if another marker stands on the node by
    /// now.
    async fn try_recover(&self, master: &Sighting) -> Result<Option<usize>, LinkError> {
        let at = master.at;
        let enough = self.quorum.blocking();
        let others = (0..self.nodes.len()).filter(|other| *other != at);
        let read = join_all(others.map(|other| self.read(other, master.seen_on_clock))).await;
        let (read, failures): (Vec<_>, Vec<_>) = read.into_iter().partition(Result::is_ok);
        if read.len() < enough {
            let why = failures.into_iter().find_map(Result::err);
            return Err(too_few(
                read.len(),
                enough,
                &why.map_or_else(String::new, |error| format!(": {error}")),
            ));
        }
        let mut read: Vec<MasterLocks> = read.into_iter().flatten().collect();
        // The master voted only for a T at most `max_clock_skew` ahead of its own clock. A lost
        // vote matters only if other masters accepted the same T. The sum of 3 × `max_clock_skew`
        // covers both this lead and the differences between the masters' clocks.
        let ahead = (self.settings.max_clock_skew * 3).as_micros() as u64;
        let then = read.iter().map(|master| master.then_micros).max().unwrap_or_default();
        let no_time = |_| LinkError::broken("the other masters' clocks show no time");
        let newest = FencingToken::new(then.saturating_add(ahead)).map_err(no_time)?;
        if !self.settings.rules().lost_locks_are_recovered {
            return Ok(Some(0));
        }
        let read_at = self.env.clock.monotonic();
        let mut recovered = Vec::new();
        let mut suspect = Vec::new();
        for (name, put) in plan(self.quorum, newest, &mut read).await {
            // The masters were not read at the same moment. If only a minority seems to store a lock,
            // it may have been released between two readings. Such locks are read again.
            if put.record.is_placeholder() {
                suspect.push(name);
            } else {
                recovered.push((name, put, read_at));
            }
        }
        let (mut read, failure) = self.read_all_again(read, &suspect).await;
        if read.len() < enough {
            let why = failure.map_or_else(String::new, |error| format!(": {error}"));
            return Err(too_few(read.len(), enough, &why));
        }
        // From each life, the time since the end of its own reading is subtracted. Counting from an
        // earlier moment would make the life too short, and a life that is too short breaks
        // exclusion.
        let read_again_at = self.env.clock.monotonic();
        let again = plan(self.quorum, newest, &mut read).await;
        recovered.extend(again.into_iter().map(|(name, put)| (name, put, read_again_at)));
        let session = self.connect(at).await?;
        for chunk in recovered.chunks(CHUNK) {
            // The time is taken for each chunk: a gateway that stood still meanwhile must not write
            // lives that are too long.
            let now = self.env.clock.monotonic();
            let aged = |put: &Put, read_at: Duration| put.aged(now.saturating_sub(read_at));
            let puts = chunk
                .iter()
                .filter_map(|(name, put, read_at)| Some((name.clone(), aged(put, *read_at)?)))
                .collect();
            let recovery = RecoveryBatch { marker: master.marker.clone(), puts };
            match in_time(session.recover(recovery)).await? {
                RecoveryAnswer::Done => {}
                // Usually another gateway was faster.
                RecoveryAnswer::OtherMarker => return Ok(None),
                RecoveryAnswer::OtherClient => {
                    return Err(LinkError::broken("another client holds one of the locks on it"));
                }
            }
        }
        Ok(Some(recovered.len()))
    }

    fn admitted_by(&self, at: usize) -> Option<String> {
        let status = self.nodes[at].status();
        let status = status.borrow();
        status.state.is_admitted().then(|| status.marker.clone())
    }

    /// Reads all locks of a master that lost nothing before or during the reading.
    async fn read(&self, at: usize, seen: Duration) -> Result<MasterLocks, LinkError> {
        let name = self.nodes[at].name();
        let before = self
            .admitted_by(at)
            .ok_or_else(|| LinkError::broken(format!("{name} is not admitted")))?;
        let session = self.connect(at).await?;
        // This clock is read before the master's. If this process stands still between the two readings,
        // `then_micros` is too late: grants may come back that the master never had, which is safe. In the
        // other order it would be too early, and lost grants would not come back.
        let since = self.env.clock.monotonic().saturating_sub(seen);
        let ProbeReply { facts, marker, .. } = in_time(session.probe()).await?;
        // A lock may live longer than this gateway's own `max_ttl`.
        let bound = marker.as_deref().and_then(ClusterConfig::ttl_bound_of);
        let longest_life = self.longest_life.max(bound.unwrap_or_default());
        let (session, stored) = all_of(session, longest_life).await?;
        let after = in_time(session.probe()).await?;
        let is_same =
            |marker: Option<&str>| marker.map(incarnation_of) == Some(incarnation_of(&before));
        let now = self.admitted_by(at);
        let same = [marker.as_deref(), after.marker.as_deref(), now.as_deref()];
        if !facts.has_same_history(&after.facts) || !same.into_iter().all(is_same) {
            return Err(LinkError::broken(format!("{name} has changed while it was read")));
        }
        if facts.time_micros == 0 {
            return Err(LinkError::broken(format!("{name} does not show its time")));
        }
        let then_micros = facts.time_micros.saturating_sub(since.as_micros() as u64);
        Ok(MasterLocks { node: at, marker: before, longest_life, stored, then_micros })
    }

    /// Reads these names on each master once more. Leaves out a master that cannot be read, and
    /// returns one such failure.
    async fn read_all_again(
        &self,
        read: Vec<MasterLocks>,
        names: &[LockName],
    ) -> (Vec<MasterLocks>, Option<LinkError>) {
        let again = join_all(read.iter().map(|master| self.read_again(master, names))).await;
        let mut failure = None;
        let read = read.into_iter().zip(again).filter_map(|(master, stored)| match stored {
            Ok(stored) => Some(MasterLocks { stored, ..master }),
            Err(error) => {
                failure = Some(error);
                None
            }
        });
        (read.collect(), failure)
    }

    /// Reads these names once more on one master. Fails if the master may have lost data since its
    /// first reading.
    async fn read_again(
        &self,
        master: &MasterLocks,
        names: &[LockName],
    ) -> Result<Vec<Stored>, LinkError> {
        let node = &self.nodes[master.node];
        let mut stored = Vec::new();
        for names in names.chunks(CHUNK) {
            let keys = names.iter().map(|name| Keys::new(&self.key_prefix, name)).collect();
            let votes = node
                .reader()
                .read(keys)
                .await
                .map_err(|failure| LinkError::broken(failure.detail))?;
            stored.extend(
                names
                    .iter()
                    .zip(votes)
                    .filter_map(|(name, vote)| stored_by(vote, name, master.longest_life)),
            );
        }
        let stands = self.admitted_by(master.node);
        if stands.as_deref().map(incarnation_of) != Some(incarnation_of(&master.marker)) {
            return Err(LinkError::broken(format!(
                "{} has changed while it was read",
                node.name()
            )));
        }
        Ok(stored)
    }

    async fn connect(&self, at: usize) -> Result<Box<dyn Session>, LinkError> {
        let link =
            self.nodes[at].link().ok_or_else(|| LinkError::broken("the node has no link"))?;
        in_time(link.connect()).await
    }
}

/// The lock that a vote shows, by the rules of `node/stored.lua`.
fn stored_by(vote: Vote, name: &LockName, longest: Duration) -> Option<Stored> {
    let Vote::Found(Holding { record, expires_in, .. }) = vote else { return None };
    let is_ours = record.parse().is_some();
    let expires_in = match expires_in {
        Some(life) if is_ours => life.min(longest),
        Some(life) => life,
        None if is_ours => longest,
        // A key that another client set without an expiry is no lock.
        None => return None,
    };
    Some(Stored { name: name.clone(), record, expires_in })
}

/// Plans what comes back, and takes the locks out of the readings. Lets other tasks run meanwhile,
/// because the gateway may have only one thread.
async fn plan(
    quorum: Quorum,
    newest: FencingToken,
    read: &mut [MasterLocks],
) -> Vec<(LockName, Put)> {
    let mut planner = Planner::new(newest);
    for (master, locks) in read.iter_mut().enumerate() {
        for (count, stored) in std::mem::take(&mut locks.stored).into_iter().enumerate() {
            if count % CHUNK == 0 {
                yield_now().await;
            }
            planner.add(master, stored);
        }
    }
    let mut puts = Vec::new();
    for planned in planner.finish(quorum, read.len()) {
        if puts.len() % CHUNK == 0 {
            yield_now().await;
        }
        puts.push(planned);
    }
    puts
}

async fn all_of(
    session: Box<dyn Session>,
    longest_life: Duration,
) -> Result<(Box<dyn Session>, Vec<Stored>), LinkError> {
    let mut all = Vec::new();
    let mut cursor = None;
    let mut bytes = 0;
    loop {
        let page = in_time(session.stored(cursor, longest_life)).await?;
        let size = |stored: &Stored| {
            size_of::<Stored>() + stored.name.as_str().len() + stored.record.as_bytes().len()
        };
        bytes += page.stored.iter().map(size).sum::<usize>();
        all.extend(page.stored);
        if bytes > MAX_READ {
            return Err(LinkError::broken(format!(
                "another master stores more than {} MiB of locks, the limit of a reading; the full \
                 quarantine stands",
                MAX_READ >> 20
            )));
        }
        cursor = page.next;
        if cursor.is_none() {
            return Ok((session, all));
        }
        tokio::time::sleep(PAGE_PAUSE).await;
    }
}

async fn in_time<T>(step: impl Future<Output = Result<T, LinkError>>) -> Result<T, LinkError> {
    timeout(STEP, step).await.unwrap_or_else(|_| Err(LinkError::broken("no answer in time")))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::node::Record;

    #[tokio::test]
    async fn planning_many_locks_lets_other_tasks_run() {
        const LOCKS: usize = 10 * CHUNK;
        let newest = FencingToken::new(FencingToken::MIN.get() + 1).unwrap();
        let stored = |number| Stored {
            name: format!("job-{number}").parse().unwrap(),
            record: Record::placeholder(FencingToken::MIN),
            expires_in: Duration::from_secs(1),
        };
        let mut read = [MasterLocks {
            node: 1,
            marker: String::new(),
            longest_life: Duration::from_secs(300),
            stored: (0..LOCKS).map(stored).collect(),
            then_micros: 0,
        }];
        let turns = Cell::new(0);
        let other_task = async {
            loop {
                turns.set(turns.get() + 1);
                yield_now().await;
            }
        };
        let planned = tokio::select! {
            planned = plan(Quorum::new(3).unwrap(), newest, &mut read) => planned,
            () = other_task => unreachable!(),
        };
        assert_eq!(planned.len(), LOCKS);
        assert!(turns.get() >= 2 * LOCKS / CHUNK, "{} turns", turns.get());
    }
}
