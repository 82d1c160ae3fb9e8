//! A push stream at the leader: batches up, acknowledgements down.

use std::collections::BTreeSet;
use std::sync::Arc;

use cairn_index::{Batch, BatchOutcome, Incarnation, Seq, SourceId, WorkerId};
use cairn_proto::{BatchAnswer, check_push, v1};
use cairn_telemetry::TraceContext;
use parking_lot::Mutex;
use tokio::sync::broadcast::error::RecvError;
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

/// Sources whose leases a stream renews; what engines reused goes to the agent that speaks for them.
type SpokenFor = Arc<Mutex<BTreeSet<SourceId>>>;

impl Service {
    /// Serves a push stream here; it ends with UNAVAILABLE when this node no longer leads.
    pub(super) fn push_here(&self, requests: Streaming<v1::PushRequest>) -> Answers<v1::PushReply> {
        let (replies, stream) = mpsc::channel(REPLIES_WAITING);
        let (answers, answered) = mpsc::channel(ANSWERS_WAITING);
        let node = self.node.clone();
        let ended = wait_for_change(node.leadership.clone(), node.leader_now(), node.stopping.clone());
        let spoken_for = SpokenFor::default();
        let reading = read(node.clone(), requests, answers, Arc::clone(&spoken_for));
        tokio::spawn(async move {
            let writing = write(node, answered, replies.clone(), spoken_for);
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
    spoken_for: SpokenFor,
) -> Result<(), Status> {
    while let Some(message) = requests.message().await? {
        if let Err(error) = check_push(&message) {
            Metrics::count(&node.metrics.refused, "push_invalid");
            return Err(error.into());
        }
        if !message.renew.is_empty() {
            *spoken_for.lock() = message.renew.iter().map(|lease| SourceId(lease.source)).collect();
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

/// The report as the agent of its source needs it, where this stream is that agent's.
fn addressed(node: &Node, spoken_for: &SpokenFor, report: &v1::Reused) -> Option<v1::Reused> {
    let (source, incarnation) = node.consensus.read(|state| {
        let registry = state.registry();
        let source = registry.workers.get(&WorkerId(report.worker))?.source;
        Some((source, registry.sources.get(&source)?.incarnation))
    })?;
    spoken_for.lock().contains(&source).then(|| v1::Reused {
        source: source.0,
        incarnation: incarnation.0,
        ..report.clone()
    })
}

async fn write(
    node: Arc<Node>,
    mut answered: mpsc::Receiver<Outcome>,
    replies: mpsc::Sender<Result<v1::PushReply, Status>>,
    spoken_for: SpokenFor,
) {
    let mut group = Vec::with_capacity(ACKS_PER_REPLY);
    let mut reports = node.soft.reused();
    loop {
        tokio::select! {
            count = answered.recv_many(&mut group, ACKS_PER_REPLY) => if count == 0 { return },
            report = reports.recv() => {
                let told = match report {
                    Ok(report) => addressed(&node, &spoken_for, &report),
                    // Missed reports cost an agent nothing but time: what is suspect goes with the next turnover.
                    Err(RecvError::Lagged(_) | RecvError::Closed) => None,
                };
                if let Some(report) = told {
                    let reply = v1::PushReply { reused: vec![report], ..v1::PushReply::default() };
                    // An agent that doesn't keep up with its acknowledgements has no use for more.
                    if replies.try_send(Ok(reply)).is_err() {
                        Metrics::count(&node.metrics.soft_frames, "reused_full");
                    }
                }
                continue;
            }
        }
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
