//! How a tokenizer is loaded, with the limits that bound its work and memory.

use crate::format::ContentFormat;
use serde_json::{Map, Value};
use std::fmt;
use std::sync::Arc;

/// Gives the local wall-clock time that a template's `strftime_now` prints.
#[derive(Clone)]
pub struct WallClock(pub Arc<dyn Fn() -> chrono::NaiveDateTime + Send + Sync>);

impl Default for WallClock {
    fn default() -> Self {
        Self(Arc::new(|| chrono::Local::now().naive_local()))
    }
}

impl fmt::Debug for WallClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WallClock")
    }
}

/// How message content is handed to the template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ContentFormatOption {
    /// Read it off the template, as vLLM does.
    #[default]
    Auto,
    /// Always this one (vLLM's `--chat-template-content-format`).
    Fixed(ContentFormat),
}

/// How to load a tokenizer. The defaults match an engine started with its defaults.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// A chat template that replaces the model's own (vLLM's `--chat-template`): its text.
    pub chat_template: Option<String>,
    /// Whether a request may bring its own template (vLLM's `--trust-request-chat-template`).
    pub trust_request_chat_template: bool,
    /// How message content is handed to the template.
    pub content_format: ContentFormatOption,
    /// Template variables for every request (vLLM's `--default-chat-template-kwargs`).
    pub default_chat_template_kwargs: Map<String, Value>,
    /// Leave tools out where `tool_choice` is `none` (vLLM's `--exclude-tools-when-tool-choice-none`).
    pub exclude_tools_when_tool_choice_none: bool,
    /// Longest text that is encoded, in bytes.
    pub text_bytes_max: usize,
    /// Memory for the piece cache, in bytes; 0 turns it off.
    pub cache_bytes_max: usize,
    /// Whether the faster encoder may be tried.
    pub fast: bool,
    /// Work that one rendering may do, in template instructions (or 64-byte units of text made).
    pub template_fuel: u64,
    /// The clock of `strftime_now`.
    pub clock: WallClock,
}

/// A 128k-token context in English is half a megabyte; 16 MiB leaves room for every model in sight while one
/// request stays under a second of work.
pub(crate) const TEXT_BYTES_MAX: usize = 16 << 20;
/// About 40,000 pieces of 0.5 KiB with their ids.
pub(crate) const CACHE_BYTES_MAX: usize = 64 << 20;
/// Real templates spend tens of instructions a message; this allows conversations of many thousand messages
/// and about 256 MiB of text made on the way, and stops a hostile loop within a second.
pub(crate) const TEMPLATE_FUEL: u64 = 4_000_000;

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            chat_template: None,
            trust_request_chat_template: false,
            content_format: ContentFormatOption::Auto,
            default_chat_template_kwargs: Map::new(),
            exclude_tools_when_tool_choice_none: false,
            text_bytes_max: TEXT_BYTES_MAX,
            cache_bytes_max: CACHE_BYTES_MAX,
            fast: true,
            template_fuel: TEMPLATE_FUEL,
            clock: WallClock::default(),
        }
    }
}
