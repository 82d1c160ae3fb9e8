//! Request bodies of a given size: a shared system message and a user message that was never sent before.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::json;

/// How many system messages requests share.
pub const SYSTEM_MESSAGES: usize = 64;
/// Name of the model that the mock engines serve.
pub const MODEL: &str = "bench-model";

const WORDS: [&str; 48] = [
    "the",
    "engine",
    "holds",
    "a",
    "block",
    "of",
    "tokens",
    "and",
    "every",
    "request",
    "that",
    "shares",
    "its",
    "prefix",
    "can",
    "reuse",
    "it",
    "when",
    "router",
    "knows",
    "where",
    "this",
    "copy",
    "lies",
    "while",
    "load",
    "changes",
    "from",
    "one",
    "moment",
    "to",
    "next",
    "so",
    "operators",
    "look",
    "at",
    "queue",
    "lengths",
    "before",
    "they",
    "decide",
    "which",
    "machine",
    "answers",
    "first",
    "without",
    "waiting",
    "again",
];

/// What share of a body may have been seen before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// One of [`SYSTEM_MESSAGES`] starts, and a fresh end.
    Shared,
    /// Nothing.
    Unique,
}

impl Sharing {
    /// As the JSON says it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::Unique => "unique",
        }
    }
}

/// Makes bodies; the same seed makes the same ones.
pub struct Prompts {
    rng: SmallRng,
    systems: Vec<String>,
    bytes: usize,
    sharing: Sharing,
    stream: bool,
}

/// Bytes of the user message for a body of `bytes`.
fn user_bytes(bytes: usize) -> usize {
    (bytes / 4).min(1024)
}

/// The system messages of bodies of `bytes`.
pub fn system_messages(bytes: usize) -> Vec<String> {
    let mut rng = SmallRng::seed_from_u64(bytes as u64);
    (0..SYSTEM_MESSAGES)
        .map(|_| text(&mut rng, bytes - user_bytes(bytes)))
        .collect()
}

fn text(rng: &mut SmallRng, bytes: usize) -> String {
    let mut out = String::with_capacity(bytes + 16);
    while out.len() < bytes {
        if !out.is_empty() {
            out.push(' ');
        }
        out.push_str(WORDS[rng.random_range(0..WORDS.len())]);
        if rng.random_ratio(1, 12) {
            out.push('.');
        }
        if rng.random_ratio(1, 40) {
            out.push_str(&format!(" {}", rng.random_range(0..100_000)));
        }
    }
    out.truncate(bytes);
    out
}

impl Prompts {
    /// Bodies whose prompt text has `bytes` bytes.
    pub fn new(seed: u64, bytes: usize, sharing: Sharing, stream: bool) -> Self {
        Self {
            rng: SmallRng::seed_from_u64(seed),
            systems: system_messages(bytes),
            bytes,
            sharing,
            stream,
        }
    }

    /// The next body.
    pub fn next_body(&mut self) -> Vec<u8> {
        let fresh;
        let system = match self.sharing {
            Sharing::Shared => &self.systems[self.rng.random_range(0..SYSTEM_MESSAGES)],
            Sharing::Unique => {
                fresh = text(&mut self.rng, self.bytes - user_bytes(self.bytes));
                &fresh
            }
        };
        let user = format!(
            "{:016x} {}",
            self.rng.random::<u64>(),
            text(&mut self.rng, user_bytes(self.bytes))
        );
        let body = json!({
            "model": MODEL,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
            "max_tokens": 16,
            "stream": self.stream,
        });
        body.to_string().into_bytes()
    }
}
