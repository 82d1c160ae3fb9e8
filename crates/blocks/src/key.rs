//! The key of one block: a fast keyed hash of its parent's key, its tokens and what else it depends on.

use std::fmt;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::Token;

/// Identity of a KV block and of everything before it in its chain.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct BlockKey(pub u64);

impl fmt::Debug for BlockKey {
    /// Keys are derived from prompts, so even debug output shows a short tag only.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockKey(..{:04x})", self.0 & 0xffff)
    }
}

/// Tokens of a block of the default size.
const COMMON_TOKENS: usize = 16;
/// Blocks of up to this many tokens are hashed from the stack.
const STACK_TOKENS: usize = 64;

/// Derives the key of the block that follows `parent` and holds `tokens`.
///
/// `extra` names what the block depends on besides its tokens: the stable identities of multimodal items that fall in
/// it, in order. Plain text blocks pass an empty slice. The hash is XXH3-64 seeded with the parent's key over the
/// tokens as little-endian `u32`s, followed, where `extra` isn't empty, by each identity framed by its length.
#[inline]
#[must_use]
pub fn next_key(parent: BlockKey, tokens: &[Token], extra: &[&str]) -> BlockKey {
    if extra.is_empty()
        && let Ok(tokens) = <&[Token; COMMON_TOKENS]>::try_from(tokens)
    {
        // Two tokens at a time: what is hashed is read again in words of eight bytes.
        let mut bytes = [0u8; COMMON_TOKENS * 4];
        for (word, pair) in bytes.chunks_exact_mut(8).zip(tokens.chunks_exact(2)) {
            word.copy_from_slice(&(u64::from(pair[0]) | u64::from(pair[1]) << 32).to_le_bytes());
        }
        return BlockKey(xxh3_64_with_seed(&bytes, parent.0));
    }
    uncommon_key(parent, tokens, extra)
}

/// [`next_key`] of a block of another size, or with identities.
#[inline(never)]
fn uncommon_key(parent: BlockKey, tokens: &[Token], extra: &[&str]) -> BlockKey {
    if extra.is_empty() && tokens.len() <= STACK_TOKENS {
        let mut bytes = [0u8; STACK_TOKENS * 4];
        for (slot, token) in bytes.chunks_exact_mut(4).zip(tokens) {
            slot.copy_from_slice(&token.to_le_bytes());
        }
        return BlockKey(xxh3_64_with_seed(&bytes[..tokens.len() * 4], parent.0));
    }
    let mut bytes = Vec::with_capacity(tokens.len() * 4 + extra.iter().map(|e| e.len() + 8).sum::<usize>());
    for token in tokens {
        bytes.extend_from_slice(&token.to_le_bytes());
    }
    for identity in extra {
        frame(&mut bytes, identity.as_bytes());
    }
    BlockKey(xxh3_64_with_seed(&bytes, parent.0))
}

/// Appends a field with its length in front, so that no two field lists give the same bytes.
pub(crate) fn frame(out: &mut Vec<u8>, field: &[u8]) {
    out.extend_from_slice(&(field.len() as u64).to_le_bytes());
    out.extend_from_slice(field);
}
