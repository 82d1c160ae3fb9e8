//! What operators ask of a router: metrics, status, decisions, explanations. Guarded by a token, or by loopback alone.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use http::{HeaderMap, HeaderName, Method, Response, StatusCode, header};
use hyper::body::Incoming;
use serde_json::{Value, json};

use crate::ask::{self, Arrival};
use crate::body::Endpoint;
use crate::decide::refuse;
use crate::decisions::explained;
use crate::engines::Health;
use crate::error::ApiError;
use crate::fleet::claim_label;
use crate::reply::{self, ReplyBody};
use crate::state::Router;
use crate::tenants::equal;
use crate::why::{self, Named};

/// Carries the operators' token beside an engine's own `Authorization`.
const OPERATOR_HEADER: &str = "x-cairn-operator";
/// Asks for decision headers.
const DEBUG_HEADER: HeaderName = HeaderName::from_static("x-cairn-debug");
/// Which operation `/cairn/explain` is about, where the body's shape doesn't tell.
const ENDPOINT_HEADER: &str = "x-cairn-endpoint";
/// Decisions in one answer.
const LIMIT_DEFAULT: usize = 20;
const LIMIT_MAX: usize = 1_024;

/// Whether a request is an operator's.
fn is_operator(router: &Router, headers: &HeaderMap, peer: SocketAddr) -> bool {
    let Some(token) = &router.operator_token else {
        return peer.ip().is_loopback();
    };
    let bearer = headers
        .get(header::AUTHORIZATION)
        .and_then(|v| v.as_bytes().strip_prefix(b"Bearer "));
    let own = headers.get(OPERATOR_HEADER).map(|v| v.as_bytes());
    [bearer, own].into_iter().flatten().any(|shown| equal(shown, token))
}

/// Whether an answer gets decision headers.
pub(crate) fn wants_decision(router: &Router, headers: &HeaderMap, peer: SocketAddr) -> bool {
    router.config.decision_headers
        && headers.get(DEBUG_HEADER).is_some_and(|v| v == "1" || v == "true")
        && is_operator(router, headers, peer)
}

fn not_allowed() -> Response<ReplyBody> {
    reply::error(&ApiError::new(
        StatusCode::UNAUTHORIZED,
        "authentication_error",
        "operators_only",
        "this path is for operators: send the token of `operator_token_file` as `Authorization: Bearer`, or ask from \
         the router's own host where none is configured",
    ))
}

/// Answers `/cairn/...`.
pub(crate) async fn answer(
    router: &Arc<Router>,
    parts: &http::request::Parts,
    body: Incoming,
    peer: SocketAddr,
) -> Response<ReplyBody> {
    if !is_operator(router, &parts.headers, peer) {
        return not_allowed();
    }
    match (parts.uri.path(), &parts.method) {
        ("/cairn/status", &Method::GET) => reply::json(StatusCode::OK, status(router).to_string()),
        ("/cairn/decisions", &Method::GET) => decisions(router, parts.uri.query().unwrap_or_default()),
        ("/cairn/explain", &Method::POST) => match explain(router, parts, body, peer).await {
            Ok(value) => reply::json(StatusCode::OK, value.to_string()),
            Err(error) => reply::error(&error),
        },
        (path, method) => reply::error(&ApiError::new(
            StatusCode::NOT_FOUND,
            "invalid_request_error",
            "unknown_path",
            format!(
                "no such operator path: {method} {path}; there are GET /cairn/status, GET /cairn/decisions and POST \
                 /cairn/explain"
            ),
        )),
    }
}

/// `GET /metrics`.
pub(crate) fn metrics(router: &Router, parts: &http::request::Parts, peer: SocketAddr) -> Response<ReplyBody> {
    if !is_operator(router, &parts.headers, peer) {
        return not_allowed();
    }
    refresh(router);
    reply::own(
        StatusCode::OK,
        "application/openmetrics-text; version=1.0.0; charset=utf-8",
        router.metrics.registry.encode(),
    )
}

/// Brings gauges up to date.
pub(crate) fn refresh(router: &Router) {
    router
        .metrics
        .view_age_ms
        .set(i64::try_from(router.view.age_ms()).unwrap_or(i64::MAX));
    router
        .metrics
        .reservations
        .set(i64::try_from(router.routing.lock().reservations()).unwrap_or(i64::MAX));
}

fn decisions(router: &Router, query: &str) -> Response<ReplyBody> {
    let (mut request_id, mut trace_id, mut any_id, mut limit) = (None, None, None, LIMIT_DEFAULT);
    for (key, value) in url::form_urlencoded::parse(query.as_bytes()) {
        match &*key {
            "request_id" => request_id = Some(value.into_owned()),
            "trace_id" => trace_id = Some(value.into_owned()),
            "id" => any_id = Some(value.into_owned()),
            "limit" => match value.parse::<usize>() {
                Ok(n) if (1..=LIMIT_MAX).contains(&n) => limit = n,
                Ok(_) | Err(_) => {
                    let message = format!("limit must be 1 to {LIMIT_MAX}");
                    return reply::error(&ApiError::invalid("invalid_value", message).at("limit"));
                }
            },
            _ => {
                let message = "unknown parameter; there are limit, id, request_id and trace_id";
                return reply::error(&ApiError::invalid("unknown_parameter", message));
            }
        }
    }
    let fleet = router.fleet.load();
    let found = router.decisions.find(
        router,
        &fleet,
        request_id.as_deref(),
        trace_id.as_deref(),
        any_id.as_deref(),
        limit,
    );
    reply::json(StatusCode::OK, json!({ "decisions": found }).to_string())
}

/// Decides a request without sending or reserving it.
async fn explain(
    router: &Arc<Router>,
    parts: &http::request::Parts,
    body: Incoming,
    peer: SocketAddr,
) -> Result<Value, ApiError> {
    let held = router.bodies.read(body, router.body_limits).await?;
    let scanned = ask::scan(&parts.headers, &held.bytes)?;
    let endpoint = match parts.headers.get(ENDPOINT_HEADER).and_then(|v| v.to_str().ok()) {
        Some("chat") => Some(Endpoint::Chat),
        Some("completions") => Some(Endpoint::Completions),
        Some(_) | None => None,
    };
    let wanted = Wanted::read(parts.uri.query().unwrap_or_default())?;
    let arrival = Arrival {
        at: std::time::Instant::now(),
        endpoint,
        headers: parts.headers.clone(),
        peer,
        wants_ids: wanted.token_ids,
    };
    let mut parsed = ask::parse(router, &arrival, &scanned)?;
    let fleet = router.fleet.load_full();
    let (pool, adapter) = ask::pool_of(&fleet, parsed.fields.model.as_deref())?;
    let mut asked = ask::ask(router, &fleet, pool, adapter, &mut parsed, &arrival).await?;
    if wanted.policy.is_some() {
        asked.policy = wanted.policy;
    }
    let overlaps = asked.overlap(router);
    let record = {
        let facts = asked.facts(&[]);
        let mut routing = router.routing.lock();
        routing.explain(router.now(), &facts, &overlaps).map_err(refuse)?.1
    };
    let mut value = explained(&fleet, &record);
    value["degraded"] = json!(asked.degraded.map(crate::tokenize::Degraded::as_str));
    value["applied_index"] = json!(router.view.applied());
    value["view_age_ms"] = json!(router.view.age_ms());
    if let Some(ids) = &asked.ids {
        value["token_ids"] = json!(ids);
    }
    why::add(router, &fleet, &Named::of(router, &asked), &record, &mut value);
    Ok(value)
}

/// What an operator wants to see of a request.
#[derive(Default)]
struct Wanted {
    /// The policy that is to decide it.
    policy: Option<String>,
    /// Whether its token ids are to be shown.
    token_ids: bool,
}

impl Wanted {
    fn read(query: &str) -> Result<Self, ApiError> {
        let mut wanted = Self::default();
        for (key, value) in url::form_urlencoded::parse(query.as_bytes()) {
            match &*key {
                "policy" => {
                    let policy = cairn_routing::PolicyConfig::by_name(&value)
                        .map_err(|error| ApiError::invalid("unknown_policy", error.to_string()))?;
                    wanted.policy = Some(policy.name().to_string());
                }
                "token_ids" => {
                    wanted.token_ids = value.parse().map_err(|_| {
                        ApiError::invalid("invalid_value", "token_ids must be true or false").at("token_ids")
                    })?;
                }
                _ => {
                    return Err(ApiError::invalid(
                        "unknown_parameter",
                        "unknown parameter; there are policy and token_ids",
                    ));
                }
            }
        }
        Ok(wanted)
    }
}

/// The router as it sees itself and its engines.
pub(crate) fn status(router: &Router) -> Value {
    let fleet = router.fleet.load();
    let now = router.now();
    let applied_seqs: HashMap<String, u64> = {
        let state = router.view.state.read();
        let sources = state.registry().sources.values();
        sources.map(|source| (source.name.clone(), source.seq.0)).collect()
    };
    let routing = router.routing.lock();
    let workers: Vec<Value> = fleet
        .workers()
        .map(|(pool, worker)| {
            let load = routing.load(now, worker.id);
            let health = match worker.engine.health() {
                Health::Healthy => "healthy",
                Health::Unhealthy => "unhealthy",
                Health::Unknown => "unknown",
            };
            let breaker = routing
                .breaker(now, worker.id)
                .map(|state| format!("{state:?}").to_lowercase());
            let why_not = match (health, worker.draining, breaker.as_deref()) {
                ("healthy", false, Some("open")) => Some("breaker open"),
                ("healthy", false, _) => None,
                ("healthy", true, _) => Some("draining"),
                (unfit, _, _) => Some(unfit),
            };
            json!({
                "worker": worker.name(),
                "id": worker.id.0,
                "engine_url": worker.spec.engine_url,
                "rank": worker.spec.rank,
                "eligible": why_not.is_none(),
                "why_not": why_not,
                "pool": pool.name,
                "source": worker.source,
                "applied_seq": applied_seqs.get(&worker.source),
                "role": format!("{:?}", worker.spec.role).to_lowercase(),
                "health": health,
                "draining": worker.draining,
                "claim": claim_label(worker.confidence),
                "incarnation": worker.incarnation,
                "breaker": breaker,
                "in_flight": load.in_flight(),
                "own_requests": load.own.requests,
                "other_requests": load.others.requests,
                "unexplained": load.unexplained_running + load.unexplained_waiting,
                "adapters": worker.adapters,
            })
        })
        .collect();
    let reservations = routing.reservations();
    drop(routing);
    let pools: Vec<Value> = fleet
        .pools
        .iter()
        .map(|pool| {
            let policy = crate::decide::policy_of(router, pool);
            json!({
                "pool": pool.name,
                "models": pool.models,
                "block_size": pool.block_size.tokens(),
                "max_model_len": pool.max_model_len,
                "policy": policy.map_or_else(|error| error, |policy| policy.name().to_string()),
                "tokenizer": router.tokens_of(&pool.name).said(),
            })
        })
        .collect();
    json!({
        "router": router.name,
        "draining": router.draining.load(std::sync::atomic::Ordering::Acquire),
        "in_flight": router.in_flight.count(),
        "reservations": reservations,
        "view": {
            "state": format!("{:?}", router.view.is()).to_lowercase(),
            "node": router.view.node(),
            "applied_index": router.view.applied(),
            "digest": format!("{:016x}", router.view.state.read().digest().0),
            "age_ms": router.view.age_ms(),
        },
        "pools": pools,
        "workers": workers,
    })
}
