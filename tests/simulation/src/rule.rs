//! The rules of the core by name, so that each can be switched off alone. If the simulation finds
//! no violation with a rule off, finding none with the rule on proves nothing about it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use redlock_core::node::SafetyRules;

use crate::plan::Plan;

/// A rule that can be switched off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule(&'static str);

impl Rule {
    /// A watermark outlives its lock, or the release that left it. For the core this is a duration.
    pub const WATERMARK_OUTLIVES_LOCK: Self = Self("watermark_outlives_lock");
    /// A marker names the clock skew, so gateways with different clock skews do not vote together.
    /// For the core this is a field of the marker.
    pub const MARKER_NAMES_SKEW: Self = Self("marker_names_skew");

    /// All rules: the switches of the core, and the two rules that are no switches there.
    pub fn all() -> impl Iterator<Item = Self> {
        let others = [Self::WATERMARK_OUTLIVES_LOCK, Self::MARKER_NAMES_SKEW];
        SafetyRules::NAMES.iter().map(|name| Self(name)).chain(others)
    }

    /// The same plan without this rule.
    pub fn off(self, plan: Plan) -> Plan {
        match self {
            Self::WATERMARK_OUTLIVES_LOCK => Plan { fence_grace: Some(Duration::ZERO), ..plan },
            Self::MARKER_NAMES_SKEW => Plan { marker_names_skew: false, ..plan },
            Self(name) => {
                let rules = plan.rules.without(name).expect("a rule of the core");
                Plan { rules, ..plan }
            }
        }
    }
}

/// The name that `--without` takes.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.replace('_', "-"))
    }
}

/// The error for an unknown rule name.
#[derive(Debug)]
pub struct NoSuchRule;

impl fmt::Display for NoSuchRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = Rule::all().map(|rule| rule.to_string()).collect();
        write!(f, "the rules are {}", names.join(", "))
    }
}

impl std::error::Error for NoSuchRule {}

impl FromStr for Rule {
    type Err = NoSuchRule;

    fn from_str(text: &str) -> Result<Self, NoSuchRule> {
        Self::all().find(|rule| rule.to_string() == text).ok_or(NoSuchRule)
    }
}
