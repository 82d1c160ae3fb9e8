//! Pseudo-answers: plain sentences fixed by the prompt, so that every engine answers a prompt alike.

use std::sync::Arc;

use cairn_blocks::{BlockKey, Token, next_key};
use cairn_tokens::{EncodeError, ModelTokens};

/// Words of answers. Plain words keep text and tokens in step: each is encoded once, with its space.
const WORDS: [&str; 48] = [
    "stone", "path", "river", "hill", "cloud", "morning", "signal", "lantern", "bridge", "valley", "harbour", "garden",
    "window", "letter", "engine", "market", "season", "shadow", "winter", "summer", "quiet", "bright", "narrow",
    "distant", "gentle", "early", "steady", "hidden", "open", "small", "follows", "carries", "meets", "crosses",
    "reaches", "leaves", "holds", "turns", "and", "then", "near", "under", "over", "beyond", "the", "a", "this",
    "each",
];
/// A sentence ends after this many words.
const SENTENCE_WORDS: usize = 11;

/// Makes answers with one tokenizer.
pub(crate) struct Answers {
    /// Every word with its leading space.
    words: Vec<Vec<Token>>,
    /// Every word without it, for the start of a chat's answer.
    starts: Vec<Vec<Token>>,
    full_stop: Vec<Token>,
    tokens_min: u32,
    tokens_max: u32,
}

/// How a request limits its answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Most tokens.
    pub(crate) most: u32,
    /// Fewest tokens.
    pub(crate) least: u32,
    /// Go on to the limit.
    pub(crate) ignore_end: bool,
    /// Start without a space, as a chat's answer does; a text completion goes on after its prompt's last word.
    pub(crate) fresh_start: bool,
}

impl Answers {
    /// Encodes the words once.
    pub(crate) fn new(tokens: &ModelTokens, tokens_min: u32, tokens_max: u32) -> Result<Self, EncodeError> {
        let encode = |text: &str| tokens.encode_prompt(text, false);
        Ok(Self {
            words: WORDS
                .iter()
                .map(|word| encode(&format!(" {word}")))
                .collect::<Result<_, _>>()?,
            starts: WORDS.iter().map(|word| encode(word)).collect::<Result<_, _>>()?,
            full_stop: encode(".")?,
            tokens_min,
            tokens_max,
        })
    }

    /// The answer to `prompt`, and whether it was cut at the limit. `choice` tells the answers of one request apart.
    pub(crate) fn answer(&self, prompt: &[Token], choice: u32, limits: Limits) -> (Arc<[Token]>, bool) {
        let mut state = next_key(BlockKey(u64::from(choice)), prompt, &["answer"]).0;
        let mut draw = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut x = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^ (x >> 31)
        };
        let spread = u64::from(self.tokens_max - self.tokens_min) + 1;
        let natural = (u64::from(self.tokens_min) + draw() % spread).max(u64::from(limits.least));
        let len = if limits.ignore_end {
            u64::from(limits.most)
        } else {
            natural.min(u64::from(limits.most))
        };
        let mut out: Vec<Token> = Vec::with_capacity(len as usize + 8);
        let mut words = 0;
        while (out.len() as u64) < len {
            let list = if out.is_empty() && limits.fresh_start {
                &self.starts
            } else {
                &self.words
            };
            out.extend_from_slice(&list[(draw() % list.len() as u64) as usize]);
            words += 1;
            if words % SENTENCE_WORDS == 0 {
                out.extend_from_slice(&self.full_stop);
            }
        }
        out.truncate(len as usize);
        (out.into(), limits.ignore_end || natural > u64::from(limits.most))
    }
}
