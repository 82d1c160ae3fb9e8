//! `least-tokens`: the fewest tokens outstanding, to be computed or held by running answers.

use super::{Policy, PolicyConfig, Reason, Score, Situation};

/// A context token costs a decode step about this part of what computing it cost (memory traffic against arithmetic).
const CONTEXT_PART: u64 = 64;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct LeastTokens;

impl Policy for LeastTokens {
    fn config(&self) -> PolicyConfig {
        PolicyConfig::LeastTokens
    }

    fn score(&self, situation: &Situation<'_>, scores: &mut [Score]) {
        for (score, candidate) in scores.iter_mut().zip(situation.candidates) {
            *score = candidate.inputs.queued_work + candidate.inputs.context_tokens / CONTEXT_PART;
        }
    }

    fn reason(&self, _: &Situation<'_>, _: usize) -> Reason {
        Reason::LeastLoad
    }
}
