//! API keys: how they are made, how a running gateway reads them again, how they end, and how their
//! use is limited.

use futures_util::future::join_all;
use http::Method;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::client::{Answer, Call, Lease, lock_path};
use crate::support::gateway::{Gateway, Launch, Scratch};
use crate::support::harness::{TempDir, eventually};
use crate::support::metrics::Samples;
use crate::support::waiters::{HOUR_MS, patient, waiting_is};

/// A key, and its entry in the file of keys.
pub(crate) struct Key {
    pub(crate) text: String,
    pub(crate) entry: String,
}

/// Makes a key with the program itself.
pub(crate) async fn key(name: &str, verbs: &str, names: &str) -> Key {
    let made =
        Launch::bare(&["key", "new", name, "--verbs", verbs, "--names", names]).finish().await;
    assert_eq!(made.code, Some(0), "{made:?}");
    let (text, entry) = made.stdout.split_once("\n\n").expect("the key, an empty line, the entry");
    Key { text: text.into(), entry: entry.into() }
}

pub(crate) fn file(keys: &[&Key]) -> Scratch {
    let entries: Vec<_> = keys.iter().map(|key| key.entry.as_str()).collect();
    Scratch::new("keys.toml", &entries.join("\n"))
}

pub(crate) fn with_keys(file: &Scratch) -> Launch {
    Launch::embedded().flag("--auth-keys", file.path())
}

pub(crate) const HOLDER: &str = "acquire,extend,release,inspect";

impl Key {
    pub(crate) fn bearer(&self) -> String {
        format!("Bearer {}", self.text)
    }

    pub(crate) fn call(&self, gateway: &Gateway, method: Method, path: &str) -> Call {
        gateway.call(method, path).header("authorization", self.bearer())
    }

    pub(crate) async fn acquire(&self, gateway: &Gateway, name: &str) -> Lease {
        let call = self.call(gateway, Method::POST, &lock_path(name));
        Lease::from(&call.json(&json!({ "ttl_ms": 60_000, "owner": "somebody" })).send().await)
    }

    pub(crate) async fn patch(&self, gateway: &Gateway, name: &str, token: &str) -> Answer {
        let call = self.call(gateway, Method::PATCH, &lock_path(name)).header("lock-token", token);
        call.json(&json!({ "ttl_ms": 60_000 })).send().await
    }

    pub(crate) async fn delete(&self, gateway: &Gateway, name: &str, token: &str) -> Answer {
        self.call(gateway, Method::DELETE, &lock_path(name))
            .header("lock-token", token)
            .send()
            .await
    }

    pub(crate) async fn get(&self, gateway: &Gateway, path: &str) -> Answer {
        self.call(gateway, Method::GET, path).send().await
    }
}

#[tokio::test]
async fn keys_reload_without_a_gap_and_survive_a_broken_file() {
    let old = key("ci", HOLDER, "*").await;
    let new = key("ci", HOLDER, "*").await;
    let file = file(&[&old]);
    let gateway = with_keys(&file).start().await;
    let lease = old.acquire(&gateway, "job").await;
    let knows = async |key: &Key| key.get(&gateway, "/locks/job").await.status == 200;
    assert!(knows(&old).await && !knows(&new).await);

    // While the file changes, no request may be refused.
    std::fs::write(file.path(), &new.entry).unwrap();
    eventually("the new key is known", async || {
        let old_is_known = knows(&old).await;
        let new_is_known = knows(&new).await;
        if !new_is_known {
            assert!(old_is_known, "one of the two keys is always valid");
        }
        new_is_known.then_some(())
    })
    .await;
    assert!(!knows(&old).await);
    // A lock belongs to the principal, not to one of the principal's keys.
    assert_eq!(new.patch(&gateway, "job", &lease.token).await.status, 200);

    std::fs::write(file.path(), format!("{}\n[[key]]\nname = 'x'", new.entry)).unwrap();
    gateway.signal(Signal::HUP);
    eventually("the log says that the file is broken", async || {
        let log = gateway.stdout();
        (log.contains("the old keys stay") && log.contains("missing field `allow`")).then_some(())
    })
    .await;
    assert!(knows(&new).await);
    let logs_failure = async |what: &str| {
        eventually(what, async || gateway.stdout().contains(what).then_some(())).await
    };
    std::fs::write(file.path(), "\n").unwrap();
    logs_failure("it is empty").await;
    std::fs::remove_file(file.path()).unwrap();
    gateway.signal(Signal::HUP);
    logs_failure("No such file").await;
    // Nobody can read this file to its end.
    std::os::unix::fs::symlink("/dev/zero", file.path()).unwrap();
    logs_failure("it is not a regular file").await;
    assert!(knows(&new).await);
    std::fs::remove_file(file.path()).unwrap();
    std::fs::write(file.path(), &old.entry).unwrap();
    gateway.signal(Signal::HUP);
    eventually("the old key is back", async || knows(&old).await.then_some(())).await;
}

#[tokio::test]
async fn a_key_that_ends_while_its_request_waits_gets_no_lock() {
    let holder = key("holder", HOLDER, "*").await;
    let waiter = key("waiter", HOLDER, "*").await;
    let file = file(&[&holder, &waiter]);
    let gateway = patient(with_keys(&file)).flag("--public", "metrics").start().await;
    let lease = holder.acquire(&gateway, "job").await;
    let body = json!({ "ttl_ms": HOUR_MS, "wait_ms": HOUR_MS });
    let waiting =
        tokio::spawn(waiter.call(&gateway, Method::POST, "/locks/job").json(&body).send());
    waiting_is(&gateway, 1, 1).await;
    std::fs::write(file.path(), &holder.entry).unwrap();
    eventually("the key is gone", async || {
        (waiter.get(&gateway, "/locks/job").await.status == 401).then_some(())
    })
    .await;
    assert_eq!(holder.delete(&gateway, "job", &lease.token).await.status, 204);
    waiting.await.unwrap().problem(401, "unauthenticated");
    eventually("the waiter's grant is released", async || {
        (holder.get(&gateway, "/locks/job").await.json()["state"] == "free").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_key_has_its_own_limits_of_ttl_hold_and_rate() {
    let mut short = key("short", HOLDER, "*").await;
    short.entry.push_str("max_ttl = '2m'\nmax_hold = '1h'\n");
    let mut brief = key("brief", HOLDER, "*").await;
    brief.entry.push_str("max_hold = '3s'\n");
    let mut slow = key("slow", HOLDER, "*").await;
    slow.entry.push_str("rate = 1\nburst = 2\n");
    let file = file(&[&short, &slow, &brief]);
    let gateway = with_keys(&file).flag("--default-ttl", "5m").start().await;
    let ask =
        async |ttl: Value| short.call(&gateway, Method::POST, "/locks/job").json(&ttl).send().await;
    let problem = ask(json!({ "ttl_ms": 120_001 })).await.problem(400, "invalid_ttl");
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("10 to 120000;"), "{problem}");
    assert!(detail.contains("(max_ttl or max_hold, of the gateway or of your key)"), "{problem}");
    // The gateway's default TTL is longer than the key allows, so the key's limit applies.
    let granted = ask(json!({})).await;
    assert_eq!(granted.json()["ttl_ms"], 120_000);
    let token = Lease::from(&granted).token;
    let longer = short.call(&gateway, Method::PATCH, "/locks/job").header("lock-token", &token);
    let longer = longer.json(&json!({ "ttl_ms": 120_001 })).send().await;
    longer.problem(400, "invalid_ttl");
    let acquire = async || {
        let held = brief.call(&gateway, Method::POST, "/locks/brief").send().await;
        assert_eq!(held.json()["ttl_ms"], 3_000, "a TTL beyond max_hold is refused at once");
        Lease::from(&held).token
    };
    let mut token = acquire().await;
    eventually("the lock has reached max_hold", async || {
        let call = brief.call(&gateway, Method::PATCH, "/locks/brief").header("lock-token", &token);
        let answer = call.json(&json!({ "ttl_ms": 3_000 })).send().await;
        if answer.status == 404 {
            // The machine was too busy, so the lock has ended before.
            token = acquire().await;
        }
        (answer.status == 409).then(|| answer.problem(409, "max_hold_reached"))
    })
    .await;

    for _ in 0..2 {
        assert_eq!(slow.get(&gateway, "/locks/other").await.status, 200, "the burst");
    }
    // The key may send one more request for every second that passes. So this repeats.
    let refused = eventually("the rate is used up", async || {
        let answers = join_all((0..10).map(|_| slow.get(&gateway, "/locks/other"))).await;
        answers.into_iter().find(|answer| answer.status != 200)
    })
    .await;
    let problem = refused.problem(429, "rate_limited");
    assert!((1..=1000).contains(&problem["retry_after_ms"].as_u64().unwrap()), "{problem}");
    assert_eq!(refused.header("retry-after"), "1");
    assert_eq!(
        short.get(&gateway, "/locks/other").await.status,
        200,
        "another key's rate is not used up"
    );
}

#[tokio::test]
async fn a_key_file_open_to_others_causes_a_warning() {
    use std::os::unix::fs::PermissionsExt;
    let known = key("known", HOLDER, "*").await;
    let file = file(&[&known]);
    let set =
        |mode| std::fs::set_permissions(file.path(), PermissionsExt::from_mode(mode)).unwrap();
    let made = async || {
        let made = Launch::bare(&["key", "new", "ci"])
            .env("REDLOCK_AUTH_KEYS", file.path())
            .finish()
            .await;
        assert_eq!(made.code, Some(0), "{made:?}");
        made.stderr
    };
    for mode in [0o600, 0o640, 0o440] {
        set(mode);
        assert_eq!(made().await, "", "{mode:o}");
    }
    for mode in [0o644, 0o604, 0o660, 0o602] {
        set(mode);
        let warning = made().await;
        assert!(
            warning.contains(file.path()) && warning.contains(&format!("{mode:04o}")),
            "{warning}"
        );
    }

    set(0o600);
    let gateway = with_keys(&file).start().await;
    known.acquire(&gateway, "job").await;
    let warnings = || gateway.stdout().lines().filter(|line| line.contains("its mode is")).count();
    assert_eq!(warnings(), 0);
    set(0o644);
    gateway.signal(Signal::HUP);
    eventually("the log has the line", async || (warnings() == 1).then_some(())).await;
    let other = with_keys(&file).start().await;
    assert!(other.stdout().contains("its mode is 0644"), "the start warns of the mode, too");

    // If the program's output goes to a file, that file contains the key. So the mode of the file
    // matters.
    let out = Scratch::new("key", "");
    for (mode, is_warned_of) in [(0o600, false), (0o640, true), (0o644, true)] {
        std::fs::set_permissions(out.path(), PermissionsExt::from_mode(mode)).unwrap();
        let into = std::fs::File::options().write(true).open(out.path()).unwrap();
        let binary = crate::support::gateway::binary();
        let made = std::process::Command::new(binary)
            .args(["key", "new", "ci"])
            .stdout(into)
            .output()
            .unwrap();
        let warning = String::from_utf8(made.stderr).unwrap();
        assert_eq!(warning.contains("--out FILE"), is_warned_of, "{mode:o}: {warning}");
    }
}

#[tokio::test]
async fn a_key_written_to_a_file_is_for_its_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let dir = TempDir::new();
    let path = dir.path().join("ci.key");
    let out = path.to_str().expect("a plain path");
    // The shell's umask lets everybody read new files.
    let made = std::process::Command::new("sh")
        .args(["-c", "umask 022; exec \"$@\"", "sh"])
        .arg(crate::support::gateway::binary())
        .args(["key", "new", "ci", "--out", out])
        .output()
        .expect("a shell");
    assert!(made.status.success() && made.stderr.is_empty(), "{made:?}");
    let mode = std::fs::metadata(&path).expect("the file is made").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let text = std::fs::read_to_string(&path).expect("text");
    let entry = String::from_utf8(made.stdout).expect("text");
    assert!(text.starts_with("rlk.ci.") && text.lines().count() == 1, "{text}");
    assert!(entry.starts_with("[[key]]") && !entry.contains(text.trim()), "{entry}");
    let new = Key { text: text.trim().into(), entry };
    let file = file(&[&new]);
    new.acquire(&with_keys(&file).start().await, "job").await;

    let again = Launch::bare(&["key", "new", "ci", "--out", out]).finish().await;
    assert_eq!(again.code, Some(2), "{again:?}");
    assert!(again.stderr.contains("--out") && again.stderr.contains("exists"), "{again:?}");
    assert_eq!(std::fs::read_to_string(&path).expect("text"), text, "the key is still there");
}

#[tokio::test]
async fn the_next_expiry_of_a_key_is_a_metric() {
    let expires = async |date: &str| {
        let made = Launch::bare(&["key", "new", "ci", "--expires", date]).finish().await;
        made.stdout.split_once("\n\n").expect("a key and its entry").1.to_owned()
    };
    let never = key("never", HOLDER, "*").await;
    let later = expires("2999-01-31").await.replace("\"ci\"", "\"later\"");
    let past = expires("2001-01-31").await.replace("\"ci\"", "\"past\"");
    let file = Scratch::new("keys.toml", &[never.entry, later.clone(), past].join("\n"));
    let gateway = with_keys(&file).flag("--public", "metrics").start().await;
    let metric =
        async || Samples::of(&gateway).await.get("redlock_auth_key_expiry_timestamp_seconds", &[]);
    // date -u -d 2999-01-31 +%s
    assert_eq!(metric().await, 32_474_736_000.0);
    let sooner = expires("2998-01-31").await;
    std::fs::write(file.path(), [later, sooner].join("\n")).expect("the file can be written");
    gateway.signal(Signal::HUP);
    eventually("the new file counts", async || (metric().await == 32_443_200_000.0).then_some(()))
        .await;
}

#[tokio::test]
async fn a_new_key_is_printed_once_and_ready_to_use() {
    let made = Launch::bare(&["key", "new", "ci", "--expires", "2999-01-31"]).finish().await;
    let lines: Vec<_> = made.stdout.lines().collect();
    assert!(lines[0].starts_with("rlk.ci.") && lines[0].len() == 50, "{made:?}");
    let rest = lines[2..].join("\n");
    assert!(rest.contains("hashes = [\"sha256:") && !rest.contains(&lines[0][7..]), "{rest}");
    assert!(rest.contains("expires = 2999-01-31"), "{rest}");
    for bad in [
        &["key", "new", "a b"] as &[_],
        &["key", "new", "a", "--names", "a b"],
        &["key", "new", "a", "--verbs", "x"],
    ] {
        let refused = Launch::bare(bad).finish().await;
        assert_ne!(refused.code, Some(0), "{bad:?}");
        assert!(refused.stdout.is_empty() && !refused.stderr.is_empty(), "{refused:?}");
    }
    let refused = Launch::bare(&["key", "new", "a", "--expires", "soon"]).finish().await;
    assert_ne!(refused.code, Some(0), "{refused:?}");
}
