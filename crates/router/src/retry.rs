//! How many second attempts a router may make: few more than live requests warrant, so that retries never multiply a fault.

use parking_lot::Mutex;

/// Attempts at engines per request, the first one included.
pub(crate) const ATTEMPTS_MAX: u32 = 2;
/// Share of a retry that each request earns: ten percent more load at most.
const EARN: f64 = 0.1;
/// Retries that may happen in a burst: one engine's running requests when it dies.
const BURST: f64 = 256.0;

/// Shared by all requests of a router.
pub(crate) struct RetryBudget(Mutex<f64>);

impl Default for RetryBudget {
    fn default() -> Self {
        Self(Mutex::new(BURST))
    }
}

impl RetryBudget {
    /// A request came.
    pub(crate) fn earn(&self) {
        let mut left = self.0.lock();
        *left = (*left + EARN).min(BURST);
    }

    /// Whether one more attempt may be made.
    pub(crate) fn spend(&self) -> bool {
        let mut left = self.0.lock();
        if *left < 1.0 {
            return false;
        }
        *left -= 1.0;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_a_burst_one_request_in_ten_is_retried() {
        let budget = RetryBudget::default();
        let burst = std::iter::repeat_with(|| budget.spend()).take_while(|ok| *ok).count();
        assert_eq!(burst, 256);
        let retried = (0..1_000).filter(|_| {
            budget.earn();
            budget.spend()
        });
        assert!((99..=100).contains(&retried.count()));
    }
}
