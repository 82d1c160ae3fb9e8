//! Tokens: Hugging Face tokenizers and chat templates giving exactly the ids the engine computes.
//!
//! [`ModelTokens`] is one model's tokenizer and chat template. It renders a request as vLLM does (messages
//! flattened or kept as lists, tool arguments parsed, `transformers`' Jinja environment) and encodes the text
//! as Python's `tokenizers` does; a start seen before costs a hash and a copy. Nothing here opens a socket,
//! and nothing keeps or logs a prompt: only the bounded piece cache holds text, and it is never shown.

#![cfg_attr(test, allow(clippy::unwrap_used, missing_docs))]

mod cache;
mod embedded;
mod encoder;
mod error;
mod few;
mod files;
mod format;
mod measure;
mod media;
mod messages;
mod model;
mod options;
mod pieces;
mod request;
mod sample;
mod template;

pub use cache::CacheStats;
pub use encoder::Pipeline;
pub use error::{ChatError, EncodeError, LoadError};
pub use format::ContentFormat;
pub use measure::Speed;
pub use model::{ModelTokens, Prompt, PromptEnd, Rendered};
pub use options::{ContentFormatOption, LoadOptions, WallClock};
pub use request::{ChatRequest, PlainMessage, Truncate};
pub use sample::SampleReport;

/// A token id, as tokenizers and engines number them.
pub type Token = u32;
