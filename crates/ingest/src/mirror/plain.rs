//! The short way for what engines send nearly always: full-attention blocks of the canonical size, each announced once.
//!
//! What it takes it does exactly as the careful way would; the first block that needs more thought ends it.

use cairn_blocks::next_key;

use super::Mirror;
use super::arena::AHEAD;
use super::node::{DIRTY, MAX_END, NONE, Node, SIDE, SUSPECT, Slot, TWIN};
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
        let mut seen = [NONE; AHEAD];
        for (i, (hash, tokens)) in stored
            .hashes
            .iter()
            .zip(stored.tokens.chunks_exact(size as usize))
            .enumerate()
        {
            if i.is_multiple_of(AHEAD) {
                let next = &stored.hashes[i..stored.hashes.len().min(i + AHEAD)];
                // One new block in twenty looks like another, which is then near too.
                self.arena.find_each(next, &mut seen);
                self.arena.touch_free(next.len());
            }
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
    /// `found` has what [`Arena::find_each`](super::arena::Arena::find_each) found of them.
    pub(super) fn remove_plain(&mut self, hashes: &[EngineHash], found: &[Slot], tier: usize) -> usize {
        let mut gone = 0;
        for (hash, slot) in hashes.iter().zip(found) {
            // It may have gone with a block before.
            let known = self.arena.live(*slot).is_some_and(|n| n.hash() == *hash);
            let Some(slot) = (if known { Some(*slot) } else { self.arena.find(*hash) }) else {
                break;
            };
            let node = self.arena.get_mut(slot);
            if node.copies_low(tier) != 1 || node.has(TWIN | SUSPECT << tier) {
                break;
            }
            node.set_copies_low(tier, 0);
            self.held[tier] -= 1;
            self.held_anywhere -= usize::from(!node.is_held_anywhere());
            self.touch(slot, tier);
            gone += 1;
        }
        gone
    }
}
