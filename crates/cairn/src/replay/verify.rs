//! `--verify`: recorded decisions are made again, bit by bit.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use anyhow::{Context, bail};
use cairn_routing::DecisionRecord;
use serde_json::{Deserializer, Value, json};

use crate::output;

/// Most bytes that are read.
const BYTES_MAX: u64 = 8 << 30;
/// Differences that are shown one by one.
const SHOWN: usize = 10;

/// Verifies every decision of a file.
pub fn run(file: &Path, as_json: bool) -> anyhow::Result<()> {
    let opened = File::open(file).with_context(|| format!("opening the decisions {}", file.display()))?;
    let input = BufReader::new(opened).take(BYTES_MAX);
    let (mut number, mut wrong) = (0usize, Vec::new());
    for value in Deserializer::from_reader(input).into_iter::<Value>() {
        let value = value.with_context(|| format!("{}: after decision {number}", file.display()))?;
        for record in records(value) {
            number += 1;
            let record: DecisionRecord = serde_json::from_value(record)
                .with_context(|| format!("{}: decision {number} is no record", file.display()))?;
            if let Err(error) = record.verify() {
                wrong.push(format!("decision {number}: {error}"));
            }
        }
    }
    if number == 0 {
        bail!("{} has no decisions", file.display());
    }
    if as_json {
        let shown: Vec<&String> = wrong.iter().take(SHOWN).collect();
        output::line(json!({"decisions": number, "wrong": wrong.len(), "first": shown}).to_string());
    }
    if wrong.is_empty() {
        if !as_json {
            output::line(format!("{number} decisions, every one made again as it was"));
        }
        return Ok(());
    }
    for text in wrong.iter().take(SHOWN) {
        output::note(text);
    }
    bail!("{} of {number} decisions come out otherwise than recorded", wrong.len())
}

/// The records in one value: itself, one wrapped with what the router tells besides, or a router's list.
fn records(value: Value) -> Vec<Value> {
    match value {
        Value::Array(list) => list.into_iter().flat_map(records).collect(),
        Value::Object(mut fields) => match (fields.remove("record"), fields.remove("decisions")) {
            (Some(record), _) => vec![record],
            (None, Some(list)) => records(list),
            (None, None) => vec![Value::Object(fields)],
        },
        other => vec![other],
    }
}
