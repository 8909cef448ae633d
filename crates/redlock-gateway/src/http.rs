//! The table of routes, and the layers around every request: identification, fair queue, admission,
//! routing, accounting. Only this module and those below it know axum's routes and extractors.

pub mod access;
mod acquire;
mod browser;
mod console;
mod docs;
pub mod error;
mod extend_many;
pub mod extract;
mod gate;
mod health;
mod hold;
mod locks;
pub mod openapi;
mod render;
mod requests;
mod sets;
mod site;
mod swagger;
mod token;
mod watch;
pub mod wire;

use std::any::Any;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use futures_util::FutureExt;
use http::{HeaderValue, Method, StatusCode, Uri, header};
use redlock_api::ProblemCode;
use redlock_api::headers::REQUEST_ID;
use tower::Service;
use tower_http::catch_panic::CatchPanic;
use tower_http::compression::CompressionLayer;
use utoipa::OpenApi;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter, UtoipaMethodRouterExt};
use utoipa_axum::routes;

pub use self::access::AppState;
use self::access::{Needs, Route};
use self::error::{ApiError, ErrorReport, METHOD_NOT_ALLOWED, NOT_FOUND, is_denial};
pub use self::site::Hosts;
use crate::audit::{Audit, AuditGuard, RequestEnd};
use crate::auth::{Verb, holds_secret};
use crate::config::Public;
use crate::gateway::Gateway;
use crate::overload::clients::{Client, FairQueue, network};
use crate::overload::large_messages::{self, LargeMessages, LargePermit};
use crate::overload::refusals::{Refusals, Summary};
use crate::proxies::ClientAddress;
use crate::remedy::PublicUrl;
use crate::telemetry::{Mentions, RequestSpan, Telemetry, TraceIds};
use crate::transport::connection::Application;
use crate::transport::connections::{ConnectionSlot, NoSlot};
use crate::transport::disconnect::Peer;

/// The operations, and the permission that each needs. The handler declares its method and path.
/// The OpenAPI document takes them from there, and the path is also the route's label in metrics.
fn operations(public: Public) -> [(UtoipaMethodRouter<Route>, Needs); 15] {
    let metrics = needs_for_metrics(public);
    [
        (routes!(locks::acquire), Needs::OnLock(Verb::Acquire)),
        (routes!(locks::extend), Needs::OnLock(Verb::Extend)),
        (routes!(locks::release), Needs::OnLock(Verb::Release)),
        (routes!(locks::inspect), Needs::OnLock(Verb::Inspect)),
        (routes!(locks::list), Needs::Anywhere(Verb::List)),
        (routes!(extend_many::extend_many), Needs::Anywhere(Verb::Extend)),
        (routes!(sets::acquire_set), Needs::Anywhere(Verb::Acquire)),
        (routes!(sets::release_set), Needs::Anywhere(Verb::Release)),
        (routes!(requests::create), Needs::Anywhere(Verb::Acquire)),
        (routes!(requests::inspect), Needs::AnyKey),
        (routes!(requests::cancel), Needs::AnyKey),
        (routes!(health::livez), Needs::Nothing),
        (routes!(health::readyz), Needs::Nothing),
        (routes!(health::healthz), Needs::Nothing),
        (routes!(health::metrics).layer(CompressionLayer::new()), metrics),
    ]
}

/// What callers need to see metrics and their history.
fn needs_for_metrics(public: Public) -> Needs {
    if public.metrics { Needs::Nothing } else { Needs::Anywhere(Verb::Metrics) }
}

/// Paths outside the OpenAPI document, and their labels in metrics.
const PAGES: [(&str, &str); 11] = [
    ("/", "/"),
    ("/locks/", "/locks/"),
    ("/openapi.json", "/openapi.json"),
    ("/openapi-3.0.json", "/openapi-3.0.json"),
    ("/console", "/console"),
    ("/console/", "/console"),
    ("/console/{file}", "/console"),
    ("/console/history", "/console/history"),
    ("/docs", "/docs"),
    ("/docs/", "/docs"),
    ("/docs/{*file}", "/docs"),
];

/// Paths that the gateway serves even when all connection slots are taken.
const PROBES: [&str; 4] = ["/livez", "/readyz", "/healthz", "/metrics"];

/// The OpenAPI documents 3.1 and 3.0 as JSON. They are made at the first request. All answers share one
/// copy of each: thousands of clients may request a document and not read the answer.
static DOCUMENTS: LazyLock<[Bytes; 2]> = LazyLock::new(|| {
    let document = openapi::served(openapi_document());
    [&document, &openapi::downgrade(&document)].map(|document| document.to_string().into())
});

/// The pages for people, and what callers need to see them.
fn pages(public: Public) -> (Router, Needs) {
    let text = |kind: &'static str, text: Bytes| ([(header::CONTENT_TYPE, kind)], text);
    let document = move |at: usize| {
        get(move || std::future::ready(text("application/json", DOCUMENTS[at].clone())))
    };
    let styles = text("text/css; charset=utf-8", docs::STYLES.into());
    let pages = Router::new()
        .route("/openapi.json", document(0))
        .route("/openapi-3.0.json", document(1))
        // A relative path works behind a proxy that adds a prefix.
        .route("/", get(async || (StatusCode::SEE_OTHER, [(header::LOCATION, "docs/")])))
        .route("/docs", get(async || (StatusCode::SEE_OTHER, [(header::LOCATION, "docs/")])))
        .route("/docs/", get(async || docs_file("")))
        .route("/docs/api", get(async || (StatusCode::SEE_OTHER, [(header::LOCATION, "api/")])))
        .route("/docs/{*file}", get(async |Path(file): Path<String>| docs_file(&file)))
        .route("/docs/pages.css", get(move || std::future::ready(styles.clone())));
    (pages, if public.docs { Needs::Nothing } else { Needs::AnyKey })
}

/// Serves the console. Its files need no key; the calls of the page do.
fn console_pages(state: &Arc<AppState>) -> Router {
    let file = |kind: &'static str, text: &'static str| {
        get(move || std::future::ready(([(header::CONTENT_TYPE, kind)], text)))
    };
    // A relative path works behind a proxy that adds a prefix.
    let pages = Router::new()
        .route("/console", get(async || (StatusCode::SEE_OTHER, [(header::LOCATION, "console/")])))
        .route("/console/", file("text/html; charset=utf-8", console::INDEX))
        .route(
            "/console/history",
            get(console::history).with_state(Route::new(state, needs_for_metrics(state.public))),
        );
    console::FILES.iter().chain(&console::SHARED).fold(
        pages,
        |pages, console::File { name, kind, text }| {
            pages.route(&format!("/console/{name}"), file(kind, text))
        },
    )
}

/// A page of the documentation, a picture, or a file of the page about the API.
fn docs_file(name: &str) -> Response {
    if let Some(html) = docs::page(name) {
        return ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], html).into_response();
    }
    if let Some(svg) = docs::picture(name) {
        let headers = [
            (header::CONTENT_TYPE, "image/svg+xml"),
            (header::CONTENT_SECURITY_POLICY, browser::PICTURE_POLICY),
        ];
        return (headers, svg).into_response();
    }
    let Some(name) = name.strip_prefix("api/") else {
        return StatusCode::NOT_FOUND.into_response();
    };
    match swagger::file(if name.is_empty() { swagger::INDEX } else { name }) {
        Ok(Some(file)) => ([(header::CONTENT_TYPE, file.kind)], file.bytes.clone()).into_response(),
        Ok(None) => StatusCode::NOT_FOUND.into_response(),
        Err(error) => ApiError::internal(error).into_response(),
    }
}

/// The OpenAPI 3.1 document.
pub fn openapi_document() -> serde_json::Value {
    let api = OpenApiRouter::with_openapi(openapi::ApiDoc::openapi());
    let public = Public { docs: true, metrics: true };
    let api = operations(public).into_iter().fold(api, |api, (operation, _)| api.routes(operation));
    openapi::document(api.get_openapi())
}

/// Makes the answer to a request whose handler panicked.
type Panicked = fn(Box<dyn Any + Send>) -> Response;

type Routes = CatchPanic<Router, Panicked>;

/// The service: the routes, and the layers around every request.
#[derive(Clone)]
pub struct App {
    routes: Routes,
    observer: Arc<Observer>,
}

/// The state of the layers around the routes.
struct Observer {
    /// Finds the label of a path. A layer inside axum's router would know the path that axum
    /// matched, but axum would box and clone such a layer for every request. So the path is matched
    /// a second time here, with axum's path library and the same table.
    labels: matchit::Router<String>,
    telemetry: Arc<Telemetry>,
    audit: Arc<Audit>,
    refusals: Refusals,
    has_keys: bool,
    hosts: Hosts,
    fair_queue: Arc<FairQueue>,
    large_answers: Arc<LargeMessages>,
    public_url: PublicUrl,
    logs_lock_names: bool,
    /// Requests that failed for want of a quorum.
    without_quorum: Mentions,
}

/// Time between two log lines at full level about requests without a quorum.
const MENTION_INTERVAL: Duration = Duration::from_secs(60);

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
        let state = Arc::new(state);
        let (routes, labels) = router(&state);
        let routes = browser::open_to(&state.cors_origins, routes);
        let fair_queue = state.fair_queue.clone();
        let observer = Observer::new(labels, telemetry, audit, has_keys, hosts, fair_queue);
        let large_answers = state.gateway.large_answers().clone();
        let public_url = state.public_url.clone();
        Self::observed(routes, Observer { public_url, large_answers, ..observer })
    }

    /// Sets whether log lines at level warn and error name the lock.
    pub fn logging_lock_names(mut self, logs_lock_names: bool) -> Self {
        if let Some(observer) = Arc::get_mut(&mut self.observer) {
            observer.logs_lock_names = logs_lock_names;
        }
        self
    }

    /// The service of the operators' address: only probes and metrics, without keys.
    pub fn of_operators(
        gateway: Arc<Gateway>,
        telemetry: Arc<Telemetry>,
        audit: Arc<Audit>,
        hosts: Hosts,
        public_url: PublicUrl,
    ) -> Self {
        let state = Arc::new(AppState { public_url, ..AppState::open(gateway) });
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
        let routes = routes.fallback(async || no_such_path());
        let fair_queue = state.fair_queue.clone();
        Self::observed(routes, Observer::new(labels, telemetry, audit, false, hosts, fair_queue))
    }

    /// Logs, and writes to the audit log, how many requests were refused without a line of their
    /// own. To be called at the end of each window of the refusals.
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

    /// Answers a request. Passes the request through the layers around the routes, in the order of
    /// the calls below.
    pub async fn answer(mut self, mut request: Request) -> Response {
        let observer = &*self.observer;
        let is_head = request.method() == Method::HEAD;
        let mut context = observer.identify(&mut request);
        if !observer.has_keys {
            observer.take_turn(context.client.as_ref(), context.is_probe).await;
        }
        let mut response = match observer.admit(&mut context, &request) {
            Ok(()) => match route(&mut self.routes, request, context.span.as_ref()).await {
                Ok(response) => response.map(Body::new),
            },
            Err(error) => error.into_response(),
        };
        if context.may_be_refused_late()
            && let Some(size) = large_messages::large(response.body())
            && let Some(client) = context.payer()
        {
            response = observer.bound(response, size, &client);
        }
        let is_turn_due = observer.is_turn_due(&context);
        let mut error = take_error(&mut response);
        if let Some(error) = &mut error {
            error.name_client(|| context.client_name(observer.has_keys));
        }
        // The accounting takes the record of the request, which knows the payer.
        let has_holders = error.as_ref().is_some_and(ErrorReport::has_holders);
        let payer = has_holders.then(|| context.payer()).flatten();
        observer.account(&mut context, response.status(), error.as_ref());
        finish(&mut response, error, &observer.public_url, context.id, |size| {
            observer.large_answers.take(&payer.as_deref()?.large_answers, size)
        });
        if is_head {
            leave_out_body(&mut response);
        }
        // The queue comes after the accounting. So a request whose client hangs up in the queue is
        // accounted for.
        if is_turn_due {
            observer.take_turn(context.client.as_ref(), context.is_probe).await;
        }
        response
    }
}

/// A request, as far as the layers around the routes know it.
struct RequestContext<'a> {
    started: Instant,
    id: HeaderValue,
    method: &'static str,
    /// The label of the path. Empty for an unknown path.
    route: &'a str,
    span: Option<RequestSpan>,
    trace: Option<TraceIds>,
    address: Option<ClientAddress>,
    /// The slot of the connection, until the request is admitted.
    place: Option<Arc<ConnectionSlot>>,
    /// Held until the request ends. Otherwise the client could be forgotten as idle in between, and
    /// its next request would get a new queue.
    client: Option<Arc<Client>>,
    is_probe: bool,
    /// The lock's name, if log lines may have it.
    lock: Option<String>,
    record: Option<AuditGuard>,
}

impl RequestContext<'_> {
    /// Whether a refusal may replace the answer: the request has changed nothing and is no probe, and
    /// the answer takes memory of its own. All answers with a page share one copy of the page.
    fn may_be_refused_late(&self) -> bool {
        let is_page = || PAGES.iter().any(|(_, label)| *label == self.route);
        matches!(self.method, "GET" | "HEAD") && !self.is_probe && !is_page()
    }

    /// The client that the memory of a large answer counts for: that of the API key, or of the address.
    fn payer(&self) -> Option<Arc<Client>> {
        let of_key = self.record.as_ref().and_then(AuditGuard::client);
        of_key.or_else(|| self.client.clone())
    }

    /// What the client's shares are counted by: its API key, or its address.
    fn client_name(&self, has_keys: bool) -> Option<String> {
        let key = self.record.as_ref().filter(|_| has_keys).and_then(AuditGuard::who);
        let address = || match network(self.address?.ip) {
            ip @ IpAddr::V4(_) => Some(format!("the address {ip}")),
            ip @ IpAddr::V6(_) => Some(format!("the network {ip}/64")),
        };
        key.map(|key| format!("the key {:?}", key.name)).or_else(address)
    }
}

/// Routing: calls the handler of the path, with the request's span as the parent of spans that
/// start there.
fn route(
    routes: &mut Routes,
    request: Request,
    span: Option<&RequestSpan>,
) -> impl Future<Output = Result<<Routes as Service<Request>>::Response, Infallible>> {
    // Not `async`: such a function would store the request in its future twice.
    RequestSpan::within(span, routes.call(request))
}

/// Takes the problem out of an answer, if the answer is an error.
fn take_error(response: &mut Response) -> Option<ErrorReport> {
    let error = response.extensions_mut().remove::<ErrorReport>();
    // The documentation pages have a router of their own, whose 404 has no body.
    let is_bare = error.is_none() && response.status() == StatusCode::NOT_FOUND;
    if is_bare { Some(no_such_path().report()) } else { error }
}

/// Finish: writes the body of an error and the request id. `memory` takes the memory for a large body.
/// If there is none, the body does not name the holders of slots.
fn finish(
    response: &mut Response,
    error: Option<ErrorReport>,
    url: &PublicUrl,
    id: HeaderValue,
    memory: impl Fn(usize) -> Option<LargePermit>,
) {
    if let Some(error) = error {
        error.render(&id, url, response, memory);
    }
    response.headers_mut().insert(REQUEST_ID.clone(), id);
}

/// Removes the body of an answer to HEAD, and keeps its length. The library does so for HTTP/1.1
/// only, and the routes do so for their own answers only.
fn leave_out_body(response: &mut Response) {
    let body = std::mem::take(response.body_mut());
    if let Some(length) = http_body::Body::size_hint(&body).exact().filter(|length| *length > 0) {
        response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(length));
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
        Self {
            labels,
            telemetry,
            audit,
            refusals: Refusals::default(),
            has_keys,
            hosts,
            fair_queue,
            large_answers: Arc::default(),
            public_url: PublicUrl::default(),
            logs_lock_names: false,
            without_quorum: Mentions::every(MENTION_INTERVAL),
        }
    }

    /// Identification: gives the request an id, a label, a span and an audit record, and finds its
    /// client.
    fn identify(&self, request: &mut Request) -> RequestContext<'_> {
        let started = Instant::now();
        if let Some(uri) = with_encoded_slashes(request.uri()) {
            *request.uri_mut() = uri;
        }
        let id = match request.headers().get(&REQUEST_ID) {
            Some(given) if is_usable_id(given) => given.clone(),
            _ => new_id(),
        };
        let method = method_word(request.method());
        let route = self.labels.at(request.uri().path()).map_or("", |matched| matched.value);
        let span = self.telemetry.request_span(method, route, request.headers());
        let trace = TraceIds::of(span.as_ref(), request.headers());
        let peer = request.extensions().get::<Peer>();
        let address = peer.map(Peer::address);
        let place = peer.map(|peer| peer.slot().clone());
        let client = peer.map(|peer| peer.client().clone());
        let is_probe = PROBES.contains(&request.uri().path());
        let lock = self.logs_lock_names.then(|| access::lock_in(request.uri())).flatten();
        let record = self.record(&id, request);
        RequestContext {
            started,
            id,
            method,
            route,
            span,
            trace,
            address,
            place,
            client,
            is_probe,
            lock,
            record,
        }
    }

    /// Takes the memory for a large answer until the client has read it, see [`LargeMessages`]. If there
    /// is none, returns a refusal instead.
    fn bound(&self, response: Response, size: usize, client: &Client) -> Response {
        let Some(permit) = self.large_answers.take(&client.large_answers, size) else {
            return ApiError::no_memory_for_answer(size).into_response();
        };
        let (parts, body) = response.into_parts();
        // The handlers make such answers in one piece, so this waits for nothing.
        match axum::body::to_bytes(body, size).now_or_never() {
            Some(Ok(bytes)) => {
                Response::from_parts(parts, large_messages::bounded(bytes, permit).into())
            }
            Some(Err(error)) => ApiError::internal(error).into_response(),
            None => ApiError::internal("an answer of a known size is not complete").into_response(),
        }
    }

    /// Fair queue: waits for the turn of the client, if the client is known.
    async fn take_turn(&self, client: Option<&Arc<Client>>, is_probe: bool) {
        if let Some(client) = client {
            self.fair_queue.take(&client.queue, is_probe).await;
        }
    }

    /// Whether the request must still take its turn in the fair queue, before its answer is sent.
    /// On a gateway with keys, a caller with a valid key has taken its turn on the way in, in the
    /// queue of its principal. All others take it now, in the queue of their address.
    fn is_turn_due(&self, context: &RequestContext<'_>) -> bool {
        self.has_keys && context.record.as_ref().and_then(AuditGuard::client).is_none()
    }

    /// Admission: refuses a request whose connection has no regular slot, or that is for another
    /// host.
    fn admit(&self, context: &mut RequestContext<'_>, request: &Request) -> Result<(), ApiError> {
        let place = context.place.take();
        let peer = request.extensions().get::<Peer>();
        match peer.and_then(Peer::refused).filter(|_| !context.is_probe) {
            None => {}
            Some(NoSlot::Full) => return Err(ApiError::no_place()),
            Some(NoSlot::Client) => return Err(ApiError::beyond_share()),
        }
        // This check comes last, because it may close an idle connection to make room.
        if !context.is_probe && place.is_some_and(|place| !place.may_serve()) {
            return Err(ApiError::no_place());
        }
        self.hosts.check(request)
    }

    /// Accounting: audit record, metrics, log line and span.
    fn account(
        &self,
        context: &mut RequestContext<'_>,
        status: StatusCode,
        error: Option<&ErrorReport>,
    ) {
        let RequestContext {
            started, id, method, route, span, trace, address, record, lock, ..
        } = context;
        let has_own_line = self.has_own_line(status, error, *address, record.as_ref());
        let key = error.and(record.as_ref()).filter(|_| self.has_keys).and_then(AuditGuard::who);
        if let Some(record) = record.take() {
            if let (Some(code), Some(address)) = (record.refused_part(), *address) {
                let is_first = self.refusals.is_first(address.ip, record.who(), code);
                record.context().entry().refused_are_summed_up = !is_first;
            }
            let is_denied = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
            let problem = error.map(|error| error.code.as_str());
            let end = RequestEnd { status: status.as_u16(), problem, is_denied };
            let taker = record.context().entry().taker.take();
            match taker {
                // If the stream has ended meanwhile, the record says that the client is gone.
                Some(taker) => drop(taker.send(record)),
                None if has_own_line => record.end(end),
                None => record.summed_up(),
            }
        }
        let elapsed = started.elapsed();
        self.telemetry.http(method, route, status.as_u16(), elapsed);
        let (in_full, without_quorum) =
            if has_own_line { self.may_mention(error) } else { (false, None) };
        let line = RequestLogLine {
            id,
            trace: trace.as_ref(),
            method,
            route,
            status,
            address: *address,
            key: key.as_ref().map(|key| &*key.name),
            lock: lock.as_deref(),
            is_probe: context.is_probe,
            without_quorum,
            elapsed,
            in_full,
        };
        line.log(error);
        if let Some(span) = span.take() {
            span.end(status.as_u16(), error.map(|error| error.code.as_str()));
        }
    }

    /// The audit record of a request, if the request may need one.
    fn record(&self, id: &HeaderValue, request: &mut Request) -> Option<AuditGuard> {
        // Without keys, only two kinds of requests can be denied: forced releases, which have a
        // query, and requests that pages of other sites made a browser send.
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

    /// Whether to log a failure at its full level. Without a quorum, thousands of requests fail,
    /// and one line per [`MENTION_INTERVAL`] is enough. Such a line has the number of requests that
    /// failed since the last one.
    fn may_mention(&self, error: Option<&ErrorReport>) -> (bool, Option<u64>) {
        let without_quorum = |error: &ErrorReport| {
            matches!(error.code, ProblemCode::QuorumUnavailable | ProblemCode::OutcomeUnknown)
        };
        if !error.is_some_and(without_quorum) {
            return (true, None);
        }
        let since = self.without_quorum.count();
        (since.is_some(), since)
    }

    /// Whether the request gets its own line in the log and in the audit log. Strangers can cause
    /// any number of refusals. So only the first refusals of a kind to each client get lines, and
    /// the others are summed up.
    fn has_own_line(
        &self,
        status: StatusCode,
        error: Option<&ErrorReport>,
        address: Option<ClientAddress>,
        record: Option<&AuditGuard>,
    ) -> bool {
        let (Some(error), Some(address), true) = (error, address, is_refusal(status, error)) else {
            return true;
        };
        let who = record.and_then(AuditGuard::who);
        self.refusals.is_first(address.ip, who, error.code.as_str())
    }
}

/// Whether a request was refused before anything was done, because of its form, its sender, or an
/// overload.
fn is_refusal(status: StatusCode, error: Option<&ErrorReport>) -> bool {
    const REFUSALS: [StatusCode; 5] = [
        StatusCode::BAD_REQUEST,
        StatusCode::UNAUTHORIZED,
        StatusCode::FORBIDDEN,
        StatusCode::MISDIRECTED_REQUEST,
        StatusCode::TOO_MANY_REQUESTS,
    ];
    let of_service = |error: &ErrorReport| {
        matches!(error.code, ProblemCode::Overloaded | ProblemCode::AuditUnavailable)
    };
    REFUSALS.contains(&status) || error.is_some_and(of_service)
}

const NO_LOCK: Option<&str> = None;

/// The log line of a request.
struct RequestLogLine<'a> {
    id: &'a HeaderValue,
    trace: Option<&'a TraceIds>,
    method: &'static str,
    route: &'a str,
    status: StatusCode,
    address: Option<ClientAddress>,
    /// The name of the API key, if the request failed.
    key: Option<&'a str>,
    lock: Option<&'a str>,
    is_probe: bool,
    /// How many requests failed for want of a quorum since the last line about one.
    without_quorum: Option<u64>,
    elapsed: Duration,
    in_full: bool,
}

impl RequestLogLine<'_> {
    fn log(&self, error: Option<&ErrorReport>) {
        macro_rules! log {
            ($level:ident, $lock:expr, $message:literal) => {
                tracing::$level!(
                    request_id = text(self.id),
                    trace_id = self.trace.map(|ids| ids.trace.as_str()),
                    span_id = self.trace.map(|ids| ids.span.as_str()),
                    method = self.method,
                    route = self.route,
                    status = self.status.as_u16(),
                    code = error.map(|error| error.code.as_str()),
                    address = self.address.map(tracing::field::display),
                    key = self.key,
                    lock = $lock,
                    detail = self.detail(error),
                    without_quorum = self.without_quorum,
                    cause = error.and_then(|error| error.cause.as_deref()),
                    elapsed_ms = self.elapsed.as_micros() as f64 / 1e3,
                    $message
                )
            };
        }
        match error {
            Some(ErrorReport { cause: Some(_), .. }) => log!(error, self.lock, "request failed"),
            // During a shutdown the gateway refuses every new lock. That is no failure, and there
            // may be thousands of such requests.
            Some(ErrorReport { code: ProblemCode::Draining, .. }) => {
                log!(debug, NO_LOCK, "request")
            }
            _ if !self.in_full => log!(debug, NO_LOCK, "request"),
            // The probe's sender sees the answer. The log has a line about the cause of its own.
            _ if self.is_probe => log!(debug, NO_LOCK, "request"),
            _ if self.status.is_server_error() => log!(warn, self.lock, "request failed"),
            Some(_) if is_refusal(self.status, error) => log!(info, NO_LOCK, "request refused"),
            _ => log!(debug, NO_LOCK, "request"),
        }
    }

    /// The detail of a refusal because of a limit. It names the limit's flag and the client.
    fn detail<'e>(&self, error: Option<&'e ErrorReport>) -> Option<&'e str> {
        error.filter(|error| error.is_of_a_share()).map(|error| error.problem.detail.as_str())
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
    let (pages, needs) = pages(state.public);
    let pages = pages.layer(from_fn_with_state(Route::new(state, needs), access::require));
    let router = router
        .route("/locks/", any(locks::no_name))
        .merge(browser::guarded(pages))
        .merge(browser::guarded(console_pages(state)))
        .fallback(async || no_such_path())
        .method_not_allowed_fallback(async || METHOD_NOT_ALLOWED.as_usual());
    (router, labels)
}

fn no_such_path() -> ApiError {
    NOT_FOUND.as_usual()
}

/// Percent-encodes the slashes of a lock's name in the path. Returns `None` if there are none. Some
/// clients do not encode these slashes, and some proxies decode them on the way.
fn with_encoded_slashes(uri: &Uri) -> Option<Uri> {
    let name = uri.path().strip_prefix("/locks/").filter(|name| name.contains('/'))?;
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    let path = format!("/locks/{}{query}", name.replace('/', "%2F")).parse().ok()?;
    // The other parts of the URI stay, because the host of an absolute target is checked later.
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(path);
    Uri::from_parts(parts).ok()
}

fn text(value: &HeaderValue) -> String {
    String::from_utf8_lossy(value.as_bytes()).into_owned()
}

/// Whether a request may name itself so. The log shows the id, so it must not hold a token or a key.
fn is_usable_id(value: &HeaderValue) -> bool {
    let is_visible = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
    let is_usable = |text: &str| is_visible(text) && !holds_secret(text);
    (1..=128).contains(&value.len()) && value.to_str().is_ok_and(is_usable)
}

/// A new request id: 16 random hexadecimal digits. The id serves to find the request in the log, so
/// it need not be hard to guess.
fn new_id() -> HeaderValue {
    let id = format!("{:016x}", fastrand::u64(..));
    HeaderValue::try_from(id).unwrap_or_else(|_| HeaderValue::from_static("0"))
}

/// The label of a method in metrics. Labels come from fixed lists, so clients cannot create new
/// ones.
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
