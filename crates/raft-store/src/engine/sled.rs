//! The log on sled 0.34, with the one recipe under which it lost nothing in simulated power cuts.
//!
//! One database, one tree, one flusher thread. Large segments, no background flush; a batch is applied, then sled's
//! `flush` writes it out, then our own `fdatasync` of `<dir>/db` makes it durable, since sled's flush is only
//! `sync_file_range`. Values stay small, because sled puts large ones into blob files that it never syncs. Every value
//! carries a CRC.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use sled::{Batch, Db, Tree};

use super::{Done, EngineError, LogEngine, Record, VALUE_BYTES_MAX};

/// Segments of this size keep values in the log and the file's growth rare.
const SEGMENT_BYTES: usize = 8 << 20;
/// Page cache: the tail of the log, which is all that is read in normal work, is cached above this engine.
const CACHE_BYTES: u64 = 64 << 20;
/// Waiting flushes; openraft waits for each of its appends, so there are few.
const FLUSHES_MAX: usize = 1024;
/// Records that one removal batch takes.
const REMOVALS_PER_BATCH: u64 = 4096;
/// How long a lock may outlive the handle that held it.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// Pause between two tries.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Keys of records begin with this, followed by the big-endian position.
const RECORD: u8 = 1;
/// Keys of named values begin with this, followed by the name.
const NAMED: u8 = 0;

/// The log of one Raft group in a sled database.
pub struct SledEngine {
    dir: PathBuf,
    tree: Tree,
    db: Arc<Db>,
    flushes: Mutex<Option<SyncSender<Done>>>,
    flusher: Mutex<Option<JoinHandle<()>>>,
}

/// Opens the database; a store that this process closed a moment ago still holds its lock while its last handle ends.
fn open_when_free(config: &sled::Config) -> sled::Result<sled::Db> {
    let begun = Instant::now();
    loop {
        match config.open() {
            Err(sled::Error::Io(error))
                if error.to_string().contains("could not acquire lock") && begun.elapsed() < LOCK_PATIENCE =>
            {
                std::thread::sleep(LOCK_PAUSE);
            }
            opened => return opened,
        }
    }
}

impl SledEngine {
    /// Opens or makes the database in `dir` and checks every record.
    ///
    /// # Errors
    /// [`EngineError`]: full disk, permissions, another process, or damage, with the remedy.
    pub fn open(dir: &Path, group: u32) -> Result<Self, EngineError> {
        let blobs = dir.join("blobs");
        if blobs.read_dir().is_ok_and(|mut entries| entries.next().is_some()) {
            let what = "blobs/ isn't empty, so a value left the log unsynced".to_owned();
            return Err(EngineError::Corrupt {
                dir: dir.to_owned(),
                what,
            });
        }
        let config = sled::Config::new()
            .path(dir)
            .segment_size(SEGMENT_BYTES)
            .cache_capacity(CACHE_BYTES)
            .flush_every_ms(None)
            .use_compression(false)
            .print_profile_on_drop(false);
        let opened = catch_unwind(AssertUnwindSafe(|| {
            let db = open_when_free(&config)?;
            let tree = db.open_tree(format!("group-{group}"))?;
            Ok((db, tree))
        }));
        let (db, tree) = match opened {
            Ok(Ok(pair)) => pair,
            Ok(Err(error)) => return Err(translate(dir, &error)),
            Err(_) => {
                let what = "the database can't be recovered".to_owned();
                return Err(EngineError::Corrupt {
                    dir: dir.to_owned(),
                    what,
                });
            }
        };
        let file = File::open(dir.join("db")).map_err(|error| EngineError::io(dir, &error))?;
        let db = Arc::new(db);
        let (sender, receiver) = sync_channel(FLUSHES_MAX);
        let (flushed, place) = (db.clone(), dir.to_owned());
        let flusher = std::thread::Builder::new()
            .name("cairn-log-flush".to_owned())
            .spawn(move || flush_loop(&place, &flushed, &file, &receiver))
            .map_err(|error| EngineError::io(dir, &error))?;
        let engine = Self {
            dir: dir.to_owned(),
            tree,
            db,
            flushes: Mutex::new(Some(sender)),
            flusher: Mutex::new(Some(flusher)),
        };
        engine.check()?;
        Ok(engine)
    }

    /// Reads everything once: no hole, no damaged value.
    fn check(&self) -> Result<(), EngineError> {
        let mut expected = None;
        for pair in self.tree.scan_prefix([RECORD]) {
            let (key, value) = pair.map_err(|error| translate(&self.dir, &error))?;
            let index = self.index_of(&key)?;
            if expected.is_some_and(|expected| expected != index) {
                return Err(self.corrupt(format!("record {} is missing", expected.unwrap_or(0))));
            }
            self.open_value(&value, || format!("record {index}"))?;
            expected = Some(index + 1);
        }
        for pair in self.tree.scan_prefix([NAMED]) {
            let (key, value) = pair.map_err(|error| translate(&self.dir, &error))?;
            self.open_value(&value, || format!("value {:?}", String::from_utf8_lossy(&key[1..])))?;
        }
        Ok(())
    }

    fn corrupt(&self, what: String) -> EngineError {
        EngineError::Corrupt {
            dir: self.dir.clone(),
            what,
        }
    }

    fn index_of(&self, key: &[u8]) -> Result<u64, EngineError> {
        match <[u8; 8]>::try_from(&key[1..]) {
            Ok(bytes) => Ok(u64::from_be_bytes(bytes)),
            Err(_) => Err(self.corrupt("a record's key has a wrong length".to_owned())),
        }
    }

    /// Checks the CRC and returns what it guards.
    fn open_value(&self, stored: &[u8], what: impl Fn() -> String) -> Result<Bytes, EngineError> {
        let Some((crc, value)) = stored.split_first_chunk::<4>() else {
            return Err(self.corrupt(format!("{} is cut short", what())));
        };
        if crc32fast::hash(value) != u32::from_le_bytes(*crc) {
            return Err(self.corrupt(format!("{} fails its checksum", what())));
        }
        Ok(Bytes::copy_from_slice(value))
    }

    /// Hands a completed write to the flusher; the order of calls is the order on disk.
    fn flush_later(&self, done: Done) {
        let refused = match &*self.flushes.lock() {
            Some(flushes) => match flushes.send(done) {
                Ok(()) => return,
                Err(error) => error.0,
            },
            None => done,
        };
        refused(Err(EngineError::Stopped { dir: self.dir.clone() }));
    }

    fn apply(&self, batch: Batch) -> Result<(), EngineError> {
        self.tree
            .apply_batch(batch)
            .map_err(|error| translate(&self.dir, &error))
    }

    /// Flushes and waits; for the rare writes that have no `done`.
    fn flush_now(&self) -> Result<(), EngineError> {
        let (sender, receiver) = std::sync::mpsc::channel();
        self.flush_later(Box::new(move |result| {
            let _ = sender.send(result);
        }));
        receiver
            .recv()
            .unwrap_or_else(|_| Err(EngineError::Stopped { dir: self.dir.clone() }))
    }
}

impl Drop for SledEngine {
    fn drop(&mut self) {
        drop(self.flushes.lock().take());
        if let Some(flusher) = self.flusher.lock().take() {
            let _ = flusher.join();
        }
    }
}

impl LogEngine for SledEngine {
    fn bounds(&self) -> Result<Option<(u64, u64)>, EngineError> {
        let mut records = self.tree.scan_prefix([RECORD]);
        let Some(first) = records.next() else {
            return Ok(None);
        };
        let first = first.map_err(|error| translate(&self.dir, &error))?;
        let first = self.index_of(&first.0)?;
        match self.tree.scan_prefix([RECORD]).next_back() {
            Some(last) => {
                let last = last.map_err(|error| translate(&self.dir, &error))?;
                Ok(Some((first, self.index_of(&last.0)?)))
            }
            None => Ok(None),
        }
    }

    fn read(&self, from: u64, to: u64, bytes_max: usize) -> Result<Vec<Record>, EngineError> {
        let mut records = Vec::new();
        let mut bytes = 0;
        if from >= to {
            return Ok(records);
        }
        for pair in self.tree.range(record_key(from).as_slice()..record_key(to).as_slice()) {
            let (key, value) = pair.map_err(|error| translate(&self.dir, &error))?;
            let index = self.index_of(&key)?;
            bytes += value.len();
            records.push(Record {
                index,
                value: self.open_value(&value, || format!("record {index}"))?,
            });
            if bytes >= bytes_max {
                break;
            }
        }
        Ok(records)
    }

    fn append(&self, records: &[Record], done: Done) {
        let mut batch = Batch::default();
        for record in records {
            if record.value.len() > VALUE_BYTES_MAX {
                return done(Err(EngineError::TooLarge {
                    len: record.value.len(),
                }));
            }
            batch.insert(record_key(record.index).as_slice(), sealed(&record.value));
        }
        match self.apply(batch) {
            Ok(()) => self.flush_later(done),
            Err(error) => done(Err(error)),
        }
    }

    fn truncate(&self, from: u64) -> Result<(), EngineError> {
        let Some((first, last)) = self.bounds()? else {
            return Ok(());
        };
        // From the end, so that a crash in between leaves no hole.
        let start = from.max(first);
        let mut end = last + 1;
        while end > start {
            let begin = end.saturating_sub(REMOVALS_PER_BATCH).max(start);
            self.apply(removals(begin, end))?;
            self.flush_now()?;
            end = begin;
        }
        Ok(())
    }

    fn purge(&self, upto: u64, name: &str, value: &[u8]) -> Result<(), EngineError> {
        let mut first = Batch::default();
        first.insert(named_key(name), sealed(value));
        self.apply(first)?;
        // The marker is on disk before the first record goes.
        self.flush_now()?;
        let Some((first, last)) = self.bounds()? else {
            return Ok(());
        };
        let mut begin = first;
        let end = last.min(upto) + 1;
        while begin < end {
            let stop = (begin + REMOVALS_PER_BATCH).min(end);
            self.apply(removals(begin, stop))?;
            begin = stop;
        }
        Ok(())
    }

    fn put(&self, name: &str, value: &[u8], done: Done) {
        match self.put_lazily(name, value) {
            Ok(()) => self.flush_later(done),
            Err(error) => done(Err(error)),
        }
    }

    fn put_lazily(&self, name: &str, value: &[u8]) -> Result<(), EngineError> {
        let mut batch = Batch::default();
        batch.insert(named_key(name), sealed(value));
        self.apply(batch)
    }

    fn get(&self, name: &str) -> Result<Option<Bytes>, EngineError> {
        match self
            .tree
            .get(named_key(name))
            .map_err(|error| translate(&self.dir, &error))?
        {
            Some(value) => self.open_value(&value, || format!("value {name:?}")).map(Some),
            None => Ok(None),
        }
    }

    fn size_on_disk(&self) -> u64 {
        self.db.size_on_disk().unwrap_or(0)
    }
}

/// Takes what waits, makes it durable with one flush, and answers; ends when the engine is dropped.
fn flush_loop(dir: &Path, db: &Db, file: &File, waiting: &Receiver<Done>) {
    let mut failed: Option<EngineError> = None;
    while let Ok(first) = waiting.recv() {
        let mut group = vec![first];
        group.extend(waiting.try_iter().take(FLUSHES_MAX));
        let result = match &failed {
            // After a failed sync nobody knows what the disk has: nothing more is acknowledged.
            Some(_) => Err(EngineError::Stopped { dir: dir.to_owned() }),
            None => db
                .flush()
                .map_err(|error| translate(dir, &error))
                .and_then(|_| file.sync_data().map_err(|error| EngineError::io(dir, &error))),
        };
        if let (Err(error), None) = (&result, &failed) {
            tracing::error!(%error, "the log can't be written; this node stops");
            failed = Some(error.clone());
        }
        for done in group {
            done(result.clone());
        }
    }
}

fn record_key(index: u64) -> [u8; 9] {
    let mut key = [RECORD; 9];
    key[1..].copy_from_slice(&index.to_be_bytes());
    key
}

fn named_key(name: &str) -> Vec<u8> {
    let mut key = vec![NAMED];
    key.extend_from_slice(name.as_bytes());
    key
}

fn sealed(value: &[u8]) -> Vec<u8> {
    let mut stored = Vec::with_capacity(value.len() + 4);
    stored.extend_from_slice(&crc32fast::hash(value).to_le_bytes());
    stored.extend_from_slice(value);
    stored
}

fn removals(begin: u64, end: u64) -> Batch {
    let mut batch = Batch::default();
    for index in begin..end {
        batch.remove(record_key(index).as_slice());
    }
    batch
}

fn translate(dir: &Path, error: &sled::Error) -> EngineError {
    match error {
        sled::Error::Io(error) => EngineError::io(dir, error),
        sled::Error::Corruption { .. } => EngineError::Corrupt {
            dir: dir.to_owned(),
            what: "a page fails its checksum".to_owned(),
        },
        other => EngineError::Io {
            dir: dir.to_owned(),
            message: other.to_string(),
        },
    }
}
