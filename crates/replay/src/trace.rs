//! Request traces: when requests come, how long they are, and which leading blocks they share.

mod read;
mod synthetic;

use cairn_blocks::Token;

pub use read::{READ_BYTES_MAX, TraceError, read};
pub use synthetic::{SYNTHETIC_NAMES, synthetic};

use crate::engine_model::Micros;

/// One request of a trace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Row {
    /// When it comes, from the trace's start.
    pub at: Micros,
    /// Prompt tokens; at least 1.
    pub input: u32,
    /// Answer tokens; at least 1.
    pub output: u32,
    /// Ids of its blocks of `Trace::block` tokens; equal ids mean equal content and equal history.
    pub blocks: Vec<u64>,
    /// Session, where the trace names one.
    pub session: Option<String>,
}

/// A trace in order of arrival.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Trace {
    /// What reports call it.
    pub name: String,
    /// Tokens that one id stands for.
    pub block: u32,
    /// Its requests.
    pub rows: Vec<Row>,
}

impl Trace {
    /// The prompt of a row as tokens: equal ids give equal tokens, and what no id covers is the row's own.
    #[must_use]
    pub fn prompt(&self, index: usize) -> Vec<Token> {
        let row = &self.rows[index];
        let mut tokens = Vec::with_capacity(row.input as usize);
        for id in &row.blocks {
            let left = row.input as usize - tokens.len();
            push(&mut tokens, *id ^ SHARED, left.min(self.block as usize));
        }
        let left = row.input as usize - tokens.len();
        push(&mut tokens, index as u64 ^ OWN, left);
        tokens
    }

    /// Prompt tokens of the whole trace.
    #[must_use]
    pub fn prompt_tokens(&self) -> u64 {
        self.rows.iter().map(|row| u64::from(row.input)).sum()
    }

    /// Share of prompt tokens that a cache which never forgets would serve, in order of arrival.
    #[must_use]
    pub fn oracle_hit(&self) -> f64 {
        let mut seen = std::collections::HashSet::new();
        let mut hits = 0u64;
        for row in &self.rows {
            let run = row.blocks.iter().take_while(|id| seen.contains(*id)).count() as u64;
            hits += (run * u64::from(self.block)).min(u64::from(row.input).saturating_sub(1));
            seen.extend(row.blocks.iter().copied());
        }
        hits as f64 / self.prompt_tokens().max(1) as f64
    }

    /// The trace with its time compressed by `speed` (2 is twice as fast).
    #[must_use]
    pub fn faster(mut self, speed: f64) -> Self {
        if speed.is_finite() && speed > 0.0 {
            for row in &mut self.rows {
                row.at = Micros((row.at.0 as f64 / speed) as u64);
            }
        }
        self
    }
}

/// Tells ids of shared blocks from row numbers.
const SHARED: u64 = 0x5eed_0000_0000_0000;
/// See [`SHARED`].
const OWN: u64 = 0x0e17_0000_0000_0000;

fn push(tokens: &mut Vec<Token>, id: u64, count: usize) {
    let mut state = id.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (id >> 29);
    tokens.extend((0..count).map(|_| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        ((state ^ (state >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 34) as Token
    }));
}
