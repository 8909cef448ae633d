//! Masters with TLS, that is, with `rediss://` URLs. They are trusted by the system's certificates,
//! by SSL_CERT_FILE or by --node-ca. Some require a client certificate. Their certificates are
//! renewed under load.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use serde_json::json;
use tokio::task::JoinHandle;

use crate::operations::reconfigure::use_once;
use crate::support::certificates::{Authority, Client, Issued, certificate};
use crate::support::gateway::{Gateway, Launch, Scratch};
use crate::support::harness::{RedisOptions, RedisServer, eventually, free_port};
use crate::support::resp::Resp;

/// A server with a TLS port beside its plain one. Returns the server and the URL of its TLS port.
fn master(authority: &Authority, own: &Issued, asks_clients: bool) -> (RedisServer, String) {
    let tls_port = free_port().to_string();
    let asks = if asks_clients { "yes" } else { "no" };
    let ca = authority.ca();
    let args = [
        ("--tls-port", tls_port.as_str()),
        ("--tls-auth-clients", asks),
        ("--tls-cert-file", &own.cert),
        ("--tls-key-file", &own.key),
        ("--tls-ca-cert-file", &ca),
    ];
    let args = args
        .iter()
        .flat_map(|(option, value)| [(*option).to_owned(), (*value).to_owned()])
        .collect();
    let password = Some("a-password".to_owned());
    let server =
        RedisServer::start_with(RedisOptions { args, password, ..RedisOptions::default() });
    (server, format!("rediss://:a-password@localhost:{tls_port}"))
}

/// Renames a copy of a file over another file.
fn replace(from: &str, to: &str) {
    write_over(to, &std::fs::read(from).expect("a file"));
}

fn write_over(path: &str, content: &[u8]) {
    let next = format!("{path}.next");
    std::fs::write(&next, content).expect("the folder can be written");
    std::fs::rename(next, path).expect("the same folder");
}

/// Checks that the only node is refused, for this reason and with this advice.
async fn refused_for(gateway: &Gateway, word: &str, advice: &str) {
    eventually(word, async || {
        let node = gateway.readyz().await.json()["nodes"][0].clone();
        let has = |field: &str, word: &str| node[field].as_str().unwrap_or_default().contains(word);
        (has("detail", word) && has("advice", advice)).then_some(())
    })
    .await;
    gateway.post("job", json!({})).await.problem(503, "quorum_unavailable");
}

async fn works(gateway: &Gateway, server: &RedisServer) {
    gateway.all_nodes_admitted().await;
    let lease = gateway.acquire("job").await;
    assert_ne!(server.cmd(&["GET", "lock:job"]), Resp::Nil);
    assert_eq!(gateway.delete("job", &lease.token).await.status, 204);
}

#[tokio::test]
async fn masters_with_tls_are_used_only_with_a_trusted_authority() {
    let ours = Authority::new();
    let theirs = Authority::new();
    let (server, url) = master(&ours, &ours.issue("redis", "/CN=redis"), false);
    let launch = || {
        let launch = Launch::embedded().nodes(std::slice::from_ref(&url)).brand_new();
        launch.flag("--node-timeout", "6s")
    };
    works(&launch().env("SSL_CERT_FILE", &ours.ca()).start().await, &server).await;
    works(&launch().flag("--node-ca", &ours.ca()).start().await, &server).await;
    let deceived = launch().env("SSL_CERT_FILE", &theirs.ca()).start().await;
    refused_for(&deceived, "certificate", "--node-ca").await;
    // The given authorities replace those of the system; they are not added to them.
    let replaced = launch().env("SSL_CERT_FILE", &ours.ca()).flag("--node-ca", &theirs.ca());
    refused_for(&replaced.start().await, "certificate", "--node-ca").await;
}

#[tokio::test]
async fn a_master_gets_the_client_certificate_now_in_the_file() {
    let ours = Authority::new();
    let theirs = Authority::new();
    let (server, url) = master(&ours, &ours.issue("redis", "/CN=redis"), true);
    let [live, good] = ["live", "good"].map(|name| ours.issue(name, "/CN=gateway"));
    let other = theirs.issue("other", "/CN=gateway");
    let trusting = || {
        Launch::embedded()
            .nodes(std::slice::from_ref(&url))
            .brand_new()
            .flag("--node-timeout", "6s")
            .flag("--node-ca", &ours.ca())
    };
    let launch =
        |own: &Issued| trusting().flag("--node-cert", &own.cert).flag("--node-key", &own.key);

    refused_for(
        &trusting().start().await,
        "CertificateRequired",
        "give --node-cert and --node-key",
    )
    .await;
    refused_for(&launch(&other).start().await, "UnknownCA", "--node-cert").await;
    let gateway = launch(&live).start().await;
    works(&gateway, &server).await;
    let check = async |own: &Issued, words: &[&str]| {
        let args = [
            "check",
            "--node",
            &url,
            "--node-timeout",
            "6s",
            "--node-ca",
            &ours.ca(),
            "--node-cert",
            &own.cert,
            "--node-key",
            &own.key,
        ];
        let checked = Launch::bare(&args).finish().await;
        assert!(words.iter().all(|word| checked.stdout.contains(word)), "{checked:?}");
    };
    check(&good, &["marker ours", "1 of 1"]).await;
    check(&other, &["UNREACHABLE"]).await;

    // Only the files change. They now have a certificate that the master refuses. As soon as the
    // connection breaks, the previous certificate no longer helps.
    replace(&other.cert, &live.cert);
    replace(&other.key, &live.key);
    // Connections that are open stay open.
    gateway.acquire("other").await;
    server.cmd(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    refused_for(&gateway, "UnknownCA", "--node-cert").await;
    replace(&good.key, &live.key);
    refused_for(&gateway, "does not belong", "").await;
    replace(&good.cert, &live.cert);
    works(&gateway, &server).await;
}

/// Flags and their values.
type Flags<'a> = &'a [(&'a str, &'a str)];

#[tokio::test]
async fn unusable_tls_settings_for_masters_are_named() {
    let authority = Authority::new();
    let [one, other] = ["one", "other"].map(|name| authority.issue(name, "/CN=gateway"));
    let text = Scratch::new("text.pem", "no PEM");
    let ca = authority.ca();
    let cases: [(&str, Flags, &[&str]); 7] = [
        ("redis", &[("--node-ca", &ca)], &["--node-ca", "rediss://"]),
        (
            "redis",
            &[("--node-cert", &one.cert), ("--node-key", &one.key)],
            &["--node-cert", "rediss://"],
        ),
        ("rediss", &[("--node-cert", &one.cert)], &["--node-cert", &one.cert, "--node-key"]),
        ("rediss", &[("--node-key", &one.key)], &["--node-key", &one.key, "--node-cert"]),
        (
            "rediss",
            &[("--node-cert", &one.cert), ("--node-key", &other.key)],
            &["--node-key", &other.key, "does not belong", &one.cert],
        ),
        ("rediss", &[("--node-ca", text.path())], &["--node-ca", text.path(), "no certificate"]),
        ("rediss", &[("--node-ca", "/nowhere")], &["--node-ca: /nowhere", "No such file"]),
    ];
    for (scheme, flags, words) in cases {
        for command in ["serve", "check", "reconfigure"] {
            let node = format!("{scheme}://127.0.0.1:1");
            let launch = Launch::bare(&[command, "--node", &node]);
            let refused = flags
                .iter()
                .fold(launch, |launch, (flag, value)| launch.flag(flag, value))
                .finish()
                .await;
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
        }
    }
    let embedded = Launch::bare(&["--node-ca", &ca]).finish().await;
    assert!(embedded.code == Some(2) && embedded.stderr.contains("rediss://"), "{embedded:?}");
}

const CLIENTS: usize = 4;
/// Each client makes at least this many requests between two steps. So each client has acquired its
/// lock again since the last step. A lock that was granted while one of the three masters had no
/// connection is on two masters only. It must not be held when the next master loses its connection.
const REQUESTS_EACH: u32 = 15;

/// Three masters with certificates that can be renewed, and a gateway under load.
struct Renewal {
    masters: Vec<Renewed>,
    trusted: Scratch,
    gateway: Arc<Gateway>,
    is_over: Arc<AtomicBool>,
    done: Arc<[AtomicU32; CLIENTS]>,
    clients: Vec<JoinHandle<()>>,
}

struct Renewed {
    server: RedisServer,
    port: u16,
    own: Issued,
}

impl Renewed {
    fn start(authority: &Authority, name: &str) -> (Self, String) {
        let own = authority.issue(name, "/CN=redis");
        let (server, url) = master(authority, &own, false);
        let port = url.rsplit(':').next().and_then(|port| port.parse().ok());
        (Self { server, port: port.expect("the URL ends in the port"), own }, url)
    }

    /// Replaces certificate and key, and makes the server read them again.
    fn renew(&self, new: &Issued) {
        replace(&new.key, &self.own.key);
        replace(&new.cert, &self.own.cert);
        let Issued { cert, key } = &self.own;
        self.server.cmd(&["CONFIG", "SET", "tls-cert-file", cert, "tls-key-file", key]);
    }

    /// Checks that a new connection gets this certificate.
    async fn serves(&self, authority: &Authority, own: &Issued) {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        let stream = Client::trusting(authority).connect(address).await.expect("it is trusted");
        let shown = stream.get_ref().1.peer_certificates().expect("servers have one");
        assert_eq!(shown[0], certificate(&own.cert));
    }

    /// The numbers of the gateway's connections that are at least this old.
    fn connections(&self, seconds: u32) -> BTreeSet<String> {
        let list = self.server.cmd(&["CLIENT", "LIST"]).text();
        let to_us = format!(" laddr=127.0.0.1:{} ", self.port);
        let is_old = |line: &&str| {
            let age = line.split(' ').find_map(|word| word.strip_prefix("age="));
            age.is_some_and(|age| age.parse::<u32>().expect("a number") >= seconds)
        };
        let ours = list.lines().filter(|line| line.contains(&to_us)).filter(is_old);
        ours.filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
    }

    /// The connections that the gateway keeps. Others look for the process behind the name, and
    /// soon end.
    async fn kept_connections(&self) -> BTreeSet<String> {
        eventually("the gateway keeps a connection for requests and one for hints", async || {
            let list = self.server.cmd(&["CLIENT", "LIST", "TYPE", "pubsub"]).text();
            let hints = list.lines().filter_map(|line| line.split(' ').next());
            let kept = self.connections(2);
            let has_hints = hints.into_iter().any(|id| kept.contains(id));
            (has_hints && kept.len() >= 2).then_some(kept)
        })
        .await
    }

    /// Ends the gateway's connections. Returns when the gateway has connected again, and has set
    /// the locks on the master that were granted without it.
    async fn reconnected(&self, gateway: &Gateway) {
        let before = self.kept_connections().await;
        for kind in ["normal", "pubsub"] {
            self.server.cmd(&["CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"]);
        }
        eventually("the gateway connects again", async || {
            let now = self.connections(0);
            (now.len() >= before.len() && now.is_disjoint(&before)).then_some(())
        })
        .await;
        gateway.all_nodes_caught_up().await;
    }
}

impl Renewal {
    async fn start(authority: &Authority) -> Self {
        let started = ["one", "two", "three"].map(|name| Renewed::start(authority, name));
        let (masters, urls): (Vec<_>, Vec<_>) = started.into_iter().unzip();
        let trusted = Scratch::new("trusted.pem", "");
        replace(&authority.ca(), trusted.path());
        let launch = Launch::embedded().nodes(&urls).brand_new().flag("--node-timeout", "6s");
        let gateway = Arc::new(launch.flag("--node-ca", trusted.path()).ready().await);
        let is_over = Arc::new(AtomicBool::new(false));
        let done: Arc<[AtomicU32; CLIENTS]> = Arc::default();
        let client = |number: usize| {
            let (gateway, is_over, done) = (gateway.clone(), is_over.clone(), done.clone());
            tokio::spawn(async move {
                let name = format!("client-{number}");
                while !is_over.load(Ordering::Acquire) {
                    use_once(&gateway, &name, 300_000).await.expect("a success");
                    done[number].fetch_add(3, Ordering::Relaxed);
                }
            })
        };
        let clients = (0..CLIENTS).map(client).collect();
        let this = Self { masters, trusted, gateway, is_over, done, clients };
        this.goes_on().await;
        this
    }

    /// How many requests of each client have succeeded.
    fn done(&self) -> [u32; CLIENTS] {
        std::array::from_fn(|client| self.done[client].load(Ordering::Relaxed))
    }

    /// Waits until further requests of each client have succeeded, or until one has failed.
    async fn goes_on(&self) {
        let wanted = self.done().map(|done| done + REQUESTS_EACH);
        eventually("requests are served", async || {
            let has_failed = self.clients.iter().any(JoinHandle::is_finished);
            let is_enough = self.done().iter().zip(wanted).all(|(done, wanted)| *done >= wanted);
            (has_failed || is_enough).then_some(())
        })
        .await;
    }

    /// Ends the load. No request may have failed.
    async fn ends(self) {
        self.is_over.store(true, Ordering::Release);
        let done = self.done();
        for client in self.clients {
            client.await.expect("no request failed");
        }
        println!("0 failed of {}", done.iter().sum::<u32>());
    }
}

#[tokio::test]
async fn certificates_of_masters_are_renewed_under_load() {
    let authority = Authority::new();
    let renewal = Renewal::start(&authority).await;
    let held = renewal.gateway.acquire_for("held", 300_000).await;
    for (number, master) in renewal.masters.iter().enumerate() {
        let kept = master.kept_connections().await;
        let new = authority.issue(&format!("new-{number}"), "/CN=redis");
        master.renew(&new);
        master.serves(&authority, &new).await;
        renewal.goes_on().await;
        // A connection that only catching up used may close itself meanwhile.
        let still = kept.intersection(&master.connections(0)).count();
        assert!(still >= 2, "{still} of {} connections are left", kept.len());
    }
    // A certificate without its key is refused, and the old one stays.
    let [master, ..] = renewal.masters.as_slice() else { panic!("three masters") };
    let other = authority.issue("other", "/CN=redis");
    let set = ["CONFIG", "SET", "tls-cert-file", &other.cert, "tls-key-file", &master.own.key];
    assert!(master.server.answer(&set).is_err_and(|error| error.contains("TLS")));
    master.serves(&authority, &master.own).await;
    assert_eq!(renewal.gateway.patch("held", &held.token, 300_000).await.status, 200);
    renewal.ends().await;
}

#[tokio::test]
async fn masters_move_to_a_new_authority_under_load() {
    let old = Authority::new();
    let new = Authority::new();
    let renewal = Renewal::start(&old).await;
    let held = renewal.gateway.acquire_for("held", 300_000).await;
    let pem = |authority: &Authority| std::fs::read(authority.ca()).expect("a file");
    write_over(renewal.trusted.path(), &[pem(&old), pem(&new)].concat());
    // The gateway accepts the old certificate and the new one.
    renewal.masters[0].reconnected(&renewal.gateway).await;
    for (number, master) in renewal.masters.iter().enumerate() {
        let issued = new.issue(&format!("new-{number}"), "/CN=redis");
        master.renew(&issued);
        master.serves(&new, &issued).await;
        renewal.goes_on().await;
    }
    renewal.masters[0].reconnected(&renewal.gateway).await;
    renewal.goes_on().await;
    write_over(renewal.trusted.path(), &pem(&new));
    for master in &renewal.masters[1..] {
        master.reconnected(&renewal.gateway).await;
        renewal.goes_on().await;
    }
    assert_eq!(renewal.gateway.patch("held", &held.token, 300_000).await.status, 200);
    renewal.ends().await;
}
