//! `cairn bench cluster`: the replicated path on three durable nodes in one process.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use cairn_index_node::bench::{Options, run as measure};
use clap::Args;
use serde_json::json;

use crate::output;

/// Arguments of `cairn bench cluster`.
#[derive(Args, Debug)]
pub struct ClusterBenchArgs {
    /// Index nodes.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=7))]
    nodes: u8,
    /// Sources that push at once.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    sources: u16,
    /// Blocks of one stored chain.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u16).range(1..=4096))]
    chain_blocks: u16,
    /// Seconds of the phase at full rate; the phase at half rate is as long.
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=3600))]
    seconds: u16,
    /// Where the nodes' data go: a disk to be measured, not memory. The folder is emptied of them afterwards.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Measures and prints.
pub fn run(args: &ClusterBenchArgs) -> anyhow::Result<()> {
    let parent = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let dir = tempfile::Builder::new()
        .prefix("cairn-bench-cluster-")
        .tempdir_in(&parent)
        .with_context(|| format!("making a folder for the nodes in {}", parent.display()))?;
    let options = Options {
        dir: dir.path().to_owned(),
        nodes: usize::from(args.nodes),
        sources: usize::from(args.sources),
        chain_blocks: usize::from(args.chain_blocks),
        phase: Duration::from_secs(u64::from(args.seconds)),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("starting the runtime")?;
    let report = runtime.block_on(measure(options))?;
    if args.json {
        output::line(json!(report).to_string());
        return Ok(());
    }
    output::line(format!(
        "{:.0} block changes a second committed and applied",
        report.changes_per_s
    ));
    output::line(format!(
        "visible to a follower at half that rate: p50 {:.1} ms, p99 {:.1} ms",
        report.visible_p50_ms, report.visible_p99_ms
    ));
    output::line(format!(
        "longest wait for a snapshot: {:.1} ms",
        report.snapshot_stall_ms_max
    ));
    output::line(format!("{:.2} bytes a change", report.bytes_per_change));
    Ok(())
}
