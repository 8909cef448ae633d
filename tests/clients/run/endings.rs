//! How `redlock run` brings its command to an end.

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Child;

use super::{code_and_words, lives, number, output, redlock, script};
use crate::support::gateway::Launch;
use crate::support::harness::{TempDir, eventually};

fn signal(runner: &Child, signal: Signal) {
    kill_process(Pid::from_raw(runner.id().unwrap() as i32).unwrap(), signal).unwrap();
}

/// What a script has written into a file, when that is a whole line.
async fn written(dir: &TempDir, file: &str) -> String {
    let path = dir.path().join(file);
    let read = || std::fs::read_to_string(&path).ok()?.strip_suffix('\n').map(str::to_owned);
    eventually(&format!("{file} is written"), async || read()).await
}

/// As Terraform and its providers: the one ends its work at INT, and the other one ignores INT and dies of TERM.
const PROVIDER: &str = r#"
    perl -e '$SIG{INT} = "IGNORE"; $SIG{TERM} = sub { open F, ">", "$ARGV[0]/died"; exit };
        open F, ">", "$ARGV[0]/provider"; print F "$$\n"; close F; sleep 1 while 1' "$1" & provider=$!
    trap 'echo INT >> "$1/told"; sleep 0.5; kill -KILL $provider; exit 5' INT
    trap 'echo TERM >> "$1/told"' TERM
    while [ ! -e "$1/provider" ]; do sleep 0.05; done
    echo "$REDLOCK_TOKEN" > "$1/token"
    while :; do sleep 0.05; done"#;

#[tokio::test]
async fn providers_of_terraform_were_sent_term_in_the_middle_of_their_work() {
    let gateway = Launch::embedded().ready().await;
    for (is_lost, name, code) in [(true, "INT", 79), (false, "sigint", 5)] {
        let dir = TempDir::new();
        let flags = ["--ttl", "9s", "--grace", "3s", "--stop-signal", name];
        let runner = redlock(&gateway, &script(&dir, &flags, PROVIDER)).spawn().unwrap();
        let token = written(&dir, "token").await;
        match is_lost {
            true => assert_eq!(gateway.delete("job", &token).await.status, 204),
            false => signal(&runner, Signal::TERM),
        }
        let (ended, err) = code_and_words(runner).await;
        assert_eq!((ended, &*written(&dir, "told").await), (Some(code), "INT"), "{err}");
        assert!(!dir.path().join("died").exists(), "{err}");
    }
    let (code, _, err) = output(&gateway, &["run", "job", "--stop-signal", "KILL", "--", "true"]).await;
    assert!(code == Some(64) && err.contains("possible values: TERM, INT, HUP, QUIT"), "{err}");
}

#[tokio::test]
async fn what_was_left_behind_was_asked_to_stop_a_second_time_and_dropped_its_work() {
    let gateway = Launch::embedded().ready().await;
    let dir = TempDir::new();
    let work = r#"
        perl -e '$SIG{INT} = sub { open F, ">>", "$ARGV[0]/told"; print F "INT\n"; close F };
            open F, ">", "$ARGV[0]/left"; print F "$$\n"; close F;
            select undef, undef, undef, 0.1 while ! -e "$ARGV[0]/told"; sleep 1; open F, ">", "$ARGV[0]/saved"' "$1" &
        trap 'exit 5' INT; wait; while :; do sleep 0.05; done"#;
    let runner = redlock(&gateway, &script(&dir, &["--stop-signal", "INT"], work)).spawn().unwrap();
    let left = number(&dir, "left").await;
    signal(&runner, Signal::TERM);
    assert_eq!(code_and_words(runner).await.0, Some(5));
    assert!(!lives(left) && dir.path().join("saved").exists(), "it had time to end");
    assert_eq!(written(&dir, "told").await, "INT");
}
