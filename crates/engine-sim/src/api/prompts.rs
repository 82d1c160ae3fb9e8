//! From a body to prompt tokens.

use cairn_blocks::Token;
use cairn_tokens::{ChatRequest, PromptEnd};
use serde_json::Value;

use super::fields::Fields;
use super::request::CHOICES_MAX;
use crate::engine::Engine;
use crate::http::ApiError;

/// A chat's prompt, as the model's template renders it.
pub(crate) fn chat(engine: &Engine, body: &Value) -> Result<Vec<Token>, ApiError> {
    let request = ChatRequest::from_body(body).map_err(|error| ApiError::bad(error.to_string()))?;
    let prompt = engine
        .tokens
        .encode_chat(&request)
        .map_err(|error| ApiError::bad(error.to_string()))?;
    match prompt.end {
        PromptEnd::Whole => Ok(prompt.ids),
        PromptEnd::Media | PromptEnd::Budget => Err(ApiError::field(
            "messages",
            "this model takes text only; leave images, audio and video out",
        )),
    }
}

/// The prompts of a text completion: a string, token ids, or a list of either.
pub(crate) fn text(engine: &Engine, fields: &Fields<'_>) -> Result<Vec<Vec<Token>>, ApiError> {
    let prompt = fields
        .get("prompt")
        .ok_or_else(|| ApiError::field("prompt", "is missing"))?;
    list(engine, "prompt", prompt, add_special(fields)?)
}

/// Inputs of an embedding, in the same forms.
pub(crate) fn embedding(engine: &Engine, fields: &Fields<'_>) -> Result<Vec<Vec<Token>>, ApiError> {
    let input = fields
        .get("input")
        .ok_or_else(|| ApiError::field("input", "is missing"))?;
    list(engine, "input", input, add_special(fields)?)
}

fn add_special(fields: &Fields<'_>) -> Result<bool, ApiError> {
    match fields.get("add_special_tokens") {
        None => Ok(true),
        Some(_) => fields.flag("add_special_tokens"),
    }
}

fn list(engine: &Engine, field: &'static str, value: &Value, special: bool) -> Result<Vec<Vec<Token>>, ApiError> {
    let forms = "give a string, a list of token ids, or a list of either";
    let encode = |text: &str| {
        engine
            .tokens
            .encode_prompt(text, special)
            .map_err(|error| ApiError::field(field, error))
    };
    let Value::Array(items) = value else {
        let text = value.as_str().ok_or_else(|| ApiError::field(field, forms))?;
        return Ok(vec![encode(text)?]);
    };
    match items.first() {
        None => Err(ApiError::field(field, "the list is empty")),
        Some(Value::Number(_)) => Ok(vec![ids(engine, field, items)?]),
        Some(_) if items.len() > CHOICES_MAX => Err(ApiError::field(
            field,
            format!("{} prompts are more than {CHOICES_MAX}", items.len()),
        )),
        Some(_) => items
            .iter()
            .map(|item| match item {
                Value::String(text) => encode(text),
                Value::Array(tokens) => ids(engine, field, tokens),
                Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => {
                    Err(ApiError::field(field, forms))
                }
            })
            .collect(),
    }
}

fn ids(engine: &Engine, field: &'static str, items: &[Value]) -> Result<Vec<Token>, ApiError> {
    let size = engine.tokens.vocab_size() as u64;
    let mut tokens = Vec::with_capacity(items.len());
    for (at, item) in items.iter().enumerate() {
        match item
            .as_u64()
            .filter(|id| *id < size)
            .and_then(|id| Token::try_from(id).ok())
        {
            Some(id) => tokens.push(id),
            None => {
                return Err(ApiError::field(
                    field,
                    format!("item {at} is not a token id below {size}"),
                ));
            }
        }
    }
    Ok(tokens)
}
