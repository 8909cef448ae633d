//! For machines that watch: livez, readyz, healthz, metrics.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{StatusCode, header};

use super::access::{MayScrape, Sight};
use super::error::ApiError;
use super::locks::json_response;
use super::wire::{Health, Problem};
use crate::gateway::{Gateway, Readiness};

/// Whether the process lives
///
/// Asks no node, so a failure of Redis never restarts gateways.
#[utoipa::path(get, path = "/livez", operation_id = "getLiveness", tag = "operations",
    responses(
        (status = 200, description = "Alive", body = Health),
        (status = 500, description = "internal_error", body = Problem, content_type = "application/problem+json"),
    ))]
pub async fn livez() -> Result<Response, ApiError> {
    json_response(StatusCode::OK, &Health::alive())
}

/// Whether to send requests here
///
/// 200 when a majority of the nodes may vote; 503 when not, and while shutting down. Needs no key; where there are keys, the
/// nodes are shown to those with the metrics permission.
#[utoipa::path(get, path = "/readyz", operation_id = "getReadiness", tag = "operations",
    responses(
        (status = 200, description = "Ready", body = Health),
        (status = 503, description = "No quorum, or draining", body = Health),
    ))]
pub async fn readyz(sight: Sight, State(gateway): State<Arc<Gateway>>) -> Result<Response, ApiError> {
    let (readiness, nodes) = gateway.readiness();
    let status = match readiness {
        Readiness::Ready => StatusCode::OK,
        Readiness::NoQuorum | Readiness::Draining => StatusCode::SERVICE_UNAVAILABLE,
    };
    let health = match sight {
        Sight::All => Health::new(readiness, nodes),
        Sight::Brief => Health::brief(readiness),
    };
    json_response(status, &health)
}

/// The same as /readyz
#[utoipa::path(get, path = "/healthz", operation_id = "getHealth", tag = "operations",
    responses(
        (status = 200, description = "Ready", body = Health),
        (status = 503, description = "No quorum, or draining", body = Health),
    ))]
pub async fn healthz(sight: Sight, state: State<Arc<Gateway>>) -> Result<Response, ApiError> {
    readyz(sight, state).await
}

/// Metrics as Prometheus text
#[utoipa::path(get, path = "/metrics", operation_id = "getMetrics", tag = "operations",
    responses(
        (status = 200, description = "Prometheus text", body = String, content_type = "text/plain"),
        (status = 401, description = "unauthenticated", body = Problem, content_type = "application/problem+json", headers(("WWW-Authenticate" = String, description = "Bearer and Basic, in two lines"))),
        (status = 403, description = "forbidden: the key has no metrics permission", body = Problem, content_type = "application/problem+json", headers(("WWW-Authenticate" = String, description = "Bearer and Basic, in two lines"))),
        (status = 429, description = "rate_limited", body = Problem, content_type = "application/problem+json", headers(("Retry-After" = u32, description = "Seconds until trying again makes sense"))),
        (status = 500, description = "internal_error", body = Problem, content_type = "application/problem+json"),
    ))]
pub async fn metrics(_: MayScrape, State(gateway): State<Arc<Gateway>>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], gateway.metrics()).into_response()
}
