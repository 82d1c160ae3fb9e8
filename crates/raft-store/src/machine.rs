//! openraft's state machine over [`IndexState`].

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use cairn_index::{Command, IndexState, LogIndex, Reply, codec};
use openraft::storage::RaftStateMachine;
use openraft::{AnyError, EntryPayload, OptionalSend, RaftSnapshotBuilder, Snapshot, StorageIOError};
use parking_lot::{Mutex, RwLock};

use crate::snapshot::{
    FORK_FROM_BYTES, SnapshotDir, SnapshotError, load, snapshot_id, write_aside, write_state, write_to,
};
use crate::types::{Applied, Entry, LogId, SnapshotFile, SnapshotMeta, StorageError, StoredMembership, TypeConfig};

/// One applied log entry.
#[derive(Clone, Debug)]
pub struct AppliedEntry<'a> {
    /// Its position.
    pub index: u64,
    /// The encoded command and its answer; `None` for entries that hold no command.
    pub command: Option<(&'a Bytes, &'a Command, &'a Reply)>,
    /// Digest of the state after it.
    pub digest: u64,
}

/// Hears what happens to the replicated state, in order; called outside the state's lock.
pub trait Observer: Send + Sync + 'static {
    /// An entry was applied.
    fn applied(&self, entry: &AppliedEntry<'_>);
    /// The state was replaced by a snapshot; nothing before `index` was heard by entries.
    fn installed(&self, index: u64, digest: u64);
}

/// The state with its place in the log.
#[derive(Default)]
pub(crate) struct Replica {
    pub(crate) state: IndexState,
    pub(crate) last_applied: Option<LogId>,
    pub(crate) membership: StoredMembership,
}

pub(crate) struct Shared {
    pub(crate) replica: RwLock<Replica>,
    current: Mutex<Option<(SnapshotMeta, PathBuf)>>,
    snapshots: SnapshotDir,
    observer: Arc<dyn Observer>,
    node: u64,
    /// From this weight on a forked process writes snapshots.
    fork_from: u64,
    /// Counts built snapshots, so that two at one place in the log are told apart.
    built: AtomicU64,
    /// Longest time that a snapshot kept writes waiting, in microseconds.
    pub(crate) snapshot_stall_us: AtomicU64,
}

/// The state at one place in the log, in the index's snapshot encoding.
#[derive(Debug)]
pub struct StateFile {
    /// Where in the log.
    pub index: u64,
    /// Digest of the state.
    pub digest: u64,
    /// Length of the file.
    pub bytes: u64,
    /// The bytes, to be read from position 0.
    pub file: File,
}

/// The state machine; clones share it.
#[derive(Clone)]
pub struct Machine {
    pub(crate) shared: Arc<Shared>,
}

fn read_failed(error: &SnapshotError) -> StorageError {
    StorageIOError::read_snapshot(None, AnyError::new(error)).into()
}

fn write_failed(error: &SnapshotError) -> StorageError {
    StorageIOError::write_snapshot(None, AnyError::new(error)).into()
}

impl Machine {
    /// The state as the newest snapshot has it, or empty.
    ///
    /// # Errors
    /// The newest snapshot is damaged or can't be read.
    pub fn open(snapshots: SnapshotDir, node: u64, observer: Arc<dyn Observer>) -> Result<Self, SnapshotError> {
        Self::open_forking_from(FORK_FROM_BYTES, snapshots, node, observer)
    }

    /// Like [`Machine::open`]; states of that weight and more are written by a forked process.
    ///
    /// # Errors
    /// As [`Machine::open`].
    pub fn open_forking_from(
        fork_from: u64,
        snapshots: SnapshotDir,
        node: u64,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, SnapshotError> {
        let (replica, current) = match snapshots.load_newest()? {
            Some(loaded) => {
                let replica = Replica {
                    state: loaded.state,
                    last_applied: loaded.meta.last_log_id,
                    membership: loaded.meta.last_membership.clone(),
                };
                observer.installed(replica.state.applied().0, replica.state.digest().0);
                (replica, Some((loaded.meta, loaded.path)))
            }
            None => (
                Replica {
                    state: IndexState::new(),
                    ..Replica::default()
                },
                None,
            ),
        };
        Ok(Self {
            shared: Arc::new(Shared {
                replica: RwLock::new(replica),
                current: Mutex::new(current),
                snapshots,
                observer,
                node,
                fork_from,
                built: AtomicU64::new(0),
                snapshot_stall_us: AtomicU64::new(0),
            }),
        })
    }

    /// Where the current snapshot stands.
    pub(crate) fn snapshot_index(&self) -> Option<u64> {
        self.shared
            .current
            .lock()
            .as_ref()
            .and_then(|(meta, _)| meta.last_log_id.map(|id| id.index))
    }

    /// A fresh file name for a received snapshot.
    pub(crate) fn part(&self) -> PathBuf {
        self.shared
            .snapshots
            .part(self.shared.built.fetch_add(1, Ordering::Relaxed))
    }

    fn stalled(&self, stall: Duration) {
        let stall = u64::try_from(stall.as_micros()).unwrap_or(u64::MAX);
        self.shared.snapshot_stall_us.fetch_max(stall, Ordering::Relaxed);
    }

    /// Writes a snapshot file of the present state and makes it the current one; waits for the disk.
    fn build(&self) -> Result<Snapshot<TypeConfig>, SnapshotError> {
        let shared = &self.shared;
        let (written, mut file) = shared.snapshots.create(shared.built.fetch_add(1, Ordering::Relaxed))?;
        let describe = |replica: &Replica| {
            let (index, term) = replica.last_applied.map_or((0, 0), |id| (id.index, id.leader_id.term));
            SnapshotMeta {
                last_log_id: replica.last_applied,
                last_membership: replica.membership.clone(),
                snapshot_id: snapshot_id(index, term, shared.node),
            }
        };
        let described = write_aside(&shared.replica, shared.fork_from, &mut file, describe, write_to);
        let published = described
            .map_err(|source| SnapshotError::Io {
                doing: "write",
                path: written.clone(),
                source,
            })
            .and_then(|(meta, stall)| {
                self.stalled(stall);
                let path = shared.snapshots.publish(&written, &file, &meta)?;
                Ok((meta, path))
            });
        let (meta, path) = published.inspect_err(|_| {
            let _ = std::fs::remove_file(&written);
        })?;
        *shared.current.lock() = Some((meta.clone(), path.clone()));
        Ok(Snapshot {
            meta,
            snapshot: Box::new(SnapshotFile { path }),
        })
    }

    /// Writes the present state, for a follower, into a file that has no name and goes when it is closed; waits for the
    /// disk.
    pub(crate) fn export(&self) -> Result<StateFile, SnapshotError> {
        let shared = &self.shared;
        let (written, mut file) = shared.snapshots.create(shared.built.fetch_add(1, Ordering::Relaxed))?;
        let failed = |source| SnapshotError::Io {
            doing: "write",
            path: written.clone(),
            source,
        };
        // Nameless from the start: whatever happens, nothing is left behind.
        std::fs::remove_file(&written).map_err(failed)?;
        let describe = |replica: &Replica| (replica.state.applied().0, replica.state.digest().0);
        let write = |file: &mut File, _: &(u64, u64), state: &IndexState| write_state(file, state);
        let written = write_aside(&shared.replica, shared.fork_from, &mut file, describe, write);
        let ((index, digest), stall) = written.map_err(failed)?;
        self.stalled(stall);
        let bytes = file.metadata().map_err(failed)?.len();
        Ok(StateFile {
            index,
            digest,
            bytes,
            file,
        })
    }

    fn apply_one(&self, entry: Entry) -> Result<Applied, StorageError> {
        let decoded = match &entry.payload {
            EntryPayload::Normal(payload) => {
                let command = codec::decode_command(&payload.0)
                    .map_err(|error| StorageIOError::apply(entry.log_id, AnyError::new(&error)))?;
                Some((payload.0.clone(), command))
            }
            EntryPayload::Blank | EntryPayload::Membership(_) => None,
        };
        let at = LogIndex(entry.log_id.index);
        let (reply, digest) = {
            let mut replica = self.shared.replica.write();
            replica.last_applied = Some(entry.log_id);
            if let EntryPayload::Membership(membership) = entry.payload {
                replica.membership = StoredMembership::new(Some(entry.log_id), membership);
            }
            let reply = match &decoded {
                Some((_, command)) => Some(replica.state.apply(at, command)),
                None => {
                    replica.state.skip_to(at);
                    None
                }
            };
            (reply, replica.state.digest().0)
        };
        let command = match (&decoded, &reply) {
            (Some((bytes, command)), Some(reply)) => Some((bytes, command, reply)),
            (Some(_), None) | (None, Some(_)) | (None, None) => None,
        };
        self.shared.observer.applied(&AppliedEntry {
            index: at.0,
            command,
            digest,
        });
        Ok(Applied(reply))
    }
}

impl RaftStateMachine<TypeConfig> for Machine {
    type SnapshotBuilder = Self;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), StorageError> {
        let replica = self.shared.replica.read();
        Ok((replica.last_applied, replica.membership.clone()))
    }

    async fn apply<I>(&mut self, entries: I) -> Result<Vec<Applied>, StorageError>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        entries.into_iter().map(|entry| self.apply_one(entry)).collect()
    }

    async fn get_snapshot_builder(&mut self) -> Self {
        self.clone()
    }

    async fn begin_receiving_snapshot(&mut self) -> Result<Box<SnapshotFile>, StorageError> {
        Ok(Box::new(SnapshotFile { path: self.part() }))
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, file: Box<SnapshotFile>) -> Result<(), StorageError> {
        let shared = self.shared.clone();
        let wanted = meta.clone();
        let install = move || -> Result<(), SnapshotError> {
            let loaded = load(&file.path)?;
            if loaded.meta != wanted {
                let what = "its description isn't the one announced".to_owned();
                return Err(SnapshotError::Damaged {
                    path: file.path.clone(),
                    what,
                });
            }
            let path = shared.snapshots.adopt(&file.path, &wanted)?;
            let (index, digest) = (loaded.state.applied().0, loaded.state.digest().0);
            let old = {
                let mut replica = shared.replica.write();
                if replica.last_applied > wanted.last_log_id {
                    tracing::warn!(index, "a snapshot older than the state isn't installed");
                    return Ok(());
                }
                replica.last_applied = wanted.last_log_id;
                replica.membership = wanted.last_membership.clone();
                std::mem::replace(&mut replica.state, loaded.state)
            };
            drop(old);
            *shared.current.lock() = Some((wanted, path));
            shared.observer.installed(index, digest);
            Ok(())
        };
        run(install).await
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot<TypeConfig>>, StorageError> {
        let current = self.shared.current.lock().clone();
        Ok(current.map(|(meta, path)| Snapshot {
            meta,
            snapshot: Box::new(SnapshotFile { path }),
        }))
    }
}

impl RaftSnapshotBuilder<TypeConfig> for Machine {
    async fn build_snapshot(&mut self) -> Result<Snapshot<TypeConfig>, StorageError> {
        let machine = self.clone();
        let build = move || machine.build();
        match tokio::task::spawn_blocking(build).await {
            Ok(result) => result.map_err(|error| write_failed(&error)),
            Err(error) => Err(StorageIOError::write_snapshot(None, AnyError::new(&error)).into()),
        }
    }
}

async fn run(work: impl FnOnce() -> Result<(), SnapshotError> + Send + 'static) -> Result<(), StorageError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(|error| read_failed(&error)),
        Err(error) => Err(StorageIOError::read_snapshot(None, AnyError::new(&error)).into()),
    }
}
