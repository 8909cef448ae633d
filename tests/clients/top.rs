//! `redlock top` on a pseudo terminal.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::run::{Screen, number, output};
use crate::support::gateway::Launch;
use crate::support::harness::{TempDir, free_port};

/// What restores a terminal: it leaves the second screen.
const RESTORED: &str = "\u{1b}[?1049l";

#[tokio::test]
async fn top_shows_held_locks_as_they_change() {
    let gateway = Launch::embedded().ready().await;
    gateway.post("jobs/first", json!({ "owner": "alice", "ttl_ms": 300_000 })).await;
    let shell = "stty rows 20 cols 120; redlock top --prefix jobs/; echo code-$?";
    let mut screen = Screen::new(&gateway, "sh -c", shell);
    for text in ["jobs/first", "alice", "admitted"] {
        screen.shows(text).await;
    }
    gateway.post("jobs/second", json!({ "owner": "bob", "ttl_ms": 300_000 })).await;
    screen.shows("jobs/second").await;
    screen.types("/fir").await;
    screen.shows("/fir").await;
    screen.types("\r").await;
    screen.types("q").await;
    screen.shows(RESTORED).await;
    screen.shows("code-0").await;
}

#[tokio::test]
async fn top_shows_that_it_reconnects() {
    let address = format!("127.0.0.1:{}", free_port());
    let gateway = Launch::bare(&["--listen", &address]).ready().await;
    gateway.post("before", json!({ "owner": "alice", "ttl_ms": 300_000 })).await;
    let mut screen = Screen::new(&gateway, "sh -c", "stty rows 20 cols 120; redlock top");
    screen.shows("before").await;
    drop(gateway);
    screen.shows("reconnecting").await;
    let gateway = Launch::bare(&["--listen", &address]).ready().await;
    let after = gateway.post("after", json!({ "owner": "bob", "ttl_ms": 300_000 })).await;
    assert_eq!(after.status, 201, "{after:?}");
    screen.shows("after").await;
}

#[tokio::test]
async fn signal_ends_top_and_restores_the_terminal() {
    let gateway = Launch::embedded().ready().await;
    let dir = TempDir::new();
    let pid = dir.path().join("pid");
    let top = format!(r#"sh -c "echo \$\$ > {}; exec redlock top""#, pid.display());
    let shell = format!("stty rows 20 cols 120; {top}; echo code-$?; stty -a");
    let mut screen = Screen::new(&gateway, "sh -c", &shell);
    screen.shows("connected to").await;
    kill_process(Pid::from_raw(number(&dir, "pid").await).unwrap(), Signal::TERM).unwrap();
    screen.shows(RESTORED).await;
    screen.shows("code-0").await;
    screen.shows(" icanon").await;
}

#[tokio::test]
async fn top_needs_a_terminal() {
    let gateway = Launch::embedded().ready().await;
    let (code, out, err) = output(&gateway, &["top"]).await;
    assert!(code == Some(64) && out.is_empty() && err.contains("not a terminal"), "{code:?} {err}");
    let (code, _, err) = output(&gateway, &["top", "--json"]).await;
    assert!(code == Some(64) && err.contains("redlock watch"), "{code:?} {err}");
}
