//! `lmetric`: prefill tokens outstanding with the new ones, times the batch size with the new request.

use super::{Policy, PolicyConfig, Reason, Score, Situation};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Lmetric;

impl Policy for Lmetric {
    fn config(&self) -> PolicyConfig {
        PolicyConfig::Lmetric
    }

    fn score(&self, situation: &Situation<'_>, scores: &mut [Score]) {
        for (score, candidate) in scores.iter_mut().zip(situation.candidates) {
            let tokens = candidate.inputs.queued_work + u64::from(candidate.terms.new_tokens);
            *score = tokens * (u64::from(candidate.inputs.in_flight) + 1);
        }
    }

    fn reason(&self, situation: &Situation<'_>, chosen: usize) -> Reason {
        let c = &situation.candidates[chosen];
        if c.terms.new_tokens < c.inputs.prompt_tokens {
            Reason::LeastCostWithReuse
        } else {
            Reason::LeastCost
        }
    }
}
