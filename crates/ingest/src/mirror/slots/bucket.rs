//! One cache line of the table of engine hashes: fifteen entries and who passed by.

use super::wide::equal;
use crate::mirror::node::Slot;

/// Entries in a bucket.
pub(super) const ENTRIES: usize = 15;
/// Groups of hashes that a bucket counts apart.
pub(super) const GROUPS: u32 = 8;
/// The largest count of a group.
const COUNT: u32 = 15;
/// Where the slots begin, three bytes each, and where the counts are.
const SLOTS: usize = ENTRIES;
const PASSED: usize = SLOTS + 3 * ENTRIES;
/// Masks a position, which is below fifteen anyhow: then all of its bytes are seen to lie in the bucket.
const POSITION: usize = 15;

/// The tag of an entry in no use.
const VACANT: u8 = 0;

/// Fifteen tags of eight bits of the hash, the same number of slots, and how many of each of eight groups of hashes
/// passed by this full bucket and lie in a later one: four bits each, so that a hash that isn't in the table is so
/// seldom looked for beyond its own line. Tags are side by side, so that all are compared at once.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Bucket([u8; PASSED + 4]);

const _: () = assert!(size_of::<Bucket>() == 64);

impl Bucket {
    pub(super) const NEW: Self = Self([VACANT; PASSED + 4]);

    /// Four bytes as a word.
    #[inline]
    fn word(&self, at: usize) -> u32 {
        let mut word = [0; 4];
        word.copy_from_slice(&self.0[at..at + 4]);
        u32::from_le_bytes(word)
    }

    #[inline]
    fn set_word(&mut self, at: usize, word: u32) {
        self.0[at..at + 4].copy_from_slice(&word.to_le_bytes());
    }

    /// Where the word begins that has a slot in its upper three bytes.
    #[inline]
    fn slot_at(at: usize) -> usize {
        SLOTS - 1 + 3 * (at & POSITION)
    }

    /// The tag of a hash whose bits these are: any but that of an entry in no use.
    #[inline]
    pub(super) fn tag(bits: u8) -> u8 {
        bits.max(VACANT + 1)
    }

    /// Positions of entries with this tag.
    #[inline]
    pub(super) fn alike(&self, tag: u8) -> Positions {
        // The tags, and the first byte of the slots.
        let equal = self.0.first_chunk().map_or(0, |tags| equal(tags, tag));
        Positions(equal & ((1 << ENTRIES) - 1))
    }

    /// Where there is room.
    #[inline]
    pub(super) fn vacancy(&self) -> Option<usize> {
        self.alike(VACANT).lowest()
    }

    /// The slot of an entry.
    #[inline]
    pub(super) fn slot(&self, at: usize) -> Slot {
        self.word(Self::slot_at(at)) >> 8
    }

    /// Sets an entry in no use.
    #[inline]
    pub(super) fn put(&mut self, at: usize, tag: u8, slot: Slot) {
        // With the byte before it, so that it is one word, as it is read again.
        let word = Self::slot_at(at);
        self.set_word(word, self.word(word) & 0xff | slot << 8);
        self.0[at & POSITION] = tag;
    }

    /// Takes an entry out; the others stay where they are.
    #[inline]
    pub(super) fn take(&mut self, at: usize) {
        self.0[at & POSITION] = VACANT;
    }

    /// Slots of the entries in use.
    pub(super) fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        (0..ENTRIES).filter(|at| self.0[*at] != VACANT).map(|at| self.slot(at))
    }

    /// How many of a group passed by; the largest count stands for that many or more.
    #[inline]
    pub(super) fn passed(&self, group: u8) -> u32 {
        self.word(PASSED) >> group & COUNT
    }

    /// One of a group passes by. A count that is full stays so: then more is looked through than need be.
    #[inline]
    pub(super) fn pass(&mut self, group: u8) {
        let one = u32::from(self.passed(group) < COUNT) << group;
        self.set_word(PASSED, self.word(PASSED) + one);
    }

    /// One that passed by is gone.
    #[inline]
    pub(super) fn unpass(&mut self, group: u8) {
        let one = u32::from(self.passed(group) < COUNT) << group;
        self.set_word(PASSED, self.word(PASSED) - one);
    }

    /// Whether nothing is in it, and nobody passed by but groups whose count is full.
    #[cfg(test)]
    pub(super) fn is_left_as_new(&self) -> bool {
        self.slots().next().is_none() && (0..GROUPS).all(|g| matches!(self.passed(4 * g as u8), 0 | COUNT))
    }
}

/// Positions in a bucket, a bit each.
#[derive(Clone, Copy)]
pub(super) struct Positions(u32);

impl Positions {
    /// Whether there is none.
    #[inline]
    pub(super) fn is_nowhere(self) -> bool {
        self.0 == 0
    }

    /// The lowest one.
    #[inline]
    pub(super) fn lowest(self) -> Option<usize> {
        (self.0 != 0).then_some(self.0.trailing_zeros() as usize)
    }

    /// All but the lowest one.
    #[inline]
    pub(super) fn rest(self) -> Self {
        Self(self.0 & self.0.wrapping_sub(1))
    }
}
