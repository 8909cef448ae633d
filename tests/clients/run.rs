//! `redlock run` with the real program, real commands and real masters. A command writes files, and
//! the tests read in them what it did.

mod endings;
mod messages;
mod reach;
mod terminal;
mod waiting;
mod watchdogs;

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::time::timeout;

pub(super) use self::terminal::Screen;
use crate::support::gateway::{Gateway, Launch, Scratch, built};
use crate::support::harness::{PATIENCE, TempDir, daily_or_long, eventually, masters};
use crate::support::waiters::{patient, patient_over};

fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| built(&[]).join("redlock"))
}

pub(super) fn redlock(gateway: &Gateway, args: &[&str]) -> Command {
    // A shell starts background jobs with SIGINT ignored. A shell below such a job cannot trap
    // SIGINT, so this resets it.
    let mut command = Command::new("env");
    command.arg("--default-signal=INT,QUIT").arg(binary());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("REDLOCK_")) {
        command.env_remove(name);
    }
    command.env("REDLOCK_URL", format!("http://{}", gateway.address())).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

pub(super) async fn output(gateway: &Gateway, args: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = ended(redlock(gateway, args).spawn().unwrap()).await;
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

pub(super) async fn ended(child: Child) -> Output {
    timeout(PATIENCE, child.wait_with_output()).await.expect("the process ends").unwrap()
}

async fn code_and_words(child: Child) -> (Option<i32>, String) {
    let output = ended(child).await;
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The first line on standard error. All later lines are thrown away.
async fn line(child: &mut Child) -> String {
    line_of(child.stderr.take().expect("piped")).await
}

async fn line_of(output: impl AsyncRead + Unpin + Send + 'static) -> String {
    let mut output = BufReader::new(output);
    let mut line = String::new();
    timeout(PATIENCE, output.read_line(&mut line))
        .await
        .expect("the runner prints a line")
        .unwrap();
    tokio::spawn(async move { tokio::io::copy(&mut output, &mut tokio::io::sink()).await });
    line
}

/// The arguments to run a script under the lock `job`. The script's `$1` is a directory for its
/// output.
fn script<'a>(dir: &'a TempDir, flags: &[&'a str], script: &'a str) -> Vec<&'a str> {
    let dir = dir.path().to_str().unwrap();
    [&["run", "job"], flags, &["--", "sh", "-c", script, "sh", dir]].concat()
}

/// Waits for the number that a script writes to a file.
pub(super) async fn number(dir: &TempDir, file: &str) -> i32 {
    let path = dir.path().join(file);
    let read = || std::fs::read_to_string(&path).ok()?.strip_suffix('\n')?.parse().ok();
    eventually(&format!("{file} is written"), async || read()).await
}

fn lives(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // A zombie no longer runs.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| state != 'Z')
        && test_kill_process(Pid::from_raw(pid).unwrap()).is_ok()
}

async fn gone(pid: i32) -> Instant {
    eventually("the process is gone", async || (!lives(pid)).then(Instant::now)).await
}

/// A command and its child, neither of which ends by itself.
const TWO: &str = r#"sleep 100000 & echo $! > "$1/grandchild"; echo $$ > "$1/child"; wait"#;

#[tokio::test]
async fn a_command_runs_under_the_lock_and_keeps_its_exit_code() {
    let servers = masters(3);
    let gateway = patient_over(&servers).ready().await;
    let shown =
        r#"echo "$REDLOCK_NAME $REDLOCK_TOKEN $REDLOCK_FENCING_TOKEN $REDLOCK_DEADLINE"; exit 7"#;
    let (code, out, err) = output(&gateway, &["run", "jobs/a", "--", "sh", "-c", shown]).await;
    assert_eq!((code, &*err), (Some(7), ""));
    let words: Vec<&str> = out.split_whitespace().collect();
    assert_eq!((words[0], words[1].split('.').nth(1)), ("jobs/a", Some(words[2])), "{out}");
    assert!(words[3].ends_with('Z'), "{out}");
    assert_eq!(gateway.inspect("jobs/a").await["state"], "free", "the lock is released");
    let signalled = output(&gateway, &["run", "jobs/a", "--", "sh", "-c", "kill -TERM $$"]).await;
    assert_eq!(signalled.0, Some(143));
    assert_eq!(output(&gateway, &["run", "a", "--", "/no/such/thing"]).await.0, Some(127));
    let file = Scratch::new("no-program", "");
    assert_eq!(output(&gateway, &["run", "a", "--", file.path()]).await.0, Some(126));
}

#[tokio::test]
async fn without_a_lock_nothing_runs_and_the_exit_code_says_why() {
    let gateway = Launch::embedded().ready().await;
    let _lease = gateway.post("job", json!({ "owner": "alice", "ttl_ms": 300_000 })).await;
    let dir = TempDir::new();
    let touch = "touch \"$1/ran\"";
    let (code, _, err) = output(&gateway, &script(&dir, &["--wait", "0"], touch)).await;
    assert!(code == Some(75) && err.contains("job: \"alice\" holds the lock"), "{err}");
    let (code, _, err) =
        output(&gateway, &script(&dir, &["--url", "http://127.0.0.1:1", "--wait", "0s"], touch))
            .await;
    assert!(code == Some(69) && err.contains("refused"), "{err}");
    for (flags, says) in [
        (&["--ttl", "1s"][..], "more than 1200ms"),
        (&["--grace", "20s"], "less than 13s 850ms"),
        (&["--ttl", "1h"], "300000"),
        (&["--url", "localhost"], "\"localhost\""),
        (&["--key-file", "/no/such/file"], "/no/such/file"),
        (&["--wait", "soon"], "soon"),
    ] {
        let (code, _, err) = output(&gateway, &script(&dir, flags, touch)).await;
        assert!(code == Some(64) && err.contains(says), "{flags:?}: {err}");
    }
    let (code, _, err) =
        output(&gateway, &[&["--json"], &script(&dir, &["--wait", "0"], touch)[..]].concat()).await;
    let told: Value = serde_json::from_str(&err).expect("nothing but JSON");
    assert_eq!((code, &told["event"], &told["exit_code"]), (Some(75), &"held".into(), &75.into()));
    assert!(!dir.path().join("ran").exists());
}

#[tokio::test]
async fn with_json_every_early_error_is_one_object() {
    let gateway = Launch::embedded().ready().await;
    for (args, code, event, says) in [
        (&["--json", "run", "job"][..], 64, "usage", "<COMMAND>"),
        (&["run", "job", "--wait", "soon", "--json", "--", "true"], 64, "usage", "'soon'"),
        (&["--json", "nonsense"], 64, "usage", "'nonsense'"),
        (&["--json"], 64, "usage", "subcommand"),
        (&["status", "job", "--json", "--url", "localhost"], 64, "usage", "\"localhost\""),
        (&["status", "job", "--json", "--key-file", "/no/such/file"], 64, "usage", "/no/such/file"),
        (&["--json", "status", ".."], 64, "usage", "is not a name of a lock"),
        (&["--json", "run", "job", "--ttl", "1s", "--", "true"], 64, "usage", "1200ms"),
        (&["--json", "run", "job", "--", "/no/such/thing"], 127, "not_run", "/no/such/thing: "),
    ] {
        let (ended, out, err) = output(&gateway, args).await;
        let told: Value =
            serde_json::from_str(&err).unwrap_or_else(|_| panic!("{args:?}: no JSON: {err}"));
        let detail = told["detail"].as_str().unwrap();
        assert_eq!(
            (ended, &told["event"], &told["exit_code"]),
            (Some(code), &event.into(), &code.into()),
            "{args:?}"
        );
        assert!(
            detail.contains(says)
                && !detail.contains('\n')
                && err.ends_with("}\n")
                && out.is_empty(),
            "{err}"
        );
    }
    let (code, _, err) =
        output(&gateway, &["run", "job", "--nonsense", "--", "curl", "--json"]).await;
    assert!(code == Some(64) && err.starts_with("error: "), "--json belongs to the command: {err}");
}

#[tokio::test]
async fn runs_of_one_name_never_overlap() {
    let runs_of_one_name = daily_or_long(30, 100);
    const AT_ONCE: usize = 25;
    let servers = masters(3);
    let gateways = [patient_over(&servers).ready().await, patient_over(&servers).ready().await];
    let dir = TempDir::new();
    // If a second run overlapped, it would write between these two lines.
    let work = r#"echo "begin $$" >> "$1/log"; sleep 0.01; echo "end $$" >> "$1/log""#;
    let run = |n: usize| {
        redlock(&gateways[n % 2], &script(&dir, &["--wait", "1h"], work)).spawn().unwrap()
    };
    // A run fails if its watchdogs need more than 10 s to start. So a busy machine must not start
    // all runs together.
    let mut runs =
        futures_util::stream::iter((0..runs_of_one_name).map(|n| ended(run(n)))).buffered(AT_ONCE);
    while let Some(output) = runs.next().await {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
    let lines: Vec<_> = log.lines().map(|line| line.split_once(' ').unwrap()).collect();
    assert_eq!(lines.len(), 2 * runs_of_one_name);
    for pair in lines.chunks(2) {
        assert!(
            pair[0].0 == "begin" && pair[1].0 == "end" && pair[0].1 == pair[1].1,
            "two at once: {pair:?}"
        );
    }
}

#[tokio::test]
async fn a_killed_runner_takes_its_command_along() {
    let gateway = Launch::embedded().ready().await;
    let dir = TempDir::new();
    let mut runner = redlock(&gateway, &script(&dir, &["--ttl", "9s"], TWO)).spawn().unwrap();
    let grandchild = number(&dir, "grandchild").await;
    let child = number(&dir, "child").await;
    assert!(lives(child) && lives(grandchild));
    runner.start_kill().unwrap();
    runner.wait().await.unwrap();
    gone(child).await;
    gone(grandchild).await;
    let (code, ..) = output(&gateway, &script(&dir, &["--wait", "1h"], "true")).await;
    assert_eq!(code, Some(0), "the lock ends with its TTL");
}

/// A runner whose command ignores TERM, so that the command must be killed.
struct Stubborn {
    runner: Child,
    child: i32,
    grandchild: i32,
    dir: TempDir,
}

impl Stubborn {
    async fn start(gateway: &Gateway, flags: &[&str]) -> Self {
        let dir = TempDir::new();
        let ignores_term = format!(r#"trap '' TERM; echo "$REDLOCK_TOKEN" > "$1/token"; {TWO}"#);
        let runner = redlock(gateway, &script(&dir, flags, &ignores_term)).spawn().unwrap();
        let grandchild = number(&dir, "grandchild").await;
        let child = number(&dir, "child").await;
        Self { runner, child, grandchild, dir }
    }

    fn token(&self) -> String {
        let token = std::fs::read_to_string(self.dir.path().join("token")).unwrap();
        token.trim().to_owned()
    }

    /// When the command and its child were gone.
    async fn gone(&self) -> Instant {
        gone(self.child).await.max(gone(self.grandchild).await)
    }
}

/// Stops a runner. Returns how long before the end of the lock its command was gone.
async fn stopped_runner(ttl: &str) -> Duration {
    let servers = masters(3);
    let gateway = patient_over(&servers).ready().await;
    let command = Stubborn::start(&gateway, &["--ttl", ttl]).await;
    let runner = command.runner.id().unwrap() as i32;
    kill_process(Pid::from_raw(runner).unwrap(), Signal::STOP).unwrap();
    // From now on nobody extends the lock.
    let left = gateway.inspect("job").await["expires_in_ms"].as_u64().unwrap_or(0);
    let expires = Instant::now() + Duration::from_millis(left);
    expires.saturating_duration_since(command.gone().await)
}

#[tokio::test]
async fn a_stopped_runners_command_ends() {
    stopped_runner("6s").await;
}

/// Stops a majority of masters. Returns how long before the end of the lock the command was gone.
async fn without_masters(ttl: &str) -> Duration {
    let servers = masters(3);
    let gateway = Launch::over(&servers).flag("--node-timeout", "50ms").ready().await;
    let command = Stubborn::start(&gateway, &["--ttl", ttl]).await;
    // A majority of masters is stopped, so no extension is confirmed any more. The PTTL on the
    // third master shows how long the lock still lives.
    servers[..2].iter().for_each(|server| server.stop());
    let ends = || {
        let left = servers[2].cmd(&["PTTL", "lock:job"]).integer();
        Instant::now() + Duration::from_millis(u64::try_from(left).expect("the lock is held"))
    };
    let seen = ends();
    // The third master may get the last extension after the others.
    tokio::time::sleep(Duration::from_millis(50)).await;
    let expires = ends().max(seen);
    let margin = expires.saturating_duration_since(command.gone().await);
    servers[..2].iter().for_each(|server| server.cont());
    let (code, err) = code_and_words(command.runner).await;
    assert!(code == Some(79) && err.contains("no gateway has confirmed"), "{err}");
    println!("margin: {} ms", margin.as_millis());
    margin
}

#[tokio::test]
async fn without_masters_a_command_ends() {
    without_masters("6s").await;
}

#[tokio::test]
async fn a_released_lock_ends_or_warns_the_command() {
    let gateway = Launch::embedded().ready().await;
    for (on_lost, code) in [("kill", 79), ("warn", 3)] {
        let dir = TempDir::new();
        let work = r#"echo "$REDLOCK_TOKEN" > "$1/token"; while [ ! -e "$1/go" ]; do sleep 0.05; done; exit 3"#;
        let flags = ["--ttl", "9s", "--on-lost", on_lost];
        let mut runner = redlock(&gateway, &script(&dir, &flags, work)).spawn().unwrap();
        let path = dir.path().join("token");
        let written = || std::fs::read_to_string(&path).ok().filter(|text| text.ends_with('\n'));
        let token = eventually("the command runs", async || written()).await;
        assert_eq!(gateway.delete("job", token.trim()).await.status, 204);
        let told = line(&mut runner).await;
        assert!(told.contains("the lock is lost: it was released"), "{on_lost}: {told}");
        if on_lost == "warn" {
            std::fs::write(dir.path().join("go"), "").unwrap();
        }
        assert_eq!(ended(runner).await.status.code(), Some(code), "{on_lost}");
    }
}

/// Takes the lock of a command away. Returns how long the command lived after the report of the
/// loss.
async fn lost_lock() -> Duration {
    let gateway = Launch::embedded().ready().await;
    let flags = ["--ttl", "9s", "--grace", "300ms"];
    let mut command = Stubborn::start(&gateway, &flags).await;
    assert_eq!(gateway.delete("job", &command.token()).await.status, 204);
    assert!(line(&mut command.runner).await.contains("the lock is lost"));
    let told = Instant::now();
    let took = command.gone().await.saturating_duration_since(told);
    assert_eq!(ended(command.runner).await.status.code(), Some(79));
    took
}

#[tokio::test]
async fn a_lost_lock_kills_a_command_that_ignores_term() {
    lost_lock().await;
}

/// `timeout` and `setsid` start processes outside the command's process group. Their pids are in
/// the files `timed` and `session`.
const LEFT: &str = r#"
    trap '' TERM
    timeout 100000 sh -c 'echo $$ > "$1/timed"; while :; do sleep 1; done' sh "$1" &
    setsid sh -c 'echo $$ > "$1/session"; while :; do sleep 1; done' sh "$1" &
    while :; do sleep 1; done"#;

#[tokio::test]
async fn descendants_outside_the_group_end_with_lock_and_runner() {
    let gateway = Launch::embedded().ready().await;
    for is_killed in [false, true] {
        let dir = TempDir::new();
        let token = format!("echo \"$REDLOCK_TOKEN\" > \"$1/token\"; {LEFT}");
        let mut runner =
            redlock(&gateway, &script(&dir, &["--ttl", "9s"], &token)).spawn().unwrap();
        let timed = number(&dir, "timed").await;
        let session = number(&dir, "session").await;
        if is_killed {
            runner.start_kill().unwrap();
        } else {
            let token = std::fs::read_to_string(dir.path().join("token")).unwrap();
            assert_eq!(gateway.delete("job", token.trim()).await.status, 204);
        }
        gone(timed).await;
        gone(session).await;
        runner.wait().await.unwrap();
        eventually("the lock is free", async || {
            (gateway.inspect("job").await["state"] == "free").then_some(())
        })
        .await;
    }
}

/// An orphan in its own session. The title that it gives its process has overwritten its
/// environment.
const TITLED: &str = r#"
    (setsid perl -e '$SIG{TERM} = "IGNORE"; $0 = "x" x 100000; open F, ">", "$ARGV[0]/titled"; print F "$$\n"; close F; sleep 100000' "$1" &)
    echo "$REDLOCK_TOKEN" > "$1/token"; trap '' TERM; while :; do sleep 1; done"#;

#[tokio::test]
async fn an_orphan_with_overwritten_environment_ends_with_the_lock() {
    let gateway = Launch::embedded().ready().await;
    for is_stopped in [false, true] {
        let dir = TempDir::new();
        let runner = redlock(&gateway, &script(&dir, &["--ttl", "9s", "--grace", "300ms"], TITLED))
            .spawn()
            .unwrap();
        let titled = number(&dir, "titled").await;
        let environment = std::fs::read(format!("/proc/{titled}/environ")).unwrap();
        assert!(
            !String::from_utf8_lossy(&environment).contains("REDLOCK"),
            "the environment is overwritten"
        );
        let token = dir.path().join("token");
        let written =
            || std::fs::read_to_string(&token).ok()?.strip_suffix('\n').map(str::to_owned);
        let token = eventually("the command runs", async || written()).await;
        let process = Pid::from_raw(runner.id().unwrap() as i32).unwrap();
        // If the runner is stopped and cannot kill the orphan, the watchdog does.
        match is_stopped {
            true => kill_process(process, Signal::STOP).unwrap(),
            false => assert_eq!(gateway.delete("job", &token).await.status, 204),
        }
        gone(titled).await;
        kill_process(process, Signal::CONT).unwrap();
        ended(runner).await;
    }
}

#[tokio::test]
async fn ended_orphans_are_reaped_and_the_exit_code_is_kept() {
    let gateway = Launch::embedded().ready().await;
    let dir = TempDir::new();
    let work = r#"for n in 1 2 3 4 5 6 7 8; do (sleep 0.$n & echo $! > "$1/$n"); done
        while [ ! -e "$1/go" ]; do sleep 0.05; done; exit 7"#;
    let runner = redlock(&gateway, &script(&dir, &[], work)).spawn().unwrap();
    for n in 1..=8 {
        let orphan = number(&dir, &n.to_string()).await;
        let is_there = || Path::new(&format!("/proc/{orphan}")).exists();
        eventually("the orphan is gone, and no zombie", async || (!is_there()).then_some(())).await;
    }
    std::fs::write(dir.path().join("go"), "").unwrap();
    assert_eq!(ended(runner).await.status.code(), Some(7));
}

#[tokio::test]
async fn processes_the_shell_started_before_the_runner_survive() {
    let gateway = Launch::embedded().ready().await;
    let dir = TempDir::new();
    // One process is and stays a child of the runner. Another becomes an orphan while the command
    // runs.
    let before = r#"sleep 100000 & echo $! > "$2/child"
        sh -c 'sleep 100000 & echo $! > "$1/orphan"; while [ -d "$1" ] && [ ! -e "$1/go" ]; do sleep 0.05; done' sh "$2" &
        exec "$1" run job --ttl 1m -- sh -c 'echo $$ > "$1/command"; while :; do sleep 1; done' sh "$2""#;
    let mut shell = Command::new("sh");
    shell.args(["-c", before, "sh"]).arg(binary()).arg(dir.path());
    shell
        .env("REDLOCK_URL", format!("http://{}", gateway.address()))
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let mut runner = shell.spawn().unwrap();
    let child = number(&dir, "child").await;
    let orphan = number(&dir, "orphan").await;
    number(&dir, "command").await;
    std::fs::write(dir.path().join("go"), "").unwrap();
    kill_process(Pid::from_raw(runner.id().unwrap() as i32).unwrap(), Signal::TERM).unwrap();
    assert_eq!(runner.wait().await.unwrap().code(), Some(143));
    for pid in [child, orphan] {
        assert!(lives(pid));
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }
}

#[tokio::test]
async fn a_signal_ends_descendants_before_the_lock_is_released() {
    let gateway = Launch::embedded().ready().await;
    let dir = TempDir::new();
    let work = r#"timeout 100000 sh -c 'echo $$ > "$1/timed"; while :; do sleep 1; done' sh "$1"; echo after"#;
    let runner = redlock(&gateway, &script(&dir, &[], work)).spawn().unwrap();
    let timed = number(&dir, "timed").await;
    kill_process(Pid::from_raw(runner.id().unwrap() as i32).unwrap(), Signal::TERM).unwrap();
    assert_eq!(ended(runner).await.status.code(), Some(143));
    assert!(!lives(timed));
    assert_eq!(gateway.inspect("job").await["state"], "free");
}

#[tokio::test]
async fn a_daemon_survives_a_command_that_ends_by_itself() {
    let gateway = Launch::embedded().ready().await;
    for code in [0, 255] {
        let dir = TempDir::new();
        let work = format!(
            r#"setsid sh -c 'echo $$ > "$1/daemon"; exec sleep 100000' sh "$1" > /dev/null 2>&1 &
            while [ ! -s "$1/daemon" ]; do sleep 0.05; done; exit {code}"#
        );
        let (ended, ..) = output(&gateway, &script(&dir, &[], &work)).await;
        let daemon = number(&dir, "daemon").await;
        assert!(ended == Some(code) && lives(daemon), "{code}");
        kill_process(Pid::from_raw(daemon).unwrap(), Signal::KILL).unwrap();
    }
}

#[tokio::test]
async fn a_waiting_runner_names_the_holder_and_ends_on_interrupt() {
    let gateway = Launch::embedded().ready().await;
    let _lease = gateway.post("job", json!({ "owner": "alice", "ttl_ms": 300_000 })).await;
    let dir = TempDir::new();
    let mut runner =
        redlock(&gateway, &script(&dir, &["--wait", "1h"], "touch \"$1/ran\"")).spawn().unwrap();
    let told = line(&mut runner).await;
    assert!(told.contains("job: ") && told.contains("held by \"alice\""), "{told}");
    kill_process(Pid::from_raw(runner.id().unwrap() as i32).unwrap(), Signal::INT).unwrap();
    assert_eq!(ended(runner).await.status.code(), Some(130));
    assert!(!dir.path().join("ran").exists());
}

/// A proxy in front of the gateway. It loses the answers on its first connection.
async fn losing_first_answers(gateway: &Gateway) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let address = gateway.address();
    tokio::spawn(async move {
        let (mut first, _) = listener.accept().await.unwrap();
        tokio::spawn(async move {
            let mut to_gateway = TcpStream::connect(address).await.unwrap();
            let (mut requests, _unanswered) = first.split();
            let (_lost, mut to_gateway) = to_gateway.split();
            let _ = tokio::io::copy(&mut requests, &mut to_gateway).await;
            std::future::pending::<()>().await;
        });
        while let Ok((mut other, _)) = listener.accept().await {
            let mut to_gateway = TcpStream::connect(address).await.unwrap();
            tokio::spawn(async move {
                let _ = tokio::io::copy_bidirectional(&mut other, &mut to_gateway).await;
            });
        }
    });
    url
}

#[tokio::test]
async fn an_interrupted_runner_releases_a_grant_with_a_lost_answer() {
    let gateway = patient(Launch::embedded()).ready().await;
    let url = losing_first_answers(&gateway).await;
    let dir = TempDir::new();
    // The TTL outlasts the test. So if the lock is free, it was released.
    let flags = ["--url", &url, "--wait", "1h", "--ttl", "1h"];
    let runner = redlock(&gateway, &script(&dir, &flags, "touch \"$1/ran\"")).spawn().unwrap();
    let state = async || gateway.inspect("job").await["state"].as_str().unwrap().to_owned();
    eventually("the lock is granted", async || (state().await == "held").then_some(())).await;
    kill_process(Pid::from_raw(runner.id().unwrap() as i32).unwrap(), Signal::INT).unwrap();
    assert_eq!(ended(runner).await.status.code(), Some(130));
    eventually("the lock is free", async || (state().await == "free").then_some(())).await;
    assert!(!dir.path().join("ran").exists());
}

#[tokio::test]
async fn interrupts_reach_the_runner_when_tests_ignore_them() {
    let mut tests = Command::new("env");
    tests.arg("--ignore-signal=INT").arg(std::env::current_exe().unwrap()).kill_on_drop(true);
    tests
        .args(["--exact", "clients::run::a_waiting_runner_names_the_holder_and_ends_on_interrupt"]);
    let output = tests.output().await.unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && printed.contains("1 passed"), "{printed}");
}

#[tokio::test]
async fn a_shell_acquires_extends_inspects_and_releases() {
    let gateway = Launch::embedded().ready().await;
    let path = binary().parent().unwrap().to_str().unwrap();
    let session = format!(
        r#"set -eu; PATH={path}:$PATH
        eval "$(redlock acquire jobs/a --ttl 5m --owner me --format shell)"
        redlock status jobs/a; redlock list jobs/
        redlock extend jobs/a --ttl 1m --json
        redlock release jobs/a; redlock release jobs/a
        redlock status jobs/a; redlock nodes | head -2"#
    );
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(session).env("REDLOCK_URL", format!("http://{}", gateway.address()));
    let output = shell.output().await.unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{err}{out}");
    let lines: Vec<&str> = out.lines().collect();
    assert!(
        lines[0].starts_with("jobs/a: held by \"me\" since 20")
            && lines[1].starts_with("jobs/a: held"),
        "{out}"
    );
    assert!(lines[2].starts_with("{\"name\":\"jobs/a\",\"validity_ms\":5"), "{out}");
    assert_eq!((lines[3], lines[4]), ("jobs/a: free", "ready"), "{out}");
    assert!(lines[5].ends_with("  admitted"), "{out}");
}

mod measured {
    use super::*;
    use crate::support::measure::measured;

    /// An error if a command was gone less than 100 ms before the end of the lock.
    fn is_early(margin: Duration) -> Result<(), String> {
        let is_early = margin > Duration::from_millis(100);
        if is_early { Ok(()) } else { Err(format!("{margin:?} before the lock ended")) }
    }

    #[tokio::test]
    async fn a_stopped_runners_command_ends_before_the_lock() {
        measured("the end of a stopped runner's command", async || {
            is_early(stopped_runner("2s").await)
        })
        .await;
    }

    #[tokio::test]
    async fn without_masters_a_command_ends_before_the_lock() {
        measured("the end of a command without masters", async || {
            is_early(without_masters("2s").await)
        })
        .await;
    }

    #[tokio::test]
    async fn a_lost_lock_kills_a_command_that_ignores_term_after_grace() {
        measured("the end of a command after the loss of its lock", async || {
            // 300 ms are allowed, and the deadline is 6 s away.
            let took = lost_lock().await;
            let is_in_time = took < Duration::from_secs(3);
            if is_in_time { Ok(()) } else { Err(format!("it took {took:?}")) }
        })
        .await;
    }
}
