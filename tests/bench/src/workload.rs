//! The workloads. Each names its contenders, its number of connections, the condition of its
//! masters, and the names that a connection locks.

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::PossibleValue;

use crate::contenders::Contender;
use crate::load::Names;
use crate::masters::Condition;

const ALL: &[Contender] = &[
    Contender::Noop,
    Contender::Floor,
    Contender::FredPlain,
    Contender::FredFenced,
    Contender::Rslock,
    Contender::GatewayLua,
    Contender::Gateway,
    Contender::GatewayKeys,
    Contender::GatewayTls,
];
const MAIN: &[Contender] =
    &[Contender::Noop, Contender::Floor, Contender::FredFenced, Contender::Gateway];
const ON_REDIS: &[Contender] = &[Contender::Floor, Contender::FredFenced, Contender::Gateway];
const WITH_LIBRARY: &[Contender] =
    &[Contender::Floor, Contender::FredFenced, Contender::Rslock, Contender::Gateway];
const GATEWAY: &[Contender] = &[Contender::Gateway];

const CONNECTIONS: u32 = 64;

/// The workloads, in the order of a run and of its tables. `--help` and the tables show these
/// texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Workload {
    /// 64 connections acquire and release locks of random names
    #[value(name = "uncontended")]
    Uncontended,
    /// 1 connection acquires and releases locks of random names
    #[value(name = "concurrency-1")]
    Concurrency1,
    /// 8 connections acquire and release locks of random names
    #[value(name = "concurrency-8")]
    Concurrency8,
    /// 256 connections acquire and release locks of random names
    #[value(name = "concurrency-256")]
    Concurrency256,
    /// Uncontended, with one of five masters stopped by SIGSTOP
    #[value(name = "stopped")]
    Stopped,
    /// Uncontended, with one of five masters 50 ms late
    #[value(name = "late")]
    Late,
    /// 1 connection, and a network between the contender and the masters with a round trip of 1 ms
    #[value(name = "network-1ms-idle")]
    Network1msIdle,
    /// 64 connections on the network of 1 ms
    #[value(name = "network-1ms")]
    Network1ms,
    /// 64 connections on a network of 10 ms
    #[value(name = "network-10ms")]
    Network10ms,
    /// 64 connections share 1,000 names, each walking through its own share; all had been used
    /// before
    #[value(name = "names-1k")]
    Names1k,
    /// 64 connections share 10,000 names in the same way
    #[value(name = "names-10k")]
    Names10k,
    /// 64 connections share 100,000 names in the same way
    #[value(name = "names-100k")]
    Names100k,
    /// 64 connections share 1,000,000 names in the same way
    #[value(name = "names-1m")]
    Names1m,
    /// Uncontended, while 1,000 other locks are held
    #[value(name = "held-1k")]
    Held1k,
    /// Uncontended, while 100,000 other locks are held
    #[value(name = "held-100k")]
    Held100k,
    /// 64 workers want one lock, waiting at one and at two gateways, or polling at one
    #[value(name = "contended")]
    Contended,
    /// 64,000 locks are held: 64 connections extend one with each request, 16 extend 100, and 4
    /// extend 1,000
    #[value(name = "renewals")]
    Renewals,
    /// As `renewals`, with 8,000 locks. More of the masters' data is then in the processors' caches
    #[value(name = "renewals-8k")]
    Renewals8k,
    /// 30,000, 100,000 and 300,000 locks are held, and each is extended once in 10 s; only 30,000 in
    /// a quick run
    #[value(name = "held-renewals")]
    HeldRenewals,
    /// 10,000 requests wait for 1,000 locks at one gateway, 10 each; 2,000 for 200 in a quick run
    #[value(name = "waiters")]
    Waiters,
    /// 10,000 streams watch 100 locks, while these or other locks change 1,000 times a second; 2,000
    /// streams in a quick run
    #[value(name = "watchers")]
    Watchers,
    /// 1,000 streams keep their locks until a majority of the masters stops, 200 in a quick run
    #[value(name = "held-streams")]
    HeldStreams,
}

/// How a workload is measured.
pub(crate) enum WorkloadKind {
    Load(Spec),
    /// A workload that the module of the same name measures.
    Contended,
    /// With this many locks.
    Renewals(u64),
    HeldRenewals,
    Waiters,
    Watchers,
    HeldStreams,
}

/// Contenders that take turns, all under the same load.
#[derive(Clone, Copy)]
pub(crate) struct Spec {
    pub(crate) lineup: &'static [Contender],
    pub(crate) connections: u32,
    pub(crate) names: Names,
    pub(crate) condition: Condition,
    /// Number of other locks that are held during the whole measurement.
    pub(crate) held: u32,
}

impl Spec {
    /// Whether the preparation takes too long to repeat it in every turn.
    pub(crate) fn takes_long_to_prepare(&self) -> bool {
        self.held > 0 || matches!(self.names, Names::Walk(_))
    }
}

impl Workload {
    pub(crate) fn kind(self) -> WorkloadKind {
        let plain = Spec {
            lineup: MAIN,
            connections: CONNECTIONS,
            names: Names::Random,
            condition: Condition::Healthy,
            held: 0,
        };
        let connected = |connections| Spec { connections, ..plain };
        let among = |lineup, condition| Spec { lineup, condition, ..plain };
        let network = |round_trip_ms, connections| Spec {
            connections,
            ..among(ON_REDIS, Condition::Network(Duration::from_millis(round_trip_ms)))
        };
        let names = |names| Spec { names: Names::Walk(names), lineup: GATEWAY, ..plain };
        let held = |held| Spec { held, lineup: GATEWAY, ..plain };
        WorkloadKind::Load(match self {
            Self::Uncontended => Spec { lineup: ALL, ..plain },
            Self::Concurrency1 => connected(1),
            Self::Concurrency8 => connected(8),
            Self::Concurrency256 => connected(256),
            Self::Stopped => among(WITH_LIBRARY, Condition::Stopped),
            Self::Late => among(WITH_LIBRARY, Condition::Late(Duration::from_millis(50))),
            Self::Network1msIdle => network(1, 1),
            Self::Network1ms => network(1, CONNECTIONS),
            Self::Network10ms => network(10, CONNECTIONS),
            Self::Names1k => names(1_000),
            Self::Names10k => names(10_000),
            Self::Names100k => names(100_000),
            Self::Names1m => names(1_000_000),
            Self::Held1k => held(1_000),
            Self::Held100k => held(100_000),
            Self::Contended => return WorkloadKind::Contended,
            Self::Renewals => return WorkloadKind::Renewals(64_000),
            Self::Renewals8k => return WorkloadKind::Renewals(8_000),
            Self::HeldRenewals => return WorkloadKind::HeldRenewals,
            Self::Waiters => return WorkloadKind::Waiters,
            Self::Watchers => return WorkloadKind::Watchers,
            Self::HeldStreams => return WorkloadKind::HeldStreams,
        })
    }

    /// Whether the workload runs if the user names none. A quick run leaves out workloads with a
    /// long preparation.
    pub(crate) fn is_usual(self, quick: bool) -> bool {
        !(quick && matches!(self, Self::Names100k | Self::Names1m | Self::Held100k))
    }

    /// Whether one of the masters does not do its work.
    pub(crate) fn breaks_masters(self) -> bool {
        matches!(self, Self::Stopped | Self::Late)
    }

    /// The workload to compare with, which has everything but the difficulty. Each turn is paired
    /// with a turn of this twin, because a machine's speed changes within minutes.
    pub(crate) fn twin(self) -> Option<(Self, Spec)> {
        let twin = match self {
            Self::Stopped | Self::Late => Self::Uncontended,
            Self::Names10k | Self::Names100k | Self::Names1m => Self::Names1k,
            Self::Held100k => Self::Held1k,
            _ => return None,
        };
        match twin.kind() {
            WorkloadKind::Load(spec) => Some((twin, spec)),
            _ => None,
        }
    }

    pub(crate) fn description(self) -> String {
        let value = self.value();
        value.get_help().map(|help| format!("{help}.")).unwrap_or_default()
    }

    fn value(self) -> PossibleValue {
        self.to_possible_value().expect("no workload is hidden")
    }
}

impl Display for Workload {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.pad(self.value().get_name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workloads_have_descriptions_and_fair_twins() {
        for &workload in Workload::value_variants() {
            assert!(workload.description().len() > 10, "{workload}");
            if let WorkloadKind::Load(spec) = workload.kind() {
                assert!(spec.lineup.contains(&Contender::Gateway), "{workload}");
                if let Some((twin, easy)) = workload.twin() {
                    assert!(
                        twin < workload && spec.lineup.iter().all(|who| easy.lineup.contains(who)),
                        "{workload}"
                    );
                    assert_eq!(
                        (easy.connections, easy.condition),
                        (spec.connections, Condition::Healthy)
                    );
                }
            }
        }
    }
}
