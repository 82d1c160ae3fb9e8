//! Points and spans of time as the caller measures them.

use serde::{Deserialize, Serialize};

/// Microseconds on the caller's monotonic clock, or a span of them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Micros(pub u64);

impl Micros {
    /// A span of whole milliseconds.
    #[must_use]
    pub const fn from_ms(ms: u64) -> Self {
        Self(ms.saturating_mul(1_000))
    }

    /// Milliseconds with their fraction, for people.
    #[must_use]
    pub fn ms(self) -> f64 {
        self.0 as f64 / 1_000.0
    }

    /// Time since `earlier`, 0 where that lies ahead.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }

    /// The point `span` later.
    #[must_use]
    pub const fn plus(self, span: Self) -> Self {
        Self(self.0.saturating_add(span.0))
    }
}
