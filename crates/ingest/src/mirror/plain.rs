//! The short way for what engines send nearly always: full-attention blocks of the canonical size, each announced once.
//!
//! What it takes it does exactly as the careful way would; the first block that needs more thought ends it. Where
//! nothing else waits to be told, it writes down at once what the index will be told, so that no block is visited again.

use cairn_blocks::{BlockKey, Depth, next_key};
use cairn_index::mix;

use super::Mirror;
use super::arena::AHEAD;
use super::node::{DIRTY, MAX_END, NONE, Node, ROOT, SENT, SIDE, SUSPECT, Slot, TIERS, TOLD_ANYWHERE, TWIN};
use super::slots::Entry;
use super::tape::{Going, Run};
use crate::{EngineHash, Stored};

/// How far the short way went.
pub(super) struct Plain {
    /// Blocks of the event that are done.
    pub(super) done: usize,
    /// The last of them, or the parent.
    pub(super) above: Slot,
}

/// Writes a run of new blocks.
struct Pen {
    run: Run,
    /// Most keys of the run.
    room: usize,
}

impl Pen {
    /// One that must begin a run first.
    fn new(tier: usize) -> Self {
        let run = Run {
            tier,
            above: NONE,
            anchor: BlockKey(0),
            anchor_depth: Depth(0),
            keys: Vec::new(),
            tail: NONE,
        };
        Self { run, room: 0 }
    }

    #[inline]
    fn continues(&self, above: Slot) -> bool {
        self.run.tail == above && self.run.keys.len() < self.room
    }

    #[inline]
    fn write(&mut self, slot: Slot, key: BlockKey) {
        self.run.keys.push(key);
        self.run.tail = slot;
    }
}

impl Mirror {
    /// Whether a change of a tier may be told as it happens: nothing that happened before waits to be told otherwise.
    #[inline]
    fn tells_at_once(&self, tier: usize) -> bool {
        !self.mixed && self.dirty.is_empty() && self.tape.takes(tier) && self.clear_first == [false; TIERS]
    }

    /// Stores leading blocks of an event below `parent`.
    pub(super) fn store_plain(&mut self, parent: Slot, stored: &Stored, tier: usize) -> Plain {
        let size = self.config.block_size.tokens();
        let start = self.arena.get(parent);
        let (mut key, mut end) = (start.key(), start.end());
        let mut out = Plain { done: 0, above: parent };
        let blocks = stored.hashes.len();
        let is_plain = stored.block_size == size && stored.extra_keys.is_empty() && stored.remaining_copies.is_none();
        let fits = self.arena.len() + blocks <= self.config.max_nodes && blocks <= ((MAX_END - end) / size) as usize;
        if self.mixed || !is_plain || !fits || start.has(SIDE) || !end.is_multiple_of(size) {
            return out;
        }
        let at_once = self.tells_at_once(tier);
        let news = if at_once { SENT } else { DIRTY } << tier;
        let mut pen = Pen::new(tier);
        let mut fresh = 0;
        let each = stored.hashes.iter().zip(stored.tokens.chunks_exact(size as usize));
        for (i, (hash, tokens)) in each.enumerate() {
            if i.is_multiple_of(AHEAD) {
                self.arena.touch(&stored.hashes[i..blocks.min(i + AHEAD)]);
            }
            let above = out.above;
            let next = next_key(key, tokens, &[]);
            let slot = match self.arena.look(*hash) {
                Ok(Entry { slot: found, .. }) => {
                    let node = self.arena.get(found);
                    let there = node.parent() == above && node.key() == next && node.end() == end + size;
                    if !there || node.has(SUSPECT << tier) {
                        break;
                    }
                    let held = node.is_held(tier);
                    if at_once && !held {
                        if !pen.continues(above) && !self.begin_run(&mut pen, above, blocks - i) {
                            break;
                        }
                        self.arena.get_mut(found).set(SENT << tier, true);
                        pen.write(found, next);
                    }
                    self.hold_again(found, tier, at_once);
                    found
                }
                Err(vacancy) => {
                    if at_once && !pen.continues(above) && !self.begin_run(&mut pen, above, blocks - i) {
                        break;
                    }
                    let mut node = Node::new(*hash, next, above, end + size, news);
                    node.set_copies_low(tier, 1);
                    let slot = self.arena.insert_at(vacancy, node);
                    if at_once {
                        pen.write(slot, next);
                    } else {
                        self.dirty.push_back(slot | (tier as u32) << 30);
                    }
                    fresh += 1;
                    slot
                }
            };
            (key, end) = (next, end + size);
            out.above = slot;
            out.done = i + 1;
        }
        self.end_run(&mut pen);
        self.held[tier] += fresh;
        self.held_anywhere += fresh as usize;
        out
    }

    /// One copy more of a block that is known.
    fn hold_again(&mut self, slot: Slot, tier: usize, at_once: bool) {
        let copies = self.arena.copies(slot, tier);
        if !at_once {
            return self.set_copies(slot, tier, copies.saturating_add(1));
        }
        let before = *self.arena.get(slot);
        self.arena.set_copies(slot, tier, copies.saturating_add(1));
        if copies == 0 {
            self.held[tier] += 1;
            self.held_anywhere += usize::from(!before.is_held_anywhere());
        }
    }

    /// Begins a run below a block that the index knows. Returns whether it does.
    fn begin_run(&mut self, pen: &mut Pen, above: Slot, blocks: usize) -> bool {
        self.end_run(pen);
        let node = *self.arena.get(above);
        if !node.has(TOLD_ANYWHERE | ROOT) {
            return false;
        }
        let (keys, room) = self.tape.begin(blocks);
        pen.run = Run {
            above,
            anchor: node.key(),
            anchor_depth: Depth(self.depth(above)),
            keys,
            tail: above,
            ..pen.run
        };
        pen.room = room;
        true
    }

    fn end_run(&mut self, pen: &mut Pen) {
        let next = Pen::new(pen.run.tier);
        let Pen { run, .. } = std::mem::replace(pen, next);
        if !run.keys.is_empty() {
            self.told[run.tier].add_all(&run.keys);
            self.tape.store(run);
        }
    }

    /// Gives up leading blocks of an event's list of which each has one copy that is sure to be meant. Returns how many.
    ///
    /// `found` has what [`Arena::find_each`](super::arena::Arena::find_each) found of them.
    pub(super) fn remove_plain(&mut self, hashes: &[EngineHash], found: &[Entry], tier: usize) -> usize {
        let at_once = self.tells_at_once(tier);
        let mut gone = 0;
        for (hash, entry) in hashes.iter().zip(found) {
            // It may have gone with a block before.
            let known = self.arena.live(entry.slot).is_some_and(|n| n.hash() == *hash);
            let entry = if known { Some(*entry) } else { self.arena.look(*hash).ok() };
            let Some(entry) = entry else { break };
            let node = self.arena.get_mut(entry.slot);
            if node.copies_low(tier) != 1 || node.has(TWIN | SUSPECT << tier) {
                break;
            }
            if !at_once {
                node.set_copies_low(tier, 0);
                self.held[tier] -= 1;
                self.held_anywhere -= usize::from(!node.is_held_anywhere());
                self.touch(entry.slot, tier);
            } else if node.has(SENT << tier) {
                self.remove_at_once(entry, tier);
            } else {
                break;
            }
            gone += 1;
        }
        gone
    }

    /// The last copy of a block that the index knows of goes, and with it the block where nothing hangs on it.
    #[inline]
    fn remove_at_once(&mut self, entry: Entry, tier: usize) {
        let size = self.config.block_size.tokens();
        let node = self.arena.get_mut(entry.slot);
        node.set_copies_low(tier, 0);
        node.set(SENT << tier, false);
        let node = *node;
        self.held[tier] -= 1;
        self.held_anywhere -= usize::from(!node.is_held_anywhere());
        let told = &mut self.told[tier];
        told.blocks -= 1;
        told.digest = told.digest.wrapping_sub(mix(node.key()));
        self.tape.remove(Going {
            tier,
            slot: entry.slot,
            parent: node.parent(),
            key: node.key(),
            end: node.end(),
            size,
        });
        if !node.is_idle() {
            return;
        }
        if node.flags != 0 || self.config.tiers.len() > 1 {
            return self.release(entry.slot);
        }
        self.forget_end(entry.slot);
        self.arena.remove_plain(entry);
        if self.arena.get(node.parent()).is_idle() {
            self.release(node.parent());
        }
    }
}
