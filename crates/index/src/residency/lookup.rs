//! Reading: where a block lies, and how much of a prompt each holder holds.

use cairn_blocks::{BlockKey, Depth};

use super::Residency;
use super::run::{RunId, Share};
use super::runs::Spot;
use crate::HolderId;

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
                go_on |= self.deepen(id, shares, base, common, out);
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
        let [first, .., last] = shares else {
            for share in shares {
                if let Some(depth) = out.get_mut(share.holder().0 as usize) {
                    all |= step(depth, self.whole_from(id, *share, 0));
                }
            }
            return all;
        };
        let (first, last) = (first.holder().0 as usize, last.holder().0 as usize);
        let neighbours = last - first == NEIGHBOURS - 1 && shares.len() == NEIGHBOURS;
        let whole = !shares.iter().fold(false, |holes, share| holes | share.holes());
        if neighbours
            && whole
            && let Some(depths) = out.get_mut(first..=last)
        {
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
    pub(super) fn locate(&self, holder: HolderId, key: BlockKey, depth: u32) -> Option<Spot> {
        let state = self.state(holder)?;
        let checked = |run: RunId| {
            let spot = self.runs.spot_of(run, key, depth)?;
            self.holds(holder, spot).then_some(spot)
        };
        for run in state
            .last
            .into_iter()
            .chain(state.moved.iter().flatten().map(|moved| moved.0))
        {
            if let Some(spot) = checked(run) {
                return Some(spot);
            }
        }
        let mut found = None;
        state.runs.find(key, |run| {
            found = checked(run);
            found.is_some()
        });
        if found.is_some() {
            return found;
        }
        state.runs.runs().find_map(checked)
    }
}
