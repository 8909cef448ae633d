//! The clock of deadlines.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A moment of a clock that nobody sets, and that goes on while the machine sleeps. So a lock is
/// known to be lost after a suspended night. [`std::time::Instant`] stands still then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(Duration);

/// The longest sleep. Timers stand still while the machine sleeps.
const LONGEST_SLEEP: Duration = Duration::from_millis(500);

impl Moment {
    pub fn now() -> Self {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let clock = ClockId::Boottime;
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let clock = ClockId::Monotonic;
        let now = clock_gettime(clock);
        Self(Duration::new(now.tv_sec as u64, now.tv_nsec as u32))
    }

    /// Time until this moment; zero when it has passed.
    pub fn left(self) -> Duration {
        self.0.saturating_sub(Self::now().0)
    }

    pub fn has_passed(self) -> bool {
        self.left().is_zero()
    }

    /// Time since `earlier`; zero if that is later.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Time since the machine was started.
    pub fn since_boot(self) -> Duration {
        self.0
    }

    /// The moment this long after the machine was started.
    pub fn after_boot(since: Duration) -> Self {
        Self(since)
    }

    /// Waits until this moment, also if the machine sleeps meanwhile.
    pub async fn reached(self) {
        while !self.has_passed() {
            tokio::time::sleep(self.left().min(LONGEST_SLEEP)).await;
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
