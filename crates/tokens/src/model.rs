//! One model's tokenizer and chat template.

use crate::Token;
use crate::cache::{CacheStats, PieceCache};
use crate::embedded;
use crate::encoder::{Encoder, Pipeline};
use crate::error::{ChatError, EncodeError, LoadError};
use crate::files::Files;
use crate::options::LoadOptions;
use crate::pieces::{Cutter, Piece};
use crate::request::{ChatRequest, PlainMessage, Truncate};
use crate::sample::{SampleReport, Samples};
use crate::template::Templates;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use xxhash_rust::xxh3::Xxh3;

/// A single piece above this size is left to the caller's fallback while a budget runs and only the reference
/// encoder serves: it needs a second a megabyte and can't be stopped in between.
const UNCUT_BYTES_MAX: usize = 256 << 10;

/// A tokenizer with its chat templates; share it behind an `Arc`.
#[derive(Debug)]
pub struct ModelTokens {
    encoder: Encoder,
    cutter: Cutter,
    cache: Option<PieceCache>,
    distrusted: AtomicBool,
    templates: Templates,
    samples: Samples,
    text_bytes_max: usize,
    bos: Option<Token>,
    fingerprint: u64,
}

/// A prompt's ids, and how far they reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The ids.
    pub ids: Vec<Token>,
    /// Whether they are the whole prompt.
    pub end: PromptEnd,
}

/// Where the ids of a [`Prompt`] end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptEnd {
    /// At the prompt's end.
    Whole,
    /// Before the first image, audio or video, whose tokens only the engine knows.
    Media,
    /// Where the caller's budget ended.
    Budget,
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The prompt's text.
    pub text: String,
    /// Where media follow: how many bytes of the text come surely before the first one.
    pub known_bytes: Option<usize>,
}

impl ModelTokens {
    /// Loads the tokenizer and templates of a model folder.
    ///
    /// # Errors
    /// [`LoadError`], naming the file at fault.
    pub fn load(dir: &Path, options: LoadOptions) -> Result<Self, LoadError> {
        let files = Files::read(dir)?;
        Self::build(&files, &dir.join("tokenizer.json"), options)
    }

    /// The tokenizer that comes with the program: a byte-level BPE of 4,096 entries with a ChatML template.
    ///
    /// # Errors
    /// None in a sound build.
    pub fn embedded() -> Result<Self, LoadError> {
        Self::embedded_with(LoadOptions::default())
    }

    /// The same with options.
    ///
    /// # Errors
    /// [`LoadError::Template`] where the options bring a template that doesn't compile.
    pub fn embedded_with(options: LoadOptions) -> Result<Self, LoadError> {
        Self::build(&embedded::files()?, Path::new("the embedded tokenizer"), options)
    }

    fn build(files: &Files, path: &Path, options: LoadOptions) -> Result<Self, LoadError> {
        let (encoder, cutter) = Encoder::new(files, options.fast).map_err(|reason| LoadError::Tokenizer {
            path: path.to_owned(),
            reason,
        })?;
        let named = |name: &str| {
            files
                .named
                .iter()
                .find(|(n, _)| n == name)
                .map(|(_, token)| token.as_str())
        };
        let bos = named("bos_token").and_then(|t| encoder.token_id(t));
        let fingerprint = fingerprint(files, &options);
        let cache = (options.cache_bytes_max > 0 && cutter.cuts()).then(|| PieceCache::new(options.cache_bytes_max));
        Ok(Self {
            encoder,
            cutter,
            cache,
            distrusted: AtomicBool::new(false),
            text_bytes_max: options.text_bytes_max,
            templates: Templates::new(files, options)?,
            samples: Samples::default(),
            bos,
            fingerprint,
        })
    }

    /// Ids of a text prompt, as `/v1/completions` encodes it; `add_special` is true there unless the request
    /// says otherwise.
    ///
    /// # Errors
    /// [`EncodeError::TooLong`], or the tokenizer's own failure.
    pub fn encode_prompt(&self, text: &str, add_special: bool) -> Result<Vec<Token>, EncodeError> {
        self.encode(text, text.len(), add_special, None)
            .map(|prompt| prompt.ids)
    }

    /// The same within a budget: `go_on` is asked with the bytes done before each piece that must be computed.
    ///
    /// # Errors
    /// As [`Self::encode_prompt`].
    pub fn encode_prompt_within(
        &self,
        text: &str,
        add_special: bool,
        go_on: &mut dyn FnMut(usize) -> bool,
    ) -> Result<Prompt, EncodeError> {
        self.encode(text, text.len(), add_special, Some(go_on))
    }

    /// Ids of a conversation, as `/v1/chat/completions` encodes it.
    ///
    /// # Errors
    /// [`ChatError`]; engines answer these with 400.
    pub fn encode_chat(&self, request: &ChatRequest<'_>) -> Result<Prompt, ChatError> {
        self.chat(request, None)
    }

    /// The same within a budget, see [`Self::encode_prompt_within`].
    ///
    /// # Errors
    /// As [`Self::encode_chat`].
    pub fn encode_chat_within(
        &self,
        request: &ChatRequest<'_>,
        go_on: &mut dyn FnMut(usize) -> bool,
    ) -> Result<Prompt, ChatError> {
        self.chat(request, Some(go_on))
    }

    /// Ids of a conversation of nothing but roles and texts, every option at its default: those of [`Self::encode_chat`],
    /// at a fraction of the work.
    ///
    /// # Errors
    /// As [`Self::encode_chat`].
    pub fn encode_plain_within(
        &self,
        messages: &[PlainMessage<'_>],
        go_on: &mut dyn FnMut(usize) -> bool,
    ) -> Result<Prompt, ChatError> {
        let text = self.templates.render_plain(messages)?;
        Ok(self.encode(&text, text.len(), false, Some(go_on))?)
    }

    /// The text of a conversation of nothing but roles and texts.
    ///
    /// # Errors
    /// As [`Self::encode_chat`].
    pub fn render_plain(&self, messages: &[PlainMessage<'_>]) -> Result<String, ChatError> {
        self.templates.render_plain(messages)
    }

    /// Whether [`Self::render_plain`] puts this conversation together from pieces that are ready.
    pub fn renders_from_pieces(&self, messages: &[PlainMessage<'_>]) -> bool {
        self.templates.renders_from_pieces(messages)
    }

    /// The text of a conversation.
    ///
    /// # Errors
    /// As [`Self::encode_chat`].
    pub fn render_chat(&self, request: &ChatRequest<'_>) -> Result<Rendered, ChatError> {
        self.templates.render(request)
    }

    fn chat(
        &self,
        request: &ChatRequest<'_>,
        go_on: Option<&mut dyn FnMut(usize) -> bool>,
    ) -> Result<Prompt, ChatError> {
        let Rendered { text, known_bytes } = self.templates.render(request)?;
        let mut prompt = match known_bytes {
            None => self.encode(&text, text.len(), request.add_special_tokens, go_on)?,
            Some(known) => {
                let safe = self.cutter.safe_prefix(&text, known);
                let mut prompt = self.encode(&text, safe, request.add_special_tokens, go_on)?;
                prompt.end = if prompt.end == PromptEnd::Budget {
                    prompt.end
                } else {
                    PromptEnd::Media
                };
                prompt
            }
        };
        if let (Some(truncate), PromptEnd::Whole) = (request.truncate, prompt.end) {
            truncate.apply(&mut prompt.ids);
        }
        Ok(prompt)
    }

    /// Encodes `text[..end]`; special tokens after it only where that is the whole text.
    fn encode(
        &self,
        text: &str,
        end: usize,
        add_special: bool,
        go_on: Option<&mut dyn FnMut(usize) -> bool>,
    ) -> Result<Prompt, EncodeError> {
        if text.len() > self.text_bytes_max {
            return Err(EncodeError::TooLong {
                bytes: text.len(),
                limit: self.text_bytes_max,
            });
        }
        let whole = end == text.len();
        let text = &text[..end];
        let mut ids = Vec::with_capacity(text.len() / 4 + 8);
        if add_special {
            ids.extend_from_slice(&self.encoder.before);
        }
        let before = ids.len();
        let complete = if self.distrusted.load(Ordering::Relaxed) {
            ids.extend(self.encoder.encode_reference(text)?);
            true
        } else {
            self.encode_pieces(text, &mut ids, go_on)?
        };
        if complete {
            self.samples.offer(text, &ids[before..]);
            if add_special && whole {
                ids.extend_from_slice(&self.encoder.after);
            }
        }
        Ok(Prompt {
            ids,
            end: if complete { PromptEnd::Whole } else { PromptEnd::Budget },
        })
    }

    /// Appends the ids of `text`, known pieces from the cache; false where the budget ended before the text.
    fn encode_pieces(
        &self,
        text: &str,
        ids: &mut Vec<Token>,
        mut go_on: Option<&mut dyn FnMut(usize) -> bool>,
    ) -> Result<bool, EncodeError> {
        let mut done = 0;
        self.cutter.pieces(text, |piece| {
            let piece = match piece {
                Piece::Token(id) => {
                    ids.push(id);
                    return Ok(true);
                }
                Piece::Text(piece) => piece,
            };
            if !self.cache.as_ref().is_some_and(|cache| cache.append(piece, ids)) {
                if let Some(go_on) = go_on.as_mut() {
                    let endless = piece.len() > UNCUT_BYTES_MAX && self.encoder.pipeline() != Pipeline::Fast;
                    if endless || !go_on(done) {
                        return Ok(false);
                    }
                }
                let computed = self.encoder.encode(piece)?;
                ids.extend_from_slice(&computed);
                if let Some(cache) = &self.cache {
                    cache.insert(piece, &computed);
                }
            }
            done += piece.len();
            Ok(true)
        })
    }

    /// Text of ids; `skip_special` leaves special tokens out.
    ///
    /// # Errors
    /// [`EncodeError::Tokenizer`].
    pub fn decode(&self, ids: &[Token], skip_special: bool) -> Result<String, EncodeError> {
        self.encoder.decode(ids, skip_special)
    }

    /// Whether a text surely has more than `tokens_max` tokens, known from its length alone: engines refuse a
    /// prompt of more characters than that many of the longest vocabulary entries.
    pub fn surely_longer_than(&self, text: &str, tokens_max: usize) -> bool {
        let chars_max = tokens_max.saturating_mul(self.encoder.entry_chars_max);
        text.len() > chars_max && text.chars().count() > chars_max
    }

    /// The longest prompt, in characters, that can fit `tokens_max` tokens.
    pub fn chars_max(&self, tokens_max: usize) -> usize {
        tokens_max.saturating_mul(self.encoder.entry_chars_max)
    }

    /// The id of a vocabulary entry.
    pub fn token_id(&self, token: &str) -> Option<Token> {
        self.encoder.token_id(token)
    }

    /// Entries of the vocabulary, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.encoder.vocab_size()
    }

    /// The beginning-of-text token.
    pub fn bos_id(&self) -> Option<Token> {
        self.bos
    }

    /// A number that differs where files or options could give other ids.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Which encoder serves, and why.
    pub fn pipeline(&self) -> Pipeline {
        self.encoder.pipeline()
    }

    /// The piece cache's counters; zero where it is off.
    pub fn cache_stats(&self) -> CacheStats {
        self.cache.as_ref().map(PieceCache::stats).unwrap_or_default()
    }

    /// Compares the sampled encodings with the reference encoder. Slow: call it now and then from a thread of
    /// its own. On the first difference the fast encoder and the cache are not used again.
    pub fn run_samples(&self) -> SampleReport {
        while let Some((text, ids)) = self.samples.take() {
            let same = self
                .encoder
                .encode_reference(&text)
                .is_ok_and(|reference| reference == ids);
            self.samples.count(same);
            if !same {
                self.encoder.fail_fast();
                self.distrusted.store(true, Ordering::Relaxed);
                self.cache.iter().for_each(PieceCache::clear);
            }
        }
        self.samples.report()
    }
}

impl Truncate {
    fn apply(self, ids: &mut Vec<Token>) {
        if self.from_left {
            ids.drain(..ids.len().saturating_sub(self.keep));
        } else {
            ids.truncate(self.keep);
        }
    }
}

fn fingerprint(files: &Files, options: &LoadOptions) -> u64 {
    let mut hash = Xxh3::new();
    let mut part = |bytes: &[u8]| {
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    part(&files.tokenizer);
    for (name, text) in files.templates.iter().chain(files.named.iter().map(|(n, t)| (n, t))) {
        part(name.as_bytes());
        part(text.as_bytes());
    }
    files.special.iter().for_each(|token| part(token.as_bytes()));
    part(options.chat_template.as_deref().unwrap_or_default().as_bytes());
    part(format!("{:?}", options.content_format).as_bytes());
    part(
        serde_json::Value::Object(options.default_chat_template_kwargs.clone())
            .to_string()
            .as_bytes(),
    );
    part(&[u8::from(options.exclude_tools_when_tool_choice_none)]);
    hash.digest()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_sample_ends_the_use_of_the_fast_encoder_and_of_the_cache() {
        let tokens = ModelTokens::embedded().unwrap();
        let text = "a short text";
        let right = tokens.encoder.encode_reference(text).unwrap();
        tokens.cache.as_ref().unwrap().insert(text, &[7]);
        assert_eq!(
            tokens.encode_prompt(text, false).unwrap(),
            [7],
            "the first encoding is sampled"
        );
        assert_eq!(
            tokens.run_samples(),
            SampleReport {
                compared: 1,
                different: 1
            }
        );
        assert_eq!(tokens.encode_prompt(text, false).unwrap(), right);
        assert!(matches!(tokens.pipeline(), Pipeline::Reference { .. }));
        assert_eq!(tokens.cache_stats().bytes, 0);
    }
}
