//! Changes that a source reports, in bounded ordered batches.

use cairn_blocks::{BlockKey, Depth};

use crate::{HolderId, Incarnation, Seq, SourceId};

/// One change to what a holder holds, or to what is known about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// The holder now holds a stretch of a chain.
    Store {
        /// Whose cache.
        holder: HolderId,
        /// The key just above `keys[0]`: the chain's root key when `anchor_depth` is 0, else a block that the index knows.
        anchor: BlockKey,
        /// Depth of `anchor`; 0 for the root.
        anchor_depth: Depth,
        /// The first `skip` keys only name ancestors that this holder doesn't hold.
        skip: u32,
        /// Keys from `anchor_depth + 1` on, each the child of the one before; never empty.
        keys: Vec<BlockKey>,
    },
    /// The holder no longer holds `count` neighbouring blocks of one chain, of which `key` is the deepest.
    Remove {
        /// Whose cache.
        holder: HolderId,
        /// The deepest removed block.
        key: BlockKey,
        /// Its depth.
        depth: Depth,
        /// How many blocks go, upwards from `key`; at least 1 and at most `depth`.
        count: u32,
    },
    /// The holder holds nothing any more.
    Clear {
        /// Whose cache.
        holder: HolderId,
    },
    /// What the index may claim about the source from here on.
    Confidence(Confidence),
}

impl Op {
    /// The block that the index must find to apply this: whose, its key and its depth.
    #[must_use]
    pub fn block(&self) -> Option<(HolderId, BlockKey, Depth)> {
        match self {
            Self::Store {
                holder,
                anchor,
                anchor_depth,
                ..
            } => (anchor_depth.0 > 0).then_some((*holder, *anchor, *anchor_depth)),
            Self::Remove { holder, key, depth, .. } => Some((*holder, *key, *depth)),
            Self::Clear { .. } | Self::Confidence(_) => None,
        }
    }
}

/// What the index may claim about one source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Confidence {
    /// The stream is gap-free.
    Exact,
    /// It isn't, and why.
    Degraded(DegradedReason),
}

/// Why a source isn't exact.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum DegradedReason {
    /// Events were lost and couldn't be replayed; older blocks are suspect until one cache turnover.
    Gap,
    /// A gap is being repaired by replay.
    Replaying,
    /// The engine has cache groups whose hits can't be told from full-attention events alone.
    Hybrid,
    /// The engine announces events but sends none while it serves.
    Silent,
    /// The engine publishes no events at all; its cache is guessed.
    NoEvents,
    /// Block size, tokenizer or hashes of the engine don't agree with its pool.
    Mismatch,
    /// The agent that reported it has gone.
    LeaseLapsed,
    /// A memory or queue bound was reached and blocks were left out.
    Bounded,
}

/// A bounded group of changes from one source, applied as a whole.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Batch {
    /// Who reports.
    pub source: SourceId,
    /// In which lifetime.
    pub incarnation: Incarnation,
    /// Contiguous within the incarnation.
    pub seq: Seq,
    /// The changes, in order.
    pub ops: Vec<Op>,
}
