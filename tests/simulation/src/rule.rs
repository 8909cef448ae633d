//! The rules of the core by name, so that each can be switched off alone. If the simulation found
//! no violation with a rule off, a run without violations would prove nothing about that rule.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::plan::Plan;

/// A rule of the core that can be switched off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// A node never overwrites a lock, even for the same owner.
    LockIsKept,
    /// A release leaves the watermark at its T or above.
    ReleaseLeavesATombstone,
    /// A release deletes only a lock whose T is not newer than its own.
    ReleaseKeepsNewer,
    /// The undo of a proposal removes exactly its own grant, and only if that grant was not
    /// extended.
    UndoIsExact,
    /// A node refuses a T that is too far from its own time.
    ClockIsChecked,
    /// A node grants only a T above the last one that it stored for the lock.
    WatermarkIsChecked,
    /// A node refuses lock operations unless its admitting marker stands.
    MarkerIsChecked,
    /// A node is quarantined before it votes if its memory of locks cannot be trusted.
    QuarantineIsWaited,
    /// A node may vote before the end of its quarantine only after it has recovered its lost locks
    /// from the others.
    LostLocksAreRecovered,
    /// A process stops voting when its name leads to another process.
    NameIsFollowed,
    /// A process that restarted with its data votes only when no gateway can still reach the
    /// process before it.
    ReturnedWaits,
    /// A restarted process is quarantined if a gateway saw the process before it alive at the same
    /// time.
    TwoAliveAreNoticed,
    /// A marker names the clock skew, so gateways with different clock skews do not let the same
    /// node vote.
    MarkerNamesSkew,
    /// A node whose clock runs faster than promised is quarantined.
    RateIsChecked,
    /// A successful extension sets the lock again on nodes that lost it.
    MissingIsRepaired,
    /// A node that is admitted again gets the locks that were granted while it was away.
    AdmittedIsCaughtUp,
    /// A watermark outlives its lock, or the release that left it.
    FenceOutlivesLock,
}

impl Rule {
    pub const ALL: [Self; 17] = [
        Self::LockIsKept,
        Self::ReleaseLeavesATombstone,
        Self::ReleaseKeepsNewer,
        Self::UndoIsExact,
        Self::ClockIsChecked,
        Self::WatermarkIsChecked,
        Self::MarkerIsChecked,
        Self::QuarantineIsWaited,
        Self::LostLocksAreRecovered,
        Self::NameIsFollowed,
        Self::ReturnedWaits,
        Self::TwoAliveAreNoticed,
        Self::MarkerNamesSkew,
        Self::RateIsChecked,
        Self::MissingIsRepaired,
        Self::AdmittedIsCaughtUp,
        Self::FenceOutlivesLock,
    ];

    /// The name that `--without` takes.
    pub fn name(self) -> &'static str {
        match self {
            Self::LockIsKept => "lock-is-kept",
            Self::ReleaseLeavesATombstone => "release-leaves-a-tombstone",
            Self::ReleaseKeepsNewer => "release-keeps-newer",
            Self::UndoIsExact => "undo-is-exact",
            Self::ClockIsChecked => "clock-is-checked",
            Self::WatermarkIsChecked => "watermark-is-checked",
            Self::MarkerIsChecked => "marker-is-checked",
            Self::QuarantineIsWaited => "quarantine-is-waited",
            Self::LostLocksAreRecovered => "lost-locks-are-recovered",
            Self::NameIsFollowed => "name-is-followed",
            Self::ReturnedWaits => "returned-waits",
            Self::TwoAliveAreNoticed => "two-alive-are-noticed",
            Self::MarkerNamesSkew => "marker-names-skew",
            Self::RateIsChecked => "rate-is-checked",
            Self::MissingIsRepaired => "missing-is-repaired",
            Self::AdmittedIsCaughtUp => "admitted-is-caught-up",
            Self::FenceOutlivesLock => "fence-outlives-lock",
        }
    }

    /// The same plan without this rule.
    pub fn off(self, plan: Plan) -> Plan {
        let mut rules = plan.rules;
        let rule = match self {
            // Two of the rules are no switches of the core: the one is a duration, the other a
            // field of the marker.
            Self::FenceOutlivesLock => return Plan { fence_grace: Some(Duration::ZERO), ..plan },
            Self::MarkerNamesSkew => return Plan { marker_names_skew: false, ..plan },
            Self::LockIsKept => &mut rules.lock_is_kept,
            Self::ReleaseLeavesATombstone => &mut rules.release_leaves_a_tombstone,
            Self::ReleaseKeepsNewer => &mut rules.release_keeps_newer,
            Self::UndoIsExact => &mut rules.undo_is_exact,
            Self::ClockIsChecked => &mut rules.clock_is_checked,
            Self::WatermarkIsChecked => &mut rules.watermark_is_checked,
            Self::MarkerIsChecked => &mut rules.marker_is_checked,
            Self::QuarantineIsWaited => &mut rules.quarantine_is_waited,
            Self::LostLocksAreRecovered => &mut rules.lost_locks_are_recovered,
            Self::NameIsFollowed => &mut rules.name_is_followed,
            Self::ReturnedWaits => &mut rules.returned_waits,
            Self::TwoAliveAreNoticed => &mut rules.two_alive_are_noticed,
            Self::RateIsChecked => &mut rules.rate_is_checked,
            Self::MissingIsRepaired => &mut rules.missing_is_repaired,
            Self::AdmittedIsCaughtUp => &mut rules.admitted_is_caught_up,
        };
        *rule = false;
        Plan { rules, ..plan }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The error for an unknown rule name.
#[derive(Debug)]
pub struct NoSuchRule;

impl fmt::Display for NoSuchRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the rules are {}", Rule::ALL.map(Rule::name).join(", "))
    }
}

impl std::error::Error for NoSuchRule {}

impl FromStr for Rule {
    type Err = NoSuchRule;

    fn from_str(text: &str) -> Result<Self, NoSuchRule> {
        Self::ALL.into_iter().find(|rule| rule.name() == text).ok_or(NoSuchRule)
    }
}
