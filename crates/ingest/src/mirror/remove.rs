//! Copies that an engine gave up.

use super::Mirror;
use super::arena::AHEAD;
use super::node::{Slot, TWIN};
use super::slots::{Entry, Place};
use super::store::remaining;
use crate::{EngineHash, RefusalReason, Removed};

/// Up to so many blocks need no large room.
const FEW: usize = 4;

impl Mirror {
    pub(super) fn remove(&mut self, removed: &Removed) {
        let Some(tier) = self.tier_of(removed.medium) else {
            return self.refuse(RefusalReason::NoHolder);
        };
        if !self.groups.removes(removed.group) {
            return;
        }
        if removed.hashes.len() <= FEW {
            self.remove_in::<FEW>(removed, tier);
        } else {
            self.remove_in::<AHEAD>(removed, tier);
        }
        self.sweep();
    }

    /// Removes in pieces of `N` blocks.
    fn remove_in<const N: usize>(&mut self, removed: &Removed, tier: usize) {
        let mut rest = removed.hashes.as_slice();
        let mut next = self.guess_each::<N>(self.arena.approach(rest), rest.len());
        let mut places = self.arena.approach::<N>(rest.get(N..).unwrap_or(&[]));
        while !rest.is_empty() {
            let (hashes, after) = rest.split_at(rest.len().min(N));
            let found = next;
            if !after.is_empty() {
                next = self.guess_each(places, after.len());
                places = self.arena.approach(after.get(N..).unwrap_or(&[]));
            }
            let mut at = 0;
            while at < hashes.len() {
                if removed.remaining_copies.is_none() {
                    at += self.remove_plain(&hashes[at..], &found[at..], tier);
                }
                let Some(hash) = hashes.get(at) else { break };
                let done = removed.hashes.len() - rest.len() + at;
                let remaining = remaining(removed.remaining_copies.as_deref(), done);
                self.remove_one(*hash, tier, remaining, removed.cache_salt.as_deref());
                at += 1;
            }
            rest = after;
        }
    }

    /// Guesses the blocks of up to `N` places, of which so many are used.
    #[inline(always)]
    fn guess_each<const N: usize>(&self, places: [Place; N], used: usize) -> [Entry; N] {
        let mut found = [Entry::NONE; N];
        for (entry, place) in found.iter_mut().zip(&places).take(used) {
            *entry = self.arena.guess(*place);
        }
        found
    }

    fn remove_one(&mut self, hash: EngineHash, tier: usize, remaining: Option<u32>, salt: Option<&str>) {
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
                && let Some(salt) = salt
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
