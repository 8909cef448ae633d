//! Deferred requests: those of `POST /requests`, which are answered before they are granted.
//!
//! A process of the gateway waits for the lock with a short TTL, the accept window, and rings the
//! client. It neither extends nor releases the grant, except that it undoes the grant if the client
//! gives the request up. The ring may be lost, or come late. The client claims the lock by an
//! ordinary request for the same owner, at any gateway, once or twice at a time, or never. The process
//! may die at any time.

use std::time::Duration;

use redlock_core::{AcquireOptions, Info, LockSet, OwnerChoice, Ttl};
use tokio::sync::oneshot;

use super::{Client, FIRST_SLOT, How, Wish, answer, lock_name, lock_names};
use crate::history::{Answer, Request};

/// The accept window. It is short, as all TTLs here.
pub const WINDOW_MS: u64 = 1_000;

impl Client {
    pub(super) async fn defer(&mut self) {
        let patience = self.chance.millis(100, 3_000);
        let owner = Some(self.owner());
        let wish = Wish { owner, how: How::Once, hangs_up: None, ..self.wish(0) };
        let gateway = self.home();
        let (ring, rung) = oneshot::channel();
        let (give_up, given_up) = oneshot::channel();
        if !self.begin_deferred(gateway, wish, patience, ring, given_up) {
            return;
        }
        let is_heard = self.chance.percent(75);
        let late = self.chance.millis(0, WINDOW_MS + 300);
        if is_heard && rung.await.is_err() {
            // The gateway refused the request or died. Half of the clients give up. The others ask
            // once more with the same owner.
            if self.chance.percent(50) {
                return;
            }
        }
        let pause = if self.chance.percent(60) { Duration::ZERO } else { late };
        tokio::time::sleep(pause).await;
        let fate = self.chance.below(100);
        if fate < 25 {
            let _ = give_up.send(());
        }
        // A quarter of the clients do not claim. Some clients cancel and claim nevertheless.
        if (10..35).contains(&fate) {
            return;
        }
        let (one, other) = (self.any_gateway(), self.any_gateway());
        let held = if self.chance.percent(30) {
            let (one, other) =
                tokio::join!(biased; self.acquire(one, wish), self.acquire(other, wish));
            one.into_iter().chain(other).max_by_key(|hold| hold.grant.fencing)
        } else {
            self.acquire(one, wish).await
        };
        if let Some(hold) = held {
            self.use_all(hold, wish).await;
        }
    }

    /// Begins the part of the gateway. Returns false if the gateway is down.
    fn begin_deferred(
        &self,
        gateway: u8,
        wish: Wish,
        patience: Duration,
        ring: oneshot::Sender<()>,
        given_up: oneshot::Receiver<()>,
    ) -> bool {
        let Wish { name, other, slots, owner, .. } = wish;
        let owner = owner.expect("deferred requests have an owner");
        let window = Ttl::from_millis(WINDOW_MS).expect("within the limits");
        let more = slots.map_or(0, |slots| slots.count() as u8 - 1);
        let names: Vec<_> =
            std::iter::once(name).chain(other).chain((1..=more).map(|slot| name + slot)).collect();
        let request =
            Request::Acquire { owner: Some(owner.1), ttl_ms: WINDOW_MS, patience_ms: None };
        let numbers: Vec<_> = names
            .iter()
            .map(|name| self.recorder.begin(self.index, self.through(gateway), *name, request))
            .collect();
        let info = Info::new(format!("c{} later", self.index)).unwrap_or_default();
        let options = AcquireOptions {
            info,
            slots,
            owner: OwnerChoice::Shared(owner.0),
            ..AcquireOptions::default()
        };
        let recorder = self.recorder.clone();
        let releases_unclaimed = self.releases_unclaimed;
        let work = async move |redlock: redlock_core::Redlock| {
            let lock = lock_name(name);
            let acquired = match other {
                Some(other) => {
                    let set = LockSet::new(vec![lock, lock_name(other)]).expect("two names");
                    redlock.acquire_set(&set, window, options, Some(patience), |_| Ok(())).await
                }
                None => redlock.acquire_within(&lock, window, options, patience, || Ok(())).await,
            };
            let end = |answer| numbers.iter().for_each(|number| recorder.end(*number, answer));
            let lease = match acquired {
                Ok(lease) => lease,
                Err(error) => return end(answer(&error)),
            };
            // The client has no answer yet. Its claim is a separate request.
            end(Answer::Cancelled);
            let _ = ring.send(());
            let window = tokio::time::sleep(Duration::from_millis(WINDOW_MS));
            // One release covers all slots of the token.
            let names = if name >= FIRST_SLOT { &names[..1] } else { &names[..] };
            tokio::select! {
                Ok(()) = given_up => {
                    redlock.abandon(&lock_names(names), &lease);
                }
                () = window => {}
            }
            if releases_unclaimed {
                for name in names {
                    drop(redlock.release(&lock_name(*name), &lease.token).await);
                }
            }
        };
        self.gateway(gateway).request(work).is_some()
    }
}
