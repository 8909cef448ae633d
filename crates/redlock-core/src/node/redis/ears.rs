//! Hears what gateways say through one master: a connection of its own, because one that listens can ask nothing else,
//! and because trouble with hints must not cost votes.
//!
//! Without it waiters still get their locks, by polling.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use fred::types::Message;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::RedisSettings;
use super::session::{NOT_HEARD, Session, SessionError};
use super::url::RedisUrl;
use crate::clock::Entropy;
use crate::node::{Hint, Listener, hint};

/// How often the connection is tried.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// Pauses between two attempts to connect, doubled from the first to the last.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// How often it is mentioned in the log that nothing is heard.
const MENTION: Duration = Duration::from_secs(60);

#[derive(Clone)]
pub(super) struct Ears {
    url: RedisUrl,
    channel: String,
    settings: RedisSettings,
    entropy: Arc<dyn Entropy>,
    hears: Arc<AtomicBool>,
    tasks: Arc<Mutex<Vec<AbortHandle>>>,
}

impl Ears {
    pub(super) fn new(url: &RedisUrl, settings: &RedisSettings, entropy: Arc<dyn Entropy>) -> Self {
        let channel = hint::channel(&settings.key_prefix, url.database);
        let (url, settings) = (url.clone(), settings.clone());
        Self { url, channel, settings, entropy, hears: Arc::default(), tasks: Arc::default() }
    }

    /// Must be called on a tokio runtime.
    pub(super) fn listen(&self, listener: Weak<dyn Listener>) {
        let task = tokio::spawn(self.clone().run(listener)).abort_handle();
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.retain(|task| !task.is_finished());
        tasks.push(task);
    }

    pub(super) fn hears(&self) -> bool {
        self.hears.load(Ordering::Relaxed)
    }

    pub(super) fn stop(&self) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).drain(..).for_each(|task| task.abort());
    }

    async fn run(self, listener: Weak<dyn Listener>) {
        let mut pause = BACKOFF.0;
        let mut mentioned: Option<Instant> = None;
        loop {
            let mut unique = [0; 8];
            self.entropy.fill(&mut unique);
            let probe = format!("0 {:016x}", u64::from_le_bytes(unique));
            let why = match Session::subscribe(&self.url, &self.settings, &self.channel, &probe).await {
                Ok((session, messages)) => {
                    pause = BACKOFF.0;
                    tracing::debug!(node = %self.url, "hears hints");
                    self.hears.store(true, Ordering::Relaxed);
                    let ended = self.hear(session, messages, &listener).await;
                    self.hears.store(false, Ordering::Relaxed);
                    match ended {
                        Ok(()) => return,
                        Err(why) => why,
                    }
                }
                Err(why) => why,
            };
            let text = why.to_string();
            let forbidden = text.starts_with("NOPERM") || text == NOT_HEARD;
            if forbidden && mentioned.is_none_or(|at| at.elapsed() >= MENTION) {
                mentioned = Some(Instant::now());
                let advice = format!("allow the gateway's user SUBSCRIBE and PUBLISH on the channel {}", self.channel);
                tracing::warn!(node = %self.url, %why, advice, "no hints can be heard: waiters poll");
            } else {
                tracing::debug!(node = %self.url, %why, "hears no hints");
            }
            tokio::time::sleep(pause.mul_f64(0.5 + 0.5 * self.entropy.unit())).await;
            pause = (pause * 2).min(BACKOFF.1);
        }
    }

    /// Until the connection fails; `Ok` when nobody listens any more.
    async fn hear(
        &self,
        session: Session,
        mut messages: Receiver<Message>,
        listener: &Weak<dyn Listener>,
    ) -> Result<(), SessionError> {
        let mut heartbeat = tokio::time::interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        heartbeat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                why = session.ended() => return Err(SessionError::Broken(why)),
                _ = heartbeat.tick() => session.ping().await?,
                message = messages.recv() => match message {
                    Ok(message) => {
                        let Some(listener) = listener.upgrade() else { return Ok(()) };
                        if let Some(text) = message.value.into_bytes() {
                            listener.hear(&Hint::received(text));
                        }
                    }
                    // More than can be kept came at once: those are lost, as hints may be.
                    Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => return Err(SessionError::Broken("the client has ended".into())),
                },
            }
        }
    }
}
