//! What is known of an expression of a template.

use minijinja::Value;

/// The template looks at a text, or at a message as a whole.
#[derive(Debug)]
pub(in crate::template) struct Opaque;

/// What an expression is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// The same in all conversations of these roles.
    Fixed,
    /// Not there.
    Absent,
    /// `none`.
    Nothing,
    /// A message's role.
    Role,
    /// A part's type.
    PartType,
    /// The text of a message, whole.
    Text,
    /// The content of a message: a list of one part.
    Parts,
    /// That part: its type, which is `text`, and the text.
    Part,
    /// Texts and fixed parts, one after the other.
    Joined,
    /// A message.
    Message,
    /// The messages, or some of them.
    Messages,
}

impl Kind {
    pub fn fixed(self) -> bool {
        matches!(
            self,
            Self::Fixed | Self::Absent | Self::Nothing | Self::Role | Self::PartType
        )
    }
}

/// What is known of an expression's value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Seen {
    pub kind: Kind,
    /// Whether it is nothing else; else it may be fixed.
    pub sure: bool,
    /// Whether it is there: a variable may be read where it isn't set.
    pub set: bool,
    /// Whether it is true, where that is known.
    pub truth: Option<bool>,
}

impl Seen {
    pub const FIXED: Self = Self {
        kind: Kind::Fixed,
        sure: true,
        set: true,
        truth: None,
    };

    pub fn sure(kind: Kind) -> Self {
        let truth = match kind {
            Kind::Absent | Kind::Nothing => Some(false),
            // An empty text isn't rendered from pieces.
            Kind::Text | Kind::Parts | Kind::Part | Kind::PartType => Some(true),
            Kind::Fixed | Kind::Role | Kind::Joined | Kind::Message | Kind::Messages => None,
        };
        Self {
            kind,
            truth,
            ..Self::FIXED
        }
    }

    pub fn known(truth: Option<bool>) -> Self {
        Self { truth, ..Self::FIXED }
    }

    /// A value that is known.
    pub fn constant(value: &Value) -> Self {
        if value.is_none() {
            return Self::sure(Kind::Nothing);
        }
        Self::known(Some(value.is_true()))
    }

    /// One of a list, as sure as the list.
    pub fn item(self, kind: Kind) -> Self {
        Self {
            sure: self.sure,
            ..Self::sure(kind)
        }
    }

    /// Whether it is this and nothing else.
    pub fn is(self, kind: Kind) -> bool {
        self.sure && self.kind == kind
    }

    /// Either of two.
    pub fn or(self, other: Self) -> Result<Self, Opaque> {
        if self == other {
            return Ok(self);
        }
        let kind = match (self.kind, other.kind) {
            (a, b) if a == b => a,
            (a, b) if a.fixed() && b.fixed() => Kind::Fixed,
            (a, b) if b.fixed() => a,
            (a, b) if a.fixed() => b,
            (Kind::Text | Kind::Joined, Kind::Text | Kind::Joined) => Kind::Joined,
            _ => return Err(Opaque),
        };
        Ok(Self {
            kind,
            sure: self.kind == other.kind && self.sure && other.sure,
            set: self.set && other.set,
            truth: self.truth.filter(|_| self.truth == other.truth),
        })
    }
}
