//! gRPC channels to the other nodes, and the consensus room's transport over them.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cairn_proto::limits::MESSAGE_BYTES_MAX;
use cairn_proto::security::{AuthChannel, Credentials, SecurityError};
use cairn_proto::v1;
use cairn_raft_store::{ChunkReceiver, Peer, PeerFuture, PeerTransport, TransportError};
use dashmap::DashMap;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status};

/// Largest Raft message that is decoded: appends stop at 2 MiB, one entry is 256 KiB at most.
pub(crate) const RAFT_BYTES_MAX: usize = 16 << 20;
/// How long a probe may take.
pub(crate) const PROBE_TIMEOUT: Duration = Duration::from_millis(700);
/// Marks a call that another node passed on, so that it isn't passed on again.
pub(crate) const FORWARDED: &str = "cairn-forwarded";
/// Channels kept; addresses come from the membership and from operators.
const CHANNELS_MAX: usize = 256;

/// Channels by address; they connect lazily and again after breaks.
#[derive(Clone)]
pub(crate) struct Peers {
    credentials: Arc<Credentials>,
    channels: Arc<DashMap<String, AuthChannel>>,
}

impl Peers {
    pub(crate) fn new(credentials: Arc<Credentials>) -> Self {
        Self {
            credentials,
            channels: Arc::default(),
        }
    }

    /// The channel to an address.
    pub(crate) fn channel(&self, address: &str) -> Result<AuthChannel, SecurityError> {
        if let Some(channel) = self.channels.get(address) {
            return Ok(channel.clone());
        }
        let channel = self.credentials.client_channel(address)?;
        if self.channels.len() >= CHANNELS_MAX {
            self.channels.clear();
        }
        self.channels.insert(address.to_owned(), channel.clone());
        Ok(channel)
    }

    pub(crate) fn raft(&self, address: &str) -> Result<v1::raft_client::RaftClient<AuthChannel>, SecurityError> {
        let client = v1::raft_client::RaftClient::new(self.channel(address)?);
        Ok(client
            .max_decoding_message_size(RAFT_BYTES_MAX)
            .max_encoding_message_size(RAFT_BYTES_MAX))
    }

    pub(crate) fn ingest(&self, address: &str) -> Result<v1::ingest_client::IngestClient<AuthChannel>, Status> {
        let client = v1::ingest_client::IngestClient::new(self.channel(address).map_err(|error| refused(&error))?);
        Ok(client.max_decoding_message_size(MESSAGE_BYTES_MAX))
    }

    pub(crate) fn admin(&self, address: &str) -> Result<v1::admin_client::AdminClient<AuthChannel>, Status> {
        let client = v1::admin_client::AdminClient::new(self.channel(address).map_err(|error| refused(&error))?);
        Ok(client.max_decoding_message_size(MESSAGE_BYTES_MAX))
    }

    pub(crate) fn soft(&self, address: &str) -> Result<v1::soft_client::SoftClient<AuthChannel>, Status> {
        Ok(v1::soft_client::SoftClient::new(
            self.channel(address).map_err(|error| refused(&error))?,
        ))
    }

    /// Asks a node who it is.
    pub(crate) async fn probe(&self, address: &str, cluster: &str) -> Result<v1::ProbeReply, Status> {
        let mut client = self.raft(address).map_err(|error| refused(&error))?;
        let request = v1::ProbeRequest {
            cluster: cluster.to_owned(),
        };
        match tokio::time::timeout(PROBE_TIMEOUT, client.probe(request)).await {
            Ok(reply) => reply.map(tonic::Response::into_inner),
            Err(_) => Err(Status::deadline_exceeded(format!("no answer within {PROBE_TIMEOUT:?}"))),
        }
    }
}

fn refused(error: &SecurityError) -> Status {
    Status::failed_precondition(error.to_string())
}

/// A request marked as passed on.
pub(crate) fn forwarded<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request
        .metadata_mut()
        .insert(FORWARDED, tonic::metadata::AsciiMetadataValue::from_static("1"));
    request
}

fn failed(status: &Status) -> TransportError {
    let text = status.message().to_owned();
    match status.code() {
        Code::Unauthenticated | Code::PermissionDenied | Code::FailedPrecondition | Code::InvalidArgument => {
            TransportError::Refused(text)
        }
        _ => TransportError::Unreachable(text),
    }
}

fn unreachable(error: &SecurityError) -> TransportError {
    TransportError::Refused(error.to_string())
}

impl PeerTransport for Peers {
    fn append(&self, peer: &Peer, payload: Bytes, _timeout: Duration) -> PeerFuture {
        let client = self.raft(&peer.address);
        Box::pin(async move {
            let mut client = client.map_err(|error| unreachable(&error))?;
            let reply = client
                .append(v1::RaftMessage { payload })
                .await
                .map_err(|status| failed(&status))?;
            Ok(reply.into_inner().payload)
        })
    }

    fn vote(&self, peer: &Peer, payload: Bytes, _timeout: Duration) -> PeerFuture {
        let client = self.raft(&peer.address);
        Box::pin(async move {
            let mut client = client.map_err(|error| unreachable(&error))?;
            let reply = client
                .vote(v1::RaftMessage { payload })
                .await
                .map_err(|status| failed(&status))?;
            Ok(reply.into_inner().payload)
        })
    }

    fn snapshot(&self, peer: &Peer, chunks: ChunkReceiver) -> PeerFuture {
        let client = self.raft(&peer.address);
        Box::pin(async move {
            let mut client = client.map_err(|error| unreachable(&error))?;
            // A read error ends the stream early; the receiver then misses bytes and refuses.
            let pieces = ReceiverStream::new(chunks)
                .map_while(Result::ok)
                .map(|payload| v1::RaftMessage { payload });
            let reply = client.snapshot(pieces).await.map_err(|status| failed(&status))?;
            Ok(reply.into_inner().payload)
        })
    }
}
