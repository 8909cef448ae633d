//! The same seed gives the same history, equal to the last byte of its timeline.

use redlock_sim::plan::Plan;
use redlock_sim::rule::Rule;
use redlock_sim::run::run;
use redlock_sim::timeline::render;

#[track_caller]
fn replays(plan: &Plan) -> String {
    let first = run(plan);
    let second = run(plan);
    let text = render(&first.history);
    let again = render(&second.history);
    for (number, (line, other)) in text.lines().zip(again.lines()).enumerate() {
        assert_eq!(line, other, "seed {}, line {}", plan.seed, number + 1);
    }
    assert_eq!(text.len(), again.len(), "seed {}", plan.seed);
    assert_eq!(first.violations, second.violations);
    text
}

#[test]
fn a_storm_replays_byte_for_byte() {
    let texts: Vec<String> = (0..12).map(|seed| replays(&Plan::storm(seed))).collect();
    assert!(texts.iter().all(|text| text.lines().count() > 1_000), "histories are eventful");
    assert!(texts.windows(2).all(|pair| pair[0] != pair[1]), "another seed is another history");
}

#[test]
fn other_plans_replay_as_well() {
    replays(&Plan::rolling(5, false));
    replays(&Plan::rolling(5, true));
    replays(&Plan::young(5));
    (0..4).for_each(|seed| drop(replays(&Plan::queue(seed))));
    (0..4).for_each(|seed| drop(replays(&Plan::reconfigure(seed))));
    replays(&"watermark-is-checked".parse::<Rule>().expect("a rule").off(Plan::storm(5)));
}

#[test]
fn history_does_not_depend_on_the_thread() {
    let here = replays(&Plan::storm(40));
    let there = std::thread::spawn(|| render(&run(&Plan::storm(40)).history)).join().unwrap();
    assert!(here == there);
}
