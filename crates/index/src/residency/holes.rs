//! What a holder lacks inside its share of a run: sorted intervals of offsets that don't touch.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::run::RunId;
use crate::HolderId;

/// Holes by run and holder; looked up, never iterated in an order that matters.
pub(super) type HolesMap = HashMap<(RunId, HolderId), Holes, BuildHasherDefault<IdHasher>>;

/// Hashes a few small numbers by multiplication; ids are ours, so nobody can choose them to collide.
#[derive(Clone, Default)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 29)
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u32(u32::from(byte)));
    }

    fn write_u32(&mut self, number: u32) {
        self.0 = (self.0.rotate_left(32) ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// Missing stretches `[start, end)`, ascending, each apart from the next.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Holes {
    gaps: Vec<(u32, u32)>,
}

impl Holes {
    pub(super) fn is_empty(&self) -> bool {
        self.gaps.is_empty()
    }

    pub(super) fn gaps(&self) -> &[(u32, u32)] {
        &self.gaps
    }

    pub(super) fn bytes(&self) -> usize {
        self.gaps.capacity() * 8
    }

    /// Whether the offset is missing.
    pub(super) fn has(&self, offset: u32) -> bool {
        let after = self.gaps.partition_point(|gap| gap.0 <= offset);
        after > 0 && offset < self.gaps[after - 1].1
    }

    /// The first missing offset at or after `from`.
    pub(super) fn first_from(&self, from: u32) -> Option<u32> {
        let after = self.gaps.partition_point(|gap| gap.1 <= from);
        self.gaps.get(after).map(|gap| gap.0.max(from))
    }

    /// Makes `[start, end)` missing; hands the stretches that weren't missing before to `newly`.
    pub(super) fn add(&mut self, start: u32, end: u32, mut newly: impl FnMut(u32, u32)) {
        if start >= end {
            return;
        }
        // Gaps that touch or overlap the new one merge with it.
        let first = self.gaps.partition_point(|gap| gap.1 < start);
        let last = self.gaps.partition_point(|gap| gap.0 <= end);
        let mut at = start;
        for gap in &self.gaps[first..last] {
            if at < gap.0.min(end) {
                newly(at, gap.0.min(end));
            }
            at = at.max(gap.1);
        }
        if at < end {
            newly(at, end);
        }
        if first == last {
            self.gaps.insert(first, (start, end));
        } else {
            self.gaps[first] = (self.gaps[first].0.min(start), self.gaps[last - 1].1.max(end));
            self.gaps.drain(first + 1..last);
        }
    }

    /// Fills `[start, end)`; hands the stretches that were missing before to `newly`.
    pub(super) fn fill(&mut self, start: u32, end: u32, mut newly: impl FnMut(u32, u32)) {
        let first = self.gaps.partition_point(|gap| gap.1 <= start);
        let last = self.gaps.partition_point(|gap| gap.0 < end);
        if first >= last {
            return;
        }
        for gap in &self.gaps[first..last] {
            newly(gap.0.max(start), gap.1.min(end));
        }
        let before = (self.gaps[first].0, start);
        let after = (end, self.gaps[last - 1].1);
        let keep = [before, after].into_iter().filter(|gap| gap.0 < gap.1);
        self.gaps.splice(first..last, keep);
    }

    /// Cuts what lies at or after `end`; gives the offset that held blocks really end at.
    pub(super) fn cut(&mut self, end: u32) -> u32 {
        let keep = self.gaps.partition_point(|gap| gap.0 < end);
        self.gaps.truncate(keep);
        match self.gaps.last() {
            Some(&(start, gap_end)) if gap_end >= end => {
                self.gaps.pop();
                start
            }
            Some(_) | None => end,
        }
    }
}
