//! The one stream to the index that carries every source's batches, leases and acknowledgements.

mod stream;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cairn_blocks::BlockKey;
use cairn_index::{Batch, BatchOutcome, Incarnation, Seq, SourceId, SourceSpec};
use cairn_ingest::HolderAudit;
use cairn_proto::{RegisterAnswer, limits, v1};
use dashmap::DashMap;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;

use crate::metrics::Metrics;
use crate::nodes::IndexNodes;

/// A unary call that takes longer is tried at another node: an election is over by then.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);
/// Batches between the sources and the stream; each is at most 256 KiB.
const QUEUE_BATCHES: usize = 256;
/// Answers that wait for one source; its window of unacknowledged batches is smaller.
const QUEUE_ANSWERS: usize = 4096;

/// One batch on its way, with the stream it was made for.
pub struct Outgoing {
    /// The stream's number; a batch made for an earlier stream is left out, since its source sends it again.
    pub stream: u64,
    /// The batch.
    pub batch: Batch,
    /// `traceparent` of its span, empty where it isn't sampled.
    pub traceparent: String,
}

/// What the index says to one source.
#[derive(Debug)]
pub enum Answer {
    /// A batch's outcome.
    Ack {
        /// In which lifetime.
        incarnation: Incarnation,
        /// Which batch.
        seq: Seq,
        /// How it ended.
        outcome: BatchOutcome,
    },
    /// What its engine reused of one prompt, as a router heard it.
    Reused {
        /// The prompt's block keys from its start.
        keys: Vec<BlockKey>,
        /// How many tokens were reused.
        tokens: u32,
    },
    /// What the index holds of it.
    Audit {
        /// In which lifetime.
        incarnation: Incarnation,
        /// After which batch.
        seq: Seq,
        /// By holder.
        holders: Vec<HolderAudit>,
    },
}

/// Whether the stream is up; the number counts streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StreamState {
    /// Number of the present or last stream; 0 before the first.
    pub number: u64,
    /// Whether it is up.
    pub up: bool,
}

struct Speaker {
    incarnation: Incarnation,
    answers: mpsc::Sender<Answer>,
}

struct Shared {
    nodes: Arc<IndexNodes>,
    metrics: Metrics,
    speakers: DashMap<SourceId, Speaker>,
    lease_ms: std::sync::atomic::AtomicU32,
}

/// The agent's way to the index; cheap to clone.
#[derive(Clone)]
pub struct Uplink {
    shared: Arc<Shared>,
    outgoing: mpsc::Sender<Outgoing>,
    state: watch::Receiver<StreamState>,
    _tasks: Arc<[AbortOnDropHandle<()>; 2]>,
}

/// A registration that didn't come to an answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The node failed or didn't answer.
    #[error("index node {address}: {status}")]
    Node {
        /// Which one.
        address: String,
        /// Its status.
        status: Box<Status>,
    },
    /// Its answer can't be read.
    #[error("index node {address}: {source}")]
    Answer {
        /// Which one.
        address: String,
        /// What is wrong with the answer.
        source: cairn_proto::WireError,
    },
}

impl Uplink {
    /// Starts to talk to the index.
    #[must_use]
    pub fn start(nodes: Arc<IndexNodes>, metrics: Metrics, audit_every: Duration) -> Self {
        let shared = Arc::new(Shared {
            nodes,
            metrics,
            speakers: DashMap::new(),
            lease_ms: std::sync::atomic::AtomicU32::new(0),
        });
        let (outgoing, queue) = mpsc::channel(QUEUE_BATCHES);
        let (told, state) = watch::channel(StreamState::default());
        let tasks = Arc::new([
            AbortOnDropHandle::new(tokio::spawn(stream::run(shared.clone(), queue, told))),
            AbortOnDropHandle::new(tokio::spawn(audit(shared.clone(), audit_every))),
        ]);
        Self {
            shared,
            outgoing,
            state,
            _tasks: tasks,
        }
    }

    /// Whether the stream is up, and its changes.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<StreamState> {
        self.state.clone()
    }

    /// Where batches go.
    #[must_use]
    pub fn outgoing(&self) -> &mpsc::Sender<Outgoing> {
        &self.outgoing
    }

    /// Address of the node in use.
    #[must_use]
    pub fn node(&self) -> String {
        self.shared.nodes.current().address
    }

    /// Begins or resumes a lifetime.
    ///
    /// # Errors
    /// When the node in use doesn't answer; the next call goes to another one.
    pub async fn register(&self, spec: SourceSpec, resume: Option<Incarnation>) -> Result<RegisterAnswer, CallError> {
        let request = v1::RegisterRequest::from((spec, resume));
        let chosen = self.shared.nodes.current();
        let reply = match timeout(CALL_TIMEOUT, chosen.ingest().register(request)).await {
            Ok(Ok(reply)) => reply.into_inner(),
            failed => {
                let status = failed.map_or_else(
                    |_| Status::deadline_exceeded("no answer in time"),
                    |r| match r {
                        Ok(_) => Status::internal("unreachable"),
                        Err(status) => status,
                    },
                );
                self.shared.nodes.failed(&chosen, &status);
                return Err(CallError::Node {
                    address: chosen.address,
                    status: Box::new(status),
                });
            }
        };
        let answer = RegisterAnswer::try_from(reply).map_err(|source| CallError::Answer {
            address: chosen.address,
            source,
        })?;
        if answer.lease_ms > 0 {
            self.shared
                .lease_ms
                .store(answer.lease_ms, std::sync::atomic::Ordering::Relaxed);
        }
        Ok(answer)
    }

    /// Renews the lease of a source and takes in its answers, until the place is dropped.
    #[must_use]
    pub fn speak_for(&self, source: SourceId, incarnation: Incarnation) -> (Place, mpsc::Receiver<Answer>) {
        let (answers, receiver) = mpsc::channel(QUEUE_ANSWERS);
        self.shared.speakers.insert(source, Speaker { incarnation, answers });
        (
            Place {
                shared: self.shared.clone(),
                source,
                incarnation,
            },
            receiver,
        )
    }

    /// Says that a source is gone for good.
    ///
    /// # Errors
    /// When the node in use doesn't answer.
    pub async fn remove(&self, source: SourceId, incarnation: Incarnation) -> Result<(), CallError> {
        let chosen = self.shared.nodes.current();
        let request = v1::RemoveRequest {
            source: source.0,
            incarnation: incarnation.0,
        };
        let called = timeout(CALL_TIMEOUT, chosen.ingest().remove(request)).await;
        let status = match called {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(status)) => status,
            Err(_) => Status::deadline_exceeded("no answer in time"),
        };
        self.shared.nodes.failed(&chosen, &status);
        Err(CallError::Node {
            address: chosen.address,
            status: Box::new(status),
        })
    }
}

/// A source's place on the stream.
pub struct Place {
    shared: Arc<Shared>,
    source: SourceId,
    incarnation: Incarnation,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared
            .speakers
            .remove_if(&self.source, |_, speaker| speaker.incarnation == self.incarnation);
    }
}

impl Shared {
    fn leases(&self) -> Vec<v1::Lease> {
        let leases = self.speakers.iter();
        leases
            .map(|s| v1::Lease {
                source: s.key().0,
                incarnation: s.value().incarnation.0,
            })
            .collect()
    }

    /// Hands an answer to its source; `false` where the source doesn't keep up.
    fn hand_over(&self, source: SourceId, incarnation: Incarnation, answer: Answer) -> bool {
        let Some(speaker) = self.speakers.get(&source).filter(|s| s.incarnation == incarnation) else {
            self.metrics.index_stray.inc();
            return true;
        };
        !matches!(
            speaker.answers.try_send(answer),
            Err(mpsc::error::TrySendError::Full(_))
        )
    }
}

/// Asks what the index holds, every so often, for all sources at once.
async fn audit(shared: Arc<Shared>, every: Duration) {
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let leases = shared.leases();
        for part in leases.chunks(limits::AUDIT_SOURCES_MAX) {
            let chosen = shared.nodes.current();
            let request = v1::AuditRequest { sources: part.to_vec() };
            // A node that doesn't answer is found by the stream, too.
            let Ok(Ok(reply)) = timeout(CALL_TIMEOUT, chosen.ingest().audit(request)).await else {
                continue;
            };
            for found in reply.into_inner().sources {
                hand_over_audit(&shared, found);
            }
        }
    }
}

fn hand_over_audit(shared: &Shared, found: v1::SourceAudit) {
    if !found.found || found.holders.len() > limits::HOLDERS_MAX {
        return;
    }
    // By id, in case a node lists one twice.
    let holders: BTreeMap<u32, HolderAudit> = found
        .holders
        .into_iter()
        .map(|h| {
            let holder = cairn_index::HolderId(h.holder);
            (
                h.holder,
                HolderAudit {
                    holder,
                    blocks: h.blocks,
                    digest: h.digest,
                },
            )
        })
        .collect();
    let incarnation = Incarnation(found.incarnation);
    let answer = Answer::Audit {
        incarnation,
        seq: Seq(found.seq),
        holders: holders.into_values().collect(),
    };
    shared.hand_over(SourceId(found.source), incarnation, answer);
}
