//! What a checkpoint leaves out because it follows from the rest.

use super::Mirror;
use super::groups::Groups;
use super::node::{SENT, SUSPECT, SUSPECT_ANYWHERE, Slot};

impl Mirror {
    pub(crate) fn group_parts(&self) -> (Option<u32>, bool, bool) {
        self.groups.parts()
    }

    pub(crate) fn set_group_parts(&mut self, parts: (Option<u32>, bool, bool)) {
        self.groups = Groups::from_parts(parts);
    }

    /// Recounts what is held, told and suspect, and finds what is still to be told.
    ///
    /// # Errors
    /// Names what contradicts itself.
    pub(crate) fn rebuild(&mut self, size: u32) -> Result<(), &'static str> {
        let slots: Vec<Slot> = self.arena.slots().collect();
        for slot in &slots {
            let node = self.arena.get(*slot);
            if node.has(super::ROOT) {
                continue;
            }
            let start = self.arena.get(node.parent()).end();
            let owned = (node.end() / size - start / size) as usize;
            let (keys, tail) = self.arena.side(*slot).map_or((0, 0), |s| (s.keys.len(), s.tail.len()));
            if keys != owned.saturating_sub(1) || tail != (node.end() % size) as usize {
                return Err("a block's keys");
            }
            self.mixed |= node.end() - start != size || !start.is_multiple_of(size);
        }
        let tiers = self.config.tiers.len();
        for slot in &slots {
            let flags = self.arena.get(*slot).flags;
            self.held_anywhere += usize::from(self.arena.get(*slot).is_held_anywhere());
            let mut keys = Vec::new();
            self.push_keys(*slot, &mut keys);
            for tier in 0..tiers {
                self.held[tier] += u64::from(self.arena.get(*slot).is_held(tier));
                self.suspects[tier] += u64::from(flags & SUSPECT << tier != 0);
                if flags & SENT << tier != 0 {
                    self.count_told(&keys, tier);
                }
                if self.is_effective(*slot, tier) != (flags & SENT << tier != 0) {
                    self.mark(*slot, tier);
                }
            }
            if flags & SUSPECT_ANYWHERE != 0 {
                self.suspect_keys.insert(self.arena.get(*slot).key().0, *slot);
            }
        }
        for slot in slots {
            if self.arena.live(slot).is_some_and(|n| n.is_idle()) {
                self.release(slot);
            }
        }
        Ok(())
    }
}
