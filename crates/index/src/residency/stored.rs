//! The residency's part of a snapshot: every run with its place, keys and shares, parents before children.
//!
//! Runs, and the tables and cursors that find a holder's blocks in them, are written as they are, so that a restored copy
//! goes on exactly as the one that was written, even where an agent's keys contradict each other.

use std::io::{self, Read, Write};

use cairn_blocks::BlockKey;

use super::run::{Run, RunId};
use super::runs::{Below, Spot};
use super::shares::Share;
use super::table::KeyTable;
use super::{DEPTH_MAX, HolderState, Residency};
use crate::HolderId;
use crate::codec::{DecodeError, In, Out};

/// Where a run hangs: below a root.
const BELOW_ROOT: u64 = 0;

impl Residency {
    /// Writes all of it.
    pub(crate) fn put<W: Write>(&self, out: &mut Out<'_, W>) -> io::Result<()> {
        let order = self.parents_first();
        out.number(order.len() as u64)?;
        // Position in the order plus one, by run id.
        let mut position = vec![0u32; self.runs.runs.len()];
        for (at, id) in (1u32..).zip(&order) {
            position[id.0 as usize] = at;
            self.put_run(out, *id, &position)?;
        }
        self.holders
            .iter()
            .flatten()
            .try_for_each(|state| put_holder(out, state, &position))
    }

    /// Every run, those below roots first, each level in the order of its parents.
    fn parents_first(&self) -> Vec<RunId> {
        let ids = (0..self.runs.runs.len() as u32).map(RunId);
        let mut order: Vec<RunId> = ids
            .filter(|&id| self.runs.get(id).len > 0 && self.runs.get(id).parent == RunId::NONE)
            .collect();
        order.reserve(self.runs.live() - order.len());
        let mut next = 0;
        while let Some(&id) = order.get(next) {
            let mut child = self.runs.get(id).first_child;
            while child != RunId::NONE {
                order.push(child);
                child = RunId(self.runs.get(child).siblings[1]);
            }
            next += 1;
        }
        order
    }

    fn put_run<W: Write>(&self, out: &mut Out<'_, W>, id: RunId, position: &[u32]) -> io::Result<()> {
        let run = self.runs.get(id);
        if run.parent == RunId::NONE {
            out.number(BELOW_ROOT)?;
            out.key(run.root())?;
        } else {
            out.number(position[run.parent.0 as usize])?;
            out.number(run.base - self.runs.get(run.parent).base)?;
        }
        out.number(run.len)?;
        let mut written = Ok(());
        self.runs.each_stretch(run, 0, run.len, |keys| {
            if written.is_ok() {
                written = out.keys(keys);
            }
        });
        written?;
        out.number(run.shares.len() as u64)?;
        for share in run.shares.iter() {
            out.number(share.holder().0)?;
            out.number(u64::from(share.cut()) << 1 | u64::from(share.holes()))?;
            if share.holes() {
                let holes = &self.holes[&(id, share.holder())];
                out.number(holes.count() as u64)?;
                let mut written = Ok(());
                holes.each_gap(|start, end| {
                    if written.is_ok() {
                        written = out.number(start).and_then(|()| out.number(end));
                    }
                });
                written?;
            }
        }
        Ok(())
    }

    /// Reads what [`Residency::put`] wrote for these holders.
    pub(crate) fn read<R: Read>(
        input: &mut In<R>,
        holders: impl Iterator<Item = HolderId>,
    ) -> Result<Self, DecodeError> {
        let mut read = Self::new();
        holders.for_each(|holder| read.add_holder(holder));
        let count = input.count("the number of runs", u32::MAX as usize - 1)?;
        let mut keys = Vec::new();
        for at in 0..count {
            read.read_run(input, at as u32, &mut keys)?;
        }
        let ends_live = read
            .runs
            .runs
            .iter()
            .all(|run| run.len == run.child_max.max(run.shares.longest()));
        let mut counts = vec![0usize; read.holders.len()];
        for share in read.runs.runs.iter().flat_map(|run| run.shares.iter()) {
            counts[share.holder().0 as usize] += 1;
        }
        for (holder, shares) in (0..).map(HolderId).zip(counts) {
            if read.state(holder).is_some() {
                read.read_holder(input, holder, shares)?;
            }
        }
        if ends_live {
            Ok(read)
        } else {
            Err(DecodeError::Invalid("a run whose end nobody needs"))
        }
    }

    fn read_run<R: Read>(&mut self, input: &mut In<R>, at: u32, keys: &mut Vec<BlockKey>) -> Result<(), DecodeError> {
        let (place, root, base) = match input.number("a run's parent")? {
            BELOW_ROOT => (None, input.key("a run's root")?, 0),
            parent if parent <= u64::from(at) => {
                let run = RunId(parent as u32 - 1);
                let offset = input.small("a run's place")?;
                let found: &Run = self.runs.get(run);
                if offset == 0 || offset > found.len {
                    return Err(DecodeError::Invalid("a run's place"));
                }
                (Some(Spot { run, offset }), BlockKey(0), found.base + offset)
            }
            _ => return Err(DecodeError::Invalid("a run's parent")),
        };
        let len = input.count("a run's length", DEPTH_MAX.saturating_sub(base) as usize)?;
        if len == 0 {
            return Err(DecodeError::Invalid("a run without keys"));
        }
        keys.clear();
        input.each_key(len, "a run's keys", |key| keys.push(key))?;
        if !matches!(self.runs.below(place, root, keys[0]), Below::Nothing) {
            return Err(DecodeError::Invalid("two runs that begin with one key"));
        }
        let id = self.runs.add(place, root, keys);
        let shares = input.count("the number of a run's shares", self.holders.len())?;
        let mut before = None;
        for _ in 0..shares {
            let holder = HolderId(input.small("a share's holder")?);
            if before.is_some_and(|before| before >= holder) || self.state(holder).is_none() {
                return Err(DecodeError::Invalid("a share's holder"));
            }
            before = Some(holder);
            self.read_share(input, id, holder)?;
        }
        Ok(())
    }

    fn read_share<R: Read>(&mut self, input: &mut In<R>, id: RunId, holder: HolderId) -> Result<(), DecodeError> {
        let packed = input.number("a share's end")?;
        let (cut, has_holes) = (packed >> 1, packed & 1 == 1);
        let cut = u32::try_from(cut).unwrap_or(u32::MAX);
        if cut == 0 || cut > self.runs.get(id).len {
            return Err(DecodeError::Invalid("a share's end"));
        }
        let mut missing = (0, 0);
        if has_holes {
            let count = input.count("the number of gaps", cut as usize)?;
            let holes = self.holes.entry((id, holder)).or_default();
            let mut end_before = None;
            for _ in 0..count {
                let gap = (input.small("a gap")?, input.small("a gap")?);
                if gap.0 >= gap.1 || gap.1 >= cut || end_before.is_some_and(|end| end >= gap.0) {
                    return Err(DecodeError::Invalid("a gap"));
                }
                end_before = Some(gap.1);
                holes.add(gap.0, gap.1, |_, _| {});
                let run = self.runs.get(id);
                missing = (
                    missing.0 + gap.1 - gap.0,
                    self.runs.mix(run, gap.0, gap.1).wrapping_add(missing.1),
                );
            }
            if holes.is_empty() {
                return Err(DecodeError::Invalid("a share without the gaps it announces"));
            }
            self.gaps += holes.count() as u64;
        }
        let run = self.runs.get(id);
        let sum = self.runs.mix(run, 0, cut).wrapping_sub(missing.1);
        let state = self.state_mut(holder).expect("the caller checked the holder");
        state.digest.blocks += u64::from(cut - missing.0);
        state.digest.digest = state.digest.digest.wrapping_add(sum);
        self.runs.get_mut(id).shares.set(Share::new(holder, cut, has_holes));
        self.shares += 1;
        Ok(())
    }

    /// Reads what [`put_holder`] wrote. Runs are numbered as they were read.
    fn read_holder<R: Read>(&mut self, input: &mut In<R>, holder: HolderId, shares: usize) -> Result<(), DecodeError> {
        const WRONG: DecodeError = DecodeError::Invalid("a holder's table of runs");
        let mut last = [RunId::NONE; 2];
        for cursor in &mut last {
            *cursor = RunId(input.small("a holder's cursor")?.wrapping_sub(1));
        }
        let mut moved = [None; 2];
        for entry in &mut moved {
            if let Some(run) = input.small("a holder's cursor")?.checked_sub(1) {
                *entry = Some((RunId(run), input.key("a holder's cursor")?));
            }
        }
        let slots = input.count("a holder's slots", u32::MAX as usize)?;
        if !KeyTable::plausible(slots, shares) {
            return Err(WRONG);
        }
        let mut entries = Vec::with_capacity(shares);
        for _ in 0..shares {
            let slot = input.count("a holder's slot", slots)?;
            let id = RunId(input.small("a holder's run")?);
            let run = self.runs.runs.get(id.0 as usize).ok_or(WRONG)?;
            let share = run.shares.find(holder).ok_or(WRONG)?;
            let moved = moved.iter().flatten().find(|moved| moved.0 == id);
            let key = moved.map_or_else(|| self.runs.key(run, share.cut() - 1), |moved| moved.1);
            entries.push((slot, key, id));
        }
        let mut runs: Vec<RunId> = entries.iter().map(|entry| entry.2).collect();
        runs.sort_unstable();
        let distinct = runs.windows(2).all(|pair| pair[0] != pair[1]);
        let cursors = last.iter().filter(|&&run| run != RunId::NONE).copied();
        let mut known = cursors.chain(moved.iter().flatten().map(|moved| moved.0));
        let all_known = known.all(|run| runs.binary_search(&run).is_ok());
        let twice = matches!(moved, [Some(a), Some(b)] if a.0 == b.0);
        let table = KeyTable::with_entries(slots, &entries).ok_or(WRONG)?;
        if !distinct || !all_known || twice {
            return Err(WRONG);
        }
        let state = self.state_mut(holder).expect("the caller took existing holders");
        (state.runs, state.last, state.moved) = (table, last, moved);
        Ok(())
    }
}

/// Writes how a holder finds its runs.
fn put_holder<W: Write>(out: &mut Out<'_, W>, state: &HolderState, position: &[u32]) -> io::Result<()> {
    let place = |run: RunId| {
        if run == RunId::NONE {
            0
        } else {
            position[run.0 as usize]
        }
    };
    for run in state.last {
        out.number(place(run))?;
    }
    for moved in state.moved {
        match moved {
            Some((run, key)) => {
                out.number(place(run))?;
                out.key(key)?;
            }
            None => out.number(0u32)?,
        }
    }
    out.number(state.runs.slots() as u64)?;
    for (slot, run) in state.runs.entries() {
        out.number(slot as u64)?;
        out.number(place(run) - 1)?;
    }
    Ok(())
}
