//! Traces by OTLP. Each request has a span. Each round of the request has a span below it, and each
//! node asked in a round has a span below that of the round.
//!
//! The library sends spans in the background, from a bounded queue. If the collector is slow or
//! absent, spans are lost, but no request waits. No lock name, owner or token is in a span.

use parking_lot::Mutex;
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{
    FutureExt, Span as _, SpanContext, SpanKind, Status, TraceContextExt, Tracer, TracerProvider,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, Span};
use redlock_core::node::{Op, RoundTrace, Vote};

/// Limit on a client's `tracestate`, in bytes. There is a limit because each queued span keeps the
/// text. W3C Trace Context asks every participant to pass on at least 512 characters.
const MAX_TRACE_STATE: usize = 512;
/// Time limit for sending the last spans when the process ends.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// The endpoint for spans is malformed.
#[derive(Debug, thiserror::Error)]
#[error("--otlp-endpoint: {endpoint}: {source}")]
pub struct TracesError {
    endpoint: String,
    source: ExporterBuildError,
}

/// The destination of spans, and what all spans have in common.
pub struct Traces {
    provider: SdkTracerProvider,
    tracer: Arc<SdkTracer>,
    nodes: Arc<[String]>,
}

impl Traces {
    /// Starts to send spans to a collector. `nodes` are the names of the nodes, by position.
    ///
    /// # Errors
    /// The endpoint is malformed. An endpoint without a listener is logged later.
    pub fn start(endpoint: &str, nodes: &[String]) -> Result<Self, TracesError> {
        let exporter = SpanExporter::builder().with_http().with_endpoint(endpoint).build();
        let exporter =
            exporter.map_err(|source| TracesError { endpoint: endpoint.to_owned(), source })?;
        let mut resource = Resource::builder()
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
        if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
            resource = resource.with_service_name("redlock-gateway");
        }
        // The library itself reads the variables OTEL_…, which set sampling and the length of the
        // queue.
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource.build())
            .build();
        let tracer = Arc::new(provider.tracer("redlock-gateway"));
        Ok(Self { provider, tracer, nodes: nodes.into() })
    }

    /// Sends the queued spans. Blocks for 2 s at most.
    pub fn finish(&self) {
        if let Err(error) = self.provider.shutdown_with_timeout(SHUTDOWN_TIMEOUT) {
            tracing::warn!(%error, "the last spans could not be sent");
        }
    }

    pub(super) fn request(
        &self,
        method: &'static str,
        route: &str,
        headers: &HeaderMap,
    ) -> RequestSpan {
        let name = if route.is_empty() {
            Cow::Borrowed(method)
        } else {
            Cow::Owned(format!("{method} {route}"))
        };
        let attributes = [
            KeyValue::new("http.request.method", method),
            KeyValue::new("http.route", route.to_owned()),
        ];
        let span =
            self.tracer.span_builder(name).with_kind(SpanKind::Server).with_attributes(attributes);
        let parent =
            TraceContextPropagator::new().extract_with_context(&Context::new(), &Headers(headers));
        RequestSpan(parent.with_span(span.start_with_context(&*self.tracer, &parent)))
    }

    /// Starts the span of a round. `None` if the round belongs to no request, or to a request that
    /// is not sampled.
    pub(super) fn round(&self, op: &Op) -> Option<Box<dyn RoundTrace>> {
        let request = Context::map_current(|now| now.span().is_recording().then(|| now.clone()))?;
        let span = self.tracer.span_builder(format!("round {}", op.name()));
        let round = span.start_with_context(&*self.tracer, &request);
        let nodes = self.nodes.iter().map(|_| None).collect();
        let tracer = self.tracer.clone();
        let names = self.nodes.clone();
        let context = request.with_remote_span_context(round.span_context().clone());
        let word = op.name();
        Some(Box::new(Round {
            tracer,
            names,
            word,
            context,
            spans: Mutex::new(Spans { round, nodes }),
        }))
    }
}

/// The span of a request. It is the parent of the spans that start in [`RequestSpan::within`].
pub struct RequestSpan(Context);

impl RequestSpan {
    /// Runs `work` as part of the request whose span is given. Without a span, just runs `work`.
    pub async fn within<T>(span: Option<&Self>, work: impl Future<Output = T>) -> T {
        match span {
            Some(Self(context)) => work.with_context(context.clone()).await,
            None => work.await,
        }
    }

    /// Ends the span. `code`: the code of the error, if the answer is an error.
    pub fn end(self, status: u16, code: Option<&str>) {
        let span = self.0.span();
        span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status)));
        if let Some(code) = code {
            span.set_attribute(KeyValue::new("error.type", code.to_owned()));
        }
        if status >= 500 {
            span.set_status(Status::error(code.unwrap_or_default().to_owned()));
        }
        span.end();
    }
}

/// The ids by which log lines and traces are matched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceIds {
    pub trace: String,
    pub span: String,
}

impl TraceIds {
    /// The ids of the request's span. Without a span, the ids of the client's `traceparent`, if
    /// that is valid.
    pub fn of(span: Option<&RequestSpan>, headers: &HeaderMap) -> Option<Self> {
        let ids = |context: &SpanContext| Self {
            trace: context.trace_id().to_string(),
            span: context.span_id().to_string(),
        };
        if let Some(RequestSpan(context)) = span {
            return Some(ids(context.span().span_context()));
        }
        headers.get("traceparent")?;
        let context =
            TraceContextPropagator::new().extract_with_context(&Context::new(), &Headers(headers));
        let span = context.span();
        Some(span.span_context()).filter(|context| context.is_valid()).map(ids)
    }
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).filter(|value| value.len() <= MAX_TRACE_STATE)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}

struct Round {
    tracer: Arc<SdkTracer>,
    names: Arc<[String]>,
    word: &'static str,
    /// The parent of the nodes' spans.
    context: Context,
    spans: Mutex<Spans>,
}

struct Spans {
    round: Span,
    /// By the node's position, the span of each node that was asked and has not answered yet.
    nodes: Vec<Option<Span>>,
}

impl Round {
    fn with<T>(&self, work: impl FnOnce(&mut Spans) -> T) -> T {
        work(&mut self.spans.lock())
    }
}

impl RoundTrace for Round {
    fn asked(&self, node: usize) {
        let name = self.names.get(node).map_or("?", String::as_str);
        let span = self
            .tracer
            .span_builder(format!("{} on {name}", self.word))
            .with_kind(SpanKind::Client);
        let span = span.with_attributes([KeyValue::new("redlock.node", name.to_owned())]);
        let span = span.start_with_context(&*self.tracer, &self.context);
        self.with(|spans| spans.nodes.get_mut(node).map(|place| *place = Some(span)));
    }

    fn voted(&self, node: usize, vote: &Vote) {
        let Some(mut span) = self.with(|spans| spans.nodes.get_mut(node).and_then(Option::take))
        else {
            return;
        };
        span.set_attribute(KeyValue::new("redlock.vote", vote.name()));
        if let Vote::Failed(failure) = vote {
            span.set_status(Status::error(failure.reason.as_str()));
        }
        span.end();
    }

    fn decided(&self, decision: &'static str) {
        self.with(|Spans { round, .. }| {
            round.set_attribute(KeyValue::new("redlock.decision", decision));
            round.end();
        });
    }
}
