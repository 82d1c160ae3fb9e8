//! Every policy with every seed, some at once; the results come in the order asked for, whoever was first.

use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, anyhow};
use cairn_replay::trace::Trace;
use cairn_replay::{Options, Run, best, grid};
use cairn_routing::PolicyConfig;

use super::args::{Asked, ReplayArgs};
use super::progress::Progress;
use crate::output;

/// One run to be made.
struct Job {
    label: String,
    config: PolicyConfig,
    seed: u64,
}

/// Runs all policies with all seeds, after tuning where that was asked for.
pub fn all(trace: &Trace, policies: &[Asked], args: &ReplayArgs, options: &Options) -> anyhow::Result<Vec<Run>> {
    let threads = threads(args);
    let mut jobs = Vec::new();
    for asked in policies {
        let config = if args.tune {
            tuned(trace, &asked.label, &asked.config, options, threads)?
        } else {
            asked.config.clone()
        };
        jobs.extend((1..=args.seeds).map(|seed| Job {
            label: asked.label.clone(),
            config: config.clone(),
            seed,
        }));
    }
    make(trace, &jobs, options, threads)
}

/// Runs at once.
pub fn threads(args: &ReplayArgs) -> usize {
    args.threads
        .or_else(|| std::thread::available_parallelism().ok())
        .map_or(1, NonZeroUsize::get)
}

/// One run with the first seed.
pub fn one(trace: &Trace, config: &PolicyConfig, options: &Options) -> anyhow::Result<Run> {
    Ok(cairn_replay::run(trace, config, 1, options, &mut |_| {})?)
}

/// The parameters with the least 90th percentile.
pub fn tuned(
    trace: &Trace,
    label: &str,
    config: &PolicyConfig,
    options: &Options,
    threads: usize,
) -> anyhow::Result<PolicyConfig> {
    let sets = grid(config);
    if sets.len() < 2 {
        return Ok(config.clone());
    }
    let jobs: Vec<Job> = sets
        .into_iter()
        .map(|config| Job {
            label: label.to_owned(),
            config,
            seed: 1,
        })
        .collect();
    let runs = make(trace, &jobs, options, threads)?;
    let best = best(&runs).context("a grid has at least one point")?;
    output::note(format!(
        "{}: best of {} is {} with P90 {:.0} ms",
        label,
        runs.len(),
        serde_json::to_string(&best.parameters)?,
        best.ttft_ms.p90
    ));
    Ok(best.parameters.clone())
}

/// Makes the runs, in order.
fn make(trace: &Trace, jobs: &[Job], options: &Options, threads: usize) -> anyhow::Result<Vec<Run>> {
    let progress = Progress::new(trace.rows.len() * jobs.len());
    let next = AtomicUsize::new(0);
    let made: Mutex<Vec<Option<anyhow::Result<Run>>>> = Mutex::new(jobs.iter().map(|_| None).collect());
    std::thread::scope(|scope| {
        for _ in 0..threads.min(jobs.len()) {
            scope.spawn(|| {
                while let Some((at, job)) = {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    jobs.get(at).map(|job| (at, job))
                } {
                    let mut before = 0;
                    let mut told = |came: usize| {
                        progress.add(came - before);
                        before = came;
                    };
                    let run = cairn_replay::run(trace, &job.config, job.seed, options, &mut told).map(|run| Run {
                        policy: job.label.clone(),
                        ..run
                    });
                    if let Ok(mut made) = made.lock() {
                        made[at] = Some(run.map_err(anyhow::Error::from));
                    }
                }
            });
        }
    });
    progress.end();
    let made = made.into_inner().map_err(|_| anyhow!("a run panicked"))?;
    made.into_iter()
        .map(|run| run.unwrap_or_else(|| Err(anyhow!("a run is missing"))))
        .collect()
}
