//! A bounded cache from a piece of text to its token ids, least recently used out first.

use crate::Token;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

/// Locks are held for a look-up or an insertion only; this many keep a dozen threads apart.
const SHARDS: usize = 16;

/// What an entry costs beside its text and ids: map slot, list links, two allocations.
const ENTRY_BYTES: usize = 160;

/// A piece larger than this share of its shard isn't kept, so that one giant can't empty it.
const PIECE_SHARE: usize = 8;

/// Counters of the cache since the start, and its size now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheStats {
    /// Pieces found.
    pub hits: u64,
    /// Pieces computed.
    pub misses: u64,
    /// Pieces dropped for room.
    pub evicted: u64,
    /// Pieces held.
    pub entries: u64,
    /// Bytes held, with the cost of each entry.
    pub bytes: u64,
}

/// The cache. Keys are a randomly keyed hash, and every hit compares the text itself.
#[derive(Debug)]
pub(crate) struct PieceCache {
    shards: Vec<Mutex<Shard>>,
    shard_bytes: usize,
    seed: u64,
    hits: AtomicU64,
    misses: AtomicU64,
    evicted: AtomicU64,
}

#[derive(Debug, Default)]
struct Shard {
    map: HashMap<u64, usize, BuildHasherDefault<Straight>>,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Most recently used slot and least recently used one.
    ends: Option<(usize, usize)>,
    bytes: usize,
}

#[derive(Debug)]
struct Slot {
    hash: u64,
    text: Box<str>,
    ids: Box<[Token]>,
    newer: Option<usize>,
    older: Option<usize>,
}

/// The keys are hashes already.
#[derive(Debug, Default, Clone, Copy)]
struct Straight(u64);

impl Hasher for Straight {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |h, b| h.rotate_left(8) ^ u64::from(*b));
    }
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

impl PieceCache {
    /// A cache of at most `bytes_max` bytes.
    pub fn new(bytes_max: usize) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            shard_bytes: bytes_max / SHARDS,
            // Keyed by the process's own randomness, so that clients can't aim at one slot.
            seed: RandomState::new().hash_one(0x0063_6169_726e_u64),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
        }
    }

    fn place(&self, text: &str) -> (u64, &Mutex<Shard>) {
        let hash = xxhash_rust::xxh3::xxh3_64_with_seed(text.as_bytes(), self.seed);
        (hash, &self.shards[(hash >> 60) as usize % SHARDS])
    }

    /// Appends the ids of `text` where it is known, and says whether it was.
    pub fn append(&self, text: &str, out: &mut Vec<Token>) -> bool {
        let (hash, shard) = self.place(text);
        let mut shard = shard.lock();
        let found = shard
            .map
            .get(&hash)
            .copied()
            .filter(|at| *shard.slots[*at].text == *text);
        let counter = match found {
            Some(at) => {
                out.extend_from_slice(&shard.slots[at].ids);
                shard.touch(at);
                &self.hits
            }
            None => &self.misses,
        };
        drop(shard);
        counter.fetch_add(1, Ordering::Relaxed);
        found.is_some()
    }

    /// Keeps the ids of `text`.
    pub fn insert(&self, text: &str, ids: &[Token]) {
        let cost = cost(text, ids);
        if cost > self.shard_bytes / PIECE_SHARE {
            return;
        }
        let (hash, shard) = self.place(text);
        let mut shard = shard.lock();
        if let Some(at) = shard.map.get(&hash).copied() {
            shard.remove(at);
        }
        let mut evicted = 0;
        while shard.bytes + cost > self.shard_bytes {
            let Some((_, oldest)) = shard.ends else { break };
            shard.remove(oldest);
            evicted += 1;
        }
        shard.insert(Slot {
            hash,
            text: text.into(),
            ids: ids.into(),
            newer: None,
            older: None,
        });
        drop(shard);
        self.evicted.fetch_add(evicted, Ordering::Relaxed);
    }

    /// Forgets everything.
    pub fn clear(&self) {
        for shard in &self.shards {
            *shard.lock() = Shard::default();
        }
    }

    pub fn stats(&self) -> CacheStats {
        let mut stats = CacheStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            evicted: self.evicted.load(Ordering::Relaxed),
            ..CacheStats::default()
        };
        for shard in &self.shards {
            let shard = shard.lock();
            stats.entries += shard.map.len() as u64;
            stats.bytes += shard.bytes as u64;
        }
        stats
    }
}

fn cost(text: &str, ids: &[Token]) -> usize {
    text.len() + size_of_val(ids) + ENTRY_BYTES
}

impl Shard {
    fn insert(&mut self, slot: Slot) {
        self.bytes += cost(&slot.text, &slot.ids);
        let hash = slot.hash;
        let at = match self.free.pop() {
            Some(at) => {
                self.slots[at] = slot;
                at
            }
            None => {
                self.slots.push(slot);
                self.slots.len() - 1
            }
        };
        self.map.insert(hash, at);
        self.link(at);
    }

    fn remove(&mut self, at: usize) {
        self.unlink(at);
        let slot = &mut self.slots[at];
        self.bytes -= cost(&slot.text, &slot.ids);
        self.map.remove(&slot.hash);
        slot.text = Box::default();
        slot.ids = Box::default();
        self.free.push(at);
    }

    fn touch(&mut self, at: usize) {
        if self.ends.is_some_and(|(newest, _)| newest != at) {
            self.unlink(at);
            self.link(at);
        }
    }

    fn link(&mut self, at: usize) {
        let (newest, oldest) = self.ends.map_or((None, at), |(newest, oldest)| (Some(newest), oldest));
        self.slots[at].older = newest;
        self.slots[at].newer = None;
        if let Some(newest) = newest {
            self.slots[newest].newer = Some(at);
        }
        self.ends = Some((at, oldest));
    }

    fn unlink(&mut self, at: usize) {
        let (newer, older) = (self.slots[at].newer, self.slots[at].older);
        if let Some(newer) = newer {
            self.slots[newer].older = older;
        }
        if let Some(older) = older {
            self.slots[older].newer = newer;
        }
        self.ends = self.ends.and_then(|(newest, oldest)| {
            let newest = if newest == at { older } else { Some(newest) };
            let oldest = if oldest == at { newer } else { Some(oldest) };
            newest.zip(oldest)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(cache: &PieceCache, text: &str) -> Option<Vec<Token>> {
        let mut out = Vec::new();
        cache.append(text, &mut out).then_some(out)
    }

    #[test]
    fn memory_stays_within_the_limit_and_the_oldest_piece_goes_first() {
        let limit = SHARDS * 4096;
        let cache = PieceCache::new(limit);
        for n in 0..10_000u32 {
            cache.insert(&format!("piece {n}"), &[n, n + 1]);
            let first = cache.append("piece 0", &mut Vec::new());
            assert!(first, "a piece in use was dropped at {n}");
        }
        let stats = cache.stats();
        assert!(stats.bytes <= limit as u64, "{stats:?}");
        assert!(stats.evicted > 9_000 && stats.entries > 100, "{stats:?}");
        assert_eq!(ids(&cache, "piece 9999"), Some(vec![9999, 10000]));
        assert_eq!(ids(&cache, "piece 1"), None);
        cache.clear();
        assert_eq!(cache.stats().bytes, 0);
    }

    #[test]
    fn a_piece_too_large_for_its_share_is_not_kept() {
        let cache = PieceCache::new(SHARDS * 4096);
        cache.insert(&"x".repeat(1000), &[1]);
        assert_eq!(cache.stats().entries, 0);
    }
}
