//! Measures the replicated path: three durable nodes in one process, sources that store and remove chains, and a router's
//! view that follows the feed, applies it and says when each batch became visible.
//!
//! Sources and view have threads of their own, whose CPU is reported apart from that of the nodes.

mod cluster;
mod gauge;
mod load;
mod view;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;

use cluster::Cluster;
use load::{Load, Phase};

/// How long the cluster may take to form, and any phase to drain.
const PATIENCE: Duration = Duration::from_secs(120);

/// What is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the nodes' data go; must be empty and on the disk to be measured.
    pub dir: PathBuf,
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
}

/// What came out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Block changes (stored and removed) per second at full rate, until every node had applied them.
    pub changes_per_s: f64,
    /// From when a batch was due to its entry applied in a router's view, at half the full rate.
    pub visible_p50_ms: f64,
    /// The same, 99th percentile.
    pub visible_p99_ms: f64,
    /// Longest time that making a snapshot kept writes waiting.
    pub snapshot_stall_ms_max: f64,
    /// Command bytes per block change.
    pub bytes_per_change: f64,
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
    /// Opening a stopped node's log and snapshot.
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
        memberships: cluster.memberships(),
        ..Report::default()
    };
    full_rate(&options, &cluster, &mut load, &shared, &mut report).await?;
    let half = report.changes_per_s / 2.0;
    half_rate(&options, &cluster, &mut load, &shared, half, &mut report).await?;
    if let (Some(away), true) = (options.away, options.nodes > 2) {
        report.away_s = Some(away.as_secs_f64());
        absence(&mut cluster, &mut load, &shared, half, away, &mut report).await?;
        cluster.level(&shared).await?;
    }
    following.abort();
    let begun = Instant::now();
    let fresh = Arc::new(Shared::default());
    let following = view::spawn(cluster.followed_address(), fresh.clone());
    cluster.level(&fresh).await?;
    report.view_cold_start_s = begun.elapsed().as_secs_f64();
    following.abort();
    cluster.stop().await;
    Ok(report)
}

async fn full_rate(
    options: &Options,
    cluster: &Cluster,
    load: &mut Load,
    shared: &Arc<Shared>,
    report: &mut Report,
) -> Result<(), BenchError> {
    let (seen, bytes) = (
        shared.seen.load(Ordering::Relaxed),
        shared.seen_bytes.load(Ordering::Relaxed),
    );
    shared.changes.store(0, Ordering::Relaxed);
    let slowdown = gauge::Slowdown::start();
    let (process, view) = (gauge::process_cpu(), shared.view_cpu_ns.load(Ordering::Relaxed));
    let begun = Instant::now();
    let loading = load.run(Phase::Push {
        rate: None,
        length: options.phase,
    });
    let load_cpu = loading.await?;
    cluster.level(shared).await?;
    let elapsed = begun.elapsed();
    let process = gauge::process_cpu().saturating_sub(process);
    let view_cpu = shared.view_cpu_ns.load(Ordering::Relaxed) - view;
    let (slowdown, gauge_cpu) = slowdown.stop();
    let changes = shared.changes.load(Ordering::Relaxed).max(1) as f64;
    let seen = shared.seen.load(Ordering::Relaxed) - seen;
    let node_cpu = process
        .saturating_sub(load_cpu)
        .saturating_sub(gauge_cpu)
        .saturating_sub(Duration::from_nanos(view_cpu));
    report.changes_per_s = changes / elapsed.as_secs_f64();
    report.bytes_per_change = (shared.seen_bytes.load(Ordering::Relaxed) - bytes) as f64 / seen.max(1) as f64;
    report.node_cpu_ns_per_change = node_cpu.as_nanos() as f64 / changes;
    report.load_cpu_ns_per_change = load_cpu.as_nanos() as f64 / changes;
    report.view_cpu_ns_per_change = view_cpu as f64 / changes;
    report.changes_per_node_core_s = 1e9 / report.node_cpu_ns_per_change.max(f64::MIN_POSITIVE);
    report.slowdown = slowdown;
    Ok(())
}

/// Latency at a rate, with a snapshot of every node in the middle.
async fn half_rate(
    options: &Options,
    cluster: &Cluster,
    load: &mut Load,
    shared: &Arc<Shared>,
    rate: f64,
    report: &mut Report,
) -> Result<(), BenchError> {
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
    (report.snapshot_s_max, report.snapshot_rss_ratio) = taken?;
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
    report.visible_p50_ms = percentile(0.5);
    report.visible_p99_ms = percentile(0.99);
    report.snapshot_stall_ms_max = cluster.snapshot_stall_ms_max();
    Ok(())
}

/// One follower is stopped, stays away and comes back, while writes go on.
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
