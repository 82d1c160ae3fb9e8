//! The engine's own name of a block: a seeded chain over parent, tokens and extra keys, opaque to everyone else.

use std::hash::{BuildHasherDefault, Hasher};

use cairn_blocks::Token;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Opaque identity of one block inside one engine process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct EngineHash(pub u64);

impl EngineHash {
    /// The 32-byte form that engines publish when configured for full digests; its low 64 bits are the integer form.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 32] {
        let mut out = [0u8; 32];
        for (i, word) in out.chunks_exact_mut(8).take(3).enumerate() {
            word.copy_from_slice(&xxh3_64_with_seed(&self.0.to_be_bytes(), i as u64 + 1).to_be_bytes());
        }
        out[24..].copy_from_slice(&self.0.to_be_bytes());
        out
    }
}

/// The hash that a first block has as its parent, for one engine process.
#[must_use]
pub fn root(seed: u64) -> EngineHash {
    let mut bytes = *b"engine-none-hash\0\0\0\0\0\0\0\0";
    bytes[16..].copy_from_slice(&seed.to_le_bytes());
    EngineHash(xxh3_64(&bytes))
}

/// The hash of a block that follows `parent`; `adapter` goes into every block, `salt` into the first only.
#[must_use]
pub fn next(parent: EngineHash, tokens: &[Token], adapter: Option<&str>, salt: Option<&str>) -> EngineHash {
    let extra = adapter.map_or(0, |a| a.len() + 9) + salt.map_or(0, |s| s.len() + 9);
    let mut bytes = Vec::with_capacity(tokens.len() * 4 + extra);
    for token in tokens {
        bytes.extend_from_slice(&token.to_le_bytes());
    }
    for (tag, field) in [(b'a', adapter), (b's', salt)] {
        if let Some(field) = field {
            bytes.push(tag);
            bytes.extend_from_slice(&(field.len() as u64).to_le_bytes());
            bytes.extend_from_slice(field.as_bytes());
        }
    }
    EngineHash(xxh3_64_with_seed(&bytes, parent.0))
}

/// Passes an [`EngineHash`] or an id through: both are well spread or dense already, and lookups must be repeatable.
#[derive(Default, Clone, Copy)]
pub(crate) struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64_with_seed(bytes, self.0);
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 32;
    }
}

/// A map that is looked up and never iterated, with a repeatable hasher.
pub(crate) type LookupMap<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<Spread>>;
