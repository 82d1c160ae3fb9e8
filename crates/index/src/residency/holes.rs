//! What a holder lacks inside its share of a run: sorted intervals of offsets, or a bit for each offset where many are missing.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use super::bits::Bits;
use super::run::RunId;
use crate::HolderId;
use crate::hint::prefetch;
use crate::ids::IdHasher;

/// Holes by run and holder; looked up, never iterated in an order that matters.
pub(super) type HolesMap = HashMap<(RunId, HolderId), Holes, BuildHasherDefault<IdHasher>>;

/// Intervals become bits where they take more bytes: 8 each against an eighth for each offset up to the last.
const OFFSETS_PER_GAP: u32 = 64;
/// Bits become intervals again where there are so much fewer that turning to and fro costs nothing.
const OFFSETS_PER_GAP_AGAIN: u32 = 512;
/// So few intervals are kept as they are, however near they lie.
const FEW_GAPS: usize = 4;

/// What is missing.
#[derive(Clone, Debug)]
pub(super) enum Holes {
    /// Missing stretches `[start, end)`, ascending, each apart from the next.
    Gaps(Vec<(u32, u32)>),
    /// A bit for each offset.
    Bits(Bits),
}

impl Default for Holes {
    fn default() -> Self {
        Self::Gaps(Vec::new())
    }
}

impl Holes {
    pub(super) fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// How many missing stretches there are.
    #[inline]
    pub(super) fn count(&self) -> usize {
        match self {
            Self::Gaps(gaps) => gaps.len(),
            Self::Bits(bits) => bits.gaps(),
        }
    }

    /// Hands on the missing stretches, ascending.
    pub(super) fn each_gap(&self, mut take: impl FnMut(u32, u32)) {
        match self {
            Self::Gaps(gaps) => gaps.iter().for_each(|&(start, end)| take(start, end)),
            Self::Bits(bits) => bits.each(0, bits.end(), true, take),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Gaps(gaps) => gaps.capacity() * 8,
            Self::Bits(bits) => bits.bytes(),
        }
    }

    /// Asks for what lies where the offset will be looked for.
    #[inline]
    pub(super) fn prefetch(&self, offset: u32) {
        match self {
            Self::Gaps(gaps) => {
                if let Some(middle) = gaps.get(gaps.len() / 2) {
                    prefetch(middle);
                }
            }
            Self::Bits(bits) => bits.prefetch(offset),
        }
    }

    /// Whether the offset is missing.
    #[inline]
    pub(super) fn has(&self, offset: u32) -> bool {
        match self {
            Self::Gaps(gaps) => {
                let after = gaps.partition_point(|gap| gap.0 <= offset);
                after > 0 && offset < gaps[after - 1].1
            }
            Self::Bits(bits) => bits.has(offset),
        }
    }

    /// The first missing offset at or after `from`.
    pub(super) fn first_from(&self, from: u32) -> Option<u32> {
        match self {
            Self::Gaps(gaps) => {
                let after = gaps.partition_point(|gap| gap.1 <= from);
                gaps.get(after).map(|gap| gap.0.max(from))
            }
            Self::Bits(bits) => bits.first_from(from),
        }
    }

    /// Makes `[start, end)` missing; hands the stretches that weren't missing before to `newly`.
    pub(super) fn add(&mut self, start: u32, end: u32, mut newly: impl FnMut(u32, u32)) {
        if start >= end {
            return;
        }
        match self {
            Self::Bits(bits) => {
                bits.each(start, end, false, newly);
                bits.set(start, end);
            }
            Self::Gaps(gaps) => {
                add(gaps, start, end, &mut newly);
                self.as_bits_if_many();
            }
        }
    }

    /// Makes one offset missing; gives whether it wasn't before.
    #[inline]
    pub(super) fn add_one(&mut self, offset: u32) -> bool {
        match self {
            Self::Bits(bits) => bits.set_one(offset),
            Self::Gaps(_) => {
                let mut new = false;
                self.add(offset, offset + 1, |_, _| new = true);
                new
            }
        }
    }

    /// Fills `[start, end)`; hands the stretches that were missing before to `newly`.
    pub(super) fn fill(&mut self, start: u32, end: u32, mut newly: impl FnMut(u32, u32)) {
        if start >= end {
            return;
        }
        match self {
            Self::Bits(bits) => {
                bits.each(start, end, true, newly);
                bits.clear(start, end);
                self.as_gaps_if_few();
            }
            Self::Gaps(gaps) => {
                fill(gaps, start, end, &mut newly);
                self.as_bits_if_many();
            }
        }
    }

    /// Cuts what lies at or after `end`; gives the offset that held blocks really end at.
    pub(super) fn cut(&mut self, end: u32) -> u32 {
        match self {
            Self::Bits(bits) => {
                let end = bits.cut(end);
                self.as_gaps_if_few();
                end
            }
            Self::Gaps(gaps) => {
                let keep = gaps.partition_point(|gap| gap.0 < end);
                gaps.truncate(keep);
                match gaps.last() {
                    Some(&(start, gap_end)) if gap_end >= end => {
                        gaps.pop();
                        start
                    }
                    Some(_) | None => end,
                }
            }
        }
    }

    fn as_bits_if_many(&mut self) {
        let Self::Gaps(gaps) = self else { return };
        let end = gaps.last().map_or(0, |gap| gap.1);
        if gaps.len() <= FEW_GAPS || (end / OFFSETS_PER_GAP) as usize >= gaps.len() {
            return;
        }
        let mut bits = Bits::default();
        gaps.iter().for_each(|&(start, end)| bits.set(start, end));
        *self = Self::Bits(bits);
    }

    fn as_gaps_if_few(&mut self) {
        let Self::Bits(bits) = self else { return };
        if bits.gaps() > FEW_GAPS / 2 && (bits.end() / OFFSETS_PER_GAP_AGAIN) as usize <= bits.gaps() {
            return;
        }
        let mut gaps = Vec::with_capacity(bits.gaps());
        bits.each(0, bits.end(), true, |start, end| gaps.push((start, end)));
        *self = Self::Gaps(gaps);
    }
}

fn add(gaps: &mut Vec<(u32, u32)>, start: u32, end: u32, newly: &mut impl FnMut(u32, u32)) {
    // Gaps that touch or overlap the new one merge with it.
    let first = gaps.partition_point(|gap| gap.1 < start);
    let last = gaps.partition_point(|gap| gap.0 <= end);
    let mut at = start;
    for gap in &gaps[first..last] {
        if at < gap.0.min(end) {
            newly(at, gap.0.min(end));
        }
        at = at.max(gap.1);
    }
    if at < end {
        newly(at, end);
    }
    if first == last {
        gaps.insert(first, (start, end));
    } else {
        gaps[first] = (gaps[first].0.min(start), gaps[last - 1].1.max(end));
        gaps.drain(first + 1..last);
    }
}

fn fill(gaps: &mut Vec<(u32, u32)>, start: u32, end: u32, newly: &mut impl FnMut(u32, u32)) {
    let first = gaps.partition_point(|gap| gap.1 <= start);
    let last = gaps.partition_point(|gap| gap.0 < end);
    if first >= last {
        return;
    }
    for gap in &gaps[first..last] {
        newly(gap.0.max(start), gap.1.min(end));
    }
    let before = (gaps[first].0, start);
    let after = (end, gaps[last - 1].1);
    let keep = [before, after].into_iter().filter(|gap| gap.0 < gap.1);
    gaps.splice(first..last, keep);
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// What is missing, as the plainest model keeps it.
    fn gaps(missing: &[bool]) -> Vec<(u32, u32)> {
        let mut gaps: Vec<(u32, u32)> = Vec::new();
        for at in (0..missing.len()).filter(|&at| missing[at]) {
            match gaps.last_mut() {
                Some(last) if last.1 == at as u32 => last.1 += 1,
                _ => gaps.push((at as u32, at as u32 + 1)),
            }
        }
        gaps
    }

    #[test]
    fn intervals_and_bits_say_what_a_row_of_flags_says() {
        let mut turns = 0;
        for seed in 0..60 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let len = rng.random_range(1..700u32);
            let mut missing = vec![false; len as usize];
            let mut holes = Holes::default();
            for _ in 0..400 {
                let was_bits = matches!(holes, Holes::Bits(_));
                let start = rng.random_range(0..len);
                let most = if rng.random_bool(0.9) { 3 } else { len };
                let end = (start + rng.random_range(1..=most)).min(len);
                let set = rng.random_bool(if seed % 2 == 0 { 0.5 } else { 0.8 });
                let mut newly = Vec::new();
                if set {
                    holes.add(start, end, |from, to| newly.extend(from..to));
                } else {
                    holes.fill(start, end, |from, to| newly.extend(from..to));
                }
                let changed: Vec<u32> = (start..end).filter(|&at| missing[at as usize] != set).collect();
                assert_eq!(newly, changed);
                missing[start as usize..end as usize].fill(set);
                if rng.random_bool(0.02) {
                    let cut = rng.random_range(0..=len);
                    let end = (0..cut).rev().find(|&at| !missing[at as usize]).map_or(0, |at| at + 1);
                    assert_eq!(holes.cut(cut), end);
                    missing[end as usize..].fill(false);
                }
                let mut found = Vec::new();
                holes.each_gap(|start, end| found.push((start, end)));
                assert_eq!(found, gaps(&missing));
                assert_eq!(holes.count(), found.len());
                let one = rng.random_range(0..len);
                assert_eq!(holes.add_one(one), !missing[one as usize]);
                missing[one as usize] = true;
                assert_eq!(holes.count(), gaps(&missing).len());
                let from = rng.random_range(0..len);
                assert_eq!(holes.has(from), missing[from as usize]);
                assert_eq!(holes.first_from(from), (from..len).find(|&at| missing[at as usize]));
                turns += u32::from(was_bits != matches!(holes, Holes::Bits(_)));
            }
        }
        assert!(turns > 60, "bits came or went {turns} times");
    }
}
