//! A small open-addressed table from keys to runs that keeps no keys: callers compare with the run itself.

use cairn_blocks::BlockKey;

use super::huge::advise;
use super::run::RunId;
use crate::hint::prefetch;

/// Slots that a table begins with.
const FIRST_SLOTS: usize = 8;

/// A table with fewer entries than a slot in so many is made smaller.
const SPARSE: usize = 16;

/// Runs by 32 bits of a key, linear probing, removal by shifting back.
///
/// A slot is 0 where empty, else the key's low half above the run's id plus one.
#[derive(Clone, Default)]
pub(super) struct KeyTable {
    slots: Vec<u64>,
    len: usize,
}

impl KeyTable {
    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * 8
    }

    /// Asks for the slot that a key belongs in.
    #[inline]
    pub(super) fn prefetch(&self, key: BlockKey) {
        if let Some(slot) = self.slots.get(self.home(tag(key)) & self.slots.len().wrapping_sub(1)) {
            prefetch(slot);
        }
    }

    /// The first run under that key which `is` says yes to.
    #[inline]
    pub(super) fn find(&self, key: BlockKey, mut is: impl FnMut(RunId) -> bool) -> Option<RunId> {
        if self.slots.is_empty() {
            return None;
        }
        let (tag, mask) = (tag(key), self.slots.len() - 1);
        let mut at = self.home(tag);
        loop {
            let slot = self.slots[at & mask];
            if slot == 0 {
                return None;
            }
            if slot >> 32 == u64::from(tag) {
                let run = run_of(slot);
                if is(run) {
                    return Some(run);
                }
            }
            at += 1;
        }
    }

    /// Adds an entry.
    pub(super) fn insert(&mut self, key: BlockKey, run: RunId) {
        // At most three quarters full, so that probing stays short.
        if (self.len + 1) * 4 > self.slots.len() * 3 {
            self.resize((self.slots.len() * 2).max(FIRST_SLOTS));
        }
        self.len += 1;
        self.place(u64::from(tag(key)) << 32 | u64::from(run.0 + 1));
    }

    /// Takes away the entry of that key and run, which must be there.
    pub(super) fn remove(&mut self, key: BlockKey, run: RunId) {
        let wanted = u64::from(tag(key)) << 32 | u64::from(run.0 + 1);
        let mask = self.slots.len() - 1;
        let mut at = self.home(tag(key)) & mask;
        while self.slots[at] != wanted {
            assert!(self.slots[at] != 0, "an entry to remove is there");
            at = (at + 1) & mask;
        }
        self.len -= 1;
        let mut hole = at;
        loop {
            at = (at + 1) & mask;
            let slot = self.slots[at];
            if slot == 0 {
                break;
            }
            // An entry may move back unless its home lies after the hole.
            let home = self.home((slot >> 32) as u32) & mask;
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.slots[hole] = slot;
                hole = at;
            }
        }
        self.slots[hole] = 0;
        if self.slots.len() > FIRST_SLOTS && self.len * SPARSE < self.slots.len() {
            self.resize(self.slots.len() / 2);
        }
    }

    /// How many entries there are.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// How many slots there are.
    pub(super) fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Every entry with its slot, by slot.
    pub(super) fn entries(&self) -> impl Iterator<Item = (usize, RunId)> + '_ {
        self.slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| **slot != 0)
            .map(|(at, &slot)| (at, run_of(slot)))
    }

    /// Whether a table with so many entries may have so many slots.
    pub(super) fn plausible(slots: usize, len: usize) -> bool {
        let full = len * 4 > slots * 3;
        let sparse = slots > FIRST_SLOTS && len * SPARSE < slots;
        slots == 0 && len == 0 || slots.is_power_of_two() && slots >= FIRST_SLOTS && !full && !sparse
    }

    /// A table with exactly these entries at these slots; none where it couldn't have come to be.
    pub(super) fn with_entries(slots: usize, entries: &[(usize, BlockKey, RunId)]) -> Option<Self> {
        if !Self::plausible(slots, entries.len()) {
            return None;
        }
        let mut table = Self {
            slots: empty(slots),
            len: entries.len(),
        };
        for &(at, key, run) in entries {
            let slot = table.slots.get_mut(at).filter(|slot| **slot == 0)?;
            *slot = u64::from(tag(key)) << 32 | u64::from(run.0 + 1);
        }
        // Nothing empty may lie between an entry and its home.
        let mask = slots.wrapping_sub(1);
        let reachable = entries.iter().all(|&(at, key, _)| {
            let home = table.home(tag(key)) & mask;
            (0..at.wrapping_sub(home) & mask).all(|step| table.slots[(home + step) & mask] != 0)
        });
        reachable.then_some(table)
    }

    /// Every run, in no order that means anything.
    pub(super) fn runs(&self) -> impl Iterator<Item = RunId> + '_ {
        self.slots.iter().filter(|&&slot| slot != 0).map(|&slot| run_of(slot))
    }

    #[inline]
    fn home(&self, tag: u32) -> usize {
        // Fibonacci hashing (Knuth, TAOCP 6.4): keys are uniform in service, but need not be in tests.
        (tag.wrapping_mul(0x9e37_79b9) as usize) >> (32 - self.slots.len().trailing_zeros().min(32))
    }

    fn place(&mut self, slot: u64) {
        let mask = self.slots.len() - 1;
        let mut at = self.home((slot >> 32) as u32) & mask;
        while self.slots[at] != 0 {
            at = (at + 1) & mask;
        }
        self.slots[at] = slot;
    }

    fn resize(&mut self, slots: usize) {
        let old = std::mem::replace(&mut self.slots, empty(slots));
        for slot in old.into_iter().filter(|&slot| slot != 0) {
            self.place(slot);
        }
    }
}

fn empty(slots: usize) -> Vec<u64> {
    let slots = vec![0; slots];
    advise(&slots);
    slots
}

#[inline]
fn tag(key: BlockKey) -> u32 {
    key.0 as u32
}

#[inline]
fn run_of(slot: u64) -> RunId {
    RunId(slot as u32 - 1)
}
