//! The agent's monotonic clock, as the cores want it.

use std::time::Instant;

use cairn_ingest::Millis;

/// Milliseconds since the agent started; cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// A clock that starts now.
    #[must_use]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Now.
    #[must_use]
    pub fn now(self) -> Millis {
        Millis(u64::try_from(self.0.elapsed().as_millis()).unwrap_or(u64::MAX))
    }
}

/// Delays between tries: doubling from `first` to `last`.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    first: std::time::Duration,
    last: std::time::Duration,
    next: std::time::Duration,
}

impl Backoff {
    /// Starts at `first` and never waits longer than `last`.
    #[must_use]
    pub fn new(first: std::time::Duration, last: std::time::Duration) -> Self {
        Self {
            first,
            last,
            next: first,
        }
    }

    /// The next delay.
    pub fn delay(&mut self) -> std::time::Duration {
        let now = self.next;
        self.next = (now * 2).min(self.last);
        now
    }

    /// It worked: the next failure waits briefly again.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}
