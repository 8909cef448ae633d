//! A lock with several slots, through the core's own API and over real masters: the bound holds, a
//! waiter for many slots is not overtaken, and a repeated request gets its own slots again. Masters
//! that lose their data recover slots and sets.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use redlock_core::node::{Node, NodeState};
use redlock_core::{
    AcquireOptions, Env, Lease, LockError, LockName, LockSet, LockState, LockToken, Nonce, Owner,
    OwnerChoice, Redlock, Slots,
};
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout};

use super::waiting::another;
use crate::core::hints::{BY_A_HINT, by_hints};
use crate::support::chance::{Chance, seed};
use crate::support::cluster::{ClusterSettings, OUTLASTING_MS, decided};
use crate::support::harness::{PATIENCE, RedisServer, daily_or_long, eventually, masters};
use crate::support::nodes::{
    Cluster, LONG_MS, NODE_TIMEOUT, PREFIX, Recorder, in_state, intercepted, memory_nodes, name,
    node_settings, pass_on, redlock, redlock_with, ttl,
};
use crate::support::resp::Resp;

fn asking(count: u64, take: u64) -> AcquireOptions {
    AcquireOptions { slots: Slots::new(count, take).ok(), ..AcquireOptions::default() }
}

fn for_owner(count: u64, take: u64, owner: u8) -> AcquireOptions {
    let owner = OwnerChoice::Shared(Owner::from_bytes([owner; 16]));
    AcquireOptions { owner, ..asking(count, take) }
}

fn in_memory() -> Redlock {
    let nodes = memory_nodes().into_iter().map(|node| node as Arc<dyn Node>);
    redlock(nodes.collect(), NODE_TIMEOUT)
}

async fn acquire(locks: &Redlock, lock: &LockName, options: AcquireOptions) -> Lease {
    locks.acquire(lock, ttl(LONG_MS), options).await.expect("enough slots are free")
}

fn slots_of(lease: &Lease) -> Vec<u16> {
    lease.token.slots().iter().collect()
}

fn held_slots(result: Result<Lease, LockError>) -> Vec<u16> {
    let Err(LockError::Held(by)) = result else { panic!("{result:?}") };
    by.holders().iter().map(|holder| holder.slot).collect()
}

/// A request, and the moment of its end.
type Waiter = JoinHandle<(Result<Lease, LockError>, Instant)>;

/// A request that waits for a lock, and the event that it begins to wait.
fn waiting(
    locks: &Redlock,
    lock: &LockName,
    options: AcquireOptions,
    patience: Duration,
) -> (Waiter, oneshot::Receiver<()>) {
    let (begins, begun) = oneshot::channel();
    let locks = locks.clone();
    let lock = lock.clone();
    let waiter = tokio::spawn(async move {
        let on_wait = || {
            begins.send(()).expect("the test listens");
            Ok(())
        };
        let lease = locks.acquire_within(&lock, ttl(LONG_MS), options, patience, on_wait).await;
        (lease, Instant::now())
    });
    (waiter, begun)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_has_as_many_holders_as_slots_and_no_more() {
    let cluster = Cluster::start(5).await;
    let (locks, elsewhere) = (cluster.redlock(), another(&cluster).await);
    let lock = name("pool");
    let mut leases = Vec::new();
    for at in 0..4 {
        let locks = if at % 2 == 0 { &locks } else { &elsewhere };
        leases.push(acquire(locks, &lock, asking(4, 1)).await);
    }
    let all: BTreeSet<_> = leases.iter().flat_map(slots_of).collect();
    assert_eq!(all.into_iter().collect::<Vec<_>>(), [1, 2, 3, 4]);
    let refused = elsewhere.acquire(&lock, ttl(LONG_MS), asking(4, 1)).await;
    assert_eq!(held_slots(refused), [1, 2, 3, 4]);
    // A request without slots asks for slot 1.
    let refused = locks.acquire(&lock, ttl(LONG_MS), AcquireOptions::default()).await;
    assert!(matches!(refused, Err(LockError::Held(_))), "{refused:?}");

    let seen = locks.inspect_slots(&lock, 256).await;
    let holders: Vec<_> = seen.holders.iter().map(|holder| holder.slot).collect();
    assert_eq!(holders, [1, 2, 3, 4]);
    assert!(matches!(seen.state, LockState::Held(_)));

    for lease in &leases {
        locks.extend(&lock, &lease.token, ttl(LONG_MS)).await.expect("held");
        elsewhere.release(&lock, &lease.token).await.expect("held");
        assert_eq!(
            locks.extend(&lock, &lease.token, ttl(LONG_MS)).await.err(),
            Some(LockError::Lost)
        );
    }
    assert_eq!(locks.inspect_slots(&lock, 4).await.holders, []);
}

#[tokio::test]
async fn a_request_for_many_slots_gets_all_of_them_or_none() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let lock = name("pool");
    let one = acquire(&locks, &lock, asking(256, 1)).await;
    let refused = locks.acquire(&lock, ttl(LONG_MS), asking(256, 256)).await;
    assert_eq!(held_slots(refused), slots_of(&one));
    let rest = acquire(&locks, &lock, asking(256, 255)).await;
    assert_eq!(rest.token.slots().count(), 255);
    let text = rest.token.expose();
    assert_eq!(text.parse(), Ok(rest.token), "{} characters", text.len());
    let refused = locks.acquire(&lock, ttl(LONG_MS), asking(256, 1)).await;
    assert_eq!(held_slots(refused).len(), 256);
    locks.extend(&lock, &rest.token, ttl(LONG_MS)).await.expect("held");
    locks.release(&lock, &rest.token).await.expect("held");
    locks.release(&lock, &one.token).await.expect("held");
    let all = acquire(&locks, &lock, asking(256, 256)).await;
    locks.release(&lock, &all.token).await.expect("held");
}

#[tokio::test]
async fn a_lost_slot_is_a_lost_grant() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let lock = name("pool");
    let lease = acquire(&locks, &lock, asking(4, 3)).await;
    let lost = slots_of(&lease)[1];
    locks.force_release_slot(&lock, lost, |_| ()).await.expect("held");
    assert_eq!(locks.extend(&lock, &lease.token, ttl(LONG_MS)).await.err(), Some(LockError::Lost));
    // The extension releases the other slots, because nobody will use them.
    locks.drained().await;
    assert_eq!(locks.release(&lock, &lease.token).await, Err(LockError::Lost));
    let all = acquire(&locks, &lock, asking(4, 4)).await;
    locks.force_release_slot(&lock, 2, |_| ()).await.expect("held");
    assert_eq!(locks.release(&lock, &all.token).await, Err(LockError::Lost));
    assert_eq!(locks.inspect_slots(&lock, 4).await.holders, []);
}

/// When the gateway gives up the delivery, a repeated request has confirmed the grant on all its locks,
/// or on none.
#[tokio::test]
async fn an_undelivered_grant_is_undone_as_a_whole_or_not_at_all() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let set = LockSet::new(vec![name("red"), name("green")]).unwrap();
    let pool = [name("pool")];
    for is_confirmed in [false, true] {
        let stand = if is_confirmed { 2 } else { 0 };
        let of_slots = acquire(&locks, &pool[0], asking(4, 2)).await;
        let options = AcquireOptions::default();
        let of_set = locks.acquire_set(&set, ttl(LONG_MS), options, None, |_| Ok(())).await;
        let of_set = of_set.expect("the locks are free");
        if is_confirmed {
            locks.extend(&pool[0], &of_slots.token, ttl(LONG_MS)).await.expect("held");
            for lock in set.names() {
                locks.extend(lock, &of_set.token, ttl(LONG_MS)).await.expect("held");
            }
        }
        locks.abandon(&pool, &of_slots);
        locks.abandon(set.names(), &of_set);
        locks.drained().await;
        assert_eq!(locks.inspect_slots(&pool[0], 4).await.holders.len(), stand);
        for lock in set.names() {
            let state = locks.inspect(lock).await.state;
            assert_eq!(matches!(state, LockState::Held(_)), is_confirmed, "{lock}: {state:?}");
        }
    }
}

/// Waiters poll 400 to 800 ms after their first attempt, so only a wake-up explains a quick grant.
/// The time is paused: the clock advances only while all tasks are idle.
#[tokio::test(start_paused = true)]
async fn an_undelivered_grant_goes_to_the_waiters_of_each_lock_at_once() {
    let locks = in_memory();
    let pool = [name("pool")];
    let set = LockSet::new(vec![name("red"), name("green")]).unwrap();
    for at in 0..3 {
        let (lock, options) = match at {
            0 => (&pool[0], asking(2, 1)),
            _ => (&set.names()[at - 1], AcquireOptions::default()),
        };
        let (names, lease) = if at == 0 {
            (&pool[..], acquire(&locks, lock, asking(2, 2)).await)
        } else {
            let options = AcquireOptions::default();
            let lease = locks.acquire_set(&set, ttl(LONG_MS), options, None, |_| Ok(())).await;
            (set.names(), lease.expect("the locks are free"))
        };
        let (waiter, begun) = waiting(&locks, lock, options, PATIENCE);
        begun.await.expect("it waits");
        let since = Instant::now();
        locks.abandon(names, &lease);
        let (granted, at) = waiter.await.expect("no panic");
        assert!(at - since <= BY_A_HINT, "{lock}: {:?}", at - since);
        locks.release(lock, &granted.expect("it is free").token).await.expect("held");
        locks.drained().await;
    }
}

/// The first waiter here gets one of the slots by a handoff.
#[tokio::test(start_paused = true)]
async fn slots_released_together_go_to_the_waiters_of_two_gateways_at_once() {
    let nodes = memory_nodes().into_iter().map(|node| node as Arc<dyn Node>).collect::<Vec<_>>();
    let [here, there] = [(); 2].map(|()| redlock(nodes.clone(), NODE_TIMEOUT));
    let pool = name("pool");
    let lease = acquire(&here, &pool, asking(2, 2)).await;
    let (elsewhere, begun) = waiting(&there, &pool, asking(2, 1), PATIENCE);
    begun.await.expect("it waits");
    let (first, begun) = waiting(&here, &pool, asking(2, 1), PATIENCE);
    begun.await.expect("it waits");
    let since = Instant::now();
    here.release(&pool, &lease.token).await.expect("held");
    for (waiter, who) in [(first, "here"), (elsewhere, "elsewhere")] {
        let (granted, at) = waiter.await.expect("no panic");
        granted.expect("a slot is free");
        assert!(at - since <= BY_A_HINT, "{who}: {:?}", at - since);
    }
}

/// One master hangs, so every extension must find its two votes among the two others.
#[tokio::test]
async fn each_of_many_extensions_has_its_own_result() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let mut leases = Vec::new();
    for at in 0..100 {
        let lock = name(&format!("job-{at}"));
        leases.push((lock.clone(), acquire(&locks, &lock, AcquireOptions::default()).await.token));
    }
    let pool = name("pool");
    let three = acquire(&locks, &pool, asking(4, 3)).await;
    leases.push((pool.clone(), three.token));
    locks.force_release_slot(&pool, slots_of(&three)[1], |_| ()).await.expect("held");
    locks.release(&leases[7].0, &leases[7].1).await.expect("held");
    leases[13].1 = leases[14].1;
    let nobody = LockToken::new(Owner::NOBODY, Nonce::from_bytes([0; 4]), leases[21].1.fencing());
    leases[21].1 = nobody;
    cluster.servers[0].stop();
    let asked: Vec<_> = leases.iter().map(|(lock, token)| (lock, token)).collect();
    let results = locks.extend_many(&asked, ttl(LONG_MS)).await;
    for (at, (result, (_, token))) in results.iter().zip(&leases).enumerate() {
        match at {
            7 | 21 | 100 => assert!(matches!(result, Err(LockError::Lost)), "{at}: {result:?}"),
            13 => assert!(matches!(result, Err(LockError::NotHolder(_))), "{result:?}"),
            _ => assert_eq!(result.as_ref().expect("held").token, *token, "lease {at}"),
        }
    }
    assert_eq!(results.len(), leases.len());
    // Nobody will use the other slots of the pool.
    eventually("the pool is free", async || {
        locks.inspect_slots(&pool, 4).await.holders.is_empty().then_some(())
    })
    .await;
}

/// One of three masters is down or hangs, or has remains of another attempt in every slot.
#[tokio::test]
async fn slots_are_shared_without_one_master() {
    for trouble in ["down", "hung", "remains"] {
        let mut cluster = Cluster::start(3).await;
        let locks = cluster.redlock();
        let lock = name("pool");
        match trouble {
            "down" => cluster.servers[0].kill(),
            "hung" => cluster.servers[0].stop(),
            _ => {
                for slot in 1..=4 {
                    let key = format!("{PREFIX}{}", lock.of_slot(slot));
                    cluster.servers[0].cmd(&["SET", &key, "of another client", "PX", "3600000"]);
                }
            }
        }
        let one = acquire(&locks, &lock, asking(4, 1)).await;
        let three = acquire(&locks, &lock, asking(4, 3)).await;
        let refused = locks.acquire(&lock, ttl(LONG_MS), asking(4, 2)).await;
        assert_eq!(held_slots(refused), [1, 2, 3, 4], "{trouble}");
        let again = acquire(&locks, &name("other"), for_owner(4, 3, 9)).await;
        assert_eq!(acquire(&locks, &name("other"), for_owner(4, 3, 9)).await.token, again.token);
        for lease in [&one, &three] {
            locks.extend(&lock, &lease.token, ttl(LONG_MS)).await.expect("held");
            locks.release(&lock, &lease.token).await.expect("held");
        }
        assert_eq!(locks.inspect_slots(&lock, 4).await.holders, [], "{trouble}");
    }
}

#[tokio::test]
async fn a_repeated_request_gets_its_own_slots_again() {
    let cluster = Cluster::start(5).await;
    let (locks, elsewhere) = (cluster.redlock(), another(&cluster).await);
    let lock = name("pool");
    let others = acquire(&locks, &lock, asking(8, 3)).await;
    let first = acquire(&locks, &lock, for_owner(8, 2, 7)).await;
    // Its first choice may be free by now.
    locks.release(&lock, &others.token).await.expect("held");
    for locks in [&locks, &elsewhere] {
        let again = acquire(locks, &lock, for_owner(8, 2, 7)).await;
        assert!(again.replayed);
        assert_eq!(again.token, first.token);
    }
    let slots = Slots::new(8, 2).expect("slots");
    let owner = Owner::from_bytes([7; 16]);
    elsewhere.release_owner_of_slots(&lock, slots, &owner).await.expect("held");
    assert_eq!(locks.inspect_slots(&lock, 8).await.holders, []);
}

/// Requests of one owner at two gateways find different slots free, because others come and go. The
/// owner must end with one grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_of_a_request_at_two_gateways_get_one_grant() {
    let seed = seed("REDLOCK_SEED");
    let mut chance = Chance::of(seed, 0);
    let cluster = Cluster::start(3).await;
    let gateways = [cluster.redlock(), another(&cluster).await];
    for round in 1..=30u8 {
        let lock = name(&format!("pool-{round}"));
        let mut others = Vec::new();
        for _ in 0..chance.below(4) {
            others.push(acquire(&gateways[0], &lock, asking(5, 1)).await);
        }
        let mut tasks = JoinSet::new();
        for locks in gateways.clone() {
            let lock = lock.clone();
            tasks.spawn(async move {
                locks
                    .acquire_within(
                        &lock,
                        ttl(LONG_MS),
                        for_owner(5, 1, round),
                        PATIENCE,
                        || Ok(()),
                    )
                    .await
            });
        }
        for lease in others {
            gateways[1].release(&lock, &lease.token).await.expect("held");
        }
        let tokens: Vec<_> = tasks
            .join_all()
            .await
            .into_iter()
            .map(|lease| lease.map(|lease| lease.token))
            .collect();
        let Ok(token) = tokens[0] else { panic!("round {round}, {seed}: {tokens:?}") };
        assert_eq!(tokens[1], Ok(token), "round {round}, {seed}");
        for locks in &gateways {
            locks.drained().await;
        }
        let holders = gateways[0].inspect_slots(&lock, 5).await.holders;
        let held: Vec<_> = holders.iter().map(|holder| (holder.slot, holder.by.fencing)).collect();
        let slot = token.slots().iter().next().expect("a slot");
        assert_eq!(held, [(slot, Some(token.fencing()))], "round {round}, {seed}");
        gateways[0].release(&lock, &token).await.expect("held");
    }
}

#[tokio::test]
async fn a_heavy_waiter_is_not_overtaken_by_light_ones() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let lock = name("pool");
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(acquire(&locks, &lock, asking(4, 1)).await);
    }
    let mut waiters = Vec::new();
    for take in [3, 1, 1] {
        let before = locks.waiting().waiters;
        let (locks, lock) = (locks.clone(), lock.clone());
        let of_count = locks.clone();
        waiters.push(tokio::spawn(async move {
            locks.acquire_within(&lock, ttl(LONG_MS), asking(4, take), PATIENCE, || Ok(())).await
        }));
        eventually("one more waits", async || {
            (of_count.waiting().waiters == before + 1).then_some(())
        })
        .await;
    }
    // One after the other: the waiter for three slots is first, and gets them.
    for lease in held.drain(..3) {
        assert!(waiters.iter().all(|waiter| !waiter.is_finished()));
        locks.release(&lock, &lease.token).await.expect("held");
    }
    let mut waiters = waiters.into_iter();
    let heavy = waiters.next().expect("three").await.expect("no panic").expect("granted");
    assert_eq!(heavy.token.slots().count(), 3);
    // One release frees the slots of both waiters behind it.
    locks.release(&lock, &heavy.token).await.expect("held");
    for waiter in waiters {
        let light = waiter.await.expect("no panic").expect("granted");
        locks.release(&lock, &light.token).await.expect("held");
    }
}

/// A slot that is too few for the first waiter does for the next one. Without a wake-up, the light
/// waiter polls 400 to 800 ms after its first attempt. The heavy waiter gives up long before that, so
/// only a wake-up can explain a quick grant. The time is paused: the clock advances only while all
/// tasks are idle.
#[tokio::test(start_paused = true)]
async fn the_next_waiter_tries_at_once_when_a_heavy_one_gives_up() {
    let locks = in_memory();
    let lock = name("pool");
    for _ in 0..7 {
        let held = acquire(&locks, &lock, asking(4, 3)).await;
        let wait = |take, patience| waiting(&locks, &lock, asking(4, take), patience);
        let (heavy, begun) = wait(2, Duration::from_millis(120));
        begun.await.expect("it waits");
        let (light, begun) = wait(1, PATIENCE);
        begun.await.expect("it waits");
        let (refused, gave_up) = heavy.await.expect("no panic");
        assert!(matches!(refused, Err(LockError::Held(_))), "{refused:?}");
        let (granted, at) = light.await.expect("no panic");
        assert!(at - gave_up <= BY_A_HINT, "{:?}", at - gave_up);
        for lease in [held, granted.expect("a slot is free")] {
            locks.release(&lock, &lease.token).await.expect("held");
        }
    }
}

/// The core of another gateway process over the same masters, and its reports.
async fn recorded(cluster: &Cluster) -> (Redlock, Arc<Recorder>) {
    let recorder = Arc::new(Recorder::default());
    let env = Env { observer: recorder.clone(), ..Env::default() };
    let nodes = Cluster::remote_nodes(&cluster.servers, node_settings()).await;
    (redlock_with(nodes, NODE_TIMEOUT, env), recorder)
}

/// A release at one gateway is announced to the waiters at another. The oldest grant is released
/// last: hints with the T of the grants would look old.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_passes_between_gateways_by_a_hint() {
    let cluster = Cluster::start(3).await;
    let here = cluster.redlock();
    let (there, recorder) = recorded(&cluster).await;
    let lock = name("pool");
    // Which of the three releases have been announced. On a busy machine a waiter may poll before
    // its hint arrives.
    let mut announced = [false; 3];
    eventually("every release is announced", async || {
        let (mut held, mut taken) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            held.push(acquire(&here, &lock, asking(3, 1)).await);
        }
        for (at, lease) in held.iter().rev().enumerate() {
            let before = by_hints(&recorder);
            let waiter = tokio::spawn({
                let (there, lock) = (there.clone(), lock.clone());
                async move {
                    let options = asking(3, 1);
                    there.acquire_within(&lock, ttl(LONG_MS), options, PATIENCE, || Ok(())).await
                }
            });
            eventually("it waits", async || (there.waiting().waiters == 1).then_some(())).await;
            // Time for the waiter's hint to arrive. Receivers do not acknowledge hints.
            tokio::time::sleep(Duration::from_millis(50)).await;
            here.release(&lock, &lease.token).await.expect("held");
            taken.push(waiter.await.expect("no panic").expect("granted"));
            announced[at] |= by_hints(&recorder) > before;
        }
        for lease in taken {
            there.release(&lock, &lease.token).await.expect("held");
        }
        (announced == [true; 3]).then_some(())
    })
    .await;
}

/// Copies of one request arrive at two gateways at once, while other holders come and go. No two
/// answers name different grants, and a copy is refused only if the lock is full.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_of_a_request_among_other_holders_name_one_grant() {
    let seed = seed("REDLOCK_SEED");
    let mut chance = Chance::of(seed, 0);
    let cluster = Cluster::start(3).await;
    let gateways = [cluster.redlock(), another(&cluster).await];
    let lock = name("pool");
    let is_over = Arc::new(AtomicBool::new(false));
    let mut others = JoinSet::new();
    for locks in gateways.clone() {
        let (lock, is_over) = (lock.clone(), is_over.clone());
        others.spawn(async move {
            while !is_over.load(Ordering::SeqCst) {
                if let Ok(lease) = locks.acquire(&lock, ttl(LONG_MS), asking(6, 1)).await {
                    tokio::task::yield_now().await;
                    locks.release(&lock, &lease.token).await.expect("held");
                }
            }
        });
    }
    for round in 1..=60u8 {
        let take = 1 + u64::from(round % 2);
        let mut copies = JoinSet::new();
        for _ in 0..4 {
            let locks = gateways[chance.below(2)].clone();
            let lock = lock.clone();
            copies.spawn(async move {
                let options = for_owner(6, take, round);
                locks.acquire_within(&lock, ttl(LONG_MS), options, PATIENCE, || Ok(())).await
            });
        }
        let answers = copies.join_all().await;
        let mut granted = BTreeSet::new();
        for answer in &answers {
            match answer {
                Ok(lease) => drop(granted.insert(lease.token.expose())),
                Err(LockError::Unknown(_)) => {}
                Err(error) => panic!("round {round}, {seed}: {error:?}"),
            }
        }
        assert!(granted.len() <= 1, "round {round}, {seed}: {granted:?}");
        let slots = Slots::new(6, take).expect("slots");
        let owner = Owner::from_bytes([round; 16]);
        let released = gateways[0].release_owner_of_slots(&lock, slots, &owner).await;
        assert!(matches!(released, Ok(_) | Err(LockError::Lost)), "{released:?}");
    }
    is_over.store(true, Ordering::SeqCst);
    others.join_all().await;
}

/// The first waiter here needs more than the released slot. So the release is announced, and a
/// waiter at the other gateway gets the slot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_is_too_few_here_goes_to_a_waiter_elsewhere() {
    let cluster = Cluster::start(3).await;
    let here = cluster.redlock();
    let (there, recorder) = recorded(&cluster).await;
    let lock = name("pool");
    // On a busy machine the waiter may poll before the hint arrives.
    eventually("releases are announced", async || {
        let mut held = Vec::new();
        for _ in 0..4 {
            held.push(acquire(&here, &lock, asking(4, 1)).await);
        }
        let wait = |locks: &Redlock, take| {
            let (locks, lock) = (locks.clone(), lock.clone());
            tokio::spawn(async move {
                locks
                    .acquire_within(&lock, ttl(LONG_MS), asking(4, take), PATIENCE, || Ok(()))
                    .await
            })
        };
        let heavy = wait(&here, 4);
        let light = wait(&there, 1);
        eventually("both wait", async || {
            (here.waiting().waiters == 1 && there.waiting().waiters == 1).then_some(())
        })
        .await;
        // Time for the hints to arrive. Receivers do not acknowledge hints.
        tokio::time::sleep(Duration::from_millis(50)).await;
        here.release(&lock, &held.remove(0).token).await.expect("held");
        held.push(light.await.expect("no panic").expect("a slot is free"));
        for lease in held {
            here.release(&lock, &lease.token).await.expect("held");
        }
        let heavy = heavy.await.expect("no panic").expect("all slots are free");
        here.release(&lock, &heavy.token).await.expect("held");
        (by_hints(&recorder) >= 4).then_some(())
    })
    .await;
}

/// Whether all masters store this grant of these locks.
fn is_stored_by_all(servers: &[RedisServer], names: &[LockName], lease: &Lease) -> bool {
    let t = lease.token.fencing().to_string();
    let is_stored = |server: &RedisServer, lock: &LockName| {
        let key = format!("{PREFIX}{lock}");
        let value = server.cmd(&["GET", &key]);
        value != Resp::Nil && value.text().starts_with(&t)
    };
    let is_everywhere = |lock: LockName| servers.iter().all(|server| is_stored(server, &lock));
    let slots = || lease.token.slots().iter();
    names.iter().all(|name| slots().all(|slot| is_everywhere(name.of_slot(slot))))
}

/// Acquires until all masters store the grant. A grant on a bare majority could be lost with the
/// first master that loses its data.
async fn granted_by_all(
    locks: &Redlock,
    servers: &[RedisServer],
    names: &[LockName],
    acquire: impl AsyncFn() -> Result<Lease, LockError>,
) -> Lease {
    eventually("all masters store the grant", async || {
        let lease = acquire().await.ok()?;
        let stored = async || {
            while !is_stored_by_all(servers, names, &lease) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        // A master that received the acquire too late never stores this grant, so the attempt is
        // repeated.
        let is_stored = timeout(Duration::from_secs(1), stored()).await.is_ok();
        if is_stored {
            return Some(lease);
        }
        for name in names {
            let _ = locks.release(name, &lease.token).await;
        }
        None
    })
    .await
}

async fn acquire_set(locks: &Redlock, set: &LockSet) -> Result<Lease, LockError> {
    let options = AcquireOptions::default();
    locks.acquire_set(set, ttl(OUTLASTING_MS), options, None, |_| Ok(())).await
}

/// Waits until a node has caught up. Only then may the next master lose its data.
async fn has_caught_up(node: &dyn Node) {
    eventually("the master has caught up", async || {
        (node.status().borrow().state == NodeState::Admitted).then_some(())
    })
    .await;
}

/// Tries to get slots and locks that others hold, until it is stopped. Returns all grants.
async fn contend(
    locks: Redlock,
    wishes: Vec<(LockName, AcquireOptions)>,
    is_over: Arc<AtomicBool>,
) -> Vec<Lease> {
    let mut granted = Vec::new();
    while !is_over.load(Ordering::SeqCst) {
        for (lock, options) in &wishes {
            let tried = locks.acquire(lock, ttl(OUTLASTING_MS), options.clone()).await;
            granted.extend(tried.ok());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    granted
}

/// Two of three masters lose all their data, one after the other, and recover it. Then the third
/// master is killed. If the two had recovered less than everything, others would now get the locks.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slots_and_a_set_survive_masters_that_lose_their_data() {
    let cluster = ClusterSettings::ENDLESS_QUARANTINE;
    let mut servers = masters(3);
    cluster.mark(&servers).await;
    let remotes = [(); 2].map(|()| cluster.remote_nodes(&servers));
    for remote in remotes.iter().flatten() {
        in_state(remote.as_ref(), NodeState::Admitted).await;
    }
    let [locks, elsewhere] = remotes.clone().map(|remotes| cluster.redlock(remotes));
    for remote in remotes.iter().flatten() {
        has_caught_up(remote.as_ref()).await;
    }

    let pool = name("pool");
    let names = ["env/staging", "env/production"].map(name);
    let set = LockSet::new(names.to_vec()).expect("a set");
    let only_pool = std::slice::from_ref(&pool);
    let one = granted_by_all(&locks, &servers, only_pool, async || {
        locks.acquire(&pool, ttl(OUTLASTING_MS), asking(4, 1)).await
    })
    .await;
    let three = granted_by_all(&elsewhere, &servers, only_pool, async || {
        elsewhere.acquire(&pool, ttl(OUTLASTING_MS), asking(4, 3)).await
    })
    .await;
    let all_names =
        granted_by_all(&locks, &servers, &names, async || acquire_set(&locks, &set).await).await;
    let held = [
        (&pool, one.token),
        (&pool, three.token),
        (&names[0], all_names.token),
        (&names[1], all_names.token),
    ];
    let extend_all = async || {
        for (lock, token) in &held {
            let extended =
                decided(async || elsewhere.extend(lock, token, ttl(OUTLASTING_MS)).await).await;
            assert_eq!(extended.expect("still held").token, *token, "{lock}");
        }
    };
    let mut wishes = vec![(pool.clone(), asking(4, 1))];
    wishes.extend(names.iter().map(|name| (name.clone(), AcquireOptions::default())));
    let is_over = Arc::new(AtomicBool::new(false));
    let contender = tokio::spawn(contend(elsewhere.clone(), wishes, is_over.clone()));

    for victim in [0, 1] {
        servers[victim].restart();
        for state in [NodeState::Quarantined, NodeState::Admitted] {
            for remotes in &remotes {
                in_state(remotes[victim].as_ref(), state).await;
            }
        }
        for remotes in &remotes {
            has_caught_up(remotes[victim].as_ref()).await;
        }
        // No extension here: it would repair what the recovery has missed.
    }
    is_over.store(true, Ordering::SeqCst);
    let granted = contender.await.expect("no panic");
    assert!(granted.is_empty(), "{granted:?}");

    servers[2].kill();
    for locks in [&locks, &elsewhere] {
        let refused =
            decided(async || locks.acquire(&pool, ttl(OUTLASTING_MS), asking(4, 1)).await).await;
        assert_eq!(held_slots(refused), [1, 2, 3, 4]);
        for lock in &names {
            let overlapping = LockSet::new(vec![name("free"), lock.clone()]).expect("a set");
            let refused = decided(async || acquire_set(locks, &overlapping).await).await;
            assert!(
                matches!(&refused, Err(LockError::Held(by)) if by.lock_of_set == 1),
                "{refused:?}"
            );
        }
    }
    extend_all().await;
    for (lock, token) in &held {
        let mut is_unknown = false;
        eventually("the lock is released", async || match locks.release(lock, token).await {
            Ok(()) => Some(()),
            Err(LockError::Unknown(_)) => {
                is_unknown = true;
                None
            }
            Err(error) => {
                assert!(is_unknown, "{lock}: {error:?}");
                Some(())
            }
        })
        .await;
    }
    let all_slots =
        decided(async || elsewhere.acquire(&pool, ttl(OUTLASTING_MS), asking(4, 4)).await).await;
    let newer = all_slots.expect("all slots are free").token.fencing();
    assert!(newer > one.token.fencing() && newer > three.token.fencing());
    let again = decided(async || acquire_set(&elsewhere, &set).await).await;
    assert!(again.expect("all locks are free").token.fencing() > all_names.token.fencing());
}

/// Contenders for 1 and for 4 of 8 slots at two gateways: never more than 8 places are held, and
/// every request is served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weighted_contenders_stay_within_all_slots() {
    const SLOTS: u32 = 8;
    let (contenders, seconds) = daily_or_long((40, 4), (200, 60));
    let cluster = Cluster::start(5).await;
    let gateways = [cluster.redlock(), another(&cluster).await];
    let held = Arc::new(AtomicU32::new(0));
    let since = Instant::now();
    let until = since + Duration::from_secs(seconds);
    let mut tasks = JoinSet::new();
    for contender in 0..contenders {
        let locks = gateways[contender % 2].clone();
        let held = held.clone();
        let take = if contender % 10 < 2 { 4 } else { 1 };
        tasks.spawn(async move {
            let lock = name("pool");
            let (mut grants, mut longest) = (0, Duration::ZERO);
            while grants == 0 || Instant::now() < until {
                let began = Instant::now();
                let options = asking(SLOTS.into(), take.into());
                let lease = locks
                    .acquire_within(&lock, ttl(LONG_MS), options, PATIENCE, || Ok(()))
                    .await
                    .expect("granted in time");
                longest = longest.max(began.elapsed());
                let now = held.fetch_add(take, Ordering::SeqCst) + take;
                assert!(now <= SLOTS, "{now} slots are held");
                tokio::task::yield_now().await;
                held.fetch_sub(take, Ordering::SeqCst);
                locks.release(&lock, &lease.token).await.expect("held");
                grants += 1;
            }
            (take, grants, longest)
        });
    }
    let results = tasks.join_all().await;
    let took = since.elapsed();
    let total: u32 = results.iter().map(|(_, grants, _)| grants).sum();
    // At most the first grants took slots that nobody had held before.
    let handoffs = f64::from(total.saturating_sub(SLOTS));
    println!("{:.0} handoffs per second in {took:.1?}", handoffs / took.as_secs_f64());
    for weight in [1, 4] {
        let of_weight = || results.iter().filter(|(take, ..)| *take == weight);
        let grants: u32 = of_weight().map(|(_, grants, _)| grants).sum();
        let least = of_weight().map(|(_, grants, _)| grants).min();
        let longest = of_weight().map(|(.., longest)| longest).max();
        println!(
            "weight {weight}: {grants} grants in {seconds} s, at least {least:?} each, longest wait {longest:?}"
        );
        assert!(least >= Some(&1));
    }
    for locks in &gateways {
        locks.drained().await;
    }
    assert_eq!(gateways[0].inspect_slots(&name("pool"), 8).await.holders, []);
}

#[tokio::test]
async fn one_question_to_each_node_finds_a_full_lock_full() {
    let cluster = Cluster::start(3).await;
    let asked = Arc::new(AtomicU32::new(0));
    let nodes = Cluster::remote_nodes(&cluster.servers, node_settings()).await.into_iter();
    let counted = nodes.map(|node| {
        let asked = asked.clone();
        intercepted(node, move |node, task| {
            asked.fetch_add(1, Ordering::SeqCst);
            pass_on(node, task);
        })
    });
    let locks = redlock(counted.collect(), NODE_TIMEOUT);
    let lock = name("pool");
    let lease = acquire(&locks, &lock, asking(256, 200)).await;
    asked.store(0, Ordering::SeqCst);
    let refused = locks.acquire(&lock, ttl(LONG_MS), asking(256, 100)).await;
    assert_eq!(held_slots(refused).len(), 200);
    assert_eq!(asked.load(Ordering::SeqCst), 3);
    locks.release(&lock, &lease.token).await.expect("held");
}
