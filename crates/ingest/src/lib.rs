//! Ingest: turns one engine's ordered KV events into gap-free, coalesced batches for the index.
//!
//! A [`Source`] follows one stream: its session puts messages in order and notices gaps and restarts, its mirror
//! turns engine hashes into block keys and counts copies, its outbox coalesces what changed into bounded batches.
//! Nothing here does I/O or reads a clock: a shell feeds [`Source`] with messages and the time, carries out its
//! [`Effect`]s and sends its batches.

mod checkpoint;
mod event;
mod fixed_hash;
mod mirror;
mod outbox;
mod refusal;
mod session;
mod source;
mod time;

pub use checkpoint::CheckpointError;
pub use event::{BlockExtra, EngineEvent, EngineHash, EventBatch, ExtraValue, Medium, Removed, SpecKind, Stored};
pub use refusal::{RefusalCounts, RefusalReason};
pub use source::{AuditOutcome, Effect, HolderAudit, Registration, ReplayEnd, Source, SourceConfig, SourceStats};
pub use time::Millis;
