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

/// Counts for each worker how many leading keys it holds; `holds` keeps of a list of workers those with a key.
fn walk(
    keys: &[BlockKey],
    found: &mut Vec<(u32, u32)>,
    first: impl FnOnce(BlockKey, &mut Vec<u32>),
    mut holds: impl FnMut(BlockKey, &mut Vec<u32>, &mut Vec<u32>),
) {
    found.clear();
    let (mut alive, mut gone) = (Vec::new(), Vec::new());
    let Some((head, rest)) = keys.split_first() else { return };
    first(*head, &mut alive);
    let mut depth = 1;
    for key in rest {
        if alive.is_empty() {
            break;
        }
        holds(*key, &mut alive, &mut gone);
        found.extend(gone.drain(..).map(|worker| (worker, depth)));
        depth += 1;
    }
    found.extend(alive.into_iter().map(|worker| (worker, depth)));
}

/// Keeps the workers that `held` says yes to, and moves the others to `gone`.
fn part(alive: &mut Vec<u32>, gone: &mut Vec<u32>, mut held: impl FnMut(u32) -> bool) {
    alive.retain(|worker| {
        let stays = held(*worker);
        if !stays {
            gone.push(*worker);
        }
        stays
    });
}

/// A hash map from key to a hash set of workers.
pub struct MapOfSets {
    map: FxHashMap<BlockKey, FxHashSet<u32>>,
    found: Vec<(u32, u32)>,
}

impl Contender for MapOfSets {
    type Batch = Vec<Change>;
    type Query = Vec<BlockKey>;
    type Key = BlockKey;

    fn new(_: &Log) -> Self {
        Self {
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
            query,
            &mut self.found,
            |key, alive| alive.extend(map.get(&key).into_iter().flatten()),
            |key, alive, gone| match map.get(&key) {
                Some(set) => part(alive, gone, |worker| set.contains(&worker)),
                None => gone.append(alive),
            },
        );
    }

    fn answer(&self, out: &mut Vec<(u32, u32)>) {
        out.extend_from_slice(&self.found);
    }
}

/// A sharded concurrent map from key to an ascending list of workers.
pub struct ShardedMap {
    map: DashMap<BlockKey, Vec<u32>, FxBuildHasher>,
    found: Vec<(u32, u32)>,
}

impl Contender for ShardedMap {
    type Batch = Vec<Change>;
    type Query = Vec<BlockKey>;
    type Key = BlockKey;

    fn new(_: &Log) -> Self {
        Self {
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
                    let mut workers = self.map.entry(*key).or_default();
                    if let Err(at) = workers.binary_search(&change.worker) {
                        workers.insert(at, change.worker);
                    }
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
            query,
            &mut self.found,
            |key, alive| {
                if let Some(workers) = map.get(&key) {
                    alive.extend_from_slice(&workers);
                }
            },
            |key, alive, gone| match map.get(&key) {
                // Both ascend, so one pass over each does.
                Some(workers) => {
                    let mut rest = workers.iter().copied().peekable();
                    part(alive, gone, |worker| {
                        while rest.next_if(|held| *held < worker).is_some() {}
                        rest.peek() == Some(&worker)
                    });
                }
                None => gone.append(alive),
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
