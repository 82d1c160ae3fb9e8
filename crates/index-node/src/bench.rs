//! Measures the replicated path: durable nodes, each a process of its own, sources that store and remove chains, and a
//! router's view that follows the feed, applies it and says when each batch became visible.
//!
//! Sources and view have threads of their own in this process. Nodes are looked at from outside: what they say over gRPC
//! and on their operators' ports, and what the system says of their CPU and memory.

mod cluster;
mod gauge;
mod load;
mod node;
mod source;
mod view;

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cairn_index::Op;
use parking_lot::Mutex;
use serde::Serialize;

use crate::Config;
use cluster::Cluster;
use load::{Load, Phase};

/// How long the cluster may take to form, and any phase to drain.
const PATIENCE: Duration = Duration::from_secs(120);
/// Pause between two looks at the nodes.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Half of the rate that is promised: what is visible in time is measured there, or at half of what was reached where
/// that is less.
const HALF_OF_THE_MARK: f64 = 1e6;

/// Starts an index node with this configuration as a process of its own, which ends when its standard input does.
pub type StartNode = fn(&Config) -> std::io::Result<Child>;

/// What each source of a trace told, in batches.
pub type Told = Vec<Vec<Vec<Op>>>;

/// What is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the nodes' data go; must be empty and on the disk to be measured.
    pub dir: PathBuf,
    /// Starts a node.
    pub start: StartNode,
    /// Index nodes.
    pub nodes: usize,
    /// Sources that push at once.
    pub sources: usize,
    /// Blocks of one stored chain.
    pub chain_blocks: usize,
    /// Blocks that all sources together hold before anything is measured.
    pub memberships: usize,
    /// Length of the phase at full rate; the phase at half rate is as long.
    pub phase: Duration,
    /// How long a follower is away while writes go on; it isn't stopped where absent.
    pub away: Option<Duration>,
    /// What sources of a trace told: pushed at last, for its bytes.
    pub told: Told,
}

/// What came out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Block changes (stored and removed) per second at full rate, until every node had applied them.
    pub changes_per_s: f64,
    /// Block changes per second at which visibility was measured: half of the mark, or of what was reached if that is less.
    pub visible_at_changes_per_s: f64,
    /// From when a batch was due to its entry applied in a router's view, at that rate, while every node makes a snapshot.
    pub visible_p50_ms: f64,
    /// The same, 99th percentile.
    pub visible_p99_ms: f64,
    /// The same at half of what was reached.
    pub visible_p99_ms_at_half_reached: f64,
    /// Longest time that making a snapshot kept writes waiting.
    pub snapshot_stall_ms_max: f64,
    /// Command bytes per block change.
    pub bytes_per_change: f64,
    /// Block changes of the trace.
    pub trace_changes: Option<u64>,
    /// Command bytes per block change of the trace.
    pub trace_bytes_per_change: Option<f64>,
    /// Block changes of the trace per second, until every node had applied them.
    pub trace_changes_per_s: Option<f64>,
    /// CPU of all nodes together for each block change, at full rate.
    pub node_cpu_ns_per_change: f64,
    /// CPU of the sources for each block change, at full rate.
    pub load_cpu_ns_per_change: f64,
    /// CPU of the view for each block change, at full rate.
    pub view_cpu_ns_per_change: f64,
    /// Block changes per second of all the nodes' CPU on one core: what `changes_per_s` would be with a core of their own.
    pub changes_per_node_core_s: f64,
    /// Slowdown of a fixed piece of work against its own CPU time, while at full rate: above 1.2 CPU figures count.
    pub slowdown: f64,
    /// Blocks held while it was measured.
    pub memberships: u64,
    /// Longest time from asking for a snapshot to having it on disk.
    pub snapshot_s_max: f64,
    /// Most memory of a node during its snapshot, with what the snapshot's writer copied, against that just before.
    pub snapshot_rss_ratio: f64,
    /// From the connection of an empty view to its being exact.
    pub view_cold_start_s: f64,
    /// A killed node's start: its log and snapshot read, until it answers.
    pub restore_s: Option<f64>,
    /// How long that node was away, in seconds.
    pub away_s: Option<f64>,
    /// From its start to being level with the leader, while writes went on.
    pub catch_up_s: Option<f64>,
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
#[error("the cluster benchmark failed: {0}")]
pub struct BenchError(String);

fn failed(error: impl std::fmt::Display) -> BenchError {
    BenchError(error.to_string())
}

/// What sources and view share.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// Changes acknowledged.
    changes: AtomicU64,
    /// Changes and command bytes seen in the feed.
    seen: AtomicU64,
    seen_bytes: AtomicU64,
    /// Place and digest of the view.
    view_at: AtomicU64,
    view_digest: AtomicU64,
    view_cpu_ns: AtomicU64,
    /// When each (source, seq) was due, while latency is measured.
    sent: Mutex<HashMap<(u32, u64), Instant>>,
    latencies: Mutex<Vec<Duration>>,
}

impl Shared {
    /// Changes that the view has seen, and the bytes of their commands.
    fn seen(&self) -> (u64, u64) {
        (
            self.seen.load(Ordering::Relaxed),
            self.seen_bytes.load(Ordering::Relaxed),
        )
    }
}

/// Runs the benchmark.
///
/// # Errors
/// [`BenchError`] where the cluster doesn't form, a source is refused or the copies differ.
pub async fn run(options: Options) -> Result<Report, BenchError> {
    let mut cluster = Cluster::start(&options).await?;
    let shared = Arc::new(Shared::default());
    let mut load = Load::new(&options, cluster.leader_address(), shared.clone());
    let following = view::spawn(cluster.followed_address(), shared.clone());
    load.run(Phase::Fill).await?;
    cluster.level(&shared).await?;

    let mut report = Report {
        memberships: cluster.memberships().await?,
        ..Report::default()
    };
    full_rate(&options, &cluster, &mut load, &shared, &mut report).await?;
    let half = report.changes_per_s / 2.0;
    report.visible_at_changes_per_s = half.min(HALF_OF_THE_MARK);
    let rate = report.visible_at_changes_per_s;
    let (p50, p99) = paced(&options, &cluster, &mut load, &shared, rate, &mut report).await?;
    (report.visible_p50_ms, report.visible_p99_ms) = (p50, p99);
    if half > rate {
        (_, report.visible_p99_ms_at_half_reached) =
            paced(&options, &cluster, &mut load, &shared, half, &mut report).await?;
    } else {
        report.visible_p99_ms_at_half_reached = p99;
    }
    report.snapshot_stall_ms_max = cluster.snapshot_stall_ms_max().await?;
    if let (Some(away), true) = (options.away, options.nodes > 2) {
        report.away_s = Some(away.as_secs_f64());
        absence(&mut cluster, &mut load, &shared, rate, away, &mut report).await?;
        cluster.level(&shared).await?;
    }
    following.abort();
    let begun = Instant::now();
    let fresh = Arc::new(Shared::default());
    let following = view::spawn(cluster.followed_address(), fresh.clone());
    cluster.level(&fresh).await?;
    report.view_cold_start_s = begun.elapsed().as_secs_f64();
    if !options.told.is_empty() {
        told(options.told, &cluster, &fresh, &mut report).await?;
    }
    following.abort();
    Ok(report)
}

async fn full_rate(
    options: &Options,
    cluster: &Cluster,
    load: &mut Load,
    shared: &Arc<Shared>,
    report: &mut Report,
) -> Result<(), BenchError> {
    let (seen, bytes) = shared.seen();
    shared.changes.store(0, Ordering::Relaxed);
    let slowdown = gauge::Slowdown::start();
    let (nodes, view) = (cluster.cpu(), shared.view_cpu_ns.load(Ordering::Relaxed));
    let begun = Instant::now();
    let loading = load.run(Phase::Push {
        rate: None,
        length: options.phase,
    });
    let load_cpu = loading.await?;
    cluster.level(shared).await?;
    let elapsed = begun.elapsed();
    let node_cpu = cluster.cpu().saturating_sub(nodes);
    let view_cpu = shared.view_cpu_ns.load(Ordering::Relaxed) - view;
    report.slowdown = slowdown.stop();
    let changes = shared.changes.load(Ordering::Relaxed).max(1) as f64;
    let (seen_after, bytes_after) = shared.seen();
    report.changes_per_s = changes / elapsed.as_secs_f64();
    report.bytes_per_change = (bytes_after - bytes) as f64 / (seen_after - seen).max(1) as f64;
    report.node_cpu_ns_per_change = node_cpu.as_nanos() as f64 / changes;
    report.load_cpu_ns_per_change = load_cpu.as_nanos() as f64 / changes;
    report.view_cpu_ns_per_change = view_cpu as f64 / changes;
    report.changes_per_node_core_s = 1e9 / report.node_cpu_ns_per_change.max(f64::MIN_POSITIVE);
    Ok(())
}

/// Visibility at a rate in milliseconds, median and 99th percentile, with a snapshot of every node in the middle.
async fn paced(
    options: &Options,
    cluster: &Cluster,
    load: &mut Load,
    shared: &Arc<Shared>,
    rate: f64,
    report: &mut Report,
) -> Result<(f64, f64), BenchError> {
    let snapshots = async {
        tokio::time::sleep(options.phase / 4).await;
        cluster.snapshots().await
    };
    let pushing = load.run(Phase::Push {
        rate: Some(rate),
        length: options.phase,
    });
    let (pushed, taken) = tokio::join!(pushing, snapshots);
    pushed?;
    let (longest, ratio) = taken?;
    report.snapshot_s_max = report.snapshot_s_max.max(longest);
    report.snapshot_rss_ratio = report.snapshot_rss_ratio.max(ratio);
    cluster.level(shared).await?;
    let mut latencies = std::mem::take(&mut *shared.latencies.lock());
    shared.sent.lock().clear();
    latencies.sort_unstable();
    let percentile = |share: f64| {
        let last = latencies.len().saturating_sub(1);
        latencies
            .get((last as f64 * share) as usize)
            .map_or(0.0, |d| d.as_secs_f64() * 1e3)
    };
    Ok((percentile(0.5), percentile(0.99)))
}

/// One follower is killed, stays away and comes back, while writes go on.
async fn absence(
    cluster: &mut Cluster,
    load: &mut Load,
    shared: &Shared,
    rate: f64,
    away: Duration,
    report: &mut Report,
) -> Result<(), BenchError> {
    let returning = async {
        let result = cluster.leave_and_return(away).await;
        shared.stop.store(true, Ordering::Relaxed);
        result
    };
    let pushing = load.run(Phase::Push {
        rate: Some(rate),
        length: away + PATIENCE,
    });
    let (pushed, returned) = tokio::join!(pushing, returning);
    pushed?;
    let (restore, catch_up) = returned?;
    report.restore_s = Some(restore.as_secs_f64());
    report.catch_up_s = Some(catch_up.as_secs_f64());
    Ok(())
}

/// What the sources of a trace told, as fast as it goes.
async fn told(told: Told, cluster: &Cluster, shared: &Arc<Shared>, report: &mut Report) -> Result<(), BenchError> {
    let (seen, bytes) = shared.seen();
    let begun = Instant::now();
    let mut load = Load::telling(told, cluster.leader_address(), shared.clone());
    load.run(Phase::Fill).await?;
    cluster.level(shared).await?;
    let (seen_after, bytes_after) = shared.seen();
    let changes = seen_after - seen;
    report.trace_changes = Some(changes);
    report.trace_bytes_per_change = Some((bytes_after - bytes) as f64 / changes.max(1) as f64);
    report.trace_changes_per_s = Some(changes as f64 / begun.elapsed().as_secs_f64());
    Ok(())
}
