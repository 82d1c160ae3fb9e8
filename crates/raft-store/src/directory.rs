//! The data directory: whose it is, that nobody else uses it, and that it can be written.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A start below this much free space is refused: a log segment and a snapshot must fit.
pub const FREE_BYTES_MIN: u64 = 64 << 20;
const IDENTITY: &str = "identity.json";
const LOCK: &str = "lock";
/// Version of the directory's layout.
const FORMAT: u32 = 1;

/// Whose data a directory holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Layout version.
    pub format: u32,
    /// Name of the cluster.
    pub cluster: String,
    /// Id of the node.
    pub node: u64,
    /// Drawn when the directory was made.
    pub store: u64,
}

/// Why a data directory isn't taken.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// Another process has it.
    #[error("data_dir {} is in use by another process; stop that one or give another directory", dir.display())]
    Locked {
        /// The directory.
        dir: PathBuf,
    },
    /// It can't be read or written.
    #[error("data_dir {}: no permission ({path}); give it to the user that runs this node", dir.display())]
    Permission {
        /// The directory.
        dir: PathBuf,
        /// What exactly.
        path: String,
    },
    /// The disk has no room.
    #[error("the disk that holds data_dir {} has {free} bytes left and {need} are needed; free space or give another directory", dir.display())]
    Full {
        /// The directory.
        dir: PathBuf,
        /// Bytes left.
        free: u64,
        /// Bytes needed.
        need: u64,
    },
    /// It belongs to another cluster or node.
    #[error(
        "data_dir {} belongs to {what} {found:?} and this node is configured as {wanted:?}; correct the \
         configuration or give another directory",
        dir.display()
    )]
    Foreign {
        /// The directory.
        dir: PathBuf,
        /// `cluster` or `node`.
        what: &'static str,
        /// What the directory says.
        found: String,
        /// What the configuration says.
        wanted: String,
    },
    /// Its identity file is unreadable, or made by a newer version.
    #[error("data_dir {}: {IDENTITY} {problem}; move the directory aside and rejoin under a new id", dir.display())]
    Damaged {
        /// The directory.
        dir: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Anything else the system says.
    #[error("data_dir {}: can't {doing}", dir.display())]
    Io {
        /// The directory.
        dir: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}

/// A locked data directory; the lock goes with it.
#[derive(Debug)]
pub struct DataDir {
    dir: PathBuf,
    identity: Identity,
    fresh: bool,
    _lock: File,
}

impl DataDir {
    /// Makes or takes the directory for a node; `store` names it where it is new.
    ///
    /// # Errors
    /// [`DirectoryError`]: each cause apart, with what to do.
    pub fn open(dir: &Path, cluster: &str, node: u64, store: u64, free_bytes_min: u64) -> Result<Self, DirectoryError> {
        std::fs::create_dir_all(dir).map_err(|error| failed(dir, "make it", error))?;
        let lock = lock(dir)?;
        let free = free_bytes(dir)?;
        if free < free_bytes_min {
            return Err(DirectoryError::Full {
                dir: dir.to_owned(),
                free,
                need: free_bytes_min,
            });
        }
        let (identity, fresh) = match read_identity(dir)? {
            Some(identity) => (identity, false),
            None => {
                if dir.join("log").join("db").exists() {
                    let problem = "is missing beside a log".to_owned();
                    return Err(DirectoryError::Damaged {
                        dir: dir.to_owned(),
                        problem,
                    });
                }
                let identity = Identity {
                    format: FORMAT,
                    cluster: cluster.to_owned(),
                    node,
                    store,
                };
                write_identity(dir, &identity)?;
                (identity, true)
            }
        };
        let foreign = |what, found: String, wanted: String| {
            Err(DirectoryError::Foreign {
                dir: dir.to_owned(),
                what,
                found,
                wanted,
            })
        };
        if identity.cluster != cluster {
            return foreign("cluster", identity.cluster, cluster.to_owned());
        }
        if identity.node != node {
            return foreign("node", identity.node.to_string(), node.to_string());
        }
        for part in ["log", "snapshots"] {
            std::fs::create_dir_all(dir.join(part)).map_err(|error| failed(dir, "make its parts", error))?;
        }
        Ok(Self {
            dir: dir.to_owned(),
            identity,
            fresh,
            _lock: lock,
        })
    }

    /// Whose it is.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Whether it was made just now.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// Where the log lies.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// Where snapshots lie.
    #[must_use]
    pub fn snapshots(&self) -> PathBuf {
        self.dir.join("snapshots")
    }
}

fn failed(dir: &Path, doing: &'static str, source: io::Error) -> DirectoryError {
    match source.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => DirectoryError::Permission {
            dir: dir.to_owned(),
            path: format!("can't {doing}: {source}"),
        },
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => DirectoryError::Full {
            dir: dir.to_owned(),
            free: 0,
            need: FREE_BYTES_MIN,
        },
        _ => DirectoryError::Io {
            dir: dir.to_owned(),
            doing,
            source,
        },
    }
}

fn lock(dir: &Path) -> Result<File, DirectoryError> {
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(dir.join(LOCK))
        .map_err(|error| failed(dir, "open its lock file", error))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(DirectoryError::Locked { dir: dir.to_owned() }),
        Err(TryLockError::Error(error)) => Err(failed(dir, "lock it", error)),
    }
}

fn free_bytes(dir: &Path) -> Result<u64, DirectoryError> {
    let stat = rustix::fs::statvfs(dir).map_err(|error| failed(dir, "ask for free space", error.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

fn read_identity(dir: &Path) -> Result<Option<Identity>, DirectoryError> {
    let text = match std::fs::read(dir.join(IDENTITY)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(dir, "read its identity file", error)),
    };
    let damaged = |problem: String| DirectoryError::Damaged {
        dir: dir.to_owned(),
        problem,
    };
    let identity: Identity =
        serde_json::from_slice(&text).map_err(|error| damaged(format!("isn't readable ({error})")))?;
    if identity.format != FORMAT {
        return Err(damaged(format!(
            "has format {} and this version knows {FORMAT}",
            identity.format
        )));
    }
    Ok(Some(identity))
}

fn write_identity(dir: &Path, identity: &Identity) -> Result<(), DirectoryError> {
    let write = || -> io::Result<()> {
        let text = serde_json::to_vec_pretty(identity)?;
        write_durably(dir, IDENTITY, |file| file.write_all(&text))
    };
    write().map_err(|error| failed(dir, "write its identity file", error))
}

/// Writes a file so that after a crash it is there whole or not at all: write, fsync, rename, fsync the directory.
pub(crate) fn write_durably(
    dir: &Path,
    name: &str,
    content: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let temporary = dir.join(format!("{name}.tmp"));
    let mut file = File::create(&temporary)?;
    content(&mut file)?;
    file.sync_all()?;
    drop(file);
    std::fs::rename(&temporary, dir.join(name))?;
    File::open(dir)?.sync_all()
}
