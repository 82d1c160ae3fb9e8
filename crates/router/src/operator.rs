//! What operators ask of a router: metrics, status, explanations. Guarded by a token, or by loopback without one.

use std::net::SocketAddr;
use std::sync::Arc;

use http::{Response, StatusCode};
use hyper::body::Incoming;

use crate::error::ApiError;
use crate::reply::{self, ReplyBody};
use crate::state::Router;

/// Answers `/cairn/...`.
pub(crate) async fn answer(
    router: &Arc<Router>,
    parts: &http::request::Parts,
    _body: Incoming,
    _peer: SocketAddr,
) -> Response<ReplyBody> {
    let _ = router;
    reply::error(&ApiError::new(
        StatusCode::NOT_FOUND,
        "invalid_request_error",
        "unknown_path",
        format!("no such path: {}", parts.uri.path()),
    ))
}

/// `GET /metrics`.
pub(crate) fn metrics(router: &Router, _parts: &http::request::Parts, _peer: SocketAddr) -> Response<ReplyBody> {
    reply::own(
        StatusCode::OK,
        "application/openmetrics-text; version=1.0.0; charset=utf-8",
        router.metrics.registry.encode(),
    )
}
