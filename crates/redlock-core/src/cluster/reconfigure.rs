//! The operator's protocol that moves masters from one configuration to another, without granting a
//! lock twice between the two:
//!
//! 1. The operator's command probes all masters of the new configuration, and those of the old one
//!    that leave. All must answer, except leaving masters that are lost. Nothing is changed yet
//!    ([`survey`]).
//! 2. Each of these masters gets a marker that no gateway accepts, so it stops voting. Then no
//!    majority of the old node set is left.
//! 3. The command waits for a quarantine, computed from the longer `max_ttl` and the longer clock
//!    skew of the two configurations. After that every lock of the old configuration has ended.
//! 4. Each master of the new configuration gets the marker that admits it. [`Change::carry_out`]
//!    runs steps 2 to 4.
//!
//! Raising `max_ttl` alone needs no stop and no wait, see `raise.rs`.
//!
//! Every marker replaces exactly the marker that was seen before. The markers of step 2 contain a
//! nonce and the new configuration. So if two operators run a change at once, one of them is
//! refused. If a run is overtaken during its wait, it cannot end the wait of the other run.
//!
//! An interrupted change is run again from the beginning. Everything needed for that is in the
//! markers of step 2: the old node set, the longest TTL of its locks and the longest clock skew.
//!
//! Markers contain only the hash of a node set, so the operator must name the old masters.
//! Otherwise gateways of the old configuration would go on granting locks on the masters that
//! leave. If no marker on the new masters shows an old node set, the operator must still name the
//! old masters, or declare that there were none.
//!
//! Two hazards are not detected here. If a leaving master loses its data, its marker of step 2 is
//! lost too. A gateway of the old configuration that still runs then admits that master again. If a
//! new master loses its data in step 3, a gateway of the new configuration that was started too
//! early may admit that master too soon. Operators stop the old gateways first and start the new
//! ones last.

mod raise;

use std::collections::BTreeMap;
use std::time::Duration;

use self::raise::NotRaised;
use crate::model::clock::{Entropy, SystemClock};
use crate::model::quorum::Quorum;
use crate::node::Diagnosis;
use crate::node::eligibility::{ClusterConfig, nonce};
use crate::node::link::{LinkError, MarkerSwap, ProbeReply, Swapped};
use crate::node::probe::Master;

/// The old node set, as far as the operator named it.
pub enum Old {
    /// The operator gave nothing: the markers must show that the node set stays the same.
    Unsaid,
    /// The operator declared that there was none: the new masters are the first.
    Nobody,
    /// The nodes that the operator named.
    Nodes(OldNodes),
}

/// The old node set.
pub struct OldNodes {
    /// The name that was given to [`ClusterConfig::new`].
    pub cluster: String,
    /// All old masters. Those that stay have the same name as in the new configuration.
    pub masters: Vec<Master>,
    /// The old `max_ttl`. Needed only if no marker shows it any more.
    pub max_ttl: Option<Duration>,
}

/// The old configuration, as far as the operator gave it.
pub struct Left {
    /// The old masters.
    pub nodes: Old,
    /// The old `max_clock_skew`. Needed if the markers do not show it, because all old masters are
    /// lost or an older version wrote a marker.
    pub max_clock_skew: Option<Duration>,
}

/// The progress of a change, as it happens.
#[derive(Debug)]
pub enum Progress<'a> {
    /// A master of the new configuration has answered.
    Stays {
        /// The master's name.
        master: &'a str,
        /// The master's present marker.
        marker: Option<&'a str>,
        /// The beginning of the master's new marker.
        new_prefix: &'a str,
    },
    /// A master that leaves has answered. Its votes will be stopped.
    Leaves {
        /// The master's name.
        master: &'a str,
        /// The master's present marker.
        marker: Option<&'a str>,
    },
    /// A master that leaves has not answered.
    Lost {
        /// The master's name.
        master: &'a str,
        /// Why it did not answer.
        error: &'a LinkError,
    },
    /// From now on no master votes, for this long.
    VotesStopped(Duration),
    /// The marker of this master could not be raised yet. The command tries again.
    NotYetRaised {
        /// The master's name.
        master: &'a str,
        /// Why the marker could not be raised.
        why: &'a str,
    },
}

/// Why masters are not moved, with the name of the master. All but the last two errors come before
/// anything is changed.
#[derive(Debug, thiserror::Error)]
pub enum ReconfigureError {
    /// A master of the new configuration did not answer.
    #[error("{0}: {1}; all nodes must answer")]
    Unreachable(String, LinkError),
    /// The master's facts forbid it to vote, whatever its marker.
    #[error("{0}: {reason}", reason = .1.reason)]
    Unfit(String, Diagnosis),
    /// Two names lead to one process.
    #[error("{0}: it is the same Redis process as {1}; a quorum needs independent masters")]
    SameProcess(String, String),
    /// The markers are of several old node sets. Contains the set of this master's marker, and that
    /// of another master's.
    #[error(
        "{0}: its marker is of node set {1}, another node's of {2}; only one old \
         set can be replaced"
    )]
    SeveralSets(String, String, String),
    /// A change to another configuration was begun, and has not ended.
    #[error(
        "{0}: a change to another configuration is under way ({1}); first complete it, by \
         running it again with that configuration"
    )]
    OtherChange(String, String),
    /// The markers are of this node set, and the given old nodes are not.
    #[error("the markers are of node set {0}, and the old nodes given are not that set")]
    OtherSet(String),
    /// No marker shows which masters were used before.
    #[error(
        "not all markers show the old nodes: name the old nodes, or declare that there were none"
    )]
    OldUnknown,
    /// No marker shows how long locks of the old configuration may live.
    #[error("no marker shows how long a lock of the old nodes may live: give their max_ttl")]
    MaxTtlUnknown,
    /// No marker shows the clock skew of the old configuration.
    #[error("not all markers show the old clock skew: give the old clock_skew")]
    ClockSkewUnknown,
    /// A majority of the old masters might go on voting.
    #[error(
        "{stopped} of {total} old nodes can be stopped; {needed} are needed to stop every majority"
    )]
    TooFewStopped {
        /// The masters that answer.
        stopped: usize,
        /// All old masters.
        total: usize,
        /// The masters that must answer.
        needed: usize,
    },
    /// The marker is no longer the one that was seen or written: another operator, a gateway or a
    /// loss of data has changed it. Some new markers may be written.
    #[error(
        "{0}: its marker was changed meanwhile, by another run, a gateway or a loss of data; run \
         it again"
    )]
    Overtaken(String),
    /// The marker of this master was not raised in time. Those of other masters may have been.
    #[error("{0}: {1}; its marker was not raised, and all masters keep voting; run it again")]
    NotRaised(String, String),
    /// This master's marker may not have been written. Markers of other masters may have been.
    #[error("{0}: {1}; run it again")]
    Interrupted(String, LinkError),
}

/// A master as it was probed.
struct Seen {
    master: Master,
    run_id: String,
    marker: Option<String>,
}

/// A change of configuration that can be carried out.
pub struct Change {
    masters: Vec<Seen>,
    leaving: Vec<Seen>,
    /// The longer `max_ttl` of the two configurations.
    longest_ttl: Duration,
    /// The longer clock skew of the two configurations.
    longest_skew: Duration,
    /// The hash of the old node set.
    left: String,
    /// Whether the change only raises `max_ttl`.
    is_raise: bool,
}

/// Probes all masters and changes nothing. `masters` are all those of the new configuration.
///
/// # Errors
/// All but [`ReconfigureError::Interrupted`] and [`ReconfigureError::Overtaken`].
///
/// # Panics
/// If `masters` is empty.
pub async fn survey(
    masters: Vec<Master>,
    left: Left,
    mut report: impl FnMut(Progress<'_>),
) -> Result<Change, ReconfigureError> {
    let config = masters[0].identity.cluster_config().clone();
    let mut survey = Survey {
        config,
        processes: BTreeMap::new(),
        longest_ttl: Duration::ZERO,
        longest_skew: left.max_clock_skew.unwrap_or_default(),
        is_skew_unknown: false,
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
        report(Progress::Stays { master, marker, new_prefix: survey.config.marker_prefix() });
        seen.push(found);
    }
    // Whether a marker shows the old nodes already. Either the marker admits the master in this
    // same node set. Or a change to this configuration was begun, and the operator named the old
    // nodes then.
    let goes_on = |seen: &Seen| {
        let config = &survey.config;
        seen.marker.as_deref().is_some_and(|marker| {
            config.has_admitted(marker) || config.is_target_of(marker).is_some()
        })
    };
    let is_raise = !matches!(left.nodes, Old::Nobody) && survey.is_raise(&seen);
    let leaving = match (left.nodes, &survey.left) {
        (Old::Nodes(old), _) => survey.leave(old, &seen, report).await?,
        (Old::Unsaid | Old::Nobody, Some(left)) => {
            return Err(ReconfigureError::OtherSet(left.clone()));
        }
        // All masters must show it. The marker of an added node shows no other node, and a
        // cluster's name can stand for more nodes than the new ones.
        (Old::Unsaid, None) if !is_raise && !seen.iter().all(goes_on) => {
            return Err(ReconfigureError::OldUnknown);
        }
        (Old::Unsaid | Old::Nobody, None) => Vec::new(),
    };
    if survey.is_skew_unknown && left.max_clock_skew.is_none() {
        return Err(ReconfigureError::ClockSkewUnknown);
    }
    let Survey { config, longest_ttl, longest_skew, left, .. } = survey;
    let left = left.unwrap_or_else(|| config.node_set().to_owned());
    let longest_ttl = longest_ttl.max(config.max_ttl());
    let longest_skew = longest_skew.max(config.max_clock_skew());
    // The operator may state longer values than the markers.
    let is_raise = is_raise
        && leaving.is_empty()
        && left == config.node_set()
        && longest_ttl == config.max_ttl()
        && longest_skew == config.max_clock_skew();
    Ok(Change { masters: seen, leaving, longest_ttl, longest_skew, left, is_raise })
}

/// The facts gathered so far.
struct Survey {
    config: ClusterConfig,
    /// Names by run_id.
    processes: BTreeMap<String, String>,
    /// The longest TTL that any marker shows.
    longest_ttl: Duration,
    longest_skew: Duration,
    /// Whether the old clock skew is unknown: a marker does not contain it, or no marker is of the
    /// old set.
    is_skew_unknown: bool,
    /// The hash of another node set that markers show.
    left: Option<String>,
}

impl Survey {
    /// Whether this configuration differs from all markers only by a larger `max_ttl`. A master
    /// that has just lost its data has no marker.
    fn is_raise(&self, seen: &[Seen]) -> bool {
        let max_ttl = self.config.max_ttl();
        let rises = |marker: &str| {
            self.config.bounds_in(marker).is_some_and(|bounds| bounds.bound <= max_ttl)
        };
        let mut markers = seen.iter().filter_map(|seen| seen.marker.as_deref()).peekable();
        markers.peek().is_some() && markers.all(rises)
    }

    /// Probes one more master. The inner result is an error if the master does not answer.
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
        self.longest_ttl = self
            .longest_ttl
            .max(ClusterConfig::bounds_of(stands).map_or(Duration::ZERO, |b| b.bound));
        let skew = ClusterConfig::clock_skew_of(stands);
        self.is_skew_unknown |= skew.is_none() && ClusterConfig::node_set_of(stands).is_some();
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

    /// Probes the masters of the old set that leave, and returns those that answer. Checks that the
    /// given masters are the old set. Also checks that the masters that do not answer are too few
    /// for a majority of that set.
    async fn leave(
        &mut self,
        old: OldNodes,
        new: &[Seen],
        mut report: impl FnMut(Progress<'_>),
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
                    report(Progress::Leaves {
                        master: &seen.master.name,
                        marker: seen.marker.as_deref(),
                    });
                    found.push(seen);
                }
                Err((master, error)) => {
                    report(Progress::Lost { master: &master.name, error: &error })
                }
            }
        }
        if let Some(left) = self.left.as_ref().filter(|left| **left != set) {
            return Err(ReconfigureError::OtherSet(left.clone()));
        }
        // A marker of the old set, or of a change that leaves the old set, shows the longest TTL of
        // that set.
        let is_known =
            self.left.is_some() || set == self.config.node_set() && !self.longest_ttl.is_zero();
        if !is_known && old.max_ttl.is_none() {
            return Err(ReconfigureError::MaxTtlUnknown);
        }
        self.is_skew_unknown |= !is_known;
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
    /// Whether the change only raises `max_ttl`. Then all masters keep voting.
    pub fn is_raise(&self) -> bool {
        self.is_raise
    }

    /// How long no master will vote: the quarantine of the longest TTL and clock skew. Zero if the
    /// change only raises `max_ttl`.
    pub fn wait(&self) -> Duration {
        if self.is_raise {
            return Duration::ZERO;
        }
        let settings = self.masters[0].master.settings.with_max_clock_skew(self.longest_skew);
        settings.quarantine(self.longest_ttl)
    }

    /// Stops the votes, waits, and writes the new markers. A change that only raises `max_ttl`
    /// raises it in the markers instead. If the future is dropped before its end, begin again with
    /// [`survey`].
    ///
    /// # Errors
    /// [`ReconfigureError::Interrupted`], [`ReconfigureError::Overtaken`] and
    /// [`ReconfigureError::NotRaised`] only.
    pub async fn carry_out(
        &self,
        entropy: &dyn Entropy,
        mut report: impl FnMut(Progress<'_>),
    ) -> Result<(), ReconfigureError> {
        let config = self.masters[0].master.identity.cluster_config();
        if self.is_raise {
            let masters: Vec<_> = self.masters.iter().map(|seen| &seen.master).collect();
            let report = |master: &str, why: &str| report(Progress::NotYetRaised { master, why });
            return raise::raise(&masters, config.max_ttl(), report).await.map_err(
                |why| match why {
                    NotRaised::Overtaken(master) => ReconfigureError::Overtaken(master),
                    NotRaised::TooLate(master, why) => ReconfigureError::NotRaised(master, why),
                },
            );
        }
        let under_way = config.marker_under_way(
            &self.left,
            self.longest_ttl,
            self.longest_skew,
            nonce(entropy),
        );
        // The markers are put in the order of the masters' names, however the lists are ordered. If
        // two operators run a change at once, they meet first at the same master, and only one of
        // them replaces its marker.
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
        report(Progress::VotesStopped(self.wait()));
        tokio::time::sleep(self.wait()).await;
        for Seen { master, .. } in &self.masters {
            let looked = master.probe_with_offset(&SystemClock).await;
            let interrupted = |error| ReconfigureError::Interrupted(master.name.clone(), error);
            let (ProbeReply { facts, .. }, _) = looked.map_err(interrupted)?;
            let to = master.identity.admitting(&facts, nonce(entropy));
            // Replaces only the marker of step 2. If that marker is gone, the master lost its data
            // or another operator began a change. Then a new wait is needed.
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
