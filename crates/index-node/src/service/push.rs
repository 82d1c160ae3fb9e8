//! A push stream at the leader: batches up, acknowledgements down.

use std::sync::Arc;

use cairn_index::{Batch, BatchOutcome, Incarnation, Seq, SourceId};
use cairn_proto::{BatchAnswer, check_push, v1};
use cairn_telemetry::TraceContext;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::forward::wait_for_change;
use super::{Answers, Service};
use crate::batcher::{Outcome, Submission};
use crate::metrics::Metrics;
use crate::node::Node;

/// Batches of one stream that are on their way or answered and not yet sent.
const ANSWERS_WAITING: usize = 512;
/// Messages ready for the wire.
const REPLIES_WAITING: usize = 16;
/// Acknowledgements of one message.
const ACKS_PER_REPLY: usize = 256;

impl Service {
    /// Serves a push stream here; it ends with UNAVAILABLE when this node no longer leads.
    pub(super) fn push_here(&self, requests: Streaming<v1::PushRequest>) -> Answers<v1::PushReply> {
        let (replies, stream) = mpsc::channel(REPLIES_WAITING);
        let (answers, answered) = mpsc::channel(ANSWERS_WAITING);
        let node = self.node.clone();
        let ended = wait_for_change(node.leadership.clone(), node.leader_now(), node.stopping.clone());
        let reading = read(node.clone(), requests, answers);
        tokio::spawn(async move {
            let writing = write(node, answered, replies.clone());
            tokio::pin!(reading, writing);
            let status = tokio::select! {
                status = ended => Some(status),
                // The client is done: what is on its way is still answered.
                status = &mut reading => match status {
                    Ok(()) => {
                        writing.await;
                        None
                    }
                    Err(status) => Some(status),
                },
                () = &mut writing => None,
            };
            if let Some(status) = status {
                let _ = replies.send(Err(status)).await;
            }
        });
        Box::pin(ReceiverStream::new(stream))
    }
}

async fn read(
    node: Arc<Node>,
    mut requests: Streaming<v1::PushRequest>,
    answers: mpsc::Sender<Outcome>,
) -> Result<(), Status> {
    while let Some(message) = requests.message().await? {
        if let Err(error) = check_push(&message) {
            Metrics::count(&node.metrics.refused, "push_invalid");
            return Err(error.into());
        }
        let applied = node.feed.applied();
        for answer in renew(&node, &message.renew) {
            if answers.send(Outcome::Answered(answer, applied)).await.is_err() {
                return Ok(());
            }
        }
        for mut message in message.batches {
            let trace = TraceContext::parse(&std::mem::take(&mut message.traceparent)).filter(|trace| trace.sampled);
            let batch = Batch::try_from(message).inspect_err(|_| {
                Metrics::count(&node.metrics.refused, "batch_invalid");
            })?;
            let Ok(answer) = answers.clone().reserve_owned().await else {
                return Ok(());
            };
            let submission = Submission { batch, trace, answer };
            node.batcher
                .submit(submission)
                .await
                .map_err(|error| node.not_committed(&error))?;
        }
    }
    Ok(())
}

/// A batch of the present lifetime is as good as a renewal; one of an earlier lifetime is nobody's.
fn heard(node: &Node, answer: &BatchAnswer) {
    match &answer.outcome {
        BatchOutcome::Applied { .. } | BatchOutcome::Duplicate | BatchOutcome::OutOfOrder { .. } => {
            node.leases.touch(answer.source, answer.incarnation);
        }
        BatchOutcome::Fenced { .. } | BatchOutcome::UnknownSource => {}
    }
}

/// Renews leases; those that name no present lifetime are answered, so that their agents stop.
fn renew(node: &Node, leases: &[v1::Lease]) -> Vec<BatchAnswer> {
    if leases.is_empty() {
        return Vec::new();
    }
    let current: Vec<Option<Incarnation>> = node.consensus.read(|state| {
        let sources = &state.registry().sources;
        leases
            .iter()
            .map(|lease| sources.get(&SourceId(lease.source)).map(|source| source.incarnation))
            .collect()
    });
    let mut refused = Vec::new();
    for (lease, current) in leases.iter().zip(current) {
        let (source, incarnation) = (SourceId(lease.source), Incarnation(lease.incarnation));
        let outcome = match current {
            Some(current) if current == incarnation => {
                node.leases.touch(source, incarnation);
                continue;
            }
            Some(current) => BatchOutcome::Fenced { current },
            None => BatchOutcome::UnknownSource,
        };
        refused.push(BatchAnswer {
            source,
            incarnation,
            seq: Seq(0),
            outcome,
        });
    }
    refused
}

async fn write(
    node: Arc<Node>,
    mut answered: mpsc::Receiver<Outcome>,
    replies: mpsc::Sender<Result<v1::PushReply, Status>>,
) {
    let mut group = Vec::with_capacity(ACKS_PER_REPLY);
    while answered.recv_many(&mut group, ACKS_PER_REPLY).await > 0 {
        let mut reply = v1::PushReply::default();
        let mut failed = None;
        for outcome in group.drain(..) {
            match outcome {
                Outcome::Answered(answer, index) => {
                    heard(&node, &answer);
                    reply.applied_index = reply.applied_index.max(index);
                    reply.acks.push(answer.into());
                }
                Outcome::Failed(error) => {
                    failed = Some(node.not_committed(&error));
                    break;
                }
            }
        }
        if !reply.acks.is_empty() && replies.send(Ok(reply)).await.is_err() {
            return;
        }
        if let Some(status) = failed {
            let _ = replies.send(Err(status)).await;
            return;
        }
    }
}
