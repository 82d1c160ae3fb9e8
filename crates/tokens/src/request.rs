//! The fields of a chat request that decide its prompt.

use crate::error::ChatError;
use serde_json::{Map, Value};
use std::borrow::Cow;

/// The parts of a chat body that reach the chat template, borrowed from the parsed body.
#[derive(Debug, Clone, Copy, Default)]
pub struct ChatRequest<'a> {
    /// `messages`: the conversation.
    pub messages: &'a [Value],
    /// `tools`, as sent; `None` where absent or null.
    pub tools: Option<&'a [Value]>,
    /// `tool_choice` is the string `none`.
    pub tool_choice_none: bool,
    /// `documents` for retrieval templates.
    pub documents: Option<&'a Value>,
    /// `reasoning_effort`.
    pub reasoning_effort: Option<&'a str>,
    /// `add_generation_prompt`; engines default to true.
    pub add_generation_prompt: bool,
    /// `continue_final_message`: leave the last message open.
    pub continue_final_message: bool,
    /// `add_special_tokens`; engines default to false, since the template writes them.
    pub add_special_tokens: bool,
    /// `chat_template` of the request itself.
    pub chat_template: Option<&'a str>,
    /// `chat_template_kwargs`.
    pub chat_template_kwargs: Option<&'a Map<String, Value>>,
    /// `truncate_prompt_tokens` and whether the left end goes (`truncation_side`).
    pub truncate: Option<Truncate>,
}

/// A message that is nothing but a role and a text, as most are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlainMessage<'a> {
    /// `role`.
    pub role: Cow<'a, str>,
    /// `content`.
    pub content: Cow<'a, str>,
}

/// Keep only so many tokens of the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Truncate {
    /// How many to keep.
    pub keep: usize,
    /// Whether the first tokens go (else the last ones).
    pub from_left: bool,
}

impl<'a> ChatRequest<'a> {
    /// Reads the fields of a `/v1/chat/completions` (or `/tokenize`) body.
    ///
    /// # Errors
    /// [`ChatError::Invalid`] naming the first field of a wrong type.
    pub fn from_body(body: &'a Value) -> Result<Self, ChatError> {
        let body = body
            .as_object()
            .ok_or_else(|| invalid("body", "must be a JSON object"))?;
        let messages = match body.get("messages") {
            Some(Value::Array(list)) => list.as_slice(),
            Some(_) => return Err(invalid("messages", "must be a list of messages")),
            None => return Err(invalid("messages", "is missing")),
        };
        let tools = match body.get("tools") {
            None | Some(Value::Null) => None,
            Some(Value::Array(list)) => Some(list.as_slice()),
            Some(_) => return Err(invalid("tools", "must be a list of tools")),
        };
        let chat_template_kwargs = match body.get("chat_template_kwargs") {
            None | Some(Value::Null) => None,
            Some(Value::Object(map)) => Some(map),
            Some(_) => return Err(invalid("chat_template_kwargs", "must be an object")),
        };
        Ok(Self {
            messages,
            tools,
            tool_choice_none: body.get("tool_choice").and_then(Value::as_str) == Some("none"),
            documents: body.get("documents").filter(|v| !v.is_null()),
            reasoning_effort: text(body, "reasoning_effort")?,
            add_generation_prompt: flag(body, "add_generation_prompt", true)?,
            continue_final_message: flag(body, "continue_final_message", false)?,
            add_special_tokens: flag(body, "add_special_tokens", false)?,
            chat_template: text(body, "chat_template")?,
            chat_template_kwargs,
            truncate: Truncate::from_body(body)?,
        })
    }
}

impl Truncate {
    /// Reads `truncate_prompt_tokens` and `truncation_side`; -1 (the model's limit) is left to the engine.
    ///
    /// # Errors
    /// [`ChatError::Invalid`] where either has a wrong type.
    pub fn from_body(body: &Map<String, Value>) -> Result<Option<Self>, ChatError> {
        let keep = match body.get("truncate_prompt_tokens") {
            None | Some(Value::Null) => return Ok(None),
            Some(v) => v
                .as_i64()
                .ok_or_else(|| invalid("truncate_prompt_tokens", "must be an integer"))?,
        };
        // vLLM loads its tokenizers with truncation on the left.
        let from_left = text(body, "truncation_side")?.is_none_or(|side| side == "left");
        Ok(usize::try_from(keep).ok().map(|keep| Self { keep, from_left }))
    }
}

pub(crate) fn invalid(field: &'static str, reason: impl Into<String>) -> ChatError {
    ChatError::Invalid {
        field,
        reason: reason.into(),
    }
}

fn flag(body: &Map<String, Value>, name: &'static str, default: bool) -> Result<bool, ChatError> {
    match body.get(name) {
        None => Ok(default),
        Some(Value::Bool(b)) => Ok(*b),
        Some(_) => Err(invalid(name, "must be true or false")),
    }
}

fn text<'a>(body: &'a Map<String, Value>, name: &'static str) -> Result<Option<&'a str>, ChatError> {
    match body.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(s)) => Ok(Some(s)),
        Some(_) => Err(invalid(name, "must be a string")),
    }
}
