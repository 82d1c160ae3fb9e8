//! The short way for what engines send nearly always: full-attention blocks of the canonical size, each announced once.
//!
//! What it takes it does exactly as the careful way would; the first block that needs more thought ends it.

use cairn_blocks::next_key;

use super::Mirror;
use super::node::{DIRTY, MAX_END, NONE, Node, ROOT, SIDE, SUSPECT, Slot, TWIN};
use crate::{EngineHash, Stored};

/// How far the short way went.
pub(super) struct Plain {
    /// Blocks of the event that are done.
    pub(super) done: usize,
    /// The last of them, or the parent.
    pub(super) above: Slot,
}

impl Mirror {
    /// Stores leading blocks of an event below `parent`.
    pub(super) fn store_plain(&mut self, parent: Slot, stored: &Stored, tier: usize) -> Plain {
        let size = self.config.block_size.tokens();
        let start = *self.arena.get(parent);
        let mut out = Plain { done: 0, above: parent };
        let is_plain = stored.block_size == size && stored.extra_keys.is_empty() && stored.remaining_copies.is_none();
        if self.mixed || !is_plain || start.has(SIDE) || !start.end().is_multiple_of(size) {
            return out;
        }
        let (mut key, mut end) = (start.key(), start.end());
        let mut fresh = 0;
        self.arena.touch(&stored.hashes);
        for (hash, tokens) in stored.hashes.iter().zip(stored.tokens.chunks_exact(size as usize)) {
            if end + size > MAX_END {
                break;
            }
            let next = next_key(key, tokens, &[]);
            let slot = match self.arena.look(*hash) {
                Ok(found) => {
                    let node = self.arena.get(found);
                    let there = node.parent() == out.above && node.key() == next && node.end() == end + size;
                    if !there || node.has(SUSPECT << tier) {
                        break;
                    }
                    let copies = self.arena.copies(found, tier);
                    self.set_copies(found, tier, copies.saturating_add(1));
                    found
                }
                Err(_) if self.arena.len() >= self.config.max_nodes => break,
                Err(vacancy) => {
                    let mut node = Node::new(*hash, next, out.above, end + size, DIRTY << tier);
                    node.set_copies_low(tier, 1);
                    let slot = self.arena.insert_at(vacancy, node);
                    self.dirty.push_back(slot | (tier as u32) << 30);
                    fresh += 1;
                    slot
                }
            };
            (key, end) = (next, end + size);
            out.above = slot;
            out.done += 1;
        }
        self.held[tier] += fresh;
        self.held_anywhere += fresh as usize;
        out
    }

    /// Gives up leading blocks of an event's list of which each has one copy that is sure to be meant. Returns how many.
    ///
    /// Engines evict chains from their tails, so the next block is mostly the one above the last, and needn't be looked for.
    pub(super) fn remove_plain(&mut self, hashes: &[EngineHash], tier: usize) -> usize {
        let mut above = NONE;
        for (done, hash) in hashes.iter().enumerate() {
            let predicted = self
                .arena
                .live(above)
                .is_some_and(|n| n.hash() == *hash && !n.has(ROOT));
            let Some(slot) = (if predicted { Some(above) } else { self.arena.find(*hash) }) else {
                return done;
            };
            let node = self.arena.get_mut(slot);
            if node.copies_low(tier) != 1 || node.has(TWIN | SUSPECT << tier) {
                return done;
            }
            node.set_copies_low(tier, 0);
            above = node.parent();
            self.held[tier] -= 1;
            self.held_anywhere -= usize::from(!node.is_held_anywhere());
            self.touch(slot, tier);
        }
        hashes.len()
    }
}
