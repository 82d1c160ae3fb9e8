//! `least-requests`: the fewest requests in flight from all routers.

use super::{Policy, PolicyConfig, Reason, Score, Situation};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct LeastRequests;

impl Policy for LeastRequests {
    fn config(&self) -> PolicyConfig {
        PolicyConfig::LeastRequests
    }

    fn score(&self, situation: &Situation<'_>, scores: &mut [Score]) {
        for (score, candidate) in scores.iter_mut().zip(situation.candidates) {
            *score = u64::from(candidate.inputs.in_flight);
        }
    }

    fn reason(&self, _: &Situation<'_>, _: usize) -> Reason {
        Reason::LeastLoad
    }
}
