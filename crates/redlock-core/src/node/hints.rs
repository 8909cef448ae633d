//! Receives hints through one master, on a separate connection: a subscribed connection cannot make
//! calls, and trouble with hints must not cost votes.
//!
//! Without hints waiters still get their locks, by polling.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, timeout};

use super::Listener;
use super::link::{Link, LinkError, Subscription};
use super::status::Remedy;
use crate::model::clock::Entropy;

/// How often the connection is tested with a ping.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// Backoff between two attempts to connect, doubled from the first value to the last.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// How often the log repeats that hints do not arrive.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// Keeps a separate subscription for each listener.
#[derive(Clone)]
pub(super) struct HintSubscriber {
    name: Arc<str>,
    link: Arc<dyn Link>,
    deadline: Duration,
    entropy: Arc<dyn Entropy>,
    is_subscribed: Arc<AtomicBool>,
    tasks: Arc<Mutex<Vec<AbortHandle>>>,
}

impl HintSubscriber {
    pub(super) fn new(
        name: Arc<str>,
        link: Arc<dyn Link>,
        deadline: Duration,
        entropy: Arc<dyn Entropy>,
    ) -> Self {
        Self { name, link, deadline, entropy, is_subscribed: Arc::default(), tasks: Arc::default() }
    }

    /// Must be called on a tokio runtime.
    pub(super) fn listen(&self, listener: Weak<dyn Listener>) {
        let task = tokio::spawn(self.clone().run(listener)).abort_handle();
        let mut tasks = self.tasks.lock();
        tasks.retain(|task| !task.is_finished());
        tasks.push(task);
    }

    pub(super) fn is_subscribed(&self) -> bool {
        self.is_subscribed.load(Ordering::Relaxed)
    }

    pub(super) fn stop(&self) {
        self.tasks.lock().drain(..).for_each(|task| task.abort());
    }

    async fn run(self, listener: Weak<dyn Listener>) {
        let mut pause = BACKOFF.0;
        let mut logged_at: Option<Instant> = None;
        loop {
            let mut nonce = [0; 8];
            self.entropy.fill(&mut nonce);
            let ended = match self.link.subscribe(u64::from_le_bytes(nonce)).await {
                Ok(subscription) => {
                    pause = BACKOFF.0;
                    tracing::debug!(node = %self.name, "receiving hints");
                    self.is_subscribed.store(true, Ordering::Relaxed);
                    let ended = self.forward(subscription, &listener).await;
                    self.is_subscribed.store(false, Ordering::Relaxed);
                    ended
                }
                Err(error) => Err(error),
            };
            let Err(error) = ended else { return };
            let is_forbidden = error.remedy == Some(Remedy::AllowHints);
            if is_forbidden && logged_at.is_none_or(|at| at.elapsed() >= LOG_EVERY) {
                logged_at = Some(Instant::now());
                let advice = Remedy::AllowHints;
                tracing::warn!(
                    node = %self.name, why = %error, %advice,
                    "no hints arrive: waiters poll"
                );
            } else {
                tracing::debug!(node = %self.name, why = %error, "the subscription for hints ended");
            }
            sleep(pause.mul_f64(0.5 + 0.5 * self.entropy.unit())).await;
            pause = (pause * 2).min(BACKOFF.1);
        }
    }

    /// Passes hints on until the connection fails; `Ok` when the listener is gone.
    async fn forward(
        &self,
        mut subscription: Box<dyn Subscription>,
        listener: &Weak<dyn Listener>,
    ) -> Result<(), LinkError> {
        let mut heartbeat = interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                _ = heartbeat.tick() => {
                    let answered = timeout(self.deadline, subscription.ping()).await;
                    answered.unwrap_or_else(|_| Err(LinkError::broken("no answer in time")))?;
                }
                hint = subscription.next() => match listener.upgrade() {
                    Some(listener) => listener.on_hint(&hint?),
                    None => return Ok(()),
                },
            }
        }
    }
}
