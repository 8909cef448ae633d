//! A lock that is released on drop, for programs that do the work under the lock themselves.

use std::time::Duration;

use crate::error::LockError;
use crate::model::types::{FencingToken, LockName, Ttl};
use crate::model::validity::Lease;
use crate::operations::acquire::AcquireOptions;
use crate::redlock::Redlock;

/// An acquired lock, from [`Redlock::lock`]. The guard does not extend the lock by itself, and
/// nothing stops the program when the validity ends. So check [`LockGuard::validity`] during the
/// work, and send [`LockGuard::fencing_token`] to the resource that the lock protects.
///
/// Dropping the guard releases the lock in the background. A process about to end must await
/// [`LockGuard::release`], or [`Redlock::drained`] after the drop; otherwise the lock stays until
/// its TTL ends.
#[must_use = "a guard that is dropped releases its lock"]
pub struct LockGuard {
    locks: Redlock,
    name: LockName,
    lease: Lease,
    is_released: bool,
}

impl Redlock {
    /// Gets the lock as a guard, and waits up to `patience` as [`Redlock::acquire_within`] does. A
    /// `patience` of zero makes one attempt.
    ///
    /// # Errors
    /// As for [`Redlock::acquire_within`].
    pub async fn lock(
        &self,
        name: &LockName,
        ttl: Ttl,
        options: AcquireOptions,
        patience: Duration,
    ) -> Result<LockGuard, LockError> {
        let lease = self.acquire_within(name, ttl, options, patience, || Ok(())).await?;
        Ok(LockGuard { locks: self.clone(), name: name.clone(), lease, is_released: false })
    }
}

impl LockGuard {
    /// The name of the lock.
    pub fn name(&self) -> &LockName {
        &self.name
    }

    /// The fencing token: larger than that of every earlier grant of this lock, and unchanged by an
    /// extension. The fencing token is not a secret.
    pub fn fencing_token(&self) -> FencingToken {
        self.lease.token.fencing()
    }

    /// How long the lock may still be trusted. `None`: stop work.
    pub fn validity(&self) -> Option<Duration> {
        self.locks.validity(&self.lease)
    }

    /// Extends the lock, see [`Redlock::extend`]. A good interval between extensions is a third of
    /// the TTL.
    ///
    /// # Errors
    /// [`LockError::Lost`] and [`LockError::NotHolder`]: the lock is gone, so stop work. After any
    /// other error, the deadline from before this call still holds.
    pub async fn extend(&mut self, ttl: Ttl) -> Result<(), LockError> {
        self.lease = self.locks.extend(&self.name, &self.lease.token, ttl).await?;
        Ok(())
    }

    /// Releases the lock, see [`Redlock::release`]. If the future is dropped, the release continues
    /// in the background.
    ///
    /// # Errors
    /// [`LockError::Lost`] and [`LockError::NotHolder`]: the lock was already gone before the
    /// release. [`LockError::Unknown`]: nodes that did not answer are asked again in the
    /// background.
    pub async fn release(mut self) -> Result<(), LockError> {
        // The release is sent before the first await, so `Drop` need not send it if this future is
        // dropped.
        self.is_released = true;
        self.locks.release(&self.name, &self.lease.token).await
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        if !self.is_released {
            self.locks.release_in_background(&self.name, &self.lease);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::LockError::{Held, Lost};
    use crate::round::votes::LockState;

    const AT_ONCE: Duration = Duration::ZERO;

    fn locks() -> (Redlock, LockName, Ttl) {
        let locks = Redlock::builder().embedded(3).connect().expect("settings");
        (locks, "a".parse().expect("a name"), Ttl::from_millis(60_000).expect("a TTL"))
    }

    async fn lock(
        locks: &Redlock,
        name: &LockName,
        ttl: Ttl,
        patience: Duration,
    ) -> Result<LockGuard, LockError> {
        locks.lock(name, ttl, AcquireOptions::default(), patience).await
    }

    #[tokio::test]
    async fn a_dropped_guard_hands_its_lock_to_the_next_waiter() {
        let (locks, name, ttl) = locks();
        let first = lock(&locks, &name, ttl, AT_ONCE).await.expect("free");
        assert!(matches!(lock(&locks, &name, ttl, AT_ONCE).await, Err(Held(_))));
        let token = first.fencing_token();
        let waits = lock(&locks, &name, ttl, Duration::from_secs(600));
        let (next, ()) = tokio::join!(waits, async { drop(first) });
        assert!(next.expect("released").fencing_token() > token);
        locks.drained().await;
        assert_eq!(locks.inspect(&name).await.state, LockState::Free);
    }

    #[tokio::test]
    async fn a_guard_extends_releases_and_notices_a_lost_lock() {
        let (locks, name, ttl) = locks();
        let short = Ttl::from_millis(30_000).expect("a TTL");
        let mut guard = lock(&locks, &name, short, AT_ONCE).await.expect("free");
        let token = guard.fencing_token();
        guard.extend(ttl).await.expect("held");
        assert!(guard.validity() > Some(short.duration()));
        assert_eq!((guard.fencing_token(), guard.name()), (token, &name));
        guard.release().await.expect("held");

        let mut gone = lock(&locks, &name, ttl, AT_ONCE).await.expect("free again");
        locks.force_release(&name, |_| ()).await.expect("held");
        assert_eq!(gone.extend(ttl).await, Err(Lost));
        let next = lock(&locks, &name, ttl, AT_ONCE).await.expect("free");
        drop(gone);
        locks.drained().await;
        assert!(
            matches!(locks.inspect(&name).await.state, LockState::Held(_)),
            "an old guard releases no newer lock"
        );
        assert!(next.validity().is_some());
    }
}
