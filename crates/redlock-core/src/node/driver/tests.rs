//! The driver alone, without a worker, a link or a running clock: events in, actions out.

#![cfg(test)]

mod contested;

use parking_lot::Mutex;

use super::*;
use crate::model::clock::{Clock, Entropy, OsEntropy};
use crate::model::types::{Info, LockName, LockToken, Ttl};
use crate::node::eligibility::ClusterConfig;
use crate::node::{Keys, NoObserver, Record, Reply, Voter};

const MAX_TTL: Duration = Duration::from_secs(300);
const SKEW: Duration = Duration::from_secs(2);
const DEADLINE: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Votes(Mutex<Vec<Vote>>);

impl Voter for Votes {
    fn vote(&self, _: usize, vote: Vote) {
        self.0.lock().push(vote);
    }
}

/// A clock that the test sets.
#[derive(Clone)]
struct ManualClock(Arc<Mutex<Duration>>);

impl ManualClock {
    fn advance(&self, by: Duration) {
        *self.0.lock() += by;
    }
}

impl Clock for ManualClock {
    fn monotonic(&self) -> Duration {
        *self.0.lock()
    }

    fn wall_micros(&self) -> u64 {
        1_700_000_000_000_000 + self.monotonic().as_micros() as u64
    }
}

struct Bench {
    driver: Driver,
    clock: ManualClock,
    now: Instant,
    votes: Arc<Votes>,
    /// The marker that admitted the node.
    marker: String,
}

impl Bench {
    fn new(bootstrap: bool) -> Self {
        let clock = ManualClock(Arc::new(Mutex::new(Duration::from_secs(100))));
        let env = Env {
            clock: Arc::new(clock.clone()),
            entropy: Arc::new(OsEntropy),
            observer: Arc::new(NoObserver),
        };
        let identity = ClusterConfig::new("a:1", MAX_TTL, SKEW).identity("a:1");
        let eligibility = Eligibility::new(identity, MAX_TTL, SKEW).expecting_bootstrap(bootstrap);
        let settings = DriverSettings {
            call_deadline: DEADLINE,
            question_deadline: DEADLINE,
            max_clock_skew: SKEW,
            overlap_above: Duration::ZERO,
            drift_factor: 0.01,
            rules: SafetyRules::ALL,
            node_registry: Arc::default(),
        };
        let now = Instant::now();
        Self {
            driver: Driver::new("a:1".into(), eligibility, settings, env, now),
            clock,
            now,
            votes: Arc::default(),
            marker: String::new(),
        }
    }

    fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.driver.next_action()).collect()
    }

    fn at_deadline(&mut self) -> Vec<Action> {
        self.now = self.driver.deadline();
        self.driver.tick(self.now);
        self.actions()
    }

    fn on(&mut self, event: Event) -> Vec<Action> {
        self.driver.handle(event, self.now);
        self.actions()
    }

    fn connect(&mut self) {
        assert_eq!(self.at_deadline(), [Action::Connect]);
        assert_eq!(self.on(Event::Connected(Ok(()))), [Action::Probe]);
    }

    fn answer_probe(&mut self, marker: Option<&str>) -> Vec<Action> {
        self.on(Event::Probed(Ok(ProbeReply {
            facts: Facts::volatile_master(),
            marker: marker.map(str::to_owned),
            is_caught_up: true,
            number: 0,
        })))
    }

    /// Puts a quarantine marker where none stood.
    fn quarantined(&mut self) -> String {
        let actions = self.answer_probe(None);
        let [Action::SwapMarker(MarkerSwap { from: None, to, .. })] = actions.as_slice() else {
            panic!("{actions:?}")
        };
        assert_eq!(self.on(Event::Swapped(Ok(Swapped::Done))), [Action::Probe]);
        assert_eq!(self.answer_probe(Some(to)), []);
        to.clone()
    }

    /// A driver whose node votes.
    fn admitted(bootstrap: bool) -> Self {
        Self::admitted_as(Facts::volatile_master(), bootstrap)
    }

    fn admitted_as(facts: Facts, bootstrap: bool) -> Self {
        let mut bench = Self::new(bootstrap);
        bench.connect();
        let marker = ClusterConfig::new("a:1", MAX_TTL, SKEW).identity("a:1").admitting(&facts, 7);
        let loads = bench.on(Event::Probed(Ok(ProbeReply {
            facts,
            marker: Some(marker.clone()),
            is_caught_up: true,
            number: 0,
        })));
        bench.marker = marker;
        assert!(matches!(loads.as_slice(), [Action::Load { .. }]), "{loads:?}");
        assert_eq!(
            bench.on(Event::Loaded(Ok(Engine::Lua))),
            [Action::Call],
            "this call measures the round trip"
        );
        bench.now += Duration::from_millis(2);
        assert_eq!(bench.on(Event::Answered(Ok(answer(Vec::new())))), []);
        bench
    }

    fn submit(&mut self, count: usize) {
        let keys = Keys::new("lock:", &"a".parse::<LockName>().unwrap());
        let task = || Task {
            op: Arc::new(Op::Inspect { keys: keys.clone() }),
            not_after: self.now + DEADLINE,
            reply: Reply::new(self.votes.clone(), 0),
        };
        let tasks: Vec<_> = (0..count).map(|_| task()).collect();
        self.driver.submit(tasks.into_iter());
    }

    fn call(&mut self) {
        assert!(self.driver.wants_call());
        self.driver.call(self.now);
        assert_eq!(self.actions(), [Action::Call]);
    }

    fn failures(&self) -> Vec<(Reason, Effect)> {
        let failure = |vote: &Vote| match vote {
            Vote::Failed(failure) => Some((failure.reason, failure.effect)),
            _ => None,
        };
        self.votes.0.lock().iter().filter_map(failure).collect()
    }

    fn state(&self) -> NodeState {
        self.driver.status().borrow().state
    }
}

fn answer(votes: Vec<Vote>) -> Answer {
    Answer { votes, time_micros: None, is_admitted: true, is_number_kept: true, write_error: None }
}

#[test]
fn a_confirmed_bootstrap_survives_a_lost_connection() {
    let mut bench = Bench::new(true);
    bench.connect();
    let marker = bench.quarantined();
    assert_eq!(bench.on(Event::Closed("cut".into())), [Action::Disconnect]);
    assert_eq!(bench.on(Event::BootstrapConfirmed), [], "there is no connection to probe");
    bench.connect();
    let actions = bench.answer_probe(Some(&marker));
    assert!(
        matches!(actions.as_slice(), [Action::SwapMarker(MarkerSwap { to, .. })] if to.contains(":volatile.")),
        "{actions:?}"
    );
}

/// Recovery names this marker when it reports its success.
#[test]
fn a_quarantine_marker_survives_a_lost_connection() {
    let mut bench = Bench::new(false);
    bench.connect();
    let marker = bench.quarantined();
    let since = bench.driver.status().borrow().since_micros;
    bench.clock.advance(HEARTBEAT);
    assert_eq!(bench.at_deadline(), [Action::Probe]);
    assert_eq!(bench.answer_probe(Some(&marker)), []);
    let status = bench.driver.status().borrow().clone();
    assert_eq!(
        (status.marker.as_str(), status.since_micros),
        (marker.as_str(), since),
        "a probe changes nothing"
    );
    assert_eq!(bench.on(Event::Closed("cut".into())), [Action::Disconnect]);
    bench.connect();
    assert_eq!(bench.answer_probe(Some(&marker)), []);
    assert_eq!(bench.driver.status().borrow().marker, marker);
}

#[test]
fn a_confirmed_bootstrap_ends_only_its_quarantine() {
    let mut bench = Bench::new(true);
    bench.connect();
    bench.quarantined();
    assert_eq!(bench.on(Event::BootstrapConfirmed), [Action::Probe]);
    // Meanwhile the node has lost its data again.
    bench.quarantined();
    assert_eq!(bench.state(), NodeState::Quarantined);
    assert_eq!(bench.at_deadline(), [Action::Probe], "the node is still in quarantine");
}

#[test]
fn a_timed_out_call_ends_the_session_with_later_calls() {
    let mut bench = Bench::admitted(false);
    bench.submit(1);
    bench.call();
    bench.now += DEADLINE / 2;
    bench.submit(1);
    bench.call();
    bench.submit(1);
    bench.now += DEADLINE / 2;
    bench.driver.tick(bench.now);
    assert_eq!(bench.actions(), [Action::Disconnect]);
    let failures = [
        (Reason::Timeout, Effect::Possible),
        (Reason::Down, Effect::Possible),
        (Reason::Down, Effect::None),
    ];
    assert_eq!(bench.failures(), failures);
    assert_eq!(bench.state(), NodeState::Connecting);
}

/// A node whose clock the test sets. Probes are answered at once.
struct Clocked(Bench);

impl Clocked {
    /// Advances our clock, then answers a probe with a node clock that is this far ahead of ours.
    fn probe_after(&mut self, millis: u64, ahead_micros: u64) -> Vec<Action> {
        let bench = &mut self.0;
        bench.clock.advance(Duration::from_millis(millis));
        bench.driver.probe_sent = bench.clock.monotonic();
        let facts = Facts {
            time_micros: bench.clock.wall_micros() + ahead_micros,
            ..Facts::volatile_master()
        };
        bench.on(Event::Probed(Ok(ProbeReply {
            facts,
            marker: Some(bench.marker.clone()),
            is_caught_up: true,
            number: 0,
        })))
    }

    /// The driver's actions after it left the node for running ahead and connected again.
    fn compared(&mut self) -> Vec<Action> {
        assert_eq!(self.0.state(), NodeState::Connecting);
        let left = self.0.now;
        self.0.connect();
        assert!(self.0.now - left >= HEARTBEAT * 2, "time to read the other clocks");
        self.probe_after(3_000, 60_000)
    }
}

/// A jump of 50 ms ends every lock on the node 50 ms early.
#[test]
fn a_node_whose_clock_jumps_ahead_is_quarantined() {
    let mut node = Clocked(Bench::admitted(false));
    assert_eq!(node.probe_after(1_000, 10_000), []);
    assert_eq!(node.probe_after(1_000, 15_000), [], "5 ms in a second are within the drift factor");
    assert_eq!(node.probe_after(1_000, 65_000), [Action::Disconnect]);
    let actions = node.compared();
    assert!(
        matches!(actions.as_slice(), [Action::SwapMarker(MarkerSwap { to, .. })] if to.contains(":ran-ahead.")),
        "{actions:?}"
    );
}

#[test]
fn no_node_is_blamed_if_all_clocks_run_ahead_alike() {
    let mut node = Clocked(Bench::admitted(false));
    assert_eq!(node.probe_after(1_000, 0), []);
    assert_eq!(node.probe_after(1_000, 50_000), [Action::Disconnect]);
    let to = node.0.clock.monotonic();
    let ran = RanAhead { from: to - HEARTBEAT * 2, to, by: Duration::from_millis(49) };
    node.0.driver.settings.node_registry.note_clock(&"b:2".into(), ran.from - HEARTBEAT, None);
    node.0.driver.settings.node_registry.note_clock(&"b:2".into(), to + HEARTBEAT, Some(ran));
    assert!(matches!(node.compared().as_slice(), [Action::Load { .. }]));
}

/// An old process may live on behind connections that were opened before its name moved.
#[test]
fn a_process_stops_voting_when_its_name_moves() {
    let mut bench = Bench::admitted(false);
    let follow = |bench: &mut Bench| {
        for _ in 0..4 {
            let actions = bench.at_deadline();
            let reply = ProbeReply {
                facts: Facts::volatile_master(),
                marker: Some(bench.marker.clone()),
                is_caught_up: true,
                number: 0,
            };
            bench.on(Event::Probed(Ok(reply)));
            bench.on(Event::Answered(Ok(answer(Vec::new()))));
            if actions.contains(&Action::Follow) {
                return;
            }
        }
        panic!("the name is not followed");
    };
    let begin = bench.now;
    let other = Facts { run_id: "b".repeat(40), ..Facts::volatile_master() };
    for facts in
        [Ok(Facts::volatile_master()), Err(LinkError::broken("max number of clients reached"))]
    {
        follow(&mut bench);
        assert_eq!(
            bench.on(Event::Followed(facts.map(|facts| ProbeReply {
                facts,
                marker: None,
                is_caught_up: false,
                number: 0,
            }))),
            []
        );
    }
    follow(&mut bench);
    assert!(bench.now - begin <= NAME_IS_FOLLOWED_EVERY * 3);
    let moved = Event::Followed(Ok(ProbeReply {
        facts: other,
        marker: None,
        is_caught_up: false,
        number: 0,
    }));
    assert_eq!(bench.on(moved), [Action::Disconnect]);
    assert_eq!(bench.state(), NodeState::Connecting);
}

/// A marker that admits the node of the bench.
fn admitting_marker() -> String {
    let identity = ClusterConfig::new("a:1", MAX_TTL, SKEW).identity("a:1");
    identity.admitting(&Facts::volatile_master(), 7)
}

/// Quarantines the node for longer than its connection counts as fresh. Returns the driver's
/// actions after another gateway has ended the quarantine.
fn actions_after_a_wait(bench: &mut Bench) -> Vec<Action> {
    bench.quarantined();
    bench.now += NAME_IS_FOLLOWED_EVERY;
    bench.driver.tick(bench.now);
    assert_eq!(bench.actions(), [Action::Probe]);
    bench.answer_probe(Some(&admitting_marker()))
}

/// The name may have moved to another process during the wait. That process has not waited.
#[test]
fn a_wait_ends_with_a_probe_on_a_fresh_connection() {
    let mut bench = Bench::new(false);
    bench.connect();
    assert_eq!(actions_after_a_wait(&mut bench), [Action::Disconnect, Action::Connect]);
    assert_eq!(bench.on(Event::Connected(Ok(()))), [Action::Probe]);
    let actions = bench.answer_probe(Some(&admitting_marker()));
    assert!(matches!(actions.as_slice(), [Action::Load { .. }]));
}

/// A second wait may begin on the connection that ended the first one.
#[test]
fn a_node_that_waits_again_votes_on_a_newer_connection() {
    let mut bench = Bench::new(false);
    bench.connect();
    for _ in 0..2 {
        assert_eq!(actions_after_a_wait(&mut bench), [Action::Disconnect, Action::Connect]);
        assert_eq!(bench.on(Event::Connected(Ok(()))), [Action::Probe]);
    }
}

/// The two names may be, for example, two database numbers of one process.
#[test]
fn one_process_under_two_names_is_refused_as_the_second() {
    let mut first = Bench::new(false);
    let mut second = Bench::new(false);
    first
        .driver
        .settings
        .node_registry
        .claim(&"b:2".into(), &Facts::volatile_master().run_id)
        .unwrap();
    first.connect();
    assert_eq!(first.answer_probe(None), [Action::Disconnect]);
    assert_eq!(first.state(), NodeState::Refused);
    assert!(first.driver.status().borrow().detail.contains("answers as b:2 too"));
    second.connect();
    second.quarantined();
}

#[test]
fn operations_without_a_session_fail_as_not_sent() {
    let mut bench = Bench::new(false);
    bench.submit(1);
    bench.connect();
    bench.quarantined();
    bench.submit(1);
    assert_eq!(
        bench.failures(),
        [(Reason::Down, Effect::None), (Reason::Quarantined, Effect::None)]
    );
}

#[test]
fn a_master_turned_replica_must_be_probed_again() {
    let mut bench = Bench::admitted(false);
    bench.submit(1);
    bench.call();
    let vote =
        Vote::Failed(Failure::new(Reason::Error, Effect::Possible, "READONLY You can't write"));
    assert_eq!(bench.on(Event::Answered(Ok(answer(vec![vote])))), [Action::Disconnect]);
    assert_eq!(bench.state(), NodeState::Connecting);
}

#[test]
fn probes_run_beside_calls() {
    let mut bench = Bench::admitted(false);
    bench.now += HEARTBEAT / 2;
    bench.submit(1);
    bench.call();
    assert_eq!(bench.at_deadline(), [Action::Probe], "before the call is answered");
    assert!(bench.driver.has_calls());
}

#[test]
fn backoff_between_connections_doubles_up_to_a_second() {
    let mut bench = Bench::new(false);
    let mut backoff = Vec::new();
    for _ in 0..8 {
        assert_eq!(bench.at_deadline(), [Action::Connect]);
        assert_eq!(
            bench.on(Event::Connected(Err(LinkError::broken("refused")))),
            [Action::Disconnect]
        );
        backoff.push(bench.driver.deadline() - bench.now);
    }
    for (pause, limit) in
        backoff.iter().zip([50, 100, 200, 400, 800, 1_000, 1_000, 1_000].map(Duration::from_millis))
    {
        assert!((limit / 2..=limit).contains(pause), "{backoff:?}");
    }
}

/// A master whose clock is a little behind ours, but within the limit, refuses the tokens of a
/// gateway if these are ahead of the gateway's clock.
#[test]
fn a_node_that_refuses_tokens_for_their_lead_cannot_vote() {
    let mut bench = Bench::admitted(false);
    let wall = bench.clock.wall_micros();
    let token = |ahead: u64| {
        let (owner, nonce) = OsEntropy.owner_and_nonce();
        LockToken::new(owner, nonce, FencingToken::new(wall + ahead).unwrap())
    };
    let mut ask = |ahead| {
        let op = Op::Acquire {
            keys: Keys::new("lock:", &"a".parse::<LockName>().unwrap()),
            record: Record::new(&token(ahead), &Info::default()),
            ttl: Ttl::from_millis(1_000).unwrap(),
            tell: None,
        };
        let reply = Reply::new(bench.votes.clone(), 0);
        let task = Task { op: Arc::new(op), not_after: bench.now + DEADLINE, reply };
        bench.driver.submit(std::iter::once(task));
        bench.call();
        let answer =
            Answer { time_micros: Some(wall as i64 - 1_300_000), ..answer(vec![Vote::Granted]) };
        bench.on(Event::Answered(Ok(answer)));
        bench.driver.status().borrow().votes()
    };
    assert!(ask(0), "1.3 s behind is within max_clock_skew");
    assert!(!ask(1_000_000), "2.3 s behind the tokens is not");
    assert!(ask(100_000), "the lead is small again");
}

/// The master answers everything except writes, so a probe does not detect this state.
#[test]
fn a_node_that_refuses_writes_cannot_vote_until_they_work() {
    let mut bench = Bench::admitted(false);
    let votes = |bench: &Bench| bench.driver.status().borrow().votes();
    let mut heartbeat = |error: Option<&str>| {
        let actions = bench.at_deadline();
        assert!(actions.contains(&Action::Call) && actions.contains(&Action::Probe), "{actions:?}");
        bench.on(Event::Answered(Ok(Answer {
            write_error: error.map(str::to_owned),
            ..answer(Vec::new())
        })));
        let reply = ProbeReply {
            facts: Facts::volatile_master(),
            marker: Some(bench.marker.clone()),
            is_caught_up: true,
            number: 0,
        };
        assert_eq!(bench.on(Event::Probed(Ok(reply))), []);
        votes(&bench)
    };
    assert!(!heartbeat(Some("OOM command not allowed when used memory > 'maxmemory'.")));
    assert!(heartbeat(None));
    assert!(!heartbeat(Some("NOREPLICAS Not enough good replicas to write.")));
    bench.submit(1);
    bench.call();
    bench.on(Event::Answered(Ok(answer(vec![Vote::Granted]))));
    assert!(!votes(&bench), "a grant beside a release is written even without memory");
    assert!(bench.at_deadline().contains(&Action::Call));
    bench.on(Event::Answered(Ok(answer(Vec::new()))));
    assert!(votes(&bench));
}
