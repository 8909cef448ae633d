//! Catching up: a master that votes again gets the locks that were granted while it was away.
//!
//! A lock that was granted meanwhile is stored on a majority without this master. If one of the
//! masters of that majority loses its data next, the lock may lose its majority, and its holder
//! loses the lock. So after every admission a gateway reads the other masters. If a quorum of them
//! stores a lock that this master lacks, the gateway sets the lock on this master too. This follows
//! the rule of repair ([`Op::Repair`]): the master refuses the lock if its watermark shows a
//! release or a later grant. The master also refuses it if the reading is not recent. Passes repeat
//! until one sets nothing. Then a note on the master says that it has caught up, and the next
//! master may be restarted.
//!
//! This master refuses a repair if its watermark shows that the lock may have been released here.
//! There may be another cause. For example, this master has granted the lock, was away at the first
//! extension, and let its own copy expire. So the passes go on while a majority stores the lock,
//! until the watermark lets it pass or has expired.
//!
//! [Recovery](crate::cluster::recovery) comes earlier and has another purpose: it keeps a master
//! that lost its data from granting a lock again. Catching up only keeps holders from losing their
//! locks; exclusion does not need it. Any gateway may catch a master up, even several at once.
//!
//! Two cases are not covered. A gateway that cannot reach this master, while the others can, may
//! grant a lock without it after the last pass. And a slow master that was not restarted may miss a
//! lock; the next extension of the lock repairs that.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{join, join_all};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use crate::cluster::schedule::{self, Attempt, Pause, Scheduled, Sighting, Work};
use crate::model::quorum::Quorum;
use crate::model::types::Ttl;
use crate::node::eligibility::{ClusterConfig, NAME_MOVES_WITHIN, incarnation_of};
use crate::node::link::{LinkError, Scan, Scanned};
use crate::node::{Env, Failure, Holding, Keys, Node, NodeState, Op, Record, Reply, Vote, Voter};
use crate::settings::Settings;

/// Locks compared in one step.
const CHUNK: usize = 128;
/// How long the master may take to set the locks of one step.
const STEP: Duration = Duration::from_secs(2);
/// The last pass begins no sooner than this after the gateway first saw the master admitted. By
/// then every gateway that reaches the master lets it vote, so new grants reach this master too.
const ADMITTED_EVERYWHERE_AFTER: Duration = NAME_MOVES_WITHIN;
/// Copies of one lock are mostly read within this time of each other. So a smaller difference
/// between their lives means nothing.
const READ_APART: Duration = Duration::from_secs(1);
/// A gateway begins after a random delay of at most this length, so that gateways do not all begin
/// at once.
const SPREAD: Duration = Duration::from_millis(500);

/// Starts to catch up every master that votes again. Must be called on a tokio runtime.
pub(crate) fn start(
    nodes: &[Arc<dyn Node>],
    quorum: Quorum,
    settings: &Settings,
    env: &Env,
) -> Option<Scheduled> {
    // Masters inside this process lose their locks all together or not at all, so there is nothing
    // to catch up.
    let is_linked = nodes.iter().all(|node| node.link().is_some());
    is_linked.then(|| {
        let worker = Worker {
            nodes: nodes.to_vec(),
            quorum,
            key_prefix: settings.key_prefix.clone(),
            longest_life: settings.max_ttl.duration(),
            is_on: settings.node.rules().admitted_is_caught_up,
            env: env.clone(),
        };
        schedule::start(nodes.to_vec(), env.clone(), worker)
    })
}

struct Worker {
    nodes: Vec<Arc<dyn Node>>,
    quorum: Quorum,
    key_prefix: String,
    longest_life: Duration,
    /// Off only in tests, see `SafetyRules::admitted_is_caught_up`.
    is_on: bool,
    env: Env,
}

/// The result of one pass.
#[derive(Default)]
struct Pass {
    /// Locks that the master lacked and has now.
    given: usize,
    /// Locks that could not be set yet.
    unsettled: usize,
    /// How many of the unsettled locks are only kept out by a watermark, which expires by itself.
    barred: usize,
    /// The key of an unsettled lock.
    example: Option<Bytes>,
}

/// What the master lacks among some locks of another master.
#[derive(Default)]
struct Missing {
    repairs: Vec<Op>,
    /// The key of a lock that has a majority among the others only if a master that cannot be read
    /// stores it too.
    uncertain: Option<Bytes>,
}

impl Work for Worker {
    const STATE: NodeState = NodeState::CatchingUp;
    const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));
    const FAILURE: &'static str = "the node cannot catch up for now: restart no other master";

    fn delay(&self) -> Duration {
        SPREAD.mul_f64(self.env.entropy.unit())
    }

    async fn attempt(&self, master: &Sighting) -> Attempt {
        let began = Instant::now();
        let Sighting { at, marker, seen, .. } = master;
        let last_begins = *seen + ADMITTED_EVERYWHERE_AFTER;
        let passed = if self.is_on { self.pass(*at, marker).await } else { Ok(Pass::default()) };
        let pause = match &passed {
            Ok(Pass { given: 1.., .. }) => Pause::Shortest,
            Ok(Pass { barred: 1.., .. }) => Pause::Same,
            _ => Pause::Longer,
        };
        let failure = match passed {
            Err(why) => Some(why),
            Ok(Pass { given: 0, unsettled: 0, .. }) if began >= last_begins => {
                let noted = note(self.nodes[*at].as_ref(), marker).await;
                noted.err().map(|error| format!("the note could not be written: {error}"))
            }
            Ok(Pass { given: 0, unsettled: 0, .. }) => None,
            Ok(Pass { given: 0, unsettled, example, .. }) => {
                let example = example.map_or_else(String::new, |key| {
                    format!(", for example {}", String::from_utf8_lossy(&key))
                });
                Some(format!("{unsettled} locks cannot be set on it yet{example}"))
            }
            Ok(Pass { given, unsettled, .. }) => {
                let node = self.nodes[*at].name();
                tracing::info!(
                    node,
                    given,
                    unsettled,
                    "the node got locks that were granted while it was away"
                );
                None
            }
        };
        Attempt { failure, pause, not_before: Some(last_begins) }
    }
}

impl Worker {
    /// Gives a master the locks that a quorum of the others stores.
    ///
    /// A majority without this master has a member among any `nodes - quorum` of the others, so
    /// only the keys of that many masters are listed. This holds even if some members of the
    /// majority cannot be read now.
    async fn pass(&self, at: usize, marker: &str) -> Result<Pass, String> {
        let mut pass = Pass::default();
        let enough = self.quorum.size();
        if self.nodes.len() <= enough {
            // Every majority has this master as a member, so none was formed without it.
            return Ok(pass);
        }
        let is_admitted = |other: &usize| self.nodes[*other].status().borrow().state.is_admitted();
        let others: Vec<usize> =
            (0..self.nodes.len()).filter(|other| *other != at).filter(is_admitted).collect();
        if others.len() < enough {
            return Err(format!(
                "masters that vote beside it: {}; {enough} are needed to compare with",
                others.len()
            ));
        }
        for scanned in &others[..self.nodes.len() - enough] {
            self.compare(at, marker, *scanned, &others, &mut pass).await?;
        }
        Ok(pass)
    }

    /// Compares all locks of the master `scanned` with those of the master `at`.
    async fn compare(
        &self,
        at: usize,
        marker: &str,
        scanned: usize,
        others: &[usize],
        pass: &mut Pass,
    ) -> Result<(), String> {
        let mut cursor = Bytes::new();
        loop {
            let scan =
                Scan { key_prefix: self.key_prefix.clone().into(), cursor, count: CHUNK as u32 };
            let Scanned { keys, next, .. } =
                self.readable(scanned, self.nodes[scanned].reader().scan(scan).await)?;
            let locks: Vec<_> = keys.iter().map(|key| Keys::of_lock_key(key)).collect();
            for locks in locks.chunks(CHUNK) {
                let Missing { repairs, uncertain } =
                    self.missing(at, scanned, others, locks).await?;
                if let Some(name) = uncertain {
                    pass.unsettled += 1;
                    pass.example = Some(name);
                }
                // If the master has another marker by now, it was admitted anew. Locks that were
                // read before must not be set after that.
                let now = self.nodes[at].status().borrow().marker.clone();
                if incarnation_of(&now) != incarnation_of(marker) {
                    return Err("it must be admitted again".to_owned());
                }
                let refused = self.give(at, repairs, pass).await;
                if refused.is_empty() {
                    continue;
                }
                // The watermark of a release refuses a repair too. Then the others release the lock
                // about now, and it is no longer missing.
                let Missing { repairs, uncertain } =
                    self.missing(at, scanned, others, &refused).await?;
                pass.unsettled += repairs.len() + usize::from(uncertain.is_some());
                pass.barred += repairs.len();
                let barred = repairs.first().and_then(|repair| match repair {
                    Op::Repair { keys, .. } => Some(keys.lock.clone()),
                    _ => None,
                });
                pass.example = barred.or(uncertain).or(pass.example.take());
            }
            match next {
                Some(next) => cursor = next,
                None => return Ok(()),
            }
        }
    }

    /// Compares some locks of the master `scanned` with those of the master `at`. Returns repairs
    /// for the locks that a quorum of the others stores and `at` does not.
    async fn missing(
        &self,
        at: usize,
        scanned: usize,
        others: &[usize],
        locks: &[Keys],
    ) -> Result<Missing, String> {
        let read = |node: usize, locks: Vec<Keys>| async move {
            let votes = self.nodes[node].reader().read(locks).await;
            self.readable(node, votes)
        };
        let (here, there) = join(read(at, locks.to_vec()), read(scanned, locks.to_vec())).await;
        let differs = |(keys, (here, there)): (&Keys, (Vote, Vote))| {
            let there = grant(&there)?;
            let is_there = matches!(&here, Vote::Found(here)
                if here.record.is_grant_of(&there.record) && !is_much_shorter(here, there));
            (!is_there).then(|| keys.clone())
        };
        let differ: Vec<_> =
            locks.iter().zip(here?.into_iter().zip(there?)).filter_map(differs).collect();
        if differ.is_empty() {
            return Ok(Missing::default());
        }
        let began = Instant::now();
        let began_micros = self.env.clock.wall_micros();
        let read = join_all(others.iter().map(|other| read(*other, differ.clone()))).await;
        let read: Vec<Vec<Vote>> = read.into_iter().collect::<Result<_, _>>()?;
        let enough = self.quorum.size();
        let longest = self.longest_life_on(others);
        // A master that cannot be read now may store a copy too, and may vote again at any time.
        let unread = self.nodes.len() - 1 - others.len();
        let mut uncertain = None;
        let repair = |(index, keys): (usize, Keys)| {
            let found: Vec<_> = read.iter().filter_map(|votes| grant(&votes[index])).collect();
            let Some((record, life)) = majority(enough, &found) else {
                if may_be_majority(enough, unread, &found) {
                    uncertain = Some(keys.lock.clone());
                }
                return None;
            };
            let life = life.unwrap_or(longest).min(longest);
            // The time since the reading is subtracted. A lock that ends within milliseconds is
            // left out.
            let millis = life.saturating_sub(began.elapsed()).as_millis();
            let ttl = Ttl::from_millis(u64::try_from(millis).ok()?).ok()?;
            Some(Op::Repair { keys, record, ttl, began_micros })
        };
        let repairs = differ.into_iter().enumerate().filter_map(repair).collect();
        Ok(Missing { repairs, uncertain })
    }

    /// The longest life that a lock of ours may have on these masters. Other gateways may grant a
    /// longer TTL than this one.
    fn longest_life_on(&self, masters: &[usize]) -> Duration {
        let bound = |master: &usize| {
            ClusterConfig::ttl_bound_of(&self.nodes[*master].status().borrow().marker)
        };
        masters.iter().filter_map(bound).fold(self.longest_life, Duration::max)
    }

    /// Sends repairs to the master. Returns the locks that its watermarks refuse.
    async fn give(&self, at: usize, repairs: Vec<Op>, pass: &mut Pass) -> Vec<Keys> {
        let repairs: Vec<_> = repairs.into_iter().map(Arc::new).collect();
        let mut refused = Vec::new();
        for (index, vote) in ask_all(self.nodes[at].as_ref(), &repairs).await {
            match vote {
                Vote::Granted => {
                    self.env.observer.repaired(at);
                    pass.given += 1;
                }
                Vote::Stale { .. } => {
                    if let Op::Repair { keys, .. } = repairs[index].as_ref() {
                        refused.push(keys.clone());
                    }
                }
                // The lock has arrived on this master meanwhile.
                Vote::Extended { .. } => {}
                // A lock of another Redlock client stands there, and must not be replaced.
                Vote::Held(holding) if holding.record.parse().is_none() => {}
                _ => pass.unsettled += 1,
            }
        }
        refused
    }

    fn readable<T>(&self, node: usize, answer: Result<T, Failure>) -> Result<T, String> {
        answer.map_err(|failure| {
            format!("{} cannot be read: {}", self.nodes[node].name(), failure.detail)
        })
    }
}

/// A grant of ours, if the vote shows one.
fn grant(vote: &Vote) -> Option<&Holding> {
    match vote {
        Vote::Found(holding) => Some(holding)
            .filter(|found| found.record.parse().is_some() && !found.record.is_placeholder()),
        _ => None,
    }
}

/// The grant that at least `enough` nodes store. It has the extension flag if any copy has it, and
/// the longest life of its copies. The life is `None` if somebody removed the expiry of a copy.
fn majority(enough: usize, found: &[&Holding]) -> Option<(Record, Option<Duration>)> {
    let stands = found.iter().find(|holding| copies(holding, found) >= enough)?;
    let copies = || found.iter().filter(|other| other.record.is_grant_of(&stands.record));
    let record = copies()
        .map(|copy| &copy.record)
        .find(|record| record.is_extended())
        .unwrap_or(&stands.record);
    let life = copies().map(|copy| copy.expires_in).reduce(|a, b| Some(a?.max(b?)))?;
    Some((record.clone(), life))
}

/// Whether some grant would have a majority if every master that was not read had a copy too.
fn may_be_majority(enough: usize, unread: usize, found: &[&Holding]) -> bool {
    found.iter().any(|grant| copies(grant, found) + unread >= enough)
}

/// How many of the holdings are copies of one grant.
fn copies(of: &Holding, found: &[&Holding]) -> usize {
    found.iter().filter(|other| other.record.is_grant_of(&of.record)).count()
}

/// Whether the copy here ends well before the copy there. Both were read within about
/// [`READ_APART`], so a smaller difference means nothing.
fn is_much_shorter(here: &Holding, there: &Holding) -> bool {
    let there_lives = there.expires_in.unwrap_or(Duration::MAX);
    here.expires_in.is_some_and(|left| left.saturating_add(READ_APART) < there_lives)
}

/// Submits all operations, and returns the votes that arrive in time, each with the position of its
/// operation.
async fn ask_all(node: &dyn Node, ops: &[Arc<Op>]) -> Vec<(usize, Vote)> {
    let until = Instant::now() + STEP;
    let (votes, mut answers) = mpsc::channel(ops.len().max(1));
    let voter = Arc::new(Collect(votes));
    for (index, op) in ops.iter().enumerate() {
        node.submit(op.clone(), until, Reply::new(voter.clone(), index));
    }
    drop(voter);
    let mut received = Vec::with_capacity(ops.len());
    while let Some(vote) = answers.recv().await {
        received.push(vote);
    }
    received
}

struct Collect(mpsc::Sender<(usize, Vote)>);

impl Voter for Collect {
    fn vote(&self, index: usize, vote: Vote) {
        // The channel has room for all votes. Sending fails only when the receiver is gone.
        drop(self.0.try_send((index, vote)));
    }
}

async fn note(node: &dyn Node, marker: &str) -> Result<(), LinkError> {
    let link = node.link().ok_or_else(|| LinkError::broken("the node has no link"))?;
    let noted = async { link.connect().await?.mark_caught_up(marker).await };
    timeout(STEP, noted).await.unwrap_or_else(|_| Err(LinkError::broken("no answer in time")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: u64 = 1_763_725_165_000_000;

    fn holding(t: u64, is_extended: bool, seconds: u64) -> Holding {
        let token = format!("1.{t}.{}", "a".repeat(40));
        let record = Record::new(&token.parse().unwrap(), &crate::Info::default());
        let record = if is_extended { record.extended() } else { record };
        Holding { record, expires_in: Some(Duration::from_secs(seconds)), at: 0 }
    }

    #[test]
    fn a_minority_of_copies_is_no_lock() {
        let one = holding(T, false, 5);
        let other = holding(T + 1, false, 5);
        assert!(majority(2, &[&one]).is_none());
        assert!(majority(2, &[&one, &other]).is_none(), "copies of two grants");
        assert!(majority(2, &[&other, &one, &one]).is_some());
    }

    #[test]
    fn the_longest_life_and_the_extension_are_taken_over() {
        let plain = holding(T, false, 5);
        let extended = holding(T, true, 9);
        let (record, life) = majority(2, &[&plain, &extended]).unwrap();
        assert!(record.is_extended());
        assert_eq!(life, Some(Duration::from_secs(9)));
    }

    #[test]
    fn an_unread_master_may_complete_a_majority() {
        let one = holding(T, false, 5);
        assert!(!may_be_majority(3, 0, &[&one, &one]));
        assert!(may_be_majority(3, 1, &[&one, &one]));
        assert!(!may_be_majority(3, 1, &[&one]));
    }

    #[test]
    fn a_copy_that_ends_much_earlier_counts_as_missing() {
        let short = holding(T, false, 5);
        let long = holding(T, false, 60);
        let endless = Holding { expires_in: None, ..long.clone() };
        assert!(is_much_shorter(&short, &long) && is_much_shorter(&short, &endless));
        assert!(!is_much_shorter(&long, &short) && !is_much_shorter(&endless, &long));
        assert!(!is_much_shorter(&holding(T, false, 59), &long), "within the time of the readings");
    }
}
