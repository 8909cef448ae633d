//! HTTPS: which servers and clients are trusted, how certificates are replaced under load, and
//! clients that do not finish their handshake.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::symlink;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::support::certificates::{Authority, Client, Issued, Open, certificate};
use crate::support::gateway::{Gateway, Launch, Scratch};
use crate::support::harness::{PATIENCE, TempDir, eventually};
use crate::support::measure::measured;
use crate::support::waiters::{HOUR_MS, patient};

fn https(own: &Issued) -> Launch {
    Launch::embedded()
        .flag("--tls-cert", &own.cert)
        .flag("--tls-key", &own.key)
        .env("RUST_LOG", "debug")
}

/// The log lines that have this message.
fn logged(gateway: &Gateway, message: &str) -> Vec<Value> {
    let lines = gateway.stdout();
    let lines = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines
        .filter(|line| line["message"].as_str().is_some_and(|entry| entry.contains(message)))
        .collect()
}

/// The log line about a handshake that failed.
const FAILED: &str = "handshake failed";
/// The reason in this line if the handshake took longer than its time limit.
const TOO_LATE: &str = "timed out";
const TAKEN: &str = "new connections get the certificate";
const NOT_TAKEN: &str = "the previous certificate stays";

/// An address that leads to the gateway for one connection. What the client sends first is passed
/// on at once. What it sends then is passed on together, when it is at least `bytes`.
async fn gathering(gateway: &Gateway, bytes: usize) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    let gateway = gateway.address();
    tokio::spawn(async move {
        let (client, _) = listener.accept().await?;
        let gateway = TcpStream::connect(gateway).await?;
        let (mut from_client, mut to_client) = client.into_split();
        let (mut from_gateway, mut to_gateway) = gateway.into_split();
        tokio::spawn(async move { tokio::io::copy(&mut from_gateway, &mut to_client).await });
        let mut greeting = [0; 4096];
        let read = from_client.read(&mut greeting).await?;
        to_gateway.write_all(&greeting[..read]).await?;
        let mut gathered = Vec::new();
        while gathered.len() < bytes && from_client.read_buf(&mut gathered).await? > 0 {}
        to_gateway.write_all(&gathered).await?;
        tokio::io::copy(&mut from_client, &mut to_gateway).await
    });
    address
}

#[tokio::test]
async fn a_large_request_may_come_with_the_end_of_the_handshake() {
    let authority = Authority::new();
    let gateway = https(&authority.issue("server", "/CN=gateway")).start().await;
    let token = format!("1.{}.{}", 10_u64.pow(15), "1".repeat(40));
    let lease = |number: usize| json!({ "name": format!("job-{number}"), "token": token });
    let leases: Vec<_> = (0..1_000).map(lease).collect();
    let body = json!({ "leases": leases, "ttl_ms": 60_000 }).to_string();
    let head = format!(
        "PATCH /locks HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    for _ in 0..5 {
        let stream = TcpStream::connect(gathering(&gateway, body.len()).await).await;
        let client = Client::trusting(&authority);
        let mut stream = client.over(stream.expect("it listens")).await.expect("a handshake");
        stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).await.expect("sent");
        stream.flush().await.expect("sent");
        let mut answer = String::new();
        let read = timeout(PATIENCE, stream.read_to_string(&mut answer)).await.expect("in time");
        assert!(answer.starts_with("HTTP/1.1 200"), "{read:?}: {answer}");
    }
}

#[tokio::test]
async fn locks_are_served_over_https_to_trusting_clients() {
    let ours = Authority::new();
    let theirs = Authority::new();
    let (gateway, banner) = https(&ours.issue("server", "/CN=gateway")).start_with_banner().await;
    assert!(banner.contains(&format!("on https://{}", gateway.address())), "{banner}");
    let command =
        banner.lines().find_map(|line| line.trim().strip_prefix("try:")).expect("a command to try");
    let command = command.split("   ").next().unwrap().trim();
    let curl = async |authority: &Authority| {
        let command = command.replace("AUTHORITY.pem", &authority.ca());
        let tried = tokio::process::Command::new("bash")
            .args(["-c", &command])
            .output()
            .await
            .expect("bash starts");
        (tried.status.code(), String::from_utf8_lossy(&tried.stdout).into_owned())
    };
    let (code, shown) = curl(&ours).await;
    assert!(
        code == Some(0) && shown.starts_with("HTTP/2 201"),
        "{command} gives {code:?}\n{shown}"
    );
    assert_eq!(
        curl(&theirs).await,
        (Some(60), String::new()),
        "60: the certificate cannot be verified"
    );

    let mut open = Client::trusting(&ours).open(gateway.address()).await.unwrap();
    let (status, _) = open.post("/locks/job", &json!({ "ttl_ms": 60_000 })).await.unwrap();
    assert_eq!(status, 201);
    assert_eq!(open.get("/locks/job").await, Ok(200), "the same connection serves another request");
    let refused = Client::trusting(&theirs).get(gateway.address(), "/livez").await.unwrap_err();
    assert!(refused.contains("certificate"), "{refused}");

    let mut plain = gateway.raw().await;
    plain.write("GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert!(!plain.closed().await.contains("HTTP/1.1"), "nothing is served in the clear");
}

/// Flags and their values.
type Flags<'a> = &'a [(&'a str, &'a str)];

#[tokio::test]
async fn unusable_tls_files_are_named_before_anything_is_bound() {
    let authority = Authority::new();
    let [one, other] = ["one", "other"].map(|name| authority.issue(name, "/CN=gateway"));
    let text = Scratch::new("text.pem", "no PEM");
    let keys = Scratch::new("keys.toml", "");
    let client_ca = ("--tls-client-ca", text.path());
    // This address is taken, so binding it would fail. The error in the flags must be reported
    // before that.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let taken = taken.local_addr().expect("bound").to_string();
    let cases: [(Flags, &[&str]); 10] = [
        (&[("--tls-cert", &one.cert)], &["--tls-cert", &one.cert, "--tls-key"]),
        (&[("--tls-key", &one.key)], &["--tls-key", &one.key, "--tls-cert"]),
        (&[("--tls-client-ca", &one.cert)], &["--tls-client-ca", &one.cert, "--tls-cert", "HTTPS"]),
        (
            &[("--tls-cert", &one.cert), ("--tls-key", &other.key)],
            &["--tls-key", &other.key, "does not belong", "--tls-cert", &one.cert],
        ),
        (
            &[("--tls-cert", "/nowhere"), ("--tls-key", &one.key)],
            &["--tls-cert: /nowhere", "No such file"],
        ),
        (
            &[("--tls-cert", &one.cert), ("--tls-key", "/nowhere")],
            &["--tls-key: /nowhere", "No such file"],
        ),
        (
            &[("--tls-cert", text.path()), ("--tls-key", &one.key)],
            &["--tls-cert", text.path(), "no certificate"],
        ),
        (
            &[("--tls-cert", &one.cert), ("--tls-key", &one.cert)],
            &["--tls-key", &one.cert, "no private key"],
        ),
        (
            &[("--tls-cert", &one.cert), ("--tls-key", &one.key), client_ca],
            &["--tls-client-ca", text.path(), "without --auth-keys"],
        ),
        (
            &[
                ("--tls-cert", &one.cert),
                ("--tls-key", &one.key),
                client_ca,
                ("--auth-keys", keys.path()),
            ],
            &["--tls-client-ca", text.path(), "no certificate"],
        ),
    ];
    for (flags, words) in cases {
        let launch =
            flags.iter().fold(Launch::bare(&["--listen", &taken]), |launch, (flag, value)| {
                launch.flag(flag, value)
            });
        let refused = launch.finish().await;
        assert_eq!(
            (refused.code, refused.stdout.as_str()),
            (Some(2), ""),
            "{flags:?}: {refused:?}"
        );
        for word in words {
            assert!(
                refused.stderr.contains(word),
                "{flags:?}: {word:?} is not in {:?}",
                refused.stderr
            );
        }
        assert!(!refused.stderr.contains("--listen"), "{flags:?}: {}", refused.stderr);
    }
    let file = format!("listen = '127.0.0.1:0'\ntls_cert = '{}'\n", one.cert);
    let file = Scratch::new("gateway.toml", &file);
    let half = Launch::bare(&["--config", file.path()]).finish().await;
    assert!(half.code == Some(2) && half.stderr.contains("--tls-key"), "{half:?}");
    let gateway =
        Launch::bare(&["--config", file.path()]).env("REDLOCK_TLS_KEY", &one.key).start().await;
    assert_eq!(Client::trusting(&authority).get(gateway.address(), "/livez").await, Ok(200));
}

/// A directory behind a link, as Kubernetes mounts a secret. One rename of the link replaces all
/// files at once.
struct Secret(TempDir);

impl Secret {
    fn new(issued: &Issued) -> Self {
        let made = Self(TempDir::new());
        made.turn_to(issued);
        made
    }

    fn turn_to(&self, issued: &Issued) {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let version =
            self.0.path().join(format!("version-{}", COUNT.fetch_add(1, Ordering::Relaxed)));
        std::fs::create_dir(&version).expect("a fresh directory");
        std::fs::copy(&issued.cert, version.join("tls.crt")).expect("a copy");
        std::fs::copy(&issued.key, version.join("tls.key")).expect("a copy");
        let next = self.0.path().join("next");
        symlink(version, &next).expect("a link");
        std::fs::rename(next, self.0.path().join("now")).expect("the link is turned");
    }

    fn issued(&self) -> Issued {
        let path = |name: &str| {
            self.0.path().join("now").join(name).to_str().expect("a plain path").to_owned()
        };
        Issued { cert: path("tls.crt"), key: path("tls.key") }
    }
}

/// Sends requests without a pause until it is stopped. Returns the number of answers.
async fn asks(
    client: Client,
    gateway: std::net::SocketAddr,
    keeps: bool,
    stop: Arc<AtomicBool>,
) -> Result<u32, String> {
    let mut kept = client.open(gateway).await?;
    let mut count = 0;
    while count == 0 || !stop.load(Ordering::Relaxed) {
        let status = if keeps {
            kept.get("/locks/job").await?
        } else {
            client.get(gateway, "/locks/job").await?
        };
        if status != 200 {
            return Err(format!("status {status} after {count} answers"));
        }
        count += 1;
    }
    Ok(count)
}

#[tokio::test]
async fn a_certificate_is_replaced_without_losing_a_request() {
    let authority = Authority::new();
    let versions: Vec<_> =
        (0..3).map(|n| authority.issue(&format!("v{n}"), "/CN=gateway")).collect();
    let secret = Secret::new(&versions[0]);
    let gateway = https(&secret.issued()).env("RUST_LOG", "info").start().await;
    let client = Client::trusting(&authority);
    let address = gateway.address();
    let stop = Arc::new(AtomicBool::new(false));
    let load: Vec<_> = (0..8)
        .map(|n| tokio::spawn(asks(client.clone(), address, n % 2 == 0, stop.clone())))
        .collect();
    let mut first = client.open(address).await.unwrap();
    assert_eq!(first.shown, certificate(&versions[0].cert));

    for (n, version) in versions.iter().enumerate().skip(1) {
        secret.turn_to(version);
        eventually("new connections see the new certificate", async || {
            (client.open(address).await.unwrap().shown == certificate(&version.cert)).then_some(())
        })
        .await;
        assert_eq!(
            first.get("/locks/job").await,
            Ok(200),
            "an open connection keeps its certificate"
        );
        eventually("the log has the line", async || {
            (logged(&gateway, TAKEN).len() == n).then_some(())
        })
        .await;
    }
    stop.store(true, Ordering::Relaxed);
    for asked in load {
        let answers = asked
            .await
            .expect("no panic")
            .unwrap_or_else(|error| panic!("a request was lost: {error}"));
        assert!(answers > 0);
    }
    assert_eq!(logged(&gateway, NOT_TAKEN).len(), 0);
}

fn replace(path: &str, content: impl AsRef<[u8]>) {
    let next = format!("{path}.next");
    std::fs::write(&next, content).expect("the folder can be written");
    std::fs::rename(next, path).expect("the same folder");
}

#[tokio::test]
async fn an_unusable_certificate_is_skipped_for_the_next_good_one() {
    let authority = Authority::new();
    let [live, old, new] = ["live", "old", "new"].map(|name| authority.issue(name, "/CN=gateway"));
    let copy = |from: &str, to: &str| replace(to, std::fs::read(from).expect("a file"));
    copy(&old.cert, &live.cert);
    copy(&old.key, &live.key);
    let gateway = https(&live).start().await;
    let client = Client::trusting(&authority);
    let shown = async || client.open(gateway.address()).await.unwrap().shown;

    for (n, (content, why)) in [
        (b"no PEM".to_vec(), "no certificate in it"),
        (std::fs::read(&new.cert).unwrap(), "does not belong"),
        (Vec::new(), "no certificate in it"),
    ]
    .into_iter()
    .enumerate()
    {
        replace(&live.cert, content);
        let entry = eventually("the log has the line", async || {
            logged(&gateway, NOT_TAKEN).into_iter().nth(n)
        })
        .await;
        assert!(entry["level"] == "ERROR" && entry.to_string().contains(why), "{entry}");
        assert!(entry.to_string().contains(&live.cert), "{entry}");
        assert_eq!(shown().await, certificate(&old.cert));
    }
    copy(&new.cert, &live.cert);
    copy(&new.key, &live.key);
    eventually("the good certificate is used", async || {
        (shown().await == certificate(&new.cert)).then_some(())
    })
    .await;

    let before = logged(&gateway, TAKEN).len();
    gateway.signal(Signal::HUP);
    eventually("the file is read again", async || {
        (logged(&gateway, TAKEN).len() > before).then_some(())
    })
    .await;
    assert_eq!(client.get(gateway.address(), "/livez").await, Ok(200));
}

#[tokio::test]
async fn a_client_certificate_of_another_authority_is_refused() {
    let servers = Authority::new();
    let clients = Authority::new();
    let others = Authority::new();
    let server = servers.issue("server", "/CN=gateway");
    let trusted = Scratch::new("clients.pem", &std::fs::read_to_string(clients.ca()).unwrap());
    let keys = "[[key]]\nname = 'ci'\ncertificate = 'CN=ci,O=Example'\nallow = [{ verbs = ['inspect'], names = ['*'] }]";
    let keys = Scratch::new("keys.toml", keys);
    let gateway = https(&server)
        .flag("--tls-client-ca", trusted.path())
        .flag("--auth-keys", keys.path())
        .start()
        .await;
    let address = gateway.address();
    assert_eq!(
        Client::trusting(&servers).get(address, "/livez").await,
        Ok(200),
        "no client certificate is required"
    );

    for (name, subject, text) in [
        ("ci", "/CN=ci/O=Example", "CN=ci,O=Example"),
        ("order", r"/C=DE/O=Größe, AG/OU=a\+b/CN=#ci", r"C=DE,O=Größe\, AG,OU=a\+b,CN=\#ci"),
        (
            "mail",
            "/DC=org/UID=7/CN=ci/emailAddress=ci@example.org",
            "DC=org,UID=7,CN=ci,emailAddress=ci@example.org",
        ),
        ("others", "/L=a/ST=b/serialNumber=1/CN=ci+OU=z", "L=a,ST=b,serialNumber=1,OU=z+CN=ci"),
    ] {
        let own = clients.issue(name, subject);
        // A certificate stands for the API key with the same name, and for no other.
        let allowed = if name == "ci" { 200 } else { 401 };
        assert_eq!(
            Client::showing(&servers, &own).get(address, "/locks/job").await,
            Ok(allowed),
            "{text}"
        );
        eventually(text, async || {
            let known = logged(&gateway, "a client has shown its certificate");
            known.last().is_some_and(|line| line["subject"] == text).then_some(())
        })
        .await;
        // This is the command by which the documentation shows the subject of a certificate.
        let command = [
            "x509",
            "-noout",
            "-subject",
            "-nameopt",
            "RFC2253,-dn_rev,-esc_msb",
            "-in",
            &own.cert,
        ];
        let printed =
            std::process::Command::new("openssl").args(command).output().expect("openssl starts");
        assert_eq!(
            String::from_utf8(printed.stdout).unwrap().trim_end(),
            format!("subject={text}")
        );
    }

    let stranger = Client::showing(&servers, &others.issue("ci", "/CN=ci"));
    stranger.get(address, "/livez").await.unwrap_err();
    let failed = eventually("the log has the line", async || logged(&gateway, FAILED).pop()).await;
    assert!(failed.to_string().contains("invalid peer certificate"), "{failed}");

    // A client certificate from an authority that was removed no longer counts, even if its client
    // connected before.
    let known = Client::showing(&servers, &clients.issue("again", "/CN=ci"));
    assert_eq!(known.get(address, "/livez").await, Ok(200));
    replace(trusted.path(), std::fs::read(others.ca()).unwrap());
    eventually("the other authority counts", async || stranger.get(address, "/livez").await.ok())
        .await;
    known.get(address, "/livez").await.unwrap_err();
}

/// What a client with an expiring certificate has begun.
struct Begun {
    /// The connection that holds a lock.
    open: Open,
    token: String,
    /// A request that waits for this lock on another connection.
    waits: JoinHandle<Result<(u16, Bytes), String>>,
}

impl Begun {
    /// Returns `None` if the certificate expired before that.
    async fn with(client: &Client, address: SocketAddr, path: &str) -> Option<Self> {
        let mut open = client.open(address).await.ok()?;
        let mut waits = client.open(address).await.ok()?;
        let (status, body) = open.post(path, &json!({ "ttl_ms": HOUR_MS })).await.ok()?;
        let body: Value = serde_json::from_slice(&body).expect("JSON");
        let token = body["token"].as_str().filter(|_| status == 201)?.to_owned();
        let of_lock = path.to_owned();
        let body = json!({ "wait_ms": HOUR_MS });
        let waits = tokio::spawn(async move { waits.post(&of_lock, &body).await });
        let is_waiting = eventually("the request waits, or is refused", async || {
            let request = http::Request::get(path).header("host", "localhost");
            let request = request.body(Default::default()).expect("a request");
            let Ok((200, body)) = open.send(request).await else { return Some(false) };
            let body: Value = serde_json::from_slice(&body).expect("JSON");
            (body["waiters_total"] == 1).then_some(true)
        });
        is_waiting.await.then_some(Self { open, token, waits })
    }
}

#[tokio::test]
async fn an_expired_certificate_ends_access_on_an_open_connection() {
    let authority = Authority::new();
    let server = authority.issue("server", "/CN=gateway");
    let keys = "[[key]]\nname = 'ci'\ncertificate = 'CN=ci'\nallow = [{ verbs = ['acquire', 'inspect', 'release'], names = ['*'] }]";
    let keys = Scratch::new("keys.toml", keys);
    let launch = patient(https(&server)).flag("--tls-client-ca", &authority.ca());
    let gateway = launch.flag("--auth-keys", keys.path()).start().await;
    let lasting = Client::showing(&authority, &authority.issue("lasting", "/CN=ci"));
    // On a busy machine, the certificate may expire too early. Then the next one lives longer.
    let mut seconds = 4;
    let (path, begun) = loop {
        let path = format!("/locks/job-{seconds}");
        let before = Instant::now();
        let expiring = authority.issue_for("ci", "/CN=ci", seconds);
        let client = Client::showing(&authority, &expiring);
        if let Some(begun) = Begun::with(&client, gateway.address(), &path).await {
            break (path, begun);
        }
        // The end of a certificate is rounded to a second.
        assert!(before.elapsed() >= Duration::from_secs(seconds - 1), "it has not expired");
        seconds *= 2;
    };
    let Begun { mut open, token, waits } = begun;
    let answer = eventually("the certificate has expired", async || {
        let request = http::Request::get(&path).header("host", "localhost");
        let (status, body) = open.send(request.body(Default::default()).unwrap()).await.unwrap();
        (status != 200).then_some((status, String::from_utf8(body.to_vec()).unwrap()))
    })
    .await;
    assert!(answer.0 == 401 && answer.1.contains("certificate has expired"), "{answer:?}");
    assert_eq!(open.post("/locks/other", &json!({})).await.unwrap().0, 401);
    // The waiter would get this lock now.
    let mut lasting = lasting.open(gateway.address()).await.unwrap();
    let release = http::Request::delete(&path).header("host", "localhost");
    let release = release.header("lock-token", token).body(Default::default()).unwrap();
    assert_eq!(lasting.send(release).await.unwrap().0, 204);
    assert_eq!(waits.await.unwrap().unwrap().0, 401);
}

#[tokio::test]
async fn a_tls_client_that_hangs_up_after_a_stray_byte_is_noticed() {
    let authority = Authority::new();
    let gateway = patient(https(&authority.issue("server", "/CN=gateway"))).start().await;
    let client = Client::trusting(&authority);
    let mut open = client.open(gateway.address()).await.unwrap();
    assert_eq!(open.post("/locks/job", &json!({ "ttl_ms": HOUR_MS })).await.unwrap().0, 201);
    let mut waiters_are = async |count: &str| {
        eventually("the waiters are counted", async || {
            let request = http::Request::get("/metrics")
                .header("host", "localhost")
                .body(Default::default())
                .unwrap();
            let (_, metrics) = open.send(request).await.unwrap();
            let metrics = String::from_utf8_lossy(&metrics).into_owned();
            metrics.lines().any(|line| line == format!("redlock_waiters {count}")).then_some(())
        })
        .await;
    };
    let body = json!({ "ttl_ms": HOUR_MS, "wait_ms": HOUR_MS }).to_string();
    let head = format!(
        "POST /locks/job HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    for polite in [true, false] {
        let mut waits = client.connect(gateway.address()).await.unwrap();
        waits.write_all(format!("{head}{body}\n").as_bytes()).await.unwrap();
        waits.flush().await.unwrap();
        waiters_are("1").await;
        if polite {
            waits.shutdown().await.unwrap();
        }
        drop(waits);
        waiters_are("0").await;
    }
}

#[tokio::test]
async fn an_endless_tls_greeting_is_not_buffered() {
    let authority = Authority::new();
    let gateway = https(&authority.issue("server", "/CN=gateway")).start().await;
    let mut endless = gateway.raw().await;
    // The client announces a message of 60,000 bytes, and sends it in records of 4,096.
    endless.write([22, 3, 1, 16, 0, 1, 0, 0xea, 0x60]).await;
    let record = [[22, 3, 1, 16, 0].as_slice(), &[0; 4096]].concat();
    let _ = endless.try_write([0; 4092]).await;
    for _ in 0..10 {
        let _ = endless.try_write(&record).await;
    }
    endless.closed().await;
    // The reason is the number of bytes, and not the time limit of the handshake.
    let failed = eventually("the log has the line", async || logged(&gateway, FAILED).pop()).await;
    assert!(!failed.to_string().contains(TOO_LATE), "{failed}");
    assert_eq!(Client::trusting(&authority).get(gateway.address(), "/livez").await, Ok(200));
}

/// Ends a gateway that has an idle connection and one with an incomplete handshake. Returns how
/// long that took.
async fn shut_down(mut gateway: Gateway, authority: &Authority) -> Duration {
    let mut idle = Client::trusting(authority).connect(gateway.address()).await.unwrap();
    let mut silent = TcpStream::connect(gateway.address()).await.unwrap();
    idle.write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    let mut answer = [0; 12];
    idle.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
    let since = Instant::now();
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.ended().await, Some(0));
    let took = since.elapsed();
    // The gateway did not wait for the time limit of the handshake.
    let late = logged(&gateway, FAILED);
    assert!(!late.iter().any(|line| line.to_string().contains(TOO_LATE)), "{late:?}");
    let mut rest = Vec::new();
    timeout(PATIENCE, idle.read_to_end(&mut rest))
        .await
        .expect("the connection is closed")
        .expect("the connection is closed cleanly");
    assert!(
        timeout(PATIENCE, silent.read(&mut answer))
            .await
            .expect("the connection is closed")
            .is_ok_and(|got| got == 0)
    );
    took
}

#[tokio::test]
async fn handshakes_and_idle_connections_do_not_delay_shutdown() {
    let authority = Authority::new();
    let launch = https(&authority.issue("server", "/CN=gateway"));
    // With these limits, the test would time out if the gateway waited for the idle connection.
    let launch = launch.flag("--shutdown-grace", "1h").flag("--idle-timeout", "1h");
    shut_down(launch.start().await, &authority).await;
}

mod measured {
    use super::*;

    #[tokio::test]
    async fn a_silent_handshake_keeps_its_slot_for_at_most_10_s() {
        let authority = Authority::new();
        let gateway = https(&authority.issue("server", "/CN=gateway"))
            .flag("--max-connections", "3")
            .start()
            .await;
        let client = Client::trusting(&authority);
        measured("the time limit of handshakes", async || {
            let since = Instant::now();
            let mut silent = Vec::new();
            for _ in 0..3 {
                silent.push(gateway.raw().await);
            }
            // A client that has sent half of its first message is treated like one that has sent
            // nothing.
            silent[0].write([22, 3, 1, 2, 0, 1]).await;
            assert_eq!(
                client.get(gateway.address(), "/livez").await,
                Ok(200),
                "there is a slot for a client that sends"
            );
            for one in &mut silent {
                one.closed().await;
            }
            let took = since.elapsed();
            assert!(took > Duration::from_secs(9), "{took:?}");
            eventually("the log has the reason", async || {
                let failed = logged(&gateway, FAILED);
                failed.iter().any(|line| line.to_string().contains(TOO_LATE)).then_some(())
            })
            .await;
            if took < Duration::from_secs(14) { Ok(()) } else { Err(format!("{took:?}")) }
        })
        .await;
    }

    #[tokio::test]
    async fn a_shutdown_beside_idle_connections_is_quick() {
        let authority = Authority::new();
        let launch = https(&authority.issue("server", "/CN=gateway"));
        measured("a shutdown beside idle connections", async || {
            let took = shut_down(launch.clone().start().await, &authority).await;
            if took < Duration::from_secs(3) { Ok(()) } else { Err(format!("{took:?}")) }
        })
        .await;
    }
}
