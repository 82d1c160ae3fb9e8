//! A router between a client and scripted engines.
#![allow(clippy::unwrap_used, missing_docs)]

mod client;
mod engine;
mod explain;
mod faults;
mod hostile;
mod index;
mod proxy;
mod routing;
mod splits;
mod traces;
#[path = "../../../../tests/watch.rs"]
mod watch;

use cairn_router::{Config, EngineConfig, Running};
use engine::Engine;

/// A configuration over these engines.
pub fn config(engines: &[&Engine]) -> Config {
    Config {
        listen: "127.0.0.1:0".into(),
        check_interval_ms: 100,
        engine: engines
            .iter()
            .map(|engine| EngineConfig {
                url: engine.url(),
                role: "both".into(),
                ranks: 1,
                pool: String::new(),
                allow_link_local: false,
            })
            .collect(),
        ..Config::default()
    }
}

/// A router that knows all of its engines.
pub async fn router(config: Config) -> Running {
    let running = cairn_router::start(config).await.unwrap();
    let deadline = tokio::time::Instant::now() + client::BOUND;
    loop {
        if client::send(running.addr, client::get("/ready")).await.status == 200 {
            return running;
        }
        assert!(tokio::time::Instant::now() < deadline, "the router didn't become ready");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}
