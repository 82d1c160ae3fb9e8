//! `cairn bench live`: a small trace through real processes and through the replay.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::fmt::Write as _;

use support::ask;

const REQUESTS: u64 = 40;
const SESSIONS: u64 = 4;

/// Four sessions of ten turns that share nothing, each prompt longer than what `prefix` looks at; a turn's prompt is the one before it and 512 tokens more.
fn trace() -> String {
    let mut text = String::new();
    for number in 0..REQUESTS {
        let (session, turn) = (number % SESSIONS, number / SESSIONS + 2);
        let ids: Vec<u64> = (0..turn).map(|at| session * 1_000 + at).collect();
        let (at, length) = (number * 1_000, turn * 512);
        writeln!(
            text,
            "{{\"timestamp\":{at},\"input_length\":{length},\"output_length\":4,\"hash_ids\":{ids:?}}}"
        )
        .unwrap();
    }
    text
}

#[test]
fn real_processes_reuse_what_the_replay_says() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.jsonl");
    std::fs::write(&file, trace()).unwrap();
    let report = ask(&[
        "bench",
        "live",
        "--trace",
        file.to_str().unwrap(),
        "--engines",
        "2",
        "--capacity-tokens",
        "100000",
        "--policies",
        "prefix,random",
        "--json",
    ]);
    assert_eq!(report["requests"], REQUESTS);
    let oracle = report["oracle_hit"].as_f64().unwrap();
    let policies = report["policies"].as_array().unwrap();
    assert_eq!(policies.len(), 2);
    for row in policies {
        assert_eq!(row["failed"], 0, "{row}");
        let live = row["live_hit"].as_f64().unwrap();
        assert!(live > 0.0 && live <= oracle + 1e-9, "{row}");
    }
    // Each session has its engine, and both come to the same. What chance does is only bounded.
    let prefix = &policies[0];
    assert!(prefix["difference_points"].as_f64().unwrap().abs() < 2.0, "{prefix}");
    assert!((prefix["live_hit"].as_f64().unwrap() - oracle).abs() < 0.02, "{prefix}");
    assert_eq!(prefix["live_hits"].as_array().unwrap().len(), 1);
}
