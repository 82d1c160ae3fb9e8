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
const COUNT: u64 = 0xf;
/// Where in the place of a node what begins: the parent's slot, the end, children, then copies by tier.
const END_SHIFT: u32 = 24;
const CHILDREN_SHIFT: u32 = 48;
const COPIES_SHIFT: u32 = 52;
const COPIES_BITS: u32 = 4;
const LOW: u64 = (1 << 24) - 1;

/// One engine block, or the root of a namespace.
#[derive(Clone, Copy, Debug)]
#[repr(C, packed(2))]
pub(crate) struct Node {
    hash: EngineHash,
    /// Key of the last canonical block that ends at or before the end.
    key: BlockKey,
    /// Parent's slot and end, 24 bits each, then children and copies by tier, four bits each: one word, as they are
    /// looked at together.
    place: u64,
    pub(crate) flags: u16,
}

const _: () = assert!(size_of::<Node>() == 26);

/// Where the copies in a tier begin.
#[inline]
fn copies_shift(tier: usize) -> u32 {
    COPIES_SHIFT + COPIES_BITS * tier as u32
}

impl Node {
    /// A node that nobody holds. `end` is at most [`MAX_END`].
    #[inline]
    pub(crate) fn new(hash: EngineHash, key: BlockKey, parent: Slot, end: u32, flags: u16) -> Self {
        debug_assert!(end <= MAX_END && parent <= NONE);
        Self {
            hash,
            key,
            place: u64::from(parent) | u64::from(end) << END_SHIFT,
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
        (self.place & LOW) as u32
    }

    /// Tokens from the root to the end of this block.
    #[inline]
    pub(crate) fn end(&self) -> u32 {
        (self.place >> END_SHIFT & LOW) as u32
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
        (self.place >> CHILDREN_SHIFT & COUNT) as u32
    }

    #[inline]
    pub(super) fn set_children_low(&mut self, children: u32) {
        self.place = self.place & !(COUNT << CHILDREN_SHIFT) | (u64::from(children) & COUNT) << CHILDREN_SHIFT;
    }

    /// One child more, of less than [`COUNT_MAX`].
    #[inline]
    pub(super) fn add_child(&mut self) {
        self.place += 1 << CHILDREN_SHIFT;
    }

    /// One child less, of at least one.
    #[inline]
    pub(super) fn drop_child(&mut self) {
        debug_assert!(self.children_low() > 0, "a child that wasn't counted");
        self.place -= 1 << CHILDREN_SHIFT;
    }

    /// Copies in a tier, at most [`COUNT_MAX`].
    #[inline]
    pub(super) fn copies_low(&self, tier: usize) -> u32 {
        (self.place >> copies_shift(tier) & COUNT) as u32
    }

    #[inline]
    pub(super) fn set_copies_low(&mut self, tier: usize, copies: u32) {
        let shift = copies_shift(tier);
        self.place = self.place & !(COUNT << shift) | (u64::from(copies) & COUNT) << shift;
    }

    /// Whether there are copies in a tier.
    #[inline]
    pub(crate) fn is_held(&self, tier: usize) -> bool {
        self.copies_low(tier) > 0
    }

    /// Whether there are copies in any tier.
    #[inline]
    pub(crate) fn is_held_anywhere(&self) -> bool {
        self.place >> COPIES_SHIFT != 0
    }

    /// Nobody holds it, nothing hangs below it, the index knows nothing of it.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.is_unused() && self.flags & (TOLD_ANYWHERE | DIRTY_ANYWHERE | PIN) == 0
    }

    /// Nobody holds it and nothing hangs below it.
    #[inline]
    pub(super) fn is_unused(&self) -> bool {
        self.place >> CHILDREN_SHIFT == 0
    }

    /// Whether it has these copies, children and flags and no other.
    #[inline]
    pub(super) fn is_only(&self, link: Link) -> bool {
        self.place >> CHILDREN_SHIFT == link.counts >> CHILDREN_SHIFT && self.flags == link.flags
    }
}

/// What the nodes of a chain have in common that comes as a whole: one copy in one tier, one child, one flag.
#[derive(Clone, Copy)]
pub(super) struct Link {
    counts: u64,
    flags: u16,
}

impl Link {
    /// In this tier; `flag` is the one to be set for it.
    pub(super) fn new(tier: usize, flag: u16) -> Self {
        Self {
            counts: 1 << CHILDREN_SHIFT | 1 << copies_shift(tier),
            flags: flag << tier,
        }
    }

    /// The last of such a chain.
    pub(super) fn leaf(tier: usize, flag: u16) -> Self {
        let mut leaf = Self::new(tier, flag);
        leaf.counts -= 1 << CHILDREN_SHIFT;
        leaf
    }

    /// One of them.
    #[inline]
    pub(super) fn node(self, hash: EngineHash, key: BlockKey, parent: Slot, end: u32) -> Node {
        let mut node = Node::new(hash, key, parent, end, self.flags);
        node.place |= self.counts;
        node
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
