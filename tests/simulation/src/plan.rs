//! Decides what kind of history a seed gives: its sizes, the speed of its network, and the
//! frequency of its faults.
//!
//! A plan keeps the assumptions under which a correct core shows no violation. The wall clocks of
//! gateways agree within `max_clock_skew`. All clock rates stay within the drift factor. Masters
//! fail independently of each other. Clients do not rely on a lock past their deadline, though a
//! late write may still arrive; fencing tokens protect against such writes. Any number of masters
//! may lose their data at any time.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::node::SafetyRules;

use crate::chance::{Chance, Stream};
use crate::master::FIRST_SLOT;
use crate::network::Latency;
use crate::time::MAX_SLEWED_PPM;

/// The kind of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scenario {
    /// Every kind of fault.
    Storm,
    /// One lock that is always extended in time, while every master in turn restarts without its
    /// data. Each restart waits until the previously restarted master votes again.
    Rolling,
    /// The rolling scenario, while other clients try to get the lock.
    Contended,
    /// Many locks that are granted at any time and left alone for most of their TTL, while masters
    /// restart without their data. Each restart waits until all gateways see that the masters
    /// restarted before have caught up.
    Young,
    /// Many clients that wait for one or two locks, with few faults or none.
    Queue,
    /// An operator moves the masters to another configuration.
    Reconfigure,
    /// An operator raises `max_ttl` while masters lose their data.
    Raise,
    /// Names move to new processes that have read the files of the old ones. The old processes
    /// still run.
    Moved,
}

/// For each kind of fault, the mean time between two such faults in the whole cluster. `None` means
/// never.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    /// Masters are killed and restart, with or without their data.
    pub crash: Option<Duration>,
    /// FLUSHALL: a master loses its data in place.
    pub flush: Option<Duration>,
    /// The name of a master moves to a new process, while open connections still lead to the old
    /// one.
    pub name: Option<Duration>,
    /// A master is stopped for a while.
    pub stop: Option<Duration>,
    /// A master's wall clock jumps.
    pub master_clock: Option<Duration>,
    /// A master's clock runs fast for a while.
    pub slew: Option<Duration>,
    /// One connection between a gateway and a master breaks.
    pub cut: Option<Duration>,
    /// Messages on a path wait for a while.
    pub dark: Option<Duration>,
    /// A gateway dies and starts again.
    pub death: Option<Duration>,
    /// A gateway's wall clock jumps, within `max_clock_skew`.
    pub gateway_clock: Option<Duration>,
    /// A master is a replica for a while.
    pub replica: Option<Duration>,
    /// A master runs out of memory, between two writes of an operation or before its first write.
    pub memory: Option<Duration>,
    /// A gateway stops for a while: no message leaves or reaches it.
    pub gateway_stop: Option<Duration>,
    /// Everything stands still for a while, but the clocks go on.
    pub freeze: Option<Duration>,
}

/// All decisions before a history begins.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The source of all random numbers.
    pub seed: u64,
    /// The kind of history.
    pub scenario: Scenario,
    /// The core's rules, on or off.
    pub rules: SafetyRules,
    pub masters: u8,
    pub gateways: u8,
    pub clients: u8,
    /// Number of clients of another Redlock library on the same masters.
    pub foreign_clients: u8,
    /// Whether connections break while the cluster is being started.
    pub bootstrap_cuts: bool,
    /// Number of locks that clients compete for.
    pub names: u8,
    /// Percentage of requests that name an owner. A failed proposal of such a request may leave its
    /// watermark on a node that granted it, and that watermark keeps a repair out. The core's
    /// documentation describes this limit.
    pub keyed_percent: u64,
    /// How many copies of a request with an owner may follow before it is answered. With 1, only
    /// waiting requests have a copy.
    pub copies: u64,
    /// Percentage of requests that ask for two locks as a set.
    pub set_percent: u64,
    /// Percentage of requests that ask for slots of the lock with slots.
    pub slots_percent: u64,
    /// Percentage of requests that are answered before they are granted.
    pub deferred_percent: u64,
    /// A fault for a test: at the end of its window, a gateway releases a deferred grant by its token,
    /// whether the client has claimed it or not.
    pub releases_unclaimed: bool,
    /// Percentage of requests after which the lock is kept for a least time.
    pub hold_percent: u64,
    /// Percentage of requests that wait in the queue.
    pub waiting_percent: u64,
    /// Percentage of requests whose TTL is too short for the way to the masters.
    pub hasty_percent: u64,
    /// Percentage of hints that are lost.
    pub hint_loss_percent: u64,
    /// Time from the beginning until all faults are mended.
    pub length: Duration,
    /// The longest TTL.
    pub max_ttl: Duration,
    /// The clock skew of the configuration (`max_clock_skew`).
    pub skew: Duration,
    /// The mistaken `max_clock_skew` of the last gateway. The gateway's clock may be wrong by that
    /// much.
    pub odd_skew: Option<Duration>,
    /// Whether markers name `max_clock_skew`.
    pub marker_names_skew: bool,
    /// How long a watermark outlives its lock or release, if not for the core's own time.
    pub fence_grace: Option<Duration>,
    /// How long a round waits for the other masters, once a majority has answered.
    pub node_timeout: Duration,
    /// A master that answers more slowly than this counts as distant. Gateways send it several
    /// calls at once.
    pub overlap_above: Duration,
    /// Maximum number of operations that wait for one master.
    pub queue: usize,
    pub latency: Latency,
    /// How much too fast a master's clock runs during a slew, in millionths.
    pub slewed_ppm: u64,
    /// How often each kind of fault happens.
    pub faults: Faults,
}

/// The longest TTL in most histories. It is short, so a quarantine takes only seconds.
const MAX_TTL: Duration = Duration::from_secs(3);
/// The `max_ttl` before it is raised.
pub const SHORT_MAX_TTL: Duration = MAX_TTL;
/// The longest TTL in the other histories. A quarantine would take most of the history, unless the
/// master recovers its locks.
const LONG_MAX_TTL: Duration = Duration::from_secs(40);

/// Number of lock names for each client in a history of young locks.
pub const YOUNG_NAMES: u8 = 50;
const _: () = assert!(4 * YOUNG_NAMES <= FIRST_SLOT, "a name would be a slot");

/// Milliseconds that no answer takes, so the limit that this sets is never reached.
const NEVER: u64 = 1_000_000;

const HINT_LOSS: [u64; 4] = [0, 0, 10, 100];

impl Plan {
    /// The storm of a seed.
    pub fn storm(seed: u64) -> Self {
        let mut chance = Chance::new(seed, Stream::Plan);
        let gateways = chance.between(2, 3) as u8;
        let mut fault = |likely: u64, fast: u64, slow: u64| {
            chance.percent(likely).then(|| chance.millis(fast, slow))
        };
        let faults = Faults {
            crash: fault(70, 4_000, 15_000),
            flush: fault(45, 8_000, 25_000),
            stop: fault(50, 3_000, 12_000),
            master_clock: fault(45, 3_000, 12_000),
            cut: fault(75, 300, 4_000),
            dark: fault(40, 2_000, 9_000),
            death: fault(50, 5_000, 20_000),
            gateway_clock: fault(45, 3_000, 12_000),
            replica: fault(30, 6_000, 25_000),
            memory: fault(30, 4_000, 15_000),
            gateway_stop: fault(30, 4_000, 15_000),
            freeze: fault(30, 6_000, 25_000),
            name: fault(50, 4_000, 15_000),
            slew: fault(25, 8_000, 25_000),
        };
        // A client of another library cannot know that a master has lost its data. So in these
        // histories no master does.
        let foreign_clients = if chance.percent(15) { 2 } else { 0 };
        let loses_data = foreign_clients == 0;
        let faults = Faults {
            crash: faults.crash.filter(|_| loses_data),
            flush: faults.flush.filter(|_| loses_data),
            name: faults.name.filter(|_| loses_data),
            replica: faults.replica.filter(|_| loses_data),
            ..faults
        };
        Self {
            seed,
            scenario: Scenario::Storm,
            rules: SafetyRules::ALL,
            masters: chance.pick(&[5, 5, 5, 5, 3, 3, 4, 2, 1]),
            gateways,
            clients: gateways * chance.between(2, 4) as u8,
            foreign_clients,
            bootstrap_cuts: chance.percent(30),
            names: chance.between(2, 4) as u8,
            keyed_percent: 35,
            copies: 1,
            set_percent: 25,
            slots_percent: 20,
            deferred_percent: 0,
            releases_unclaimed: false,
            hold_percent: 15,
            length: Duration::from_secs(60),
            max_ttl: chance.pick(&[MAX_TTL, MAX_TTL, LONG_MAX_TTL]),
            skew: chance.pick(&[500, 700, 1_000]).millis(),
            odd_skew: None,
            marker_names_skew: true,
            fence_grace: None,
            node_timeout: Duration::from_millis(50),
            overlap_above: chance.pick(&[NEVER, NEVER, 0, 8]).millis(),
            queue: chance.pick(&[8192, 8192, 8192, 4]) as usize,
            latency: Latency {
                base_ms: 1,
                jitter_ms: chance.pick(&[2, 5, 10]),
                spike_percent: chance.pick(&[0, 1, 3]),
                spike_ms: chance.pick(&[30, 200, 900]),
            },
            slewed_ppm: MAX_SLEWED_PPM,
            faults,
            waiting_percent: 45,
            hasty_percent: 0,
            hint_loss_percent: chance.pick(&HINT_LOSS),
        }
    }

    /// The storm of a seed, but masters' clocks run faster than promised, as fast as chrony may
    /// slew by default. A gateway needs a probe or two to notice. Until then, locks may end early
    /// and be granted twice.
    pub fn fast_clocks(seed: u64) -> Self {
        let storm = Self::storm(seed);
        let faults = Faults { slew: Some(Duration::from_secs(5)), ..storm.faults };
        Self { slewed_ppm: 83_000, faults, ..storm }
    }

    /// The storm of a seed, but many requests are answered before they are granted. A third of the
    /// histories have no faults.
    pub fn deferred(seed: u64) -> Self {
        let storm = Self::storm(seed);
        let faults = if seed.is_multiple_of(3) { Faults::default() } else { storm.faults };
        Self { deferred_percent: 50, foreign_clients: 0, faults, ..storm }
    }

    /// The storm of a seed, but most requests are repeated up to three times, at any gateway, before
    /// they are answered. A third of the histories have no faults.
    pub fn copies(seed: u64) -> Self {
        let storm = Self::storm(seed);
        let faults = if seed.is_multiple_of(3) { Faults::default() } else { storm.faults };
        Self { copies: 3, keyed_percent: 80, waiting_percent: 60, names: 2, faults, ..storm }
    }

    /// The storm of a seed, but the last gateway has a clock skew of its own.
    pub fn skews(seed: u64) -> Self {
        let storm = Self::storm(seed);
        Self { odd_skew: Some(storm.skew * 24), ..storm }
    }

    /// Names move to new processes that have read the files of the old ones. The only other fault
    /// is one broken connection for each move.
    pub fn moved(seed: u64) -> Self {
        let storm = Self::storm(seed);
        let mut chance = Chance::new(seed, Stream::Plan);
        Self {
            scenario: Scenario::Moved,
            masters: chance.pick(&[5, 3, 3, 1]),
            foreign_clients: 0,
            bootstrap_cuts: false,
            names: chance.pick(&[1, 2]),
            latency: Latency {
                base_ms: 1,
                jitter_ms: chance.between(1, 6),
                spike_percent: 0,
                spike_ms: 0,
            },
            faults: Faults::default(),
            ..storm
        }
    }

    /// How far a gateway's clock may be from true time, in microseconds: half of `max_clock_skew`.
    /// The gateway with its own clock skew may use all of it, because the clocks of the others are
    /// nearly right.
    pub fn clock_limit(&self) -> u64 {
        let skew = self.skew.as_micros() as u64;
        if self.odd_skew == Some(self.skew) { skew } else { skew / 2 }
    }

    /// The plan as one gateway sees it. Only the last gateway may have a clock skew of its own.
    pub fn for_gateway(self: &Arc<Self>, index: u8) -> Arc<Self> {
        match self.odd_skew.filter(|_| index + 1 == self.gateways) {
            Some(skew) => Arc::new(Self { skew, ..self.as_ref().clone() }),
            None => self.clone(),
        }
    }

    /// The rolling restarts of a seed. With `contended`, other clients try to get the lock, and half of
    /// the seeds have TTLs so long that only recovery ends a quarantine soon.
    pub fn rolling(seed: u64, contended: bool) -> Self {
        let mut chance = Chance::new(seed, Stream::Plan);
        let long = contended && seed.is_multiple_of(2);
        Self {
            scenario: if contended { Scenario::Contended } else { Scenario::Rolling },
            masters: chance.pick(&[5, 5, 3]),
            gateways: 2,
            clients: if contended { 3 } else { 1 },
            foreign_clients: 0,
            bootstrap_cuts: false,
            names: 1,
            max_ttl: if long { LONG_MAX_TTL } else { MAX_TTL },
            length: Duration::from_secs(if long { 90 } else { 60 }),
            keyed_percent: 0,
            set_percent: 0,
            slots_percent: 0,
            hold_percent: 0,
            latency: Latency {
                base_ms: 1,
                jitter_ms: chance.between(1, 6),
                spike_percent: 0,
                spike_ms: 0,
            },
            faults: Faults::default(),
            ..Self::storm(seed)
        }
    }

    /// The rolling restarts of a seed, with locks that are left alone for most of their TTL. If
    /// there are five masters, two of them restart at a time.
    pub fn young(seed: u64) -> Self {
        let mut chance = Chance::new(seed, Stream::Plan);
        Self {
            scenario: Scenario::Young,
            masters: chance.pick(&[5, 3, 3]),
            clients: 4,
            names: 4 * YOUNG_NAMES,
            max_ttl: LONG_MAX_TTL,
            length: Duration::from_secs(90),
            ..Self::rolling(seed, false)
        }
    }

    /// The queue of a seed. Half of all histories have no faults.
    pub fn queue(seed: u64) -> Self {
        let mut chance = Chance::new(seed, Stream::Plan);
        let gateways = chance.between(2, 3) as u8;
        let harm = chance.percent(50);
        let mut fault = |likely: u64, fast: u64, slow: u64| {
            let gap = chance.millis(fast, slow);
            (chance.percent(likely) && harm).then_some(gap)
        };
        let faults = Faults {
            cut: fault(80, 1_500, 8_000),
            death: fault(50, 4_000, 15_000),
            dark: fault(30, 4_000, 12_000),
            crash: fault(30, 8_000, 20_000),
            ..Faults::default()
        };
        Self {
            scenario: Scenario::Queue,
            masters: chance.pick(&[5, 5, 3]),
            gateways,
            clients: chance.between(8, 20) as u8,
            foreign_clients: 0,
            bootstrap_cuts: false,
            names: chance.pick(&[1, 1, 2]),
            max_ttl: MAX_TTL,
            keyed_percent: 10,
            set_percent: 10,
            slots_percent: 0,
            hold_percent: 0,
            waiting_percent: 95,
            hasty_percent: chance.pick(&[0, 0, 5, 30]),
            length: Duration::from_secs(20),
            latency: Latency {
                base_ms: 1,
                jitter_ms: chance.between(1, 5),
                spike_percent: 0,
                spike_ms: 0,
            },
            faults,
            ..Self::storm(seed)
        }
    }

    /// The raise of `max_ttl` of a seed. `max_ttl` is the larger one.
    pub fn raise(seed: u64) -> Self {
        let storm = Self::storm(seed);
        let mut chance = Chance::new(seed, Stream::Plan);
        let Faults { cut, gateway_clock, .. } = storm.faults;
        Self {
            scenario: Scenario::Raise,
            masters: chance.pick(&[3, 3, 3, 5]),
            foreign_clients: 0,
            bootstrap_cuts: false,
            gateways: 4,
            clients: 8,
            names: chance.between(4, 8) as u8,
            max_ttl: LONG_MAX_TTL,
            length: Duration::from_secs(75),
            latency: Latency {
                base_ms: 1,
                jitter_ms: chance.between(1, 6),
                spike_percent: 0,
                spike_ms: 0,
            },
            faults: Faults { cut, gateway_clock, ..Faults::default() },
            ..storm
        }
    }

    /// The change of configuration of a seed.
    pub fn reconfigure(seed: u64) -> Self {
        let storm = Self::storm(seed);
        let mut chance = Chance::new(seed, Stream::Plan);
        let Faults { stop, master_clock, cut, death, gateway_clock, .. } = storm.faults;
        Self {
            scenario: Scenario::Reconfigure,
            masters: chance.pick(&[3, 4, 6, 7]),
            foreign_clients: 0,
            gateways: 4,
            clients: 8,
            max_ttl: MAX_TTL,
            length: Duration::from_secs(35),
            faults: Faults { stop, master_clock, cut, death, gateway_clock, ..Faults::default() },
            ..storm
        }
    }
}

trait Millis {
    fn millis(self) -> Duration;
}

impl Millis for u64 {
    fn millis(self) -> Duration {
        Duration::from_millis(self)
    }
}
