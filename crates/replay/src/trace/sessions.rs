//! Coding-agent sessions, one JSON object each: requests at times within the session, nested ones of sub-agents, blocks by
//! ids that are local to the session, listed (`hash_ids`) or as ranges (`hr`: `[[first, count], ...]`).
//!
//! Such files don't say when a session began: sessions start by a Poisson process of mean [`START_MEAN_S`]. Nor do they
//! say what two sessions share: tools and system prompt count as equal where model and both lengths are.

use serde_json::Value;

use super::read::{LENGTH_MAX, TraceError, bad};
use super::synthetic::Draw;
use super::{Builder, Row, mix};
use crate::engine_model::Micros;

/// Mean seconds between two sessions' starts: about a hundred sessions an hour.
const START_MEAN_S: f64 = 45.0;
/// Seed of the starts.
const START_SEED: u64 = 7;
/// Sub-agents within sub-agents.
const NESTING_MAX: u32 = 8;

/// When sessions start.
pub(super) struct Clock {
    draw: Draw,
    at_s: f64,
    sessions: u64,
}

impl Clock {
    pub(super) fn new() -> Self {
        Self {
            draw: Draw::new(START_SEED),
            at_s: 0.0,
            sessions: 0,
        }
    }
}

/// What all requests of one (sub-)session have in common.
struct Scope {
    session: u64,
    name: String,
    model: String,
    /// Blocks of tools and system prompt, and what names them.
    shared: (usize, u64),
    block: u32,
    start_s: f64,
    depth: u32,
}

/// Takes one session; gives its block size.
pub(super) fn session(line: usize, text: &str, clock: &mut Clock, builder: &mut Builder) -> Result<u32, TraceError> {
    let value: Value =
        serde_json::from_str(text).map_err(|error| bad(line, "the line", format!("is not JSON: {error}")))?;
    clock.at_s += clock.draw.exponential(START_MEAN_S);
    clock.sessions += 1;
    let block = first(&value, &["B", "block_size"])
        .and_then(Value::as_u64)
        .unwrap_or(64);
    if !(1..=4_096).contains(&block) {
        return Err(bad(line, "block_size", format!("is {block}; give 1 to 4096 tokens")));
    }
    let models = value.get("models").and_then(|m| m.get(0));
    let model = value
        .get("model")
        .or(models)
        .and_then(Value::as_str)
        .unwrap_or_default();
    let name = value.get("id").and_then(Value::as_str).unwrap_or_default();
    let mut scope = Scope {
        session: clock.sessions,
        name: if name.is_empty() {
            format!("session {}", clock.sessions)
        } else {
            name.to_owned()
        },
        model: model.to_owned(),
        shared: (0, 0),
        block: block as u32,
        start_s: clock.at_s,
        depth: 0,
    };
    scope.share(&value);
    requests(line, &value, &scope, builder)?;
    Ok(block as u32)
}

fn first<'a>(value: &'a Value, names: &[&str]) -> Option<&'a Value> {
    names.iter().find_map(|name| value.get(name))
}

impl Scope {
    fn share(&mut self, value: &Value) {
        let length = |names: &[&str]| first(value, names).and_then(Value::as_u64).unwrap_or(0);
        let (tool, system) = (length(&["tool", "tool_tokens"]), length(&["sys", "system_tokens"]));
        let blocks = (tool + system).min(LENGTH_MAX) / u64::from(self.block);
        let mut name = mix(tool) ^ mix(!system);
        for byte in self.model.bytes() {
            name = mix(name ^ u64::from(byte));
        }
        self.shared = (blocks as usize, name | 1 << 63);
    }
}

fn requests(line: usize, value: &Value, scope: &Scope, builder: &mut Builder) -> Result<(), TraceError> {
    let list = value.get("requests").and_then(Value::as_array);
    let list = list.ok_or_else(|| bad(line, "requests", "has to be a list"))?;
    for request in list {
        let at = request
            .get("t")
            .and_then(Value::as_f64)
            .filter(|t| t.is_finite() && *t >= 0.0);
        let at = at.ok_or_else(|| bad(line, "requests.t", "has to be seconds from 0"))? + scope.start_s;
        if request.get("requests").is_some() {
            if scope.depth >= NESTING_MAX {
                return Err(bad(line, "requests", format!("is nested deeper than {NESTING_MAX}")));
            }
            let agent = first(request, &["sub", "agent_id"])
                .and_then(Value::as_str)
                .unwrap_or("agent");
            let mut inner = Scope {
                name: format!("{}/{agent}", scope.name),
                model: scope.model.clone(),
                start_s: at,
                depth: scope.depth + 1,
                ..*scope
            };
            inner.share(request);
            requests(line, request, &inner, builder)?;
            continue;
        }
        let input = length(line, "requests.in", request.get("in"))?;
        let output = length(line, "requests.out", request.get("out"))?;
        let ids = ids(line, request, input / scope.block)?;
        let (shared, name) = scope.shared;
        let last = builder.chain(ids.into_iter().enumerate().map(|(at, id)| {
            if at < shared {
                mix(name ^ at as u64)
            } else {
                mix(mix(scope.session) ^ id)
            }
        }));
        let session = builder.session(&scope.name);
        builder.push(Row {
            at: Micros::from_seconds(at),
            input: input.max(1),
            output: output.max(1),
            last,
            session,
        });
    }
    Ok(())
}

fn length(line: usize, field: &'static str, value: Option<&Value>) -> Result<u32, TraceError> {
    let value = value.ok_or_else(|| bad(line, field, "is missing"))?;
    let length = value.as_u64().filter(|n| *n <= LENGTH_MAX);
    length
        .map(|n| n as u32)
        .ok_or_else(|| bad(line, field, format!("is {value}; it has to be 0 to {LENGTH_MAX}")))
}

/// At most `most` ids of a request.
fn ids(line: usize, request: &Value, most: u32) -> Result<Vec<u64>, TraceError> {
    let wrong = |field| bad(line, field, "has to hold whole numbers from 0");
    let mut ids = Vec::with_capacity(most as usize);
    match (request.get("hash_ids"), request.get("hr")) {
        (Some(list), _) => {
            let list = list.as_array().ok_or_else(|| wrong("requests.hash_ids"))?;
            for id in list.iter().take(most as usize) {
                ids.push(id.as_u64().ok_or_else(|| wrong("requests.hash_ids"))?);
            }
        }
        (None, Some(ranges)) => {
            for range in ranges.as_array().ok_or_else(|| wrong("requests.hr"))? {
                let at = |i| range.get(i).and_then(Value::as_u64).ok_or_else(|| wrong("requests.hr"));
                let (first, count) = (at(0)?, at(1)?);
                let left = most as usize - ids.len();
                ids.extend((0..count).take(left).map(|i| first.wrapping_add(i)));
            }
        }
        (None, None) => {}
    }
    Ok(ids)
}
