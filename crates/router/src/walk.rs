//! One request from its arrival to the answer's first byte:
//! parse -> tokenize -> chain -> overlap -> choose -> reserve -> forward -> observe.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use cairn_routing::{Ending, MAX_ATTEMPTS, Micros, Plan};
use cairn_telemetry::{TraceContext, propagation};
use http::{HeaderMap, HeaderValue, Response, header};
use hyper::body::Incoming;
use tracing::Instrument;

use crate::body::{EditPlan, Endpoint, Fields, PromptInput, ScannedBody, edit};
use crate::decide::{Asked, Decided, decide, looks_at_text, policy_of};
use crate::error::ApiError;
use crate::fleet::{Fleet, Pool, Worker};
use crate::forward::{Begun, Leg, begin};
use crate::headers::{REQUEST_ID, strip_request};
use crate::metrics::{PolicyLabel, Reason};
use crate::observe::{self, Exchange};
use crate::reply::ReplyBody;
use crate::state::{InFlightGuard, Router};
use crate::tokenize::{Budget, Degraded, Job, Tokens, too_long};
use crate::upstream::UpstreamFault;
use crate::{ask_engine, operator, split};

/// SageMaker's header that steers affinity: 1 to 64 printable ASCII characters.
const AFFINITY_HEADER: &str = "x-amzn-sagemaker-prefix-aware-id";
const AFFINITY_BYTES_MAX: usize = 64;
/// Chooses a request's policy, where that is allowed.
pub(crate) const POLICY_HEADER: &str = "x-cairn-policy";

/// What came with a request besides its body.
pub(crate) struct Arrival {
    /// When.
    pub at: Instant,
    /// Its endpoint; `None` where the body's shape tells.
    pub endpoint: Option<Endpoint>,
    /// Its headers.
    pub headers: HeaderMap,
    /// From where.
    pub peer: SocketAddr,
}

/// A parsed request; borrows from its body.
pub(crate) struct Parsed<'a> {
    /// Which operation.
    pub endpoint: Endpoint,
    /// The body with the spans of its members.
    pub body: &'a ScannedBody,
    /// What a decision needs of it.
    pub fields: Fields<'a>,
    /// The salt of its keys.
    pub salt: String,
    /// Whether that replaces the body's own.
    pub replaces_salt: bool,
}

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
    let served = serve(router, guard, arrival, body, trace, &span)
        .instrument(span.clone())
        .await;
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
    let held = router.bodies.read(body, router.body_limits).await?;
    let scanned = ScannedBody::new(held.bytes.clone())?;
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
    strip_request(&mut headers);
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

/// Reads what a decision needs.
pub(crate) fn parse<'a>(router: &Router, arrival: &Arrival, scanned: &'a ScannedBody) -> Result<Parsed<'a>, ApiError> {
    let endpoint = match arrival.endpoint {
        Some(endpoint) => endpoint,
        None => Endpoint::by_shape(&scanned.members()).ok_or_else(|| {
            ApiError::invalid(
                "unknown_shape",
                "the body has none of `messages`, `prompt` and `input`; send one of them",
            )
        })?,
    };
    let fields = Fields::read(scanned.bytes(), &scanned.members(), endpoint)?;
    let (salt, replaces_salt) = router.tenants.salt(&arrival.headers, fields.cache_salt.as_deref())?;
    Ok(Parsed {
        endpoint,
        body: scanned,
        fields,
        salt,
        replaces_salt,
    })
}

/// The pool of a model name.
pub(crate) fn pool_of<'a>(fleet: &'a Fleet, model: Option<&str>) -> Result<(&'a Arc<Pool>, Option<&'a str>), ApiError> {
    let Some(name) = model else {
        return fleet
            .only_pool()
            .map(|pool| (pool, None))
            .ok_or_else(|| ApiError::invalid("model_missing", "name a model; GET /v1/models lists them").at("model"));
    };
    fleet.model(name).ok_or_else(|| {
        if fleet.has_unknown() || fleet.pools.is_empty() {
            return ApiError::unavailable("starting", "engines haven't said yet what they serve; ask again");
        }
        let message = format!(
            "no engine serves a model of that name; use one of the {} names that GET /v1/models lists",
            fleet.names().len()
        );
        ApiError::new(
            http::StatusCode::NOT_FOUND,
            "invalid_request_error",
            "model_not_found",
            message,
        )
        .at("model")
    })
}

/// Tokenizes and chains.
pub(crate) async fn ask<'a>(
    router: &Router,
    fleet: &Fleet,
    pool: &'a Pool,
    adapter: Option<&'a str>,
    parsed: &mut Parsed<'_>,
    arrival: &Arrival,
) -> Result<Asked<'a>, ApiError> {
    let policy = request_policy(router, &arrival.headers)?;
    let by_text = match &policy {
        Some(policy) => looks_at_text(policy),
        None => policy_of(router, pool).is_ok_and(|policy| looks_at_text(policy.name())),
    };
    let (tokens, text) = tokenize(router, pool, parsed, by_text).await?;
    if let Some(max) = pool.max_model_len
        && !parsed.fields.truncates
        && let Some(longest) = tokens.prompts.iter().map(Vec::len).max()
        && longest >= max as usize
    {
        return Err(too_long(max, &longest.to_string()));
    }
    if let Some(degraded) = tokens.degraded {
        router
            .metrics
            .tokenize_degraded
            .get_or_create(&Reason {
                reason: degraded.as_str(),
            })
            .inc();
    }
    let mut asked = Asked::chain(fleet, pool, adapter.unwrap_or_default(), &parsed.salt, tokens);
    if let Some(text) = text {
        asked.prefix = text.into_bytes();
    }
    asked.affinity = affinity(&arrival.headers, &parsed.fields)?;
    asked.max_tokens = parsed.fields.max_tokens;
    asked.policy = policy;
    asked.may_split = router.config.split
        && parsed.endpoint != Endpoint::Embeddings
        && !parsed.fields.has_kv_transfer_params
        && asked.more.is_empty();
    Ok(asked)
}

async fn tokenize(
    router: &Router,
    pool: &Pool,
    parsed: &mut Parsed<'_>,
    by_text: bool,
) -> Result<(Tokens, Option<String>), ApiError> {
    let span = tracing::info_span!(
        "tokenize",
        tokens = tracing::field::Empty,
        degraded = tracing::field::Empty
    );
    let started = Instant::now();
    let job = match (parsed.endpoint, parsed.fields.chat.take()) {
        (Endpoint::Chat, Some(chat)) => Job::Chat(chat),
        (Endpoint::Completions, _) => match PromptInput::parse(parsed.fields.prompt.unwrap_or("null"))? {
            PromptInput::Texts(texts) => Job::Texts {
                texts,
                add_special: parsed.fields.add_special_tokens.unwrap_or(true),
            },
            PromptInput::Tokens(prompts) => {
                let prompts = prompts
                    .into_iter()
                    .map(|ids| truncated(ids, parsed.fields.truncate))
                    .collect();
                return Ok((
                    Tokens {
                        prompts,
                        ..Tokens::default()
                    },
                    None,
                ));
            }
        },
        (Endpoint::Embeddings | Endpoint::Chat, _) => return Ok((Tokens::default(), None)),
    };
    let job = Arc::new(job);
    let text = by_text.then(|| job.text());
    let budget = Budget {
        base: std::time::Duration::from_millis(router.config.tokenize_budget_ms),
        per_kib: std::time::Duration::from_micros(router.config.tokenize_budget_us_per_kib),
    };
    let max = pool.max_model_len.filter(|_| !parsed.fields.truncates);
    let slot = router.tokens_of(&pool.name);
    let mut tokens = slot.encode(&job, budget, max).instrument(span.clone()).await?;
    if matches!(tokens.degraded, Some(Degraded::NoTokenizer | Degraded::Mismatch)) {
        let asked = ask_engine::encode(router, pool, &job, slot.allowed(&job, budget))
            .instrument(span.clone())
            .await;
        tokens = asked.unwrap_or(tokens);
    }
    if parsed.endpoint == Endpoint::Completions && tokens.degraded.is_none() {
        for prompt in &mut tokens.prompts {
            *prompt = truncated(std::mem::take(prompt), parsed.fields.truncate);
        }
    }
    router.metrics.tokenize_seconds.observe(started.elapsed().as_secs_f64());
    span.record("tokens", tokens.total());
    if let Some(degraded) = tokens.degraded {
        span.record("degraded", degraded.as_str());
    }
    Ok((tokens, text))
}

/// What is left of a prompt that the client lets the engine shorten.
fn truncated(mut ids: Vec<u32>, how: Option<cairn_tokens::Truncate>) -> Vec<u32> {
    if let Some(how) = how {
        if how.from_left {
            ids.drain(..ids.len().saturating_sub(how.keep));
        } else {
            ids.truncate(how.keep);
        }
    }
    ids
}

/// The policy that a request names, where that is allowed.
fn request_policy(router: &Router, headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get(POLICY_HEADER).filter(|_| router.config.allow_policy_header) else {
        return Ok(None);
    };
    let name = value.to_str().unwrap_or_default();
    match cairn_routing::PolicyConfig::by_name(name) {
        Ok(policy) => Ok(Some(policy.name().to_string())),
        Err(error) => Err(ApiError::invalid("unknown_policy", error.to_string())),
    }
}

fn affinity(headers: &HeaderMap, fields: &Fields<'_>) -> Result<Vec<u8>, ApiError> {
    if let Some(value) = headers.get(AFFINITY_HEADER) {
        let bytes = value.as_bytes();
        if bytes.is_empty() || bytes.len() > AFFINITY_BYTES_MAX || !bytes.iter().all(|b| (0x20..0x7f).contains(b)) {
            return Err(ApiError::invalid(
                "invalid_affinity",
                "X-Amzn-SageMaker-Prefix-Aware-Id must be 1 to 64 printable ASCII characters",
            ));
        }
        return Ok(bytes.to_vec());
    }
    Ok(fields.prompt_cache_key.clone().unwrap_or_default().into_bytes())
}

/// The client's request id where it can be sent on, else one of ours.
fn request_id(headers: &mut HeaderMap) -> String {
    if let Some(id) = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok())
        && (1..=128).contains(&id.len())
    {
        return id.to_string();
    }
    let id = uuid::Uuid::new_v4().simple().to_string();
    if let Ok(value) = HeaderValue::from_str(&id) {
        headers.insert(REQUEST_ID, value);
    }
    id
}

/// One try at one worker or pair.
pub(crate) struct Try<'a> {
    /// The request.
    pub parsed: &'a Parsed<'a>,
    /// Headers to send.
    pub headers: &'a HeaderMap,
    /// Its trace.
    pub trace: TraceContext,
}

/// How a try went.
pub(crate) enum Outcome {
    /// The answer has begun; whether its usage event is ours to take out.
    Begun { begun: Begun, strip_usage: bool },
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
            Plan::Whole { worker } => whole(router, fleet, worker, &trying).await?,
            Plan::Split { prefill, decode } => {
                split::run(router, fleet, (prefill, decode), &trying, &mut reservation).await?
            }
        };
        match outcome {
            Outcome::Begun { begun, strip_usage } => {
                let push_back = begun.is_back_pressure();
                if push_back && attempt < MAX_ATTEMPTS && may_retry(router, attempt, "back_pressure") {
                    let after = begun.retry_after().map(|s| Micros::from_ms(s.saturating_mul(1_000)));
                    reservation.finish(Ending::PushedBack { after }, None);
                    excluded.push(choice.answering_worker());
                    // Where nobody else can take it, the engine's own words go to the client.
                    if others_left(router, asked, &excluded) {
                        last = Some(ApiError::unavailable(
                            "engines_busy",
                            "the engines have too much to do; ask again",
                        ));
                        continue;
                    }
                    return Ok(observe::answer_unreserved(exchange, begun));
                }
                if exchange.streamed && begun.head.status.is_success() {
                    reservation.first_token();
                }
                let worker = fleet.worker(choice.answering_worker()).map(|(_, worker)| worker);
                return Ok(observe::answer(
                    exchange,
                    begun,
                    strip_usage,
                    reservation,
                    &choice,
                    worker,
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
    let policy = asked.policy.as_deref().map_or_else(
        || policy_of(router, asked.pool).map_or("kv", |policy| policy.name()),
        |name| cairn_routing::PolicyConfig::by_name(name).map_or("kv", |policy| policy.name()),
    );
    router
        .metrics
        .decisions
        .get_or_create(&PolicyLabel { policy, basis })
        .inc();
    Ok(decided)
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
    let edited = edit(trying.parsed.body.bytes(), &trying.parsed.body.members(), &plan)?;
    let leg = leg(worker, trying, &span, edited.body);
    match begin(&router.upstream, leg).instrument(span).await {
        Ok(begun) => Ok(Outcome::Begun {
            begun,
            strip_usage: edited.strip_usage,
        }),
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
    let mut headers = trying.headers.clone();
    propagation::inject(&mut headers, propagation::outgoing(span, trying.trace));
    Leg {
        engine: &worker.engine,
        rank: (worker.spec.ranks > 1).then_some(worker.spec.rank),
        path: trying.parsed.endpoint.path(),
        headers,
        body,
    }
}
