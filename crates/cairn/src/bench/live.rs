//! `cairn bench live`: one trace through real routers and engines and through the replay, hit rates side by side.

mod cluster;
mod load;
mod prompts;

use std::num::NonZeroUsize;

use anyhow::{Context, bail};
use cairn_replay::engine_model::Micros;
use cairn_replay::trace::Trace;
use cairn_replay::{FirstToken, Options};
use cairn_routing::PolicyConfig;
use clap::Args;
use serde::Serialize;

use self::cluster::{Cluster, Shape};
use crate::{output, replay};

/// How often agents read engines' load; the replay is told the same.
const LOAD_PERIOD_MS: u64 = 500;
/// Seeds of the replay, over which its figures are a mean: it costs next to nothing.
const REPLAY_SEEDS: u64 = 5;
/// Live runs of a policy at most.
const RUNS_MAX: u32 = 20;
/// Engines at most: each is a process of its own.
const ENGINES_MAX: i64 = 64;

/// Arguments of `cairn bench live`.
#[derive(Args, Debug)]
pub struct LiveBenchArgs {
    /// Trace to send and to replay, as `cairn replay` takes it.
    #[arg(long, value_name = "FILE|synthetic:NAME")]
    trace: String,
    /// Policies, by name.
    #[arg(long, value_name = "A,B,...", default_value = "kv,prefix,random")]
    policies: String,
    /// Engines, each a process.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=ENGINES_MAX))]
    engines: u32,
    /// Routers, each a process; requests go round.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    routers: u32,
    /// KV tokens that each engine holds.
    #[arg(long, value_name = "TOKENS", default_value_t = 3_000_000)]
    capacity_tokens: u64,
    /// Tokens in an engine block; the trace's own size within 16 to 128 where not given.
    #[arg(long, value_name = "TOKENS")]
    block_size: Option<u32>,
    /// How much faster than recorded requests come, and than the hardware they imitate engines compute.
    #[arg(long, value_name = "X", default_value_t = 10.0)]
    speed: f64,
    /// Only the first requests of the trace.
    #[arg(long, value_name = "N")]
    requests: Option<NonZeroUsize>,
    /// Live runs of each policy, on fresh engines each; their mean counts.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(RUNS_MAX)))]
    runs: u32,
    /// Fail where a policy's live hit rate is further than this from the replay's, in percentage points, or a request failed.
    #[arg(long, value_name = "POINTS")]
    within: Option<f64>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One policy, live and replayed.
#[derive(Serialize)]
struct Row {
    policy: String,
    replayed_hit: f64,
    live_hit: f64,
    /// Live less replayed, in percentage points.
    difference_points: f64,
    live_hits: Vec<f64>,
    replayed_ttft_ms: FirstToken,
    live_ttft_ms: FirstToken,
    failed: u64,
    /// The furthest that a request was sent behind its time.
    behind_ms_max: f64,
}

#[derive(Serialize)]
struct Report {
    trace: String,
    requests: usize,
    speed: f64,
    engines: u32,
    routers: u32,
    oracle_hit: f64,
    policies: Vec<Row>,
}

/// Sends, replays and prints.
pub fn run(args: &LiveBenchArgs) -> anyhow::Result<()> {
    if !args.speed.is_finite() || args.speed <= 0.0 {
        bail!("--speed is {}; give a number above 0", args.speed);
    }
    let trace = replay::open_trace(&args.trace, None, args.requests, args.speed)?;
    let policies = policies(&args.policies)?;
    let options = options(args, &trace);
    options.validate()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting the runtime")?;
    let mut report = Report {
        trace: trace.name.clone(),
        requests: trace.rows.len(),
        speed: args.speed,
        engines: args.engines,
        routers: args.routers,
        oracle_hit: trace.oracle_hit(),
        policies: Vec::new(),
    };
    for policy in &policies {
        report
            .policies
            .push(runtime.block_on(row(args, &trace, &options, policy))?);
    }
    if args.json {
        output::line(serde_json::to_string(&report)?);
    } else {
        print(&report);
    }
    args.within.map_or(Ok(()), |within| judge(&report, within))
}

fn policies(names: &str) -> anyhow::Result<Vec<PolicyConfig>> {
    let names = names.split(',').map(str::trim).filter(|name| !name.is_empty());
    let policies: Vec<PolicyConfig> = names.map(PolicyConfig::by_name).collect::<Result<_, _>>()?;
    if policies.is_empty() {
        bail!("--policies names none");
    }
    Ok(policies)
}

/// The fleet as the replay sees it. Requests come in real time, so engines that run `speed` times faster have costs that
/// are as much smaller.
fn options(args: &LiveBenchArgs, trace: &Trace) -> Options {
    let options = Options {
        engines: args.engines,
        routers: args.routers,
        capacity_tokens: args.capacity_tokens,
        block_size: args.block_size.unwrap_or(0),
        load_period: Micros(LOAD_PERIOD_MS * 1_000),
        ..Options::default()
    };
    let options = options.for_trace(trace);
    Options {
        timing: Some(options.default_timing().faster(args.speed)),
        ..options
    }
}

async fn row(args: &LiveBenchArgs, trace: &Trace, options: &Options, policy: &PolicyConfig) -> anyhow::Result<Row> {
    let mut live = load::Outcome::default();
    let mut live_hits = Vec::new();
    for number in 1..=args.runs {
        output::note(format!("{}: run {number} of {}", policy.name(), args.runs));
        let shape = Shape::new(trace, options, policy.name());
        let cluster = Cluster::start(&shape).await?;
        let outcome = load::run(trace, &cluster.routers, policy).await;
        cluster.stop().await;
        let outcome = outcome?;
        live_hits.push(outcome.hit());
        live.merge(outcome);
    }
    let mut replayed = Vec::new();
    for seed in 1..=REPLAY_SEEDS {
        replayed.push(cairn_replay::run(trace, policy, seed, options, &mut |_| {})?);
    }
    let mean = |of: &dyn Fn(&cairn_replay::Run) -> f64| replayed.iter().map(of).sum::<f64>() / replayed.len() as f64;
    let replayed_hit = mean(&|run| run.hit);
    let live_hit = live_hits.iter().sum::<f64>() / live_hits.len() as f64;
    Ok(Row {
        policy: policy.name().to_owned(),
        replayed_hit,
        live_hit,
        difference_points: (live_hit - replayed_hit) * 100.0,
        live_hits,
        replayed_ttft_ms: FirstToken {
            p50: mean(&|run| run.ttft_ms.p50),
            p90: mean(&|run| run.ttft_ms.p90),
            p99: mean(&|run| run.ttft_ms.p99),
            mean: mean(&|run| run.ttft_ms.mean),
        },
        live_ttft_ms: FirstToken::of(live.first_token_ms),
        failed: live.failed,
        behind_ms_max: live.behind_ms_max,
    })
}

fn print(report: &Report) {
    output::line(format!(
        "{}: {} requests at {} times their speed, {} engines, {} routers; at most {:.1} % of prompt tokens can be cached",
        report.trace,
        report.requests,
        report.speed,
        report.engines,
        report.routers,
        report.oracle_hit * 100.0
    ));
    let head = [
        "policy",
        "replayed %",
        "live %",
        "points",
        "p50 ms",
        "live p50",
        "failed",
        "behind ms",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for row in &report.policies {
        rows.push(vec![
            row.policy.clone(),
            format!("{:.2}", row.replayed_hit * 100.0),
            format!("{:.2}", row.live_hit * 100.0),
            format!("{:+.2}", row.difference_points),
            format!("{:.0}", row.replayed_ttft_ms.p50),
            format!("{:.0}", row.live_ttft_ms.p50),
            row.failed.to_string(),
            format!("{:.0}", row.behind_ms_max),
        ]);
    }
    output::table(&rows);
}

fn judge(report: &Report, within: f64) -> anyhow::Result<()> {
    for row in &report.policies {
        if row.failed > 0 {
            bail!("{}: {} requests failed", row.policy, row.failed);
        }
        if row.difference_points.abs() > within {
            bail!(
                "{}: live hits are {:.2} %, replayed {:.2} %: more than {within} points apart",
                row.policy,
                row.live_hit * 100.0,
                row.replayed_hit * 100.0
            );
        }
    }
    Ok(())
}
