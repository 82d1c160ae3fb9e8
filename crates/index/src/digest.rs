//! Digests of what a holder holds: order-independent, updated key by key, computed equally by agents' mirrors.

use cairn_blocks::BlockKey;

/// Number and digest of the blocks that one holder holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HolderDigest {
    /// How many blocks.
    pub blocks: u64,
    /// Wrapping sum of [`mix`] over their keys.
    pub digest: u64,
}

impl HolderDigest {
    /// Counts a block in.
    pub fn add(&mut self, key: BlockKey) {
        self.blocks += 1;
        self.digest = self.digest.wrapping_add(mix(key));
    }

    /// Counts a block out.
    pub fn remove(&mut self, key: BlockKey) {
        self.blocks -= 1;
        self.digest = self.digest.wrapping_sub(mix(key));
    }

    /// Counts in neighbouring blocks.
    pub fn add_all(&mut self, keys: &[BlockKey]) {
        self.blocks += keys.len() as u64;
        self.digest = self.digest.wrapping_add(mix_sum(keys));
    }
}

/// What one key adds to a digest.
///
/// Keys are uniform already; the product of the halves keeps equal sums of keys from giving equal digests, and is one
/// 32-bit multiplication, which vectorises.
#[inline]
#[must_use]
pub fn mix(key: BlockKey) -> u64 {
    key.0.wrapping_add((key.0 >> 32).wrapping_mul(key.0 & 0xffff_ffff))
}

/// Wrapping sum of [`mix`] over neighbouring keys.
#[inline]
#[must_use]
pub fn mix_sum(keys: &[BlockKey]) -> u64 {
    keys.iter().fold(0u64, |sum, &key| sum.wrapping_add(mix(key)))
}

/// Scrambles a word of a state digest (the finaliser of SplitMix64, Steele et al. 2014).
#[inline]
pub(crate) fn scramble(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
