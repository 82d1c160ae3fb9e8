//! Copies that an engine gave up.

use super::ahead::Ahead;
use super::node::{Slot, TWIN};
use super::store::remaining;
use super::{BLOCKS_AHEAD, Mirror};
use crate::{RefusalReason, Removed};

impl Mirror {
    #[inline(never)]
    pub(super) fn remove(&mut self, removed: &Removed) {
        let Some(tier) = self.tier_of(removed.medium) else {
            return self.refuse(RefusalReason::NoHolder);
        };
        if !self.groups.removes(removed.group) {
            return;
        }
        if removed.hashes.len() <= BLOCKS_AHEAD {
            self.remove_few(removed, tier);
        } else {
            self.remove_many(removed, tier);
        }
        self.sweep();
    }

    /// Removes few blocks, which mostly were asked for with their message.
    #[inline]
    fn remove_few(&mut self, removed: &Removed, tier: usize) {
        let mut at_once = self.tells_at_once(tier);
        for (i, hash) in removed.hashes.iter().enumerate() {
            if removed.remaining_copies.is_none() && self.remove_next(*hash, tier, at_once) {
                continue;
            }
            self.remove_with_care(removed, i, tier);
            at_once = self.tells_at_once(tier);
        }
    }

    /// Removes blocks that are asked for ahead.
    #[inline(never)]
    fn remove_many(&mut self, removed: &Removed, tier: usize) {
        let mut next = Ahead::new(&self.arena, &removed.hashes);
        while next.hash().is_some() {
            if removed.remaining_copies.is_none() {
                self.remove_plain(&mut next, tier);
            }
            if next.hash().is_some() {
                self.remove_with_care(removed, next.done(), tier);
                next.advance(&self.arena);
            }
        }
    }

    /// Removes one of an event's blocks, whichever is meant and however many copies there are.
    #[inline(never)]
    fn remove_with_care(&mut self, removed: &Removed, at: usize, tier: usize) {
        let hash = removed.hashes[at];
        let remaining = remaining(removed.remaining_copies.as_deref(), at);
        let found = self.arena.find(hash);
        if let Some(slot) = found.filter(|s| !self.arena.get(*s).has(TWIN)) {
            if self.arena.get(slot).is_held(tier) {
                return self.give_up(slot, tier, remaining);
            }
        } else if found.is_some() {
            let mut holding: Vec<Slot> = self
                .arena
                .find_all(hash)
                .into_iter()
                .filter(|s| self.arena.get(*s).is_held(tier))
                .collect();
            if holding.len() > 1
                && let Some(salt) = &removed.cache_salt
            {
                let root = self.namespace_root("", salt);
                let of_salt: Vec<Slot> = holding
                    .iter()
                    .copied()
                    .filter(|s| self.arena.get(self.root_of(*s)).key() == root)
                    .collect();
                if !of_salt.is_empty() {
                    holding = of_salt;
                }
            }
            if holding.len() > 1 {
                self.refuse(RefusalReason::AmbiguousRemoval);
            }
            if !holding.is_empty() {
                for slot in holding {
                    self.give_up(slot, tier, remaining);
                }
                return;
            }
        }
        if !self.quarantine.remove(hash, tier) {
            self.refuse(RefusalReason::UnknownHash);
        }
    }

    /// One copy less; of a suspect, whose count may be too high, all of them.
    pub(super) fn give_up(&mut self, slot: Slot, tier: usize, remaining: Option<u32>) {
        let left = if self.unsuspect(slot, tier) {
            0
        } else {
            self.arena.copies(slot, tier) - 1
        };
        self.set_copies(slot, tier, remaining.unwrap_or(left));
    }
}
