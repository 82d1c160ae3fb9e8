//! Encodes requests from standard input, one JSON body a line, and prints their ids, one JSON line each.
//!
//! `encode MODEL_DIR` reads a model folder (`-` is the embedded tokenizer); bodies with `messages` are chats, bodies with
//! `prompt` are completions. Requests may bring their own chat template. Used to compare with a real engine.

use anyhow::Context;
use cairn_tokens::{ChatRequest, LoadOptions, ModelTokens};
use serde_json::{Value, json};
use std::io::{BufRead, Write};
use std::path::Path;

fn main() -> anyhow::Result<()> {
    let dir = std::env::args()
        .nth(1)
        .context("usage: encode MODEL_DIR < bodies.jsonl")?;
    let options = LoadOptions {
        trust_request_chat_template: true,
        ..LoadOptions::default()
    };
    let tokens = match dir.as_str() {
        "-" => ModelTokens::embedded_with(options)?,
        dir => ModelTokens::load(Path::new(dir), options)?,
    };
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let answer = match encode(&tokens, &line?) {
            Ok(answer) => answer,
            Err(error) => json!({"error": error.to_string()}),
        };
        writeln!(out, "{answer}")?;
    }
    Ok(())
}

fn encode(tokens: &ModelTokens, line: &str) -> anyhow::Result<Value> {
    let body: Value = serde_json::from_str(line)?;
    if let Some(prompt) = body["prompt"].as_str() {
        let special = body["add_special_tokens"].as_bool().unwrap_or(true);
        return Ok(json!({"tokens": tokens.encode_prompt(prompt, special)?}));
    }
    let request = ChatRequest::from_body(&body)?;
    let prompt = tokens.encode_chat(&request)?;
    Ok(json!({"tokens": prompt.ids, "end": format!("{:?}", prompt.end)}))
}
