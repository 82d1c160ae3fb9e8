//! A growing row of bits that knows how many stretches of set ones it has.

use crate::hint::prefetch;

/// Bits by offset; those beyond the words are clear.
#[derive(Clone, Debug, Default)]
pub(super) struct Bits {
    words: Vec<u64>,
    gaps: u32,
}

/// Bits in a word.
const WORD: u32 = u64::BITS;

/// The part of `[start, end)` that lies in the word `at`, as a mask. The word must touch the stretch.
#[inline]
fn mask(at: usize, start: u32, end: u32) -> u64 {
    let base = at as u32 * WORD;
    let low = u64::MAX << start.saturating_sub(base);
    let after = end - base;
    if after < WORD { low & !(u64::MAX << after) } else { low }
}

impl Bits {
    /// How many stretches of set bits there are.
    #[inline]
    pub(super) fn gaps(&self) -> usize {
        self.gaps as usize
    }

    /// All bits from here on are clear.
    #[inline]
    pub(super) fn end(&self) -> u32 {
        self.words.len() as u32 * WORD
    }

    pub(super) fn bytes(&self) -> usize {
        self.words.capacity() * 8
    }

    /// Asks for the word that an offset lies in.
    #[inline]
    pub(super) fn prefetch(&self, offset: u32) {
        if let Some(word) = self.words.get((offset / WORD) as usize) {
            prefetch(word);
        }
    }

    /// The word that an offset lies in.
    #[inline]
    fn word(&self, offset: usize) -> u64 {
        self.words.get(offset / WORD as usize).copied().unwrap_or(0)
    }

    #[inline]
    pub(super) fn has(&self, offset: u32) -> bool {
        self.word(offset as usize) >> (offset % WORD) & 1 == 1
    }

    /// Sets `[start, end)`, which isn't empty.
    #[inline]
    pub(super) fn set(&mut self, start: u32, end: u32) {
        let words = (end - 1) as usize / WORD as usize + 1;
        if words > self.words.len() {
            self.words.resize(words, 0);
        }
        self.change(start, end, |word, mask| word | mask);
    }

    /// Sets one bit; gives whether it was clear.
    #[inline]
    pub(super) fn set_one(&mut self, offset: u32) -> bool {
        if offset >= self.end() || offset == 0 {
            let clear = !self.has(offset);
            self.set(offset, offset + 1);
            return clear;
        }
        if self.has(offset) {
            return false;
        }
        let neighbours = u32::from(self.has(offset - 1)) + u32::from(self.has(offset + 1));
        self.words[(offset / WORD) as usize] |= 1 << (offset % WORD);
        self.gaps = self.gaps + 1 - neighbours;
        true
    }

    /// Clears `[start, end)`, which isn't empty.
    #[inline]
    pub(super) fn clear(&mut self, start: u32, end: u32) {
        self.change(start, end, |word, mask| word & !mask);
    }

    /// Changes a stretch word by word and counts the gaps anew where they may differ.
    #[inline]
    fn change(&mut self, start: u32, end: u32, to: impl Fn(u64, u64) -> u64) {
        let end = end.min(self.end());
        if start >= end {
            return;
        }
        let (first, last) = ((start / WORD) as usize, ((end - 1) / WORD) as usize);
        // The bits before `first` and after `last` stay, so only gaps that begin from `first` to just after `last` change.
        let mut before = self.words[..first].last().map_or(0, |word| word >> (WORD - 1));
        let mut before_new = before;
        let (mut gone, mut come) = (0, 0);
        for (at, word) in self.words[first..=last].iter_mut().enumerate() {
            let old = *word;
            let new = to(old, mask(first + at, start, end));
            gone += (old & !(old << 1 | before)).count_ones();
            come += (new & !(new << 1 | before_new)).count_ones();
            (before, before_new) = (old >> (WORD - 1), new >> (WORD - 1));
            *word = new;
        }
        let after = self.words.get(last + 1).map_or(0, |word| word & 1);
        gone += (after & !before) as u32;
        come += (after & !before_new) as u32;
        self.gaps = self.gaps + come - gone;
    }

    /// The first set offset at or after `from`.
    pub(super) fn first_from(&self, from: u32) -> Option<u32> {
        self.next(from, self.end(), true)
    }

    /// The first offset in `[from, end)` whose bit is as wanted.
    #[inline]
    fn next(&self, from: u32, end: u32, set: bool) -> Option<u32> {
        if from >= end {
            return None;
        }
        let flip = if set { 0 } else { u64::MAX };
        let mut at = (from / WORD) as usize;
        let last = ((end - 1) / WORD) as usize;
        let mut word = (self.words.get(at).copied().unwrap_or(0) ^ flip) & u64::MAX << (from % WORD);
        loop {
            if word != 0 {
                let found = at as u32 * WORD + word.trailing_zeros();
                return (found < end).then_some(found);
            }
            if at == last {
                return None;
            }
            at += 1;
            word = self.words.get(at).copied().unwrap_or(0) ^ flip;
        }
    }

    /// Hands on the stretches of `[start, end)` whose bits are as wanted.
    #[inline]
    pub(super) fn each(&self, start: u32, end: u32, set: bool, mut take: impl FnMut(u32, u32)) {
        let mut at = start;
        while let Some(from) = self.next(at, end, set) {
            let to = self.next(from + 1, end, !set).unwrap_or(end);
            take(from, to);
            at = to;
        }
    }

    /// Clears all at or after `end`; gives the offset that clear bits below it end at, and clears what lies between.
    pub(super) fn cut(&mut self, end: u32) -> u32 {
        let mut words = end.div_ceil(WORD) as usize;
        if words > self.words.len() {
            return end;
        }
        let mut clear_end = 0;
        while words > 0 {
            let clear = !self.words[words - 1] & mask(words - 1, 0, end.min(words as u32 * WORD));
            if clear != 0 {
                clear_end = words as u32 * WORD - clear.leading_zeros();
                break;
            }
            words -= 1;
        }
        if clear_end < self.end() {
            self.clear(clear_end, self.end());
        }
        self.words.truncate(words);
        clear_end
    }
}
