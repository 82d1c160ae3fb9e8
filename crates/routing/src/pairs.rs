//! How KV transfers between pairs of workers fare: a pair that fails too often is left alone for a while.

use std::collections::BTreeMap;

use cairn_index::WorkerId;

use crate::Micros;

/// Window over which failures are counted, and time for which a failing pair is avoided.
pub const WINDOW: Micros = Micros::from_ms(30_000);

/// Failures above this part of transfers, in percent, are too many.
pub const FAILURES_PERCENT: u32 = 5;

/// Failures below this number say nothing, whatever their part.
pub const FAILURES_LEAST: u32 = 2;

/// Most pairs followed: 128 prefill times 128 decode workers; the least recently used goes first.
pub const MAX_PAIRS: usize = 16_384;

#[derive(Clone, Copy, Debug, Default)]
struct Pair {
    /// Start of the current half window.
    since: Micros,
    now: (u32, u32),
    before: (u32, u32),
    avoided_until: Micros,
    used: Micros,
}

impl Pair {
    fn roll(&mut self, now: Micros) {
        let half = Micros(WINDOW.0 / 2);
        let passed = now.since(self.since).0 / half.0;
        if passed >= 1 {
            self.before = if passed == 1 { self.now } else { (0, 0) };
            self.now = (0, 0);
            self.since = now;
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct PairHealth {
    pairs: BTreeMap<(WorkerId, WorkerId), Pair>,
    bounded: u64,
}

impl PairHealth {
    /// A transfer from `prefill` to `decode` ended; `true` where the pair is avoided from now on.
    pub fn observe(&mut self, now: Micros, prefill: WorkerId, decode: WorkerId, ok: bool) -> bool {
        if self.pairs.len() >= MAX_PAIRS && !self.pairs.contains_key(&(prefill, decode)) {
            self.bounded += 1;
            if let Some(oldest) = self.pairs.iter().min_by_key(|(_, p)| p.used).map(|(k, _)| *k) {
                self.pairs.remove(&oldest);
            }
        }
        let pair = self.pairs.entry((prefill, decode)).or_insert(Pair {
            since: now,
            ..Pair::default()
        });
        pair.roll(now);
        pair.used = now;
        pair.now.0 = pair.now.0.saturating_add(1);
        pair.now.1 = pair.now.1.saturating_add(u32::from(!ok));
        let (all, failed) = (pair.now.0 + pair.before.0, pair.now.1 + pair.before.1);
        let bad = failed >= FAILURES_LEAST && u64::from(failed) * 100 > u64::from(all) * u64::from(FAILURES_PERCENT);
        if bad && !ok && now >= pair.avoided_until {
            pair.avoided_until = now.plus(WINDOW);
            // Judged afresh when the time is over.
            pair.now = (0, 0);
            pair.before = (0, 0);
            return true;
        }
        false
    }

    /// Whether to leave the pair alone.
    #[must_use]
    pub fn avoided(&self, now: Micros, prefill: WorkerId, decode: WorkerId) -> bool {
        self.pairs
            .get(&(prefill, decode))
            .is_some_and(|p| now < p.avoided_until)
    }

    /// Forgets a worker.
    pub fn remove(&mut self, worker: WorkerId) {
        self.pairs.retain(|(p, d), _| *p != worker && *d != worker);
    }

    /// Pairs dropped because the table was full.
    #[must_use]
    pub fn bounded(&self) -> u64 {
        self.bounded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: WorkerId = WorkerId(1);
    const D: WorkerId = WorkerId(2);

    fn at(ms: u64) -> Micros {
        Micros::from_ms(ms)
    }

    #[test]
    fn a_pair_that_fails_too_often_is_avoided_for_thirty_seconds_and_then_tried_again() {
        let mut pairs = PairHealth::default();
        // 4 requests a second for 30 s, one in ten fails: more than 5 %.
        let first = (0..120u64)
            .find(|i| pairs.observe(at(i * 250), P, D, i % 10 != 9))
            .expect("it is seen");
        assert!(first <= 20, "seen at request {first}");
        let seen = first * 250;
        assert!(pairs.avoided(at(seen + 29_999), P, D));
        assert!(!pairs.avoided(at(seen + 30_000), P, D));
        assert!(!pairs.avoided(at(seen), D, P), "only that pair");
        for i in 0..100 {
            assert!(!pairs.observe(at(seen + 30_000 + i * 250), P, D, true));
        }
    }

    #[test]
    fn one_failure_or_four_in_a_hundred_are_tolerated() {
        let mut pairs = PairHealth::default();
        assert!(!pairs.observe(at(0), P, D, false));
        let mut pairs = PairHealth::default();
        for i in 0..1_000u64 {
            let ok = i < 100 || i % 25 != 0;
            assert!(!pairs.observe(at(i * 10), P, D, ok), "at {i}");
        }
    }

    #[test]
    fn pairs_are_bounded() {
        let mut pairs = PairHealth::default();
        for i in 0..(MAX_PAIRS as u32 + 10) {
            pairs.observe(at(u64::from(i)), WorkerId(i), D, true);
        }
        assert_eq!(pairs.pairs.len(), MAX_PAIRS);
        assert_eq!(pairs.bounded(), 10);
        pairs.remove(D);
        assert!(pairs.pairs.is_empty());
    }
}
