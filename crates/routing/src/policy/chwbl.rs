//! `chwbl`: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016), ranked by rendezvous hashing.

use super::{Policy, PolicyConfig, PolicyError, Reason, Score, Situation, prefix, within};
use crate::{RequestFacts, draw};

/// Set on the scores of workers above their bound.
const OVER: u64 = 1 << 63;

pub(super) fn default_load() -> u32 {
    125
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Chwbl {
    load_percent: u32,
    prefix_length: u32,
}

impl Chwbl {
    /// Checks the parameters' ranges.
    pub fn new(load_percent: u32, prefix_length: u32) -> Result<Self, PolicyError> {
        within("chwbl", "load_percent", load_percent, (101, 1_000))?;
        within("chwbl", "prefix_length", prefix_length, (1, prefix::PREFIX_LENGTH.1))?;
        Ok(Self {
            load_percent,
            prefix_length,
        })
    }

    /// Most requests that a worker may have, the new one included.
    fn bound(&self, situation: &Situation<'_>) -> u64 {
        let total: u64 = situation
            .candidates
            .iter()
            .map(|c| u64::from(c.inputs.in_flight))
            .sum::<u64>()
            + 1;
        (total * u64::from(self.load_percent)).div_ceil(100 * situation.candidates.len() as u64)
    }
}

impl Policy for Chwbl {
    fn config(&self) -> PolicyConfig {
        PolicyConfig::Chwbl {
            load_percent: self.load_percent,
            prefix_length: self.prefix_length,
        }
    }

    fn identity(&self, request: &RequestFacts<'_>, seed: u64) -> u64 {
        prefix::identity(request, self.prefix_length, seed)
    }

    fn score(&self, situation: &Situation<'_>, scores: &mut [Score]) {
        let bound = self.bound(situation);
        let identity = if situation.identity == 0 {
            situation.draw
        } else {
            situation.identity
        };
        for (score, candidate) in scores.iter_mut().zip(situation.candidates) {
            let load = u64::from(candidate.inputs.in_flight);
            let rank = draw::pair(identity, u64::from(candidate.worker.0)) >> 1;
            *score = if load < bound { rank } else { OVER | rank };
        }
    }

    fn reason(&self, situation: &Situation<'_>, chosen: usize) -> Reason {
        if situation.identity == 0 {
            return Reason::Chance;
        }
        let rank = |at: usize| draw::pair(situation.identity, u64::from(situation.candidates[at].worker.0));
        let first = (0..situation.candidates.len()).all(|at| rank(chosen) <= rank(at));
        if first { Reason::Affinity } else { Reason::Overflow }
    }
}
