//! Cairn's own decision log: arrival and lengths of what a router decided. Records hold no keys, so nothing is shared.

use cairn_routing::DecisionRecord;
use serde_json::Value;

use super::read::{TraceError, bad};
use super::{Builder, Row};
use crate::engine_model::Micros;

/// Length of an answer that the router couldn't know beforehand, in tokens.
const ANSWER_UNKNOWN: u32 = 256;

/// Takes one decision, plain or as the router's page shows it.
pub(super) fn decision(line: usize, text: &str, builder: &mut Builder) -> Result<(), TraceError> {
    let mut value: Value =
        serde_json::from_str(text).map_err(|error| bad(line, "the line", format!("is not JSON: {error}")))?;
    let record = match value.get_mut("record") {
        Some(record) => record.take(),
        None => value,
    };
    let record: DecisionRecord =
        serde_json::from_value(record).map_err(|error| bad(line, "record", format!("isn't a decision: {error}")))?;
    let expected = record.candidates.first().map_or(0, |c| c.inputs.expected_output);
    builder.push(Row {
        at: Micros(record.at_us.0),
        input: record.prompt_tokens.max(1),
        output: if expected > 0 { expected } else { ANSWER_UNKNOWN },
        last: 0,
        session: 0,
    });
    Ok(())
}
