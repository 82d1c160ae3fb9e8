//! `--advise`: what limits a workload on a fleet, and what would help.

use cairn_replay::engine_model::ModelConfig;
use cairn_replay::trace::Trace;
use cairn_replay::{Options, Run};
use cairn_routing::PolicyConfig;
use serde_json::json;

use super::args::ReplayArgs;
use super::run::{one, threads, tuned};
use crate::output;

/// A fleet is called loaded from this share of busy time.
const LOADED: f64 = 0.6;
/// A change is worth naming from this share of the 90th percentile or of hits.
const WORTH: f64 = 0.03;
/// CPU memory that is tried, as a multiple of GPU capacity.
const CPU_TIMES: u64 = 4;

/// Replays what could be changed, one thing at a time, and says what it brings.
pub fn run(trace: &Trace, args: &ReplayArgs, options: &Options) -> anyhow::Result<()> {
    let kv = PolicyConfig::Kv;
    let now = one(trace, &kv, options)?;
    let oracle = trace.oracle_hit();
    let larger = Options {
        capacity_tokens: options.capacity_tokens.saturating_mul(2),
        ..options.clone()
    };
    let most = u64::from(ModelConfig::BLOCKS_MAX) * u64::from(options.for_trace(trace).block_size);
    let tier = Options {
        cpu_tokens: (options.capacity_tokens * CPU_TIMES).min(most),
        ..options.clone()
    };
    let wider = Options {
        engines: options.engines + 1,
        ..options.clone()
    };
    let doubled = one(trace, &kv, &larger)?;
    let with_cpu = one(trace, &kv, &tier)?;
    let more = one(trace, &kv, &wider)?;
    let prefix = tuned(
        trace,
        "prefix",
        &PolicyConfig::by_name("prefix")?,
        options,
        threads(args),
    )?;
    let best_prefix = one(trace, &prefix, options)?;
    let PolicyConfig::Prefix {
        prefix_length,
        concurrency_threshold,
    } = prefix
    else {
        anyhow::bail!("the grid of prefix gave another policy");
    };
    let words = [
        limits(&now, &doubled, oracle),
        brings(
            &format!("{CPU_TIMES} times the GPU's KV in CPU memory"),
            &now,
            &with_cpu,
        ),
        brings("one engine more", &now, &more),
        format!(
            "SageMaker's prefix-aware routing is best with PrefixLength {prefix_length} and ConcurrencyThreshold \
             {concurrency_threshold}: P90 {:.0} ms, hits {:.1} %; kv has P90 {:.0} ms ({:.0} % less) and hits {:.1} %",
            best_prefix.ttft_ms.p90,
            best_prefix.hit * 100.0,
            now.ttft_ms.p90,
            (1.0 - now.ttft_ms.p90 / best_prefix.ttft_ms.p90.max(f64::MIN_POSITIVE)) * 100.0,
            now.hit * 100.0
        ),
    ];
    if !args.json {
        words.iter().for_each(output::line);
        return Ok(());
    }
    let figures = |run: &Run| json!({"hit": run.hit, "ttft_ms": run.ttft_ms, "utilisation": run.utilisation});
    output::line(
        json!({
            "trace": trace.name, "requests": trace.rows.len(), "oracle_hit": oracle,
            "now": figures(&now), "twice_the_capacity": figures(&doubled), "cpu_tier": figures(&with_cpu),
            "one_engine_more": figures(&more),
            "prefix": {"prefix_length": prefix_length, "concurrency_threshold": concurrency_threshold, "figures": figures(&best_prefix)},
            "advice": words,
        })
        .to_string(),
    );
    Ok(())
}

/// Compulsory misses, capacity, load, or skew: whatever takes most.
fn limits(now: &Run, doubled: &Run, oracle: f64) -> String {
    let mut out = format!(
        "{:.1} % of prompt tokens come for the first time and have to be computed; of the rest kv finds {:.1} %",
        (1.0 - oracle) * 100.0,
        now.oracle_fraction * 100.0
    );
    if doubled.hit - now.hit > WORTH * oracle {
        out += &format!(
            "; memory limits: twice the KV capacity would bring hits from {:.1} to {:.1} %",
            now.hit * 100.0,
            doubled.hit * 100.0
        );
    }
    if now.utilisation > LOADED {
        out += &format!(
            "; load limits: engines compute {:.0} % of their time",
            now.utilisation * 100.0
        );
    }
    if now.work_max_over_mean > 1.0 + 2.0 * WORTH && now.utilisation > 0.4 {
        out += &format!(
            "; skew: the busiest engine computes {:.2} times the mean",
            now.work_max_over_mean
        );
    }
    out
}

fn brings(what: &str, now: &Run, then: &Run) -> String {
    let faster = 1.0 - then.ttft_ms.p90 / now.ttft_ms.p90.max(f64::MIN_POSITIVE);
    if faster.abs() < WORTH && (then.hit - now.hit).abs() < WORTH {
        return format!(
            "{what} would bring little: P90 {:.0} ms instead of {:.0}",
            then.ttft_ms.p90, now.ttft_ms.p90
        );
    }
    format!(
        "{what} would bring P90 from {:.0} to {:.0} ms ({:+.0} %), and hits from {:.1} to {:.1} %",
        now.ttft_ms.p90,
        then.ttft_ms.p90,
        -faster * 100.0,
        now.hit * 100.0,
        then.hit * 100.0
    )
}
