//! Cuts an engine block's tokens into canonical blocks, wherever its start lies.

use cairn_blocks::{BlockKey, Token, next_key};

use super::Mirror;
use super::node::{MAX_END, Side, Slot};

/// Where a block goes: its keys, and what its children need of it.
#[derive(Debug, Default)]
pub(super) struct Place {
    /// Every canonical block that ends in it.
    pub(super) keys: Vec<BlockKey>,
    /// Tokens after the last boundary.
    pub(super) tail: Vec<Token>,
    pub(super) tail_extra: Vec<Box<str>>,
    /// Key of the last boundary.
    pub(super) key: BlockKeyOrParent,
    /// Tokens from the root to its end.
    pub(super) end: u32,
}

/// The key of the last boundary at or before a block's end.
pub(super) type BlockKeyOrParent = Option<BlockKey>;

impl Mirror {
    /// Computes the place of a block of `tokens` below `parent`. `None` where the chain would be longer than
    /// [`MAX_END`].
    ///
    /// Identities count for every canonical block that the engine block touches, since the engine doesn't say where in
    /// its block a medium lies: at worst a hit is missed, never invented.
    #[inline]
    pub(super) fn place(&self, parent: Slot, tokens: &[Token], identities: &[&str], out: &mut Place) -> Option<()> {
        let size = self.config.block_size.tokens() as usize;
        let above = self.arena.get(parent);
        out.keys.clear();
        out.tail.clear();
        out.tail_extra.clear();
        out.end = above.end().checked_add(u32::try_from(tokens.len()).ok()?)?;
        if out.end > MAX_END {
            return None;
        }
        let mut key = above.key();
        let offset = above.end() as usize % size;
        if offset == 0 && tokens.len() == size {
            key = next_key(key, tokens, identities);
            out.keys.push(key);
            out.key = Some(key);
            return Some(());
        }
        let empty = Side::default();
        let side = self.arena.side(parent).unwrap_or(&empty);
        let mut rest = tokens;
        if offset > 0 {
            out.tail.extend_from_slice(&side.tail);
            out.tail_extra.extend(side.tail_extra.iter().cloned());
            let (fill, after) = tokens.split_at(tokens.len().min(size - offset));
            out.tail.extend_from_slice(fill);
            for identity in identities {
                if !out.tail_extra.iter().any(|known| **known == **identity) {
                    out.tail_extra.push(Box::from(*identity));
                }
            }
            if out.tail.len() < size {
                out.key = Some(key);
                return Some(());
            }
            let extra: Vec<&str> = out.tail_extra.iter().map(AsRef::as_ref).collect();
            key = next_key(key, &out.tail, &extra);
            out.keys.push(key);
            out.tail.clear();
            out.tail_extra.clear();
            rest = after;
        }
        let mut chunks = rest.chunks_exact(size);
        for chunk in &mut chunks {
            key = next_key(key, chunk, identities);
            out.keys.push(key);
        }
        if !chunks.remainder().is_empty() {
            out.tail.extend_from_slice(chunks.remainder());
            out.tail_extra.extend(identities.iter().map(|i| Box::from(*i)));
        }
        out.key = Some(key);
        Some(())
    }
}
