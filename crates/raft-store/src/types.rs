//! The type configuration that openraft runs on; private to this room.

use bytes::Bytes;
use cairn_index::Reply;

/// A member as the replicated membership names it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    /// Where other nodes reach it, `host:port`.
    pub address: String,
    /// Drawn when its data directory was made: an emptied node under an old id is somebody else.
    pub store: u64,
}

/// One encoded command.
#[derive(Clone, PartialEq, Eq)]
pub struct Payload(pub Bytes);

impl std::fmt::Debug for Payload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Payload({} bytes)", self.0.len())
    }
}

/// What applying an entry answered; `None` for entries without a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied(pub Option<Reply>);

/// A snapshot on its way: a file of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotFile {
    /// Where it lies.
    pub path: std::path::PathBuf,
}

openraft::declare_raft_types!(
    /// What openraft is instantiated with.
    pub TypeConfig:
        D = Payload,
        R = Applied,
        NodeId = u64,
        Node = Peer,
        Entry = openraft::Entry<TypeConfig>,
        SnapshotData = SnapshotFile,
        AsyncRuntime = openraft::TokioRuntime,
);

pub(crate) type LogId = openraft::LogId<u64>;
pub(crate) type Vote = openraft::Vote<u64>;
pub(crate) type Entry = openraft::Entry<TypeConfig>;
pub(crate) type Membership = openraft::Membership<u64, Peer>;
pub(crate) type StoredMembership = openraft::StoredMembership<u64, Peer>;
pub(crate) type SnapshotMeta = openraft::SnapshotMeta<u64, Peer>;
pub(crate) type StorageError = openraft::StorageError<u64>;
pub(crate) type Raft = openraft::Raft<TypeConfig>;
