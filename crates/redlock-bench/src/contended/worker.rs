//! One worker: a connection that wants the lock over and over, and a log of what it was granted and answered.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::grants::{Grant, fencing_token};
use crate::http::{Answer, Connection, write_acquire, write_release};
use crate::worker_pool::Phase;

/// Between two polls, in ms; the default of several Redlock libraries.
const POLL_EVERY: std::ops::RangeInclusive<u64> = 50..=200;
/// After an answer that nobody asked for, lest refusals become the load.
const REFUSED_PAUSE: Duration = Duration::from_millis(20);
/// A release that is unknown may have left the lock to its TTL, which would stall everybody.
const RELEASE_TRIES: u32 = 5;

/// What all workers of a turn do.
#[derive(Clone)]
pub(super) struct Job {
    /// Workers are dealt to them in turn.
    pub(super) gateways: Vec<SocketAddr>,
    pub(super) lock: u64,
    pub(super) pace: Pace,
    pub(super) hold: Duration,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Pace {
    Wait(Duration),
    Poll,
}

/// What one worker saw, from its first request to its last.
#[derive(Default)]
pub(super) struct Log {
    pub(super) grants: Vec<Grant>,
    /// Answers 409 to a poll.
    pub(super) polls: u64,
    /// Other answers than expected, by method and status.
    pub(super) others: BTreeMap<String, u64>,
    pub(super) first_other: Option<String>,
}

impl Log {
    fn other(&mut self, method: &str, answer: &Answer<'_>) {
        *self.others.entry(format!("{method} {}", answer.status)).or_default() += 1;
        self.first_other.get_or_insert_with(|| format!("{method} was answered with {}", answer.describe()));
    }
}

pub(super) async fn work(job: Job, worker: u32, phase: Phase) -> Result<Log, String> {
    let mut connection = Connection::open(job.gateways[worker as usize % job.gateways.len()]).await?;
    let mut log = Log::default();
    let (mut acquire, mut release) = (Vec::with_capacity(256), Vec::with_capacity(256));
    let wait_ms = match job.pace {
        Pace::Wait(wait) => wait.as_millis(),
        Pace::Poll => 0,
    };
    write_acquire(&mut acquire, job.lock, &format!(r#"{{"ttl_ms":30000,"wait_ms":{wait_ms}}}"#));

    let mut wanted = Instant::now();
    while !phase.stops() {
        let answer = connection.exchange(&acquire).await?;
        let received = Instant::now();
        let pause = match (answer.status, answer.lock_token.and_then(fencing_token)) {
            (201, Some(fencing_token)) => {
                write_release(&mut release, job.lock, answer.lock_token.unwrap_or_default());
                if !job.hold.is_zero() {
                    sleep(job.hold).await;
                }
                log.grants.push(Grant { fencing_token, worker, wanted, received, released: Instant::now() });
                release_lock(&mut connection, &release, &mut log).await?;
                wanted = Instant::now();
                continue;
            }
            (409, _) if job.pace == Pace::Poll => {
                log.polls += 1;
                Duration::from_millis(rand::random_range(POLL_EVERY))
            }
            (409, _) => {
                log.other("POST", &answer);
                continue;
            }
            _ => {
                log.other("POST", &answer);
                REFUSED_PAUSE
            }
        };
        sleep(pause).await;
    }
    Ok(log)
}

async fn release_lock(connection: &mut Connection, release: &[u8], log: &mut Log) -> Result<(), String> {
    for _ in 0..RELEASE_TRIES {
        let answer = connection.exchange(release).await?;
        if answer.status == 204 {
            break;
        }
        log.other("DELETE", &answer);
        if answer.status != 503 {
            break;
        }
        sleep(REFUSED_PAUSE).await;
    }
    Ok(())
}
