//! The benchmark runs and its figures are sane; the marks are `cairn bench cluster`'s business.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

#[path = "cluster/process.rs"]
mod process;

use std::time::Duration;

use cairn_blocks::{BlockKey, Depth};
use cairn_index::{HolderId, Op};
use cairn_index_node::bench::{Options, run};

/// Two batches of a source: a chain of `blocks`, and its longer half gone.
fn told(source: u64, blocks: u32) -> Vec<Vec<Op>> {
    let keys: Vec<BlockKey> = (0..=u64::from(blocks)).map(|i| BlockKey(source << 32 | i)).collect();
    let holder = HolderId(0);
    let store = Op::Store {
        holder,
        anchor: keys[0],
        anchor_depth: Depth(0),
        skip: 0,
        keys: keys[1..].to_vec(),
    };
    let remove = Op::Remove {
        holder,
        key: keys[blocks as usize],
        depth: Depth(blocks),
        count: blocks / 2,
    };
    vec![vec![store], vec![remove]]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_run_commits_and_shows_changes() {
    let dir = tempfile::tempdir().unwrap();
    let seconds = std::env::var("CAIRN_BENCH_SECONDS").map_or(1, |seconds| seconds.parse().unwrap());
    let options = Options {
        dir: dir.path().to_owned(),
        start: |config| process::spawn(config, &config.data_dir.with_extension("toml")),
        nodes: 3,
        sources: 8,
        chain_blocks: 256,
        memberships: 8 * 256 * 16,
        phase: Duration::from_secs(seconds),
        away: Some(Duration::from_millis(200)),
        told: (1..=4).map(|source| told(source, 100)).collect(),
    };
    let report = run(options).await.unwrap();
    eprintln!("{report:?}");
    assert!(
        report.changes_per_s > 1_000.0 && report.visible_p99_ms > 0.0,
        "{report:?}"
    );
    assert!(report.bytes_per_change < 6.0, "{report:?}");
    assert_eq!(report.memberships, 8 * 256 * 16);
    assert!(
        report.catch_up_s.is_some() && report.node_cpu_ns_per_change > 0.0,
        "{report:?}"
    );
    assert_eq!(report.trace_changes, Some(4 * 150));
    assert!(
        report.trace_bytes_per_change.is_some_and(|bytes| bytes > 4.0),
        "{report:?}"
    );
}
