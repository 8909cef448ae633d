//! The only loop around attempts. A [`RetrySchedule`] decides whether another attempt follows, and
//! when.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use super::attempt::{AcquireParams, Attempt, AttemptError};
use super::backoff::Backoff;
use crate::error::LockError;
use crate::model::retry::RetryPolicy;
use crate::model::validity::Lease;
use crate::shared::Shared;

/// The limit on attempts after the first, if contenders split the votes.
pub(super) const MAX_SPLIT_TRIES: u32 = 3;
/// A pause after split votes is computed as if a round took at least this long.
const SHORTEST_ROUND: Duration = Duration::from_millis(2);

/// Decides when attempts are made.
pub(super) trait RetrySchedule: Send {
    /// Waits until the next attempt is due. Returns the attempt, and the time at which it is cut
    /// off, if any.
    fn next(
        &mut self,
    ) -> impl Future<Output = Result<(Attempt, Option<Instant>), LockError>> + Send;

    /// Handles a failed attempt. Another one follows unless this returns an error.
    fn failed(
        &mut self,
        failed: AttemptError,
        round: Duration,
        now: Instant,
    ) -> Result<(), LockError>;

    /// The last attempt was cut off. Returns the error of the request.
    fn cut_off(&mut self, _now: Instant) -> LockError {
        // A schedule that keeps no details of refusals reports the lock as held.
        LockError::Held(Default::default())
    }

    /// Handles an attempt that got the lock.
    fn granted(self, lease: &mut Lease, round: Duration, now: Instant);
}

pub(super) async fn until_granted(mut schedule: impl RetrySchedule) -> Result<Lease, LockError> {
    let mut rounds = 0;
    loop {
        let (mut attempt, cut_off) = schedule.next().await?;
        let began = Instant::now();
        // Boxed, because the future is large, and a request that only waits should not carry its
        // size. The block owns the attempt; an `async fn` would keep a second copy of it.
        let attempt = Box::pin(async move { attempt.run().await });
        let result = match cut_off {
            None => attempt.await,
            Some(cut_off) => match timeout_at(cut_off, attempt).await {
                Ok(result) => result,
                Err(_) => return Err(schedule.cut_off(Instant::now())),
            },
        };
        let now = Instant::now();
        match result {
            Ok(mut lease) => {
                lease.rounds += rounds;
                schedule.granted(&mut lease, now - began, now);
                return Ok(lease);
            }
            Err(failed) => {
                rounds += failed.rounds;
                schedule.failed(failed, now - began, now)?;
            }
        }
    }
}

/// The schedule of a request outside of a queue: it tries again after a pause, or not at all.
pub(super) struct Retries<'a> {
    shared: &'a Arc<Shared>,
    params: AcquireParams,
    /// Without a policy only split votes lead to another attempt.
    policy: Option<&'a RetryPolicy>,
    started: Instant,
    tries: u32,
    pause: Duration,
}

impl<'a> Retries<'a> {
    pub(super) fn new(
        shared: &'a Arc<Shared>,
        params: AcquireParams,
        policy: Option<&'a RetryPolicy>,
    ) -> Self {
        Self { shared, params, policy, started: Instant::now(), tries: 0, pause: Duration::ZERO }
    }

    fn pause(&self, failed: &AttemptError, round: Duration) -> Option<Duration> {
        let backoff = Backoff(self.shared.env.entropy.as_ref());
        let tries = self.tries;
        let error = &failed.error;
        match self.policy {
            None if failed.split && tries <= MAX_SPLIT_TRIES => {
                let lock = self.params.keys.lock.escape_ascii();
                tracing::debug!(%lock, tries, %error, "the votes were split");
                Some(backoff.after_split(round.max(SHORTEST_ROUND), tries))
            }
            Some(policy)
                if matches!(
                    error,
                    LockError::Held(_) | LockError::NoQuorum(_) | LockError::Unknown(_)
                ) =>
            {
                policy.pause(tries, self.started.elapsed(), backoff.0.unit())
            }
            None | Some(_) => None,
        }
    }
}

impl RetrySchedule for Retries<'_> {
    async fn next(&mut self) -> Result<(Attempt, Option<Instant>), LockError> {
        if self.tries > 0 {
            sleep(self.pause).await;
        }
        Ok((Attempt::new(self.shared, self.params.for_attempt()), None))
    }

    fn failed(
        &mut self,
        failed: AttemptError,
        round: Duration,
        _: Instant,
    ) -> Result<(), LockError> {
        self.tries += 1;
        self.pause = self.pause(&failed, round).ok_or(failed.error)?;
        Ok(())
    }

    fn granted(self, _: &mut Lease, _: Duration, _: Instant) {}
}
