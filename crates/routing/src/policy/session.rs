//! `session`: every request of one identity to one worker, by rendezvous hashing; without identity the least requests.

use super::{Policy, PolicyConfig, Reason, Score, Situation};
use crate::{RequestFacts, draw};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Session;

impl Policy for Session {
    fn config(&self) -> PolicyConfig {
        PolicyConfig::Session
    }

    fn identity(&self, request: &RequestFacts<'_>, seed: u64) -> u64 {
        if request.affinity.is_empty() {
            0
        } else {
            draw::bytes(seed, request.affinity) | 1
        }
    }

    fn score(&self, situation: &Situation<'_>, scores: &mut [Score]) {
        for (score, candidate) in scores.iter_mut().zip(situation.candidates) {
            *score = match situation.identity {
                0 => u64::from(candidate.inputs.in_flight),
                identity => draw::pair(identity, u64::from(candidate.worker.0)),
            };
        }
    }

    fn reason(&self, situation: &Situation<'_>, _: usize) -> Reason {
        if situation.identity == 0 {
            Reason::LeastLoad
        } else {
            Reason::Affinity
        }
    }
}
