//! The audit records of clients with keys. They go to a file of their own, or to the log.

use http::Method;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::http::auth::is_ready;
use crate::http::keys::{HOLDER, Key, file, key, with_keys};
use crate::support::client::{Answer, Lease, lock_path};
use crate::support::gateway::{Gateway, Launch, Scratch};
use crate::support::harness::{eventually, masters};
use crate::support::metrics::Samples;
use crate::support::waiters::{HOUR_MS, patient_over, waiting_is};

#[tokio::test]
async fn force_takes_a_lock_from_its_holder_and_records_the_caller() {
    let log = Scratch::new("audit.jsonl", "");
    let holder = key("holder", HOLDER, "*").await;
    let chief = key("chief", "force", "deploy/*").await;
    let reader = key("reader", "force,inspect", "deploy/*").await;
    let file = file(&[&holder, &chief, &reader]);
    let servers = masters(3);
    let launch = patient_over(&servers)
        .flag("--clock-skew", "10s")
        .flag("--node-timeout", "10s")
        .flag("--auth-keys", file.path())
        .flag("--audit-log", log.path());
    let gateway = launch.flag("--public", "metrics").start().await;
    is_ready(&gateway).await;
    let force = async |key: &Key, name: &str, query: &str| {
        key.call(&gateway, Method::DELETE, &format!("{}?{query}", lock_path(name))).send().await
    };

    let lease = holder.acquire(&gateway, "deploy/app").await;
    force(&holder, "deploy/app", "force=true").await.problem(403, "forbidden");
    force(&chief, "other", "force=true").await.problem(403, "forbidden");
    for query in ["force=1", "force", "force=TRUE", "Force=true"] {
        force(&holder, "deploy/app", query).await.problem(400, "invalid_parameter");
    }
    force(&chief, "deploy/app", "force=true&x=1").await.problem(400, "invalid_parameter");
    let both =
        chief.call(&gateway, Method::DELETE, &format!("{}?force=true", lock_path("deploy/app")));
    both.header("lock-token", &lease.token).send().await.problem(400, "invalid_parameter");
    // A forced release does not delete the lock of another Redlock library, and says so.
    servers.iter().for_each(|server| drop(server.cmd(&["SET", "lock:deploy/theirs", "somebody"])));
    for (key, names_holder) in [(&chief, false), (&reader, true)] {
        let theirs = force(key, "deploy/theirs", "force=true").await.problem(409, "not_holder");
        let detail = theirs["detail"].as_str().expect("a text");
        assert!(detail.contains("delete the lock's key on the masters"), "{detail}");
        let holder = "another client of the masters holds it, without an expiry";
        assert_eq!(detail.ends_with(holder), names_holder, "{detail}");
    }
    let seen = reader.call(&gateway, Method::GET, &lock_path("deploy/theirs")).send().await;
    assert_eq!(seen.json()["may_force"], json!(false), "{seen:?}");

    let waits = json!({ "ttl_ms": HOUR_MS, "wait_ms": HOUR_MS });
    let waits = holder.call(&gateway, Method::POST, &lock_path("deploy/app")).json(&waits);
    let waits = tokio::spawn(waits.send());
    waiting_is(&gateway, 1, 1).await;
    let answer = force(&chief, "deploy/app", "force=true").await;
    assert_eq!(answer.status, 204, "{answer:?}");
    let next = Lease::from(&waits.await.unwrap());
    assert!(next.fencing > lease.fencing);
    holder.patch(&gateway, "deploy/app", &lease.token).await.problem(409, "not_holder");
    assert_eq!(holder.delete(&gateway, "deploy/app", &next.token).await.status, 204);
    force(&chief, "deploy/app", "force=true").await.problem(404, "lock_not_found");

    // Waits until the last record is written.
    let lines = eventually("all records are written", async || {
        let lines = audit_lines(&log);
        let is_last = |line: &Value| line["what"] == "force" && line["outcome"] == "lock_not_found";
        lines.iter().any(is_last).then_some(lines)
    })
    .await;
    let of = |what: &str, outcome: &str| {
        let found = lines.iter().find(|line| line["what"] == what && line["outcome"] == outcome);
        found.unwrap_or_else(|| panic!("no {what} {outcome} in {lines:#?}")).clone()
    };
    let forced = of("force", "done");
    for (field, value) in [
        ("who", json!("chief")),
        ("lock", json!("deploy/app")),
        ("owner", json!("somebody")),
        ("status", json!(204)),
        ("request_id", json!(answer.header("x-request-id"))),
    ] {
        assert_eq!(forced[field], value, "{forced}");
    }
    assert!(
        forced["address"].as_str().is_some_and(|text| text.starts_with("127.0.0.1:")),
        "{forced}"
    );
    assert_eq!(of("force", "forbidden")["who"], "holder");
    assert_eq!(of("acquire", "done")["owner"], "somebody");
    assert_eq!(of("force", "lock_not_found")["who"], "chief");
    let text = std::fs::read_to_string(log.path()).unwrap();
    for secret in [&holder.text, &chief.text, lease.owner()] {
        assert!(!text.contains(secret.rsplit('.').next().unwrap()), "{text}");
    }
}

#[tokio::test]
async fn a_rotated_log_is_opened_again() {
    let log = Scratch::new("audit.jsonl", "");
    let known = key("known", HOLDER, "*").await;
    let file = file(&[&known]);
    let gateway = with_keys(&file).flag("--audit-log", log.path()).start().await;
    let moved = format!("{}.1", log.path());
    std::fs::rename(log.path(), &moved).unwrap();
    gateway.signal(Signal::HUP);
    eventually("the log is opened anew", async || {
        known.get(&gateway, "/locks").await.problem(403, "forbidden");
        std::path::Path::new(log.path()).exists().then_some(())
    })
    .await;
    std::fs::remove_file(moved).unwrap();
}

/// An audit file on a full disk. [`Self::replace_disk`] makes room.
struct FullDisk(Scratch);

impl FullDisk {
    fn new() -> Self {
        let path = Scratch::new("full.jsonl", "");
        std::fs::remove_file(path.path()).unwrap();
        std::os::unix::fs::symlink("/dev/full", path.path()).unwrap();
        Self(path)
    }

    /// Replaces the full disk, and signals the gateway to open its audit file again.
    fn replace_disk(&self, gateway: &Gateway) {
        std::fs::remove_file(self.0.path()).unwrap();
        gateway.signal(Signal::HUP);
    }
}

/// Repeats a request until its record can be written. A write that takes longer than a second counts
/// as a failure, and a busy machine may cause that.
async fn recorded(request: impl AsyncFn() -> Answer) -> Answer {
    eventually("the request is recorded", async || {
        Some(request().await).filter(|answer| answer.status != 503)
    })
    .await
}

async fn failures(gateway: &Gateway) -> f64 {
    Samples::of(gateway).await.get("redlock_audit_failures_total", &[])
}

#[tokio::test]
async fn a_full_disk_delays_audit_records_and_no_locks() {
    let disk = FullDisk::new();
    let mut gateway = Launch::embedded().flag("--audit-log", disk.0.path()).start().await;
    assert_eq!(failures(&gateway).await, 0.0);
    for n in 0..50 {
        let lease = gateway.acquire(&format!("job-{n}")).await;
        assert_eq!(gateway.delete(&format!("job-{n}"), &lease.token).await.status, 204);
    }
    eventually("the failure is counted and logged", async || {
        (failures(&gateway).await >= 1.0
            && gateway.stdout().contains("a line could not be written"))
        .then_some(())
    })
    .await;
    disk.replace_disk(&gateway);
    let lines = eventually("all records are written", async || {
        let lines = std::path::Path::new(disk.0.path()).exists().then(|| audit_lines(&disk.0));
        lines.filter(|lines| lines.len() == 100)
    })
    .await;
    let locks: Vec<_> =
        lines.iter().map(|line| line["lock"].as_str().unwrap().to_owned()).collect();
    let expected: Vec<_> = (0..50).flat_map(|n| [format!("job-{n}"), format!("job-{n}")]).collect();
    assert_eq!(locks, expected, "the records are in order, each once");
    // A shutdown waits until the records of requests in flight are written.
    for n in 0..50 {
        gateway.acquire(&format!("late-{n}")).await;
    }
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.ended().await, Some(0));
    assert_eq!(audit_lines(&disk.0).len(), 150);
}

#[tokio::test]
async fn a_required_audit_on_a_full_disk_refuses_changes() {
    let disk = FullDisk::new();
    let launch =
        Launch::embedded().flag("--audit-log", disk.0.path()).flag("--audit-on-failure", "refuse");
    let mut gateway = launch.start().await;
    // The gateway has not noticed the full disk yet, because no write has failed.
    let lease = gateway.acquire("job").await;
    let refused = eventually("the failure is noticed", async || {
        let answer = gateway.post("other", json!({})).await;
        (answer.status == 503).then_some(answer)
    })
    .await;
    refused.problem(503, "audit_unavailable");
    gateway.post("third", json!({})).await.problem(503, "audit_unavailable");
    gateway.patch("job", &lease.token, 60_000).await.problem(503, "audit_unavailable");
    gateway.delete("job", &lease.token).await.problem(503, "audit_unavailable");
    assert_eq!(
        gateway.inspect("third").await["state"],
        "free",
        "a request without changes is served"
    );
    assert_eq!(gateway.readyz().await.status, 200);
    disk.replace_disk(&gateway);
    let next = eventually("records can be written again", async || {
        Some(gateway.post("third", json!({})).await).filter(|answer| answer.status == 201)
    })
    .await;
    let extended = recorded(async || gateway.patch("job", &lease.token, 60_000).await).await;
    assert_eq!(extended.status, 200, "{extended:?}");
    let token = Lease::from(&next).token;
    let released = recorded(async || gateway.delete("third", &token).await).await;
    assert_eq!(released.status, 204, "{released:?}");
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.ended().await, Some(0));
    let lines = audit_lines(&disk.0);
    let outcomes = |code: &str| lines.iter().filter(|line| line["outcome"] == code).count();
    assert!(outcomes("audit_unavailable") >= 4 && outcomes("done") >= 4, "{lines:#?}");
}

#[tokio::test]
async fn a_hung_disk_delays_no_request() {
    // Nobody reads this pipe. It takes a limited number of lines, and then no more.
    let pipe = Scratch::new("pipe", "");
    std::fs::remove_file(pipe.path()).unwrap();
    let made =
        std::process::Command::new("mkfifo").arg(pipe.path()).status().expect("mkfifo starts");
    assert!(made.success());
    // A pipe that is opened for reading and writing does not block.
    let _other_end = std::fs::File::options().read(true).write(true).open(pipe.path()).unwrap();
    let mut gateway =
        Launch::embedded().flag("--audit-log", pipe.path()).env("RUST_LOG", "info").start().await;
    let name = |n| format!("{}-{n}", "n".repeat(200));
    // The records need twice the capacity of a pipe.
    for n in 0..300 {
        gateway.acquire(&name(n)).await;
    }
    assert_eq!(gateway.get("/livez").await.status, 200);
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.ended().await, Some(0));
    let log = gateway.stdout();
    let mut lost = log.lines().filter(|line| line.contains("a line could not be written"));
    let last = "n-299";
    assert!(lost.any(|line| line.contains(last)), "the log has the records that no disk took");
}

pub(crate) fn audit_lines(log: &Scratch) -> Vec<Value> {
    let text = std::fs::read_to_string(log.path()).unwrap();
    // The pipe may have taken only a part of the last line.
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    whole.map(|line| serde_json::from_str(line).expect("one object a line")).collect()
}

#[tokio::test]
async fn without_an_audit_file_records_go_to_the_log_at_any_level() {
    let known = key("known", HOLDER, "a").await;
    let file = file(&[&known]);
    let gateway = with_keys(&file).env("RUST_LOG", "error").start_quiet().await;
    known.call(&gateway, Method::POST, "/locks/b").send().await.problem(403, "forbidden");
    gateway
        .call(Method::POST, "/locks/a")
        .header("authorization", "Bearer rlk.known.x")
        .send()
        .await;
    eventually("both changes are recorded", async || {
        let lines = audit_in_log(&gateway);
        let who: Vec<_> = lines.iter().map(|line| &line["who"]).collect();
        (who == [&json!("known"), &json!("known (not proven)")]).then_some(())
    })
    .await;
    known.acquire(&gateway, "a").await;
    known.delete(&gateway, "a", "x").await.problem(400, "invalid_token");
    known.call(&gateway, Method::GET, "/locks/c").send().await.problem(403, "forbidden");
    let lines = eventually("the last one is recorded", async || {
        let lines = audit_in_log(&gateway);
        lines.iter().any(|line| line["lock"] == "c").then_some(lines)
    })
    .await;
    let what: Vec<_> = lines.iter().map(|line| (&line["what"], &line["lock"])).collect();
    let expected = [("acquire", "b"), ("acquire", "a"), ("inspect", "c")]
        .map(|(what, lock)| (json!(what), json!(lock)));
    assert_eq!(what, expected.each_ref().map(|(what, lock)| (what, lock)), "denials only");
}

/// The audit records that are in the log.
pub(super) fn audit_in_log(gateway: &Gateway) -> Vec<Value> {
    let log = gateway.stdout();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["target"] == "redlock_audit").collect()
}
