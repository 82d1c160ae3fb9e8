//! Answers: registrations and batch acknowledgements.

use cairn_blocks::ClusterSeed;
use cairn_index::{BatchOutcome, HolderId, Incarnation, RegisterOutcome, Seq, SourceId, WorkerId};

use super::{WireError, count, limits};
use crate::v1;

/// A registration's answer with what the node adds to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegisterAnswer {
    /// How it ended.
    pub outcome: RegisterOutcome,
    /// Seed of the cluster's block keys.
    pub seed: ClusterSeed,
    /// How long the agent may stay silent, in milliseconds.
    pub lease_ms: u32,
}

impl From<RegisterAnswer> for v1::RegisterReply {
    fn from(answer: RegisterAnswer) -> Self {
        use v1::register_reply::Outcome;
        Self {
            outcome: Some(match answer.outcome {
                RegisterOutcome::Registered {
                    source,
                    incarnation,
                    worker,
                    holders,
                    seq,
                    resumed,
                } => Outcome::Registered(v1::Registered {
                    source: source.0,
                    incarnation: incarnation.0,
                    worker: worker.0,
                    holders: holders.into_iter().map(|holder| holder.0).collect(),
                    seq: seq.0,
                    resumed,
                    cluster_seed: answer.seed.0,
                    lease_ms: answer.lease_ms,
                }),
                RegisterOutcome::HeldBy { agent } => Outcome::HeldBy(agent),
                RegisterOutcome::Invalid { reason } => Outcome::Invalid(reason),
            }),
        }
    }
}

impl TryFrom<v1::RegisterReply> for RegisterAnswer {
    type Error = WireError;

    /// `seed` and `lease_ms` are 0 where the registration was refused.
    fn try_from(reply: v1::RegisterReply) -> Result<Self, WireError> {
        use v1::register_reply::Outcome;
        let refused = |outcome| RegisterAnswer {
            outcome,
            seed: ClusterSeed(0),
            lease_ms: 0,
        };
        match reply.outcome.ok_or(WireError::Missing { field: "outcome" })? {
            Outcome::Registered(message) => {
                count("registered.holders", message.holders.len(), limits::HOLDERS_MAX)?;
                Ok(RegisterAnswer {
                    outcome: RegisterOutcome::Registered {
                        source: SourceId(message.source),
                        incarnation: Incarnation(message.incarnation),
                        worker: WorkerId(message.worker),
                        holders: message.holders.into_iter().map(HolderId).collect(),
                        seq: Seq(message.seq),
                        resumed: message.resumed,
                    },
                    seed: ClusterSeed(message.cluster_seed),
                    lease_ms: message.lease_ms,
                })
            }
            Outcome::HeldBy(agent) => Ok(refused(RegisterOutcome::HeldBy { agent })),
            Outcome::Invalid(reason) => Ok(refused(RegisterOutcome::Invalid { reason })),
        }
    }
}

/// One batch's answer with the name of the batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BatchAnswer {
    /// Whose batch.
    pub source: SourceId,
    /// Of which lifetime.
    pub incarnation: Incarnation,
    /// Which one.
    pub seq: Seq,
    /// How it ended.
    pub outcome: BatchOutcome,
}

impl From<BatchAnswer> for v1::BatchAck {
    fn from(answer: BatchAnswer) -> Self {
        use v1::batch_ack::Outcome;
        Self {
            source: answer.source.0,
            incarnation: answer.incarnation.0,
            seq: answer.seq.0,
            outcome: Some(match answer.outcome {
                BatchOutcome::Applied { unknown_anchors } => Outcome::Applied(v1::Applied { unknown_anchors }),
                BatchOutcome::Duplicate => Outcome::Duplicate(true),
                BatchOutcome::OutOfOrder { expected } => Outcome::ExpectedSeq(expected.0),
                BatchOutcome::Fenced { current } => Outcome::FencedBy(current.0),
                BatchOutcome::UnknownSource => Outcome::UnknownSource(true),
            }),
        }
    }
}

impl TryFrom<v1::BatchAck> for BatchAnswer {
    type Error = WireError;

    fn try_from(ack: v1::BatchAck) -> Result<Self, WireError> {
        use v1::batch_ack::Outcome;
        Ok(Self {
            source: SourceId(ack.source),
            incarnation: Incarnation(ack.incarnation),
            seq: Seq(ack.seq),
            outcome: match ack.outcome.ok_or(WireError::Missing { field: "ack.outcome" })? {
                Outcome::Applied(applied) => {
                    let anchors = applied.unknown_anchors;
                    count("ack.unknown_anchors", anchors.len(), limits::BATCH_OPS_MAX)?;
                    BatchOutcome::Applied {
                        unknown_anchors: anchors,
                    }
                }
                Outcome::Duplicate(_) => BatchOutcome::Duplicate,
                Outcome::ExpectedSeq(expected) => BatchOutcome::OutOfOrder {
                    expected: Seq(expected),
                },
                Outcome::FencedBy(current) => BatchOutcome::Fenced {
                    current: Incarnation(current),
                },
                Outcome::UnknownSource(_) => BatchOutcome::UnknownSource,
            },
        })
    }
}
