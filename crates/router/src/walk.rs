//! One request from its arrival to the answer's first byte:
//! parse -> tokenize -> chain -> overlap -> choose -> reserve -> forward -> observe.

use std::pin::{Pin, pin};
use std::sync::Arc;

use bytes::Bytes;
use cairn_routing::{Ending, MAX_ATTEMPTS, Micros, Plan};
use cairn_telemetry::{TraceContext, propagation};
use http::{HeaderMap, HeaderValue, Response, header};
use hyper::body::Incoming;
use tracing::Instrument;

use crate::ask::{Arrival, Parsed, ask, parse, pool_of, scan};
use crate::body::{BodyLimits, EditPlan, Endpoint, edit};
use crate::decide::{Asked, Decided, Reservation, decide, policy_name};
use crate::error::ApiError;
use crate::fleet::{Fleet, Worker};
use crate::forward::{Begun, Leg, begin};
use crate::headers::{REQUEST_ID, sent_on};
use crate::metrics::{PolicyLabel, Reason};
use crate::observe::{self, Exchange};
use crate::reply::ReplyBody;
use crate::state::{InFlightGuard, Router};
use crate::tokenize::Degraded;
use crate::upstream::UpstreamFault;
use crate::{operator, split};

/// Serves one request.
pub(crate) async fn request(
    router: &Arc<Router>,
    guard: InFlightGuard,
    arrival: Arrival,
    body: Incoming,
) -> Result<Response<ReplyBody>, ApiError> {
    let caller = propagation::extract(&arrival.headers);
    let span = tracing::info_span!(
        "gateway.request",
        endpoint = tracing::field::Empty,
        pool = tracing::field::Empty,
        tokens = tracing::field::Empty,
        worker = tracing::field::Empty,
        status = tracing::field::Empty,
        code = tracing::field::Empty
    );
    if let Some(caller) = caller {
        propagation::set_parent(&span, caller);
    }
    let trace = propagation::outgoing(&span, caller.unwrap_or_else(|| TraceContext::generate(false)));
    // Pinned where it is made: instrumented by value, all of its state would be moved.
    let serving = pin!(serve(router, guard, arrival, body, trace, &span));
    let served = serving.instrument(span.clone()).await;
    if let Err(error) = &served {
        span.record("status", error.status.as_u16());
        span.record("code", error.code);
    }
    served
}

async fn serve(
    router: &Arc<Router>,
    guard: InFlightGuard,
    arrival: Arrival,
    body: Incoming,
    trace: TraceContext,
    span: &tracing::Span,
) -> Result<Response<ReplyBody>, ApiError> {
    let limits = BodyLimits {
        awaited: arrival.headers.contains_key(header::EXPECT),
        ..router.body_limits
    };
    let held = router.bodies.read(body, limits).await?;
    let scanned = scan(&arrival.headers, &held.bytes)?;
    let mut parsed = parse(router, &arrival, &scanned)?;
    span.record("endpoint", parsed.endpoint.label());
    let fleet = router.fleet.load_full();
    let (pool, adapter) = pool_of(&fleet, parsed.fields.model.as_deref())?;
    span.record("pool", pool.name.as_str());
    let asked = ask(router, &fleet, pool, adapter, &mut parsed, &arrival).await?;
    span.record("tokens", asked.prompt_tokens);
    let mut headers = arrival.headers;
    let request_id = request_id(&mut headers);
    let debug = operator::wants_decision(router, &headers, arrival.peer);
    if router.tenants.any() {
        headers.remove(header::AUTHORIZATION);
    }
    let exchange = Exchange {
        router: Arc::clone(router),
        _guard: guard,
        arrived: arrival.at,
        endpoint: parsed.endpoint,
        streamed: parsed.fields.stream,
        span: span.clone(),
        trace,
        request_id,
        debug,
        comparable: asked.key_source == cairn_routing::KeySource::Exact,
        prompt_tokens: asked.prompt_tokens,
    };
    attempts(router, &fleet, &asked, &parsed, headers, exchange).await
}

/// The client's request id where it can be sent on, else one of ours.
fn request_id(headers: &mut HeaderMap) -> HeaderValue {
    if let Some(id) = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok())
        && (1..=128).contains(&id.len())
        // In bytes of its own: decisions are kept with it, and the header's lie in those of the whole head.
        && let Ok(id) = HeaderValue::from_str(id)
    {
        return id;
    }
    // From the thread's own generator: the system's would be asked by a system call for each request.
    let mut text = [0; 32];
    let uuid = uuid::Builder::from_random_bytes(rand::random()).into_uuid();
    let id = HeaderValue::from_str(uuid.simple().encode_lower(&mut text)).expect("hex digits can stand in a header");
    headers.insert(REQUEST_ID, id.clone());
    id
}

/// One try at one worker or pair.
pub(crate) struct Try<'a> {
    /// The request.
    pub parsed: &'a Parsed<'a>,
    /// Its headers, of which some are sent on.
    pub headers: &'a HeaderMap,
    /// Its trace.
    pub trace: TraceContext,
}

/// An answer that has begun, and whose it is.
pub(crate) struct Answered {
    /// The worker that answers: of a split either one, since both may refuse.
    pub by: cairn_index::WorkerId,
    /// The answer.
    pub begun: Begun,
    /// Whether its usage event is ours to take out.
    pub strip_usage: bool,
}

/// How a try went.
pub(crate) enum Outcome {
    /// The answer has begun.
    Begun(Answered),
    /// It failed before its first byte.
    Failed {
        /// Whose fault it is.
        blamed: cairn_index::WorkerId,
        /// How.
        fault: UpstreamFault,
    },
}

async fn attempts(
    router: &Arc<Router>,
    fleet: &Arc<Fleet>,
    asked: &Asked<'_>,
    parsed: &Parsed<'_>,
    headers: HeaderMap,
    exchange: Exchange,
) -> Result<Response<ReplyBody>, ApiError> {
    let mut excluded = Vec::new();
    let mut last: Option<ApiError> = None;
    router.retries.lock().on_request(router.now());
    for attempt in 1..=MAX_ATTEMPTS {
        let decided = match choose(router, fleet, asked, &excluded, &exchange) {
            Ok(decided) => decided,
            Err(error) => return Err(last.unwrap_or(error)),
        };
        let Decided {
            choice,
            mut reservation,
            ..
        } = decided;
        let trying = Try {
            parsed,
            headers: &headers,
            trace: exchange.trace,
        };
        if attempt == 1 {
            router
                .metrics
                .router_seconds
                .observe(exchange.arrived.elapsed().as_secs_f64());
        }
        let outcome = match choice.plan {
            Plan::Whole { worker } => {
                let sent = pin!(whole(router, fleet, worker, &trying));
                if exchange.streamed {
                    sent.await?
                } else {
                    until_answered(router, sent, &mut reservation, choice.terms.ttft()).await?
                }
            }
            // Boxed, as whatever few requests need: every request's future has room for the largest that it awaits.
            Plan::Split { prefill, decode } => {
                let split = split::run(router, fleet, (prefill, decode), &trying, &mut reservation);
                Box::pin(split).await?
            }
        };
        match outcome {
            Outcome::Begun(answered) => {
                let begun = &answered.begun;
                let push_back = begun.is_back_pressure();
                if push_back && attempt < MAX_ATTEMPTS && may_retry(router, attempt, "back_pressure") {
                    let after = begun.retry_after().map(|s| Micros::from_ms(s.saturating_mul(1_000)));
                    reservation.finish(Ending::PushedBack { after }, Some(answered.by));
                    excluded.push(answered.by);
                    // Where nobody else can take it, the engine's own words go to the client.
                    if others_left(router, asked, &excluded) {
                        last = Some(ApiError::unavailable(
                            "engines_busy",
                            "the engines have too much to do; ask again",
                        ));
                        continue;
                    }
                    return Ok(observe::answer_unreserved(exchange, answered));
                }
                if exchange.streamed && begun.head.status.is_success() {
                    reservation.first_token();
                }
                let worker = fleet.worker(answered.by).map(|(_, worker)| worker);
                return Ok(observe::answer(
                    exchange,
                    answered,
                    reservation,
                    &choice,
                    (asked, worker),
                ));
            }
            Outcome::Failed { blamed, fault } => {
                note_fault(router, fleet, blamed, &fault);
                reservation.finish(Ending::Fault, Some(blamed));
                excluded.push(blamed);
                last = Some(ApiError::bad_gateway(
                    "engine_failed",
                    "the engine that was asked failed before answering; ask again",
                ));
                // A refused connection has asked no engine for anything, so it costs nothing of the budget.
                let free = matches!(fault, UpstreamFault::Connect(_));
                if attempt < MAX_ATTEMPTS && !free && !may_retry(router, attempt, fault.label()) {
                    break;
                }
            }
        }
    }
    Err(last.unwrap_or_else(|| ApiError::unavailable("no_engine", "no engine can take the request now")))
}

fn others_left(router: &Router, asked: &Asked<'_>, excluded: &[cairn_index::WorkerId]) -> bool {
    let facts = asked.facts(excluded);
    router
        .routing
        .lock()
        .explain(router.now(), &facts, &Vec::<cairn_index::WorkerOverlap>::new())
        .is_ok()
}

fn may_retry(router: &Router, attempts: u32, reason: &'static str) -> bool {
    let granted = router.retries.lock().try_retry(router.now(), attempts);
    let reason = if granted { reason } else { "no_budget" };
    router.metrics.retries.get_or_create(&Reason { reason }).inc();
    granted
}

/// A fault takes an engine out at once where nobody listens, and has it checked where its connection broke.
pub(crate) fn note_fault(router: &Router, fleet: &Fleet, blamed: cairn_index::WorkerId, fault: &UpstreamFault) {
    let Some((_, worker)) = fleet.worker(blamed) else {
        return;
    };
    tracing::debug!(
        engine = worker.engine.url,
        kind = fault.label(),
        reason = fault.reason(),
        "an engine failed"
    );
    match fault {
        UpstreamFault::Connect(_) => {
            worker.engine.refused();
            let mut routing = router.routing.lock();
            for (_, other) in fleet
                .workers()
                .filter(|(_, other)| other.engine.url == worker.engine.url)
            {
                routing.update_worker(other.id, |facts| facts.healthy = false);
            }
        }
        UpstreamFault::Cut(_) => worker.engine.broke(),
    }
}

/// Decides within its spans and writes the decision down.
fn choose(
    router: &Arc<Router>,
    fleet: &Fleet,
    asked: &Asked<'_>,
    excluded: &[cairn_index::WorkerId],
    exchange: &Exchange,
) -> Result<Decided, ApiError> {
    let span = tracing::info_span!(
        "choose",
        policy = tracing::field::Empty,
        reason = tracing::field::Empty,
        worker = tracing::field::Empty,
        predicted_tokens = tracing::field::Empty,
        view_age_ms = tracing::field::Empty
    );
    let _entered = span.enter();
    let mut decided = decide(router, asked, excluded)?;
    let record = decided.record.take();
    observe::decision(router, fleet, asked, &decided, record, exchange, &span);
    let basis = match (asked.key_source, asked.degraded) {
        (cairn_routing::KeySource::Text, _) => "text",
        (_, Some(Degraded::Budget)) => "partial_tokens",
        _ => "tokens",
    };
    let named = asked.policy.as_deref();
    let named = named.unwrap_or_else(|| policy_name(router, asked.pool));
    let policy = cairn_routing::PolicyConfig::by_name(named).map_or("kv", |policy| policy.name());
    router.metrics.decisions.inc(&PolicyLabel { policy, basis });
    Ok(decided)
}

/// Waits for an answer that doesn't show its first token: when that is due, the request stops counting as a waiting
/// prefill.
async fn until_answered<T>(
    router: &Router,
    mut sent: Pin<&mut impl Future<Output = T>>,
    reservation: &mut Reservation,
    due: Micros,
) -> T {
    let due = router.alarms.after(std::time::Duration::from_micros(due.0));
    tokio::select! {
        biased;
        answer = sent.as_mut() => return answer,
        () = due.notified() => {}
    }
    reservation.assume_first_token();
    sent.await
}

/// Sends the whole request to one worker.
async fn whole(
    router: &Router,
    fleet: &Fleet,
    worker: cairn_index::WorkerId,
    trying: &Try<'_>,
) -> Result<Outcome, ApiError> {
    let Some((_, worker)) = fleet.worker(worker) else {
        return Err(ApiError::unavailable(
            "no_engine",
            "the engine has just gone; ask again",
        ));
    };
    let span = tracing::info_span!("forward", worker = worker.name());
    let plan = plan_of(trying.parsed);
    let edited = edit(trying.parsed.body.bytes(), &trying.parsed.members, &plan)?;
    let leg = leg(worker, trying, &span, edited.body);
    let beginning = pin!(begin(&router.upstream, leg));
    match beginning.instrument(span).await {
        Ok(begun) => Ok(Outcome::Begun(Answered {
            by: worker.id,
            begun,
            strip_usage: edited.strip_usage,
        })),
        Err(fault) => Ok(Outcome::Failed {
            blamed: worker.id,
            fault,
        }),
    }
}

/// Edits that every leg gets.
pub(crate) fn plan_of(parsed: &Parsed<'_>) -> EditPlan {
    EditPlan {
        cache_salt: parsed.replaces_salt.then(|| parsed.salt.clone()),
        ask_usage: parsed.endpoint != Endpoint::Embeddings && parsed.fields.stream,
        ..EditPlan::default()
    }
}

/// One leg to one worker, traced below `span`.
pub(crate) fn leg<'a>(worker: &'a Worker, trying: &Try<'_>, span: &tracing::Span, body: Bytes) -> Leg<'a> {
    let mut headers = sent_on(trying.headers);
    propagation::inject(&mut headers, propagation::outgoing(span, trying.trace));
    Leg {
        engine: &worker.engine,
        rank: (worker.spec.ranks > 1).then_some(worker.spec.rank),
        path: trying.parsed.endpoint.uri(),
        headers,
        body,
    }
}
