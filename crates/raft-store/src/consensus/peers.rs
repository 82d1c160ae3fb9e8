//! Messages from other members.

use std::path::Path;

use bytes::Bytes;
use openraft::Snapshot;
use tokio::io::AsyncWriteExt;

use super::Consensus;
use crate::codec::{CodecError, Reader};
use crate::network::ChunkReceiver;
use crate::snapshot;
use crate::types::SnapshotFile;
use crate::wire::{self, Envelope};

/// Largest snapshot that is received: a hundred million memberships take about a gigabyte.
const SNAPSHOT_BYTES_MAX: u64 = 16 << 30;

/// Why a peer's message isn't taken.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// It isn't readable.
    #[error("the message isn't readable: {0}")]
    Unreadable(String),
    /// It belongs to another cluster.
    #[error("the message is of another cluster; correct `cluster` or the addresses of `peers`")]
    OtherCluster,
    /// It is for another node.
    #[error("the message is for node {wanted} and this is node {node}; correct the addresses of `peers`")]
    OtherNode {
        /// Whom it is for.
        wanted: u64,
        /// Who this is.
        node: u64,
    },
    /// It is for an earlier life of this node.
    #[error(
        "node {node} was emptied since it became a member; remove it from the cluster and add it again under a new id"
    )]
    OtherStore {
        /// Who this is.
        node: u64,
    },
    /// A snapshot didn't arrive whole.
    #[error("the snapshot isn't taken: {0}")]
    Snapshot(String),
    /// The core has stopped.
    #[error("this node has stopped: {0}")]
    Stopped(String),
}

impl From<CodecError> for ReceiveError {
    fn from(error: CodecError) -> Self {
        Self::Unreadable(error.to_string())
    }
}

impl Consensus {
    fn open_envelope(&self, payload: Bytes) -> Result<(Envelope, Reader), ReceiveError> {
        let (envelope, reader) = Envelope::read(payload)?;
        let identity = self.identity();
        if envelope.cluster != self.inner.cluster {
            return Err(ReceiveError::OtherCluster);
        }
        if envelope.to != identity.node {
            return Err(ReceiveError::OtherNode {
                wanted: envelope.to,
                node: identity.node,
            });
        }
        if envelope.store != identity.store {
            return Err(ReceiveError::OtherStore { node: identity.node });
        }
        Ok((envelope, reader))
    }

    /// Entries or a heartbeat of the leader.
    ///
    /// # Errors
    /// [`ReceiveError`].
    pub async fn receive_append(&self, payload: Bytes) -> Result<Bytes, ReceiveError> {
        let (envelope, reader) = self.open_envelope(payload)?;
        let reply = self.inner.raft.append_entries(wire::append(reader)?).await;
        let reply = reply.map_err(|error| ReceiveError::Stopped(error.to_string()))?;
        match reply {
            openraft::raft::AppendEntriesResponse::HigherVote(_) => {}
            openraft::raft::AppendEntriesResponse::Success
            | openraft::raft::AppendEntriesResponse::PartialSuccess(_)
            | openraft::raft::AppendEntriesResponse::Conflict => self.inner.contact.heard(envelope.quorum_age_ms),
        }
        Ok(wire::put_append_reply(&reply))
    }

    /// A candidate asks for a vote.
    ///
    /// # Errors
    /// [`ReceiveError`].
    pub async fn receive_vote(&self, payload: Bytes) -> Result<Bytes, ReceiveError> {
        let (_, reader) = self.open_envelope(payload)?;
        let reply = self.inner.raft.vote(wire::vote(reader)?).await;
        let reply = reply.map_err(|error| ReceiveError::Stopped(error.to_string()))?;
        Ok(wire::put_vote_reply(&reply))
    }

    /// A snapshot of the leader, piece by piece: a description, then the file.
    ///
    /// # Errors
    /// [`ReceiveError`]; nothing of the node's state has changed then.
    pub async fn receive_snapshot(&self, mut pieces: ChunkReceiver) -> Result<Bytes, ReceiveError> {
        let head = match pieces.recv().await {
            Some(Ok(head)) => head,
            Some(Err(error)) => return Err(ReceiveError::Snapshot(error.to_string())),
            None => return Err(ReceiveError::Snapshot("nothing came".to_owned())),
        };
        let (_, reader) = self.open_envelope(head)?;
        let (vote, len, meta) = wire::snapshot_head(reader)?;
        if len > SNAPSHOT_BYTES_MAX {
            return Err(ReceiveError::Snapshot(format!(
                "{len} bytes are more than {SNAPSHOT_BYTES_MAX}"
            )));
        }
        let path = self.inner.machine.part();
        let received = receive_file(&path, len, &mut pieces).await;
        if let Err(error) = received {
            let _ = tokio::fs::remove_file(&path).await;
            return Err(ReceiveError::Snapshot(error.to_string()));
        }
        let snapshot = Snapshot {
            meta,
            snapshot: Box::new(SnapshotFile { path: path.clone() }),
        };
        let reply = self.inner.raft.install_full_snapshot(vote, snapshot).await;
        // Where it was installed the part was renamed; a refused one goes.
        let _ = tokio::fs::remove_file(&path).await;
        let reply = reply.map_err(|error| ReceiveError::Stopped(error.to_string()))?;
        Ok(wire::put_snapshot_reply(&reply))
    }
}

async fn receive_file(path: &Path, len: u64, pieces: &mut ChunkReceiver) -> std::io::Result<()> {
    let mut file = tokio::fs::File::create(path).await?;
    let mut written = 0u64;
    while let Some(piece) = pieces.recv().await {
        let piece = piece?;
        written += piece.len() as u64;
        if written > len {
            return Err(std::io::Error::other("more bytes came than were announced"));
        }
        file.write_all(&piece).await?;
    }
    if written != len {
        return Err(std::io::Error::other(format!("{written} of {len} bytes came")));
    }
    file.sync_all().await?;
    drop(file);
    let path = path.to_owned();
    let checked = tokio::task::spawn_blocking(move || snapshot::check(&path)).await;
    checked.map_err(std::io::Error::other)?.map_err(std::io::Error::other)
}
