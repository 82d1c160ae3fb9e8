//! How long ago this node knew of a quorum: what readers are told about the age of an answer.

use std::time::{Duration, Instant};

use openraft::{RaftMetrics, ServerState};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::types::Peer;

/// Told while no quorum was ever known of: a day.
const NEVER_MS: u64 = 86_400_000;

/// The ticker marks that this process runs, this often; a quarter of a pause, so that an idle member is rarely woken.
const TICK: Duration = Duration::from_millis(150);
/// A longer gap between marks means that the process was stopped or starved.
const PAUSE: Duration = Duration::from_millis(600);
/// After a pause, news is disbelieved for this long: it may have waited in a buffer during the pause.
const QUARANTINE: Duration = Duration::from_millis(500);

/// The last moment at which a quorum is known to have stood behind this node's leader.
pub(crate) struct Contact {
    state: Mutex<State>,
}

struct State {
    last: Option<Instant>,
    marked: Instant,
    trusted_from: Instant,
}

impl State {
    /// Notices a pause that has just ended.
    fn mark(&mut self, now: Instant) {
        if now.saturating_duration_since(self.marked) > PAUSE {
            self.trusted_from = now + QUARANTINE;
        }
        self.marked = now;
    }

    fn heard(&mut self, age_ms: u64, now: Instant) {
        self.mark(now);
        if now < self.trusted_from {
            return;
        }
        if let Some(moment) = now.checked_sub(Duration::from_millis(age_ms)) {
            self.last = self.last.max(Some(moment));
        }
    }
}

impl Default for Contact {
    fn default() -> Self {
        let now = Instant::now();
        Self {
            state: Mutex::new(State {
                last: None,
                marked: now,
                trusted_from: now,
            }),
        }
    }
}

impl Contact {
    /// A quorum was known of `age_ms` ago; only news counts.
    pub(crate) fn heard(&self, age_ms: u64) {
        self.state.lock().heard(age_ms, Instant::now());
    }

    pub(crate) fn quorum_age_ms(&self) -> u64 {
        match self.state.lock().last {
            Some(moment) => u64::try_from(moment.elapsed().as_millis()).unwrap_or(NEVER_MS),
            None => NEVER_MS,
        }
    }
}

/// Marks that the process runs, until the member is gone.
pub(super) async fn tick(contact: std::sync::Weak<Contact>) {
    loop {
        tokio::time::sleep(TICK).await;
        match contact.upgrade() {
            Some(contact) => contact.state.lock().mark(Instant::now()),
            None => return,
        }
    }
}

/// Follows the core's own measurements while this node leads; ends with the core.
pub(super) async fn watch_leader(
    mut metrics: watch::Receiver<RaftMetrics<u64, Peer>>,
    contact: std::sync::Arc<Contact>,
) {
    loop {
        {
            let now = metrics.borrow_and_update();
            if now.state == ServerState::Leader {
                let mut voters = now.membership_config.voter_ids();
                let alone = voters.next() == Some(now.id) && voters.next().is_none();
                match now.millis_since_quorum_ack {
                    _ if alone => contact.heard(0),
                    Some(age) => contact.heard(age),
                    None => {}
                }
            }
        }
        if metrics.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_that_waited_through_a_pause_is_not_taken_for_fresh() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut state = State {
            last: None,
            marked: start,
            trusted_from: start,
        };
        state.heard(40, at(100));
        assert_eq!(state.last, Some(at(60)));
        // The process stops for five seconds; a message from before it is read right after.
        state.heard(40, at(5_100));
        state.mark(at(5_150));
        state.heard(40, at(5_300));
        assert_eq!(state.last, Some(at(60)));
        state.mark(at(5_500));
        state.heard(40, at(5_700));
        assert_eq!(state.last, Some(at(5_660)));
        // Older news changes nothing.
        state.heard(3_000, at(5_750));
        assert_eq!(state.last, Some(at(5_660)));
    }
}
