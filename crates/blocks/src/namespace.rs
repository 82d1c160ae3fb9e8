//! What separates chains that hold equal tokens: cluster, pool, block size, adapter and salt.

use std::num::NonZeroU32;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::key::{BlockKey, frame};

/// Version of the bytes that keys are made of; part of every root, so two versions never meet.
pub const KEY_FORMAT_VERSION: u32 = 1;

/// Secret-free number that a cluster draws once, so that keys of different clusters differ.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ClusterSeed(pub u64);

/// Canonical number of tokens in a block of one pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BlockSize(NonZeroU32);

/// A block size outside 1..=4096.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("block size {0} is outside 1..=4096 tokens; use the pool's canonical size, 16 by default")]
pub struct InvalidBlockSize(pub u32);

impl BlockSize {
    /// Largest accepted size in tokens; engines use 1 to 1,056.
    pub const MAX: u32 = 4096;
    /// The default canonical size, vLLM's own default on GPUs.
    pub const DEFAULT: BlockSize = BlockSize(NonZeroU32::new(16).expect("16 is not zero"));

    /// Checks a size in tokens.
    pub fn new(tokens: u32) -> Result<Self, InvalidBlockSize> {
        match NonZeroU32::new(tokens) {
            Some(size) if tokens <= Self::MAX => Ok(Self(size)),
            _ => Err(InvalidBlockSize(tokens)),
        }
    }

    /// Tokens in a block.
    #[must_use]
    pub fn tokens(self) -> u32 {
        self.0.get()
    }
}

/// The fields that a chain's root is derived from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Namespace<'a> {
    /// The cluster's seed.
    pub seed: ClusterSeed,
    /// The pool's name.
    pub pool: &'a str,
    /// The pool's canonical block size.
    pub block_size: BlockSize,
    /// Adapter (LoRA) name, or empty for the base model.
    pub adapter: &'a str,
    /// Cache salt, or empty.
    pub salt: &'a str,
}

impl Namespace<'_> {
    /// The key that the first block of a chain has as its parent.
    #[must_use]
    pub fn root(&self) -> BlockKey {
        let mut bytes = Vec::with_capacity(64);
        bytes.extend_from_slice(b"cairn-root");
        bytes.extend_from_slice(&KEY_FORMAT_VERSION.to_le_bytes());
        bytes.extend_from_slice(&self.block_size.tokens().to_le_bytes());
        frame(&mut bytes, self.pool.as_bytes());
        frame(&mut bytes, self.adapter.as_bytes());
        frame(&mut bytes, self.salt.as_bytes());
        BlockKey(xxh3_64_with_seed(&bytes, self.seed.0))
    }
}
