//! Who holds which block.
//!
//! Chains share prefixes, so whole stretches of them, *runs*, are kept instead of blocks. A run is never split: a branch
//! starts a run of its own that hangs at some offset of its parent, and whoever stores beyond a run's end makes it
//! longer. A holder's share of a run is one number, the offset it ends at; what it lacks below that is kept apart for
//! that holder and run alone. Only the first key of a run is in a map. Any other block is addressed by holder, depth
//! and key: it lies beside the holder's last change, or at the end of one of its shares, or is looked for in those of
//! its runs that cover the depth. Blocks stay while somebody holds them or a descendant; what no longer is needed is
//! cut at once and its memory is reused.

mod ahead;
mod arena;
mod bits;
mod change;
mod holes;
mod huge;
mod lanes;
mod lookup;
mod middle;
mod places;
mod row;
mod run;
mod runs;
mod shares;
mod stored;
mod table;

use std::fmt;

use cairn_blocks::BlockKey;

use crate::{HolderDigest, HolderId};
pub use ahead::READ_AHEAD;
use holes::{Holes, HolesMap};
use run::RunId;
use runs::Runs;
use table::KeyTable;

/// Deepest block that is stored: 268 million tokens at the default block size.
pub const DEPTH_MAX: u32 = 1 << 24;
/// Bytes that the blocks of one state may take, as [`Residency::weight`] counts them; the same on every copy.
pub const WEIGHT_MAX: u64 = 64 << 30;

/// How a store ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stored {
    /// The holder holds the stretch now.
    Done {
        /// How many of its blocks the holder didn't hold before.
        new_blocks: u32,
    },
    /// The holder doesn't hold the anchor at that depth; send the chain again from its root.
    UnknownAnchor,
    /// A run begins with one of the keys at another place; nothing was stored.
    Refused,
    /// There is no such holder.
    UnknownHolder,
    /// A bound on bytes or depth is reached; nothing was stored.
    Full,
}

/// How a removal ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Removed {
    /// How many blocks the holder held and holds no more.
    pub blocks: u32,
}

/// Who holds which block.
#[derive(Clone)]
pub struct Residency {
    runs: Runs,
    /// By holder id.
    holders: Vec<Option<HolderState>>,
    /// What is missing inside shares, where something is.
    holes: HolesMap,
    /// Shares of all holders.
    shares: u64,
    /// Gaps in `holes`.
    gaps: u64,
    weight_max: u64,
}

/// One holder.
#[derive(Clone)]
struct HolderState {
    /// The runs it has a share of, by the last key of the share, or by an earlier last key where `moved` says so.
    runs: KeyTable,
    digest: HolderDigest,
    /// The run that it stored to last, and the one that it removed from last.
    last: [RunId; 2],
    /// Runs whose share ends elsewhere now than under the key that `runs` has it by: the end of a share moves with
    /// every block while a request is decoded or evicted, and is only looked for there when another run is changed.
    moved: [Option<(RunId, BlockKey)>; 2],
}

/// Which of a holder's two cursors a change concerns.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cursor {
    Store,
    Removal,
}

impl HolderState {
    fn new() -> Self {
        Self {
            runs: KeyTable::default(),
            digest: HolderDigest::default(),
            last: [RunId::NONE; 2],
            moved: [None; 2],
        }
    }
}

impl Default for Residency {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Residency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Residency")
            .field("holders", &self.holders.iter().flatten().count())
            .field("runs", &self.runs.live())
            .field("blocks", &self.runs.known)
            .finish_non_exhaustive()
    }
}

impl Residency {
    /// Nobody holds anything.
    #[must_use]
    pub fn new() -> Self {
        Self {
            runs: Runs::new(),
            holders: Vec::new(),
            holes: HolesMap::default(),
            shares: 0,
            gaps: 0,
            weight_max: WEIGHT_MAX,
        }
    }

    /// Like [`Residency::new`], with another bound than [`WEIGHT_MAX`]; every copy needs the same.
    #[must_use]
    pub fn with_weight_max(weight_max: u64) -> Self {
        Self {
            weight_max,
            ..Self::new()
        }
    }

    /// Makes a holder known.
    pub fn add_holder(&mut self, holder: HolderId) {
        let at = holder.0 as usize;
        if at >= self.holders.len() {
            self.holders.resize_with(at + 1, || None);
        }
        self.holders[at].get_or_insert_with(HolderState::new);
    }

    /// Forgets a holder with all it holds, in time proportional to its runs.
    pub fn remove_holder(&mut self, holder: HolderId) {
        self.clear(holder);
        if let Some(slot) = self.holders.get_mut(holder.0 as usize) {
            *slot = None;
        }
        while self.holders.last().is_some_and(Option::is_none) {
            self.holders.pop();
        }
    }

    /// How many blocks the holder holds.
    #[must_use]
    pub fn holder_blocks(&self, holder: HolderId) -> u64 {
        self.holder_digest(holder).blocks
    }

    /// Number and digest of the blocks that the holder holds.
    #[must_use]
    pub fn holder_digest(&self, holder: HolderId) -> HolderDigest {
        self.state(holder)
            .map_or_else(HolderDigest::default, |state| state.digest)
    }

    /// How many distinct blocks are known: held ones and their ancestors.
    #[must_use]
    pub fn known_blocks(&self) -> u64 {
        self.runs.known
    }

    /// How many runs there are.
    #[must_use]
    pub fn run_count(&self) -> u64 {
        self.runs.live() as u64
    }

    /// How many (run, holder) shares there are.
    #[must_use]
    pub fn share_count(&self) -> u64 {
        self.shares
    }

    /// Bytes of memory that the structure takes, without the allocator's own. Looks at every run.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let holders = self.holders.iter().flatten().map(|h| h.runs.bytes()).sum::<usize>();
        let holes = self.holes.values().map(Holes::bytes).sum::<usize>();
        self.runs.bytes()
            + holders
            + self.holders.capacity() * size_of::<Option<HolderState>>()
            + holes
            + self.holes.capacity() * (size_of::<((RunId, HolderId), Holes)>() + 1)
    }

    /// Bytes of those that are mappings of their own, which no allocator counts.
    #[must_use]
    pub fn mapped_bytes(&self) -> usize {
        self.runs.mapped_bytes()
    }

    /// What the bound on bytes counts: equal on every copy, whatever its allocator and history.
    #[must_use]
    pub fn weight(&self) -> u64 {
        /// Bytes of a chunk with its entry in a run's list.
        const CHUNK: u64 = arena::CHUNK_KEYS as u64 * 8 + 4;
        /// Bytes of a run with its entry among the heads.
        const RUN: u64 = size_of::<run::Run>() as u64 + 16;
        /// Bytes of a share with its entry in the holder's table.
        const SHARE: u64 = 8 + 16;
        /// Bytes of a gap.
        const GAP: u64 = 16;
        self.runs.arena.used() as u64 * CHUNK + self.runs.live() as u64 * RUN + self.shares * SHARE + self.gaps * GAP
    }

    /// The share of a run ends at `cut` instead of below `old` now: keeps it findable by its last key, sooner or later.
    fn move_end(&mut self, holder: HolderId, cursor: Cursor, run: RunId, old: BlockKey) {
        let Some(state) = self.holders.get_mut(holder.0 as usize).and_then(Option::as_mut) else {
            return;
        };
        if state.moved.iter().flatten().any(|moved| moved.0 == run) {
            return;
        }
        if let Some((before, key)) = state.moved[cursor as usize].replace((run, old)) {
            let found = self.runs.get(before);
            let share = found.shares.find(holder).expect("a run whose share moved still has it");
            state.runs.remove(key, before);
            state.runs.insert(self.runs.key(found, share.cut() - 1), before);
        }
    }

    fn state(&self, holder: HolderId) -> Option<&HolderState> {
        self.holders.get(holder.0 as usize)?.as_ref()
    }

    fn state_mut(&mut self, holder: HolderId) -> Option<&mut HolderState> {
        self.holders.get_mut(holder.0 as usize)?.as_mut()
    }
}
