//! Whole replays: repeatable, and with the order of policies that the caches dictate.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

use cairn_replay::trace::{Trace, read, synthetic};
use cairn_replay::{Model, Options, Report, Scenario, replay};
use cairn_routing::PolicyConfig;

fn run(trace: &Trace, policies: &[&str], options: &Options) -> Report {
    let policies: Vec<PolicyConfig> = policies
        .iter()
        .map(|name| PolicyConfig::by_name(name).unwrap())
        .collect();
    replay(trace, &policies, 1, options).unwrap()
}

/// The first `rows` requests of the published 8,000-token shape.
fn short(rows: usize) -> Trace {
    let mut trace = synthetic("sagemaker-8k", 1).unwrap();
    trace.rows.truncate(rows);
    trace
}

fn options() -> Options {
    Options {
        engines: 4,
        capacity_tokens: 600_000,
        model: Model::Reference,
        ..Options::default()
    }
}

#[test]
fn one_seed_gives_one_report_byte_for_byte() {
    let trace = short(150);
    let json = || serde_json::to_string(&run(&trace, &["kv", "random", "prefix"], &options())).unwrap();
    assert_eq!(json(), json());
    let other = Options {
        routers: 3,
        model: Model::Default,
        ..options()
    };
    let json = || serde_json::to_string(&run(&trace, &["kv"], &other)).unwrap();
    assert_eq!(json(), json());
}

#[test]
fn knowing_the_caches_beats_chance_and_what_was_predicted_was_there() {
    let mut trace = short(400);
    for row in &mut trace.rows {
        // Forty prefixes instead of a thousand, so that they come again within the short run.
        let which = row.session.as_deref().unwrap()[1..].parse::<u64>().unwrap() % 40;
        row.blocks = (0..u64::from(row.input / 16))
            .map(|at| {
                if at < 500 {
                    which << 32 | at
                } else {
                    *row.blocks.last().unwrap() ^ at
                }
            })
            .collect();
    }
    let report = run(&trace, &["kv", "random"], &options());
    let (kv, random) = (&report.runs[0], &report.runs[1]);
    assert!(
        kv.hit >= random.hit && kv.hit <= report.oracle_hit + 1e-9,
        "{kv:?} {random:?}"
    );
    assert!(kv.predicted_hit <= kv.hit + 0.02, "{kv:?}");
    assert_eq!(kv.unserved + random.unserved, 0);
}

#[test]
fn no_request_is_lost_when_the_fleet_changes() {
    let trace = short(200);
    for scenario in [Scenario::ScaleOut, Scenario::ScaleIn, Scenario::Restart] {
        let report = run(&trace, &["kv"], &Options { scenario, ..options() });
        assert_eq!(report.runs[0].unserved, 0, "{scenario:?}");
        let served: u64 = report.runs[0].windows.iter().map(|window| window.requests).sum();
        assert_eq!(served, 200, "{scenario:?}");
    }
}

#[test]
fn the_mooncake_conversation_is_replayed_in_seconds() {
    let Ok(folder) = std::env::var("CAIRN_DATA") else {
        eprintln!("SKIPPED: the_mooncake_conversation_is_replayed_in_seconds: set CAIRN_DATA=<folder of traces>");
        return;
    };
    let file = std::fs::File::open(format!("{folder}/mooncake_conversation.jsonl.gz")).unwrap();
    let trace = read("mooncake_conversation", file, None).unwrap().faster(2.0);
    assert_eq!((trace.rows.len(), trace.block), (12_031, 512));
    let options = Options {
        model: Model::Reference,
        ..Options::default()
    };
    let started = std::time::Instant::now();
    let report = run(&trace, &["kv", "sticky", "prefix", "random"], &options);
    eprintln!("{:.1} s\n{}", started.elapsed().as_secs_f64(), report.table());
    assert!((report.oracle_hit - 0.374).abs() < 0.01, "{}", report.oracle_hit);
}
