//! How much of its time a worker lately had prefills to do: what new work there costs those that come after it.

use crate::Micros;

/// Whole of [`Occupied::share`].
pub(crate) const WHOLE: u64 = 1 << 16;

/// Time over which the share is taken: some dozens of prefills, so that chance evens out, and less than a shift of
/// traffic takes to matter.
const OVER: Micros = Micros::from_ms(10_000);

/// Time over which given work fades: a few turns of a conversation, so that who lately got the heavy ones is passed over
/// where nothing else tells workers apart.
const WORK_OVER: Micros = Micros::from_ms(60_000);

/// A share that forgets. Integers only, so that it is the same on every machine.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Occupied {
    share: u64,
    /// Work given to the worker, fading over [`WORK_OVER`].
    work: u64,
    at: Micros,
}

impl Occupied {
    /// The worker has prefills to do now, or none.
    pub(crate) fn observe(&mut self, now: Micros, busy: bool) {
        let span = now.since(self.at).0.min(OVER.0);
        let elapsed = now.since(self.at).0;
        self.at = self.at.max(now);
        let work_over = WORK_OVER.0;
        self.work = (u128::from(self.work) * u128::from(work_over) / u128::from(work_over + elapsed)) as u64;
        let over = OVER.0;
        let state = if busy { WHOLE } else { 0 };
        self.share = (self.share * over + state * span) / (over + span);
    }

    /// The worker was given work, in tokens at no context.
    pub(crate) fn given(&mut self, work: u64) {
        self.work = self.work.saturating_add(work);
    }

    /// Work that it was lately given.
    pub(crate) fn work(&self) -> u64 {
        self.work
    }

    /// Of [`WHOLE`].
    pub(crate) fn share(&self) -> u64 {
        self.share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_busy_is_half_and_equal_moments_say_nothing_new() {
        let mut occupied = Occupied::default();
        for i in 0..2_000u64 {
            occupied.observe(Micros::from_ms(i * 50), i % 4 < 2);
        }
        assert!(
            (occupied.share() as f64 / WHOLE as f64 - 0.5).abs() < 0.05,
            "{occupied:?}"
        );
        let before = occupied.share();
        (0..1_000).for_each(|_| occupied.observe(Micros::from_ms(1_999 * 50), true));
        assert_eq!(occupied.share(), before);
    }
}
