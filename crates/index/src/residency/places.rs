//! A compact table from many keys to runs: four bytes an entry, a look-up reads one cache line nearly always.

use cairn_blocks::BlockKey;

use super::huge::advise;
use super::run::RunId;
use crate::hint::prefetch;

/// Entries that fit in a line.
const ENTRIES: usize = 15;
/// Entries a line that the table is full at; up to as many as fit, but then many lie elsewhere.
const FULL: usize = 12;
/// Entries a line that a table is made with, so that more than as many again can come before it is made anew.
const AT_FIRST: usize = 5;
/// Lines that an entry may lie from its home: only keys that were chosen to come together ever lie so far.
const LINES_PASSED_MOST: usize = 1 << 10;
/// Where among the tags the number of entries is.
const COUNT: usize = ENTRIES;
/// Bits of a run's id that an entry keeps.
const RUN_BITS: u32 = 24;

/// One cache line: its entries lie side by side from the front.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    /// Eight bits of each entry's key, never 0; 0 where there is none; then the number of entries.
    tags: [u8; ENTRIES + 1],
    /// The low bytes of each entry's run id.
    runs: [[u8; 3]; ENTRIES],
    /// How many entries belong here or before and lie beyond.
    beyond: [u8; 3],
}

const _: () = assert!(size_of::<Line>() == 64, "a line is a cache line");

/// Runs by keys, of which only 8 bits are kept: callers compare with the run itself.
#[derive(Clone, Default)]
pub(super) struct Places {
    lines: Vec<Line>,
    len: usize,
}

/// Where a key belongs, and how its entries begin.
#[derive(Clone, Copy)]
struct Home {
    line: usize,
    tag: u8,
}

/// The low bit of each byte of a word.
const LOW: u64 = 0x0101_0101_0101_0101;

/// The low bit of each byte that is equal.
#[inline(always)]
fn equal_bytes(word: u64, byte: u8) -> u64 {
    let differing = word ^ (u64::from(byte) * LOW);
    let below = LOW * 0x7f;
    // The high bit of a byte ends up set where any of its bits is; nothing carries into the next byte.
    (!(((differing & below) + below) | differing) >> 7) & LOW
}

impl Line {
    const EMPTY: Line = Line {
        tags: [0; ENTRIES + 1],
        runs: [[0; 3]; ENTRIES],
        beyond: [0; 3],
    };

    /// The entries with this tag.
    #[inline(always)]
    fn tagged(&self, tag: u8) -> Tagged {
        let both = u128::from_le_bytes(self.tags);
        let (low, high) = (both as u64, (both >> 64) as u64);
        // The last byte counts the entries.
        Tagged(equal_bytes(low, tag) | (equal_bytes(high, tag) << 1 & (u64::MAX >> 8)))
    }

    #[inline(always)]
    fn run(&self, at: usize) -> RunId {
        let [a, b, c] = self.runs[at];
        RunId(u32::from_le_bytes([a, b, c, 0]))
    }

    #[inline(always)]
    fn beyond(&self) -> u32 {
        let [a, b, c] = self.beyond;
        u32::from_le_bytes([a, b, c, 0])
    }

    #[inline]
    fn set_beyond(&mut self, beyond: u32) {
        self.beyond = three_bytes(beyond);
    }

    /// Adds an entry; gives whether there was room.
    #[inline(always)]
    fn push(&mut self, tag: u8, run: RunId) -> bool {
        let at = usize::from(self.tags[COUNT]);
        if at >= ENTRIES {
            return false;
        }
        self.tags[at] = tag;
        self.runs[at] = three_bytes(run.0);
        self.tags[COUNT] += 1;
        true
    }

    /// Takes an entry away; gives whether it was there.
    #[inline(always)]
    fn take(&mut self, tag: u8, run: RunId) -> bool {
        let Some(at) = self.tagged(tag).find(|at| self.run(*at) == run) else {
            return false;
        };
        // The last one takes its place.
        let last = usize::from(self.tags[COUNT] - 1);
        self.tags[at] = self.tags[last];
        self.runs[at] = self.runs[last];
        self.tags[last] = 0;
        self.tags[COUNT] -= 1;
        true
    }
}

/// Places of entries in a line, as bits: the lower eight at the low bits of bytes, the others one higher.
struct Tagged(u64);

impl Iterator for Tagged {
    type Item = usize;

    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        let bit = self.0.trailing_zeros();
        (self.0 != 0).then(|| {
            self.0 &= self.0 - 1;
            (bit / 8 + bit % 8 * 8) as usize
        })
    }
}

#[inline]
fn three_bytes(number: u32) -> [u8; 3] {
    let [a, b, c, _] = number.to_le_bytes();
    [a, b, c]
}

impl Places {
    /// The largest run id that entries can name.
    pub(super) const RUN_MAX: u32 = (1 << RUN_BITS) - 1;

    /// An empty table with room for so many entries and more than as many again.
    pub(super) fn with_room_for(entries: usize) -> Self {
        let count = entries / AT_FIRST + 1;
        let mut lines = Vec::with_capacity(count);
        advise(lines.spare_capacity_mut());
        lines.resize(count, Line::EMPTY);
        Self { lines, len: 0 }
    }

    pub(super) fn bytes(&self) -> usize {
        self.lines.capacity() * size_of::<Line>()
    }

    /// Whether so many more entries fit.
    #[inline]
    pub(super) fn has_room_for(&self, entries: usize) -> bool {
        self.len + entries <= self.lines.len() * FULL
    }

    /// Hands on every run that may be under that key.
    #[inline]
    pub(super) fn each(&self, key: BlockKey, mut take: impl FnMut(RunId)) {
        let Home { mut line, tag } = self.home(key);
        // Ends: counters say where an entry lies beyond, and the table is never full.
        while let Some(found) = self.lines.get(line) {
            found.tagged(tag).for_each(|at| take(found.run(at)));
            if found.beyond() == 0 {
                return;
            }
            line = self.after(line);
        }
    }

    /// The first run that looks like that key's, where it lies at home.
    #[inline]
    pub(super) fn guess(&self, key: BlockKey) -> Option<RunId> {
        let Home { line, tag } = self.home(key);
        let line = self.lines.get(line)?;
        line.tagged(tag).next().map(|at| line.run(at))
    }

    /// Asks for the line where a key is, or will be.
    #[inline]
    pub(super) fn prefetch(&self, key: BlockKey) {
        if let Some(line) = self.lines.get(self.home(key).line) {
            prefetch(line);
        }
    }

    /// Adds an entry; there must be room, and the run's id at most [`Places::RUN_MAX`]. Gives whether a line near its home
    /// had room: else the table is of no use any more.
    #[inline]
    pub(super) fn insert(&mut self, key: BlockKey, run: RunId) -> bool {
        let Home { mut line, tag } = self.home(key);
        self.len += 1;
        for _ in 0..LINES_PASSED_MOST {
            if self.lines[line].push(tag, run) {
                return true;
            }
            let beyond = self.lines[line].beyond();
            self.lines[line].set_beyond(beyond + 1);
            line = self.after(line);
        }
        false
    }

    /// Takes away an entry of that key and run, which must be there.
    #[inline]
    pub(super) fn remove(&mut self, key: BlockKey, run: RunId) {
        let Home { mut line, tag } = self.home(key);
        self.len -= 1;
        while !self.lines[line].take(tag, run) {
            let beyond = self.lines[line].beyond();
            self.lines[line].set_beyond(beyond.checked_sub(1).expect("an entry to remove is there"));
            line = self.after(line);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn home(&self, key: BlockKey) -> Home {
        // Fibonacci hashing (Knuth, TAOCP 6.4): keys are uniform in service, but need not be in tests.
        let hash = key.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Home {
            line: (((hash >> 32) * self.lines.len() as u64) >> 32) as usize,
            // Never 0, as tags in no use are.
            tag: ((hash >> 24) as u8).max(1),
        }
    }

    #[inline]
    fn after(&self, line: usize) -> usize {
        if line + 1 == self.lines.len() { 0 } else { line + 1 }
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    #[test]
    fn what_was_entered_is_found_until_it_goes() {
        let mut rng = SmallRng::seed_from_u64(3);
        let mut places = Places::with_room_for(600);
        let mut there: Vec<(BlockKey, RunId)> = Vec::new();
        for step in 0..40_000u32 {
            if places.has_room_for(1) && (step / 900 % 2 == 0 || there.is_empty()) {
                // Some keys come several times, for one run or for others.
                let spread = if rng.random_bool(0.5) { 3 } else { u64::MAX };
                let new = (BlockKey(rng.random_range(0..spread)), RunId(rng.random_range(0..50)));
                assert!(places.insert(new.0, new.1));
                there.push(new);
            } else {
                let (key, run) = there.swap_remove(rng.random_range(0..there.len()));
                places.remove(key, run);
            }
            let (key, run) = *there
                .get(step as usize % there.len().max(1))
                .unwrap_or(&(BlockKey(1), RunId(0)));
            let mut found = 0;
            places.each(key, |candidate| found += usize::from(candidate == run));
            // Other keys may look the same.
            assert!(found >= there.iter().filter(|entry| **entry == (key, run)).count());
        }
        assert!(there.len() > 100);
        there.drain(..).for_each(|(key, run)| places.remove(key, run));
        let empty = |line: &Line| line.tags == Line::EMPTY.tags && line.beyond() == 0;
        assert!(places.lines.iter().all(empty));
    }

    #[test]
    fn keys_chosen_to_come_together_fill_no_more_lines_than_a_bound() {
        let mut places = Places::with_room_for(20_000);
        let fit = ENTRIES * LINES_PASSED_MOST;
        assert!((0..fit).all(|_| places.insert(BlockKey(5), RunId(1))));
        assert!(places.has_room_for(1) && !places.insert(BlockKey(5), RunId(1)));
    }
}
