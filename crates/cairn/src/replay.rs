//! `cairn replay`: a trace through a simulated fleet under any policies, with the code that decides in routers.

mod advise;
mod args;
mod model;
mod progress;
mod run;
mod source;
mod verify;

use std::time::Instant;

use anyhow::Context;
use cairn_replay::{Difference, Report};

pub use self::args::ReplayArgs;
pub use self::source::open as open_trace;
use crate::output;

/// Replays and prints.
pub fn run(args: ReplayArgs) -> anyhow::Result<()> {
    if args.show_model {
        return model::show(&args);
    }
    if let Some(file) = &args.verify {
        return verify::run(file, args.json);
    }
    let options = args.options()?;
    let policies = args.policies()?;
    let trace = options.scenario.shape(args.open()?);
    if args.advise {
        return advise::run(&trace, &args, &options);
    }
    let started = Instant::now();
    let runs = run::all(&trace, &policies, &args, &options)?;
    let report = Report::new(&trace, runs);
    if let Some(file) = &args.html {
        std::fs::write(file, report.html()).with_context(|| format!("writing {}", file.display()))?;
    }
    let differences = if args.compare.is_some() {
        report.compare()
    } else {
        Vec::new()
    };
    if args.json {
        let mut value = serde_json::to_value(&report)?;
        if args.compare.is_some() {
            value["compare"] = serde_json::to_value(&differences)?;
        }
        output::line(serde_json::to_string(&value)?);
    } else if args.compare.is_some() {
        side_by_side(&report, &policies, &differences);
    } else {
        output::line(report.table().trim_end());
        output::note(format!("{:.1} s", started.elapsed().as_secs_f64()));
    }
    Ok(())
}

fn side_by_side(report: &Report, policies: &[args::Asked], differences: &[Difference]) {
    let name = |at: usize| policies.get(at).map_or_else(String::new, |asked| asked.label.clone());
    let mut rows = vec![vec!["figure".into(), name(0), name(1), "change".into()]];
    for difference in differences {
        let interval = difference
            .plus_minus
            .map_or_else(String::new, |half| format!(" ± {half:.1}"));
        rows.push(vec![
            difference.figure.clone(),
            format!("{:.3}", difference.first),
            format!("{:.3}", difference.second),
            format!("{:+.1} %{interval}", difference.percent),
        ]);
    }
    output::table(&rows);
    output::line(&report.verdict);
}
