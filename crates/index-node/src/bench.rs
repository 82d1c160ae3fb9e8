//! Measures the replicated path: three durable nodes in one process, sources that store and remove chains, and a
//! follower of the feed that says when each batch became visible.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cairn_index::{Command, RegisterOutcome, codec};
use cairn_proto::security::{AuthChannel, Credentials};
use cairn_proto::{RegisterAnswer, limits, v1};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::{Config, PeerConfig, Running, start_on};

/// Batches that one source has unacknowledged.
const WINDOW: u64 = 8;
/// Chains that a source keeps; older ones are removed, as a full cache does.
const CHAINS_KEPT: u64 = 64;
/// How long the cluster may take to form and to drain.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the nodes' data go; must be empty and on the disk to be measured.
    pub dir: PathBuf,
    /// Index nodes.
    pub nodes: usize,
    /// Sources that push at once.
    pub sources: usize,
    /// Blocks of one stored chain.
    pub chain_blocks: usize,
    /// Length of the phase at full rate; the phase at half rate is as long.
    pub phase: Duration,
}

/// What came out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Block changes (stored and removed) committed and applied per second at full rate.
    pub changes_per_s: f64,
    /// From the send of a batch to its entry in a follower's hands, at half the full rate.
    pub visible_p50_ms: f64,
    /// The same, 99th percentile.
    pub visible_p99_ms: f64,
    /// Longest time that making a snapshot kept writes waiting.
    pub snapshot_stall_ms_max: f64,
    /// Command bytes per block change.
    pub bytes_per_change: f64,
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
#[error("the cluster benchmark failed: {0}")]
pub struct BenchError(String);

fn failed(error: impl std::fmt::Display) -> BenchError {
    BenchError(error.to_string())
}

/// What sources and follower share.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// Changes acknowledged.
    changes: AtomicU64,
    /// Changes and command bytes seen in the feed.
    seen: AtomicU64,
    seen_bytes: AtomicU64,
    /// When each (source, seq) was sent, while latency is measured.
    sent: Mutex<HashMap<(u32, u64), Instant>>,
    latencies: Mutex<Vec<Duration>>,
}

/// Runs the benchmark.
///
/// # Errors
/// [`BenchError`] where the cluster doesn't form or a source is refused.
pub async fn run(options: Options) -> Result<Report, BenchError> {
    let nodes = cluster(&options).await?;
    let leader = leader(&nodes).await?;
    let shared = Arc::new(Shared::default());
    let credentials = Credentials::default();
    let channel = |i: usize| {
        credentials
            .client_channel(&nodes[i].address.to_string())
            .map_err(failed)
    };
    let follower = tokio::spawn(follow(channel((leader + 1) % nodes.len())?, shared.clone()));

    let begun = Instant::now();
    phase(&options, channel(leader)?, &shared, None).await?;
    let rate = shared.changes.swap(0, Ordering::Relaxed) as f64 / begun.elapsed().as_secs_f64();
    let bytes = shared.seen_bytes.load(Ordering::Relaxed) as f64;
    let bytes_per_change = bytes / (shared.seen.load(Ordering::Relaxed).max(1) as f64);

    let snapshots = async {
        tokio::time::sleep(options.phase / 2).await;
        for node in &nodes {
            node.snapshot().await.map_err(failed)?;
        }
        Ok::<(), BenchError>(())
    };
    let (measured, asked) = tokio::join!(phase(&options, channel(leader)?, &shared, Some(rate / 2.0)), snapshots);
    measured?;
    asked?;
    follower.abort();
    let mut latencies = std::mem::take(&mut *shared.latencies.lock());
    latencies.sort_unstable();
    let percentile = |share: f64| {
        let last = latencies.len().saturating_sub(1);
        latencies
            .get((last as f64 * share) as usize)
            .map_or(0.0, |d| d.as_secs_f64() * 1e3)
    };
    let stall = nodes.iter().map(Running::snapshot_stall_us_max).max().unwrap_or(0);
    let report = Report {
        changes_per_s: rate,
        visible_p50_ms: percentile(0.5),
        visible_p99_ms: percentile(0.99),
        snapshot_stall_ms_max: stall as f64 / 1e3,
        bytes_per_change,
    };
    for node in nodes {
        node.stop().await;
    }
    Ok(report)
}

async fn cluster(options: &Options) -> Result<Vec<Running>, BenchError> {
    let mut listeners = Vec::new();
    let mut peers = Vec::new();
    for id in 1..=options.nodes as u64 {
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(failed)?;
        peers.push(PeerConfig {
            id,
            address: listener.local_addr().map_err(failed)?.to_string(),
        });
        listeners.push(listener);
    }
    let mut nodes = Vec::new();
    for (peer, listener) in peers.iter().zip(listeners) {
        let config = Config {
            cluster: "bench".to_owned(),
            node_id: peer.id,
            data_dir: options.dir.join(format!("node-{}", peer.id)),
            peers: peers.clone(),
            ..Config::default()
        };
        nodes.push(start_on(config, listener).await.map_err(failed)?);
    }
    Ok(nodes)
}

async fn leader(nodes: &[Running]) -> Result<usize, BenchError> {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        let leads = |node: &Running| node.ready().is_ok() && node.member().role == "leader";
        if let Some(leader) = nodes.iter().position(leads) {
            return Ok(leader);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Err(failed("no leader was found"))
}

/// All sources push for one phase; at `rate` changes per second over all, or as fast as it goes.
async fn phase(
    options: &Options,
    channel: AuthChannel,
    shared: &Arc<Shared>,
    rate: Option<f64>,
) -> Result<(), BenchError> {
    shared.stop.store(false, Ordering::Relaxed);
    // A chain stored and one removed in each batch.
    let per_batch = (options.chain_blocks * 2) as f64;
    let pause = rate.map(|rate| Duration::from_secs_f64(per_batch * options.sources as f64 / rate.max(1.0)));
    let mut sources = tokio::task::JoinSet::new();
    for i in 0..options.sources {
        let source = Source {
            channel: channel.clone(),
            shared: shared.clone(),
            blocks: options.chain_blocks,
            pause,
        };
        sources.spawn(source.run(i));
    }
    tokio::time::sleep(options.phase).await;
    shared.stop.store(true, Ordering::Relaxed);
    while let Some(ended) = sources.join_next().await {
        ended.map_err(failed)??;
    }
    Ok(())
}

struct Source {
    channel: AuthChannel,
    shared: Arc<Shared>,
    blocks: usize,
    pause: Option<Duration>,
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
    async fn run(self, i: usize) -> Result<(), BenchError> {
        let mut client = v1::ingest_client::IngestClient::new(self.channel.clone());
        let request = v1::RegisterRequest {
            spec: Some(spec(i)),
            resume_incarnation: 0,
        };
        let answer = client.register(request).await.map_err(failed)?.into_inner();
        let answer = RegisterAnswer::try_from(answer).map_err(failed)?;
        let RegisterOutcome::Registered {
            source,
            incarnation,
            holders,
            ..
        } = answer.outcome
        else {
            return Err(failed(format!("a registration was refused: {:?}", answer.outcome)));
        };
        let (requests, receiver) = mpsc::channel(16);
        let mut replies = client
            .push(ReceiverStream::new(receiver))
            .await
            .map_err(failed)?
            .into_inner();
        let (mut sent, mut acked) = (0u64, 0u64);
        let mut due = tokio::time::Instant::now();
        loop {
            let stopped = self.shared.stop.load(Ordering::Relaxed);
            if stopped && acked == sent {
                return Ok(());
            }
            if !stopped && sent < acked + WINDOW && tokio::time::Instant::now() >= due {
                sent += 1;
                let ops = self.ops(source.0, holders[0].0, sent);
                let (source, incarnation) = (source.0, incarnation.0);
                let batch = v1::Batch {
                    source,
                    incarnation,
                    seq: sent,
                    ops,
                    ..v1::Batch::default()
                };
                if let Some(pause) = self.pause {
                    due += pause;
                    self.shared.sent.lock().insert((source, sent), Instant::now());
                }
                let push = v1::PushRequest {
                    batches: vec![batch],
                    renew: Vec::new(),
                };
                requests.send(push).await.map_err(failed)?;
                continue;
            }
            let reply = if stopped || sent >= acked + WINDOW {
                tokio::time::timeout(PATIENCE, replies.message())
                    .await
                    .map_err(failed)?
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
                let changes = if ack.seq > CHAINS_KEPT {
                    self.blocks * 2
                } else {
                    self.blocks
                };
                self.shared.changes.fetch_add(changes as u64, Ordering::Relaxed);
            }
        }
    }

    fn ops(&self, source: u32, holder: u32, seq: u64) -> Vec<v1::Op> {
        let blocks = self.blocks as u64;
        let mut ops = Vec::with_capacity(2);
        if let Some(old) = seq.checked_sub(CHAINS_KEPT).filter(|old| *old > 0) {
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

/// Follows the feed as a router does, and notes when each batch is in its hands.
async fn follow(channel: AuthChannel, shared: Arc<Shared>) {
    let mut client = v1::feed_client::FeedClient::new(channel).max_decoding_message_size(limits::MESSAGE_BYTES_MAX);
    let request = v1::FollowRequest {
        follower: "bench".to_owned(),
        ..v1::FollowRequest::default()
    };
    let Ok(stream) = client.follow(request).await else {
        return;
    };
    let mut stream = stream.into_inner();
    while let Ok(Some(frame)) = stream.message().await {
        let Some(v1::feed_frame::Frame::Entries(entries)) = frame.frame else {
            continue;
        };
        let now = Instant::now();
        for entry in entries.entries {
            let Ok(Command::Batches(batches)) = codec::decode_command(&entry.command) else {
                continue;
            };
            shared
                .seen_bytes
                .fetch_add(entry.command.len() as u64, Ordering::Relaxed);
            for batch in batches {
                let changes = batch.ops.iter().map(|op| match op {
                    cairn_index::Op::Store { keys, .. } => keys.len() as u64,
                    cairn_index::Op::Remove { count, .. } => u64::from(*count),
                    cairn_index::Op::Clear { .. } | cairn_index::Op::Confidence(_) => 0,
                });
                shared.seen.fetch_add(changes.sum(), Ordering::Relaxed);
                if let Some(sent) = shared.sent.lock().remove(&(batch.source.0, batch.seq.0)) {
                    shared.latencies.lock().push(now.duration_since(sent));
                }
            }
        }
    }
}
