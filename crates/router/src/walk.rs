//! One request from its arrival to the answer's first byte:
//! parse -> tokenize -> chain -> overlap -> choose -> reserve -> forward -> observe.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use http::Response;
use hyper::body::Incoming;

use crate::body::{EditPlan, Endpoint, Fields, edit, members};
use crate::error::ApiError;
use crate::fleet::{Fleet, Pool, Worker};
use crate::forward::{Begun, Leg, begin};
use crate::headers::strip_request;
use crate::metrics::{Reason, RequestLabels, status_class};
use crate::relay::{Ending, Observer, Relay};
use crate::reply::ReplyBody;
use crate::retry::ATTEMPTS_MAX;
use crate::sse::{SseWatch, Usage};
use crate::state::{InFlightGuard, Router};
use crate::upstream::UpstreamFault;

/// Serves one request.
pub(crate) async fn request(
    router: &Arc<Router>,
    guard: InFlightGuard,
    arrived: Instant,
    endpoint: Option<Endpoint>,
    parts: http::request::Parts,
    body: Incoming,
    _peer: SocketAddr,
) -> Result<Response<ReplyBody>, ApiError> {
    let held = router.bodies.read(body, router.body_limits).await?;
    let found = members(&held.bytes)?;
    let endpoint = match endpoint {
        Some(endpoint) => endpoint,
        None => Endpoint::by_shape(&found).ok_or_else(|| {
            ApiError::invalid(
                "unknown_shape",
                "the body has none of `messages`, `prompt` and `input`; send one of them",
            )
        })?,
    };
    let fields = Fields::read(&held.bytes, &found, endpoint)?;
    let fleet = router.fleet.load_full();
    let (pool, _adapter) = pool_of(&fleet, fields.model.as_deref())?;
    let plan = EditPlan {
        ask_usage: endpoint != Endpoint::Embeddings && fields.stream,
        ..EditPlan::default()
    };
    let edited = edit(&held.bytes, &found, &plan)?;
    let mut headers = parts.headers;
    strip_request(&mut headers);

    router.retries.earn();
    let mut tried: Vec<Worker> = Vec::new();
    let mut last = None;
    for attempt in 0..ATTEMPTS_MAX {
        let Some(worker) = choose(router, pool, &tried) else {
            break;
        };
        let leg = Leg {
            engine: &worker.engine,
            rank: (worker.spec.ranks > 1).then_some(worker.spec.rank),
            path: endpoint.path(),
            headers: headers.clone(),
            body: edited.body.clone(),
        };
        router.metrics.router_seconds.observe(arrived.elapsed().as_secs_f64());
        match begin(&router.upstream, leg).await {
            Ok(begun) if begun.is_back_pressure() && attempt + 1 < ATTEMPTS_MAX => {
                worker.engine.back_pressure(begun.retry_after());
                last = Some(Ok(begun));
                note_retry(router, "back_pressure");
            }
            Ok(begun) => {
                worker.engine.answered();
                return Ok(pipe(router, guard, endpoint, begun, edited.strip_usage));
            }
            Err(fault) => {
                worker.engine.fault();
                note_retry(router, fault.label());
                last = Some(Err(fault));
            }
        }
        tried.push(worker);
        if !router.retries.spend() {
            note_retry(router, "no_budget");
            break;
        }
    }
    match last {
        Some(Ok(begun)) => Ok(pipe(router, guard, endpoint, begun, edited.strip_usage)),
        Some(Err(UpstreamFault::Connect(_) | UpstreamFault::Cut(_))) => Err(ApiError::bad_gateway(
            "engine_failed",
            "the engines that were asked failed before answering; ask again",
        )),
        None => Err(ApiError::unavailable(
            "no_engine",
            "no engine of this model can take requests now",
        )),
    }
}

fn note_retry(router: &Router, reason: &'static str) {
    router.metrics.retries.get_or_create(&Reason { reason }).inc();
}

/// The pool of a model name.
fn pool_of<'a>(fleet: &'a Fleet, model: Option<&str>) -> Result<(&'a Arc<Pool>, Option<&'a str>), ApiError> {
    match model {
        Some(name) => fleet.model(name).ok_or_else(|| {
            ApiError::new(
                http::StatusCode::NOT_FOUND,
                "invalid_request_error",
                "model_not_found",
                format!(
                    "no engine serves a model of that name; GET /v1/models lists the {} names",
                    fleet.names().len()
                ),
            )
            .at("model")
        }),
        None => fleet
            .only_pool()
            .map(|pool| (pool, None))
            .ok_or_else(|| ApiError::invalid("model_missing", "name a model; GET /v1/models lists them").at("model")),
    }
}

fn choose(router: &Router, pool: &Pool, tried: &[Worker]) -> Option<Worker> {
    use crate::engines::Health;
    let able: Vec<&Worker> = pool
        .workers
        .iter()
        .filter(|w| !w.draining && w.engine.health() != Health::Unhealthy && !w.engine.breaker_open())
        .filter(|w| tried.iter().all(|t| t.id != w.id))
        .collect();
    if able.is_empty() {
        return None;
    }
    let turn = router.metrics.router_seconds.clone();
    let _ = turn;
    Some(able[rand::random_range(0..able.len())].clone())
}

/// Hands an answer that has begun to the client.
fn pipe(
    router: &Arc<Router>,
    guard: InFlightGuard,
    endpoint: Endpoint,
    begun: Begun,
    strip_usage: bool,
) -> Response<ReplyBody> {
    let status = begun.head.status;
    router
        .metrics
        .requests
        .get_or_create(&RequestLabels {
            endpoint: endpoint.label(),
            status: status_class(status),
        })
        .inc();
    let events = (begun.is_events() && status.is_success()).then(|| SseWatch::new(strip_usage));
    let length = if events.is_some() { None } else { begun.length };
    let observer = Observed {
        router: Arc::clone(router),
        _guard: guard,
    };
    let relay = Relay::new(begun.first, begun.rest, events, length, Box::new(observer));
    Response::from_parts(begun.head, ReplyBody::Relay(Box::new(relay)))
}

struct Observed {
    router: Arc<Router>,
    _guard: InFlightGuard,
}

impl Observer for Observed {
    fn first_byte(&mut self, _at: Instant) {}
    fn ended(&mut self, ending: Ending, _usage: Option<Usage>) {
        self.router
            .metrics
            .ended
            .get_or_create(&Reason { reason: ending.label() })
            .inc();
    }
}
