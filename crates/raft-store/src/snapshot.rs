//! Snapshot files: written whole or not at all, checked by checksum and by the state's own digest.
//!
//! Layout: magic, length and bytes of the description, the state in the index's snapshot encoding, CRC-32 of all before.

mod aside;
#[cfg(target_os = "linux")]
mod forked;

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use cairn_index::{IndexState, codec};

use crate::codec::{CodecError, Reader, Writer};
use crate::types::SnapshotMeta;

pub(crate) use aside::{FORK_FROM_BYTES, write_aside};

const MAGIC: &[u8; 8] = b"CAIRNSN1";
/// Longest description: a membership of the most members with the longest addresses.
const META_BYTES_MAX: usize = 1 << 20;
const SUFFIX: &str = ".snap";
const BUFFER_BYTES: usize = 256 << 10;
const CRC_BYTES: u64 = 4;

/// Why a snapshot file can't be written or taken.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The operating system refuses.
    #[error("can't {doing} snapshot {}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// It isn't as it was written.
    #[error("snapshot {} is damaged: {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What was found.
        what: String,
    },
}

/// The directory that holds the current snapshot, and parts of new ones.
#[derive(Clone, Debug)]
pub struct SnapshotDir {
    dir: PathBuf,
}

/// A snapshot read back.
pub(crate) struct Loaded {
    pub(crate) meta: SnapshotMeta,
    pub(crate) state: IndexState,
    pub(crate) path: PathBuf,
}

impl SnapshotDir {
    /// Takes a directory, and removes what a crash left half-written.
    ///
    /// # Errors
    /// It can't be listed.
    pub fn open(dir: PathBuf) -> io::Result<Self> {
        for entry in std::fs::read_dir(&dir)? {
            let path = entry?.path();
            if path
                .extension()
                .is_some_and(|extension| extension == "tmp" || extension == "part")
            {
                std::fs::remove_file(path)?;
            }
        }
        Ok(Self { dir })
    }

    /// A place for a snapshot that is being received.
    pub(crate) fn part(&self, n: u64) -> PathBuf {
        self.dir.join(format!("received-{n}.part"))
    }

    /// An empty file for a snapshot that is being written.
    pub(crate) fn create(&self, n: u64) -> Result<(PathBuf, File), SnapshotError> {
        let path = self.dir.join(format!("written-{n}.tmp"));
        let opened = OpenOptions::new()
            .create(true)
            .truncate(true)
            .read(true)
            .write(true)
            .open(&path);
        match opened {
            Ok(file) => Ok((path, file)),
            Err(source) => Err(SnapshotError::Io {
                doing: "make",
                path,
                source,
            }),
        }
    }

    /// Makes a written file the current snapshot, so that after a crash it is there whole or not at all, and removes
    /// older ones.
    pub(crate) fn publish(&self, written: &Path, file: &File, meta: &SnapshotMeta) -> Result<PathBuf, SnapshotError> {
        let name = format!("{}{SUFFIX}", meta.snapshot_id);
        let path = self.dir.join(&name);
        let publish = || {
            file.sync_all()?;
            std::fs::rename(written, &path)?;
            File::open(&self.dir)?.sync_all()
        };
        publish().map_err(|source| SnapshotError::Io {
            doing: "write",
            path: path.clone(),
            source,
        })?;
        self.remove_others(&name);
        Ok(path)
    }

    /// Takes a checked, received file over as the current snapshot.
    pub(crate) fn adopt(&self, from: &Path, meta: &SnapshotMeta) -> Result<PathBuf, SnapshotError> {
        let name = format!("{}{SUFFIX}", meta.snapshot_id);
        let path = self.dir.join(&name);
        if from != path {
            let failed = |source| SnapshotError::Io {
                doing: "adopt",
                path: path.clone(),
                source,
            };
            // The sender's own file is left where it is; only a received part is moved.
            if from.parent() == Some(&self.dir) && from.extension().is_some_and(|extension| extension == "part") {
                std::fs::rename(from, &path).map_err(failed)?;
            } else {
                std::fs::copy(from, &path).map_err(failed)?;
                File::open(&path).and_then(|file| file.sync_all()).map_err(failed)?;
            }
            File::open(&self.dir).and_then(|dir| dir.sync_all()).map_err(failed)?;
        }
        self.remove_others(&name);
        Ok(path)
    }

    /// The newest snapshot, checked; `None` where there is none.
    pub(crate) fn load_newest(&self) -> Result<Option<Loaded>, SnapshotError> {
        let failed = |source| SnapshotError::Io {
            doing: "list",
            path: self.dir.clone(),
            source,
        };
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.dir).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            if name.ends_with(SUFFIX) {
                names.push(name);
            }
        }
        names.sort_unstable();
        match names.pop() {
            Some(newest) => load(&self.dir.join(newest)).map(Some),
            None => Ok(None),
        }
    }

    fn remove_others(&self, keep: &str) {
        let Ok(entries) = std::fs::read_dir(&self.dir) else {
            return;
        };
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.ends_with(SUFFIX)
                && name != keep
                && let Err(error) = std::fs::remove_file(entry.path())
            {
                tracing::warn!(%error, name, "an old snapshot can't be removed");
            }
        }
    }
}

/// Writes the state alone, as followers of the feed take it.
pub(crate) fn write_state(file: &mut File, state: &IndexState) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, file);
    codec::encode_snapshot(state, &mut out)?;
    out.flush()
}

/// Names sort by log position.
pub(crate) fn snapshot_id(index: u64, term: u64, node: u64) -> String {
    format!("{index:020}-{term:020}-{node}")
}

/// Hands a file to the disk as it is written: the log's flushes, which wait for what the system has gathered, never wait for
/// a whole snapshot.
struct Steady<'a> {
    file: &'a mut File,
    unsynced: usize,
}

/// Bytes that may gather.
const UNSYNCED_MAX: usize = 4 << 20;

impl Write for Steady<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.unsynced += written;
        if self.unsynced >= UNSYNCED_MAX {
            self.file.sync_data()?;
            self.unsynced = 0;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Passes bytes through and sums them up.
struct Summed<T> {
    inner: T,
    crc: crc32fast::Hasher,
}

impl<T> Summed<T> {
    fn new(inner: T) -> Self {
        Self {
            inner,
            crc: crc32fast::Hasher::new(),
        }
    }
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.crc.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<R: Read> Read for Summed<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(bytes)?;
        self.crc.update(&bytes[..read]);
        Ok(read)
    }
}

/// Writes description and state.
pub(crate) fn write_to(file: &mut File, meta: &SnapshotMeta, state: &IndexState) -> io::Result<()> {
    let mut writer = Writer::versioned();
    writer.snapshot_meta(meta);
    let steady = Steady { file, unsynced: 0 };
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, Summed::new(steady));
    out.write_all(MAGIC)?;
    out.write_all(&(writer.0.len() as u32).to_le_bytes())?;
    out.write_all(&writer.0)?;
    codec::encode_snapshot(state, &mut out)?;
    out.flush()?;
    let mut summed = out.into_inner().map_err(|error| error.into_error())?;
    let crc = summed.crc.clone().finalize();
    summed.inner.write_all(&crc.to_le_bytes())
}

/// Checks a received file's checksum, without reading the state.
pub(crate) fn check(path: &Path) -> Result<(), SnapshotError> {
    let io = |source| SnapshotError::Io {
        doing: "check",
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(io)?;
    let len = file.metadata().map_err(io)?.len();
    let content = len.saturating_sub(CRC_BYTES);
    let mut summed = Summed::new((&file).take(content));
    io::copy(
        &mut BufReader::with_capacity(BUFFER_BYTES, &mut summed),
        &mut io::sink(),
    )
    .map_err(io)?;
    let mut written = [0u8; 4];
    (&file).read_exact(&mut written).map_err(io)?;
    if summed.crc.finalize() != u32::from_le_bytes(written) {
        return Err(SnapshotError::Damaged {
            path: path.to_owned(),
            what: "it fails its checksum".to_owned(),
        });
    }
    Ok(())
}

/// Reads and checks a snapshot file.
pub(crate) fn load(path: &Path) -> Result<Loaded, SnapshotError> {
    let io = |source| SnapshotError::Io {
        doing: "read",
        path: path.to_owned(),
        source,
    };
    let damaged = |what: String| SnapshotError::Damaged {
        path: path.to_owned(),
        what,
    };
    let file = File::open(path).map_err(io)?;
    let len = file.metadata().map_err(io)?.len();
    let Some(content) = len.checked_sub(CRC_BYTES) else {
        return Err(damaged(format!("it is {len} bytes long")));
    };
    let mut summed = Summed::new((&file).take(content));
    let meta = {
        let mut head = [0u8; 12];
        summed
            .read_exact(&mut head)
            .map_err(|_| damaged("it ends inside its head".to_owned()))?;
        if &head[..8] != MAGIC {
            return Err(damaged("it doesn't begin as a snapshot does".to_owned()));
        }
        let len = u32::from_le_bytes([head[8], head[9], head[10], head[11]]) as usize;
        if len > META_BYTES_MAX {
            return Err(damaged(format!("its description claims {len} bytes")));
        }
        let mut bytes = vec![0u8; len];
        summed
            .read_exact(&mut bytes)
            .map_err(|_| damaged("it ends inside its description".to_owned()))?;
        let read = || -> Result<SnapshotMeta, CodecError> {
            let mut reader = Reader::versioned(bytes.into())?;
            let meta = reader.snapshot_meta()?;
            reader.finish()?;
            Ok(meta)
        };
        read().map_err(|error| damaged(error.to_string()))?
    };
    let mut buffered = BufReader::with_capacity(BUFFER_BYTES, summed);
    let state = codec::decode_snapshot(&mut buffered).map_err(|error| damaged(error.to_string()))?;
    let left = io::copy(&mut buffered, &mut io::sink()).map_err(io)?;
    if left > 0 {
        return Err(damaged(format!("{left} bytes are left over")));
    }
    let found = buffered.into_inner().crc.finalize();
    let mut written = [0u8; 4];
    (&file).read_exact(&mut written).map_err(io)?;
    if found != u32::from_le_bytes(written) {
        return Err(damaged("it fails its checksum".to_owned()));
    }
    let at = meta.last_log_id.map_or(0, |id| id.index);
    if state.applied().0 != at {
        return Err(damaged(format!(
            "its state is of {} and its description of {at}",
            state.applied().0
        )));
    }
    Ok(Loaded {
        meta,
        state,
        path: path.to_owned(),
    })
}
