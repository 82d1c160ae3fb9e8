//! Requests: public traces in 16-token blocks, and a generated agentic one.

use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::Context;
use rand::Rng;
use rand::rngs::SmallRng;

use crate::log::BLOCK_TOKENS;

/// One request.
pub struct Request {
    /// Each block of its prompt by what its tokens are made from.
    pub words: Vec<u64>,
    /// Full blocks of its answer.
    pub answer: u32,
}

/// Reads a gzipped trace of JSON lines with `input_length`, `output_length` and `hash_ids`, each id for `id_tokens`.
pub fn read(path: &Path, id_tokens: usize, limit: usize) -> anyhow::Result<Vec<Request>> {
    let file = std::fs::File::open(path).with_context(|| format!("opening the trace {}", path.display()))?;
    let per_id = (id_tokens / BLOCK_TOKENS) as u64;
    let mut requests = Vec::new();
    for (n, line) in BufReader::new(flate2::read::GzDecoder::new(file))
        .lines()
        .take(limit)
        .enumerate()
    {
        let at = || format!("line {} of {}", n + 1, path.display());
        let row: serde_json::Value = serde_json::from_str(&line.with_context(at)?).with_context(at)?;
        let field = |name: &str| {
            row[name]
                .as_u64()
                .with_context(|| format!("{name} isn't a number in {}", at()))
        };
        let (input, output) = (field("input_length")?, field("output_length")?);
        let ids = row["hash_ids"]
            .as_array()
            .with_context(|| format!("hash_ids isn't a list in {}", at()))?;
        let words = ids
            .iter()
            .filter_map(serde_json::Value::as_u64)
            .flat_map(|id| (0..per_id).map(move |part| id * per_id + part))
            .take(input as usize / BLOCK_TOKENS)
            .collect();
        requests.push(Request {
            words,
            answer: output as u32 / BLOCK_TOKENS as u32,
        });
    }
    Ok(requests)
}

/// Agents at work: one of six system prompts with tools (1,000-2,000 blocks), then 10-120 turns that each add a few
/// tool results to all that was said before; some turns open a sub-agent with a fresh context below the same start.
pub fn agentic(rng: &mut SmallRng, count: usize) -> Vec<Request> {
    const PROMPTS: u64 = 6;
    /// Sessions at the same time.
    const OPEN: usize = 150;
    /// 128k tokens: then the session ends.
    const LONGEST: usize = 8_192;
    let starts: Vec<Vec<u64>> = (0..PROMPTS)
        .map(|p| (0..1_000 + p * 200).map(|i| 1 << 48 | p << 32 | i).collect())
        .collect();
    let mut fresh = 0u64;
    let mut extend = |words: &mut Vec<u64>, blocks: usize| {
        words.extend((0..blocks as u64).map(|i| 2 << 48 | (fresh + i)));
        fresh += blocks as u64;
    };
    let mut open: Vec<(Vec<u64>, u32)> = Vec::new();
    (0..count)
        .map(|_| {
            let answer = rng.random_range(2..60);
            let (mut words, turns) = if open.len() < OPEN {
                let start = starts[rng.random_range(0..starts.len())].clone();
                (start, rng.random_range(10..120))
            } else {
                let at = rng.random_range(0..open.len());
                if rng.random_bool(0.08) {
                    // A sub-agent: the same system prompt, nothing of the conversation.
                    let start = starts.iter().find(|s| s[0] == open[at].0[0]).unwrap_or(&starts[0]);
                    (start.clone(), rng.random_range(3..12))
                } else {
                    open.swap_remove(at)
                }
            };
            extend(&mut words, rng.random_range(4..80));
            if turns > 1 && words.len() < LONGEST {
                open.push((words.clone(), turns - 1));
                if open.len() > 2 * OPEN {
                    open.swap_remove(0);
                }
            }
            Request { words, answer }
        })
        .collect()
}
