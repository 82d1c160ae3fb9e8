//! The paged block pool with prefix caching: reference counts, copies of equal blocks, and a free queue in eviction order.

use super::events::{CacheEvent, Medium};
use super::hash::{EngineHash, LookupMap};

/// Index of a physical block; block 0 is reserved as the engine's null block.
pub type BlockId = u32;

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Block {
    hash: Option<EngineHash>,
    refs: u32,
    queued: bool,
    previous: u32,
    next: u32,
    /// Next physical copy of the same hash, in order of caching.
    next_copy: u32,
}

/// Physical blocks of one worker's GPU cache.
///
/// A block without references waits in the free queue and keeps its content until it is taken again. The queue's head is
/// taken first. Blocks with a hash join its tail, so what was freed first is evicted first; those without one, which
/// nobody can hit, join its head (vLLM's `BlockPool.free_blocks`, from 0.24 on). Freeing a request queues its last block
/// first.
pub struct BlockPool {
    blocks: Vec<Block>,
    cached: LookupMap<EngineHash, u32>,
    head: u32,
    tail: u32,
    free: usize,
    copies: usize,
}

impl BlockPool {
    /// A pool of `total` blocks of which one is the null block; `total` is at least 2.
    #[must_use]
    pub fn new(total: u32) -> Self {
        let empty = Block {
            hash: None,
            refs: 0,
            queued: false,
            previous: NONE,
            next: NONE,
            next_copy: NONE,
        };
        let mut pool = Self {
            blocks: vec![empty; total.max(2) as usize],
            cached: LookupMap::default(),
            head: NONE,
            tail: NONE,
            free: 0,
            copies: 0,
        };
        for id in 1..pool.blocks.len() as u32 {
            pool.insert_after(pool.tail, id);
        }
        pool
    }

    /// Blocks that can hold content.
    #[must_use]
    pub fn usable(&self) -> usize {
        self.blocks.len() - 1
    }

    /// Blocks without a reference, cached or not.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free
    }

    /// Physical blocks that carry a hash, counting every copy.
    #[must_use]
    pub fn cached_copies(&self) -> usize {
        self.copies
    }

    /// The oldest copy of `hash`.
    #[must_use]
    pub fn lookup(&self, hash: EngineHash) -> Option<BlockId> {
        self.cached.get(&hash).copied()
    }

    /// Whether a block is waiting in the free queue.
    #[must_use]
    pub fn is_free(&self, id: BlockId) -> bool {
        self.blocks[id as usize].refs == 0
    }

    /// Takes a reference; a block of the free queue leaves it.
    pub fn touch(&mut self, id: BlockId) {
        if self.blocks[id as usize].refs == 0 {
            self.unlink(id);
        }
        self.blocks[id as usize].refs += 1;
    }

    /// Takes the head of the free queue with one reference, evicting what it held.
    ///
    /// Returns `None` when every block is referenced.
    pub fn take(&mut self, events: &mut Vec<CacheEvent>) -> Option<(BlockId, Option<EngineHash>)> {
        let id = self.head;
        if id == NONE {
            return None;
        }
        self.unlink(id);
        let evicted = self.forget(id);
        if let Some(hash) = evicted {
            events.push(CacheEvent::Removed {
                hashes: vec![hash],
                medium: Medium::Gpu,
            });
        }
        self.blocks[id as usize].refs = 1;
        Some((id, evicted))
    }

    /// Gives a referenced block its hash, as a further copy where the hash is cached already.
    pub fn cache(&mut self, id: BlockId, hash: EngineHash) {
        let block = &mut self.blocks[id as usize];
        debug_assert!(block.hash.is_none(), "a block is cached once between two allocations");
        block.hash = Some(hash);
        block.next_copy = NONE;
        self.copies += 1;
        match self.cached.get(&hash).copied() {
            None => {
                self.cached.insert(hash, id);
            }
            Some(first) => {
                let mut last = first;
                while self.blocks[last as usize].next_copy != NONE {
                    last = self.blocks[last as usize].next_copy;
                }
                self.blocks[last as usize].next_copy = id;
            }
        }
    }

    /// Drops one reference of each block in the order given. Those without any join the free queue in that order: the
    /// cached ones at its tail, the others at its head.
    pub fn release(&mut self, ids: impl Iterator<Item = BlockId>) {
        let mut last_in_front = NONE;
        for id in ids {
            let block = &mut self.blocks[id as usize];
            block.refs = block.refs.saturating_sub(1);
            if block.refs > 0 || block.queued {
                continue;
            }
            if block.hash.is_some() {
                self.insert_after(self.tail, id);
            } else {
                self.insert_after(last_in_front, id);
                last_in_front = id;
            }
        }
    }

    /// Forgets every hash. Refused, with `false`, while any block is referenced.
    pub fn reset(&mut self) -> bool {
        if self.free != self.usable() {
            return false;
        }
        for block in &mut self.blocks {
            block.hash = None;
            block.next_copy = NONE;
        }
        self.cached.clear();
        self.copies = 0;
        true
    }

    /// Removes a block's hash from the lookup; other copies stay reachable.
    fn forget(&mut self, id: BlockId) -> Option<EngineHash> {
        let hash = self.blocks[id as usize].hash.take()?;
        let after = std::mem::replace(&mut self.blocks[id as usize].next_copy, NONE);
        self.copies -= 1;
        let first = self.cached.get(&hash).copied()?;
        if first == id {
            if after == NONE {
                self.cached.remove(&hash);
            } else {
                self.cached.insert(hash, after);
            }
        } else {
            let mut at = first;
            while self.blocks[at as usize].next_copy != id {
                at = self.blocks[at as usize].next_copy;
            }
            self.blocks[at as usize].next_copy = after;
        }
        Some(hash)
    }

    /// Queues a block behind `before`, or at the head where that is [`NONE`].
    fn insert_after(&mut self, before: u32, id: BlockId) {
        let after = match before {
            NONE => std::mem::replace(&mut self.head, id),
            before => std::mem::replace(&mut self.blocks[before as usize].next, id),
        };
        match after {
            NONE => self.tail = id,
            after => self.blocks[after as usize].previous = id,
        }
        let block = &mut self.blocks[id as usize];
        block.previous = before;
        block.next = after;
        block.queued = true;
        self.free += 1;
    }

    fn unlink(&mut self, id: BlockId) {
        let Block { previous, next, .. } = self.blocks[id as usize];
        if previous == NONE {
            self.head = next;
        } else {
            self.blocks[previous as usize].next = next;
        }
        if next == NONE {
            self.tail = previous;
        } else {
            self.blocks[next as usize].previous = previous;
        }
        let block = &mut self.blocks[id as usize];
        block.previous = NONE;
        block.next = NONE;
        block.queued = false;
        self.free -= 1;
    }
}
