//! The few edits that a body may get, spliced in at member spans; every other byte stays as the client sent it.

use bytes::{BufMut, Bytes, BytesMut};

use super::scan::{Member, ScanError, members};

/// What to change in one body.
#[derive(Clone, Debug, Default)]
pub(crate) struct EditPlan {
    /// Replace (or add) `cache_salt` with this text.
    pub cache_salt: Option<String>,
    /// Ask a streamed answer for its usage.
    pub ask_usage: bool,
    /// Give this JSON text as `kv_transfer_params`.
    pub kv_transfer_params: Option<String>,
    /// Members that a prefill leg replaces: `max_tokens`, `max_completion_tokens`, `min_tokens`, `stream`, `n`.
    pub prefill_leg: bool,
    /// Further top-level members, as key and JSON text.
    pub extra: Vec<(&'static str, String)>,
}

/// An edited body.
#[derive(Clone, Debug)]
pub(crate) struct Edited {
    /// The bytes to send.
    pub body: Bytes,
    /// Whether the usage chunk was asked for by us alone and must not reach the client.
    pub strip_usage: bool,
}

/// Members that never pass: engines would announce blocks again without a copy.
const REPORT_MODE: &str = "kv_cache_report_mode";

/// Members that name other engines and the blocks they hold: an engine connects where they say. They are the router's to
/// give, and a client's own never pass.
const FOR_ENGINES: [&str; 4] = [
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
];

/// Applies `plan` to `body`, whose members are `found`.
pub(crate) fn edit(body: &Bytes, found: &[Member<'_>], plan: &EditPlan) -> Result<Edited, ScanError> {
    let mut out = Splice::default();
    let mut streams = false;
    let mut options_seen = false;
    let mut strip_usage = false;
    for member in found {
        let value = &body[member.value.clone()];
        match &*member.key {
            REPORT_MODE => out.drop_member(),
            "cache_salt" if plan.cache_salt.is_some() => out.drop_member(),
            key if FOR_ENGINES.contains(&key) => out.drop_member(),
            "vllm_xargs" => match without_report_mode(value)? {
                Some(new) => out.replace(format!("\"vllm_xargs\":{new}")),
                None => out.keep(&body[member.whole.clone()]),
            },
            "max_tokens" | "max_completion_tokens" | "min_tokens" | "stream" | "n" | "stream_options"
                if plan.prefill_leg =>
            {
                out.drop_member();
            }
            "stream_options" if plan.ask_usage => {
                options_seen = true;
                match with_usage(value)? {
                    Some(new) => {
                        strip_usage = true;
                        out.replace(format!("\"stream_options\":{new}"));
                    }
                    None => out.keep(&body[member.whole.clone()]),
                }
            }
            key => {
                if key == "stream" {
                    streams = value == b"true";
                }
                out.keep(&body[member.whole.clone()]);
            }
        }
    }
    if plan.ask_usage && !options_seen && streams {
        strip_usage = true;
        out.add("\"stream_options\":{\"include_usage\":true}".into());
    }
    if let Some(salt) = &plan.cache_salt {
        out.add(format!("\"cache_salt\":{}", serde_json::Value::from(salt.as_str())));
    }
    if let Some(params) = &plan.kv_transfer_params {
        out.add(format!("\"kv_transfer_params\":{params}"));
    }
    if plan.prefill_leg {
        out.add("\"stream\":false,\"max_tokens\":1".into());
        if found.iter().any(|m| m.key == "max_completion_tokens") {
            out.add("\"max_completion_tokens\":1".into());
        }
    }
    // Further members go last: of duplicates an engine takes the last one.
    for (key, json) in &plan.extra {
        out.add(format!("\"{key}\":{json}"));
    }
    Ok(Edited {
        body: out.finish(body),
        strip_usage,
    })
}

/// Members that are kept as they came, and new ones.
#[derive(Default)]
struct Splice<'a> {
    kept: Vec<Piece<'a>>,
    changed: bool,
}

enum Piece<'a> {
    Kept(&'a [u8]),
    New(String),
}

impl<'a> Splice<'a> {
    fn keep(&mut self, bytes: &'a [u8]) {
        self.kept.push(Piece::Kept(bytes));
    }

    fn drop_member(&mut self) {
        self.changed = true;
    }

    fn replace(&mut self, text: String) {
        self.changed = true;
        self.kept.push(Piece::New(text));
    }

    fn add(&mut self, text: String) {
        self.replace(text);
    }

    fn finish(self, original: &Bytes) -> Bytes {
        if !self.changed {
            return original.clone();
        }
        let size: usize = self
            .kept
            .iter()
            .map(|piece| {
                1 + match piece {
                    Piece::Kept(bytes) => bytes.len(),
                    Piece::New(text) => text.len(),
                }
            })
            .sum();
        let mut out = BytesMut::with_capacity(size + 2);
        for (i, piece) in self.kept.iter().enumerate() {
            out.put_u8(if i == 0 { b'{' } else { b',' });
            match piece {
                Piece::Kept(bytes) => out.put_slice(bytes),
                Piece::New(text) => out.put_slice(text.as_bytes()),
            }
        }
        if self.kept.is_empty() {
            out.put_u8(b'{');
        }
        out.put_u8(b'}');
        out.freeze()
    }
}

/// `stream_options` with usage switched on, or `None` where the client asked for it itself.
fn with_usage(value: &[u8]) -> Result<Option<String>, ScanError> {
    if value == b"null" {
        return Ok(Some("{\"include_usage\":true}".into()));
    }
    let found = members(value)?;
    if found
        .iter()
        .rev()
        .find(|m| m.key == "include_usage")
        .is_some_and(|m| &value[m.value.clone()] == b"true")
    {
        return Ok(None);
    }
    let mut text = String::from("{\"include_usage\":true");
    push_others(&mut text, value, &found, "include_usage");
    Ok(Some(text + "}"))
}

/// `vllm_xargs` without the report mode, or `None` where it has none.
fn without_report_mode(value: &[u8]) -> Result<Option<String>, ScanError> {
    if value == b"null" || memchr::memmem::find(value, b"{").is_none() {
        return Ok(None);
    }
    let found = members(value)?;
    if !found.iter().any(|m| m.key == REPORT_MODE) {
        return Ok(None);
    }
    let mut text = String::from("{");
    push_others(&mut text, value, &found, REPORT_MODE);
    if text.starts_with("{,") {
        text.remove(1);
    }
    Ok(Some(text + "}"))
}

/// Appends every member but `without`, each with a comma in front.
fn push_others(text: &mut String, value: &[u8], found: &[Member<'_>], without: &str) {
    for member in found.iter().filter(|m| m.key != without) {
        text.push(',');
        text.push_str(&String::from_utf8_lossy(&value[member.whole.clone()]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(text: &str, plan: &EditPlan) -> (String, bool) {
        let body = Bytes::copy_from_slice(text.as_bytes());
        let edited = edit(&body, &members(text.as_bytes()).unwrap(), plan).unwrap();
        (String::from_utf8(edited.body.to_vec()).unwrap(), edited.strip_usage)
    }

    #[test]
    fn a_body_without_edits_is_the_same_bytes() {
        let text = r#"{ "model" : "m", "weird": [1,  2], "n": 2 }"#;
        assert_eq!(
            run(
                text,
                &EditPlan {
                    ask_usage: true,
                    ..EditPlan::default()
                }
            ),
            (text.into(), false)
        );
    }

    #[test]
    fn usage_is_asked_for_once_and_only_in_streams() {
        let plan = EditPlan {
            ask_usage: true,
            ..EditPlan::default()
        };
        let (text, strip) = run(r#"{"model":"m","stream":true}"#, &plan);
        assert_eq!(
            text,
            r#"{"model":"m","stream":true,"stream_options":{"include_usage":true}}"#
        );
        assert!(strip);
        let own = r#"{"stream":true,"stream_options":{"include_usage":true}}"#;
        assert_eq!(run(own, &plan), (own.into(), false));
        let (text, strip) = run(
            r#"{"stream":true,"stream_options":{"x":1,"include_usage":false}}"#,
            &plan,
        );
        assert_eq!(text, r#"{"stream":true,"stream_options":{"include_usage":true,"x":1}}"#);
        assert!(strip);
    }

    #[test]
    fn the_report_mode_is_stripped_wherever_a_client_puts_it() {
        let plan = EditPlan::default();
        let text = r#"{"kv_cache_report_mode":"full","a":1,"vllm_xargs":{"kv_cache_report_mode":"full","b":2}}"#;
        assert_eq!(run(text, &plan).0, r#"{"a":1,"vllm_xargs":{"b":2}}"#);
        let text = "{\"kv\\u005fcache_report_mode\":\"full\"}";
        assert_eq!(run(text, &plan).0, "{}");
    }

    #[test]
    fn a_clients_own_words_about_other_engines_never_pass() {
        let text = r#"{"model":"m","kv_transfer_params":{"remote_host":"10.0.0.9"},"bootstrap_host":"x","bootstrap_port":1,"bootstrap\u005froom":2}"#;
        assert_eq!(run(text, &EditPlan::default()).0, r#"{"model":"m"}"#);
        let plan = EditPlan {
            extra: vec![("bootstrap_room", "7".into())],
            ..EditPlan::default()
        };
        assert_eq!(run(text, &plan).0, r#"{"model":"m","bootstrap_room":7}"#);
    }

    #[test]
    fn every_duplicate_of_a_replaced_salt_goes() {
        let plan = EditPlan {
            cache_salt: Some("h".into()),
            ..EditPlan::default()
        };
        let text = r#"{"cache_salt":"a","model":"m","cache\u005fsalt":"b"}"#;
        assert_eq!(run(text, &plan).0, r#"{"model":"m","cache_salt":"h"}"#);
    }

    #[test]
    fn a_prefill_leg_asks_for_one_token_and_no_stream() {
        let plan = EditPlan {
            prefill_leg: true,
            kv_transfer_params: Some("{\"do_remote_decode\":true}".into()),
            ..EditPlan::default()
        };
        let text = r#"{"model":"m","stream":true,"max_completion_tokens":9,"stream_options":{"include_usage":true}}"#;
        assert_eq!(
            run(text, &plan).0,
            r#"{"model":"m","kv_transfer_params":{"do_remote_decode":true},"stream":false,"max_tokens":1,"max_completion_tokens":1}"#
        );
    }
}
