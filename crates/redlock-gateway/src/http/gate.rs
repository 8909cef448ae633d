//! The gate between a request with checked arguments and the core. Each route takes these steps in this
//! order: a permit among the requests in flight, a second look at the API key, the rate of the key, and
//! turns in the fair queue. A handler parses, passes the gate, calls the gateway and renders.
//!
//! A request costs one for each lock and slot that it changes. [`Access`] has charged the first one
//! already, when it identified the caller. So a request with bad arguments costs one.

use std::num::NonZeroU32;
use std::time::Duration;

use redlock_core::LockName;

use super::access::{Access, LockAccess};
use super::error::{ApiError, RATE_LIMITED};
use crate::auth::{Caller, RateExceeded, Verb};
use crate::overload::clients::Concurrency;
use crate::overload::in_flight::{InFlight, RequestClass};

/// The pause after a refusal that only an operator can change.
const LONG_PAUSE: Duration = Duration::from_secs(60);

/// The permission to ask the masters, until this is dropped.
pub(super) struct Pass {
    pub(super) in_flight: InFlight,
    /// The caller, as the keys are now.
    pub(super) caller: Caller,
}

impl Access {
    /// Lets a request use `verb` on each of these locks. `cost` is how many locks and slots it changes.
    /// Handlers call this when the body is complete, so a client that sends no body takes no permit.
    ///
    /// # Errors
    /// Too many requests are in flight, in all or of this client. The key has lost its permission. An
    /// acquire exceeds the rate of the key. An extension or a release counts only once in the rate.
    pub(super) async fn pass(
        &self,
        verb: Verb,
        names: &[LockName],
        cost: usize,
    ) -> Result<Pass, ApiError> {
        let class = match verb {
            Verb::Extend | Verb::Release | Verb::Force => RequestClass::Held,
            Verb::Acquire | Verb::Inspect | Verb::List | Verb::Callback | Verb::Metrics => {
                RequestClass::Other
            }
        };
        let in_flight = self.gateway().enter(class, self.client()).await?;
        self.passed(verb, names, cost, in_flight).await
    }

    /// Lets one lease of a request that extends many locks pass.
    pub(super) async fn pass_lease(&self, name: &LockName, cost: usize) -> Result<Pass, ApiError> {
        let in_flight = self.gateway().enter_lease(self.client()).await?;
        self.passed(Verb::Extend, std::slice::from_ref(name), cost, in_flight).await
    }

    async fn passed(
        &self,
        verb: Verb,
        names: &[LockName],
        cost: usize,
        mut in_flight: InFlight,
    ) -> Result<Pass, ApiError> {
        // The body may have taken long to arrive, and the key may have been removed meanwhile.
        let caller = self.check_again(verb, names)?;
        if cost > 1 {
            // Boxed, because an unboxed future would make the future of every request larger.
            Box::pin(async {
                if verb == Verb::Acquire {
                    self.charge(cost)?;
                }
                // Other clients must not feel a request for many. The token of a release may name 256
                // slots, for each of 32 locks.
                for _ in 1..cost.min(Concurrency::MAX) {
                    self.take_turn().await;
                }
                in_flight.widen(self.client(), cost).await;
                Ok::<_, ApiError>(())
            })
            .await?;
        }
        Ok(Pass { in_flight, caller })
    }

    /// Takes the locks and slots after the first off the rate of the key, all together or none.
    fn charge(&self, cost: usize) -> Result<(), ApiError> {
        let Some(more) = u32::try_from(cost - 1).ok().and_then(NonZeroU32::new) else {
            return Ok(());
        };
        let counts = || {
            format!(
                "a request for {cost} names or slots counts as {cost} requests, and the API key has"
            )
        };
        self.caller().check_rate_of_many(more).map_err(|exceeded| match exceeded {
            RateExceeded::Until(pause) => {
                let detail = format!(
                    "{} used up its rate (`rate` and `burst` in the keys file); wait for retry_after_ms",
                    counts()
                );
                RATE_LIMITED.because(detail).retry_after(pause)
            }
            RateExceeded::BeyondBurst(burst) => {
                let detail = format!(
                    "{} a `burst` of {burst}; raise `burst` in the keys file, or ask for fewer",
                    counts()
                );
                RATE_LIMITED.because(detail).retry_after(LONG_PAUSE)
            }
        })
    }
}

impl LockAccess {
    /// As [`Access::pass`].
    pub(super) async fn pass(&self, cost: usize) -> Result<Pass, ApiError> {
        self.access.pass(self.verb, std::slice::from_ref(&self.name), cost).await
    }
}
