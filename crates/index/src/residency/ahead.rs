//! Reads what coming changes will look at, so that their waits for memory overlap.

use cairn_blocks::{BlockKey, Depth};

use super::Residency;
use super::arena::{CHUNK_KEYS, ChunkId};
use super::run::RunId;
use crate::HolderId;

/// Changes whose blocks are read ahead together: what they read stays near until it is used.
pub const READ_AHEAD: usize = 32;

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

impl Residency {
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
