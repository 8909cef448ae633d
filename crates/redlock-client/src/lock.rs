//! Acquiring.

use std::collections::BTreeMap;
use std::time::Duration;

use reqwest::Method;
use serde_json::json;
use tokio::runtime::Handle;

use crate::client::{Client, Granted};
use crate::clock::Moment;
use crate::error::{Error, Problem};
use crate::guard::Guard;
use crate::http::{Call, IDEMPOTENCY_KEY};

/// A gateway answers a longer wait in turns: proxies in front end a request that is silent for half a minute.
const LONGEST_TURN: Duration = Duration::from_secs(20);
const SHORTEST_TURN: Duration = Duration::from_millis(100);
/// Where there are several gateways: one that hangs must not have all the time.
const TURN_OF_SEVERAL: Duration = Duration::from_secs(5);
/// Beside its wait, for one request.
const ONE_TRY: Duration = Duration::from_secs(5);
/// For how long a lock is asked for that nobody decides on, also without a wait.
const UNDECIDED: Duration = Duration::from_secs(5);
/// The end of a lease that is left for whoever has to stop: a tenth of the TTL, and no more than this.
const LONGEST_MARGIN: Duration = Duration::from_secs(2);

/// A lock to be acquired, and how.
#[derive(Debug, Clone)]
#[must_use]
pub struct Lock {
    client: Client,
    name: String,
    ttl: Duration,
    wait: Duration,
    owner: Option<String>,
    metadata: BTreeMap<String, String>,
    margin: Option<Duration>,
}

/// A lock that nobody extends.
#[derive(Debug, Clone)]
pub struct Grant {
    /// The secret by which it is extended and released.
    pub token: String,
    /// As of [`Guard::fencing_token`].
    pub fencing_token: u64,
    /// Until when it is certainly ours.
    pub deadline: Moment,
}

impl Client {
    /// A lock to be acquired.
    pub fn lock(&self, name: impl Into<String>) -> Lock {
        Lock {
            client: self.clone(),
            name: name.into(),
            ttl: Duration::from_secs(30),
            wait: Duration::ZERO,
            owner: None,
            metadata: BTreeMap::new(),
            margin: None,
        }
    }
}

impl Lock {
    /// For how long the lock outlives its holder: 30 s unless this says otherwise. It is extended long before.
    pub fn ttl(self, ttl: Duration) -> Self {
        Self { ttl, ..self }
    }

    /// How long to wait for it while somebody else holds it, 0 by default: whoever is refused is told at once.
    pub fn wait(self, wait: Duration) -> Self {
        Self { wait, ..self }
    }

    /// A label for people: shown to whoever asks who holds the lock.
    pub fn owner(self, owner: impl Into<String>) -> Self {
        Self { owner: Some(owner.into()), ..self }
    }

    /// Stored beside the lock, for people.
    pub fn metadata(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    /// How long before its deadline a lock that could not be extended is given up for lost; a tenth of the TTL by default, 2 s
    /// at most; less than half of the TTL. As long as work takes to stop.
    pub fn margin(self, margin: Duration) -> Self {
        Self { margin: Some(margin), ..self }
    }

    /// Acquires it, and keeps it until the guard is released or dropped. Dropping the future leaves the queue.
    ///
    /// # Errors
    /// [`Error::Held`], [`Error::Refused`] with what is allowed, [`Error::Unavailable`]; [`Error::Setup`] for a name or margin that
    /// cannot work.
    pub async fn acquire(self) -> Result<Guard, Error> {
        let guard = self.acquire_unless(std::future::pending()).await?;
        guard.ok_or_else(|| Error::Setup("nobody cancels this request".into()))
    }

    /// Acquires the lock unless `cancelled` resolves first. Returns `None` then. By that time the request has left the queue,
    /// and a lock that it may have been granted is released, or no gateway has answered for 2 s.
    ///
    /// # Errors
    /// As of [`Lock::acquire`].
    pub async fn acquire_unless(
        self,
        cancelled: impl Future<Output = ()>,
    ) -> Result<Option<Guard>, Error> {
        let margin = margin(self.ttl, self.margin)?;
        let Some((granted, deadline, sent)) = self.asked_unless(cancelled).await? else {
            return Ok(None);
        };
        Ok(Some(Guard::new(self.client, self.name, granted, sent, deadline, self.ttl, margin)))
    }

    /// Runs this under the lock. When it is lost, the work is dropped where it stands; work that ended after the loss is
    /// reported as lost too.
    ///
    /// # Errors
    /// As of [`Lock::acquire`], and [`Error::Lost`].
    pub async fn hold<T>(self, work: impl AsyncFnOnce(&Guard) -> T) -> Result<T, Error> {
        let guard = self.acquire().await?;
        let value = tokio::select! {
            biased;
            loss = guard.lost() => return Err(Error::Lost(loss)),
            value = work(&guard) => value,
        };
        guard.check()?;
        // It was ours until the work was done; whatever becomes of the release, it ends with its TTL.
        if let Err(error) = guard.release().await {
            tracing::warn!(%error, "a lock was not released, and ends with its TTL");
        }
        Ok(value)
    }

    /// Acquires it, and leaves extending and releasing to whoever has its token.
    ///
    /// # Errors
    /// As of [`Lock::acquire`].
    pub async fn grant(&self) -> Result<Grant, Error> {
        let granted = self.asked_unless(std::future::pending()).await?;
        let (Granted { token, fencing_token, .. }, deadline, _) =
            granted.ok_or_else(|| Error::Setup("nobody cancels this request".into()))?;
        Ok(Grant { token, fencing_token, deadline })
    }

    /// The grant with its deadline and the moment its request was sent. `None` when it was cancelled.
    async fn asked_unless(
        &self,
        cancelled: impl Future<Output = ()>,
    ) -> Result<Option<(Granted, Moment, Moment)>, Error> {
        let mut random = [0; 16];
        getrandom::fill(&mut random)
            .map_err(|error| Error::Setup(format!("no randomness: {error}")))?;
        // The same for all repetitions: whichever is answered tells of the same grant.
        let key = hex::encode(random);
        let call = Call::of_lock(Method::POST, &self.name)?.secret(&IDEMPOTENCY_KEY, &key)?;
        let request = Request { client: self.client.clone(), name: self.name.clone(), key };
        let mut unanswered = Unanswered(Some(request.clone()));
        let answer = tokio::select! {
            biased;
            answer = self.granted(call) => answer.map(Some),
            () = cancelled => Ok(None),
        };
        if matches!(answer, Ok(None) | Err(Error::Unavailable { .. } | Error::Setup(_))) {
            request.release().await;
        }
        unanswered.0 = None;
        answer
    }

    async fn granted(&self, call: Call) -> Result<(Granted, Moment, Moment), Error> {
        let end_of_wait = Moment::now() + self.wait;
        let gateways = self.client.gateways();
        let mut longest = if gateways > 1 { TURN_OF_SEVERAL } else { LONGEST_TURN };
        let give_up = (Moment::now() + UNDECIDED).max(end_of_wait)
            + (longest.min(self.wait) + ONE_TRY) * gateways;
        while !give_up.has_passed() {
            let asked = Moment::now();
            let turn = end_of_wait.left().min(longest);
            let body = json!({ "ttl_ms": self.ttl.as_millis() as u64, "wait_ms": turn.as_millis() as u64 });
            let call = call.clone().body(self.described(body));
            match self.client.ask::<Granted>(&call, give_up, turn + ONE_TRY).await {
                Ok((Some(granted), _)) if !granted.has_token() => {
                    return Err(Error::Setup("POST was answered with a token that is none".into()));
                }
                Ok((Some(granted), sent)) => {
                    let deadline = granted.deadline(sent, self.ttl);
                    if !deadline.has_passed() {
                        return Ok((granted, deadline, sent));
                    }
                    // The answer was on its way for longer than the lock lives. Asked again, it is extended or granted anew.
                }
                Ok((None, _)) => return Err(Error::Setup("POST was answered 204".into())),
                Err(Error::Refused(problem))
                    if problem.code == "invalid_wait" && longest > SHORTEST_TURN =>
                {
                    longest = (turn / 2).max(SHORTEST_TURN);
                }
                Err(Error::Refused(problem)) if problem.code == "lock_held" => {
                    if end_of_wait.has_passed() {
                        let Problem { holder, expires_in_ms, .. } = *problem;
                        return Err(Error::Held {
                            holder,
                            expires_in: expires_in_ms.map(Duration::from_millis),
                        });
                    }
                    // Answered before its turn was over: not to be asked again at once.
                    if Moment::now().since(asked) < turn / 2 {
                        let pause = Duration::from_millis(problem.retry_after_ms.unwrap_or(1_000));
                        tokio::time::sleep(pause.min(end_of_wait.left())).await;
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Err(Error::Unavailable { what: vec!["answers took longer than the lock lives".into()] })
    }

    fn described(&self, mut body: serde_json::Value) -> serde_json::Value {
        if let Some(owner) = &self.owner {
            body["owner"] = json!(owner);
        }
        if !self.metadata.is_empty() {
            body["metadata"] = json!(self.metadata);
        }
        body
    }
}

/// A lock that may have been granted without anybody having its token. Dropped, it is released in the background.
struct Unanswered(Option<Request>);

/// By which it was asked for.
#[derive(Debug, Clone)]
struct Request {
    client: Client,
    name: String,
    key: String,
}

impl Request {
    async fn release(&self) {
        let Self { client, name, key } = self;
        if let Err(error) = client.release_by_key(name, key).await {
            tracing::debug!(name, %error, "a lock that was asked for in vain was not released by its key");
        }
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        // Without a runtime it ends with its TTL.
        if let (Some(request), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            runtime.spawn(async move { request.release().await });
        }
    }
}

/// It is extended at a third of its validity: with half of it or more as margin hardly any time would be left for trying again.
fn margin(ttl: Duration, asked: Option<Duration>) -> Result<Duration, Error> {
    match asked {
        None => Ok((ttl / 10).min(LONGEST_MARGIN)),
        Some(margin) if margin.saturating_mul(2) < ttl => Ok(margin),
        Some(margin) => Err(Error::Setup(format!(
            "the margin of {margin:?} has to be less than half of the TTL of {ttl:?}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_margin_of_half_the_ttl_left_no_time_to_try_again() {
        let ttl = Duration::from_secs(1);
        let ms = Duration::from_millis;
        assert_eq!(margin(ttl, None).unwrap(), ms(100));
        assert_eq!(margin(ttl * 60, None).unwrap(), LONGEST_MARGIN);
        assert_eq!(margin(ttl, Some(ms(499))).unwrap(), ms(499));
        for wrong in [ms(500), ttl, Duration::MAX] {
            let told = margin(ttl, Some(wrong)).unwrap_err().to_string();
            assert!(
                told.contains(&format!("{wrong:?}"))
                    && told.contains("less than half of the TTL of 1s"),
                "{told}"
            );
        }
    }
}
