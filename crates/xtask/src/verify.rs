//! `verify`, `fix` and `soak`: what they run, in order.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::links;
use crate::step::{Steps, cargo, say};

/// Arguments of `cargo xtask verify`.
#[derive(Args)]
pub struct VerifyArgs {
    /// Leave out what downloads Python packages: real clients and real vLLM engines.
    #[arg(long)]
    no_python: bool,
}

/// Every check, cheapest first.
pub fn run(root: &Path, args: &VerifyArgs) -> anyhow::Result<()> {
    let mut steps = Steps::default();
    steps.run("format", &mut cargo(root, &["fmt", "--all", "--check"]))?;
    steps.time("links", || links::check(root))?;
    let lints = [
        "clippy",
        "--release",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ];
    steps.run("lints", &mut cargo(root, &lints))?;
    steps.run("build", &mut cargo(root, &["build", "--release", "--workspace"]))?;
    if !args.no_python {
        steps.run("set up real clients", &mut script(root, "tests/clients/setup.sh"))?;
        steps.run("set up real engines", &mut script(root, "tests/real/setup.sh"))?;
    }
    steps.run(
        "tests",
        &mut cargo(root, &["test", "--release", "--workspace", "--no-fail-fast"]),
    )?;
    let mut docs = cargo(root, &["doc", "--release", "--workspace", "--no-deps", "--quiet"]);
    steps.run("docs", docs.env("RUSTDOCFLAGS", "-D warnings"))?;
    if args.no_python {
        say("SKIPPED: real clients and real engines (--no-python)");
    } else {
        steps.run("real clients", &mut script(root, "tests/clients/run.sh"))?;
        steps.run("real engines", &mut script(root, "tests/real/run.sh"))?;
    }
    steps.summary();
    Ok(())
}

/// Formats and applies suggestions.
pub fn fix(root: &Path) -> anyhow::Result<()> {
    let mut steps = Steps::default();
    let lints = [
        "clippy",
        "--release",
        "--workspace",
        "--all-targets",
        "--fix",
        "--allow-dirty",
        "--allow-staged",
    ];
    steps.run("lints", &mut cargo(root, &lints))?;
    steps.run("format", &mut cargo(root, &["fmt", "--all"]))
}

/// The long runs; their sizes come from the variables that the tests read.
pub fn soak(root: &Path) -> anyhow::Result<()> {
    let mut steps = Steps::default();
    // Of the whole workspace, like every other build: a part of it would be compiled with other features.
    let test = |target: &str, filter: &str| {
        let mut command = cargo(root, &["test", "--release", "--workspace", "--test", target]);
        command.args(["--", "--nocapture", "--test-threads", "1", filter]);
        command
    };
    steps.run(
        "simulation, 20,000 seeds",
        test("seeds", "").env("CAIRN_SIM_SEEDS", "20000"),
    )?;
    steps.run(
        "crash suite, 200 kills",
        test("engine", "kill_9").env("CAIRN_CRASH_ROUNDS", "200"),
    )?;
    steps.run(
        "crash suite, 60 power cuts",
        test("engine", "power_cut").env("CAIRN_POWER_ROUNDS", "60"),
    )?;
    steps.run(
        "crash suite, torn and flipped bytes at every offset",
        test("engine", "torn_and_flipped").env("CAIRN_TORN_STEP", "1"),
    )?;
    steps.run(
        "a cluster of index nodes, 20 kills",
        test("cluster", "faults").env("CAIRN_CRASH_ROUNDS", "20"),
    )?;
    steps.run(
        "index against its oracle, 20 M operations",
        test("residency", "a_million").env("CAIRN_FUZZ_WORLDS", "10000"),
    )?;
    steps.run(
        "index with a hundred million memberships",
        cargo(root, &["run", "--release", "--manifest-path", "tests/peers/Cargo.toml"])
            .args(["--", "--only", "huge", "--strict"]),
    )?;
    steps.run(
        "faults under load, full length",
        test("faults", "").env("CAIRN_SOAK", "1"),
    )?;
    steps.run("build", &mut cargo(root, &["build", "--release", "--workspace"]))?;
    match std::env::var("CAIRN_DATA") {
        Ok(data) => steps.run(
            "ten minutes of Mooncake conversation, live and replayed",
            &mut live(root, &data),
        )?,
        Err(_) => say("SKIPPED: live and replayed: set CAIRN_DATA=<folder of traces>"),
    }
    steps.summary();
    Ok(())
}

/// Chance alone can put one run of `random` two points off, so two count.
fn live(root: &Path, data: &str) -> Command {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let mut command = Command::new(target.join("release").join("cairn"));
    command.current_dir(root).args([
        "bench", "live", "--speed", "10", "--runs", "2", "--within", "2", "--trace",
    ]);
    command.arg(Path::new(data).join("mooncake_conversation_10min.jsonl.gz"));
    command
}

fn script(root: &Path, path: &str) -> Command {
    let mut command = Command::new("bash");
    command.current_dir(root).arg(path);
    command
}
