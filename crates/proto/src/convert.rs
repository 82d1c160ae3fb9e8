//! The one translation between gRPC messages and the domain of the index.

mod batch;
mod check;
pub mod limits;
mod outcome;
mod spec;

use crate::v1;

pub use check::{check_push, check_reused, check_soft};
pub use outcome::{BatchAnswer, RegisterAnswer};

/// A message that can't be taken: which field, what is wrong with it and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A field that must be set isn't.
    #[error("`{field}` is missing; set it")]
    Missing {
        /// Name of the field as the `.proto` file spells it.
        field: &'static str,
    },
    /// A repeated field, or the sum of several, has too many elements.
    #[error("`{field}` has {count} elements and {max} are allowed; split the message")]
    TooMany {
        /// Name of the field.
        field: &'static str,
        /// How many came.
        count: usize,
        /// How many may come.
        max: usize,
    },
    /// A text is too long.
    #[error("`{field}` is {len} bytes long and {max} are allowed; shorten it")]
    TooLong {
        /// Name of the field.
        field: &'static str,
        /// Its length in bytes.
        len: usize,
        /// The longest that is taken.
        max: usize,
    },
    /// A value that means nothing.
    #[error("`{field}` is invalid: {reason}")]
    Invalid {
        /// Name of the field.
        field: &'static str,
        /// What is wrong and what is allowed.
        reason: String,
    },
}

impl From<WireError> for tonic::Status {
    fn from(error: WireError) -> Self {
        tonic::Status::invalid_argument(error.to_string())
    }
}

/// Refuses a text longer than `max` bytes or with control characters.
pub(crate) fn text(field: &'static str, value: String, max: usize) -> Result<String, WireError> {
    if value.len() > max {
        return Err(WireError::TooLong {
            field,
            len: value.len(),
            max,
        });
    }
    if value.chars().any(char::is_control) {
        return Err(WireError::Invalid {
            field,
            reason: "control characters aren't allowed".to_owned(),
        });
    }
    Ok(value)
}

/// Like [`text`], and refuses the empty text.
pub(crate) fn name(field: &'static str, value: String) -> Result<String, WireError> {
    if value.is_empty() {
        return Err(WireError::Missing { field });
    }
    text(field, value, limits::NAME_BYTES_MAX)
}

/// Refuses more than `max` elements.
pub(crate) fn count(field: &'static str, count: usize, max: usize) -> Result<(), WireError> {
    if count > max {
        return Err(WireError::TooMany { field, count, max });
    }
    Ok(())
}

/// An enum value that this version doesn't know.
pub(crate) fn unknown_enum(field: &'static str, value: i32) -> WireError {
    WireError::Invalid {
        field,
        reason: format!("{value} is no value of this enum; upgrade the older side"),
    }
}

/// Wraps a oneof variant of [`v1::op::Op`] into its message.
pub(crate) fn op(op: v1::op::Op) -> v1::Op {
    v1::Op { op: Some(op) }
}
