//! The trace to replay: from a file, or made from a recipe.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, bail};
use cairn_replay::trace::{SYNTHETIC_NAMES, Trace, read, synthetic};

use super::args::ReplayArgs;

/// Opens what `--trace` names.
pub fn open(args: &ReplayArgs) -> anyhow::Result<Trace> {
    let source = args.trace.as_deref().context("--trace is missing")?;
    let mut trace = match source.strip_prefix("synthetic:") {
        Some(name) => match synthetic(name, 0) {
            Some(trace) => trace,
            None => bail!(
                "there is no synthetic workload {name:?}; the known ones are {}",
                SYNTHETIC_NAMES.join(", ")
            ),
        },
        None => {
            let file = File::open(source).with_context(|| format!("opening the trace {source}"))?;
            let name = Path::new(source)
                .file_name()
                .map_or(source.into(), |name| name.to_string_lossy());
            read(&name, file, args.trace_block).with_context(|| format!("reading the trace {source}"))?
        }
    };
    if let Some(most) = args.requests {
        trace.rows.truncate(most.get());
    }
    Ok(trace.faster(args.speed))
}
