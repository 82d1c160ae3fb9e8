//! Checkpoints on disk: one file per source, with what must agree before it may be used.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use cairn_blocks::ClusterSeed;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::identity::write_atomically;

const MAGIC: &[u8; 8] = b"CAIRNCK2";
/// Magic, fingerprint, seed, process start, digest.
const HEADER_BYTES: usize = 5 * 8;

/// The file of one source.
#[derive(Clone, Debug)]
pub struct CheckpointFile {
    path: PathBuf,
    /// Hash of all that the mirror depends on: source name, pool, block sizes, tiers.
    fingerprint: u64,
    max_bytes: u64,
}

/// A checkpoint that was read.
#[derive(Debug)]
pub struct Checkpoint {
    /// Seed of the cluster whose keys it holds.
    pub seed: ClusterSeed,
    /// Process start of the engine whose blocks it holds, where known.
    pub start: Option<u64>,
    /// The core's own bytes.
    pub body: Vec<u8>,
}

/// Why there is no usable checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// It can't be read.
    #[error("checkpoint {path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// It is damaged, too long, or of another source, configuration or version.
    #[error("checkpoint {path} is not used: {fault}")]
    Unusable {
        /// Which file.
        path: PathBuf,
        /// Why.
        fault: &'static str,
    },
}

impl CheckpointFile {
    /// The file of the source `name` in `directory`; `depends` is all that its content depends on.
    #[must_use]
    pub fn new(directory: &Path, name: &str, depends: &str, max_bytes: u64) -> Self {
        let path = directory.join(format!("{:016x}.ckpt", xxh3_64(name.as_bytes())));
        let mut hash = Xxh3::new();
        hash.update(&(name.len() as u64).to_le_bytes());
        hash.update(name.as_bytes());
        hash.update(depends.as_bytes());
        Self {
            path,
            fingerprint: hash.digest(),
            max_bytes,
        }
    }

    /// Reads it; `None` where there is none.
    ///
    /// # Errors
    /// When it can't be read or must not be used.
    pub fn read(&self) -> Result<Option<Checkpoint>, CheckpointError> {
        let io = |source| CheckpointError::Io {
            path: self.path.clone(),
            source,
        };
        let mut file = match fs::File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io(error)),
        };
        let unusable = |fault| CheckpointError::Unusable {
            path: self.path.clone(),
            fault,
        };
        if file.metadata().map_err(io)?.len() > self.max_bytes.saturating_add(HEADER_BYTES as u64) {
            return Err(unusable("it is longer than limits.max_checkpoint_bytes"));
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(io)?;
        let Some((header, body)) = bytes.split_at_checked(HEADER_BYTES) else {
            return Err(unusable("it is cut short"));
        };
        let word = |at: usize| {
            let mut word = [0u8; 8];
            word.copy_from_slice(&header[at..at + 8]);
            u64::from_le_bytes(word)
        };
        if &header[..8] != MAGIC {
            return Err(unusable("it is of another version"));
        }
        if word(8) != self.fingerprint {
            return Err(unusable("its source, pool or block size was another"));
        }
        let (seed, start) = (ClusterSeed(word(16)), word(24));
        if word(32) != digest(seed, start, body) {
            return Err(unusable("it is damaged"));
        }
        bytes.drain(..HEADER_BYTES);
        Ok(Some(Checkpoint {
            seed,
            start: (start != 0).then_some(start),
            body: bytes,
        }))
    }

    /// Writes it; a crash leaves the old or the new one. `false` where it would be too long.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn write(&self, seed: ClusterSeed, start: Option<u64>, body: &[u8]) -> io::Result<bool> {
        if body.len() as u64 > self.max_bytes {
            return Ok(false);
        }
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend_from_slice(MAGIC);
        header.extend_from_slice(&self.fingerprint.to_le_bytes());
        header.extend_from_slice(&seed.0.to_le_bytes());
        header.extend_from_slice(&start.unwrap_or(0).to_le_bytes());
        header.extend_from_slice(&digest(seed, start.unwrap_or(0), body).to_le_bytes());
        write_atomically(&self.path, &[&header, body])?;
        Ok(true)
    }

    /// Removes it.
    pub fn remove(&self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn digest(seed: ClusterSeed, start: u64, body: &[u8]) -> u64 {
    let mut hash = Xxh3::with_seed(seed.0);
    hash.update(&start.to_le_bytes());
    hash.update(body);
    hash.digest()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_used_only_whole_and_only_by_its_own_source() {
        let dir = tempfile::tempdir().unwrap();
        let file = CheckpointFile::new(dir.path(), "http://x#0", "pool 16", 1 << 20);
        assert!(file.read().unwrap().is_none());
        assert!(file.write(ClusterSeed(7), Some(9), b"body").unwrap());
        let read = file.read().unwrap().unwrap();
        assert_eq!(
            (read.seed, read.start, read.body.as_slice()),
            (ClusterSeed(7), Some(9), b"body".as_slice())
        );
        assert!(
            CheckpointFile::new(dir.path(), "http://x#0", "pool 32", 1 << 20)
                .read()
                .is_err()
        );
        let mut bytes = fs::read(&file.path).unwrap();
        for at in 0..bytes.len() {
            bytes[at] ^= 1;
            fs::write(&file.path, &bytes).unwrap();
            assert!(file.read().is_err(), "byte {at}");
            bytes[at] ^= 1;
        }
        fs::write(&file.path, &bytes[..20]).unwrap();
        assert!(file.read().is_err());
        assert!(
            !CheckpointFile::new(dir.path(), "y", "", 2)
                .write(ClusterSeed(1), None, b"body")
                .unwrap()
        );
    }
}
