//! Sources that push batches, on one thread of their own.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cairn_index::RegisterOutcome;
use cairn_proto::security::{AuthChannel, Credentials};
use cairn_proto::{RegisterAnswer, v1};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{BenchError, Options, PATIENCE, Shared, failed, gauge};

/// Batches that one source has unacknowledged: as many as an agent allows itself.
const WINDOW: u64 = 16;
/// Pushes of one source that wait for the wire.
const QUEUE_PUSHES: usize = 16;

/// What the sources do.
#[derive(Clone, Copy, Debug)]
pub(super) enum Phase {
    /// Store until every source holds its share.
    Fill,
    /// A chain stored and one removed in each batch: at `rate` changes per second over all, or as fast as it goes.
    Push { rate: Option<f64>, length: Duration },
}

/// All sources.
pub(super) struct Load {
    address: SocketAddr,
    shared: Arc<Shared>,
    blocks: usize,
    kept: u64,
    sources: Vec<Source>,
}

impl Load {
    pub(super) fn new(options: &Options, address: SocketAddr, shared: Arc<Shared>) -> Self {
        let chains = options.memberships / (options.sources * options.chain_blocks).max(1);
        Self {
            address,
            shared,
            blocks: options.chain_blocks,
            kept: chains.max(1) as u64,
            sources: (0..options.sources).map(Source::new).collect(),
        }
    }

    /// Runs one phase until everything is acknowledged; gives the CPU that the sources took.
    pub(super) async fn run(&mut self, phase: Phase) -> Result<Duration, BenchError> {
        self.shared.stop.store(false, Ordering::Relaxed);
        let sources = std::mem::take(&mut self.sources);
        let (address, shared, blocks, kept) = (self.address, self.shared.clone(), self.blocks, self.kept);
        let pushing = tokio::task::spawn_blocking(move || {
            let before = gauge::thread_cpu();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(failed)?;
            let sources = runtime.block_on(push_all(sources, address, shared, blocks, kept, phase))?;
            Ok::<_, BenchError>((sources, gauge::thread_cpu().saturating_sub(before)))
        });
        let (sources, cpu) = pushing.await.map_err(failed)??;
        self.sources = sources;
        Ok(cpu)
    }
}

async fn push_all(
    sources: Vec<Source>,
    address: SocketAddr,
    shared: Arc<Shared>,
    blocks: usize,
    kept: u64,
    phase: Phase,
) -> Result<Vec<Source>, BenchError> {
    let channel = Credentials::default()
        .client_channel(&address.to_string())
        .map_err(failed)?;
    let per_batch = (blocks * 2) as f64 * sources.len() as f64;
    let pushing = Pushing {
        channel,
        shared: shared.clone(),
        blocks,
        kept,
        fill: matches!(phase, Phase::Fill),
        pause: match phase {
            Phase::Fill | Phase::Push { rate: None, .. } => None,
            Phase::Push { rate: Some(rate), .. } => Some(Duration::from_secs_f64(per_batch / rate.max(1.0))),
        },
    };
    let mut running = tokio::task::JoinSet::new();
    for source in sources {
        running.spawn(source.run(pushing.clone()));
    }
    if let Phase::Push { length, .. } = phase {
        let begun = Instant::now();
        while begun.elapsed() < length && !shared.stop.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        shared.stop.store(true, Ordering::Relaxed);
    }
    let mut sources = Vec::new();
    while let Some(ended) = running.join_next().await {
        sources.push(ended.map_err(failed)??);
    }
    sources.sort_by_key(|source| source.number);
    Ok(sources)
}

/// What all sources of a phase share.
#[derive(Clone)]
struct Pushing {
    channel: AuthChannel,
    shared: Arc<Shared>,
    blocks: usize,
    /// Chains that a source keeps; older ones are removed, as a full cache does.
    kept: u64,
    fill: bool,
    pause: Option<Duration>,
}

/// One source with its place in its stream.
struct Source {
    number: usize,
    registered: Option<(u32, u64, u32)>,
    sent: u64,
}

fn spec(i: usize) -> v1::SourceSpec {
    let url = format!("http://bench-{i}:8000");
    v1::SourceSpec {
        name: format!("{url}#0"),
        agent: format!("bench-{i}"),
        pool: Some(v1::PoolSpec {
            name: "bench".to_owned(),
            models: vec!["bench".to_owned()],
            block_size: 16,
            ..v1::PoolSpec::default()
        }),
        worker: Some(v1::WorkerSpec {
            engine_url: url,
            ranks: 1,
            host: format!("bench-{i}"),
            engine_kind: "vllm".to_owned(),
            engine_block_size: 16,
            ..v1::WorkerSpec::default()
        }),
        holders: vec![v1::HolderSpec {
            tier: v1::Tier::Gpu.into(),
            fetch_unit: 16,
            reach: Some(v1::holder_spec::Reach::Worker(true)),
        }],
    }
}

/// A well-spread key of (source, batch, block).
fn key(source: u32, seq: u64, block: u64) -> u64 {
    let mut z = (u64::from(source) << 44) ^ (seq << 20) ^ block;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Source {
    fn new(number: usize) -> Self {
        Self {
            number,
            registered: None,
            sent: 0,
        }
    }

    /// Source, lifetime and holder.
    async fn register(
        &mut self,
        client: &mut v1::ingest_client::IngestClient<AuthChannel>,
    ) -> Result<(u32, u64, u32), BenchError> {
        if let Some(registered) = self.registered {
            return Ok(registered);
        }
        let request = v1::RegisterRequest {
            spec: Some(spec(self.number)),
            resume_incarnation: 0,
        };
        let answer = client.register(request).await.map_err(failed)?.into_inner();
        match RegisterAnswer::try_from(answer).map_err(failed)?.outcome {
            RegisterOutcome::Registered {
                source,
                incarnation,
                holders,
                ..
            } => {
                let holder = holders.first().ok_or_else(|| failed("a source without a cache"))?;
                Ok(*self.registered.insert((source.0, incarnation.0, holder.0)))
            }
            refused @ (RegisterOutcome::HeldBy { .. } | RegisterOutcome::Invalid { .. }) => {
                Err(failed(format!("a registration was refused: {refused:?}")))
            }
        }
    }

    async fn run(mut self, with: Pushing) -> Result<Self, BenchError> {
        let mut client = v1::ingest_client::IngestClient::new(with.channel.clone());
        let (source, incarnation, holder) = self.register(&mut client).await?;
        let (requests, receiver) = mpsc::channel(QUEUE_PUSHES);
        let pushed = client.push(ReceiverStream::new(receiver)).await.map_err(failed)?;
        let mut replies = pushed.into_inner();
        let mut acked = self.sent;
        let mut due = tokio::time::Instant::now();
        if let Some(pause) = with.pause {
            // Sources begin one after another within a turn, as engines do.
            due += pause.mul_f64((self.number % 64) as f64 / 64.0);
        }
        loop {
            let stopped = with.shared.stop.load(Ordering::Relaxed) || with.fill && self.sent >= with.kept;
            if stopped && acked == self.sent {
                return Ok(self);
            }
            if !stopped && self.sent < acked + WINDOW && tokio::time::Instant::now() >= due {
                self.sent += 1;
                if let Some(pause) = with.pause {
                    with.shared.sent.lock().insert((source, self.sent), due.into_std());
                    due += pause;
                }
                let batch = v1::Batch {
                    source,
                    incarnation,
                    seq: self.sent,
                    ops: with.ops(source, holder, self.sent),
                    ..v1::Batch::default()
                };
                let push = v1::PushRequest {
                    batches: vec![batch],
                    renew: Vec::new(),
                };
                requests.send(push).await.map_err(failed)?;
                continue;
            }
            let reply = if stopped || self.sent >= acked + WINDOW {
                let waited = tokio::time::timeout(PATIENCE, replies.message()).await;
                waited.map_err(failed)?
            } else {
                match tokio::time::timeout_at(due, replies.message()).await {
                    Ok(reply) => reply,
                    Err(_) => continue,
                }
            };
            let Some(reply) = reply.map_err(failed)? else {
                return Err(failed("a push stream ended"));
            };
            for ack in reply.acks {
                acked = acked.max(ack.seq);
                // Chains stored beyond what is kept replace older ones.
                let chains = if ack.seq > with.kept { 2 } else { 1 };
                let per_batch = chains * with.blocks as u64;
                with.shared.changes.fetch_add(per_batch, Ordering::Relaxed);
            }
        }
    }
}

impl Pushing {
    fn ops(&self, source: u32, holder: u32, seq: u64) -> Vec<v1::Op> {
        let blocks = self.blocks as u64;
        let mut ops = Vec::with_capacity(2);
        if let Some(old) = seq.checked_sub(self.kept).filter(|old| *old > 0) {
            let (depth, count) = (self.blocks as u32, self.blocks as u32);
            let cut = v1::Cut {
                holder,
                key: key(source, old, blocks),
                depth,
                count,
            };
            ops.push(v1::Op {
                op: Some(v1::op::Op::Remove(cut)),
            });
        }
        let store = v1::Store {
            holder,
            anchor: key(source, seq, 0),
            anchor_depth: 0,
            skip: 0,
            keys: (1..=blocks).map(|block| key(source, seq, block)).collect(),
        };
        ops.push(v1::Op {
            op: Some(v1::op::Op::Store(store)),
        });
        ops
    }
}
