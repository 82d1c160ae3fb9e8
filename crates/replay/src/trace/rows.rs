//! Mooncake-shaped JSON lines: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`, and a `session_id` where there is one.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::read::{LENGTH_MAX, TraceError, bad};
use super::{Builder, Row};
use crate::engine_model::Micros;

/// Fields as they stand, so that an error can name the one that is wrong.
#[derive(Deserialize)]
struct Fields<'a> {
    #[serde(borrow)]
    timestamp: Option<&'a RawValue>,
    #[serde(borrow)]
    input_length: Option<&'a RawValue>,
    #[serde(borrow)]
    output_length: Option<&'a RawValue>,
    #[serde(borrow)]
    hash_ids: Option<&'a RawValue>,
    #[serde(borrow)]
    session_id: Option<&'a RawValue>,
}

pub(super) fn row(line: usize, text: &str, builder: &mut Builder) -> Result<(), TraceError> {
    let fields: Fields<'_> =
        serde_json::from_str(text).map_err(|error| bad(line, "the line", format!("is not JSON: {error}")))?;
    let ids: Vec<u64> = match fields.hash_ids {
        None => Vec::new(),
        Some(ids) if ids.get() == "null" => Vec::new(),
        Some(ids) => serde_json::from_str(ids.get()).map_err(|error| {
            bad(
                line,
                "hash_ids",
                format!("has to be a list of whole numbers from 0: {error}"),
            )
        })?,
    };
    let row = Row {
        at: Micros((number(line, "timestamp", fields.timestamp)? * 1_000.0) as u64),
        input: length(line, "input_length", fields.input_length)?,
        output: length(line, "output_length", fields.output_length)?,
        last: builder.chain(ids),
        session: match fields.session_id.map(RawValue::get) {
            None | Some("null") => 0,
            Some(text) => builder.session(text.trim_matches('"')),
        },
    };
    builder.push(row);
    Ok(())
}

fn number(line: usize, field: &'static str, value: Option<&RawValue>) -> Result<f64, TraceError> {
    let value = value.ok_or_else(|| bad(line, field, "is missing"))?;
    let number: Option<f64> = value.get().parse().ok();
    number
        .filter(|n| n.is_finite() && *n >= 0.0)
        .ok_or_else(|| bad(line, field, format!("is {}; it has to be a number from 0", value.get())))
}

/// Some traces have rows of length 0; an engine computes at least one token.
fn length(line: usize, field: &'static str, value: Option<&RawValue>) -> Result<u32, TraceError> {
    let length = number(line, field, value)?;
    if length > LENGTH_MAX as f64 {
        return Err(bad(line, field, format!("is {length}; the limit is {LENGTH_MAX}")));
    }
    Ok((length as u32).max(1))
}
