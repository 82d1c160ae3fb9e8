//! `kv`: the least estimated time to the first token, with a price on work that others then wait for.

use super::{Policy, PolicyConfig, Reason, Score, Situation};

/// Costs within this part of the best (1/16, about 6 %) are equal: estimates aren't better than that.
const EQUAL_PART: u64 = 16;

/// Costs within this are equal however small they are: less than one scheduler step.
const EQUAL_US: u64 = 100;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Kv;

impl Policy for Kv {
    fn config(&self) -> PolicyConfig {
        PolicyConfig::Kv
    }

    fn score(&self, situation: &Situation<'_>, scores: &mut [Score]) {
        for (score, candidate) in scores.iter_mut().zip(situation.candidates) {
            *score = candidate.terms.cost().0;
        }
    }

    fn tolerance(&self, best: Score) -> Score {
        (best / EQUAL_PART).max(EQUAL_US)
    }

    fn reason(&self, situation: &Situation<'_>, chosen: usize) -> Reason {
        let c = &situation.candidates[chosen];
        let committed = c.inputs.gpu_tokens + c.inputs.cpu_tokens + c.inputs.shared_tokens + c.inputs.peer_tokens;
        if c.inputs.speculative_tokens > committed {
            Reason::JoinsPrefixOnItsWay
        } else if committed > 0 {
            Reason::LeastCostWithReuse
        } else {
            Reason::LeastCost
        }
    }
}
