//! Hears what gateways say through one simulated master: `node/redis/ears.rs` of the core, with the wire replaced. A
//! connection of its own, that breaks and is made again on its own; what is said in the meantime is lost.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use redlock_core::clock::Entropy;
use redlock_core::node::{Hint, Listener};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};

use super::{CALL_DEADLINE, LaneParts};
use crate::chance::SimEntropy;
use crate::master::{Master, Question, Reply};
use crate::network::{Connection, Network};

const HEARTBEAT: Duration = Duration::from_secs(2);
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

#[derive(Clone)]
pub(super) struct Ears {
    gateway: u8,
    master: Arc<Master>,
    network: Arc<Network>,
    entropy: Arc<SimEntropy>,
    connection: Arc<Mutex<Option<Arc<Connection>>>>,
    task: Arc<Mutex<Option<AbortHandle>>>,
}

impl Ears {
    pub(super) fn new(parts: &LaneParts) -> Self {
        Self {
            gateway: parts.gateway,
            master: parts.master.clone(),
            network: parts.network.clone(),
            entropy: parts.entropy.clone(),
            connection: Arc::default(),
            task: Arc::default(),
        }
    }

    pub(super) fn listen(&self, listener: Weak<dyn Listener>) {
        let task = tokio::spawn(self.clone().run(listener)).abort_handle();
        if let Some(before) = lock(&self.task).replace(task) {
            before.abort();
        }
    }

    pub(super) fn cut(&self, why: &str) {
        let connection = lock(&self.connection).clone();
        if let Some(connection) = connection {
            connection.end(why);
        }
    }

    pub(super) fn stop(&self) {
        if let Some(task) = lock(&self.task).take() {
            task.abort();
        }
        self.cut("the gateway is gone");
    }

    async fn run(self, listener: Weak<dyn Listener>) {
        let mut pause = BACKOFF.0;
        loop {
            if let Ok(connection) = self.network.connect(self.gateway, &self.master, CALL_DEADLINE).await {
                *lock(&self.connection) = Some(connection.clone());
                let (to, hints) = mpsc::unbounded_channel();
                if let Ok(Ok(Reply::Listening)) = timeout(CALL_DEADLINE, connection.send(Question::Listen(to))).await {
                    pause = BACKOFF.0;
                    if hear(&connection, hints, &listener).await.is_none() {
                        return;
                    }
                }
                connection.end("the gateway dropped the connection");
            }
            sleep(pause.mul_f64(0.5 + 0.5 * self.entropy.unit())).await;
            pause = (pause * 2).min(BACKOFF.1);
        }
    }
}

/// Until the connection fails; `None` when nobody listens any more.
async fn hear(
    connection: &Arc<Connection>,
    mut hints: mpsc::UnboundedReceiver<Hint>,
    listener: &Weak<dyn Listener>,
) -> Option<()> {
    let mut heartbeat = tokio::time::interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
    heartbeat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            _ = connection.ended() => return Some(()),
            _ = heartbeat.tick() => {
                if !matches!(timeout(CALL_DEADLINE, connection.send(Question::Look)).await, Ok(Ok(_))) {
                    return Some(());
                }
            }
            // The master has forgotten who listens when it was restarted.
            hint = hints.recv() => match hint {
                Some(hint) => listener.upgrade()?.hear(&hint),
                None => return Some(()),
            },
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
