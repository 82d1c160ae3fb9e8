//! One source: registers, and pushes its batches within a window as an agent does.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cairn_index::{HolderId, Op, RegisterOutcome};
use cairn_proto::security::AuthChannel;
use cairn_proto::{RegisterAnswer, v1};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{BenchError, PATIENCE, Shared, Told, failed};

/// Batches that one source has unacknowledged: as many as an agent allows itself.
const WINDOW: u64 = 16;
/// Pushes of one source that wait for the wire.
const QUEUE_PUSHES: usize = 16;

/// What sources say.
#[derive(Clone)]
pub(super) enum Content {
    /// Chains of this many blocks, of which each source keeps some; older ones are removed, as a full cache does.
    Chains { blocks: usize, kept: u64 },
    /// What sources of a trace told.
    Told(Arc<Told>),
}

/// What all sources of a phase share.
#[derive(Clone)]
pub(super) struct Pushing {
    pub(super) channel: AuthChannel,
    pub(super) shared: Arc<Shared>,
    pub(super) content: Content,
    /// Sources end once each holds its share, or has told everything.
    pub(super) fill: bool,
    pub(super) pause: Option<Duration>,
}

/// One source with its place in its stream.
pub(super) struct Source {
    pub(super) number: usize,
    name: &'static str,
    registered: Option<(u32, u64, u32)>,
    sent: u64,
}

fn spec(name: &str, i: usize) -> v1::SourceSpec {
    let host = format!("{name}-{i}");
    let url = format!("http://{host}:8000");
    v1::SourceSpec {
        name: format!("{url}#0"),
        agent: host.clone(),
        pool: Some(v1::PoolSpec {
            name: "bench".to_owned(),
            models: vec!["bench".to_owned()],
            block_size: 16,
            ..v1::PoolSpec::default()
        }),
        worker: Some(v1::WorkerSpec {
            engine_url: url,
            ranks: 1,
            host,
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
    /// Its name and number tell it from all others.
    pub(super) fn new(name: &'static str, number: usize) -> Self {
        Self {
            number,
            name,
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
            spec: Some(spec(self.name, self.number)),
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

    /// Pushes until told to stop, or until all is said, and everything is acknowledged.
    pub(super) async fn run(mut self, with: Pushing) -> Result<Self, BenchError> {
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
            let stopped =
                with.shared.stop.load(Ordering::Relaxed) || with.fill && self.sent >= with.content.share(self.number);
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
                    ops: with.content.ops((self.number, source), holder, self.sent),
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
                let changes = with.content.changes(ack.seq);
                with.shared.changes.fetch_add(changes, Ordering::Relaxed);
            }
        }
    }
}

impl Content {
    /// Batches of a source until it holds its share, or has said all.
    fn share(&self, number: usize) -> u64 {
        match self {
            Self::Chains { kept, .. } => *kept,
            Self::Told(told) => told[number].len() as u64,
        }
    }

    /// Block changes of one batch of chains; those of a trace are counted where they are seen.
    fn changes(&self, seq: u64) -> u64 {
        match self {
            // Chains stored beyond what is kept replace older ones.
            Self::Chains { blocks, kept } => *blocks as u64 * if seq > *kept { 2 } else { 1 },
            Self::Told(_) => 0,
        }
    }

    /// Changes of batch `seq` of a source, by its number here and its registered one.
    fn ops(&self, (number, source): (usize, u32), holder: u32, seq: u64) -> Vec<v1::Op> {
        match self {
            Self::Chains { blocks, kept } => chain_ops(*blocks as u64, *kept, source, holder, seq),
            Self::Told(told) => {
                let batch = &told[number][seq as usize - 1];
                let own = |op: &Op| v1::Op::from(of_holder(op.clone(), HolderId(holder)));
                batch.iter().map(own).collect()
            }
        }
    }
}

/// The same change of another holder.
fn of_holder(mut op: Op, own: HolderId) -> Op {
    match &mut op {
        Op::Store { holder, .. } | Op::Remove { holder, .. } | Op::Clear { holder } => *holder = own,
        Op::Confidence(_) => {}
    }
    op
}

fn chain_ops(blocks: u64, kept: u64, source: u32, holder: u32, seq: u64) -> Vec<v1::Op> {
    let mut ops = Vec::with_capacity(2);
    if let Some(old) = seq.checked_sub(kept).filter(|old| *old > 0) {
        let cut = v1::Cut {
            holder,
            key: key(source, old, blocks),
            depth: blocks as u32,
            count: blocks as u32,
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
