//! Time and clocks. The true time of a history is tokio's paused clock: it stands still while any
//! task can run, and otherwise jumps to the next timer. Each party derives its own clock from it.
//!
//! The monotonic side of a clock runs at its own rate, within the drift factor. The wall side is
//! true time plus an offset, as if NTP disciplined it. A change of the offset is a jump. Locks on a
//! simulated master expire by the monotonic side. So a jump of a master's wall clock changes only
//! how the master judges tokens. During a slew, both sides run at another rate.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use redlock_core::clock::Clock;
use tokio::time::Instant;

/// What a wall clock without an offset shows when a history begins, in µs since 1970.
pub const EPOCH_MICROS: u64 = 1_763_725_165_000_000;

/// Limit of a monotonic clock's rate error, in millionths. A lease depends on three clocks
/// (gateway, master, client). So the sum of three such errors must stay below the drift factor of 1
/// %.
pub const MAX_RATE_PPM: u64 = 3_000;

/// Limit of a slewed master's clock, in millionths. With it the three errors make exactly 1 %, and
/// the constant 2 ms of the drift remain.
pub const MAX_SLEWED_PPM: u64 = 4_000;

/// The clock of one gateway, master or client.
pub struct SimClock {
    start: Instant,
    rate_ppm: i64,
    first_offset_micros: i64,
    offset_micros: AtomicI64,
    slew: Mutex<Slew>,
}

/// How far a clock has run ahead of its own rate.
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
    /// A clock that begins with the history.
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

    /// Moves the wall clock to this offset from true time.
    pub fn set_offset(&self, micros: i64) {
        self.offset_micros.store(micros, Ordering::Relaxed);
    }

    /// Restores the clock's first offset and ends a slew.
    pub fn mend(&self) {
        self.set_offset(self.first_offset_micros);
        self.slew(None);
    }

    /// From now on the clock runs `ppm` millionths faster than true time. With `None` it runs at
    /// its own rate again.
    pub fn slew(&self, ppm: Option<u64>) {
        let ppm = ppm.map_or(0, |ppm| ppm.saturating_add_signed(-self.rate_ppm));
        let mut slew = self.slew.lock().unwrap_or_else(PoisonError::into_inner);
        *slew = Slew { since: Instant::now(), ppm, before: slew.ahead() };
    }

    fn slewed(&self) -> Duration {
        self.slew.lock().unwrap_or_else(PoisonError::into_inner).ahead()
    }

    /// How far the current slew has put the wall clock ahead. When the slew ends, the wall clock
    /// goes back by this much.
    fn slewing(&self) -> Duration {
        let slew = self.slew.lock().unwrap_or_else(PoisonError::into_inner);
        slew.ahead() - slew.before
    }

    /// The true time that passes until this clock has advanced by `shown`.
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
