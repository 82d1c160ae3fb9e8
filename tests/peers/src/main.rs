//! Cairn's index beside the public ones: the same event log, the same questions, every answer compared.
//!
//! `cargo run --release --manifest-path tests/peers/Cargo.toml -- --quick|--full [--json FILE] [--data DIR] [--only TEXT]`.
//! Traces come from the folder that `--data` or `CAIRN_DATA` names; what can't be run without it is said. `--only` keeps
//! the workloads whose label contains a text, `--index` the indexes whose name does. `--only scale`, `--only churn` and
//! `--only huge` take Cairn alone: a thousand workers, memory over many turnovers, a hundred million memberships. With
//! `--strict` a missed mark is an error.

mod allocator;
mod baselines;
mod cairn;
mod churn;
mod clock;
mod contender;
mod dynamo;
mod isolate;
mod log;
mod lossy;
mod marks;
mod measure;
mod mirror;
mod rows;
mod scale;
mod simulate;
mod smg;
mod trace;
mod workload;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::{Value, json};

use contender::Contender;
use log::Log;
use rows::Row;
use workload::Workload;

#[global_allocator]
static ALLOCATOR: allocator::Counting = allocator::Counting;

/// A quick run begins no further index that is far from the best after this, and no further round: it must end soon.
const QUICK: Duration = Duration::from_secs(200);
/// Rounds that are wanted of each index that somebody compares with, and the time after which no further one is begun.
const ROUNDS: usize = 3;

/// One index: its name, its two passes, and whether it is taken in every round.
struct Entry {
    name: &'static str,
    ingest: Option<fn(&Log) -> Value>,
    answers: Option<fn(&Log) -> Value>,
    every_round: bool,
    /// It is the best peer on some figure, so that it is never left out.
    close: bool,
    /// It is taken on the first workload alone.
    first_only: bool,
}

impl Entry {
    /// One that is compared with: two passes, in every round.
    fn new<C: Contender>(name: &'static str) -> Self {
        Self {
            name,
            ingest: Some(measure::ingest::<C>),
            answers: Some(measure::answers::<C>),
            every_round: true,
            close: true,
            first_only: false,
        }
    }

    /// One that is far from the best: one pass, once.
    fn once<C: Contender>(name: &'static str) -> Self {
        Self {
            name,
            ingest: None,
            answers: Some(measure::together::<C>),
            every_round: false,
            close: false,
            first_only: false,
        }
    }
}

fn entries() -> Vec<Entry> {
    vec![
        Entry {
            answers: None,
            ..Entry::new::<baselines::Empty>("harness")
        },
        Entry::new::<cairn::Cairn>("cairn"),
        Entry::new::<mirror::Mirrored>("cairn+mirror"),
        Entry {
            close: true,
            first_only: true,
            ..Entry::once::<lossy::Lossy>("cairn+mirror/1% lost")
        },
        Entry::new::<smg::Chain<false>>("kv-index"),
        Entry {
            answers: Some(measure::answers::<smg::Chain<true>>),
            ..Entry::once::<smg::Chain<true>>("kv-index/find_matches")
        },
        Entry {
            close: true,
            ..Entry::once::<smg::Radix>("smg-radix-tree")
        },
        Entry::once::<dynamo::Compressed>("dynamo/compressed"),
        Entry::once::<dynamo::Radix>("dynamo/radix"),
        Entry::once::<dynamo::Positional>("dynamo/positional"),
        Entry::once::<baselines::MapOfSets>("map-of-sets"),
        Entry::once::<baselines::ShardedMap>("sharded-map"),
    ]
}

const HELP: &str = "\
Cairn's index beside the public ones, on one event log

  --quick        the workloads of the marks, under six minutes (default)
  --full         all workloads, worker counts and kinds of holes
  --json FILE    writes every row and mark
  --data DIR     the folder of the public traces, else CAIRN_DATA
  --only TEXT    only workloads and parts whose name contains it
  --index TEXT   only indexes whose name contains it
  --strict       a missed mark is an error";

struct Options {
    full: bool,
    json: Option<PathBuf>,
    data: Option<PathBuf>,
    only: String,
    index: String,
    strict: bool,
}

fn options() -> anyhow::Result<Options> {
    let mut options = Options {
        full: false,
        json: None,
        data: std::env::var_os("CAIRN_DATA").map(PathBuf::from),
        only: String::new(),
        index: String::new(),
        strict: false,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().with_context(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--quick" => options.full = false,
            "--full" => options.full = true,
            "--json" => options.json = Some(value()?.into()),
            "--data" => options.data = Some(value()?.into()),
            "--only" => options.only = value()?,
            "--index" => options.index = value()?,
            "--strict" => options.strict = true,
            "-h" | "--help" => {
                println!("{HELP}");
                std::process::exit(0);
            }
            _ => bail!("unknown option {arg}; --help lists the options"),
        }
    }
    Ok(options)
}

fn main() -> anyhow::Result<()> {
    let options = options()?;
    let began = Instant::now();
    let mut calibrations = vec![clock::calibration_ns()];
    let workloads = if options.full {
        Workload::full()
    } else {
        Workload::quick()
    };
    let mut measured = Vec::new();
    let mut derivation = Value::Null;
    for workload in workloads.into_iter().filter(|w| w.label().contains(&options.only)) {
        if let Err(why) = workload.available(options.data.as_deref()) {
            eprintln!("{why}");
            continue;
        }
        let log = workload.log(options.data.as_deref())?;
        eprintln!(
            "{}: {} events, {} block changes, {} memberships at the end",
            workload.label(),
            log.events.len(),
            log.changes,
            log.memberships
        );
        if derivation.is_null() {
            derivation = measure::derivation(&log);
        }
        let budget = Duration::from_secs(if options.full { 600 } else { 40 });
        let late = !options.full && began.elapsed() > QUICK;
        let budget = if late { Duration::ZERO } else { budget };
        let rows = run(&log, measured.is_empty(), &options, budget, &mut calibrations)?;
        print!("{}", rows::table(&workload.label(), &rows));
        measured.push((workload, rows));
    }
    let scale = if options.index.is_empty() && (options.only.is_empty() || options.only == "scale") {
        isolate::run(scale::measure).context("measuring a thousand workers")?
    } else {
        Value::Null
    };
    println!("\ncairn alone over a thousand workers: {scale}");
    let alone = |name: &str, measure: fn() -> Value| {
        if options.index.is_empty() && (options.only.is_empty() || options.only == name) {
            isolate::run(measure).with_context(|| format!("measuring {name}"))
        } else {
            Ok(Value::Null)
        }
    };
    let churned = alone("churn", churn::churn)?;
    println!("cairn alone, 200,000 blocks held while 20 million pass: {churned}");
    // Takes a minute and more than a GiB: only where it is asked for.
    let huge = if options.full || options.only == "huge" {
        alone("huge", churn::huge)?
    } else {
        Value::Null
    };
    println!("cairn alone, a hundred million memberships: {huge}");
    let mut marks = marks::judge(&measured);
    marks.extend(marks::judge_alone(&scale, &churned, &huge));
    println!();
    marks.iter().for_each(|mark| println!("{}", mark.line()));
    let least = calibrations.iter().copied().min().unwrap_or(1).max(1);
    let slowdown = |ns: u64| ns as f64 / least as f64;
    calibrations.sort_unstable();
    let (median, worst) = (
        calibrations[calibrations.len() / 2],
        calibrations[calibrations.len() - 1],
    );
    println!(
        "\ncalibration loop: {:.2} ms at best, slowdown {:.2} in the median and {:.2} at worst; keys from tokens: {derivation}; {:.0} s in all",
        least as f64 / 1e6,
        slowdown(median),
        slowdown(worst),
        began.elapsed().as_secs_f64()
    );
    if let Some(path) = &options.json {
        let rows: Vec<Value> = measured
            .iter()
            .flat_map(|(w, rows)| rows.iter().map(|r| r.to_json(w)))
            .collect();
        let report = json!({
            "machine": machine(),
            "commit": commit(),
            "mode": if options.full { "full" } else { "quick" },
            "calibration": { "best_ns": least, "slowdown_median": slowdown(median), "slowdown_worst": slowdown(worst) },
            "derivation": derivation,
            "rows": rows,
            "scale": scale,
            "churn": churned,
            "huge": huge,
            "marks": marks.iter().map(marks::Mark::to_json).collect::<Vec<_>>(),
        });
        std::fs::write(path, format!("{report:#}\n")).with_context(|| format!("writing {}", path.display()))?;
    }
    let missed = marks.iter().filter(|mark| !mark.holds()).count();
    if options.strict && missed > 0 {
        bail!("{missed} of {} marks were missed", marks.len());
    }
    Ok(())
}

/// Takes turns with all indexes, round by round.
fn run(
    log: &Log,
    is_first: bool,
    options: &Options,
    budget: Duration,
    calibrations: &mut Vec<u64>,
) -> anyhow::Result<Vec<Row>> {
    let began = Instant::now();
    let mut entries: Vec<Entry> = entries()
        .into_iter()
        .filter(|e| e.name.contains(&options.index) && (is_first || !e.first_only))
        .collect();
    if budget.is_zero() {
        let (kept, skipped): (Vec<Entry>, Vec<Entry>) = entries.into_iter().partition(|e| e.close);
        entries = kept;
        let names: Vec<&str> = skipped.iter().map(|e| e.name).collect();
        eprintln!("SKIPPED here, for want of time: {}; --full takes all", names.join(", "));
    }
    let mut taken: Vec<Vec<Value>> = entries.iter().map(|_| Vec::new()).collect();
    for round in 0..ROUNDS {
        if round > 0 && began.elapsed() > budget {
            break;
        }
        calibrations.push(clock::calibration_ns());
        for (entry, taken) in entries.iter().zip(&mut taken) {
            if round > 0 && !entry.every_round {
                continue;
            }
            for pass in [entry.ingest, entry.answers].into_iter().flatten() {
                let figures = isolate::run(|| pass(log)).with_context(|| format!("measuring {}", entry.name))?;
                taken.push(figures);
            }
        }
    }
    Ok(entries
        .iter()
        .zip(&taken)
        .map(|(entry, taken)| Row::from_rounds(entry.name, taken))
        .collect())
}

fn machine() -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|l| l.starts_with("model name"))?;
        Some(line.split(':').nth(1)?.trim().to_owned())
    });
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or("unknown").to_owned();
    format!(
        "{}, {cores} cores, load {load} at the end",
        cpu.unwrap_or_else(|| std::env::consts::ARCH.into())
    )
}

fn commit() -> String {
    let output = std::process::Command::new("git")
        .args([
            "-C",
            env!("CARGO_MANIFEST_DIR"),
            "describe",
            "--always",
            "--dirty",
            "--abbrev=12",
        ])
        .output();
    output.ok().filter(|o| o.status.success()).map_or_else(
        || "unknown".into(),
        |o| String::from_utf8_lossy(&o.stdout).trim().to_owned(),
    )
}
