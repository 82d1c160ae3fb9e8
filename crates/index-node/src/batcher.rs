//! The leader's batcher: many agents' batches become one log entry per window.
//!
//! Each entry costs a flush on every member, so entries are made as large as is good for the disk (48-64 KiB) and as
//! rare as latency allows (one window); behind entries that still wait for the disk they grow to three times that, so
//! that a backlog costs fewer flushes. Answers go back in log order after commit and apply.

use std::time::{Duration, Instant};

use bytes::Bytes;
use cairn_index::{Batch, BatchOutcome, Command, Op, Reply, codec};
use cairn_proto::BatchAnswer;
use cairn_raft_store::{Consensus, Pending, ProposeError};
use cairn_telemetry::TraceContext;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TryRecvError;
use tracing::Instrument;

use crate::metrics::Metrics;

/// An entry is closed at this estimated size while the log keeps up.
const ENTRY_BYTES_AIM: usize = 64 << 10;
/// And at this one while entries before it wait. One batch is at most 184 KiB, so an entry stays below 256 KiB.
const ENTRY_BYTES_MAX: usize = 192 << 10;
/// Batches waiting for an entry; senders wait beyond it, which the agents feel as back-pressure.
const WAITING_MAX: usize = 1024;
/// Entries proposed and not yet applied: one at each step from the leader's disk to the answer, and as many again.
const IN_FLIGHT_MAX: usize = 8;
/// So many of them mean that the log doesn't keep up.
const BACKLOG: usize = 2;
/// Trace links of one entry's span.
const LINKS_MAX: usize = 32;

/// How a batch ended, for the stream that it came on.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Applied or refused by the index, at this log index.
    Answered(BatchAnswer, u64),
    /// Not known to be committed: the stream must end.
    Failed(ProposeError),
}

/// One batch on its way.
pub(crate) struct Submission {
    pub(crate) batch: Batch,
    pub(crate) trace: Option<TraceContext>,
    /// Room for the answer was taken beforehand, so answering never waits.
    pub(crate) answer: mpsc::OwnedPermit<Outcome>,
}

/// The way into the batcher.
#[derive(Clone)]
pub(crate) struct Batcher {
    sender: mpsc::Sender<Submission>,
}

/// An entry on its way, with whom to answer.
struct Proposed {
    pending: Result<Pending, ProposeError>,
    asked: Vec<(BatchAnswer, mpsc::OwnedPermit<Outcome>)>,
    begun: Instant,
    bytes: usize,
    span: tracing::Span,
}

impl Batcher {
    /// Starts the two tasks; they end when the last handle is dropped.
    pub(crate) fn start(consensus: Consensus, window: Duration, metrics: Metrics) -> Self {
        let (sender, waiting) = mpsc::channel(WAITING_MAX);
        let (proposed, answering) = mpsc::channel(IN_FLIGHT_MAX);
        tokio::spawn(gather(consensus, window, waiting, proposed));
        tokio::spawn(answer(answering, metrics));
        Self { sender }
    }

    /// Hands a batch in; waits while the batcher is full.
    pub(crate) async fn submit(&self, submission: Submission) -> Result<(), ProposeError> {
        let stopped = |_| ProposeError::Stopped("the batcher has ended".to_owned());
        self.sender.send(submission).await.map_err(stopped)
    }
}

/// Upper estimate of a batch's encoded size: numbers take at most 10 bytes and most take one.
pub(crate) fn size_of(batch: &Batch) -> usize {
    let ops = batch.ops.iter().map(|op| match op {
        Op::Store { keys, .. } => 32 + 8 * keys.len(),
        Op::Remove { .. } => 26,
        Op::Clear { .. } | Op::Confidence(_) => 8,
    });
    24 + ops.sum::<usize>()
}

async fn gather(
    consensus: Consensus,
    window: Duration,
    mut waiting: mpsc::Receiver<Submission>,
    proposed: mpsc::Sender<Proposed>,
) {
    let mut next = None;
    loop {
        let first = match next.take() {
            Some(held) => held,
            None => match waiting.recv().await {
                Some(first) => first,
                None => return,
            },
        };
        // While there is no room, what comes waits for this entry, which then takes it at once.
        let Ok(room) = proposed.reserve().await else { return };
        let behind = IN_FLIGHT_MAX - 1 - proposed.capacity();
        let limit = if behind >= BACKLOG {
            ENTRY_BYTES_MAX
        } else {
            ENTRY_BYTES_AIM
        };
        let group = fill(first, limit, window, &mut waiting, &mut next).await;
        room.send(propose(&consensus, group).await);
    }
}

/// What goes into one entry: up to `limit` bytes, or what comes within `window`.
async fn fill(
    first: Submission,
    limit: usize,
    window: Duration,
    waiting: &mut mpsc::Receiver<Submission>,
    next: &mut Option<Submission>,
) -> Vec<Submission> {
    let closes = tokio::time::Instant::now() + window;
    let mut bytes = size_of(&first.batch);
    let mut group = vec![first];
    while bytes < limit {
        let more = match waiting.try_recv() {
            Ok(more) => more,
            Err(TryRecvError::Disconnected) => break,
            Err(TryRecvError::Empty) => match tokio::time::timeout_at(closes, waiting.recv()).await {
                Ok(Some(more)) => more,
                Ok(None) | Err(_) => break,
            },
        };
        let size = size_of(&more.batch);
        if bytes + size > limit {
            *next = Some(more);
            break;
        }
        bytes += size;
        group.push(more);
    }
    group
}

async fn propose(consensus: &Consensus, group: Vec<Submission>) -> Proposed {
    let span = tracing::info_span!(
        "raft.apply",
        batches = group.len(),
        bytes = tracing::field::Empty,
        index = tracing::field::Empty
    );
    let mut asked = Vec::with_capacity(group.len());
    let mut batches = Vec::with_capacity(group.len());
    let mut links = 0;
    for Submission { batch, trace, answer } in group {
        if let (Some(context), true) = (trace, links < LINKS_MAX) {
            cairn_telemetry::propagation::add_link(&span, context);
            links += 1;
        }
        let name = BatchAnswer {
            source: batch.source,
            incarnation: batch.incarnation,
            seq: batch.seq,
            outcome: BatchOutcome::UnknownSource,
        };
        asked.push((name, answer));
        batches.push(batch);
    }
    let command = Bytes::from(codec::encode_command(&Command::Batches(batches)));
    let bytes = command.len();
    span.record("bytes", bytes);
    let begun = Instant::now();
    let pending = consensus.propose(command).instrument(span.clone()).await;
    Proposed {
        pending,
        asked,
        begun,
        bytes,
        span,
    }
}

fn outcome_name(outcome: &BatchOutcome) -> &'static str {
    match outcome {
        BatchOutcome::Applied { .. } => "applied",
        BatchOutcome::Duplicate => "duplicate",
        BatchOutcome::OutOfOrder { .. } => "out_of_order",
        BatchOutcome::Fenced { .. } => "fenced",
        BatchOutcome::UnknownSource => "unknown_source",
    }
}

async fn answer(mut answering: mpsc::Receiver<Proposed>, metrics: Metrics) {
    while let Some(Proposed {
        pending,
        asked,
        begun,
        bytes,
        span,
    }) = answering.recv().await
    {
        let committed = match pending {
            Ok(pending) => pending.wait().await,
            Err(error) => Err(error),
        };
        let failed = match committed {
            Ok(committed) => match committed.reply {
                Reply::Batches(outcomes) if outcomes.len() == asked.len() => {
                    span.record("index", committed.index);
                    metrics.entries.inc();
                    metrics.entry_bytes.inc_by(bytes as u64);
                    metrics.commit_seconds.observe(begun.elapsed().as_secs_f64());
                    for ((mut name, room), outcome) in asked.into_iter().zip(outcomes) {
                        Metrics::count(&metrics.batches, outcome_name(&outcome));
                        name.outcome = outcome;
                        room.send(Outcome::Answered(name, committed.index));
                    }
                    continue;
                }
                Reply::Batches(_) | Reply::Done | Reply::Register(_) | Reply::Unknown => ProposeError::Unknown,
            },
            Err(error) => error,
        };
        for (_, room) in asked {
            Metrics::count(&metrics.batches, "not_committed");
            room.send(Outcome::Failed(failed.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use cairn_blocks::{BlockKey, Depth};
    use cairn_index::{HolderId, Incarnation, Seq, SourceId};
    use cairn_proto::limits::{BATCH_KEYS_MAX, BATCH_OPS_MAX};

    use super::*;

    #[test]
    fn the_size_estimate_covers_the_largest_batch_and_stays_below_an_entry() {
        let (max, big) = (u64::MAX, u32::MAX);
        let store = |keys: usize| Op::Store {
            holder: HolderId(big),
            anchor: BlockKey(max),
            anchor_depth: Depth(big),
            skip: big,
            keys: vec![BlockKey(max); keys],
        };
        let remove = Op::Remove {
            holder: HolderId(big),
            key: BlockKey(max),
            depth: Depth(big),
            count: big,
        };
        let mut ops = vec![store(BATCH_KEYS_MAX - 1), store(1)];
        ops.resize(BATCH_OPS_MAX, remove);
        let batch = Batch {
            source: SourceId(big),
            incarnation: Incarnation(max),
            seq: Seq(max),
            ops,
        };
        let estimate = size_of(&batch);
        let real = codec::encode_command(&Command::Batches(vec![batch])).len();
        assert!(real <= estimate + 16, "{real} bytes against an estimate of {estimate}");
        assert!(estimate.max(ENTRY_BYTES_MAX) + 256 < cairn_raft_store::VALUE_BYTES_MAX);
    }
}
