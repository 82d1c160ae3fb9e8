//! One cache line of the table of engine hashes: fifteen entries and who passed by.

use crate::mirror::node::Slot;

/// Entries in a bucket.
pub(super) const ENTRIES: usize = 15;
/// Groups of hashes that a bucket counts apart.
pub(super) const GROUPS: u32 = 8;
/// The largest count of a group.
const COUNT: u32 = 15;
/// Where the slots begin, three bytes each.
const SLOTS: usize = ENTRIES;
/// Where the second word of tags begins: its first byte is the first word's last.
const SECOND: usize = 7;
const WORD: usize = 8;
/// The highest bit of each byte, the lowest bit of each.
const HIGH: u64 = 0x8080_8080_8080_8080;
const LOW: u64 = 0x0101_0101_0101_0101;

/// The tag of an entry in no use.
const VACANT: u8 = 0;

/// Fifteen tags of eight bits of the hash, the same number of slots, and how many of each of eight groups of hashes
/// passed by this full bucket and lie in a later one: four bits each, so that a hash that isn't in the table is so
/// seldom looked for beyond its own line. Tags are side by side, so that eight are compared at once.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Bucket {
    bytes: [u8; SLOTS + 3 * ENTRIES],
    passed: u32,
}

const _: () = assert!(size_of::<Bucket>() == 64);

impl Bucket {
    pub(super) const NEW: Self = Self {
        bytes: [VACANT; SLOTS + 3 * ENTRIES],
        passed: 0,
    };

    /// The tag of a hash whose bits these are: any but that of an entry in no use, and the one that differs from that
    /// in its lowest bit, so that [`Bucket::alike`] never takes the one for the other.
    #[inline]
    pub(super) fn tag(bits: u8) -> u8 {
        bits.max(VACANT + 2)
    }

    #[inline]
    fn word(&self, at: usize) -> u64 {
        let mut word = [0; WORD];
        word.copy_from_slice(&self.bytes[at..at + WORD]);
        u64::from_le_bytes(word)
    }

    /// Positions of entries with this tag, and now and then of one just after such whose tag differs in its lowest bit:
    /// the caller tells by its slot.
    #[inline]
    pub(super) fn alike(&self, tag: u8) -> Positions {
        let pattern = u64::from(tag) * LOW;
        // A byte that is zero borrows from the next, which may then look like zero too.
        let zeros = |word: u64| word.wrapping_sub(LOW) & !word & HIGH;
        Positions {
            first: zeros(self.word(0) ^ pattern),
            second: zeros(self.word(SECOND) ^ pattern) & !0xff,
        }
    }

    /// Where there is room.
    #[inline]
    pub(super) fn vacancy(&self) -> Option<usize> {
        // Of the lowest one that looks like zero it is certain.
        self.alike(VACANT).lowest()
    }

    /// The slot of an entry.
    #[inline]
    pub(super) fn slot(&self, at: usize) -> Slot {
        let at = SLOTS + 3 * at;
        u32::from_le_bytes([self.bytes[at], self.bytes[at + 1], self.bytes[at + 2], 0])
    }

    /// Sets an entry in no use.
    #[inline]
    pub(super) fn put(&mut self, at: usize, tag: u8, slot: Slot) {
        self.bytes[at] = tag;
        let [a, b, c, _] = slot.to_le_bytes();
        self.bytes[SLOTS + 3 * at..][..3].copy_from_slice(&[a, b, c]);
    }

    /// Takes an entry out; the others stay where they are.
    #[inline]
    pub(super) fn take(&mut self, at: usize) {
        self.bytes[at] = VACANT;
    }

    /// Slots of the entries in use.
    pub(super) fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        (0..ENTRIES)
            .filter(|at| self.bytes[*at] != VACANT)
            .map(|at| self.slot(at))
    }

    /// How many of a group passed by; the largest count stands for that many or more.
    #[inline]
    pub(super) fn passed(&self, group: u8) -> u32 {
        self.passed >> group & COUNT
    }

    /// Something that every read of the line brings near.
    #[inline]
    pub(super) fn touch(&self) -> u32 {
        self.passed
    }

    /// One of a group passes by. A count that is full stays so: then more is looked through than need be.
    #[inline]
    pub(super) fn pass(&mut self, group: u8) {
        self.passed += u32::from(self.passed(group) < COUNT) << group;
    }

    /// One that passed by is gone.
    #[inline]
    pub(super) fn unpass(&mut self, group: u8) {
        self.passed -= u32::from(self.passed(group) < COUNT) << group;
    }

    /// Whether nothing is in it, and nobody passed by but groups whose count is full.
    #[cfg(test)]
    pub(super) fn is_left_as_new(&self) -> bool {
        self.slots().next().is_none() && (0..GROUPS).all(|g| matches!(self.passed(4 * g as u8), 0 | COUNT))
    }
}

/// Positions in a bucket, a high bit each in two words.
#[derive(Clone, Copy)]
pub(super) struct Positions {
    first: u64,
    second: u64,
}

impl Positions {
    /// Whether there is none.
    #[inline]
    pub(super) fn is_nowhere(self) -> bool {
        self.first | self.second == 0
    }

    /// The lowest one.
    #[inline]
    pub(super) fn lowest(self) -> Option<usize> {
        if self.first != 0 {
            Some(self.first.trailing_zeros() as usize / 8)
        } else if self.second != 0 {
            Some(SECOND + self.second.trailing_zeros() as usize / 8)
        } else {
            None
        }
    }

    /// All but the lowest one.
    #[inline]
    pub(super) fn rest(self) -> Self {
        if self.first != 0 {
            Self {
                first: self.first & (self.first - 1),
                ..self
            }
        } else {
            Self {
                second: self.second & self.second.wrapping_sub(1),
                ..self
            }
        }
    }
}
