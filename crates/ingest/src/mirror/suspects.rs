//! Blocks that were held before events were lost: confirmed or cut by what the engine says, dropped after a turnover.

use cairn_blocks::BlockKey;

use super::Mirror;
use super::node::{DROPPED, ROOT, SUSPECT, SUSPECT_ANYWHERE, Slot};

impl Mirror {
    /// Everything held is suspect from here on. After a firm gap what waits for its place goes: its removal may be
    /// among what was lost, and its copies would count once more.
    pub(crate) fn suspect_all(&mut self, firm: bool) {
        if firm {
            self.quarantine.clear();
        }
        self.suspect_keys.clear();
        let slots: Vec<Slot> = self.arena.slots().collect();
        for slot in slots {
            for tier in 0..self.config.tiers.len() {
                let node = self.arena.get_mut(slot);
                if node.is_held(tier) && !node.has(SUSPECT << tier) {
                    node.set(SUSPECT << tier, true);
                    self.suspects[tier] += 1;
                }
            }
            let node = self.arena.get(slot);
            if node.flags & SUSPECT_ANYWHERE != 0 {
                self.suspect_keys.insert(node.key().0, slot);
            }
        }
    }

    /// Nothing was lost: nothing is suspect.
    pub(crate) fn trust_all(&mut self) {
        if self.suspects() > 0 {
            let slots: Vec<Slot> = self.arena.slots().collect();
            for slot in slots {
                self.arena.get_mut(slot).set(SUSPECT_ANYWHERE, false);
            }
        }
        self.suspects = [0; super::TIERS];
        self.suspect_keys = Default::default();
    }

    /// Takes the suspicion off a node in a tier; returns whether there was any.
    #[inline]
    pub(super) fn unsuspect(&mut self, slot: Slot, tier: usize) -> bool {
        let node = self.arena.get_mut(slot);
        let was = node.has(SUSPECT << tier);
        if was {
            node.set(SUSPECT << tier, false);
            self.suspects[tier] -= 1;
        }
        was
    }

    /// The engine showed that it has a suspect: one copy is sure, whatever was counted before.
    fn confirm(&mut self, slot: Slot) {
        if self.unsuspect(slot, 0) {
            self.stats.suspects_confirmed += 1;
            self.set_copies(slot, 0, 1);
        }
    }

    /// A block was computed on the GPU below this node, so the engine held every block above it.
    #[inline(always)]
    pub(super) fn confirm_above(&mut self, slot: Slot) {
        if self.arena.get(slot).flags & (SUSPECT | DROPPED) != 0 {
            self.confirm_from(slot);
        }
    }

    #[inline(never)]
    fn confirm_from(&mut self, slot: Slot) {
        let mut at = slot;
        while self.arena.get(at).flags & (SUSPECT | DROPPED) != 0 {
            self.confirm(at);
            let node = self.arena.get_mut(at);
            if node.has(DROPPED) {
                node.set(DROPPED, false);
                if !node.is_held(0) {
                    self.set_copies(at, 0, 1);
                }
            }
            at = self.arena.get(at).parent();
        }
    }

    /// Drops what is still suspect.
    pub(crate) fn drop_suspects(&mut self) {
        if self.suspects() == 0 {
            return;
        }
        let slots: Vec<Slot> = self.arena.slots().collect();
        for slot in slots {
            for tier in 0..self.config.tiers.len() {
                // A node may go with the last of its children.
                if self.arena.live(slot).is_some_and(|n| n.has(SUSPECT << tier)) {
                    if tier == 0 {
                        self.arena.get_mut(slot).set(DROPPED, true);
                    }
                    self.stats.suspects_dropped += 1;
                    self.set_copies(slot, tier, 0);
                }
            }
        }
        self.suspect_keys = Default::default();
        self.sweep();
    }

    /// What an engine reused of a prompt with these block keys: suspects up to there are confirmed, the rest is cut.
    ///
    /// `cached` is in tokens from the prompt's start. Engines compute the last block of a prompt anew even when they
    /// hold it, so that one is left alone.
    pub(crate) fn observe_cached(&mut self, keys: &[BlockKey], cached: u32) {
        let size = self.config.block_size.tokens();
        let prompt = (keys.len() as u32).saturating_mul(size);
        for (key, end) in keys.iter().zip((1..).map(|i: u32| i.saturating_mul(size))) {
            if self.suspects() == 0 {
                return;
            }
            let Some(&slot) = self.suspect_keys.get(&key.0) else {
                continue;
            };
            let Some(node) = self
                .arena
                .live(slot)
                .copied()
                .filter(|n| n.key() == *key && !n.has(ROOT))
            else {
                continue;
            };
            let length = node.end() - self.arena.get(node.parent()).end();
            if end <= cached {
                self.confirm(slot);
            } else if end.saturating_add(length) <= prompt {
                self.cut(slot);
            }
        }
    }

    fn cut(&mut self, slot: Slot) {
        for tier in 0..self.config.tiers.len() {
            if self.arena.live(slot).is_some_and(|n| n.has(SUSPECT << tier)) {
                self.stats.suspects_cut += 1;
                self.set_copies(slot, tier, 0);
            }
        }
    }
}
