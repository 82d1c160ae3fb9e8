//! `sticky`: among workers that hold most of the prompt the one with the least outstanding prefill, unless it leads the
//! least busy of all by more than tau.

use super::{Policy, PolicyConfig, PolicyError, Reason, Score, Situation, within};

pub(super) fn default_cached() -> u32 {
    80
}

pub(super) fn default_tau() -> u32 {
    16_384
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Sticky {
    cached_percent: u32,
    tau_tokens: u32,
}

impl Sticky {
    /// Checks the parameters' ranges.
    pub fn new(cached_percent: u32, tau_tokens: u32) -> Result<Self, PolicyError> {
        within("sticky", "cached_percent", cached_percent, (1, 100))?;
        within("sticky", "tau_tokens", tau_tokens, (0, 1 << 30))?;
        Ok(Self {
            cached_percent,
            tau_tokens,
        })
    }

    fn sticks(&self, situation: &Situation<'_>, at: usize) -> bool {
        let c = &situation.candidates[at];
        let cached = u64::from(c.inputs.prompt_tokens - c.terms.new_tokens);
        // The last token is always computed, so a prompt that is there as a whole counts as such.
        (cached + 1) * 100 >= u64::from(c.inputs.prompt_tokens) * u64::from(self.cached_percent) && cached > 0
    }
}

impl Policy for Sticky {
    fn config(&self) -> PolicyConfig {
        PolicyConfig::Sticky {
            cached_percent: self.cached_percent,
            tau_tokens: self.tau_tokens,
        }
    }

    fn score(&self, situation: &Situation<'_>, scores: &mut [Score]) {
        for (at, (score, candidate)) in scores.iter_mut().zip(situation.candidates).enumerate() {
            let penalty = if self.sticks(situation, at) {
                0
            } else {
                u64::from(self.tau_tokens)
            };
            *score = candidate.inputs.queued_work + penalty;
        }
    }

    fn reason(&self, situation: &Situation<'_>, chosen: usize) -> Reason {
        if self.sticks(situation, chosen) {
            Reason::LeastCostWithReuse
        } else {
            Reason::LeastLoad
        }
    }
}
