//! Measures how fast text never seen before is encoded, and what a known start costs.

use crate::error::EncodeError;
use crate::model::ModelTokens;
use std::time::{Duration, Instant};

/// What a measurement shows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// Text never seen before, in megabytes (10^6 bytes) a second on one thread.
    pub unseen_mb_per_s: f64,
    /// One prompt of 32 KiB whose first 30 KiB were seen and whose rest wasn't.
    pub known_start: Duration,
    /// The same prompt again, all of it seen.
    pub known: Duration,
}

const PROMPT_BYTES: usize = 32 << 10;
const SHARED_BYTES: usize = 30 << 10;
const ROUNDS: usize = 64;

/// Text of made-up words, different for every seed.
fn text(seed: u64, bytes: usize) -> String {
    const PARTS: [&str; 24] = [
        "ta", "re", "mi", "sol", "ver", "an", "con", "di", "ing", "tion", "pre", "k", "lo", "st", "er", "qu", "ea",
        "ment", "al", "y", "us", "or", "in", "be",
    ];
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut roll = |sides: u64| {
        state = state
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) % sides
    };
    let mut out = String::with_capacity(bytes + 16);
    while out.len() < bytes {
        for _ in 0..=roll(3) {
            out.push_str(PARTS[roll(24) as usize]);
        }
        out.push_str([" ", " ", " ", " ", ", ", ". ", ".\n"][roll(7) as usize]);
    }
    out.truncate(bytes);
    out
}

impl ModelTokens {
    /// Measures over about `megabytes` of made-up text.
    ///
    /// # Errors
    /// As [`Self::encode_prompt`].
    pub fn measure(&self, megabytes: usize) -> Result<Speed, EncodeError> {
        let count = (megabytes * 1_000_000).div_ceil(PROMPT_BYTES).max(1);
        let unseen: Vec<String> = (0..count as u64).map(|n| text(1_000 + n, PROMPT_BYTES)).collect();
        let started = Instant::now();
        for text in &unseen {
            self.encode_prompt(text, false)?;
        }
        let unseen_mb_per_s = (count * PROMPT_BYTES) as f64 / 1e6 / started.elapsed().as_secs_f64();
        let shared = text(1, SHARED_BYTES);
        let prompts: Vec<String> = (0..ROUNDS as u64)
            .map(|n| format!("{shared} {}", text(2 + n, PROMPT_BYTES - SHARED_BYTES)))
            .collect();
        self.encode_prompt(&shared, false)?;
        let median = |prompts: &[String]| -> Result<Duration, EncodeError> {
            let mut times = Vec::with_capacity(prompts.len());
            for prompt in prompts {
                let started = Instant::now();
                self.encode_prompt(prompt, false)?;
                times.push(started.elapsed());
            }
            times.sort_unstable();
            Ok(times[times.len() / 2])
        };
        Ok(Speed {
            unseen_mb_per_s,
            known_start: median(&prompts)?,
            known: median(&prompts)?,
        })
    }
}
