//! Prints what happened in one seed: `story SEED [WORD ...]` keeps lines that hold one of the words.
#![allow(clippy::print_stdout)]

use cairn_sim::{Plan, run};

fn main() {
    let mut args = std::env::args().skip(1);
    let Some(seed) = args.next().and_then(|seed| seed.parse().ok()) else {
        println!("name a seed");
        return;
    };
    let words: Vec<String> = args.collect();
    let plan = Plan::from_seed(seed).traced();
    println!("{plan:?}");
    let report = run(plan);
    for line in &report.trace.lines {
        if words.is_empty() || words.iter().any(|word| line.contains(word.as_str())) {
            println!("{line}");
        }
    }
    if let Some(violation) = &report.violation {
        println!("{violation}");
    }
}
