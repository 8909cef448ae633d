//! Router and layers. Below this module are the only files that know axum.

mod access;
pub mod browser;
pub mod error;
pub mod health;
pub mod locks;
pub mod openapi;
pub mod wire;

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{FromRef, Request};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use tower::Service;
use tower_http::catch_panic::CatchPanic;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use utoipa_swagger_ui::{Config, SwaggerUi};

use self::error::ApiError;
use self::wire::Problem;
use crate::audit::{self, Audit};
use crate::auth::Guard;
use crate::config::{Origin, Public};
use crate::gateway::Gateway;
use crate::peer::Peer;
use crate::telemetry::Telemetry;

static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
static TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// What handlers need.
#[derive(Clone)]
pub struct Rooms {
    pub gateway: Arc<Gateway>,
    pub guard: Arc<Guard>,
    pub public: Public,
}

impl Rooms {
    /// For everybody.
    pub fn open(gateway: Arc<Gateway>) -> Self {
        Self { gateway, guard: Arc::new(Guard::open()), public: Public { docs: true, metrics: true } }
    }
}

impl FromRef<Rooms> for Arc<Gateway> {
    fn from_ref(rooms: &Rooms) -> Self {
        rooms.gateway.clone()
    }
}

impl FromRef<Rooms> for Arc<Guard> {
    fn from_ref(rooms: &Rooms) -> Self {
        rooms.guard.clone()
    }
}

fn api() -> OpenApiRouter<Rooms> {
    OpenApiRouter::with_openapi(openapi::ApiDoc::openapi())
        .routes(routes!(locks::acquire, locks::extend, locks::release, locks::inspect))
        .routes(routes!(locks::list))
        .routes(routes!(health::livez))
        .routes(routes!(health::readyz))
        .routes(routes!(health::healthz))
        .routes(routes!(health::metrics))
}

/// The OpenAPI document, 3.1.
pub fn openapi_document() -> serde_json::Value {
    openapi::document(api().get_openapi())
}

/// The answer of a handler that has panicked.
type Panicked = fn(Box<dyn Any + Send>) -> Response;

/// The whole service: what is done around every request, and the routes.
#[derive(Clone)]
pub struct App {
    routes: CatchPanic<Router, Panicked>,
    telemetry: Arc<Telemetry>,
    audit: Arc<Audit>,
    /// There are no keys.
    is_open: bool,
}

impl App {
    pub fn new(rooms: Rooms, telemetry: Arc<Telemetry>, audit: Arc<Audit>, cors_origins: &[Origin]) -> Self {
        let panicked: Panicked = |_| ApiError::Internal.into_response();
        let is_open = rooms.guard.is_open();
        let routes = browser::open_to(cors_origins, router(rooms));
        Self { routes: CatchPanic::custom(routes, panicked), telemetry, audit, is_open }
    }
}

/// All routes over a gateway.
fn router(rooms: Rooms) -> Router {
    let (router, generated) = api().split_for_parts();
    let document = openapi::document(&generated);
    let (newer, older) = (document.to_string(), openapi::downgrade(&document).to_string());
    let json =
        |text: String| get(move || std::future::ready(([(header::CONTENT_TYPE, "application/json")], text.clone())));
    let swagger = SwaggerUi::new("/docs").config(Config::new(["/openapi.json"]));
    let pages = Router::new()
        .route("/openapi.json", json(newer))
        .route("/openapi-3.0.json", json(older))
        .merge(swagger)
        .layer(from_fn_with_state(rooms.clone(), access::readers));
    router
        .route("/locks/", any(locks::no_name))
        .merge(browser::guarded(pages))
        .fallback(not_found)
        .method_not_allowed_fallback(async || ApiError::MethodNotAllowed)
        .with_state(rooms)
}

async fn not_found(uri: Uri) -> ApiError {
    no_such_path(uri.path())
}

fn no_such_path(path: &str) -> ApiError {
    ApiError::NotFound(if path.starts_with("/locks/") {
        "a lock's name is one path segment: write its slashes as %2F".into()
    } else {
        "the paths of this service are listed under /docs and in /openapi.json".into()
    })
}

fn text(value: &HeaderValue) -> String {
    String::from_utf8_lossy(value.as_bytes()).into_owned()
}

impl App {
    /// Opens a record of a request that may have to be recorded: without keys, only force can be denied.
    fn record(&self, request: &mut Request, id: &HeaderValue) -> Option<audit::Open> {
        if self.is_open && !self.audit.has_file() && request.uri().query().is_none() {
            return None;
        }
        let address = request.extensions().get::<Peer>().map(Peer::address);
        let record = audit::Open::new(self.audit.clone(), text(id), address);
        let trail = record.trail();
        let (what, lock) = access::about(request.method(), request.uri());
        *trail.note() = audit::Note { what, lock, ..audit::Note::default() };
        request.extensions_mut().insert(trail);
        Some(record)
    }

    /// Around everything: the request id, the duration, the log line, and the body of errors, which carries the id. As a
    /// layer of the router it would be boxed and copied once more for every request.
    pub async fn answer(mut self, mut request: Request) -> Response {
        let started = Instant::now();
        let id = match request.headers().get(&REQUEST_ID) {
            Some(given) if is_usable_id(given) => given.clone(),
            _ => new_id(),
        };
        let trace = request.headers().get(&TRACEPARENT).filter(|value| is_usable_id(value)).cloned();
        let method = method_word(request.method());
        let route = route_word(request.uri().path());
        let record = self.record(&mut request, &id);

        let mut response = match self.routes.call(request).await {
            Ok(response) => response.map(Body::new),
            Err(never) => match never {},
        };
        let problem = response.extensions_mut().remove::<Arc<Problem>>();
        // The page's own router says 404 without a body.
        let plain = || (response.status() == StatusCode::NOT_FOUND).then(|| Arc::new(no_such_path("").problem()));
        let is_draining = problem.as_ref().is_some_and(|problem| problem.code == "draining");
        let mut code = None;
        if let Some(problem) = problem.or_else(plain) {
            code = record.is_some().then(|| problem.code.clone());
            render_problem(&mut response, problem, &id);
        }
        let status = response.status();
        if let Some(record) = record {
            record.end(audit::End { status: status.as_u16(), problem: code.as_deref() });
        }
        let elapsed = started.elapsed();
        self.telemetry.http(method, route, status.as_u16(), elapsed);
        // Sending everybody away while shutting down is no failure, and there may be thousands.
        if status.is_server_error() && !is_draining {
            let trace = trace.as_ref().map(text);
            tracing::warn!(
                request_id = text(&id),
                trace,
                method,
                route,
                status = status.as_u16(),
                ?elapsed,
                "request failed"
            );
        } else if tracing::enabled!(tracing::Level::DEBUG) {
            let trace = trace.as_ref().map(text);
            tracing::debug!(
                request_id = text(&id),
                trace,
                method,
                route,
                status = status.as_u16(),
                ?elapsed,
                "request"
            );
        }
        response.headers_mut().insert(REQUEST_ID.clone(), id);
        response
    }
}

fn render_problem(response: &mut Response, problem: Arc<Problem>, id: &HeaderValue) {
    let problem = Problem { request_id: id.to_str().ok().map(str::to_owned), ..Arc::unwrap_or_clone(problem) };
    *response.body_mut() = Body::from(locks::json_line(&problem).unwrap_or_default());
    let headers = response.headers_mut();
    headers.remove(header::CONTENT_LENGTH);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    if problem.status != StatusCode::NOT_FOUND {
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    }
}

fn is_usable_id(value: &HeaderValue) -> bool {
    (1..=128).contains(&value.len()) && value.as_bytes().iter().all(u8::is_ascii_graphic)
}

/// 16 hexadecimal digits: a random number of this process, counted on. Only has to be findable in a log.
fn new_id() -> HeaderValue {
    use std::hash::{BuildHasher, RandomState};
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: LazyLock<AtomicU64> = LazyLock::new(|| AtomicU64::new(RandomState::new().hash_one(0)));
    // An odd constant: all 2^64 values come up before one repeats, and neighbours do not look alike.
    let id = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    HeaderValue::try_from(format!("{id:016x}")).unwrap_or_else(|_| HeaderValue::from_static("0"))
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

/// The pattern that a path matches.
fn route_word(path: &str) -> &'static str {
    const ROUTES: [&str; 8] =
        ["/locks", "/livez", "/readyz", "/healthz", "/metrics", "/openapi.json", "/openapi-3.0.json", "/locks/"];
    match path.strip_prefix("/locks/") {
        Some(name) if !name.is_empty() => return if name.contains('/') { "" } else { "/locks/{name}" },
        _ => {}
    }
    match ROUTES.iter().find(|route| **route == path) {
        Some(route) => route,
        None if path == "/docs" || path.starts_with("/docs/") => "/docs",
        None => "",
    }
}
