//! Blocks that an engine announces: found again, or placed below their parent, or kept until that is known.

use super::Mirror;
use super::groups::Use;
use super::node::{GHOST, NONE, Node, PIN, ROOT, SIDE, Side, Slot, TWIN};
use super::place::Place;
use super::plain::Plain;
use crate::fixed_hash::scatter;
use crate::{EngineHash, RefusalReason, Stored};

/// Up to so many hashes are compared each with each.
const FEW: usize = 8;

/// Where a store begins.
enum Start {
    Below(Slot),
    Unknown(EngineHash),
    Refused(RefusalReason),
}

impl Mirror {
    #[inline(never)]
    pub(super) fn store(&mut self, stored: &Stored) {
        let Some(tier) = self.tier_of(stored.medium) else {
            return self.refuse(RefusalReason::NoHolder);
        };
        match self.groups.store(stored) {
            Use::Pass => return,
            Use::Take => {}
            Use::TakeAfresh => self.clear(),
        }
        if stored.hashes.is_empty() {
            return;
        }
        if stored.tokens.is_empty() {
            if has_duplicate(&stored.hashes) {
                return self.refuse(RefusalReason::DuplicateHash);
            }
            return self.store_by_hash(stored, tier);
        }
        if stored.block_size == 0 || stored.tokens.len() != stored.block_size as usize * stored.hashes.len() {
            if self.groups.misshapen(stored) {
                self.clear();
            }
            return self.refuse(RefusalReason::Shape);
        }
        if tier == 0 {
            // Whatever becomes of them here: the engine took that many blocks of its pool.
            self.gpu_stores += stored.hashes.len() as u64;
        }
        // Events of outer tiers lack the salt: the GPU's event knows the place better.
        if tier > 0 && !stored.has_extra_keys && stored.cache_salt.is_none() {
            if has_duplicate(&stored.hashes) {
                return self.refuse(RefusalReason::DuplicateHash);
            }
            return self.store_outer(stored, tier);
        }
        match self.start(stored) {
            Start::Below(parent) => self.store_below(parent, stored, tier),
            Start::Unknown(_) if has_duplicate(&stored.hashes) => self.refuse(RefusalReason::DuplicateHash),
            Start::Unknown(parent) => {
                self.refuse(RefusalReason::UnknownParent);
                self.quarantine_from(stored, 0, Some(parent), tier);
            }
            Start::Refused(reason) => self.refuse(reason),
        }
    }

    /// Finds what the first block hangs below.
    fn start(&mut self, stored: &Stored) -> Start {
        let Some(parent) = stored.parent else {
            return Start::Below(self.start_at_root(stored));
        };
        if stored.cache_salt.is_none()
            && let Some(end) = self.last_of(parent)
        {
            return Start::Below(end);
        }
        let Some(found) = self.arena.find(parent) else {
            return Start::Unknown(parent);
        };
        if !self.arena.get(found).has(TWIN) && stored.cache_salt.is_none() {
            return Start::Below(found);
        }
        self.start_among(parent, stored)
    }

    /// The end of the last chain that was stored, if that alone has the hash: mostly the next one goes on there.
    #[inline]
    pub(super) fn last_of(&self, hash: EngineHash) -> Option<Slot> {
        let (end, _) = self.last_end;
        let node = self.arena.node(end)?;
        (node.hash() == hash && !node.has(TWIN)).then_some(end)
    }

    #[inline(never)]
    fn start_at_root(&mut self, stored: &Stored) -> Slot {
        let key = self.root_key(stored);
        self.arena.root(key)
    }

    /// Finds which of the blocks with the parent's hash is meant.
    #[inline(never)]
    fn start_among(&mut self, parent: EngineHash, stored: &Stored) -> Start {
        let named = stored.cache_salt.is_some() || stored.adapter.is_some();
        let candidates = self.arena.find_all(parent);
        if stored.cache_salt.is_some() || (named && candidates.len() > 1) {
            // Equal hashes in several namespaces: the event says which one it means.
            let wanted = self.root_key(stored);
            let mut fits = candidates
                .iter()
                .filter(|c| self.arena.get(self.root_of(**c)).key() == wanted);
            return match (fits.next(), fits.next()) {
                (Some(one), None) => Start::Below(*one),
                (None, _) => Start::Unknown(parent),
                (Some(_), Some(_)) => Start::Refused(RefusalReason::AmbiguousParent),
            };
        }
        match candidates.as_slice() {
            [one] => Start::Below(*one),
            _ => Start::Refused(RefusalReason::AmbiguousParent),
        }
    }

    #[inline(always)]
    fn store_below(&mut self, parent: Slot, stored: &Stored, tier: usize) {
        if tier == 0 {
            self.confirm_above(parent);
        }
        let plainly = self.store_plain(parent, stored, tier);
        let above = if plainly.done < stored.hashes.len() {
            self.store_rest(plainly, stored, tier)
        } else {
            plainly.above
        };
        self.last_end = match self.last_end {
            (end, root) if end == parent => (above, root),
            _ if self.arena.get(parent).has(ROOT) => (above, parent),
            _ => (NONE, NONE),
        };
        // A root that nothing could be stored below goes again.
        if above == parent && self.arena.get(parent).is_idle() {
            self.release(parent);
        }
        if !self.quarantine.is_empty() {
            for hash in &stored.hashes {
                self.resolve(*hash);
            }
        }
        self.sweep();
    }

    /// Stores what the short way left. Returns the last block that is there.
    #[inline(never)]
    fn store_rest(&mut self, plainly: Plain, stored: &Stored, tier: usize) -> Slot {
        let Plain { done, mut above } = plainly;
        // The short way stops at a hash that comes a second time, so it needn't look for one itself.
        if has_duplicate(&stored.hashes) {
            self.refuse(RefusalReason::DuplicateHash);
            return self.take_back(above, done, tier);
        }
        let size = stored.block_size as usize;
        let plain = stored.extra_keys.is_empty();
        let mut place = Place::default();
        let blocks = stored.hashes.iter().zip(stored.tokens.chunks_exact(size)).enumerate();
        for (i, (hash, tokens)) in blocks.skip(done) {
            let identities = if plain { Vec::new() } else { self.identities(stored, i) };
            if self.place(above, tokens, &identities, &mut place).is_none() {
                self.refuse(RefusalReason::TooLarge);
                break;
            }
            let Some(slot) = self.find_or_insert(*hash, above, &mut place) else {
                break;
            };
            self.announce(slot, tier, remaining(stored.remaining_copies.as_deref(), i));
            above = slot;
        }
        above
    }

    /// Takes the last `blocks` back that the short way stored down to `above`. Returns what they hang below.
    fn take_back(&mut self, mut above: Slot, blocks: usize, tier: usize) -> Slot {
        for _ in 0..blocks {
            let slot = above;
            above = self.arena.get(slot).parent();
            self.give_up(slot, tier, None);
        }
        above
    }

    /// Counts a copy of a block, or takes the engine's own count.
    #[inline]
    fn announce(&mut self, slot: Slot, tier: usize, remaining: Option<u32>) {
        let trusted = !self.unsuspect(slot, tier);
        let known = if trusted { self.arena.copies(slot, tier) } else { 0 };
        self.set_copies(slot, tier, remaining.unwrap_or_else(|| known.saturating_add(1)));
    }

    /// The node of a block at a place. `None` where the mirror is full.
    #[inline]
    fn find_or_insert(&mut self, hash: EngineHash, parent: Slot, place: &mut Place) -> Option<Slot> {
        self.arena.get_mut(parent).set(PIN, true);
        let slot = self.find_or_insert_pinned(hash, parent, place);
        self.arena.get_mut(parent).set(PIN, false);
        slot
    }

    #[inline]
    fn find_or_insert_pinned(&mut self, hash: EngineHash, parent: Slot, place: &mut Place) -> Option<Slot> {
        let key = place.key?;
        let mut twin = 0;
        if let Some(found) = self.arena.find(hash) {
            if self.is_at(found, parent, place) {
                return Some(found);
            }
            let others = self.arena.find_all(hash);
            if let Some(same) = others.iter().find(|s| self.is_at(**s, parent, place)) {
                return Some(*same);
            }
            if others.iter().any(|s| !self.give_way(*s)) {
                self.refuse(RefusalReason::Collision);
            }
            for other in self.arena.find_all(hash) {
                self.arena.get_mut(other).set(TWIN, true);
                twin = TWIN;
            }
        }
        if self.arena.len() >= self.config.max_nodes {
            self.full = true;
            self.refuse(RefusalReason::MirrorFull);
            return None;
        }
        let size = self.config.block_size.tokens();
        let slot = self.arena.insert(Node::new(hash, key, parent, place.end, twin));
        if place.keys.len() != 1 || !place.end.is_multiple_of(size) {
            self.mixed_from(slot, place);
        } else if place.end - self.arena.get(parent).end() != size {
            self.become_mixed();
        }
        Some(slot)
    }

    /// Keeps what a node of several keys, or with an end inside a block, needs.
    fn mixed_from(&mut self, slot: Slot, place: &mut Place) {
        self.become_mixed();
        place.keys.pop();
        let side = Side {
            keys: std::mem::take(&mut place.keys),
            tail: std::mem::take(&mut place.tail),
            tail_extra: std::mem::take(&mut place.tail_extra),
            children: Vec::new(),
        };
        if side != Side::default() {
            self.arena.sides.insert(slot, Box::new(side));
            self.arena.get_mut(slot).set(SIDE, true);
        }
    }

    #[inline]
    fn is_at(&self, slot: Slot, parent: Slot, place: &Place) -> bool {
        let node = self.arena.get(slot);
        node.parent() == parent
            && Some(node.key()) == place.key
            && node.end() == place.end
            && (place.tail.is_empty() || self.arena.side(slot).is_some_and(|s| s.tail == place.tail))
    }

    /// Another chain claims this node's hash: a node that nobody surely holds makes room. Returns whether it did.
    fn give_way(&mut self, slot: Slot) -> bool {
        for tier in 0..self.config.tiers.len() {
            if self.unsuspect(slot, tier) {
                self.set_copies(slot, tier, 0);
            }
        }
        let Some(node) = self.arena.live(slot).copied() else {
            return true;
        };
        if node.has(GHOST) {
            let mut bare = node;
            bare.set(GHOST, false);
            if bare.is_idle() {
                self.ghosts.retain(|s| *s != slot);
                self.free_ghost(slot);
                return true;
            }
        }
        !node.is_held_anywhere()
    }

    /// An event without tokens: its blocks are known by the GPU's events, or will be.
    #[inline(never)]
    fn store_by_hash(&mut self, stored: &Stored, tier: usize) {
        for (i, hash) in stored.hashes.iter().enumerate() {
            let remaining = remaining(stored.remaining_copies.as_deref(), i);
            match self.only(*hash) {
                Some(slot) => self.announce(slot, tier, remaining),
                None => {
                    self.refuse(RefusalReason::Unresolved);
                    let given_up = self.quarantine.add(*hash, tier, remaining.unwrap_or(1), None, &[], &[]);
                    self.stats.refused.add_many(RefusalReason::QuarantineFull, given_up);
                }
            }
        }
        self.sweep();
    }

    /// An outer tier's event with tokens but without extra keys: by hash first, then below a known parent, whose
    /// namespace it shares. The start of a prompt can't tell its salt and waits for the GPU's event.
    #[inline(never)]
    fn store_outer(&mut self, stored: &Stored, tier: usize) {
        let size = stored.block_size as usize;
        let mut parent = stored.parent;
        let mut place = Place::default();
        for (i, (hash, tokens)) in stored.hashes.iter().zip(stored.tokens.chunks_exact(size)).enumerate() {
            let remaining = remaining(stored.remaining_copies.as_deref(), i);
            let known = self.only(*hash).or_else(|| {
                let above = self.only(parent?)?;
                self.place(above, tokens, &[], &mut place)?;
                self.find_or_insert(*hash, above, &mut place)
            });
            match known {
                Some(slot) => {
                    self.announce(slot, tier, remaining);
                    self.resolve(*hash);
                }
                None => {
                    let reason = if parent.is_some() {
                        RefusalReason::UnknownParent
                    } else {
                        RefusalReason::Unresolved
                    };
                    self.refuse(reason);
                    let tokens = if parent.is_some() { tokens } else { &[] };
                    let given_up = self
                        .quarantine
                        .add(*hash, tier, remaining.unwrap_or(1), parent, tokens, &[]);
                    self.stats.refused.add_many(RefusalReason::QuarantineFull, given_up);
                }
            }
            parent = Some(*hash);
        }
        self.sweep();
    }

    /// The node with this hash, if there is exactly one.
    fn only(&self, hash: EngineHash) -> Option<Slot> {
        let found = self.arena.find(hash)?;
        if !self.arena.get(found).has(TWIN) {
            return Some(found);
        }
        match self.arena.find_all(hash).as_slice() {
            [one] => Some(*one),
            _ => None,
        }
    }

    #[inline(never)]
    fn quarantine_from(&mut self, stored: &Stored, from: usize, parent: Option<EngineHash>, tier: usize) {
        let size = stored.block_size as usize;
        let mut parent = parent;
        for (i, tokens) in stored.tokens.chunks_exact(size).enumerate().skip(from) {
            let identities = self.identities(stored, i);
            let copies = remaining(stored.remaining_copies.as_deref(), i).unwrap_or(1);
            let given_up = self
                .quarantine
                .add(stored.hashes[i], tier, copies, parent, tokens, &identities);
            self.stats.refused.add_many(RefusalReason::QuarantineFull, given_up);
            parent = Some(stored.hashes[i]);
        }
    }

    /// Takes out of the quarantine what a block that is known now explains.
    #[inline(never)]
    pub(super) fn resolve(&mut self, hash: EngineHash) {
        let mut known = vec![hash];
        let mut place = Place::default();
        while let Some(hash) = known.pop() {
            if self.quarantine.is_empty() {
                return;
            }
            let Some(slot) = self.only(hash) else { continue };
            if let Some(waiting) = self.quarantine.take(hash) {
                self.add_waiting(slot, waiting.copies);
            }
            for child in self.quarantine.below(hash) {
                let Some(waiting) = self.quarantine.take(child) else {
                    continue;
                };
                let identities: Vec<&str> = waiting.identities.iter().map(AsRef::as_ref).collect();
                if self.place(slot, &waiting.tokens, &identities, &mut place).is_none() {
                    continue;
                }
                let Some(below) = self.find_or_insert(child, slot, &mut place) else {
                    continue;
                };
                self.add_waiting(below, waiting.copies);
                known.push(child);
            }
        }
    }

    fn add_waiting(&mut self, slot: Slot, copies: [u32; super::TIERS]) {
        for (tier, copies) in copies.into_iter().enumerate().filter(|(_, c)| *c > 0) {
            let known = if self.unsuspect(slot, tier) {
                0
            } else {
                self.arena.copies(slot, tier)
            };
            self.set_copies(slot, tier, known.saturating_add(copies));
        }
    }

    /// Forgets the memo of the last chain when its end is gone.
    #[inline]
    pub(super) fn forget_end(&mut self, slot: Slot) {
        if self.last_end.0 == slot {
            self.last_end = (NONE, NONE);
        }
    }
}

pub(super) fn remaining(copies: Option<&[u32]>, at: usize) -> Option<u32> {
    copies?.get(at).copied()
}

/// Whether a hash comes twice.
fn has_duplicate(hashes: &[EngineHash]) -> bool {
    let many = hashes.len();
    if many <= FEW {
        (1..many).any(|i| hashes[..i].contains(&hashes[i]))
    } else if many <= 32 {
        has_duplicate_by(&mut [0; 64], hashes)
    } else if many <= 128 {
        has_duplicate_by(&mut [0; 256], hashes)
    } else if many <= 512 {
        has_duplicate_by(&mut [0; 1_024], hashes)
    } else {
        has_duplicate_by(&mut vec![0; (many * 2).next_power_of_two()], hashes)
    }
}

/// Like [`has_duplicate`], by an open-addressed table of positions: a power of two, at most half full, and empty.
fn has_duplicate_by(table: &mut [u32], hashes: &[EngineHash]) -> bool {
    let mask = table.len() - 1;
    for (i, hash) in hashes.iter().enumerate() {
        let mut at = scatter(hash.0) as usize & mask;
        while table[at] > 0 {
            if hashes[table[at] as usize - 1] == *hash {
                return true;
            }
            at = (at + 1) & mask;
        }
        table[at] = i as u32 + 1;
    }
    false
}
