//! The clock of deadlines.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A moment of a clock that nobody sets and that goes on while the machine sleeps: after a suspended night a lock is known to
/// be lost. [`std::time::Instant`] stands still then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(Duration);

/// Timers stand still while the machine sleeps; so a long pause is slept in pieces of this length.
const PIECE: Duration = Duration::from_millis(500);

impl Moment {
    pub fn now() -> Self {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let clock = ClockId::Boottime;
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let clock = ClockId::Monotonic;
        let now = clock_gettime(clock);
        Self(Duration::new(now.tv_sec as u64, now.tv_nsec as u32))
    }

    /// How long it is until then; nothing when it has passed.
    pub fn left(self) -> Duration {
        self.0.saturating_sub(Self::now().0)
    }

    pub fn has_passed(self) -> bool {
        self.left().is_zero()
    }

    /// How long after the other one it is.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Since the machine was started.
    pub fn since_boot(self) -> Duration {
        self.0
    }

    /// The moment so long after the machine was started.
    pub fn after_boot(since: Duration) -> Self {
        Self(since)
    }

    /// Resolves when it has come, also when the machine has slept meanwhile.
    pub async fn reached(self) {
        while !self.has_passed() {
            tokio::time::sleep(self.left().min(PIECE)).await;
        }
    }
}

impl std::ops::Add<Duration> for Moment {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }
}

impl std::ops::Sub<Duration> for Moment {
    type Output = Self;

    fn sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(duration))
    }
}
