#![cfg(test)]

use super::*;
use crate::model::types::{FencingToken, LockName, LockToken, Nonce, Owner, Ttl};
use crate::node::hint::HintKind;
use crate::node::{Env, Hint, Record, ReleaseScope};

const MS: Duration = Duration::from_millis(1);
const LIMITS: RoundLimits = RoundLimits { rest: Duration::from_millis(50), quorum: QUORUM };
const QUORUM: Duration = Duration::from_millis(800);

fn fencing() -> FencingToken {
    FencingToken::new(1_763_725_165_123_456).expect("a T")
}

/// An acquire over five nodes, whose votes the test gives.
fn round() -> Arc<Round> {
    let name: LockName = "job".parse().expect("a name");
    let token = LockToken::new(Owner::from_bytes([1; 16]), Nonce::from_bytes([1; 4]), fencing());
    let op = Op::Acquire {
        keys: Keys::new("lock:", &name),
        record: Record::new(&token, &Default::default()),
        ttl: Ttl::from_millis(30_000).expect("a TTL"),
        tell: None,
    };
    let quorum = Quorum::new(5).expect("five nodes");
    Round::prepare(quorum, op, LIMITS, &Env::default().observer, None).ask(&[], 0)
}

fn down() -> Vote {
    Vote::Failed(Failure::new(Reason::Down, Effect::None, "nobody listens".to_owned()))
}

/// Gives votes at these times after the start of the round. Returns the decision, and when it was
/// known.
async fn outcome(votes: Vec<(Duration, Vote)>) -> (Decision, Duration) {
    let (round, began) = (round(), Instant::now());
    let asker = async { (round.outcome().await.decision, began.elapsed()) };
    let voters = async {
        for (node, (at, vote)) in votes.into_iter().enumerate() {
            tokio::time::sleep_until(began + at).await;
            round.vote(node, vote);
        }
    };
    tokio::join!(asker, voters).0
}

fn about(millis: u64) -> std::ops::RangeInclusive<Duration> {
    let at = Duration::from_millis(millis);
    at..=at + 2 * MS
}

#[tokio::test(start_paused = true)]
async fn slow_quorum_is_waited_for() {
    let grants = [300, 310, 400].map(|at| (at * MS, Vote::Granted));
    let (decision, at) = outcome(grants.into()).await;
    assert_eq!(decision, Decision::Yes);
    assert!(about(400).contains(&at), "{at:?}");
}

#[tokio::test(start_paused = true)]
async fn silent_quorum_ends_the_round_at_its_limit() {
    let (decision, at) = outcome(vec![(MS, Vote::Granted), (MS, Vote::Granted)]).await;
    assert_eq!(decision, Decision::Neither);
    assert!(about(800).contains(&at), "{at:?}");
}

/// A hung minority delays a round by the short limit only.
#[tokio::test(start_paused = true)]
async fn answers_of_a_quorum_end_the_longer_wait() {
    let stale = || Vote::Stale { fence: fencing() };
    let early = vec![(MS, Vote::Granted), (2 * MS, Vote::Granted), (3 * MS, stale())];
    let (decision, at) = outcome(early).await;
    assert_eq!(decision, Decision::Neither);
    assert!(about(50).contains(&at), "{at:?}");
    // The short wait begins with the last answer of the quorum.
    let late = vec![(MS, Vote::Granted), (2 * MS, Vote::Granted), (200 * MS, stale())];
    let (decision, at) = outcome(late.clone()).await;
    assert_eq!(decision, Decision::Neither);
    assert!(about(250).contains(&at), "{at:?}");
    let (decision, at) = outcome([late, vec![(210 * MS, Vote::Granted)]].concat()).await;
    assert_eq!(decision, Decision::Yes);
    assert!(about(210).contains(&at), "{at:?}");
}

/// A node that fails has not answered. When too few others are left, nothing is waited for.
#[tokio::test(start_paused = true)]
async fn failed_nodes_are_no_answers() {
    let one_down = vec![(MS, down()), (2 * MS, Vote::Granted), (3 * MS, Vote::Granted)];
    let late = [one_down.clone(), vec![(300 * MS, Vote::Granted)]].concat();
    let (decision, at) = outcome(late).await;
    assert_eq!(decision, Decision::Yes);
    assert!(about(300).contains(&at), "{at:?}");
    let three_down = [one_down, vec![(300 * MS, down()), (300 * MS, down())]].concat();
    let (decision, at) = outcome(three_down).await;
    assert_eq!(decision, Decision::Neither);
    assert!(about(300).contains(&at), "{at:?}");
}

#[tokio::test]
async fn the_parts_of_a_large_set_vote_on_each_lock_once() {
    let mut each = (0..149).map(|lock| Keys::of_lock_key(format!("lock:{lock}").as_bytes()));
    let keys = each.next().expect("a lock").with(each);
    let token = LockToken::new(Owner::from_bytes([1; 16]), Nonce::from_bytes([1; 4]), fencing());
    let op = Op::Release {
        keys: keys.clone(),
        record: Record::new(&token, &Default::default()),
        scope: ReleaseScope::Holder,
        tell: Some(Hint::new(1, HintKind::Released { t: fencing(), waiting: false }, &keys.lock)),
    };
    let quorum = Quorum::new(3).expect("three nodes");
    let prepared = Round::prepare(quorum, op, LIMITS, &Env::default().observer, None).in_parts();
    let rounds: Vec<_> = prepared.rounds().cloned().collect();
    let mut tasks: Vec<_> = prepared.round().tasks(1).collect();
    let asked = tasks.iter().flat_map(|task| task.op.keys().each()).map(|keys| &keys.lock);
    assert!(asked.eq(keys.each().map(|keys| &keys.lock)));
    let told = |task: &Task| matches!(&*task.op, Op::Release { tell: Some(_), .. });
    let parts: Vec<_> = tasks.iter().map(|task| (task.op.keys().count(), told(task))).collect();
    assert_eq!(parts, [(49, false), (50, false), (50, true)]);
    let vote = |round: &Arc<Round>| round.read(|votes| votes[1].clone());

    // The second part fails, the last one arrives before the first.
    let last = tasks.pop().expect("the last part");
    last.reply.send(Vote::Each([vec![Vote::Released; 49], vec![Vote::Missing]].concat()));
    tasks.pop().expect("the second part").reply.send(down());
    let votes: Vec<_> = rounds.iter().map(vote).collect();
    assert!(votes[..49].iter().all(Option::is_none), "{votes:?}");
    assert!(votes[49..99].iter().all(|vote| *vote == Some(down())), "{votes:?}");
    assert!(votes[99..148].iter().all(|vote| *vote == Some(Vote::Released)), "{votes:?}");
    assert_eq!(votes[148], Some(Vote::Missing));
    tasks.pop().expect("the first part").reply.send(Vote::Each(vec![Vote::Released; 49]));
    assert!(rounds[..49].iter().all(|round| vote(round) == Some(Vote::Released)));
}
