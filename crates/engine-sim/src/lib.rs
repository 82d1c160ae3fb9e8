//! A vLLM-compatible simulated engine over the replay engine model.
//!
//! One process is one engine: OpenAI endpoints, load and cache metrics, KV events over ZMQ in the shape of any engine
//! version, prefill/decode transfers, and switches that make it fail on purpose. Cache and timing are those of
//! [`cairn_replay::engine_model`], run in real time.

#![cfg_attr(test, allow(clippy::unwrap_used, missing_docs))]

mod answer;
mod api;
mod config;
mod engine;
pub mod events;
mod histogram;
mod http;
mod rank;
mod running;
mod server;
mod transfer;

pub use config::{
    ADAPTERS_MAX, AdapterConfig, AnswersConfig, CacheConfig, Config, ConfigError, EventsConfig, Profile, RANKS_MAX,
    SchedulerConfig, TimingConfig, TransferConfig,
};
pub use running::{EventEndpoints, Running, StartError, start};
