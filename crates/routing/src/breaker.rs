//! One worker's breaker: faults open it, time half-opens it, a success closes it; push-back only pauses.
//!
//! A fault is a refused or cut connection, a timeout or a 5xx that isn't push-back. 503 and 429 say "busy": the worker is
//! left alone for as long as it asks, and isn't blamed.

use crate::Micros;

/// Faults in a row that open it.
pub const FAULTS_TO_OPEN: u32 = 3;

/// First time it stays open; doubles with each failed trial up to [`LONGEST_OPEN`].
pub const FIRST_OPEN: Micros = Micros::from_ms(1_000);

/// Longest time between trials, so that a worker that came back waits no longer than this for traffic.
pub const LONGEST_OPEN: Micros = Micros::from_ms(30_000);

/// Pause after push-back that names no time.
pub const DEFAULT_PAUSE: Micros = Micros::from_ms(500);

/// Longest pause that an engine may ask for.
pub const LONGEST_PAUSE: Micros = Micros::from_ms(10_000);

/// A trial that hasn't ended after this is forgotten, so that a hanging one can't keep the breaker half-open for ever.
const TRIAL_LIFE: Micros = Micros::from_ms(30_000);

/// What the breaker says about sending a request now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BreakerState {
    /// Send.
    Closed,
    /// Send one and see.
    Trial,
    /// Don't, unless there is nobody else.
    Open,
    /// It asked to be left alone.
    Paused,
}

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub struct Breaker {
    faults: u32,
    open_until: Option<Micros>,
    open_for: Micros,
    trial_since: Option<Micros>,
    paused_until: Micros,
}

impl Breaker {
    /// State at `now`.
    #[must_use]
    pub fn state(&self, now: Micros) -> BreakerState {
        match self.open_until {
            Some(until) if now < until => BreakerState::Open,
            Some(_) => match self.trial_since {
                Some(since) if now.since(since) < TRIAL_LIFE => BreakerState::Open,
                Some(_) | None => BreakerState::Trial,
            },
            None if now < self.paused_until => BreakerState::Paused,
            None => BreakerState::Closed,
        }
    }

    /// A request was sent.
    pub fn on_sent(&mut self, now: Micros) {
        if self.state(now) == BreakerState::Trial {
            self.trial_since = Some(now);
        }
    }

    /// The worker answered.
    pub fn on_success(&mut self) {
        *self = Self {
            paused_until: self.paused_until,
            ..Self::default()
        };
    }

    /// The worker failed; `true` where that opened the breaker.
    pub fn on_fault(&mut self, now: Micros) -> bool {
        self.faults = self.faults.saturating_add(1);
        let trial = self.open_until.is_some();
        if !trial && self.faults < FAULTS_TO_OPEN {
            return false;
        }
        if self.open_until.is_some_and(|until| now < until) {
            return false;
        }
        let doubled = Micros(self.open_for.0.saturating_mul(2).clamp(FIRST_OPEN.0, LONGEST_OPEN.0));
        self.open_for = doubled;
        self.open_until = Some(now.plus(doubled));
        self.trial_since = None;
        true
    }

    /// The worker asked to be left alone, for `after` where it said how long.
    pub fn on_push_back(&mut self, now: Micros, after: Option<Micros>) {
        let pause = Micros(after.unwrap_or(DEFAULT_PAUSE).0.min(LONGEST_PAUSE.0));
        self.paused_until = self.paused_until.max(now.plus(pause));
        // Busy isn't broken: a trial that is pushed back has reached the engine.
        self.on_success();
    }

    /// The request ended without saying anything about the worker, such as by its client.
    pub fn on_neutral(&mut self) {
        self.trial_since = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Micros {
        Micros::from_ms(ms)
    }

    #[test]
    fn three_faults_open_it_and_one_trial_at_a_time_is_let_through() {
        let mut b = Breaker::default();
        assert!(!b.on_fault(ms(0)) && !b.on_fault(ms(1)));
        assert_eq!(b.state(ms(2)), BreakerState::Closed);
        assert!(b.on_fault(ms(2)));
        assert_eq!(b.state(ms(900)), BreakerState::Open);
        assert_eq!(b.state(ms(1_002)), BreakerState::Trial);
        b.on_sent(ms(1_002));
        assert_eq!(b.state(ms(1_003)), BreakerState::Open);
        assert!(b.on_fault(ms(1_010)));
        assert_eq!(b.state(ms(3_009)), BreakerState::Open);
        b.on_sent(ms(3_010));
        b.on_success();
        assert_eq!(b.state(ms(3_011)), BreakerState::Closed);
    }

    #[test]
    fn a_success_between_faults_starts_the_count_again() {
        let mut b = Breaker::default();
        for i in 0..10 {
            assert!(!b.on_fault(ms(i)));
            assert!(!b.on_fault(ms(i)));
            b.on_success();
        }
    }

    #[test]
    fn time_open_doubles_up_to_its_bound() {
        let mut b = Breaker::default();
        let mut now = ms(0);
        for _ in 0..20 {
            while !b.on_fault(now) {}
            let mut open = 0;
            while b.state(now.plus(ms(open))) == BreakerState::Open {
                open += 500;
            }
            assert!(open <= 30_000);
            now = now.plus(ms(open));
        }
        assert_eq!(b.open_for, LONGEST_OPEN);
    }

    #[test]
    fn push_back_pauses_for_as_long_as_asked_within_bounds_and_blames_nobody() {
        let mut b = Breaker::default();
        b.on_fault(ms(0));
        b.on_fault(ms(0));
        b.on_push_back(ms(0), Some(ms(2_000)));
        assert_eq!(b.state(ms(1_999)), BreakerState::Paused);
        assert_eq!(b.state(ms(2_000)), BreakerState::Closed);
        b.on_push_back(ms(5_000), Some(ms(3_600_000)));
        assert_eq!(b.state(ms(15_000)), BreakerState::Closed);
        assert!(!b.on_fault(ms(15_000)), "push-back reset the count of faults");
    }

    #[test]
    fn a_trial_that_never_ends_is_forgotten() {
        let mut b = Breaker::default();
        while !b.on_fault(ms(0)) {}
        b.on_sent(ms(1_000));
        assert_eq!(b.state(ms(30_999)), BreakerState::Open);
        assert_eq!(b.state(ms(31_000)), BreakerState::Trial);
    }
}
