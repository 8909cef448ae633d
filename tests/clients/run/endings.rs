//! How `redlock run` ends its command.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::process::{Child, Command};

use super::{code_and_words, lives, number, output, redlock, script};
use crate::support::gateway::Launch;
use crate::support::harness::{TempDir, eventually};

fn signal(runner: &Child, signal: Signal) {
    kill_process(Pid::from_raw(runner.id().unwrap() as i32).unwrap(), signal).unwrap();
}

/// Waits until a script has written one whole line to a file. Returns the line.
async fn written(dir: &TempDir, file: &str) -> String {
    let path = dir.path().join(file);
    let read = || std::fs::read_to_string(&path).ok()?.strip_suffix('\n').map(str::to_owned);
    eventually(&format!("{file} is written"), async || read()).await
}

/// A script that behaves like Terraform and its provider. Terraform ends its work after INT. The
/// provider ignores INT and dies of TERM.
const PROVIDER: &str = r#"
    perl -e '$SIG{INT} = "IGNORE"; $SIG{TERM} = sub { open F, ">", "$ARGV[0]/died"; exit };
        open F, ">", "$ARGV[0]/provider"; print F "$$\n"; close F; sleep 1 while 1' "$1" & provider=$!
    trap 'echo INT >> "$1/signals"; sleep 0.5; kill -KILL $provider; exit 5' INT
    trap 'echo TERM >> "$1/signals"' TERM
    while [ ! -e "$1/provider" ]; do sleep 0.05; done
    echo "$REDLOCK_TOKEN" > "$1/token"
    while :; do sleep 0.05; done"#;

#[tokio::test]
async fn the_stop_signal_is_chosen_and_no_term_reaches_a_provider() {
    let gateway = Launch::embedded().ready().await;
    for (is_lost, name, code) in [(true, "INT", 79), (false, "sigint", 5)] {
        let dir = TempDir::new();
        let flags = ["--ttl", "15s", "--grace", "3s", "--stop-signal", name];
        let runner = redlock(&gateway, &script(&dir, &flags, PROVIDER)).spawn().unwrap();
        let token = written(&dir, "token").await;
        match is_lost {
            true => assert_eq!(gateway.delete("job", &token).await.status, 204),
            false => signal(&runner, Signal::TERM),
        }
        let (ended, err) = code_and_words(runner).await;
        assert_eq!((ended, &*written(&dir, "signals").await), (Some(code), "INT"), "{err}");
        assert!(!dir.path().join("died").exists(), "{err}");
    }
    let (code, _, err) =
        output(&gateway, &["run", "job", "--stop-signal", "KILL", "--", "true"]).await;
    assert!(code == Some(64) && err.contains("possible values: TERM, INT, HUP, QUIT"), "{err}");
}

#[tokio::test]
async fn a_leftover_process_gets_the_stop_signal_once() {
    let gateway = Launch::embedded().ready().await;
    let dir = TempDir::new();
    let work = r#"
        trap 'exit 5' INT
        perl -e '$SIG{INT} = sub { open F, ">>", "$ARGV[0]/signals"; print F "INT\n"; close F };
            open F, ">", "$ARGV[0]/left"; print F "$$\n"; close F;
            select undef, undef, undef, 0.1 while ! -e "$ARGV[0]/signals";
            select undef, undef, undef, 0.5; open F, ">", "$ARGV[0]/saved"' "$1" &
        wait; while :; do sleep 0.05; done"#;
    let runner = redlock(&gateway, &script(&dir, &["--stop-signal", "INT"], work)).spawn().unwrap();
    let left = number(&dir, "left").await;
    signal(&runner, Signal::TERM);
    assert_eq!(code_and_words(runner).await.0, Some(5));
    assert!(
        !lives(left) && dir.path().join("saved").exists(),
        "the leftover process had time to end"
    );
    assert_eq!(written(&dir, "signals").await, "INT");
}

/// A process that leaves its process group. Its first thread ends. Another thread continues and
/// ignores TERM.
const THREADED: &str = r#"
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>
static void *work(void *file) {
    usleep(100000);
    FILE *out = fopen(file, "w");
    fprintf(out, "%d\n", getpid());
    fclose(out);
    for (;;) sleep(1);
}
int main(int count, char **words) {
    pthread_t thread;
    signal(SIGTERM, SIG_IGN);
    setsid();
    if (count < 2 || pthread_create(&thread, NULL, work, words[1])) return 1;
    pthread_exit(NULL);
}
"#;

#[tokio::test]
async fn a_process_with_an_ended_first_thread_is_killed() {
    let gateway = Launch::embedded().ready().await;
    let (dir, file) = (TempDir::new(), |dir: &TempDir, name: &str| {
        dir.path().join(name).to_str().unwrap().to_owned()
    });
    let source = file(&dir, "threaded.c");
    let program = file(&dir, "threaded");
    std::fs::write(&source, THREADED).unwrap();
    let built = Command::new("cc")
        .args(["-pthread", "-o", &program, &source])
        .output()
        .await
        .expect("cc starts");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    for is_killed in [false, true] {
        let dir = TempDir::new();
        let work = format!(
            r#"{program} "$1/threaded" & echo "$REDLOCK_TOKEN" > "$1/token"; while :; do sleep 1; done"#
        );
        let mut runner =
            redlock(&gateway, &script(&dir, &["--ttl", "9s", "--grace", "300ms"], &work))
                .spawn()
                .unwrap();
        let threaded = number(&dir, "threaded").await;
        let token = written(&dir, "token").await;
        let process = format!("/proc/{threaded}");
        eventually("the first thread has ended", async || {
            let stat = std::fs::read_to_string(format!("{process}/stat")).unwrap();
            stat.contains(") Z ").then_some(())
        })
        .await;
        match is_killed {
            true => runner.start_kill().unwrap(),
            false => assert_eq!(gateway.delete("job", &token).await.status, 204),
        }
        let threads = || std::fs::read_dir(format!("{process}/task")).map_or(0, Iterator::count);
        eventually("all its threads are gone", async || (threads() < 2).then_some(())).await;
        assert_eq!(runner.wait().await.unwrap().code(), if is_killed { None } else { Some(79) });
        eventually("the lock is free", async || {
            (gateway.inspect("job").await["state"] == "free").then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn the_conflict_exit_code_can_be_chosen() {
    let gateway = Launch::embedded().ready().await;
    let _lease = gateway.post("job", json!({ "owner": "alice", "ttl_ms": 300_000 })).await;
    for (wanted, code) in [("0", 0), ("9", 9), ("75", 75), ("255", 255)] {
        for wait in ["0", "100ms"] {
            let args = [
                "--json",
                "run",
                "job",
                "--wait",
                wait,
                "--conflict-exit-code",
                wanted,
                "--",
                "false",
            ];
            let (ended, _, err) = output(&gateway, &args).await;
            let event: serde_json::Value = serde_json::from_str(&err).unwrap();
            assert_eq!(
                (ended, &event["event"], &event["exit_code"]),
                (Some(code), &"held".into(), &code.into()),
                "{err}"
            );
        }
    }
    let free = ["run", "free", "--conflict-exit-code", "0", "--"];
    assert_eq!(output(&gateway, &[&free[..], &["sh", "-c", "exit 75"]].concat()).await.0, Some(75));
    let nowhere = ["--url", "http://127.0.0.1:1"];
    assert_eq!(
        output(&gateway, &[&nowhere[..], &free, &["true"]].concat()).await.0,
        Some(69),
        "a missing gateway is not a held lock"
    );
    let (code, _, err) =
        output(&gateway, &["run", "job", "--conflict-exit-code", "256", "--", "true"]).await;
    assert!(code == Some(64) && err.contains("256"), "{err}");
}

#[tokio::test]
async fn a_command_stopped_for_want_of_a_terminal_ends() {
    let gateway = Launch::embedded().ready().await;
    let dir = TempDir::new();
    let work = r#"exec perl -e '$SIG{TTIN} = "DEFAULT"; kill TTIN => $$; sleep 60'"#;
    let runner = redlock(&gateway, &script(&dir, &[], work)).spawn().unwrap();
    let (code, err) = code_and_words(runner).await;
    assert!(
        code == Some(143) && err.contains("reads a terminal that belongs to another job"),
        "{code:?} {err}"
    );
    assert_eq!(gateway.inspect("job").await["state"], "free");
}

#[tokio::test]
async fn a_failed_acquire_ends_the_shell_that_evaluates_it() {
    let gateway = Launch::embedded().ready().await;
    let _lease = gateway.post("job", json!({ "ttl_ms": 300_000 })).await;
    let dead = "http://127.0.0.1:1";
    let alive = format!("http://{}", gateway.address());
    for (url, code) in [(&*alive, 75), (dead, 69)] {
        let redlock = super::binary().display();
        let work = format!(
            "set -e; eval \"$({redlock} acquire job --format shell)\"; echo working without the lock"
        );
        let output =
            Command::new("sh").args(["-c", &work]).env("REDLOCK_URL", url).output().await.unwrap();
        assert_eq!((output.status.code(), &*output.stdout), (Some(code), &b""[..]), "{url}");
    }
}

#[tokio::test]
async fn a_shell_and_a_command_learn_their_slots() {
    let gateway = Launch::embedded().ready().await;
    let redlock = super::binary().display();
    let work = format!(
        "set -e; eval \"$({redlock} acquire pool --slots 4 --take 3 --at-least 1m --format shell)\"
         {redlock} run pool --slots 4 -- sh -c 'echo $REDLOCK_SLOTS'; echo $REDLOCK_SLOTS; echo $REDLOCK_TOKEN"
    );
    let url = format!("http://{}", gateway.address());
    let output =
        Command::new("sh").args(["-c", &work]).env("REDLOCK_URL", url).output().await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<_> = text.lines().collect();
    let [of_command, of_shell, token] = lines[..] else { panic!("{output:?}") };
    let mut all: Vec<_> = of_shell.split(',').chain([of_command]).collect();
    all.sort_unstable();
    assert_eq!(all, ["1", "2", "3", "4"], "{text}");
    assert!(token.starts_with("2-60000-"), "{token}");
}

#[tokio::test]
async fn a_run_reports_processes_left_without_the_lock() {
    let gateway = Launch::embedded().ready().await;
    let dir = TempDir::new();
    let work = r#"setsid sh -c 'echo $$ > "$1/daemon"; exec sleep 100000' sh "$1" > /dev/null 2>&1 &
        while [ ! -s "$1/daemon" ]; do sleep 0.05; done"#;
    let (code, _, err) = output(&gateway, &script(&dir, &[], work)).await;
    let daemon = number(&dir, "daemon").await;
    let is_there = lives(daemon);
    kill_process(Pid::from_raw(daemon).unwrap(), Signal::KILL).unwrap();
    assert!(
        code == Some(0) && is_there && err.contains("go on without the lock"),
        "{code:?} {err}"
    );
}

#[tokio::test]
async fn a_signal_reaches_the_command_and_stops_its_leftovers() {
    let gateway = Launch::embedded().ready().await;
    let dir = TempDir::new();
    let work =
        r#"trap 'exit 5' TERM; sleep 100000 & echo $! > "$1/left"; echo $$ > "$1/child"; wait"#;
    let runner = redlock(&gateway, &script(&dir, &[], work)).spawn().unwrap();
    let (left, _) = (number(&dir, "left").await, number(&dir, "child").await);
    signal(&runner, Signal::TERM);
    assert_eq!(code_and_words(runner).await.0, Some(5));
    assert!(!lives(left), "the leftover process would continue without the lock");
    assert_eq!(gateway.inspect("job").await["state"], "free");
}
