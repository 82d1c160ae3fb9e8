//! Where a text may be cut so that the pieces encode to exactly the ids of the whole.
//!
//! Two kinds of cut are exact, each only under conditions that are read off the tokenizer file:
//! around added tokens, which tokenizers split off before anything else; and between a character that isn't
//! white space and the space after it, where no alternative of the known pre-tokenizer patterns can match
//! across and no normal form composes. Pieces depend on the text before them only through where they start, so
//! equal starts give equal pieces.

use crate::Token;
use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;
use std::collections::HashSet;
use tokenizers::AddedToken;

/// A piece ends at the first space at or after this many bytes. Shorter pieces cost more look-ups for a known
/// start (0.1 µs each), longer ones compute more again after the point where two prompts part.
const PIECE_BYTES_MIN: usize = 512;

/// One piece of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Piece<'a> {
    /// An added token.
    Token(Token),
    /// Text to be encoded on its own.
    Text(&'a str),
}

/// How added tokens cut a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Split {
    /// Not at all: some token's flags look past its own text.
    Never,
    /// Token by token.
    Plain,
    /// A token stays in front of the text after it, which it may strip or shield from being first.
    InFront,
}

/// The cuts that one tokenizer allows.
#[derive(Debug)]
pub(crate) struct Cutter {
    split: Split,
    at_spaces: bool,
    matcher: Option<AhoCorasick>,
    ids: Vec<Token>,
}

/// The pre-tokenizer patterns for which a cut before a space was shown to be right. In each, an alternative that
/// starts with anything but white space never matches a space further on, and nothing looks behind.
const SPACE_SAFE_PATTERNS: [&str; 4] = [
    // Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Qwen 2 and 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // o200k
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // tekken
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

impl Cutter {
    /// Reads the cuts off a tokenizer file and its added tokens.
    pub fn new(file: &Value, added: &[(Token, AddedToken)]) -> Self {
        let split = split_rule(file, added);
        let at_spaces = split == Split::Plain && spaces_are_safe(file);
        let matcher = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(added.iter().map(|(_, token)| token.content.as_str()))
            .ok()
            .filter(|_| !added.is_empty());
        let split = if matcher.is_none() && !added.is_empty() {
            Split::Never
        } else {
            split
        };
        Self {
            split,
            at_spaces,
            matcher,
            ids: added.iter().map(|(id, _)| *id).collect(),
        }
    }

    /// Whether known pieces can be reused at all.
    pub fn cuts(&self) -> bool {
        self.split != Split::Never
    }

    /// Calls `each` with every piece in order until it fails or answers false; says whether all were taken.
    pub fn pieces<'a, E>(&self, text: &'a str, mut each: impl FnMut(Piece<'a>) -> Result<bool, E>) -> Result<bool, E> {
        let mut from = 0;
        if self.split != Split::Never {
            for found in self.matcher.iter().flat_map(|m| m.find_iter(text)) {
                if !self.segment(&text[from..found.start()], &mut each)? {
                    return Ok(false);
                }
                from = found.start();
                if self.split == Split::Plain {
                    if !each(Piece::Token(self.ids[found.pattern().as_usize()]))? {
                        return Ok(false);
                    }
                    from = found.end();
                }
            }
        }
        self.segment(&text[from..], &mut each)
    }

    fn segment<'a, E>(
        &self,
        mut text: &'a str,
        each: &mut impl FnMut(Piece<'a>) -> Result<bool, E>,
    ) -> Result<bool, E> {
        while !text.is_empty() {
            let (piece, rest) = text.split_at(self.cut(text).unwrap_or(text.len()));
            if !each(Piece::Text(piece))? {
                return Ok(false);
            }
            text = rest;
        }
        Ok(true)
    }

    /// The first allowed cut at a space from the least piece size on.
    fn cut(&self, text: &str) -> Option<usize> {
        if !self.at_spaces || text.len() <= PIECE_BYTES_MIN {
            return None;
        }
        memchr::memchr_iter(b' ', &text.as_bytes()[PIECE_BYTES_MIN..])
            .map(|at| at + PIECE_BYTES_MIN)
            .find(|at| is_cut(text, *at))
    }

    /// How much of `text[..end]` surely encodes alike whatever stands at `end`.
    pub fn safe_prefix(&self, text: &str, end: usize) -> usize {
        let mut safe = 0;
        if self.split == Split::Never {
            return safe;
        }
        for found in self.matcher.iter().flat_map(|m| m.find_iter(text)) {
            if found.start() > end {
                break;
            }
            let border = if self.split == Split::Plain && found.end() <= end {
                found.end()
            } else {
                found.start()
            };
            safe = safe.max(border.min(end));
        }
        if self.at_spaces {
            let head = &text.as_bytes()[safe..end];
            let space = memchr::memrchr_iter(b' ', head)
                .map(|at| safe + at)
                .find(|at| *at > safe && is_cut(text, *at));
            safe = space.unwrap_or(safe);
        }
        safe
    }
}

/// Whether the space at byte `at` follows a character that isn't white space or a control.
fn is_cut(text: &str, at: usize) -> bool {
    text[..at]
        .chars()
        .next_back()
        .is_some_and(|c| !c.is_whitespace() && !c.is_control())
}

fn split_rule(file: &Value, added: &[(Token, AddedToken)]) -> Split {
    let normalizer = parts(&file["normalizer"], "normalizers");
    let plain_normalizers = ["NFC", "NFKC", "Prepend", "Replace"];
    if normalizer.iter().any(|n| !plain_normalizers.contains(&kind(n))) {
        return Split::Never;
    }
    let pre_tokenizer = parts(&file["pre_tokenizer"], "pretokenizers");
    let plain_pre_tokenizers = ["ByteLevel", "Split", "Digits", "Metaspace"];
    if pre_tokenizer.iter().any(|p| !plain_pre_tokenizers.contains(&kind(p))) {
        return Split::Never;
    }
    let tokens = || added.iter().map(|(_, token)| token);
    if tokens().any(|t| t.lstrip || t.single_word || t.content.is_empty()) {
        return Split::Never;
    }
    let normalized = tokens().any(|t| t.normalized);
    if normalized && !normalizer.is_empty() || overlap(added) {
        return Split::Never;
    }
    let first_matters = pre_tokenizer
        .iter()
        .any(|p| kind(p) == "Metaspace" && p["prepend_scheme"] == "first");
    if first_matters || tokens().any(|t| t.rstrip) {
        Split::InFront
    } else {
        Split::Plain
    }
}

/// Whether two occurrences of added tokens can share text, or a token matched in the second, normalized round
/// lies inside or around one of the first.
fn overlap(added: &[(Token, AddedToken)]) -> bool {
    let borders = |s: &str| s.char_indices().map(|(at, _)| at).skip(1).collect::<Vec<_>>();
    let mut heads: HashSet<&str> = HashSet::new();
    for (_, token) in added {
        heads.extend(borders(&token.content).into_iter().map(|at| &token.content[..at]));
    }
    let crosses = |token: &AddedToken| {
        borders(&token.content)
            .into_iter()
            .any(|at| heads.contains(&token.content[at..]))
    };
    if added.iter().any(|(_, token)| crosses(token)) {
        return true;
    }
    let (second, first): (Vec<_>, Vec<_>) = added.iter().map(|(_, t)| t).partition(|t| t.normalized);
    if second.is_empty() || first.is_empty() {
        return false;
    }
    let inside = |inner: &[&AddedToken], outer: &[&AddedToken]| {
        let Ok(matcher) = AhoCorasick::new(inner.iter().map(|t| t.content.as_str())) else {
            return true;
        };
        outer.iter().any(|t| matcher.is_match(&t.content))
    };
    inside(&first, &second) || inside(&second, &first)
}

fn spaces_are_safe(file: &Value) -> bool {
    if parts(&file["normalizer"], "normalizers")
        .iter()
        .any(|n| kind(n) != "NFC")
    {
        return false;
    }
    let model = &file["model"];
    if model["type"].as_str().is_some_and(|t| t != "BPE") || model["dropout"].as_f64().is_some_and(|d| d > 0.0) {
        return false;
    }
    let byte_level = |p: &Value, regex: bool| {
        kind(p) == "ByteLevel" && p["add_prefix_space"] == false && p["use_regex"].as_bool().unwrap_or(true) == regex
    };
    match parts(&file["pre_tokenizer"], "pretokenizers").as_slice() {
        // GPT-2's own pattern
        [only] => byte_level(only, true),
        [split, bytes] => {
            let pattern = split["pattern"]["Regex"].as_str().unwrap_or_default();
            kind(split) == "Split"
                && split["behavior"] == "Isolated"
                && split["invert"].as_bool() != Some(true)
                && SPACE_SAFE_PATTERNS.contains(&pattern)
                && byte_level(bytes, false)
        }
        _ => false,
    }
}

/// The steps of a possibly nested sequence; none for null.
fn parts<'v>(value: &'v Value, list: &str) -> Vec<&'v Value> {
    match value {
        Value::Null => Vec::new(),
        v if kind(v) == "Sequence" => v[list]
            .as_array()
            .into_iter()
            .flatten()
            .flat_map(|inner| parts(inner, list))
            .collect(),
        v => vec![v],
    }
}

fn kind(value: &Value) -> &str {
    value["type"].as_str().unwrap_or_default()
}
