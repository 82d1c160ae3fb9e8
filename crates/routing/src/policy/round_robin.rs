//! `round-robin`: in turn, by the decision's ordinal over the candidates in order of their ids.

use super::{Policy, PolicyConfig, Reason, Score, Situation};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct RoundRobin;

impl Policy for RoundRobin {
    fn config(&self) -> PolicyConfig {
        PolicyConfig::RoundRobin
    }

    fn score(&self, situation: &Situation<'_>, scores: &mut [Score]) {
        let n = scores.len() as u64;
        let turn = situation.ordinal % n.max(1);
        for (at, score) in scores.iter_mut().enumerate() {
            *score = (at as u64 + n - turn) % n;
        }
    }

    fn reason(&self, _: &Situation<'_>, _: usize) -> Reason {
        Reason::Turn
    }
}
