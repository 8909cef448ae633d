//! rslock, the library that users might take instead of a gateway. It runs in this process and
//! without HTTP. Every worker locks a random name and unlocks it, as fast as it can. A lock and an
//! unlock count as one request each, as they do for every contender.
//!
//! rslock gets its fastest setup: one thread for each core, with its own `LockManager` and
//! connections. Its examples use one manager on a runtime that shares its tasks; that was slower by
//! a quarter. A single thread was no faster than the present setup. Retries have rslock's defaults.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rslock::LockManager;

use crate::load::Tally;
use crate::report::cores;
use crate::worker_pool::{Phase, WorkerPool};

const TTL: Duration = Duration::from_secs(30);
/// How many of its last names each stopped worker checks. The check is needed because rslock's
/// unlock does not report its outcome.
const CHECKED: usize = 100;
/// Time limit of that check at one master.
const CHECK_WITHIN: Duration = Duration::from_secs(3);

/// Starts the workers. Each connects before it works.
pub(crate) fn start(masters: &[SocketAddr], workers: u32) -> Result<WorkerPool<Tally>, String> {
    let threads = workers.min(cores());
    let urls: Vec<_> = masters.iter().map(|master| format!("redis://{master}/")).collect();
    let users: Vec<_> = (0..threads).map(|_| User::new(&urls)).collect();
    WorkerPool::start(workers, threads, move |worker, phase| {
        users[(worker % threads) as usize].clone().work(phase)
    })
}

/// What the workers of one thread share. The first command opens the connections, which belong to
/// the thread that runs it.
#[derive(Clone)]
struct User {
    manager: LockManager,
    /// One manager for each master.
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
        self.count_leftovers(&names, &mut tally).await;
        Ok(tally)
    }

    /// Counts names that are still locked. A master that hangs is skipped: it keeps locks in any
    /// case.
    async fn count_leftovers(&self, names: &VecDeque<String>, tally: &mut Tally) {
        for master in &self.masters {
            let check = async {
                for name in names {
                    if let Ok(Some(_)) = master.query_redis_for_key_value(name.as_bytes()).await {
                        tally.error(|| format!("rslock left {name} locked"));
                    }
                }
            };
            let _ = tokio::time::timeout(CHECK_WITHIN, check).await;
        }
    }
}
