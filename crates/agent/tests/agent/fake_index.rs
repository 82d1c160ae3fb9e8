//! An index node without Raft: the real state machine behind the real gRPC services.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use cairn_blocks::{BlockSize, Chain, ClusterSeed, Namespace, Token};
use cairn_index::{
    Batch, BatchOutcome, Command, Incarnation, IndexState, LeaseState, LogIndex, Op, Overlap, Query, RegisterOutcome,
    Reply, SourceId, SourceSpec, WorkerOverlap,
};
use cairn_proto::v1::ingest_server::{Ingest, IngestServer};
use cairn_proto::v1::soft_server::{Soft, SoftServer};
use cairn_proto::{BatchAnswer, RegisterAnswer, v1};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

pub const SEED: ClusterSeed = ClusterSeed(0x5eed);

#[derive(Default)]
pub struct World {
    pub state: IndexState,
    pub log: u64,
    pub loads: BTreeMap<String, v1::LoadReport>,
    /// Registrations: spec, asked resume, whether it was resumed.
    pub registrations: Vec<(SourceSpec, Option<Incarnation>, bool)>,
    /// Batches as they came, applied or not.
    pub batches: Vec<(Batch, String, BatchOutcome)>,
    pub renewals: BTreeMap<SourceId, u64>,
    /// Applied batches whose acknowledgements are not sent.
    pub swallow_acks: bool,
    pub refuse_push: bool,
    /// Renewals don't heal a lapsed lease: the agent is behind a partition.
    pub ignore_renewals: bool,
    /// The next batch is applied and acknowledged without its stores: a fault that no protocol allows.
    pub corrupt_next: bool,
}

impl World {
    pub fn apply(&mut self, command: &Command) -> Reply {
        self.log += 1;
        self.state.apply(LogIndex(self.log), command)
    }

    pub fn source(&self, name: &str) -> Option<(SourceId, Incarnation)> {
        self.state
            .registry()
            .sources
            .iter()
            .find(|(_, s)| s.name == name)
            .map(|(id, s)| (*id, s.incarnation))
    }

    /// Blocks of each holder of a source: gpu, cpu, shared.
    pub fn blocks(&self, name: &str) -> Vec<u64> {
        let Some((id, _)) = self.source(name) else {
            return Vec::new();
        };
        self.state
            .audit(id)
            .map(|a| a.holders.iter().map(|(_, d)| d.blocks).collect())
            .unwrap_or_default()
    }

    pub fn claim(&self, name: &str) -> Option<cairn_index::Confidence> {
        self.state
            .registry()
            .sources
            .values()
            .find(|s| s.name == name)
            .map(|s| s.confidence)
    }
}

#[derive(Clone)]
pub struct FakeIndex {
    pub world: Arc<Mutex<World>>,
    pub addr: SocketAddr,
    /// Bumped to cut every open stream.
    cut: watch::Sender<u64>,
    /// Dropped to stop serving.
    _stop: Arc<tokio_util::task::AbortOnDropHandle<()>>,
}

impl FakeIndex {
    pub async fn start() -> Self {
        let mut world = World::default();
        world.apply(&Command::InitCluster {
            cluster: "test".into(),
            seed: SEED,
        });
        Self::serve(Arc::new(Mutex::new(world))).await
    }

    /// Another node over the same state.
    pub async fn beside(&self) -> Self {
        Self::serve(self.world.clone()).await
    }

    /// A node with TLS that asks for the cluster token.
    pub async fn start_secured(security: &cairn_proto::security::Security) -> Self {
        let mut world = World::default();
        world.apply(&Command::InitCluster {
            cluster: "test".into(),
            seed: SEED,
        });
        Self::serve_with(Arc::new(Mutex::new(world)), security.load().unwrap()).await
    }

    async fn serve(world: Arc<Mutex<World>>) -> Self {
        Self::serve_with(world, cairn_proto::security::Credentials::default()).await
    }

    async fn serve_with(world: Arc<Mutex<World>>, credentials: cairn_proto::security::Credentials) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (cut, cuts) = watch::channel(0);
        let node = Node {
            world: world.clone(),
            cuts,
        };
        let auth = credentials.server_auth();
        let serving = credentials
            .server_builder()
            .unwrap()
            .add_service(IngestServer::with_interceptor(node.clone(), auth.clone()))
            .add_service(SoftServer::with_interceptor(node, auth))
            .serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener));
        let task = tokio::spawn(async move { serving.await.unwrap() });
        Self {
            world,
            addr,
            cut,
            _stop: Arc::new(tokio_util::task::AbortOnDropHandle::new(task)),
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub fn cut_streams(&self) {
        self.cut.send_modify(|n| *n += 1);
    }

    /// Cached tokens of the worker at `engine#rank` for a prompt.
    pub fn overlap(&self, pool: &str, source: &str, tokens: &[Token]) -> Overlap {
        let size = BlockSize::DEFAULT;
        let root = Namespace {
            seed: SEED,
            pool,
            block_size: size,
            adapter: "",
            salt: "",
        }
        .root();
        let chain = Chain::new(root, size, tokens, &[]);
        let world = self.world.lock();
        let mut found: Vec<WorkerOverlap> = Vec::new();
        let prompt_tokens = u32::try_from(tokens.len()).unwrap() + 1;
        world.state.overlap(
            &Query {
                pool,
                keys: &chain.keys,
                prompt_tokens,
                block_size: size,
            },
            &mut found,
        );
        let worker = world
            .state
            .registry()
            .sources
            .values()
            .find(|s| s.name == source)
            .map(|s| s.worker);
        found
            .into_iter()
            .find(|o| Some(o.worker) == worker)
            .map(|o| o.overlap)
            .unwrap_or_default()
    }

    /// The lease of a source lapses, as the leader would propose.
    pub fn lapse(&self, name: &str) {
        let mut world = self.world.lock();
        let (source, incarnation) = world.source(name).unwrap();
        world.apply(&Command::LapseLease { source, incarnation });
    }
}

#[derive(Clone)]
struct Node {
    world: Arc<Mutex<World>>,
    cuts: watch::Receiver<u64>,
}

type Replies = Pin<Box<dyn tokio_stream::Stream<Item = Result<v1::PushReply, Status>> + Send>>;

#[tonic::async_trait]
impl Ingest for Node {
    type PushStream = Replies;

    async fn register(&self, request: Request<v1::RegisterRequest>) -> Result<Response<v1::RegisterReply>, Status> {
        let (spec, resume): (SourceSpec, Option<Incarnation>) = request.into_inner().try_into()?;
        let mut world = self.world.lock();
        let Reply::Register(outcome) = world.apply(&Command::RegisterSource {
            spec: spec.clone(),
            resume,
        }) else {
            return Err(Status::internal("not a registration's reply"));
        };
        let resumed = matches!(&outcome, RegisterOutcome::Registered { resumed: true, .. });
        if matches!(&outcome, RegisterOutcome::Registered { .. }) {
            world.registrations.push((spec, resume, resumed));
        }
        Ok(Response::new(
            RegisterAnswer {
                outcome,
                seed: SEED,
                lease_ms: 1000,
            }
            .into(),
        ))
    }

    async fn push(&self, request: Request<Streaming<v1::PushRequest>>) -> Result<Response<Replies>, Status> {
        if self.world.lock().refuse_push {
            return Err(Status::unavailable("not now"));
        }
        let mut pushes = request.into_inner();
        let world = self.world.clone();
        let mut cuts = self.cuts.clone();
        cuts.mark_unchanged();
        let (sender, replies) = mpsc::channel(16);
        tokio::spawn(async move {
            loop {
                let push = tokio::select! {
                    push = pushes.message() => push,
                    _ = cuts.changed() => return,
                };
                let Ok(Some(push)) = push else { return };
                let reply = take_push(&world, push);
                let Some(reply) = reply.transpose() else { continue };
                if sender.send(reply).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(replies))))
    }

    async fn audit(&self, request: Request<v1::AuditRequest>) -> Result<Response<v1::AuditReply>, Status> {
        let world = self.world.lock();
        let sources =
            request
                .into_inner()
                .sources
                .into_iter()
                .map(|lease| match world.state.audit(SourceId(lease.source)) {
                    Some(audit) => v1::SourceAudit {
                        source: lease.source,
                        incarnation: audit.incarnation.0,
                        seq: audit.seq.0,
                        holders: audit
                            .holders
                            .iter()
                            .map(|(h, d)| v1::HolderDigest {
                                holder: h.0,
                                blocks: d.blocks,
                                digest: d.digest,
                            })
                            .collect(),
                        found: true,
                    },
                    None => v1::SourceAudit {
                        source: lease.source,
                        found: false,
                        ..Default::default()
                    },
                });
        Ok(Response::new(v1::AuditReply {
            sources: sources.collect(),
            applied_index: world.log,
        }))
    }

    async fn remove(&self, request: Request<v1::RemoveRequest>) -> Result<Response<v1::RemoveReply>, Status> {
        let request = request.into_inner();
        let (source, incarnation) = (SourceId(request.source), Incarnation(request.incarnation));
        self.world.lock().apply(&Command::RemoveSource { source, incarnation });
        Ok(Response::new(v1::RemoveReply {}))
    }
}

fn take_push(world: &Mutex<World>, push: v1::PushRequest) -> Result<Option<v1::PushReply>, Status> {
    cairn_proto::check_push(&push)?;
    let mut world = world.lock();
    let mut acks = Vec::new();
    for lease in &push.renew {
        let (source, incarnation) = (SourceId(lease.source), Incarnation(lease.incarnation));
        let present = world
            .state
            .registry()
            .sources
            .get(&source)
            .map(|s| (s.incarnation, s.lease));
        let outcome = match present {
            None => BatchOutcome::UnknownSource,
            Some((current, _)) if current != incarnation => BatchOutcome::Fenced { current },
            Some((_, lease)) => {
                *world.renewals.entry(source).or_default() += 1;
                if matches!(lease, LeaseState::Lapsed(_)) && !world.ignore_renewals {
                    world.apply(&Command::RestoreLease { source, incarnation });
                }
                continue;
            }
        };
        acks.push(
            BatchAnswer {
                source,
                incarnation,
                seq: cairn_index::Seq(0),
                outcome,
            }
            .into(),
        );
    }
    let mut batches = Vec::new();
    let mut parents = Vec::new();
    for batch in push.batches {
        parents.push(batch.traceparent.clone());
        let mut batch = Batch::try_from(batch)?;
        if world.corrupt_next {
            world.corrupt_next = false;
            batch.ops.retain(|op| !matches!(op, Op::Store { .. }));
        }
        batches.push(batch);
    }
    if batches.is_empty() {
        let reply = v1::PushReply {
            acks,
            applied_index: world.log,
            reused: Vec::new(),
        };
        return Ok((!reply.acks.is_empty()).then_some(reply));
    }
    let Reply::Batches(outcomes) = world.apply(&Command::Batches(batches.clone())) else {
        return Err(Status::internal("not the reply of batches"));
    };
    for ((batch, parent), outcome) in batches.into_iter().zip(parents).zip(outcomes) {
        acks.push(
            BatchAnswer {
                source: batch.source,
                incarnation: batch.incarnation,
                seq: batch.seq,
                outcome: outcome.clone(),
            }
            .into(),
        );
        world.batches.push((batch, parent, outcome));
    }
    if world.swallow_acks {
        return Ok(None);
    }
    Ok(Some(v1::PushReply {
        acks,
        applied_index: world.log,
        reused: Vec::new(),
    }))
}

#[tonic::async_trait]
impl Soft for Node {
    async fn publish(&self, request: Request<Streaming<v1::SoftFrames>>) -> Result<Response<v1::PublishReply>, Status> {
        let mut frames = request.into_inner();
        let mut cuts = self.cuts.clone();
        cuts.mark_unchanged();
        loop {
            let message = tokio::select! {
                message = frames.message() => message?,
                _ = cuts.changed() => return Err(Status::unavailable("cut")),
            };
            let Some(message) = message else {
                return Ok(Response::new(v1::PublishReply {}));
            };
            for frame in message.frames {
                if let Some(v1::soft_frame::Frame::Load(load)) = frame.frame {
                    self.world.lock().loads.insert(load.source.clone(), load);
                }
            }
        }
    }
}

/// How many ops of a kind came so far, over all sources.
pub fn count_ops(world: &World, wanted: impl Fn(&Op) -> bool) -> usize {
    world
        .batches
        .iter()
        .flat_map(|(b, _, _)| &b.ops)
        .filter(|op| wanted(op))
        .count()
}
