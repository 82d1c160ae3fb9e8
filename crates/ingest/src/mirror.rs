//! What one engine rank holds, by its own hashes: block keys, depths and copy counts, and what the index was told.

mod ahead;
pub(crate) mod arena;
mod drain;
mod groups;
mod names;
pub(crate) mod node;
mod place;
mod plain;
mod quarantine;
mod rebuild;
mod remove;
mod slots;
mod store;
mod suspects;
mod tape;

use std::collections::VecDeque;

use cairn_blocks::{BlockKey, BlockSize, ClusterSeed};
use cairn_index::{HolderDigest, Tier};

use crate::fixed_hash::FixedMap;
use crate::{EngineEvent, Medium, RefusalCounts, RefusalReason, Stored};
use arena::Arena;
use groups::Groups;
use node::{DIRTY, DIRTY_ANYWHERE, DROPPED, FREE, GHOST, MAX_SLOTS, ROOT, SENT, Slot, TIERS, TOLD_ANYWHERE};
use quarantine::Quarantine;
pub(crate) use tape::{Changes, Tape};

/// Nodes that nobody holds, up to which some are kept a while where the source has outer tiers: their events may come later than the
/// GPU's removal and without tokens.
const MAX_GHOSTS: usize = 8 << 10;
/// Blocks beyond the engine's cache that there is room for: roots, and blocks that went before those below them.
const SPARE_BLOCKS: u64 = 128;
/// The list of changes is swept when it is this much longer than after the last sweep.
const SWEEP_SLACK: usize = 4 << 10;

/// Events of a message whose first blocks are asked for before the first event is applied, and how many blocks.
const EVENTS_AHEAD: usize = 4;
const BLOCKS_AHEAD: usize = 4;

/// What a mirror needs to know.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct MirrorConfig {
    pub(crate) seed: ClusterSeed,
    pub(crate) pool: String,
    pub(crate) block_size: BlockSize,
    /// In the order of the holders; at most three.
    pub(crate) tiers: Vec<Tier>,
    pub(crate) multimodal: bool,
    /// Most nodes; capped by what a slot can name.
    pub(crate) max_nodes: usize,
    /// Blocks that the engine's cache has room for, 0 where unknown.
    pub(crate) capacity: u64,
}

/// Figures of a mirror.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct MirrorStats {
    pub(crate) refused: RefusalCounts,
    /// Blocks of outer tiers that a clear took away although the engine may still have them.
    pub(crate) cleared_outer: u64,
    /// Suspects that `cached_tokens` confirmed or cut, and that a turnover dropped.
    pub(crate) suspects_confirmed: u64,
    pub(crate) suspects_cut: u64,
    pub(crate) suspects_dropped: u64,
    /// Blocks that could not be anchored within the bounds of a batch.
    pub(crate) unanchored: u64,
}

/// Engine hash -> place, per source.
#[derive(Debug)]
pub(crate) struct Mirror {
    pub(crate) config: MirrorConfig,
    /// Which of its tiers a medium is.
    tiers_by_medium: [Option<usize>; 3],
    pub(crate) arena: Arena,
    quarantine: Quarantine,
    groups: Groups,
    /// What the index will be told next, where that is known already.
    pub(crate) tape: Tape,
    /// Slot and tier of what else changed since it was last told to the index.
    dirty: VecDeque<u32>,
    swept: usize,
    ghosts: VecDeque<Slot>,
    /// Blocks with copies, by tier.
    held: [u64; TIERS],
    /// Blocks with copies in any tier.
    held_anywhere: usize,
    suspects: [u64; TIERS],
    /// Suspects by their key, from the last time that everything became suspect.
    suspect_keys: FixedMap<u64, Slot>,
    /// GPU copies that were ever announced: measures turnovers.
    pub(crate) gpu_stores: u64,
    /// What the index has been told, by tier.
    pub(crate) told: [HolderDigest; TIERS],
    /// Tiers whose holders must be emptied before anything else is told.
    pub(crate) clear_first: [bool; TIERS],
    /// Some block isn't exactly one canonical block.
    mixed: bool,
    /// Where that is so: how many nodes tell a key, by tier. Engine blocks that differ late share their first keys.
    tellers: FixedMap<u64, [u32; TIERS]>,
    /// Blocks were left out for want of room.
    pub(crate) full: bool,
    pub(crate) stats: MirrorStats,
    /// End of the last chain that was stored and its root, so that a growing chain isn't walked again.
    last_end: (Slot, Slot),
    /// Root of chains without adapter and salt, once there was one.
    plain_root: Option<BlockKey>,
}

impl Mirror {
    pub(crate) fn new(mut config: MirrorConfig) -> Self {
        config.tiers.truncate(TIERS);
        config.max_nodes = config.max_nodes.min(MAX_SLOTS);
        let arena = Arena::new(expected_nodes(&config));
        let tiers_by_medium = [Tier::Gpu, Tier::Cpu, Tier::Shared].map(|t| config.tiers.iter().position(|c| *c == t));
        Self {
            config,
            tiers_by_medium,
            arena,
            quarantine: Quarantine::default(),
            groups: Groups::default(),
            tape: Tape::default(),
            dirty: VecDeque::new(),
            swept: 0,
            ghosts: VecDeque::new(),
            held: [0; TIERS],
            held_anywhere: 0,
            suspects: [0; TIERS],
            suspect_keys: FixedMap::default(),
            gpu_stores: 0,
            told: [HolderDigest::default(); TIERS],
            clear_first: [false; TIERS],
            mixed: false,
            tellers: FixedMap::default(),
            full: false,
            stats: MirrorStats::default(),
            last_end: (node::NONE, node::NONE),
            plain_root: None,
        }
    }

    pub(crate) fn set_max_nodes(&mut self, nodes: usize) {
        self.config.max_nodes = nodes.min(MAX_SLOTS);
    }

    /// Sets the capacity of the engine's cache in blocks, once it is known.
    pub(crate) fn set_capacity(&mut self, blocks: u64) {
        self.config.capacity = blocks;
        self.arena.expect(expected_nodes(&self.config));
    }

    /// Asks for what the first blocks of a few events will need, so that the waits for it overlap.
    #[inline]
    pub(crate) fn approach(&self, events: &[EngineEvent]) {
        let first = &events[..events.len().min(EVENTS_AHEAD)];
        let mut parents = 0;
        for event in first {
            let hashes = match event {
                EngineEvent::Stored(stored) => {
                    stored.tokens.first().into_iter().for_each(cairn_index::prefetch);
                    if let Some(parent) = stored.parent
                        && self.last_of(parent).is_none()
                    {
                        self.arena.approach_one(parent);
                        parents += 1;
                    }
                    &stored.hashes
                }
                EngineEvent::Removed(removed) => &removed.hashes,
                EngineEvent::Cleared => continue,
            };
            self.arena.ask_for(&hashes[..hashes.len().min(BLOCKS_AHEAD)]);
        }
        if parents > 0 {
            self.approach_parents(first);
        }
    }

    /// Asks for the blocks that events' blocks hang below, whose lines were asked for.
    #[inline(never)]
    fn approach_parents(&self, events: &[EngineEvent]) {
        for event in events {
            if let EngineEvent::Stored(Stored {
                parent: Some(parent), ..
            }) = event
            {
                self.arena.approach_known(*parent);
            }
        }
    }

    /// Applies one event.
    pub(crate) fn apply(&mut self, event: &EngineEvent) {
        match event {
            EngineEvent::Stored(stored) => self.store(stored),
            EngineEvent::Removed(removed) => self.remove(removed),
            EngineEvent::Cleared => self.clear(),
        }
    }

    /// Everything goes, in every tier; the index is told by one clear for each holder.
    pub(crate) fn clear(&mut self) {
        self.stats.cleared_outer += self.held.iter().skip(1).sum::<u64>();
        for tier in 0..self.config.tiers.len() {
            // What waits on the tape may be the removal of all that the index has.
            self.clear_first[tier] |= self.told[tier].blocks > 0 || !self.tape.is_empty();
        }
        self.forget_blocks();
    }

    /// A new lifetime: the index drops the old one's blocks by itself, so nothing is told.
    pub(crate) fn restart(&mut self) {
        self.clear_first = [false; TIERS];
        self.groups = Groups::default();
        self.mixed = false;
        self.full = false;
        self.forget_blocks();
    }

    fn forget_blocks(&mut self) {
        self.arena.clear();
        self.quarantine.clear();
        self.tape.discard();
        self.dirty = VecDeque::new();
        self.swept = 0;
        self.ghosts = VecDeque::new();
        self.held = [0; TIERS];
        self.held_anywhere = 0;
        self.suspects = [0; TIERS];
        self.suspect_keys = FixedMap::default();
        self.tellers = FixedMap::default();
        self.told = [HolderDigest::default(); TIERS];
        self.last_end = (node::NONE, node::NONE);
    }

    /// Tells everything again: after clears where the index may have something, else from nothing.
    pub(crate) fn tell_all(&mut self, clear: bool) {
        self.tape.discard();
        self.dirty.clear();
        let slots: Vec<Slot> = self.arena.slots().collect();
        for slot in &slots {
            let node = self.arena.get_mut(*slot);
            node.flags &= !(TOLD_ANYWHERE | DIRTY_ANYWHERE);
        }
        for tier in 0..self.config.tiers.len() {
            self.told[tier] = HolderDigest::default();
            self.clear_first[tier] = clear;
        }
        self.tellers.clear();
        for slot in slots {
            for tier in 0..self.config.tiers.len() {
                if self.arena.get(slot).is_held(tier) {
                    self.mark(slot, tier);
                }
            }
            if !self.arena.get(slot).has(FREE) && self.arena.get(slot).is_idle() {
                self.release(slot);
            }
        }
    }

    /// Engine blocks with copies in a tier.
    pub(crate) fn held(&self, tier: usize) -> u64 {
        self.held[tier]
    }

    pub(crate) fn suspects(&self) -> u64 {
        self.suspects.iter().sum()
    }

    pub(crate) fn waiting(&self) -> usize {
        self.quarantine.len()
    }

    /// Changes not told yet, an upper bound.
    pub(crate) fn backlog(&self) -> usize {
        self.tape.len() + self.dirty.len()
    }

    pub(crate) fn is_hybrid(&self) -> bool {
        self.groups.is_hybrid()
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.arena.memory_bytes()
            + self.tape.memory_bytes()
            + self.dirty.capacity() * 4
            + self.ghosts.capacity() * 4
            + self.tellers.capacity() * 8 / 7 * (8 + 4 * TIERS + 1)
    }

    #[inline]
    fn tier_of(&self, medium: Medium) -> Option<usize> {
        self.tiers_by_medium[medium as usize]
    }

    #[inline]
    fn refuse(&mut self, reason: RefusalReason) {
        self.stats.refused.add(reason);
    }

    /// Sets how many copies a node has in a tier, and notes what that changes.
    #[inline]
    fn set_copies(&mut self, slot: Slot, tier: usize, copies: u32) {
        let before = *self.arena.get(slot);
        self.arena.set_copies(slot, tier, copies);
        if before.is_held(tier) == (copies > 0) {
            return;
        }
        if copies > 0 {
            self.held[tier] += 1;
            self.held_anywhere += usize::from(!before.is_held_anywhere());
        } else {
            self.held[tier] -= 1;
            self.held_anywhere -= usize::from(!self.arena.get(slot).is_held_anywhere());
            self.unsuspect(slot, tier);
        }
        self.touch(slot, tier);
        if copies == 0 && self.arena.get(slot).is_idle() {
            self.release(slot);
        }
    }

    /// Notes that what `slot` completes in `tier` may have changed, and what hangs on it inside the same block.
    #[inline]
    fn touch(&mut self, slot: Slot, tier: usize) {
        self.mark(slot, tier);
        if !self.mixed {
            return;
        }
        let size = self.config.block_size.tokens();
        let end = self.arena.get(slot).end();
        if end.is_multiple_of(size) {
            return;
        }
        let ceiling = end - end % size + size;
        let mut below: Vec<Slot> = self.arena.side(slot).map(|s| s.children.clone()).unwrap_or_default();
        while let Some(child) = below.pop() {
            self.mark(child, tier);
            if self.arena.get(child).end() < ceiling
                && let Some(side) = self.arena.side(child)
            {
                below.extend_from_slice(&side.children);
            }
        }
    }

    /// Puts a node into the list of changes, if it completes a block.
    #[inline]
    fn mark(&mut self, slot: Slot, tier: usize) {
        if self.mixed && self.owned(slot) == 0 {
            return;
        }
        let node = self.arena.get_mut(slot);
        if node.has(DIRTY << tier) {
            return;
        }
        node.set(DIRTY << tier, true);
        self.dirty.push_back(slot | (tier as u32) << 30);
    }

    /// From here on blocks don't map one to one: keys that were told are counted.
    fn become_mixed(&mut self) {
        if self.mixed {
            return;
        }
        self.mixed = true;
        let slots: Vec<Slot> = self.arena.slots().collect();
        for slot in slots {
            let node = *self.arena.get(slot);
            for tier in (0..TIERS).filter(|t| node.has(SENT << t)) {
                self.tellers.entry(node.key().0).or_default()[tier] += 1;
            }
        }
    }

    /// How many canonical blocks end inside this node.
    #[inline]
    fn owned(&self, slot: Slot) -> u32 {
        if !self.mixed {
            return 1;
        }
        let node = self.arena.get(slot);
        if node.has(ROOT) {
            return 0;
        }
        let size = self.config.block_size.tokens();
        node.end() / size - self.arena.get(node.parent()).end() / size
    }

    /// Whether a holder has everything of the first block that this node completes, and the node itself.
    #[inline]
    fn is_effective(&self, slot: Slot, tier: usize) -> bool {
        let node = self.arena.get(slot);
        if !node.is_held(tier) {
            return false;
        }
        if !self.mixed {
            return true;
        }
        let size = self.config.block_size.tokens();
        let mut above = node.parent();
        let start = self.arena.get(above).end();
        let floor = start - start % size;
        loop {
            let node = self.arena.get(above);
            if node.end() <= floor || node.has(ROOT) {
                return true;
            }
            if !node.is_held(tier) {
                return false;
            }
            above = node.parent();
        }
    }

    /// Frees a node that is idle, or keeps it a while; then its ancestors that only it kept.
    #[inline(never)]
    fn release(&mut self, slot: Slot) {
        let keep_ghosts = self.config.tiers.len() > 1;
        let mut next = slot;
        loop {
            let node = *self.arena.get(next);
            if !node.is_idle() || node.has(GHOST) {
                return;
            }
            if (keep_ghosts || node.has(DROPPED)) && !node.has(ROOT) {
                self.keep_ghost(next);
                return;
            }
            self.forget_end(next);
            self.arena.remove(next);
            if node.has(ROOT) {
                return;
            }
            next = node.parent();
        }
    }

    /// Puts an idle node into the queue of ghosts, and frees the oldest beyond the bound on nodes that nobody holds.
    fn keep_ghost(&mut self, slot: Slot) {
        self.arena.get_mut(slot).set(GHOST, true);
        self.ghosts.push_back(slot);
        // Their ancestors count too: a short queue can keep many long chains.
        while self.arena.len() - self.held_anywhere > MAX_GHOSTS {
            let Some(oldest) = self.ghosts.pop_front() else { return };
            self.free_ghost(oldest);
        }
    }

    fn free_ghost(&mut self, slot: Slot) {
        self.arena.get_mut(slot).set(GHOST, false);
        let mut next = slot;
        while self.arena.get(next).is_idle() && !self.arena.get(next).has(GHOST) {
            let node = *self.arena.get(next);
            self.forget_end(next);
            self.arena.remove(next);
            if node.has(ROOT) {
                return;
            }
            next = node.parent();
        }
    }

    /// Drops entries of the list of changes that cancelled out, once it has grown enough to be worth it.
    #[inline]
    fn sweep(&mut self) {
        if self.dirty.len() >= 2 * self.swept + SWEEP_SLACK {
            self.sweep_now();
        }
    }

    #[inline(never)]
    fn sweep_now(&mut self) {
        let mut kept = VecDeque::new();
        for entry in std::mem::take(&mut self.dirty) {
            let (slot, tier) = (entry & ((1 << 30) - 1), (entry >> 30) as usize);
            if self.is_effective(slot, tier) == self.arena.get(slot).has(SENT << tier) {
                self.arena.get_mut(slot).set(DIRTY << tier, false);
                if self.arena.get(slot).is_idle() {
                    self.release(slot);
                }
            } else {
                kept.push_back(entry);
            }
        }
        self.swept = kept.len();
        self.dirty = kept;
    }

    /// The root above a node.
    #[inline]
    fn root_of(&self, slot: Slot) -> Slot {
        let mut at = slot;
        while !self.arena.get(at).has(ROOT) {
            if at == self.last_end.0 {
                return self.last_end.1;
            }
            at = self.arena.get(at).parent();
        }
        at
    }

    /// Appends the keys that a node completes.
    #[inline]
    fn push_keys(&self, slot: Slot, out: &mut Vec<BlockKey>) {
        if self.owned(slot) == 0 {
            return;
        }
        if let Some(side) = self.arena.side(slot) {
            out.extend_from_slice(&side.keys);
        }
        out.push(self.arena.get(slot).key());
    }
}

/// Nodes that a mirror of a GPU's cache will have, 0 where that isn't known: a little more than the cache has room for.
fn expected_nodes(config: &MirrorConfig) -> usize {
    match config.tiers.len() {
        1 if config.capacity > 0 => {
            let nodes = config.capacity.saturating_add(config.capacity / 128 + SPARE_BLOCKS);
            usize::try_from(nodes).map_or(config.max_nodes, |nodes| nodes.min(config.max_nodes))
        }
        _ => 0,
    }
}
