//! Whole replays: repeatable, and with the order of policies that the caches dictate.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

#[path = "../../../tests/watch.rs"]
mod watch;

use cairn_replay::engine_model::{Micros, Timing};
use cairn_replay::trace::{Trace, read, synthetic};
use cairn_replay::{Model, Options, Report, Scenario};
use cairn_routing::PolicyConfig;

fn run(trace: &Trace, policies: &[&str], options: &Options) -> Report {
    let runs = policies.iter().map(|name| {
        let policy = PolicyConfig::by_name(name).unwrap();
        cairn_replay::run(trace, &policy, 1, options, &mut |_| {}).unwrap()
    });
    Report::new(trace, runs.collect())
}

/// Requests that come again and again to the same forty contexts of 4,096 tokens.
fn contexts(rows: usize) -> Trace {
    let lines: Vec<String> = (0..rows as u64)
        .map(|row| {
            let context = row.wrapping_mul(0x9e37_79b9) >> 7 & 0xffff;
            let (context, own) = (context % 40, 1_000_000 + row);
            let ids: Vec<u64> = (0..8).map(|at| context * 100 + at).chain([own]).collect();
            let at = row * 140;
            format!("{{\"timestamp\":{at},\"input_length\":4300,\"output_length\":60,\"hash_ids\":{ids:?},\"session_id\":{context}}}\n")
        })
        .collect();
    read("contexts", lines.concat().as_bytes(), None).unwrap()
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
    let mut trace = synthetic("sagemaker-8k", 0).unwrap();
    trace.rows.truncate(300);
    let json = |policies: &[&str], options: &Options| serde_json::to_string(&run(&trace, policies, options)).unwrap();
    let all = PolicyConfig::NAMES;
    assert_eq!(json(&all, &options()), json(&all, &options()));
    let other = Options {
        routers: 3,
        model: Model::Default,
        peer_fetch: true,
        ..options()
    };
    assert_eq!(json(&["kv", "prefix"], &other), json(&["kv", "prefix"], &other));
}

/// Taken once and never again: another machine, another release of a library or a map's order would show here.
#[test]
fn the_bytes_are_those_of_every_other_machine() {
    let trace = contexts(400);
    let report = run(&trace, &["kv", "random", "prefix", "lmetric"], &options());
    let text =
        serde_json::to_string(&report.runs.iter().map(|run| (run.hit, run.ttft_ms)).collect::<Vec<_>>()).unwrap();
    let made = synthetic("agent", 0).unwrap();
    let sum = made.rows.iter().fold(0u64, |sum, row| {
        (sum ^ row.at.0)
            .wrapping_mul(31)
            .wrapping_add(u64::from(row.input) << 20 | u64::from(row.output))
    });
    let digest = text.bytes().fold(0xcbf2_9ce4_8422_2325u64, |state, byte| {
        (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    assert_eq!(
        (sum, made.rows.len()),
        (GOLDEN_AGENT, 5_681),
        "the recipe's rows changed"
    );
    assert_eq!(digest, GOLDEN_RUNS, "{text}");
}

const GOLDEN_AGENT: u64 = 2_303_161_639_737_678_408;
const GOLDEN_RUNS: u64 = 16_583_827_162_594_455_456;

#[test]
fn knowing_the_caches_beats_chance_and_what_was_predicted_was_there() {
    let trace = contexts(400);
    let report = run(&trace, &["kv", "random"], &options());
    let (kv, random) = (&report.runs[0], &report.runs[1]);
    assert!(
        kv.hit >= random.hit && kv.hit <= report.oracle_hit + 1e-9,
        "{kv:?} {random:?}"
    );
    assert!(kv.ttft_ms.p90 < random.ttft_ms.p90, "{kv:?} {random:?}");
    assert!(kv.predicted_hit <= kv.hit + 0.02, "{kv:?}");
    assert_eq!(kv.refused + random.refused, 0);
}

#[test]
fn no_request_is_lost_when_the_fleet_changes() {
    let trace = contexts(300);
    for name in Scenario::NAMES {
        let scenario = Scenario::by_name(name).unwrap();
        let report = run(
            &scenario.shape(trace.clone()),
            &["kv"],
            &Options { scenario, ..options() },
        );
        let run = &report.runs[0];
        let served: u64 = run.windows.iter().map(|window| window.requests).sum();
        assert_eq!(served + run.refused, 300, "{name}");
        assert!(run.refused == 0 || scenario == Scenario::Overload, "{name}");
        assert_eq!(run.changes_s.len(), usize::from(scenario.changes_fleet()), "{name}");
    }
}

#[test]
fn an_overloaded_fleet_refuses_instead_of_queueing_without_bound() {
    let trace = contexts(3_000).faster(20.0);
    let options = Options {
        scenario: Scenario::Overload,
        ..options()
    };
    let report = run(&trace, &["kv", "max-hit"], &options);
    for run in &report.runs {
        assert!(run.refused > 0 && run.retries > 0, "{run:?}");
        // At most 32 wait in each engine, each for a prefill of at most half a second.
        assert!(run.ttft_ms.p99 < 34.0 * 500.0, "{run:?}");
    }
}

#[test]
fn what_a_peer_holds_is_fetched_where_that_is_faster_than_computing() {
    let trace = contexts(400).faster(3.0);
    let alone = run(&trace, &["random", "kv"], &options());
    let peers = run(
        &trace,
        &["random", "kv"],
        &Options {
            peer_fetch: true,
            ..options()
        },
    );
    assert!(alone.runs.iter().all(|run| run.fetched == 0.0));
    let (random, kv) = (&peers.runs[0], &peers.runs[1]);
    assert!(
        random.fetched > 0.2 && random.hit > alone.runs[0].hit + 0.2,
        "{random:?}"
    );
    assert!(kv.hit >= 0.95 * peers.oracle_hit, "{kv:?}");
}

#[test]
fn engines_serve_only_once_they_have_started() {
    // 300 requests in 42 s.
    let trace = contexts(300);
    let work_of = |scenario, seconds: u64, engine: usize| {
        let options = Options {
            scenario,
            engine_start: Some(Micros(seconds * 1_000_000)),
            window: Micros(1_000_000),
            ..options()
        };
        let run = run(&trace, &["random"], &options).runs.remove(0);
        assert_eq!(run.windows.iter().map(|window| window.requests).sum::<u64>(), 300);
        let busy = run
            .windows
            .iter()
            .filter(|window| window.work.get(engine).is_some_and(|work| *work > 0));
        (
            busy.map(|window| window.at_s).collect::<Vec<f64>>(),
            run.changes_s.clone(),
        )
    };
    let (busy, changes) = work_of(Scenario::ScaleOut, 10, 4);
    assert_eq!(changes.len(), 2);
    assert!(
        (changes[1] - changes[0] - 10.0).abs() < 1e-6 && busy[0] >= changes[1].floor(),
        "{busy:?} {changes:?}"
    );
    let (busy, changes) = work_of(Scenario::Restart, 10, 0);
    let away = (changes[0].ceil(), changes[1].floor());
    assert!(
        busy.iter().any(|at| *at < away.0) && busy.iter().any(|at| *at >= away.1),
        "{busy:?}"
    );
    assert!(
        !busy.iter().any(|at| (away.0..away.1).contains(at)),
        "{busy:?} {changes:?}"
    );
    // Nothing but a trace's length of time: who starts later never serves.
    assert_eq!(work_of(Scenario::ScaleOut, 3_600, 4).0, [0.0; 0]);
}

#[test]
fn splits_are_decided_by_the_routing_core_and_every_request_is_answered_once() {
    let trace = contexts(400).faster(2.0);
    let split = Options {
        model: Model::Default,
        prefill: 2,
        ..options()
    };
    let report = run(&trace, &["kv", "random"], &split);
    for run in &report.runs {
        assert_eq!(
            (
                run.windows.iter().map(|window| window.requests).sum::<u64>(),
                run.refused
            ),
            (400, 0)
        );
        assert!(run.split_share > 0.0 && run.hit <= report.oracle_hit + 1e-9, "{run:?}");
        // Prefill engines answer nobody.
        assert_eq!(run.request_share[..2], [0.0, 0.0]);
        assert!(run.work_share[0] + run.work_share[1] > 0.5, "{run:?}");
    }
    assert!(report.table().contains("% split"));
    // Transfers that take two seconds are tried, and then no more.
    let slow = Options {
        timing: Some(Timing {
            transfer_base_s: 2.0,
            ..Timing::llama_70b_8gpu()
        }),
        ..split.clone()
    };
    let calm = contexts(400);
    let often = |options: &Options| run(&calm, &["kv"], options).runs[0].split_share;
    let (usual, reluctant) = (often(&split), often(&slow));
    assert!(reluctant < 0.5 * usual, "{reluctant} {usual}");
    let json = |report: &Report| serde_json::to_string(report).unwrap();
    assert_eq!(json(&report), json(&run(&trace, &["kv", "random"], &split)));
    // Decode engines that are full send requests back.
    let overloaded = Options {
        scenario: Scenario::Overload,
        ..split
    };
    let run = run(&contexts(2_000).faster(40.0), &["kv"], &overloaded).runs.remove(0);
    let served = run.windows.iter().map(|window| window.requests).sum::<u64>();
    assert_eq!(served + run.refused, 2_000);
}

#[test]
fn splits_need_engines_of_both_kinds_and_a_fleet_that_stays() {
    let refused = |options: Options| options.validate().unwrap_err().field;
    let prefill = 4;
    assert_eq!(refused(Options { prefill, ..options() }), "prefill");
    let scenario = Scenario::Restart;
    let prefill = 2;
    assert_eq!(
        refused(Options {
            prefill,
            scenario,
            ..options()
        }),
        "prefill"
    );
}

#[test]
fn what_one_engine_stored_others_load_from_the_shared_store() {
    let trace = contexts(400).faster(3.0);
    let with = |shared_tokens| {
        let options = Options {
            shared_tokens,
            ..options()
        };
        run(&trace, &["random", "kv"], &options)
    };
    let (alone, large, small) = (with(0), with(10_000_000), with(40_000));
    assert!(alone.runs.iter().all(|run| run.fetched == 0.0));
    let (random, kv) = (&large.runs[0], &large.runs[1]);
    assert!(
        random.fetched > 0.2 && random.hit > alone.runs[0].hit + 0.2,
        "{random:?}"
    );
    assert!(
        kv.hit >= 0.95 * large.oracle_hit && kv.predicted_hit <= kv.hit + 0.02,
        "{kv:?}"
    );
    // Nine contexts fit, of forty.
    assert!(small.runs[0].hit < random.hit - 0.1, "{:?}", small.runs[0]);
    let json = |report: &Report| serde_json::to_string(report).unwrap();
    assert_eq!(json(&large), json(&with(10_000_000)));
}

#[test]
fn the_page_stands_alone_has_its_plots_and_escapes_names() {
    let mut trace = contexts(200);
    trace.name = "<script>alert('x')</script> & \"mine\"".into();
    let options = Options {
        scenario: Scenario::ScaleIn,
        ..options()
    };
    let mut report = run(&trace, &["kv", "prefix"], &options);
    report.runs[1].policy = "prefix<b>".into();
    let page = report.html();
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</body></html>\n"));
    for loaded in [
        "<script", "<link", "<img", "src=", "href=", "url(", "http:", "https:", "@import", "<b>",
    ] {
        assert!(!page.contains(loaded), "{loaded}");
    }
    assert!(page.contains("&lt;script&gt;alert") && page.contains("prefix&lt;b&gt;"));
    // Distribution, P90 over time, hits over time: each with a line for either policy; the change of the fleet is marked.
    assert_eq!(page.matches("<svg").count(), 3);
    assert_eq!(page.matches("<polyline").count(), 6);
    assert_eq!(page.matches("fleet changes").count(), 2);
    assert!(page.contains("title=\"engine 3: ") && page.contains("Why requests went where they went"));
    assert!(!page.contains("NaN") && !page.contains("inf"));
}

#[test]
fn the_mooncake_conversation_is_replayed_in_seconds() {
    let Ok(folder) = std::env::var("CAIRN_DATA") else {
        use std::io::Write as _;
        // Past the capture of a passing test's output.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: the_mooncake_conversation_is_replayed_in_seconds: set CAIRN_DATA=<folder of traces>"
        );
        return;
    };
    let file = std::fs::File::open(format!("{folder}/mooncake_conversation.jsonl.gz")).unwrap();
    let trace = read("mooncake_conversation", file, None).unwrap().faster(2.0);
    assert_eq!((trace.rows.len(), trace.block), (12_031, 512));
    let options = Options {
        model: Model::Reference,
        ..Options::default()
    };
    let started = watch::Watch::start();
    let report = run(&trace, &["kv"], &options);
    started.within(std::time::Duration::from_secs(5), "a replay of the conversation");
    eprintln!("{}", report.table());
    assert!((report.oracle_hit - 0.374).abs() < 0.01, "{}", report.oracle_hit);
}
