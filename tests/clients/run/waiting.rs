//! How `redlock run` waits for a lock: its place in line, also over many requests.

use std::fs::File;
use std::process::Stdio;

use serde_json::json;
use tokio::process::Child;

use super::{ended, output, redlock};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{TempDir, eventually, masters};
use crate::support::metrics::Samples;
use crate::support::waiters::{HOUR_MS, patient, patient_over};

const WAITERS: [&str; 5] = ["A", "B", "C", "D", "E"];

/// Runs of one lock that wait in line.
struct Line {
    dir: TempDir,
    urls: Vec<String>,
    runs: Vec<Child>,
}

impl Line {
    fn new(gateways: &[&Gateway]) -> Self {
        let urls = gateways.iter().map(|gateway| format!("http://{}", gateway.address()));
        Self { dir: TempDir::new(), urls: urls.collect(), runs: Vec::new() }
    }

    fn path(&self, file: &str) -> std::path::PathBuf {
        self.dir.path().join(file)
    }

    fn read(&self, file: &str) -> String {
        std::fs::read_to_string(self.path(file)).unwrap_or_default()
    }

    /// Starts a run that writes its label to the file `log`. Returns when it shows its place.
    async fn join(&mut self, any: &Gateway, label: &str) {
        let place = format!("{} in line", ["1st", "2nd", "3rd", "4th", "5th"][self.runs.len()]);
        let log = self.path("log");
        let work = format!("echo {label} >> {}", log.display());
        let mut run = redlock(
            any,
            &["run", "job", "--owner", label, "--wait", "1h", "--", "sh", "-c", &work],
        );
        run.env("REDLOCK_URL", self.urls.join(","));
        run.stderr(Stdio::from(File::create(self.path(label)).unwrap()));
        self.runs.push(run.spawn().unwrap());
        self.shows(label, &place).await;
    }

    async fn shows(&self, label: &str, text: &str) {
        let is_shown = async || self.read(label).contains(text).then_some(());
        eventually(&format!("{label} shows {text:?}"), is_shown).await;
    }

    /// Waits for the end of all runs. Returns what they wrote.
    async fn served(&mut self) -> String {
        for run in self.runs.drain(..) {
            assert!(ended(run).await.status.success());
        }
        self.read("log").split_whitespace().collect()
    }
}

/// Waits until this many more requests have found the lock held.
async fn turns(gateway: &Gateway, count: u64) {
    let found_held = async || {
        let outcomes = Samples::of(gateway)
            .await
            .non_zero("redlock_operations_total", &["operation", "outcome"]);
        outcomes.get(&["acquire", "held"].map(String::from)[..]).copied().unwrap_or(0)
    };
    let before = found_held().await;
    eventually("the turns pass", async || (found_held().await >= before + count).then_some(()))
        .await;
}

/// Lets runs wait for many turns, with one URL and with two. Returns the orders in which they were
/// served.
async fn served_after_many_turns() -> [String; 2] {
    let servers = masters(3);
    let short = || patient_over(&servers).flag("--max-wait", "500ms");
    let gateways = [short().ready().await, short().ready().await];
    let mut orders = [(); 2].map(|()| String::new());
    for (order, count) in orders.iter_mut().zip(1..) {
        let of: Vec<_> = gateways[..count].iter().collect();
        let held = gateways[0].post("job", json!({ "owner": "holder", "ttl_ms": HOUR_MS })).await;
        let mut line = Line::new(&of);
        for label in WAITERS {
            line.join(&gateways[0], label).await;
            turns(&gateways[0], 2).await;
        }
        turns(&gateways[0], 5 * WAITERS.len() as u64).await;
        for label in WAITERS {
            let shown = line.read(label);
            assert!(shown.contains("in line, held by \"holder\" since "), "{label}: {shown}");
            assert!(!shown.contains("lost"), "{label}: {shown}");
        }
        eventually("all places are shown in their order", async || {
            let (_, out, _) = output(&gateways[0], &["status", "job"]).await;
            let labels = out.lines().skip(1).map(|line| line.split('"').nth(1));
            labels.eq(WAITERS.map(Some)).then_some(())
        })
        .await;
        let token = held.json()["token"].as_str().unwrap().to_owned();
        assert_eq!(gateways[0].delete("job", &token).await.status, 204);
        *order = line.served().await;
    }
    orders
}

#[tokio::test]
async fn all_are_served_after_many_turns() {
    for order in served_after_many_turns().await {
        // On a busy machine, a run may be between two turns when the lock is free.
        let mut served: Vec<_> = order.chars().map(String::from).collect();
        served.sort();
        assert_eq!(served, WAITERS);
    }
}

#[tokio::test]
async fn killed_gateway_loses_the_places_and_runs_say_so() {
    let servers = masters(3);
    let launch = || patient_over(&servers).flag("--max-wait", "500ms");
    let [first, second] = [launch().ready().await, launch().ready().await];
    let held = second.post("job", json!({ "owner": "holder", "ttl_ms": HOUR_MS })).await;
    let mut line = Line::new(&[&first, &second]);
    for label in WAITERS {
        line.join(&second, label).await;
    }
    let gone = format!("place in line lost: http://{}", first.address());
    let there = format!("in line at http://{}", second.address());
    drop(first);
    for label in WAITERS {
        line.shows(label, &gone).await;
        line.shows(label, &there).await;
    }
    let token = held.json()["token"].as_str().unwrap().to_owned();
    assert_eq!(second.delete("job", &token).await.status, 204);
    let mut served: Vec<_> = line.served().await.chars().map(String::from).collect();
    served.sort();
    assert_eq!(served, WAITERS);
}

#[tokio::test]
async fn run_waits_without_end_and_wait_0_tries_once() {
    let gateway = patient(Launch::embedded()).ready().await;
    let held = gateway.post("job", json!({ "owner": "alice", "ttl_ms": HOUR_MS })).await;
    let (code, out, err) = output(&gateway, &["run", "job", "--wait", "0", "--", "true"]).await;
    assert_eq!((code, &*out), (Some(75), ""), "{err}");
    let mut waiting = Vec::new();
    for flags in [&[][..], &["--wait", "forever"], &["--json"]] {
        let args = [&["run", "job"], flags, &["--", "echo", "hi"]].concat();
        let mut run = redlock(&gateway, &args).spawn().unwrap();
        let told = super::line(&mut run).await;
        assert!(told.contains("in line, held by ") && told.contains("alice"), "{told}");
        waiting.push(run);
    }
    let token = held.json()["token"].as_str().unwrap().to_owned();
    assert_eq!(gateway.delete("job", &token).await.status, 204);
    for run in waiting {
        let ended = ended(run).await;
        assert!(ended.status.success() && ended.stdout == b"hi\n", "{ended:?}");
    }
}

#[tokio::test]
async fn superseded_run_exits_as_for_a_held_lock() {
    let gateway = patient(Launch::embedded()).ready().await;
    let held = gateway.post("job", json!({ "owner": "alice", "ttl_ms": HOUR_MS })).await;
    let newest = |flags: &[&str]| {
        let args = [&["run", "job", "--queue", "newest"], flags, &["--", "echo", "hi"]].concat();
        redlock(&gateway, &args).spawn().unwrap()
    };
    let mut run = newest(&[]);
    eventually("the first run waits", async || {
        (gateway.inspect("job").await["waiters_total"] == 1).then_some(())
    })
    .await;
    // The end of the older run shows that the newer one waits.
    let cases = [
        (&["--conflict-exit-code", "0"][..], 75, "redlock: job: superseded (409): a newer request"),
        (&["--json"], 0, "redlock: job: superseded (409): a newer request"),
        (&["--priority", "9"], 75, "\"event\":\"superseded\""),
    ];
    for (flags, code, words) in cases {
        let superseded = ended(std::mem::replace(&mut run, newest(flags))).await;
        let err = String::from_utf8_lossy(&superseded.stderr);
        assert_eq!((superseded.status.code(), &*superseded.stdout), (Some(code), &b""[..]));
        assert!(err.contains(words), "{err}");
    }
    assert_eq!(gateway.inspect("job").await["waiters"][0]["priority"], 9);
    let token = held.json()["token"].as_str().unwrap().to_owned();
    assert_eq!(gateway.delete("job", &token).await.status, 204);
    let served = ended(run).await;
    assert!(served.status.success() && served.stdout == b"hi\n", "{served:?}");
    for (flag, value) in [("--priority", "10"), ("--queue", "last")] {
        let (code, _, err) = output(&gateway, &["run", "job", flag, value, "--", "true"]).await;
        assert!(code == Some(64) && err.contains(flag), "{err}");
    }
}

#[tokio::test]
async fn wrong_wait_says_what_is_wanted() {
    let gateway = Launch::embedded().ready().await;
    for args in
        [&["run", "job", "--wait", "soon", "--", "true"][..], &["acquire", "job", "--wait", "5"]]
    {
        let (code, _, err) = output(&gateway, args).await;
        assert!(code == Some(64) && err.contains("10m") && err.contains("forever"), "{err}");
    }
}

#[tokio::test]
async fn given_up_place_is_free_at_once() {
    let gateway = patient(Launch::embedded()).flag("--max-wait", "500ms").ready().await;
    gateway.post("job", json!({ "owner": "alice", "ttl_ms": HOUR_MS })).await;
    let mut line = Line::new(&[&gateway]);
    let (code, _, err) = output(&gateway, &["run", "job", "--wait", "3s", "--", "true"]).await;
    assert!(code == Some(75) && err.contains("1st in line"), "{err}");
    line.join(&gateway, "A").await;
    turns(&gateway, 2).await;
    assert!(!line.read("A").contains("2nd"), "{}", line.read("A"));
}

mod measured {
    use super::*;
    use crate::support::measure::measured;

    #[tokio::test]
    async fn first_come_first_served_over_many_turns() {
        measured("the order of runs", async || {
            let orders = served_after_many_turns().await;
            let are_kept = orders.iter().all(|order| *order == WAITERS.concat());
            if are_kept { Ok(()) } else { Err(format!("{orders:?}")) }
        })
        .await;
    }
}
