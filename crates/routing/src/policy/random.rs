//! `random`: uniformly at random; the baseline that every claim is measured against.

use super::{Policy, PolicyConfig, Reason, Score, Situation};
use crate::draw;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Random;

impl Policy for Random {
    fn config(&self) -> PolicyConfig {
        PolicyConfig::Random
    }

    fn score(&self, situation: &Situation<'_>, scores: &mut [Score]) {
        for (score, candidate) in scores.iter_mut().zip(situation.candidates) {
            *score = draw::pair(situation.draw, u64::from(candidate.worker.0));
        }
    }

    fn reason(&self, _: &Situation<'_>, _: usize) -> Reason {
        Reason::Chance
    }
}
