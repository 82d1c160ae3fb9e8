//! Prefixes that were just routed to a worker and that the index can't show yet.
//!
//! An entry says "this worker will hold these blocks soon". It lies outside view and digest, lives shortly, and is
//! withdrawn when its request fails, its worker goes, or the view shows the blocks. The wait for it isn't kept here: the
//! request that computes the prefix is in the worker's queue, so its reservation already makes later ones wait.
//!
//! Only every [`STRIDE`]-th key is indexed: a shared prefix is credited down to the last multiple.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use cairn_blocks::BlockKey;
use smallvec::SmallVec;

use crate::Micros;
use crate::ids::{RouterName, Slot};

/// Blocks between two indexed keys of a prompt: 128 tokens at blocks of 16, a few milliseconds of prefill.
pub const STRIDE: u32 = 8;

/// Most indexed keys of one entry; 262,144 tokens at blocks of 16.
pub const MAX_KEYS_PER_ENTRY: usize = 2_048;

/// Longest life that another router may ask for.
pub const MAX_LIFE: Micros = Micros::from_ms(120_000);

/// Entries that one key leads to; a prefix that is on its way to more workers isn't cold.
const MAX_PER_KEY: usize = 32;

/// Keys are hashes already: the map takes them as they are.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

type KeyMap = HashMap<BlockKey, SmallVec<[u32; 2]>, BuildHasherDefault<KeyHasher>>;

/// Bounds of one overlay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OverlayLimits {
    /// Entries held at once.
    pub entries: usize,
    /// Indexed keys held at once.
    pub keys: usize,
}

/// Names one entry; the generation makes a stale id harmless.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OverlayId {
    index: u32,
    generation: u32,
}

/// How often entries ended, by reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OverlayCounters {
    /// Entries made.
    pub inserted: u64,
    /// The view showed the blocks.
    pub confirmed: u64,
    /// The request failed or the worker went.
    pub withdrawn: u64,
    /// Their time was over.
    pub expired: u64,
    /// They had to go, or were cut, for a bound.
    pub bounded: u64,
}

#[derive(Debug)]
struct Prefix {
    slot: Slot,
    /// `None` for this router's own.
    router: Option<RouterName>,
    /// Index of `keys[0]` in strides: 0 where it is at depth [`STRIDE`].
    first: u32,
    keys: Vec<BlockKey>,
    expires: Micros,
    /// Its request had its first token: the blocks exist, and no reservation waits for them.
    ready: bool,
}

impl Prefix {
    /// Depth of the last key in blocks.
    fn end(&self) -> u32 {
        (self.first + self.keys.len() as u32) * STRIDE
    }
}

#[derive(Debug, Default)]
struct Cell {
    generation: u32,
    live: Option<Prefix>,
}

/// See the module.
#[derive(Debug)]
pub struct Overlay {
    limits: OverlayLimits,
    cells: Vec<Cell>,
    free: Vec<u32>,
    by_key: KeyMap,
    by_expiry: BTreeSet<(Micros, u32)>,
    by_router: BTreeMap<RouterName, BTreeSet<u32>>,
    keys: usize,
    /// By slot: blocks that more than one router has reserved to be computed there, beyond the first.
    doubled: Vec<u32>,
    counters: OverlayCounters,
    confirmed: Vec<u32>,
}

/// Of the entries that one key leads to, how many reserve computing it on `slot` although another makes that needless.
fn doubled(cells: &[Cell], list: &[u32], slot: Slot) -> u32 {
    let (mut pending, mut ready) = (0u32, false);
    for prefix in list
        .iter()
        .filter_map(|at| cells[*at as usize].live.as_ref())
        .filter(|p| p.slot == slot)
    {
        if prefix.ready {
            ready = true;
        } else {
            pending += 1;
        }
    }
    if ready { pending } else { pending.saturating_sub(1) }
}

/// What a frame says of an own promise besides its keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnPromise {
    pub(crate) first: u32,
    pub(crate) expires: Micros,
    pub(crate) ready: bool,
}

/// Blocks that workers will hold of one request, by slot; reused between requests.
#[derive(Debug, Default)]
pub struct Promises {
    blocks: Vec<u32>,
    touched: Vec<Slot>,
}

impl Promises {
    /// Leading blocks promised on a worker; 0 where nothing is.
    pub(crate) fn blocks(&self, slot: Slot) -> u32 {
        self.blocks.get(slot.at()).copied().unwrap_or(0)
    }

    /// Most leading blocks promised on any worker.
    pub(crate) fn most(&self) -> u32 {
        self.touched.iter().map(|slot| self.blocks(*slot)).max().unwrap_or(0)
    }

    fn clear(&mut self) {
        for slot in self.touched.drain(..) {
            self.blocks[slot.at()] = 0;
        }
    }

    fn raise(&mut self, slot: Slot, blocks: u32) {
        if self.blocks.len() <= slot.at() {
            self.blocks.resize(slot.at() + 1, 0);
        }
        if self.blocks[slot.at()] == 0 {
            self.touched.push(slot);
        }
        self.blocks[slot.at()] = self.blocks[slot.at()].max(blocks);
    }
}

impl Overlay {
    /// An empty overlay.
    #[must_use]
    pub fn new(limits: OverlayLimits) -> Self {
        Self {
            limits,
            cells: Vec::new(),
            free: Vec::new(),
            by_key: KeyMap::default(),
            by_expiry: BTreeSet::new(),
            by_router: BTreeMap::new(),
            keys: 0,
            doubled: Vec::new(),
            counters: OverlayCounters::default(),
            confirmed: Vec::new(),
        }
    }

    /// Counts by reason.
    #[cfg(test)]
    pub fn counters(&self) -> OverlayCounters {
        self.counters
    }

    /// Says that `slot` will hold the blocks of `keys` below depth `have` (which it holds or has been promised).
    ///
    /// `None` where that is less than one stride.
    pub(crate) fn insert(&mut self, slot: Slot, keys: &[BlockKey], have: u32, expires: Micros) -> Option<OverlayId> {
        let first = have / STRIDE;
        let strided = keys
            .iter()
            .copied()
            .skip(((first + 1) * STRIDE - 1) as usize)
            .step_by(STRIDE as usize);
        let strided: Vec<BlockKey> = strided.take(MAX_KEYS_PER_ENTRY).collect();
        self.add(Prefix {
            slot,
            router: None,
            first,
            keys: strided,
            expires,
            ready: false,
        })
    }

    fn add(&mut self, mut prefix: Prefix) -> Option<OverlayId> {
        if prefix.keys.len() > MAX_KEYS_PER_ENTRY {
            prefix.keys.truncate(MAX_KEYS_PER_ENTRY);
            self.counters.bounded += 1;
        }
        if prefix.keys.is_empty() || prefix.keys.len() > self.limits.keys || self.limits.entries == 0 {
            return None;
        }
        while self.by_expiry.len() >= self.limits.entries || self.keys + prefix.keys.len() > self.limits.keys {
            let (_, oldest) = *self.by_expiry.first().expect("a bound is hit, so there are entries");
            self.counters.bounded += 1;
            self.remove(oldest);
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.cells.push(Cell::default());
            (self.cells.len() - 1) as u32
        });
        self.keys += prefix.keys.len();
        self.by_expiry.insert((prefix.expires, index));
        if let Some(router) = &prefix.router {
            self.by_router.entry(router.clone()).or_default().insert(index);
        }
        self.counters.inserted += 1;
        let slot = prefix.slot;
        if self.doubled.len() <= slot.at() {
            self.doubled.resize(slot.at() + 1, 0);
        }
        let (keys, cell) = (prefix.keys.clone(), &mut self.cells[index as usize]);
        let generation = cell.generation;
        cell.live = Some(prefix);
        for key in &keys {
            let list = self.by_key.entry(*key).or_default();
            if list.len() >= MAX_PER_KEY {
                self.counters.bounded += 1;
                continue;
            }
            let before = if list.is_empty() {
                0
            } else {
                doubled(&self.cells, list, slot)
            };
            list.push(index);
            let after = if list.len() == 1 {
                0
            } else {
                doubled(&self.cells, list, slot)
            };
            self.doubled[slot.at()] = self.doubled[slot.at()] + after * STRIDE - before * STRIDE;
        }
        Some(OverlayId { index, generation })
    }

    fn remove(&mut self, index: u32) {
        // Still in its cell while its keys are taken off, so that what it doubled can be counted.
        let Some(prefix) = self.cells[index as usize].live.as_ref() else {
            return;
        };
        let slot = prefix.slot;
        for key in &prefix.keys {
            let Some(list) = self.by_key.get_mut(key) else { continue };
            if let Some(at) = list.iter().position(|at| *at == index) {
                let before = doubled(&self.cells, list, slot);
                list.remove(at);
                let after = doubled(&self.cells, list, slot);
                self.doubled[slot.at()] = self.doubled[slot.at()] + after * STRIDE - before * STRIDE;
            }
            if list.is_empty() {
                self.by_key.remove(key);
            }
        }
        let cell = &mut self.cells[index as usize];
        cell.generation = cell.generation.wrapping_add(1);
        let Some(prefix) = cell.live.take() else { return };
        self.free.push(index);
        self.by_expiry.remove(&(prefix.expires, index));
        self.keys -= prefix.keys.len();
        if let Some(router) = &prefix.router
            && let Some(list) = self.by_router.get_mut(router)
        {
            list.remove(&index);
            if list.is_empty() {
                self.by_router.remove(router);
            }
        }
    }

    fn live(&self, id: OverlayId) -> bool {
        self.cells
            .get(id.index as usize)
            .is_some_and(|c| c.generation == id.generation && c.live.is_some())
    }

    /// The request that was to compute the blocks failed.
    pub fn withdraw(&mut self, id: OverlayId) {
        if self.live(id) {
            self.counters.withdrawn += 1;
            self.remove(id.index);
        }
    }

    /// The worker is gone or empty.
    pub(crate) fn withdraw_worker(&mut self, slot: Slot) {
        for index in 0..self.cells.len() as u32 {
            if self.cells[index as usize].live.as_ref().is_some_and(|p| p.slot == slot) {
                self.counters.withdrawn += 1;
                self.remove(index);
            }
        }
    }

    /// The request had its first token: the blocks exist, and are believed until `expires` for the view to show them.
    pub(crate) fn set_ready(&mut self, id: OverlayId, expires: Micros) {
        if self.live(id) {
            self.set_expiry(id, expires);
            self.mark_ready(id.index);
        }
    }

    fn mark_ready(&mut self, index: u32) {
        let Some(prefix) = self.cells[index as usize].live.as_mut().filter(|p| !p.ready) else {
            return;
        };
        prefix.ready = true;
        let slot = prefix.slot;
        let keys = std::mem::take(&mut prefix.keys);
        for key in &keys {
            let Some(list) = self.by_key.get(key).filter(|l| l.contains(&index)) else {
                continue;
            };
            let after = doubled(&self.cells, list, slot);
            if let Some(prefix) = self.cells[index as usize].live.as_mut() {
                prefix.ready = false;
            }
            let before = doubled(&self.cells, list, slot);
            if let Some(prefix) = self.cells[index as usize].live.as_mut() {
                prefix.ready = true;
            }
            self.doubled[slot.at()] = self.doubled[slot.at()] + after * STRIDE - before * STRIDE;
        }
        if let Some(prefix) = self.cells[index as usize].live.as_mut() {
            prefix.keys = keys;
        }
    }

    /// Blocks reserved on a slot by more than one router, beyond the first: they are computed once.
    pub(crate) fn doubled_blocks(&self, slot: Slot) -> u32 {
        self.doubled.get(slot.at()).copied().unwrap_or(0)
    }

    /// Gives an entry another end of life.
    pub(crate) fn set_expiry(&mut self, id: OverlayId, expires: Micros) {
        if !self.live(id) {
            return;
        }
        if let Some(prefix) = self.cells[id.index as usize].live.as_mut() {
            self.by_expiry.remove(&(prefix.expires, id.index));
            prefix.expires = expires;
            self.by_expiry.insert((expires, id.index));
        }
    }

    /// Drops what is too old.
    pub fn expire(&mut self, now: Micros) {
        while let Some(&(at, index)) = self.by_expiry.first() {
            if at > now {
                return;
            }
            self.counters.expired += 1;
            self.remove(index);
        }
    }

    /// Replaces what another router promised. Entries that it repeats stay as they are, with their new end of life.
    pub(crate) fn replace_router<'a>(
        &mut self,
        now: Micros,
        router: &RouterName,
        prefixes: impl Iterator<Item = (Slot, &'a crate::SpeculativePrefix)>,
    ) {
        let mut old: Vec<u32> = self
            .by_router
            .get(router)
            .map(|l| l.iter().copied().collect())
            .unwrap_or_default();
        for (slot, said) in prefixes {
            let expires = now.plus(Micros(said.ttl.0.min(MAX_LIFE.0)));
            let same = old.iter().position(|&index| {
                self.cells[index as usize].live.as_ref().is_some_and(|p| {
                    p.slot == slot
                        && p.first == said.first
                        && p.keys.last() == said.keys.last()
                        && p.keys.len() == said.keys.len()
                })
            });
            if let Some(at) = same {
                let index = old.swap_remove(at);
                let generation = self.cells[index as usize].generation;
                self.set_expiry(OverlayId { index, generation }, expires);
                if said.ready {
                    self.mark_ready(index);
                }
            } else if said.stride == STRIDE {
                let keys = said.keys.iter().copied().take(MAX_KEYS_PER_ENTRY).collect();
                let first = said.first.min(MAX_KEYS_PER_ENTRY as u32);
                self.add(Prefix {
                    slot,
                    router: Some(router.clone()),
                    first,
                    keys,
                    expires,
                    ready: said.ready,
                });
            } else {
                self.counters.bounded += 1;
            }
        }
        for index in old {
            self.remove(index);
        }
    }

    /// Own entries for a frame: the youngest `most`.
    pub(crate) fn own(&self, most: usize) -> impl Iterator<Item = (Slot, &[BlockKey], OwnPromise)> {
        let live = self
            .by_expiry
            .iter()
            .rev()
            .filter_map(|&(_, index)| self.cells[index as usize].live.as_ref());
        live.filter(|p| p.router.is_none()).take(most).map(|p| {
            (
                p.slot,
                p.keys.as_slice(),
                OwnPromise {
                    first: p.first,
                    expires: p.expires,
                    ready: p.ready,
                },
            )
        })
    }

    /// Finds what is promised of `keys`; `committed` gives the leading blocks that a worker is known to hold.
    ///
    /// A promise counts only where it continues what is held or promised above it. Promises that the view has caught up
    /// with are dropped.
    pub(crate) fn look_up(&mut self, keys: &[BlockKey], committed: impl Fn(Slot) -> u32, out: &mut Promises) {
        out.clear();
        if self.by_expiry.is_empty() {
            return;
        }
        for at in (STRIDE as usize - 1..keys.len()).step_by(STRIDE as usize) {
            let Some(list) = self.by_key.get(&keys[at]) else {
                continue;
            };
            let depth = at as u32 + 1;
            for &index in list {
                let Some(prefix) = self.cells[index as usize].live.as_ref() else {
                    continue;
                };
                let held = committed(prefix.slot);
                if held >= prefix.end() {
                    if !self.confirmed.contains(&index) {
                        self.confirmed.push(index);
                    }
                } else if held.max(out.blocks(prefix.slot)) + STRIDE >= depth {
                    out.raise(prefix.slot, depth);
                }
            }
        }
        while let Some(index) = self.confirmed.pop() {
            self.counters.confirmed += 1;
            self.remove(index);
        }
    }
}

#[cfg(test)]
#[path = "overlay/tests.rs"]
mod tests;
