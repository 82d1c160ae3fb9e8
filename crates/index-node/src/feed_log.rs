//! The last applied entries in memory, for followers of the feed: one bounded ring for all of them.
//!
//! Followers keep only their position; one that falls behind the ring is cut and starts again from a snapshot. So a
//! slow follower costs nothing but the ring.

use std::collections::VecDeque;

use bytes::Bytes;
use cairn_raft_store::{AppliedEntry, Observer};
use parking_lot::Mutex;
use tokio::sync::watch;

/// Command bytes that the ring holds: about three seconds at the highest rate measured.
const RING_BYTES_MAX: usize = 64 << 20;
/// Entries that it holds: a quarter of an hour at one entry every 10 ms.
const RING_ENTRIES_MAX: usize = 90_000;

/// An applied entry as followers take it.
#[derive(Clone, Debug)]
pub(crate) struct FeedEntry {
    pub(crate) index: u64,
    /// `None` for entries without a command.
    pub(crate) command: Option<Bytes>,
    /// Of the state after it.
    digest: u64,
}

struct Ring {
    /// Place and digest of the state just before the first entry held.
    floor: (u64, u64),
    entries: VecDeque<FeedEntry>,
    bytes: usize,
    /// Counts replacements of the state by a snapshot.
    epoch: u64,
}

/// What a follower reads next.
#[derive(Debug)]
pub(crate) enum Next {
    /// Entries, and the index up to which the follower then has everything.
    Entries(Vec<FeedEntry>, u64),
    /// It is up to date.
    Nothing,
    /// What it needs is no longer held.
    Cut,
}

/// The ring; an [`Observer`] of the replicated state.
pub(crate) struct FeedLog {
    ring: Mutex<Ring>,
    applied: watch::Sender<u64>,
}

impl Default for FeedLog {
    fn default() -> Self {
        let ring = Ring {
            floor: (0, 0),
            entries: VecDeque::new(),
            bytes: 0,
            epoch: 0,
        };
        Self {
            ring: Mutex::new(ring),
            applied: watch::Sender::new(0),
        }
    }
}

impl FeedLog {
    /// Wakes at each applied entry.
    pub(crate) fn watch(&self) -> watch::Receiver<u64> {
        self.applied.subscribe()
    }

    /// Last applied entry.
    pub(crate) fn applied(&self) -> u64 {
        *self.applied.borrow()
    }

    /// Counts replacements of the state; a follower from before one is cut.
    pub(crate) fn epoch(&self) -> u64 {
        self.ring.lock().epoch
    }

    /// Whether a follower that stands at `index` with `digest` can go on from there.
    pub(crate) fn confirms(&self, index: u64, digest: u64) -> bool {
        let ring = self.ring.lock();
        if ring.floor == (index, digest) {
            return true;
        }
        let Some(offset) = index.checked_sub(ring.floor.0 + 1) else {
            return false;
        };
        let entry = usize::try_from(offset).ok().and_then(|offset| ring.entries.get(offset));
        entry.is_some_and(|entry| entry.index == index && entry.digest == digest)
    }

    /// Whether everything after `index` is still held.
    pub(crate) fn reaches(&self, index: u64) -> bool {
        index >= self.ring.lock().floor.0
    }

    /// The entries after `index`, as many as `bytes_max` allows and at least one.
    pub(crate) fn after(&self, index: u64, bytes_max: usize) -> Next {
        let ring = self.ring.lock();
        let Some(offset) = index.checked_sub(ring.floor.0) else {
            return Next::Cut;
        };
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        if offset >= ring.entries.len() {
            return Next::Nothing;
        }
        let mut bytes = 0;
        let mut upto = index;
        let mut found = Vec::new();
        for entry in ring.entries.range(offset..) {
            let size = entry.command.as_ref().map_or(0, Bytes::len);
            if bytes > 0 && bytes + size > bytes_max {
                break;
            }
            bytes += size;
            upto = entry.index;
            if entry.command.is_some() {
                found.push(entry.clone());
            }
        }
        Next::Entries(found, upto)
    }

    fn push(&self, entry: FeedEntry) {
        let index = entry.index;
        {
            let mut ring = self.ring.lock();
            let last = ring.entries.back().map_or(ring.floor.0, |last| last.index);
            if last + 1 != index {
                // Entries 1..first of a new log, or a state that begins at a snapshot: nothing before is held.
                ring.entries.clear();
                ring.bytes = 0;
                ring.epoch += u64::from(last != 0);
                ring.floor = (index, entry.digest);
            } else {
                ring.bytes += entry.command.as_ref().map_or(0, Bytes::len);
                ring.entries.push_back(entry);
            }
            while ring.bytes > RING_BYTES_MAX || ring.entries.len() > RING_ENTRIES_MAX {
                let Some(gone) = ring.entries.pop_front() else { break };
                ring.bytes -= gone.command.as_ref().map_or(0, Bytes::len);
                ring.floor = (gone.index, gone.digest);
            }
        }
        self.applied.send_replace(index);
    }
}

impl Observer for FeedLog {
    fn applied(&self, entry: &AppliedEntry<'_>) {
        let command = entry.command.map(|(bytes, _, _)| bytes.clone());
        self.push(FeedEntry {
            index: entry.index,
            command,
            digest: entry.digest,
        });
    }

    fn installed(&self, index: u64, digest: u64) {
        {
            let mut ring = self.ring.lock();
            ring.entries.clear();
            ring.bytes = 0;
            ring.floor = (index, digest);
            ring.epoch += 1;
        }
        self.applied.send_replace(index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(bytes: &[usize]) -> FeedLog {
        let log = FeedLog::default();
        log.installed(10, 100);
        for (i, bytes) in (11u64..).zip(bytes) {
            let command = (*bytes > 0).then(|| Bytes::from(vec![0; *bytes]));
            log.push(FeedEntry {
                index: i,
                command,
                digest: 90 + i,
            });
        }
        log
    }

    #[test]
    fn a_follower_resumes_only_where_index_and_digest_agree() {
        let log = log(&[1, 0, 1]);
        for (index, digest) in [(10, 100), (11, 101), (12, 102), (13, 103)] {
            assert!(log.confirms(index, digest));
            assert!(!log.confirms(index, digest + 1));
        }
        assert!(!log.confirms(9, 99) && !log.confirms(14, 104) && !log.confirms(0, 0));
    }

    #[test]
    fn entries_come_in_order_and_those_without_a_command_only_move_the_position() {
        let log = log(&[5, 0, 5, 5]);
        let Next::Entries(entries, upto) = log.after(10, 10) else {
            panic!()
        };
        assert_eq!(
            (entries.iter().map(|e| e.index).collect::<Vec<_>>(), upto),
            (vec![11, 13], 13)
        );
        let Next::Entries(entries, upto) = log.after(11, 1) else {
            panic!()
        };
        assert_eq!((entries.len(), upto), (1, 13), "at least one entry comes");
        assert!(matches!(log.after(14, 10), Next::Nothing));
        assert!(matches!(log.after(9, 10), Next::Cut));
    }

    #[test]
    fn the_ring_is_bounded_and_who_falls_behind_is_cut() {
        let log = log(&[RING_BYTES_MAX / 2, RING_BYTES_MAX / 2, 10]);
        assert!(matches!(log.after(10, 1), Next::Cut));
        assert!(matches!(log.after(11, 1), Next::Entries(_, 12)));
        assert!(log.confirms(11, 101) && log.reaches(11) && !log.reaches(10));
    }

    #[test]
    fn a_snapshot_in_between_begins_a_new_epoch() {
        let log = log(&[1]);
        let before = log.epoch();
        log.installed(50, 7);
        assert_ne!(log.epoch(), before);
        assert!(log.confirms(50, 7) && matches!(log.after(11, 1), Next::Cut));
    }
}
