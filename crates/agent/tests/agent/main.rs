//! The agent as a process part, between fake engines on real sockets and the real index state machine.

#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

mod engines;
mod fake_engine;
mod fake_index;
mod hostile;
mod index;
mod real;
mod restarts;
mod security;
mod stream;
mod traces;

use std::path::Path;
use std::time::Duration;

use cairn_agent::{Config, EngineConfig, Running};

use fake_engine::FakeEngine;
use fake_index::FakeIndex;

/// Longest wait for anything that must come; a busy machine needs some of it.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `done`, looking often.
pub async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !done() {
        assert!(
            tokio::time::Instant::now() < deadline,
            "waited {PATIENCE:?} in vain for: {what}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub fn config(index: &FakeIndex, engines: Vec<EngineConfig>, dir: &Path) -> Config {
    let mut config = Config {
        data_dir: dir.to_owned(),
        index: vec![index.url()],
        engines,
        ..Config::default()
    };
    config.agent.host = "test-host".into();
    config.poll.load_ms = 50;
    config.poll.discovery_ms = 300;
    config.poll.audit_ms = 200;
    config.poll.checkpoint_ms = 100;
    config
}

pub async fn agent(index: &FakeIndex, engine: &FakeEngine, dir: &Path) -> Running {
    let running = cairn_agent::start(config(index, vec![EngineConfig::at(&engine.url())], dir))
        .await
        .unwrap();
    until("the agent to be ready", || {
        running.ready().is_ok() && !running.sources().is_empty()
    })
    .await;
    running
}

/// `n` blocks of tokens that no other `salt` shares.
pub fn tokens(salt: u32, blocks: u32) -> Vec<u32> {
    (0..blocks * 16).map(|i| salt * 1_000_003 + i).collect()
}

/// Engine hashes for `n` blocks.
pub fn hashes(salt: u64, blocks: u64) -> Vec<u64> {
    (0..blocks).map(|i| (salt << 32) + i + 1).collect()
}

pub fn gpu(index: &FakeIndex, source: &str) -> u64 {
    index.world.lock().blocks(source).first().copied().unwrap_or(0)
}

pub fn exact(index: &FakeIndex, source: &str) -> bool {
    index.world.lock().claim(source) == Some(cairn_index::Confidence::Exact)
}
