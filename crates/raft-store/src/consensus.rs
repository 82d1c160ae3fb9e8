//! One member of the group: proposes, reads, receives peers' messages, changes the membership.

mod contact;
mod members;
mod peers;
mod recover;
mod retention;
mod view;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use cairn_index::{IndexState, Reply};
use openraft::SnapshotPolicy;
use openraft::error::{ClientWriteError, InitializeError, RaftError};

use crate::directory::{DataDir, DirectoryError, FREE_BYTES_MIN, Identity};
use crate::engine::{EngineError, SledEngine};
use crate::log::LogStore;
use crate::machine::{Machine, Observer, StateFile};
use crate::network::{Network, PeerTransport};
use crate::snapshot::{SnapshotDir, SnapshotError};
use crate::types::{Payload, Peer, Raft, StorageError, TypeConfig};
use crate::wire::cluster_hash;

pub(crate) use contact::Contact;
pub use members::ChangeError;
pub use peers::ReceiveError;
pub use recover::recover_alone;
pub use retention::Retention;
pub use view::{MemberView, NodeView, ViewCursor};

/// Entries of one append message: at the aimed 64 KiB each they are bounded by bytes first.
pub(crate) const PAYLOAD_ENTRIES_MAX: u64 = 256;
/// A snapshot must have arrived within this.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(120);
/// How long closing waits for other handles.
pub const CLOSE_PATIENCE: Duration = Duration::from_secs(5);
/// The one data group there is today.
const GROUP: u32 = 0;

/// How a member is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// Data directory.
    pub dir: PathBuf,
    /// Name of the cluster.
    pub cluster: String,
    /// Id of this node; never 0.
    pub node: u64,
    /// A random number that names the data directory where it is new.
    pub store_if_new: u64,
    /// How often the leader is heard; also the time limit of one append message.
    pub heartbeat: Duration,
    /// Silence of the leader after which a follower stands for election; the real limit is drawn between this and twice it.
    pub election: Duration,
    /// When snapshots are made and how much log stays behind them.
    pub retention: Retention,
    /// A start with less free space is refused.
    pub free_bytes_min: u64,
}

impl Options {
    /// Defaults for a directory, cluster and node.
    #[must_use]
    pub fn new(dir: PathBuf, cluster: &str, node: u64, store_if_new: u64) -> Self {
        Self {
            dir,
            cluster: cluster.to_owned(),
            node,
            store_if_new,
            heartbeat: Duration::from_millis(200),
            election: Duration::from_millis(1000),
            retention: Retention::default(),
            free_bytes_min: FREE_BYTES_MIN,
        }
    }
}

/// Why a member can't start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The data directory isn't taken.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The log isn't taken.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The snapshot isn't taken.
    #[error("{0}; move the data directory aside and let the node rejoin under a new id")]
    Snapshot(#[from] SnapshotError),
    /// Snapshot directory can't be listed.
    #[error("can't use {}", dir.display())]
    SnapshotDir {
        /// The directory.
        dir: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// Snapshot and log don't meet.
    #[error(
        "the log in {} was cut up to {purged} and the snapshot reaches {snapshot} only: data are missing; move the \
         directory aside and let the node rejoin under a new id",
        dir.display()
    )]
    Hole {
        /// Data directory.
        dir: PathBuf,
        /// Where the log was cut.
        purged: u64,
        /// Where the snapshot stands; 0 for none.
        snapshot: u64,
    },
    /// Stored values can't be read.
    #[error("stored values can't be read: {0}")]
    Storage(String),
    /// The settings contradict each other.
    #[error("the consensus settings are refused: {0}")]
    Settings(String),
    /// The core stopped at its start.
    #[error("the consensus core didn't start: {0}")]
    Core(String),
}

impl From<StorageError> for OpenError {
    fn from(error: StorageError) -> Self {
        Self::Storage(error.to_string())
    }
}

/// Why a command wasn't committed, as far as this node knows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// Another node leads.
    #[error("this node isn't the leader")]
    NotLeader {
        /// The leader and its address, where known.
        leader: Option<(u64, String)>,
    },
    /// The outcome is unknown: the node lost its lead or stopped.
    #[error("the outcome is unknown since leadership changed; send again")]
    Unknown,
    /// The node has stopped for good.
    #[error("this node has stopped: {0}")]
    Stopped(String),
}

/// A committed and applied command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Its position in the log.
    pub index: u64,
    /// What applying it answered.
    pub reply: Reply,
}

/// A proposed command.
pub struct Pending {
    receiver: tokio::sync::oneshot::Receiver<openraft::raft::ClientWriteResult<TypeConfig>>,
}

impl Pending {
    /// Waits until the command is committed and applied here.
    ///
    /// # Errors
    /// [`ProposeError`]; after [`ProposeError::Unknown`] it may have been committed all the same.
    pub async fn wait(self) -> Result<Committed, ProposeError> {
        match self.receiver.await {
            Ok(Ok(response)) => match response.data.0 {
                Some(reply) => Ok(Committed {
                    index: response.log_id.index,
                    reply,
                }),
                None => Err(ProposeError::Unknown),
            },
            Ok(Err(ClientWriteError::ForwardToLeader(forward))) => Err(ProposeError::NotLeader {
                leader: forward.leader_id.zip(forward.leader_node.map(|peer| peer.address)),
            }),
            Ok(Err(ClientWriteError::ChangeMembershipError(error))) => Err(ProposeError::Stopped(error.to_string())),
            Err(_) => Err(ProposeError::Unknown),
        }
    }
}

/// One member of the replicated group. Clones share it.
#[derive(Clone)]
pub struct Consensus {
    inner: Arc<Inner>,
}

struct Inner {
    raft: Raft,
    machine: Machine,
    log: LogStore,
    directory: DataDir,
    cluster: u64,
    contact: Arc<Contact>,
}

impl Consensus {
    /// Opens the data directory and joins in; a fresh node waits to be initialised or added.
    ///
    /// # Errors
    /// [`OpenError`], naming cause and remedy.
    pub async fn open(
        options: Options,
        transport: Arc<dyn PeerTransport>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, OpenError> {
        let config = Arc::new(
            raft_config(&options)
                .validate()
                .map_err(|e| OpenError::Settings(e.to_string()))?,
        );
        let opening = options.clone();
        let opened = tokio::task::spawn_blocking(move || open_storage(&opening, observer)).await;
        let (directory, log, machine) = opened.map_err(|error| OpenError::Core(error.to_string()))??;
        let contact = Arc::new(Contact::default());
        let cluster = cluster_hash(&options.cluster);
        let network = Network {
            transport,
            cluster,
            node: options.node,
            contact: contact.clone(),
        };
        let raft = Raft::new(options.node, config, network, log.clone(), machine.clone())
            .await
            .map_err(|error| OpenError::Core(error.to_string()))?;
        let inner = Arc::new(Inner {
            raft,
            machine,
            log,
            directory,
            cluster,
            contact,
        });
        tokio::spawn(contact::watch_leader(inner.raft.metrics(), inner.contact.clone()));
        tokio::spawn(contact::tick(Arc::downgrade(&inner.contact)));
        tokio::spawn(retention::run(options.retention, Arc::downgrade(&inner)));
        Ok(Self { inner })
    }

    /// Whose data directory it is.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        self.inner.directory.identity()
    }

    /// Whether the data directory was made by this start.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.inner.directory.is_fresh()
    }

    /// Whether this node belongs to a group.
    #[must_use]
    pub fn is_initialised(&self) -> bool {
        let metrics = self.inner.raft.metrics();
        let metrics = metrics.borrow();
        metrics.last_log_index.is_some() || metrics.current_term > 0
    }

    /// Forms the group; called on one fresh member. Doing it again is no error.
    ///
    /// # Errors
    /// A message where the core refuses.
    pub async fn initialise(&self, members: BTreeMap<u64, Peer>) -> Result<(), String> {
        match self.inner.raft.initialize(members).await {
            Ok(()) | Err(RaftError::APIError(InitializeError::NotAllowed(_))) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Proposes an encoded command; calls from one task keep their order in the log.
    ///
    /// # Errors
    /// [`ProposeError::Stopped`].
    pub async fn propose(&self, command: Bytes) -> Result<Pending, ProposeError> {
        match self.inner.raft.client_write_ff(Payload(command)).await {
            Ok(receiver) => Ok(Pending { receiver }),
            Err(error) => Err(ProposeError::Stopped(error.to_string())),
        }
    }

    /// Reads the replicated state; keep `read` short, since applying waits meanwhile.
    pub fn read<T>(&self, read: impl FnOnce(&IndexState) -> T) -> T {
        read(&self.inner.machine.shared.replica.read().state)
    }

    /// Milliseconds since this node last knew of a quorum behind the state that it has; very large where it never did.
    #[must_use]
    pub fn quorum_age_ms(&self) -> u64 {
        self.inner.contact.quorum_age_ms()
    }

    /// Bytes of the log on disk.
    #[must_use]
    pub fn log_bytes(&self) -> u64 {
        self.inner.log.size_on_disk()
    }

    /// Longest time that making a snapshot kept writes waiting, in microseconds.
    #[must_use]
    pub fn snapshot_stall_us_max(&self) -> u64 {
        self.inner.machine.shared.snapshot_stall_us.load(Ordering::Relaxed)
    }

    /// Asks for a snapshot now.
    ///
    /// # Errors
    /// [`ProposeError::Stopped`].
    pub async fn snapshot(&self) -> Result<(), ProposeError> {
        self.inner
            .raft
            .trigger()
            .snapshot()
            .await
            .map_err(|error| ProposeError::Stopped(error.to_string()))
    }

    /// Writes the present state into a nameless file of the data directory; blocks until it is written.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn export(&self) -> Result<StateFile, SnapshotError> {
        self.inner.machine.export()
    }

    /// Stops taking part; the log is on disk.
    pub async fn shutdown(&self) {
        if let Err(error) = self.inner.raft.shutdown().await {
            tracing::warn!(%error, "the consensus core ended badly");
        }
    }

    /// Like [`Consensus::shutdown`], and waits until every other handle is gone and the directory is free again.
    ///
    /// Returns whether it is; it gives up after [`CLOSE_PATIENCE`].
    pub async fn close(self) -> bool {
        self.shutdown().await;
        let (inner, log) = (Arc::downgrade(&self.inner), self.inner.log.downgrade());
        drop(self);
        let begun = std::time::Instant::now();
        while inner.strong_count() > 0 || log.strong_count() > 0 {
            if begun.elapsed() > CLOSE_PATIENCE {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        true
    }
}

fn raft_config(options: &Options) -> openraft::Config {
    let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    openraft::Config {
        cluster_name: options.cluster.clone(),
        heartbeat_interval: millis(options.heartbeat),
        election_timeout_min: millis(options.election),
        election_timeout_max: millis(options.election * 2),
        install_snapshot_timeout: millis(SNAPSHOT_TIMEOUT),
        max_payload_entries: PAYLOAD_ENTRIES_MAX,
        snapshot_policy: SnapshotPolicy::Never,
        // Snapshots and purges follow our own schedule, by time and bytes.
        max_in_snapshot_log_to_keep: u64::MAX,
        ..openraft::Config::default()
    }
}

fn open_storage(options: &Options, observer: Arc<dyn Observer>) -> Result<(DataDir, LogStore, Machine), OpenError> {
    let directory = DataDir::open(
        &options.dir,
        &options.cluster,
        options.node,
        options.store_if_new,
        options.free_bytes_min,
    )?;
    let engine = SledEngine::open(&directory.log(), GROUP)?;
    let log = LogStore::new(Arc::new(engine));
    let snapshots = SnapshotDir::open(directory.snapshots()).map_err(|source| OpenError::SnapshotDir {
        dir: directory.snapshots(),
        source,
    })?;
    let machine = Machine::open(snapshots, options.node, observer)?;
    let snapshot = machine.snapshot_index().unwrap_or(0);
    if let Some(purged) = log.purged()?.filter(|purged| purged.index > snapshot) {
        return Err(OpenError::Hole {
            dir: options.dir.clone(),
            purged: purged.index,
            snapshot,
        });
    }
    Ok((directory, log, machine))
}
