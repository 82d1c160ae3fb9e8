//! What a shell tells a source, and what a source asks of it.

use cairn_blocks::{BlockSize, ClusterSeed};
use cairn_index::{HolderId, Incarnation, Seq, SourceId, Tier};

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
    /// Whether the engine publishes events at all.
    pub events: bool,
}

impl SourceConfig {
    /// Most engine blocks that a mirror keeps unless told otherwise: the cache of a small model on a GPU with 128 GB.
    /// At about 40 bytes each they take 160 MB.
    pub const MAX_BLOCKS: usize = 4 << 20;
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
    /// The engine began a new life: register without `resume`, then call [`crate::Source::registered`].
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
