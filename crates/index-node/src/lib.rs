//! Index node: replicates the index through Raft and serves ingest, feed, soft state and operators over gRPC.
//!
//! The rooms, in the order a batch walks them: `service::ingest` takes it from an agent (or forwards it to the leader),
//! `batcher` groups it into a log entry, the consensus room commits and applies it, `feed_log` keeps the entry for
//! `service::feed`. `leases` times agents out, `soft` relays loads and reservations beside the log.

mod batcher;
pub mod bench;
mod bootstrap;
mod config;
mod feed_log;
mod feed_snapshot;
mod leadership;
mod leases;
mod metrics;
mod node;
mod peers;
mod running;
mod service;
mod soft;
mod soft_relay;

pub use config::{Config, ConfigError, PeerConfig};
pub use running::{Running, StartError, recover, start, start_on};
