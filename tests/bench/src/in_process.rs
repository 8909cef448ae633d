//! The library that users would take instead: rslock, in this very process, without HTTP between. Every worker locks a
//! random name and unlocks it, as fast as it can; a lock and an unlock are one request each, like everybody's.
//!
//! It gets what makes it fastest: a thread per core, each with a `LockManager` and connections of its own. One manager on a
//! runtime that shares its tasks, as in its examples, was slower by a quarter, and one thread no faster. Retries are as they
//! are by default.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rslock::LockManager;

use crate::load::Tally;
use crate::report::cores;
use crate::worker_pool::{Phase, WorkerPool};

const TTL: Duration = Duration::from_secs(30);
/// So many of its last names each worker looks for when it has stopped: an unlock says nothing of how it went.
const CHECKED: usize = 100;
/// At one master.
const LOOK_WITHIN: Duration = Duration::from_secs(3);

/// Starts connecting.
pub(crate) fn start(masters: &[SocketAddr], workers: u32) -> Result<WorkerPool<Tally>, String> {
    let threads = workers.min(cores());
    let urls: Vec<_> = masters.iter().map(|master| format!("redis://{master}/")).collect();
    let users: Vec<_> = (0..threads).map(|_| User::new(&urls)).collect();
    WorkerPool::start(workers, threads, move |worker, phase| {
        users[(worker % threads) as usize].clone().work(phase)
    })
}

/// What the workers of one thread share. Connections are opened with the first command, and belong to that thread.
#[derive(Clone)]
struct User {
    manager: LockManager,
    /// Each master by itself.
    masters: Vec<LockManager>,
}

impl User {
    fn new(urls: &[String]) -> Self {
        let manager = |urls: &[String]| LockManager::new(urls.iter().map(String::as_str).collect());
        Self { manager: manager(urls), masters: urls.chunks(1).map(manager).collect() }
    }

    async fn work(self, phase: Phase) -> Result<Tally, String> {
        let mut tally = Tally::new();
        let mut names = VecDeque::with_capacity(CHECKED);
        while !phase.stops() {
            let name = format!("bench:rslock-{:016x}", rand::random::<u64>());
            let asked = Instant::now();
            let lock = self.manager.lock(name.as_str(), TTL).await;
            let elapsed = asked.elapsed();
            let lock = match lock {
                Ok(lock) => lock,
                Err(error) => {
                    tally.error(|| format!("rslock did not lock: {error}"));
                    continue;
                }
            };
            if phase.counts() {
                tally.acquire.record(elapsed);
            }

            let asked = Instant::now();
            self.manager.unlock(&lock).await;
            let elapsed = asked.elapsed();
            if phase.counts() {
                tally.release.record(elapsed);
            }
            if names.len() == CHECKED {
                names.pop_front();
            }
            names.push_back(name);
        }
        self.look_for(&names, &mut tally).await;
        Ok(tally)
    }

    /// A master that hangs is not looked at: it is known to have locks.
    async fn look_for(&self, names: &VecDeque<String>, tally: &mut Tally) {
        for master in &self.masters {
            let look = async {
                for name in names {
                    if let Ok(Some(_)) = master.query_redis_for_key_value(name.as_bytes()).await {
                        tally.error(|| format!("rslock left {name} locked"));
                    }
                }
            };
            let _ = tokio::time::timeout(LOOK_WITHIN, look).await;
        }
    }
}
