//! The trace to replay: from a file, or made from a recipe.

use std::fs::File;
use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::{Context, bail};
use cairn_replay::trace::{SYNTHETIC_NAMES, Trace, read, synthetic};

/// Opens what `--trace` names: at most `requests` of it, `speed` times as fast.
pub fn open(
    source: &str,
    trace_block: Option<u32>,
    requests: Option<NonZeroUsize>,
    speed: f64,
) -> anyhow::Result<Trace> {
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
            read(&name, file, trace_block).with_context(|| format!("reading the trace {source}"))?
        }
    };
    if let Some(most) = requests {
        trace.rows.truncate(most.get());
    }
    Ok(trace.faster(speed))
}
