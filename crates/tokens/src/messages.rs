//! Messages as the engine hands them to the template: content flattened or kept as parts, tool arguments parsed.
//!
//! Follows what vLLM 0.32 does to a chat body before rendering; each rule was checked against its `/tokenize`.

use crate::error::ChatError;
use crate::few::mapping;
use crate::format::ContentFormat;
use crate::request::{PlainMessage, invalid};
use minijinja::Value as Jinja;
use serde_json::{Map, Value as Json};
use std::borrow::Cow;

/// Stands where a media item goes when looking for the first place that text can't be known; from a
/// private-use plane, so that no real prompt holds it.
pub(crate) const MEDIA_MARK: &str = "\u{10FFFD}\u{F8FFE}media\u{F8FFE}\u{10FFFD}";

/// Part fields that the engine consumes itself; any other field is passed on to the template.
const KNOWN_PART_FIELDS: &[&str] = &[
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];

/// A client's changing attribution line, which engines drop from system texts.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// One message ready for the template.
#[derive(Debug, Clone)]
pub(crate) struct Message<'a> {
    pub role: &'a str,
    pub content: Content<'a>,
    fields: Vec<(&'static str, Jinja)>,
}

/// Its content: one string, or parts for templates that loop over them.
#[derive(Debug, Clone)]
pub(crate) enum Content<'a> {
    Text(Cow<'a, str>),
    Parts(Vec<Part<'a>>),
}

/// One part of a content list.
#[derive(Debug, Clone)]
pub(crate) struct Part<'a> {
    pub kind: PartKind<'a>,
    extra: Vec<(&'a str, &'a Json)>,
}

/// What a part is.
#[derive(Debug, Clone)]
pub(crate) enum PartKind<'a> {
    Text(Cow<'a, str>),
    Media(&'static str),
    ToolReference(&'a str),
}

/// A conversation and whether it holds media.
#[derive(Debug, Clone)]
pub(crate) struct Conversation<'a> {
    pub messages: Vec<Message<'a>>,
    pub has_media: bool,
}

impl<'a> Conversation<'a> {
    /// Reads `messages` under the given content format.
    pub fn read(messages: &'a [Json], format: ContentFormat) -> Result<Self, ChatError> {
        if messages.is_empty() {
            return Err(invalid("messages", "must hold at least one message"));
        }
        let mut out = Self {
            messages: Vec::with_capacity(messages.len()),
            has_media: false,
        };
        for message in messages {
            let read = read_message(message, format, &mut out.has_media)?;
            out.messages.push(read);
        }
        Ok(out)
    }

    /// The same of messages that are nothing but roles and texts.
    pub fn plain(messages: &'a [PlainMessage<'a>], format: ContentFormat) -> Result<Self, ChatError> {
        if messages.is_empty() {
            return Err(invalid("messages", "must hold at least one message"));
        }
        let nothing_else = Map::new();
        let read = |message: &'a PlainMessage<'a>| -> Result<Message<'a>, ChatError> {
            let (content, _) = content_of(&message.role, vec![Part::of(&message.content)], format);
            Ok(Message {
                role: &message.role,
                content,
                fields: read_fields(&nothing_else, &message.role)?,
            })
        };
        Ok(Self {
            messages: messages.iter().map(read).collect::<Result<_, _>>()?,
            has_media: false,
        })
    }

    /// Turns developer messages into system ones and merges all system messages into a first one, for templates
    /// that don't know the developer role.
    pub fn developer_to_system(&mut self) {
        if !self.messages.iter().any(|m| m.role == "developer") {
            return;
        }
        for message in self.messages.iter_mut().filter(|m| m.role == "developer") {
            message.role = "system";
            message.fields.retain(|(name, _)| *name != "tools");
        }
        let system = self.messages.iter().filter(|m| m.role == "system").count();
        if system <= 1 && self.messages.first().is_some_and(|m| m.role == "system") {
            return;
        }
        let mut merged: Vec<String> = Vec::new();
        for message in self.messages.iter().filter(|m| m.role == "system") {
            let text = message.content.joined_text();
            if !text.is_empty() {
                merged.push(text);
            }
        }
        self.messages.retain(|m| m.role != "system");
        let content = Content::Text(merged.join("\n\n").into());
        self.messages.insert(
            0,
            Message {
                role: "system",
                content,
                fields: Vec::new(),
            },
        );
    }

    /// The conversation with a mark in place of every media item.
    pub fn with_marks(&self) -> Self {
        let mut marked = self.clone();
        for message in &mut marked.messages {
            if let Content::Parts(parts) = &mut message.content {
                for part in parts.iter_mut().filter(|p| matches!(p.kind, PartKind::Media(_))) {
                    part.kind = PartKind::Text(MEDIA_MARK.into());
                    part.extra.clear();
                }
            }
        }
        marked
    }

    pub fn to_jinja(&self) -> Jinja {
        self.messages.iter().map(Message::to_jinja).collect::<Vec<_>>().into()
    }
}

impl Message<'_> {
    fn to_jinja(&self) -> Jinja {
        let content = match &self.content {
            Content::Text(text) => Jinja::from(text.as_ref()),
            Content::Parts(parts) => parts.iter().map(Part::to_jinja).collect::<Vec<_>>().into(),
        };
        let head = [("role", Jinja::from(self.role)), ("content", content)];
        mapping(head.into_iter().chain(self.fields.iter().cloned()))
    }
}

impl Content<'_> {
    fn joined_text(&self) -> String {
        match self {
            Content::Text(text) => text.to_string(),
            Content::Parts(parts) => {
                let texts: Vec<&str> = parts.iter().filter_map(Part::text).collect();
                texts.join("\n")
            }
        }
    }
}

impl Part<'_> {
    pub fn text(&self) -> Option<&str> {
        match &self.kind {
            PartKind::Text(text) => Some(text),
            PartKind::Media(_) | PartKind::ToolReference(_) => None,
        }
    }

    fn to_jinja(&self) -> Jinja {
        let mut pairs = match &self.kind {
            PartKind::Text(text) => vec![("type", Jinja::from("text")), ("text", Jinja::from(text.as_ref()))],
            PartKind::Media(modality) => vec![("type", Jinja::from(*modality))],
            PartKind::ToolReference(name) => {
                vec![("type", Jinja::from("tool_reference")), ("name", Jinja::from(*name))]
            }
        };
        pairs.extend(self.extra.iter().map(|(k, v)| (*k, to_jinja(v))));
        mapping(pairs)
    }
}

fn read_message<'a>(message: &'a Json, format: ContentFormat, has_media: &mut bool) -> Result<Message<'a>, ChatError> {
    let message = message
        .as_object()
        .ok_or_else(|| invalid("messages", "every message must be an object"))?;
    let role = message
        .get("role")
        .and_then(Json::as_str)
        .ok_or_else(|| invalid("messages", "every message needs a role, as a string"))?;
    let parts = match message.get("content") {
        None | Some(Json::Null) => Vec::new(),
        Some(Json::String(text)) => vec![Part::of(text)],
        Some(Json::Array(list)) => list
            .iter()
            .map(read_part)
            .filter_map(Result::transpose)
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(invalid("messages", "content must be a string, a list of parts or null")),
    };
    let (content, media) = content_of(role, parts, format);
    *has_media |= media;
    Ok(Message {
        role,
        content,
        fields: read_fields(message, role)?,
    })
}

/// The parts of a message as the template gets them, and whether media are among them.
fn content_of<'a>(role: &str, mut parts: Vec<Part<'a>>, format: ContentFormat) -> (Content<'a>, bool) {
    if role == "system" {
        strip_billing_header(&mut parts);
    }
    let media = parts.iter().any(|p| matches!(p.kind, PartKind::Media(_)));
    let content = match format {
        ContentFormat::OpenAi => Content::Parts(parts),
        ContentFormat::String => Content::Text(flatten(parts, media)),
    };
    match role {
        "tool" => (flatten_tool(content), media),
        _ => (content, media),
    }
}

/// Whether a template gets more or less of this message than its role and text.
pub(crate) fn changes_in_plain(message: &PlainMessage<'_>) -> bool {
    message.role == "developer" || message.content.starts_with(BILLING_HEADER)
}

/// Joins text parts by newlines. Media placeholders depend on the model, so a mark stands in front for them.
fn flatten(parts: Vec<Part<'_>>, media: bool) -> Cow<'_, str> {
    let mut texts: Vec<Cow<'_, str>> = Vec::with_capacity(parts.len() + 1);
    if media {
        texts.push(MEDIA_MARK.into());
    }
    for part in parts {
        match part.kind {
            PartKind::Text(text) if !text.is_empty() => texts.push(text),
            PartKind::ToolReference(name) if !name.is_empty() => texts.push(name.into()),
            PartKind::Text(_) | PartKind::ToolReference(_) | PartKind::Media(_) => {}
        }
    }
    match texts.len() {
        0 => "".into(),
        1 => texts.swap_remove(0),
        _ => texts.join("\n").into(),
    }
}

/// Tool results that are all text become one string, since most templates expect one.
fn flatten_tool(content: Content<'_>) -> Content<'_> {
    match content {
        Content::Parts(parts) if parts.iter().all(|p| matches!(p.kind, PartKind::Text(_))) => {
            let texts: Vec<&str> = parts.iter().filter_map(Part::text).collect();
            Content::Text(texts.join("\n").into())
        }
        other @ (Content::Parts(_) | Content::Text(_)) => other,
    }
}

impl<'a> Part<'a> {
    fn of(text: &'a str) -> Self {
        Self {
            kind: PartKind::Text(text.into()),
            extra: Vec::new(),
        }
    }
}

fn read_part(part: &Json) -> Result<Option<Part<'_>>, ChatError> {
    let part = match part {
        Json::String(text) => return Ok(Some(Part::of(text))),
        Json::Object(part) => part,
        _ => return Err(invalid("messages", "a content part must be a string or an object")),
    };
    let typed = match part.get("type") {
        Some(Json::String(kind)) => Some(kind.as_str()),
        Some(Json::Null) | None => None,
        Some(_) => return Err(invalid("messages", "a content part's type must be a string")),
    };
    let extra = || {
        part.iter()
            .map(|(k, v)| (k.as_str(), v))
            .filter(|(k, _)| !KNOWN_PART_FIELDS.contains(k))
            .collect()
    };
    let field = match typed {
        Some("text" | "input_text" | "output_text") => "text",
        Some("thinking") => "thinking",
        Some("refusal") => "refusal",
        Some("tool_reference") => {
            let name = part.get("name").and_then(Json::as_str).unwrap_or_default();
            return Ok(Some(Part {
                kind: PartKind::ToolReference(name),
                extra: Vec::new(),
            }));
        }
        Some(other) => {
            let modality = modality(other)
                .ok_or_else(|| invalid("messages", "a content part has a type that engines don't support"))?;
            return Ok(Some(Part {
                kind: PartKind::Media(modality),
                extra: extra(),
            }));
        }
        None => {
            let found = part.keys().find_map(|key| modality(key));
            let modality = found.ok_or_else(|| invalid("messages", "a content part has no type"))?;
            return Ok(Some(Part {
                kind: PartKind::Media(modality),
                extra: extra(),
            }));
        }
    };
    match part.get(field) {
        Some(Json::String(text)) => Ok(Some(Part {
            kind: PartKind::Text(text.into()),
            extra: extra(),
        })),
        None | Some(Json::Null) => Ok(None),
        Some(_) => Err(invalid("messages", "a text part's text must be a string")),
    }
}

fn modality(kind: &str) -> Option<&'static str> {
    Some(match kind {
        "image_url" | "input_image" | "image_pil" | "image_embeds" => "image",
        "audio_url" | "input_audio" | "audio_embeds" => "audio",
        "video_url" | "video_embeds" => "video",
        "prompt_embeds" => "prompt_embeds",
        _ => return None,
    })
}

fn strip_billing_header(parts: &mut Vec<Part<'_>>) {
    parts.retain_mut(|part| {
        let PartKind::Text(text) = &mut part.kind else {
            return true;
        };
        if !text.starts_with(BILLING_HEADER) {
            return true;
        }
        let rest = text
            .split_once('\n')
            .map(|(_, rest)| rest.to_owned())
            .unwrap_or_default();
        *text = rest.into();
        !text.is_empty()
    });
}

/// The fields beside role and content, in the order in which the engine sets them.
fn read_fields(message: &Map<String, Json>, role: &str) -> Result<Vec<(&'static str, Jinja)>, ChatError> {
    let mut fields = Vec::new();
    if role == "assistant" {
        match message.get("tool_calls") {
            None | Some(Json::Null) => {}
            Some(Json::Array(calls)) if calls.is_empty() => {}
            Some(Json::Array(calls)) => {
                let calls = calls.iter().map(read_tool_call).collect::<Result<Vec<_>, _>>()?;
                fields.push(("tool_calls", calls.into()));
            }
            Some(_) => return Err(invalid("messages", "tool_calls must be a list")),
        }
        let set = |name: &str| message.get(name).filter(|v| !v.is_null());
        if let Some(reasoning) = set("reasoning").or_else(|| set("reasoning_content")) {
            fields.push(("reasoning", to_jinja(reasoning)));
            fields.push(("reasoning_content", to_jinja(reasoning)));
        }
    } else if role == "tool"
        && let Some(id) = message.get("tool_call_id")
    {
        fields.push(("tool_call_id", to_jinja(id)));
    }
    for name in ["name", "task"] {
        if let Some(Json::String(text)) = message.get(name) {
            fields.push((name, Jinja::from(text.as_str())));
        }
    }
    if role == "developer" {
        fields.push(("tools", message.get("tools").map_or_else(|| Jinja::from(()), to_jinja)));
    }
    Ok(fields)
}

/// A tool call in the engine's key order, with its arguments as an object.
fn read_tool_call(call: &Json) -> Result<Jinja, ChatError> {
    let call = call
        .as_object()
        .ok_or_else(|| invalid("messages", "every tool call must be an object"))?;
    let function = call.get("function").and_then(Json::as_object);
    let plain = call.get("type").is_none_or(|t| t == "function");
    let Some(function) = function.filter(|_| plain) else {
        return Err(invalid(
            "messages",
            "tool_calls must be of type function, with a function object",
        ));
    };
    let mut named = vec![("arguments", arguments(function.get("arguments")))];
    named.extend(function.get("name").map(|v| ("name", to_jinja(v))));
    named.extend(rest(function, &["arguments", "name"]));
    let function = mapping(named);
    let mut pairs = Vec::new();
    pairs.extend(call.get("id").map(|v| ("id", to_jinja(v))));
    pairs.push(("function", function));
    pairs.extend(call.get("type").map(|v| ("type", to_jinja(v))));
    pairs.extend(rest(call, &["id", "function", "type"]));
    Ok(mapping(pairs))
}

fn rest<'a>(object: &'a Map<String, Json>, known: &'a [&str]) -> impl Iterator<Item = (&'a str, Jinja)> {
    object
        .iter()
        .filter(|(k, _)| !known.contains(&k.as_str()))
        .map(|(k, v)| (k.as_str(), to_jinja(v)))
}

/// Arguments come as a JSON text; what isn't an object counts as an empty one, so that one bad turn doesn't
/// end a conversation.
fn arguments(arguments: Option<&Json>) -> Jinja {
    match arguments {
        Some(Json::String(text)) => match serde_json::from_str(text) {
            Ok(parsed @ Json::Object(_)) => to_jinja(&parsed),
            Ok(_) | Err(_) => mapping([]),
        },
        Some(object @ Json::Object(_)) => to_jinja(object),
        _ => mapping([]),
    }
}

/// The tools as the engine's request model prints them: fixed order, defaults filled in, unknown fields dropped.
pub(crate) fn tools_to_jinja(tools: &[Json]) -> Result<Jinja, ChatError> {
    tools
        .iter()
        .map(tool_to_jinja)
        .collect::<Result<Vec<_>, _>>()
        .map(Jinja::from)
}

fn tool_to_jinja(tool: &Json) -> Result<Jinja, ChatError> {
    let function = tool
        .get("function")
        .and_then(Json::as_object)
        .ok_or_else(|| invalid("tools", "every tool must be an object with a function object"))?;
    let name = function.get("name").filter(|n| n.is_string());
    let name = name.ok_or_else(|| invalid("tools", "every function needs a name, as a string"))?;
    let field = |name: &str| function.get(name).map_or_else(|| Jinja::from(()), to_jinja);
    let mut out = vec![
        ("name", to_jinja(name)),
        ("description", field("description")),
        ("parameters", field("parameters")),
    ];
    let set = |object: &Map<String, Json>, name: &str| object.get(name).filter(|v| !v.is_null()).map(to_jinja);
    out.extend(set(function, "strict").map(|v| ("strict", v)));
    let outer = tool.as_object().and_then(|t| set(t, "defer_loading"));
    out.extend(
        set(function, "defer_loading")
            .or_else(|| outer.clone())
            .map(|v| ("defer_loading", v)),
    );
    let mut pairs = vec![("type", Jinja::from("function")), ("function", mapping(out))];
    pairs.extend(outer.map(|v| ("defer_loading", v)));
    Ok(mapping(pairs))
}

/// A JSON value for the template, key order kept.
pub(crate) fn to_jinja(value: &Json) -> Jinja {
    match value {
        Json::Null => Jinja::from(()),
        Json::Bool(b) => Jinja::from(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => Jinja::from(i),
            (None, Some(u)) => Jinja::from(u),
            (None, None) => Jinja::from(n.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(s) => Jinja::from(s.as_str()),
        Json::Array(list) => list.iter().map(to_jinja).collect::<Vec<_>>().into(),
        Json::Object(object) => mapping(object.iter().map(|(k, v)| (k.as_str(), to_jinja(v)))),
    }
}
