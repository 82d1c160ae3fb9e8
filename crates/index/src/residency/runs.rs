//! The forest of runs: their keys, their heads, and how they hang together. Knows nothing of holders but their shares.

use cairn_blocks::BlockKey;

use super::arena::{Arena, CHUNK_KEYS, ChunkId};
use super::middle::{Middle, STEP_KEYS};
use super::run::{Run, RunId};
use super::shares::Shares;
use super::table::KeyTable;
use crate::hint::prefetch;
use crate::{mix, mix_sum};

/// A place in the forest: just after the first `offset` keys of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Spot {
    pub run: RunId,
    pub offset: u32,
}

impl Spot {
    /// Nowhere.
    pub(super) const NONE: Spot = Spot {
        run: RunId::NONE,
        offset: 0,
    };
}

/// What lies under a key at a place.
pub(super) enum Below {
    /// The run that begins there.
    Run(RunId),
    /// The key is known, but not there.
    Elsewhere,
    /// Nothing.
    Nothing,
}

/// Chunks that are asked for before they are summed up.
const CHUNKS_AHEAD: usize = 8;
/// Points compared at once when a run is searched; their cache misses overlap.
const PROBES: usize = 7;

/// All runs.
#[derive(Clone)]
pub(super) struct Runs {
    pub arena: Arena,
    pub runs: Vec<Run>,
    free: Vec<RunId>,
    heads: KeyTable,
    /// Every key, where blocks inside runs are asked for often.
    pub middle: Middle,
    /// Keys in all runs.
    pub known: u64,
}

impl Runs {
    pub(super) fn new() -> Self {
        Self {
            arena: Arena::new(),
            runs: Vec::new(),
            free: Vec::new(),
            heads: KeyTable::default(),
            middle: Middle::default(),
            known: 0,
        }
    }

    #[inline]
    pub(super) fn get(&self, run: RunId) -> &Run {
        &self.runs[run.0 as usize]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, run: RunId) -> &mut Run {
        &mut self.runs[run.0 as usize]
    }

    /// Runs that exist.
    pub(super) fn live(&self) -> usize {
        self.runs.len() - self.free.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.arena.bytes()
            + self.runs.capacity() * size_of::<Run>()
            + self.runs.iter().map(Run::spilled_bytes).sum::<usize>()
            + self.free.capacity() * 4
            + self.heads.bytes()
            + self.middle.bytes()
    }

    /// Bytes of `bytes` that lie in mappings of their own.
    pub(super) fn mapped_bytes(&self) -> usize {
        self.arena.mapped_bytes()
    }

    /// The key at an offset.
    #[inline]
    pub(super) fn key(&self, run: &Run, offset: u32) -> BlockKey {
        let offset = offset as usize;
        self.arena.chunk(run.chunks[offset / CHUNK_KEYS])[offset % CHUNK_KEYS]
    }

    /// The place just after that block, where this run has it.
    #[inline]
    pub(super) fn spot_of(&self, run: RunId, key: BlockKey, depth: u32) -> Option<Spot> {
        let found = self.runs.get(run.0 as usize)?;
        let offset = depth.wrapping_sub(found.base);
        if offset == 0 || offset > found.len {
            return None;
        }
        let there = if offset == found.len {
            found.last
        } else {
            self.key(found, offset - 1)
        };
        (there == key).then_some(Spot { run, offset })
    }

    /// The run that begins a chain with that key.
    #[inline]
    pub(super) fn first(&self, key: BlockKey) -> Option<RunId> {
        self.heads.find(key, |run| {
            let run = self.get(run);
            run.head == key && run.base == 0
        })
    }

    /// The run that hangs at that place and begins with that key.
    #[inline]
    pub(super) fn child(&self, parent: RunId, depth: u32, key: BlockKey) -> Option<RunId> {
        self.heads.find(key, |run| {
            let run = self.get(run);
            run.head == key && run.parent == parent && run.base == depth
        })
    }

    /// Asks for what tells whether a run begins with that key.
    #[inline]
    pub(super) fn prefetch_head(&self, key: BlockKey) {
        self.heads.prefetch(key);
    }

    /// Asks for a run, where there is one.
    #[inline]
    pub(super) fn prefetch_run(&self, run: RunId) {
        if let Some(run) = self.runs.get(run.0 as usize) {
            prefetch(&run.head);
            prefetch(&run.shares);
        }
    }

    /// What is under `key` at `at`, or below `root` where `at` is none.
    pub(super) fn below(&self, at: Option<Spot>, root: BlockKey, key: BlockKey) -> Below {
        let Some(found) = self.heads.find(key, |run| self.get(run).head == key) else {
            return Below::Nothing;
        };
        let run = self.get(found);
        let there = match at {
            None => run.parent == RunId::NONE && run.root() == root,
            Some(at) => run.parent == at.run && run.base == self.get(at.run).base + at.offset,
        };
        if there { Below::Run(found) } else { Below::Elsewhere }
    }

    /// How many keys from `offset` on are those of `keys`. A key fixes its history, so the last equal key tells.
    #[inline]
    pub(super) fn common(&self, run: &Run, offset: u32, keys: &[BlockKey]) -> u32 {
        let most = (run.len - offset).min(u32::try_from(keys.len()).unwrap_or(u32::MAX));
        if most == 0 {
            return 0;
        }
        let last = if offset + most == run.len {
            run.last
        } else {
            self.key(run, offset + most - 1)
        };
        if last == keys[most as usize - 1] {
            return most;
        }
        let keys = &keys[..most as usize - 1];
        // Where others have branched off, this chain may do so too.
        let (mut low, mut high) = (0, keys.len());
        let branch = run.child_max.wrapping_sub(offset) as usize;
        if branch < keys.len() {
            if self.key(run, run.child_max) == keys[branch] {
                low = branch + 1;
            } else {
                high = branch;
                if branch == 0 || self.key(run, run.child_max - 1) == keys[branch - 1] {
                    return branch as u32;
                }
            }
        }
        self.search(run, offset, keys, low, high)
    }

    /// The first of `keys` that differs from the run's, by narrowing down: below `low` all are equal, from `high` on
    /// none is.
    fn search(&self, run: &Run, offset: u32, keys: &[BlockKey], mut low: usize, mut high: usize) -> u32 {
        while high - low > PROBES {
            let step = (high - low) / (PROBES + 1);
            let mut equal = 0;
            for probe in 1..=PROBES {
                let at = low + probe * step;
                equal += usize::from(self.key(run, offset + at as u32) == keys[at]);
            }
            // Equality is monotone, so the count of equal probes tells where it ends.
            if equal < PROBES {
                high = low + (equal + 1) * step;
            }
            if equal > 0 {
                low += equal * step + 1;
            }
        }
        let mut equal = low;
        for (at, &key) in keys.iter().enumerate().take(high).skip(low) {
            equal += usize::from(self.key(run, offset + at as u32) == key);
        }
        equal as u32
    }

    /// Wrapping sum of the digests' mix over a stretch.
    pub(super) fn mix(&self, run: &Run, start: u32, end: u32) -> u64 {
        if end - start == 1 {
            return mix(self.key(run, start));
        }
        let chunks = start as usize / CHUNK_KEYS..(end as usize).div_ceil(CHUNK_KEYS);
        let chunks = run.chunks.get(chunks).unwrap_or_default();
        let ask_for = |chunk: &ChunkId| self.arena.prefetch(*chunk);
        chunks.iter().take(CHUNKS_AHEAD).for_each(ask_for);
        let mut further = chunks.iter().skip(CHUNKS_AHEAD);
        let mut sum = 0u64;
        self.each_stretch(run, start, end, |keys| {
            further.next().into_iter().for_each(ask_for);
            sum = sum.wrapping_add(mix_sum(keys));
        });
        sum
    }

    /// Hands on the keys of a stretch, chunk by chunk.
    pub(super) fn each_stretch(&self, run: &Run, start: u32, end: u32, mut take: impl FnMut(&[BlockKey])) {
        let (mut at, end) = (start as usize, end as usize);
        while at < end {
            let within = at % CHUNK_KEYS;
            let to = (within + end - at).min(CHUNK_KEYS);
            take(&self.arena.chunk(run.chunks[at / CHUNK_KEYS])[within..to]);
            at += to - within;
        }
    }

    /// Makes a run with those keys at `at`, or below `root` where `at` is none.
    pub(super) fn add(&mut self, at: Option<Spot>, root: BlockKey, keys: &[BlockKey]) -> RunId {
        let id = self.free.pop().unwrap_or(RunId(self.runs.len() as u32));
        let mut run = Run {
            head: keys[0],
            last: keys[0],
            base: 0,
            len: 0,
            parent: RunId::NONE,
            first_child: RunId::NONE,
            siblings: Run::root_siblings(root),
            child_max: 0,
            chunks: smallvec::SmallVec::new(),
            shares: Shares::default(),
        };
        if let Some(at) = at {
            let parent = self.get_mut(at.run);
            run.base = parent.base + at.offset;
            run.parent = at.run;
            run.siblings = [RunId::NONE.0, parent.first_child.0];
            parent.child_max = parent.child_max.max(at.offset);
            let next = std::mem::replace(&mut parent.first_child, id);
            if next != RunId::NONE {
                self.get_mut(next).siblings[0] = id.0;
            }
        }
        if id.0 as usize == self.runs.len() {
            self.runs.push(run);
        } else {
            *self.get_mut(id) = run;
        }
        self.heads.insert(keys[0], id);
        self.extend(id, keys);
        id
    }

    /// Adds keys to the end of a run.
    pub(super) fn extend(&mut self, id: RunId, keys: &[BlockKey]) {
        self.middle.came(keys, id);
        let run = &mut self.runs[id.0 as usize];
        let mut left = keys;
        let mut at = run.len as usize;
        let chunks = (at + keys.len()).div_ceil(CHUNK_KEYS);
        if chunks > run.chunks.len() {
            run.chunks.reserve_exact(chunks - run.chunks.len());
        }
        while !left.is_empty() {
            let within = at % CHUNK_KEYS;
            if within == 0 {
                run.chunks.push(self.arena.alloc());
            }
            let now = left.len().min(CHUNK_KEYS - within);
            self.arena.chunk_mut(run.chunks[at / CHUNK_KEYS])[within..within + now].copy_from_slice(&left[..now]);
            left = &left[now..];
            at += now;
        }
        run.len = at as u32;
        run.last = keys[keys.len() - 1];
        self.known += keys.len() as u64;
    }

    /// Cuts what nobody holds and nothing hangs below from the end of the run, and from its ancestors if it goes whole.
    pub(super) fn trim(&mut self, id: RunId) {
        let mut id = id;
        loop {
            let run = self.get(id);
            if run.len == 0 {
                return;
            }
            let end = run.child_max.max(run.shares.longest());
            if end == run.len {
                return;
            }
            if end > 0 {
                self.truncate(id, end);
                return;
            }
            let parent = run.parent;
            self.free(id);
            if parent == RunId::NONE {
                return;
            }
            id = parent;
        }
    }

    fn truncate(&mut self, id: RunId, end: u32) {
        self.forget_keys(id, end);
        let run = &mut self.runs[id.0 as usize];
        self.known -= u64::from(run.len - end);
        run.len = end;
        let chunks = (end as usize).div_ceil(CHUNK_KEYS);
        if chunks < run.chunks.len() {
            for chunk in run.chunks.drain(chunks..) {
                self.arena.release(chunk);
            }
        }
        let last = end as usize - 1;
        run.last = self.arena.chunk(run.chunks[last / CHUNK_KEYS])[last % CHUNK_KEYS];
    }

    /// Takes the keys of a run from `start` on out of the table of all keys.
    fn forget_keys(&mut self, id: RunId, start: u32) {
        let run = &self.runs[id.0 as usize];
        let (start, end) = (start as usize, run.len as usize);
        if !self.middle.is_made() {
            return self.middle.count(end - start);
        }
        let mut at = start;
        while at < end {
            let within = at % CHUNK_KEYS;
            let to = (within + end - at).min(CHUNK_KEYS);
            let keys = &self.arena.chunk(run.chunks[at / CHUNK_KEYS])[within..to];
            self.middle.went(keys, id);
            at += to - within;
        }
    }

    /// Enters the keys of some more runs into the table of all keys.
    #[cold]
    pub(super) fn enter_some(&mut self) {
        let (mut entered, mut keys) = (0, Vec::new());
        while entered < STEP_KEYS {
            let id = self.middle.next();
            let Some(run) = self.runs.get(id.0 as usize) else {
                return self.middle.completed();
            };
            self.each_stretch(run, 0, run.len, |part| keys.extend_from_slice(part));
            let len = run.len;
            if !self.middle.enter(&keys, id) {
                return;
            }
            keys.clear();
            // Runs in no use count too, or very many of them would be passed at once.
            entered += len + 1;
            self.middle.entered();
        }
    }

    /// Takes a run away that has neither shares nor children.
    fn free(&mut self, id: RunId) {
        self.forget_keys(id, 0);
        let run = &mut self.runs[id.0 as usize];
        self.known -= u64::from(run.len);
        run.len = 0;
        let (head, parent, base, siblings) = (run.head, run.parent, run.base, run.siblings);
        for chunk in std::mem::take(&mut run.chunks) {
            self.arena.release(chunk);
        }
        run.shares = Shares::default();
        self.heads.remove(head, id);
        self.free.push(id);
        if parent == RunId::NONE {
            return;
        }
        let [before, after] = siblings.map(RunId);
        if before == RunId::NONE {
            self.get_mut(parent).first_child = after;
        } else {
            self.get_mut(before).siblings[1] = after.0;
        }
        if after != RunId::NONE {
            self.get_mut(after).siblings[0] = before.0;
        }
        let offset = base - self.get(parent).base;
        if self.get(parent).child_max == offset {
            self.get_mut(parent).child_max = self.last_child(parent, offset);
        }
    }

    /// Largest offset that a child hangs at; no child hangs beyond `most`.
    fn last_child(&self, parent: RunId, most: u32) -> u32 {
        let parent = self.get(parent);
        let (mut child, mut last) = (parent.first_child, 0);
        while child != RunId::NONE && last < most {
            let run = self.get(child);
            last = last.max(run.base - parent.base);
            child = RunId(run.siblings[1]);
        }
        last
    }
}
