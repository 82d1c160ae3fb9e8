//! Runs: stretches of chains as they were first stored, and who holds how much of them.

use cairn_blocks::BlockKey;
use smallvec::SmallVec;

use super::arena::ChunkId;
use crate::HolderId;

/// Name of a run; reused after the run is gone.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct RunId(pub u32);

impl RunId {
    /// No run.
    pub(super) const NONE: RunId = RunId(u32::MAX);
}

/// A holder's share of a run: it holds the offsets below `cut`, apart from holes kept elsewhere.
///
/// The block just below `cut` is held always. Packed as holder, flag and cut from the high bits down, so that shares
/// sort by holder.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Share(u64);

const HOLES: u64 = 1 << 31;
const CUT: u64 = HOLES - 1;

impl Share {
    pub(super) fn new(holder: HolderId, cut: u32, holes: bool) -> Self {
        debug_assert!(u64::from(cut) <= CUT);
        Self(u64::from(holder.0) << 32 | if holes { HOLES } else { 0 } | u64::from(cut))
    }

    #[inline]
    pub(super) fn holder(self) -> HolderId {
        HolderId((self.0 >> 32) as u32)
    }

    #[inline]
    pub(super) fn cut(self) -> u32 {
        (self.0 & CUT) as u32
    }

    /// Whether there are holes below the cut.
    #[inline]
    pub(super) fn holes(self) -> bool {
        self.0 & HOLES != 0
    }
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
    pub shares: SmallVec<[Share; 2]>,
}

/// Shares up to this number are looked through one by one.
const LINEAR_SHARES: usize = 12;

impl Run {
    /// Where the holder's share is, or would be.
    #[inline]
    pub(super) fn share(&self, holder: HolderId) -> Result<usize, usize> {
        if self.shares.len() <= LINEAR_SHARES {
            for (i, share) in self.shares.iter().enumerate() {
                if share.holder() >= holder {
                    return if share.holder() == holder { Ok(i) } else { Err(i) };
                }
            }
            return Err(self.shares.len());
        }
        self.shares.binary_search_by_key(&holder, |share| share.holder())
    }

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
        let shares = if self.shares.spilled() {
            self.shares.capacity() * 8
        } else {
            0
        };
        chunks + shares
    }
}
