//! Reading: where a block lies, and how much of a prompt each holder holds.

use cairn_blocks::{BlockKey, Depth};

use super::Residency;
use super::arena::{CHUNK_KEYS, ChunkId};
use super::run::{RunId, Share};
use super::runs::Spot;
use crate::HolderId;

/// Changes whose blocks are read ahead together: what they read stays near until it is used.
pub const READ_AHEAD: usize = 32;

/// Holders with neighbouring ids are looked at so many at a time, as vectors.
const NEIGHBOURS: usize = 8;

impl Residency {
    /// How many leading blocks of the chain `keys` each holder holds without a gap, by holder id.
    pub fn match_prefix(&self, keys: &[BlockKey], out: &mut Vec<u32>) {
        out.clear();
        out.resize(self.holders.len(), 0);
        let Some(&first) = keys.first() else { return };
        let Some(mut id) = self.runs.first(first) else { return };
        let mut base = 0u32;
        loop {
            let run = self.runs.get(id);
            let rest = &keys[base as usize..];
            let common = self.runs.common(run, 0, rest);
            let mut go_on = false;
            for shares in run.shares.chunks(NEIGHBOURS) {
                go_on |= if base == 0 {
                    self.begin(id, shares, common, out)
                } else {
                    self.deepen(id, shares, base, common, out)
                };
            }
            base += common;
            let Some(&next) = keys.get(base as usize) else { return };
            if !go_on {
                return;
            }
            match self.runs.child(id, base, next) {
                Some(child) => id = child,
                None => return,
            }
        }
    }

    /// Like [`Residency::deepen`] for the run that a chain begins with: nobody came anywhere before.
    #[inline]
    fn begin(&self, id: RunId, shares: &[Share], common: u32, out: &mut [u32]) -> bool {
        let mut all = false;
        if let Some(depths) = neighbours(shares, out) {
            for (depth, share) in depths.iter_mut().zip(shares) {
                *depth = share.cut().min(common);
                all |= share.cut() >= common;
            }
            return all;
        }
        for share in shares {
            let held = self.whole_from(id, *share, 0);
            if let Some(depth) = out.get_mut(share.holder().0 as usize) {
                *depth = held.min(common);
            }
            all |= held >= common;
        }
        all
    }

    /// Moves those of a few holders of a run that hold all above it on by what they hold of its first `common` keys; gives
    /// whether one of them holds all of these.
    #[inline]
    fn deepen(&self, id: RunId, shares: &[Share], base: u32, common: u32, out: &mut [u32]) -> bool {
        // Without branches: whether a holder came this far is hard to guess where many share a run.
        let step = |depth: &mut u32, held: u32| {
            let here = *depth == base;
            *depth = if here { base + held.min(common) } else { *depth };
            here & (held >= common)
        };
        let mut all = false;
        if let Some(depths) = neighbours(shares, out) {
            for (depth, share) in depths.iter_mut().zip(shares) {
                all |= step(depth, share.cut());
            }
            return all;
        }
        for share in shares {
            if let Some(depth) = out.get_mut(share.holder().0 as usize) {
                all |= step(depth, self.whole_from(id, *share, 0));
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
                let Ok(share) = run.share(holder) else {
                    return Depth(reached);
                };
                let held = self.whole_from(id, run.shares[share], reached - base).min(common);
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
        let Ok(at) = run.share(holder) else { return false };
        let share = run.shares[at];
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
        let inside = run.share(holder).is_ok_and(|at| spot.offset < run.shares[at].cut());
        if inside {
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
            let share = run.share(place.holder).map_or(0, |at| run.shares[at].cut());
            seen ^= u64::from(share);
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

/// Where the depths of a few holders lie, if they have neighbouring ids, are enough for vectors and lack nothing.
#[inline]
fn neighbours<'a>(shares: &[Share], out: &'a mut [u32]) -> Option<&'a mut [u32]> {
    let shares: &[Share; NEIGHBOURS] = shares.try_into().ok()?;
    let first = shares[0].holder().0 as usize;
    let last = shares[NEIGHBOURS - 1].holder().0 as usize;
    let whole = !shares.iter().fold(false, |holes, share| holes | share.holes());
    if last - first == NEIGHBOURS - 1 && whole {
        out.get_mut(first..=last)
    } else {
        None
    }
}
