//! Conversations of nothing but roles and texts, as most are, by where these lie in the body: nothing is copied until it
//! is rendered.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use cairn_tokens::PlainMessage;

use super::scan::{Quoted, Scan, ScanError};

/// Where a message's role and text are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    role: Quoted,
    content: Quoted,
}

/// A plain conversation in its body.
#[derive(Clone, Debug)]
pub(crate) struct Turns {
    body: Bytes,
    turns: Arc<Vec<Turn>>,
}

impl Scan<'_> {
    /// Walks the value of `messages`; the turns, where it is a list of plain messages.
    pub(super) fn turns_or_value(&mut self) -> Result<Option<Vec<Turn>>, ScanError> {
        let start = self.at;
        let turns = self.turns();
        if turns.is_none() {
            // The general walk takes every other value, or names its fault.
            self.at = start;
            self.value()?;
        }
        Ok(turns)
    }

    fn turns(&mut self) -> Option<Vec<Turn>> {
        self.byte(b'[', "").ok()?;
        let mut turns = Vec::with_capacity(8);
        loop {
            turns.push(self.turn()?);
            self.space();
            match self.next("").ok()? {
                b',' => {}
                b']' => return Some(turns),
                _ => return None,
            }
        }
    }

    fn turn(&mut self) -> Option<Turn> {
        let (mut role, mut content) = (None, None);
        self.space();
        self.byte(b'{', "").ok()?;
        for end in [b',', b'}'] {
            self.space();
            let key = self.string().ok()?;
            self.space();
            self.byte(b':', "").ok()?;
            self.space();
            let place = if key.is(self.text, b"role") {
                &mut role
            } else if key.is(self.text, b"content") {
                &mut content
            } else {
                return None;
            };
            *place = Some(self.string().ok()?);
            self.space();
            self.byte(end, "").ok()?;
        }
        Some(Turn {
            role: role?,
            content: content?,
        })
    }
}

impl Turns {
    pub(super) fn new(body: Bytes, turns: Arc<Vec<Turn>>) -> Self {
        Self { body, turns }
    }

    /// The messages, texts without escapes borrowed from the body.
    pub(crate) fn messages(&self) -> Vec<PlainMessage<'_>> {
        // Validated with the whole body, so none is empty for being unreadable.
        let text = |quoted: &Quoted| quoted.decode(&self.body).unwrap_or_default();
        self.turns
            .iter()
            .map(|turn| PlainMessage {
                role: text(&turn.role),
                content: text(&turn.content),
            })
            .collect()
    }

    /// Bytes of all roles and texts as they were sent.
    pub(crate) fn bytes(&self) -> usize {
        let spans = self.turns.iter().flat_map(|turn| [&turn.role, &turn.content]);
        spans.map(|quoted| Range::len(&quoted.inside)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::super::scan::ScannedBody;
    use super::*;
    use serde_json::{Value, json};

    fn turns(text: &str) -> Option<Vec<(String, String)>> {
        let body = ScannedBody::new(Bytes::copy_from_slice(text.as_bytes())).unwrap();
        let last = body.members().iter().rposition(|m| m.key == "messages")?;
        let turns = body.turns(last)?;
        let messages = turns.messages();
        Some(
            messages
                .into_iter()
                .map(|m| (m.role.into_owned(), m.content.into_owned()))
                .collect(),
        )
    }

    #[test]
    fn plain_messages_are_found_where_they_lie() {
        let text = r#"{"model":"m", "messages" : [ {"role":"system","content":"a\n\u00d7\ud83d\ude42\"b"} ,{ "content" : "漢", "role":"user" }],"n":1}"#;
        let want = [("system", "a\n×\u{1f642}\"b"), ("user", "漢")];
        let want: Vec<(String, String)> = want.iter().map(|(r, c)| ((*r).into(), (*c).into())).collect();
        assert_eq!(turns(text), Some(want.clone()));
        let parsed: Value = serde_json::from_str(text).unwrap();
        let list: Vec<Value> = want.iter().map(|(r, c)| json!({"role": r, "content": c})).collect();
        assert_eq!(parsed["messages"], json!(list));
    }

    #[test]
    fn anything_more_or_less_is_not_plain() {
        for messages in [
            "[]",
            "{}",
            r#""text""#,
            r#"[{"role":"user"}]"#,
            r#"[{"role":"user","role":"user"}]"#,
            r#"[{"role":"user","content":null}]"#,
            r#"[{"role":"user","content":[]}]"#,
            r#"[{"role":"user","content":"a","name":"b"}]"#,
            r#"[{"role":"user","content":"a","content":"b"}]"#,
            r#"[{"role":"user","cont\u0065nt":"a"}]"#,
            r#"[{"role":"user","content":"a"},7]"#,
            r#"[{"role":"user","content":"a"},[]]"#,
        ] {
            assert_eq!(turns(&format!("{{\"messages\":{messages}}}")), None, "{messages}");
        }
        let twice = r#"{"messages":[{"role":"user","content":"a"}],"messages":[{"role":"user","content":"b"}]}"#;
        assert_eq!(
            turns(twice),
            Some(vec![("user".into(), "b".into())]),
            "the last one counts"
        );
        let twice = r#"{"messages":[{"role":"user","content":"a"}],"mess\u0061ges":[{"role":"user","content":"b"}]}"#;
        assert_eq!(turns(twice), None, "the last one counts");
        let twice = r#"{"messages":[{"role":"user","content":"a"}],"messages":[]}"#;
        assert_eq!(turns(twice), None);
    }

    #[test]
    fn faults_inside_messages_are_named_as_elsewhere() {
        let fault = |text: &str| ScannedBody::new(Bytes::copy_from_slice(text.as_bytes())).err();
        let text = r#"{"messages":[{"role":"user","content":"\ud83e x"}]}"#;
        assert_eq!(fault(text), Some(ScanError::LoneSurrogate { at: 39 }));
        assert!(matches!(
            fault(r#"{"messages":[{"role":"user","content":"a"}"#),
            Some(ScanError::Truncated { .. })
        ));
        assert!(matches!(
            fault(r#"{"messages":[{"role":"user","content":"a"},]}"#),
            Some(ScanError::Malformed { .. })
        ));
    }
}
