//! The short way for what engines send nearly always: full-attention blocks of the canonical size, each announced once.
//!
//! What it takes it does exactly as the careful way would; the first block that needs more thought ends it. Where
//! nothing else waits to be told, it writes down at once what the index will be told, so that no block is visited again.

use cairn_blocks::{Depth, Token, next_key};

use super::Mirror;
use super::ahead::Ahead;
use super::arena::AHEAD;
use super::node::{DIRTY, Link, MAX_END, NONE, ROOT, SENT, SUSPECT, Slot, TIERS, TOLD_ANYWHERE, TWIN};
use super::slots::Guess;
use super::tape::{Going, Run};
use crate::{EngineHash, Stored};

/// New blocks whose lines have come are looked at so far ahead.
const NEAR: usize = AHEAD / 4;

/// How far the short way went.
pub(super) struct Plain {
    /// Blocks of the event that are done.
    pub(super) done: usize,
    /// The last of them, or the parent.
    pub(super) above: Slot,
}

impl Mirror {
    /// Whether a change of a tier may be told as it happens: nothing that happened before waits to be told otherwise.
    #[inline]
    pub(super) fn tells_at_once(&self, tier: usize) -> bool {
        !self.mixed && self.dirty.is_empty() && self.tape.takes(tier) && self.clear_first == [false; TIERS]
    }

    /// Stores leading blocks of an event below `parent`.
    #[inline(never)]
    pub(super) fn store_plain(&mut self, parent: Slot, stored: &Stored, tier: usize) -> Plain {
        let size = self.config.block_size.tokens();
        let start = self.arena.get(parent);
        let mut out = Plain { done: 0, above: parent };
        let blocks = stored.hashes.len();
        let is_plain = stored.block_size == size && stored.extra_keys.is_empty() && stored.remaining_copies.is_none();
        let fits = self.arena.len() + blocks <= self.config.max_nodes
            && blocks as u64 * u64::from(size) <= u64::from(MAX_END - start.end());
        if self.mixed || !is_plain || !fits {
            return out;
        }
        let at_once = self.tells_at_once(tier);
        if let [hash] = stored.hashes[..] {
            let _ = self.store_one(&mut out, hash, &stored.tokens, tier, at_once)
                || self.store_known(&mut out, hash, &stored.tokens, tier, at_once);
        } else {
            self.store_many(&mut out, stored, tier, at_once);
        }
        out
    }

    /// Stores leading blocks of an event of several.
    #[inline(never)]
    fn store_many(&mut self, out: &mut Plain, stored: &Stored, tier: usize, at_once: bool) {
        let size = self.config.block_size.tokens() as usize;
        while out.done < stored.hashes.len() {
            let hashes = &stored.hashes[out.done..];
            let tokens = &stored.tokens[out.done * size..];
            if self.store_fresh(out, hashes, tokens, tier, at_once) == 0
                && !self.store_known(out, hashes[0], &tokens[..size], tier, at_once)
            {
                break;
            }
        }
    }

    /// Stores a block that nobody knows yet. Returns whether it is one.
    #[inline]
    fn store_one(&mut self, out: &mut Plain, hash: EngineHash, tokens: &[Token], tier: usize, at_once: bool) -> bool {
        let size = self.config.block_size.tokens();
        let start = *self.arena.get(out.above);
        if at_once && !start.has(TOLD_ANYWHERE | ROOT) {
            return false;
        }
        let key = next_key(start.key(), tokens, &[]);
        let leaf = Link::leaf(tier, if at_once { SENT } else { DIRTY });
        let Some(slot) = self
            .arena
            .insert_leaf(leaf.node(hash, key, out.above, start.end() + size))
        else {
            return false;
        };
        self.held[tier] += 1;
        self.held_anywhere += 1;
        if at_once {
            self.told[tier].add(key);
            let anchor = (out.above, start.key(), Depth(start.end() / size));
            self.tape.store_one(tier, anchor, (slot, key));
        } else {
            self.dirty.push_back(slot | (tier as u32) << 30);
        }
        *out = Plain {
            done: out.done + 1,
            above: slot,
        };
        true
    }

    /// Stores leading blocks that nobody knows yet, each below the one before, of which [`AHEAD`] are asked for ahead. Returns
    /// how many.
    #[inline(never)]
    fn store_fresh(
        &mut self,
        out: &mut Plain,
        hashes: &[EngineHash],
        tokens: &[Token],
        tier: usize,
        at_once: bool,
    ) -> usize {
        let size = self.config.block_size.tokens();
        let start = *self.arena.get(out.above);
        // No keys are made for what is known.
        if self.arena.find(hashes[0]).is_some() || at_once && !start.has(TOLD_ANYWHERE | ROOT) {
            return 0;
        }
        let (mut keys, room) = if at_once {
            self.tape.begin(hashes.len())
        } else {
            (Vec::new(), usize::MAX)
        };
        let blocks = hashes.len().min(room);
        let model = Link::new(tier, if at_once { SENT } else { DIRTY });
        let (mut key, mut end, mut above) = (start.key(), start.end(), out.above);
        let mut done = 0;
        let hashes = &hashes[..blocks];
        let size_of_block = size as usize;
        // Places of the next blocks, each where its number is a multiple of [`AHEAD`] and what is left.
        let mut places = self.arena.approach(hashes);
        // Nearer ones are known better: what they need beside their lines, and their tokens.
        for place in &places[..NEAR.min(blocks)] {
            self.arena.look_ahead(*place);
        }
        for (hash, tokens_of_block) in hashes.iter().zip(tokens.chunks_exact(size_of_block)) {
            if done % AHEAD == 0 && self.arena.make_room(AHEAD.min(blocks - done)) {
                places = self.arena.approach(&hashes[done..]);
            }
            let place = places[done % AHEAD];
            if let Some(further) = hashes.get(done + AHEAD) {
                places[done % AHEAD] = self.arena.approach_one(*further);
            }
            if done + NEAR < blocks {
                self.arena.look_ahead(places[(done + NEAR) % AHEAD]);
                tokens
                    .get((done + NEAR) * size_of_block)
                    .into_iter()
                    .for_each(cairn_index::prefetch);
            }
            let next = next_key(key, tokens_of_block, &[]);
            let Some(slot) = self
                .arena
                .insert_link(place, model.node(*hash, next, above, end + size))
            else {
                break;
            };
            (above, key, end) = (slot, next, end + size);
            keys.push(key);
            done += 1;
        }
        if !at_once {
            self.note_links(above, done, tier);
        }
        if done > 0 {
            self.arena.join_links(out.above, above);
            self.held[tier] += done as u64;
            self.held_anywhere += done;
        }
        if at_once {
            self.tell_run(Run {
                tier,
                above: out.above,
                anchor: start.key(),
                anchor_depth: Depth(start.end() / size),
                keys,
                tail: above,
            });
        }
        *out = Plain {
            done: out.done + done,
            above,
        };
        done
    }

    /// Puts the last blocks of a chain into the list of changes, from the uppermost on.
    fn note_links(&mut self, last: Slot, count: usize, tier: usize) {
        let mut next = last;
        let upwards = (0..count).map(|_| {
            let slot = next;
            next = self.arena.get(slot).parent();
            slot
        });
        let chain: Vec<Slot> = upwards.collect();
        self.dirty
            .extend(chain.into_iter().rev().map(|slot| slot | (tier as u32) << 30));
    }

    fn tell_run(&mut self, run: Run) {
        self.told[run.tier].add_all(&run.keys);
        self.tape.store(run);
    }

    /// Stores the next block where it is known at this place already. Returns whether it does.
    #[inline(never)]
    fn store_known(&mut self, out: &mut Plain, hash: EngineHash, tokens: &[Token], tier: usize, at_once: bool) -> bool {
        let Some(slot) = self.arena.find(hash) else {
            return false;
        };
        let above = *self.arena.get(out.above);
        let node = *self.arena.get(slot);
        let key = next_key(above.key(), tokens, &[]);
        let there = node.parent() == out.above && node.key() == key && node.end() - above.end() == tokens.len() as u32;
        let news = !node.is_held(tier);
        if !there || node.has(SUSPECT << tier) || at_once && news && !above.has(TOLD_ANYWHERE | ROOT) {
            return false;
        }
        let copies = self.arena.copies(slot, tier).saturating_add(1);
        if at_once && news {
            self.arena.set_copies(slot, tier, copies);
            self.arena.get_mut(slot).set(SENT << tier, true);
            self.held[tier] += 1;
            self.held_anywhere += usize::from(!node.is_held_anywhere());
            self.told[tier].add(key);
            let anchor = (out.above, above.key(), Depth(self.depth(out.above)));
            self.tape.store_one(tier, anchor, (slot, key));
        } else {
            self.set_copies(slot, tier, copies);
        }
        *out = Plain {
            done: out.done + 1,
            above: slot,
        };
        true
    }

    /// Gives up the next blocks of an event's list of which each has one copy that is sure to be meant.
    pub(super) fn remove_plain(&mut self, next: &mut Ahead<'_>, tier: usize) {
        let at_once = self.tells_at_once(tier);
        loop {
            // With outer tiers a block that goes is remembered for a while.
            if at_once && self.config.tiers.len() == 1 {
                self.remove_leaves(next, tier);
            }
            let Some(hash) = next.hash() else { return };
            if !self.remove_known(hash, next.guess(), tier, at_once) {
                return;
            }
            next.advance(&self.arena);
        }
    }

    /// Gives up a block that is sure to be meant. Returns whether there is such.
    #[inline]
    pub(super) fn remove_next(&mut self, hash: EngineHash, tier: usize, at_once: bool) -> bool {
        // With outer tiers a block that goes is remembered for a while.
        let forgets = at_once && self.config.tiers.len() == 1;
        forgets && self.remove_leaf(hash, tier) || self.remove_known(hash, Guess::NONE, tier, at_once)
    }

    /// Gives up a block that nothing hangs on, and forgets it. Returns whether there is such.
    #[inline]
    fn remove_leaf(&mut self, hash: EngineHash, tier: usize) -> bool {
        let Some((slot, node)) = self.arena.take_leaf(hash, Link::leaf(tier, SENT)) else {
            return false;
        };
        self.forget_end(slot);
        self.held[tier] -= 1;
        self.held_anywhere -= 1;
        self.told[tier].remove(node.key());
        self.end_going(&Going::one(slot, &node, tier, self.config.block_size.tokens()));
        true
    }

    /// Gives up the next blocks as long as nothing hangs on them, and forgets them.
    #[inline(never)]
    fn remove_leaves(&mut self, next: &mut Ahead<'_>, tier: usize) {
        let size = self.config.block_size.tokens();
        // The next one above a block that went still counts that as its child.
        let links = (Link::leaf(tier, SENT), Link::new(tier, SENT));
        let before = next.done();
        let mut digest = 0u64;
        while next.hash().is_some() {
            let mut going = Going::none(tier, size);
            digest = digest.wrapping_add(self.arena.take_chain(next, links, &mut going));
            if going.count == 0 {
                break;
            }
            self.end_going(&going);
        }
        let gone = next.done() - before;
        if gone > 0 && self.arena.live(self.last_end.0).is_none() {
            self.last_end = (NONE, NONE);
        }
        self.held[tier] -= gone as u64;
        self.held_anywhere -= gone;
        let told = &mut self.told[tier];
        told.blocks -= gone as u64;
        told.digest = told.digest.wrapping_sub(digest);
    }

    /// Tells of blocks that went, and that the one above them has a child less.
    #[inline(always)]
    fn end_going(&mut self, going: &Going) {
        self.tape.remove(going);
        if self.arena.orphan(going.parent, going.slot) && self.arena.get(going.parent).is_idle() {
            return self.release(going.parent);
        }
        // Mostly it is the next to go: tails go first, and often block by block.
        self.arena.approach_next(going.parent);
    }

    /// Gives up the one copy of a block that is sure to be meant. Returns whether there is such.
    #[inline(never)]
    fn remove_known(&mut self, hash: EngineHash, guess: Guess, tier: usize, at_once: bool) -> bool {
        // It may have gone with a block before.
        let known = self.arena.live(guess.slot()).is_some_and(|n| n.hash() == hash);
        let slot = if known {
            Some(guess.slot())
        } else {
            self.arena.find(hash)
        };
        let Some(slot) = slot else { return false };
        let node = self.arena.get_mut(slot);
        if node.copies_low(tier) != 1 || node.has(TWIN | SUSPECT << tier) || at_once && !node.has(SENT << tier) {
            return false;
        }
        node.set_copies_low(tier, 0);
        if at_once {
            node.set(SENT << tier, false);
        }
        let node = *node;
        self.held[tier] -= 1;
        self.held_anywhere -= usize::from(!node.is_held_anywhere());
        if !at_once {
            self.touch(slot, tier);
            return true;
        }
        self.told[tier].remove(node.key());
        let size = self.config.block_size.tokens();
        self.tape.remove(&Going::one(slot, &node, tier, size));
        if node.is_idle() {
            self.release(slot);
        }
        true
    }
}
