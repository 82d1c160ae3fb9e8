//! The router's metrics: names, units, label values and bucket edges. All label sets are closed.

use std::hash::Hash;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use cairn_telemetry::SharedRegistry;
use cairn_telemetry::metrics::LATENCY_SECONDS;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

/// Labels of finished requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct RequestLabels {
    /// `chat`, `completions`, `embeddings`.
    pub endpoint: &'static str,
    /// Class of the status: `2xx`, `4xx`, `429`, `5xx`, `503`.
    pub status: &'static str,
}

/// One cause.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Reason {
    /// From the closed set that the metric's help names.
    pub reason: &'static str,
}

/// One policy.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct PolicyLabel {
    /// Name of the policy.
    pub policy: &'static str,
    /// What the decision was based on.
    pub basis: &'static str,
}

/// Label sets of a family whose counters are at hand: the first that come are those of most requests.
const AT_HAND: usize = 8;

/// A family that every request counts in: a look-up in the family itself hashes the labels and takes a lock.
pub(crate) struct Often<L> {
    family: Family<L, Counter>,
    at_hand: Arc<[OnceLock<(L, Counter)>; AT_HAND]>,
}

impl<L: Clone + Eq + Hash> Often<L> {
    /// Counts one more under `labels`.
    pub(crate) fn inc(&self, labels: &L) {
        for slot in &*self.at_hand {
            let (known, counter) = slot.get_or_init(|| (labels.clone(), self.family.get_or_create(labels).clone()));
            if known == labels {
                counter.inc();
                return;
            }
        }
        self.family.get_or_create(labels).inc();
    }
}

impl<L: Clone + Eq + Hash> Default for Often<L> {
    fn default() -> Self {
        Self {
            family: Family::default(),
            at_hand: Arc::default(),
        }
    }
}

impl<L> Clone for Often<L> {
    fn clone(&self) -> Self {
        Self {
            family: self.family.clone(),
            at_hand: Arc::clone(&self.at_hand),
        }
    }
}

/// All of them; cheap to clone.
#[derive(Clone)]
pub(crate) struct Metrics {
    pub registry: SharedRegistry,
    pub requests: Often<RequestLabels>,
    pub refused: Family<Reason, Counter>,
    pub ended: Often<Reason>,
    pub retries: Family<Reason, Counter>,
    pub decisions: Often<PolicyLabel>,
    pub shadow: Family<Reason, Counter>,
    pub shadow_new_tokens: Counter,
    pub new_tokens: Counter,
    pub tokenize_degraded: Family<Reason, Counter>,
    pub in_flight: Gauge,
    pub reservations: Gauge,
    pub router_seconds: Histogram,
    pub tokenize_seconds: Histogram,
    pub ttft_seconds: Histogram,
    pub overlap_tokens: Counter,
    pub prompt_tokens: Counter,
    pub predicted_tokens: Counter,
    pub cached_tokens: Counter,
    pub audited_prompt_tokens: Counter,
    pub drift_ratio: Gauge<f64, AtomicU64>,
    pub splits: Family<Reason, Counter>,
    pub view_applied_index: Gauge,
    pub view_age_ms: Gauge,
    pub view_switches: Family<Reason, Counter>,
    pub bounded: Family<Reason, Counter>,
    pub samples: Family<Reason, Counter>,
}

impl Metrics {
    /// Registers everything in a fresh registry.
    pub(crate) fn new() -> Self {
        let registry = SharedRegistry::new();
        let histogram = || Histogram::new(LATENCY_SECONDS);
        let metrics = Self {
            registry: registry.clone(),
            requests: Often::default(),
            refused: Family::default(),
            ended: Often::default(),
            retries: Family::default(),
            decisions: Often::default(),
            shadow: Family::default(),
            shadow_new_tokens: Counter::default(),
            new_tokens: Counter::default(),
            tokenize_degraded: Family::default(),
            in_flight: Gauge::default(),
            reservations: Gauge::default(),
            router_seconds: histogram(),
            tokenize_seconds: histogram(),
            ttft_seconds: histogram(),
            overlap_tokens: Counter::default(),
            prompt_tokens: Counter::default(),
            predicted_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            audited_prompt_tokens: Counter::default(),
            drift_ratio: Gauge::default(),
            splits: Family::default(),
            view_applied_index: Gauge::default(),
            view_age_ms: Gauge::default(),
            view_switches: Family::default(),
            bounded: Family::default(),
            samples: Family::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&self) {
        let m = self.clone();
        self.registry.with(move |r| {
            let r = r.sub_registry_with_prefix("cairn_router");
            r.register(
                "requests",
                "Requests answered, by endpoint and class of status",
                m.requests.family,
            );
            r.register(
                "refused",
                "Requests refused before an engine was asked, by code",
                m.refused,
            );
            r.register(
                "streams_ended",
                "Answers by ending: done, client_gone, upstream_cut",
                m.ended.family,
            );
            r.register(
                "retries",
                "Second attempts by cause: connect, cut, back_pressure, no_budget",
                m.retries,
            );
            r.register(
                "decisions",
                "Decisions by policy and basis: tokens, text, blind",
                m.decisions.family,
            );
            r.register(
                "shadow",
                "Decisions by what the shadow policy would have chosen: same, other",
                m.shadow,
            );
            r.register(
                "shadow_new_tokens",
                "Prompt tokens that would have been computed under the shadow policy",
                m.shadow_new_tokens,
            );
            r.register(
                "shadowed_new_tokens",
                "Prompt tokens to be computed of decisions with a shadow, by their own policy",
                m.new_tokens,
            );
            r.register(
                "tokenize_degraded",
                "Prompts whose tokens weren't all known: budget, no_tokenizer, template, too_long, media",
                m.tokenize_degraded,
            );
            r.register("reservations", "Reservations that haven't ended", m.reservations);
            r.register("in_flight", "Requests between arrival and end", m.in_flight);
            r.register(
                "overhead_seconds",
                "Time from a request's arrival to its sending on",
                m.router_seconds,
            );
            r.register("tokenize_seconds", "Time to get a prompt's tokens", m.tokenize_seconds);
            r.register(
                "ttft_seconds",
                "Time from arrival to the first byte of a streamed answer",
                m.ttft_seconds,
            );
            r.register(
                "overlap_tokens",
                "Prompt tokens that the committed view promised where requests were sent",
                m.overlap_tokens,
            );
            r.register("prompt_tokens", "Prompt tokens of all decisions", m.prompt_tokens);
            r.register(
                "predicted_tokens",
                "Prompt tokens predicted to be cached, of audited requests",
                m.predicted_tokens,
            );
            r.register(
                "cached_tokens",
                "Prompt tokens that engines took from cache, of audited requests",
                m.cached_tokens,
            );
            r.register(
                "audited_prompt_tokens",
                "Prompt tokens of audited requests",
                m.audited_prompt_tokens,
            );
            r.register(
                "prediction_drift_ratio",
                "Recent mean of |predicted - cached| over prompt tokens",
                m.drift_ratio,
            );
            r.register(
                "splits",
                "Split requests: done, prefill_failed, decode_failed, retried",
                m.splits,
            );
            r.register(
                "view_applied_index",
                "Log index that the view has applied",
                m.view_applied_index,
            );
            r.register(
                "view_age_ms",
                "Time since the view's node last knew of a quorum",
                m.view_age_ms,
            );
            r.register(
                "view_switches",
                "Changes of the followed index node: error, stale, closed",
                m.view_switches,
            );
            r.register(
                "bounded",
                "Limits that were hit: decisions, approximate, soft, reused",
                m.bounded,
            );
            r.register(
                "tokenizer_samples",
                "Served encodings compared with the reference encoder: same, different",
                m.samples,
            );
        });
    }
}

/// Class of a status.
pub(crate) fn status_class(status: http::StatusCode) -> &'static str {
    match status.as_u16() {
        429 => "429",
        503 => "503",
        200..=299 => "2xx",
        400..=499 => "4xx",
        500..=599 => "5xx",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_at_hand_are_those_of_the_family_and_more_label_sets_than_fit_still_count() {
        const NAMES: [&str; AT_HAND + 2] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];
        let often = Often::default();
        for reason in NAMES.iter().chain(&NAMES) {
            often.inc(&Reason { reason });
        }
        for reason in NAMES {
            assert_eq!(often.family.get_or_create(&Reason { reason }).get(), 2, "{reason}");
        }
    }
}
