//! Masters behind TLS: `rediss://` URLs, trusted by the certificates that the system, or SSL_CERT_FILE, names.

use std::process::Command;

use serde_json::json;

use crate::gateway::Launch;
use crate::harness::{RedisOptions, RedisServer, Resp, TempDir, eventually, free_port};

/// An authority, and a certificate of it for localhost.
struct Certificates {
    folder: TempDir,
}

impl Certificates {
    fn new() -> Self {
        let made = Self { folder: TempDir::new() };
        std::fs::write(made.path("names"), "subjectAltName=DNS:localhost\n").expect("the folder can be written");
        made.openssl("req -x509 -days 2 -newkey rsa:2048 -nodes -subj /CN=authority -keyout ca.key -out ca.pem");
        made.openssl("req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout key -out csr");
        made.openssl("x509 -req -days 2 -in csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile names -out cert");
        made
    }

    fn openssl(&self, args: &str) {
        let done = Command::new("openssl").args(args.split(' ')).current_dir(self.folder.path()).output();
        let done = done.expect("openssl starts");
        assert!(done.status.success(), "openssl {args}: {}", String::from_utf8_lossy(&done.stderr));
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().expect("a plain path").to_owned()
    }
}

#[tokio::test]
async fn masters_behind_tls_are_used_when_their_authority_is_trusted_and_refused_when_it_is_not() {
    let (ours, theirs) = (Certificates::new(), Certificates::new());
    let tls_port = free_port().to_string();
    let mut args = vec!["--tls-port".to_owned(), tls_port.clone(), "--tls-auth-clients".into(), "no".into()];
    for (option, file) in [("--tls-cert-file", "cert"), ("--tls-key-file", "key"), ("--tls-ca-cert-file", "ca.pem")] {
        args.extend([option.to_owned(), ours.path(file)]);
    }
    let password = Some("a-password".to_owned());
    let server = RedisServer::start_with(RedisOptions { args, password, ..RedisOptions::default() });
    let url = format!("rediss://:a-password@localhost:{tls_port}");
    let launch = |trusted: &Certificates| {
        let launch = Launch::embedded().nodes(std::slice::from_ref(&url)).brand_new();
        launch.env("SSL_CERT_FILE", &trusted.path("ca.pem"))
    };

    let gateway = launch(&ours).ready().await;
    let lease = gateway.acquire("job").await;
    assert_ne!(server.cmd(&["GET", "lock:job"]), Resp::Nil);
    assert_eq!(gateway.delete("job", &lease.token).await.status, 204);

    let deceived = launch(&theirs).start().await;
    eventually("the certificate is refused", async || {
        let health = deceived.readyz().await.json();
        let why = health["nodes"][0]["detail"].as_str().unwrap_or_default().to_lowercase();
        why.contains("certificate").then_some(())
    })
    .await;
    deceived.post("job", json!({})).await.problem(503, "quorum_unavailable");
}
