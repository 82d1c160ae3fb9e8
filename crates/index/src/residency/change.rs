//! Writing: stores, removals, clears.

use cairn_blocks::{BlockKey, Depth};
use smallvec::SmallVec;

use super::run::RunId;
use super::runs::{Below, Spot};
use super::shares::Share;
use super::{Cursor, DEPTH_MAX, Removed, Residency, Stored};
use crate::{HolderId, mix};

/// A stretch of one run.
#[derive(Clone, Copy)]
struct Stretch {
    run: RunId,
    start: u32,
    end: u32,
}

/// What of a chain was found, and where the rest belongs.
struct Walk {
    stretches: SmallVec<[Stretch; 8]>,
    /// Keys found.
    found: usize,
    /// Just after the last found one; none at the root.
    end: Option<Spot>,
}

impl Residency {
    /// The holder now holds `keys[skip..]`, a stretch of one chain below `anchor`.
    ///
    /// `anchor` is the chain's root key where `anchor_depth` is 0, else a block that the holder holds at that depth.
    /// The first `skip` keys only name ancestors.
    pub fn store(
        &mut self,
        holder: HolderId,
        anchor: BlockKey,
        anchor_depth: Depth,
        skip: u32,
        keys: &[BlockKey],
    ) -> Stored {
        self.store_beside(holder, &[], anchor, anchor_depth, skip, keys)
    }

    /// Like [`Residency::store`], but the anchor may also be held by one of `beside`, the other caches of that source.
    pub fn store_beside(
        &mut self,
        holder: HolderId,
        beside: &[HolderId],
        anchor: BlockKey,
        anchor_depth: Depth,
        skip: u32,
        keys: &[BlockKey],
    ) -> Stored {
        let Some(state) = self.state(holder) else {
            return Stored::UnknownHolder;
        };
        let last = state.last[Cursor::Store as usize];
        let deep = usize::try_from(DEPTH_MAX.saturating_sub(anchor_depth.0)).unwrap_or(0);
        if keys.len() > deep || self.weight() >= self.weight_max {
            return Stored::Full;
        }
        if skip == 0
            && let Some(share) = self.ends_with(last, holder, anchor, anchor_depth.0, keys)
        {
            return Stored::Done {
                new_blocks: self.lengthen(share, last, keys),
            };
        }
        let at = match anchor_depth.0 {
            0 => None,
            depth => {
                let own = self.locate(holder, anchor, depth);
                let others = || {
                    let mut others = beside.iter().filter(|&&b| b != holder);
                    others.find_map(|&b| self.locate(b, anchor, depth))
                };
                match own.or_else(others) {
                    Some(spot) => Some(spot),
                    None => return Stored::UnknownAnchor,
                }
            }
        };
        if skip as usize >= keys.len() {
            return Stored::Done { new_blocks: 0 };
        }
        let Some(walk) = self.walk(at, anchor, keys) else {
            return Stored::Refused;
        };
        Stored::Done {
            new_blocks: self.store_walked(holder, anchor, skip, keys, &walk),
        }
    }

    /// The holder's share of the run that it stored to last, where these keys just lengthen both, as while it decodes.
    #[inline]
    fn ends_with(&self, id: RunId, holder: HolderId, anchor: BlockKey, depth: u32, keys: &[BlockKey]) -> Option<Share> {
        let run = self.runs.runs.get(id.0 as usize)?;
        let &first = keys.first()?;
        if run.last != anchor || run.len == 0 || run.base + run.len != depth {
            return None;
        }
        let share = run.shares.find(holder)?;
        let at = Spot {
            run: id,
            offset: run.len,
        };
        let is_new = || matches!(self.runs.below(Some(at), anchor, first), Below::Nothing);
        (share.cut() == run.len && is_new()).then_some(share)
    }

    /// Adds keys to the end of a run, and to the share that ends there.
    #[inline]
    fn lengthen(&mut self, share: Share, id: RunId, keys: &[BlockKey]) -> u32 {
        let holder = share.holder();
        let run = self.runs.get_mut(id);
        let old_end = run.last;
        run.shares
            .set(Share::new(holder, run.len + keys.len() as u32, share.holes()));
        self.runs.extend(id, keys);
        self.state_mut(holder)
            .expect("the caller found the share")
            .digest
            .add_all(keys);
        self.move_end(holder, Cursor::Store, id, old_end);
        keys.len() as u32
    }

    /// Follows `keys` through the runs from `at`, or from the root; none where a key is known elsewhere.
    fn walk(&self, at: Option<Spot>, root: BlockKey, keys: &[BlockKey]) -> Option<Walk> {
        let mut walk = Walk {
            stretches: SmallVec::new(),
            found: 0,
            end: at,
        };
        loop {
            if let Some(spot) = &mut walk.end {
                let run = self.runs.get(spot.run);
                let common = self.runs.common(run, spot.offset, &keys[walk.found..]);
                if common > 0 {
                    let end = spot.offset + common;
                    walk.stretches.push(Stretch {
                        run: spot.run,
                        start: spot.offset,
                        end,
                    });
                    spot.offset = end;
                    walk.found += common as usize;
                }
            }
            let Some(&next) = keys.get(walk.found) else {
                return Some(walk);
            };
            match self.runs.below(walk.end, root, next) {
                Below::Run(run) => walk.end = Some(Spot { run, offset: 0 }),
                Below::Elsewhere => return None,
                Below::Nothing => return Some(walk),
            }
        }
    }

    /// Gives the holder what was found, and makes or extends a run for the rest.
    fn store_walked(&mut self, holder: HolderId, root: BlockKey, skip: u32, keys: &[BlockKey], walk: &Walk) -> u32 {
        let mut new_blocks = 0;
        let mut left = skip;
        for stretch in &walk.stretches {
            let passed = left.min(stretch.end - stretch.start);
            left -= passed;
            if stretch.start + passed < stretch.end {
                new_blocks += self.hold(
                    holder,
                    Stretch {
                        start: stretch.start + passed,
                        ..*stretch
                    },
                );
            }
        }
        let rest = &keys[walk.found..];
        let mut last = walk.end.map(|end| end.run);
        if !rest.is_empty() {
            let run = match walk.end {
                Some(at) if at.offset == self.runs.get(at.run).len => {
                    self.runs.extend(at.run, rest);
                    at.run
                }
                Some(_) | None => self.runs.add(walk.end, root, rest),
            };
            let end = self.runs.get(run).len;
            let start = end - rest.len() as u32 + left;
            new_blocks += self.hold(holder, Stretch { run, start, end });
            last = Some(run);
        }
        if let (Some(state), Some(last)) = (self.state_mut(holder), last) {
            state.last[Cursor::Store as usize] = last;
        }
        new_blocks
    }

    /// The holder holds a stretch now; gives the number of its blocks that it didn't hold before.
    fn hold(&mut self, holder: HolderId, stretch: Stretch) -> u32 {
        let Stretch { run: id, start, end } = stretch;
        let state = self.holders[holder.0 as usize]
            .as_mut()
            .expect("the caller checked the holder");
        let run = self.runs.get(id);
        let mut new_blocks = 0u32;
        let mut sum = 0u64;
        let mut newly = |start, end| {
            new_blocks += end - start;
            sum = sum.wrapping_add(self.runs.mix(run, start, end));
        };
        let share = run.shares.find(holder);
        let old_cut = share.map_or(0, Share::cut);
        let mut has_holes = share.is_some_and(Share::holes);
        if start > old_cut {
            let holes = self.holes.entry((id, holder)).or_default();
            self.gaps -= holes.count() as u64;
            holes.add(old_cut, start, |_, _| {});
            self.gaps += holes.count() as u64;
            has_holes = true;
        } else if has_holes {
            let holes = self.holes.get_mut(&(id, holder)).expect("the share is marked");
            self.gaps -= holes.count() as u64;
            holes.fill(start, end.min(old_cut), &mut newly);
            self.gaps += holes.count() as u64;
            if holes.is_empty() {
                self.holes.remove(&(id, holder));
                has_holes = false;
            }
        }
        if end > old_cut {
            newly(start.max(old_cut), end);
        }
        let cut = end.max(old_cut);
        let old_end = match old_cut {
            0 => {
                state.runs.insert(self.runs.key(run, cut - 1), id);
                None
            }
            old_cut if old_cut < cut => Some(self.runs.key(run, old_cut - 1)),
            _ => None,
        };
        state.digest.blocks += u64::from(new_blocks);
        state.digest.digest = state.digest.digest.wrapping_add(sum);
        let new = Share::new(holder, cut, has_holes);
        if share != Some(new) {
            self.shares += u64::from(self.runs.get_mut(id).shares.set(new));
        }
        if let Some(old_end) = old_end {
            self.move_end(holder, Cursor::Store, id, old_end);
        }
        new_blocks
    }

    /// The holder no longer holds `count` neighbouring blocks of one chain, of which `key` at `depth` is the deepest.
    ///
    /// Nothing happens where the holder doesn't hold `key` at `depth`; blocks above it that it doesn't hold are passed over.
    pub fn remove(&mut self, holder: HolderId, key: BlockKey, depth: Depth, count: u32) -> Removed {
        if let Some(run) = self.ends_with_removed(holder, key, depth.0, count) {
            self.shorten(holder, run, count);
            return Removed { blocks: count };
        }
        if count == 1
            && self.reads_ahead()
            && self.state(holder).is_some()
            && let Some(place) = self.only_place(key, depth.0)
        {
            return place.map_or_else(Removed::default, |spot| self.remove_one(holder, key, spot));
        }
        let Some(mut spot) = self.locate(holder, key, depth.0) else {
            return Removed::default();
        };
        let mut left = count.min(depth.0);
        let mut blocks = 0;
        while left > 0 {
            let run = self.runs.get(spot.run);
            let stretch = Stretch {
                run: spot.run,
                start: spot.offset.saturating_sub(left),
                end: spot.offset,
            };
            left -= stretch.end - stretch.start;
            // Where the next removal goes on; found before the run may go.
            let next = match run.parent {
                _ if stretch.start > 0 => Spot {
                    run: spot.run,
                    offset: stretch.start,
                },
                RunId::NONE => Spot::NONE,
                parent => Spot {
                    run: parent,
                    offset: run.base - self.runs.get(parent).base,
                },
            };
            blocks += self.unhold(holder, stretch);
            if next == Spot::NONE {
                break;
            }
            spot = next;
        }
        self.removed_from(holder, spot.run);
        Removed { blocks }
    }

    /// The run that the holder removed from last, where its last blocks are just those that are to go, are the last of the
    /// holder's whole share too, and leave some of it: as where a chain is evicted from its end.
    fn ends_with_removed(&self, holder: HolderId, key: BlockKey, depth: u32, count: u32) -> Option<RunId> {
        let [stored, id] = self.state(holder)?.last;
        let run = self.runs.runs.get(id.0 as usize)?;
        if run.last != key || run.base + run.len != depth || count == 0 || count >= run.len {
            return None;
        }
        let share = run.shares.find(holder)?;
        // What was stored to last is looked through first.
        let is_first = stored == id || self.runs.spot_of(stored, key, depth).is_none();
        (share.cut() == run.len && !share.holes() && is_first).then_some(id)
    }

    /// Takes the last keys of a run out of the share of the holder that ends there.
    fn shorten(&mut self, holder: HolderId, id: RunId, count: u32) {
        let run = self.runs.get_mut(id);
        let (old_end, old_len) = (run.last, run.len);
        let cut = old_len - count;
        run.shares.set(Share::new(holder, cut, false));
        let sum = match count {
            1 => mix(old_end),
            _ => self.runs.mix(self.runs.get(id), cut, old_len),
        };
        let digest = &mut self.state_mut(holder).expect("the caller found the share").digest;
        digest.blocks -= u64::from(count);
        digest.digest = digest.digest.wrapping_sub(sum);
        self.move_end(holder, Cursor::Removal, id, old_end);
        self.runs.trim(id);
    }

    /// Like [`Residency::remove`] for the one block just above a place, which the holder may lack.
    fn remove_one(&mut self, holder: HolderId, key: BlockKey, spot: Spot) -> Removed {
        let start = spot.offset - 1;
        let run = self.runs.get(spot.run);
        let Some(share) = run.shares.find(holder).filter(|share| spot.offset <= share.cut()) else {
            return Removed::default();
        };
        if 0 < start && spot.offset < share.cut() {
            return self.remove_inside(holder, key, spot, share);
        }
        // The next block is that above, which may lie in another run; found before this one may go.
        let next = if start > 0 || run.parent == RunId::NONE {
            spot.run
        } else {
            run.parent
        };
        let inside = run.len != spot.offset;
        let stretch = Stretch {
            run: spot.run,
            start,
            end: spot.offset,
        };
        let blocks = self.unhold(holder, stretch);
        if blocks > 0 {
            if inside {
                self.runs.middle.answered();
            }
            self.removed_from(holder, next);
        }
        Removed { blocks }
    }

    /// Like [`Residency::remove_one`] where the share has blocks of the run on both sides of it: its end stays, and so does the run.
    fn remove_inside(&mut self, holder: HolderId, key: BlockKey, spot: Spot, share: Share) -> Removed {
        let holes = if share.holes() {
            self.holes.get_mut(&(spot.run, holder)).expect("the share is marked")
        } else {
            let run = self.runs.get_mut(spot.run);
            run.shares.set(Share::new(holder, share.cut(), true));
            self.holes.entry((spot.run, holder)).or_default()
        };
        let before = holes.count() as u64;
        if !holes.add_one(spot.offset - 1) {
            return Removed::default();
        }
        self.gaps = self.gaps + holes.count() as u64 - before;
        self.runs.middle.answered();
        let state = self.state_mut(holder).expect("the caller checked the holder");
        state.digest.remove(key);
        state.last[Cursor::Removal as usize] = spot.run;
        Removed { blocks: 1 }
    }

    /// The holder's next removal is likely to concern that run.
    fn removed_from(&mut self, holder: HolderId, run: RunId) {
        // A cursor is only ever at a run that the holder has a share of, so it never outlives the run.
        let shared = self.runs.get(run).shares.find(holder).is_some();
        if let Some(state) = self.state_mut(holder).filter(|_| shared) {
            state.last[Cursor::Removal as usize] = run;
        }
    }

    /// The holder holds nothing of a stretch any more; gives the number of its blocks that it held.
    fn unhold(&mut self, holder: HolderId, stretch: Stretch) -> u32 {
        let Stretch { run: id, start, end } = stretch;
        let state = self.holders[holder.0 as usize]
            .as_mut()
            .expect("the caller checked the holder");
        let run = self.runs.get(id);
        let Some(share) = run.shares.find(holder) else {
            return 0;
        };
        let (old_cut, end) = (share.cut(), end.min(share.cut()));
        if start >= end {
            return 0;
        }
        let mut removed = 0u32;
        let mut sum = 0u64;
        let cut;
        let mut has_holes = share.holes();
        if has_holes || end < old_cut {
            let holes = self.holes.entry((id, holder)).or_default();
            self.gaps -= holes.count() as u64;
            holes.add(start, end, |start, end| {
                removed += end - start;
                sum = sum.wrapping_add(self.runs.mix(run, start, end));
            });
            // Only what reaches the end can move it.
            cut = if end == old_cut { holes.cut(old_cut) } else { old_cut };
            self.gaps += holes.count() as u64;
            has_holes = !holes.is_empty();
            if !has_holes {
                self.holes.remove(&(id, holder));
            }
        } else {
            removed = end - start;
            sum = self.runs.mix(run, start, end);
            cut = start;
        }
        state.digest.blocks -= u64::from(removed);
        state.digest.digest = state.digest.digest.wrapping_sub(sum);
        if cut == old_cut {
            if has_holes != share.holes() {
                self.runs.get_mut(id).shares.set(Share::new(holder, cut, has_holes));
            }
            return removed;
        }
        let old_end = self.runs.key(run, old_cut - 1);
        if cut > 0 {
            self.runs.get_mut(id).shares.set(Share::new(holder, cut, has_holes));
            self.move_end(holder, Cursor::Removal, id, old_end);
        } else {
            let moved = state
                .moved
                .iter_mut()
                .find(|moved| moved.is_some_and(|moved| moved.0 == id));
            let end = moved.and_then(Option::take).map_or(old_end, |moved| moved.1);
            state.runs.remove(end, id);
            state
                .last
                .iter_mut()
                .filter(|last| **last == id)
                .for_each(|last| *last = RunId::NONE);
            self.runs.get_mut(id).shares.remove(holder);
            self.shares -= 1;
        }
        self.runs.trim(id);
        removed
    }

    /// Empties a holder, in time proportional to its runs.
    pub fn clear(&mut self, holder: HolderId) {
        let Some(state) = self.state_mut(holder) else { return };
        let runs = std::mem::replace(state, super::HolderState::new()).runs;
        for id in runs.runs() {
            let run = self.runs.get_mut(id);
            let share = run
                .shares
                .find(holder)
                .expect("the holder's table names the runs that it has a share of");
            run.shares.remove(holder);
            self.shares -= 1;
            if share.holes() {
                let holes = self.holes.remove(&(id, holder)).unwrap_or_default();
                self.gaps -= holes.count() as u64;
            }
            self.runs.trim(id);
        }
    }
}
