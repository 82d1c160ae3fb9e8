//! An index node as routers see it: the feed over a real state, and soft state passed on to every follower.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use cairn_blocks::{BlockKey, BlockSize, Chain, ClusterSeed, Depth, Namespace};
use cairn_index::{
    Batch, Command, Confidence, HolderId, HolderSpec, IndexState, LogIndex, Op, PoolSpec, Reach, RegisterOutcome,
    Reply, Role, Seq, SourceId, SourceSpec, Tier, WorkerId, WorkerSpec, codec,
};
use cairn_proto::v1;
use parking_lot::Mutex;
use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

pub const SEED: ClusterSeed = ClusterSeed(99);
pub const POOL: &str = "m";

pub struct Inner {
    pub state: IndexState,
    pub seqs: std::collections::BTreeMap<SourceId, u64>,
}

/// A worker as tests register it.
#[derive(Clone, Debug)]
pub struct Registered {
    pub source: SourceId,
    pub incarnation: cairn_index::Incarnation,
    pub worker: WorkerId,
    pub holders: Vec<HolderId>,
}

/// A running node.
pub struct Index {
    pub addr: SocketAddr,
    pub inner: Arc<Mutex<Inner>>,
    pub quorum_age_ms: Arc<std::sync::atomic::AtomicU64>,
    pub max_model_len: std::sync::atomic::AtomicU32,
    pub follows: Arc<Mutex<Vec<v1::FollowRequest>>>,
    frames: broadcast::Sender<v1::FeedFrame>,
    end: watch::Sender<bool>,
    task: JoinHandle<()>,
}

#[derive(Clone)]
struct Service {
    inner: Arc<Mutex<Inner>>,
    frames: broadcast::Sender<v1::FeedFrame>,
    quorum_age_ms: Arc<std::sync::atomic::AtomicU64>,
    follows: Arc<Mutex<Vec<v1::FollowRequest>>>,
    end: watch::Receiver<bool>,
}

fn age(of: &std::sync::atomic::AtomicU64) -> u64 {
    of.load(std::sync::atomic::Ordering::SeqCst)
}

#[tonic::async_trait]
impl v1::feed_server::Feed for Service {
    type FollowStream = Pin<Box<dyn Stream<Item = Result<v1::FeedFrame, Status>> + Send>>;

    async fn follow(&self, request: Request<v1::FollowRequest>) -> Result<Response<Self::FollowStream>, Status> {
        let request = request.into_inner();
        self.follows.lock().push(request.clone());
        let quorum_age_ms = age(&self.quorum_age_ms);
        let (snapshot, live) = {
            let inner = self.inner.lock();
            let live = self.frames.subscribe();
            let mut bytes = Vec::new();
            codec::encode_snapshot(&inner.state, &mut bytes).unwrap();
            let applied = inner.state.applied().0;
            let resumed = request.applied_index == applied && request.digest == inner.state.digest().0;
            let frame = if resumed {
                v1::feed_frame::Frame::Idle(v1::Idle {})
            } else {
                v1::feed_frame::Frame::Snapshot(v1::SnapshotChunk {
                    snapshot_index: applied,
                    data: bytes.into(),
                    last: true,
                    digest: inner.state.digest().0,
                })
            };
            (
                v1::FeedFrame {
                    applied_index: applied,
                    quorum_age_ms,
                    frame: Some(frame),
                },
                live,
            )
        };
        let live = tokio_stream::wrappers::BroadcastStream::new(live)
            .map(|frame| frame.map_err(|_| Status::aborted("too slow")));
        let ticks =
            tokio_stream::wrappers::IntervalStream::new(tokio::time::interval(std::time::Duration::from_millis(100)));
        let (inner, ages) = (self.inner.clone(), self.quorum_age_ms.clone());
        let idle = ticks.map(move |_| {
            Ok(v1::FeedFrame {
                applied_index: inner.lock().state.applied().0,
                quorum_age_ms: age(&ages),
                frame: Some(v1::feed_frame::Frame::Idle(v1::Idle {})),
            })
        });
        let mut end = self.end.clone();
        let ended = async move {
            let _ = end.wait_for(|end| *end).await;
        };
        let frames = tokio_stream::once(Ok(snapshot)).chain(live.merge(idle));
        let frames = futures::StreamExt::take_until(frames, Box::pin(ended));
        Ok(Response::new(Box::pin(frames)))
    }

    async fn overlap(&self, _: Request<v1::OverlapRequest>) -> Result<Response<v1::OverlapReply>, Status> {
        Err(Status::unimplemented("not asked by routers"))
    }
}

#[tonic::async_trait]
impl v1::soft_server::Soft for Service {
    async fn publish(&self, request: Request<Streaming<v1::SoftFrames>>) -> Result<Response<v1::PublishReply>, Status> {
        let mut stream = request.into_inner();
        while let Some(frames) = stream.message().await? {
            self.send(v1::feed_frame::Frame::Soft(frames));
        }
        Ok(Response::new(v1::PublishReply {}))
    }
}

impl Service {
    fn send(&self, frame: v1::feed_frame::Frame) {
        let _ = self.frames.send(v1::FeedFrame {
            applied_index: 0,
            quorum_age_ms: age(&self.quorum_age_ms),
            frame: Some(frame),
        });
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Index {
    pub async fn start() -> Self {
        let mut state = IndexState::new();
        state.apply(
            LogIndex(1),
            &Command::InitCluster {
                cluster: "c".into(),
                seed: SEED,
            },
        );
        Self::over(Arc::new(Mutex::new(Inner {
            state,
            seqs: Default::default(),
        })))
        .await
    }

    /// Another node of the same cluster.
    pub async fn over(inner: Arc<Mutex<Inner>>) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (frames, _) = broadcast::channel(4096);
        let (end, ended) = watch::channel(false);
        let service = Service {
            inner: inner.clone(),
            frames: frames.clone(),
            quorum_age_ms: Arc::default(),
            follows: Arc::default(),
            end: ended,
        };
        let (quorum_age_ms, follows) = (service.quorum_age_ms.clone(), service.follows.clone());
        let server = tonic::transport::Server::builder()
            .add_service(v1::feed_server::FeedServer::new(service.clone()))
            .add_service(v1::soft_server::SoftServer::new(service));
        let task = tokio::spawn(async move {
            let _ = server
                .serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener))
                .await;
        });
        Self {
            addr,
            inner,
            max_model_len: 4096.into(),
            quorum_age_ms,
            follows,
            frames,
            end,
            task,
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Ends every stream and the port.
    pub fn kill(&self) {
        self.end.send_replace(true);
        self.task.abort();
    }

    /// Commits a command on this node.
    pub fn commit(&self, command: &Command) -> Reply {
        let mut inner = self.inner.lock();
        let at = inner.state.applied().0 + 1;
        let reply = inner.state.apply(LogIndex(at), command);
        let entry = v1::Entry {
            index: at,
            command: codec::encode_command(command).into(),
        };
        let _ = self.frames.send(v1::FeedFrame {
            applied_index: at,
            quorum_age_ms: age(&self.quorum_age_ms),
            frame: Some(v1::feed_frame::Frame::Entries(v1::Entries { entries: vec![entry] })),
        });
        reply
    }

    /// Registers an engine with a GPU and a CPU cache.
    pub fn register(&self, url: &str, role: Role, rank: u32, ranks: u32) -> Registered {
        self.register_as(url, role, rank, ranks, |_| {})
    }

    /// The same, with what `change` makes of the worker.
    pub fn register_as(
        &self,
        url: &str,
        role: Role,
        rank: u32,
        ranks: u32,
        change: impl FnOnce(&mut WorkerSpec),
    ) -> Registered {
        let mut spec = SourceSpec {
            name: format!("{url}#{rank}"),
            agent: "agent".into(),
            pool: PoolSpec {
                name: POOL.into(),
                models: vec!["m".into(), "alias/of-m".into()],
                block_size: BlockSize::DEFAULT,
                max_model_len: Some(self.max_model_len.load(std::sync::atomic::Ordering::SeqCst)),
                model_root: Some("cairn:embedded".into()),
            },
            worker: WorkerSpec {
                engine_url: url.into(),
                rank,
                ranks,
                host: "h".into(),
                role,
                engine_kind: "vllm".into(),
                engine_block_size: 16,
                capacity_blocks: 4096,
                max_num_seqs: 64,
                max_batched_tokens: 2048,
                adapters: vec![],
                bootstrap: None,
            },
            holders: vec![
                HolderSpec {
                    tier: Tier::Gpu,
                    fetch_unit: 16,
                    reach: Reach::Worker,
                },
                HolderSpec {
                    tier: Tier::Cpu,
                    fetch_unit: 16,
                    reach: Reach::Worker,
                },
            ],
        };
        change(&mut spec.worker);
        let Reply::Register(RegisterOutcome::Registered {
            source,
            incarnation,
            worker,
            holders,
            ..
        }) = self.commit(&Command::RegisterSource { spec, resume: None })
        else {
            panic!("the registration was refused");
        };
        let registered = Registered {
            source,
            incarnation,
            worker,
            holders,
        };
        self.ops(&registered, vec![Op::Confidence(Confidence::Exact)]);
        registered
    }

    pub fn ops(&self, of: &Registered, ops: Vec<Op>) -> Reply {
        let seq = {
            let mut inner = self.inner.lock();
            let seq = inner.seqs.entry(of.source).or_insert(0);
            *seq += 1;
            *seq
        };
        let batch = Batch {
            source: of.source,
            incarnation: of.incarnation,
            seq: Seq(seq),
            ops,
        };
        self.commit(&Command::Batches(vec![batch]))
    }

    /// The worker's GPU now holds the full blocks of `tokens`.
    pub fn store(&self, of: &Registered, tokens: &[u32], salt: &str) {
        let namespace = Namespace {
            seed: SEED,
            pool: POOL,
            block_size: BlockSize::DEFAULT,
            adapter: "",
            salt,
        };
        let root = namespace.root();
        let keys: Vec<BlockKey> = Chain::new(root, BlockSize::DEFAULT, tokens, &[]).keys;
        self.ops(
            of,
            vec![Op::Store {
                holder: of.holders[0],
                anchor: root,
                anchor_depth: Depth(0),
                skip: 0,
                keys,
            }],
        );
    }
}
