//! Masters with TLS, that is, with `rediss://` URLs. They are trusted by the system's certificates,
//! by SSL_CERT_FILE or by --node-ca. Some require a client certificate.

use serde_json::json;

use crate::support::certificates::{Authority, Issued};
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
    let launch = || Launch::embedded().nodes(std::slice::from_ref(&url)).brand_new();
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
    let copy = |from: &str, to: &str| {
        let next = format!("{to}.next");
        std::fs::copy(from, &next).expect("a copy");
        std::fs::rename(next, to).expect("the same folder");
    };
    let [live, good] = ["live", "good"].map(|name| ours.issue(name, "/CN=gateway"));
    let other = theirs.issue("other", "/CN=gateway");
    let trusting = || {
        Launch::embedded()
            .nodes(std::slice::from_ref(&url))
            .brand_new()
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
    copy(&other.cert, &live.cert);
    copy(&other.key, &live.key);
    // Connections that are open stay open.
    gateway.acquire("other").await;
    server.cmd(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    refused_for(&gateway, "UnknownCA", "--node-cert").await;
    copy(&good.key, &live.key);
    refused_for(&gateway, "does not belong", "").await;
    copy(&good.cert, &live.cert);
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
