//! Runs: stretches of chains as they were first stored, and who holds how much of them.

use cairn_blocks::BlockKey;
use smallvec::SmallVec;

use super::arena::ChunkId;
use super::shares::Shares;

/// Name of a run; reused after the run is gone.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct RunId(pub u32);

impl RunId {
    /// No run.
    pub(super) const NONE: RunId = RunId(u32::MAX);
}

/// A stretch of one chain.
#[derive(Clone, Debug)]
pub(super) struct Run {
    /// First key.
    pub head: BlockKey,
    /// Last key.
    pub last: BlockKey,
    /// Depth of the block above the first one.
    pub base: u32,
    /// Number of keys; 0 where this id is free.
    pub len: u32,
    /// The run it hangs from, or none below a root.
    pub parent: RunId,
    /// Any of the runs that hang from it.
    pub first_child: RunId,
    /// Neighbours among the parent's children; below a root, the halves of the root's key.
    pub siblings: [u32; 2],
    /// Largest number of this run's keys that lie above a child; 0 without children.
    pub child_max: u32,
    /// Where the keys are.
    pub chunks: SmallVec<[ChunkId; 4]>,
    /// Who holds how much, by holder.
    pub shares: Shares,
}

impl Run {
    /// Key of the root that it hangs below, where it has no parent.
    pub(super) fn root(&self) -> BlockKey {
        BlockKey(u64::from(self.siblings[0]) << 32 | u64::from(self.siblings[1]))
    }

    pub(super) fn root_siblings(root: BlockKey) -> [u32; 2] {
        [(root.0 >> 32) as u32, root.0 as u32]
    }

    /// Bytes that lie outside the struct.
    pub(super) fn spilled_bytes(&self) -> usize {
        let chunks = if self.chunks.spilled() {
            self.chunks.capacity() * 4
        } else {
            0
        };
        chunks + self.shares.bytes()
    }
}
