//! Messages between index nodes.

use cairn_proto::v1;
use cairn_raft_store::ReceiveError;
use tokio::sync::mpsc;
use tonic::{Request, Response, Status, Streaming};

use super::Service;

/// Pieces of a received snapshot that wait for the disk.
const PIECES_WAITING: usize = 2;

fn refused(error: &ReceiveError) -> Status {
    match error {
        ReceiveError::Unreadable(_) => Status::invalid_argument(error.to_string()),
        ReceiveError::OtherCluster | ReceiveError::OtherNode { .. } | ReceiveError::OtherStore { .. } => {
            tracing::debug!(%error, "a peer's message is refused");
            Status::failed_precondition(error.to_string())
        }
        ReceiveError::Snapshot(_) => Status::aborted(error.to_string()),
        ReceiveError::Stopped(_) => Status::unavailable(error.to_string()),
    }
}

fn answer(result: Result<bytes::Bytes, ReceiveError>) -> Result<Response<v1::RaftMessage>, Status> {
    match result {
        Ok(payload) => Ok(Response::new(v1::RaftMessage { payload })),
        Err(error) => Err(refused(&error)),
    }
}

#[tonic::async_trait]
impl v1::raft_server::Raft for Service {
    async fn append(&self, request: Request<v1::RaftMessage>) -> Result<Response<v1::RaftMessage>, Status> {
        answer(self.node.consensus.receive_append(request.into_inner().payload).await)
    }

    async fn vote(&self, request: Request<v1::RaftMessage>) -> Result<Response<v1::RaftMessage>, Status> {
        answer(self.node.consensus.receive_vote(request.into_inner().payload).await)
    }

    async fn snapshot(
        &self,
        request: Request<Streaming<v1::RaftMessage>>,
    ) -> Result<Response<v1::RaftMessage>, Status> {
        let mut pieces = request.into_inner();
        let (sender, receiver) = mpsc::channel(PIECES_WAITING);
        let reading = tokio::spawn(async move {
            loop {
                let piece = match pieces.message().await {
                    Ok(Some(message)) => Ok(message.payload),
                    Ok(None) => return,
                    Err(status) => Err(std::io::Error::other(status.message().to_owned())),
                };
                if sender.send(piece).await.is_err() {
                    return;
                }
            }
        });
        let result = self.node.consensus.receive_snapshot(receiver).await;
        reading.abort();
        answer(result)
    }

    async fn probe(&self, _request: Request<v1::ProbeRequest>) -> Result<Response<v1::ProbeReply>, Status> {
        let node = &self.node;
        let view = node.consensus.view();
        let identity = node.consensus.identity();
        let members = view
            .members
            .iter()
            .map(|member| v1::MemberStore {
                id: member.id,
                address: member.peer.address.clone(),
                store: member.peer.store,
                voter: member.voter,
            })
            .collect();
        Ok(Response::new(v1::ProbeReply {
            cluster: identity.cluster.clone(),
            node: identity.node,
            store: identity.store,
            initialised: node.consensus.is_initialised(),
            joining: node.config.join && !node.consensus.is_initialised(),
            member: Some(node.own_member()),
            members,
        }))
    }
}
