//! A process that is suspended between its votes and its decision.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::clock::{Clock, SystemClock};
use redlock_core::node::{NodeState, Vote};
use redlock_core::{AcquireOptions, Env, LockError};

use crate::support::cluster::ClusterSettings;
use crate::support::harness::{eventually, masters};
use crate::support::nodes::{Recorder, in_state, name, stored_on, ttl};

/// A clock that jumps at the moment when a given number of nodes has agreed. This is what a gateway
/// sees after its machine was suspended at that moment.
struct SuspendedClock {
    recorder: Arc<Recorder>,
    enough: usize,
    slept: Duration,
}

impl Clock for SuspendedClock {
    fn monotonic(&self) -> Duration {
        let votes = self.recorder.votes.lock().unwrap();
        let agreed = votes
            .iter()
            .filter(|vote| matches!(vote, Vote::Granted | Vote::Extended { .. }))
            .count();
        SystemClock.monotonic() + if agreed >= self.enough { self.slept } else { Duration::ZERO }
    }
    fn wall_micros(&self) -> u64 {
        SystemClock.wall_micros()
    }
}

#[tokio::test]
async fn votes_counted_after_a_sleep_beyond_the_ttl_are_undone() {
    let cluster = ClusterSettings::ENDLESS_QUARANTINE;
    let servers = masters(3);
    cluster.mark(&servers).await;
    let remotes = cluster.remote_nodes(&servers);
    for remote in &remotes {
        in_state(remote.as_ref(), NodeState::Admitted).await;
    }
    let env = |slept: Duration, enough: usize| {
        let recorder = Arc::new(Recorder::default());
        let clock = Arc::new(SuspendedClock { recorder: recorder.clone(), enough, slept });
        (Env { clock, observer: recorder.clone(), ..Env::default() }, recorder)
    };
    let lock = name("job");
    let ttl = ttl(60_000);
    let undone_everywhere = async || {
        eventually("the grant is undone everywhere", async || {
            stored_on(&servers, "job", |_| true).is_empty().then_some(())
        })
        .await;
    };
    for (slept, is_granted) in [(0, true), (4, true), (30, false), (60, false), (600, false)] {
        // On a busy machine, an attempt may take too long even without a sleep.
        eventually("the request has its result", async || {
            let (env, _) = env(Duration::from_secs(slept), 2);
            let locks = cluster.redlock_with(remotes.clone(), env);
            let result = locks.acquire(&lock, ttl, AcquireOptions::default()).await;
            match &result {
                Ok(lease) => {
                    assert!(is_granted, "granted after a sleep of {slept} s");
                    let left = locks.validity(lease);
                    assert!(
                        left <= Some(Duration::from_secs(60 - slept)),
                        "{left:?} left after a sleep of {slept} s"
                    );
                    locks.release(&lock, &lease.token).await.unwrap();
                }
                Err(error) => {
                    assert!(matches!(error, LockError::NoQuorum(_)), "{slept} s: {error}")
                }
            }
            locks.drained().await;
            undone_everywhere().await;
            (result.is_ok() == is_granted).then_some(())
        })
        .await;
    }

    // An extension that took so long gives no new promise. But it does not end the lock either.
    let (locks, lease) = eventually("all nodes grant the lock", async || {
        let (env, recorder) = env(Duration::from_secs(60), 5);
        let locks = cluster.redlock_with(remotes.clone(), env);
        let lease = locks.acquire(&lock, ttl, AcquireOptions::default()).await.ok();
        // The clock counts the votes, so every vote must have arrived.
        let all = async || (recorder.votes.lock().unwrap().len() >= 3).then_some(());
        eventually("all nodes have voted", all).await;
        let is_granted = recorder.votes.lock().unwrap().iter().all(|vote| *vote == Vote::Granted);
        if let Some(lease) = &lease
            && is_granted
        {
            return Some((locks, lease.clone()));
        }
        if let Some(lease) = lease {
            let _ = locks.release(&lock, &lease.token).await;
        }
        locks.drained().await;
        undone_everywhere().await;
        None
    })
    .await;
    let extended = locks.extend(&lock, &lease.token, ttl).await;
    assert!(matches!(extended, Err(LockError::Unknown(_))), "{extended:?}");
    assert_eq!(stored_on(&servers, "job", |_| true), [0, 1, 2]);
}
