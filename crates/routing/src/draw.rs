//! Seeded chance: pure functions from a seed and a counter, so that a recorded decision can be made again.

/// One step of splitmix64 (Steele, Lea, Flood 2014): every bit of the result depends on every bit of `x`.
#[must_use]
pub(crate) const fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A number for the pair (`seed`, `item`), as good as independent of every other pair's.
#[must_use]
pub(crate) const fn pair(seed: u64, item: u64) -> u64 {
    mix(mix(seed) ^ item)
}

/// Hash of bytes under a seed (FNV-1a folded through [`mix`] in 8-byte steps): stable over releases, as remapping must be.
#[must_use]
pub(crate) fn bytes(seed: u64, data: &[u8]) -> u64 {
    let mut state = mix(seed ^ data.len() as u64);
    let mut chunks = data.chunks_exact(8);
    for chunk in &mut chunks {
        let mut word = [0u8; 8];
        word.copy_from_slice(chunk);
        state = (state ^ u64::from_le_bytes(word)).wrapping_mul(0x9fb2_1c65_1e98_df25);
        state ^= state >> 29;
    }
    let mut word = [0u8; 8];
    let rest = chunks.remainder();
    word[..rest.len()].copy_from_slice(rest);
    mix(state ^ u64::from_le_bytes(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_bytes_hash_equally_and_a_changed_byte_or_length_changes_it() {
        let text = b"a system prompt that many requests share";
        assert_eq!(bytes(7, text), bytes(7, text));
        assert_ne!(bytes(7, text), bytes(8, text));
        for i in 0..text.len() {
            let mut other = text.to_vec();
            other[i] ^= 1;
            assert_ne!(bytes(7, text), bytes(7, &other));
            assert_ne!(bytes(7, text), bytes(7, &text[..i]));
        }
    }
}
