//! The keys of a token sequence: full blocks only, cut before media that has no stable identity.

use crate::{BlockKey, BlockSize, Token, next_key};

/// A multimodal item's placeholder tokens inside a prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MediaSpan<'a> {
    /// Index of its first token.
    pub start: usize,
    /// How many tokens it takes; at least 1.
    pub len: usize,
    /// Identity that is equal for equal content, as the engine reports it; `None` ends the chain before its block.
    pub identity: Option<&'a str>,
}

/// The block keys of one prompt, first block first.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Chain {
    /// One key per full block.
    pub keys: Vec<BlockKey>,
}

impl Chain {
    /// Derives the keys of every full block of `tokens`, starting below `root`.
    ///
    /// `media` is ordered by `start`. The chain stops before the first block that a span without identity touches.
    #[must_use]
    pub fn new(root: BlockKey, block_size: BlockSize, tokens: &[Token], media: &[MediaSpan<'_>]) -> Self {
        let mut chain = Self::default();
        chain.extend(root, block_size, tokens, media);
        chain
    }

    /// Like [`Chain::new`], reusing the buffer of an earlier chain.
    pub fn extend(&mut self, root: BlockKey, block_size: BlockSize, tokens: &[Token], media: &[MediaSpan<'_>]) {
        let size = block_size.tokens() as usize;
        self.keys.clear();
        self.keys.reserve(tokens.len() / size);
        let mut parent = root;
        let mut extra: Vec<&str> = Vec::new();
        for (i, block) in tokens.chunks_exact(size).enumerate() {
            let (start, end) = (i * size, (i + 1) * size);
            extra.clear();
            for span in media.iter().filter(|s| s.start < end && s.start + s.len > start) {
                match span.identity {
                    Some(identity) => extra.push(identity),
                    None => return,
                }
            }
            parent = next_key(parent, block, &extra);
            self.keys.push(parent);
        }
    }
}
