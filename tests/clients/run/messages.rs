//! What the messages and answers of `redlock` say, and what they must not say.

use http::Method;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::watchdogs::{both_watchdogs, runner};
use super::{code_and_words, ended, lives, number, output, redlock, script};
use crate::http::keys::{HOLDER, file, key, with_keys};
use crate::support::client::lock_path;
use crate::support::gateway::{Launch, Scratch};
use crate::support::harness::{TempDir, eventually, masters};
use crate::support::waiters::waiting_is;

/// A command that prints nothing, and runs until the file `go` is there.
const WORK: &str = r#"echo $$ > "$1/child"; while [ ! -e "$1/go" ]; do sleep 0.05; done"#;

#[tokio::test]
async fn json_shows_the_token_only_to_acquire() {
    let gateway = Launch::embedded().ready().await;
    let dir = TempDir::new();
    let work = format!(r#"echo "$REDLOCK_TOKEN" > "$1/token"; {WORK}"#);
    let running = redlock(&gateway, &[&["--json"], &script(&dir, &[], &work)[..]].concat());
    let running = { running }.spawn().unwrap();
    number(&dir, "child").await;
    let token = std::fs::read_to_string(dir.path().join("token")).unwrap();
    let token = token.trim();
    let mut watch = redlock(&gateway, &["--json", "watch", "job"]).spawn().unwrap();
    let mut shown = super::line_of(watch.stdout.take().unwrap()).await;
    watch.kill().await.unwrap();
    assert!(shown.contains("\"held\""), "{shown}");
    for args in [
        &["status", "job"][..],
        &["list"],
        &["nodes"],
        &["acquire", "job"],
        &["acquire", "job", "--format", "shell"],
        &["run", "job", "--wait", "0", "--", "true"],
        &["run", "job", "--wait", "100ms", "--", "true"],
        &["extend", "job", "--token", token],
        &["extend", "other", "--token", token],
        &["release", "other", "--token", token],
    ] {
        let (code, out, err) = output(&gateway, &[&["--json"], args].concat()).await;
        assert!(
            code.is_some() && !(out.is_empty() && err.is_empty()) || code == Some(0),
            "{args:?}"
        );
        for line in out.lines().chain(err.lines()) {
            let parsed: Result<Value, _> = serde_json::from_str(line);
            assert!(parsed.is_ok(), "{args:?}: {line}");
        }
        shown += &format!("{}: {out}{err}\n", args[0]);
    }
    std::fs::write(dir.path().join("go"), "").unwrap();
    let ended = ended(running).await;
    shown += &String::from_utf8([ended.stdout, ended.stderr].concat()).unwrap();
    assert!(token.len() > 20 && !shown.contains(token), "{shown}");
    let (_, out, _) = output(&gateway, &["--json", "acquire", "job"]).await;
    let granted: Value = serde_json::from_str(&out).unwrap();
    assert!(granted["token"].as_str().is_some_and(|token| token.len() > 20), "{out}");
}

#[tokio::test]
async fn every_refusal_names_the_lock() {
    let holder = key("jobs", HOLDER, "jobs/*").await;
    let keys = file(&[&holder]);
    let gateway = with_keys(&keys).start().await;
    let key_file = Scratch::new("key", &holder.text);
    let key_file = ["--key-file", key_file.path()];
    let acquire = holder.call(&gateway, Method::POST, &lock_path("jobs/a"));
    assert_eq!(acquire.json(&json!({ "ttl_ms": 300_000 })).send().await.status, 201);
    let nowhere = ["--url", "http://127.0.0.1:1"];
    for (flags, args, code) in [
        (&key_file[..], &["run", "jobs/a", "--wait", "0", "--", "true"][..], 75),
        (&key_file, &["run", "jobs/a", "--wait", "1ms", "--", "true"], 75),
        (&key_file, &["acquire", "jobs/a"], 75),
        (&key_file, &["extend", "jobs/a", "--token", "1.1.a"], 64),
        (&key_file, &["run", "jobs/b", "--ttl", "20h", "--", "true"], 64),
        (&key_file, &["run", "jobs/b", "--", "/no/such/thing"], 127),
        (&key_file, &["run", "other", "--", "true"], 77),
        (&key_file, &["force-release", "jobs/a"], 77),
        (&[], &["status", "jobs/a"], 77),
        (&nowhere, &["run", "jobs/a", "--", "true"], 69),
        (&nowhere, &["release", "jobs/a", "--token", "a"], 69),
        (&nowhere, &["watch", "jobs/a"], 69),
    ] {
        let (ended, _, err) = output(&gateway, &[flags, args].concat()).await;
        assert_eq!(ended, Some(code), "{args:?}: {err}");
        assert!(err.starts_with(&format!("redlock: {}: ", args[1])), "{args:?}: {err}");
        let (_, _, err) = output(&gateway, &[&["--json"], flags, args].concat()).await;
        for line in err.lines() {
            let event: Value = serde_json::from_str(line).unwrap();
            assert_eq!(event["name"], args[1], "{err}");
        }
    }
}

#[tokio::test]
async fn default_owner_names_user_host_pid_and_command() {
    let gateway = Launch::embedded().ready().await;
    let dir = TempDir::new();
    let mut run = redlock(&gateway, &script(&dir, &[], WORK));
    let run = run.env("USER", "al\u{1b}ice\n").spawn().unwrap();
    number(&dir, "child").await;
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let label = format!("al ice@{}:{} sh", host.trim(), run.id().unwrap()).replace(' ', "");
    let owner = gateway.inspect("job").await["owner"].as_str().unwrap().to_owned();
    assert_eq!(owner.replace(' ', ""), label);
    std::fs::write(dir.path().join("go"), "").unwrap();
    assert!(ended(run).await.status.success());
    let (code, ..) = output(&gateway, &["acquire", "job"]).await;
    let owner = gateway.inspect("job").await["owner"].as_str().unwrap().to_owned();
    let by_us = format!(":{} ", std::process::id());
    assert!(code == Some(0) && owner.contains(&by_us), "the process that works: {owner}");
}

#[tokio::test]
async fn status_shows_metadata() {
    let gateway = Launch::embedded().ready().await;
    let flags = ["--metadata", "job=nightly", "--metadata", "run=4711"];
    output(&gateway, &[&["acquire", "job"], &flags[..]].concat()).await;
    let (_, out, _) = output(&gateway, &["status", "job"]).await;
    assert!(out.contains(r#""job" = "nightly", "run" = "4711""#), "{out}");
}

#[tokio::test]
async fn nodes_exits_with_1_without_a_quorum() {
    let mut servers = masters(3);
    let gateway = Launch::over(&servers).ready().await;
    for args in [&["nodes"][..], &["--json", "nodes"]] {
        assert_eq!(output(&gateway, args).await.0, Some(0));
    }
    servers[..2].iter_mut().for_each(|server| server.kill());
    eventually("the quorum is lost", async || (gateway.readyz().await.status == 503).then_some(()))
        .await;
    for args in [&["nodes"][..], &["--json", "nodes"]] {
        let (code, out, err) = output(&gateway, args).await;
        assert!(code == Some(1) && out.contains("no_quorum") && err.is_empty(), "{out}{err}");
    }
}

#[tokio::test]
async fn command_needs_no_double_dash() {
    let gateway = Launch::embedded().ready().await;
    for (args, shown) in [
        (&["run", "a", "echo", "hi"][..], "hi\n"),
        (&["run", "a", "--ttl", "50s", "echo", "--json", "--ttl", "x"], "--json --ttl x\n"),
        (&["run", "--ttl", "50s", "a", "echo", "--", "hi"], "-- hi\n"),
        (&["run", "a", "--", "echo", "--", "hi"], "-- hi\n"),
    ] {
        assert_eq!(
            output(&gateway, args).await,
            (Some(0), shown.into(), String::new()),
            "{args:?}"
        );
    }
    let (code, _, err) = output(&gateway, &["run", "a", "--nonsense", "echo"]).await;
    assert!(code == Some(64) && err.contains("--nonsense"), "{err}");
}

#[tokio::test]
async fn nested_run_leaves_no_process_behind() {
    let gateway = Launch::embedded().ready().await;
    gateway.post("held", json!({ "ttl_ms": 300_000 })).await;
    let redlock_path = super::binary().to_str().unwrap();
    let dir = TempDir::new();
    // The inner `redlock run` waits in vain, until a newer request takes its place. Its watchdogs
    // are stopped, so they cannot end by themselves.
    let work = format!(
        r#"{redlock_path} run held --queue newest -- true 2> /dev/null & echo $! > "$1/inner"; wait $!"#
    );
    let outer = redlock(&gateway, &script(&dir, &[], &work)).spawn().unwrap();
    let inner = number(&dir, "inner").await;
    let watchdogs = both_watchdogs(inner).await;
    // The inner run asks for the lock when its watchdogs are ready.
    waiting_is(&gateway, 1, 1).await;
    for watchdog in watchdogs {
        kill_process(Pid::from_raw(watchdog).unwrap(), Signal::STOP).unwrap();
    }
    assert!(runner(&outer) != inner);
    let newer = json!({ "queue": "newest", "wait_ms": 25_000 });
    let newer = gateway.call(Method::POST, "/locks/held").json(&newer);
    let newer = tokio::spawn(newer.send());
    let (code, err) = code_and_words(outer).await;
    newer.abort();
    let left: Vec<i32> = watchdogs.into_iter().filter(|watchdog| lives(*watchdog)).collect();
    left.iter().for_each(|left| kill_process(Pid::from_raw(*left).unwrap(), Signal::KILL).unwrap());
    assert!(code == Some(75) && err.is_empty() && left.is_empty(), "{code:?} {left:?} {err}");
}
