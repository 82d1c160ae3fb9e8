//! The last decisions, kept for operators who ask why a request went where it did.

use std::collections::VecDeque;

use cairn_routing::{CandidateTerms, DecisionRecord};
use cairn_telemetry::TraceContext;
use http::HeaderValue;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::fleet::Fleet;
use crate::state::Router;
use crate::why::{self, Named};

/// Decisions kept; a few seconds of a busy router, minutes of a quiet one.
const KEPT_MAX: usize = 1_024;
/// Candidates kept in all, so that large pools don't make the ring large: about 200 bytes each.
const CANDIDATES_MAX: usize = 65_536;

/// One of them.
pub(crate) struct Kept {
    /// The request's id.
    pub request_id: HeaderValue,
    /// Its trace.
    pub trace: TraceContext,
    /// When, in ms since the epoch.
    pub at_ms: u64,
    /// Which operation.
    pub endpoint: &'static str,
    /// Why tokens weren't all known.
    pub degraded: Option<&'static str>,
    /// The log index of the view.
    pub applied: u64,
    /// How long the decision took in µs.
    pub took_us: u64,
    /// Where the shadow policy would have sent it.
    pub shadow: Option<cairn_index::WorkerId>,
    /// How its prompt was named.
    pub named: Named,
    /// Everything that it was made from.
    pub record: DecisionRecord,
}

/// A ring of them.
#[derive(Default)]
pub(crate) struct Decisions {
    ring: Mutex<(VecDeque<Kept>, usize)>,
}

impl Decisions {
    /// Keeps one more.
    pub(crate) fn push(&self, kept: Kept) {
        let mut ring = self.ring.lock();
        ring.1 += kept.record.candidates.len();
        ring.0.push_back(kept);
        while ring.0.len() > KEPT_MAX || (ring.1 > CANDIDATES_MAX && ring.0.len() > 1) {
            if let Some(old) = ring.0.pop_front() {
                ring.1 -= old.record.candidates.len();
            }
        }
    }

    /// The newest ones that match, newest first.
    pub(crate) fn find(
        &self,
        router: &Router,
        fleet: &Fleet,
        request_id: Option<&str>,
        trace_id: Option<&str>,
        any_id: Option<&str>,
        limit: usize,
    ) -> Vec<Value> {
        let ring = self.ring.lock();
        let is_named = |kept: &Kept, id: &str| kept.request_id.as_bytes() == id.as_bytes();
        ring.0
            .iter()
            .rev()
            .filter(|kept| request_id.is_none_or(|id| is_named(kept, id)))
            .filter(|kept| trace_id.is_none_or(|id| kept.trace.trace_id_hex() == id))
            .filter(|kept| any_id.is_none_or(|id| is_named(kept, id) || kept.trace.trace_id_hex() == id))
            .take(limit)
            .map(|kept| {
                let mut value = explained(fleet, &kept.record);
                why::add(router, fleet, &kept.named, &kept.record, &mut value);
                value["request_id"] = json!(kept.request_id.to_str().unwrap_or_default());
                value["trace_id"] = json!(kept.trace.trace_id_hex());
                value["at_ms"] = json!(kept.at_ms);
                value["endpoint"] = json!(kept.endpoint);
                value["degraded"] = json!(kept.degraded);
                value["applied_index"] = json!(kept.applied);
                value["took_us"] = json!(kept.took_us);
                if let Some(shadow) = kept.shadow {
                    let worker = fleet.worker(shadow);
                    value["shadow"] = json!(worker.map_or_else(|| format!("worker {}", shadow.0), |(_, w)| w.name()));
                }
                value["record"] = json!(kept.record);
                value
            })
            .collect()
    }
}

/// A decision with names for people.
pub(crate) fn explained(fleet: &Fleet, record: &DecisionRecord) -> Value {
    let name = |id: u32| {
        let worker = fleet.worker(cairn_index::WorkerId(id));
        worker.map_or_else(|| format!("worker {id}"), |(_, worker)| worker.name())
    };
    let candidates: Vec<Value> = record
        .candidates
        .iter()
        .map(|candidate| {
            let mut value = json!(CandidateTerms::from(candidate));
            value["id"] = json!(candidate.worker.0);
            value["worker"] = json!(name(candidate.worker.0));
            value
        })
        .collect();
    json!({
        "pool": record.pool,
        "tokens": record.prompt_tokens,
        "key_source": record.key_source,
        "policy": record.policy.name(),
        "chosen": name(record.chosen.0),
        "decode": record.decode.map(|id| name(id.0)),
        "runner_up": record.runner_up.map(|id| name(id.0)),
        "reason": record.reason.as_str(),
        "candidates": candidates,
    })
}
