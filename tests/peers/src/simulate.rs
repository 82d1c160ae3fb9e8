//! Caches with tail-first LRU eviction, which turn requests into the log of everyone's events and right answers.

use rand::Rng;
use rand::rngs::SmallRng;
use rustc_hash::FxHashMap;

use crate::log::{BlockId, Event, Log, NONE, checksum};
use crate::trace::Request;

/// Blocks of one prefill step: 8,192 tokens.
const CHUNK: usize = 512;
/// Of ten requests this many go where most of their prompt is, the others anywhere, as load balancing does.
const AFFINE: f64 = 0.7;

/// How a workload's caches behave.
pub struct Caches {
    /// How many.
    pub workers: u32,
    /// Blocks in each.
    pub capacity: u32,
    /// Share of evictions that take a random block instead of the least recently used tail.
    pub holes: f64,
}

/// Makes the log of what `requests` do to the caches.
pub fn simulate(caches: &Caches, requests: &[Request], rng: &mut SmallRng) -> Log {
    let mut run = Run::new(caches);
    let mut names: FxHashMap<(BlockId, u64), BlockId> = FxHashMap::default();
    for (n, request) in requests.iter().enumerate() {
        let decoded = (0..u64::from(request.answer)).map(|i| 1 << 52 | (n as u64) << 20 | i);
        let words = request.words.iter().copied().chain(decoded);
        let mut above = NONE;
        let chain: Vec<BlockId> = words
            .take(caches.capacity as usize)
            .map(|word| {
                above = *names
                    .entry((above, word))
                    .or_insert_with(|| run.log.blocks.push(above, word));
                above
            })
            .collect();
        let prompt = request.words.len().min(chain.len());
        if prompt > 0 {
            run.request(rng, &chain, prompt);
        }
    }
    run.log.memberships = run.caches.iter().map(|c| c.slots_of.len() as u64).sum();
    run.log
}

#[derive(Clone, Copy)]
struct Slot {
    block: BlockId,
    /// Neighbours in order of use; `NONE` at the ends.
    newer: u32,
    older: u32,
    /// In use by the present request, so not in that order.
    used: bool,
}

/// One worker's blocks.
#[derive(Default)]
struct Cache {
    slots_of: FxHashMap<BlockId, u32>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
}

impl Cache {
    fn new() -> Self {
        Self {
            newest: NONE,
            oldest: NONE,
            ..Self::default()
        }
    }

    fn unlink(&mut self, slot: u32) {
        let Slot { newer, older, .. } = self.slots[slot as usize];
        match newer {
            NONE => self.newest = older,
            _ => self.slots[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            _ => self.slots[older as usize].newer = newer,
        }
    }

    fn link_newest(&mut self, slot: u32) {
        let older = self.newest;
        let entry = &mut self.slots[slot as usize];
        (entry.newer, entry.older) = (NONE, older);
        match older {
            NONE => self.oldest = slot,
            _ => self.slots[older as usize].newer = slot,
        }
        self.newest = slot;
    }

    /// Takes a block out of the order of use. Returns whether the cache has it.
    fn take_into_use(&mut self, block: BlockId) -> bool {
        let Some(&slot) = self.slots_of.get(&block) else {
            return false;
        };
        if !self.slots[slot as usize].used {
            self.unlink(slot);
            self.slots[slot as usize].used = true;
        }
        true
    }

    fn insert_in_use(&mut self, block: BlockId) {
        let entry = Slot {
            block,
            newer: NONE,
            older: NONE,
            used: true,
        };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = entry;
                slot
            }
            None => {
                self.slots.push(entry);
                self.slots.len() as u32 - 1
            }
        };
        self.slots_of.insert(block, slot);
    }

    fn release(&mut self, block: BlockId) {
        if let Some(&slot) = self.slots_of.get(&block)
            && self.slots[slot as usize].used
        {
            self.slots[slot as usize].used = false;
            self.link_newest(slot);
        }
    }

    /// Evicts the least recently used block, or a random one that isn't in use.
    fn evict(&mut self, rng: &mut SmallRng, random: bool) -> Option<BlockId> {
        if self.oldest == NONE {
            return None;
        }
        let slot = if random {
            // Ends: some slot is in the order of use.
            loop {
                let slot = rng.random_range(0..self.slots.len() as u32);
                let entry = &self.slots[slot as usize];
                if !entry.used && self.slots_of.get(&entry.block) == Some(&slot) {
                    break slot;
                }
            }
        } else {
            self.oldest
        };
        self.unlink(slot);
        let block = self.slots[slot as usize].block;
        self.slots_of.remove(&block);
        self.free.push(slot);
        Some(block)
    }
}

/// Holders of every block, the plainest way there is: a row of bits for each.
struct Oracle {
    words: usize,
    held: Vec<u64>,
}

impl Oracle {
    fn set(&mut self, block: BlockId, worker: u32, held: bool) {
        let at = block as usize * self.words + worker as usize / 64;
        if self.held.len() <= at {
            self.held.resize((block as usize + 1) * self.words, 0);
        }
        let bit = 1 << (worker % 64);
        if held {
            self.held[at] |= bit;
        } else {
            self.held[at] &= !bit;
        }
    }

    /// Leading blocks of a chain that each worker holds, by a linear walk.
    fn depths(&self, workers: u32, chain: &[BlockId]) -> Vec<u32> {
        let mut alive: Vec<u32> = (0..workers).collect();
        let mut depths = vec![0; workers as usize];
        for block in chain {
            let row = self.held.get(*block as usize * self.words..).unwrap_or(&[]);
            alive.retain(|w| row.get(*w as usize / 64).is_some_and(|word| word >> (w % 64) & 1 == 1));
            if alive.is_empty() {
                break;
            }
            for worker in &alive {
                depths[*worker as usize] += 1;
            }
        }
        depths
    }
}

struct Run {
    log: Log,
    caches: Vec<Cache>,
    holes: f64,
    oracle: Oracle,
}

impl Run {
    fn new(caches: &Caches) -> Self {
        Self {
            log: Log {
                workers: caches.workers,
                capacity: caches.capacity,
                ..Log::default()
            },
            caches: (0..caches.workers).map(|_| Cache::new()).collect(),
            holes: caches.holes,
            oracle: Oracle {
                words: caches.workers.div_ceil(64) as usize,
                held: Vec::new(),
            },
        }
    }

    fn request(&mut self, rng: &mut SmallRng, chain: &[BlockId], prompt: usize) {
        let workers = self.log.workers;
        let depths = self.oracle.depths(workers, &chain[..prompt]);
        let best = depths.iter().copied().max().unwrap_or(0);
        let blocks = self.log.keep(&chain[..prompt]);
        self.log.events.push(Event::Match {
            blocks,
            right: checksum((0..).zip(depths.iter().copied())),
            best,
        });
        let worker = if rng.random_bool(AFFINE) {
            let start = rng.random_range(0..workers);
            let order = (0..workers).map(|i| (i + start) % workers);
            order.max_by_key(|w| depths[*w as usize]).unwrap_or(start)
        } else {
            rng.random_range(0..workers)
        };
        for block in chain {
            self.caches[worker as usize].take_into_use(*block);
        }
        // The prompt in chunks, then the answer block by block.
        let mut at = 0;
        while at < chain.len() {
            let end = if at < prompt { (at + CHUNK).min(prompt) } else { at + 1 };
            let cache = &self.caches[worker as usize];
            let missing = chain[at..end]
                .iter()
                .filter(|b| !cache.slots_of.contains_key(b))
                .count();
            if missing > 0 {
                self.make_room(rng, worker, missing);
                self.store(worker, &chain[at..end]);
            }
            at = end;
        }
        // The tail is the first to go.
        for block in chain.iter().rev() {
            self.caches[worker as usize].release(*block);
        }
    }

    fn make_room(&mut self, rng: &mut SmallRng, worker: u32, blocks: usize) {
        let cache = &mut self.caches[worker as usize];
        let mut gone = Vec::new();
        while cache.slots_of.len() + blocks > self.log.capacity as usize {
            let random = self.holes > 0.0 && rng.random_bool(self.holes);
            let Some(block) = cache.evict(rng, random) else { break };
            self.oracle.set(block, worker, false);
            gone.push(block);
        }
        if !gone.is_empty() {
            self.log.changes += gone.len() as u64;
            let blocks = self.log.keep(&gone);
            self.log.events.push(Event::Remove { worker, blocks });
        }
    }

    /// Stores the stretches of a piece of a chain that the cache lacks.
    fn store(&mut self, worker: u32, piece: &[BlockId]) {
        let mut rest = piece;
        while let Some(start) = rest.iter().position(|b| !self.has(worker, *b)) {
            rest = &rest[start..];
            let len = rest.iter().position(|b| self.has(worker, *b)).unwrap_or(rest.len());
            let (stretch, after) = rest.split_at(len);
            for block in stretch {
                self.caches[worker as usize].insert_in_use(*block);
                self.oracle.set(*block, worker, true);
            }
            self.log.changes += len as u64;
            let blocks = self.log.keep(stretch);
            self.log.events.push(Event::Store { worker, blocks });
            rest = after;
        }
    }

    fn has(&self, worker: u32, block: BlockId) -> bool {
        self.caches[worker as usize].slots_of.contains_key(&block)
    }
}
