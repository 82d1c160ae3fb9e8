//! Ids of this room, and how the index's ids are written in records.

use serde::{Deserialize, Serialize};

/// Name of a router process, unique in the cluster.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RouterName(pub String);

/// A worker's position in this router's tables; reused after the worker is gone and all its reservations have ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Slot(pub(crate) u32);

impl Slot {
    pub(crate) fn at(self) -> usize {
        self.0 as usize
    }
}

/// Writes a [`cairn_index::WorkerId`] as its number.
pub(crate) mod worker_id {
    use cairn_index::WorkerId;
    use serde::{Deserialize, Deserializer, Serializer};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
    pub(crate) fn serialize<S: Serializer>(id: &WorkerId, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u32(id.0)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<WorkerId, D::Error> {
        u32::deserialize(from).map(WorkerId)
    }
}

/// Writes an optional [`cairn_index::WorkerId`] as its number or null.
pub(crate) mod maybe_worker_id {
    use cairn_index::WorkerId;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(id: &Option<WorkerId>, to: S) -> Result<S::Ok, S::Error> {
        id.map(|id| id.0).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<WorkerId>, D::Error> {
        Ok(Option::<u32>::deserialize(from)?.map(WorkerId))
    }
}
