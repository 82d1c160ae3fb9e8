//! The benchmark runs and its figures are sane; the marks are `cairn bench cluster`'s business.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

use std::time::Duration;

use cairn_index_node::bench::{Options, run};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_run_commits_and_shows_changes() {
    let dir = tempfile::tempdir().unwrap();
    let seconds = std::env::var("CAIRN_BENCH_SECONDS").map_or(1, |seconds| seconds.parse().unwrap());
    let options = Options {
        dir: dir.path().to_owned(),
        nodes: 3,
        sources: 8,
        chain_blocks: 256,
        memberships: 8 * 256 * 16,
        phase: Duration::from_secs(seconds),
        away: Some(Duration::from_millis(200)),
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
}
