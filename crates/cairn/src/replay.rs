//! `cairn replay`: a trace through a simulated fleet under any policies, with the code that decides in routers.

mod args;
mod model;
mod progress;
mod run;
mod source;

use std::time::Instant;

use cairn_replay::Report;

pub use self::args::ReplayArgs;
use crate::output;

/// Replays and prints.
pub fn run(args: ReplayArgs) -> anyhow::Result<()> {
    if args.show_model {
        return model::show(&args);
    }
    let options = args.options()?;
    let policies = args.policies()?;
    let trace = options.scenario.shape(source::open(&args)?);
    let started = Instant::now();
    let runs = run::all(&trace, &policies, &args, &options)?;
    let report = Report::new(&trace, runs);
    if args.json {
        output::line(serde_json::to_string(&report)?);
    } else {
        output::line(report.table().trim_end());
        output::note(format!("{:.1} s", started.elapsed().as_secs_f64()));
    }
    Ok(())
}
