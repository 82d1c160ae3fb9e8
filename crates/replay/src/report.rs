//! Figures of a replay, as machines read them.

use std::collections::BTreeMap;

use cairn_routing::PolicyConfig;
use serde::{Deserialize, Serialize};

use crate::trace::Trace;

/// Time to the first token in milliseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct FirstToken {
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Mean.
    pub mean: f64,
}

/// Shares of [`Run::ttft_curve_ms`].
pub(crate) const CURVE: [f64; 23] = [
    0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95,
    0.98, 0.99, 1.0,
];

/// One stretch of a run, by time of arrival.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Window {
    /// Its start in seconds from the trace's.
    pub at_s: f64,
    /// Requests that came in it and were served.
    pub requests: u64,
    /// Share of their prompt tokens that were cached.
    pub hit: f64,
    /// 90th percentile of their time to the first token in milliseconds.
    pub ttft_p90_ms: f64,
    /// 99th percentile.
    pub ttft_p99_ms: f64,
    /// Prompt tokens that each engine computed for them.
    pub work: Vec<u64>,
}

/// One policy with one seed.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Run {
    /// The policy's name.
    pub policy: String,
    /// The same with its parameters.
    pub parameters: PolicyConfig,
    /// The seed of its chance.
    pub seed: u64,
    /// Share of prompt tokens that were cached.
    pub hit: f64,
    /// The same as a share of what a cache that never forgets would have served.
    pub oracle_fraction: f64,
    /// Share of prompt tokens that were cached, but had to be fetched from host memory or a peer.
    pub fetched: f64,
    /// Share of requests whose prompt one engine computed and another answered.
    pub split_share: f64,
    /// Share of prompt tokens that the routers expected to be cached when they decided.
    pub predicted_hit: f64,
    /// Time to the first token.
    pub ttft_ms: FirstToken,
    /// The distribution of the time to the first token: its 1, 5, 10, 15, ... 95, 98, 99 and 100 % points.
    pub ttft_curve_ms: Vec<f64>,
    /// Share of their time that engines were busy.
    pub utilisation: f64,
    /// Requests finished in a second of trace time.
    pub throughput_rps: f64,
    /// Decisions that passed over their affine worker because of its load.
    pub overflow: u64,
    /// Decisions by their reason.
    pub reasons: BTreeMap<String, u64>,
    /// Requests whose client got a 429, since every engine that was tried was full.
    pub refused: u64,
    /// Times that a full engine sent a request back to its router.
    pub retries: u64,
    /// Share of requests by the engine that answered.
    pub request_share: Vec<f64>,
    /// Share of computed prompt tokens by engine.
    pub work_share: Vec<f64>,
    /// Prompt tokens that the busiest engine computed, over the mean of all.
    pub work_max_over_mean: f64,
    /// Preemptions over all engines.
    pub preemptions: u64,
    /// When the fleet changed, in seconds.
    pub changes_s: Vec<f64>,
    /// The run in stretches.
    pub windows: Vec<Window>,
}

/// Everything that was replayed.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Which trace.
    pub trace: String,
    /// Its requests.
    pub requests: u64,
    /// Share of prompt tokens that a cache which never forgets would serve.
    pub oracle_hit: f64,
    /// One for each policy and seed.
    pub runs: Vec<Run>,
    /// What it comes to, in words.
    pub verdict: String,
}

impl FirstToken {
    /// Of the times of many requests, in milliseconds and any order.
    #[must_use]
    pub fn of(mut ms: Vec<f64>) -> Self {
        ms.sort_by(f64::total_cmp);
        Self::of_sorted(&ms)
    }

    pub(crate) fn of_sorted(ms: &[f64]) -> Self {
        Self {
            p50: quantile(ms, 0.5),
            p90: quantile(ms, 0.9),
            p99: quantile(ms, 0.99),
            mean: ms.iter().sum::<f64>() / ms.len().max(1) as f64,
        }
    }
}

/// The value below which `share` of the sorted values lie; 0 where there are none.
pub(crate) fn quantile(sorted: &[f64], share: f64) -> f64 {
    let at = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(at.saturating_sub(1)).copied().unwrap_or(0.0)
}

impl Report {
    /// Sums runs up; the first policy is compared with each other one.
    #[must_use]
    pub fn new(trace: &Trace, runs: Vec<Run>) -> Self {
        let mut report = Self {
            trace: trace.name.clone(),
            requests: trace.rows.len() as u64,
            oracle_hit: trace.oracle_hit(),
            runs,
            verdict: String::new(),
        };
        report.verdict = report.judge();
        report
    }

    /// Policies in the order of their first run, with their runs.
    fn by_policy(&self) -> Vec<(&str, Vec<&Run>)> {
        let mut out: Vec<(&str, Vec<&Run>)> = Vec::new();
        for run in &self.runs {
            match out.iter_mut().find(|(policy, _)| *policy == run.policy) {
                Some((_, runs)) => runs.push(run),
                None => out.push((&run.policy, vec![run])),
            }
        }
        out
    }

    /// A table for people.
    #[must_use]
    pub fn table(&self) -> String {
        use std::fmt::Write as _;
        let mut text = format!(
            "{}: {} requests, at most {:.1} % of prompt tokens can be cached\n",
            self.trace,
            self.requests,
            self.oracle_hit * 100.0
        );
        let _ = writeln!(
            text,
            "{:<15} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>6} {:>9}",
            "policy", "hit %", "of oracle", "p50 ms", "p90 ms", "p99 ms", "mean ms", "req/s", "busy %", "work max"
        );
        let splits = self.runs.iter().any(|run| run.split_share > 0.0);
        for (policy, runs) in self.by_policy() {
            let mean = |of: &dyn Fn(&Run) -> f64| runs.iter().map(|run| of(run)).sum::<f64>() / runs.len() as f64;
            let split = if splits {
                format!("  {:.1} % split", mean(&|r| r.split_share * 100.0))
            } else {
                String::new()
            };
            let _ = writeln!(
                text,
                "{policy:<15} {:>6.1} {:>9.3} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>7.2} {:>6.1} {:>9.2}{split}",
                mean(&|r| r.hit * 100.0),
                mean(&|r| r.oracle_fraction),
                mean(&|r| r.ttft_ms.p50),
                mean(&|r| r.ttft_ms.p90),
                mean(&|r| r.ttft_ms.p99),
                mean(&|r| r.ttft_ms.mean),
                mean(&|r| r.throughput_rps),
                mean(&|r| r.utilisation * 100.0),
                mean(&|r| r.work_max_over_mean),
            );
        }
        text.push_str(&self.verdict);
        text.push('\n');
        text
    }

    /// Says so where affinity sends most work to a few engines, or most requests past their own.
    fn collapse(&self, policy: &str, runs: &[&Run]) -> Option<String> {
        let run = runs.first()?;
        match run.parameters {
            PolicyConfig::Prefix { .. } | PolicyConfig::Chwbl { .. } | PolicyConfig::MaxHit => {}
            PolicyConfig::Kv
            | PolicyConfig::Random
            | PolicyConfig::RoundRobin
            | PolicyConfig::LeastRequests
            | PolicyConfig::LeastTokens
            | PolicyConfig::Session
            | PolicyConfig::Lmetric
            | PolicyConfig::Sticky { .. } => return None,
        }
        let most = run.request_share.iter().copied().fold(0.0, f64::max);
        let engines = run.request_share.len() as f64;
        if engines >= 2.0 && most > 0.5_f64.max(2.0 / engines) {
            let percent = most * 100.0;
            return Some(format!(
                "on this trace a shared start of prompts makes {policy} collapse: one engine gets {percent:.0} % of requests"
            ));
        }
        let passed = run.overflow as f64 / self.requests.max(1) as f64;
        (passed > 0.5).then(|| {
            let percent = passed * 100.0;
            format!("a shared start of prompts makes {policy} overflow: {percent:.0} % of requests pass their engine")
        })
    }

    /// Compares the first policy with each other one on the 90th percentile, paired by seed.
    #[must_use]
    pub(crate) fn judge(&self) -> String {
        let policies = self.by_policy();
        let Some((first, firsts)) = policies.first() else {
            return "nothing was replayed".into();
        };
        let mut words: Vec<String> = policies[1..]
            .iter()
            .map(|(other, others)| {
                let gains: Vec<f64> = firsts
                    .iter()
                    .zip(others)
                    .map(|(a, b)| 1.0 - a.ttft_ms.p90 / b.ttft_ms.p90.max(f64::MIN_POSITIVE))
                    .collect();
                compare(first, other, &gains)
            })
            .collect();
        if words.is_empty() {
            words.push(format!("{first} alone: name another policy to compare it with"));
        }
        words.extend(policies.iter().filter_map(|(policy, runs)| self.collapse(policy, runs)));
        words.join("; ")
    }
}

/// A figure's name and where a run has it.
type Figure = (&'static str, fn(&Run) -> f64);

/// How one policy does against another on one figure, over seeds.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Difference {
    /// Which figure.
    pub figure: String,
    /// Its mean under the first policy.
    pub first: f64,
    /// Its mean under the second.
    pub second: f64,
    /// The first's change against the second in percent, paired by seed.
    pub percent: f64,
    /// Half of its 95 % interval; `None` with one seed.
    pub plus_minus: Option<f64>,
}

impl Report {
    /// The first two policies side by side, figure by figure.
    #[must_use]
    pub fn compare(&self) -> Vec<Difference> {
        let policies = self.by_policy();
        let [(_, first), (_, second), ..] = policies.as_slice() else {
            return Vec::new();
        };
        let figures: [Figure; 7] = [
            ("hit", |run| run.hit),
            ("ttft_ms.p50", |run| run.ttft_ms.p50),
            ("ttft_ms.p90", |run| run.ttft_ms.p90),
            ("ttft_ms.p99", |run| run.ttft_ms.p99),
            ("ttft_ms.mean", |run| run.ttft_ms.mean),
            ("throughput_rps", |run| run.throughput_rps),
            ("work_max_over_mean", |run| run.work_max_over_mean),
        ];
        let differences = figures.iter().map(|(figure, of)| {
            let mean = |runs: &[&Run]| runs.iter().map(|run| of(run)).sum::<f64>() / runs.len().max(1) as f64;
            let changes: Vec<f64> = first
                .iter()
                .zip(second)
                .map(|(a, b)| (of(a) / of(b).max(f64::MIN_POSITIVE) - 1.0) * 100.0)
                .collect();
            let (percent, plus_minus) = interval(&changes);
            Difference {
                figure: (*figure).to_owned(),
                first: mean(first),
                second: mean(second),
                percent,
                plus_minus,
            }
        });
        differences.collect()
    }
}

/// Mean of paired values, and half of their 95 % interval.
fn interval(values: &[f64]) -> (f64, Option<f64>) {
    let n = values.len();
    let mean = values.iter().sum::<f64>() / n.max(1) as f64;
    if n < 2 {
        return (mean, None);
    }
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1) as f64;
    let student = STUDENT.get(n - 2).copied().unwrap_or(1.96);
    (mean, Some(student * (variance / n as f64).sqrt()))
}

/// Two-sided 95 % points of Student's t for 1 to 9 degrees of freedom; beyond, the normal one is close enough.
const STUDENT: [f64; 9] = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26];

fn compare(first: &str, other: &str, gains: &[f64]) -> String {
    let (mean, half) = interval(gains);
    let word = if mean >= 0.0 { "beats" } else { "loses to" };
    let by = mean.abs() * 100.0;
    let Some(half) = half.map(|half| half * 100.0) else {
        return format!("{first} {word} {other} on P90 by {by:.0} % (one seed: no interval)");
    };
    if by <= half {
        return format!(
            "{first} and {other} don't differ on P90 ({:.0} % ± {half:.0})",
            mean * 100.0
        );
    }
    format!("{first} {word} {other} on P90 by {by:.0} % ± {half:.0}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_take_the_nearest_rank() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(
            (quantile(&values, 0.5), quantile(&values, 0.99), quantile(&[], 0.5)),
            (50.0, 99.0, 0.0)
        );
    }

    #[test]
    fn a_difference_within_its_interval_is_no_difference() {
        assert!(compare("a", "b", &[0.4, 0.42, 0.41]).starts_with("a beats b on P90 by 41 %"));
        assert!(compare("a", "b", &[-0.3, 0.3, 0.01]).contains("don't differ"));
        assert!(compare("a", "b", &[-0.2]).contains("loses to"));
    }
}
