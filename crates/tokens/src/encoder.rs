//! The encoders of one tokenizer file: the reference crate, and a faster one where both agree.

use crate::Token;
use crate::error::EncodeError;
use crate::files::Files;
use crate::pieces::Cutter;
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use tokenizers::{AddedToken, Tokenizer};

/// Which encoder serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pipeline {
    /// The fast one, checked against the reference at load.
    Fast,
    /// The reference one.
    Reference {
        /// Why not the fast one.
        why: String,
    },
}

/// The encoders and what surrounds their ids.
pub(crate) struct Encoder {
    reference: Tokenizer,
    fast: Option<fastokens::Tokenizer>,
    fast_failed: AtomicBool,
    why_reference: String,
    /// Ids that special tokens put before a prompt.
    pub before: Vec<Token>,
    /// And after it.
    pub after: Vec<Token>,
    /// The longest vocabulary entry, in characters.
    pub entry_chars_max: usize,
}

/// Long enough that the encoders build all their tables before the first request.
const WARM_UP_REPEATS: usize = 400;

impl Encoder {
    /// Builds the encoders of a file, with the special tokens that its configuration adds.
    pub fn new(files: &Files, fast: bool) -> Result<(Self, Cutter), String> {
        let mut reference = Tokenizer::from_bytes(&files.tokenizer).map_err(|e| e.to_string())?;
        reference.with_truncation(None).map_err(|e| e.to_string())?;
        reference.with_padding(None);
        let changed = add_configured(&mut reference, files)?;
        let mut file: Value = if changed {
            serde_json::from_str(&reference.to_string(false).map_err(|e| e.to_string())?)
        } else {
            serde_json::from_slice(&files.tokenizer)
        }
        .map_err(|e| e.to_string())?;
        let mut added: Vec<(Token, AddedToken)> = reference.get_added_tokens_decoder().into_iter().collect();
        added.sort_by_key(|(id, _)| *id);
        let cutter = Cutter::new(&file, &added);
        let (before, after) = surroundings(&reference)?;
        let entry_chars_max = reference
            .get_vocab(true)
            .keys()
            .map(|k| k.chars().count())
            .max()
            .unwrap_or(1)
            .max(1);
        let mut encoder = Self {
            reference,
            fast: None,
            fast_failed: AtomicBool::new(false),
            why_reference: "turned off".to_owned(),
            before,
            after,
            entry_chars_max,
        };
        if fast {
            if let Some(object) = file.as_object_mut() {
                object.insert("truncation".to_owned(), Value::Null);
                object.insert("padding".to_owned(), Value::Null);
            }
            match encoder.try_fast(file, &added) {
                Ok(fast) => encoder.fast = Some(fast),
                Err(why) => encoder.why_reference = why,
            }
        }
        let warm_up = CORPUS.join("\n").repeat(WARM_UP_REPEATS / CORPUS.len() + 1);
        encoder.encode(&warm_up).map_err(|e| e.to_string())?;
        Ok((encoder, cutter))
    }

    /// Builds the fast encoder and runs the fixed corpus through both.
    fn try_fast(&self, file: Value, added: &[(Token, AddedToken)]) -> Result<fastokens::Tokenizer, String> {
        // The reference crate numbers added tokens on without gaps, whatever the file says; the fast one doesn't.
        let listed = file["added_tokens"].as_array().into_iter().flatten();
        let moved = |token: &Value| {
            let id = token["content"]
                .as_str()
                .and_then(|content| self.reference.token_to_id(content));
            id.map(u64::from) != token["id"].as_u64()
        };
        if listed.into_iter().any(moved) {
            return Err("the ids of added tokens have gaps".to_owned());
        }
        let fast = catch_unwind(AssertUnwindSafe(|| fastokens::Tokenizer::from_json(file)))
            .map_err(|_| "building it failed".to_owned())?
            .map_err(|e| e.to_string())?;
        let mut texts: Vec<String> = CORPUS.iter().map(|t| (*t).to_owned()).collect();
        texts.push(CORPUS.join(" "));
        for (_, token) in added.iter().take(64) {
            texts.push(format!("a {0}b {0} {0}\n{0}", token.content));
        }
        for text in texts {
            let reference = self.encode_reference(&text).map_err(|e| e.to_string())?;
            let same = encode_fast(&fast, &text).is_some_and(|ids| ids == reference);
            if !same {
                return Err("it differs from the reference on the check corpus".to_owned());
            }
        }
        Ok(fast)
    }

    /// Ids of a text, without the special tokens around it.
    pub fn encode(&self, text: &str) -> Result<Vec<Token>, EncodeError> {
        if let Some(fast) = self.fast.as_ref().filter(|_| !self.fast_failed.load(Ordering::Relaxed)) {
            match encode_fast(fast, text) {
                Some(ids) => return Ok(ids),
                None => self.fail_fast(),
            }
        }
        self.encode_reference(text)
    }

    /// The same by the reference crate.
    pub fn encode_reference(&self, text: &str) -> Result<Vec<Token>, EncodeError> {
        catch_unwind(AssertUnwindSafe(|| self.reference.encode_fast(text, false)))
            .map_err(|_| EncodeError::Tokenizer {
                reason: "it panicked".to_owned(),
            })?
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|_| EncodeError::Tokenizer {
                reason: "it refused the text".to_owned(),
            })
    }

    /// Never uses the fast encoder again.
    pub fn fail_fast(&self) {
        self.fast_failed.store(true, Ordering::Relaxed);
    }

    pub fn pipeline(&self) -> Pipeline {
        if self.fast.is_none() {
            Pipeline::Reference {
                why: self.why_reference.clone(),
            }
        } else if self.fast_failed.load(Ordering::Relaxed) {
            Pipeline::Reference {
                why: "it differed from the reference, or failed, in service".to_owned(),
            }
        } else {
            Pipeline::Fast
        }
    }

    pub fn decode(&self, ids: &[Token], skip_special: bool) -> Result<String, EncodeError> {
        self.reference
            .decode(ids, skip_special)
            .map_err(|_| EncodeError::Tokenizer {
                reason: "it refused the ids".to_owned(),
            })
    }

    pub fn token_id(&self, token: &str) -> Option<Token> {
        self.reference.token_to_id(token)
    }

    pub fn vocab_size(&self) -> usize {
        self.reference.get_vocab_size(true)
    }
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder")
            .field("pipeline", &self.pipeline())
            .finish_non_exhaustive()
    }
}

fn encode_fast(fast: &fastokens::Tokenizer, text: &str) -> Option<Vec<Token>> {
    catch_unwind(AssertUnwindSafe(|| fast.encode(text))).ok()?.ok()
}

/// Adds the tokens that `tokenizer_config.json` brings, as `transformers` does at load; whether any were new.
fn add_configured(reference: &mut Tokenizer, files: &Files) -> Result<bool, String> {
    let before = reference.get_added_tokens_decoder();
    reference
        .add_tokens(files.added.values().cloned())
        .map_err(|e| e.to_string())?;
    let known = |content: &str| {
        let listed = files.added.values().find(|t| t.content == content).cloned();
        listed.or_else(|| {
            before
                .values()
                .find(|t| t.content == content && files.added.is_empty())
                .cloned()
        })
    };
    let special: Vec<AddedToken> = files
        .special
        .iter()
        .map(|content| {
            known(content)
                .unwrap_or_else(|| AddedToken::from(content.clone(), true))
                .special(true)
        })
        .collect();
    reference.add_special_tokens(special).map_err(|e| e.to_string())?;
    Ok(reference.get_added_tokens_decoder() != before)
}

/// What the file's post-processor puts around a prompt.
fn surroundings(reference: &Tokenizer) -> Result<(Vec<Token>, Vec<Token>), String> {
    let ids = |special: bool| {
        reference
            .encode_fast("a", special)
            .map(|e| e.get_ids().to_vec())
            .map_err(|e| e.to_string())
    };
    let (bare, full) = (ids(false)?, ids(true)?);
    let at = (0..=full.len().saturating_sub(bare.len()))
        .find(|at| full[*at..].starts_with(&bare))
        .ok_or("its post-processor changes the prompt's own ids")?;
    Ok((full[..at].to_vec(), full[at + bare.len()..].to_vec()))
}

/// Texts on which tokenizers are known to part: contractions, digit runs, white space of all kinds, marks,
/// combining characters, scripts without spaces, emoji sequences, bytes that no vocabulary holds.
const CORPUS: [&str; 16] = [
    "The quick brown fox didn't jump over 13 lazy dogs; they're GOING to've slept, we'll see, I'D say.",
    "It's 1234567890 or 3.14159, -42e10 (0x1F) \u{bd} \u{2167} \u{0661}\u{0662}\u{0663} 2\u{b2}.",
    "a  b   c    d\te\t\tf \t g\n\nh\r\ni\r\rj \n k\n \n  l   \n",
    "   leading and trailing   ",
    "\u{a0}no-break\u{2003}em\u{3000}ideographic\u{200b}zero\u{85}next\u{1c}file\u{2028}line",
    "caf\u{e9} cafe\u{301} \u{212b} \u{c5} A\u{30a} \u{1e9b}\u{323} \u{fb01} \u{3a9}\u{2126} \u{ac00} \u{1100}\u{1161}",
    "\u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c}\u{3002}\u{3053}\u{3093}\u{306b}\u{3061}\u{306f}\u{c548}\u{b155}",
    "\u{627}\u{644}\u{633}\u{644}\u{627}\u{645} \u{e2a}\u{e27}\u{e31}\u{e2a}\u{e14}\u{e35} \u{928}\u{92e}\u{938}\u{94d}\u{924}\u{947}",
    "\u{1f642}\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467} \u{1f1e9}\u{1f1ea} \u{2764}\u{fe0f} x\u{d7}y \u{1f44d}\u{1f3fd}",
    "fn main() { let x: Vec<u8> = vec![1, 2]; println!(\"{x:?}\"); } // ok\n\tif (a && b) || !c {}\n",
    "{\"key\": [1, 2.5, null, true], \"nested\": {\"a\\n\": \"\\u00e9\"}}",
    "https://example.org/a/b?c=d&e=%20f#g user@example.org C:\\path\\file.txt ../x/./y",
    "<|im_start|>user\n<s>[INST] not special [/INST]</s> <|endoftext|>",
    "\u{0}\u{1}\u{7f}\u{fffd}\u{feff}\u{10ffff}\u{e000}",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ................................ ======== ----",
    "'S 'T 'RE 'Ve 'm 'LL 'd \u{2019}s ''' \"\"\" `` don''t o'clock \u{17f}'\u{17f}",
];
