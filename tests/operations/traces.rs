//! Traces as a collector receives them: OTLP over HTTP. The tests decode it with the definitions of
//! the protocol.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use prost::Message;
use rustix::process::Signal;
use serde_json::json;
use tokio::net::TcpListener;

use super::config::assert_refused;
use crate::support::client::Lease;
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{DeadPort, eventually, masters};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

/// Accepts every export and keeps its spans.
struct Collector {
    endpoint: String,
    exports: Arc<Mutex<Vec<(String, Bytes)>>>,
}

impl Collector {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
        let exports = Arc::new(Mutex::new(Vec::new()));
        let kept = exports.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let kept = kept.clone();
                let take = service_fn(move |request: Request<hyper::body::Incoming>| {
                    let kept = kept.clone();
                    async move {
                        let path = request.uri().path().to_owned();
                        let body =
                            request.into_body().collect().await.expect("a whole body").to_bytes();
                        kept.lock().unwrap().push((path, body));
                        Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
                    }
                });
                let serving = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), take);
                tokio::spawn(async move { drop(serving.await) });
            }
        });
        Self { endpoint, exports }
    }

    fn launch(&self, launch: Launch) -> Launch {
        launch.flag("--otlp-endpoint", &self.endpoint).env("OTEL_BSP_SCHEDULE_DELAY", "50")
    }

    fn spans(&self) -> Vec<Span> {
        let exports = self.exports.lock().unwrap();
        let decoded = exports
            .iter()
            .map(|(_, body)| ExportTraceServiceRequest::decode(body.clone()).expect("OTLP"));
        let scopes = decoded
            .flat_map(|export| export.resource_spans)
            .flat_map(|of_process| of_process.scope_spans);
        scopes.flat_map(|scope| scope.spans).collect()
    }

    async fn until(&self, what: &str, enough: impl Fn(&[Span]) -> bool) -> Vec<Span> {
        eventually(what, async || Some(self.spans()).filter(|spans| enough(spans))).await
    }
}

fn attribute(span: &Span, key: &str) -> String {
    let found = span.attributes.iter().find(|attribute| attribute.key == key);
    match found.and_then(|attribute| attribute.value.as_ref()?.value.clone()) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        other => panic!("{key} of {span:?}: {other:?}"),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn below<'a>(spans: &'a [Span], parent: &'a Span) -> impl Iterator<Item = &'a Span> {
    spans
        .iter()
        .filter(|span| span.parent_span_id == parent.span_id && span.trace_id == parent.trace_id)
}

async fn traced(
    gateway: &Gateway,
    method: Method,
    path: &str,
    sampled: bool,
) -> crate::support::client::Answer {
    let header = format!("00-{TRACE}-{CALLER}-0{}", u8::from(sampled));
    gateway
        .call(method, path)
        .header("traceparent", &header)
        .json(&json!({ "ttl_ms": 60_000 }))
        .send()
        .await
}

#[tokio::test]
async fn a_trace_has_request_rounds_and_nodes_as_levels() {
    let collector = Collector::start().await;
    let servers = masters(3);
    let launch = collector.launch(Launch::over(&servers)).flag("--node-timeout", "6s");
    let launch = launch.env("RUST_LOG", "redlock_gateway=debug");
    let gateway = launch.ready().await;
    let lease = Lease::from(&traced(&gateway, Method::POST, "/locks/customers-4711", true).await);
    assert_eq!(gateway.delete("customers-4711", &lease.token).await.status, 204);

    let is_whole = |spans: &[Span]| {
        let count = |part: &str| spans.iter().filter(|span| span.name.contains(part)).count();
        (count(" on 127.0.0.1:"), count(" /locks/{name}")) == (6, 2)
    };
    let spans = collector.until("both requests, and their rounds at all nodes", is_whole).await;
    let named = |name: &str| {
        spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("{name}: {spans:#?}"))
    };
    let request = named("POST /locks/{name}");
    assert_eq!(
        (hex(&request.trace_id), hex(&request.parent_span_id)),
        (TRACE.to_owned(), CALLER.to_owned())
    );
    assert_eq!(request.kind(), SpanKind::Server);
    assert_eq!(attribute(request, "http.response.status_code"), "201");
    let rounds: Vec<_> = below(&spans, request).collect();
    let [round] = rounds[..] else { panic!("{rounds:#?}") };
    assert_eq!(
        (round.name.as_str(), attribute(round, "redlock.decision").as_str()),
        ("round acquire", "yes")
    );
    let mut nodes: Vec<_> =
        below(&spans, round).map(|node| attribute(node, "redlock.node")).collect();
    nodes.sort();
    let mut expected: Vec<_> =
        servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
    expected.sort();
    assert_eq!(nodes, expected);
    for node in below(&spans, round) {
        assert_eq!(
            (node.kind(), attribute(node, "redlock.vote").as_str()),
            (SpanKind::Client, "granted")
        );
        assert!(
            round.start_time_unix_nano <= node.start_time_unix_nano
                && node.start_time_unix_nano < node.end_time_unix_nano
        );
    }
    // A request without a traceparent begins a trace of its own.
    let release = named("DELETE /locks/{name}");
    assert!(release.parent_span_id.is_empty() && release.trace_id != request.trace_id);
    assert_eq!(
        below(&spans, release).map(|round| round.name.as_str()).collect::<Vec<_>>(),
        ["round release"]
    );

    let line = eventually("the log line has the trace", async || {
        gateway.stdout().lines().find(|line| line.contains(TRACE)).map(str::to_owned)
    })
    .await;
    let line: serde_json::Value = serde_json::from_str(&line).expect("one JSON object");
    assert_eq!(
        (line["span_id"].as_str(), &line["status"]),
        (Some(hex(&request.span_id).as_str()), &json!(201)),
        "{line}"
    );
    for (path, body) in collector.exports.lock().unwrap().iter() {
        assert_eq!(path, "/v1/traces");
        for private in ["customers-4711", lease.owner(), &lease.fencing.to_string()] {
            assert!(
                !body.windows(private.len()).any(|part| part == private.as_bytes()),
                "{private} is in a span"
            );
        }
    }
}

#[tokio::test]
async fn a_round_without_a_quorum_names_the_failed_nodes() {
    let collector = Collector::start().await;
    let mut servers = masters(3);
    let launch = collector.launch(Launch::over(&servers)).flag("--node-timeout", "6s");
    let gateway = launch.ready().await;
    servers[..2].iter_mut().for_each(|server| server.kill());
    traced(&gateway, Method::POST, "/locks/job", true).await.problem(503, "quorum_unavailable");
    let has_request = |spans: &[Span]| spans.iter().any(|span| span.name == "POST /locks/{name}");
    let spans = collector.until("the request", has_request).await;
    let request =
        spans.iter().find(|span| span.name == "POST /locks/{name}").expect("the body is awaited");
    assert_eq!(attribute(request, "error.type"), "quorum_unavailable");
    assert_eq!(request.status.as_ref().expect("a status").code(), StatusCode::Error);
    // A release that cleans up may end without a decision.
    let rounds: Vec<_> =
        below(&spans, request).filter(|span| span.name == "round acquire").collect();
    assert!(
        !rounds.is_empty()
            && rounds.iter().all(|round| attribute(round, "redlock.decision") != "yes"),
        "{rounds:#?}"
    );
    let down = |span: &&Span| attribute(span, "redlock.vote") == "down";
    assert!(
        rounds.iter().flat_map(|round| below(&spans, round)).filter(down).count() >= 2,
        "{spans:#?}"
    );
}

#[tokio::test]
async fn unsampled_requests_send_no_spans() {
    let collector = Collector::start().await;
    let gateway = collector.launch(Launch::embedded()).start().await;
    assert_eq!(traced(&gateway, Method::POST, "/locks/silent", false).await.status, 201);
    assert_eq!(traced(&gateway, Method::POST, "/locks/told", true).await.status, 201);
    let is_there = |spans: &[Span]| spans.iter().any(|span| span.name.starts_with("POST"));
    let spans = collector.until("the second", is_there).await;
    assert_eq!(spans.iter().filter(|span| span.name.starts_with("POST")).count(), 1, "{spans:#?}");
}

#[tokio::test]
async fn the_last_spans_are_sent_before_the_process_ends() {
    let collector = Collector::start().await;
    // With these settings no span is sent before the gateway ends.
    let launch = Launch::embedded()
        .flag("--shutdown-grace", "1h")
        .flag("--otlp-endpoint", &collector.endpoint)
        .env("OTEL_BSP_SCHEDULE_DELAY", "3600000");
    let mut gateway = launch.start().await;
    gateway.acquire("job").await;
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.ended().await, Some(0));
    assert!(
        collector.spans().iter().any(|span| span.name == "POST /locks/{name}"),
        "{:#?}",
        collector.spans()
    );
}

#[tokio::test]
async fn an_absent_or_hung_collector_costs_spans_and_no_request() {
    let dead = DeadPort::new();
    // Accepts connections and never answers on them.
    let hanging = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    for port in [dead.port(), hanging.local_addr().expect("bound").port()] {
        let launch =
            Launch::embedded().flag("--otlp-endpoint", &format!("http://127.0.0.1:{port}"));
        // The gateway would send its last spans for two hours, but for its own limit.
        let mut gateway = launch
            .flag("--shutdown-grace", "1h")
            .env("OTEL_EXPORTER_OTLP_TIMEOUT", "7200000")
            .env("OTEL_BSP_SCHEDULE_DELAY", "10")
            .env("OTEL_BSP_MAX_QUEUE_SIZE", "16")
            .start()
            .await;
        // These are more spans than the queue can hold.
        for number in 0..50 {
            gateway.acquire(&format!("job-{number}")).await;
        }
        gateway.signal(Signal::TERM);
        assert_eq!(gateway.ended().await, Some(0));
    }
}

#[tokio::test]
async fn an_invalid_endpoint_is_refused_at_the_start() {
    let odd = ["http://h:99999", "http://h:4318?a=b", "http://user:hunter2@h:4318", "http://h:"];
    for endpoint in
        ["localhost:4318", "grpc://localhost:4317", "http://", ""].into_iter().chain(odd)
    {
        let refused = Launch::embedded().flag("--otlp-endpoint", endpoint).finish().await;
        assert_refused(endpoint, &refused, &["--otlp-endpoint", "http://localhost:4318"]);
        assert!(!refused.stderr.contains("hunter2"), "{refused:?}");
    }
    for endpoint in ["http://[::1]:1", "https://collector.example/otlp/v1/traces", "http://h/"] {
        let checked = Launch::bare(&["check", "--otlp-endpoint", endpoint]).finish().await;
        assert_eq!(checked.code, Some(0), "{endpoint}: {checked:?}");
    }
}
