//! Keeps one push stream open, moves batches up and acknowledgements down, and renews leases on it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cairn_blocks::BlockKey;
use cairn_index::{Incarnation, SourceId};
use cairn_proto::{BatchAnswer, check_reused, limits, v1};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::{Answer, CALL_TIMEOUT, Outgoing, Shared, StreamState};
use crate::clock::Backoff;
use crate::nodes::Chosen;

/// Messages between this task and the transport: little, so that back-pressure reaches the sources.
const QUEUE_PUSHES: usize = 8;
/// Batches of one message: some hundred KiB at most, so that no message holds up leases.
const BATCHES_PER_PUSH: usize = 32;
/// Until the index says how long a lease is.
const LEASE_DEFAULT: Duration = Duration::from_secs(3);
/// Renewals within one lease: two may be lost.
const RENEWALS_PER_LEASE: u32 = 4;
const RECONNECT_FIRST: Duration = Duration::from_millis(50);
const RECONNECT_LAST: Duration = Duration::from_secs(2);

pub(super) async fn run(shared: Arc<Shared>, mut queue: mpsc::Receiver<Outgoing>, told: watch::Sender<StreamState>) {
    let mut backoff = Backoff::new(RECONNECT_FIRST, RECONNECT_LAST);
    loop {
        let chosen = shared.nodes.current();
        let (pushes, feed) = mpsc::channel(QUEUE_PUSHES);
        // The first message makes the node answer, and renews leases that the break may have endangered.
        let _ = pushes.try_send(v1::PushRequest {
            batches: Vec::new(),
            renew: renewals(&shared),
        });
        let opening = timeout(CALL_TIMEOUT, async {
            chosen.ingest().push(ReceiverStream::new(feed)).await
        })
        .await;
        let status = match opening {
            Ok(Ok(replies)) => {
                backoff.reset();
                shared.metrics.index_connected.set(1);
                tracing::info!(node = %chosen.address, "connected to the index");
                told.send_modify(|state| {
                    *state = StreamState {
                        number: state.number + 1,
                        up: true,
                    }
                });
                let number = told.borrow().number;
                let status = talk(&shared, &mut queue, number, &pushes, replies.into_inner()).await;
                told.send_modify(|state| state.up = false);
                shared.metrics.index_connected.set(0);
                shared.metrics.index_losses.inc();
                status
            }
            Ok(Err(status)) => status,
            Err(_) => Status::deadline_exceeded("no answer in time"),
        };
        lost(&shared, &chosen, &status);
        tokio::time::sleep(backoff.delay()).await;
    }
}

fn lost(shared: &Shared, chosen: &Chosen, status: &Status) {
    tracing::debug!(node = %chosen.address, code = ?status.code(), message = status.message(), "the index stream broke");
    shared.nodes.failed(chosen, status);
}

/// Until the stream breaks; the status says why.
async fn talk(
    shared: &Shared,
    queue: &mut mpsc::Receiver<Outgoing>,
    number: u64,
    pushes: &mpsc::Sender<v1::PushRequest>,
    mut replies: Streaming<v1::PushReply>,
) -> Status {
    let mut waiting: VecDeque<v1::Batch> = VecDeque::with_capacity(BATCHES_PER_PUSH);
    let mut lease = lease(shared);
    let mut renew = renewal_ticks(lease);
    loop {
        tokio::select! {
            reply = replies.message() => match reply {
                Ok(Some(reply)) => if let Err(status) = take_reply(shared, reply) { return status },
                Ok(None) => return Status::unavailable("the node ended the stream"),
                Err(status) => return status,
            },
            permit = pushes.reserve(), if !waiting.is_empty() => match permit {
                Ok(permit) => permit.send(v1::PushRequest { batches: waiting.drain(..).collect(), renew: Vec::new() }),
                Err(_) => return Status::unavailable("the stream was closed"),
            },
            outgoing = queue.recv(), if waiting.len() < BATCHES_PER_PUSH => {
                let Some(outgoing) = outgoing else { return Status::cancelled("the agent stops") };
                keep(&mut waiting, number, outgoing);
                while waiting.len() < BATCHES_PER_PUSH {
                    let Ok(outgoing) = queue.try_recv() else { break };
                    keep(&mut waiting, number, outgoing);
                }
            },
            _ = renew.tick() => {
                // A full queue means that messages are under way, and each of them renews nothing: try again soon.
                let _ = pushes.try_send(v1::PushRequest { batches: Vec::new(), renew: renewals(shared) });
                let current = self::lease(shared);
                if current != lease {
                    lease = current;
                    renew = renewal_ticks(lease);
                }
            },
        }
    }
}

/// Ticks often enough to renew leases of this length; the first comes after a full pause.
fn renewal_ticks(lease: Duration) -> tokio::time::Interval {
    let pause = lease / RENEWALS_PER_LEASE;
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + pause, pause);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ticks
}

fn keep(waiting: &mut VecDeque<v1::Batch>, number: u64, outgoing: Outgoing) {
    if outgoing.stream == number {
        let mut batch = v1::Batch::from(outgoing.batch);
        batch.traceparent = outgoing.traceparent;
        waiting.push_back(batch);
    }
}

fn take_reply(shared: &Shared, reply: v1::PushReply) -> Result<(), Status> {
    for ack in reply.acks {
        let answer = match BatchAnswer::try_from(ack) {
            Ok(answer) => answer,
            Err(error) => {
                shared.metrics.index_stray.inc();
                tracing::debug!(%error, "an acknowledgement that can't be read");
                continue;
            }
        };
        let BatchAnswer {
            source,
            incarnation,
            seq,
            outcome,
        } = answer;
        if !shared.hand_over(
            source,
            incarnation,
            Answer::Ack {
                incarnation,
                seq,
                outcome,
            },
        ) {
            // Without its acknowledgements the source would wait for ever; a new stream begins afresh.
            return Err(Status::resource_exhausted(
                "a source does not keep up with its acknowledgements",
            ));
        }
    }
    for reused in reply.reused {
        if check_reused(&reused).is_err() {
            shared.metrics.index_stray.inc();
            continue;
        }
        let answer = Answer::Reused {
            keys: reused.keys.into_iter().map(BlockKey).collect(),
            tokens: reused.tokens,
        };
        // A source that is busy misses one; its suspects go with the next turnover anyway.
        shared.hand_over(SourceId(reused.source), Incarnation(reused.incarnation), answer);
    }
    Ok(())
}

fn renewals(shared: &Shared) -> Vec<v1::Lease> {
    let mut leases = shared.leases();
    leases.truncate(limits::PUSH_RENEWALS_MAX);
    leases
}

fn lease(shared: &Shared) -> Duration {
    match shared.lease_ms.load(Ordering::Relaxed) {
        0 => LEASE_DEFAULT,
        ms => Duration::from_millis(u64::from(ms).max(100)),
    }
}
