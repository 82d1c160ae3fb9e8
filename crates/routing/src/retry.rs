//! The retry budget: at most two attempts a request, and at most a tenth extra over the last minute.

use crate::Micros;

/// Attempts that one request may make upstream.
pub const MAX_ATTEMPTS: u32 = 2;

/// Extra attempts allowed in a minute, in percent of that minute's requests.
pub const EXTRA_PERCENT: u64 = 10;

/// Extra attempts that are always allowed in a minute, so that a quiet router can retry at all.
pub const EXTRA_FLOOR: u64 = 10;

/// Cells of the sliding minute.
const CELLS: usize = 60;

/// Length of one cell.
const CELL: Micros = Micros::from_ms(1_000);

/// See the module.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    requests: [u32; CELLS],
    extra: [u32; CELLS],
    /// Number of the newest cell since time 0.
    newest: u64,
    refused: u64,
}

impl Default for RetryBudget {
    fn default() -> Self {
        Self {
            requests: [0; CELLS],
            extra: [0; CELLS],
            newest: 0,
            refused: 0,
        }
    }
}

impl RetryBudget {
    fn advance(&mut self, now: Micros) -> usize {
        let cell = (now.0 / CELL.0).max(self.newest);
        for step in 1..=(cell - self.newest).min(CELLS as u64) {
            let at = ((self.newest + step) % CELLS as u64) as usize;
            self.requests[at] = 0;
            self.extra[at] = 0;
        }
        self.newest = cell;
        (cell % CELLS as u64) as usize
    }

    /// A request made its first attempt.
    pub fn on_request(&mut self, now: Micros) {
        let at = self.advance(now);
        self.requests[at] = self.requests[at].saturating_add(1);
    }

    /// Asks for one more attempt for a request that has made `attempts`; counted if granted.
    pub fn try_retry(&mut self, now: Micros, attempts: u32) -> bool {
        let at = self.advance(now);
        let requests: u64 = self.requests.iter().map(|n| u64::from(*n)).sum();
        let extra: u64 = self.extra.iter().map(|n| u64::from(*n)).sum();
        let allowed = (requests * EXTRA_PERCENT / 100).max(EXTRA_FLOOR);
        if attempts >= MAX_ATTEMPTS || extra >= allowed {
            self.refused += 1;
            return false;
        }
        self.extra[at] = self.extra[at].saturating_add(1);
        true
    }

    /// Retries that were refused.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_attempt_is_never_granted() {
        let mut budget = RetryBudget::default();
        budget.on_request(Micros(0));
        assert!(budget.try_retry(Micros(0), 1));
        assert!(!budget.try_retry(Micros(0), 2));
    }

    #[test]
    fn retries_stay_within_a_tenth_of_a_minutes_requests_when_everything_fails() {
        let mut budget = RetryBudget::default();
        let mut granted = 0;
        for i in 0..6_000u64 {
            let now = Micros::from_ms(i * 10);
            budget.on_request(now);
            granted += u64::from(budget.try_retry(now, 1));
        }
        assert!(granted <= 600, "{granted}");
        assert!(granted >= 590, "{granted}");
        assert_eq!(budget.refused(), 6_000 - granted);
    }

    #[test]
    fn the_minute_slides_and_time_that_steps_back_does_no_harm() {
        let mut budget = RetryBudget::default();
        let at = |s: u64| Micros::from_ms(s * 1_000);
        for _ in 0..EXTRA_FLOOR {
            assert!(budget.try_retry(at(100), 1));
        }
        assert!(!budget.try_retry(at(159), 1));
        assert!(!budget.try_retry(at(3), 1));
        assert!(budget.try_retry(at(160), 1));
        assert!(budget.try_retry(at(1_000_000), 1));
    }
}
