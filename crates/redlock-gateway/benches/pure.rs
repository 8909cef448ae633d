//! The cost of a request in the gateway without its locks: routing, headers, JSON in and out,
//! problems, metrics. Times depend on the machine and its load; allocations do not.
//!
//! `cargo bench -p redlock-gateway --bench pure`, or with `-- problem` to run only some.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::IntoResponse;
use axum::routing::get;
use divan::{AllocProfiler, Bencher, black_box};
use http::{HeaderMap, HeaderName, HeaderValue, Request};
use redlock_api::AcquireBody;
use redlock_core::clock::OsEntropy;
use redlock_core::{HeldBy, LockError, LockName, LockToken, Ttl};
use redlock_gateway::auth::{Authenticator, Credential, Keys, Secret, Verb};
use redlock_gateway::config::Limits;
use redlock_gateway::gateway::{LeaseView, Refusal};
use redlock_gateway::http::access::Name;
use redlock_gateway::http::error::ApiError;
use redlock_gateway::http::extract::{lock_token, metadata, requested_ttl, requested_wait, stored};
use redlock_gateway::http::wire::{json_line, lease};
use redlock_gateway::info::label_of;
use redlock_gateway::telemetry::{Operation, OutcomeLabel, Telemetry};
use tower::Service;

#[global_allocator]
static ALLOCATIONS: AllocProfiler = AllocProfiler::system();

const TOKEN: &str = "1.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b";
const LABEL: &str = "nightly-report on host-7";
const INFO: &[u8] = br#"{"owner":"nightly-report on host-7"}"#;
const BODIES: [&str; 3] = [
    r#"{"ttl_ms": 30000}"#,
    r#"{"ttl_ms": 30000, "wait_ms": 10000, "owner": "nightly-report on host-7"}"#,
    r#"{"ttl_ms": 30000, "owner": "ci", "metadata": {"pipeline": "8812", "commit": "9f86d081884c"}}"#,
];

fn main() {
    divan::main();
}

fn ttl(millis: u64) -> Ttl {
    Ttl::from_millis(millis).expect("within the limits of a Ttl")
}

fn name() -> LockName {
    "reports/nightly".parse::<LockName>().expect("a lock's name")
}

fn limits() -> Limits {
    let max_wait = Duration::from_secs(25);
    let max_hold = Duration::from_secs(86_400);
    Limits { default_ttl: ttl(30_000), max_ttl: ttl(300_000), max_wait, max_hold }
}

fn view() -> LeaseView {
    LeaseView {
        token: TOKEN.parse::<LockToken>().expect("a token"),
        ttl: ttl(30_000),
        validity: Duration::from_micros(29_697_123),
        elapsed: Duration::from_micros(812),
        expires_at: 1_763_725_194_820_579,
        nodes_granted: 3,
        nodes_total: 5,
        replayed: false,
    }
}

fn held() -> ApiError {
    let mut by = HeldBy::default();
    (by.info, by.expires_in) = (INFO.into(), Some(Duration::from_millis(21_400)));
    Refusal::Lock(LockError::Held(by)).into()
}

mod request {
    use super::*;

    /// Routing, and decoding and checking the name, to a handler that does nothing.
    #[divan::bench(args = ["/locks/a", "/locks/reports%2Fnightly%2F2026-11-21"])]
    fn routed_to_its_name(bencher: Bencher, path: &str) {
        let mut router = Router::new().route("/locks/{name}", get(async |_: Name| ()));
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        bencher
            .with_inputs(|| Request::get(path).body(Body::empty()).expect("a request"))
            .bench_local_values(|request| runtime.block_on(router.call(request)));
    }

    #[divan::bench]
    fn token_header(bencher: Bencher) {
        let named = (HeaderName::from_static("lock-token"), HeaderValue::from_static(TOKEN));
        let headers = HeaderMap::from_iter([named]);
        bencher.bench(|| lock_token(black_box(&headers)));
    }

    #[divan::bench(args = BODIES)]
    fn body(bencher: Bencher, text: &str) {
        let limits = limits();
        bencher.bench(|| {
            let body: AcquireBody = serde_json::from_str(black_box(text)).expect("JSON");
            (
                requested_ttl(body.ttl_ms.as_ref(), &limits),
                requested_wait(body.wait_ms.as_ref(), &limits),
                metadata(body.owner, body.metadata, None).map(|metadata| stored(&metadata)),
            )
        });
    }
}

mod access {
    use super::*;

    /// The cost of a key: identification, permission, and the owner on the nodes.
    #[divan::bench(args = [1, 1000])]
    fn key(bencher: Bencher, keys: usize) {
        let secrets: Vec<_> =
            (0..keys).map(|n| Secret::new(&format!("key-{n}"), &OsEntropy)).collect();
        let entry = |(n, secret): (usize, &Secret)| {
            let hash = secret.hash_text();
            format!(
                "[[key]]\nname = 'key-{n}'\nhashes = ['{hash}']\nallow = [{{ verbs = ['acquire'], names = ['reports/*'] }}]"
            )
        };
        let file: Vec<_> = secrets.iter().enumerate().map(entry).collect();
        let authenticator =
            Authenticator::new(Keys::parse(&file.join("\n")).expect("a file of keys"));
        let name = name();
        let token = TOKEN.parse::<LockToken>().expect("a token");
        bencher.bench(|| {
            let caller = authenticator
                .identify(Some(Credential::Key(black_box(secrets[0].expose()))))
                .expect("it is known");
            (
                caller.may(Verb::Acquire, &name),
                token.bound_to(caller.principal().unwrap_or_default()),
            )
        });
    }
}

mod answer {
    use super::*;

    #[divan::bench]
    fn lease(bencher: Bencher) {
        let name = name();
        let view = view();
        bencher.bench(|| {
            json_line(&super::lease(black_box(&name), black_box(&view), Some(LABEL.into())))
        });
    }

    #[divan::bench]
    fn label(bencher: Bencher) {
        bencher.bench(|| label_of(black_box(INFO)));
    }

    #[divan::bench]
    fn problem_body(bencher: Bencher) {
        let problem = held().problem();
        bencher.bench(|| json_line(black_box(&problem)));
    }

    /// Without the body, which is written on the way out.
    #[divan::bench]
    fn problem_response(bencher: Bencher) {
        bencher.with_inputs(held).bench_values(IntoResponse::into_response);
    }
}

mod metrics {
    use super::*;

    fn telemetry() -> Telemetry {
        let nodes: Vec<_> = (1..=5).map(|node| format!("10.0.0.{node}:6379")).collect();
        Telemetry::new(&nodes)
    }

    #[divan::bench]
    fn of_an_operation(bencher: Bencher) {
        let telemetry = telemetry();
        let name: LockName = "deploy/shop".parse().expect("a name");
        bencher.bench(|| {
            telemetry
                .of(black_box(&name))
                .operation(black_box(Operation::Release), black_box(OutcomeLabel::Released))
        });
    }

    #[divan::bench]
    fn of_a_request(bencher: Bencher) {
        let telemetry = telemetry();
        let elapsed = Duration::from_micros(812);
        bencher.bench(|| {
            telemetry.http(black_box("POST"), black_box("/locks/{name}"), black_box(201), elapsed)
        });
    }
}
