//! Raft log, vote and snapshots on disk, and the [`Consensus`] facade over openraft.
//!
//! Nothing of openraft leaves this room: callers propose encoded commands, read the replicated [`IndexState`], move
//! opaque peer messages through a [`PeerTransport`] and hear what was applied through an [`Observer`]. The stored bytes
//! and the peer messages are encoded here.
//!
//! [`IndexState`]: cairn_index::IndexState
#![expect(
    clippy::result_large_err,
    reason = "openraft's storage error is large, its traits ask for it, and it ends the node"
)]

mod codec;
mod consensus;
mod directory;
mod engine;
mod log;
mod machine;
mod network;
mod snapshot;
mod types;
mod wire;

pub use consensus::{
    CLOSE_PATIENCE, ChangeError, Committed, Consensus, MemberView, NodeView, OpenError, Options, Pending, ProposeError,
    ReceiveError, Retention, ViewCursor, recover_alone,
};
pub use directory::{DataDir, DirectoryError, Identity};
pub use engine::{Done, EngineError, LogEngine, Record, SledEngine, VALUE_BYTES_MAX};
pub use machine::{AppliedEntry, Observer, StateFile};
pub use network::{ChunkReceiver, PeerFuture, PeerTransport, TransportError};
pub use snapshot::SnapshotError;
pub use types::Peer;

/// Internals that the storage tests drive directly.
#[doc(hidden)]
pub mod testing {
    pub use crate::log::LogStore;
    pub use crate::machine::Machine;
    pub use crate::snapshot::SnapshotDir;
    pub use crate::types::{Applied, Payload, TypeConfig};
}
