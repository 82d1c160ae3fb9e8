//! Members come and go at run time.

use std::time::Duration;

use cairn_proto::v1;
use cairn_raft_store::{ChangeError, Peer};
use tonic::{Response, Status};

use super::Service;
use crate::config::bare_address;

/// How long a newcomer may take to catch up: a snapshot of a hundred million memberships and the log after it.
const PATIENCE: Duration = Duration::from_secs(120);

fn refused(error: &ChangeError) -> Status {
    match error {
        ChangeError::NotLeader { .. } => Status::unavailable("leadership changed; try again"),
        ChangeError::Refused(_) => Status::failed_precondition(error.to_string()),
        ChangeError::InProgress => Status::aborted(error.to_string()),
        ChangeError::TooSlow { .. } => Status::deadline_exceeded(error.to_string()),
        ChangeError::Unknown(_) => Status::unavailable(error.to_string()),
    }
}

impl Service {
    /// Asks a newcomer who it is: right id and cluster, and data of its own only where it is a member already.
    async fn newcomer(&self, id: u64, address: &str) -> Result<Peer, Status> {
        if id == 0 {
            return Err(Status::invalid_argument("`id` is 0; ids begin at 1"));
        }
        let address = bare_address(address).to_owned();
        let probe = self
            .node
            .peers
            .probe(&address, &self.node.config.cluster)
            .await
            .map_err(|status| {
                Status::failed_precondition(format!(
                    "node {id} doesn't answer at {address} ({}); start it with `join = true` first",
                    status.message()
                ))
            })?;
        let cluster = &self.node.config.cluster;
        if probe.cluster != *cluster {
            let problem = format!(
                "the node at {address} belongs to cluster {:?}, not {cluster:?}",
                probe.cluster
            );
            return Err(Status::failed_precondition(problem));
        }
        if probe.node != id {
            let problem = format!("the node at {address} has id {}, not {id}", probe.node);
            return Err(Status::failed_precondition(problem));
        }
        let member = self
            .node
            .consensus
            .view()
            .member(id)
            .is_some_and(|member| member.peer.store == probe.store);
        if probe.initialised && !member {
            return Err(Status::failed_precondition(format!(
                "the node at {address} holds data of a cluster already; start it with an empty data_dir and `join = true`"
            )));
        }
        Ok(Peer {
            address,
            store: probe.store,
        })
    }

    async fn changed(&self, result: Result<(), ChangeError>) -> Result<Response<v1::MembersReply>, Status> {
        match result {
            Ok(()) => Ok(Response::new(v1::MembersReply {
                members: self.members_now().await,
            })),
            Err(error) => Err(refused(&error)),
        }
    }

    pub(super) async fn add(&self, id: u64, address: &str) -> Result<Response<v1::MembersReply>, Status> {
        let peer = self.newcomer(id, address).await?;
        tracing::info!(id, address = peer.address, "adding a member");
        self.changed(self.node.consensus.add_member(id, peer, PATIENCE).await)
            .await
    }

    pub(super) async fn remove(&self, id: u64) -> Result<Response<v1::MembersReply>, Status> {
        tracing::info!(id, "removing a member");
        self.changed(self.node.consensus.remove_member(id).await).await
    }

    pub(super) async fn replace(
        &self,
        old: u64,
        new: u64,
        address: &str,
    ) -> Result<Response<v1::MembersReply>, Status> {
        let peer = self.newcomer(new, address).await?;
        tracing::info!(old, new, address = peer.address, "replacing a member");
        self.changed(self.node.consensus.replace_member(old, new, peer, PATIENCE).await)
            .await
    }
}
