//! Plain baselines: a map of sets, a sharded concurrent map of lists, and no index at all.

use std::collections::hash_map::Entry;

use cairn_blocks::BlockKey;
use dashmap::DashMap;
use rustc_hash::{FxBuildHasher, FxHashMap, FxHashSet};

use crate::contender::Contender;
use crate::log::{BlockId, Event, Log};

/// Keys that a worker came to hold or gave up.
pub struct Change {
    worker: u32,
    stored: bool,
    keys: Vec<BlockKey>,
}

fn changes(log: &Log, events: &[Event]) -> Vec<Change> {
    let keys = |span| log.span(span).iter().map(|id| log.blocks.key[*id as usize]).collect();
    let change = |event: &Event| match *event {
        Event::Store { worker, blocks } => Some(Change {
            worker,
            stored: true,
            keys: keys(blocks),
        }),
        Event::Remove { worker, blocks } => Some(Change {
            worker,
            stored: false,
            keys: keys(blocks),
        }),
        Event::Match { .. } => None,
    };
    events.iter().filter_map(change).collect()
}

fn query(log: &Log, prompt: &[BlockId]) -> Vec<BlockKey> {
    prompt.iter().map(|id| log.blocks.key[*id as usize]).collect()
}

/// Counts for each worker how many leading keys it holds; `holds` drops from a list of workers those without a key.
fn walk(
    workers: u32,
    keys: &[BlockKey],
    found: &mut Vec<(u32, u32)>,
    mut first: impl FnMut(BlockKey, &mut Vec<u32>),
    mut holds: impl FnMut(BlockKey, &mut Vec<u32>),
) {
    found.clear();
    let mut alive = Vec::with_capacity(workers as usize);
    let Some((head, rest)) = keys.split_first() else { return };
    first(*head, &mut alive);
    let mut depth = 1;
    for key in rest {
        if alive.is_empty() {
            break;
        }
        let before = alive.clone();
        holds(*key, &mut alive);
        if alive.len() < before.len() {
            found.extend(before.iter().filter(|w| !alive.contains(w)).map(|w| (*w, depth)));
        }
        depth += 1;
    }
    found.extend(alive.into_iter().map(|w| (w, depth)));
}

/// A hash map from key to a hash set of workers.
pub struct MapOfSets {
    workers: u32,
    map: FxHashMap<BlockKey, FxHashSet<u32>>,
    found: Vec<(u32, u32)>,
}

impl Contender for MapOfSets {
    type Batch = Vec<Change>;
    type Query = Vec<BlockKey>;
    type Key = BlockKey;

    fn new(log: &Log) -> Self {
        Self {
            workers: log.workers,
            map: FxHashMap::default(),
            found: Vec::new(),
        }
    }

    fn prepare(&mut self, log: &Log, events: &[Event]) -> Vec<Change> {
        changes(log, events)
    }

    fn ingest(&mut self, batch: &mut Vec<Change>) {
        for change in batch {
            for key in &change.keys {
                if change.stored {
                    self.map.entry(*key).or_default().insert(change.worker);
                } else if let Entry::Occupied(mut entry) = self.map.entry(*key) {
                    entry.get_mut().remove(&change.worker);
                    if entry.get().is_empty() {
                        entry.remove();
                    }
                }
            }
        }
    }

    fn query(&self, log: &Log, prompt: &[BlockId]) -> Vec<BlockKey> {
        query(log, prompt)
    }

    fn keys(query: &Vec<BlockKey>) -> &[BlockKey] {
        query
    }

    fn find(&mut self, query: &mut Vec<BlockKey>) {
        let map = &self.map;
        walk(
            self.workers,
            query,
            &mut self.found,
            |key, alive| alive.extend(map.get(&key).into_iter().flatten()),
            |key, alive| match map.get(&key) {
                Some(set) => alive.retain(|w| set.contains(w)),
                None => alive.clear(),
            },
        );
    }

    fn answer(&self, out: &mut Vec<(u32, u32)>) {
        out.extend_from_slice(&self.found);
    }
}

/// A sharded concurrent map from key to a list of workers.
pub struct ShardedMap {
    workers: u32,
    map: DashMap<BlockKey, Vec<u32>, FxBuildHasher>,
    found: Vec<(u32, u32)>,
}

impl Contender for ShardedMap {
    type Batch = Vec<Change>;
    type Query = Vec<BlockKey>;
    type Key = BlockKey;

    fn new(log: &Log) -> Self {
        Self {
            workers: log.workers,
            map: DashMap::with_hasher(FxBuildHasher),
            found: Vec::new(),
        }
    }

    fn prepare(&mut self, log: &Log, events: &[Event]) -> Vec<Change> {
        changes(log, events)
    }

    fn ingest(&mut self, batch: &mut Vec<Change>) {
        for change in batch {
            for key in &change.keys {
                if change.stored {
                    self.map.entry(*key).or_default().push(change.worker);
                } else {
                    self.map.remove_if_mut(key, |_, workers| {
                        workers.retain(|w| *w != change.worker);
                        workers.is_empty()
                    });
                }
            }
        }
    }

    fn query(&self, log: &Log, prompt: &[BlockId]) -> Vec<BlockKey> {
        query(log, prompt)
    }

    fn keys(query: &Vec<BlockKey>) -> &[BlockKey] {
        query
    }

    fn find(&mut self, query: &mut Vec<BlockKey>) {
        let map = &self.map;
        walk(
            self.workers,
            query,
            &mut self.found,
            |key, alive| {
                if let Some(workers) = map.get(&key) {
                    alive.extend_from_slice(&workers);
                }
            },
            |key, alive| match map.get(&key) {
                Some(workers) => alive.retain(|w| workers.contains(w)),
                None => alive.clear(),
            },
        );
    }

    fn answer(&self, out: &mut Vec<(u32, u32)>) {
        out.extend_from_slice(&self.found);
    }
}

/// No index: what the harness itself costs.
pub struct Empty {
    sum: u64,
}

impl Contender for Empty {
    type Batch = Vec<Change>;
    type Query = Vec<BlockKey>;
    type Key = BlockKey;

    fn new(_: &Log) -> Self {
        Self { sum: 0 }
    }

    fn prepare(&mut self, log: &Log, events: &[Event]) -> Vec<Change> {
        changes(log, events)
    }

    fn ingest(&mut self, batch: &mut Vec<Change>) {
        for change in batch {
            self.sum ^= change.keys.iter().fold(0, |sum, key| sum ^ key.0);
        }
    }

    fn query(&self, log: &Log, prompt: &[BlockId]) -> Vec<BlockKey> {
        query(log, prompt)
    }

    fn keys(query: &Vec<BlockKey>) -> &[BlockKey] {
        query
    }

    fn find(&mut self, _: &mut Vec<BlockKey>) {
        std::hint::black_box(self.sum);
    }

    fn answer(&self, _: &mut Vec<(u32, u32)>) {}
}
