//! Gateways for the tests. Each is the real program as a separate process, on a port that the
//! kernel chose. The gateways log at trace level. When a gateway ends, its log is searched for
//! secrets, and a secret in it fails the test.

use std::collections::BTreeMap;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use http::{HeaderMap, Method};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::{Value, json};

use crate::support::client::{Answer, Call, Lease, Raw, lock_path};
use crate::support::harness::{RedisServer, dies_with_us, eventually, free_port};
use crate::support::secrets::Secrets;
use crate::support::stream::Events;

/// Path of the gateway's program. It is built from the present sources, once per run and in the
/// profile of the tests.
pub(crate) fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| built(&[]).join("redlock-gateway"))
}

/// Path of the Redis module, built in the same way.
pub(crate) fn module() -> &'static Path {
    static MODULE: OnceLock<PathBuf> = OnceLock::new();
    MODULE.get_or_init(|| built(&[]).join("libredlock_module.so"))
}

/// Builds the shipped programs, or the named packages of the workspace, and returns their
/// directory.
pub(crate) fn built(what: &[&str]) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let out = test.ancestors().nth(2).expect("tests lie in <target>/<profile>/deps");
    let profile = match out.file_name().and_then(|name| name.to_str()).expect("a plain name") {
        "debug" => "dev",
        profile => profile,
    };
    let built = Command::new(env!("CARGO"))
        // The same selection of features as that of the tests: see tests/build.
        .args(["build", "--quiet", "--workspace", "--lib", "--bins", "--test", "black_box"])
        .args(["--profile", profile, "--target-dir"])
        .arg(out.parent().expect("a target directory"))
        .args(what)
        .current_dir(source_root())
        .output()
        .expect("cargo starts");
    assert!(
        built.status.success(),
        "{what:?} cannot be built:\n{}",
        String::from_utf8_lossy(&built.stderr)
    );
    out.to_owned()
}

/// The top of the source tree.
pub(crate) fn source_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the workspace")
}

/// A file in the build directory that is deleted with its owner.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str, content: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let unique =
            format!("{}-{}-{name}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(unique);
        std::fs::write(&path, content).expect("the build directory can be written");
        Self(path)
    }

    pub(crate) fn path(&self) -> &str {
        self.0.to_str().expect("a plain path")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The settings of a gateway that is not started yet.
#[derive(Debug, Clone, Default)]
pub(crate) struct Launch {
    args: Vec<String>,
    env: BTreeMap<String, String>,
    files: Option<u32>,
}

impl Launch {
    /// A gateway with only these arguments.
    pub(crate) fn bare(args: &[&str]) -> Self {
        Self { args: args.iter().map(|arg| (*arg).to_owned()).collect(), ..Self::default() }
    }

    /// Five nodes inside the gateway.
    pub(crate) fn embedded() -> Self {
        Self::bare(&["--listen", "127.0.0.1:0"])
    }

    /// A gateway over these masters, with `--bootstrap`. The timeout of its nodes is long, so that
    /// a busy machine does not look like a fault.
    pub(crate) fn over(servers: &[RedisServer]) -> Self {
        let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
        Self::embedded().nodes(&urls).flag("--node-timeout", "2s").brand_new()
    }

    /// Adds `--bootstrap`: all masters are admitted at once if none of them has been used.
    pub(crate) fn brand_new(mut self) -> Self {
        self.args.push("--bootstrap".into());
        self
    }

    pub(crate) fn nodes(mut self, urls: &[String]) -> Self {
        for url in urls {
            self = self.flag("--node", url);
        }
        self
    }

    /// Sets a flag. A later value replaces an earlier one, except for `--node`, which may be
    /// repeated.
    pub(crate) fn flag(mut self, name: &str, value: &str) -> Self {
        match self.args.iter().position(|arg| arg == name).filter(|_| name != "--node") {
            Some(at) => value.clone_into(&mut self.args[at + 1]),
            None => self.args.extend([name.into(), value.into()]),
        }
        self
    }

    /// Adds a flag that may be repeated.
    pub(crate) fn more(mut self, name: &str, value: &str) -> Self {
        self.args.extend([name.into(), value.into()]);
        self
    }

    /// Adds one argument as it is.
    pub(crate) fn argument(mut self, argument: &str) -> Self {
        self.args.push(argument.into());
        self
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    /// Limits the number of files that the process may open.
    pub(crate) fn files(mut self, most: u32) -> Self {
        self.files = Some(most);
        self
    }

    /// Puts a command in front of the arguments.
    pub(crate) fn command(mut self, command: &str) -> Self {
        self.args.insert(0, command.into());
        self
    }

    fn spawn(&self) -> Process {
        let mut command = match self.files {
            None => dies_with_us(binary()),
            Some(most) => {
                let mut command = dies_with_us("prlimit");
                command.arg(format!("--nofile={most}:{most}")).arg(binary());
                command
            }
        };
        command.args(&self.args);
        without_settings(&mut command).env("RUST_LOG", "trace").envs(&self.env);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("setpriv (util-linux) starts");
        let stdout = Captured::drain(child.stdout.take().expect("piped"));
        let stderr = Captured::drain(child.stderr.take().expect("piped"));
        Process { child, stdout, stderr, secrets: self.secrets() }
    }

    /// The secrets in the arguments and environment. They must not appear in any output.
    fn secrets(&self) -> Arc<Secrets> {
        let secrets = Secrets::default();
        let files = self.args.iter().skip_while(|arg| *arg != "--config").nth(1).into_iter();
        for file in files.chain(self.env.get("REDLOCK_CONFIG")) {
            secrets.configured(&std::fs::read_to_string(file).unwrap_or_default());
        }
        self.args.iter().chain(self.env.values()).for_each(|text| secrets.configured(text));
        Arc::new(secrets)
    }

    /// Starts the program with this file as standard output and standard error. The test captures
    /// nothing.
    pub(crate) fn spawn_into(&self, output: std::fs::File) -> Process {
        let mut command = dies_with_us(binary());
        command.args(&self.args).stdin(Stdio::null());
        without_settings(&mut command).envs(&self.env);
        command.stdout(output.try_clone().expect("a descriptor")).stderr(output);
        let child = command.spawn().expect("setpriv (util-linux) starts");
        Process {
            child,
            stdout: Captured::default(),
            stderr: Captured::default(),
            secrets: self.secrets(),
        }
    }

    /// Serves at this address, with all output to this file. Returns when the gateway answers.
    pub(crate) async fn serve_into(self, address: SocketAddr, output: std::fs::File) -> Gateway {
        let mut gateway = Gateway { process: self.spawn_into(output), address };
        eventually("the gateway answers", async || {
            assert!(!gateway.process.has_ended(), "the gateway did not start");
            gateway.call(Method::GET, "/livez").try_send().await.ok()
        })
        .await;
        gateway
    }

    /// Starts the program and waits for nothing. The process ends when the returned value is
    /// dropped.
    pub(crate) fn spawn_only(self) -> Process {
        self.spawn()
    }

    /// Runs the program to its end. For commands, and for configurations that are refused.
    pub(crate) async fn finish(self) -> Finished {
        self.spawn().finish().await
    }

    /// Serves. Returns when the gateway listens, in whatever state its nodes are.
    pub(crate) async fn start(self) -> Gateway {
        let mut process = self.spawn();
        let address = eventually("the gateway listens", async || {
            let listening = process.logged("listening");
            if listening.is_none() && process.has_ended() {
                panic!(
                    "the gateway did not start:\n{}{}",
                    process.stdout.all(),
                    process.stderr.all()
                );
            }
            listening?["address"].as_str()?.parse().ok()
        })
        .await;
        Gateway { process, address }
    }

    /// Serves at a log level without the line `listening`. Returns when the gateway accepts
    /// connections.
    pub(crate) async fn start_quiet(self) -> Gateway {
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let process = self.flag("--listen", &address.to_string()).spawn();
        eventually("the gateway listens", async || std::net::TcpStream::connect(address).ok())
            .await;
        Gateway { process, address }
    }

    /// Serves with a log of text. Returns the gateway and its banner, once the banner is complete.
    pub(crate) async fn start_with_banner(self) -> (Gateway, String) {
        let gateway = self.flag("--log-format", "text").start_quiet().await;
        let banner = eventually("the banner is complete", async || {
            Some(gateway.stderr()).filter(|text| text.contains("/docs"))
        })
        .await;
        (gateway, banner)
    }

    /// Serves. Returns when every node is admitted.
    pub(crate) async fn ready(self) -> Gateway {
        let gateway = self.start().await;
        gateway.all_nodes_admitted().await;
        gateway
    }
}

/// Removes the settings that the process would inherit from the environment of the tests.
fn without_settings(command: &mut Command) -> &mut Command {
    for (name, _) in std::env::vars_os() {
        if name == "RUST_LOG" || name.to_string_lossy().starts_with("REDLOCK_") {
            command.env_remove(name);
        }
    }
    command
}

/// Exit code and output of an ended process.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// The output of a process so far.
#[derive(Default)]
struct Captured {
    bytes: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
}

impl Captured {
    fn drain(mut pipe: impl Read + Send + 'static) -> Self {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let filled = bytes.clone();
        let reader = std::thread::spawn(move || {
            let mut chunk = [0; 8192];
            while let Ok(got @ 1..) = pipe.read(&mut chunk) {
                filled.lock().unwrap().extend_from_slice(&chunk[..got]);
            }
        });
        Self { bytes, reader: Some(reader) }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes.lock().unwrap()).into_owned()
    }

    /// The whole output. The process must have ended.
    fn all(&mut self) -> String {
        if let Some(reader) = self.reader.take() {
            reader.join().expect("the reader does not panic");
        }
        self.text()
    }
}

/// A process that is killed when this value is dropped.
pub(crate) struct Process {
    child: Child,
    stdout: Captured,
    stderr: Captured,
    secrets: Arc<Secrets>,
}

impl Process {
    fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("a child can be waited for").is_some()
    }

    async fn ended(&mut self) -> ExitStatus {
        let child = &mut self.child;
        let status = eventually("the process ends", async || {
            child.try_wait().expect("a child can be waited for")
        })
        .await;
        let _ = (self.stdout.all(), self.stderr.all());
        status
    }

    /// Waits for the end of the process, like [`Launch::finish`].
    pub(crate) async fn finish(mut self) -> Finished {
        let status = self.ended().await;
        Finished { code: status.code(), stdout: self.stdout.all(), stderr: self.stderr.all() }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("the process lives");
        // A process may answer until it has really stopped, so this waits for that.
        if signal == Signal::STOP {
            let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED)
                .expect("a child")
                .expect("a blocking wait");
            assert!(status.stopped(), "the process ended instead of stopping");
        }
    }

    /// The first line of the log that has this message.
    fn logged(&self, message: &str) -> Option<Value> {
        let text = self.stdout.text();
        let mut lines = text.lines().filter(|line| line.contains(message));
        lines.find_map(|line| {
            serde_json::from_str(line).ok().filter(|line: &Value| line["message"] == message)
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if !std::thread::panicking() {
            for written in [self.stdout.all(), self.stderr.all()] {
                let found = self.secrets.found_in(&written);
                assert!(found.is_none(), "{}", found.unwrap_or_default());
            }
        }
    }
}

/// A serving gateway.
pub(crate) struct Gateway {
    process: Process,
    address: SocketAddr,
}

impl Gateway {
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn call(&self, method: Method, path: impl Into<String>) -> Call {
        Call::new(self.address, method, path.into(), self.process.secrets.clone())
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path).send().await
    }

    pub(crate) async fn post(&self, name: &str, body: Value) -> Answer {
        self.call(Method::POST, lock_path(name)).json(&body).send().await
    }

    /// Acquires a lock for a minute. Panics if the status is not 201.
    pub(crate) async fn acquire(&self, name: &str) -> Lease {
        self.acquire_for(name, 60_000).await
    }

    /// Acquires a lock, and repeats that until it is granted. A round gets a tenth of the TTL, so a
    /// busy machine may miss the round of a short lock.
    pub(crate) async fn acquire_soon(&self, name: &str, body: Value) -> Lease {
        eventually("the lock is granted", async || {
            let answer = self.post(name, body.clone()).await;
            (answer.status == 201).then(|| Lease::from(&answer))
        })
        .await
    }

    /// Acquires and releases a lock once, so that masters have a watermark for it. Returns the
    /// watermark's token.
    pub(crate) async fn used_before(&self, name: &str) -> u64 {
        let lease = self.acquire(name).await;
        assert_eq!(self.delete(name, &lease.token).await.status, 204);
        lease.fencing
    }

    pub(crate) async fn acquire_for(&self, name: &str, ttl_ms: u64) -> Lease {
        Lease::from(&self.post(name, json!({ "ttl_ms": ttl_ms })).await)
    }

    pub(crate) async fn patch(&self, name: &str, token: &str, ttl_ms: u64) -> Answer {
        let body = json!({ "ttl_ms": ttl_ms });
        self.call(Method::PATCH, lock_path(name))
            .header("lock-token", token)
            .json(&body)
            .send()
            .await
    }

    pub(crate) async fn delete(&self, name: &str, token: &str) -> Answer {
        self.call(Method::DELETE, lock_path(name)).header("lock-token", token).send().await
    }

    /// What the majority of masters stores for a lock.
    pub(crate) async fn inspect(&self, name: &str) -> Value {
        let answer = self.get(&lock_path(name)).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    }

    /// Opens a stream of events.
    pub(crate) async fn events(&self, path: &str) -> Events {
        let opened = Events::open(self.address, path, &HeaderMap::new()).await;
        opened.unwrap_or_else(|answer| panic!("no stream: {answer:?}"))
    }

    pub(crate) async fn readyz(&self) -> Answer {
        self.get("/readyz").await
    }

    pub(crate) async fn all_nodes_caught_up(&self) {
        eventually("every node has caught up", async || {
            let health = self.readyz().await.json();
            let nodes = health["nodes"].as_array().expect("readyz lists nodes").clone();
            nodes.iter().all(|node| node["state"] == "admitted").then_some(())
        })
        .await;
    }

    pub(crate) async fn all_nodes_admitted(&self) {
        eventually("every node is admitted", async || {
            let health = self.readyz().await.json();
            let nodes = health["nodes"].as_array().expect("readyz lists nodes").clone();
            nodes
                .iter()
                .all(|node| node["state"] == "admitted" || node["state"] == "catching_up")
                .then_some(())
        })
        .await;
    }

    pub(crate) async fn raw(&self) -> Raw {
        Raw::open(self.address, self.process.secrets.clone()).await
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Resident memory in bytes.
    pub(crate) fn resident(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.child.id()))
            .expect("the process lives");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("Linux has /proc");
        let kilobytes =
            line.split_whitespace().nth(1).and_then(|number| number.parse::<f64>().ok());
        kilobytes.expect("a number") * 1024.0
    }

    /// Whether all threads of the process sleep. Then it has handled everything that has arrived.
    pub(crate) fn is_idle(&self) -> bool {
        let tasks = format!("/proc/{}/task", self.process.child.id());
        let tasks = std::fs::read_dir(tasks).expect("the process lives").flatten();
        let stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
        let mut states = stats.map(|stat| {
            let (_, rest) = stat.rsplit_once(") ").expect("the state follows the name");
            rest.starts_with('S')
        });
        states.all(|sleeps| sleeps)
    }

    /// Waits for the end of the process. Returns its exit code.
    pub(crate) async fn ended(&mut self) -> Option<i32> {
        self.process.ended().await.code()
    }

    pub(crate) fn stdout(&self) -> String {
        self.process.stdout.text()
    }

    pub(crate) fn stderr(&self) -> String {
        self.process.stderr.text()
    }
}

/// Whether a request failed only because masters were late, as on a busy machine: at most one of
/// them could not vote. `problem` is the body of the answer.
pub(crate) fn is_late(status: u16, problem: &Value) -> bool {
    let votes = ["agreed", "held", "free", "pending", "timeout", "clock"];
    let can_vote = |node: &&Value| {
        let text = |field: &str| node[field].as_str().unwrap_or_default();
        // A vote against the request, in contrast to a master that must not vote.
        let is_no = ["held by ", "has "].iter().any(|start| text("detail").starts_with(start));
        votes.contains(&text("state")) || text("state") == "refused" && is_no
    };
    let nodes = problem["nodes"].as_array();
    status == 503 && nodes.is_some_and(|it| it.len() - it.iter().filter(can_vote).count() <= 1)
}

/// A limit between two outcomes: a quick answer stays far below it, and a timeout lies far above.
pub(crate) const WELL_BELOW_A_TIMEOUT: Duration = Duration::from_secs(1);
