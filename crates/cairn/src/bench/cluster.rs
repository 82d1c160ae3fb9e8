//! `cairn bench cluster`: the replicated path on durable nodes, each a process of its own.

mod trace;

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use cairn_index_node::Config;
use cairn_index_node::bench::{Options, Report, run as measure};
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
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    sources: u16,
    /// Blocks of one stored chain.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u16).range(1..=4096))]
    chain_blocks: u16,
    /// Seconds of the phase at full rate; those at half rates are as long.
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=3600))]
    seconds: u16,
    /// Blocks that the sources together hold before anything is measured.
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1..=200_000_000))]
    memberships: u32,
    /// Seconds that one follower is away while writes go on; 0: none is stopped.
    #[arg(long, value_name = "S", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=3600))]
    away: u16,
    /// At last, what the engines of this request trace tell: 64 caches of 16,384 blocks of 16 tokens.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
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
    let told = args.trace.as_deref().map(trace::told).transpose()?;
    let options = Options {
        dir: dir.path().to_owned(),
        start: start_node,
        nodes: usize::from(args.nodes),
        sources: usize::from(args.sources),
        chain_blocks: usize::from(args.chain_blocks),
        memberships: args.memberships as usize,
        phase: Duration::from_secs(u64::from(args.seconds)),
        away: (args.away > 0).then(|| Duration::from_secs(u64::from(args.away))),
        told: told.unwrap_or_default(),
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
    print(&report);
    Ok(())
}

/// Starts `cairn index`; configuration and log lie beside its data.
fn start_node(config: &Config) -> std::io::Result<Child> {
    let beside = |extension: &str| config.data_dir.with_extension(extension);
    let text = toml::to_string(config).map_err(std::io::Error::other)?;
    std::fs::write(beside("toml"), text)?;
    let log = File::options().create(true).append(true).open(beside("log"))?;
    Command::new(std::env::current_exe()?)
        .args(["index", "--end-with-stdin", "--config"])
        .arg(beside("toml"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
}

fn print(report: &Report) {
    output::line(format!(
        "{:.0} block changes a second committed and applied by every node, at {} blocks held",
        report.changes_per_s, report.memberships
    ));
    output::line(format!(
        "CPU a change: nodes {:.0} ns, sources {:.0} ns, view {:.0} ns; slowdown {:.2}: {:.0} changes for each second of the nodes' CPU",
        report.node_cpu_ns_per_change,
        report.load_cpu_ns_per_change,
        report.view_cpu_ns_per_change,
        report.slowdown,
        report.changes_per_node_core_s
    ));
    output::line(format!(
        "visible in a view at {:.0} changes a second: p50 {:.1} ms, p99 {:.1} ms; at half of what was reached: p99 {:.1} ms",
        report.visible_at_changes_per_s,
        report.visible_p50_ms,
        report.visible_p99_ms,
        report.visible_p99_ms_at_half_reached
    ));
    output::line(format!(
        "snapshots: longest wait {:.1} ms, longest {:.2} s, memory {:.2} x",
        report.snapshot_stall_ms_max, report.snapshot_s_max, report.snapshot_rss_ratio
    ));
    output::line(format!(
        "{:.2} bytes a change; an empty view is exact after {:.2} s",
        report.bytes_per_change, report.view_cold_start_s
    ));
    if let (Some(changes), Some(bytes), Some(rate)) = (
        report.trace_changes,
        report.trace_bytes_per_change,
        report.trace_changes_per_s,
    ) {
        output::line(format!(
            "the trace's {changes} changes: {bytes:.2} bytes a change, {rate:.0} a second"
        ));
    }
    if let (Some(away), Some(restore), Some(level)) = (report.away_s, report.restore_s, report.catch_up_s) {
        output::line(format!(
            "a follower {away:.0} s away: open after {restore:.2} s, level after {level:.2} s"
        ));
    }
}
