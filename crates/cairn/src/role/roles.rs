//! The four roles, each as its own crate starts it.

use std::path::PathBuf;
use std::time::Duration;

use cairn_telemetry::TelemetryConfig;
use serde_json::{Value, json};

use super::{Role, RunningRole};

/// `cairn index`.
pub struct IndexRole;

impl Role for IndexRole {
    const NAME: &'static str = "index";
    const THREADS: usize = 0;
    type Config = cairn_index_node::Config;
    type Running = cairn_index_node::Running;

    fn commented_default() -> String {
        cairn_index_node::Config::commented_default()
    }

    fn telemetry(config: &Self::Config) -> &TelemetryConfig {
        &config.telemetry
    }

    fn instance(config: &Self::Config) -> String {
        format!("{}/{}", config.cluster, config.node_id)
    }

    fn set_token(config: &mut Self::Config, file: PathBuf) {
        config.security.cluster_token_file = Some(file);
    }

    async fn start(config: Self::Config) -> anyhow::Result<Self::Running> {
        Ok(cairn_index_node::start(config).await?)
    }
}

impl RunningRole for cairn_index_node::Running {
    fn ready(&self) -> Value {
        json!({"addr": self.address.to_string(), "ops": self.ops_address.map(|a| a.to_string())})
    }

    async fn failed(&mut self) -> anyhow::Error {
        match self.wait().await {
            Ok(()) => anyhow::anyhow!("the index node ended by itself"),
            Err(error) => anyhow::Error::new(error).context("the index node failed"),
        }
    }

    async fn stop(self, _grace: Duration) {
        cairn_index_node::Running::stop(self).await;
    }
}

/// `cairn agent`.
pub struct AgentRole;

impl Role for AgentRole {
    const NAME: &'static str = "agent";
    const THREADS: usize = 2;
    type Config = cairn_agent::Config;
    type Running = cairn_agent::Running;

    fn commented_default() -> String {
        cairn_agent::Config::commented_default()
    }

    fn telemetry(config: &Self::Config) -> &TelemetryConfig {
        &config.telemetry
    }

    fn instance(config: &Self::Config) -> String {
        config.agent.id.clone()
    }

    fn set_token(config: &mut Self::Config, file: PathBuf) {
        config.security.cluster_token_file = Some(file);
    }

    async fn start(config: Self::Config) -> anyhow::Result<Self::Running> {
        Ok(cairn_agent::start(config).await?)
    }
}

impl RunningRole for cairn_agent::Running {
    fn ready(&self) -> Value {
        json!({"agent": self.agent_id, "ops": self.ops.to_string()})
    }

    async fn failed(&mut self) -> anyhow::Error {
        self.wait().await;
        anyhow::anyhow!("all of the agent's engine tasks ended")
    }

    async fn stop(self, _grace: Duration) {
        cairn_agent::Running::stop(self).await;
    }
}

/// `cairn router`.
pub struct RouterRole;

impl Role for RouterRole {
    const NAME: &'static str = "router";
    // Requests run on the router's own lanes; these threads follow the index.
    const THREADS: usize = 2;
    type Config = cairn_router::Config;
    type Running = cairn_router::Running;

    fn commented_default() -> String {
        cairn_router::Config::commented_default()
    }

    fn telemetry(config: &Self::Config) -> &TelemetryConfig {
        &config.telemetry
    }

    fn instance(config: &Self::Config) -> String {
        if config.name.is_empty() {
            config.listen.clone()
        } else {
            config.name.clone()
        }
    }

    fn set_token(config: &mut Self::Config, file: PathBuf) {
        config.security.cluster_token_file = Some(file);
    }

    async fn start(config: Self::Config) -> anyhow::Result<Self::Running> {
        Ok(cairn_router::start(config).await?)
    }
}

impl RunningRole for cairn_router::Running {
    fn ready(&self) -> Value {
        json!({"http": format!("http://{}", self.addr), "ops": self.ops_addr.map(|a| a.to_string())})
    }

    async fn failed(&mut self) -> anyhow::Error {
        self.wait().await;
        anyhow::anyhow!("the router's door closed by itself")
    }

    async fn stop(self, grace: Duration) {
        self.stop_within(grace).await;
    }
}

/// `cairn engine`.
pub struct EngineRole;

impl Role for EngineRole {
    const NAME: &'static str = "engine";
    const THREADS: usize = 2;
    type Config = cairn_engine_sim::Config;
    type Running = cairn_engine_sim::Running;

    fn commented_default() -> String {
        cairn_engine_sim::Config::commented_default()
    }

    fn telemetry(config: &Self::Config) -> &TelemetryConfig {
        &config.telemetry
    }

    fn instance(config: &Self::Config) -> String {
        config.listen.to_string()
    }

    fn set_token(config: &mut Self::Config, file: PathBuf) {
        config.security.cluster_token_file = Some(file);
    }

    async fn start(config: Self::Config) -> anyhow::Result<Self::Running> {
        Ok(cairn_engine_sim::start(config).await?)
    }
}

impl RunningRole for cairn_engine_sim::Running {
    fn ready(&self) -> Value {
        json!({"http": format!("http://{}", self.http)})
    }

    async fn failed(&mut self) -> anyhow::Error {
        self.wait().await;
        anyhow::anyhow!("the engine stopped by itself")
    }

    async fn stop(self, _grace: Duration) {
        cairn_engine_sim::Running::stop(self).await;
    }
}
