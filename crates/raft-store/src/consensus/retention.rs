//! When snapshots are made, and how much log stays behind them.

use std::collections::VecDeque;
use std::sync::Weak;
use std::time::{Duration, Instant};

use super::Inner;

/// The schedule of snapshots and purges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// A snapshot is due after this many bytes of log.
    pub snapshot_after_bytes: u64,
    /// A snapshot is due after this many entries.
    pub snapshot_after_entries: u64,
    /// Log younger than this stays, so that a member that was away briefly catches up without a snapshot: keeping none
    /// led to storms of snapshots.
    pub keep_log_for: Duration,
    /// Log beyond this many bytes goes all the same, whoever is away.
    pub keep_log_bytes_max: u64,
    /// How often the schedule is looked at.
    pub look_every: Duration,
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            snapshot_after_bytes: 256 << 20,
            snapshot_after_entries: 20_000,
            keep_log_for: Duration::from_secs(90),
            keep_log_bytes_max: 1 << 30,
            look_every: Duration::from_secs(1),
        }
    }
}

/// Where the log stood at a moment.
struct Sample {
    at: Instant,
    applied: u64,
    appended: u64,
}

/// The last entry that may go: covered by the snapshot, and old enough or beyond the byte bound.
fn purge_upto(samples: &VecDeque<Sample>, retention: &Retention, now: Instant, appended: u64, snapshot: u64) -> u64 {
    let old = samples.iter().take_while(|sample| {
        now.duration_since(sample.at) >= retention.keep_log_for
            || appended - sample.appended > retention.keep_log_bytes_max
    });
    old.last().map_or(0, |sample| sample.applied.min(snapshot))
}

/// Watches the log until the member is gone.
pub(super) async fn run(retention: Retention, member: Weak<Inner>) {
    let mut samples: VecDeque<Sample> = VecDeque::new();
    let mut at_snapshot = (0u64, 0u64);
    let mut asked: Option<u64> = None;
    loop {
        tokio::time::sleep(retention.look_every).await;
        let Some(inner) = member.upgrade() else { return };
        let (applied, snapshot, purged, stopped) = {
            let metrics = inner.raft.metrics();
            let metrics = metrics.borrow();
            let index = |id: &Option<crate::types::LogId>| id.map_or(0, |id| id.index);
            let stopped = metrics.running_state.is_err();
            (
                index(&metrics.last_applied),
                index(&metrics.snapshot),
                index(&metrics.purged),
                stopped,
            )
        };
        if stopped {
            return;
        }
        let now = Instant::now();
        let appended = inner.log.appended_bytes();
        samples.push_back(Sample {
            at: now,
            applied,
            appended,
        });
        if snapshot != at_snapshot.0 {
            at_snapshot = (snapshot, appended);
            asked = None;
        }
        let due = appended - at_snapshot.1 >= retention.snapshot_after_bytes
            || applied - snapshot.min(applied) >= retention.snapshot_after_entries;
        if due && asked != Some(snapshot) && applied > snapshot {
            asked = Some(snapshot);
            if inner.raft.trigger().snapshot().await.is_err() {
                return;
            }
        }
        let upto = purge_upto(&samples, &retention, now, appended, snapshot);
        if upto > purged && inner.raft.trigger().purge_log(upto).await.is_err() {
            return;
        }
        // One sample below the purge line is enough.
        while samples.len() > 2 && samples[1].applied <= upto {
            samples.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(list: &[(u64, u64, u64)], start: Instant) -> VecDeque<Sample> {
        let sample = |&(s, applied, appended): &(u64, u64, u64)| Sample {
            at: start + Duration::from_secs(s),
            applied,
            appended,
        };
        list.iter().map(sample).collect()
    }

    #[test]
    fn a_minute_and_more_of_log_stays_unless_it_grows_too_large() {
        let start = Instant::now();
        let retention = Retention {
            keep_log_for: Duration::from_secs(60),
            keep_log_bytes_max: 100,
            ..Default::default()
        };
        let history = samples(&[(0, 10, 0), (30, 20, 10), (70, 30, 20), (90, 40, 30)], start);
        let now = start + Duration::from_secs(100);
        let check = |appended, snapshot| purge_upto(&history, &retention, now, appended, snapshot);
        assert_eq!(check(40, 100), 20, "entries of the last minute stay");
        assert_eq!(check(40, 15), 15, "nothing beyond the snapshot goes");
        assert_eq!(check(40, 0), 0);
        assert_eq!(check(125, 100), 30, "above the byte bound younger entries go too");
        assert_eq!(check(1000, 100), 40);
    }
}
