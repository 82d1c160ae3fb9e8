//! `/tokenize` and `/detokenize`: the very ids that generation computes with.

use http::StatusCode;
use serde_json::{Value, json};

use super::fields::{self, Fields};
use super::{Call, prompts, request};
use crate::engine::Engine;
use crate::http::{ApiError, Reply, json_reply};

/// A prompt or a chat as token ids.
pub(crate) fn tokenize(engine: &Engine, call: &Call) -> Result<Reply, ApiError> {
    let body = fields::object(&call.body)?;
    request::model(engine, &Fields(&body))?;
    let tokens = if body.contains_key("messages") {
        prompts::chat(engine, &Value::Object(body))?
    } else {
        let mut prompts = prompts::text(engine, &Fields(&body))?;
        prompts.swap_remove(0)
    };
    let answer = json!({
        "count": tokens.len(),
        "max_model_len": engine.config.max_model_len,
        "tokens": tokens,
        "token_strs": null,
    });
    Ok(json_reply(StatusCode::OK, &answer))
}

/// Token ids as text.
pub(crate) fn detokenize(engine: &Engine, call: &Call) -> Result<Reply, ApiError> {
    let body = fields::object(&call.body)?;
    request::model(engine, &Fields(&body))?;
    let size = engine.tokens.vocab_size() as u64;
    let list = body
        .get("tokens")
        .and_then(Value::as_array)
        .ok_or_else(|| ApiError::field("tokens", "give a list"))?;
    let ids: Option<Vec<u32>> = list
        .iter()
        .map(|id| {
            id.as_u64()
                .filter(|id| *id < size)
                .and_then(|id| u32::try_from(id).ok())
        })
        .collect();
    let ids = ids.ok_or_else(|| ApiError::field("tokens", format!("every item has to be a token id below {size}")))?;
    let text = engine
        .tokens
        .decode(&ids, false)
        .map_err(|error| ApiError::bad(error.to_string()))?;
    Ok(json_reply(StatusCode::OK, &json!({"prompt": text})))
}
