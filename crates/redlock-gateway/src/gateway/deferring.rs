//! Carries deferred requests out: waits for the lock, holds it for the accept window, and calls the
//! client. [`super::requests`] says what a deferred request is, and why two clients never hold its
//! lock.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use redlock_core::{LockError, Owner, Ttl};
use tokio::time::{Instant as TokioInstant, sleep_until};

use super::requests::{
    CallbackOutcome, DeferredEnd, DeferredRequest, DeferredStage, GrantNotifier, RequestId,
};
use super::tokens;
use super::{AcquireRequest, Gateway, GrantGuard, LeaseView, Refusal};
use crate::callbacks::{CallbackError, CallbackUrl};
use crate::config::Limits;
use crate::overload::in_flight::InFlight;

/// How long a grant waits for its claim: the accept window. A shorter `--max-ttl` shortens it.
const ACCEPT_WINDOW: Duration = Duration::from_secs(10);
/// When the callbacks begin, as parts of the accept window. After a delivered one there is none.
const ATTEMPTS: [f64; 3] = [0.0, 0.3, 0.6];
/// How long one callback may take, as a part of the accept window. Each ends before the next one
/// begins.
const ATTEMPT_TIME: f64 = 0.25;

/// How long a repetition of a superseded request is answered like that request, as in the queue.
const SUPERSEDED_FOR: Duration = Duration::from_secs(10);

/// The TTL of a deferred grant.
pub fn accept_window(limits: &Limits) -> Ttl {
    Ttl::from_duration(ACCEPT_WINDOW).unwrap_or(Ttl::MIN).min(limits.max_ttl)
}

impl Gateway {
    fn owner_of(&self, request: &AcquireRequest) -> Owner {
        let AcquireRequest { target, principal, idempotency_key, .. } = request;
        let key = idempotency_key.as_deref().unwrap_or_default();
        tokens::owner_of_key(&self.cluster, target, principal.as_deref(), key)
    }

    /// Begins a request that is answered before it is granted, or finds the one with the same key.
    /// Returns when it waits or is ready, and says whether it is a new one.
    ///
    /// # Errors
    /// The first attempt failed, or too many such requests have not ended.
    pub async fn defer(
        self: &Arc<Self>,
        request: AcquireRequest,
        in_flight: InFlight,
        callback: Option<CallbackUrl>,
        notifier: impl GrantNotifier<Refusal> + 'static,
    ) -> Result<(Arc<DeferredRequest<Refusal>>, bool), Refusal> {
        let owner = self.owner_of(&request);
        if let Some(known) = self.deferred.find(&RequestId::of(&owner))
            && let DeferredStage::Ended(DeferredEnd::Refused(refusal)) = known.stage()
            && matches!(*refusal, Refusal::Lock(LockError::Superseded))
            && known.ended_at().is_some_and(|at| at.elapsed() < SUPERSEDED_FOR)
        {
            return Err(Refusal::clone(&refusal));
        }
        let principal = request.principal.clone();
        let limits = (self.wait_share.waiters, self.wait_share.deferred);
        let who = (principal, &request.client);
        let (deferred, is_new) =
            self.deferred.add(owner, request.target.clone(), who, limits).map_err(Refusal::Full)?;
        if is_new {
            let task = DeferredTask {
                gateway: self.clone(),
                deferred: deferred.clone(),
                callback,
                notifier: Box::new(notifier),
                client_knows_id: false,
            };
            tokio::spawn(task.run(request, in_flight));
        }
        deferred.is_decided().await;
        match deferred.stage() {
            DeferredStage::Ended(DeferredEnd::Refused(refusal)) => Err(Refusal::clone(&refusal)),
            DeferredStage::Begun
            | DeferredStage::Waiting
            | DeferredStage::Ready(_)
            | DeferredStage::Ended(_) => Ok((deferred, is_new)),
        }
    }

    /// The request with this id, if this principal may see it.
    pub fn deferred(
        &self,
        id: &RequestId,
        principal: Option<&str>,
    ) -> Option<Arc<DeferredRequest<Refusal>>> {
        self.deferred.find(id).filter(|request| request.principal.as_deref() == principal)
    }

    /// The place of a deferred request in the queue: 1 is served next. `None` for a moment when the
    /// request moves from the queue of one lock of its set to that of another.
    pub fn deferred_position(&self, request: &DeferredRequest<Refusal>) -> Option<usize> {
        request.target.locks().iter().find_map(|name| self.locks.position(name, &request.owner))
    }

    /// Cancels a deferred request. Its lock is released, unless it was claimed.
    pub fn cancel(&self, request: &DeferredRequest<Refusal>) {
        request.end(DeferredEnd::Cancelled);
    }
}

/// The task of one request. When it is dropped, the request has ended.
struct DeferredTask {
    gateway: Arc<Gateway>,
    deferred: Arc<DeferredRequest<Refusal>>,
    callback: Option<CallbackUrl>,
    notifier: Box<dyn GrantNotifier<Refusal>>,
    client_knows_id: bool,
}

impl DeferredTask {
    async fn run(mut self, request: AcquireRequest, in_flight: InFlight) {
        let (on_wait, mut waits) = tokio::sync::watch::channel(None);
        let request = AcquireRequest { on_wait: Some(on_wait), is_deferred: true, ..request };
        let (gateway, deferred) = (self.gateway.clone(), self.deferred.clone());
        let window = request.ttl.duration();
        let result = {
            let acquired = acquire(&gateway, &deferred, request, in_flight);
            tokio::pin!(acquired);
            loop {
                tokio::select! {
                    result = &mut acquired => break result,
                    Ok(()) = waits.changed(), if !self.client_knows_id => {
                        self.client_knows_id = deferred.advance(DeferredStage::Waiting);
                    }
                }
            }
        };
        match result {
            Err(refusal) => {
                // Without a wait, the refusal is the answer to the client, unless the request ended
                // before.
                self.client_knows_id |= !deferred.is_open();
                deferred.end(DeferredEnd::Refused(Arc::new(refusal)));
            }
            Ok((view, guard)) => {
                self.client_knows_id = true;
                if view.replayed && view.validity > window {
                    // An earlier request with this key was granted the lock for longer, so its client
                    // has it at work.
                    guard.delivered();
                    return deferred.end(DeferredEnd::Claimed);
                }
                self.hold(&view, guard).await;
            }
        }
    }

    /// Holds the grant during the accept window, and calls the client.
    async fn hold(&self, view: &LeaseView, guard: GrantGuard) {
        let (granted, begins) = (SystemTime::now(), Instant::now());
        let ends = begins + view.validity;
        if !self.notifier.is_allowed() {
            // The guard releases the grant.
            return self.deferred.end(DeferredEnd::Revoked);
        }
        if !self.deferred.advance(DeferredStage::Ready(ends)) {
            return self.give_back(guard);
        }
        let window = async {
            tokio::select! {
                // After a claim, this undo leaves the grant in place.
                () = self.deferred.has_ended() => self.give_back(guard),
                () = sleep_until(ends.into()) => {
                    // The grant ends by itself. A claim at another gateway may have extended it.
                    guard.delivered();
                    self.deferred.end(DeferredEnd::Expired);
                }
            }
        };
        // A claim does not cut a callback that is under way.
        tokio::join!(window, self.call_back(view, granted, begins, ends));
    }

    /// Undoes the grant of a request that ended early. A claimed grant stays.
    fn give_back(&self, guard: GrantGuard) {
        match self.deferred.stage() {
            DeferredStage::Ended(DeferredEnd::Claimed) => guard.delivered(),
            DeferredStage::Begun
            | DeferredStage::Waiting
            | DeferredStage::Ready(_)
            | DeferredStage::Ended(_) => drop(guard),
        }
    }

    /// Calls the client until a callback is delivered, or all attempts have failed.
    async fn call_back(
        &self,
        view: &LeaseView,
        granted: SystemTime,
        begins: Instant,
        ends: Instant,
    ) {
        let (Some(url), Some(callbacks)) = (&self.callback, &self.gateway.callbacks) else {
            return;
        };
        let window = ends.saturating_duration_since(begins);
        // Two gateways may announce the same grant. The receiver sees the same id.
        let id = format!("msg_{}_{}", self.deferred.id, view.token.fencing());
        let body = || {
            let left = ends.saturating_duration_since(Instant::now());
            let message = || self.notifier.message(self.deferred.id, granted, left);
            self.deferred.is_open().then(message)
        };
        for at in ATTEMPTS {
            tokio::select! {
                biased;
                () = self.deferred.has_ended() => return,
                () = sleep_until(TokioInstant::from_std(begins + window.mul_f64(at))) => {}
            }
            if !self.notifier.is_allowed() {
                return self.deferred.end(DeferredEnd::Revoked);
            }
            if !self.notifier.may_be_called() {
                return;
            }
            let limit = window.mul_f64(ATTEMPT_TIME);
            let result = callbacks.send(&self.deferred.client, url, &id, body, limit).await;
            if result == Err(CallbackError::NotNeeded) {
                return;
            }
            self.gateway.telemetry.callback(result.is_ok());
            self.notifier.callback_ended(&result);
            match result {
                Ok(()) => return self.deferred.called(CallbackOutcome::Delivered),
                Err(_) => self.deferred.called(CallbackOutcome::Failed),
            }
        }
    }
}

impl Drop for DeferredTask {
    fn drop(&mut self) {
        // Without an end, the task was stopped by a panic.
        self.deferred.end(DeferredEnd::Cancelled);
        // A refusal that answered the client has a record already.
        if let (DeferredStage::Ended(end), true) = (self.deferred.stage(), self.client_knows_id) {
            self.notifier.ended(&end);
        }
        let Gateway { deferred, wait_share, .. } = &*self.gateway;
        deferred.ended(&self.deferred, self.client_knows_id, wait_share.deferred);
    }
}

/// Acquires the lock. A drain waits for this part of the request.
async fn acquire(
    gateway: &Gateway,
    deferred: &DeferredRequest<Refusal>,
    request: AcquireRequest,
    mut in_flight: InFlight,
) -> Result<(LeaseView, GrantGuard), Refusal> {
    let _active = gateway.begin();
    gateway.acquire(request, &mut in_flight, deferred.has_ended()).await
}
