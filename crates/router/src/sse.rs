//! Watches a stream of server-sent events as it passes: its end mark, its usage, and the one event to take out again.
//!
//! Frames go on as they came. Only where a usage event that the client didn't ask for must be taken out is the start of
//! an incomplete event held back until its rest arrives; nothing can be shown of it before that anyway.

use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem;
use serde::Deserialize;

/// Longest event whose content is looked at; longer ones pass unread.
const EVENT_BYTES_MAX: usize = 256 * 1024;

/// What an engine says it used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Usage {
    /// Prompt length in tokens.
    #[serde(default)]
    pub prompt_tokens: u64,
    /// Answer length in tokens.
    #[serde(default)]
    pub completion_tokens: Option<u64>,
    /// Where the engine was told to report cached tokens.
    #[serde(default)]
    pub prompt_tokens_details: Option<PromptDetails>,
}

/// Part of [`Usage`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct PromptDetails {
    /// Prompt tokens that the engine took from its caches.
    #[serde(default)]
    pub cached_tokens: Option<u64>,
}

impl Usage {
    /// Prompt tokens from the engine's caches, where it says so.
    pub(crate) fn cached(&self) -> Option<u64> {
        self.prompt_tokens_details.and_then(|d| d.cached_tokens)
    }
}

/// Finds a usage, and the end mark; made once, since every chunk is looked through.
static USAGE: LazyLock<memmem::Finder<'static>> = LazyLock::new(|| memmem::Finder::new(USAGE_KEY));
static DONE: LazyLock<memmem::Finder<'static>> = LazyLock::new(|| memmem::Finder::new(b"[DONE]"));
/// Finds the last usage.
static LAST_USAGE: LazyLock<memmem::FinderRev<'static>> = LazyLock::new(|| memmem::FinderRev::new(USAGE_KEY));
const USAGE_KEY: &[u8] = b"\"usage\"";

/// State of one stream.
#[derive(Debug, Default)]
pub(crate) struct SseWatch {
    strip_usage: bool,
    carry: BytesMut,
    passing_long: bool,
    /// `[DONE]` was seen.
    pub done: bool,
    /// The last usage that was seen.
    pub usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow, default)]
    choices: Option<&'a serde_json::value::RawValue>,
    #[serde(default)]
    usage: Option<Usage>,
}

impl SseWatch {
    /// A watch that takes the usage event out where `strip_usage`.
    pub(crate) fn new(strip_usage: bool) -> Self {
        Self {
            strip_usage,
            ..Self::default()
        }
    }

    /// Looks at the next frame and gives what to send on; may be empty.
    pub(crate) fn push(&mut self, data: Bytes) -> Bytes {
        if self.carry.is_empty() && !self.passing_long && ends_event(&data) && !interesting(&data) {
            return data;
        }
        if self.passing_long {
            // The rest of an event too long to look at.
            self.passing_long = !ends_event(&data);
            self.done |= memmem::find(&data, b"data: [DONE]").is_some();
            return data;
        }
        if self.carry.is_empty() {
            let end = last_event_end(&data);
            let whole = data.slice(..end);
            let rest = data.slice(end..);
            let out = self.events(whole);
            self.keep(&rest);
            return match (self.strip_usage, self.passing_long) {
                (false, _) => data,
                (true, false) => out,
                (true, true) => concat(&out, &rest),
            };
        }
        self.joined(data)
    }

    /// What is still held back when the stream ends.
    pub(crate) fn finish(&mut self) -> Bytes {
        let rest = std::mem::take(&mut self.carry).freeze();
        if self.strip_usage {
            return self.events(rest);
        }
        self.events(rest);
        Bytes::new()
    }

    /// A frame that continues an incomplete event.
    fn joined(&mut self, data: Bytes) -> Bytes {
        let mut all = std::mem::take(&mut self.carry);
        all.extend_from_slice(&data);
        let all = all.freeze();
        let end = last_event_end(&all);
        let out = self.events(all.slice(..end));
        let rest = all.slice(end..);
        self.keep(&rest);
        if !self.strip_usage {
            return data;
        }
        if self.passing_long { concat(&out, &rest) } else { out }
    }

    fn keep(&mut self, rest: &[u8]) {
        if rest.len() > EVENT_BYTES_MAX {
            self.passing_long = true;
        } else {
            self.carry.extend_from_slice(rest);
        }
    }

    /// Reads whole events; gives them without the usage event where that is to be taken out.
    fn events(&mut self, whole: Bytes) -> Bytes {
        if !interesting(&whole) {
            return whole;
        }
        let mut removed = Vec::new();
        let mut start = 0;
        while start < whole.len() {
            let end = start + first_event_end(&whole[start..]).unwrap_or(whole.len() - start);
            if self.event(&whole[start..end]) {
                removed.push(start..end);
            }
            start = end;
        }
        if removed.is_empty() {
            return whole;
        }
        let mut out = BytesMut::with_capacity(whole.len());
        let mut from = 0;
        for range in removed {
            out.extend_from_slice(&whole[from..range.start]);
            from = range.end;
        }
        out.extend_from_slice(&whole[from..]);
        out.freeze()
    }

    /// Reads one event; true where it must not reach the client.
    fn event(&mut self, event: &[u8]) -> bool {
        let Some(payload) = event.trim_ascii().strip_prefix(b"data:").map(<[u8]>::trim_ascii_start) else {
            return false;
        };
        if payload == b"[DONE]" {
            self.done = true;
            return false;
        }
        if USAGE.find(payload).is_none() {
            return false;
        }
        let Ok(chunk) = serde_json::from_slice::<Chunk<'_>>(payload) else {
            return false;
        };
        let Some(usage) = chunk.usage else { return false };
        self.usage = Some(usage);
        self.strip_usage && chunk.choices.is_some_and(|raw| raw.get().trim() == "[]")
    }
}

/// The usage in the tail of a whole (not streamed) answer.
pub(crate) fn usage_in_tail(tail: &[u8]) -> Option<Usage> {
    let mut end = tail.len();
    while let Some(at) = LAST_USAGE.rfind(&tail[..end]) {
        // A key of the answer's own object isn't preceded by a backslash, as it would be inside a string.
        let rest = tail[at + USAGE_KEY.len()..].trim_ascii_start();
        if let Some(value) = rest.strip_prefix(b":")
            && (at == 0 || tail[at - 1] != b'\\')
        {
            let mut values = serde_json::Deserializer::from_slice(value).into_iter::<Usage>();
            if let Some(Ok(usage)) = values.next() {
                return Some(usage);
            }
        }
        end = at;
    }
    None
}

/// Whether a frame may hold something to look at.
fn interesting(data: &[u8]) -> bool {
    USAGE.find(data).is_some() || DONE.find(data).is_some()
}

fn ends_event(data: &[u8]) -> bool {
    data.ends_with(b"\n\n") || data.ends_with(b"\r\n\r\n")
}

/// Offset behind the first event's blank line.
fn first_event_end(data: &[u8]) -> Option<usize> {
    let plain = memmem::find(data, b"\n\n").map(|at| at + 2);
    let crlf = memmem::find(data, b"\n\r\n").map(|at| at + 3);
    match (plain, crlf) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Offset behind the last whole event; 0 where none is whole.
fn last_event_end(data: &[u8]) -> usize {
    let plain = memmem::rfind(data, b"\n\n").map_or(0, |at| at + 2);
    let crlf = memmem::rfind(data, b"\n\r\n").map_or(0, |at| at + 3);
    plain.max(crlf)
}

fn concat(a: &[u8], b: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(a.len() + b.len());
    out.extend_from_slice(a);
    out.extend_from_slice(b);
    out.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = concat!(
        "data: {\"choices\":[{\"delta\":{\"content\":\"a \\\"usage\\\": x\"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{}}],\"usage\":null}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":1,",
        "\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n",
        "data: [DONE]\n\n",
    );

    fn run(text: &str, cut: usize, strip: bool) -> (String, SseWatch) {
        let mut watch = SseWatch::new(strip);
        let mut out = Vec::new();
        for part in text.as_bytes().chunks(cut) {
            out.extend_from_slice(&watch.push(Bytes::copy_from_slice(part)));
        }
        out.extend_from_slice(&watch.finish());
        (String::from_utf8(out).unwrap(), watch)
    }

    #[test]
    fn every_cutting_of_a_stream_gives_the_same_bytes_and_facts() {
        let stripped = STREAM.replace(
            &STREAM[STREAM.find("data: {\"choices\":[],").unwrap()..STREAM.find("data: [D").unwrap()],
            "",
        );
        for text in [STREAM.to_string(), STREAM.replace('\n', "\r\n")] {
            for cut in 1..text.len() {
                let (plain, watch) = run(&text, cut, false);
                assert_eq!(plain, text);
                assert!(watch.done);
                assert_eq!(watch.usage.unwrap().cached(), Some(4));
                let (out, watch) = run(&text, cut, true);
                assert_eq!(out.replace("\r\n", "\n"), stripped, "cut {cut}");
                assert!(watch.done);
                assert_eq!(watch.usage.unwrap().prompt_tokens, 7);
            }
        }
    }

    #[test]
    fn an_event_too_long_to_look_at_passes_whole() {
        let text = format!("data: {}\n\n{STREAM}", "x".repeat(EVENT_BYTES_MAX * 2));
        for strip in [false, true] {
            let (out, _) = run(&text, 70_000, strip);
            assert!(out.starts_with("data: xxx"));
            assert!(out.contains("[DONE]"));
        }
    }

    #[test]
    fn whole_answers_tell_their_usage_at_the_end() {
        let tail =
            br#"{"choices":[{"text":"\"usage\":{\"prompt_tokens\":1}"}],"usage" : {"prompt_tokens":9},"x":null}"#;
        assert_eq!(usage_in_tail(tail).unwrap().prompt_tokens, 9);
        assert_eq!(usage_in_tail(br#"{"usage":null}"#), None);
        assert_eq!(usage_in_tail(b""), None);
    }
}
