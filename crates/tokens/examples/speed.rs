//! Prints encoding speed: `speed [MODEL_DIR]`, the embedded tokenizer by default; and what rendering a chat costs.

use cairn_tokens::{ChatRequest, LoadOptions, ModelTokens};
use serde_json::json;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

fn main() -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    for fast in [true, false] {
        let options = LoadOptions {
            fast,
            ..LoadOptions::default()
        };
        let started = Instant::now();
        let tokens = match std::env::args().nth(1) {
            Some(dir) => ModelTokens::load(Path::new(&dir), options)?,
            None => ModelTokens::embedded_with(options)?,
        };
        writeln!(out, "{:?} loaded in {:?}", tokens.pipeline(), started.elapsed())?;
        writeln!(out, "{:?}", tokens.measure(if fast { 8 } else { 1 })?)?;
        for kib in [2, 32] {
            let system = "You are a careful assistant. ".repeat((kib << 10) / 29);
            let mut times: Vec<_> = (0..200)
                .map(|n| {
                    let body = json!({"messages": [
                        {"role": "system", "content": system}, {"role": "user", "content": format!("question number {n}, please?")}]});
                    let started = Instant::now();
                    let request = ChatRequest::from_body(&body)?;
                    let prompt = tokens.encode_chat(&request)?;
                    Ok((started.elapsed(), prompt.ids.len()))
                })
                .collect::<anyhow::Result<_>>()?;
            times.sort_unstable();
            writeln!(
                out,
                "chat of {kib} KiB, new user message: {:?} for {} tokens",
                times[100].0, times[100].1
            )?;
        }
        writeln!(out, "{:?}", tokens.cache_stats())?;
    }
    Ok(())
}
