//! Batches of block changes.

use cairn_blocks::{BlockKey, Depth};
use cairn_index::{Batch, Confidence, DegradedReason, HolderId, Incarnation, Op, Seq, SourceId};

use super::{WireError, count, limits, op, unknown_enum};
use crate::v1;

impl From<Confidence> for v1::DegradedReason {
    fn from(confidence: Confidence) -> Self {
        match confidence {
            Confidence::Exact => v1::DegradedReason::None,
            Confidence::Degraded(reason) => reason.into(),
        }
    }
}

impl From<v1::DegradedReason> for Confidence {
    fn from(reason: v1::DegradedReason) -> Self {
        match reason {
            v1::DegradedReason::None => Confidence::Exact,
            v1::DegradedReason::Gap => Confidence::Degraded(DegradedReason::Gap),
            v1::DegradedReason::Replaying => Confidence::Degraded(DegradedReason::Replaying),
            v1::DegradedReason::Hybrid => Confidence::Degraded(DegradedReason::Hybrid),
            v1::DegradedReason::Silent => Confidence::Degraded(DegradedReason::Silent),
            v1::DegradedReason::NoEvents => Confidence::Degraded(DegradedReason::NoEvents),
            v1::DegradedReason::Mismatch => Confidence::Degraded(DegradedReason::Mismatch),
            v1::DegradedReason::LeaseLapsed => Confidence::Degraded(DegradedReason::LeaseLapsed),
            v1::DegradedReason::Bounded => Confidence::Degraded(DegradedReason::Bounded),
        }
    }
}

impl From<Op> for v1::Op {
    fn from(change: Op) -> Self {
        op(match change {
            Op::Store {
                holder,
                anchor,
                anchor_depth,
                skip,
                keys,
            } => v1::op::Op::Store(v1::Store {
                holder: holder.0,
                anchor: anchor.0,
                anchor_depth: anchor_depth.0,
                skip,
                keys: keys.into_iter().map(|key| key.0).collect(),
            }),
            Op::Remove {
                holder,
                key,
                depth,
                count,
            } => v1::op::Op::Remove(v1::Cut {
                holder: holder.0,
                key: key.0,
                depth: depth.0,
                count,
            }),
            Op::Clear { holder } => v1::op::Op::Clear(holder.0),
            Op::Confidence(confidence) => v1::op::Op::Confidence(v1::DegradedReason::from(confidence).into()),
        })
    }
}

fn store(store: v1::Store) -> Result<Op, WireError> {
    let keys = store.keys.len();
    if keys == 0 {
        return Err(WireError::Missing { field: "store.keys" });
    }
    count("store.keys", keys, limits::BATCH_KEYS_MAX)?;
    if store.skip as usize >= keys {
        let reason = format!("{} of {keys} keys are skipped; at least one must be stored", store.skip);
        return Err(WireError::Invalid {
            field: "store.skip",
            reason,
        });
    }
    if store.anchor_depth > limits::DEPTH_MAX - limits::BATCH_KEYS_MAX as u32 {
        let reason = format!(
            "{} is deeper than any chain may be ({})",
            store.anchor_depth,
            limits::DEPTH_MAX
        );
        return Err(WireError::Invalid {
            field: "store.anchor_depth",
            reason,
        });
    }
    Ok(Op::Store {
        holder: HolderId(store.holder),
        anchor: BlockKey(store.anchor),
        anchor_depth: Depth(store.anchor_depth),
        skip: store.skip,
        keys: store.keys.into_iter().map(BlockKey).collect(),
    })
}

fn cut(cut: v1::Cut) -> Result<Op, WireError> {
    if cut.depth > limits::DEPTH_MAX {
        let reason = format!("{} is deeper than any chain may be ({})", cut.depth, limits::DEPTH_MAX);
        return Err(WireError::Invalid {
            field: "remove.depth",
            reason,
        });
    }
    if cut.count == 0 || cut.count > cut.depth {
        let reason = format!(
            "{} blocks at depth {}; from 1 to the depth are allowed",
            cut.count, cut.depth
        );
        return Err(WireError::Invalid {
            field: "remove.count",
            reason,
        });
    }
    Ok(Op::Remove {
        holder: HolderId(cut.holder),
        key: BlockKey(cut.key),
        depth: Depth(cut.depth),
        count: cut.count,
    })
}

impl TryFrom<v1::Op> for Op {
    type Error = WireError;

    fn try_from(change: v1::Op) -> Result<Self, WireError> {
        match change.op.ok_or(WireError::Missing { field: "op" })? {
            v1::op::Op::Store(message) => store(message),
            v1::op::Op::Remove(message) => cut(message),
            v1::op::Op::Clear(holder) => Ok(Op::Clear {
                holder: HolderId(holder),
            }),
            v1::op::Op::Confidence(reason) => {
                let known = v1::DegradedReason::try_from(reason).map_err(|_| unknown_enum("confidence", reason))?;
                Ok(Op::Confidence(known.into()))
            }
        }
    }
}

impl TryFrom<v1::Batch> for Batch {
    type Error = WireError;

    /// Group ids other than 0 are refused here; the trace parent stays with the caller.
    fn try_from(batch: v1::Batch) -> Result<Self, WireError> {
        if batch.group != 0 {
            let reason = format!("group {} doesn't exist; this cluster has group 0 only", batch.group);
            return Err(WireError::Invalid {
                field: "batch.group",
                reason,
            });
        }
        if batch.seq == 0 {
            let reason = "0; the first batch of a lifetime has 1".to_owned();
            return Err(WireError::Invalid {
                field: "batch.seq",
                reason,
            });
        }
        count("batch.ops", batch.ops.len(), limits::BATCH_OPS_MAX)?;
        let keys = batch.ops.iter().map(|change| match &change.op {
            Some(v1::op::Op::Store(store)) => store.keys.len(),
            Some(v1::op::Op::Remove(_) | v1::op::Op::Clear(_) | v1::op::Op::Confidence(_)) | None => 0,
        });
        count("batch.ops.store.keys", keys.sum(), limits::BATCH_KEYS_MAX)?;
        Ok(Batch {
            source: SourceId(batch.source),
            incarnation: Incarnation(batch.incarnation),
            seq: Seq(batch.seq),
            ops: batch.ops.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
        })
    }
}

impl From<Batch> for v1::Batch {
    fn from(batch: Batch) -> Self {
        Self {
            group: 0,
            source: batch.source.0,
            incarnation: batch.incarnation.0,
            seq: batch.seq.0,
            ops: batch.ops.into_iter().map(Into::into).collect(),
            traceparent: String::new(),
        }
    }
}
