//! `max-hit`: the longest match whatever the load; shipped to show how it collapses on hot prefixes.

use super::{Policy, PolicyConfig, Reason, Score, Situation};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct MaxHit;

impl Policy for MaxHit {
    fn config(&self) -> PolicyConfig {
        PolicyConfig::MaxHit
    }

    fn score(&self, situation: &Situation<'_>, scores: &mut [Score]) {
        for (score, candidate) in scores.iter_mut().zip(situation.candidates) {
            *score = u64::from(candidate.terms.new_tokens);
        }
    }

    fn reason(&self, _: &Situation<'_>, _: usize) -> Reason {
        Reason::LongestMatch
    }
}
