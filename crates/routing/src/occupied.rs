//! How much of their time a pool's workers lately had prefills to do, and what work each was given: both fade.
//!
//! Integers only, so that they are the same on every machine.

use crate::Micros;

/// Whole of [`Occupied::share`].
pub(crate) const WHOLE: u64 = 1 << 16;

/// Time over which the share is taken: some dozens of prefills, so that chance evens out, and less than a shift of
/// traffic takes to matter.
const OVER: Micros = Micros::from_ms(10_000);

/// Given work halves in this time: a few turns of a conversation, so that who lately got the heavy ones is passed over
/// where nothing else tells workers apart.
const HALF_LIFE: Micros = Micros::from_ms(40_000);

/// Mean share of their time that a pool's workers had prefills to do.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Occupied {
    share: u64,
    at: Micros,
}

impl Occupied {
    /// `busy` of `all` workers have prefills to do now.
    pub(crate) fn observe(&mut self, now: Micros, busy: u64, all: u64) {
        let (span, over) = (now.since(self.at).0.min(OVER.0), OVER.0);
        self.at = self.at.max(now);
        let state = busy * WHOLE / all.max(1);
        self.share = (self.share * over + state * span) / (over + span);
    }

    /// Of [`WHOLE`].
    pub(crate) fn share(&self) -> u64 {
        self.share
    }
}

/// Work that a worker was lately given, in tokens at no context.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Given {
    work: u64,
    at: Micros,
}

impl Given {
    /// What is left of it: halves exactly, with a straight line in between.
    pub(crate) fn work(&self, now: Micros) -> u64 {
        let span = now.since(self.at).0;
        let halved = self.work >> (span / HALF_LIFE.0).min(63);
        halved - halved.saturating_mul(span % HALF_LIFE.0) / (2 * HALF_LIFE.0)
    }

    /// The worker was given more.
    pub(crate) fn add(&mut self, now: Micros, work: u64) {
        *self = Self {
            work: self.work(now).saturating_add(work),
            at: self.at.max(now),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_busy_is_half_and_equal_moments_say_nothing_new() {
        let mut occupied = Occupied::default();
        for i in 0..2_000u64 {
            occupied.observe(Micros::from_ms(i * 50), [8, 8, 0, 0, 2, 6][i as usize % 6], 8);
        }
        assert!(
            (occupied.share() as f64 / WHOLE as f64 - 0.5).abs() < 0.05,
            "{occupied:?}"
        );
        let before = occupied.share();
        (0..1_000).for_each(|_| occupied.observe(Micros::from_ms(1_999 * 50), 8, 8));
        assert_eq!(occupied.share(), before);
    }

    #[test]
    fn given_work_halves_in_forty_seconds_and_never_grows_by_itself() {
        let mut given = Given::default();
        given.add(Micros::from_ms(1_000), 8_000);
        assert_eq!(given.work(Micros::from_ms(41_000)), 4_000);
        assert_eq!(given.work(Micros::from_ms(121_000)), 1_000);
        assert_eq!(given.work(Micros(u64::MAX)), 0);
        let left: Vec<u64> = (0..200)
            .map(|s| given.work(Micros::from_ms(1_000 + s * 1_000)))
            .collect();
        assert!(left.is_sorted_by(|a, b| a >= b), "{left:?}");
        given.add(Micros::from_ms(41_000), 100);
        assert_eq!(given.work(Micros::from_ms(41_000)), 4_100);
    }
}
