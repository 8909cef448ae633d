//! The table of routes, and what is done around every request. Below this module are the only files that know axum.

pub mod access;
mod browser;
pub mod error;
pub mod extract;
mod health;
mod locks;
pub mod openapi;
mod render;
mod site;
pub mod wire;

use parking_lot::Mutex;
use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::middleware::{from_fn_with_state, map_response};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use tower::Service;
use tower_http::catch_panic::CatchPanic;
use tower_http::compression::CompressionLayer;
use utoipa::OpenApi;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter, UtoipaMethodRouterExt};
use utoipa_axum::routes;
use utoipa_swagger_ui::{Config, SwaggerUi};

pub use self::access::AppState;
use self::access::{Needs, Route};
use self::error::{ApiError, METHOD_NOT_ALLOWED, NOT_FOUND, Problem, is_denial};
pub use self::site::Hosts;
use crate::audit::{Audit, AuditGuard, RequestEnd};
use crate::auth::Verb;
use crate::config::Public;
use crate::gateway::Gateway;
use crate::overload::clients::FairQueue;
use crate::overload::refusals::{Refusals, Summary};
use crate::proxies::ClientAddress;
use crate::telemetry::{RequestSpan, Telemetry, TraceIds};
use crate::transport::connection::Application;
use crate::transport::disconnect::Peer;

static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The operations, and what each needs. Method and path stand at the handler, where the OpenAPI document has them from; the
/// path as it stands there is also the route's label in metrics.
fn operations(public: Public) -> [(UtoipaMethodRouter<Route>, Needs); 9] {
    let metrics = if public.metrics { Needs::Nothing } else { Needs::Anywhere(Verb::Metrics) };
    [
        (routes!(locks::acquire), Needs::OnLock(Verb::Acquire)),
        (routes!(locks::extend), Needs::OnLock(Verb::Extend)),
        (routes!(locks::release), Needs::OnLock(Verb::Release)),
        (routes!(locks::inspect), Needs::OnLock(Verb::Inspect)),
        (routes!(locks::list), Needs::Anywhere(Verb::List)),
        (routes!(health::livez), Needs::Nothing),
        (routes!(health::readyz), Needs::Nothing),
        (routes!(health::healthz), Needs::Nothing),
        (routes!(health::metrics).layer(CompressionLayer::new()), metrics),
    ]
}

/// The paths that stand in no document, and their labels.
const PAGES: [(&str, &str); 7] = [
    ("/", "/"),
    ("/locks/", "/locks/"),
    ("/openapi.json", "/openapi.json"),
    ("/openapi-3.0.json", "/openapi-3.0.json"),
    ("/docs", "/docs"),
    ("/docs/", "/docs"),
    ("/docs/{*file}", "/docs"),
];

/// What is answered also when there is no place for another connection.
const PROBES: [&str; 4] = ["/livez", "/readyz", "/healthz", "/metrics"];

/// The pages for people, and what they need.
fn pages(document: &serde_json::Value, public: Public) -> (Router, Needs) {
    // Shared: thousands may ask for it and not read it.
    let json = |text: String| {
        let text = Bytes::from(text);
        get(move || {
            std::future::ready(([(header::CONTENT_TYPE, "application/json")], text.clone()))
        })
    };
    let pages = Router::new()
        .route("/openapi.json", json(document.to_string()))
        .route("/openapi-3.0.json", json(openapi::downgrade(document).to_string()))
        // Relative, for whoever serves all this under a prefix.
        .route("/", get(async || (StatusCode::SEE_OTHER, [(header::LOCATION, "docs/")])))
        .merge(SwaggerUi::new("/docs").config(Config::new(["../openapi.json"])))
        .layer(map_response(relative));
    (pages, if public.docs { Needs::Nothing } else { Needs::AnyKey })
}

/// The OpenAPI document, 3.1.
pub fn openapi_document() -> serde_json::Value {
    let api = OpenApiRouter::with_openapi(openapi::ApiDoc::openapi());
    let public = Public { docs: true, metrics: true };
    let api = operations(public).into_iter().fold(api, |api, (operation, _)| api.routes(operation));
    openapi::document(api.get_openapi())
}

/// The answer of a handler that has panicked.
type Panicked = fn(Box<dyn Any + Send>) -> Response;

/// The whole service: the routes, and what is done around every request.
#[derive(Clone)]
pub struct App {
    routes: CatchPanic<Router, Panicked>,
    observer: Arc<Observer>,
}

/// What hears of every request.
struct Observer {
    /// By path. As a layer of the router, where the matched path is known, `answer` would be boxed and copied for every
    /// request; so the library that axum matches paths with does it once more, over the same table.
    labels: matchit::Router<String>,
    telemetry: Arc<Telemetry>,
    audit: Arc<Audit>,
    refusals: Refusals,
    has_keys: bool,
    hosts: Hosts,
    fair_queue: Arc<FairQueue>,
    /// When it was last said that a request found no quorum.
    last_mention: Mutex<Option<Instant>>,
}

/// How often it is.
const MENTION: Duration = Duration::from_secs(1);

impl Application for App {
    fn answer(self, request: Request) -> impl Future<Output = Response> + Send {
        self.answer(request)
    }
}

impl App {
    pub fn new(
        state: AppState,
        telemetry: Arc<Telemetry>,
        audit: Arc<Audit>,
        hosts: Hosts,
    ) -> Self {
        let has_keys = !state.authenticator.is_open();
        let fair_queue = state.fair_queue.clone();
        let state = Arc::new(state);
        let (routes, labels) = router(&state);
        let routes = browser::open_to(&state.cors_origins, routes);
        Self::observed(routes, Observer::new(labels, telemetry, audit, has_keys, hosts, fair_queue))
    }

    /// Probes and metrics alone, for an address of their own: for whoever can reach that.
    pub fn of_operators(
        gateway: Arc<Gateway>,
        telemetry: Arc<Telemetry>,
        audit: Arc<Audit>,
        hosts: Hosts,
    ) -> Self {
        let state = Arc::new(AppState::open(gateway));
        let mut labels = matchit::Router::new();
        for path in PROBES {
            labels.insert(path, path.to_owned()).expect("every path is there once");
        }
        let probes =
            operations(state.public).into_iter().filter(|(_, needs)| *needs == Needs::Nothing);
        let api = probes.fold(OpenApiRouter::new(), |api, (operation, needs)| {
            let operation: UtoipaMethodRouter = operation.with_state(Route::new(&state, needs));
            api.routes(operation)
        });
        let (routes, _) = api.split_for_parts();
        let fair_queue = state.fair_queue.clone();
        let routes = routes.fallback(async || no_such_path());
        Self::observed(routes, Observer::new(labels, telemetry, audit, false, hosts, fair_queue))
    }

    /// Says how often what was refused; called from time to time.
    pub fn sum_up_refusals(&self) {
        for summary in self.observer.refusals.take() {
            let Summary { address, who, what: code, refused } = &summary;
            tracing::info!(
                address = address.map(tracing::field::display),
                who,
                code,
                refused,
                "requests refused, after those that have lines of their own"
            );
            if self.observer.audit.file().is_some() || is_denial(code) {
                self.observer.audit.refused(&summary);
            }
        }
    }

    fn observed(routes: Router, observer: Observer) -> Self {
        let panicked: Panicked = |panic| {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            ApiError::internal(format_args!("panic: {text}")).into_response()
        };
        Self { routes: CatchPanic::custom(routes, panicked), observer: Arc::new(observer) }
    }

    /// Around everything: the request id, the duration, the log line, the record, and the body of errors, which carries the
    /// id.
    pub async fn answer(mut self, mut request: Request) -> Response {
        let started = Instant::now();
        if let Some(uri) = encoded(request.uri()) {
            *request.uri_mut() = uri;
        }
        let id = match request.headers().get(&REQUEST_ID) {
            Some(given) if is_usable_id(given) => given.clone(),
            _ => new_id(),
        };
        let method = method_word(request.method());
        let Observer { labels, telemetry, has_keys, hosts, fair_queue, .. } = &*self.observer;
        let route = labels.at(request.uri().path()).map_or("", |matched| matched.value);
        let span = telemetry.request_span(method, route, request.headers());
        let trace = TraceIds::of(span.as_ref(), request.headers());
        let peer = request.extensions().get::<Peer>();
        let address = peer.map(Peer::address);
        let place = peer.map(|peer| peer.slot().clone());
        // Kept to the end: a client that is lost would come back with another line.
        let client = peer.map(|peer| peer.client().clone());
        let line = client.as_ref().map(|client| &client.queue);
        let record = self.observer.record(&id, &mut request);

        let is_probe = PROBES.contains(&request.uri().path());
        if let (Some(line), false) = (line, *has_keys) {
            fair_queue.take(line, is_probe).await;
        }
        let mut response = if !is_probe && place.is_some_and(|place| !place.may_serve()) {
            ApiError::no_place().into_response()
        } else if let Err(error) = hosts.check(&request) {
            error.into_response()
        } else {
            match RequestSpan::within(span.as_ref(), self.routes.call(request)).await {
                Ok(response) => response.map(Body::new),
                Err(never) => match never {},
            }
        };
        // With keys only those are told apart who have shown one.
        let had_turn = !has_keys || record.as_ref().is_some_and(AuditGuard::had_turn);
        let problem = response.extensions_mut().remove::<Problem>();
        // The page's own router says 404 without a body.
        let plain =
            || (response.status() == StatusCode::NOT_FOUND).then(|| no_such_path().problem());
        let problem = problem.or_else(plain);
        let status = response.status();
        let is_told = self.observer.is_told(status, problem.as_ref(), address, record.as_ref());
        if let Some(record) = record {
            let is_denied = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
            let problem = problem.as_ref().map(|problem| problem.code.as_str());
            let end = RequestEnd { status: status.as_u16(), problem, is_denied };
            if is_told { record.end(end) } else { record.summed_up() }
        }
        let elapsed = started.elapsed();
        telemetry.http(method, route, status.as_u16(), elapsed);
        let in_full = is_told && self.observer.may_mention(problem.as_ref());
        let told = RequestLogLine {
            id: &id,
            trace: trace.as_ref(),
            method,
            route,
            status,
            address,
            elapsed,
            in_full,
        };
        told.log(problem.as_ref());
        span.into_iter().for_each(|span| {
            span.end(status.as_u16(), problem.as_ref().map(|problem| &*problem.code))
        });
        if let Some(problem) = problem {
            problem.render(&id, &mut response);
        }
        response.headers_mut().insert(REQUEST_ID.clone(), id);
        // After all is told: who hangs up in line is told of nevertheless.
        if let (Some(line), false) = (line, had_turn) {
            fair_queue.take(line, is_probe).await;
        }
        response
    }
}

impl Observer {
    fn new(
        labels: matchit::Router<String>,
        telemetry: Arc<Telemetry>,
        audit: Arc<Audit>,
        has_keys: bool,
        hosts: Hosts,
        fair_queue: Arc<FairQueue>,
    ) -> Self {
        let (refusals, last_mention) = Default::default();
        Self { labels, telemetry, audit, refusals, has_keys, hosts, fair_queue, last_mention }
    }

    /// The audit record of a request that may need one.
    fn record(&self, id: &HeaderValue, request: &mut Request) -> Option<AuditGuard> {
        // Without keys, only force can be denied, and pages of others.
        let may_be_denied = self.has_keys
            || request.uri().query().is_some()
            || site::is_of_browser(request.headers());
        if !may_be_denied && self.audit.file().is_none() {
            return None;
        }
        let peer = request.extensions().get::<Peer>();
        let address = peer.map(Peer::address);
        let proxy = peer.and_then(Peer::proxy);
        let record = AuditGuard::new(self.audit.clone(), text(id), address, proxy);
        request.extensions_mut().insert(record.context());
        Some(record)
    }

    /// Without a quorum requests fail by the thousand, of which one now and then is enough.
    fn may_mention(&self, problem: Option<&Problem>) -> bool {
        if !problem.is_some_and(|problem| {
            matches!(problem.code.as_str(), "quorum_unavailable" | "outcome_unknown")
        }) {
            return true;
        }
        let mut last = self.last_mention.lock();
        let may = last.is_none_or(|last| last.elapsed() >= MENTION);
        if may {
            *last = Some(Instant::now());
        }
        may
    }

    /// Whether it is told of a request for itself: of refusals, which strangers can bring about at will, only of the first
    /// of a kind to each client.
    fn is_told(
        &self,
        status: StatusCode,
        problem: Option<&Problem>,
        address: Option<ClientAddress>,
        record: Option<&AuditGuard>,
    ) -> bool {
        let (Some(problem), Some(address), true) = (problem, address, is_refusal(status, problem))
        else {
            return true;
        };
        let who = record.and_then(AuditGuard::who);
        self.refusals.is_first(address.ip, who.as_deref(), &problem.code)
    }
}

/// Whether a request was turned away before anything was done, for what it is, by whom, or how many there are.
fn is_refusal(status: StatusCode, problem: Option<&Problem>) -> bool {
    const REFUSALS: [StatusCode; 5] = [
        StatusCode::BAD_REQUEST,
        StatusCode::UNAUTHORIZED,
        StatusCode::FORBIDDEN,
        StatusCode::MISDIRECTED_REQUEST,
        StatusCode::TOO_MANY_REQUESTS,
    ];
    let of_service =
        |problem: &Problem| matches!(problem.code.as_str(), "overloaded" | "audit_unavailable");
    REFUSALS.contains(&status) || problem.is_some_and(of_service)
}

/// What the log tells of a request.
struct RequestLogLine<'a> {
    id: &'a HeaderValue,
    trace: Option<&'a TraceIds>,
    method: &'static str,
    route: &'a str,
    status: StatusCode,
    address: Option<ClientAddress>,
    elapsed: Duration,
    in_full: bool,
}

impl RequestLogLine<'_> {
    fn log(&self, problem: Option<&Problem>) {
        macro_rules! log {
            ($level:ident, $message:literal) => {
                tracing::$level!(
                    request_id = text(self.id),
                    trace_id = self.trace.map(|ids| ids.trace.as_str()),
                    span_id = self.trace.map(|ids| ids.span.as_str()),
                    method = self.method,
                    route = self.route,
                    status = self.status.as_u16(),
                    code = problem.map(|problem| problem.code.as_str()),
                    address = self.address.map(tracing::field::display),
                    cause = problem.and_then(|problem| problem.cause.as_deref()),
                    elapsed_ms = self.elapsed.as_micros() as f64 / 1e3,
                    $message
                )
            };
        }
        match problem {
            Some(Problem { cause: Some(_), .. }) => log!(error, "request failed"),
            // Sending everybody away while shutting down is no failure, and there may be thousands.
            Some(problem) if problem.code == "draining" => log!(debug, "request"),
            _ if !self.in_full => log!(debug, "request"),
            _ if self.status.is_server_error() => log!(warn, "request failed"),
            Some(_) if is_refusal(self.status, problem) => log!(info, "request refused"),
            _ => log!(debug, "request"),
        }
    }
}

/// The routes, and the label of each path.
fn router(state: &Arc<AppState>) -> (Router, matchit::Router<String>) {
    let api = OpenApiRouter::with_openapi(openapi::ApiDoc::openapi());
    let api = operations(state.public).into_iter().fold(api, |api, (operation, needs)| {
        let operation: UtoipaMethodRouter = operation.with_state(Route::new(state, needs));
        api.routes(operation)
    });
    let (router, generated) = api.split_for_parts();
    let mut labels = matchit::Router::new();
    let operations = generated.paths.paths.keys().map(|path| (path.as_str(), path.as_str()));
    for (path, label) in operations.chain(PAGES) {
        labels.insert(path, label.to_owned()).expect("every path is there once");
    }
    let (pages, needs) = pages(&openapi::document(&generated), state.public);
    let pages = pages.layer(from_fn_with_state(Route::new(state, needs), access::require));
    let router = router
        .route("/locks/", any(locks::no_name))
        .merge(browser::guarded(pages))
        .fallback(async || no_such_path())
        .method_not_allowed_fallback(async || {
            METHOD_NOT_ALLOWED.because(
                "this path does not take this method; the Allow header lists those it takes",
            )
        });
    (router, labels)
}

/// The library's own way from /docs to /docs/.
async fn relative(mut response: Response) -> Response {
    if let Some(location) =
        response.headers_mut().get_mut(header::LOCATION).filter(|at| *at == "/docs/")
    {
        *location = HeaderValue::from_static("docs/");
    }
    response
}

fn no_such_path() -> ApiError {
    NOT_FOUND.because("the paths of this service are listed under /docs and in /openapi.json")
}

/// The path of a lock with the slashes of its name encoded, where they are not: some clients do not encode them, and proxies
/// decode them on the way.
fn encoded(uri: &Uri) -> Option<Uri> {
    let name = uri.path().strip_prefix("/locks/").filter(|name| name.contains('/'))?;
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    let path = format!("/locks/{}{query}", name.replace('/', "%2F")).parse().ok()?;
    // The rest stays: a target in absolute form names the host that is checked.
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(path);
    Uri::from_parts(parts).ok()
}

fn text(value: &HeaderValue) -> String {
    String::from_utf8_lossy(value.as_bytes()).into_owned()
}

fn is_usable_id(value: &HeaderValue) -> bool {
    (1..=128).contains(&value.len()) && value.as_bytes().iter().all(u8::is_ascii_graphic)
}

/// 16 hexadecimal digits. Only has to be findable in a log.
fn new_id() -> HeaderValue {
    let id = format!("{:016x}", fastrand::u64(..));
    HeaderValue::try_from(id).unwrap_or_else(|_| HeaderValue::from_static("0"))
}

/// Metric labels come from fixed lists, whatever a client sends.
fn method_word(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::PUT => "PUT",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        _ => "_OTHER",
    }
}

#[cfg(test)]
mod tests;
