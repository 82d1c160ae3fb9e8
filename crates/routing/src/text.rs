//! Stand-in keys made from text, for the time without a tokenizer: equal starts of text give equal keys.

use cairn_blocks::BlockKey;

use crate::draw;

/// Bytes of text that stand for a block of 16 tokens.
pub const TEXT_BLOCK_BYTES: usize = 64;

/// Most stand-in keys; 4 MiB of text.
const MAX_TEXT_KEYS: usize = 65_536;

/// Appends a chained key for each full run of [`TEXT_BLOCK_BYTES`] bytes of `text`; `seed` separates pools and tenants.
pub fn text_keys(seed: u64, text: &[u8], keys: &mut Vec<BlockKey>) {
    let mut parent = draw::mix(seed);
    for run in text.chunks_exact(TEXT_BLOCK_BYTES).take(MAX_TEXT_KEYS) {
        parent = draw::bytes(parent, run);
        keys.push(BlockKey(parent));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_starts_share_keys_until_the_run_that_differs() {
        let text = "the quick brown fox jumps over the lazy dog; ".repeat(20);
        let mut other = text.clone();
        other.replace_range(300..301, "X");
        let (mut a, mut b) = (Vec::new(), Vec::new());
        text_keys(1, text.as_bytes(), &mut a);
        text_keys(1, other.as_bytes(), &mut b);
        assert_eq!(a.len(), text.len() / TEXT_BLOCK_BYTES);
        assert_eq!(a[..4], b[..4]);
        assert!(a[4..].iter().zip(&b[4..]).all(|(x, y)| x != y));
    }
}
