//! Dynamo's request trace (`dynamo.request.trace.v1`): events of which `request_end` describes a request.

use serde_json::Value;

use super::read::{LENGTH_MAX, TraceError, bad};
use super::{Builder, Row};
use crate::engine_model::Micros;

/// Takes one event; gives the block size that it names.
pub(super) fn event(line: usize, text: &str, builder: &mut Builder) -> Result<Option<u32>, TraceError> {
    let value: Value =
        serde_json::from_str(text).map_err(|error| bad(line, "the line", format!("is not JSON: {error}")))?;
    let event = value.get("event").ok_or_else(|| bad(line, "event", "is missing"))?;
    if event.get("event_type").and_then(Value::as_str) != Some("request_end") {
        return Ok(None);
    }
    let request = event.get("request").ok_or_else(|| bad(line, "request", "is missing"))?;
    let number = |field: &'static str, name: &str| {
        let value = request.get(name).ok_or_else(|| bad(line, field, "is missing"))?;
        value
            .as_u64()
            .ok_or_else(|| bad(line, field, format!("is {value}; it has to be a whole number from 0")))
    };
    let length = |field: &'static str, name: &str| {
        let length = number(field, name)?;
        if length > LENGTH_MAX {
            return Err(bad(line, field, format!("is {length}; the limit is {LENGTH_MAX}")));
        }
        Ok((length as u32).max(1))
    };
    let input = length("request.input_tokens", "input_tokens")?;
    let output = length("request.output_tokens", "output_tokens")?;
    let received = number("request.request_received_ms", "request_received_ms")?;
    let replay = request.get("replay");
    let hashes = replay
        .and_then(|r| r.get("input_sequence_hashes"))
        .and_then(Value::as_array);
    let ids = hashes.into_iter().flatten().map(|hash| {
        hash.as_u64()
            .ok_or_else(|| bad(line, "replay.input_sequence_hashes", "has to hold whole numbers from 0"))
    });
    let ids = ids.collect::<Result<Vec<u64>, TraceError>>()?;
    let session = event
        .get("agent_context")
        .and_then(|c| c.get("session_id"))
        .and_then(Value::as_str);
    let row = Row {
        at: Micros(received.saturating_mul(1_000)),
        input,
        output,
        last: builder.chain(ids),
        session: session.map_or(0, |name| builder.session(name)),
    };
    builder.push(row);
    let size = replay.and_then(|r| r.get("trace_block_size")).and_then(Value::as_u64);
    Ok(size.map(|size| size.clamp(1, 4_096) as u32))
}
