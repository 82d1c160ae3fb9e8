//! The host-memory tier: least recently used blocks go first, stores show one step after the GPU's.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use cairn_blocks::Token;

use super::config::{CpuStorePolicy, CpuTierConfig};
use super::events::{CacheEvent, Medium};
use super::hash::{EngineHash, LookupMap};

/// What a store event of this tier says about a block.
#[derive(Clone)]
pub(crate) struct Content {
    pub(crate) hash: EngineHash,
    pub(crate) parent: Option<EngineHash>,
    pub(crate) tokens: Vec<Token>,
    pub(crate) adapter: Option<Arc<str>>,
}

struct Entry {
    stamp: u64,
    pins: u32,
}

/// How many remembered first uses there are for each block of capacity.
const SEEN_PER_BLOCK: usize = 4;

/// Host-memory copies of one worker.
pub(crate) struct CpuTier {
    config: CpuTierConfig,
    entries: LookupMap<EngineHash, Entry>,
    /// Oldest use first.
    order: BTreeMap<u64, EngineHash>,
    clock: u64,
    pending: Vec<Content>,
    /// Contents of GPU blocks, kept only to store them at their eviction.
    contents: LookupMap<EngineHash, Content>,
    seen: LookupMap<EngineHash, ()>,
    seen_order: VecDeque<EngineHash>,
    pub(crate) stored: u64,
    pub(crate) evicted: u64,
}

impl CpuTier {
    pub(crate) fn new(config: CpuTierConfig) -> Self {
        Self {
            config,
            entries: LookupMap::default(),
            order: BTreeMap::new(),
            clock: 0,
            pending: Vec::new(),
            contents: LookupMap::default(),
            seen: LookupMap::default(),
            seen_order: VecDeque::new(),
            stored: 0,
            evicted: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn contains(&self, hash: EngineHash) -> bool {
        self.entries.contains_key(&hash)
    }

    /// A block became full on the GPU.
    pub(crate) fn gpu_stored(&mut self, content: Content) {
        match self.config.store {
            CpuStorePolicy::OnStore => self.pending.push(content),
            CpuStorePolicy::OnEviction => {
                self.contents.insert(content.hash, content);
            }
            CpuStorePolicy::OnSecondUse => {
                if self.seen.insert(content.hash, ()).is_some() {
                    self.pending.push(content);
                    return;
                }
                self.seen_order.push_back(content.hash);
                if self.seen_order.len() > self.config.blocks as usize * SEEN_PER_BLOCK
                    && let Some(oldest) = self.seen_order.pop_front()
                {
                    self.seen.remove(&oldest);
                }
            }
        }
    }

    /// A GPU block was hit by a request.
    pub(crate) fn gpu_hit(&mut self, content: impl FnOnce() -> Content, hash: EngineHash) {
        if self.contains(hash) {
            self.use_now(hash);
        } else if self.config.store == CpuStorePolicy::OnSecondUse {
            self.pending.push(content());
        }
    }

    /// The last GPU copy of a block was evicted.
    pub(crate) fn gpu_evicted(&mut self, hash: EngineHash) {
        if let Some(content) = self.contents.remove(&hash) {
            self.pending.push(content);
        }
    }

    /// Whether stores wait for the next step.
    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Carries out the stores of the step before; says how many blocks came in.
    pub(crate) fn apply_pending(&mut self, events: &mut Vec<CacheEvent>) -> usize {
        let pending = std::mem::take(&mut self.pending);
        let mut stored: Vec<Content> = Vec::with_capacity(pending.len());
        let mut removed = Vec::new();
        for content in pending {
            if self.contains(content.hash) {
                self.use_now(content.hash);
                continue;
            }
            if self.entries.len() >= self.config.blocks as usize {
                match self.evict_one() {
                    Some(hash) if stored.iter().any(|c| c.hash == hash) => stored.retain(|c| c.hash != hash),
                    Some(hash) => removed.push(hash),
                    None => continue,
                }
            }
            self.clock += 1;
            self.entries.insert(
                content.hash,
                Entry {
                    stamp: self.clock,
                    pins: 0,
                },
            );
            self.order.insert(self.clock, content.hash);
            self.stored += 1;
            stored.push(content);
        }
        if !removed.is_empty() {
            events.push(CacheEvent::Removed {
                hashes: removed,
                medium: Medium::Cpu,
            });
        }
        // Completions arrive in no particular order; that of the hashes is as arbitrary and can be repeated.
        stored.sort_by_key(|content| content.hash);
        let count = stored.len();
        events.extend(stored.into_iter().map(|content| CacheEvent::Stored {
            hashes: vec![content.hash],
            parent: content.parent,
            tokens: content.tokens,
            medium: Medium::Cpu,
            adapter: content.adapter,
            salt: None,
        }));
        count
    }

    pub(crate) fn use_now(&mut self, hash: EngineHash) {
        if let Some(entry) = self.entries.get_mut(&hash) {
            self.order.remove(&entry.stamp);
            self.clock += 1;
            entry.stamp = self.clock;
            self.order.insert(self.clock, hash);
        }
    }

    pub(crate) fn pin(&mut self, hash: EngineHash) {
        self.use_now(hash);
        if let Some(entry) = self.entries.get_mut(&hash) {
            entry.pins += 1;
        }
    }

    pub(crate) fn unpin(&mut self, hash: EngineHash) {
        if let Some(entry) = self.entries.get_mut(&hash) {
            entry.pins = entry.pins.saturating_sub(1);
        }
    }

    /// Drops everything, silently as engines do.
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.order.clear();
        self.forget_gpu();
    }

    /// The GPU cache was emptied: what waited to be stored from it is gone.
    pub(crate) fn forget_gpu(&mut self) {
        self.pending.clear();
        self.contents.clear();
    }

    fn evict_one(&mut self) -> Option<EngineHash> {
        let (stamp, hash) = self
            .order
            .iter()
            .map(|(stamp, hash)| (*stamp, *hash))
            .find(|(_, hash)| self.entries.get(hash).is_some_and(|entry| entry.pins == 0))?;
        self.order.remove(&stamp);
        self.entries.remove(&hash);
        self.evicted += 1;
        Some(hash)
    }
}
