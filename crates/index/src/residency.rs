//! Who holds which block.

use std::io::{self, Read, Write};

use cairn_blocks::{BlockKey, Depth};

use crate::codec::{DecodeError, In, Out};
use crate::oracle::Oracle;
use crate::{HolderDigest, HolderId};

/// How a store ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stored {
    /// The holder holds the stretch now.
    Done {
        /// How many of its blocks the holder didn't hold before.
        new_blocks: u32,
    },
    /// The holder doesn't hold the anchor at that depth; send the chain again from its root.
    UnknownAnchor,
    /// A key is known under another parent or at another depth; nothing was stored.
    Refused,
    /// There is no such holder.
    UnknownHolder,
    /// A bound on runs, blocks or depth is reached; nothing was stored.
    Full,
}

/// How a removal ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Removed {
    /// How many blocks the holder held and holds no more.
    pub blocks: u32,
}

/// Who holds which block.
#[derive(Clone, Debug, Default)]
pub struct Residency {
    model: Oracle,
}

impl Residency {
    /// Nobody holds anything.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a holder known.
    pub fn add_holder(&mut self, holder: HolderId) {
        self.model.add_holder(holder);
    }

    /// Forgets a holder with all it holds.
    pub fn remove_holder(&mut self, holder: HolderId) {
        self.model.remove_holder(holder);
    }

    /// Empties a holder.
    pub fn clear(&mut self, holder: HolderId) {
        self.model.clear(holder);
    }

    /// The holder now holds `keys[skip..]`, a stretch of one chain below `anchor`.
    ///
    /// `anchor` is the chain's root key where `anchor_depth` is 0, else a block that the holder holds at that depth.
    /// The first `skip` keys only name ancestors.
    pub fn store(
        &mut self,
        holder: HolderId,
        anchor: BlockKey,
        anchor_depth: Depth,
        skip: u32,
        keys: &[BlockKey],
    ) -> Stored {
        self.model.store(holder, anchor, anchor_depth, skip, keys)
    }

    /// Like [`Residency::store`], but the anchor may also be held by one of `beside`, the other caches of that source.
    pub fn store_beside(
        &mut self,
        holder: HolderId,
        beside: &[HolderId],
        anchor: BlockKey,
        anchor_depth: Depth,
        skip: u32,
        keys: &[BlockKey],
    ) -> Stored {
        self.model
            .store_beside(holder, beside, anchor, anchor_depth, skip, keys)
    }

    /// The holder no longer holds `count` neighbouring blocks of one chain, of which `key` at `depth` is the deepest.
    ///
    /// Nothing happens where the holder doesn't hold `key` at `depth`; blocks above it that it doesn't hold are passed over.
    pub fn remove(&mut self, holder: HolderId, key: BlockKey, depth: Depth, count: u32) -> Removed {
        self.model.remove(holder, key, depth, count)
    }

    /// How many leading blocks of the chain `keys` each holder holds without a gap, by holder id.
    pub fn match_prefix(&self, keys: &[BlockKey], out: &mut Vec<u32>) {
        self.model.match_prefix(keys, out);
    }

    /// How deep that holder alone holds the chain `keys` without a gap from the block after `from`.
    #[must_use]
    pub fn match_from(&self, holder: HolderId, keys: &[BlockKey], from: Depth) -> Depth {
        self.model.match_from(holder, keys, from)
    }

    /// How many blocks the holder holds.
    #[must_use]
    pub fn holder_blocks(&self, holder: HolderId) -> u64 {
        self.model.holder_blocks(holder)
    }

    /// Number and digest of the blocks that the holder holds.
    #[must_use]
    pub fn holder_digest(&self, holder: HolderId) -> HolderDigest {
        self.model.holder_digest(holder)
    }

    /// How many distinct blocks are known: held ones and their ancestors.
    #[must_use]
    pub fn known_blocks(&self) -> u64 {
        self.model.known_blocks()
    }

    /// Bytes of memory that the structure takes, without the allocator's own.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.model.known_blocks() as usize * 160
    }

    /// Writes all of it for a snapshot.
    pub(crate) fn put<W: Write>(&self, out: &mut Out<'_, W>) -> io::Result<()> {
        self.model.put(out)
    }

    /// Reads what [`Residency::put`] wrote.
    pub(crate) fn read<R: Read>(
        input: &mut In<R>,
        holders: impl Iterator<Item = HolderId>,
    ) -> Result<Self, DecodeError> {
        Ok(Self {
            model: Oracle::read(input, holders)?,
        })
    }
}
