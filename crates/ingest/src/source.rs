//! One stream of an engine rank, from decoded messages to batches for the index.

use cairn_blocks::{BlockKey, BlockSize, ClusterSeed};
use cairn_index::{Batch, BatchOutcome, Confidence, HolderId, Incarnation, Seq, SourceId, Tier};

use crate::{EventBatch, Millis, RefusalCounts};

/// What a source needs to know about itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SourceConfig {
    /// The cluster's seed for block keys.
    pub seed: ClusterSeed,
    /// Name of the pool.
    pub pool: String,
    /// Canonical block size of the pool.
    pub block_size: BlockSize,
    /// Tiers in the order of the registration's holders, first the GPU; events of other tiers are counted and left out.
    pub tiers: Vec<Tier>,
    /// GPU blocks of the engine's own size, 0 where unknown: one turnover of the cache.
    pub capacity_blocks: u64,
    /// Whether prompts may hold media, so that a bare extra key of a first block may be an identity and not a salt.
    pub multimodal: bool,
    /// Whether the engine has a replay socket.
    pub replay: bool,
}

/// A registration that the index accepted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Registration {
    /// Its id.
    pub source: SourceId,
    /// Its lifetime.
    pub incarnation: Incarnation,
    /// Its caches in the order of the registration.
    pub holders: Vec<HolderId>,
    /// Last batch of that lifetime that the index applied.
    pub seq: Seq,
    /// Whether the old lifetime goes on.
    pub resumed: bool,
}

/// How a replay came to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplayEnd {
    /// The engine's end marker came.
    Complete,
    /// It didn't come in time, or the socket failed.
    Failed,
}

/// What the shell must do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Ask the engine's replay socket for all batches from this seq on; then report `replayed` and `replay_ended`.
    RequestReplay {
        /// First wanted seq.
        from: u64,
    },
    /// The engine began a new life: register without `resume`, then call [`Source::registered`].
    Reregister,
    /// A newer lifetime exists elsewhere: stop reporting this source.
    Stop {
        /// The present lifetime.
        current: Incarnation,
    },
}

/// What the index says of one holder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HolderAudit {
    /// Which one.
    pub holder: HolderId,
    /// How many blocks it holds.
    pub blocks: u64,
    /// Digest of which.
    pub digest: u64,
}

/// How an audit ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AuditOutcome {
    /// Both agree.
    Equal,
    /// Batches are under way, so nothing can be said.
    InFlight,
    /// They differ: everything is being sent again.
    Drift,
}

/// Figures for metrics.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct SourceStats {
    /// What was refused so far.
    pub refused: RefusalCounts,
}

/// One stream of an engine rank.
#[derive(Debug)]
pub struct Source {
    config: SourceConfig,
    stats: SourceStats,
    queue: Vec<Effect>,
}

#[allow(missing_docs, unused_variables)]
impl Source {
    pub fn new(config: SourceConfig, now: Millis) -> Self {
        Self {
            config,
            stats: SourceStats::default(),
            queue: Vec::new(),
        }
    }
    pub fn config(&self) -> &SourceConfig {
        &self.config
    }
    /// The lifetime to ask for in the registration: `None` for a new one.
    pub fn resume(&self) -> Option<Incarnation> {
        None
    }
    pub fn registered(&mut self, now: Millis, registration: Registration) {}
    /// The subscription is (again) up.
    pub fn connected(&mut self, now: Millis) {}
    pub fn disconnected(&mut self, now: Millis) {}
    pub fn live(&mut self, now: Millis, batch: EventBatch) {}
    pub fn replayed(&mut self, now: Millis, batch: EventBatch) {}
    pub fn replay_ended(&mut self, now: Millis, end: ReplayEnd) {}
    /// The engine's process start time (any unit, only compared), as its metrics say.
    pub fn process_started(&mut self, now: Millis, start: u64) {}
    pub fn asleep(&mut self, now: Millis, asleep: bool) {}
    /// Total prompt tokens that the engine has computed so far, as its metrics say; finds silent ranks.
    pub fn served(&mut self, now: Millis, prompt_tokens: u64) {}
    /// What the engine said it reused of a request: confirms or cuts suspects.
    pub fn cached_tokens(&mut self, now: Millis, keys: &[BlockKey], cached: u32) {}
    /// Call about every 100 ms.
    pub fn tick(&mut self, now: Millis) {}
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.queue.pop()
    }
    /// The next batch to send, oldest first; `None` when the window is full or nothing changed.
    pub fn next_batch(&mut self, now: Millis) -> Option<&Batch> {
        None
    }
    pub fn acked(&mut self, now: Millis, incarnation: Incarnation, seq: Seq, outcome: &BatchOutcome) {}
    /// The stream to the index broke: unacknowledged batches are sent again.
    pub fn push_stream_lost(&mut self) {}
    pub fn audit(&mut self, now: Millis, seq: Seq, holders: &[HolderAudit]) -> AuditOutcome {
        AuditOutcome::InFlight
    }
    pub fn confidence(&self) -> Confidence {
        Confidence::Exact
    }
    pub fn stats(&self) -> &SourceStats {
        &self.stats
    }
}
