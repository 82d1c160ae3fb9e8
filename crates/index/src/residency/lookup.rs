//! Reading: where a block lies, and how much of a prompt each holder holds.

use cairn_blocks::{BlockKey, Depth};

use super::Residency;
use super::lanes;
use super::run::{Run, RunId};
use super::runs::Spot;
use super::shares::Share;
use crate::HolderId;

impl Residency {
    /// How many leading blocks of the chain `keys` each holder holds without a gap, by holder id.
    pub fn match_prefix(&self, keys: &[BlockKey], out: &mut Vec<u32>) {
        out.clear();
        let first = keys.first().and_then(|&first| self.runs.first(first));
        let Some(mut id) = first else {
            out.resize(self.holders.len(), 0);
            return;
        };
        let mut run = self.runs.get(id);
        let mut base = self.runs.common(run, 0, keys);
        let mut go_on = self.begin(id, run, base, out);
        while let Some(&next) = keys.get(base as usize).filter(|_| go_on) {
            let Some(child) = self.runs.child(id, base, next) else {
                return;
            };
            id = child;
            run = self.runs.get(id);
            let common = self.runs.common(run, 0, &keys[base as usize..]);
            go_on = self.deepen(id, run, base, common, out);
            base += common;
        }
    }

    /// Fills in how many of the first `common` keys of the run that a chain begins with each holder has; gives whether
    /// one of them may have all.
    #[inline]
    fn begin(&self, id: RunId, run: &Run, common: u32, out: &mut Vec<u32>) -> bool {
        let holders = self.holders.len();
        if let Some(row) = run.shares.row().filter(|row| row.is_whole()) {
            let first = holders.min(row.first() as usize);
            out.resize(first, 0);
            let ends = row.ends();
            lanes::begin(&ends[..ends.len().min(holders - first)], common, out);
            out.resize(holders, 0);
            return true;
        }
        out.resize(holders, 0);
        let mut all = false;
        for share in run.shares.iter() {
            let held = self.whole_from(id, share, 0).min(common);
            if let Some(depth) = out.get_mut(share.holder().0 as usize) {
                *depth = held;
            }
            all |= held == common;
        }
        all
    }

    /// Moves those holders of a run that hold all above it on by what they hold of its first `common` keys; gives
    /// whether one of them holds all of these.
    #[inline]
    fn deepen(&self, id: RunId, run: &Run, base: u32, common: u32, out: &mut [u32]) -> bool {
        if let Some(row) = run.shares.row().filter(|row| row.is_whole()) {
            let first = out.len().min(row.first() as usize);
            return lanes::deepen(row.ends(), base, common, &mut out[first..]);
        }
        let mut all = false;
        for share in run.shares.iter() {
            if let Some(depth) = out.get_mut(share.holder().0 as usize) {
                all |= lanes::step(depth, self.whole_from(id, share, 0), base, common);
            }
        }
        all
    }

    /// How deep that holder alone holds the chain `keys` without a gap from the block after `from`.
    #[must_use]
    pub fn match_from(&self, holder: HolderId, keys: &[BlockKey], from: Depth) -> Depth {
        let mut reached = from.0;
        let Some(mut id) = keys.first().and_then(|&first| self.runs.first(first)) else {
            return from;
        };
        let mut base = 0u32;
        loop {
            let run = self.runs.get(id);
            let common = self.runs.common(run, 0, &keys[base as usize..]);
            if base + common > reached {
                let Some(share) = run.shares.find(holder) else {
                    return Depth(reached);
                };
                let held = self.whole_from(id, share, reached - base).min(common);
                if base + held <= reached {
                    return Depth(reached);
                }
                reached = base + held;
                if held < common {
                    return Depth(reached);
                }
            }
            base += common;
            let Some(&next) = keys.get(base as usize) else {
                return Depth(reached);
            };
            match self.runs.child(id, base, next) {
                Some(child) => id = child,
                None => return Depth(reached),
            }
        }
    }

    /// The offset up to which the share is whole from `offset` on.
    fn whole_from(&self, run: RunId, share: Share, offset: u32) -> u32 {
        if !share.holes() {
            return share.cut();
        }
        let holes = &self.holes[&(run, share.holder())];
        holes.first_from(offset).unwrap_or_else(|| share.cut())
    }

    /// Whether the holder holds the block just above the place.
    fn holds(&self, holder: HolderId, spot: Spot) -> bool {
        let run = self.runs.get(spot.run);
        let Some(share) = run.shares.find(holder) else {
            return false;
        };
        spot.offset <= share.cut() && !(share.holes() && self.holes[&(spot.run, holder)].has(spot.offset - 1))
    }

    /// The place just after a block that the holder holds.
    pub(super) fn locate(&mut self, holder: HolderId, key: BlockKey, depth: u32) -> Option<Spot> {
        if self.reads_ahead()
            && let Some(place) = self.only_place(key, depth)
        {
            let spot = place.filter(|spot| self.holds(holder, *spot))?;
            self.count_inside(holder, spot);
            return Some(spot);
        }
        self.search(holder, key, depth)
    }

    /// The place just after a block, whoever holds it, or that there is none. Gives nothing where no table of all keys
    /// tells, or where it names several places: every copy must choose alike then, with a table or without.
    #[inline]
    pub(super) fn only_place(&self, key: BlockKey, depth: u32) -> Option<Option<Spot>> {
        let table = self.runs.middle.table()?;
        let (mut found, mut places) = (None, 0);
        table.each(key, |run| {
            let spot = self.runs.spot_of(run, key, depth);
            places += u32::from(spot.is_some());
            found = spot.or(found);
        });
        (places <= 1).then_some(found)
    }

    /// Counts an answer of the table of all keys that was worth its while: other tables find the end of a share.
    #[inline]
    fn count_inside(&mut self, holder: HolderId, spot: Spot) {
        let run = self.runs.get(spot.run);
        let share = run.shares.find(holder);
        if share.is_some_and(|share| spot.offset < share.cut()) {
            self.runs.middle.answered();
        }
    }

    /// [`Residency::locate`] where no table of all keys answers.
    fn search(&mut self, holder: HolderId, key: BlockKey, depth: u32) -> Option<Spot> {
        let state = self.state(holder)?;
        let checked = |run: RunId| {
            let spot = self.runs.spot_of(run, key, depth)?;
            self.holds(holder, spot).then_some(spot)
        };
        let [stored, removed] = state.last;
        if let Some(spot) = checked(stored).or_else(|| checked(removed)) {
            return Some(spot);
        }
        let mut moved = state.moved.iter().flatten().map(|moved| moved.0);
        if let Some(spot) = moved.find_map(checked) {
            return Some(spot);
        }
        let mut found = None;
        state.runs.find(key, |run| {
            found = checked(run);
            found.is_some()
        });
        if found.is_some() {
            return found;
        }
        found = state.runs.runs().find_map(checked);
        let passed = state.runs.len();
        if !self.reads_ahead() && self.runs.middle.passed(passed, self.runs.known, self.runs.runs.len()) {
            self.runs.enter_some();
        }
        found
    }
}
