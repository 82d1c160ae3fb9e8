//! Agents' calls: register, push, audit, remove.

use std::time::Duration;

use cairn_blocks::ClusterSeed;
use cairn_index::{Command, Incarnation, RegisterOutcome, Reply, SourceId, SourceSpec};
use cairn_proto::{RegisterAnswer, limits, v1};
use tonic::{Request, Response, Status, Streaming};

use super::{Answers, Service};
use crate::metrics::Metrics;
use crate::node::Place;
use crate::peers::forwarded;

/// How long a registration waits for the cluster's first entry.
const SEED_PATIENCE: Duration = Duration::from_secs(5);

#[tonic::async_trait]
impl v1::ingest_server::Ingest for Service {
    async fn register(&self, request: Request<v1::RegisterRequest>) -> Result<Response<v1::RegisterReply>, Status> {
        let place = self.node.place("register", &request).await?;
        let message = request.into_inner();
        if let Place::There(address) = place {
            return self.node.peers.ingest(&address)?.register(forwarded(message)).await;
        }
        let (spec, resume) = message.try_into()?;
        Ok(Response::new(self.register_here(spec, resume).await?.into()))
    }

    type PushStream = Answers<v1::PushReply>;

    async fn push(&self, request: Request<Streaming<v1::PushRequest>>) -> Result<Response<Self::PushStream>, Status> {
        match self.node.place("push", &request).await? {
            Place::Here => Ok(Response::new(self.push_here(request.into_inner()))),
            Place::There(address) => self.forward_push(&address, request.into_inner()).await,
        }
    }

    async fn audit(&self, request: Request<v1::AuditRequest>) -> Result<Response<v1::AuditReply>, Status> {
        let message = request.into_inner();
        if message.sources.len() > limits::AUDIT_SOURCES_MAX {
            let (count, max) = (message.sources.len(), limits::AUDIT_SOURCES_MAX);
            return Err(Status::invalid_argument(format!(
                "`sources` has {count} elements and {max} are allowed"
            )));
        }
        Ok(Response::new(self.node.consensus.read(|state| v1::AuditReply {
            sources: message.sources.iter().map(|lease| audit(state, lease)).collect(),
            applied_index: state.applied().0,
        })))
    }

    async fn remove(&self, request: Request<v1::RemoveRequest>) -> Result<Response<v1::RemoveReply>, Status> {
        let place = self.node.place("remove", &request).await?;
        let message = request.into_inner();
        if let Place::There(address) = place {
            return self.node.peers.ingest(&address)?.remove(forwarded(message)).await;
        }
        let (source, incarnation) = (SourceId(message.source), Incarnation(message.incarnation));
        let command = Command::RemoveSource { source, incarnation };
        let what = || format!("source {} isn't registered in lifetime {}", source.0, incarnation.0);
        self.node.commit_known(&command, what).await?;
        Ok(Response::new(v1::RemoveReply {}))
    }
}

fn audit(state: &cairn_index::IndexState, lease: &v1::Lease) -> v1::SourceAudit {
    let mut answer = v1::SourceAudit {
        source: lease.source,
        ..v1::SourceAudit::default()
    };
    if let Some(found) = state.audit(SourceId(lease.source)) {
        answer.found = true;
        answer.incarnation = found.incarnation.0;
        answer.seq = found.seq.0;
        answer.holders = found
            .holders
            .iter()
            .map(|(holder, held)| v1::HolderDigest {
                holder: holder.0,
                blocks: held.blocks,
                digest: held.digest,
            })
            .collect();
    }
    answer
}

impl Service {
    async fn seed(&self) -> Result<ClusterSeed, Status> {
        let mut applied = self.node.feed.watch();
        let known = async {
            loop {
                applied.borrow_and_update();
                if let Some(seed) = self.node.consensus.read(|state| state.registry().seed) {
                    return Some(seed);
                }
                applied.changed().await.ok()?;
            }
        };
        match tokio::time::timeout(SEED_PATIENCE, known).await {
            Ok(Some(seed)) => Ok(seed),
            Ok(None) | Err(_) => Err(Status::unavailable("the cluster is still forming; try again")),
        }
    }

    async fn register_here(&self, spec: SourceSpec, resume: Option<Incarnation>) -> Result<RegisterAnswer, Status> {
        let seed = self.seed().await?;
        let name = spec.name.clone();
        let committed = self.node.commit(&Command::RegisterSource { spec, resume }).await?;
        let Reply::Register(outcome) = committed.reply else {
            return Err(Status::internal(
                "the index answered a registration with something else",
            ));
        };
        match &outcome {
            RegisterOutcome::Registered {
                source,
                incarnation,
                resumed,
                ..
            } => {
                self.node.leases.touch(*source, *incarnation);
                Metrics::count(
                    &self.node.metrics.registrations,
                    if *resumed { "resumed" } else { "registered" },
                );
                tracing::info!(
                    name,
                    source = source.0,
                    incarnation = incarnation.0,
                    resumed = *resumed,
                    "source registered"
                );
            }
            RegisterOutcome::HeldBy { agent } => {
                Metrics::count(&self.node.metrics.registrations, "held");
                tracing::info!(name, agent, "registration refused: another agent's lease lives");
            }
            RegisterOutcome::Invalid { reason } => {
                Metrics::count(&self.node.metrics.registrations, "invalid");
                tracing::warn!(name, reason, "registration refused");
            }
        }
        Ok(RegisterAnswer {
            outcome,
            seed,
            lease_ms: self.node.config.lease_ms,
        })
    }
}
