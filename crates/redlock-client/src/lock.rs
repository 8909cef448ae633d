//! Acquires locks.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::future::pending;
use std::time::Duration;

use redlock_api::headers::IDEMPOTENCY_KEY;
use redlock_api::{AcquireBody, Granted, Problem, ProblemCode};
use serde_json::json;
use tokio::runtime::Handle;

use crate::client::{Backoff, Client, NoAnswer, Route, SHORTEST_TRY, deadline_of, millis};
use crate::clock::Moment;
use crate::error::Error;
use crate::guard::Guard;
use crate::http::Call;
use crate::names::Names;
use crate::place::Place;
use crate::waiting::{Callback, Waiting};
use crate::{log, owner};

/// The wait of the first request. It is short, so that a person soon sees the place in line.
const FIRST_TURN: Duration = Duration::from_secs(1);
/// The longest wait of one request. A longer wait is split, because proxies end a request that is
/// silent for half a minute.
const LONGEST_WAIT: Duration = Duration::from_secs(20);
const SHORTEST_WAIT: Duration = Duration::from_millis(100);
/// The longest wait of one request with several gateways: one that hangs must not use up the time.
const LONGEST_WAIT_OF_SEVERAL: Duration = Duration::from_secs(5);
/// Time for one request beyond its wait. An acquire without a decision is repeated for so long per
/// gateway, even if the caller does not wait.
const ONE_TRY: Duration = Duration::from_secs(5);
/// The part of a timeout that a wait leaves for the last answer, at most [`LONGEST_RESERVE`].
const RESERVE: u32 = 4;
const LONGEST_RESERVE: Duration = Duration::from_secs(1);
/// The longest default margin; the default is a tenth of the TTL.
const LONGEST_MARGIN: Duration = Duration::from_secs(2);

/// A lock to be acquired, with its options.
#[derive(Debug, Clone)]
#[must_use]
pub struct Lock {
    client: Client,
    names: Names,
    ttl: Duration,
    wait: Duration,
    timeout: Option<Duration>,
    needs_gateway: bool,
    owner: Option<String>,
    metadata: BTreeMap<String, String>,
    margin: Option<Duration>,
    at_least: Duration,
    priority: Option<u8>,
    queue: Option<Queue>,
    slots: Option<(u32, u32)>,
    on_waiting: Option<Callback>,
}

/// Which requests for a lock wait at a gateway at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Queue {
    /// All of them.
    All,
    /// Of the requests with this value, only the newest.
    Newest,
}

/// An acquired lock that nobody extends.
#[derive(Clone)]
pub struct Grant {
    /// The secret that extends and releases the lock.
    pub token: String,
    /// See [`Guard::fencing_token`].
    pub fencing_token: u64,
    /// Until when the lock is certainly held.
    pub deadline: Moment,
    /// See [`Guard::slots`].
    pub slots: Vec<u32>,
}

/// Leaves out the token, which is a secret.
impl fmt::Debug for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grant").field("fencing_token", &self.fencing_token).finish_non_exhaustive()
    }
}

impl Client {
    /// Returns a lock to be acquired.
    pub fn lock(&self, name: impl Into<String>) -> Lock {
        Lock {
            client: self.clone(),
            names: Names::new(name.into()),
            ttl: Duration::from_secs(30),
            wait: Duration::ZERO,
            timeout: self.timeout(),
            needs_gateway: false,
            owner: None,
            metadata: BTreeMap::new(),
            margin: None,
            at_least: Duration::ZERO,
            priority: None,
            queue: None,
            slots: None,
            on_waiting: None,
        }
    }
}

impl Lock {
    /// How long the lock outlives its holder; 30 s by default. A guard extends it long before.
    pub fn ttl(self, ttl: Duration) -> Self {
        Self { ttl, ..self }
    }

    /// How long to wait while somebody else holds the lock; 0 by default, which fails at once.
    /// [`Duration::MAX`] waits without end. All requests of one wait keep their place in the
    /// gateway's line, until that gateway fails.
    ///
    /// If no gateway can be reached, the acquire fails when this time is over: at once by default.
    pub fn wait(self, wait: Duration) -> Self {
        Self { wait, ..self }
    }

    /// The longest time for an acquire in all, its wait included. The default is that of
    /// [`crate::ClientBuilder::timeout`].
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }

    /// Fails at once if no gateway can be reached when the acquire begins. It may then still wait
    /// for the lock.
    pub fn needs_gateway(self) -> Self {
        Self { needs_gateway: true, ..self }
    }

    /// Calls a function after each answer while the acquire waits, for people. The function must
    /// not block.
    pub fn on_waiting(self, callback: impl Fn(&Waiting) + Send + Sync + 'static) -> Self {
        Self { on_waiting: Some(Callback::new(callback)), ..self }
    }

    /// The holder's label, shown to people who ask who holds the lock. The default is
    /// `user@host:pid program`.
    pub fn owner(self, owner: impl Into<String>) -> Self {
        Self { owner: Some(owner.into()), ..self }
    }

    /// Adds text that is stored beside the lock, for people.
    pub fn metadata(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    /// How long before its deadline a lock that cannot be extended counts as lost. It should be as
    /// long as the work takes to stop, and must be less than half of the TTL. The default is a
    /// tenth of the TTL, at most 2 s.
    pub fn margin(self, margin: Duration) -> Self {
        Self { margin: Some(margin), ..self }
    }

    /// How long nobody else gets the lock, counted from its grant, even if the guard releases it
    /// earlier. So a job runs once although the clocks of its hosts differ. At most the
    /// longest TTL of the gateway.
    pub fn at_least(self, at_least: Duration) -> Self {
        Self { at_least, ..self }
    }

    /// How early the request is served while it waits: 0 to 9, and 9 is served first. The gateway's
    /// default is 5.
    pub fn priority(self, priority: u8) -> Self {
        Self { priority: Some(priority), ..self }
    }

    /// Which requests for the lock wait at the same time; all of them by default. With
    /// [`Queue::Newest`], a newer request of this kind ends the wait with [`Error::Refused`], whose
    /// problem has the code `superseded`.
    pub fn queue(self, queue: Queue) -> Self {
        Self { queue: Some(queue), ..self }
    }

    /// Takes `take` of `slots` slots, all or none. Up to `slots` clients hold the lock at once: 1 to
    /// 256. Every request for a lock should give the same `slots`, because the largest number in
    /// use is the bound. Without this, the lock has one holder.
    pub fn slots(self, slots: u32, take: u32) -> Self {
        Self { slots: Some((slots, take)), ..self }
    }

    /// Acquires another lock together with this one: all or none, with one token. They wait without
    /// holding any of them, so overlapping sets cannot deadlock. The guard is lost when one of
    /// the locks is lost. Not together with [`Lock::slots`] and [`Lock::queue`].
    pub fn also(self, name: impl Into<String>) -> Self {
        Self { names: self.names.and(name.into()), ..self }
    }

    /// Acquires the lock, and extends it until the guard is released or dropped. Dropping the
    /// future leaves the queue.
    ///
    /// # Errors
    /// [`Error::Held`], [`Error::Refused`], [`Error::Unavailable`]; [`Error::Setup`] for an
    /// impossible name or margin.
    pub async fn acquire(self) -> Result<Guard, Error> {
        let Ok(guard) = self.acquire_unless(pending::<Infallible>()).await?;
        Ok(guard)
    }

    /// Acquires the lock unless `cancelled` resolves first.
    ///
    /// If `cancelled` resolves first, the inner result is what it resolved to. Before this method
    /// returns, the request leaves the queue. If it may have been granted the lock, this method
    /// also releases the lock. It gives up when no gateway has answered for 2 s.
    ///
    /// # Errors
    /// Those of [`Lock::acquire`].
    pub async fn acquire_unless<C>(
        self,
        cancelled: impl Future<Output = C>,
    ) -> Result<Result<Guard, C>, Error> {
        let margin = margin(self.ttl, self.margin)?;
        let answer = self.request_unless(cancelled).await?;
        Ok(answer.map(|(lease, deadline, sent)| {
            Guard::new(self.client, self.names, lease, sent, deadline, self.ttl, margin)
        }))
    }

    /// Runs `work` under the lock. If the lock is lost, the work is dropped where it stands. Work
    /// that ends after the loss is reported as lost too.
    ///
    /// # Errors
    /// Those of [`Lock::acquire`], and [`Error::Lost`].
    pub async fn hold<T>(self, work: impl AsyncFnOnce(&Guard) -> T) -> Result<T, Error> {
        let guard = self.acquire().await?;
        let value = tokio::select! {
            biased;
            loss = guard.lost() => return Err(Error::Lost(loss)),
            value = work(&guard) => value,
        };
        guard.check()?;
        // The lock was held until the work was done. If the release fails, the lock ends with its
        // TTL.
        if let Err(error) = guard.release().await {
            let line = log::write(move || {
                tracing::warn!(%error, "a lock was not released, and ends with its TTL");
            });
            log::written(line).await;
        }
        Ok(value)
    }

    /// Acquires the lock. The owner of its token extends and releases it.
    ///
    /// # Errors
    /// Those of [`Lock::acquire`].
    pub async fn grant(&self) -> Result<Grant, Error> {
        let Ok((lease, deadline, _)) = self.request_unless(pending::<Infallible>()).await?;
        let Granted { token, fencing_token, slots_held, .. } = lease;
        let slots = slots_held.unwrap_or_default();
        Ok(Grant { token, fencing_token, deadline, slots })
    }

    /// Returns the grant, its deadline, and when its request was sent.
    async fn request_unless<C>(
        &self,
        cancelled: impl Future<Output = C>,
    ) -> Result<Result<(Granted, Moment, Moment), C>, Error> {
        let mut random = [0; 16];
        getrandom::fill(&mut random)
            .map_err(|error| Error::Setup(format!("no randomness: {error}")))?;
        // All repetitions have the same key, so each answer is about the same grant.
        let key = hex::encode(random);
        let call = self.names.acquisition()?.secret(&IDEMPOTENCY_KEY, &key)?;
        let (client, names, slots) = (self.client.clone(), self.names.clone(), self.slots);
        let request = Request { client, names, key, slots };
        let mut unanswered = Unanswered(Some(request.clone()));
        let mut route = self.client.route();
        let answer = tokio::select! {
            biased;
            answer = self.granted(call, &mut route) => answer.map(Ok),
            cancelled = cancelled => Ok(Err(cancelled)),
        };
        // The lock may have been granted, and nobody has the token. That holds after `lock_held`
        // too: a gateway that still works on an unanswered POST may grant the lock when its holder
        // releases it. The release is safe, because it takes only grants of this key.
        let may_be_granted = match &answer {
            Ok(Ok(_)) => false,
            // A POST may be in flight.
            Ok(Err(_)) => true,
            Err(_) => route.is_unsettled,
        };
        if may_be_granted {
            request.release().await;
        }
        unanswered.0 = None;
        answer
    }

    /// Marks the route as unsettled if a POST may have been granted the lock, or has a place in
    /// line, and its answer is of no use.
    async fn granted(
        &self,
        call: Call,
        route: &mut Route,
    ) -> Result<(Granted, Moment, Moment), Error> {
        let begin = Moment::now();
        let gateways = self.client.gateways();
        let mut longest = if gateways > 1 { LONGEST_WAIT_OF_SEVERAL } else { LONGEST_WAIT };
        let timeout = self.timeout.unwrap_or(Duration::MAX);
        let reserve = (timeout / RESERVE).min(LONGEST_RESERVE);
        let end_of_wait = begin + self.wait.min(timeout - reserve);
        // The last turn ends at the end of the wait. After that, each gateway has one more try.
        let give_up = (end_of_wait + ONE_TRY * gateways).min(begin + timeout);
        let mut turn = FIRST_TURN;
        let mut place = Place::default();
        let mut backoff = Backoff::default();
        let mut was_answered = false;
        let name = &self.names.text().to_owned();
        while !give_up.has_passed() {
            let sent = Moment::now();
            let request_wait = end_of_wait.left().min(turn).min(longest);
            let body = self.names.with_names(self.body(request_wait));
            let call = call.clone().body(&body);
            let one_try = request_wait + ONE_TRY;
            let problem = match self.client.round::<Granted>(&call, give_up, one_try, route).await {
                Ok((Some(lease), _)) if !is_token(&lease.token) => {
                    route.is_unsettled = true;
                    return Err(Error::Setup(format!(
                        "{name}: POST was answered with a malformed token"
                    )));
                }
                Ok((Some(lease), sent)) => {
                    let deadline = deadline_of(lease.validity_ms, lease.elapsed_ms, sent, self.ttl);
                    if !deadline.has_passed() {
                        return Ok((lease, deadline, sent));
                    }
                    // The answer took longer than the lock lives. A repetition extends the lock or
                    // gets a new grant.
                    route.is_unsettled = true;
                    continue;
                }
                Ok((None, _)) => {
                    route.is_unsettled = true;
                    return Err(Error::Setup(format!("{name}: POST was answered 204")));
                }
                Err(NoAnswer::Round(round)) => {
                    let pause = backoff.next(round.retry_after);
                    let is_over = round.is_unreachable
                        && (end_of_wait.has_passed() || self.needs_gateway && !was_answered);
                    if is_over || pause + SHORTEST_TRY >= give_up.left() {
                        return Err(round.unavailable(Some(name.clone())));
                    }
                    if !end_of_wait.has_passed()
                        && let Some(waiting) = place.undecided(&self.client, route, name, &round)
                    {
                        self.report(&waiting);
                    }
                    tokio::time::sleep(pause).await;
                    continue;
                }
                Err(NoAnswer::Refused(problem)) => problem,
            };
            was_answered = true;
            backoff = Backoff::default();
            match problem.known_code() {
                Some(ProblemCode::InvalidWait) if longest > SHORTEST_WAIT => {
                    longest = (request_wait / 2).max(SHORTEST_WAIT);
                }
                Some(ProblemCode::LockHeld) if end_of_wait.has_passed() => {
                    // Nobody comes back for the place that the gateway keeps.
                    route.is_unsettled |= problem.queue_place_expires_ms.is_some();
                    let Problem { holder, acquired_at, expires_in_ms, .. } = *problem;
                    let expires_in = expires_in_ms.map(Duration::from_millis);
                    let name = name.clone();
                    return Err(Error::Held { name, holder, acquired_at, expires_in });
                }
                Some(ProblemCode::LockHeld) => {
                    self.report(&place.held(&self.client, route, name, &problem));
                    turn = longest;
                    // The answer came early, so the repetition waits.
                    if Moment::now().since(sent) < request_wait / 2 {
                        let place_ends = problem.queue_place_expires_ms.unwrap_or(u64::MAX);
                        let pause = problem.retry_after_ms.unwrap_or(1_000).min(place_ends / 2);
                        let pause = Duration::from_millis(pause).min(end_of_wait.left());
                        tokio::time::sleep(pause).await;
                    }
                }
                _ => return Err(Error::Refused { name: Some(name.clone()), problem }),
            }
        }
        let what = if route.is_unsettled {
            "answers took longer than the lock lives"
        } else {
            "the time limit was over before an answer came"
        };
        let what = vec![what.to_owned()];
        Err(Error::Unavailable { name: Some(name.clone()), what, is_unreachable: false })
    }

    fn report(&self, waiting: &Waiting) {
        if let Some(trouble) = waiting.trouble.clone() {
            let name = waiting.name.clone();
            log::write(move || tracing::warn!(name, trouble, "a wait for a lock is disturbed"));
        }
        if let Some(callback) = &self.on_waiting {
            callback.call(waiting);
        }
    }

    fn body(&self, wait: Duration) -> AcquireBody {
        AcquireBody {
            ttl_ms: Some(millis(self.ttl)),
            wait_ms: Some(millis(wait)),
            hold_at_least_ms: (!self.at_least.is_zero()).then(|| millis(self.at_least)),
            priority: self.priority.map(Into::into),
            queue: self.queue.map(|queue| match queue {
                Queue::All => "all".into(),
                Queue::Newest => "newest".into(),
            }),
            slots: self.slots.map(|(slots, _)| slots.into()),
            take: self.slots.map(|(_, take)| take.into()),
            owner: Some(self.owner.clone().unwrap_or_else(owner::of_this_process).into()),
            metadata: (!self.metadata.is_empty()).then(|| json!(self.metadata)),
        }
    }
}

/// Whether a token has only characters that shells and headers take unquoted.
fn is_token(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-'))
}

/// An acquire whose token has not arrived. Dropping it releases the lock in the background.
struct Unanswered(Option<Request>);

/// Identifies an acquire for its release.
#[derive(Debug, Clone)]
struct Request {
    client: Client,
    names: Names,
    key: String,
    slots: Option<(u32, u32)>,
}

impl Request {
    async fn release(&self) {
        let Self { client, names, key, slots } = self;
        let released = match names.release_without_token() {
            Ok(call) => client.release_by_key(call, key, *slots).await,
            Err(error) => Err(error),
        };
        if let Err(error) = released {
            let name = names.text().to_owned();
            log::write(move || {
                tracing::debug!(
                    name,
                    %error,
                    "an unanswered acquire was not released by its idempotency key"
                );
            });
        }
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        // Without a runtime the lock ends with its TTL.
        if let (Some(request), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            runtime.spawn(async move { request.release().await });
        }
    }
}

/// A guard extends at a third of the validity. A margin of half the TTL or more would leave hardly
/// any time for a second try.
fn margin(ttl: Duration, chosen: Option<Duration>) -> Result<Duration, Error> {
    match chosen {
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
    fn a_margin_is_less_than_half_the_ttl() {
        let ttl = Duration::from_secs(1);
        let ms = Duration::from_millis;
        assert_eq!(margin(ttl, None).unwrap(), ms(100));
        assert_eq!(margin(ttl * 60, None).unwrap(), LONGEST_MARGIN);
        assert_eq!(margin(ttl, Some(ms(499))).unwrap(), ms(499));
        for wrong in [ms(500), ttl, Duration::MAX] {
            let error = margin(ttl, Some(wrong)).unwrap_err().to_string();
            assert!(
                error.contains(&format!("{wrong:?}"))
                    && error.contains("less than half of the TTL of 1s"),
                "{error}"
            );
        }
    }
}
