//! The core's examples compile, run, and print the lines that their documentation shows.

use std::process::Output;

use crate::support::gateway::built;
use crate::support::harness::{dies_with_us, masters};

fn run(example: &str, args: &[String]) -> String {
    let program = built(&["--examples"]).join("examples").join(example);
    let Output { status, stdout, stderr } =
        dies_with_us(program).args(args).output().expect("the example starts");
    let printed = String::from_utf8(stdout).expect("text");
    assert!(status.success(), "{example}: {printed}\n{}", String::from_utf8_lossy(&stderr));
    printed
}

/// The first word of every line.
fn words(printed: &str) -> Vec<&str> {
    printed.lines().filter_map(|line| line.split([' ', ':']).next()).collect()
}

/// The fencing tokens in the output, in order.
fn tokens(printed: &str) -> Vec<u64> {
    let named = printed.lines().filter_map(|line| line.split_once("with fencing token "));
    named.map(|(_, token)| token.parse().expect("a number")).collect()
}

#[test]
fn embedded_nodes_show_the_life_of_a_lock() {
    let printed = run("embedded", &[]);
    assert_eq!(words(&printed), ["acquired", "held", "extended", "handed", "lost"], "{printed}");
    let tokens = tokens(&printed);
    assert!(tokens.len() == 2 && tokens[0] < tokens[1], "{printed}");
}

#[test]
fn real_masters_bootstrap_once_and_later_runs_get_larger_tokens() {
    let servers = masters(3);
    let urls: Vec<_> = servers.iter().map(|server| server.url()).collect();
    let first = run("redis", &[urls.as_slice(), &["--bootstrap".into()]].concat());
    let second = run("redis", &urls);
    for printed in [&first, &second] {
        let work = ["UPDATE", "extended"].repeat(3);
        assert_eq!(
            words(printed),
            [&["acquired"], work.as_slice(), &["released"]].concat(),
            "{printed}"
        );
    }
    assert!(tokens(&first) < tokens(&second), "{first}\n{second}");
}
