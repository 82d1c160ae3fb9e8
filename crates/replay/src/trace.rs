//! Request traces: when requests come, how long they are, and which leading blocks they share.

mod decisions;
mod dynamo;
mod read;
mod rows;
mod sessions;
mod synthetic;
mod table;
mod tar;

use std::collections::HashMap;

pub use read::{READ_BYTES_MAX, TraceError, read};
pub use synthetic::{SYNTHETIC_NAMES, synthetic};

use crate::engine_model::hash::Spread;
use crate::engine_model::{EngineHash, Micros, Timing};

/// One request of a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// When it comes, from the trace's start.
    pub at: Micros,
    /// Prompt tokens; at least 1.
    pub input: u32,
    /// Answer tokens; at least 1.
    pub output: u32,
    /// Its last known block, a number from [`Chains`]; 0 where none is known.
    pub last: u32,
    /// Its session by number, 0 for none; [`Trace::session`] gives the name.
    pub session: u32,
}

/// Blocks of a trace as a tree: a block is its predecessor and its id, so equal numbers mean equal content and history.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chains {
    /// (predecessor, depth) of each block; number 0 is the root, at depth 0.
    blocks: Vec<(u32, u32)>,
}

impl Chains {
    /// Blocks from the chain's start up to and including `last`.
    #[must_use]
    pub fn depth(&self, last: u32) -> u32 {
        self.blocks[last as usize].1
    }

    /// Numbers of a chain's blocks, first block first.
    pub fn path(&self, last: u32, out: &mut Vec<u32>) {
        out.clear();
        let mut at = last;
        while at != 0 {
            out.push(at);
            at = self.blocks[at as usize].0;
        }
        out.reverse();
    }

    /// Different blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len() - 1
    }

    /// Whether no block is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A trace in order of arrival.
#[derive(Clone, PartialEq, Debug)]
pub struct Trace {
    /// What reports call it.
    pub name: String,
    /// Tokens that one block stands for.
    pub block: u32,
    /// Its requests.
    pub rows: Vec<Row>,
    /// Its blocks.
    pub chains: Chains,
    /// Names of sessions.
    pub sessions: Vec<String>,
    /// Costs of the engines that the trace describes, where it says so; the default model then takes them.
    pub timing: Option<Timing>,
}

impl Trace {
    /// Name of a row's session; empty for none.
    #[must_use]
    pub fn session(&self, row: &Row) -> &str {
        match row.session {
            0 => "",
            number => &self.sessions[number as usize - 1],
        }
    }

    /// Prompt tokens of the whole trace.
    #[must_use]
    pub fn prompt_tokens(&self) -> u64 {
        self.rows.iter().map(|row| u64::from(row.input)).sum()
    }

    /// Share of prompt tokens that a cache which never forgets would serve, in order of arrival.
    #[must_use]
    pub fn oracle_hit(&self) -> f64 {
        let hits: u64 = self.oracle_tokens().iter().map(|tokens| u64::from(*tokens)).sum();
        hits as f64 / self.prompt_tokens().max(1) as f64
    }

    /// Leading tokens of each row that an earlier row had; at least the last token of a prompt is always computed.
    #[must_use]
    pub fn oracle_tokens(&self) -> Vec<u32> {
        let mut seen = vec![false; self.chains.blocks.len()];
        seen[0] = true;
        let mut out = Vec::with_capacity(self.rows.len());
        for row in &self.rows {
            let mut at = row.last;
            // What was seen is closed towards the root.
            while !seen[at as usize] {
                seen[at as usize] = true;
                at = self.chains.blocks[at as usize].0;
            }
            out.push((self.chains.depth(at) * self.block).min(row.input - 1));
        }
        out
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

    /// The trace with `tokens` of one prefix at the start of `percent` of its prompts; the rest of each prompt stays.
    #[must_use]
    pub fn with_hot_prefix(mut self, percent: u64, tokens: u32) -> Self {
        let mut builder = Builder::new();
        let mut path = Vec::new();
        let blocks = tokens / self.block;
        for (index, row) in self.rows.iter_mut().enumerate() {
            self.chains.path(row.last, &mut path);
            let hot = mix(index as u64) % 100 < percent;
            let start = (0..if hot { blocks } else { 0 }).map(|at| OWN | u64::from(at));
            row.last = builder.chain(start.chain(path.iter().map(|number| u64::from(*number))));
            if hot {
                row.input += blocks * self.block;
            }
        }
        self.chains = builder.chains;
        self
    }

    /// A row's full blocks of `size` tokens by name; `path` holds its blocks' numbers.
    pub fn name_blocks(&self, index: usize, size: u32, path: &[u32], out: &mut Vec<EngineHash>) {
        out.clear();
        let row = &self.rows[index];
        for block in 0..row.input / size {
            // A block is named by where it ends: whoever ends there has the same history.
            let within = ((block + 1) * size - 1) / self.block;
            let end = path
                .get(within as usize)
                .map_or(OWN | index as u64, |number| u64::from(*number));
            out.push(EngineHash(mix(mix(end) ^ u64::from(block))));
        }
    }
}

/// Tells what is a row's own from numbers of blocks.
const OWN: u64 = 1 << 63;

/// One step of SplitMix64 (Steele, Lea, Flood 2014).
fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

type Lookup<K> = HashMap<K, u32, std::hash::BuildHasherDefault<Spread>>;

/// Gathers rows and their blocks.
pub(crate) struct Builder {
    rows: Vec<Row>,
    chains: Chains,
    known: Lookup<(u32, u64)>,
    /// Chains of one id, by what they follow and the id.
    runs: HashMap<(u32, u64), Vec<u32>, std::hash::BuildHasherDefault<Spread>>,
    sessions: Vec<String>,
    session_numbers: HashMap<String, u32>,
}

impl Builder {
    pub(crate) fn new() -> Self {
        Self {
            rows: Vec::new(),
            chains: Chains { blocks: vec![(0, 0)] },
            known: Lookup::default(),
            runs: HashMap::default(),
            sessions: Vec::new(),
            session_numbers: HashMap::new(),
        }
    }

    /// Number of the last block of a chain of ids.
    pub(crate) fn chain(&mut self, ids: impl IntoIterator<Item = u64>) -> u32 {
        let mut at = 0;
        for id in ids {
            let blocks = &mut self.chains.blocks;
            at = *self.known.entry((at, id)).or_insert_with(|| {
                blocks.push((at, blocks[at as usize].1 + 1));
                (blocks.len() - 1) as u32
            });
        }
        at
    }

    /// Number of the last of `count` blocks of one id that follow `from`; not to be mixed with [`Builder::chain`].
    pub(crate) fn run(&mut self, from: u32, id: u64, count: u32) -> u32 {
        if count == 0 {
            return from;
        }
        let run = self.runs.entry((from, id)).or_default();
        let blocks = &mut self.chains.blocks;
        while run.len() < count as usize {
            let before = run.last().copied().unwrap_or(from);
            blocks.push((before, blocks[before as usize].1 + 1));
            run.push((blocks.len() - 1) as u32);
        }
        run[count as usize - 1]
    }

    /// Number of a session's name.
    pub(crate) fn session(&mut self, name: &str) -> u32 {
        if let Some(number) = self.session_numbers.get(name) {
            return *number;
        }
        self.sessions.push(name.to_owned());
        let number = self.sessions.len() as u32;
        self.session_numbers.insert(name.to_owned(), number);
        number
    }

    /// One more request.
    pub(crate) fn push(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// Rows so far.
    pub(crate) fn rows(&self) -> &[Row] {
        &self.rows
    }

    pub(crate) fn chains(&self) -> &Chains {
        &self.chains
    }

    /// Puts rows in order of arrival, from 0 on, and cuts chains that are longer than their prompts.
    pub(crate) fn build(mut self, name: &str, block: u32) -> Trace {
        self.rows.sort_by_key(|row| row.at);
        let first = self.rows.first().map_or(0, |row| row.at.0);
        for row in &mut self.rows {
            row.at.0 -= first;
            let most = row.input.div_ceil(block);
            while self.chains.depth(row.last) > most {
                row.last = self.chains.blocks[row.last as usize].0;
            }
        }
        Trace {
            name: name.to_owned(),
            block,
            rows: self.rows,
            chains: self.chains,
            sessions: self.sessions,
            timing: None,
        }
    }
}
