//! The members that a decision needs, read from their spans; everything else stays unread.

use std::sync::LazyLock;

use cairn_tokens::Truncate;
use http::Uri;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::scan::{Member, ScannedBody};
use super::turns::Turns;

/// Which OpenAI operation a body is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(crate) enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/v1/embeddings`.
    Embeddings,
}

impl Endpoint {
    /// The engine's path.
    fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Embeddings => "/v1/embeddings",
        }
    }

    /// The same, parsed.
    pub(crate) fn uri(self) -> Uri {
        static URIS: LazyLock<[Uri; 3]> = LazyLock::new(|| {
            [Endpoint::Chat, Endpoint::Completions, Endpoint::Embeddings].map(|of| Uri::from_static(of.path()))
        });
        URIS[self as usize].clone()
    }

    /// Label in metrics and spans.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Embeddings => "embeddings",
        }
    }

    /// The operation whose body has these members, for doors that serve them all.
    pub(crate) fn by_shape(found: &[Member<'_>]) -> Option<Self> {
        let has = |key: &str| found.iter().any(|m| m.key == key);
        if has("messages") {
            Some(Self::Chat)
        } else if has("prompt") {
            Some(Self::Completions)
        } else if has("input") {
            Some(Self::Embeddings)
        } else {
            None
        }
    }
}

/// What a text completion is asked to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PromptInput {
    /// Texts to tokenize; a single prompt is a list of one.
    Texts(Vec<String>),
    /// Token ids, used as they are.
    Tokens(Vec<Vec<u32>>),
}

/// What of a chat decides its prompt.
#[derive(Clone, Debug)]
pub(crate) enum Chat {
    /// Roles and texts, and nothing else.
    Plain(Turns),
    /// All its members that do.
    Whole(Value),
}

/// What a decision needs of a body.
#[derive(Clone, Debug)]
pub(crate) struct Fields<'a> {
    /// `model`, where given.
    pub model: Option<String>,
    /// `stream`.
    pub stream: bool,
    /// Longest answer asked for, in tokens.
    pub max_tokens: Option<u32>,
    /// `cache_salt`, where given.
    pub cache_salt: Option<String>,
    /// `prompt_cache_key`, where given.
    pub prompt_cache_key: Option<String>,
    /// `add_special_tokens`, where given.
    pub add_special_tokens: Option<bool>,
    /// `truncate_prompt_tokens` or `truncation_side` is given.
    pub truncates: bool,
    /// What that keeps of a text completion's prompts.
    pub truncate: Option<Truncate>,
    /// What reaches the chat template; `None` where this isn't a chat.
    pub chat: Option<Chat>,
    /// Raw `prompt`.
    pub prompt: Option<&'a str>,
}

/// A member with the wrong type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{param}` must be {expected}{}", .at.map(|at| format!(" (at byte {at})")).unwrap_or_default())]
pub(crate) struct FieldsError {
    /// Which member.
    pub param: &'static str,
    /// What it must be.
    pub expected: &'static str,
    /// Where its value starts; `None` where it is missing, or only its own text is at hand.
    pub at: Option<usize>,
}

impl<'a> Fields<'a> {
    /// Reads the members of a body for `endpoint`; of duplicates the last one counts, as in engines.
    pub(crate) fn read(body: &'a ScannedBody, found: &[Member<'a>], endpoint: Endpoint) -> Result<Self, FieldsError> {
        let get = Getter {
            body: body.bytes(),
            found,
        };
        let chat = match endpoint {
            Endpoint::Chat => Some(get.chat(body)?),
            Endpoint::Completions | Endpoint::Embeddings => None,
        };
        // The scan has checked the encoding of the whole body.
        let prompt = get.raw("prompt").and_then(|raw| std::str::from_utf8(raw).ok());
        if endpoint == Endpoint::Completions && prompt.is_none() {
            return Err(get.wrong("prompt", PROMPT_SHAPES));
        }
        let stream = get.flag("stream")?.unwrap_or(false);
        if stream && get.raw("stream_options").is_some_and(|raw| !raw.starts_with(b"{")) {
            return Err(get.wrong("stream_options", "an object"));
        }
        let max_tokens = match get.number("max_completion_tokens")? {
            Some(n) => Some(n),
            None => get.number("max_tokens")?,
        };
        let truncates = get.raw("truncate_prompt_tokens").is_some();
        Ok(Self {
            model: get.text("model")?,
            stream,
            max_tokens: max_tokens.map(|n| u32::try_from(n.max(0)).unwrap_or(u32::MAX)),
            cache_salt: get.text("cache_salt")?,
            prompt_cache_key: get.text("prompt_cache_key")?,
            add_special_tokens: get.flag("add_special_tokens")?,
            truncates,
            // A wrong type is left to the engine, whose rules differ between versions.
            truncate: match truncates.then(|| get.object(&["truncate_prompt_tokens", "truncation_side"])) {
                Some(Value::Object(object)) => Truncate::from_body(&object).ok().flatten(),
                _ => None,
            },
            chat,
            prompt,
        })
    }
}

/// Members that decide a chat's prompt, beside its messages.
const CHAT_OPTIONS: [&str; 11] = [
    "tools",
    "tool_choice",
    "documents",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "truncate_prompt_tokens",
    "truncation_side",
];

/// What `prompt` may be.
const PROMPT_SHAPES: &str = "a string, a list of strings, a list of token ids or a list of such lists";

impl PromptInput {
    /// Reads the value of `prompt`.
    pub(crate) fn parse(raw: &str) -> Result<Self, FieldsError> {
        let wrong = || FieldsError {
            param: "prompt",
            expected: PROMPT_SHAPES,
            at: None,
        };
        fn read<'de, T: Deserialize<'de>>(raw: &'de str) -> Option<T> {
            serde_json::from_str(raw).ok()
        }
        let inner = raw.strip_prefix('[').map(str::trim_start);
        let parsed = match inner.and_then(|rest| rest.chars().next()) {
            None => read::<String>(raw).map(|text| Self::Texts(vec![text])),
            Some('"') => read(raw).map(Self::Texts),
            Some('[') => read(raw).map(Self::Tokens),
            Some(_) => read::<Vec<u32>>(raw).map(|tokens| Self::Tokens(vec![tokens])),
        };
        parsed.ok_or_else(wrong)
    }
}

/// Typed access to members.
struct Getter<'a, 'm> {
    body: &'a [u8],
    found: &'m [Member<'a>],
}

impl<'a> Getter<'a, '_> {
    fn member(&self, key: &str) -> Option<&Member<'a>> {
        self.found.iter().rev().find(|m| m.key == key)
    }

    /// The JSON text of a member that is there and not null.
    fn raw(&self, key: &str) -> Option<&'a [u8]> {
        let value = self.body.get(self.member(key)?.value.clone())?;
        (value != b"null").then_some(value)
    }

    fn chat(&self, body: &ScannedBody) -> Result<Chat, FieldsError> {
        let place = self.found.iter().rposition(|m| m.key == "messages");
        if !place.is_some_and(|at| self.body[self.found[at].value.clone()].starts_with(b"[")) {
            return Err(self.wrong("messages", "a list of messages"));
        }
        if let Some(turns) = place.and_then(|at| body.turns(at))
            && CHAT_OPTIONS.iter().all(|option| self.raw(option).is_none())
        {
            return Ok(Chat::Plain(turns));
        }
        let mut keys = vec!["messages"];
        keys.extend(CHAT_OPTIONS);
        Ok(Chat::Whole(self.object(&keys)))
    }

    fn wrong(&self, param: &'static str, expected: &'static str) -> FieldsError {
        FieldsError {
            param,
            expected,
            at: self.member(param).map(|m| m.value.start),
        }
    }

    /// The named members that are there, as one object.
    fn object(&self, keys: &[&str]) -> Value {
        let mut object = Map::new();
        for &key in keys {
            if let Some(raw) = self.raw(key)
                && let Ok(value) = serde_json::from_slice(raw)
            {
                object.insert(key.to_string(), value);
            }
        }
        Value::Object(object)
    }

    fn typed<T: Deserialize<'a>>(&self, param: &'static str, expected: &'static str) -> Result<Option<T>, FieldsError> {
        match self.raw(param) {
            None => Ok(None),
            Some(raw) => serde_json::from_slice(raw)
                .map(Some)
                .map_err(|_| self.wrong(param, expected)),
        }
    }

    fn text(&self, param: &'static str) -> Result<Option<String>, FieldsError> {
        self.typed(param, "a string")
    }

    fn flag(&self, param: &'static str) -> Result<Option<bool>, FieldsError> {
        self.typed(param, "true or false")
    }

    fn number(&self, param: &'static str) -> Result<Option<i64>, FieldsError> {
        self.typed(param, "a whole number")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str, endpoint: Endpoint) -> Result<Fields<'static>, FieldsError> {
        let body = Box::leak(Box::new(ScannedBody::new(text.to_owned().into()).unwrap()));
        Fields::read(body, &body.members(), endpoint)
    }

    #[test]
    fn prompts_come_in_four_shapes() {
        let check = |raw: &str, want: Option<PromptInput>| assert_eq!(PromptInput::parse(raw).ok(), want, "{raw}");
        check(r#""a\u00d7""#, Some(PromptInput::Texts(vec!["a\u{d7}".into()])));
        check(r#"["a","b"]"#, Some(PromptInput::Texts(vec!["a".into(), "b".into()])));
        check("[1, 2]", Some(PromptInput::Tokens(vec![vec![1, 2]])));
        check("[ [1],[2,3] ]", Some(PromptInput::Tokens(vec![vec![1], vec![2, 3]])));
        check("[1,\"a\"]", None);
        check("[-1]", None);
        check("7", None);
    }

    #[test]
    fn wrong_types_name_the_member() {
        let error = fields(r#"{"model":7,"prompt":"x"}"#, Endpoint::Completions).unwrap_err();
        assert_eq!(error.to_string(), "`model` must be a string (at byte 9)");
        let missing = fields("{}", Endpoint::Chat).unwrap_err();
        assert_eq!(missing.to_string(), "`messages` must be a list of messages");
        let text = r#"{"prompt":"x","stream":true,"stream_options":5}"#;
        assert_eq!(fields(text, Endpoint::Completions).unwrap_err().param, "stream_options");
        assert_eq!(fields("{}", Endpoint::Completions).unwrap_err().param, "prompt");
    }

    #[test]
    fn a_chat_with_any_option_is_read_whole() {
        let messages = r#""messages":[{"role":"user","content":"a"}]"#;
        let plain = |more: &str| {
            let text = format!("{{{messages}{more}}}");
            matches!(fields(&text, Endpoint::Chat).unwrap().chat, Some(Chat::Plain(_)))
        };
        assert!(plain("") && plain(r#","model":"m","stream":true,"max_tokens":3,"temperature":0"#));
        for option in CHAT_OPTIONS {
            assert!(!plain(&format!(",\"{option}\":true")), "{option}");
            assert!(plain(&format!(",\"{option}\":null")), "{option}");
        }
    }

    #[test]
    fn the_last_duplicate_counts() {
        let got = fields(
            r#"{"model":"a","model":"b","prompt":"x","stream":true}"#,
            Endpoint::Completions,
        )
        .unwrap();
        assert_eq!(got.model.as_deref(), Some("b"));
        assert!(got.stream);
    }
}
