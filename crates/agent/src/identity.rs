//! Who this agent is: an id that survives restarts, and the host it runs on.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::config::Identity;

/// A data directory that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// It can't be read or written.
    #[error("data directory {path}: {source}; give the agent a directory that it may write (data_dir)")]
    Io {
        /// Which path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Another agent uses it.
    #[error("data directory {0} is in use by another agent; give each agent its own data_dir")]
    Locked(PathBuf),
    /// The id in it isn't one.
    #[error("{0} does not hold an agent id; remove the file to draw a new id")]
    BadId(PathBuf),
}

/// The agent's data directory, locked for as long as this lives.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    _lock: File,
}

impl DataDir {
    /// Makes the directory where it isn't there, and locks it.
    ///
    /// # Errors
    /// When it can't be used, or another agent uses it.
    pub fn open(path: &Path) -> Result<Self, DataDirError> {
        let io = |source| DataDirError::Io {
            path: path.to_owned(),
            source,
        };
        fs::create_dir_all(path.join("checkpoints")).map_err(io)?;
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path.join("lock"))
            .map_err(io)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self {
                path: path.to_owned(),
                _lock: lock,
            }),
            Err(TryLockError::WouldBlock) => Err(DataDirError::Locked(path.to_owned())),
            Err(TryLockError::Error(source)) => Err(io(source)),
        }
    }

    /// Where checkpoints lie.
    #[must_use]
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// The agent's id: as configured, else the host name and a part drawn once and kept.
    ///
    /// # Errors
    /// When the kept part can't be read or written.
    pub fn agent_id(&self, identity: &Identity, host: &str) -> Result<String, DataDirError> {
        if !identity.id.is_empty() {
            return Ok(identity.id.clone());
        }
        let path = self.path.join("agent-id");
        let drawn = match fs::read_to_string(&path) {
            Ok(text) => {
                let text = text.trim().to_owned();
                let plain = !text.is_empty() && text.len() <= 64 && text.bytes().all(|b| b.is_ascii_alphanumeric());
                if !plain {
                    return Err(DataDirError::BadId(path));
                }
                text
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let drawn = uuid::Uuid::new_v4().simple().to_string()[..12].to_owned();
                write_atomically(&path, &[drawn.as_bytes()]).map_err(|source| DataDirError::Io {
                    path: path.clone(),
                    source,
                })?;
                drawn
            }
            Err(source) => return Err(DataDirError::Io { path, source }),
        };
        Ok(format!("{host}-{drawn}"))
    }
}

/// The host name to register: as configured, else the machine's.
#[must_use]
pub fn host_name(identity: &Identity) -> String {
    if !identity.host.is_empty() {
        return identity.host.clone();
    }
    for path in ["/proc/sys/kernel/hostname", "/etc/hostname"] {
        if let Ok(name) = fs::read_to_string(path) {
            let name = name.trim();
            if !name.is_empty() && name.len() <= 253 && !name.chars().any(char::is_control) {
                return name.to_owned();
            }
        }
    }
    "localhost".to_owned()
}

/// Writes a file so that a crash leaves the old or the new one, never a part.
pub(crate) fn write_atomically(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let scratch = path.with_extension("new");
    let mut file = File::create(&scratch)?;
    for part in parts {
        file.write_all(part)?;
    }
    file.sync_data()?;
    drop(file);
    fs::rename(&scratch, path)?;
    if let Some(directory) = path.parent() {
        File::open(directory)?.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_survives_a_restart_and_the_directory_serves_one_agent() {
        let dir = tempfile::tempdir().unwrap();
        let first = DataDir::open(dir.path()).unwrap();
        let id = first.agent_id(&Identity::default(), "h").unwrap();
        assert!(id.starts_with("h-") && id.len() == 14, "{id}");
        assert!(matches!(DataDir::open(dir.path()), Err(DataDirError::Locked(_))));
        drop(first);
        let again = DataDir::open(dir.path()).unwrap();
        assert_eq!(again.agent_id(&Identity::default(), "h").unwrap(), id);
        fs::write(dir.path().join("agent-id"), "../../x").unwrap();
        assert!(matches!(
            again.agent_id(&Identity::default(), "h"),
            Err(DataDirError::BadId(_))
        ));
    }
}
