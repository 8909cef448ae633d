//! The operator's protocol that moves masters from one configuration to another, so that no lock is granted twice between
//! the two:
//!
//! 1. all masters of the new configuration answer, and those of the old one that leave, unless they are lost; nothing is
//!    changed yet ([`survey`]);
//! 2. a marker that no gateway accepts stops the votes of all of them, so that no majority of the old node set is left;
//! 3. the longest quarantine of both configurations passes: every lock of the old one has ended;
//! 4. each new master gets the marker that admits it ([`Change::carry_out`]).
//!
//! Interrupted anywhere it is run again from the beginning: the markers of step 2 keep the node set that is being left and
//! the longest TTL of its locks.
//!
//! Markers know only the hash of a node set, so the old masters must be named: gateways that still run on them would go on
//! granting on those that leave. Not seen here: a gateway of the old configuration that runs on takes a leaving master up
//! again when that loses its data; one of the new configuration that starts too early may take up a master that lost its
//! data in step 3. Operators stop the old gateways first and start the new ones last.

use std::time::Duration;

use crate::clock::SystemClock;
use crate::node::Diagnosis;
use crate::node::admission::ClusterConfig;
use crate::node::link::{LinkError, Look};
use crate::node::probe::Master;
use crate::quorum::Quorum;

/// The node set that is being left, as far as markers do not tell it.
pub struct OldNodes {
    /// What [`ClusterConfig::new`] called it.
    pub cluster: String,
    /// All of its masters; those that stay have the same name as in the new configuration.
    pub masters: Vec<Master>,
}

/// What is seen and done, as it happens.
#[derive(Debug)]
pub enum Progress<'a> {
    /// A master of the new configuration has answered.
    Stays {
        /// Which.
        master: &'a str,
        /// The marker that stands there.
        marker: Option<&'a str>,
        /// How the one begins that it will have.
        new_prefix: &'a str,
    },
    /// A master that leaves has answered; its votes will be stopped.
    Leaves {
        /// Which.
        master: &'a str,
        /// The marker that stands there.
        marker: Option<&'a str>,
    },
    /// A master that leaves has not answered.
    Lost {
        /// Which.
        master: &'a str,
        /// Why.
        error: &'a LinkError,
    },
    /// No master votes now; for so long none will.
    VotesStopped(Duration),
}

/// Why masters are not moved, with the name of the master. All but [`Interrupted`](Self::Interrupted) come before anything
/// is changed.
#[derive(Debug, thiserror::Error)]
pub enum ReconfigureError {
    /// A master of the new configuration must answer.
    #[error("{0}: {1}; all nodes must answer")]
    Unreachable(String, LinkError),
    /// A master must not vote whatever its marker says.
    #[error("{0}: {reason}", reason = .1.reason)]
    Unfit(String, Diagnosis),
    /// Two names lead to one process.
    #[error("{0}: it is the same Redis process as {1}; a quorum needs independent masters")]
    SameProcess(String, String),
    /// The markers are of more than one old node set: here of one, elsewhere of another.
    #[error("{0}: its marker is of node set {1}, another node's of {2}; a set can be left for one other only")]
    SeveralSets(String, String, String),
    /// The old masters that were named are not the node set of the markers, which is this.
    #[error("the markers are of node set {0}, and the old nodes given are not that set")]
    OtherSet(String),
    /// A majority of the old masters might go on voting.
    #[error(
        "{stopped} of {total} old nodes can be stopped, {needed} are needed so that no majority of them goes on voting"
    )]
    TooFewStopped {
        /// So many answer.
        stopped: usize,
        /// All of them.
        total: usize,
        /// So many must.
        needed: usize,
    },
    /// A marker was perhaps not written. Some are.
    #[error("{0}: {1}; run it again")]
    Interrupted(String, LinkError),
}

/// A change of configuration that can be carried out.
pub struct Change {
    masters: Vec<Master>,
    leaving: Vec<Master>,
    /// Of the locks of either configuration.
    longest_ttl: Duration,
    /// The hash of the old node set, when that is another one.
    left: Option<String>,
}

/// Looks at all masters and changes nothing. `masters` are all those of the new configuration; `old` is needed when the
/// markers show another node set.
///
/// # Errors
/// All but [`ReconfigureError::Interrupted`].
///
/// # Panics
/// Without masters.
pub async fn survey(
    masters: Vec<Master>,
    old: OldNodes,
    mut told: impl FnMut(Progress<'_>),
) -> Result<Change, ReconfigureError> {
    let longest_ttl = masters[0].identity.cluster_config().max_ttl();
    let mut change = Change { masters, leaving: Vec::new(), longest_ttl, left: None };
    let mut seen: Vec<(String, &str)> = Vec::new();
    for master in &change.masters {
        let name = || master.name.clone();
        let unreachable = |error| ReconfigureError::Unreachable(name(), error);
        let (Look { facts, marker }, _) = master.look(&SystemClock).await.map_err(unreachable)?;
        if let Some(diagnosis) = facts.unfit() {
            return Err(ReconfigureError::Unfit(name(), diagnosis));
        }
        if let Some((_, other)) = seen.iter().find(|(run_id, _)| *run_id == facts.run_id) {
            return Err(ReconfigureError::SameProcess(name(), (*other).to_owned()));
        }
        seen.push((facts.run_id, &master.name));
        let config = master.identity.cluster_config();
        let (marker, new_prefix) = (marker.as_deref(), config.marker_prefix());
        told(Progress::Stays { master: &master.name, marker, new_prefix });
        let stands = marker.unwrap_or_default();
        change.longest_ttl = change.longest_ttl.max(ClusterConfig::max_ttl_of(stands).unwrap_or_default());
        if let Some(set) = ClusterConfig::node_set_of(stands).filter(|set| *set != config.node_set()) {
            let other = change.left.get_or_insert_with(|| set.to_owned());
            if set != other {
                return Err(ReconfigureError::SeveralSets(name(), set.to_owned(), other.clone()));
            }
        }
    }
    change.add_leaving(old, told).await?;
    Ok(change)
}

impl Change {
    /// For how long no master will vote: as long as a quarantine of the longest TTL.
    pub fn wait(&self) -> Duration {
        self.masters[0].settings.quarantine(self.longest_ttl)
    }

    /// Stops the votes, waits, and writes the new markers. May be dropped anywhere, and is then to be run again from
    /// [`survey`].
    ///
    /// # Errors
    /// [`ReconfigureError::Interrupted`] only.
    pub async fn carry_out(&self, mut told: impl FnMut(Progress<'_>)) -> Result<(), ReconfigureError> {
        let interrupted = |master: &Master, error| ReconfigureError::Interrupted(master.name.clone(), error);
        let left = self.left.as_deref().unwrap_or(self.masters[0].identity.cluster_config().node_set());
        for master in self.masters.iter().chain(&self.leaving) {
            master.stop_votes(left, self.longest_ttl).await.map_err(|error| interrupted(master, error))?;
        }
        told(Progress::VotesStopped(self.wait()));
        tokio::time::sleep(self.wait()).await;
        for master in &self.masters {
            master.admit().await.map_err(|error| interrupted(master, error))?;
        }
        Ok(())
    }

    /// The masters of the old set that are not in the new one and answer. Checked: they are the old set, and with them no
    /// majority of it goes on voting.
    async fn add_leaving(&mut self, old: OldNodes, mut told: impl FnMut(Progress<'_>)) -> Result<(), ReconfigureError> {
        let Some(left) = &self.left else { return Ok(()) };
        if ClusterConfig::new(&old.cluster, self.longest_ttl).node_set() != left {
            return Err(ReconfigureError::OtherSet(left.clone()));
        }
        let total = old.masters.len();
        let stays = |master: &Master| self.masters.iter().any(|new| new.name == master.name);
        let (staying, leaving): (Vec<_>, Vec<_>) = old.masters.into_iter().partition(stays);
        for master in leaving {
            match master.look(&SystemClock).await {
                Ok((Look { marker, .. }, _)) => {
                    told(Progress::Leaves { master: &master.name, marker: marker.as_deref() });
                    let stands = marker.as_deref().and_then(ClusterConfig::max_ttl_of).unwrap_or_default();
                    self.longest_ttl = self.longest_ttl.max(stands);
                    self.leaving.push(master);
                }
                Err(error) => told(Progress::Lost { master: &master.name, error: &error }),
            }
        }
        let needed = Quorum::new(total).map_or(0, Quorum::blocking);
        let stopped = staying.len() + self.leaving.len();
        if stopped < needed { Err(ReconfigureError::TooFewStopped { stopped, total, needed }) } else { Ok(()) }
    }
}
