//! A compact table from many keys to runs: four bytes an entry, a look-up reads one cache line nearly always.

use cairn_blocks::BlockKey;

use super::huge::advise;
use super::run::RunId;

/// Words in a line; the first one counts the entries that belong here or before and lie beyond.
const WORDS: usize = 16;
/// Entries a line that the table is full at; up to one fewer than its words would fit, but then many lie elsewhere.
const FULL: usize = 12;
/// Entries a line that a table is made with, so that more than as many again can come before it is made anew.
const AT_FIRST: usize = 5;
/// Bits of an entry that name the run, as its id plus one; those above are a tag of the key.
const RUN_BITS: u32 = 24;

/// The bit of each word of a line.
const BITS: [u32; WORDS] = [
    1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768,
];

/// One cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u32; WORDS]);

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
    tag: u32,
}

impl Line {
    /// A bit for each word that is an entry with this tag.
    #[inline]
    fn tagged(&self, tag: u32) -> u32 {
        self.bits(|word| word >> RUN_BITS == tag)
    }

    /// A bit for each word of which that is true, but the first.
    #[inline]
    fn bits(&self, is: impl Fn(u32) -> bool) -> u32 {
        // Each word has its bit by itself, so that the compiler takes several words at a time.
        let bits = self.0.iter().zip(&BITS);
        let all = bits.fold(0, |all, (word, bit)| {
            all + (bit & 0u32.wrapping_sub(u32::from(is(*word))))
        });
        all & !1
    }
}

impl Places {
    /// The largest run id that entries can name.
    pub(super) const RUN_MAX: u32 = (1 << RUN_BITS) - 2;

    /// An empty table with room for so many entries and more than as many again.
    pub(super) fn with_room_for(entries: usize) -> Self {
        let lines = vec![Line([0; WORDS]); entries / AT_FIRST + 1];
        advise(&lines);
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
        while let Some(words) = self.lines.get(line) {
            let mut bits = words.tagged(tag);
            while bits != 0 {
                take(run_of(words.0[bits.trailing_zeros() as usize]));
                bits &= bits - 1;
            }
            if words.0[0] == 0 {
                return;
            }
            line = self.after(line);
        }
    }

    /// Reads where a key is found ahead of a look-up; gives the first run that looks like it.
    #[inline]
    pub(super) fn guess(&self, key: BlockKey) -> Option<RunId> {
        let Home { line, tag } = self.home(key);
        let words = self.lines.get(line)?;
        let bits = words.tagged(tag);
        (bits != 0).then(|| run_of(words.0[bits.trailing_zeros() as usize]))
    }

    /// Reads where these keys are, or will be.
    #[inline]
    pub(super) fn read(&self, keys: &[BlockKey]) {
        let lines = keys.iter().filter_map(|key| self.lines.get(self.home(*key).line));
        std::hint::black_box(lines.fold(0, |seen, line| seen ^ line.0[0]));
    }

    /// Adds an entry; there must be room, and the run's id at most [`Places::RUN_MAX`].
    pub(super) fn insert(&mut self, key: BlockKey, run: RunId) {
        let Home { mut line, tag } = self.home(key);
        self.len += 1;
        loop {
            let free = self.lines[line].bits(|word| word == 0);
            if free != 0 {
                self.lines[line].0[free.trailing_zeros() as usize] = entry(tag, run);
                return;
            }
            self.lines[line].0[0] += 1;
            line = self.after(line);
        }
    }

    /// Takes away an entry of that key and run, which must be there.
    pub(super) fn remove(&mut self, key: BlockKey, run: RunId) {
        let Home { mut line, tag } = self.home(key);
        let wanted = entry(tag, run);
        self.len -= 1;
        loop {
            let found = self.lines[line].bits(|word| word == wanted);
            if found != 0 {
                self.lines[line].0[found.trailing_zeros() as usize] = 0;
                return;
            }
            let beyond = &mut self.lines[line].0[0];
            *beyond = beyond.checked_sub(1).expect("an entry to remove is there");
            line = self.after(line);
        }
    }

    #[inline]
    fn home(&self, key: BlockKey) -> Home {
        // Fibonacci hashing (Knuth, TAOCP 6.4): keys are uniform in service, but need not be in tests.
        let hash = key.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Home {
            line: (((hash >> 32) * self.lines.len() as u64) >> 32) as usize,
            // Never 0, as words in no use are.
            tag: ((hash >> RUN_BITS) as u32 & 0xff).max(1),
        }
    }

    #[inline]
    fn after(&self, line: usize) -> usize {
        if line + 1 == self.lines.len() { 0 } else { line + 1 }
    }
}

#[inline]
fn entry(tag: u32, run: RunId) -> u32 {
    tag << RUN_BITS | (run.0 + 1)
}

#[inline]
fn run_of(entry: u32) -> RunId {
    RunId((entry & ((1 << RUN_BITS) - 1)) - 1)
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
                places.insert(new.0, new.1);
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
        assert!(places.lines.iter().all(|line| line.0 == [0; WORDS]));
    }
}
