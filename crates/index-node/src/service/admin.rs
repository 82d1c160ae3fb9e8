//! Operators' calls.

use std::time::{Duration, Instant};

use cairn_index::{Command, Confidence, LeaseState, Tier, WorkerId};
use cairn_proto::{limits, v1};
use cairn_raft_store::MemberView;
use tonic::{Request, Response, Status};

use super::Service;
use crate::node::Place;
use crate::peers::{FORWARDED, forwarded};

/// How long a follower waits for the leader's status before it answers by itself.
const STATUS_PATIENCE: Duration = Duration::from_secs(2);
/// How long a snapshot may take: a hundred million memberships on a slow disk.
const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(120);
/// Pause between two looks whether it is there.
const SNAPSHOT_LOOK: Duration = Duration::from_millis(5);
/// Looks after which it is asked for again.
const SNAPSHOT_LOOKS: u32 = 200;

#[tonic::async_trait]
impl v1::admin_server::Admin for Service {
    /// The leader's answer where it can be had, since it alone hears every agent; else this node's own.
    async fn status(&self, request: Request<v1::StatusRequest>) -> Result<Response<v1::StatusReply>, Status> {
        let now = self.node.leader_now();
        let passed_on = request.metadata().contains_key(FORWARDED);
        if let (Some((_, address)), false, false) = (&now.leader, now.leads, passed_on)
            && let Ok(mut client) = self.node.peers.admin(address)
        {
            let asked = client.status(forwarded(v1::StatusRequest {}));
            if let Ok(Ok(reply)) = tokio::time::timeout(STATUS_PATIENCE, asked).await {
                let mut reply = reply.into_inner();
                reply.node = self.node.config.node_id;
                return Ok(Response::new(reply));
            }
        }
        Ok(Response::new(v1::StatusReply {
            cluster: self.node.config.cluster.clone(),
            node: self.node.config.node_id,
            leader: now.leader.map_or(0, |(id, _)| id),
            members: self.members_now().await,
            workers: self.workers_now(),
        }))
    }

    async fn snapshot(&self, _request: Request<v1::SnapshotRequest>) -> Result<Response<v1::SnapshotReply>, Status> {
        let consensus = &self.node.consensus;
        let wanted = consensus.view().applied;
        let begun = Instant::now();
        let mut looks = 0u32;
        loop {
            let index = consensus.view().snapshot;
            if index >= wanted {
                return Ok(Response::new(v1::SnapshotReply { index }));
            }
            if begun.elapsed() > SNAPSHOT_PATIENCE {
                return Err(Status::deadline_exceeded("the snapshot isn't on disk yet; it goes on"));
            }
            // One that was being made already may stand before what is wanted: then another one is asked for.
            if looks.is_multiple_of(SNAPSHOT_LOOKS) {
                let asked = consensus.snapshot().await;
                asked.map_err(|error| Status::unavailable(error.to_string()))?;
            }
            looks += 1;
            tokio::time::sleep(SNAPSHOT_LOOK).await;
        }
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Result<Response<v1::DrainReply>, Status> {
        let place = self.node.place("drain", &request).await?;
        let message = request.into_inner();
        if let Place::There(address) = place {
            return self.node.peers.admin(&address)?.drain(forwarded(message)).await;
        }
        let url = message.engine_url.trim_end_matches('/').to_owned();
        let (workers, known) = self.node.consensus.read(|state| {
            let all = &state.registry().workers;
            let wanted = all.iter().filter(|(_, worker)| {
                worker.spec.engine_url == url && (message.all_ranks || worker.spec.rank == message.rank)
            });
            let workers: Vec<WorkerId> = wanted.map(|(id, _)| *id).collect();
            let known: Vec<String> = all
                .values()
                .take(16)
                .map(|w| format!("{}#{}", w.spec.engine_url, w.spec.rank))
                .collect();
            (workers, known.join(", "))
        });
        if workers.is_empty() {
            return Err(Status::not_found(format!(
                "no worker {url}#{}; known: {known}",
                message.rank
            )));
        }
        for worker in &workers {
            let command = Command::SetDraining {
                worker: *worker,
                draining: !message.undo,
            };
            self.node
                .commit_known(&command, || format!("worker {} has gone", worker.0))
                .await?;
        }
        Ok(Response::new(v1::DrainReply {
            workers: workers.iter().map(|worker| worker.0).collect(),
        }))
    }

    async fn set_policy(&self, request: Request<v1::SetPolicyRequest>) -> Result<Response<v1::SetPolicyReply>, Status> {
        let place = self.node.place("set_policy", &request).await?;
        let message = request.into_inner();
        if let Place::There(address) = place {
            return self.node.peers.admin(&address)?.set_policy(forwarded(message)).await;
        }
        for (field, value) in [("pool", &message.pool), ("policy", &message.policy)] {
            if value.len() > limits::NAME_BYTES_MAX {
                return Err(Status::invalid_argument(format!("`{field}` is too long")));
            }
        }
        let pool = message.pool.clone();
        let command = Command::SetPolicy {
            pool: message.pool,
            policy: message.policy,
        };
        self.node.commit_known(&command, || format!("no pool `{pool}`")).await?;
        Ok(Response::new(v1::SetPolicyReply {}))
    }

    async fn add_member(&self, request: Request<v1::AddMemberRequest>) -> Result<Response<v1::MembersReply>, Status> {
        let place = self.node.place("add_member", &request).await?;
        let message = request.into_inner();
        match place {
            Place::There(address) => self.node.peers.admin(&address)?.add_member(forwarded(message)).await,
            Place::Here => self.add(message.id, &message.address).await,
        }
    }

    async fn remove_member(
        &self,
        request: Request<v1::RemoveMemberRequest>,
    ) -> Result<Response<v1::MembersReply>, Status> {
        let place = self.node.place("remove_member", &request).await?;
        let message = request.into_inner();
        match place {
            Place::There(address) => self.node.peers.admin(&address)?.remove_member(forwarded(message)).await,
            Place::Here => self.remove(message.id).await,
        }
    }

    async fn replace_member(
        &self,
        request: Request<v1::ReplaceMemberRequest>,
    ) -> Result<Response<v1::MembersReply>, Status> {
        let place = self.node.place("replace_member", &request).await?;
        let message = request.into_inner();
        match place {
            Place::There(address) => {
                self.node
                    .peers
                    .admin(&address)?
                    .replace_member(forwarded(message))
                    .await
            }
            Place::Here => self.replace(message.old_id, message.new_id, &message.new_address).await,
        }
    }

    async fn members(&self, _request: Request<v1::MembersRequest>) -> Result<Response<v1::MembersReply>, Status> {
        Ok(Response::new(v1::MembersReply {
            members: self.members_now().await,
        }))
    }
}

impl Service {
    /// Every member's own word about itself, asked at once.
    pub(super) async fn members_now(&self) -> Vec<v1::Member> {
        let view = self.node.consensus.view();
        let asked = view.members.iter().map(|member| self.member_now(member, view.node));
        futures::future::join_all(asked).await
    }

    async fn member_now(&self, member: &MemberView, own: u64) -> v1::Member {
        if member.id == own {
            return self.node.own_member();
        }
        let unreachable = |role: &str| v1::Member {
            id: member.id,
            address: member.peer.address.clone(),
            role: role.to_owned(),
            ..v1::Member::default()
        };
        match self
            .node
            .peers
            .probe(&member.peer.address, &self.node.config.cluster)
            .await
        {
            Ok(reply) if reply.store != member.peer.store => unreachable("emptied"),
            Ok(reply) => match reply.member {
                Some(found) => v1::Member {
                    address: member.peer.address.clone(),
                    // A new voter may not have applied yet what made it one.
                    role: match found.role.as_str() {
                        "learner" if member.voter => "follower".to_owned(),
                        _ => found.role,
                    },
                    ..found
                },
                None => unreachable("unreachable"),
            },
            Err(_) => unreachable("unreachable"),
        }
    }

    fn workers_now(&self) -> Vec<v1::WorkerStatus> {
        let node = &self.node;
        node.consensus.read(|state| {
            let registry = state.registry();
            let mut workers = Vec::with_capacity(registry.workers.len());
            for (id, worker) in &registry.workers {
                let Some(source) = registry.sources.get(&worker.source) else {
                    continue;
                };
                let mut status = v1::WorkerStatus {
                    worker: id.0,
                    engine_url: worker.spec.engine_url.clone(),
                    rank: worker.spec.rank,
                    pool: worker.pool.clone(),
                    role: v1::Role::from(worker.spec.role).into(),
                    source: source.name.clone(),
                    agent: source.agent.clone(),
                    incarnation: source.incarnation.0,
                    seq: source.seq.0,
                    exact: source.claim() == Confidence::Exact,
                    reason: reason(source.claim()).to_owned(),
                    lease_live: source.lease == LeaseState::Live,
                    draining: worker.draining,
                    lag_ms: node.leases.silent_ms(worker.source).map_or(0, |ms| ms.max(1)),
                    ..v1::WorkerStatus::default()
                };
                for holder in &source.holders {
                    let blocks = state.residency().holder_digest(*holder).blocks;
                    match registry.holders.get(holder).map(|holder| holder.spec.tier) {
                        Some(Tier::Gpu) => status.gpu_blocks += blocks,
                        Some(Tier::Cpu) => status.cpu_blocks += blocks,
                        Some(Tier::Shared) => status.shared_blocks += blocks,
                        None => {}
                    }
                }
                workers.push(status);
            }
            workers
        })
    }
}

/// Why a source isn't exact, as operators read it; empty where it is.
fn reason(claim: Confidence) -> &'static str {
    use cairn_index::DegradedReason as Reason;
    match claim {
        Confidence::Exact => "",
        Confidence::Degraded(Reason::Gap) => "gap",
        Confidence::Degraded(Reason::Replaying) => "replaying",
        Confidence::Degraded(Reason::Hybrid) => "hybrid",
        Confidence::Degraded(Reason::Silent) => "silent",
        Confidence::Degraded(Reason::NoEvents) => "no_events",
        Confidence::Degraded(Reason::Mismatch) => "mismatch",
        Confidence::Degraded(Reason::LeaseLapsed) => "lease_lapsed",
        Confidence::Degraded(Reason::Bounded) => "bounded",
    }
}
