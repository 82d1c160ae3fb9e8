//! Speeds of a worker, learned from what was observed there.
//!
//! Prefill time is a line over work: a fixed start and a slope; so is the time of a KV transfer over its tokens. Both are
//! fitted by least squares over observations whose weight halves every [`HALF_LIFE`], together with a prior of constant
//! weight. What a fetch takes can't be told apart from the prefill that follows it, so its speeds stay as assumed. An
//! off-the-shelf moving average of the time per token was unfit: it mixes short prompts, where the start dominates, with
//! long ones, and a few short prompts then make long ones look slow.

use crate::Micros;
use crate::cost::{Speeds, TRANSFER_START_US};

/// Weight of an observation halves in this time: minutes, so that a change of clocks or neighbours shows, and a lull
/// doesn't forget everything.
pub const HALF_LIFE: Micros = Micros::from_ms(120_000);

/// A sample above this multiple of what was expected counts as that: a stalled client or a lost packet isn't speed.
pub const OUTLIER: f64 = 8.0;

/// Observations that a worker's prior (its pool) counts for: engines of a pool are alike until shown otherwise.
const WORKER_PRIOR: f64 = 16.0;

/// Observations that a pool's prior (the defaults) counts for.
const POOL_PRIOR: f64 = 2.0;

/// A prefill slope below a tenth of the plain ratio of time to work would make long prompts free. A transfer may well take as long
/// whatever its length: its least is nothing.
const PREFILL_LEAST_PART: f64 = 0.1;

/// Observations that the prior of a transfer's or an answer's time counts for.
const MEAN_PRIOR: f64 = 4.0;

/// Most observations that count: older ones fade once this weight is reached.
const MAX_WEIGHT: f64 = 512.0;

/// Speeds before anything was learned: a 70B model on a node of eight GPUs (1.4e11 FLOPs a token at 2e15 a second give
/// 70 us), 20 ms for scheduling and the first step; 320 KB of KV a token at 20 GB/s from CPU memory, 5 GB/s from shared
/// storage and 25 GB/s between nodes; an answer of about 10 s.
pub const DEFAULT_SPEEDS: Speeds = Speeds {
    prefill_start_us: 20_000,
    prefill_ns_per_token: 70_000,
    cpu_ns_per_token: 16_000,
    shared_ns_per_token: 64_000,
    transfer_start_us: TRANSFER_START_US,
    transfer_ns_per_token: 12_800,
    service_us: 10_000_000,
};

/// What is left of a weight after `span`: halves exactly, with a straight line in between, so that it is the same on every
/// machine (a library's `powf` isn't).
fn faded(span: Micros) -> f64 {
    let halves = (span.0 / HALF_LIFE.0).min(60);
    let rest = (span.0 % HALF_LIFE.0) as f64 / HALF_LIFE.0 as f64;
    (1.0 - rest / 2.0) / (1u64 << halves) as f64
}

/// A decaying least-squares line `time = start + slope * work`, in microseconds and tokens.
#[derive(Clone, Copy, Debug)]
struct Line {
    prior_start: f64,
    prior_slope: f64,
    prior_weight: f64,
    /// The slope's least part of the plain ratio of time to work: what the data must not pull it below.
    least_part: f64,
    n: f64,
    w: f64,
    ww: f64,
    t: f64,
    wt: f64,
    at: Micros,
}

/// Two amounts of work at which the prior pretends to have been observed.
const PRIOR_POINTS: [f64; 2] = [64.0, 4096.0];

impl Line {
    fn new(start: f64, slope: f64, prior_weight: f64, least_part: f64) -> Self {
        Self {
            prior_start: start,
            prior_slope: slope,
            prior_weight,
            least_part,
            n: 0.0,
            w: 0.0,
            ww: 0.0,
            t: 0.0,
            wt: 0.0,
            at: Micros(0),
        }
    }

    fn fit(&self) -> (f64, f64) {
        let (mut n, mut w, mut ww, mut t, mut wt) = (self.n, self.w, self.ww, self.t, self.wt);
        for point in PRIOR_POINTS {
            let weight = self.prior_weight / PRIOR_POINTS.len() as f64;
            let time = self.prior_start + self.prior_slope * point;
            n += weight;
            w += weight * point;
            ww += weight * point * point;
            t += weight * time;
            wt += weight * point * time;
        }
        let slope = (n * wt - w * t) / (n * ww - w * w);
        // No work makes anything faster.
        let slope = slope.max(self.least_part * t / w.max(1.0)).max(0.0);
        let start = (t - slope * w) / n;
        // No prefill ends before it starts: then the line goes through the origin.
        if start < 0.0 { (0.0, wt / ww) } else { (start, slope) }
    }

    fn observe(&mut self, now: Micros, work: f64, time: f64) {
        let (start, slope) = self.fit();
        let expected = start + slope * work;
        let time = time.min(expected * OUTLIER);
        let faded = faded(now.since(self.at)).min(MAX_WEIGHT / (self.n + 1.0));
        self.at = self.at.max(now);
        for sum in [&mut self.n, &mut self.w, &mut self.ww, &mut self.t, &mut self.wt] {
            *sum *= faded;
        }
        self.n += 1.0;
        self.w += work;
        self.ww += work * work;
        self.t += time;
        self.wt += work * time;
    }
}

/// A decaying mean.
#[derive(Clone, Copy, Debug)]
struct Mean {
    value: f64,
    weight: f64,
    at: Micros,
}

impl Mean {
    fn new(value: f64) -> Self {
        Self {
            value,
            weight: MEAN_PRIOR,
            at: Micros(0),
        }
    }

    fn observe(&mut self, now: Micros, sample: f64) {
        let sample = sample.min(self.value * OUTLIER);
        let faded = faded(now.since(self.at));
        self.at = self.at.max(now);
        self.weight = (self.weight * faded).clamp(MEAN_PRIOR, 64.0) + 1.0;
        self.value += (sample - self.value) / self.weight;
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Rates {
    prefill: Line,
    transfer: Line,
    service_us: Mean,
    speeds: Speeds,
}

impl Default for Rates {
    fn default() -> Self {
        Self::with_prior(DEFAULT_SPEEDS, POOL_PRIOR)
    }
}

impl Rates {
    /// Starts from the speeds of the worker's pool.
    #[must_use]
    pub fn from_prior(prior: Speeds) -> Self {
        Self::with_prior(prior, WORKER_PRIOR)
    }

    fn with_prior(prior: Speeds, weight: f64) -> Self {
        let line = |start_us: u32, ns: u32, weight, least| {
            Line::new(f64::from(start_us), f64::from(ns) / 1_000.0, weight, least)
        };
        Self {
            prefill: line(
                prior.prefill_start_us,
                prior.prefill_ns_per_token,
                weight,
                PREFILL_LEAST_PART,
            ),
            transfer: line(prior.transfer_start_us, prior.transfer_ns_per_token, MEAN_PRIOR, 0.0),
            service_us: Mean::new(prior.service_us as f64),
            speeds: prior,
        }
    }

    /// Present speeds.
    #[must_use]
    pub fn speeds(&self) -> Speeds {
        self.speeds
    }

    /// A prefill of `work` took `time` on its own.
    pub fn observe_prefill(&mut self, now: Micros, work: u64, time: Micros) {
        self.prefill.observe(now, work as f64, time.0 as f64);
        self.refit();
    }

    /// Follows what the pool has learned since.
    pub fn set_prior(&mut self, pool: Speeds) {
        self.prefill.prior_start = f64::from(pool.prefill_start_us);
        self.prefill.prior_slope = f64::from(pool.prefill_ns_per_token) / 1_000.0;
        self.refit();
    }

    fn refit(&mut self) {
        let (start, slope) = self.prefill.fit();
        // 100 ns to 100 ms a token and 0.1 ms to 10 s of start hold every engine from a toy to a 1T model on CPUs.
        self.speeds.prefill_ns_per_token = (slope * 1_000.0).clamp(100.0, 1e8) as u32;
        self.speeds.prefill_start_us = start.clamp(100.0, 1e7) as u32;
    }

    /// A KV transfer of `tokens` took `time`.
    pub fn observe_transfer(&mut self, now: Micros, tokens: u32, time: Micros) {
        if tokens > 0 {
            self.transfer.observe(now, f64::from(tokens), time.0 as f64);
            let (start, slope) = self.transfer.fit();
            self.speeds.transfer_start_us = start.clamp(100.0, 1e7) as u32;
            self.speeds.transfer_ns_per_token = (slope * 1_000.0).clamp(1.0, 1e8) as u32;
        }
    }

    /// An answer took `time` from its first token to its end.
    pub fn observe_service(&mut self, now: Micros, time: Micros) {
        self.service_us.observe(now, time.0 as f64);
        self.speeds.service_us = self.service_us.value.clamp(1_000.0, 3.6e9) as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learned(observations: impl Iterator<Item = (u64, u64)>) -> Speeds {
        let mut rates = Rates::default();
        for (i, (work, us)) in observations.enumerate() {
            rates.observe_prefill(Micros::from_ms(100 * i as u64), work, Micros(us));
        }
        rates.speeds()
    }

    #[test]
    fn start_and_slope_are_found_from_mixed_lengths() {
        let speeds = learned(
            (0..200)
                .map(|i| [100, 700, 3_000, 9_000][i % 4])
                .map(|w| (w, 5_000 + w * 25)),
        );
        assert!((4_000..7_500).contains(&speeds.prefill_start_us), "{speeds:?}");
        assert!((24_000..26_500).contains(&speeds.prefill_ns_per_token), "{speeds:?}");
    }

    #[test]
    fn equal_lengths_still_give_the_right_time_at_that_length() {
        let speeds = learned((0..200).map(|_| (2_000, 400_000)));
        let at = u64::from(speeds.prefill_start_us) + 2_000 * u64::from(speeds.prefill_ns_per_token) / 1_000;
        assert!((380_000..420_000).contains(&at), "{speeds:?} gives {at}");
    }

    #[test]
    fn one_stalled_answer_in_twenty_moves_the_estimate_by_less_than_half() {
        let speeds = learned((0..400).map(|i| (2_000, if i % 20 == 7 { 60_000_000 } else { 160_000 })));
        let at = u64::from(speeds.prefill_start_us) + 2_000 * u64::from(speeds.prefill_ns_per_token) / 1_000;
        assert!((150_000..260_000).contains(&at), "{at}");
    }

    #[test]
    fn a_new_speed_is_followed_within_minutes() {
        let slow = (0..100).map(|_| (2_000, 160_000));
        let fast = (0..3_000).map(|_| (2_000, 40_000));
        let speeds = learned(slow.chain(fast));
        let at = u64::from(speeds.prefill_start_us) + 2_000 * u64::from(speeds.prefill_ns_per_token) / 1_000;
        assert!((36_000..48_000).contains(&at), "{at}");
    }

    #[test]
    fn slow_transfers_of_short_prompts_leave_long_ones_cheap() {
        let mut rates = Rates::default();
        for i in 0..20 {
            rates.observe_transfer(Micros::from_ms(i * 50), 64, Micros(150_000));
        }
        let speeds = rates.speeds();
        assert!((100_000..160_000).contains(&speeds.transfer_start_us), "{speeds:?}");
        assert!(speeds.transfer_ns_per_token < 13_000, "{speeds:?}");
    }

    #[test]
    fn transfer_speed_is_a_mean_that_outliers_do_not_own() {
        let mut rates = Rates::default();
        for i in 0..200 {
            let us = if i % 50 == 0 { 10_000_000 } else { 8_000 };
            rates.observe_transfer(Micros::from_ms(i * 50), 1_000, Micros(us));
        }
        let speeds = rates.speeds();
        let at = u64::from(speeds.transfer_start_us) + u64::from(speeds.transfer_ns_per_token);
        assert!((7_000..20_000).contains(&at), "{speeds:?} gives {at}");
    }
}
