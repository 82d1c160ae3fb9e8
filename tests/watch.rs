//! A watch for time marks in tests: time in which something on this machine waited for a core isn't counted.
//!
//! Marks such as "within a second" are promises about an engine's or a router's own doing. On a machine that does other
//! work a process that is due may not run for seconds, which would fail the test and say nothing about the promise. Linux
//! counts how long any task was ready and had no core (pressure stall information, `/proc/pressure/cpu`, `some total`, in
//! microseconds); on an idle machine that is next to nothing, so there the whole mark holds. Without that file all time counts.

use std::time::{Duration, Instant};

/// Runs from its making on.
pub struct Watch {
    begun: Instant,
    stalled: Duration,
}

impl Watch {
    pub fn start() -> Self {
        Self {
            begun: Instant::now(),
            stalled: stalled(),
        }
    }

    /// Panics where more than `mark` has passed, stalls left out.
    pub fn within(&self, mark: Duration, what: &str) {
        let passed = self.begun.elapsed();
        let stalled = stalled().saturating_sub(self.stalled);
        assert!(
            passed.saturating_sub(stalled) <= mark,
            "{what}: {passed:?}, of which tasks waited {stalled:?} for a core; the mark is {mark:?}"
        );
    }
}

/// How long tasks of this machine have waited for a core since it started.
fn stalled() -> Duration {
    let page = std::fs::read_to_string("/proc/pressure/cpu").unwrap_or_default();
    let some = page.lines().find(|line| line.starts_with("some "));
    let total = some.and_then(|line| line.rsplit_once("total=")?.1.trim().parse().ok());
    Duration::from_micros(total.unwrap_or(0))
}
