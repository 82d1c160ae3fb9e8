//! Reading: where a block lies, and how much of a prompt each holder holds.

use cairn_blocks::{BlockKey, Depth};

use super::Residency;
use super::arena::CHUNK_KEYS;
use super::run::{RunId, Share};
use super::runs::Spot;
use crate::HolderId;

/// Changes whose blocks are read ahead together: what they read stays near until it is used.
pub const READ_AHEAD: usize = 16;

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
        self.locate_inside(holder, key, depth)
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
        let mut places = [(RunId::NONE, HolderId(0), 0usize); READ_AHEAD];
        let mut count = 0;
        for (place, (holder, key, depth)) in places.iter_mut().zip(blocks) {
            *place = (table.guess(key).unwrap_or(RunId::NONE), holder, depth.0 as usize);
            count += 1;
        }
        let places = &mut places[..count];
        for (run, _, depth) in &mut *places {
            // Now an offset, where the guess was right.
            let base = self.runs.runs.get(run.0 as usize).map_or(0, |run| run.base as usize);
            *depth = depth.wrapping_sub(base).wrapping_sub(1);
        }
        let mut seen = 0u64;
        for (run, holder, offset) in &*places {
            let Some(found) = self.runs.runs.get(run.0 as usize) else {
                continue;
            };
            if let Some(chunk) = found.chunks.get(offset / CHUNK_KEYS) {
                seen ^= self.runs.arena.chunk(*chunk)[offset % CHUNK_KEYS].0;
            }
            seen ^= found.shares.len() as u64;
            let holes = self.holes.get(&(*run, *holder)).and_then(|holes| holes.gaps().first());
            seen ^= holes.map_or(0, |gap| u64::from(gap.0));
        }
        std::hint::black_box(seen);
    }

    /// Like [`Residency::locate`], for a block at none of the places where holders mostly change something.
    fn locate_inside(&mut self, holder: HolderId, key: BlockKey, depth: u32) -> Option<Spot> {
        let state = self.state(holder)?;
        let checked = |run: RunId| {
            let spot = self.runs.spot_of(run, key, depth)?;
            self.holds(holder, spot).then_some(spot)
        };
        let Some(table) = self.runs.middle.table() else {
            let found = state.runs.runs().find_map(checked);
            let passed = state.runs.len();
            if self.runs.middle.passed(passed, self.runs.known) {
                self.runs.enter_some();
            }
            return found;
        };
        let (mut found, mut several) = (None, false);
        table.find(key, |run| {
            let spot = checked(run);
            several |= found.is_some() && spot.is_some() && spot != found;
            found = found.or(spot);
            false
        });
        if several {
            // Every copy must choose alike, with a table or without.
            found = state.runs.runs().find_map(checked);
        }
        self.runs.middle.answered();
        found
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
