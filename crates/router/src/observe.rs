//! What is noted of a decision and of an answer on its way: records, spans, headers, metrics and the audit.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use cairn_index::{Confidence, DegradedReason, WorkerId};
use cairn_proto::limits::REUSED_KEYS_MAX;
use cairn_proto::v1;
use cairn_routing::{CandidateTerms, Choice, DecisionRecord, Ending, KeySource, Plan};
use cairn_telemetry::TraceContext;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};

use crate::body::Endpoint;
use crate::decide::{Asked, Decided, Reservation};
use crate::decisions::Kept;
use crate::fleet::{Fleet, Worker};
use crate::forward::Begun;
use crate::headers::REQUEST_ID;
use crate::metrics::{Metrics, Reason, RequestLabels, status_class};
use crate::relay::{self, Observer, Relay};
use crate::reply::ReplyBody;
use crate::soft::REUSED_MAX;
use crate::sse::{SseWatch, Usage};
use crate::state::{InFlightGuard, Router};
use crate::walk::Answered;
use crate::why::Named;

/// Candidates in the table of a `choose` span.
const SPAN_CANDIDATES_MAX: usize = 8;
/// Weight of one audited request in the running drift.
const DRIFT_WEIGHT: f64 = 0.05;

/// A request and its answer, as far as they are noted.
pub(crate) struct Exchange {
    /// The router.
    pub router: Arc<Router>,
    /// Counts it as in flight.
    pub _guard: InFlightGuard,
    /// When it came.
    pub arrived: Instant,
    /// Its operation.
    pub endpoint: Endpoint,
    /// Whether a stream was asked for.
    pub streamed: bool,
    /// Its root span; ends with the answer.
    pub span: tracing::Span,
    /// Its trace.
    pub trace: TraceContext,
    /// Its id.
    pub request_id: HeaderValue,
    /// Whether an operator asked for decision headers.
    pub debug: bool,
    /// Whether its prediction can be compared with the engine's figure.
    pub comparable: bool,
    /// Length of its prompt.
    pub prompt_tokens: u32,
}

/// Notes a decision: the candidate table in its span, and the record for operators.
pub(crate) fn decision(
    router: &Router,
    fleet: &Fleet,
    asked: &Asked<'_>,
    decided: &Decided,
    record: Option<DecisionRecord>,
    exchange: &Exchange,
    span: &tracing::Span,
) {
    let choice = &decided.choice;
    if !span.is_disabled() {
        let chosen = fleet
            .worker(choice.answering_worker())
            .map(|(_, worker)| worker.name())
            .unwrap_or_default();
        span.record("reason", choice.reason.as_str());
        span.record("worker", chosen.as_str());
        span.record("predicted_tokens", choice.predicted.tokens());
        span.record("view_age_ms", router.view.age_ms());
        exchange.span.record("worker", chosen.as_str());
    }
    router
        .metrics
        .overlap_tokens
        .inc_by(u64::from(choice.predicted.tokens()));
    router.metrics.prompt_tokens.inc_by(u64::from(asked.prompt_tokens));
    if let Some(shadow) = decided.shadow {
        let same = shadow.worker == choice.prefill_worker();
        let reason = if same { "same" } else { "other" };
        router.metrics.shadow.get_or_create(&Reason { reason }).inc();
        router.metrics.shadow_new_tokens.inc_by(u64::from(shadow.new_tokens));
        router.metrics.new_tokens.inc_by(u64::from(choice.terms.new_tokens));
    }
    let Some(record) = record else { return };
    span.record("policy", record.policy.name());
    if tracing::enabled!(target: "cairn::trace", tracing::Level::INFO) {
        candidate_table(fleet, &record);
    }
    let at_ms = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_millis());
    router.decisions.push(Kept {
        request_id: exchange.request_id.clone(),
        trace: exchange.trace,
        at_ms: u64::try_from(at_ms).unwrap_or(u64::MAX),
        endpoint: exchange.endpoint.label(),
        degraded: asked.degraded.map(crate::tokenize::Degraded::as_str),
        applied: router.view.applied(),
        took_us: u64::try_from(decided.took.as_micros()).unwrap_or(u64::MAX),
        shadow: decided.shadow.map(|shadow| shadow.worker),
        named: Named::of(router, asked),
        record,
    });
}

/// The cheapest candidates as events of the current span.
fn candidate_table(fleet: &Fleet, record: &DecisionRecord) {
    let mut rows: Vec<CandidateTerms> = record.candidates.iter().map(CandidateTerms::from).collect();
    rows.sort_by(|a, b| a.cost_ms.total_cmp(&b.cost_ms));
    for row in rows.iter().take(SPAN_CANDIDATES_MAX) {
        let worker = fleet
            .worker(cairn_index::WorkerId(row.worker))
            .map(|(_, worker)| worker.name());
        tracing::event!(
            target: "cairn::trace",
            tracing::Level::INFO,
            worker = worker.unwrap_or_default(),
            eligible = row.eligible,
            why_not = row.why_not.map_or("", |why| why.as_str()),
            gpu_tokens = row.gpu_tokens,
            cpu_tokens = row.cpu_tokens,
            shared_tokens = row.shared_tokens,
            speculative_tokens = row.speculative_tokens,
            in_flight = row.in_flight,
            queue_ms = row.queue_ms,
            fetch_ms = row.fetch_ms,
            prefill_ms = row.prefill_ms,
            cost_ms = row.cost_ms,
            "candidate"
        );
    }
}

/// Hands an answer that has begun to the client, and watches it to its end.
pub(crate) fn answer(
    exchange: Exchange,
    answered: Answered,
    reservation: Reservation,
    choice: &Choice,
    (asked, worker): (&Asked<'_>, Option<&Worker>),
) -> Response<ReplyBody> {
    let debug = exchange.debug;
    let predicted = reservation.predicted();
    let doubted = worker.and_then(|worker| doubted(asked, choice, worker));
    let mut response = relayed(exchange, answered, Some(reservation), (predicted, doubted));
    if debug {
        debug_headers(response.headers_mut(), choice, worker);
    }
    response
}

/// The same for an answer whose reservation has ended: an engine's refusal that is passed on.
pub(crate) fn answer_unreserved(exchange: Exchange, answered: Answered) -> Response<ReplyBody> {
    relayed(exchange, answered, None, (0, None))
}

fn relayed(
    exchange: Exchange,
    answered: Answered,
    reservation: Option<Reservation>,
    (predicted, doubted): (u32, Option<v1::Reused>),
) -> Response<ReplyBody> {
    let Answered { by, begun, strip_usage } = answered;
    let metrics = &exchange.router.metrics;
    let status = begun.head.status;
    exchange.span.record("status", status.as_u16());
    let labels = RequestLabels {
        endpoint: exchange.endpoint.label(),
        status: status_class(status),
    };
    metrics.requests.inc(&labels);
    if exchange.streamed && status.is_success() {
        metrics.ttft_seconds.observe(exchange.arrived.elapsed().as_secs_f64());
    }
    let events = (begun.is_events() && status.is_success()).then(|| SseWatch::new(strip_usage));
    let length = if events.is_some() { None } else { begun.length };
    let request_id = exchange.request_id.clone();
    let observed = Observed {
        exchange,
        reservation,
        by,
        status,
        predicted,
        doubted,
    };
    let Begun {
        mut head, first, rest, ..
    } = begun;
    head.headers.entry(REQUEST_ID).or_insert(request_id);
    let relay = Relay::new(first, rest, events, length, Box::new(observed));
    Response::from_parts(head, ReplyBody::Relay(Box::new(relay)))
}

fn debug_headers(headers: &mut HeaderMap, choice: &Choice, worker: Option<&Worker>) {
    let mut put = |name: &'static str, value: String| {
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    };
    put("x-cairn-worker", worker.map(Worker::name).unwrap_or_default());
    put("x-cairn-overlap", choice.predicted.tokens().to_string());
    put("x-cairn-overlap-gpu", choice.predicted.gpu.to_string());
    put("x-cairn-overlap-cpu", choice.predicted.cpu.to_string());
    put("x-cairn-reason", choice.reason.as_str().to_string());
    put("x-cairn-cost-ms", format!("{:.3}", choice.terms.cost().ms()));
}

/// Watches one answer.
struct Observed {
    exchange: Exchange,
    reservation: Option<Reservation>,
    by: WorkerId,
    status: StatusCode,
    predicted: u32,
    doubted: Option<v1::Reused>,
}

/// The report to be filled in with what the engine reused, where events of it are missing: its agent learns from it
/// which blocks are still there.
fn doubted(asked: &Asked<'_>, choice: &Choice, worker: &Worker) -> Option<v1::Reused> {
    let gap = matches!(worker.confidence, Confidence::Degraded(DegradedReason::Gap));
    let whole = matches!(choice.plan, Plan::Whole { .. });
    let tokens = asked.key_source == KeySource::Exact && asked.more.is_empty();
    (gap && whole && tokens && !worker.source.is_empty()).then(|| v1::Reused {
        worker: worker.id.0,
        keys: asked.keys.iter().take(REUSED_KEYS_MAX).map(|key| key.0).collect(),
        ..v1::Reused::default()
    })
}

impl Observer for Observed {
    fn ended(&mut self, ending: relay::Ending, usage: Option<Usage>) {
        let metrics = &self.exchange.router.metrics;
        metrics.ended.inc(&Reason { reason: ending.label() });
        let Some(reservation) = self.reservation.take() else {
            return;
        };
        let cached = usage.as_ref().and_then(Usage::cached);
        let how = match ending {
            relay::Ending::ClientGone => Ending::Cancelled,
            relay::Ending::UpstreamCut => Ending::Fault,
            relay::Ending::Done if self.status.is_success() => Ending::Done {
                cached_tokens: cached.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX)),
            },
            relay::Ending::Done if matches!(self.status.as_u16(), 429 | 503) => Ending::PushedBack { after: None },
            relay::Ending::Done if self.status.is_client_error() => Ending::Refused,
            relay::Ending::Done => Ending::Fault,
        };
        if let (Ending::Done { .. }, Some(cached), true) = (how, cached, self.exchange.comparable) {
            audit(metrics, self.predicted, cached, self.exchange.prompt_tokens);
        }
        if let (Ending::Done { .. }, Some(cached), Some(mut report)) = (how, cached, self.doubted.take()) {
            report.tokens = u32::try_from(cached).unwrap_or(u32::MAX);
            let mut reused = self.exchange.router.reused.lock();
            if reused.len() < REUSED_MAX {
                reused.push(report);
            } else {
                metrics.bounded.get_or_create(&Reason { reason: "reused" }).inc();
            }
        }
        reservation.finish(how, Some(self.by));
    }
}

/// Compares what the committed view promised with what the engine found.
fn audit(metrics: &Metrics, predicted: u32, cached: u64, prompt_tokens: u32) {
    metrics.predicted_tokens.inc_by(u64::from(predicted));
    metrics.cached_tokens.inc_by(cached);
    metrics.audited_prompt_tokens.inc_by(u64::from(prompt_tokens));
    let off = (f64::from(predicted) - cached as f64).abs() / f64::from(prompt_tokens.max(1));
    let mean = metrics.drift_ratio.get();
    // A lost update of a running mean does no harm.
    metrics.drift_ratio.set(mean + (off - mean) * DRIFT_WEIGHT);
}
