//! Finds blocks inside runs by their keys alone, kept only while changes keep asking for such blocks.
//!
//! Engines evict chains from their tails and store at their ends, where a holder's own tables find a block at once. A
//! block anywhere else is looked for in all of a holder's runs; where that is asked often, as with evictions at random,
//! a table of all keys costs less. It is made in small steps as it is asked, holds nothing that doesn't follow from
//! the runs, changes no answer, and goes again when it costs more than it saves.

use cairn_blocks::BlockKey;

use super::places::Places;
use super::run::RunId;

/// Most keys that a table is made for: 430 MiB of lines.
const MOST_KEYS: u64 = 32 << 20;
/// Keys that are entered for each block that is looked for, while the table is made.
pub(super) const STEP_KEYS: u32 = 512;
/// The table is worth making where looking passed more runs than so many for each key that came or went, and this many
/// at all.
const LOOKED_PER_CHANGE: u64 = 4;
const LOOKED: u64 = 1 << 10;
/// It is worth keeping where it is asked once for so many keys that come or go.
const CHANGES_PER_ANSWER: u64 = 32;
/// Changes over which that is judged, or as many as the table has keys: it would cost as much to make it again.
const WINDOW: u64 = 16 << 10;

/// Keys whose places are asked for before the first of them is written, so that the waits for memory overlap.
const TOGETHER: usize = 32;

/// Runs by every key in them.
#[derive(Clone, Default)]
pub(super) struct Middle {
    table: Places,
    /// Runs below this have all their keys in the table, while there is one.
    entered: u32,
    /// Whether all have.
    complete: bool,
    made: bool,
    /// Runs that were passed in vain, or answers of the table, since the window began.
    asked: u64,
    /// Keys that came or went since then.
    changed: u64,
}

impl Middle {
    pub(super) fn bytes(&self) -> usize {
        self.table.bytes()
    }

    /// The table, once it has all keys.
    #[inline]
    pub(super) fn table(&self) -> Option<&Places> {
        self.complete.then_some(&self.table)
    }

    /// Whether the keys of that run are, or must be, in the table.
    #[inline]
    fn covers(&self, run: RunId) -> bool {
        self.complete || run.0 < self.entered
    }

    /// The table gave an answer.
    #[inline]
    pub(super) fn answered(&mut self) {
        self.asked += 1;
    }

    /// So many runs were passed while a block was looked for; `known` is the number of all keys, and run ids are below
    /// `ids`. Gives whether the table should be made, or made further.
    #[cold]
    pub(super) fn passed(&mut self, runs: usize, known: u64, ids: usize) -> bool {
        if self.made {
            return true;
        }
        self.asked += runs as u64;
        if known > MOST_KEYS || ids > Places::RUN_MAX as usize {
            return false;
        }
        if self.asked < LOOKED || self.asked < self.changed.saturating_mul(LOOKED_PER_CHANGE) {
            return false;
        }
        // Where more come than it has room for, it is made anew. A larger one is less often near.
        self.table = Places::with_room_for(known as usize);
        (self.made, self.asked, self.changed) = (true, 0, 0);
        true
    }

    /// The next run to enter.
    pub(super) fn next(&self) -> RunId {
        RunId(self.entered)
    }

    /// All keys of the next run were handed to [`Middle::enter`].
    pub(super) fn entered(&mut self) {
        self.entered += 1;
    }

    /// No run is left to enter.
    pub(super) fn completed(&mut self) {
        self.complete = self.made;
        (self.asked, self.changed) = (0, 0);
    }

    /// Enters keys of the next run. Gives whether there was room: else there is no table any more.
    pub(super) fn enter(&mut self, keys: &[BlockKey], run: RunId) -> bool {
        if !self.table.has_room_for(keys.len()) || run.0 > Places::RUN_MAX {
            self.forget();
            return false;
        }
        let (first, later) = keys.split_at(keys.len().min(TOGETHER));
        first.iter().for_each(|key| self.table.prefetch(*key));
        let mut later = later.iter();
        for key in keys {
            if let Some(key) = later.next() {
                self.table.prefetch(*key);
            }
            if !self.table.insert(*key, run) {
                self.forget();
                return false;
            }
        }
        true
    }

    /// Keys came to a run.
    #[inline]
    pub(super) fn came(&mut self, keys: &[BlockKey], run: RunId) {
        self.count(keys.len());
        if self.made && self.covers(run) {
            self.enter(keys, run);
        }
    }

    /// A key of a run went.
    #[inline]
    pub(super) fn went(&mut self, keys: &[BlockKey], run: RunId) {
        self.count(keys.len());
        if self.made && self.covers(run) {
            keys.iter().for_each(|key| self.table.prefetch(*key));
            keys.iter().for_each(|key| self.table.remove(*key, run));
        }
    }

    /// Whether anybody needs to be told which keys go.
    #[inline]
    pub(super) fn is_made(&self) -> bool {
        self.made
    }

    #[inline]
    pub(super) fn count(&mut self, keys: usize) {
        self.changed += keys as u64;
        if self.changed >= WINDOW {
            self.judge();
        }
    }

    #[cold]
    fn judge(&mut self) {
        if self.changed < self.table.len() as u64 {
            return;
        }
        if self.complete && self.asked * CHANGES_PER_ANSWER < self.changed {
            self.forget();
        } else {
            self.asked /= 2;
            self.changed /= 2;
        }
    }

    fn forget(&mut self) {
        *self = Self::default();
    }
}
