//! Real processes for the tests. Each test starts its own processes, on its own ports and in its
//! own directory. All of them die with the test, however the test ends.
//!
//! No function here waits for a fixed time. A server is ready when the very process that was
//! started answers PING. It has stopped when the kernel reports that. Every other condition goes
//! through [`eventually`], which polls, and panics at its deadline.

use std::cell::Cell;
use std::ffi::OsStr;
use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::{fmt, io};
use tokio::net::TcpSocket;

use crate::support::cluster::clock_shim;
use crate::support::gateway::{Scratch, module};
use crate::support::resp::{Resp, Wire};

/// How long a test waits for an event before it fails. It ends a test that hangs, and never a test
/// on a slow machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10 * 60);
const POLL: Duration = Duration::from_millis(5);

/// Returns `daily` in `tests/run`, and `long` in the part `long` of `tests/before-release`.
pub(crate) fn daily_or_long<T>(daily: T, long: T) -> T {
    if std::env::var_os("REDLOCK_LONG_TESTS").is_some() { long } else { daily }
}

/// Polls until `probe` returns a value. Panics with `what` if it returns none in time.
pub(crate) async fn eventually<T>(what: &str, mut probe: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = probe().await {
            return answer;
        }
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(POLL).await;
    }
}

/// Like [`eventually`], for blocking code.
fn eventually_blocking<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = probe() {
            return answer;
        }
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(POLL);
    }
}

/// A directory that is deleted when this value is dropped.
pub(crate) struct TempDir(PathBuf);

impl TempDir {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let unique =
            format!("redlock-it-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(unique);
        std::fs::create_dir(&path).expect("a fresh directory");
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A port on which nobody listens. It is below the range from which the kernel takes ports for
/// outgoing connections. Otherwise such a connection could take the port while a server restarts.
pub(crate) fn free_port() -> u16 {
    const FIRST: u32 = 10_000;
    const COUNT: u32 = 20_000;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let start = std::process::id().wrapping_mul(97);
    eventually_blocking("a free port", || {
        let step = start.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = (FIRST + step % COUNT) as u16;
        TcpListener::bind(("127.0.0.1", port)).is_ok().then_some(port)
    })
}

/// A child process that ends with this process, even if this process is killed.
///
/// The kernel kills the child when the *thread* that spawned it ends. So it must be spawned from
/// the test's own thread.
struct Process {
    child: Child,
}

/// A command whose process the kernel kills when the thread that started it ends, for whatever
/// reason. The kernel is told so only after the start. So a shell runs first: if this process has
/// ended before that, the shell starts nothing.
pub(crate) fn dies_with_us(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    let only_below_us = r#"[ "$PPID" = "$0" ] && exec "$@""#;
    command
        .args(["--pdeathsig", "KILL", "sh", "-c", only_below_us, &std::process::id().to_string()])
        .arg(program);
    command
}

impl Process {
    fn spawn(program: &str, args: &[String]) -> Self {
        let child = dies_with_us(program)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("setpriv (util-linux) starts");
        Self { child }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn has_ended(&mut self) -> bool {
        let status = self.child.try_wait().expect("a child can be waited for");
        // The shell of `dies_with_us` ends with this status. Another try would not help.
        assert!(status.is_none_or(|it| it.code() != Some(127)), "the program is not installed");
        status.is_some()
    }

    /// Sends SIGKILL. Returns when the process is gone.
    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends SIGSTOP. Returns when the process has stopped.
    fn stop(&self) {
        kill_process(self.pid(), Signal::STOP).expect("the process lives");
        let (_, status) = waitpid(Some(self.pid()), WaitOptions::UNTRACED)
            .expect("a child")
            .expect("a blocking wait");
        assert!(status.stopped(), "the process ended instead of stopping");
    }

    fn cont(&self) {
        kill_process(self.pid(), Signal::CONT).expect("the process lives");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether the next server loads the module. With `REDLOCK_TEST_MASTERS=native` every server does,
/// with `lua` (the default) none does. With `mix` every second server of a test does. Whether the
/// first one does depends on the test's name, so each run of a test is alike.
fn has_module() -> bool {
    thread_local!(static NEXT: Cell<Option<bool>> = const { Cell::new(None) });
    match std::env::var("REDLOCK_TEST_MASTERS").as_deref() {
        Ok("native") => true,
        Ok("lua") | Err(_) => false,
        Ok("mix") => {
            let by_name =
                || std::thread::current().name().is_some_and(|name| name.len().is_multiple_of(2));
            let native = NEXT.get().unwrap_or_else(by_name);
            NEXT.set(Some(!native));
            native
        }
        Ok(other) => panic!("REDLOCK_TEST_MASTERS={other}; known are lua, native and mix"),
    }
}

/// The server program. `REDLOCK_TEST_REDIS_SERVER=<path>` names another one, for example Valkey's.
fn server_program() -> String {
    std::env::var("REDLOCK_TEST_REDIS_SERVER").unwrap_or_else(|_| "redis-server".into())
}

/// Options of a redis-server. By default it writes nothing to disk.
#[derive(Debug, Clone, Default)]
pub(crate) struct RedisOptions {
    /// Writes an append-only file, which is synced with every write.
    pub(crate) append_only: bool,
    pub(crate) password: Option<String>,
    /// Whether to load the Redis module. `None` follows `REDLOCK_TEST_MASTERS`.
    pub(crate) native: Option<bool>,
    /// Further arguments of redis-server.
    pub(crate) args: Vec<String>,
    /// Variables for its environment, as `NAME=value`.
    pub(crate) env: Vec<String>,
}

/// A redis-server on a free loopback port.
pub(crate) struct RedisServer {
    process: Process,
    port: u16,
    dir: TempDir,
    options: RedisOptions,
    wire: Mutex<Option<Wire>>,
}

impl RedisServer {
    pub(crate) fn start() -> Self {
        Self::start_with(RedisOptions::default())
    }

    pub(crate) fn start_with(mut options: RedisOptions) -> Self {
        // Decided once, so that a restart does not change it.
        options.native.get_or_insert_with(has_module);
        let dir = TempDir::new();
        let port = free_port();
        let process = Self::launch(port, &dir, &options);
        let mut server = Self { process, port, dir, options, wire: Mutex::new(None) };
        // Another process may take the free port before the server starts, so this tries several
        // ports.
        eventually_blocking("redis-server starts", || {
            if server.ready().is_ok() {
                return Some(());
            }
            server.port = free_port();
            server.process = Self::launch(server.port, &server.dir, &server.options);
            None
        });
        server
    }

    fn launch(port: u16, dir: &TempDir, options: &RedisOptions) -> Process {
        let dir = dir.path().to_str().expect("a plain path");
        let append = if options.append_only { "yes" } else { "no" };
        let mut args: Vec<String> = ["--bind", "127.0.0.1", "--port"].map(String::from).into();
        args.push(port.to_string());
        for arg in [
            "--dir",
            dir,
            "--logfile",
            "log",
            "--save",
            "",
            "--appendonly",
            append,
            "--appendfsync",
            "always",
        ] {
            args.push(arg.into());
        }
        if let Some(password) = &options.password {
            args.extend(["--requirepass".into(), password.clone()]);
        }
        if options.native == Some(true) {
            args.extend([
                "--loadmodule".into(),
                module().to_str().expect("a plain path").to_owned(),
            ]);
        }
        args.extend(options.args.iter().cloned());
        Process::spawn("env", &[options.env.clone(), vec![server_program()], args].concat())
    }

    /// Waits until the server answers. Checks that the answer comes from the process that was
    /// started, not from another one on the same port. Fails if that process has ended.
    fn ready(&mut self) -> Result<(), ()> {
        let own = format!("process_id:{}\r\n", self.process.pid().as_raw_nonzero());
        eventually_blocking("redis-server answers", || {
            if self.process.has_ended() {
                return Some(Err(()));
            }
            let pong = self.try_cmd(&["PING"]).ok()?;
            let Resp::Bytes(info) = self.try_cmd(&["INFO", "server"]).ok()? else { return None };
            let ours = String::from_utf8_lossy(&info).contains(&own);
            (ours && pong == Resp::Text("PONG".into())).then_some(Ok(()))
        })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// The directory of the server's files.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn url(&self) -> String {
        match &self.options.password {
            Some(password) => format!("redis://:{password}@127.0.0.1:{}", self.port),
            None => format!("redis://127.0.0.1:{}", self.port),
        }
    }

    /// Sends SIGKILL. Returns when the process is gone.
    pub(crate) fn kill(&mut self) {
        self.process.kill();
        *self.wire() = None;
    }

    /// Sends SIGSTOP. Returns when the process has stopped. Until [`Self::cont`], every command to
    /// the server hangs.
    pub(crate) fn stop(&self) {
        self.process.stop();
    }

    pub(crate) fn cont(&self) {
        self.process.cont();
    }

    /// Starts a killed server again, with the same port and directory. So it has the data that it
    /// wrote to disk.
    pub(crate) fn restart(&mut self) {
        self.kill();
        eventually_blocking("redis-server starts again", || {
            self.process = Self::launch(self.port, &self.dir, &self.options);
            self.ready().ok()
        });
    }

    /// Starts a killed server again, with or without the module.
    pub(crate) fn restart_as(&mut self, native: bool) {
        self.options.native = Some(native);
        self.restart();
    }

    /// How often the server has executed a command.
    pub(crate) fn calls_of(&self, command: &str) -> u64 {
        let stats = self.cmd(&["INFO", "commandstats"]).text();
        let line =
            stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
        line.and_then(|rest| rest.split(',').next()?.parse().ok()).unwrap_or(0)
    }

    /// Shuts the server down as its service would, and starts it again with the data on its disk.
    pub(crate) fn shut_down_and_restart(&mut self) {
        // The server answers SHUTDOWN by closing the connection, so the command fails.
        let _ = self.try_cmd(&["SHUTDOWN"]);
        self.restart();
    }

    /// Runs one command, given as its words. Panics on any error.
    pub(crate) fn cmd<A: AsRef<[u8]>>(&self, words: &[A]) -> Resp {
        match self.try_cmd(words) {
            Ok(Resp::Error(error)) => panic!("redis answers {error}"),
            Ok(answer) => answer,
            Err(error) => panic!("redis-server on port {}: {error}", self.port),
        }
    }

    /// Runs one command and returns its answer or error.
    pub(crate) fn answer<A: AsRef<[u8]>>(&self, words: &[A]) -> Result<Resp, String> {
        match self
            .try_cmd(words)
            .unwrap_or_else(|error| panic!("redis-server on port {}: {error}", self.port))
        {
            Resp::Error(error) => Err(error),
            answer => Ok(answer),
        }
    }

    fn try_cmd<A: AsRef<[u8]>>(&self, words: &[A]) -> io::Result<Resp> {
        let mut wire = self.wire();
        // The connection is taken out of its place, so that it is not used again if it fails
        // half-way.
        let mut open = match wire.take() {
            Some(open) => open,
            None => Wire::open(self.port, self.options.password.as_deref())?,
        };
        let answer = open.call(words)?;
        *wire = Some(open);
        Ok(answer)
    }

    fn wire(&self) -> std::sync::MutexGuard<'_, Option<Wire>> {
        self.wire.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

pub(crate) fn masters(count: usize) -> Vec<RedisServer> {
    (0..count).map(|_| RedisServer::start()).collect()
}

/// Masters in Cluster mode, each with all slots.
pub(crate) fn masters_in_cluster_mode(count: usize) -> Vec<RedisServer> {
    let args = ["--cluster-enabled", "yes"].map(String::from).into();
    let options = RedisOptions { args, ..RedisOptions::default() };
    let servers: Vec<_> = (0..count).map(|_| RedisServer::start_with(options.clone())).collect();
    for server in &servers {
        server.cmd(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    }
    servers
}

/// A disk for redis-servers. The test decides how long each fsync takes.
pub(crate) struct SlowDisk {
    shim: Scratch,
    file: Scratch,
}

impl SlowDisk {
    pub(crate) fn new() -> Self {
        Self {
            shim: clock_shim("fsync_shim.c"),
            file: Scratch::new("fsync_delay", "\0\0\0\0\0\0\0\0"),
        }
    }

    /// Starts servers on this disk. They sync each write before they answer it.
    pub(crate) fn masters(&self, count: usize) -> Vec<RedisServer> {
        let shim = self.shim.path();
        let file = self.file.path();
        let env = vec![format!("LD_PRELOAD={shim}"), format!("FSYNC_DELAY_FILE={file}")];
        let options = RedisOptions { append_only: true, env, ..RedisOptions::default() };
        (0..count).map(|_| RedisServer::start_with(options.clone())).collect()
    }

    /// Delays every fsync by this time from now on. A delay of zero also ends the delays under way.
    pub(crate) fn delay_fsyncs(&self, delay: Duration) {
        let millis = i64::try_from(delay.as_millis()).expect("a delay that a test can wait for");
        let file =
            File::options().write(true).open(self.file.path()).expect("the test created the file");
        file.write_all_at(&millis.to_ne_bytes(), 0).expect("the file can be written");
    }
}

impl fmt::Debug for RedisServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "redis-server on port {}", self.port)
    }
}

/// A subscription to one channel of a server, on its own connection.
pub(crate) struct Subscription {
    wire: Wire,
    channel: String,
}

impl RedisServer {
    pub(crate) fn subscribe(&self, channel: &str) -> Subscription {
        let mut wire =
            Wire::open(self.port, self.options.password.as_deref()).expect("the server answers");
        let subscribed = wire.call(&["SUBSCRIBE", channel]).expect("the server answers");
        assert!(matches!(subscribed, Resp::List(_)), "{subscribed:?}");
        Subscription { wire, channel: channel.into() }
    }

    /// All messages that have arrived since the last call.
    pub(crate) fn messages(&self, subscription: &mut Subscription) -> Vec<String> {
        const END: &str = "the end";
        self.cmd(&["PUBLISH", &subscription.channel, END]);
        let mut messages = Vec::new();
        loop {
            let Resp::List(message) = subscription.wire.read().expect("the server answers") else {
                panic!("no message")
            };
            match message.last().expect("a message has a text").text() {
                end if end == END => return messages,
                text => messages.push(text),
            }
        }
    }
}

/// An address that refuses connections while this value lives: the port is taken, but nobody
/// listens. The port is outside the range from which outgoing connections get theirs. Otherwise a
/// connection to this address could connect to itself.
pub(crate) struct DeadPort(TcpSocket);

impl DeadPort {
    pub(crate) fn new() -> Self {
        eventually_blocking("a port that is still free", || {
            let socket = TcpSocket::new_v4().expect("a socket");
            socket.bind((Ipv4Addr::LOCALHOST, free_port()).into()).is_ok().then_some(Self(socket))
        })
    }

    pub(crate) fn port(&self) -> u16 {
        self.0.local_addr().expect("bound").port()
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port())
    }
}

impl RedisServer {
    /// Kills a server and deletes its data on disk, as if another machine had replaced it.
    pub(crate) fn kill_and_wipe(&mut self) {
        self.kill();
        std::fs::remove_dir_all(self.dir.path()).expect("its directory");
        std::fs::create_dir(self.dir.path()).expect("a fresh directory");
    }

    /// The URL of this server with a user and password, or with another host name.
    pub(crate) fn url_as(&self, user: &str, host: &str) -> String {
        format!("redis://{user}{host}:{}", self.port)
    }
}
