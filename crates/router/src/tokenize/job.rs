//! What of a request is to be encoded.

use cairn_tokens::ModelTokens;
use serde_json::Value;

use crate::body::Turns;

/// Text kept of a prompt whose tokens aren't known, for routing by text.
const TEXT_BYTES_MAX: usize = 64 * 1024;

/// What is to be encoded.
#[derive(Clone, Debug)]
pub(crate) enum Job {
    /// Texts of `/v1/completions`.
    Texts {
        /// Them.
        texts: Vec<String>,
        /// Whether the tokenizer adds its special tokens.
        add_special: bool,
    },
    /// A chat of nothing but roles and texts.
    Plain(Turns),
    /// The members of any other chat that decide its prompt.
    Chat(Value),
}

impl Job {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Texts { texts, .. } => texts.iter().map(String::len).sum(),
            Self::Plain(turns) => turns.bytes(),
            Self::Chat(value) => text_bytes(value),
        }
    }

    /// The text from its start, up to a bound; equal for equal conversations whatever the order of JSON keys.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        match self {
            Self::Texts { texts, .. } => {
                for text in texts {
                    push_text(&mut out, text);
                }
            }
            Self::Plain(turns) => {
                for message in turns.messages() {
                    for text in [&message.role, "\n", &message.content, "\n"] {
                        push_text(&mut out, text);
                    }
                }
            }
            Self::Chat(value) => {
                for message in value["messages"].as_array().into_iter().flatten() {
                    push_text(&mut out, message["role"].as_str().unwrap_or_default());
                    push_text(&mut out, "\n");
                    match &message["content"] {
                        Value::String(text) => push_text(&mut out, text),
                        Value::Array(parts) => {
                            for part in parts {
                                push_text(&mut out, part["text"].as_str().unwrap_or_default());
                            }
                        }
                        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => {}
                    }
                    push_text(&mut out, "\n");
                }
            }
        }
        out
    }

    /// Whether some text of it alone is longer than any prompt of `tokens_max` tokens.
    pub(super) fn surely_longer_than(&self, tokens: &ModelTokens, tokens_max: usize) -> bool {
        match self {
            Self::Texts { texts, .. } => texts.iter().any(|text| tokens.surely_longer_than(text, tokens_max)),
            Self::Plain(turns) => {
                let messages = turns.messages();
                messages
                    .iter()
                    .any(|m| tokens.surely_longer_than(&m.content, tokens_max))
            }
            Self::Chat(value) => {
                let longer = |value: &Value| value.as_str().is_some_and(|t| tokens.surely_longer_than(t, tokens_max));
                value["messages"].as_array().into_iter().flatten().any(|message| {
                    longer(&message["content"])
                        || message["content"]
                            .as_array()
                            .into_iter()
                            .flatten()
                            .any(|part| longer(&part["text"]))
                })
            }
        }
    }
}

fn push_text(out: &mut String, text: &str) {
    let mut end = TEXT_BYTES_MAX.saturating_sub(out.len()).min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    out.push_str(&text[..end]);
}

/// Bytes of all strings in a value.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(text_bytes).sum(),
        Value::Object(map) => map.values().map(text_bytes).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::ScannedBody;

    fn chat(json: &str) -> Job {
        Job::Chat(serde_json::from_str(json).unwrap())
    }

    #[test]
    fn the_text_of_a_chat_hangs_on_its_content_alone() {
        let a = chat(r#"{"messages":[{"role":"user","content":"hi"}]}"#);
        let b = chat(r#"{"messages":[{"content":[{"type":"text","text":"hi"}],"role":"user"}]}"#);
        assert_eq!(a.text(), b.text());
        let body = ScannedBody::new(r#"{"messages":[{"content":"h\u0069","role":"user"}]}"#.into()).unwrap();
        assert_eq!(Job::Plain(body.turns(0).unwrap()).text(), a.text());
    }

    #[test]
    fn text_is_cut_at_whole_characters() {
        for ch in ["\u{d7}", "\u{1f642}", "\u{6f22}"] {
            let texts = vec!["x".repeat(TEXT_BYTES_MAX - 1), ch.repeat(3)];
            let text = Job::Texts {
                texts,
                add_special: true,
            }
            .text();
            assert!(text.len() <= TEXT_BYTES_MAX && text.len() > TEXT_BYTES_MAX - 4);
        }
    }
}
