//! Router: turns requests into block keys, chooses a worker and proxies the stream.
//!
//! A request walks through the rooms in this order, each asked once: `walk` reads parse -> tokenize -> chain
//! -> overlap -> choose -> reserve -> forward -> observe. Everything that decides lives in `cairn-routing` and
//! `cairn-index`; this crate has the sockets, the clock and the tasks.

#![cfg_attr(test, allow(clippy::unwrap_used, missing_docs))]

mod alarms;
mod ask;
mod ask_engine;
mod bell;
pub mod bench;
mod body;
mod config;
mod decide;
mod decisions;
mod door;
mod engines;
mod error;
mod fleet;
mod forward;
mod headers;
mod lanes;
mod metrics;
mod models;
mod observe;
mod operator;
mod registry;
mod relay;
mod reply;
mod samples;
mod soft;
mod split;
mod sse;
mod start;
mod state;
mod tenants;
mod tokenize;
mod upstream;
mod view;
mod walk;
mod why;

pub use config::{Config, ConfigError, EngineConfig, PoolConfig, TenantConfig};
pub use start::{Running, StartError, start};
