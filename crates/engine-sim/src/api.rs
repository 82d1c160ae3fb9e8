//! The endpoints, one file for each family.

mod cache;
mod control;
mod embeddings;
mod fields;
mod generate;
mod metrics;
mod models;
mod prompts;
mod request;
pub(crate) mod stream;
mod tokenize;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode, header};
use serde_json::json;

use crate::engine::{Engine, Faults};
use crate::http::{ApiError, Reply, json_reply, ok, reply};

/// The lifetime that served the request ended; its connection is closed without an answer.
#[derive(Debug, thiserror::Error)]
#[error("the engine went away while it served the request")]
pub(crate) struct Died;

/// Why a request has no ordinary answer.
pub(crate) enum Failure {
    /// An error that the client is told.
    Api(ApiError),
    /// The connection is closed.
    Died,
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self::Api(error)
    }
}

impl From<crate::rank::Gone> for Failure {
    fn from(_: crate::rank::Gone) -> Self {
        Self::Died
    }
}

/// One request, its body read.
pub(crate) struct Call {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) peer: IpAddr,
}

impl Call {
    /// Whether a query parameter is set to true.
    fn asks(&self, name: &str) -> bool {
        self.query.split('&').any(|pair| match pair.split_once('=') {
            Some((key, value)) => key == name && matches!(value, "true" | "True" | "1"),
            None => false,
        })
    }
}

/// Counts a request as load while it lives.
pub(crate) struct LoadGuard(Arc<Engine>);

impl LoadGuard {
    fn new(engine: &Arc<Engine>) -> Self {
        engine.load.fetch_add(1, Ordering::Relaxed);
        Self(engine.clone())
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        self.0.load.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Answers one request.
pub(crate) async fn answer(engine: &Arc<Engine>, call: Call) -> Result<Reply, Died> {
    match route(engine, &call).await {
        Ok(reply) => Ok(reply),
        Err(Failure::Api(error)) => Ok(error.into_reply()),
        Err(Failure::Died) => Err(Died),
    }
}

async fn route(engine: &Arc<Engine>, call: &Call) -> Result<Reply, Failure> {
    if call.path.starts_with("/sim/") {
        return control::answer(engine, call).await;
    }
    if call.path.starts_with("/v1/") {
        authenticate(engine, &call.headers)?;
    }
    let computes = matches!(
        call.path.as_str(),
        "/v1/chat/completions" | "/v1/completions" | "/v1/embeddings" | "/health"
    );
    if computes && Faults::takes_one(&engine.faults.unavailable) {
        return Err(ApiError::status(StatusCode::SERVICE_UNAVAILABLE, "the engine is told to be unavailable").into());
    }
    let (get, post) = (call.method == Method::GET, call.method == Method::POST);
    match call.path.as_str() {
        "/v1/chat/completions" if post => generate::chat(engine, call).await,
        "/v1/completions" if post => generate::text(engine, call).await,
        "/v1/embeddings" if post => embeddings::answer(engine, call).await,
        "/v1/models" if get => Ok(models::list(engine)),
        "/v1/load_lora_adapter" if post => Ok(models::load(engine, call)?),
        "/v1/unload_lora_adapter" if post => Ok(models::unload(engine, call)?),
        "/tokenize" if post => Ok(tokenize::tokenize(engine, call)?),
        "/detokenize" if post => Ok(tokenize::detokenize(engine, call)?),
        "/health" | "/health_generate" | "/live" | "/ready" if get => Ok(ok()),
        "/ping" if get || post => Ok(ok()),
        "/version" if get => {
            let version = engine.config.events.wire.engine_version();
            Ok(json_reply(StatusCode::OK, &json!({"version": version})))
        }
        "/load" if get => {
            let load = engine.load.load(Ordering::Relaxed);
            Ok(json_reply(StatusCode::OK, &json!({"server_load": load})))
        }
        "/metrics" if get => Ok(reply(
            StatusCode::OK,
            "text/plain; version=0.0.4; charset=utf-8",
            metrics::page(engine).await?,
        )),
        "/kv_event_sources" if get && engine.config.events.wire.has_event_sources() => Ok(cache::sources(engine)),
        "/server_info" | "/get_server_info" if get && engine.config.events.wire.is_sglang() => {
            Ok(cache::server_info(engine))
        }
        "/reset_prefix_cache" | "/flush_cache" if post => cache::reset(engine, call).await,
        "/sleep" if post => cache::sleep(engine, true).await,
        "/wake_up" if post => cache::sleep(engine, false).await,
        "/is_sleeping" if get => {
            let asleep = engine.sleeping.load(Ordering::Relaxed);
            Ok(json_reply(StatusCode::OK, &json!({"is_sleeping": asleep})))
        }
        _ => Ok(unknown(call)),
    }
}

fn unknown(call: &Call) -> Reply {
    const KNOWN: [&str; 6] = [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/models",
        "/tokenize",
        "/health",
    ];
    if KNOWN.contains(&call.path.as_str()) {
        return json_reply(StatusCode::METHOD_NOT_ALLOWED, &json!({"detail": "Method Not Allowed"}));
    }
    json_reply(StatusCode::NOT_FOUND, &json!({"detail": "Not Found"}))
}

fn authenticate(engine: &Engine, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(token) = engine.credentials.token() else {
        return Ok(());
    };
    let given = headers
        .get(header::AUTHORIZATION)
        .is_some_and(|value| token.matches_header(value.as_bytes()));
    if given {
        return Ok(());
    }
    Err(ApiError::status(
        StatusCode::UNAUTHORIZED,
        "give the cluster token as `Authorization: Bearer`",
    ))
}
