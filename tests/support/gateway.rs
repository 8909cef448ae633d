//! Gateways for the tests: the real program as a process of its own on a port that the kernel chose, and two ways to
//! speak to it. An ordinary call goes through hyper, one connection for each, so that no pool hides a connection that was
//! lost; [`Raw`] writes bytes, for what no client library would send.
//!
//! Every answer to an ordinary call of a documented operation is held against the OpenAPI document: a status that is not
//! listed or a body that is not of the listed schema fails the test that met it, whatever it was about.
//!
//! Gateways write their most talkative log, and a secret in it fails the test when the gateway ends.

use std::collections::BTreeMap;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::harness::{PATIENCE, RedisServer, Resp, dies_with_us, eventually};
use crate::openapi;
use crate::secrets::Secrets;

/// The gateway, built from the present sources: once per run, in the profile of the tests.
pub(crate) fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let test = std::env::current_exe().expect("the path of this test");
        let out = test.ancestors().nth(2).expect("tests lie in <target>/<profile>/deps");
        let profile = match out.file_name().and_then(|name| name.to_str()).expect("a plain name") {
            "debug" => "dev",
            profile => profile,
        };
        let built = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--package", "redlock-gateway", "--profile", profile, "--target-dir"])
            .arg(out.parent().expect("a target directory"))
            .current_dir(source_root())
            .output()
            .expect("cargo starts");
        assert!(built.status.success(), "the gateway cannot be built:\n{}", String::from_utf8_lossy(&built.stderr));
        out.join("redlock-gateway")
    })
}

/// The top of the source tree.
pub(crate) fn source_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the workspace")
}

/// A file in the build directory that goes away with its owner.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str, content: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let unique = format!("{}-{}-{name}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
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

/// How a gateway is started.
#[derive(Debug, Clone, Default)]
pub(crate) struct Launch {
    args: Vec<String>,
    env: BTreeMap<String, String>,
}

impl Launch {
    /// With these arguments and nothing else.
    pub(crate) fn bare(args: &[&str]) -> Self {
        Self { args: args.iter().map(|arg| (*arg).to_owned()).collect(), env: BTreeMap::new() }
    }

    /// Five nodes inside the gateway.
    pub(crate) fn embedded() -> Self {
        Self::bare(&["--listen", "127.0.0.1:0"])
    }

    /// These masters, said to be brand-new. A node may take its time, so that a busy machine does not look like a fault.
    pub(crate) fn over(servers: &[RedisServer]) -> Self {
        let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
        Self::embedded().nodes(&urls).flag("--node-timeout", "2s").brand_new()
    }

    /// With an operator's word that its masters have never been used: all of them are admitted at once if that is true.
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

    /// A flag with its value. Given again, the later value replaces the former, except for nodes.
    pub(crate) fn flag(mut self, name: &str, value: &str) -> Self {
        match self.args.iter().position(|arg| arg == name).filter(|_| name != "--node") {
            Some(at) => value.clone_into(&mut self.args[at + 1]),
            None => self.args.extend([name.into(), value.into()]),
        }
        self
    }

    /// A flag that may be repeated.
    pub(crate) fn more(mut self, name: &str, value: &str) -> Self {
        self.args.extend([name.into(), value.into()]);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    fn spawn(&self) -> Process {
        let program = binary();
        let mut command = dies_with_us(program);
        command.args(&self.args);
        let inherited = std::env::vars_os().map(|(name, _)| name);
        for name in inherited.filter(|name| name == "RUST_LOG" || name.to_string_lossy().starts_with("REDLOCK_")) {
            command.env_remove(name);
        }
        command.env("RUST_LOG", "trace").envs(&self.env);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("setpriv (util-linux) starts");
        let stdout = Captured::drain(child.stdout.take().expect("piped"));
        let stderr = Captured::drain(child.stderr.take().expect("piped"));
        Process { child, stdout, stderr, secrets: self.secrets() }
    }

    /// What this is started with and must not show.
    fn secrets(&self) -> Arc<Secrets> {
        let secrets = Secrets::default();
        let files = self.args.iter().skip_while(|arg| *arg != "--config").nth(1).into_iter();
        for file in files.chain(self.env.get("REDLOCK_CONFIG")) {
            secrets.configured(&std::fs::read_to_string(file).unwrap_or_default());
        }
        self.args.iter().chain(self.env.values()).for_each(|text| secrets.configured(text));
        Arc::new(secrets)
    }

    /// Serves at this address with standard output and standard error that take nothing; returns when it answers.
    pub(crate) async fn unheard(self, address: SocketAddr) -> Gateway {
        let full = || std::fs::File::options().write(true).open("/dev/full").expect("Linux has /dev/full");
        let mut command = dies_with_us(binary());
        command.args(&self.args).envs(&self.env).stdin(Stdio::null());
        let child = command.stdout(full()).stderr(full()).spawn().expect("setpriv (util-linux) starts");
        let (stdout, stderr) = (Captured::default(), Captured::default());
        let process = Process { child, stdout, stderr, secrets: self.secrets() };
        let gateway = Gateway { process, address };
        eventually("it answers", async || gateway.call(Method::GET, "/livez").try_send().await.ok()).await;
        gateway
    }

    /// Runs until it is dropped.
    pub(crate) fn spawn_only(self) -> Process {
        self.spawn()
    }

    /// Runs to the end, as commands and refused configurations do.
    pub(crate) async fn finish(self) -> Finished {
        let mut process = self.spawn();
        let status = process.ended().await;
        Finished { code: status.code(), stdout: process.stdout.all(), stderr: process.stderr.all() }
    }

    /// Serves; returns when it listens, whatever its nodes do.
    pub(crate) async fn start(self) -> Gateway {
        let mut process = self.spawn();
        let address = eventually("the gateway listens", async || {
            let listening = process.logged("listening");
            if listening.is_none() && process.has_ended() {
                panic!("the gateway did not start:\n{}{}", process.stdout.all(), process.stderr.all());
            }
            listening?["address"].as_str()?.parse().ok()
        })
        .await;
        Gateway { process, address }
    }

    /// Serves with a log that may not say that it does; returns when its banner says so.
    pub(crate) async fn start_quiet(self) -> Gateway {
        let process = self.spawn();
        let address = eventually("the gateway listens", async || {
            let banner = process.stderr.text();
            let (_, rest) = banner.split_once(" on http://")?;
            rest.split_once('\n')?.0.parse().ok()
        })
        .await;
        Gateway { process, address }
    }

    /// Serves; returns when every node is admitted.
    pub(crate) async fn ready(self) -> Gateway {
        let gateway = self.start().await;
        gateway.all_nodes_admitted().await;
        gateway
    }
}

/// What a process that ended has left.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// What a process has written so far.
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

    /// Everything there will ever be; the process must have ended.
    fn all(&mut self) -> String {
        if let Some(reader) = self.reader.take() {
            reader.join().expect("the reader does not panic");
        }
        self.text()
    }
}

/// A process that ends with its owner.
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
        let status =
            eventually("the process ends", async || child.try_wait().expect("a child can be waited for")).await;
        let _ = (self.stdout.all(), self.stderr.all());
        status
    }

    /// The first line of the log with this message.
    fn logged(&self, message: &str) -> Option<Value> {
        let text = self.stdout.text();
        let mut lines = text.lines().filter(|line| line.contains(message));
        lines.find_map(|line| serde_json::from_str(line).ok().filter(|line: &Value| line["message"] == message))
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

/// A gateway that serves.
pub(crate) struct Gateway {
    process: Process,
    address: SocketAddr,
}

impl Gateway {
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn call(&self, method: Method, path: impl Into<String>) -> Call {
        let (address, path, secrets) = (self.address, path.into(), self.process.secrets.clone());
        Call { address, method, path, headers: HeaderMap::new(), body: Bytes::new(), secrets }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path).send().await
    }

    pub(crate) async fn post(&self, name: &str, body: Value) -> Answer {
        self.call(Method::POST, lock_path(name)).json(&body).send().await
    }

    /// Acquires for a minute; anything but 201 is a panic.
    pub(crate) async fn acquire(&self, name: &str) -> Lease {
        self.acquire_for(name, 60_000).await
    }

    /// Acquires and releases once, so that a fence stays whatever comes: answers its T.
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
        self.call(Method::PATCH, lock_path(name)).header("lock-token", token).json(&body).send().await
    }

    pub(crate) async fn delete(&self, name: &str, token: &str) -> Answer {
        self.call(Method::DELETE, lock_path(name)).header("lock-token", token).send().await
    }

    /// The majority's view of a lock.
    pub(crate) async fn look(&self, name: &str) -> Value {
        let answer = self.get(&lock_path(name)).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    }

    pub(crate) async fn readyz(&self) -> Answer {
        self.get("/readyz").await
    }

    pub(crate) async fn all_nodes_admitted(&self) {
        eventually("every node is admitted", async || {
            let health = self.readyz().await.json();
            let nodes = health["nodes"].as_array().expect("readyz lists nodes").clone();
            nodes.iter().all(|node| node["state"] == "admitted").then_some(())
        })
        .await;
    }

    pub(crate) async fn raw(&self) -> Raw {
        let stream = TcpStream::connect(self.address).await.expect("the gateway listens");
        Raw { stream, unread: Vec::new(), secrets: self.process.secrets.clone() }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.process.child);
        kill_process(pid, signal).expect("the process lives");
        // Until it has stopped it may still answer.
        if signal == Signal::STOP {
            let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).expect("a child").expect("a blocking wait");
            assert!(status.stopped(), "the process ended instead of stopping");
        }
    }

    /// Waits for the end; returns the exit code.
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

/// The path of a lock; the slash is the one character of a name that must be encoded.
pub(crate) fn lock_path(name: &str) -> String {
    format!("/locks/{}", name.replace('/', "%2F"))
}

/// A request in the making.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    address: SocketAddr,
    method: Method,
    path: String,
    headers: HeaderMap,
    body: Bytes,
    secrets: Arc<Secrets>,
}

impl Call {
    /// Adds a header; the same one twice is sent twice.
    pub(crate) fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        let value = HeaderValue::from_bytes(value.as_ref()).expect("what a client can send");
        self.headers.append(HeaderName::try_from(name).expect("a header's name"), value);
        self
    }

    pub(crate) fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    pub(crate) fn json(self, body: &Value) -> Self {
        self.header("content-type", "application/json").body(body.to_string())
    }

    pub(crate) async fn send(self) -> Answer {
        let what = format!("{} {}", self.method, self.path);
        self.try_send().await.unwrap_or_else(|error| panic!("{what}: {error}"))
    }

    /// `Err` when the connection failed before the whole answer was there.
    pub(crate) async fn try_send(self) -> Result<Answer, String> {
        let (method, path) = (self.method.clone(), self.path.clone());
        let answer =
            timeout(PATIENCE, self.exchange()).await.map_err(|_| format!("no answer within {PATIENCE:?}"))??;
        openapi::hold_against_document(&method, &path, &answer);
        Ok(answer)
    }

    async fn exchange(self) -> Result<Answer, String> {
        self.secrets.sent(&self.headers);
        let text = |error: hyper::Error| error.to_string();
        let stream = TcpStream::connect(self.address).await.map_err(|error| error.to_string())?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(text)?;
        let connection = tokio::spawn(connection);
        let mut request = Request::new(Full::new(self.body));
        *request.method_mut() = self.method;
        *request.uri_mut() = self.path.parse().map_err(|_| format!("{:?} is no URI", self.path))?;
        *request.headers_mut() = self.headers;
        request.headers_mut().insert("host", HeaderValue::try_from(self.address.to_string()).expect("an address"));
        let response = sender.send_request(request).await.map_err(text)?;
        let (head, body) = response.into_parts();
        let body = body.collect().await.map_err(text)?.to_bytes();
        let at = Instant::now();
        connection.abort();
        self.secrets.got(&head.headers, &body);
        Ok(Answer { status: head.status.as_u16(), headers: head.headers, body, at })
    }
}

/// A whole answer.
#[derive(Clone)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// When all of it was there.
    pub(crate) at: Instant,
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?} {}", self.status, self.headers, self.text())
    }
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("no JSON, {error}: {self:?}"))
    }

    /// A header that is there once, or the empty string.
    #[track_caller]
    pub(crate) fn header(&self, name: &str) -> &str {
        let mut values = self.headers.get_all(name).iter();
        let value = values.next().map_or("", |value| value.to_str().expect("plain text"));
        assert!(values.next().is_none(), "{name} is there more than once: {self:?}");
        value
    }

    /// The body of an error: the right media type, exactly the fields that belong to its code, the request id of the
    /// header. The schema's types were checked against the document when the answer came in.
    #[track_caller]
    pub(crate) fn problem(&self, status: u16, code: &str) -> Value {
        assert_eq!((self.status, self.header("content-type")), (status, "application/problem+json"), "{self:?}");
        let problem = self.json();
        assert_eq!(problem["code"], code, "{self:?}");
        assert_eq!(problem["type"], format!("urn:redlock:problem:{code}"));
        assert_eq!(problem["status"], status);
        assert_eq!(problem["request_id"], self.header("x-request-id"), "{self:?}");
        openapi::assert_schema("Problem", &problem);

        let (required, optional): (&[&str], &[&str]) = match code {
            "lock_held" | "not_holder" => (&["retry_after_ms"], &["holder", "expires_in_ms"]),
            "quorum_unavailable" | "outcome_unknown" => (&["retry_after_ms", "nodes"], &[]),
            "draining" | "overloaded" | "too_many_waiters" | "rate_limited" => (&["retry_after_ms"], &[]),
            _ => (&[], &[]),
        };
        let always = ["type", "title", "status", "code", "detail", "request_id"];
        let fields: Vec<&str> = problem.as_object().expect("an object").keys().map(String::as_str).collect();
        for field in always.iter().chain(required) {
            assert!(fields.contains(field), "{field} is missing: {problem:#}");
        }
        for field in fields {
            let known = [always.as_slice(), required, optional].iter().any(|list| list.contains(&field));
            assert!(known, "{field} does not belong to {code}: {problem:#}");
        }
        assert_eq!(problem.get("retry_after_ms").is_some(), !self.header("retry-after").is_empty(), "{self:?}");
        problem
    }
}

/// What a client keeps of a lock it got.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Lease {
    pub(crate) token: String,
    pub(crate) fencing: u64,
}

impl Lease {
    #[track_caller]
    pub(crate) fn from(answer: &Answer) -> Self {
        assert_eq!(answer.status, 201, "{answer:?}");
        let body = answer.json();
        Self {
            token: body["token"].as_str().expect("a string").to_owned(),
            fencing: body["fencing_token"].as_u64().expect("a number"),
        }
    }

    /// The secret part of the token.
    pub(crate) fn owner(&self) -> &str {
        self.token.rsplit('.').next().expect("a token has dots")
    }
}

/// A connection for bytes.
pub(crate) struct Raw {
    stream: TcpStream,
    /// What came after the last answer.
    unread: Vec<u8>,
    secrets: Arc<Secrets>,
}

impl Raw {
    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.try_write(bytes).await.expect("the gateway reads");
    }

    pub(crate) async fn try_write(&mut self, bytes: impl AsRef<[u8]>) -> std::io::Result<()> {
        self.secrets.written(bytes.as_ref());
        timeout(PATIENCE, self.stream.write_all(bytes.as_ref())).await.expect("the gateway reads or closes")
    }

    /// Nothing more will be written.
    pub(crate) async fn ends_writing(&mut self) {
        let _ = self.stream.shutdown().await;
    }

    /// The head of a POST for a lock with a body of so many bytes, of which none is sent.
    pub(crate) async fn announce(&mut self, method: &str, name: &str, headers: &str, length: usize) {
        let path = lock_path(name);
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\n{headers}\r\n"
        );
        self.write(head).await;
    }

    /// Waits for "100 Continue", which the gateway says when it begins to read the body.
    pub(crate) async fn told_to_continue(&mut self) {
        while !self.unread.ends_with(b"\r\n\r\n") {
            assert!(self.more().await, "the connection was closed");
        }
        let text = String::from_utf8_lossy(&std::mem::take(&mut self.unread)).into_owned();
        assert!(text.starts_with("HTTP/1.1 100 "), "{text}");
    }

    /// The next answer; its length must be given or it must be a 204, or it lasts until the connection is closed.
    pub(crate) async fn answer(&mut self) -> Answer {
        match self.try_answer(false).await {
            Some(answer) => answer,
            None => panic!("the connection was closed within {:?}", String::from_utf8_lossy(&self.unread)),
        }
    }

    /// The same; `None` when the connection was closed before the whole answer was there. The answer to a HEAD has a length
    /// and no body.
    pub(crate) async fn try_answer(&mut self, to_head: bool) -> Option<Answer> {
        let head_end = loop {
            if let Some(at) = self.unread.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            if !self.more().await {
                return None;
            }
        };
        let head = String::from_utf8_lossy(&self.unread[..head_end - 4]).into_owned();
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).and_then(|code| code.parse().ok());
        let status = status.expect("a status line");
        let headers: HeaderMap = lines
            .map(|line| {
                let (name, value) = line.split_once(": ").expect("a header");
                (name.parse::<HeaderName>().expect("a name"), value.parse::<HeaderValue>().expect("a value"))
            })
            .collect();
        let length = headers.get("content-length").map(|value| value.to_str().unwrap().parse().unwrap());
        let length = if to_head || status == 204 { Some(0) } else { length };
        while length.is_none_or(|length: usize| self.unread.len() < head_end + length) {
            if !self.more().await {
                if length.is_some() {
                    return None;
                }
                break;
            }
        }
        let end = length.map_or(self.unread.len(), |length| head_end + length);
        let body = Bytes::copy_from_slice(&self.unread[head_end..end]);
        self.unread.drain(..end);
        self.secrets.got(&headers, &body);
        Some(Answer { status, headers, body, at: Instant::now() })
    }

    async fn more(&mut self) -> bool {
        let got = timeout(PATIENCE, self.stream.read_buf(&mut self.unread)).await;
        got.expect("the gateway answers or closes").is_ok_and(|got| got > 0)
    }

    /// Waits until the other side closes the connection; whatever came before is returned.
    pub(crate) async fn closed(&mut self) -> String {
        while self.more().await {}
        String::from_utf8_lossy(&std::mem::take(&mut self.unread)).into_owned()
    }
}

/// How long something took, held against a limit that is far from both outcomes.
pub(crate) const WELL_BELOW_A_TIMEOUT: Duration = Duration::from_secs(1);

/// The servers that store the lock now; those for which `reachable` is false are not asked.
pub(crate) fn stored_on(servers: &[RedisServer], name: &str, reachable: impl Fn(usize) -> bool) -> Vec<usize> {
    let key = format!("lock:{name}");
    let stored = |at: &usize| reachable(*at) && servers[*at].cmd(&["GET", &key]) != Resp::Nil;
    (0..servers.len()).filter(stored).collect()
}

/// Waits until no server stores the lock and every one has a newer fence for it than `before`: what is still in some socket
/// can change nothing any more, because such a fence is only there when the acquire or its release has run. A try that
/// failed takes its fence back where the lock was never used before: see [`Gateway::used_before`].
pub(crate) async fn clean_for_good(servers: &[RedisServer], name: &str, before: u64) {
    let fence = format!("{{lock:{name}}}:fence");
    eventually("no master stores the lock, and all have its fence", async || {
        let newer = |server: &RedisServer| match server.cmd(&["GET", &fence]) {
            Resp::Nil => false,
            fence => fence.text()[..16].parse::<u64>().expect("digits") > before,
        };
        let fenced = servers.iter().all(newer);
        (fenced && stored_on(servers, name, |_| true).is_empty()).then_some(())
    })
    .await;
}
