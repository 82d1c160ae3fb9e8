//! One engine block in 32 bytes, and the arena that holds them.

use cairn_blocks::{BlockKey, Token};
use hashbrown::HashTable;

use crate::EngineHash;
use crate::fixed_hash::{FixedMap, scatter};

/// Position of a node in the arena.
pub(crate) type Slot = u32;
/// No node.
pub(crate) const NONE: Slot = u32::MAX;
/// GPU, CPU and shared.
pub(crate) const TIERS: usize = 3;
/// Most nodes: slots fit beside a tier in 32 bits, and a count of children in three bytes.
pub(crate) const MAX_SLOTS: usize = (1 << 24) - 1;

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

/// One engine block, or the root of a namespace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    pub(crate) hash: EngineHash,
    /// Key of the last canonical block that ends at or before `end`.
    pub(crate) key: BlockKey,
    pub(crate) parent: Slot,
    /// Tokens from the root to the end of this block.
    pub(crate) end: u32,
    children: [u8; 3],
    /// Copies by tier; 255 means "255 and what the overflow table has".
    pub(crate) copies: [u8; TIERS],
    pub(crate) flags: u16,
}

impl Node {
    pub(crate) fn new(hash: EngineHash, key: BlockKey, parent: Slot, end: u32, flags: u16) -> Self {
        Self {
            hash,
            key,
            parent,
            end,
            children: [0; 3],
            copies: [0; TIERS],
            flags,
        }
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

    #[inline]
    pub(crate) fn children(&self) -> u32 {
        u32::from_le_bytes([self.children[0], self.children[1], self.children[2], 0])
    }

    #[inline]
    fn set_children(&mut self, n: u32) {
        let [a, b, c, _] = n.to_le_bytes();
        self.children = [a, b, c];
    }

    /// Nobody holds it, nothing hangs below it, the index knows nothing of it.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.children == [0; 3] && self.copies == [0; TIERS] && self.flags & (TOLD_ANYWHERE | DIRTY_ANYWHERE | PIN) == 0
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

/// Nodes by slot, by engine hash and, for roots, by key.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    nodes: Vec<Node>,
    free: Slot,
    free_len: usize,
    by_hash: HashTable<Slot>,
    roots: FixedMap<BlockKey, Slot>,
    pub(crate) sides: FixedMap<Slot, Box<Side>>,
    /// Copies beyond 255.
    overflow: FixedMap<(Slot, u8), u32>,
}

impl Arena {
    pub(crate) fn new() -> Self {
        Self {
            free: NONE,
            ..Self::default()
        }
    }

    /// Nodes in use, roots included.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len() - self.free_len
    }

    #[inline]
    pub(crate) fn get(&self, slot: Slot) -> &Node {
        &self.nodes[slot as usize]
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, slot: Slot) -> &mut Node {
        &mut self.nodes[slot as usize]
    }

    /// The node in a slot that may have been freed since.
    #[inline]
    pub(crate) fn live(&self, slot: Slot) -> Option<&Node> {
        self.nodes.get(slot as usize).filter(|n| !n.has(FREE))
    }

    /// Every slot in use.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        (0..self.nodes.len() as u32).filter(|s| !self.get(*s).has(FREE))
    }

    /// Some node with this hash.
    #[inline]
    pub(crate) fn find(&self, hash: EngineHash) -> Option<Slot> {
        self.by_hash
            .find(scatter(hash.0), |s| self.nodes[*s as usize].hash == hash)
            .copied()
    }

    /// All nodes with this hash.
    pub(crate) fn find_all(&self, hash: EngineHash) -> Vec<Slot> {
        self.by_hash
            .iter_hash(scatter(hash.0))
            .copied()
            .filter(|s| self.get(*s).hash == hash)
            .collect()
    }

    /// Adds a block below `node.parent`.
    #[inline]
    pub(crate) fn insert(&mut self, node: Node) -> Slot {
        let slot = self.place(node);
        let Self { nodes, by_hash, .. } = self;
        by_hash.insert_unique(scatter(node.hash.0), slot, |s| scatter(nodes[*s as usize].hash.0));
        self.adopt(node.parent, slot);
        slot
    }

    /// One more than the highest slot.
    pub(crate) fn slot_bound(&self) -> usize {
        self.nodes.len()
    }

    /// Puts a node of a checkpoint into the next slot; its parent may not be there yet.
    pub(crate) fn place_unlinked(&mut self, mut node: Node, side: Option<Side>) -> Slot {
        node.set(SIDE, side.is_some());
        let slot = self.place(node);
        if let Some(side) = side {
            self.sides.insert(slot, Box::new(side));
        }
        slot
    }

    /// Makes a node of a checkpoint findable and known to its parent, which must be there.
    pub(crate) fn link(&mut self, slot: Slot) {
        let node = *self.get(slot);
        if node.has(ROOT) {
            self.roots.insert(node.key, slot);
            return;
        }
        for twin in self.find_all(node.hash) {
            self.get_mut(twin).set(TWIN, true);
            self.get_mut(slot).set(TWIN, true);
        }
        let Self { nodes, by_hash, .. } = self;
        by_hash.insert_unique(scatter(node.hash.0), slot, |s| scatter(nodes[*s as usize].hash.0));
        self.adopt(node.parent, slot);
    }

    #[inline]
    fn adopt(&mut self, parent: Slot, slot: Slot) {
        let node = self.get_mut(parent);
        node.set_children(node.children() + 1);
        if node.has(SIDE)
            && let Some(side) = self.sides.get_mut(&parent)
            && !side.tail.is_empty()
        {
            side.children.push(slot);
        }
    }

    #[inline]
    fn place(&mut self, node: Node) -> Slot {
        if self.free == NONE {
            self.nodes.push(node);
            return self.nodes.len() as u32 - 1;
        }
        let slot = self.free;
        self.free = self.get(slot).parent;
        self.free_len -= 1;
        *self.get_mut(slot) = node;
        slot
    }

    /// The root with this key, made where it isn't there yet.
    pub(crate) fn root(&mut self, key: BlockKey) -> Slot {
        if let Some(slot) = self.roots.get(&key) {
            return *slot;
        }
        let slot = self.place(Node::new(EngineHash(0), key, NONE, 0, ROOT));
        self.roots.insert(key, slot);
        slot
    }

    /// Takes a node out; its parent then has one child less.
    pub(crate) fn remove(&mut self, slot: Slot) {
        let node = *self.get(slot);
        if node.has(ROOT) {
            self.roots.remove(&node.key);
        } else {
            if let Ok(entry) = self.by_hash.find_entry(scatter(node.hash.0), |s| *s == slot) {
                entry.remove();
            }
            let parent = self.get_mut(node.parent);
            parent.set_children(parent.children() - 1);
            if parent.has(SIDE)
                && let Some(side) = self.sides.get_mut(&node.parent)
                && let Some(at) = side.children.iter().position(|c| *c == slot)
            {
                side.children.swap_remove(at);
            }
        }
        if node.has(SIDE) {
            self.sides.remove(&slot);
        }
        let mut freed = node;
        freed.flags = FREE;
        freed.parent = self.free;
        *self.get_mut(slot) = freed;
        self.free = slot;
        self.free_len += 1;
    }

    #[inline]
    pub(crate) fn side(&self, slot: Slot) -> Option<&Side> {
        if self.get(slot).has(SIDE) {
            self.sides.get(&slot).map(AsRef::as_ref)
        } else {
            None
        }
    }

    #[inline]
    pub(crate) fn copies(&self, slot: Slot, tier: usize) -> u32 {
        match self.get(slot).copies[tier] {
            u8::MAX => 255 + self.overflow.get(&(slot, tier as u8)).copied().unwrap_or(0),
            n => u32::from(n),
        }
    }

    #[inline]
    pub(crate) fn set_copies(&mut self, slot: Slot, tier: usize, copies: u32) {
        self.get_mut(slot).copies[tier] = u8::try_from(copies).unwrap_or(u8::MAX);
        if copies > 255 {
            self.overflow.insert((slot, tier as u8), copies - 255);
        } else if !self.overflow.is_empty() {
            self.overflow.remove(&(slot, tier as u8));
        }
    }

    /// Forgets everything and gives back the memory of a large table.
    pub(crate) fn clear(&mut self) {
        *self = Self::new();
    }

    /// Bytes that the tables take.
    pub(crate) fn memory_bytes(&self) -> usize {
        let sides: usize = self
            .sides
            .values()
            .map(|s| {
                80 + std::mem::size_of::<Side>()
                    + s.keys.capacity() * 8
                    + s.tail.capacity() * 4
                    + s.children.capacity() * 4
            })
            .sum();
        self.nodes.capacity() * std::mem::size_of::<Node>() + self.by_hash.capacity() * 8 / 7 * 5 + sides
    }
}

const _: () = assert!(std::mem::size_of::<Node>() == 32);
