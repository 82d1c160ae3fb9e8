//! Why a candidate got no credit: what a decision's prompt was named by, against what the view says of the worker now.

use cairn_blocks::BlockKey;
use cairn_index::WorkerId;
use cairn_routing::{DecisionRecord, KeySource, ViewState, ZeroFacts, why_zero};
use serde_json::{Value, json};

use crate::decide::Asked;
use crate::fleet::Fleet;
use crate::state::Router;

/// How a prompt was named when it was decided; small enough to be kept with every decision.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Named {
    /// Canonical block size.
    pub block_tokens: u32,
    /// Keys that were made.
    pub keys: usize,
    /// The first of them.
    pub first: Option<BlockKey>,
    /// What they were made from.
    pub key_source: KeySource,
    /// State of the view.
    pub view: ViewState,
}

impl Named {
    /// How `asked` is named.
    pub fn of(router: &Router, asked: &Asked<'_>) -> Self {
        Self {
            block_tokens: asked.pool.block_size.tokens(),
            keys: asked.keys.len(),
            first: asked.keys.first().copied(),
            key_source: asked.key_source,
            view: router.view.is(),
        }
    }
}

/// Adds `why_zero` to the candidates without credit in `value`, and the log index of the view that it was read from: of a past
/// decision, a worker may have stored or evicted blocks since.
pub(crate) fn add(router: &Router, fleet: &Fleet, named: &Named, record: &DecisionRecord, value: &mut Value) {
    value["why_zero_applied_index"] = json!(router.view.applied());
    let Some(rows) = value["candidates"].as_array_mut() else {
        return;
    };
    for (candidate, row) in record.candidates.iter().zip(rows) {
        let inputs = &candidate.inputs;
        if inputs.gpu_tokens + inputs.cpu_tokens + inputs.shared_tokens > 0 {
            continue;
        }
        let Some((_, worker)) = fleet.worker(candidate.worker) else {
            continue;
        };
        let (held_blocks, first_block) = held(router, candidate.worker, named.first);
        let facts = ZeroFacts {
            prompt_tokens: record.prompt_tokens,
            block_tokens: named.block_tokens,
            keys: named.keys,
            key_source: named.key_source,
            view: named.view,
            confidence: worker.confidence,
            held_blocks,
            first_block,
            trust: inputs.trust,
        };
        let reasons: Vec<Value> = why_zero(&facts)
            .into_iter()
            .map(|why| json!({ "why": why, "advice": why.advice() }))
            .collect();
        row["why_zero"] = json!(reasons);
    }
}

/// How many blocks a worker's caches hold, and whether the prompt's first one is among them.
fn held(router: &Router, worker: WorkerId, first: Option<BlockKey>) -> (u64, bool) {
    let state = router.view.state.read();
    let Some(found) = state.registry().workers.get(&worker) else {
        return (0, false);
    };
    let Some(source) = state.registry().sources.get(&found.source) else {
        return (0, false);
    };
    let blocks = source
        .holders
        .iter()
        .map(|holder| state.residency().holder_blocks(*holder))
        .sum();
    let mut depths = Vec::new();
    state.residency().match_prefix(first.as_slice(), &mut depths);
    let first = source
        .holders
        .iter()
        .any(|holder| depths.get(holder.0 as usize).is_some_and(|depth| *depth > 0));
    (blocks, first)
}
