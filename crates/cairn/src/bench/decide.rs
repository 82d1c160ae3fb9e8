//! `cairn bench decide`: what a decision takes, from known tokens to a reservation, while the feed changes the view.

use anyhow::Context;
use cairn_router::bench::{Options, Row, run as measure};
use clap::Args;
use serde_json::json;

use crate::output;

/// Lengths of prompts.
const TOKENS: [usize; 2] = [8_000, 128_000];
/// Sizes of pools.
const WORKERS: [u32; 4] = [8, 64, 256, 1_000];

/// Arguments of `cairn bench decide`.
#[derive(Args, Debug)]
pub struct DecideBenchArgs {
    /// Decisions for each row.
    #[arg(long, value_name = "N", default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    decisions: u32,
    /// Block changes per second that the feed brings meanwhile.
    #[arg(long, value_name = "N", default_value_t = 500_000.0)]
    feed: f64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Measures and prints.
pub fn run(args: &DecideBenchArgs) -> anyhow::Result<()> {
    let mut rows = Vec::new();
    for tokens in TOKENS {
        for workers in WORKERS {
            let options = Options {
                tokens,
                workers,
                decisions: args.decisions as usize,
                feed_changes_per_s: args.feed,
            };
            rows.push(measure(options).with_context(|| format!("{tokens} tokens over {workers} workers"))?);
        }
    }
    if args.json {
        output::line(json!({ "rows": rows }).to_string());
    } else {
        rows.iter().for_each(print);
    }
    Ok(())
}

fn print(row: &Row) {
    output::line(format!(
        "{:>7} tokens, {:>5} workers: p50 {:>7.1} us, p99 {:>8.1} us (keys {:.1}, overlap {:.1}; {:.0} changes/s meanwhile)",
        row.tokens, row.workers, row.p50_us, row.p99_us, row.keys_p50_us, row.overlap_p50_us, row.feed_changes_per_s
    ));
}
