//! Traces from files: Mooncake-shaped JSON lines, plain or gzipped, and tables with lengths only.

use std::io::{BufRead, BufReader, Read};

use serde_json::Value;

use super::{Row, Trace};
use crate::engine_model::Micros;

/// Largest trace in bytes, unpacked: a few million requests.
pub const READ_BYTES_MAX: u64 = 8 << 30;
/// Longest prompt or answer in tokens.
const LENGTH_MAX: u64 = 1 << 24;
/// Tokens for each id that are tried where the file doesn't say, most usual first.
const BLOCKS: [u32; 4] = [512, 64, 16, 128];

/// A trace that can't be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// Reading failed.
    #[error("line {line}: reading failed: {source}")]
    Read {
        /// Number of the line from 1.
        line: usize,
        /// Why.
        source: std::io::Error,
    },
    /// A line isn't what it should be.
    #[error("line {line}: {field} {problem}")]
    Line {
        /// Number of the line from 1.
        line: usize,
        /// Which field.
        field: &'static str,
        /// What is wrong and what is expected.
        problem: String,
    },
    /// No size fits the ids of every row.
    #[error("hash_ids fit no block size of 512, 128, 64 or 16 tokens; give the size")]
    BlockSize,
    /// Nothing in it.
    #[error("the trace has no requests")]
    Empty,
}

fn bad(line: usize, field: &'static str, problem: impl Into<String>) -> TraceError {
    TraceError::Line {
        line,
        field,
        problem: problem.into(),
    }
}

/// Reads a trace; gzip is recognised by its first bytes, a table by its head line. `block` is found out where `None`.
pub fn read(name: &str, input: impl Read, block: Option<u32>) -> Result<Trace, TraceError> {
    let mut input = BufReader::new(input);
    let start = input
        .fill_buf()
        .map_err(|source| TraceError::Read { line: 0, source })?;
    if start.starts_with(&[0x1f, 0x8b]) {
        return parse(
            name,
            BufReader::new(flate2::read::MultiGzDecoder::new(input).take(READ_BYTES_MAX)),
            block,
        );
    }
    parse(name, input.take(READ_BYTES_MAX), block)
}

fn parse(name: &str, input: impl BufRead, block: Option<u32>) -> Result<Trace, TraceError> {
    let mut rows = Vec::new();
    let mut table: Option<Table> = None;
    for (at, line) in input.lines().enumerate() {
        let number = at + 1;
        let line = line.map_err(|source| TraceError::Read { line: number, source })?;
        let text = line.trim();
        if text.is_empty() {
            continue;
        }
        if number == 1 && !text.starts_with('{') {
            table = Some(Table::head(text)?);
            continue;
        }
        rows.push(match &mut table {
            Some(table) => table.row(number, text)?,
            None => json_row(number, text)?,
        });
    }
    if rows.is_empty() {
        return Err(TraceError::Empty);
    }
    rows.sort_by_key(|row| row.at);
    let block = match block {
        Some(block) => block,
        None => infer(&rows)?,
    };
    for row in &mut rows {
        row.blocks.truncate(row.input.div_ceil(block) as usize);
    }
    Ok(Trace {
        name: name.to_owned(),
        block,
        rows,
    })
}

fn json_row(line: usize, text: &str) -> Result<Row, TraceError> {
    let value: Value =
        serde_json::from_str(text).map_err(|error| bad(line, "the line", format!("is not JSON: {error}")))?;
    let number = |field: &'static str| {
        let number = value.get(field).ok_or_else(|| bad(line, field, "is missing"))?;
        number
            .as_f64()
            .filter(|n| n.is_finite() && *n >= 0.0)
            .ok_or_else(|| bad(line, field, "has to be a number from 0"))
    };
    let length = |field: &'static str| {
        let length = number(field)?;
        if length > LENGTH_MAX as f64 {
            return Err(bad(line, field, format!("is {length}; the limit is {LENGTH_MAX}")));
        }
        // Some traces have rows of length 0; an engine computes at least one token.
        Ok((length as u32).max(1))
    };
    let blocks = match value.get("hash_ids") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(ids)) => ids
            .iter()
            .map(|id| {
                id.as_u64()
                    .ok_or_else(|| bad(line, "hash_ids", "has to hold whole numbers from 0"))
            })
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(bad(line, "hash_ids", "has to be a list")),
    };
    let session = match value.get("session_id") {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) => Some(text.clone()),
        Some(other) => Some(other.to_string()),
    };
    Ok(Row {
        at: Micros((number("timestamp")? * 1_000.0) as u64),
        input: length("input_length")?,
        output: length("output_length")?,
        blocks,
        session,
    })
}

/// The size at which every row has as many ids as full blocks, or one more for a partial last block.
fn infer(rows: &[Row]) -> Result<u32, TraceError> {
    if rows.iter().all(|row| row.blocks.is_empty()) {
        return Ok(BLOCKS[0]);
    }
    let fits = |size: u32, up: bool| {
        rows.iter().all(|row| {
            let blocks = if up { row.input.div_ceil(size) } else { row.input / size };
            // A row of length 0 was lifted to 1.
            row.blocks.len() as u32 == blocks || (row.input == 1 && row.blocks.is_empty())
        })
    };
    BLOCKS
        .into_iter()
        .find(|size| fits(*size, true) || fits(*size, false))
        .ok_or(TraceError::BlockSize)
}

/// A table with a column for the time and one for each length.
struct Table {
    time: usize,
    input: usize,
    output: usize,
    origin: Option<f64>,
}

impl Table {
    fn head(text: &str) -> Result<Self, TraceError> {
        let names: Vec<String> = text.split(',').map(|name| name.trim().to_ascii_lowercase()).collect();
        let find = |field: &'static str, known: &[&str]| {
            let at = names.iter().position(|name| known.contains(&name.as_str()));
            at.ok_or_else(|| {
                bad(
                    1,
                    field,
                    format!("has no column; one of {} is expected", known.join(", ")),
                )
            })
        };
        Ok(Self {
            time: find("time", &["timestamp", "time", "arrived"])?,
            input: find("input", &["contexttokens", "input_length", "input", "prompt_tokens"])?,
            output: find(
                "output",
                &["generatedtokens", "output_length", "output", "completion_tokens"],
            )?,
            origin: None,
        })
    }

    fn row(&mut self, line: usize, text: &str) -> Result<Row, TraceError> {
        let cells: Vec<&str> = text.split(',').map(str::trim).collect();
        let cell =
            |at: usize, field: &'static str| cells.get(at).copied().ok_or_else(|| bad(line, field, "is missing"));
        let length = |at: usize, field: &'static str| {
            let number = cell(at, field)?.parse::<u64>().ok().filter(|n| *n <= LENGTH_MAX);
            number
                .map(|n| (n as u32).max(1))
                .ok_or_else(|| bad(line, field, "has to be a whole number"))
        };
        let time = cell(self.time, "time")?;
        let seconds = time.parse::<f64>().ok().map(|ms| ms / 1e3).or_else(|| clock(time));
        let seconds = seconds.filter(|s| s.is_finite()).ok_or_else(|| {
            bad(
                line,
                "time",
                "has to be milliseconds, or a date and time such as 2023-11-16 18:17:03.97",
            )
        })?;
        let origin = *self.origin.get_or_insert(seconds);
        Ok(Row {
            at: Micros::from_seconds(seconds - origin),
            input: length(self.input, "input")?,
            output: length(self.output, "output")?,
            blocks: Vec::new(),
            session: None,
        })
    }
}

/// Seconds of `YYYY-MM-DD HH:MM:SS[.fraction]` from some fixed day.
fn clock(text: &str) -> Option<f64> {
    let (date, time) = text.split_once([' ', 'T'])?;
    let mut date = date.split('-').map(|part| part.parse::<i64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let mut time = time.trim_end_matches('Z').split(':');
    let (hour, minute): (f64, f64) = (time.next()?.parse().ok()?, time.next()?.parse().ok()?);
    let second: f64 = time.next()?.parse().ok()?;
    // Days by the civil calendar, with the year beginning in March.
    let (y, m) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let days = y * 365 + y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400) + (m * 153 + 2) / 5 + day;
    Some(days as f64 * 86_400.0 + hour * 3_600.0 + minute * 60.0 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_lines_give_rows_and_errors_name_line_and_field() {
        let text = "{\"timestamp\":0,\"input_length\":700,\"output_length\":5,\"hash_ids\":[0,1]}\n\
                    {\"timestamp\":27.5,\"input_length\":512,\"output_length\":0,\"hash_ids\":[0],\"session_id\":3}\n";
        let trace = read("t", text.as_bytes(), None).unwrap();
        assert_eq!(
            (trace.block, trace.rows.len(), trace.rows[1].at),
            (512, 2, Micros(27_500))
        );
        assert_eq!((trace.rows[1].output, trace.rows[1].session.as_deref()), (1, Some("3")));
        assert_eq!(trace.prompt(0)[..512], trace.prompt(1)[..]);
        assert!((trace.oracle_hit() - 511.0 / 1_212.0).abs() < 1e-9);
        for (line, names) in [
            (
                "{\"timestamp\":0,\"input_length\":-1,\"output_length\":1}",
                "line 1: input_length",
            ),
            (
                "{\"timestamp\":0,\"output_length\":1}",
                "line 1: input_length is missing",
            ),
            (
                "{\"timestamp\":0,\"input_length\":9,\"output_length\":1,\"hash_ids\":[-4]}",
                "hash_ids",
            ),
            ("{\"timestamp\"", "not JSON"),
            ("", "no requests"),
        ] {
            let error = read("t", line.as_bytes(), None).unwrap_err().to_string();
            assert!(error.contains(names), "{error}");
        }
    }

    #[test]
    fn tables_with_dates_and_without_a_final_newline_are_read() {
        let text =
            "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-30 23:59:59.5,10,2\r\n2023-12-01 00:00:01.0,20,3";
        let trace = read("t", text.as_bytes(), None).unwrap();
        assert_eq!((trace.rows[1].at, trace.rows[1].input), (Micros(1_500_000), 20));
        assert_eq!(trace.oracle_hit(), 0.0);
    }
}
