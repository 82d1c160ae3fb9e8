//! Replay: engine model and traces in virtual time.
#![cfg_attr(test, allow(clippy::unwrap_used, missing_docs))]

pub mod engine_model;
