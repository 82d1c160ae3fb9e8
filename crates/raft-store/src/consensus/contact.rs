//! How long ago this node knew of a quorum: what readers are told about the age of an answer.

use std::time::{Duration, Instant};

use openraft::{RaftMetrics, ServerState};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::types::Peer;

/// Told while no quorum was ever known of: a day.
const NEVER_MS: u64 = 86_400_000;

/// The last moment at which a quorum is known to have stood behind this node's leader.
#[derive(Default)]
pub(crate) struct Contact {
    last: Mutex<Option<Instant>>,
}

impl Contact {
    /// A quorum was known of `age_ms` ago; only news counts.
    pub(crate) fn heard(&self, age_ms: u64) {
        let Some(moment) = Instant::now().checked_sub(Duration::from_millis(age_ms)) else {
            return;
        };
        let mut last = self.last.lock();
        *last = (*last).max(Some(moment));
    }

    pub(crate) fn quorum_age_ms(&self) -> u64 {
        match *self.last.lock() {
            Some(moment) => u64::try_from(moment.elapsed().as_millis()).unwrap_or(NEVER_MS),
            None => NEVER_MS,
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
