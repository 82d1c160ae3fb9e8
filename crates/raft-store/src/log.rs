//! openraft's log storage over a [`LogEngine`], with the tail of the log in memory.

use std::collections::VecDeque;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use openraft::storage::{LogFlushed, RaftLogStorage};
use openraft::{AnyError, LogState, OptionalSend, RaftLogReader, StorageIOError};
use parking_lot::Mutex;

use crate::codec::{CodecError, Reader, Writer};
use crate::engine::{EngineError, LogEngine, Record};
use crate::types::{Entry, LogId, StorageError, TypeConfig, Vote};

const VOTE: &str = "vote";
const COMMITTED: &str = "committed";
const PURGED: &str = "purged";
/// Bytes of the log's tail that stay decoded in memory: replication and apply read there, not on disk.
const TAIL_BYTES_MAX: usize = 32 << 20;
/// One read for a follower stops here, so that a message stays well below the transport's bound.
const READ_BYTES_MAX: usize = 2 << 20;
/// What one entry takes beside its command.
const ENTRY_BYTES: usize = 96;

/// The log of one group; clones share it.
#[derive(Clone)]
pub struct LogStore {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    engine: Arc<dyn LogEngine>,
    tail: Mutex<Tail>,
    appended: AtomicU64,
}

#[derive(Default)]
struct Tail {
    entries: VecDeque<(Entry, usize)>,
    bytes: usize,
}

impl Tail {
    fn push(&mut self, entry: Entry, bytes: usize) {
        if self
            .entries
            .back()
            .is_some_and(|(last, _)| last.log_id.index + 1 != entry.log_id.index)
        {
            self.clear();
        }
        self.entries.push_back((entry, bytes));
        self.bytes += bytes;
        while self.bytes > TAIL_BYTES_MAX && self.entries.len() > 1 {
            self.pop_front();
        }
    }

    fn pop_front(&mut self) {
        if let Some((_, bytes)) = self.entries.pop_front() {
            self.bytes -= bytes;
        }
    }

    fn truncate(&mut self, from: u64) {
        while self.entries.back().is_some_and(|(last, _)| last.log_id.index >= from) {
            if let Some((_, bytes)) = self.entries.pop_back() {
                self.bytes -= bytes;
            }
        }
    }

    fn purge(&mut self, upto: u64) {
        while self
            .entries
            .front()
            .is_some_and(|(first, _)| first.log_id.index <= upto)
        {
            self.pop_front();
        }
    }

    fn clear(&mut self) {
        self.entries.clear();
        self.bytes = 0;
    }

    /// Entries of `from..to` where the tail holds `from`; stops at the end of the tail.
    fn read(&self, from: u64, to: u64, bytes_max: usize) -> Option<Vec<Entry>> {
        let first = self.entries.front()?.0.log_id.index;
        let start = usize::try_from(from.checked_sub(first)?).ok()?;
        if start >= self.entries.len() {
            return None;
        }
        let mut found = Vec::new();
        let mut bytes = 0;
        for (entry, size) in self.entries.range(start..) {
            if entry.log_id.index >= to || (bytes > 0 && bytes + size > bytes_max) {
                break;
            }
            bytes += size;
            found.push(entry.clone());
        }
        Some(found)
    }
}

fn read_failed(error: &(impl std::error::Error + 'static)) -> StorageError {
    StorageIOError::read_logs(AnyError::new(error)).into()
}

fn write_failed(error: &EngineError) -> StorageError {
    StorageIOError::write_logs(AnyError::new(error)).into()
}

impl LogStore {
    /// A log over an engine.
    #[must_use]
    pub fn new(engine: Arc<dyn LogEngine>) -> Self {
        Self {
            shared: Arc::new(Shared {
                engine,
                tail: Mutex::default(),
                appended: AtomicU64::new(0),
            }),
        }
    }

    /// Tells when the last handle is gone.
    pub(crate) fn downgrade(&self) -> std::sync::Weak<Shared> {
        Arc::downgrade(&self.shared)
    }

    /// Bytes appended since the start, for the snapshot schedule.
    #[must_use]
    pub fn appended_bytes(&self) -> u64 {
        self.shared.appended.load(Ordering::Relaxed)
    }

    /// Bytes that the store takes on disk.
    #[must_use]
    pub fn size_on_disk(&self) -> u64 {
        self.shared.engine.size_on_disk()
    }

    /// Where the log has been purged to.
    ///
    /// # Errors
    /// The stored value can't be read.
    pub fn purged(&self) -> Result<Option<LogId>, StorageError> {
        self.named(PURGED, Reader::log_id)
    }

    fn named<T>(
        &self,
        name: &str,
        read: impl FnOnce(&mut Reader) -> Result<T, CodecError>,
    ) -> Result<Option<T>, StorageError> {
        let Some(bytes) = self.shared.engine.get(name).map_err(|error| read_failed(&error))? else {
            return Ok(None);
        };
        let decode = || {
            let mut reader = Reader::versioned(bytes)?;
            let value = read(&mut reader)?;
            reader.finish()?;
            Ok(value)
        };
        decode().map(Some).map_err(|error: CodecError| read_failed(&error))
    }

    /// Entries of `from..to`, from memory where they are there; the first part only, above `bytes_max`.
    fn entries(&self, from: u64, to: u64, bytes_max: usize) -> Result<Vec<Entry>, StorageError> {
        if let Some(found) = self.shared.tail.lock().read(from, to, bytes_max) {
            return Ok(found);
        }
        let records = self
            .shared
            .engine
            .read(from, to, bytes_max)
            .map_err(|error| read_failed(&error))?;
        records
            .into_iter()
            .map(|record| decode(record).map_err(|error| read_failed(&error)))
            .collect()
    }
}

fn decode(record: Record) -> Result<Entry, CodecError> {
    let mut reader = Reader::versioned(record.value)?;
    let entry = reader.entry()?;
    reader.finish()?;
    if entry.log_id.index != record.index {
        return Err(CodecError::Invalid("an entry's position"));
    }
    Ok(entry)
}

fn half_open(range: &impl RangeBounds<u64>) -> (u64, u64) {
    let from = match range.start_bound() {
        Bound::Included(from) => *from,
        Bound::Excluded(before) => before + 1,
        Bound::Unbounded => 0,
    };
    let to = match range.end_bound() {
        Bound::Included(last) => last + 1,
        Bound::Excluded(to) => *to,
        Bound::Unbounded => u64::MAX,
    };
    (from, to)
}

impl RaftLogReader<TypeConfig> for LogStore {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + std::fmt::Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<Entry>, StorageError> {
        let (mut from, to) = half_open(&range);
        let mut all = Vec::new();
        while from < to {
            let part = self.entries(from, to, READ_BYTES_MAX)?;
            let Some(last) = part.last() else { break };
            from = last.log_id.index + 1;
            all.extend(part);
        }
        Ok(all)
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> Result<Vec<Entry>, StorageError> {
        self.entries(start, end, READ_BYTES_MAX)
    }
}

impl RaftLogStorage<TypeConfig> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<TypeConfig>, StorageError> {
        let last_purged_log_id = self.purged()?;
        let last = match self.shared.engine.bounds().map_err(|error| read_failed(&error))? {
            Some((_, last)) => self
                .entries(last, last + 1, usize::MAX)?
                .first()
                .map(|entry| entry.log_id),
            None => None,
        };
        // Records below the purge marker may have come back after a crash: they count as purged.
        Ok(LogState {
            last_purged_log_id,
            last_log_id: last.max(last_purged_log_id),
        })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), StorageError> {
        let mut writer = Writer::versioned();
        writer.vote(vote);
        let (sender, receiver) = tokio::sync::oneshot::channel();
        self.shared.engine.put(
            VOTE,
            &writer.0,
            Box::new(move |result| {
                let _ = sender.send(result);
            }),
        );
        let failed =
            |error: &(dyn std::error::Error + 'static)| StorageIOError::write_vote(AnyError::from_dyn(error, None));
        match receiver.await {
            Ok(result) => result.map_err(|error| failed(&error).into()),
            Err(error) => Err(failed(&error).into()),
        }
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, StorageError> {
        self.named(VOTE, Reader::vote)
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), StorageError> {
        let mut writer = Writer::versioned();
        writer.maybe_log_id(committed.as_ref());
        self.shared
            .engine
            .put_lazily(COMMITTED, &writer.0)
            .map_err(|error| write_failed(&error))
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, StorageError> {
        Ok(self.named(COMMITTED, Reader::maybe_log_id)?.flatten())
    }

    async fn append<I>(&mut self, entries: I, callback: LogFlushed<TypeConfig>) -> Result<(), StorageError>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let mut records = Vec::new();
        {
            let mut tail = self.shared.tail.lock();
            for entry in entries {
                let mut writer = Writer::versioned();
                writer.entry(&entry);
                let bytes = writer.0.len();
                self.shared.appended.fetch_add(bytes as u64, Ordering::Relaxed);
                records.push(Record {
                    index: entry.log_id.index,
                    value: writer.0.into(),
                });
                tail.push(entry, bytes + ENTRY_BYTES);
            }
        }
        let done = move |result: Result<(), EngineError>| callback.log_io_completed(result.map_err(io::Error::other));
        self.shared.engine.append(&records, Box::new(done));
        Ok(())
    }

    async fn truncate(&mut self, log_id: LogId) -> Result<(), StorageError> {
        self.shared.tail.lock().truncate(log_id.index);
        let engine = self.shared.engine.clone();
        blocking(move || engine.truncate(log_id.index)).await
    }

    async fn purge(&mut self, log_id: LogId) -> Result<(), StorageError> {
        self.shared.tail.lock().purge(log_id.index);
        let mut writer = Writer::versioned();
        writer.log_id(&log_id);
        let engine = self.shared.engine.clone();
        blocking(move || engine.purge(log_id.index, PURGED, &writer.0)).await
    }
}

/// Runs a write that waits for the disk outside the async workers.
async fn blocking(write: impl FnOnce() -> Result<(), EngineError> + Send + 'static) -> Result<(), StorageError> {
    match tokio::task::spawn_blocking(write).await {
        Ok(result) => result.map_err(|error| write_failed(&error)),
        Err(error) => Err(StorageIOError::write_logs(AnyError::new(&error)).into()),
    }
}
