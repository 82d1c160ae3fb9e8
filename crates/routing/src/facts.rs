//! What is known about a request and about a worker when a decision is made.

use cairn_blocks::BlockKey;
use cairn_index::{Confidence, DegradedReason, Role, WorkerId, WorkerOverlap};
use serde::{Deserialize, Serialize};

/// How well the request's keys name what the engine will compute.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeySource {
    /// Keys of the very tokens.
    #[default]
    Exact,
    /// The tokenizer ran out of its budget: keys of the part that was tokenised.
    PartialTokens,
    /// No tokenizer: keys made from the text by [`crate::text_keys`]; they never match the index.
    Text,
}

/// One request, as far as routing cares. Slices are borrowed; nothing is kept but what the overlay needs.
#[derive(Clone, Debug, Default)]
pub struct RequestFacts<'a> {
    /// Name of the pool that serves the model asked for.
    pub pool: &'a str,
    /// Adapter (LoRA) asked for; empty for the base model.
    pub adapter: &'a str,
    /// Length of the prompt in tokens (an estimate where `key_source` isn't exact).
    pub prompt_tokens: u32,
    /// Canonical block size of the pool in tokens.
    pub block_tokens: u32,
    /// Keys of the prompt's full blocks.
    pub keys: &'a [BlockKey],
    /// What the keys are made from.
    pub key_source: KeySource,
    /// Identity that steers affinity only (`X-Amzn-SageMaker-Prefix-Aware-Id`, `prompt_cache_key`, session); empty for none.
    pub affinity: &'a [u8],
    /// The prompt's text from its start, as far as the `prefix` policy may look; empty for token prompts.
    pub prefix: &'a [u8],
    /// How many tokens the answer is expected to have; 0 where unknown.
    pub expected_output: u32,
    /// Higher is more urgent; 0 is normal. Recorded, and used by policies that order by it.
    pub priority: i32,
    /// Workers that were tried already or are excluded by the caller; sorted or not, short.
    pub excluded: &'a [WorkerId],
    /// Policy asked for by this request; the pool's where `None`.
    pub policy: Option<&'a str>,
    /// Whether a split into prefill and decode worker is possible for this kind of request.
    pub may_split: bool,
}

/// Leading tokens of a request that one worker can reuse, by where they lie, after the index's floors and caps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Reuse {
    /// In the worker's GPU cache.
    pub gpu: u32,
    /// Further, in one CPU holder within reach.
    pub cpu: u32,
    /// Further than these, in another worker's cache that this worker can fetch from.
    pub peer: u32,
    /// Further than all of these, in one shared holder.
    pub shared: u32,
}

impl Reuse {
    /// All of them.
    #[must_use]
    pub fn tokens(self) -> u32 {
        self.gpu
            .saturating_add(self.cpu)
            .saturating_add(self.shared)
            .saturating_add(self.peer)
    }
}

/// Answers what each worker can reuse of the request being decided.
pub trait ReuseOf {
    /// Reuse of one worker; zero where it is unknown.
    fn reuse(&self, worker: WorkerId) -> Reuse;
}

/// Pairs sorted by worker.
impl ReuseOf for [(WorkerId, Reuse)] {
    fn reuse(&self, worker: WorkerId) -> Reuse {
        self.binary_search_by_key(&worker, |(w, _)| *w)
            .map_or_else(|_| Reuse::default(), |at| self[at].1)
    }
}

impl ReuseOf for Vec<(WorkerId, Reuse)> {
    fn reuse(&self, worker: WorkerId) -> Reuse {
        self.as_slice().reuse(worker)
    }
}

/// What the index answers, sorted by worker.
impl ReuseOf for [WorkerOverlap] {
    fn reuse(&self, worker: WorkerId) -> Reuse {
        self.binary_search_by_key(&worker, |w| w.worker).map_or_else(
            |_| Reuse::default(),
            |at| {
                let overlap = self[at].overlap;
                Reuse {
                    gpu: overlap.gpu,
                    cpu: overlap.cpu,
                    shared: overlap.shared,
                    peer: 0,
                }
            },
        )
    }
}

impl ReuseOf for Vec<WorkerOverlap> {
    fn reuse(&self, worker: WorkerId) -> Reuse {
        self.as_slice().reuse(worker)
    }
}

impl<F: Fn(WorkerId) -> Reuse> ReuseOf for F {
    fn reuse(&self, worker: WorkerId) -> Reuse {
        self(worker)
    }
}

/// A worker as the router knows it. Setting it again never touches its load.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerFacts {
    /// Its id.
    pub worker: WorkerId,
    /// Its pool's name.
    pub pool: String,
    /// What it may serve.
    pub role: Role,
    /// Whether a `Decode` worker can also serve whole requests (vLLM can, SGLang's disaggregated mode can't).
    pub decode_serves_whole: bool,
    /// Whether this router's own checks of the engine succeed.
    pub healthy: bool,
    /// The engine sleeps and holds nothing.
    pub asleep: bool,
    /// It takes no new requests.
    pub draining: bool,
    /// What the index may claim about it.
    pub confidence: Confidence,
    /// Adapters that are loaded, in any order.
    pub adapters: Vec<String>,
    /// Sequences the engine runs at once, 0 where unknown.
    pub max_num_seqs: u32,
    /// KV capacity in tokens, 0 where unknown.
    pub capacity_tokens: u64,
    /// Longest prompt plus answer in tokens, 0 where unknown.
    pub max_model_len: u32,
    /// Requests in flight from all routers above which it is a last resort only, 0 for no limit.
    pub max_in_flight: u32,
}

impl WorkerFacts {
    /// A healthy, idle worker that serves whole requests of the base model.
    #[must_use]
    pub fn new(worker: WorkerId, pool: &str) -> Self {
        Self {
            worker,
            pool: pool.to_owned(),
            role: Role::Both,
            decode_serves_whole: true,
            healthy: true,
            asleep: false,
            draining: false,
            confidence: Confidence::Exact,
            adapters: Vec::new(),
            max_num_seqs: 0,
            capacity_tokens: 0,
            max_model_len: 0,
            max_in_flight: 0,
        }
    }

    /// Whether its cache is guessed from what was sent to it, since its events don't come.
    #[must_use]
    pub fn is_approximate(&self) -> bool {
        matches!(
            self.confidence,
            Confidence::Degraded(DegradedReason::Silent | DegradedReason::NoEvents | DegradedReason::Mismatch)
        )
    }
}

/// Why a worker wasn't considered, or was only as a last resort.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WhyNot {
    /// The router's own checks fail.
    Unhealthy,
    /// The engine sleeps.
    Asleep,
    /// It takes no new requests.
    Draining,
    /// The adapter isn't loaded there.
    AdapterMissing,
    /// Prompt and answer are longer than it allows.
    TooLong,
    /// The request was tried there already, or the caller excluded it.
    Excluded,
    /// Its role doesn't fit.
    Role,
    /// Too many faults lately (last resort).
    BreakerOpen,
    /// It answered 503 or 429 lately (last resort).
    Backpressure,
    /// It has its limit of requests in flight (last resort).
    AtLimit,
    /// Transfers of every pair with it fail lately (last resort).
    TransfersFail,
}

impl WhyNot {
    /// Words for people and for closed label sets.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unhealthy => "unhealthy",
            Self::Asleep => "asleep",
            Self::Draining => "draining",
            Self::AdapterMissing => "adapter_missing",
            Self::TooLong => "too_long",
            Self::Excluded => "excluded",
            Self::Role => "role",
            Self::BreakerOpen => "breaker_open",
            Self::Backpressure => "backpressure",
            Self::AtLimit => "at_limit",
            Self::TransfersFail => "transfers_fail",
        }
    }
}
