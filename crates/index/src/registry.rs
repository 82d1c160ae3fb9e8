//! Pools, workers, holders and sources: small, replicated, read by everyone.

use std::collections::BTreeMap;

use cairn_blocks::{BlockSize, ClusterSeed};

use crate::{Confidence, HolderId, Incarnation, LogIndex, Seq, SourceId, WorkerId};

/// Which part of a request a worker may serve.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Role {
    /// Only prompts: its KV blocks are pulled by a decode worker.
    Prefill,
    /// Only the continuation of prompts that a prefill worker computed.
    Decode,
    /// Whole requests.
    #[default]
    Both,
}

/// Where a copy lies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Tier {
    /// GPU memory of one worker.
    Gpu,
    /// CPU memory.
    Cpu,
    /// Storage that several hosts read.
    Shared,
}

/// Which workers can read a holder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reach {
    /// Only the worker that the source belongs to.
    Worker,
    /// Every worker of this host name.
    Host(String),
    /// Every worker of the pool.
    Pool,
}

/// Workers that serve the same model with the same weights, tokenizer and canonical block size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolSpec {
    /// Unique name; part of every block key.
    pub name: String,
    /// Model names and aliases that requests may use; the first is the engine's own name for it.
    pub models: Vec<String>,
    /// Canonical block size.
    pub block_size: BlockSize,
    /// Longest prompt plus answer in tokens, where known.
    pub max_model_len: Option<u32>,
    /// Directory of the model as the engine names it (`root` of `/v1/models`), where known.
    pub model_root: Option<String>,
}

/// A worker as its agent describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerSpec {
    /// Base URL of the engine's HTTP API, without a trailing slash.
    pub engine_url: String,
    /// Data-parallel rank inside the engine.
    pub rank: u32,
    /// How many ranks the engine has.
    pub ranks: u32,
    /// Host name, for holders that a host shares.
    pub host: String,
    /// What it may serve.
    pub role: Role,
    /// Engine family: `vllm` or `sglang`.
    pub engine_kind: String,
    /// The engine's own block size in tokens.
    pub engine_block_size: u32,
    /// GPU blocks of that size, 0 where unknown.
    pub capacity_blocks: u64,
    /// Sequences the engine runs at once, 0 where unknown.
    pub max_num_seqs: u32,
    /// Longest chunk of prompt tokens per step, 0 where unknown.
    pub max_batched_tokens: u32,
    /// Adapters that are loaded.
    pub adapters: Vec<String>,
    /// SGLang's bootstrap address (`host:port`) of a prefill worker.
    pub bootstrap: Option<String>,
}

/// One cache that the source fills.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HolderSpec {
    /// Where it lies.
    pub tier: Tier,
    /// Smallest run it can serve, in tokens; a multiple of nothing in particular.
    pub fetch_unit: u32,
    /// Who can read it.
    pub reach: Reach,
}

/// All that a registration says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SourceSpec {
    /// Unique name, such as `http://10.0.0.5:8000#0`.
    pub name: String,
    /// Id of the agent process that speaks for it; stable over restarts of that agent.
    pub agent: String,
    /// The pool it serves; made or widened by this registration.
    pub pool: PoolSpec,
    /// The worker it belongs to.
    pub worker: WorkerSpec,
    /// Its caches, first the GPU.
    pub holders: Vec<HolderSpec>,
}

/// A pool in the registry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pool {
    /// As registered.
    pub spec: PoolSpec,
    /// Policy that routers use unless a request says otherwise; empty for the default.
    pub policy: String,
}

/// A worker in the registry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Worker {
    /// As registered.
    pub spec: WorkerSpec,
    /// Name of its pool.
    pub pool: String,
    /// The source that reports it.
    pub source: SourceId,
    /// Takes no new requests.
    pub draining: bool,
}

/// Whether the agent of a source is heard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LeaseState {
    /// It is.
    Live,
    /// It isn't since this entry.
    Lapsed(LogIndex),
}

/// A source in the registry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Source {
    /// Unique name.
    pub name: String,
    /// Agent that speaks for it.
    pub agent: String,
    /// Its present lifetime.
    pub incarnation: Incarnation,
    /// Last applied batch.
    pub seq: Seq,
    /// Its worker.
    pub worker: WorkerId,
    /// Its caches in the order of the registration.
    pub holders: Vec<HolderId>,
    /// What the index may claim.
    pub confidence: Confidence,
    /// Whether its agent is heard.
    pub lease: LeaseState,
}

/// A holder in the registry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holder {
    /// As registered.
    pub spec: HolderSpec,
    /// The source that fills it.
    pub source: SourceId,
}

/// Everything but the blocks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Registry {
    /// The cluster's seed for block keys; set once by [`crate::Command::InitCluster`].
    pub seed: Option<ClusterSeed>,
    /// Name of the cluster, set with the seed.
    pub cluster: String,
    /// By name.
    pub pools: BTreeMap<String, Pool>,
    /// By id.
    pub workers: BTreeMap<WorkerId, Worker>,
    /// By id.
    pub sources: BTreeMap<SourceId, Source>,
    /// By id.
    pub holders: BTreeMap<HolderId, Holder>,
    /// Counts changes, so that followers can keep derived tables.
    pub version: u64,
}
