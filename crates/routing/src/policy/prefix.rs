//! `prefix`: Amazon SageMaker's prefix-aware routing: equal prompt starts to one worker until it is busy.
//!
//! The identity is the request's prefix-aware id where it has one, else its first `prefix_length` bytes of text. Workers
//! are ranked by rendezvous hashing, so adding or removing one moves only its own share. An affine worker that has
//! `concurrency_threshold` requests in flight overflows to the least loaded.

use super::{Policy, PolicyConfig, PolicyError, Reason, Score, Situation, within};
use crate::{RequestFacts, draw};

/// Allowed `prefix_length`, in bytes.
pub const PREFIX_LENGTH: (u32, u32) = (1_024, 65_536);

/// Allowed `concurrency_threshold`, in requests.
pub const CONCURRENCY_THRESHOLD: (u32, u32) = (1, 1_024);

/// Bytes of text in a token, where only keys are known: about right for English under a large vocabulary.
const BYTES_PER_TOKEN: u32 = 4;

/// Scores of the affine worker and of all others below and above this: the affine one wins while it may.
const NOT_AFFINE: u64 = 1 << 32;

pub(super) fn default_length() -> u32 {
    4_096
}

pub(super) fn default_threshold() -> u32 {
    16
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Prefix {
    prefix_length: u32,
    concurrency_threshold: u32,
}

impl Prefix {
    /// Checks the parameters' ranges.
    pub fn new(prefix_length: u32, concurrency_threshold: u32) -> Result<Self, PolicyError> {
        within("prefix", "prefix_length", prefix_length, PREFIX_LENGTH)?;
        within(
            "prefix",
            "concurrency_threshold",
            concurrency_threshold,
            CONCURRENCY_THRESHOLD,
        )?;
        Ok(Self {
            prefix_length,
            concurrency_threshold,
        })
    }
}

/// Hash of the request's prefix-aware id, or its text's start, or the block key nearest that length; never 0 where
/// there is any of them.
pub(super) fn identity(request: &RequestFacts<'_>, prefix_length: u32, seed: u64) -> u64 {
    if !request.affinity.is_empty() {
        return draw::bytes(seed, request.affinity) | 1;
    }
    if !request.prefix.is_empty() {
        let end = request.prefix.len().min(prefix_length as usize);
        return draw::bytes(seed, &request.prefix[..end]) | 1;
    }
    let blocks = (prefix_length / (BYTES_PER_TOKEN * request.block_tokens.max(1))).max(1) as usize;
    request
        .keys
        .get(blocks.min(request.keys.len()).wrapping_sub(1))
        .map_or(0, |key| draw::pair(seed, key.0) | 1)
}

/// The candidate that an identity belongs to.
fn affine(situation: &Situation<'_>) -> Option<usize> {
    if situation.identity == 0 {
        return None;
    }
    let rank = |at: &usize| draw::pair(situation.identity, u64::from(situation.candidates[*at].worker.0));
    (0..situation.candidates.len()).min_by_key(rank)
}

impl Policy for Prefix {
    fn config(&self) -> PolicyConfig {
        PolicyConfig::Prefix {
            prefix_length: self.prefix_length,
            concurrency_threshold: self.concurrency_threshold,
        }
    }

    fn identity(&self, request: &RequestFacts<'_>, seed: u64) -> u64 {
        identity(request, self.prefix_length, seed)
    }

    fn score(&self, situation: &Situation<'_>, scores: &mut [Score]) {
        for (score, candidate) in scores.iter_mut().zip(situation.candidates) {
            *score = NOT_AFFINE + u64::from(candidate.inputs.in_flight);
        }
        if let Some(at) = affine(situation)
            && situation.candidates[at].inputs.in_flight < self.concurrency_threshold
        {
            scores[at] = 0;
        }
    }

    fn reason(&self, situation: &Situation<'_>, chosen: usize) -> Reason {
        match affine(situation) {
            None => Reason::LeastLoad,
            Some(at) if situation.candidates[at].inputs.in_flight >= self.concurrency_threshold => Reason::Overflow,
            Some(at) if at == chosen => Reason::Affinity,
            Some(_) => Reason::Overflow,
        }
    }
}
