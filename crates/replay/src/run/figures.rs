//! What a run comes to: figures of each request, summed.

use cairn_routing::PolicyConfig;

use super::World;
use crate::engine_model::{CachedTokens, Finish, Micros};
use crate::report::{CURVE, FirstToken, Run, Window, quantile};

/// One request as it was served.
#[derive(Clone, Copy, Default)]
pub(super) struct Served {
    pub(super) done: bool,
    pub(super) refused: bool,
    pub(super) retries: u8,
    /// Computed the prompt.
    engine: u16,
    /// Answered.
    answering: u16,
    /// Whether those are two.
    pub(super) split: bool,
    prompt: u32,
    cached: u32,
    fetched: u32,
    /// From arrival to the first token, in microseconds.
    wait_us: u64,
    first_us: u64,
}

impl Served {
    /// Takes how a request ended that came at `arrived`.
    pub(super) fn take(&mut self, engine: usize, finish: &Finish, arrived: Micros) {
        let first = finish.first_token.unwrap_or(finish.arrived);
        self.done = true;
        self.engine = engine as u16;
        self.answering = engine as u16;
        self.prompt = finish.prompt_tokens;
        self.cached = finish.cached.total();
        self.fetched = finish.cached.cpu + finish.cached.remote;
        self.wait_us = first.since(arrived).0;
        self.first_us = first.0;
    }

    /// Another engine computed the prompt, and reused so much of it.
    pub(super) fn take_split(&mut self, prefill: usize, cached: CachedTokens) {
        self.split = true;
        self.engine = prefill as u16;
        self.cached = cached.total();
        self.fetched = cached.cpu + cached.remote;
    }

    fn wait_ms(&self) -> f64 {
        self.wait_us as f64 / 1e3
    }
}

/// Sums of one stretch of time.
#[derive(Default)]
struct Stretch {
    requests: u64,
    prompt: u64,
    cached: u64,
    waits: Vec<f64>,
    work: Vec<u64>,
}

impl World<'_> {
    pub(super) fn figures(&self, policy: &PolicyConfig, seed: u64) -> Run {
        let engines = self.fleet.len();
        let (mut requests, mut work) = (vec![0u64; engines], vec![0u64; engines]);
        let (mut cached, mut fetched, mut prompt) = (0u64, 0u64, 0u64);
        let mut waits = Vec::with_capacity(self.served.len());
        let mut end = 1;
        for one in self.served.iter().filter(|one| one.done) {
            cached += u64::from(one.cached);
            fetched += u64::from(one.fetched);
            prompt += u64::from(one.prompt);
            requests[usize::from(one.answering)] += 1;
            work[usize::from(one.engine)] += u64::from(one.prompt - one.cached);
            end = end.max(one.first_us);
            waits.push(one.wait_ms());
        }
        let count: u64 = requests.iter().sum();
        let share = |of: &[u64]| {
            let sum = of.iter().sum::<u64>().max(1) as f64;
            of.iter().map(|part| *part as f64 / sum).collect::<Vec<f64>>()
        };
        let mean_work = work.iter().sum::<u64>() as f64 / engines.max(1) as f64;
        let all = self.trace.prompt_tokens().max(1) as f64;
        let hit = cached as f64 / prompt.max(1) as f64;
        let oracle = self.trace.oracle_hit();
        waits.sort_by(f64::total_cmp);
        Run {
            policy: policy.name().to_owned(),
            parameters: policy.clone(),
            seed,
            hit,
            oracle_fraction: if oracle > 0.0 { hit / oracle } else { 1.0 },
            fetched: fetched as f64 / prompt.max(1) as f64,
            split_share: self.served.iter().filter(|one| one.split).count() as f64 / count.max(1) as f64,
            predicted_hit: self.routers.predicted as f64 / all,
            ttft_ms: FirstToken::of_sorted(&waits),
            ttft_curve_ms: CURVE.iter().map(|share| quantile(&waits, *share)).collect(),
            utilisation: self.fleet.busy_s() / (engines.max(1) as f64 * end as f64 / 1e6),
            throughput_rps: count as f64 / (end as f64 / 1e6),
            overflow: self.routers.overflow(),
            reasons: self
                .routers
                .reasons
                .iter()
                .map(|(why, n)| ((*why).to_owned(), *n))
                .collect(),
            refused: self.served.iter().filter(|one| one.refused).count() as u64,
            retries: self.served.iter().map(|one| u64::from(one.retries)).sum(),
            request_share: share(&requests),
            work_share: share(&work),
            work_max_over_mean: work.iter().max().copied().unwrap_or(0) as f64 / mean_work.max(f64::MIN_POSITIVE),
            preemptions: self.fleet.preemptions(),
            changes_s: self.changes.iter().map(|at| at.as_seconds()).collect(),
            windows: self.windows(),
        }
    }

    fn windows(&self) -> Vec<Window> {
        let length = self.options.window.0.max(1);
        let engines = self.fleet.len();
        let mut stretches: Vec<Stretch> = Vec::new();
        for (row, one) in self.trace.rows.iter().zip(&self.served) {
            let at = (row.at.0 / length) as usize;
            if stretches.len() <= at {
                stretches.resize_with(at + 1, Stretch::default);
            }
            if !one.done {
                continue;
            }
            let stretch = &mut stretches[at];
            stretch.requests += 1;
            stretch.prompt += u64::from(one.prompt);
            stretch.cached += u64::from(one.cached);
            stretch.waits.push(one.wait_ms());
            stretch.work.resize(engines, 0);
            stretch.work[usize::from(one.engine)] += u64::from(one.prompt - one.cached);
        }
        let finished = stretches.into_iter().enumerate().map(|(at, mut stretch)| {
            stretch.waits.sort_by(f64::total_cmp);
            Window {
                at_s: at as f64 * self.options.window.as_seconds(),
                requests: stretch.requests,
                hit: stretch.cached as f64 / stretch.prompt.max(1) as f64,
                ttft_p90_ms: quantile(&stretch.waits, 0.9),
                ttft_p99_ms: quantile(&stretch.waits, 0.99),
                work: stretch.work,
            }
        });
        finished.collect()
    }
}
