//! Probes and metrics: livez, readyz, healthz, metrics.

use axum::response::{IntoResponse, Response};
use http::{StatusCode, header};
use redlock_api::Health;

use super::access::{Access, Visibility};
use super::error::ApiError;
use super::openapi::CommonErrors;
use super::render::json_response;
use super::wire::{alive, health, health_without_nodes};
use crate::gateway::Readiness;

/// Whether the process lives
///
/// The answer does not depend on the nodes, so an orchestrator does not restart gateways when Redis
/// fails.
#[utoipa::path(get, path = "/livez", operation_id = "getLiveness", tag = "operations", security(),
    responses(
        (status = 200, description = "Alive", body = Health),
        (status = 421, description = "misdirected_request"),
        (status = 500, description = "internal_error"),
    ))]
pub(super) async fn livez() -> Result<Response, ApiError> {
    json_response(StatusCode::OK, &alive())
}

/// Whether to send requests here
///
/// 200 when a majority of the nodes may vote. 503 when no majority may vote, and during a shutdown.
/// The status needs no key. If the gateway has keys, only a key with the metrics permission sees
/// the nodes, as long as the key is within its rate.
#[utoipa::path(get, path = "/readyz", operation_id = "getReadiness", tag = "operations", security(),
    responses(
        (status = 200, description = "Ready", body = Health),
        (status = 421, description = "misdirected_request"),
        (status = 503, description = "No quorum, or draining", body = Health),
    ))]
pub(super) async fn readyz(visibility: Visibility, access: Access) -> Result<Response, ApiError> {
    let gateway = access.gateway();
    let readiness = gateway.readiness();
    let status = match readiness {
        Readiness::Ready => StatusCode::OK,
        Readiness::NoQuorum | Readiness::Draining => StatusCode::SERVICE_UNAVAILABLE,
    };
    let body = match visibility {
        Visibility::Full => health(readiness, gateway.nodes(), access.public_url()),
        Visibility::StatusOnly => health_without_nodes(readiness, access.public_url()),
    };
    json_response(status, &body)
}

/// The same as /readyz
///
/// An alias for tools that probe this path by default.
#[utoipa::path(get, path = "/healthz", operation_id = "getHealth", tag = "operations", security(),
    responses(
        (status = 200, description = "Ready", body = Health),
        (status = 421, description = "misdirected_request"),
        (status = 503, description = "No quorum, or draining", body = Health),
    ))]
pub(super) async fn healthz(visibility: Visibility, access: Access) -> Result<Response, ApiError> {
    readyz(visibility, access).await
}

/// Metrics as Prometheus text
///
/// The metrics of this gateway alone. No label has the name of a lock.
#[utoipa::path(get, path = "/metrics", operation_id = "getMetrics", tag = "operations",
    responses(
        (status = 200, description = "Prometheus text", body = String, content_type = "text/plain"),
        CommonErrors,
        (status = 403, description = "forbidden: the key has no metrics permission"),
    ))]
pub(super) async fn metrics(access: Access) -> Response {
    (
        [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")],
        access.gateway().metrics(),
    )
        .into_response()
}
