//! Renderings equal those that a real vLLM 0.32 gave for the same chats, recorded by `tests/real/tokens.py --record`.
#![allow(clippy::unwrap_used, missing_docs)]

use cairn_tokens::{ChatRequest, LoadOptions, ModelTokens, WallClock};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// Fewer would mean that the record was cut.
const CHATS_MIN: usize = 100;
const TEMPLATES: usize = 6;

#[test]
fn a_hundred_chats_over_six_templates_render_as_a_real_engine_rendered_them() {
    let mut lines = include_str!("rendered.jsonl")
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let head = lines.next().unwrap();
    let day: chrono::NaiveDate = head["recorded_on"].as_str().unwrap().parse().unwrap();
    let now = day.and_hms_opt(12, 0, 0).unwrap();
    let options = LoadOptions {
        trust_request_chat_template: true,
        clock: WallClock(Arc::new(move || now)),
        ..LoadOptions::default()
    };
    let tokens = ModelTokens::embedded_with(options).unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/real/templates");
    let mut seen = std::collections::HashSet::new();
    let mut chats = 0;
    for recorded in lines {
        let name = recorded["template"].as_str().unwrap().to_owned();
        let template = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        let request = ChatRequest {
            chat_template: Some(&template),
            ..ChatRequest::from_body(&recorded["body"]).unwrap()
        };
        let text = tokens.render_chat(&request).unwrap().text;
        // Where the request asks for special tokens, the engine's text begins with one more of them.
        let special = if request.add_special_tokens {
            "<|startoftext|>"
        } else {
            ""
        };
        assert_eq!(
            format!("{special}{text}"),
            recorded["text"].as_str().unwrap(),
            "{name}: {}",
            recorded["body"]
        );
        seen.insert(name);
        chats += 1;
    }
    assert!(chats >= CHATS_MIN && seen.len() == TEMPLATES, "{chats} chats, {seen:?}");
}
