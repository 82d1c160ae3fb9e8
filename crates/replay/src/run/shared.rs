//! A KV store that every engine can read: filled as engines store blocks, bounded, least recently used ends of chains first.

use std::collections::BTreeMap;

use crate::engine_model::EngineHash;
use crate::engine_model::hash::LookupMap;

struct Entry {
    stamp: u64,
    parent: Option<EngineHash>,
    /// Blocks from the chain's start up to this one.
    depth: u32,
    children: u32,
}

/// What the store tells the index.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Blocks below `parent`, which is at `depth`; 0 and `None` at a chain's start.
    Stored {
        parent: Option<EngineHash>,
        depth: u32,
        hashes: Vec<EngineHash>,
    },
    /// A block at `depth` went.
    Removed { hash: EngineHash, depth: u32 },
}

/// See the module. What it holds is closed towards the chains' starts, so whatever it has can be found.
pub(super) struct SharedStore {
    blocks: usize,
    entries: LookupMap<EngineHash, Entry>,
    /// Blocks that no other block follows, least recently used first.
    ends: BTreeMap<u64, EngineHash>,
    clock: u64,
}

impl SharedStore {
    /// An empty store for so many blocks.
    pub(super) fn new(blocks: u64) -> Self {
        Self {
            blocks: usize::try_from(blocks).unwrap_or(usize::MAX),
            entries: LookupMap::default(),
            ends: BTreeMap::new(),
            clock: 0,
        }
    }

    /// Leading blocks of a chain that are held.
    pub(super) fn held(&self, chain: &[EngineHash]) -> u32 {
        let held = chain.iter().take_while(|hash| self.entries.contains_key(*hash));
        held.count() as u32
    }

    /// An engine looks for a chain, as they do for each prompt: what is held of it was used now, its start last.
    pub(super) fn look_up(&mut self, chain: &[EngineHash]) {
        let held = self.held(chain) as usize;
        for hash in chain[..held].iter().rev() {
            self.clock += 1;
            if let Some(entry) = self.entries.get_mut(hash) {
                if entry.children == 0 {
                    self.ends.remove(&entry.stamp);
                    self.ends.insert(self.clock, *hash);
                }
                entry.stamp = self.clock;
            }
        }
    }

    /// Takes blocks that an engine stored below `parent`; nothing where the store dropped that one meanwhile.
    pub(super) fn store(&mut self, parent: Option<EngineHash>, hashes: &[EngineHash], changes: &mut Vec<Change>) {
        let known = hashes
            .iter()
            .take_while(|hash| self.entries.contains_key(*hash))
            .count();
        let parent = if known > 0 { Some(hashes[known - 1]) } else { parent };
        let depth = match parent {
            None => 0,
            Some(parent) => match self.entries.get(&parent) {
                Some(entry) => entry.depth,
                None => return,
            },
        };
        let (mut before, mut removed) = (parent, Vec::new());
        let mut stored = Vec::new();
        for hash in &hashes[known..] {
            if before.is_some_and(|before| !self.entries.contains_key(&before)) {
                break;
            }
            self.insert(*hash, before, depth + stored.len() as u32 + 1);
            stored.push(*hash);
            before = Some(*hash);
            while self.entries.len() > self.blocks {
                removed.extend(self.remove_one());
            }
        }
        if !stored.is_empty() {
            changes.push(Change::Stored {
                parent,
                depth,
                hashes: stored,
            });
        }
        changes.append(&mut removed);
    }

    fn insert(&mut self, hash: EngineHash, parent: Option<EngineHash>, depth: u32) {
        if let Some(entry) = parent.and_then(|parent| self.entries.get_mut(&parent)) {
            entry.children += 1;
            self.ends.remove(&entry.stamp);
        }
        self.clock += 1;
        self.ends.insert(self.clock, hash);
        let entry = Entry {
            stamp: self.clock,
            parent,
            depth,
            children: 0,
        };
        self.entries.insert(hash, entry);
    }

    fn remove_one(&mut self) -> Option<Change> {
        let (_, hash) = self.ends.pop_first()?;
        let entry = self.entries.remove(&hash)?;
        if let Some(parent) = entry.parent
            && let Some(above) = self.entries.get_mut(&parent)
        {
            above.children -= 1;
            if above.children == 0 {
                self.ends.insert(above.stamp, parent);
            }
        }
        Some(Change::Removed {
            hash,
            depth: entry.depth,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(name: u64, blocks: u64) -> Vec<EngineHash> {
        (0..blocks).map(|at| EngineHash(name * 100 + at)).collect()
    }

    #[test]
    fn the_least_recently_used_end_of_a_chain_goes_first() {
        let (mut store, mut changes) = (SharedStore::new(6), Vec::new());
        let (a, b, c) = (chain(1, 3), chain(2, 3), chain(3, 2));
        store.store(None, &a, &mut changes);
        store.store(None, &b, &mut changes);
        assert_eq!(changes.len(), 2);
        store.look_up(&a);
        changes.clear();
        store.store(None, &c, &mut changes);
        let removed = |hash, depth| Change::Removed { hash, depth };
        let stored = Change::Stored {
            parent: None,
            depth: 0,
            hashes: c.clone(),
        };
        assert_eq!(changes, [stored, removed(b[2], 3), removed(b[1], 2)]);
        assert_eq!((store.held(&a), store.held(&b), store.held(&c)), (3, 1, 2));
    }

    #[test]
    fn what_hangs_below_a_dropped_block_is_not_stored_and_what_is_known_not_told_twice() {
        let (mut store, mut changes) = (SharedStore::new(4), Vec::new());
        let a = chain(1, 6);
        store.store(Some(a[1]), &a[2..4], &mut changes);
        assert_eq!(changes, []);
        store.store(None, &a[..2], &mut changes);
        store.store(None, &a[..3], &mut changes);
        let told = Change::Stored {
            parent: Some(a[1]),
            depth: 2,
            hashes: vec![a[2]],
        };
        assert_eq!(changes[1..], [told]);
        // A chain longer than the store: what fits of it stays.
        store.store(Some(a[2]), &a[3..], &mut changes);
        assert_eq!(store.held(&a), 4);
    }
}
