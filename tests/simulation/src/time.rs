//! Time. The true time of a history is tokio's paused clock: it stands still while anything can run, and jumps to the next
//! timer when nothing can. Everybody in the history has a clock of their own, derived from it.
//!
//! A clock's monotonic side runs at a rate of its own, within what the drift factor allows for. Its wall side is true time
//! plus an offset, as if it were disciplined by NTP; the offset can be moved, which is a jump. Locks on a simulated master
//! expire by its monotonic side, so a jump of a master's wall clock changes what it thinks of tokens and nothing else. A clock
//! that is slewed runs at another rate for a while, on both sides.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use redlock_core::clock::Clock;
use tokio::time::Instant;

/// What every wall clock without an offset shows when a history begins.
pub const EPOCH_MICROS: u64 = 1_763_725_165_000_000;

/// The most that a monotonic clock is fast or slow, in millionths. Three of them take part in a lease (gateway, master,
/// client), so their sum must stay below the drift factor of 1 %.
pub const MAX_RATE_PPM: u64 = 3_000;

/// The most of a master's clock that is slewed. The sum of the three is 1 % then, and 2 ms are left.
pub const MAX_SLEWED_PPM: u64 = 4_000;

/// The clock of one gateway, master or client.
pub struct SimClock {
    start: Instant,
    rate_ppm: i64,
    first_offset_micros: i64,
    offset_micros: AtomicI64,
    slew: Mutex<Slew>,
}

/// By how much a clock has run ahead of its own rate.
struct Slew {
    since: Instant,
    ppm: u64,
    before: Duration,
}

impl Slew {
    fn ahead(&self) -> Duration {
        self.before + self.since.elapsed() * self.ppm as u32 / 1_000_000
    }
}

impl SimClock {
    /// A clock that began with the history.
    pub fn new(start: Instant, rate_ppm: i64, offset_micros: i64) -> Self {
        let slew = Mutex::new(Slew { since: start, ppm: 0, before: Duration::ZERO });
        let first_offset_micros = offset_micros;
        Self {
            start,
            rate_ppm,
            first_offset_micros,
            offset_micros: AtomicI64::new(offset_micros),
            slew,
        }
    }

    /// Moves the wall clock to another distance from true time.
    pub fn set_offset(&self, micros: i64) {
        self.offset_micros.store(micros, Ordering::Relaxed);
    }

    /// Puts it back to where it was when the history began, as far as it has been moved.
    pub fn mend(&self) {
        self.set_offset(self.first_offset_micros);
        self.slew(None);
    }

    /// From now on it runs faster than true time by so many millionths; at its own rate with `None`.
    pub fn slew(&self, ppm: Option<u64>) {
        let ppm = ppm.map_or(0, |ppm| ppm.saturating_add_signed(-self.rate_ppm));
        let mut slew = self.slew.lock().unwrap_or_else(PoisonError::into_inner);
        *slew = Slew { since: Instant::now(), ppm, before: slew.ahead() };
    }

    fn slewed(&self) -> Duration {
        self.slew.lock().unwrap_or_else(PoisonError::into_inner).ahead()
    }

    /// What the wall clock shows of it: it is put back when the slew ends.
    fn slewing(&self) -> Duration {
        let slew = self.slew.lock().unwrap_or_else(PoisonError::into_inner);
        slew.ahead() - slew.before
    }

    /// How long it truly takes until this clock has advanced by `shown`.
    pub fn true_duration(&self, shown: Duration) -> Duration {
        let nanos = shown.as_nanos() * 1_000_000 / (1_000_000 + self.rate_ppm) as u128;
        Duration::from_nanos(nanos as u64)
    }
}

impl Clock for SimClock {
    fn monotonic(&self) -> Duration {
        let nanos =
            self.start.elapsed().as_nanos() * (1_000_000 + self.rate_ppm) as u128 / 1_000_000;
        Duration::from_nanos(nanos as u64) + self.slewed()
    }

    fn wall_micros(&self) -> u64 {
        (EPOCH_MICROS + (self.start.elapsed() + self.slewing()).as_micros() as u64)
            .saturating_add_signed(self.offset_micros.load(Ordering::Relaxed))
    }
}
