//! The index: who holds which block, as a deterministic state machine with its own stored-bytes codec.
//!
//! [`IndexState`] is applied command by command in log order, by index nodes after a Raft commit and by every follower
//! of the feed; equal applied index means equal digest (INV-01). It reads no clock, draws no random number and iterates
//! nothing in hash order.

pub mod codec;
mod command;
mod digest;
mod hint;
mod ids;
mod op;
pub mod oracle;
mod overlap;
mod register;
mod registry;
mod residency;
mod state;

pub use command::{BatchOutcome, Command, RegisterOutcome, Reply};
pub use digest::{HolderDigest, mix, mix_sum};
pub use hint::prefetch;
pub use ids::{ByWorker, HolderId, Incarnation, LogIndex, Seq, SourceId, WorkerId};
pub use op::{Batch, Confidence, DegradedReason, Op};
pub use overlap::{Overlap, Query, WorkerOverlap};
pub use registry::{
    Holder, HolderSpec, LeaseState, Pool, PoolSpec, Reach, Registry, Role, Source, SourceSpec, Tier, Worker, WorkerSpec,
};
pub use residency::{DEPTH_MAX, READ_AHEAD, Removed, Residency, Stored, WEIGHT_MAX};
pub use state::{Counters, IndexState, SourceAudit, StateDigest};
