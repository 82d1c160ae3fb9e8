//! The prediction audit: what the committed view promised against what the engine says it reused.
//!
//! A worker whose engine keeps confirming less than was predicted is trusted less, in proportion, within about ten
//! requests; where it confirms all, trust comes back as fast.

use crate::cost::TRUST_FULL;

/// Weight of the newest request, in 1/16: after 20 requests 93 % of an old error is gone (0.875^20 = 0.07).
const NEWEST_16THS: u64 = 2;

/// Deviations up to this part (1/32) are left alone: a block more or less at the end is no drift.
const TOLERATED_PART: u64 = 32;

/// Least trust, so that an engine that never reports reuse can still be seen to recover.
const LEAST_TRUST: u32 = TRUST_FULL / 64;

/// Sums in 1/16 token are kept below this, so that one huge prompt can't outweigh all that follow.
const MOST_TOKENS: u32 = 1 << 20;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drift {
    predicted: u64,
    confirmed: u64,
    /// Requests compared.
    pub compared: u64,
    /// Tokens predicted, in total.
    pub predicted_tokens: u64,
    /// Tokens that engines confirmed, in total.
    pub cached_tokens: u64,
    /// Tokens predicted beyond what was confirmed, in total.
    pub over_tokens: u64,
    /// Tokens confirmed beyond what was predicted, in total.
    pub under_tokens: u64,
}

impl Drift {
    /// Compares one request; `cached` is the engine's `cached_tokens`.
    pub fn observe(&mut self, predicted: u32, cached: u32) {
        let (predicted, cached) = (predicted.min(MOST_TOKENS), cached.min(MOST_TOKENS));
        self.compared += 1;
        self.predicted_tokens += u64::from(predicted);
        self.cached_tokens += u64::from(cached);
        self.over_tokens += u64::from(predicted.saturating_sub(cached));
        self.under_tokens += u64::from(cached.saturating_sub(predicted));
        if predicted == 0 {
            return;
        }
        // More than predicted isn't a reason to trust beyond what is claimed.
        let cached = cached.min(predicted);
        self.predicted = self.predicted * (16 - NEWEST_16THS) / 16 + u64::from(predicted) * NEWEST_16THS;
        self.confirmed = self.confirmed * (16 - NEWEST_16THS) / 16 + u64::from(cached) * NEWEST_16THS;
    }

    /// What part of a prediction to believe, in 1/1024.
    #[must_use]
    pub fn trust(&self) -> u32 {
        if self.predicted == 0 || self.confirmed + self.predicted / TOLERATED_PART >= self.predicted {
            return TRUST_FULL;
        }
        ((self.confirmed * u64::from(TRUST_FULL) / self.predicted) as u32).max(LEAST_TRUST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_constant_shortfall_is_corrected_within_twenty_requests() {
        let mut drift = Drift::default();
        for _ in 0..50 {
            drift.observe(1_000, 1_000);
        }
        assert_eq!(drift.trust(), TRUST_FULL);
        for _ in 0..20 {
            drift.observe(1_000, 400);
        }
        let believed = 1_000 * drift.trust() / TRUST_FULL;
        assert!((390..=450).contains(&believed), "{believed}");
        assert_eq!(drift.over_tokens, 20 * 600);
    }

    #[test]
    fn trust_comes_back_and_small_deviations_do_not_matter() {
        let mut drift = Drift::default();
        for _ in 0..20 {
            drift.observe(1_000, 0);
        }
        assert!(drift.trust() >= LEAST_TRUST);
        for _ in 0..40 {
            drift.observe(1_000, 984);
        }
        assert_eq!(drift.trust(), TRUST_FULL);
    }

    #[test]
    fn reports_beyond_the_prediction_and_absurd_ones_do_no_harm() {
        let mut drift = Drift::default();
        drift.observe(0, u32::MAX);
        drift.observe(u32::MAX, u32::MAX);
        drift.observe(10, u32::MAX);
        assert_eq!(drift.trust(), TRUST_FULL);
    }
}
