//! openraft's network over a transport that the shell gives.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use openraft::Snapshot;
use openraft::error::{Fatal, NetworkError, RPCError, RaftError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::{Backoff, RPCOption, RaftNetwork, RaftNetworkFactory};
use openraft::raft::{AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, VoteRequest, VoteResponse};
use tokio::io::AsyncReadExt;

use crate::codec::CodecError;
use crate::consensus::Contact;
use crate::types::{Peer, TypeConfig, Vote};
use crate::wire::{self, Envelope};

/// Pieces of a snapshot on the wire.
const CHUNK_BYTES: usize = 1 << 20;
/// Pieces read ahead of the wire.
const CHUNKS_AHEAD: usize = 2;
/// An unreachable peer is tried again after these pauses, the last one for ever.
const BACKOFF_FIRST: Duration = Duration::from_millis(200);
const BACKOFF_MAX: Duration = Duration::from_secs(3);

/// Why a message got no answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TransportError {
    /// The peer can't be reached.
    #[error("unreachable: {0}")]
    Unreachable(String),
    /// The peer refuses the message.
    #[error("refused: {0}")]
    Refused(String),
}

/// The answer to a peer message, on its way.
pub type PeerFuture = Pin<Box<dyn Future<Output = Result<Bytes, TransportError>> + Send>>;
/// The pieces of a snapshot, in order; an error ends it.
pub type ChunkReceiver = tokio::sync::mpsc::Receiver<std::io::Result<Bytes>>;

/// Moves opaque messages to another node.
pub trait PeerTransport: Send + Sync + 'static {
    /// Sends entries or a heartbeat.
    fn append(&self, peer: &Peer, payload: Bytes, timeout: Duration) -> PeerFuture;
    /// Asks for a vote.
    fn vote(&self, peer: &Peer, payload: Bytes, timeout: Duration) -> PeerFuture;
    /// Sends a snapshot as a stream of pieces.
    fn snapshot(&self, peer: &Peer, chunks: ChunkReceiver) -> PeerFuture;
}

/// Makes one connection per peer.
pub(crate) struct Network {
    pub(crate) transport: Arc<dyn PeerTransport>,
    pub(crate) cluster: u64,
    pub(crate) node: u64,
    pub(crate) contact: Arc<Contact>,
}

impl RaftNetworkFactory<TypeConfig> for Network {
    type Network = Connection;

    async fn new_client(&mut self, target: u64, peer: &Peer) -> Connection {
        Connection {
            transport: self.transport.clone(),
            cluster: self.cluster,
            node: self.node,
            target,
            peer: peer.clone(),
            contact: self.contact.clone(),
        }
    }
}

/// Messages to one peer.
pub(crate) struct Connection {
    transport: Arc<dyn PeerTransport>,
    cluster: u64,
    node: u64,
    target: u64,
    peer: Peer,
    contact: Arc<Contact>,
}

type RpcError = RPCError<u64, Peer, RaftError<u64>>;

fn rpc_failed(error: &TransportError) -> RpcError {
    match error {
        TransportError::Unreachable(_) | TransportError::Refused(_) => RPCError::Unreachable(Unreachable::new(error)),
    }
}

fn not_readable(error: &CodecError) -> RpcError {
    RPCError::Network(NetworkError::new(error))
}

impl Connection {
    fn envelope(&self) -> Envelope {
        Envelope {
            cluster: self.cluster,
            from: self.node,
            to: self.target,
            store: self.peer.store,
            quorum_age_ms: self.contact.quorum_age_ms(),
        }
    }
}

impl RaftNetwork<TypeConfig> for Connection {
    async fn append_entries(
        &mut self,
        request: AppendEntriesRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<u64>, RpcError> {
        let payload = wire::put_append(self.envelope().open(), &request);
        match self.transport.append(&self.peer, payload, option.hard_ttl()).await {
            Ok(reply) => wire::append_reply(reply).map_err(|error| not_readable(&error)),
            Err(error) => Err(rpc_failed(&error)),
        }
    }

    async fn vote(&mut self, request: VoteRequest<u64>, option: RPCOption) -> Result<VoteResponse<u64>, RpcError> {
        let payload = wire::put_vote(self.envelope().open(), &request);
        match self.transport.vote(&self.peer, payload, option.hard_ttl()).await {
            Ok(reply) => wire::vote_reply(reply).map_err(|error| not_readable(&error)),
            Err(error) => Err(rpc_failed(&error)),
        }
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot<TypeConfig>,
        cancel: impl Future<Output = ReplicationClosed> + Send + 'static,
        option: RPCOption,
    ) -> Result<SnapshotResponse<u64>, StreamingError<TypeConfig, Fatal<u64>>> {
        let unreachable = |error: &TransportError| StreamingError::Unreachable(Unreachable::new(error));
        let path = snapshot.snapshot.path;
        let opened = async {
            let file = tokio::fs::File::open(&path).await?;
            let len = file.metadata().await?.len();
            Ok::<_, std::io::Error>((file, len))
        };
        // A newer snapshot may have replaced the file just now: the next attempt takes that one.
        let (mut file, len) = opened
            .await
            .map_err(|error| StreamingError::Network(NetworkError::new(&error)))?;
        let head = wire::put_snapshot_head(self.envelope().open(), &vote, &snapshot.meta, len);
        let (sender, receiver) = tokio::sync::mpsc::channel(CHUNKS_AHEAD);
        let reading = tokio::spawn(async move {
            if sender.send(Ok(head)).await.is_err() {
                return;
            }
            loop {
                let mut chunk = bytes::BytesMut::with_capacity(CHUNK_BYTES);
                let read = async {
                    while chunk.len() < CHUNK_BYTES && file.read_buf(&mut chunk).await? > 0 {}
                    Ok(chunk.freeze())
                };
                let piece: std::io::Result<Bytes> = read.await;
                let end = piece.as_ref().map_or(true, Bytes::is_empty);
                if piece.as_ref().is_ok_and(Bytes::is_empty) || sender.send(piece).await.is_err() || end {
                    return;
                }
            }
        });
        let sending = self.transport.snapshot(&self.peer, receiver);
        let result = tokio::select! {
            closed = cancel => Err(StreamingError::Closed(closed)),
            sent = tokio::time::timeout(option.hard_ttl(), sending) => match sent {
                Ok(Ok(reply)) => {
                    wire::snapshot_reply(reply).map_err(|error| StreamingError::Network(NetworkError::new(&error)))
                }
                Ok(Err(error)) => Err(unreachable(&error)),
                Err(_) => Err(unreachable(&TransportError::Unreachable("the snapshot took too long".to_owned()))),
            },
        };
        reading.abort();
        result
    }

    fn backoff(&self) -> Backoff {
        Backoff::new(std::iter::successors(Some(BACKOFF_FIRST), |pause| {
            Some((*pause * 2).min(BACKOFF_MAX))
        }))
    }
}
