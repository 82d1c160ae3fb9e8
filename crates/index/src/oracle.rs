//! The plain model of who holds what: a map from key to block with a set of holders, walked block by block.
//!
//! It is slow and obviously right. Tests and benchmarks compare [`crate::Residency`] with it.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use cairn_blocks::{BlockKey, Depth};

use crate::{HolderDigest, HolderId, Removed, Stored, mix};

/// One block that somebody holds, or that somebody holds a descendant of.
#[derive(Clone, Debug)]
struct Block {
    parent: BlockKey,
    depth: u32,
    children: u32,
    holders: BTreeSet<HolderId>,
}

/// Map of sets.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    blocks: BTreeMap<BlockKey, Block>,
    holders: BTreeMap<HolderId, BTreeSet<BlockKey>>,
}

impl Oracle {
    /// An empty model.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a holder known.
    pub fn add_holder(&mut self, holder: HolderId) {
        self.holders.entry(holder).or_default();
    }

    /// Forgets a holder with all it holds.
    pub fn remove_holder(&mut self, holder: HolderId) {
        self.clear(holder);
        self.holders.remove(&holder);
    }

    /// Empties a holder.
    pub fn clear(&mut self, holder: HolderId) {
        if let Some(held) = self.holders.get_mut(&holder) {
            for key in std::mem::take(held) {
                self.drop_membership(holder, key);
            }
        }
    }

    /// See [`crate::Residency::store`].
    pub fn store(
        &mut self,
        holder: HolderId,
        anchor: BlockKey,
        anchor_depth: Depth,
        skip: u32,
        keys: &[BlockKey],
    ) -> Stored {
        self.store_beside(holder, &[], anchor, anchor_depth, skip, keys)
    }

    /// See [`crate::Residency::store_beside`].
    pub fn store_beside(
        &mut self,
        holder: HolderId,
        beside: &[HolderId],
        anchor: BlockKey,
        anchor_depth: Depth,
        skip: u32,
        keys: &[BlockKey],
    ) -> Stored {
        if !self.holders.contains_key(&holder) {
            return Stored::UnknownHolder;
        }
        if anchor_depth.0 > 0 {
            let held = self.blocks.get(&anchor).is_some_and(|b| {
                b.depth == anchor_depth.0
                    && (b.holders.contains(&holder) || beside.iter().any(|h| b.holders.contains(h)))
            });
            if !held {
                return Stored::UnknownAnchor;
            }
        }
        if skip as usize >= keys.len() {
            return Stored::Done { new_blocks: 0 };
        }
        let mut parent = anchor;
        for (depth, &key) in (anchor_depth.0 + 1..).zip(keys) {
            if self
                .blocks
                .get(&key)
                .is_some_and(|b| b.parent != parent || b.depth != depth)
            {
                return Stored::Refused;
            }
            parent = key;
        }
        let mut new_blocks = 0;
        let mut parent = anchor;
        for (i, &key) in keys.iter().enumerate() {
            let depth = anchor_depth.0 + 1 + i as u32;
            if let Entry::Vacant(slot) = self.blocks.entry(key) {
                slot.insert(Block {
                    parent,
                    depth,
                    children: 0,
                    holders: BTreeSet::new(),
                });
                if depth > 1 {
                    self.blocks.get_mut(&parent).expect("parents come first").children += 1;
                }
            }
            if i >= skip as usize && self.blocks.get_mut(&key).expect("just made").holders.insert(holder) {
                self.holders.get_mut(&holder).expect("checked above").insert(key);
                new_blocks += 1;
            }
            parent = key;
        }
        Stored::Done { new_blocks }
    }

    /// See [`crate::Residency::remove`].
    pub fn remove(&mut self, holder: HolderId, key: BlockKey, depth: Depth, count: u32) -> Removed {
        let mut blocks = 0;
        let held = self
            .blocks
            .get(&key)
            .is_some_and(|b| b.depth == depth.0 && b.holders.contains(&holder));
        if !held {
            return Removed { blocks };
        }
        let mut path = Vec::new();
        let mut next = key;
        for _ in 0..count.min(depth.0) {
            path.push(next);
            next = self.blocks[&next].parent;
        }
        for key in path {
            if self.holders.get_mut(&holder).is_some_and(|held| held.remove(&key)) {
                blocks += 1;
                self.drop_membership(holder, key);
            }
        }
        Removed { blocks }
    }

    /// Takes the holder out of one block, then cuts what nobody needs any more.
    fn drop_membership(&mut self, holder: HolderId, key: BlockKey) {
        if let Some(block) = self.blocks.get_mut(&key) {
            block.holders.remove(&holder);
        }
        let mut next = key;
        while let Some(block) = self.blocks.get(&next) {
            if block.children > 0 || !block.holders.is_empty() {
                break;
            }
            let (parent, depth) = (block.parent, block.depth);
            self.blocks.remove(&next);
            if depth == 1 {
                break;
            }
            self.blocks
                .get_mut(&parent)
                .expect("ancestors stay while a descendant lives")
                .children -= 1;
            next = parent;
        }
    }

    /// See [`crate::Residency::match_prefix`].
    pub fn match_prefix(&self, keys: &[BlockKey], out: &mut Vec<u32>) {
        out.clear();
        let len = self.holders.keys().next_back().map_or(0, |h| h.0 as usize + 1);
        out.resize(len, 0);
        for (&holder, _) in self.holders.iter().filter(|(_, held)| !held.is_empty()) {
            out[holder.0 as usize] = self.match_from(holder, keys, Depth(0)).0;
        }
    }

    /// See [`crate::Residency::match_from`].
    #[must_use]
    pub fn match_from(&self, holder: HolderId, keys: &[BlockKey], from: Depth) -> Depth {
        let mut depth = from.0;
        while let Some(key) = keys.get(depth as usize) {
            match self.blocks.get(key) {
                Some(b) if b.depth == depth + 1 && b.holders.contains(&holder) => depth += 1,
                _ => break,
            }
        }
        Depth(depth)
    }

    /// See [`crate::Residency::holder_blocks`].
    #[must_use]
    pub fn holder_blocks(&self, holder: HolderId) -> u64 {
        self.holders.get(&holder).map_or(0, |held| held.len() as u64)
    }

    /// See [`crate::Residency::holder_digest`].
    #[must_use]
    pub fn holder_digest(&self, holder: HolderId) -> HolderDigest {
        let mut digest = HolderDigest::default();
        for &key in self.holders.get(&holder).into_iter().flatten() {
            digest.blocks += 1;
            digest.digest = digest.digest.wrapping_add(mix(key));
        }
        digest
    }

    /// How many distinct blocks are known: held ones and their ancestors.
    #[must_use]
    pub fn known_blocks(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Every block that the holder holds, in key order.
    pub fn held(&self, holder: HolderId) -> impl Iterator<Item = BlockKey> + '_ {
        self.holders.get(&holder).into_iter().flatten().copied()
    }

    /// Whether the block is known, held or not.
    #[must_use]
    pub fn knows(&self, key: BlockKey) -> bool {
        self.blocks.contains_key(&key)
    }
}
