//! What agents and the index make of engines' events: one view of who holds which block.

use cairn_blocks::{BlockKey, Depth};
use cairn_index::{HolderId, Residency, Stored};

use crate::engine_model::hash::{self, LookupMap};
use crate::engine_model::{CacheEvent, EngineHash, Medium};
use crate::run::shared::Change;

/// What the agent of one engine remembers of its blocks, for one medium.
#[derive(Default)]
struct Mirror {
    /// Depth and copies of each block.
    blocks: LookupMap<EngineHash, (u32, u32)>,
}

/// The view that all routers share.
pub(super) struct Mirrors {
    view: Residency,
    mirrors: Vec<Mirror>,
    /// Root that all chains hang under: engines of a replay name blocks alike.
    root: EngineHash,
    depths: Vec<u32>,
}

impl Mirrors {
    pub(super) fn new() -> Self {
        Self {
            view: Residency::new(),
            mirrors: Vec::new(),
            root: hash::root(1),
            depths: Vec::new(),
        }
    }

    /// A store that every engine reads is one more holder.
    pub(super) fn add_shared(&mut self) {
        self.view.add_holder(SHARED);
    }

    /// Leading blocks that the shared store has.
    pub(super) fn shared_depth(&self) -> u32 {
        self.depths.get(SHARED.0 as usize).copied().unwrap_or(0)
    }

    /// Takes what the shared store tells.
    pub(super) fn see_shared(&mut self, changes: &[Change]) {
        for change in changes {
            match change {
                Change::Stored { parent, depth, hashes } => {
                    let anchor = BlockKey(parent.unwrap_or(self.root).0);
                    let keys: Vec<BlockKey> = hashes.iter().map(|hash| BlockKey(hash.0)).collect();
                    self.view.store(SHARED, anchor, Depth(*depth), 0, &keys);
                }
                Change::Removed { hash, depth } => {
                    self.view.remove(SHARED, BlockKey(hash.0), Depth(*depth), 1);
                }
            }
        }
    }

    /// GPU and host memory of an engine are two holders.
    pub(super) fn add(&mut self, engine: usize) {
        self.view.add_holder(holder(engine, Medium::Gpu));
        self.view.add_holder(holder(engine, Medium::Cpu));
        let mirrors = self.mirrors.len().max(2 * (engine + 1));
        self.mirrors.resize_with(mirrors, Mirror::default);
    }

    pub(super) fn engines(&self) -> usize {
        self.mirrors.len() / 2
    }

    /// An engine's caches are empty.
    pub(super) fn forget(&mut self, engine: usize) {
        for medium in [Medium::Gpu, Medium::Cpu] {
            self.view.clear(holder(engine, medium));
            self.mirrors[slot(engine, medium)].blocks = LookupMap::default();
        }
    }

    /// Finds how many leading blocks of a prompt each holder has; [`Mirrors::depth`] then tells.
    pub(super) fn find(&mut self, keys: &[BlockKey]) {
        self.view.match_prefix(keys, &mut self.depths);
    }

    /// Leading blocks that one engine has in one medium.
    pub(super) fn depth(&self, engine: usize, medium: Medium) -> u32 {
        self.depths.get(holder(engine, medium).0 as usize).copied().unwrap_or(0)
    }

    pub(super) fn stored(&mut self, engine: usize, medium: Medium, parent: Option<EngineHash>, hashes: &[EngineHash]) {
        let place = holder(engine, medium);
        let depth = match parent {
            None => 0,
            Some(parent) => {
                let known = |medium| {
                    self.mirrors[slot(engine, medium)]
                        .blocks
                        .get(&parent)
                        .map(|block| block.0)
                };
                match known(medium).or_else(|| known(Medium::Gpu)) {
                    Some(depth) => depth,
                    None => return,
                }
            }
        };
        let mirror = &mut self.mirrors[slot(engine, medium)];
        let mut fresh = Vec::with_capacity(hashes.len());
        for (at, hash) in hashes.iter().enumerate() {
            let entry = mirror.blocks.entry(*hash).or_insert((depth + at as u32 + 1, 0));
            entry.1 += 1;
            if entry.1 == 1 {
                fresh.push(BlockKey(hash.0));
            }
        }
        if fresh.len() < hashes.len() && !fresh.is_empty() {
            // A copy among new ones: tell the whole stretch, which the view takes as it is.
            fresh = hashes.iter().map(|hash| BlockKey(hash.0)).collect();
        }
        if fresh.is_empty() {
            return;
        }
        let anchor = BlockKey(parent.unwrap_or(self.root).0);
        let beside = [holder(engine, Medium::Gpu)];
        let told = self.view.store_beside(place, &beside, anchor, Depth(depth), 0, &fresh);
        debug_assert!(
            !matches!(told, Stored::UnknownHolder),
            "holders are added with their engines"
        );
    }

    pub(super) fn removed(&mut self, engine: usize, medium: Medium, hashes: &[EngineHash]) {
        let place = holder(engine, medium);
        for hash in hashes {
            let mirror = &mut self.mirrors[slot(engine, medium)];
            let Some(entry) = mirror.blocks.get_mut(hash) else {
                continue;
            };
            entry.1 -= 1;
            let (depth, copies) = *entry;
            if copies == 0 {
                mirror.blocks.remove(hash);
                self.view.remove(place, BlockKey(hash.0), Depth(depth), 1);
            }
        }
    }

    /// Takes an engine's events; `true` when it said that its cache is empty.
    pub(super) fn see(&mut self, engine: usize, events: &[CacheEvent]) -> bool {
        let mut cleared = false;
        for event in events {
            match event {
                CacheEvent::Stored {
                    hashes, parent, medium, ..
                } => self.stored(engine, *medium, *parent, hashes),
                CacheEvent::Removed { hashes, medium } => self.removed(engine, *medium, hashes),
                CacheEvent::Cleared => {
                    self.forget(engine);
                    cleared = true;
                }
            }
        }
        cleared
    }
}

/// The shared store's holder.
const SHARED: HolderId = HolderId(0);

/// The holder of one medium of one engine.
fn holder(engine: usize, medium: Medium) -> HolderId {
    HolderId(slot(engine, medium) as u32 + 1)
}

/// The mirror of one medium of one engine.
fn slot(engine: usize, medium: Medium) -> usize {
    match medium {
        Medium::Gpu => 2 * engine,
        Medium::Cpu => 2 * engine + 1,
    }
}
