//! What a new user tries first: finding the documentation, names with slashes, and small requests.
//! All of this must also work behind a real proxy.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use http::Method;
use serde_json::json;

use crate::support::client::{Answer, Lease};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::free_port;
use crate::support::proxy::Proxy;

#[tokio::test]
async fn a_name_with_slashes_is_one_lock_raw_and_encoded() {
    let gateway = Launch::embedded().start().await;
    let lease = gateway.acquire("reports/eu/nightly").await;
    let held = gateway.call(Method::POST, "/locks/reports/eu/nightly").send().await;
    held.problem(409, "lock_held");
    let released = gateway
        .call(Method::DELETE, "/locks/reports/eu%2Fnightly")
        .header("lock-token", &lease.token)
        .send()
        .await;
    assert_eq!(released.status, 204, "{released:?}");
    for path in ["/locks/a//b", "/locks/a/../b", "/locks/a/", "/locks//a"] {
        gateway.call(Method::POST, path).send().await.problem(400, "invalid_name");
    }
}

#[tokio::test]
async fn the_root_leads_to_the_documentation() {
    let gateway = Launch::embedded().start().await;
    let moved = gateway.get("/").await;
    assert_eq!((moved.status, moved.header("location")), (303, "docs/"), "{moved:?}");
}

#[tokio::test]
async fn an_extension_without_a_body_extends_by_the_default_ttl() {
    let gateway = Launch::embedded().flag("--default-ttl", "70s").start().await;
    let lease = gateway.acquire("job").await;
    for body in [None, Some("{}"), Some("null"), Some(" null\n")] {
        let mut call = gateway.call(Method::PATCH, "/locks/job").header("lock-token", &lease.token);
        if let Some(body) = body {
            call = call.header("content-type", "application/json").body(body);
        }
        let extended = call.send().await;
        assert_eq!(
            (extended.status, &extended.json()["ttl_ms"]),
            (200, &json!(70_000)),
            "{extended:?}"
        );
    }
}

#[tokio::test]
async fn the_holders_label_is_shown_to_everyone() {
    let gateway = Launch::embedded().start().await;
    gateway.post("job", json!({ "owner": "ci", "metadata": { "run": "4711" } })).await;
    let page = gateway.get("/locks").await.json();
    for status in [gateway.inspect("job").await, page["locks"][0].clone()] {
        assert_eq!(
            (&status["owner"], &status["metadata"]),
            (&json!("ci"), &json!({ "run": "4711" }))
        );
    }
    let free = gateway.inspect("other").await;
    assert!(free.get("metadata").is_none(), "{free}");
}

#[tokio::test]
async fn a_client_still_sending_a_too_large_body_gets_the_answer() {
    let gateway = Launch::embedded().start().await;
    // These bodies are larger than the connection's buffers. A gateway that does not read the rest
    // closes the connection while the client still sends. It reads for a second, and a busy machine
    // may need longer to send.
    for length in [20_000, 900_000] {
        let mut raw = gateway.raw().await;
        let began = Instant::now();
        raw.announce("POST", "job", "connection: close\r\n", length).await;
        let sent = raw.try_write(vec![b'x'; length]).await;
        assert!(sent.is_ok() || began.elapsed() >= Duration::from_secs(1), "{sent:?}");
        raw.answer().await.problem(413, "body_too_large");
    }
}

#[tokio::test]
async fn a_conflict_on_extend_or_release_has_no_retry_after() {
    let gateway = Launch::embedded().start().await;
    let old = gateway.acquire_for("job", 60_000).await;
    gateway.delete("job", &old.token).await;
    gateway.acquire("job").await;
    for answer in
        [gateway.patch("job", &old.token, 60_000).await, gateway.delete("job", &old.token).await]
    {
        let problem = answer.problem(409, "not_holder");
        assert!(
            answer.header("retry-after").is_empty() && problem.get("retry_after_ms").is_none(),
            "{problem}"
        );
    }
}

#[tokio::test]
async fn an_invalid_end_date_of_a_key_is_reported_as_such() {
    let made = Launch::bare(&["key", "new", "ci", "--expires", "tomorrow"]).finish().await;
    assert_eq!(made.code, Some(2));
    assert!(
        ["--expires", "tomorrow", "2027-01-31"].iter().all(|word| made.stderr.contains(word)),
        "{made:?}"
    );
}

/// An nginx that serves the gateway at its root and below a prefix. If the URL of proxy_pass has a
/// path, nginx decodes the request's path and replaces its prefix. Without a path it passes the
/// original on.
async fn nginx_with_a_prefix(gateway: &Gateway) -> Proxy {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let to = gateway.address();
    let text = format!(
        "server {{
           listen {address};
           location / {{ proxy_pass http://{to}; }}
           location /redlock/ {{ proxy_pass http://{to}/; }}
         }}"
    );
    Proxy::nginx(gateway, address, &text).await
}

#[tokio::test]
async fn slashes_and_documentation_work_behind_nginx() {
    let gateway = Launch::embedded().start().await;
    let nginx = nginx_with_a_prefix(&gateway).await;
    let call = async |method: Method, path: &str, token: &str| -> Answer {
        nginx.call(&gateway, method, path).header("lock-token", token).send().await
    };
    for prefix in ["", "/redlock"] {
        for name in ["a/b", "a%2Fb"] {
            let path = format!("{prefix}/locks/{name}");
            let lease = Lease::from(&call(Method::POST, &path, "").await);
            assert_eq!(gateway.inspect("a/b").await["state"], "held", "{path}");
            assert_eq!(call(Method::PATCH, &path, &lease.token).await.status, 200, "{path}");
            assert_eq!(call(Method::DELETE, &path, &lease.token).await.status, 204, "{path}");
        }
        let root = call(Method::GET, &format!("{prefix}/"), "").await;
        assert_eq!((root.status, root.header("location")), (303, "docs/"), "{root:?}");
        let docs = call(Method::GET, &format!("{prefix}/docs"), "").await;
        assert_eq!((docs.status, docs.header("location")), (303, "docs/"), "{docs:?}");
        let page = call(Method::GET, &format!("{prefix}/docs/"), "").await;
        assert!(page.status == 200 && !page.text().contains("=\"/"), "{}", page.text());
        let document = call(Method::GET, &format!("{prefix}/openapi.json"), "").await;
        assert_eq!(
            document.json()["servers"][0]["url"],
            ".",
            "the server's URL is relative to the document"
        );
    }
}
