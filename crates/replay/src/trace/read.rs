//! Traces from files: which format it is, plain, gzipped or an archive of several.

use std::io::{BufRead, BufReader, Read};

use serde::Deserialize;
use serde_json::value::RawValue;

use super::table::Table;
use super::{Builder, Trace, decisions, dynamo, rows, sessions, tar};

/// Largest trace in bytes, unpacked: a few million requests.
pub const READ_BYTES_MAX: u64 = 8 << 30;
/// Longest prompt or answer in tokens.
pub(super) const LENGTH_MAX: u64 = 1 << 24;
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
    /// A member of an archive can't be read.
    #[error("{member}: {source}")]
    Member {
        /// Its name.
        member: String,
        /// Why.
        source: Box<TraceError>,
    },
    /// No size fits the ids of every row.
    #[error(
        "line {line}: hash_ids fits no block size of 512, 128, 64 or 16 tokens: {ids} ids for {input} tokens; give the size with --trace-block"
    )]
    BlockSize {
        /// The first row that the best size doesn't fit.
        line: usize,
        /// Its ids.
        ids: u32,
        /// Its prompt.
        input: u32,
    },
    /// Nothing in it.
    #[error("the trace has no requests")]
    Empty,
}

pub(super) fn bad(line: usize, field: &'static str, problem: impl Into<String>) -> TraceError {
    TraceError::Line {
        line,
        field,
        problem: problem.into(),
    }
}

/// Reads a trace; gzip and tar are recognised by their marks, the format by its first line. `block` is found out where
/// `None`.
pub fn read(name: &str, input: impl Read, block: Option<u32>) -> Result<Trace, TraceError> {
    let mut input = BufReader::new(input);
    let start = input
        .fill_buf()
        .map_err(|source| TraceError::Read { line: 0, source })?;
    let mut text: Box<dyn BufRead + '_> = if start.starts_with(&[0x1f, 0x8b]) {
        Box::new(BufReader::with_capacity(
            1 << 16,
            flate2::read::MultiGzDecoder::new(input).take(READ_BYTES_MAX),
        ))
    } else {
        Box::new(input.take(READ_BYTES_MAX))
    };
    let mut reading = Reading::new();
    let start = text.fill_buf().map_err(|source| TraceError::Read { line: 0, source })?;
    if tar::is_archive(start) {
        tar::each_member(text, |member, content| {
            let read = reading.lines(content);
            read.map_err(|source| TraceError::Member {
                member: member.to_owned(),
                source: Box::new(source),
            })
        })?;
    } else {
        reading.lines(text)?;
    }
    reading.finish(name, block)
}

/// Which lines a file has.
enum Format {
    Rows,
    Table(Table),
    Sessions,
    Dynamo,
    Decisions,
}

struct Reading {
    builder: Builder,
    sessions: sessions::Clock,
    /// Tokens an id, where the lines say it.
    block: Option<u32>,
    /// Whether ids may stand for a partial last block, so that the size has to be found out.
    infer: bool,
}

/// What tells JSON formats apart.
#[derive(Deserialize)]
struct Marks<'a> {
    #[serde(borrow)]
    requests: Option<&'a RawValue>,
    #[serde(borrow)]
    event: Option<&'a RawValue>,
    #[serde(borrow)]
    record: Option<&'a RawValue>,
    #[serde(borrow)]
    candidates: Option<&'a RawValue>,
}

impl Format {
    fn of(line: usize, text: &str) -> Result<Self, TraceError> {
        if !text.starts_with('{') {
            return Ok(Self::Table(Table::head(text)?));
        }
        let marks: Marks<'_> =
            serde_json::from_str(text).map_err(|error| bad(line, "the line", format!("is not JSON: {error}")))?;
        Ok(match marks {
            Marks { requests: Some(_), .. } => Self::Sessions,
            Marks { event: Some(_), .. } => Self::Dynamo,
            Marks { record: Some(_), .. }
            | Marks {
                candidates: Some(_), ..
            } => Self::Decisions,
            Marks { .. } => Self::Rows,
        })
    }
}

impl Reading {
    fn new() -> Self {
        Self {
            builder: Builder::new(),
            sessions: sessions::Clock::new(),
            block: None,
            infer: false,
        }
    }

    fn lines(&mut self, input: impl BufRead) -> Result<(), TraceError> {
        let mut format: Option<Format> = None;
        for (at, line) in input.lines().enumerate() {
            let number = at + 1;
            let line = line.map_err(|source| TraceError::Read { line: number, source })?;
            let text = line.trim();
            if text.is_empty() {
                continue;
            }
            let known = match &mut format {
                Some(known) => known,
                None => {
                    let found = format.insert(Format::of(number, text)?);
                    if matches!(found, Format::Table(_)) {
                        continue;
                    }
                    found
                }
            };
            let builder = &mut self.builder;
            match known {
                Format::Rows => {
                    self.infer = true;
                    rows::row(number, text, builder)?;
                }
                Format::Table(table) => {
                    let row = table.row(number, text)?;
                    builder.push(row);
                }
                Format::Sessions => self.block = sessions::session(number, text, &mut self.sessions, builder)?.into(),
                Format::Dynamo => self.block = dynamo::event(number, text, builder)?.or(self.block),
                Format::Decisions => decisions::decision(number, text, builder)?,
            }
        }
        Ok(())
    }

    fn finish(self, name: &str, block: Option<u32>) -> Result<Trace, TraceError> {
        if self.builder.rows().is_empty() {
            return Err(TraceError::Empty);
        }
        let block = match block.or(self.block) {
            Some(block) => block,
            None if self.infer => infer(&self.builder)?,
            None => BLOCKS[0],
        };
        Ok(self.builder.build(name, block))
    }
}

/// The size at which every row has as many ids as full blocks, or one more for a partial last block.
fn infer(builder: &Builder) -> Result<u32, TraceError> {
    let (rows, chains) = (builder.rows(), builder.chains());
    if chains.is_empty() {
        return Ok(BLOCKS[0]);
    }
    let misfit = |size: u32, up: bool| {
        rows.iter().position(|row| {
            let blocks = if up { row.input.div_ceil(size) } else { row.input / size };
            let ids = chains.depth(row.last);
            // A row of length 0 was lifted to 1.
            ids != blocks && !(row.input == 1 && ids == 0)
        })
    };
    let mut latest = 0;
    for size in BLOCKS {
        for up in [true, false] {
            match misfit(size, up) {
                None => return Ok(size),
                Some(at) => latest = latest.max(at),
            }
        }
    }
    Err(TraceError::BlockSize {
        line: latest + 1,
        ids: chains.depth(rows[latest].last),
        input: rows[latest].input,
    })
}

#[cfg(test)]
#[path = "read/tests.rs"]
mod tests;
