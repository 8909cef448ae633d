//! Requests from pages of other sites, and through foreign names that resolve to this machine. A
//! browser adds credentials to such requests by itself. These credentials must give the pages no
//! access.

use base64::prelude::{BASE64_STANDARD, Engine};
use http::Method;
use serde_json::json;

use crate::http::keys::{HOLDER, file, key, with_keys};
use crate::support::certificates::{Authority, Client};
use crate::support::client::{Answer, Lease};
use crate::support::gateway::{Gateway, Launch, Scratch};
use crate::support::waiters::{HOUR_MS, patient};

const EVIL: &str = "https://evil.example";
const OPS: &str = "https://ops.example.com";

type Headers<'a> = &'a [(&'a str, &'a str)];

async fn send(gateway: &Gateway, method: Method, path: &str, headers: Headers<'_>) -> Answer {
    let call = gateway.call(method, path);
    headers.iter().fold(call, |call, (name, value)| call.header(name, value)).send().await
}

/// Headers that a browser adds to a request from a page of another site.
const FOREIGN: [Headers<'_>; 8] = [
    &[("sec-fetch-site", "cross-site")],
    &[("sec-fetch-site", "same-site")],
    &[("sec-fetch-site", "cross-site"), ("origin", EVIL)],
    &[("sec-fetch-site", "same-origin"), ("sec-fetch-site", "cross-site")],
    // Old browsers send only this header. So do all browsers for pages that come neither by HTTPS
    // nor from loopback.
    &[("origin", EVIL)],
    &[("origin", "null")],
    &[("origin", "http://127.0.0.1:1")],
    &[("origin", "file://")],
];

#[tokio::test]
async fn without_keys_a_page_of_another_site_changes_no_lock() {
    let gateway = patient(Launch::embedded()).start().await;
    let lease = gateway.acquire_for("held", HOUR_MS).await;
    for headers in FOREIGN {
        let token = [headers, &[("lock-token", lease.token.as_str())]].concat();
        for (method, path) in [
            (Method::POST, "/locks/free"),
            (Method::POST, "/locks/held"),
            (Method::PATCH, "/locks/held"),
            (Method::DELETE, "/locks/held"),
            (Method::GET, "/locks/held"),
            (Method::GET, "/locks"),
            (Method::GET, "/metrics"),
        ] {
            let answer = send(&gateway, method, path, &token).await;
            let problem = answer.problem(403, "forbidden");
            assert!(
                problem["detail"].as_str().unwrap().contains("a page of another site"),
                "{problem}"
            );
        }
        for path in ["/docs/", "/openapi.json", "/livez", "/readyz"] {
            assert_eq!(
                send(&gateway, Method::GET, path, headers).await.status,
                200,
                "{path} is for browsers and probes"
            );
        }
    }
    assert_eq!(gateway.inspect("free").await["state"], "free");
    assert_eq!(gateway.inspect("held").await["fencing_token"], lease.fencing);

    let own = format!("http://{}", gateway.address());
    let ours: [Headers<'_>; 4] = [
        &[("sec-fetch-site", "same-origin"), ("origin", &own)],
        // A proxy in front of the gateway may change the Host header.
        &[("sec-fetch-site", "same-origin"), ("origin", "https://locks.example.com")],
        &[("sec-fetch-site", "none")],
        &[("origin", &own)],
    ];
    for (n, headers) in ours.into_iter().enumerate() {
        assert_eq!(
            send(&gateway, Method::POST, &format!("/locks/own-{n}"), headers).await.status,
            201,
            "{headers:?}"
        );
    }
}

#[tokio::test]
async fn without_keys_only_pages_of_listed_origins_may_call() {
    let gateway = Launch::embedded().more("--cors-origin", OPS).start().await;
    for (n, site) in ["cross-site", "same-site"].into_iter().enumerate() {
        let path = format!("/locks/job-{n}");
        let from = |origin| [("sec-fetch-site", site), ("origin", origin)];
        send(&gateway, Method::POST, &path, &from(EVIL)).await.problem(403, "forbidden");
        send(&gateway, Method::POST, &path, &[("sec-fetch-site", site)])
            .await
            .problem(403, "forbidden");
        let both = [("sec-fetch-site", site), ("origin", OPS), ("origin", EVIL)];
        send(&gateway, Method::POST, &path, &both).await.problem(403, "forbidden");
        assert_eq!(send(&gateway, Method::POST, &path, &from(OPS)).await.status, 201);
    }
    assert_eq!(send(&gateway, Method::POST, "/locks/old", &[("origin", OPS)]).await.status, 201);
}

#[tokio::test]
async fn other_pages_get_no_stored_password_and_need_a_bearer_key() {
    let known = key("known", HOLDER, "*").await;
    let file = file(&[&known]);
    let gateway =
        with_keys(&file).flag("--public", "none").more("--cors-origin", OPS).start().await;
    let basic = format!("Basic {}", BASE64_STANDARD.encode(format!("known:{}", known.text)));
    let lease = known.acquire(&gateway, "held").await;
    let listed: [Headers<'_>; 2] =
        [&[("sec-fetch-site", "cross-site"), ("origin", OPS)], &[("origin", OPS)]];
    for headers in FOREIGN.into_iter().chain(listed) {
        let with = |authorization| {
            [headers, &[("authorization", authorization), ("lock-token", &lease.token)]].concat()
        };
        for (method, path) in [
            (Method::POST, "/locks/free"),
            (Method::PATCH, "/locks/held"),
            (Method::DELETE, "/locks/held"),
        ] {
            send(&gateway, method, path, &with(&basic)).await.problem(403, "forbidden");
        }
        let bearer = known.bearer();
        assert_eq!(
            send(&gateway, Method::GET, "/locks/held", &with(&bearer)).await.status,
            200,
            "{headers:?}"
        );
        send(&gateway, Method::POST, "/locks/free", headers).await.problem(401, "unauthenticated");
        // The list of nodes is hidden as well.
        let ready = send(&gateway, Method::GET, "/readyz", &with(&basic)).await;
        assert_eq!(ready.json(), json!({ "status": "ready" }));
    }
    assert_eq!(known.get(&gateway, "/locks/free").await.json()["state"], "free");
    // A link on another site may show the page, but a page of that site cannot read it.
    let page = |mode| {
        [
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", mode),
            ("authorization", basic.as_str()),
        ]
    };
    assert_eq!(send(&gateway, Method::GET, "/docs/", &page("navigate")).await.status, 200);
    send(&gateway, Method::GET, "/openapi.json", &page("no-cors")).await.problem(403, "forbidden");
    send(&gateway, Method::GET, "/locks/held", &page("navigate")).await.problem(403, "forbidden");
}

#[tokio::test]
async fn a_browsers_certificate_counts_for_our_own_pages_only() {
    let authority = Authority::new();
    let server = authority.issue("server", "/CN=gateway");
    let own = authority.issue("ci", "/CN=ci");
    let keys = "[[key]]\nname = 'ci'\ncertificate = 'CN=ci'\nallow = [{ verbs = ['acquire', 'inspect'], names = ['*'] }]";
    let keys = Scratch::new("keys.toml", keys);
    let launch = Launch::embedded().flag("--tls-cert", &server.cert).flag("--tls-key", &server.key);
    let launch = launch.flag("--tls-client-ca", &authority.ca()).flag("--auth-keys", keys.path());
    let gateway = launch.more("--cors-origin", OPS).start().await;
    let mut open = Client::showing(&authority, &own).open(gateway.address()).await.unwrap();
    let mut post = async |headers: Headers<'_>| {
        let request = http::Request::post("/locks/job").header("host", "localhost");
        let request =
            headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        open.send(request.body(Default::default()).unwrap()).await.unwrap().0
    };
    for headers in FOREIGN {
        assert_eq!(post(headers).await, 403, "{headers:?}");
    }
    assert_eq!(post(&[("sec-fetch-site", "cross-site"), ("origin", OPS)]).await, 403);
    assert_eq!(post(&[("sec-fetch-site", "same-origin")]).await, 201);
}

#[tokio::test]
async fn a_foreign_name_that_resolves_to_loopback_is_refused() {
    let gateway = Launch::embedded().start().await;
    let port = gateway.address().port();
    let with_host = async |gateway: &Gateway, host: &str| {
        gateway.call(Method::POST, "/locks/job").header("host", host).send().await
    };
    for host in [
        "evil.example",
        &format!("evil.example:{port}"),
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
    ] {
        let problem = with_host(&gateway, host).await.problem(421, "misdirected_request");
        assert!(problem["detail"].as_str().unwrap().contains("--allowed-host"), "{problem}");
        for path in ["/docs/", "/livez", "/metrics", "/locks", "/nowhere"] {
            let answer = gateway.call(Method::GET, path).header("host", host).send().await;
            answer.problem(421, "misdirected_request");
        }
    }
    assert_eq!(gateway.inspect("job").await["state"], "free");
    for host in [
        format!("localhost:{port}"),
        "LOCALHOST".into(),
        format!("127.0.0.1:{port}"),
        "127.1.2.3".into(),
        "[::1]:1".into(),
    ] {
        assert_eq!(
            gateway.call(Method::GET, "/locks/job").header("host", &host).send().await.status,
            200,
            "{host}"
        );
    }

    let named = Launch::embedded()
        .more("--allowed-host", "locks.example.com")
        .env("REDLOCK_ALLOWED_HOSTS", "ignored");
    let named = named.more("--allowed-host", "Other.example").start().await;
    for host in ["locks.example.com", "LOCKS.example.com:443", "other.example", "localhost"] {
        let lease = Lease::from(&with_host(&named, host).await);
        assert_eq!(named.delete("job", &lease.token).await.status, 204);
    }
    with_host(&named, "evil.example").await.problem(421, "misdirected_request");
}

#[tokio::test]
async fn off_loopback_any_host_counts_until_some_are_named() {
    let world = || {
        Launch::embedded()
            .flag("--listen", "0.0.0.0:0")
            .argument("--embedded")
            .argument("--allow-anonymous")
    };
    let get = async |gateway: &Gateway, host: &str| {
        gateway.call(Method::GET, "/livez").header("host", host).send().await.status
    };
    let any = world().start().await;
    assert_eq!((get(&any, "locks.example.com").await, get(&any, "evil.example").await), (200, 200));
    let named = world().more("--allowed-host", "locks.example.com").start().await;
    assert_eq!(
        (get(&named, "locks.example.com").await, get(&named, "evil.example").await),
        (200, 421)
    );
    assert_eq!(
        get(&named, "10.0.0.1:8080").await,
        200,
        "probes send only the address as their host"
    );
}

#[tokio::test]
async fn a_request_names_its_host_once() {
    let gateway = Launch::embedded().start().await;
    for (head, status, code) in [
        ("GET /livez HTTP/1.1\r\n\r\n", 400, "invalid_parameter"),
        (
            "GET /livez HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n",
            400,
            "invalid_parameter",
        ),
        (
            "GET /livez HTTP/1.1\r\nhost: localhost\r\nHost: evil.example\r\n\r\n",
            400,
            "invalid_parameter",
        ),
        ("GET /livez HTTP/1.1\r\nhost: localhost@evil.example\r\n\r\n", 400, "invalid_parameter"),
        ("GET /livez HTTP/1.1\r\nhost: localhost:80:80\r\n\r\n", 400, "invalid_parameter"),
        ("GET /readyz HTTP/1.1\r\nhost: evil.example\r\n\r\n", 421, "misdirected_request"),
        ("GET /livez HTTP/1.1\r\nhost:\r\n\r\n", 421, "misdirected_request"),
        (
            "GET http://evil.example/livez HTTP/1.1\r\nhost: localhost\r\n\r\n",
            421,
            "misdirected_request",
        ),
        (
            "GET http://localhost/livez HTTP/1.1\r\nhost: evil.example\r\n\r\n",
            421,
            "misdirected_request",
        ),
        ("GET http://localhost/livez HTTP/1.1\r\n\r\n", 400, "invalid_parameter"),
        ("POST /locks/job HTTP/1.0\r\nhost: evil.example\r\n\r\n", 421, "misdirected_request"),
    ] {
        let mut raw = gateway.raw().await;
        raw.write(head).await;
        raw.answer().await.problem(status, code);
    }
    for head in [
        "GET http://localhost/livez HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "GET /livez HTTP/1.0\r\n\r\n",
    ] {
        let mut raw = gateway.raw().await;
        raw.write(head).await;
        assert_eq!(raw.answer().await.status, 200, "{head}");
    }
}
