//! Agent: follows the local engines' KV events and load and reports them to the index.
//!
//! One task per engine discovers what it is and polls its load; one task per engine rank feeds that rank's events to
//! the ingest core and carries out what it decides; one task keeps the stream to the index. All queues between them
//! are bounded.

#![cfg_attr(test, allow(clippy::unwrap_used, missing_docs))]

mod checkpoint;
mod clock;
mod config;
mod discovery;
mod engine;
mod engine_http;
mod events;
mod identity;
mod metrics;
mod nodes;
mod page;
mod prometheus_text;
mod running;
mod soft;
mod source;
mod status;
mod uplink;
pub mod wire;
pub mod zmtp;

pub use config::{
    Config, ConfigError, EngineConfig, EventsAt, EventsConfig, Identity, KindConfig, Limits, Ops, Poll, RoleConfig,
};
pub use running::{Running, StartError, start};
pub use status::{EngineStatus, SourceStatus};
