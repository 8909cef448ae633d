//! Headers for browsers: what the documentation page may load, who may embed it, and which origins'
//! pages may call this service. Browsers obey these headers; other clients are not bound by them.

use axum::Router;
use http::Method;
use http::header::{self, HeaderName, HeaderValue};
use redlock_api::headers::{
    IDEMPOTENCY_KEY, IDEMPOTENCY_REPLAYED, LOCK_TOKEN, PREFER, PREFERENCE_APPLIED, REQUEST_ID,
};
use tower_http::cors::CorsLayer;
use tower_http::set_header::SetResponseHeaderLayer;

use crate::origin::Origin;

/// Lets the documentation page load only its own files: its scripts, its style sheets, and the
/// pictures in these. Styles that a script sets need no permission. The one inline style sheet,
/// with the colours of the logo, is allowed by its digest.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'sha256-RL3ie0nH+Lzz2YNqQN83mnU0J1ot4QL7b99vMdIX99w='; \
     img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const GUARDS: [(HeaderName, &str); 4] = [
    (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
];

/// Policy of a picture that a browser shows by itself. Its styles are within the picture.
pub(super) const PICTURE_POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox";

/// Adds these headers to the pages that people see, unless a page sets its own. Answers for programs
/// do not get them, because programs would not read them.
pub(super) fn guarded<S: Clone + Send + Sync + 'static>(pages: Router<S>) -> Router<S> {
    GUARDS.into_iter().fold(pages, |pages, (name, value)| {
        pages.layer(SetResponseHeaderLayer::if_not_present(name, HeaderValue::from_static(value)))
    })
}

/// Lets pages of these origins call every route. This layer must be outside of every check for a
/// key, because a browser's preflight request has no key.
pub(super) fn open_to(origins: &[Origin], routes: Router) -> Router {
    if origins.is_empty() {
        return routes;
    }
    // Browsers must not add credentials to these requests. A page's script sends its key itself, so
    // another page cannot make a browser send that key.
    let cors = CorsLayer::new()
        .allow_origin(
            origins
                .iter()
                .filter_map(|origin| HeaderValue::from_str(origin.as_str()).ok())
                .collect::<Vec<_>>(),
        )
        .allow_methods([Method::GET, Method::POST, Method::PATCH, Method::DELETE])
        .allow_headers([
            header::AUTHORIZATION,
            header::CONTENT_TYPE,
            LOCK_TOKEN.clone(),
            IDEMPOTENCY_KEY.clone(),
            PREFER.clone(),
            HeaderName::from_static("last-event-id"),
        ])
        .expose_headers([
            header::LOCATION,
            header::RETRY_AFTER,
            LOCK_TOKEN.clone(),
            REQUEST_ID.clone(),
            IDEMPOTENCY_REPLAYED.clone(),
            PREFERENCE_APPLIED.clone(),
        ]);
    routes.layer(cors)
}
