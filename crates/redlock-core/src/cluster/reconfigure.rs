//! The operator's protocol that moves masters from one configuration to another, so that no lock is granted twice between
//! the two:
//!
//! 1. all masters of the new configuration answer, and those of the old one that leave, unless they are lost; nothing is
//!    changed yet ([`survey`]);
//! 2. a marker that no gateway accepts stops the votes of all of them, so that no majority of the old node set is left;
//! 3. the quarantine passes of the longer `max_ttl` and the longer clock skew: every lock of the old one has ended;
//! 4. each new master gets the marker that admits it ([`Change::carry_out`]).
//!
//! Every marker is put in the place of the very one that was seen before, and those of step 2 carry a nonce and the target.
//! So of two operators at once one is told no, and one that was overtaken while it waited ends nothing that the other has
//! begun. Interrupted anywhere it is run again from the beginning: the markers of step 2 keep the node set that is being left,
//! the longest TTL of its locks and the longest clock skew.
//!
//! Markers know only the hash of a node set, so the old masters must be named: gateways that still run on them would go on
//! granting on those that leave. Where nothing on the new masters tells of the old ones, they must be named all the same,
//! or it must be said that there were none. Not seen here: a gateway of the old configuration that runs on takes a leaving
//! master up again when that loses its data; one of the new configuration that starts too early may take up a master that
//! lost its data in step 3. Operators stop the old gateways first and start the new ones last.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::model::clock::{Entropy, SystemClock};
use crate::model::quorum::Quorum;
use crate::node::Diagnosis;
use crate::node::eligibility::{ClusterConfig, nonce};
use crate::node::link::{LinkError, MarkerSwap, ProbeReply, Swapped};
use crate::node::probe::Master;

/// The node set that is being left, as far as an operator tells of it.
pub enum Old {
    /// Nothing was said: the markers have to tell that it is the same.
    Unsaid,
    /// There was none: the new masters are the first.
    Nobody,
    /// These.
    Nodes(OldNodes),
}

/// The node set that is being left.
pub struct OldNodes {
    /// What [`ClusterConfig::new`] called it.
    pub cluster: String,
    /// All of its masters; those that stay have the same name as in the new configuration.
    pub masters: Vec<Master>,
    /// Its longest TTL, for when no marker tells of it any more.
    pub max_ttl: Option<Duration>,
}

/// What is being left, as far as an operator tells of it.
pub struct Left {
    /// Its masters.
    pub nodes: Old,
    /// How far its clocks might differ. Wanted where no marker tells that: all are lost, or an older version wrote one.
    pub max_clock_skew: Option<Duration>,
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

/// Why masters are not moved, with the name of the master. All but the last two come before anything is changed.
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
    #[error(
        "{0}: its marker is of node set {1}, another node's of {2}; a set can be left for one other only"
    )]
    SeveralSets(String, String, String),
    /// A change to another configuration has been begun.
    #[error(
        "{0}: a change to another configuration is under way ({1}); end that first, by running it again with that \
         configuration"
    )]
    OtherChange(String, String),
    /// The old masters that were named are not the node set of the markers, which is this.
    #[error("the markers are of node set {0}, and the old nodes given are not that set")]
    OtherSet(String),
    /// Nothing tells which masters were used before.
    #[error("not all nodes tell which were used before: name them, or say that there were none")]
    OldUnknown,
    /// Nothing tells how long locks of the old configuration may live.
    #[error("no marker tells how long a lock of the old nodes may live: say their max_ttl")]
    MaxTtlUnknown,
    /// Nothing tells how far clocks might differ until now.
    #[error("not all markers tell how far clocks might differ until now: say the old clock_skew")]
    ClockSkewUnknown,
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
    /// Its marker is not the one any more that was seen or written: another operator, a gateway or a loss of data has changed
    /// it. Some markers may be written.
    #[error(
        "{0}: its marker was changed meanwhile, by another run of this, a gateway or a loss of data; run it again"
    )]
    Overtaken(String),
    /// A marker was perhaps not written. Some are.
    #[error("{0}: {1}; run it again")]
    Interrupted(String, LinkError),
}

/// A master as it was seen.
struct Seen {
    master: Master,
    run_id: String,
    marker: Option<String>,
}

/// A change of configuration that can be carried out.
pub struct Change {
    masters: Vec<Seen>,
    leaving: Vec<Seen>,
    /// Of the locks of either configuration.
    longest_ttl: Duration,
    /// Of the clocks of either configuration.
    longest_skew: Duration,
    /// The hash of the old node set.
    left: String,
}

/// Looks at all masters and changes nothing. `masters` are all those of the new configuration.
///
/// # Errors
/// All but [`ReconfigureError::Interrupted`] and [`ReconfigureError::Overtaken`].
///
/// # Panics
/// Without masters.
pub async fn survey(
    masters: Vec<Master>,
    left: Left,
    mut told: impl FnMut(Progress<'_>),
) -> Result<Change, ReconfigureError> {
    let config = masters[0].identity.cluster_config().clone();
    let mut survey = Survey {
        config,
        processes: BTreeMap::new(),
        longest_ttl: Duration::ZERO,
        longest_skew: left.max_clock_skew.unwrap_or_default(),
        skew_is_untold: false,
        left: None,
    };
    let mut seen = Vec::new();
    for master in masters {
        let found = match survey.look(master, true).await? {
            Ok(found) => found,
            Err((master, error)) => return Err(ReconfigureError::Unreachable(master.name, error)),
        };
        let master = found.master.name.as_str();
        let marker = found.marker.as_deref();
        told(Progress::Stays { master, marker, new_prefix: survey.config.marker_prefix() });
        seen.push(found);
    }
    // Votes with the same nodes as before, or did until a change was begun that was told of the old ones.
    let goes_on = |seen: &Seen| {
        let config = &survey.config;
        seen.marker.as_deref().is_some_and(|marker| {
            config.has_admitted(marker) || config.is_target_of(marker).is_some()
        })
    };
    let leaving = match (left.nodes, &survey.left) {
        (Old::Nodes(old), _) => survey.leave(old, &seen, told).await?,
        (Old::Unsaid | Old::Nobody, Some(left)) => {
            return Err(ReconfigureError::OtherSet(left.clone()));
        }
        // All of them: one that was added tells of no other, and a name can stand for more nodes than these.
        (Old::Unsaid, None) if !seen.iter().all(goes_on) => {
            return Err(ReconfigureError::OldUnknown);
        }
        (Old::Unsaid | Old::Nobody, None) => Vec::new(),
    };
    if survey.skew_is_untold && left.max_clock_skew.is_none() {
        return Err(ReconfigureError::ClockSkewUnknown);
    }
    let Survey { config, longest_ttl, longest_skew, left, .. } = survey;
    let left = left.unwrap_or_else(|| config.node_set().to_owned());
    let longest_ttl = longest_ttl.max(config.max_ttl());
    let longest_skew = longest_skew.max(config.max_clock_skew());
    Ok(Change { masters: seen, leaving, longest_ttl, longest_skew, left })
}

/// What is known so far.
struct Survey {
    config: ClusterConfig,
    /// Names by run_id.
    processes: BTreeMap<String, String>,
    /// Of all markers.
    longest_ttl: Duration,
    longest_skew: Duration,
    /// Some marker, or the lack of all, leaves it open.
    skew_is_untold: bool,
    /// The hash of another node set that markers tell of.
    left: Option<String>,
}

impl Survey {
    /// One more master, or why it does not answer.
    async fn look(
        &mut self,
        master: Master,
        must_be_fit: bool,
    ) -> Result<Result<Seen, (Master, LinkError)>, ReconfigureError> {
        let ProbeReply { facts, marker, .. } = match master.probe_with_offset(&SystemClock).await {
            Ok((look, _)) => look,
            Err(error) => return Ok(Err((master, error))),
        };
        let name = || master.name.clone();
        if let Some(diagnosis) = facts.ineligible().filter(|_| must_be_fit) {
            return Err(ReconfigureError::Unfit(name(), diagnosis));
        }
        if let Some(other) = self.processes.insert(facts.run_id.clone(), name()) {
            return Err(ReconfigureError::SameProcess(name(), other));
        }
        let stands = marker.as_deref().unwrap_or_default();
        if self.config.is_target_of(stands) == Some(false) {
            return Err(ReconfigureError::OtherChange(name(), stands.to_owned()));
        }
        self.longest_ttl =
            self.longest_ttl.max(ClusterConfig::max_ttl_of(stands).unwrap_or_default());
        let skew = ClusterConfig::clock_skew_of(stands);
        self.skew_is_untold |= skew.is_none() && ClusterConfig::node_set_of(stands).is_some();
        self.longest_skew = self.longest_skew.max(skew.unwrap_or_default());
        if let Some(set) =
            ClusterConfig::node_set_of(stands).filter(|set| *set != self.config.node_set())
        {
            let other = self.left.get_or_insert_with(|| set.to_owned());
            if set != other {
                return Err(ReconfigureError::SeveralSets(name(), set.to_owned(), other.clone()));
            }
        }
        Ok(Ok(Seen { run_id: facts.run_id, marker, master }))
    }

    /// The masters of the old set that are not in the new one and answer. Checked: they are the old set, and with them no
    /// majority of it goes on voting.
    async fn leave(
        &mut self,
        old: OldNodes,
        new: &[Seen],
        mut told: impl FnMut(Progress<'_>),
    ) -> Result<Vec<Seen>, ReconfigureError> {
        let set =
            ClusterConfig::new(&old.cluster, Duration::ZERO, Duration::ZERO).node_set().to_owned();
        if let Some(left) = self.left.as_ref().filter(|left| **left != set) {
            return Err(ReconfigureError::OtherSet(left.clone()));
        }
        let total = old.masters.len();
        let mut names: Vec<_> = old.masters.iter().map(|master| &master.name).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(ReconfigureError::SameProcess(twice[0].clone(), twice[1].clone()));
        }
        let stays = |master: &Master| new.iter().any(|new| new.master.name == master.name);
        let (staying, leaving): (Vec<_>, Vec<_>) = old.masters.into_iter().partition(stays);
        let mut found = Vec::new();
        for master in leaving {
            match self.look(master, false).await? {
                Ok(seen) => {
                    told(Progress::Leaves {
                        master: &seen.master.name,
                        marker: seen.marker.as_deref(),
                    });
                    found.push(seen);
                }
                Err((master, error)) => {
                    told(Progress::Lost { master: &master.name, error: &error })
                }
            }
        }
        if let Some(left) = self.left.as_ref().filter(|left| **left != set) {
            return Err(ReconfigureError::OtherSet(left.clone()));
        }
        // A marker of the old set, or of a change that leaves it, tells of its longest TTL.
        let told =
            self.left.is_some() || set == self.config.node_set() && !self.longest_ttl.is_zero();
        if !told && old.max_ttl.is_none() {
            return Err(ReconfigureError::MaxTtlUnknown);
        }
        self.skew_is_untold |= !told;
        self.left = Some(set);
        self.longest_ttl = self.longest_ttl.max(old.max_ttl.unwrap_or_default());
        let needed = Quorum::new(total).map_or(0, Quorum::blocking);
        let stopped = staying.len() + found.len();
        if stopped < needed {
            Err(ReconfigureError::TooFewStopped { stopped, total, needed })
        } else {
            Ok(found)
        }
    }
}

impl Change {
    /// For how long no master will vote: as long as a quarantine of the longest TTL and clock skew.
    pub fn wait(&self) -> Duration {
        let settings = self.masters[0].master.settings.with_max_clock_skew(self.longest_skew);
        settings.quarantine(self.longest_ttl)
    }

    /// Stops the votes, waits, and writes the new markers. May be dropped anywhere, and is then to be run again from
    /// [`survey`].
    ///
    /// # Errors
    /// [`ReconfigureError::Interrupted`] and [`ReconfigureError::Overtaken`] only.
    pub async fn carry_out(
        &self,
        entropy: &dyn Entropy,
        mut told: impl FnMut(Progress<'_>),
    ) -> Result<(), ReconfigureError> {
        let config = self.masters[0].master.identity.cluster_config();
        let under_way = config.marker_under_way(
            &self.left,
            self.longest_ttl,
            self.longest_skew,
            nonce(entropy),
        );
        // In one order, whatever the lists: the first master that two operators have in common decides between them.
        let mut all: Vec<_> = self.masters.iter().chain(&self.leaving).collect();
        all.sort_by(|a, b| a.master.name.cmp(&b.master.name));
        for Seen { master, run_id, marker } in all {
            let swap = MarkerSwap {
                run_id: run_id.clone(),
                from: marker.clone(),
                to: under_way.clone(),
                probed_micros: 0,
            };
            put(master, swap).await?;
        }
        told(Progress::VotesStopped(self.wait()));
        tokio::time::sleep(self.wait()).await;
        for Seen { master, .. } in &self.masters {
            let looked = master.probe_with_offset(&SystemClock).await;
            let interrupted = |error| ReconfigureError::Interrupted(master.name.clone(), error);
            let (ProbeReply { facts, .. }, _) = looked.map_err(interrupted)?;
            let to = master.identity.admitting(&facts, nonce(entropy));
            // From nothing else: a loss of data, or an operator who has taken this over, begins a wait of its own.
            put(
                master,
                MarkerSwap {
                    run_id: facts.run_id,
                    from: Some(under_way.clone()),
                    to,
                    probed_micros: 0,
                },
            )
            .await?;
        }
        Ok(())
    }
}

async fn put(master: &Master, swap: MarkerSwap) -> Result<(), ReconfigureError> {
    let name = || master.name.clone();
    match master.swap(swap).await {
        Ok(Swapped::Done) => Ok(()),
        Ok(Swapped::OtherMarker) => Err(ReconfigureError::Overtaken(name())),
        Ok(Swapped::OtherProcess) => Err(ReconfigureError::Interrupted(
            name(),
            LinkError::broken("it was restarted just now"),
        )),
        Err(error) => Err(ReconfigureError::Interrupted(name(), error)),
    }
}
