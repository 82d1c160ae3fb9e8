//! Reading: where a block lies, and how much of a prompt each holder holds.

use cairn_blocks::{BlockKey, Depth};

use super::Residency;
use super::arena::{CHUNK_KEYS, ChunkId};
use super::run::{Run, RunId};
use super::runs::Spot;
use super::shares::Share;
use crate::HolderId;

/// Changes whose blocks are read ahead together: what they read stays near until it is used.
pub const READ_AHEAD: usize = 32;

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
            let ends = &ends[..ends.len().min(holders - first)];
            out.extend(ends.iter().map(|&end| least(end, common)));
            out.resize(holders, 0);
            return true;
        }
        out.resize(holders, 0);
        let mut all = false;
        for share in run.shares.iter() {
            let held = least(self.whole_from(id, share, 0), common);
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
        // Without branches: whether a holder came this far is hard to guess where many share a run.
        let step = |depth: &mut u32, held: u32| {
            let more = if *depth == base { least(held, common) } else { 0 };
            *depth += more;
            more == common
        };
        let mut all = false;
        if let Some(row) = run.shares.row().filter(|row| row.is_whole()) {
            let first = out.len().min(row.first() as usize);
            for (depth, end) in out[first..].iter_mut().zip(row.ends()) {
                all |= step(depth, *end);
            }
            return all;
        }
        for share in run.shares.iter() {
            if let Some(depth) = out.get_mut(share.holder().0 as usize) {
                all |= step(depth, self.whole_from(id, share, 0));
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
        match self.only_place(key, depth) {
            Some(place) => {
                let spot = place.filter(|spot| self.holds(holder, *spot))?;
                self.count_inside(holder, spot);
                Some(spot)
            }
            None => self.search(holder, key, depth),
        }
    }

    /// The place just after a block, whoever holds it, or that there is none. Gives nothing where no table of all keys
    /// tells, or where it names several places: every copy must choose alike then, with a table or without.
    #[inline]
    pub(super) fn only_place(&self, key: BlockKey, depth: u32) -> Option<Option<Spot>> {
        let table = self.runs.middle.table()?;
        let (mut found, mut places) = (None, 0);
        table.find(key, |run| {
            let spot = self.runs.spot_of(run, key, depth);
            places += u32::from(spot.is_some());
            found = spot.or(found);
            false
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
        if !self.reads_ahead() && self.runs.middle.passed(passed, self.runs.known) {
            self.runs.enter_some();
        }
        found
    }

    /// Whether [`Residency::read_ahead`] does anything now.
    #[inline]
    #[must_use]
    pub fn reads_ahead(&self) -> bool {
        self.runs.middle.table().is_some()
    }

    /// Reads ahead what changes of these blocks will look at, each given as [`Op::block`](crate::Op::block) does: their
    /// waits for memory overlap then. Done only where blocks inside runs are asked for often; changes nothing.
    pub fn read_ahead(&self, blocks: impl Iterator<Item = (HolderId, BlockKey, Depth)>) {
        let Some(table) = self.runs.middle.table() else { return };
        // In steps: a load of one step waits for one of the step before, and all loads of a step wait together.
        let mut ahead = [Ahead::default(); READ_AHEAD];
        let mut count = 0;
        for (place, (holder, key, depth)) in ahead.iter_mut().zip(blocks) {
            *place = Ahead {
                run: table.guess(key).unwrap_or(RunId::NONE),
                holder,
                offset: depth.0,
                chunk: None,
            };
            count += 1;
        }
        let ahead = &mut ahead[..count];
        let mut seen = 0;
        for place in &mut *ahead {
            let Some(run) = self.runs.runs.get(place.run.0 as usize) else {
                continue;
            };
            // Right where the guess was.
            place.offset = place.offset.wrapping_sub(run.base).wrapping_sub(1);
            seen ^= run.shares.len() as u64;
        }
        for place in &mut *ahead {
            let Some(run) = self.runs.runs.get(place.run.0 as usize) else {
                continue;
            };
            place.chunk = run.chunks.get(place.offset as usize / CHUNK_KEYS).copied();
            seen ^= run.shares.find(place.holder).map_or(0, |share| u64::from(share.cut()));
        }
        for place in &*ahead {
            if let Some(chunk) = place.chunk {
                seen ^= self.runs.arena.chunk(chunk)[place.offset as usize % CHUNK_KEYS].0;
            }
            let holes = self.holes.get(&(place.run, place.holder));
            seen ^= holes.map_or(0, |holes| holes.glance(place.offset as usize));
        }
        std::hint::black_box(seen);
    }
}

/// What is known of a block that is read ahead.
#[derive(Clone, Copy)]
struct Ahead {
    run: RunId,
    holder: HolderId,
    /// Its depth at first, its offset in the run once that is read.
    offset: u32,
    chunk: Option<ChunkId>,
}

impl Default for Ahead {
    fn default() -> Self {
        Self {
            run: RunId::NONE,
            holder: HolderId(0),
            offset: 0,
            chunk: None,
        }
    }
}

/// The smaller one of two numbers of blocks.
///
/// As signed numbers, which more processors compare as vectors; both are far below 2^31.
#[inline]
fn least(a: u32, b: u32) -> u32 {
    (a as i32).min(b as i32) as u32
}
