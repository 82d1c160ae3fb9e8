//! What can go wrong when loading a tokenizer, rendering a chat or encoding a text.

use std::path::PathBuf;

/// Why a tokenizer could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file could not be read.
    #[error("reading {path}: {source}; give the folder that holds the model's tokenizer.json")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A file is larger than the limit that protects the process.
    #[error("{path} has {bytes} bytes, more than the limit of {limit}; is it the right file?")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        bytes: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// A file is not the JSON it should be.
    #[error("{path} is not valid: {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The tokenizer file can't be used.
    #[error("the tokenizer in {path} can't be built: {reason}")]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What the tokenizer library says.
        reason: String,
    },
    /// The chat template doesn't compile.
    #[error("the chat template {name:?} does not compile: {reason}")]
    Template {
        /// Its name (`default`, `tool_use`, ...).
        name: String,
        /// The parser's reason.
        reason: String,
    },
}

/// Why a chat could not be turned into tokens. Engines answer these with 400, and so should a caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChatError {
    /// A field has the wrong shape.
    #[error("{field}: {reason}")]
    Invalid {
        /// The request field.
        field: &'static str,
        /// What is wrong, and what is expected.
        reason: String,
    },
    /// The request brings its own chat template, which isn't allowed here.
    #[error("chat_template: this model does not accept a chat template from the request; leave the field out")]
    RequestTemplateRefused,
    /// The model has no chat template.
    #[error("the model has no chat template; use /v1/completions, or configure one")]
    NoTemplate,
    /// The template refused the conversation, or failed on it.
    #[error("the chat template refused the request: {reason}")]
    Template {
        /// The template's own message.
        reason: String,
    },
    /// The template did more work than allowed.
    #[error("the chat template used up its work budget; shorten the conversation")]
    TooMuchWork,
    /// The text could not be encoded.
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

/// Why a text could not be encoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The text is longer than the limit.
    #[error("the prompt has {bytes} bytes, more than the limit of {limit}; shorten it")]
    TooLong {
        /// Its length in bytes.
        bytes: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The tokenizer failed on the text.
    #[error("the tokenizer failed: {reason}")]
    Tokenizer {
        /// The library's reason; it never quotes the text.
        reason: String,
    },
}
