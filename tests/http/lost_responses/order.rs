//! The order of one client with one idempotency key. Its first answer is lost, so it asks other
//! gateways until one returns its grant. Then it extends the lock and releases it. The client
//! records every answer and compares it with earlier promises.

use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use http::Method;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::history::{Denial, History, Hold, Life};
use crate::support::chance::Chance;
use crate::support::client::{Answer, Lease, lock_path};
use crate::support::gateway::Gateway;
use crate::support::harness::PATIENCE;

/// A TTL longer than all steps of an order, so that nothing expires meanwhile.
pub(super) const TTL_MS: u64 = 7_200_000;
const _: () = assert!(TTL_MS > 4 * PATIENCE.as_millis() as u64);

/// What all clients of a run share.
pub(super) struct Run {
    pub(super) gateways: Vec<Gateway>,
    /// The number of orders over HTTP/1.1, and over HTTP/2.
    pub(super) orders: usize,
    pub(super) reset_orders: usize,
    pub(super) locks: usize,
    pub(super) seed: u64,
    pub(super) began: Instant,
    /// The number of orders that were carried out.
    pub(super) done: AtomicUsize,
}

pub(super) struct Order<'a> {
    run: &'a Run,
    chance: Chance,
    /// The label that the client sends to all gateways.
    label: String,
    lock: String,
    body: Value,
    /// The number of the gateway that was asked last.
    at: usize,
    /// The grant, and the time when the first answer with it arrived.
    known: Option<(Lease, Duration)>,
    /// Whether the first request was lost or refused. Then a gateway may have a grant for this key
    /// of which the client does not know.
    asked_before: bool,
    /// The last refusal.
    refused: String,
    seen: History,
}

impl<'a> Order<'a> {
    pub(super) fn new(run: &'a Run, number: usize) -> Self {
        let mut chance = Chance::of(run.seed, number);
        let label = format!("order-{number}");
        let lock = format!("stock/{}", chance.below(run.locks));
        let wait_ms = if chance.one_in(3) { 2_000 } else { 0 };
        let body = json!({ "ttl_ms": TTL_MS, "wait_ms": wait_ms, "owner": label });
        let at = chance.below(run.gateways.len());
        let known = None;
        let asked_before = false;
        let refused = String::new();
        Self {
            run,
            chance,
            label,
            lock,
            body,
            at,
            known,
            asked_before,
            refused,
            seen: History::default(),
        }
    }

    /// Carries out the whole order: acquire, extend, release.
    pub(super) async fn carried_out(mut self) -> History {
        let from = self.run.began.elapsed();
        let closed = self.chance.one_in(2);
        if closed {
            self.ask_and_leave().await;
        } else {
            self.ask().await;
            self.seen.count("read and lost");
        }
        // The client sometimes asks once more than it needs, because each answer must be as good as
        // the first.
        let repetitions = 1 + self.chance.below(2);
        let mut is_held = true;
        for _ in 0..repetitions {
            is_held = is_held && self.repeat_until_granted().await;
            // The client does its work while it holds the lock.
            sleep(Duration::from_millis(self.chance.below(60) as u64)).await;
        }
        let mut held_until = self.run.began.elapsed();
        if is_held {
            self.extend().await;
            held_until = self.run.began.elapsed();
            self.release().await;
        } else if self.seen.wrong.is_empty() {
            self.wrong("no grant in time");
        }
        let until = self.run.began.elapsed();
        let order = self.label;
        let lock = self.lock;
        if let Some((Lease { fencing, .. }, from)) = self.known {
            self.seen.holds.push(Hold {
                order: order.clone(),
                lock: lock.clone(),
                fencing,
                from,
                until: held_until,
            });
        }
        self.seen.lives.push(Life { order, lock, from, until, closed });
        self.seen
    }

    fn gateway(&self) -> &'a Gateway {
        &self.run.gateways[self.at]
    }

    fn another_gateway(&mut self) {
        let count = self.run.gateways.len();
        self.at = (self.at + 1 + self.chance.below(count - 1)) % count;
    }

    fn key(&self) -> String {
        format!("{:016x}/{}", self.run.seed, self.label)
    }

    fn wrong(&mut self, what: &str) {
        let Self { run, label, lock, known, refused, .. } = self;
        let at = run.began.elapsed();
        self.seen.wrong.push(format!(
            "{label} on {lock} after {at:.3?}: {what}; knows {known:?}, last refused: {refused}"
        ));
    }

    /// Sends the request and leaves before reading anything. The moment lies anywhere between the
    /// gateway's reading of the request and its writing of the answer.
    async fn ask_and_leave(&mut self) {
        let body = self.body.to_string();
        let mut client = self.gateway().raw().await;
        client
            .announce(
                "POST",
                &self.lock,
                &format!("idempotency-key: {}\r\n", self.key()),
                body.len(),
            )
            .await;
        client.write(body).await;
        sleep(Duration::from_micros(self.chance.below(8_000) as u64)).await;
        drop(client);
        self.asked_before = true;
        self.seen.count("closed without reading");
    }

    /// Asks for the lock. Returns whether the client has it. If not, the client has already waited
    /// until it may ask again.
    async fn ask(&mut self) -> bool {
        let sent = self.run.began.elapsed();
        let call = self
            .gateway()
            .call(Method::POST, lock_path(&self.lock))
            .header("idempotency-key", self.key());
        let answer = call.json(&self.body).send().await;
        let asked_before = std::mem::replace(&mut self.asked_before, true);
        if answer.status != 201 {
            self.refused = answer.text();
        }
        match answer.status {
            201 => self.is_granted(&answer, asked_before),
            409 => {
                let problem = answer.problem(409, "lock_held");
                self.seen.count("POST: 409 lock_held");
                if self.known.is_some() {
                    self.wrong(&format!("refused because of its own lock: {problem}"));
                }
                let order = self.label.clone();
                let lock = self.lock.clone();
                let holder = problem["holder"].as_str().map(Into::into);
                let denial =
                    Denial { order, lock, holder, sent, answered: self.run.began.elapsed() };
                self.seen.denials.push(denial);
                sleep(Duration::from_millis(10 + self.chance.below(30) as u64)).await;
            }
            _ => self.pause(&answer, "POST", &["quorum_unavailable", "outcome_unknown"]).await,
        }
        answer.status == 201
    }

    fn is_granted(&mut self, answer: &Answer, asked_before: bool) {
        let lease = Lease::from(answer);
        let replayed = answer.header("idempotency-replayed");
        assert!(["", "true"].contains(&replayed), "{answer:?}");
        let replayed = replayed == "true";
        match &self.known {
            Some((known, _)) if *known == lease && replayed => {
                self.seen.count("repeated: the same grant")
            }
            Some(_) => self.wrong(&format!("another grant: {lease:?}, replayed: {replayed}")),
            None if replayed && !asked_before => self.wrong("replayed, but never asked before"),
            None => {
                let how = match (asked_before, replayed) {
                    (false, _) => "first answer: granted to the first request",
                    (true, true) => "first answer: the grant of a lost request",
                    (true, false) => "first answer: a new grant after a lost request",
                };
                self.seen.count(how);
                self.known = Some((lease, self.run.began.elapsed()));
            }
        }
    }

    /// Repeats the request, each time at the next gateway, until it is granted.
    async fn repeat_until_granted(&mut self) -> bool {
        let since = Instant::now();
        while since.elapsed() < PATIENCE && self.seen.wrong.is_empty() {
            self.another_gateway();
            if self.ask().await {
                return self.seen.wrong.is_empty();
            }
        }
        false
    }

    /// Waits after a refusal, for as long as the refusal says. Panics if the refusal has none of
    /// these codes.
    async fn pause(&mut self, answer: &Answer, what: &str, codes: &[&str]) {
        let body = answer.json();
        let code = body["code"].as_str().unwrap_or_default();
        assert!(
            answer.status == 503 && codes.contains(&code),
            "{what} by {}: {answer:?}",
            self.label
        );
        let problem = answer.problem(503, code);
        self.seen.count(format!("{what}: 503 {code}"));
        sleep(Duration::from_millis(
            problem["retry_after_ms"].as_u64().expect("when to try again"),
        ))
        .await;
    }

    /// Extends the lock. A success proves that the client has held the lock all the time.
    async fn extend(&mut self) {
        let Some((Lease { token, fencing }, _)) = self.known.clone() else { return };
        let since = Instant::now();
        while since.elapsed() < PATIENCE {
            self.another_gateway();
            let answer = self.gateway().patch(&self.lock, &token, TTL_MS).await;
            if answer.status == 200 {
                let body = answer.json();
                assert_eq!(
                    (&body["token"], &body["fencing_token"]),
                    (&json!(token), &json!(fencing)),
                    "{answer:?}"
                );
                return self.seen.count("PATCH: 200");
            }
            if answer.status != 503 {
                return self.wrong(&format!("PATCH of a promised grant: {answer:?}"));
            }
            self.pause(&answer, "PATCH", &["outcome_unknown"]).await;
        }
        self.wrong("no extension in time");
    }

    async fn release(&mut self) {
        let Some((Lease { token, .. }, _)) = self.known.clone() else { return };
        let since = Instant::now();
        let mut perhaps_released = false;
        while since.elapsed() < PATIENCE {
            self.another_gateway();
            let answer = self.gateway().delete(&self.lock, &token).await;
            match answer.status {
                204 => return self.seen.count("DELETE: 204"),
                404 | 409 if perhaps_released => {
                    return self.seen.count("DELETE: done by one that was unknown");
                }
                503 => self.pause(&answer, "DELETE", &["outcome_unknown"]).await,
                _ => return self.wrong(&format!("DELETE of a promised grant: {answer:?}")),
            }
            perhaps_released = true;
        }
        self.wrong("no release in time");
    }
}
