//! The attacks: what each does and needs, as one table. How it looks on the wire is in `attacker`.

use std::time::Duration;

use clap::ValueEnum;
use serde::Serialize;

/// Names in the order of the issue that tells of them. Controls harm nobody but by taking the machine's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Attack {
    /// Control: a thread spins and asks nothing
    Spin,
    /// Control: `get`, at another gateway with other masters
    Elsewhere,
    /// Connections that list page after page, beside 300,000 locks
    List,
    /// The same with cursors that were made up
    ListForged,
    /// Heads of POST and PATCH that announce a body which never comes
    Bodies,
    /// New names with metadata, until masters with maxmemory 256mb are full
    FillMetadata,
    /// New names with a TTL of 10 ms; masters with 16mb, which fill within the run
    FillTtl,
    /// Releases of free names with made-up tokens, by a key that may only release; masters with 16mb
    FillRelease,
    /// Takes all waiting places, at 11 names of its own
    WaitPlaces,
    /// 8,000 waiters at as many names of its own
    WaitNames,
    /// One waiter with a TTL of 10 ms in each line in which the victim waits
    WaitTiny,
    /// Requests that are refused: a wrong key; without keys, a name that is none
    Refused,
    /// 16,000 connections with 12 KiB of a head that never ends
    Heads,
    /// 16,200 connections that say nothing
    Idle,
    /// Acquires and releases new names as fast as it is answered
    Acquire,
    /// Asks for a lock that is held as fast as it is answered
    Held,
    /// Asks who holds a lock as fast as it is answered
    Get,
}

/// How an attacker's connection goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Manner {
    /// No connections at all: it takes CPU time.
    Spin,
    /// A request after the other, each sent when the last is answered.
    Ask,
    /// Sends something incomplete, once, and stays until it is closed.
    Stay,
    /// A request that is answered late. Who is refused comes back later.
    Wait,
}

/// What an attack needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Needs {
    /// Its number in the issue.
    pub(super) issue: u8,
    pub(super) manner: Manner,
    pub(super) connections: u32,
    /// What the attacker's key may do, separated by commas.
    pub(super) verbs: &'static str,
    /// The limit on the memory of a master.
    pub(super) maxmemory: Option<&'static str>,
    /// Locks of others on the masters.
    pub(super) populated: u32,
    /// How long it works on the masters before the first measurement.
    pub(super) prelude: Duration,
}

impl Attack {
    pub(super) fn needs(self) -> Needs {
        let flood = |issue, verbs| Needs {
            issue,
            manner: Manner::Ask,
            connections: 64,
            verbs,
            maxmemory: None,
            populated: 0,
            prelude: Duration::ZERO,
        };
        let listing = Needs { connections: 48, populated: 300_000, ..flood(1, "list") };
        let fill = |verbs, maxmemory| Needs {
            maxmemory: Some(maxmemory),
            prelude: Duration::from_secs(10),
            ..flood(3, verbs)
        };
        let stay = |issue, connections| Needs { manner: Manner::Stay, connections, ..flood(issue, "acquire") };
        let wait = |issue, connections| Needs { manner: Manner::Wait, connections, ..flood(issue, "acquire") };
        match self {
            Self::Spin => Needs { manner: Manner::Spin, connections: 1, ..flood(0, "inspect") },
            Self::Elsewhere => flood(0, "inspect"),
            Self::List | Self::ListForged => listing,
            Self::Bodies => Needs { verbs: "acquire,extend", ..stay(2, 4200) },
            Self::FillMetadata => fill("acquire", "256mb"),
            Self::FillTtl => fill("acquire", "16mb"),
            Self::FillRelease => fill("release", "16mb"),
            Self::WaitPlaces => wait(4, 10_300),
            Self::WaitNames => wait(4, 8000),
            Self::WaitTiny => wait(5, LINES),
            Self::Refused => flood(7, "inspect"),
            Self::Heads => stay(7, 16_000),
            Self::Idle => stay(7, 16_200),
            Self::Acquire => flood(7, "acquire,release"),
            Self::Held => flood(7, "acquire"),
            Self::Get => flood(7, "inspect"),
        }
    }

    pub(super) fn name(self) -> String {
        self.to_possible_value().expect("none is skipped").get_name().to_owned()
    }

    /// Whether the victim waits in lines, where the attack is.
    pub(super) fn is_at_lines(self) -> bool {
        self == Self::WaitTiny
    }

    /// Whether it goes against a service that is not the victim's.
    pub(super) fn is_elsewhere(self) -> bool {
        self == Self::Elsewhere
    }
}

/// Locks for which the victim, and with it an attacker, stands in line.
pub(super) const LINES: u32 = 4;

pub(super) fn line(number: u32) -> String {
    format!("/locks/line-{}", number % LINES)
}
