//! Followers of the feed, and single overlap questions.

use std::sync::Arc;
use std::time::Duration;

use cairn_blocks::BlockKey;
use cairn_index::Query;
use cairn_proto::{limits, v1};
use tokio::sync::broadcast::{self, error::TryRecvError};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use v1::feed_frame::Frame;

use super::{Answers, Service};
use crate::feed_log::Next;
use crate::metrics::Metrics;
use crate::node::Node;
use crate::soft::Group;

/// Heartbeat of a quiet feed; followers are promised one every 250 ms.
const IDLE_EVERY: Duration = Duration::from_millis(200);
/// Command bytes of one frame.
const FRAME_BYTES: usize = 512 << 10;
/// Frames that wait for the wire, of one follower.
const FRAMES_WAITING: usize = 4;
/// A follower that takes no frame for this long is cut.
const FOLLOWER_PATIENCE: Duration = Duration::from_secs(10);
/// Soft frames are gathered this long.
const SOFT_GATHER: Duration = Duration::from_millis(10);
/// Soft frames of one feed frame.
const SOFT_FRAMES_PER_FRAME: usize = 1_024;

#[tonic::async_trait]
impl v1::feed_server::Feed for Service {
    type FollowStream = Answers<v1::FeedFrame>;

    async fn follow(&self, request: Request<v1::FollowRequest>) -> Result<Response<Self::FollowStream>, Status> {
        let message = request.into_inner();
        if message.follower.len() > limits::NAME_BYTES_MAX {
            return Err(Status::invalid_argument("`follower` is too long; give a short name"));
        }
        let cluster = &self.node.config.cluster;
        if !message.cluster.is_empty() && message.cluster != *cluster {
            return Err(Status::failed_precondition(format!(
                "this node belongs to cluster {cluster:?} and the follower wants {:?}; correct its index addresses",
                message.cluster
            )));
        }
        let (frames, stream) = mpsc::channel(FRAMES_WAITING);
        let follower = Follower {
            node: self.node.clone(),
            frames,
            name: message.follower,
            at: 0,
        };
        tokio::spawn(follower.run(message.applied_index, message.digest));
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn overlap(&self, request: Request<v1::OverlapRequest>) -> Result<Response<v1::OverlapReply>, Status> {
        let message = request.into_inner();
        if message.keys.len() > limits::OVERLAP_KEYS_MAX {
            let (count, max) = (message.keys.len(), limits::OVERLAP_KEYS_MAX);
            return Err(Status::invalid_argument(format!(
                "`keys` has {count} elements and {max} are allowed"
            )));
        }
        let keys: Vec<BlockKey> = message.keys.into_iter().map(BlockKey).collect();
        let quorum_age_ms = self.node.consensus.quorum_age_ms();
        self.node.consensus.read(|state| {
            let Some(pool) = state.registry().pools.get(&message.pool) else {
                let known: Vec<&str> = state.registry().pools.keys().take(16).map(String::as_str).collect();
                let known = known.join(", ");
                return Err(Status::not_found(format!("no pool `{}`; known: {known}", message.pool)));
            };
            let query = Query {
                pool: &message.pool,
                keys: &keys,
                prompt_tokens: message.prompt_tokens,
                block_size: pool.spec.block_size,
            };
            let mut found = Vec::new();
            state.overlap(&query, &mut found);
            let workers = found
                .iter()
                .map(|each| v1::WorkerOverlap {
                    worker: each.worker.0,
                    gpu_tokens: each.overlap.gpu,
                    cpu_tokens: each.overlap.cpu,
                    shared_tokens: each.overlap.shared,
                })
                .collect();
            Ok(Response::new(v1::OverlapReply {
                applied_index: state.applied().0,
                quorum_age_ms,
                workers,
            }))
        })
    }
}

/// One follower's stream.
struct Follower {
    node: Arc<Node>,
    frames: mpsc::Sender<Result<v1::FeedFrame, Status>>,
    name: String,
    /// Up to where the follower has everything.
    at: u64,
}

/// The stream is over; `Some` with what the follower is told.
struct Over(Option<Status>);

impl Follower {
    async fn run(mut self, index: u64, digest: u64) {
        self.node.metrics.followers.inc();
        let Over(status) = match self.serve(index, digest).await {
            Ok(()) => Over(None),
            Err(over) => over,
        };
        if let Some(status) = status {
            // A follower that takes nothing won't take this either.
            let _ = self.frames.try_send(Err(status));
        }
        self.node.metrics.followers.dec();
    }

    async fn send(&self, frame: Frame) -> Result<(), Over> {
        let frame = v1::FeedFrame {
            applied_index: self.at,
            quorum_age_ms: self.node.consensus.quorum_age_ms(),
            frame: Some(frame),
        };
        match tokio::time::timeout(FOLLOWER_PATIENCE, self.frames.send(Ok(frame))).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(Over(None)),
            Err(_) => Err(self.cut("stalled")),
        }
    }

    fn cut(&self, why: &'static str) -> Over {
        Metrics::count(&self.node.metrics.follower_cuts, why);
        tracing::info!(follower = self.name, why, "follower cut");
        Over(Some(Status::aborted(format!(
            "cut ({why}): follow again from what is applied"
        ))))
    }

    async fn serve(&mut self, index: u64, digest: u64) -> Result<(), Over> {
        let node = self.node.clone();
        let epoch = node.feed.epoch();
        let mut applied = node.feed.watch();
        let (known, mut soft) = node.soft.follow();
        if index > 0 && node.feed.confirms(index, digest) {
            self.at = index;
        } else {
            self.snapshot().await?;
        }
        self.send(Frame::Idle(v1::Idle {})).await?;
        for part in known.chunks(SOFT_FRAMES_PER_FRAME) {
            self.send(Frame::Soft(v1::SoftFrames {
                frames: part.to_vec(),
                relayed: true,
            }))
            .await?;
        }
        let mut idle = tokio::time::interval(IDLE_EVERY);
        idle.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            applied.borrow_and_update();
            if node.feed.epoch() != epoch {
                return Err(self.cut("replaced"));
            }
            loop {
                match node.feed.after(self.at, FRAME_BYTES) {
                    Next::Entries(entries, upto) => {
                        self.at = upto;
                        let entries = entries.into_iter().filter_map(|entry| {
                            entry.command.map(|command| v1::Entry {
                                index: entry.index,
                                command,
                            })
                        });
                        self.send(Frame::Entries(v1::Entries {
                            entries: entries.collect(),
                        }))
                        .await?;
                        idle.reset();
                    }
                    Next::Nothing => break,
                    Next::Cut => return Err(self.cut("behind")),
                }
            }
            tokio::select! {
                () = node.stopping.cancelled() => {
                    return Err(Over(Some(Status::unavailable("this node is stopping; follow another one"))));
                }
                () = self.frames.closed() => return Ok(()),
                changed = applied.changed() => {
                    if changed.is_err() {
                        return Ok(());
                    }
                }
                _ = idle.tick() => self.send(Frame::Idle(v1::Idle {})).await?,
                group = soft.recv() => {
                    let frames = gather(group, &mut soft, &node.metrics).await;
                    for part in frames.chunks(SOFT_FRAMES_PER_FRAME) {
                        self.send(Frame::Soft(v1::SoftFrames { frames: part.to_vec(), relayed: true })).await?;
                    }
                }
            }
        }
    }

    async fn snapshot(&mut self) -> Result<(), Over> {
        let node = self.node.clone();
        let snapshot = node
            .snapshots
            .get(&node.consensus, |index| node.feed.reaches(index))
            .await;
        let failed = |error: String| Over(Some(Status::internal(format!("no snapshot: {error}"))));
        let snapshot = snapshot.map_err(failed)?;
        node.metrics.snapshots_sent.inc();
        self.at = snapshot.state.index;
        let (mut offset, bytes) = (0, snapshot.state.bytes);
        while offset < bytes {
            let data = snapshot.chunk(offset).await.map_err(failed)?;
            offset += data.len() as u64;
            self.send(Frame::Snapshot(v1::SnapshotChunk {
                snapshot_index: snapshot.state.index,
                data,
                last: offset == bytes,
                digest: snapshot.state.digest,
            }))
            .await?;
        }
        Ok(())
    }
}

/// A group and what follows within a moment.
async fn gather(
    first: Result<Group, broadcast::error::RecvError>,
    soft: &mut broadcast::Receiver<Group>,
    metrics: &Metrics,
) -> Vec<v1::SoftFrame> {
    let mut frames = match first {
        Ok(group) => Arc::unwrap_or_clone(group),
        Err(_) => {
            Metrics::count(&metrics.soft_frames, "feed_lagged");
            Vec::new()
        }
    };
    tokio::time::sleep(SOFT_GATHER).await;
    loop {
        match soft.try_recv() {
            Ok(group) => frames.extend(group.iter().cloned()),
            Err(TryRecvError::Lagged(_)) => Metrics::count(&metrics.soft_frames, "feed_lagged"),
            Err(TryRecvError::Empty | TryRecvError::Closed) => return frames,
        }
    }
}
