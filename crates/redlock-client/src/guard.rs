//! A held lock: it is extended in the background, and its loss is reported.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use redlock_api::{Granted, LeaseRef};
use serde_json::Value;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::client::{Client, IfUnreachable, LONGEST_TRY, SHORTEST_TRY, lost, time_of_a_try};
use crate::clock::Moment;
use crate::error::{Error, Loss, LossReason};
use crate::log;
use crate::names::{Extension, Names};
use crate::together::{Renewal, Renewed};

/// How long a release is tried, at least and at most. Finished work is not held up for longer; the
/// TTL ends the lock.
const RELEASE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));

/// A held lock. Dropping it releases the lock in the background.
pub struct Guard {
    held: Arc<Held>,
    renewal: JoinHandle<()>,
    is_released: bool,
}

struct Held {
    client: Client,
    names: Names,
    token: String,
    fencing_token: u64,
    slots: Vec<u32>,
    ttl: Duration,
    margin: Duration,
    /// When the last confirmed request was sent, and the deadline that follows from it.
    lease: watch::Sender<(Moment, Moment)>,
    /// The `waiters` of the last extension; `u64::MAX` before it.
    waiters: AtomicU64,
    loss: OnceLock<Loss>,
    /// Cancelled when `loss` is set.
    lost: CancellationToken,
}

/// Leaves out the token, which is a secret.
impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("name", &self.held.names.text())
            .field("fencing_token", &self.held.fencing_token)
            .finish_non_exhaustive()
    }
}

impl Guard {
    pub(crate) fn new(
        client: Client,
        names: Names,
        granted: Granted,
        sent: Moment,
        deadline: Moment,
        ttl: Duration,
        margin: Duration,
    ) -> Self {
        let Granted { token, fencing_token, slots_held, .. } = granted;
        let slots = slots_held.unwrap_or_default();
        let (lease, _) = watch::channel((sent, deadline));
        let loss = OnceLock::new();
        let lost = CancellationToken::new();
        let waiters = AtomicU64::new(u64::MAX);
        let held = Arc::new(Held {
            client,
            names,
            token,
            fencing_token,
            slots,
            ttl,
            margin,
            lease,
            waiters,
            loss,
            lost,
        });
        let renewal = tokio::spawn({
            let held = held.clone();
            async move { held.lose(held.extend_until_lost().await) }
        });
        Self { held, renewal, is_released: false }
    }

    /// The lock's name. Of several locks, all names, with commas in between.
    pub fn name(&self) -> &str {
        self.held.names.text()
    }

    /// Which slots of the lock are held, see [`Lock::slots`](crate::Lock::slots). Empty for a lock
    /// with one holder.
    pub fn slots(&self) -> &[u32] {
        &self.held.slots
    }

    /// The secret that extends and releases the lock.
    pub fn token(&self) -> &str {
        &self.held.token
    }

    /// The fencing token, larger than that of every earlier grant of this lock. Give it to the
    /// resource with every write, and let the resource refuse smaller ones: `UPDATE … SET …, fence
    /// = $1 WHERE id = $2 AND fence <= $1`.
    pub fn fencing_token(&self) -> u64 {
        self.held.fencing_token
    }

    /// Until when the lock is certainly held. Each extension moves it on.
    pub fn deadline(&self) -> Moment {
        self.held.lease.borrow().1
    }

    /// Receives each new deadline, as (when the request was sent, deadline).
    pub fn deadlines(&self) -> watch::Receiver<(Moment, Moment)> {
        self.held.lease.subscribe()
    }

    /// How many waited for the lock at the gateway at the last extension; `None` before it. A holder
    /// may release the lock early when somebody waits.
    pub fn waiters(&self) -> Option<u64> {
        let waiters = self.held.waiters.load(Ordering::Relaxed);
        (waiters != u64::MAX).then_some(waiters)
    }

    /// Waits until the lock is lost, at the latest the margin before its deadline.
    pub async fn lost(&self) -> Loss {
        self.held.lost.cancelled().await;
        self.held.loss()
    }

    /// A token that is cancelled when the lock is lost, for work that runs elsewhere.
    pub fn cancellation(&self) -> CancellationToken {
        self.held.lost.clone()
    }

    /// Checks that the lock is certainly held at this moment. It reads the clock too, in case
    /// nothing has run for a while.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn check(&self) -> Result<(), Error> {
        if self.held.lost.is_cancelled() {
            return Err(Error::Lost(self.held.loss()));
        }
        if self.deadline().has_passed() {
            let what = vec!["nothing has run since".into()];
            return Err(Error::Lost(self.held.loss_for(LossReason::Unconfirmed { what })));
        }
        Ok(())
    }

    /// Releases the lock, and tries for 5 s at most. Succeeds also if the lock is no longer held;
    /// call [`Guard::check`] before to know.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when no gateway has confirmed the release: the lock then ends with
    /// its TTL.
    pub async fn release(mut self) -> Result<(), Error> {
        self.renewal.abort();
        let result = self.held.release().await;
        // Not earlier: if this future is dropped, the guard's drop releases the lock.
        self.is_released = true;
        result
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.renewal.abort();
        if self.is_released {
            return;
        }
        // Without a runtime the lock ends with its TTL.
        if let Ok(runtime) = Handle::try_current() {
            let held = self.held.clone();
            runtime.spawn(async move {
                if let Err(error) = held.release().await {
                    let name = held.names.text().to_owned();
                    log::write(move || {
                        tracing::warn!(
                            name,
                            %error,
                            "a lock was not released, and ends with its TTL"
                        );
                    });
                }
            });
        }
    }
}

impl Held {
    async fn extend_until_lost(&self) -> LossReason {
        let call = match self.names.extension(&self.token, self.ttl) {
            Ok(call) => call,
            Err(error) => return LossReason::Unconfirmed { what: vec![error.to_string()] },
        };
        loop {
            let (confirmed, deadline) = *self.lease.borrow();
            let interval = deadline.since(confirmed) / 3;
            let given_up = deadline - self.margin;
            let due = confirmed + interval;
            if self.names.is_set() {
                // A set has a joint request of its own.
                due.reached().await;
            } else {
                let lease =
                    LeaseRef { name: self.names.text().to_owned(), token: self.token.clone() };
                let renewal = Renewal { lease, ttl: self.ttl, interval, due, given_up };
                match self.client.renew_together(renewal).await {
                    Renewed::Extended(sent, deadline, waiters) => {
                        self.extended(sent, deadline, waiters);
                        continue;
                    }
                    Renewed::Lost(reason) => return reason,
                    Renewed::Alone => {}
                }
            }
            let mut heard = vec!["it was too late to ask".to_owned()];
            loop {
                let left = given_up.left();
                if left < SHORTEST_TRY {
                    return LossReason::Unconfirmed { what: heard };
                }
                let one_try = time_of_a_try(left);
                let answer = tokio::select! {
                    answer = self.client.ask::<Value>(
                        &call,
                        given_up,
                        one_try,
                        IfUnreachable::AskAgain,
                    ) => answer.map_err(|error| lost(self.names.text(), error)),
                    // The request's timer stands still while the machine sleeps.
                    () = given_up.reached() => continue,
                };
                match answer {
                    Ok((Some(answer), sent)) => match self.names.extended(answer, sent, self.ttl) {
                        Extension::Extended(deadline, waiters) => {
                            self.extended(sent, deadline, waiters);
                            break;
                        }
                        Extension::Lost(reason) => return reason,
                        Extension::Undecided(what) => heard = vec![what],
                    },
                    Ok((None, _)) => heard = vec!["PATCH was answered 204".into()],
                    Err(Error::Lost(loss)) => return loss.reason,
                    Err(Error::Unavailable { what, .. }) => heard = what,
                    // For example, the API key has ended. The lock is held until its deadline, and
                    // an operator may mend the key.
                    Err(error) => heard = vec![error.to_string()],
                }
                tokio::time::sleep((given_up.left() / 8).min(LONGEST_TRY)).await;
            }
        }
    }

    fn extended(&self, sent: Moment, deadline: Moment, waiters: Option<u64>) {
        self.waiters.store(waiters.unwrap_or(u64::MAX), Ordering::Relaxed);
        self.lease.send_modify(|lease| *lease = (sent, deadline.max(lease.1)));
    }

    fn lose(&self, reason: LossReason) {
        let _ = self.loss.set(self.loss_for(reason.clone()));
        self.lost.cancel();
        let name = self.names.text().to_owned();
        log::write(move || tracing::warn!(name, loss = %reason, "a lock was lost"));
    }

    fn loss(&self) -> Loss {
        let unknown = || self.loss_for(LossReason::Unconfirmed { what: Vec::new() });
        self.loss.get().cloned().unwrap_or_else(unknown)
    }

    fn loss_for(&self, reason: LossReason) -> Loss {
        Loss { name: self.names.text().to_owned(), reason }
    }

    async fn release(&self) -> Result<(), Error> {
        let (min, max) = RELEASE;
        let now = Moment::now();
        let until = self.lease.borrow().1.max(now + min).min(now + max);
        self.client.release_until(&self.names.release(&self.token)?, until).await
    }
}
