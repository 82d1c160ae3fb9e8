//! Hashing without random seeds: maps here are keyed by hashes that engines drew already.

use std::hash::{BuildHasherDefault, Hasher};

/// A map whose order and speed are the same in every run.
pub(crate) type FixedMap<K, V> = hashbrown::HashMap<K, V, BuildHasherDefault<Scatter>>;
/// Spreads the entropy of a word over all its bits (Fibonacci hashing).
#[inline]
pub(crate) fn scatter(word: u64) -> u64 {
    let mixed = word.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 32
}

/// A hasher for integers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Scatter(u64);

impl Hasher for Scatter {
    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    #[inline]
    fn write_u8(&mut self, n: u8) {
        self.write_u64(u64::from(n));
    }

    #[inline]
    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }

    #[inline]
    fn write_u64(&mut self, n: u64) {
        self.0 = scatter(self.0.rotate_left(23) ^ n);
    }
}
