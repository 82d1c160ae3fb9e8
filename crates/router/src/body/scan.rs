//! One pass over a JSON object: the whole text is validated, and the spans of its top-level members come out, with those of
//! the roles and texts of a plain conversation.
//!
//! Bodies are forwarded as they came, so what is needed is where a member lies, not a tree. The scanner refuses what a
//! strict engine would refuse later (malformed text, lone surrogates, control characters in strings) and names the byte.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::turns::{Turn, Turns};

/// Deepest accepted nesting; `serde_json`, which reads single members afterwards, stops at the same depth.
const DEPTH_MAX: usize = 127;
/// Most top-level members of a body; OpenAI's and vLLM's schemas together have fewer than 120.
const MEMBERS_MAX: usize = 1_024;

/// One `"key": value` of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member<'a> {
    /// The decoded key.
    pub key: Cow<'a, str>,
    /// Bytes from the key's opening quote to the end of the value.
    pub whole: Range<usize>,
    /// Bytes of the value alone.
    pub value: Range<usize>,
}

/// Why a text isn't the JSON object that it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ScanError {
    /// A byte that JSON doesn't allow at this place.
    #[error("malformed JSON at byte {at}: expected {expected}")]
    Malformed {
        /// Offset of the byte.
        at: usize,
        /// What would have been right there.
        expected: &'static str,
    },
    /// The text ends inside a value.
    #[error("malformed JSON: the body ends at byte {at} inside a value")]
    Truncated {
        /// Length of the text.
        at: usize,
    },
    /// Half of a surrogate pair.
    #[error(
        "lone surrogate in a string at byte {at}: \\uD800..\\uDFFF must come in pairs; send the character itself or U+FFFD"
    )]
    LoneSurrogate {
        /// Offset of its backslash.
        at: usize,
    },
    /// Bytes that aren't UTF-8.
    #[error("invalid UTF-8 at byte {at}: send the body as UTF-8")]
    Utf8 {
        /// Offset of the first wrong byte.
        at: usize,
    },
    /// Nested too deeply.
    #[error("JSON nested deeper than {DEPTH_MAX} levels at byte {at}")]
    TooDeep {
        /// Offset of the opening bracket.
        at: usize,
    },
    /// More members than any request has.
    #[error("more than {MEMBERS_MAX} top-level members at byte {at}")]
    TooManyMembers {
        /// Offset of the first member too many.
        at: usize,
    },
}

/// Validates `text` as one JSON object and gives its top-level members in order, duplicates included.
pub(crate) fn members(text: &[u8]) -> Result<Vec<Member<'_>>, ScanError> {
    object(text).map(|(found, _)| found)
}

/// The same, and the turns of the last `messages`, where that is a plain conversation.
fn object(text: &[u8]) -> Result<(Vec<Member<'_>>, Option<Placed>), ScanError> {
    // Most bodies are ASCII, which is seen at a glance.
    if !text.is_ascii()
        && let Err(error) = std::str::from_utf8(text)
    {
        return Err(ScanError::Utf8 {
            at: error.valid_up_to(),
        });
    }
    let mut scan = Scan { text, at: 0 };
    scan.space();
    scan.byte(b'{', "an object `{`")?;
    let mut found = Vec::with_capacity(16);
    let mut turns = None;
    scan.space();
    if scan.peek() == Some(b'}') {
        scan.at += 1;
    } else {
        loop {
            scan.space();
            let start = scan.at;
            if found.len() == MEMBERS_MAX {
                return Err(ScanError::TooManyMembers { at: start });
            }
            let key = scan.string()?;
            scan.space();
            scan.byte(b':', "`:` after a key")?;
            scan.space();
            let value = scan.at;
            if key.is(text, b"messages") {
                let member = found.len();
                turns = scan.turns_or_value()?.map(|turns| Placed {
                    member,
                    turns: Arc::new(turns),
                });
            } else {
                scan.value()?;
            }
            found.push(Member {
                key: key.decode(text)?,
                whole: start..scan.at,
                value: value..scan.at,
            });
            scan.space();
            match scan.next("`,` or `}`")? {
                b',' => {}
                b'}' => break,
                _ => {
                    return Err(ScanError::Malformed {
                        at: scan.at - 1,
                        expected: "`,` or `}`",
                    });
                }
            }
        }
    }
    scan.space();
    if scan.at < text.len() {
        return Err(ScanError::Malformed {
            at: scan.at,
            expected: "the end of the body",
        });
    }
    Ok((found, turns))
}

/// Turns, and the number of the member that holds them.
struct Placed {
    member: usize,
    turns: Arc<Vec<Turn>>,
}

/// A string in a text that was validated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Quoted {
    /// Its bytes, without the quotes.
    pub inside: Range<usize>,
    /// Whether it has escapes.
    pub escaped: bool,
}

impl Quoted {
    /// Whether it is spelt like this, without escapes.
    pub fn is(&self, text: &[u8], word: &[u8]) -> bool {
        text[self.inside.clone()] == *word
    }

    /// What it says.
    pub fn decode<'t>(&self, text: &'t [u8]) -> Result<Cow<'t, str>, ScanError> {
        if self.escaped {
            // The string was validated already, so this can't fail; an unreadable key matches no name.
            let whole = &text[self.inside.start - 1..self.inside.end + 1];
            return Ok(Cow::Owned(serde_json::from_slice::<String>(whole).unwrap_or_default()));
        }
        std::str::from_utf8(&text[self.inside.clone()])
            .map(Cow::Borrowed)
            .map_err(|e| ScanError::Utf8 { at: e.valid_up_to() })
    }
}

/// A body that was validated, with the places of its members.
pub(crate) struct ScannedBody {
    bytes: Bytes,
    spans: Vec<Span>,
    turns: Option<Placed>,
}

struct Span {
    /// Only where the key has escapes.
    decoded: Option<String>,
    whole: Range<usize>,
    key: Range<usize>,
    value: Range<usize>,
}

impl ScannedBody {
    /// Validates `bytes` as one JSON object.
    pub(crate) fn new(bytes: Bytes) -> Result<Self, ScanError> {
        let (found, turns) = object(&bytes)?;
        let spans = found
            .into_iter()
            .map(|member| {
                let key = member.whole.start + 1..member.whole.start + 1 + member.key.len();
                let decoded = match member.key {
                    Cow::Borrowed(_) => None,
                    Cow::Owned(text) => Some(text),
                };
                Span {
                    decoded,
                    whole: member.whole,
                    key,
                    value: member.value,
                }
            })
            .collect();
        Ok(Self { bytes, spans, turns })
    }

    /// The bytes as they came.
    pub(crate) fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The conversation, where the member of this number is one of nothing but roles and texts.
    pub(crate) fn turns(&self, member: usize) -> Option<Turns> {
        let placed = self.turns.as_ref().filter(|placed| placed.member == member)?;
        Some(Turns::new(self.bytes.clone(), Arc::clone(&placed.turns)))
    }

    /// Its members.
    pub(crate) fn members(&self) -> Vec<Member<'_>> {
        self.spans
            .iter()
            .map(|span| Member {
                key: match &span.decoded {
                    Some(text) => Cow::Borrowed(text.as_str()),
                    // Validated as UTF-8 with the whole body.
                    None => String::from_utf8_lossy(&self.bytes[span.key.clone()]),
                },
                whole: span.whole.clone(),
                value: span.value.clone(),
            })
            .collect()
    }
}

/// Position in a text that is being validated.
pub(super) struct Scan<'a> {
    pub text: &'a [u8],
    pub at: usize,
}

impl Scan<'_> {
    pub fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    pub fn next(&mut self, _expected: &'static str) -> Result<u8, ScanError> {
        let byte = self.peek().ok_or(ScanError::Truncated { at: self.text.len() })?;
        self.at += 1;
        Ok(byte)
    }

    pub fn byte(&mut self, byte: u8, expected: &'static str) -> Result<(), ScanError> {
        if self.next(expected)? == byte {
            Ok(())
        } else {
            Err(ScanError::Malformed {
                at: self.at - 1,
                expected,
            })
        }
    }

    pub fn space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    /// Walks one value of any kind without recursion; `stack` holds the closing brackets that are due.
    pub fn value(&mut self) -> Result<(), ScanError> {
        let mut stack: Vec<u8> = Vec::new();
        loop {
            self.space();
            match self.peek().ok_or(ScanError::Truncated { at: self.text.len() })? {
                b'{' => {
                    self.open(&mut stack, b'}')?;
                    if !self.closes(b'}') {
                        self.key()?;
                        continue;
                    }
                    stack.pop();
                }
                b'[' => {
                    self.open(&mut stack, b']')?;
                    if !self.closes(b']') {
                        continue;
                    }
                    stack.pop();
                }
                b'"' => {
                    self.string()?;
                }
                b't' => self.word(b"true")?,
                b'f' => self.word(b"false")?,
                b'n' => self.word(b"null")?,
                b'-' | b'0'..=b'9' => self.number()?,
                _ => {
                    return Err(ScanError::Malformed {
                        at: self.at,
                        expected: "a value",
                    });
                }
            }
            if self.after_value(&mut stack)? {
                return Ok(());
            }
        }
    }

    /// After a value: closes what ends here and steps over a comma. True where the outermost value is complete.
    fn after_value(&mut self, stack: &mut Vec<u8>) -> Result<bool, ScanError> {
        loop {
            let Some(&due) = stack.last() else { return Ok(true) };
            self.space();
            let got = self.next("`,` or a closing bracket")?;
            if got == b',' {
                if due == b'}' {
                    self.key()?;
                }
                return Ok(false);
            }
            if got != due {
                let expected = if due == b'}' { "`,` or `}`" } else { "`,` or `]`" };
                return Err(ScanError::Malformed {
                    at: self.at - 1,
                    expected,
                });
            }
            stack.pop();
        }
    }

    fn open(&mut self, stack: &mut Vec<u8>, close: u8) -> Result<(), ScanError> {
        // The members' own object is one level.
        if stack.len() + 1 >= DEPTH_MAX {
            return Err(ScanError::TooDeep { at: self.at });
        }
        self.at += 1;
        stack.push(close);
        Ok(())
    }

    fn closes(&mut self, close: u8) -> bool {
        self.space();
        let closes = self.peek() == Some(close);
        if closes {
            self.at += 1;
        }
        closes
    }

    fn key(&mut self) -> Result<(), ScanError> {
        self.space();
        self.string()?;
        self.space();
        self.byte(b':', "`:` after a key")
    }

    fn word(&mut self, word: &'static [u8]) -> Result<(), ScanError> {
        let rest = &self.text[self.at..];
        if rest.starts_with(word) {
            self.at += word.len();
            return Ok(());
        }
        if word.starts_with(rest) {
            return Err(ScanError::Truncated { at: self.text.len() });
        }
        Err(ScanError::Malformed {
            at: self.at,
            expected: "true, false, null, a number, a string, `[` or `{`",
        })
    }

    fn digits(&mut self) -> Result<(), ScanError> {
        let start = self.at;
        while let Some(b'0'..=b'9') = self.peek() {
            self.at += 1;
        }
        match (self.at > start, self.at < self.text.len()) {
            (true, _) => Ok(()),
            (false, true) => Err(ScanError::Malformed {
                at: self.at,
                expected: "a digit",
            }),
            (false, false) => Err(ScanError::Truncated { at: self.text.len() }),
        }
    }

    fn number(&mut self) -> Result<(), ScanError> {
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        if self.peek() == Some(b'0') {
            self.at += 1;
        } else {
            self.digits()?;
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            self.at += 1;
            if let Some(b'+' | b'-') = self.peek() {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    /// Walks a string.
    pub fn string(&mut self) -> Result<Quoted, ScanError> {
        self.byte(b'"', "a string `\"`")?;
        let start = self.at;
        let mut escaped = false;
        loop {
            self.at += plain_prefix(&self.text[self.at..]);
            match self.next("the end of a string")? {
                b'"' => {
                    let inside = start..self.at - 1;
                    return Ok(Quoted { inside, escaped });
                }
                b'\\' => {
                    escaped = true;
                    self.escape()?;
                }
                _ => {
                    return Err(ScanError::Malformed {
                        at: self.at - 1,
                        expected: "no raw control character inside a string",
                    });
                }
            }
        }
    }

    fn escape(&mut self) -> Result<(), ScanError> {
        let at = self.at - 1;
        match self.next("an escape")? {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Ok(()),
            b'u' => match self.hex4()? {
                0xD800..=0xDBFF => {
                    if !self.text[self.at..].starts_with(b"\\u") {
                        return Err(ScanError::LoneSurrogate { at });
                    }
                    self.at += 2;
                    match self.hex4()? {
                        0xDC00..=0xDFFF => Ok(()),
                        _ => Err(ScanError::LoneSurrogate { at }),
                    }
                }
                0xDC00..=0xDFFF => Err(ScanError::LoneSurrogate { at }),
                _ => Ok(()),
            },
            _ => Err(ScanError::Malformed {
                at,
                expected: "one of \\\" \\\\ \\/ \\b \\f \\n \\r \\t \\u",
            }),
        }
    }

    fn hex4(&mut self) -> Result<u32, ScanError> {
        let mut value = 0;
        for _ in 0..4 {
            let at = self.at;
            let digit = char::from(self.next("a hexadecimal digit")?)
                .to_digit(16)
                .ok_or(ScanError::Malformed {
                    at,
                    expected: "four hexadecimal digits after \\u",
                })?;
            value = value * 16 + digit;
        }
        Ok(value)
    }
}

/// How many leading bytes of a string's inside are neither a quote, a backslash nor a control character.
fn plain_prefix(text: &[u8]) -> usize {
    let end = memchr::memchr2(b'"', b'\\', text).unwrap_or(text.len());
    let control = |b: &u8| *b < 0x20;
    // No branch for a byte: vector instructions compare many at once, and nearly every text passes.
    match text[..end].iter().fold(false, |found, b| found | control(b)) {
        true => text[..end].iter().position(control).unwrap_or(end),
        false => end,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> Vec<(String, String)> {
        members(text.as_bytes())
            .unwrap()
            .into_iter()
            .map(|m| (m.key.into_owned(), text[m.value].to_string()))
            .collect()
    }

    #[test]
    fn spans_name_each_member_of_the_outer_object() {
        let got = keys(r#" { "a" : [1, {"b":"}"}] ,"mod\u0065l":"x\"y", "z": -1.5e+3 } "#);
        assert_eq!(
            got,
            [
                ("a".into(), r#"[1, {"b":"}"}]"#.into()),
                ("model".into(), r#""x\"y""#.into()),
                ("z".into(), "-1.5e+3".into())
            ]
        );
        assert!(keys("{}").is_empty());
    }

    #[test]
    fn faults_name_the_byte() {
        let at = |text: &[u8]| match members(text).unwrap_err() {
            ScanError::Malformed { at, .. }
            | ScanError::Truncated { at }
            | ScanError::LoneSurrogate { at }
            | ScanError::Utf8 { at }
            | ScanError::TooDeep { at }
            | ScanError::TooManyMembers { at } => at,
        };
        assert_eq!(at(b"[1]"), 0);
        assert_eq!(at(br#"{"a":1,}"#), 7);
        assert_eq!(at(br#"{"a":1"#), 6);
        assert_eq!(at(br#"{"a":"\ud83e x"}"#), 6);
        assert_eq!(at(br#"{"a":"\udd00"}"#), 6);
        assert_eq!(at(b"{\"a\":\"\xff\"}"), 6);
        assert_eq!(at(b"{\"a\":\"x\ny\"}"), 7);
        assert_eq!(at(br#"{"a":01}"#), 6);
        assert_eq!(at(br#"{"a":NaN}"#), 5);
        assert_eq!(at(br#"{"a":1} x"#), 8);
        let deep = format!("{{\"a\":{}", "[".repeat(500));
        assert!(matches!(members(deep.as_bytes()), Err(ScanError::TooDeep { .. })));
    }

    #[test]
    fn agrees_with_serde_json_on_what_is_json() {
        let cases = [
            r#"{"a":"\u00d7\ud83d\ude42 ok"}"#,
            r#"{"a":[[],{},[{}],"",null,true,false,0,-0,1e9]}"#,
            r#"{"a":1.}"#,
            r#"{"a":-}"#,
            r#"{"a":tru}"#,
            r#"{"a" 1}"#,
            r#"{"a":1 "b":2}"#,
            r#"{"a":[1,]}"#,
            r#"{a:1}"#,
            r#"{"a":"\x"}"#,
            r#"{"a":"\u12g4"}"#,
            "",
            "{",
            r#"{"": {"": ""}}"#,
            "{\"long string with a control \u{1} far inside it\":1}",
        ];
        for case in cases {
            let theirs = serde_json::from_str::<serde_json::Value>(case).is_ok_and(|v| v.is_object());
            assert_eq!(members(case.as_bytes()).is_ok(), theirs, "{case}");
        }
    }

    #[test]
    fn plain_prefix_stops_at_the_first_special_byte() {
        for len in 0..140 {
            for (i, special) in [b'"', b'\\', 0x1f, 0].into_iter().enumerate() {
                for plain in [0xe2 + i as u8, 0x20, b'!', b'#', b'[', b']', 0x7f] {
                    let mut text = vec![plain; len];
                    assert_eq!(plain_prefix(&text), len);
                    text.push(special);
                    assert_eq!(plain_prefix(&text), len);
                    text.extend([b'"', b'a', b'"'].into_iter().chain([0; 40]));
                    assert_eq!(plain_prefix(&text), len);
                }
            }
        }
    }
}
