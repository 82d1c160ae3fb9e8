//! Leases of sources: the leader's monotonic timers, whose results are log entries.
//!
//! An agent is heard by its batches and renewals. After every election each source has a full period; the same after a
//! pause of this process or a time without quorum, since nobody could have been heard then.

use std::collections::HashMap;
use std::sync::Weak;
use std::time::{Duration, Instant};

use cairn_index::{Command, Incarnation, LeaseState, SourceId};
use parking_lot::Mutex;

use crate::metrics::Metrics;
use crate::node::Node;

/// The timers are looked at this many times a period, and at most and at least this often.
const LOOKS_PER_PERIOD: u32 = 20;
const TICK_LEAST: Duration = Duration::from_millis(50);
const TICK_MOST: Duration = Duration::from_millis(500);
/// A look that comes this late means that the process was paused or starved.
const PAUSE: Duration = Duration::from_millis(1500);
/// Without a quorum for this long nobody lapses.
const QUORUM_AGE_MS_MAX: u64 = 2_000;

/// When each source was last heard.
#[derive(Default)]
pub(crate) struct Leases {
    heard: Mutex<HashMap<SourceId, (Incarnation, Instant)>>,
}

/// What the timers say about one source.
#[derive(Debug, PartialEq, Eq)]
enum Due {
    Nothing,
    Lapse,
    Restore,
    Remove,
}

fn due(lease: LeaseState, silent: Duration, period: Duration, grace: Duration) -> Due {
    match lease {
        LeaseState::Live if silent > period => Due::Lapse,
        LeaseState::Live => Due::Nothing,
        LeaseState::Lapsed(_) if silent <= period => Due::Restore,
        LeaseState::Lapsed(_) if silent > period + grace => Due::Remove,
        LeaseState::Lapsed(_) => Due::Nothing,
    }
}

impl Leases {
    /// The agent of a source was heard.
    pub(crate) fn touch(&self, source: SourceId, incarnation: Incarnation) {
        self.heard.lock().insert(source, (incarnation, Instant::now()));
    }

    /// Milliseconds since a source was heard here, where it was.
    pub(crate) fn silent_ms(&self, source: SourceId) -> Option<u64> {
        let heard = self.heard.lock();
        heard
            .get(&source)
            .map(|(_, at)| u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    fn forget_all(&self) {
        self.heard.lock().clear();
    }

    /// What is due now; sources never heard begin a full period, sources gone are forgotten.
    fn look(&self, node: &Node, now: Instant) -> Vec<Command> {
        let period = Duration::from_millis(node.config.lease_ms.into());
        let grace = Duration::from_millis(node.config.lease_grace_ms.into());
        let sources: Vec<(SourceId, Incarnation, LeaseState)> = node.consensus.read(|state| {
            state
                .registry()
                .sources
                .iter()
                .map(|(id, source)| (*id, source.incarnation, source.lease))
                .collect()
        });
        let mut heard = self.heard.lock();
        let mut commands = Vec::new();
        let mut known = HashMap::with_capacity(sources.len());
        for (source, incarnation, lease) in sources {
            let at = match heard.get(&source) {
                Some((of, at)) if *of == incarnation => *at,
                // A lapsed source that was never heard here is past its period already, not just heard.
                Some(_) | None => match lease {
                    LeaseState::Live => now,
                    LeaseState::Lapsed(_) => now.checked_sub(period + Duration::from_millis(1)).unwrap_or(now),
                },
            };
            known.insert(source, (incarnation, at));
            match due(lease, now.saturating_duration_since(at), period, grace) {
                Due::Nothing => {}
                Due::Lapse => {
                    Metrics::count(&node.metrics.leases, "lapse");
                    commands.push(Command::LapseLease { source, incarnation });
                }
                Due::Restore => {
                    Metrics::count(&node.metrics.leases, "restore");
                    commands.push(Command::RestoreLease { source, incarnation });
                }
                Due::Remove => {
                    Metrics::count(&node.metrics.leases, "remove");
                    commands.push(Command::RemoveSource { source, incarnation });
                }
            }
        }
        *heard = known;
        commands
    }
}

/// Runs the timers while the node lives.
pub(crate) async fn run(node: Weak<Node>) {
    let mut last_look = Instant::now();
    let mut leading_term = None;
    let mut tick = TICK_LEAST;
    loop {
        tokio::time::sleep(tick).await;
        let Some(node) = node.upgrade() else { return };
        let period = Duration::from_millis(node.config.lease_ms.into());
        tick = (period / LOOKS_PER_PERIOD).clamp(TICK_LEAST, TICK_MOST);
        let now = Instant::now();
        let paused = now.duration_since(last_look) > PAUSE;
        last_look = now;
        let leadership = node.leader_now();
        let quorum = node.consensus.quorum_age_ms() <= QUORUM_AGE_MS_MAX;
        if !leadership.leads || !quorum {
            leading_term = None;
            continue;
        }
        if leading_term != Some(leadership.term) || paused {
            node.leases.forget_all();
            leading_term = Some(leadership.term);
        }
        for command in node.leases.look(&node, now) {
            if let Err(status) = node.commit(&command).await {
                tracing::debug!(message = status.message(), "a lease entry wasn't committed");
                break;
            }
        }
        // Committing may take long without a quorum; that time isn't anybody's silence.
        if now.elapsed() > PAUSE {
            leading_term = None;
        }
        last_look = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use cairn_index::LogIndex;

    use super::*;

    #[test]
    fn a_source_lapses_after_a_period_and_goes_after_the_grace() {
        let (period, grace) = (Duration::from_secs(10), Duration::from_secs(60));
        let lapsed = LeaseState::Lapsed(LogIndex(3));
        let check = |lease, silent, expect| assert_eq!(due(lease, Duration::from_secs(silent), period, grace), expect);
        check(LeaseState::Live, 0, Due::Nothing);
        check(LeaseState::Live, 10, Due::Nothing);
        check(LeaseState::Live, 11, Due::Lapse);
        check(LeaseState::Live, 1000, Due::Lapse);
        check(lapsed, 11, Due::Nothing);
        check(lapsed, 70, Due::Nothing);
        check(lapsed, 71, Due::Remove);
        check(lapsed, 1, Due::Restore);
    }
}
