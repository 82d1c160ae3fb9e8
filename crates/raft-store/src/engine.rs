//! What a log store on disk must do, whichever database does it.

mod sled;

use std::io;
use std::path::PathBuf;

use bytes::Bytes;

pub use self::sled::SledEngine;

/// Largest value that an engine takes: larger ones would leave sled's log for blob files that are never synced.
pub const VALUE_BYTES_MAX: usize = 256 << 10;

/// One log record: position and bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// Position in the log.
    pub index: u64,
    /// The encoded entry.
    pub value: Bytes,
}

/// Called once, when what was asked for is on disk or can't be brought there.
pub type Done = Box<dyn FnOnce(Result<(), EngineError>) + Send>;

/// Why a store can't be opened, read or written.
#[derive(Debug, Clone, thiserror::Error)]
pub enum EngineError {
    /// No room is left.
    #[error("the disk that holds {} is full; free space and start the node again", dir.display())]
    Full {
        /// The store's directory.
        dir: PathBuf,
    },
    /// The operating system refuses.
    #[error("can't read or write {}: {message}", dir.display())]
    Io {
        /// The store's directory.
        dir: PathBuf,
        /// The system's words.
        message: String,
    },
    /// What was written isn't there any more, or not as it was written.
    #[error("the log in {} is damaged: {what}; move the directory aside and let the node rejoin under a new id", dir.display())]
    Corrupt {
        /// The store's directory.
        dir: PathBuf,
        /// What was found.
        what: String,
    },
    /// A value above [`VALUE_BYTES_MAX`].
    #[error("a log value of {len} bytes is larger than {VALUE_BYTES_MAX}")]
    TooLarge {
        /// Its length.
        len: usize,
    },
    /// The engine stopped after an earlier error.
    #[error("the log in {} stopped after an earlier error", dir.display())]
    Stopped {
        /// The store's directory.
        dir: PathBuf,
    },
}

impl EngineError {
    pub(crate) fn io(dir: &std::path::Path, error: &io::Error) -> Self {
        let dir = dir.to_owned();
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full { dir },
            _ => Self::Io {
                dir,
                message: error.to_string(),
            },
        }
    }
}

/// An ordered log of records and a few named values, of one Raft group, on disk.
///
/// Writes take effect for readers when the call returns; they are on disk when `done` is called or, where there is no
/// `done`, when the call returns. Calls come from one thread at a time; reads from any.
pub trait LogEngine: Send + Sync + 'static {
    /// First and last position, where there is a record.
    fn bounds(&self) -> Result<Option<(u64, u64)>, EngineError>;

    /// Records from `from` up to and without `to`, stopping early once more than `bytes_max` were read; at least one
    /// record comes where `from` has one.
    fn read(&self, from: u64, to: u64, bytes_max: usize) -> Result<Vec<Record>, EngineError>;

    /// Appends neighbouring records.
    fn append(&self, records: &[Record], done: Done);

    /// Removes every record from `from` on.
    fn truncate(&self, from: u64) -> Result<(), EngineError>;

    /// Removes every record up to `upto` inclusive and sets a named value with it. A crash may undo both together.
    fn purge(&self, upto: u64, name: &str, value: &[u8]) -> Result<(), EngineError>;

    /// Sets a named value.
    fn put(&self, name: &str, value: &[u8], done: Done);

    /// Sets a named value that a crash may undo.
    fn put_lazily(&self, name: &str, value: &[u8]) -> Result<(), EngineError>;

    /// A named value.
    fn get(&self, name: &str) -> Result<Option<Bytes>, EngineError>;

    /// Bytes on disk.
    fn size_on_disk(&self) -> u64;
}
