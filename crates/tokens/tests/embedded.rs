//! The embedded tokenizer: what demos and simulated engines rely on.
#![allow(clippy::unwrap_used, missing_docs)]

use cairn_tokens::{ChatRequest, ModelTokens, Pipeline, PromptEnd};
use serde_json::json;

#[test]
fn the_embedded_tokenizer_loads_on_the_fast_pipeline() {
    let tokens = ModelTokens::embedded().unwrap();
    assert_eq!(tokens.pipeline(), Pipeline::Fast);
    assert_eq!(tokens.vocab_size(), 4096);
}

#[test]
fn text_survives_a_round_trip() {
    let tokens = ModelTokens::embedded().unwrap();
    for text in [
        "Hello, world!",
        "caf\u{e9} \u{4f60}\u{597d} \u{1f642} x\u{d7}y",
        "  a\n\n b\t c ",
        "",
    ] {
        let ids = tokens.encode_prompt(text, false).unwrap();
        assert_eq!(tokens.decode(&ids, true).unwrap(), text);
    }
}

#[test]
fn completions_get_the_begin_token_once_and_chats_get_it_from_the_template() {
    let tokens = ModelTokens::embedded().unwrap();
    let bos = tokens.bos_id().unwrap();
    let count = |ids: &[u32]| ids.iter().filter(|id| **id == bos).count();
    let ids = tokens.encode_prompt("Say hi", true).unwrap();
    assert_eq!((ids[0], count(&ids)), (bos, 1));
    assert_eq!(count(&tokens.encode_prompt("Say hi", false).unwrap()), 0);
    let body = json!({"messages": [{"role": "user", "content": "Say hi"}]});
    let prompt = tokens.encode_chat(&ChatRequest::from_body(&body).unwrap()).unwrap();
    assert_eq!(
        (prompt.ids[0], count(&prompt.ids), prompt.end),
        (bos, 1, PromptEnd::Whole)
    );
    assert_eq!(
        tokens.decode(&prompt.ids, false).unwrap(),
        "<|startoftext|><|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n"
    );
}

#[test]
fn the_embedded_template_shows_tools_calls_and_results() {
    let tokens = ModelTokens::embedded().unwrap();
    let body = json!({
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Z\u{fc}rich\"}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
    });
    let text = tokens
        .render_chat(&ChatRequest::from_body(&body).unwrap())
        .unwrap()
        .text;
    assert!(
        text.contains("{\"name\": \"weather\", \"arguments\": {\"city\": \"Z\u{fc}rich\"}}"),
        "{text}"
    );
    assert!(text.contains("<tool_response>\nrain\n</tool_response>"), "{text}");
    assert!(
        text.contains("{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"description\": null,"),
        "{text}"
    );
}
