//! Tables with lengths only: a head line, then a time and two lengths a row, as in the Azure LLM inference traces.

use super::Row;
use super::read::{LENGTH_MAX, TraceError, bad};
use crate::engine_model::Micros;

/// A table with a column for the time and one for each length.
pub(super) struct Table {
    time: usize,
    input: usize,
    output: usize,
    origin: Option<f64>,
}

impl Table {
    pub(super) fn head(text: &str) -> Result<Self, TraceError> {
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

    pub(super) fn row(&mut self, line: usize, text: &str) -> Result<Row, TraceError> {
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
            last: 0,
            session: 0,
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
