//! What all services of one index node share.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cairn_index::{Command, Reply, codec};
use cairn_proto::v1;
use cairn_raft_store::{Committed, Consensus, ProposeError};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status};

use crate::batcher::Batcher;
use crate::config::Config;
use crate::feed_log::FeedLog;
use crate::feed_snapshot::FeedSnapshots;
use crate::leadership::Leadership;
use crate::leases::Leases;
use crate::metrics::{Levels, Metrics};
use crate::peers::{FORWARDED, Peers};
use crate::soft::SoftHub;

/// How long a call waits for a leader to be known, so that an election is invisible to most callers.
const LEADER_PATIENCE: Duration = Duration::from_secs(5);
/// How long a proposal may take before its caller is told that the outcome is unknown.
pub(crate) const COMMIT_PATIENCE: Duration = Duration::from_secs(10);

/// One index node.
pub(crate) struct Node {
    pub(crate) config: Config,
    pub(crate) consensus: Consensus,
    pub(crate) leadership: watch::Receiver<Leadership>,
    pub(crate) peers: Peers,
    pub(crate) feed: Arc<FeedLog>,
    pub(crate) snapshots: FeedSnapshots,
    pub(crate) soft: Arc<SoftHub>,
    pub(crate) batcher: Batcher,
    pub(crate) leases: Leases,
    pub(crate) metrics: Metrics,
    /// Cancelled when the node stops: streams end.
    pub(crate) stopping: CancellationToken,
}

/// Where a call is to be served.
pub(crate) enum Place {
    /// Here: this node leads.
    Here,
    /// At the leader.
    There(String),
}

impl Node {
    pub(crate) fn leader_now(&self) -> Leadership {
        self.leadership.borrow().clone()
    }

    /// Decides where a call that only the leader can serve goes; waits a little while nobody leads.
    pub(crate) async fn place<T>(&self, call: &'static str, request: &Request<T>) -> Result<Place, Status> {
        let passed_on = request.metadata().contains_key(FORWARDED);
        let mut leadership = self.leadership.clone();
        let known = tokio::time::timeout(
            LEADER_PATIENCE,
            leadership.wait_for(|now| now.leader.is_some() || now.stopped.is_some()),
        )
        .await;
        let now = match known {
            Ok(Ok(now)) => now.clone(),
            Ok(Err(_)) | Err(_) => {
                Metrics::count(&self.metrics.refused, "no_leader");
                return Err(Status::unavailable(
                    "no leader is known: a majority of index nodes must be running",
                ));
            }
        };
        if let Some(why) = &now.stopped {
            return Err(Status::unavailable(format!("this node has stopped: {why}")));
        }
        if now.leads {
            return Ok(Place::Here);
        }
        if passed_on {
            return Err(now.unavailable("leadership changed; send again"));
        }
        match &now.leader {
            Some((_, address)) => {
                Metrics::count(&self.metrics.forwarded, call);
                Ok(Place::There(address.clone()))
            }
            None => Err(now.unavailable("no leader is known; send again")),
        }
    }

    /// Proposes one command and waits for its answer.
    pub(crate) async fn commit(&self, command: &Command) -> Result<Committed, Status> {
        let bytes = Bytes::from(codec::encode_command(command));
        let proposed = async { self.consensus.propose(bytes).await?.wait().await };
        match tokio::time::timeout(COMMIT_PATIENCE, proposed).await {
            Ok(Ok(committed)) => Ok(committed),
            Ok(Err(error)) => Err(self.not_committed(&error)),
            Err(_) => Err(Status::unavailable(
                "no quorum answered in time; the outcome is unknown, send again",
            )),
        }
    }

    pub(crate) fn not_committed(&self, error: &ProposeError) -> Status {
        match error {
            ProposeError::NotLeader { .. } | ProposeError::Unknown => {
                self.leader_now().unavailable("leadership changed; send again")
            }
            ProposeError::Stopped(why) => Status::unavailable(format!("this node has stopped: {why}")),
        }
    }

    /// Like [`Node::commit`], for commands that name something which must exist.
    pub(crate) async fn commit_known(&self, command: &Command, what: impl Fn() -> String) -> Result<(), Status> {
        match self.commit(command).await?.reply {
            Reply::Unknown => Err(Status::not_found(what())),
            Reply::Done | Reply::Register(_) | Reply::Batches(_) => Ok(()),
        }
    }

    /// This node as a member, for status.
    pub(crate) fn own_member(&self) -> v1::Member {
        let view = self.consensus.view();
        let (applied, digest) = self.consensus.read(|state| (state.applied().0, state.digest().0));
        let address = view
            .member(view.node)
            .map_or_else(|| self.config.advertise.clone(), |m| m.peer.address.clone());
        v1::Member {
            id: view.node,
            address,
            role: view.role.to_owned(),
            term: view.term,
            applied_index: applied,
            digest: format!("{digest:016x}"),
            log_bytes: self.consensus.log_bytes(),
        }
    }

    /// Whether the node can do its work.
    pub(crate) fn ready(&self) -> Result<(), String> {
        let now = self.leader_now();
        if let Some(why) = now.stopped {
            return Err(format!("stopped: {why}"));
        }
        if now.leader.is_none() {
            return Err("no leader is known".to_owned());
        }
        if self.consensus.read(|state| state.registry().seed.is_none()) {
            return Err("the cluster's first entry isn't applied yet".to_owned());
        }
        Ok(())
    }

    /// Sources, and the blocks that all holders together hold.
    pub(crate) fn held(&self) -> (usize, u64) {
        self.consensus.read(|state| {
            let holders = state.registry().holders.keys();
            let blocks = holders.map(|holder| state.residency().holder_digest(*holder).blocks);
            (state.registry().sources.len(), blocks.sum())
        })
    }

    /// Refreshes the gauges.
    pub(crate) fn refresh_metrics(&self) {
        let view = self.consensus.view();
        let (sources, blocks) = self.held();
        self.metrics.set(Levels {
            applied: view.applied,
            term: view.term,
            leads: view.leads,
            quorum_age_ms: self.consensus.quorum_age_ms(),
            log_bytes: self.consensus.log_bytes(),
            members: view.members.len(),
            sources,
            blocks,
            snapshot_stall_us: self.consensus.snapshot_stall_us_max(),
        });
    }
}
