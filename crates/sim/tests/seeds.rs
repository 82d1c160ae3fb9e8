//! Plays many seeds; a seed that breaks an invariant is kept in `failing_seeds.txt` and played first from then on.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

use cairn_sim::{Plan, Report, run};

/// Seeds that are played unless `CAIRN_SIM_SEEDS` says otherwise.
const SEEDS: u64 = 1_000;
/// Invariants that must have been looked at.
const LOOKED_AT: [&str; 14] = [
    "INV-01", "INV-02", "INV-03", "INV-04", "INV-05", "INV-06", "INV-07", "INV-08", "INV-09", "INV-10", "INV-11",
    "INV-12", "INV-13", "INV-14",
];

fn kept_path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/failing_seeds.txt")
}

/// Seeds that broke something once, in the order in which they were found.
fn kept() -> Vec<u64> {
    let text = std::fs::read_to_string(kept_path()).unwrap_or_default();
    let seed = |line: &str| line.split('#').next().and_then(|s| s.trim().parse().ok());
    text.lines().filter_map(seed).collect()
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| {
        text.trim()
            .parse()
            .unwrap_or_else(|_| panic!("{name} is {text:?}; give a number of seeds, such as 1000"))
    })
}

/// The last lines before an invariant broke.
fn story(seed: u64) -> String {
    let report = run(Plan::from_seed(seed).traced());
    let mut text = String::new();
    for line in report.trace.lines.iter().rev().take(60).rev() {
        let _ = writeln!(text, "{line}");
    }
    text
}

#[derive(Default)]
struct Sum {
    seeds: u64,
    requests: u64,
    answered: u64,
    faults: u64,
    predicted: u64,
    cached: u64,
    events: u64,
    looked_at: BTreeMap<&'static str, u64>,
}

impl Sum {
    fn add(&mut self, report: &Report) {
        self.seeds += 1;
        self.requests += report.requests;
        self.answered += report.answered;
        self.faults += report.faults;
        self.predicted += report.predicted_tokens;
        self.cached += report.cached_tokens;
        self.events += report.events;
        for (invariant, n) in &report.looked_at {
            *self.looked_at.entry(invariant).or_default() += n;
        }
    }
}

#[test]
fn no_seed_breaks_an_invariant() {
    let (first, n) = (number("CAIRN_SIM_FIRST", 1), number("CAIRN_SIM_SEEDS", SEEDS));
    let before = kept();
    let known: BTreeSet<u64> = before.iter().copied().collect();
    let fresh = (first..first.saturating_add(n)).filter(|seed| !known.contains(seed));
    let mut sum = Sum::default();
    let mut broken = Vec::new();
    for seed in before.iter().copied().chain(fresh) {
        let report = run(Plan::from_seed(seed));
        if let Some(violation) = &report.violation {
            eprintln!("seed {seed}: {violation}");
            broken.push((seed, violation.clone()));
            if broken.len() >= 10 {
                break;
            }
        }
        sum.add(&report);
    }
    let new: Vec<_> = broken.iter().filter(|(seed, _)| !known.contains(seed)).collect();
    if !new.is_empty() {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(kept_path());
        match file {
            Ok(mut file) => {
                for (seed, violation) in new {
                    let _ = writeln!(file, "{seed} # {}", violation.invariant);
                }
            }
            Err(error) => eprintln!("the failing seeds can't be kept in {}: {error}", kept_path().display()),
        }
    }
    println!(
        "{} seeds: {} events, {} faults, {} of {} requests answered, {} tokens predicted, {} reused, checks {:?}",
        sum.seeds, sum.events, sum.faults, sum.answered, sum.requests, sum.predicted, sum.cached, sum.looked_at
    );
    if let Some((seed, violation)) = broken.first() {
        panic!(
            "{} seeds broke an invariant; seed {seed}: {violation}\n{}",
            broken.len(),
            story(*seed)
        );
    }
    if n >= 100 {
        let unseen: Vec<_> = LOOKED_AT
            .iter()
            .filter(|id| !sum.looked_at.contains_key(**id))
            .collect();
        assert!(unseen.is_empty(), "never looked at: {unseen:?}");
        assert!(
            sum.answered * 100 >= sum.requests * 90,
            "faults leave most requests unharmed"
        );
    }
}
