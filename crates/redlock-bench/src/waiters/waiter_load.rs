//! The waiters: connections that are idle or have one waiting request each. A waiter that is granted the lock releases
//! it at once. One that hangs up is gone until the connections are filled again.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt, TryStreamExt};
use tokio::task::{AbortHandle, JoinError, JoinSet};

use crate::grants::{Grant, fencing_token};
use crate::holders::settle;
use crate::http::{Connection, write_acquire, write_release};

/// Connections that are being opened at the same time; more would fill the listener's backlog.
const OPENING: usize = 64;

pub(super) struct WaiterLoad {
    address: SocketAddr,
    size: u32,
    names: u32,
    /// The first lock's name; the others follow.
    first: u64,
    idle: Vec<Waiter>,
    waiting: JoinSet<Answer>,
    lines: Vec<(u32, AbortHandle)>,
}

type Answer = Result<(Waiter, Outcome), String>;

struct Waiter {
    number: u32,
    connection: Connection,
}

/// What became of one waiting request.
pub(super) struct Outcome {
    pub(super) lock: u64,
    pub(super) sent: Instant,
    pub(super) received: Instant,
    answer: Answered,
}

enum Answered {
    /// With what was said instead of 204 to its release.
    Granted(Grant, Option<String>),
    Otherwise(u16, String),
}

impl Outcome {
    pub(super) fn grant(&self) -> Option<&Grant> {
        match &self.answer {
            Answered::Granted(grant, _) => Some(grant),
            Answered::Otherwise(..) => None,
        }
    }

    pub(super) fn is_granted_and_released(&self) -> bool {
        matches!(self.answer, Answered::Granted(_, None))
    }

    pub(super) fn is_held(&self) -> bool {
        matches!(&self.answer, Answered::Otherwise(409, body) if body.contains(r#""code":"lock_held""#))
    }

    pub(super) fn describe(&self) -> String {
        match &self.answer {
            Answered::Granted(_, None) => "201, and 204 to the release".into(),
            Answered::Granted(_, Some(text)) => format!("201, and to the release {text}"),
            Answered::Otherwise(_, text) => format!("after {:.0?}: {text}", self.received - self.sent),
        }
    }
}

/// What a waiter does in the part where half of them hang up.
#[derive(Debug, PartialEq)]
enum Departure {
    Stays,
    /// By FIN, as when a process ends.
    HangsUp,
    /// By RST, as when it ends with data unread.
    Resets,
}

/// Every second one of each queue hangs up, and every second one of those by RST.
fn departure(number: u32, names: u32) -> Departure {
    match (number / names + number % names) % 4 {
        1 => Departure::HangsUp,
        3 => Departure::Resets,
        _ => Departure::Stays,
    }
}

impl WaiterLoad {
    pub(super) fn new(address: SocketAddr, size: u32, names: u32) -> Self {
        let (idle, waiting, lines) = (Vec::new(), JoinSet::new(), Vec::new());
        Self { address, size, names, first: rand::random(), idle, waiting, lines }
    }

    fn lock(&self, number: u32) -> u64 {
        self.first.wrapping_add(u64::from(number % self.names))
    }

    pub(super) fn locks(&self) -> Vec<u64> {
        (0..self.names).map(|number| self.lock(number)).collect()
    }

    /// Opens the connections of all who have none, and has one cheap request answered on each.
    pub(super) async fn fill(&mut self) -> Result<(), String> {
        let mut there = vec![false; self.size as usize];
        self.idle.iter().for_each(|waiter| there[waiter.number as usize] = true);
        let address = self.address;
        let missing = (0..self.size).filter(|&number| !there[number as usize]);
        let arrived: Vec<_> = stream::iter(missing)
            .map(async |number| {
                let mut connection = Connection::open(address).await?;
                let answer = connection.get("/livez").await?;
                match answer.status {
                    200 => Ok(Waiter { number, connection }),
                    _ => Err(format!("GET /livez is answered with {}", answer.describe())),
                }
            })
            .buffer_unordered(OPENING)
            .try_collect()
            .await?;
        self.idle.extend(arrived);
        self.idle.sort_unstable_by_key(|waiter| waiter.number);
        Ok(())
    }

    /// To be called before they wait: afterwards their connections are out of reach.
    pub(super) fn prepare_to_reset(&self) -> Result<(), String> {
        let mut resetting = self.idle.iter().filter(|waiter| departure(waiter.number, self.names) == Departure::Resets);
        resetting.try_for_each(|waiter| waiter.connection.reset_when_dropped())
    }

    /// Everybody who is idle asks for the lock, one after another, evenly over the ramp.
    pub(super) fn send(&mut self, wait: Duration, ramp: Duration) {
        let body = format!(r#"{{"ttl_ms":30000,"wait_ms":{}}}"#, wait.as_millis());
        let start = Instant::now();
        self.lines.clear();
        for waiter in std::mem::take(&mut self.idle) {
            let number = waiter.number;
            let lock = self.lock(number);
            let mut request = Vec::with_capacity(192);
            write_acquire(&mut request, lock, &body);
            let due = start + ramp.mul_f64(f64::from(number) / f64::from(self.size));
            let line = self.waiting.spawn(async move {
                tokio::time::sleep_until(due.into()).await;
                ask(waiter, lock, request).await
            });
            self.lines.push((number, line));
        }
    }

    /// Those who are answered already.
    pub(super) fn answered(&mut self) -> Result<Vec<Outcome>, String> {
        let mut outcomes = Vec::new();
        while let Some(result) = self.waiting.try_join_next() {
            outcomes.extend(self.back(result)?);
        }
        Ok(outcomes)
    }

    /// Waits until everybody is answered.
    pub(super) async fn all(&mut self) -> Result<Vec<Outcome>, String> {
        let mut outcomes = Vec::with_capacity(self.waiting.len());
        while let Some(result) = self.waiting.join_next().await {
            outcomes.extend(self.back(result)?);
        }
        self.idle.sort_unstable_by_key(|waiter| waiter.number);
        Ok(outcomes)
    }

    /// `None` for one who hung up.
    fn back(&mut self, result: Result<Answer, JoinError>) -> Result<Option<Outcome>, String> {
        match result {
            Ok(Ok((waiter, outcome))) => {
                self.idle.push(waiter);
                Ok(Some(outcome))
            }
            Ok(Err(error)) => Err(error),
            Err(error) if error.is_cancelled() => Ok(None),
            Err(error) => Err(format!("a waiter panicked: {error}")),
        }
    }

    /// Half of those who wait close their connections without a word; says how many.
    pub(super) fn hang_up(&mut self) -> u64 {
        let gone = self
            .lines
            .iter()
            .filter(|(number, line)| departure(*number, self.names) != Departure::Stays && !line.is_finished());
        gone.map(|(_, line)| line.abort()).count() as u64
    }
}

async fn ask(mut waiter: Waiter, lock: u64, request: Vec<u8>) -> Answer {
    let sent = Instant::now();
    let answer = waiter.connection.exchange(&request).await?;
    let received = Instant::now();
    let outcome = |answer| Outcome { lock, sent, received, answer };
    let Some(fencing_token) = (answer.status == 201).then_some(answer.lock_token.and_then(fencing_token)).flatten()
    else {
        let otherwise = Answered::Otherwise(answer.status, answer.describe());
        return Ok((waiter, outcome(otherwise)));
    };
    let mut release = request;
    write_release(&mut release, lock, answer.lock_token.unwrap_or_default());
    let released = Instant::now();
    let answer = settle(&mut waiter.connection, &release).await?;
    let problem = (!answer.is_released()).then_some(answer.text);
    let grant = Grant { fencing_token, worker: waiter.number, wanted: sent, received, released };
    let answered = Answered::Granted(grant, problem);
    Ok((waiter, outcome(answered)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_hang_up_of_every_queue_and_half_of_those_reset() {
        for names in [1, 7, 64, 1000] {
            let all: Vec<_> = (0..10_000).map(|number| (number % names, departure(number, names))).collect();
            let reset = all.iter().filter(|(_, departure)| *departure == Departure::Resets).count();
            assert!((2_400..2_600).contains(&reset), "{reset} of {names} queues");
            for name in 0..names {
                let queue: Vec<_> = all.iter().filter(|(queue, _)| *queue == name).collect();
                let stay = queue.iter().filter(|(_, departure)| *departure == Departure::Stays).count();
                assert!(stay.abs_diff(queue.len() / 2) <= 1, "{stay} of {} stay", queue.len());
            }
        }
    }
}
