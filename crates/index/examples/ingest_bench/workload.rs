//! Traces, and the LRU caches that turn them into stores and removals.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader};

use cairn_blocks::BlockKey;
use rand::Rng;
use rand::rngs::SmallRng;

/// One thing that happens.
pub enum Event {
    Store {
        holder: u32,
        anchor: BlockKey,
        depth: u32,
        keys: Vec<BlockKey>,
    },
    Remove {
        holder: u32,
        key: BlockKey,
        depth: u32,
        count: u32,
    },
    /// A request asks for its prefix.
    Match { keys: Vec<BlockKey> },
}

/// One row of a trace.
pub struct Request {
    prompt: Vec<BlockKey>,
    answer: u32,
}

const ROOT: BlockKey = BlockKey(0xa5a5);
const BLOCK: usize = 16;

fn key(parent: BlockKey, word: u64) -> BlockKey {
    let mut z = parent.0.rotate_left(23) ^ word.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    BlockKey(z ^ (z >> 31))
}

/// Requests of a Mooncake-shaped trace, in 16-token blocks.
pub fn trace(path: &std::path::Path, limit: usize, per_id: usize) -> Vec<Request> {
    let file = std::fs::File::open(path).unwrap();
    let lines = BufReader::new(flate2::read::GzDecoder::new(file)).lines();
    lines
        .take(limit)
        .map(|line| {
            let row: serde_json::Value = serde_json::from_str(&line.unwrap()).unwrap();
            let blocks = row["input_length"].as_u64().unwrap() as usize / BLOCK;
            let mut parent = ROOT;
            let ids = row["hash_ids"].as_array().unwrap();
            let words = ids.iter().flat_map(|id| {
                let id = id.as_u64().unwrap();
                (0..per_id as u64).map(move |sub| id * per_id as u64 + sub)
            });
            let prompt = words
                .take(blocks)
                .map(|word| {
                    parent = key(parent, word);
                    parent
                })
                .collect();
            Request {
                prompt,
                answer: row["output_length"].as_u64().unwrap() as u32 / BLOCK as u32,
            }
        })
        .collect()
}

/// Conversations below a few system prompts.
pub fn synthetic(rng: &mut SmallRng, count: usize) -> Vec<Request> {
    let mut open: Vec<Vec<BlockKey>> = Vec::new();
    (0..count)
        .map(|n| {
            let fresh = open.len() < 50 || rng.random_bool(0.4);
            let mut prompt = if fresh {
                let mut parent = key(ROOT, rng.random_range(0..8));
                (0..30)
                    .map(|i| {
                        parent = key(parent, i);
                        parent
                    })
                    .collect()
            } else {
                let at = rng.random_range(0..open.len());
                open.swap_remove(at)
            };
            let mut parent = *prompt.last().unwrap();
            for i in 0..rng.random_range(40..900) {
                parent = key(parent, (n * 1000 + i) as u64);
                prompt.push(parent);
            }
            if prompt.len() < 6_000 {
                open.push(prompt.clone());
            }
            Request {
                prompt,
                answer: rng.random_range(2..50),
            }
        })
        .collect()
}

/// One worker's cache.
#[derive(Default)]
struct Cache {
    /// Last use and depth of each block.
    blocks: HashMap<BlockKey, (u64, u32, BlockKey)>,
    by_use: BTreeMap<u64, BlockKey>,
    keys: Vec<BlockKey>,
}

/// All workers.
pub struct Simulation {
    caches: Vec<Cache>,
    capacity: usize,
    random: bool,
    clock: u64,
    events: Vec<Event>,
    changes: u64,
}

impl Simulation {
    pub fn new(workers: usize, capacity: usize, random: bool) -> Self {
        let caches = (0..workers).map(|_| Cache::default()).collect();
        Self {
            caches,
            capacity,
            random,
            clock: 0,
            events: Vec::new(),
            changes: 0,
        }
    }

    /// Blocks in all caches.
    pub fn memberships(&self) -> usize {
        self.caches.iter().map(|c| c.blocks.len()).sum()
    }

    /// What happened, and how many block changes that is.
    pub fn finish(self) -> (Vec<Event>, u64) {
        (self.events, self.changes)
    }

    pub fn request(&mut self, rng: &mut SmallRng, n: usize, request: &Request) {
        let mut chain = request.prompt.clone();
        if chain.is_empty() {
            return;
        }
        self.events.push(Event::Match { keys: chain.clone() });
        // Most requests go where their prefix is, some elsewhere, as load balancing does.
        let hit = |cache: &Cache| chain.iter().take_while(|k| cache.blocks.contains_key(k)).count();
        let worker = if rng.random_bool(0.7) {
            let start = rng.random_range(0..self.caches.len());
            let order = (0..self.caches.len()).map(|i| (i + start) % self.caches.len());
            order.max_by_key(|&w| hit(&self.caches[w])).unwrap()
        } else {
            rng.random_range(0..self.caches.len())
        };
        let held = hit(&self.caches[worker]);
        let prompt = chain.len();
        let mut parent = *chain.last().unwrap();
        for i in 0..request.answer {
            parent = key(parent, 1 << 40 | (n as u64) << 16 | u64::from(i));
            chain.push(parent);
        }
        chain.truncate(self.capacity);
        let prompt = prompt.min(chain.len());
        // The prompt in chunks of 8,192 tokens, then the answer block by block.
        let mut at = held;
        while at < chain.len() {
            let end = if at < prompt {
                (at + 8192 / BLOCK).min(prompt)
            } else {
                at + 1
            };
            let missing = chain[at..end]
                .iter()
                .filter(|k| !self.caches[worker].blocks.contains_key(k))
                .count();
            self.make_room(rng, worker, missing, &chain);
            self.store_missing(worker, &chain, at, end);
            at = end;
        }
        // The tail is the first to go.
        let cache = &mut self.caches[worker];
        for &key in chain.iter().rev() {
            self.clock += 1;
            if let Some(entry) = cache.blocks.get_mut(&key) {
                cache.by_use.remove(&entry.0);
                entry.0 = self.clock;
                cache.by_use.insert(self.clock, key);
            }
        }
    }

    /// Stores the stretches of `chain[start..end]` that the cache lacks.
    fn store_missing(&mut self, worker: usize, chain: &[BlockKey], start: usize, end: usize) {
        let mut at = start;
        while at < end {
            let cache = &mut self.caches[worker];
            let to = (at..end).find(|&i| cache.blocks.contains_key(&chain[i])).unwrap_or(end);
            if to == at {
                at += 1;
                continue;
            }
            let anchor = if at == 0 { ROOT } else { chain[at - 1] };
            let keys = chain[at..to].to_vec();
            self.changes += keys.len() as u64;
            self.events.push(Event::Store {
                holder: worker as u32,
                anchor,
                depth: at as u32,
                keys,
            });
            for depth in at..to {
                let parent = if depth == 0 { ROOT } else { chain[depth - 1] };
                // In use: not in `by_use` until the request ends.
                cache.blocks.insert(chain[depth], (u64::MAX, depth as u32 + 1, parent));
                if self.random {
                    cache.keys.push(chain[depth]);
                }
            }
            at = to;
        }
    }

    fn make_room(&mut self, rng: &mut SmallRng, worker: usize, blocks: usize, keep: &[BlockKey]) {
        let cache = &mut self.caches[worker];
        let mut pending: Option<(BlockKey, u32, u32, BlockKey)> = None;
        let kept: std::collections::HashSet<BlockKey> = if self.random {
            keep.iter().copied().collect()
        } else {
            Default::default()
        };
        if !self.random {
            // What the request uses isn't evicted.
            for key in keep {
                if let Some(entry) = cache.blocks.get_mut(key)
                    && entry.0 != u64::MAX
                {
                    cache.by_use.remove(&entry.0);
                    entry.0 = u64::MAX;
                }
            }
        }
        while cache.blocks.len() + blocks > self.capacity {
            let key = if self.random {
                let at = rng.random_range(0..cache.keys.len());
                if kept.contains(&cache.keys[at]) {
                    continue;
                }
                cache.keys.swap_remove(at)
            } else {
                let Some((_, key)) = cache.by_use.pop_first() else {
                    break;
                };
                key
            };
            let (used, depth, parent) = cache.blocks.remove(&key).unwrap();
            cache.by_use.remove(&used);
            self.changes += 1;
            match &mut pending {
                Some((_, _, count, next)) if *next == key => {
                    *count += 1;
                    *next = parent;
                }
                _ => {
                    if let Some((key, depth, count, _)) = pending.replace((key, depth, 1, parent)) {
                        self.events.push(Event::Remove {
                            holder: worker as u32,
                            key,
                            depth,
                            count,
                        });
                    }
                }
            }
        }
        if let Some((key, depth, count, _)) = pending {
            self.events.push(Event::Remove {
                holder: worker as u32,
                key,
                depth,
                count,
            });
        }
    }
}
