//! Reads what coming changes will look at, so that their waits for memory overlap.

use cairn_blocks::{BlockKey, Depth};

use super::Residency;
use super::arena::CHUNK_KEYS;
use super::run::RunId;
use crate::hint::prefetch;
use crate::{HolderId, Op};

/// Changes whose blocks are read ahead together: what they read stays near until it is used.
pub const READ_AHEAD: usize = 32;

/// What is known of a block that is read ahead.
#[derive(Clone, Copy)]
struct Ahead {
    key: BlockKey,
    run: RunId,
    holder: HolderId,
    /// Its depth at first, its offset in the run once that is read.
    offset: u32,
}

impl Default for Ahead {
    fn default() -> Self {
        Self {
            key: BlockKey(0),
            run: RunId::NONE,
            holder: HolderId(0),
            offset: 0,
        }
    }
}

impl Residency {
    /// Asks for what the first [`READ_AHEAD`] of these changes will look at. Changes nothing.
    pub fn approach(&self, ops: &[Op]) {
        let next = &ops[..ops.len().min(READ_AHEAD)];
        for op in next {
            match op {
                Op::Store { holder, keys, .. } => self.ask_for(*holder, keys.first().copied()),
                Op::Remove { holder, .. } => self.ask_for(*holder, None),
                Op::Clear { .. } | Op::Confidence(_) => {}
            }
        }
        if self.reads_ahead() {
            self.read_ahead(next.iter().filter_map(Op::block));
        }
    }

    /// Asks for what a change looks at first: the runs that its holder was last changed in, and what tells whether a run
    /// begins with the first key of a store.
    #[inline]
    fn ask_for(&self, holder: HolderId, first: Option<BlockKey>) {
        if let Some(key) = first {
            self.runs.prefetch_head(key);
        }
        if let Some(state) = self.state(holder) {
            state.last.iter().for_each(|run| self.runs.prefetch_run(*run));
        }
    }

    /// Whether [`Residency::read_ahead`] does anything now.
    #[inline]
    #[must_use]
    pub fn reads_ahead(&self) -> bool {
        self.runs.middle.table().is_some()
    }

    /// Reads ahead what changes of these blocks will look at, each given as [`Op::block`](crate::Op::block) does. Done only
    /// where blocks inside runs are asked for often: where changes lie at ends it takes more than it saves. Changes nothing.
    pub fn read_ahead(&self, blocks: impl Iterator<Item = (HolderId, BlockKey, Depth)>) {
        let Some(table) = self.runs.middle.table() else { return };
        // In steps: what a step reads was asked for by the step before, and all lines of a step are waited for together.
        let mut ahead = [Ahead::default(); READ_AHEAD];
        let mut count = 0;
        for (place, (holder, key, depth)) in ahead.iter_mut().zip(blocks) {
            table.prefetch(key);
            *place = Ahead {
                key,
                run: RunId::NONE,
                holder,
                offset: depth.0,
            };
            count += 1;
        }
        let ahead = &mut ahead[..count];
        for place in &mut *ahead {
            let Some(id) = table.guess(place.key) else { continue };
            place.run = id;
            let Some(run) = self.runs.runs.get(id.0 as usize) else {
                continue;
            };
            prefetch(&run.head);
            prefetch(&run.shares);
        }
        for place in &mut *ahead {
            let Some(run) = self.runs.runs.get(place.run.0 as usize) else {
                continue;
            };
            // Right where the guess was.
            place.offset = place.offset.wrapping_sub(run.base).wrapping_sub(1);
            if let Some(chunk) = run.chunks.get(place.offset as usize / CHUNK_KEYS) {
                prefetch(chunk);
            }
        }
        for place in &*ahead {
            let Some(run) = self.runs.runs.get(place.run.0 as usize) else {
                continue;
            };
            if let Some(chunk) = run.chunks.get(place.offset as usize / CHUNK_KEYS) {
                prefetch(&self.runs.arena.chunk(*chunk)[place.offset as usize % CHUNK_KEYS]);
            }
            if let Some(holes) = self.holes.get(&(place.run, place.holder)) {
                holes.prefetch(place.offset);
            }
        }
    }
}
