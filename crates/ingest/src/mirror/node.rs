//! One engine block in 26 bytes.

use cairn_blocks::{BlockKey, Token};

use crate::EngineHash;

/// Position of a node in the arena.
pub(crate) type Slot = u32;
/// No node.
pub(crate) const NONE: Slot = (1 << 24) - 1;
/// GPU, CPU and shared.
pub(crate) const TIERS: usize = 3;
/// Most nodes: slots fit in three bytes, and beside a tier in 32 bits.
pub(crate) const MAX_SLOTS: usize = (1 << 24) - 2;
/// Longest chain in tokens, 16.7 million: ends fit in three bytes.
pub(crate) const MAX_END: u32 = (1 << 24) - 1;

/// Told to the index, by tier.
pub(crate) const SENT: u16 = 1;
/// In the list of changes, by tier.
pub(crate) const DIRTY: u16 = 1 << 3;
/// Held before an unrepairable gap and not confirmed since, by tier.
pub(crate) const SUSPECT: u16 = 1 << 6;
const ALL_TIERS: u16 = 0b111;
/// Any tier's bit of each kind.
pub(crate) const TOLD_ANYWHERE: u16 = ALL_TIERS * SENT;
pub(crate) const DIRTY_ANYWHERE: u16 = ALL_TIERS * DIRTY;
pub(crate) const SUSPECT_ANYWHERE: u16 = ALL_TIERS * SUSPECT;
/// The start of a namespace, not a block.
pub(crate) const ROOT: u16 = 1 << 9;
/// In the queue of nodes that are kept a while after nobody holds them.
pub(crate) const GHOST: u16 = 1 << 10;
/// Another node may have the same engine hash.
pub(crate) const TWIN: u16 = 1 << 11;
/// Has an entry in the side table.
pub(crate) const SIDE: u16 = 1 << 12;
/// A suspect that was dropped at the end of a turnover: a child of it proves that it was there.
pub(crate) const DROPPED: u16 = 1 << 13;
/// Not in use.
pub(crate) const FREE: u16 = 1 << 14;
/// Must stay although it may look idle: something is about to hang below it.
pub(crate) const PIN: u16 = 1 << 15;

/// What a checkpoint keeps.
pub(crate) const PERSISTED: u16 = TOLD_ANYWHERE | SUSPECT_ANYWHERE | ROOT | DROPPED;

/// The largest count that fits in a node; it stands for "this many and what the overflow table has".
pub(super) const COUNT_MAX: u32 = 15;
const COUNT: u16 = 0xf;
/// Where the copies begin, after the children; four bits for each tier.
const COPIES_SHIFT: usize = 4;

/// One engine block, or the root of a namespace.
#[derive(Clone, Copy, Debug)]
#[repr(C, packed(2))]
pub(crate) struct Node {
    hash: EngineHash,
    /// Key of the last canonical block that ends at or before the end.
    key: BlockKey,
    parent: [u8; 3],
    end: [u8; 3],
    /// Children, then copies by tier, four bits each.
    counts: u16,
    pub(crate) flags: u16,
}

const _: () = assert!(size_of::<Node>() == 26);

fn low_bytes(n: u32) -> [u8; 3] {
    let [a, b, c, _] = n.to_le_bytes();
    [a, b, c]
}

#[inline]
fn widen([a, b, c]: [u8; 3]) -> u32 {
    u32::from_le_bytes([a, b, c, 0])
}

impl Node {
    /// A node that nobody holds. `end` is at most [`MAX_END`].
    #[inline]
    pub(crate) fn new(hash: EngineHash, key: BlockKey, parent: Slot, end: u32, flags: u16) -> Self {
        debug_assert!(end <= MAX_END && parent <= NONE);
        Self {
            hash,
            key,
            parent: low_bytes(parent),
            end: low_bytes(end),
            counts: 0,
            flags,
        }
    }

    /// The engine's name of the block.
    #[inline]
    pub(crate) fn hash(&self) -> EngineHash {
        self.hash
    }

    /// Key of the last canonical block that ends at or before the end.
    #[inline]
    pub(crate) fn key(&self) -> BlockKey {
        self.key
    }

    /// The block above.
    #[inline]
    pub(crate) fn parent(&self) -> Slot {
        widen(self.parent)
    }

    /// Tokens from the root to the end of this block.
    #[inline]
    pub(crate) fn end(&self) -> u32 {
        widen(self.end)
    }

    #[inline]
    pub(crate) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    #[inline]
    pub(crate) fn set(&mut self, flag: u16, on: bool) {
        if on {
            self.flags |= flag;
        } else {
            self.flags &= !flag;
        }
    }

    /// Children, at most [`COUNT_MAX`].
    #[inline]
    pub(super) fn children_low(&self) -> u32 {
        u32::from(self.counts & COUNT)
    }

    #[inline]
    pub(super) fn set_children_low(&mut self, children: u32) {
        self.counts = self.counts & !COUNT | children as u16 & COUNT;
    }

    /// Copies in a tier, at most [`COUNT_MAX`].
    #[inline]
    pub(super) fn copies_low(&self, tier: usize) -> u32 {
        u32::from(self.counts >> (COPIES_SHIFT * (tier + 1)) & COUNT)
    }

    #[inline]
    pub(super) fn set_copies_low(&mut self, tier: usize, copies: u32) {
        let shift = COPIES_SHIFT * (tier + 1);
        self.counts = self.counts & !(COUNT << shift) | (copies as u16 & COUNT) << shift;
    }

    /// Whether there are copies in a tier.
    #[inline]
    pub(crate) fn is_held(&self, tier: usize) -> bool {
        self.copies_low(tier) > 0
    }

    /// Whether there are copies in any tier.
    #[inline]
    pub(crate) fn is_held_anywhere(&self) -> bool {
        self.counts >> COPIES_SHIFT != 0
    }

    /// Nobody holds it, nothing hangs below it, the index knows nothing of it.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.counts == 0 && self.flags & (TOLD_ANYWHERE | DIRTY_ANYWHERE | PIN) == 0
    }
}

/// What only some nodes need: those that own several keys, or end inside a canonical block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Side {
    /// All keys that the node completes but the last.
    pub(crate) keys: Vec<BlockKey>,
    /// Tokens since the last canonical boundary.
    pub(crate) tail: Vec<Token>,
    /// Multimodal identities that fall in `tail`.
    pub(crate) tail_extra: Vec<Box<str>>,
    /// Children, kept only where `tail` isn't empty.
    pub(crate) children: Vec<Slot>,
}
