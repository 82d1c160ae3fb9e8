//! The agent's configuration: which engines it follows, which index nodes it reports to, and its bounds.

mod default_text;
mod engine;

use std::net::SocketAddr;
use std::path::PathBuf;

use cairn_proto::security::{Security, SecurityError};
use cairn_telemetry::TelemetryConfig;
use serde::{Deserialize, Serialize};

pub use engine::{EngineConfig, EventsAt, EventsConfig, KindConfig, RoleConfig};

/// Engines of one agent: a host has a few, a gateway host some tens.
pub const MAX_ENGINES: usize = 256;
/// Index nodes that are tried in turn.
pub const MAX_INDEX_NODES: usize = 64;

/// Everything that an agent is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Where the agent keeps its id and its checkpoints.
    pub data_dir: PathBuf,
    /// Index nodes, `http://host:port`; any one serves, the others are for fail-over.
    pub index: Vec<String>,
    /// Who the agent is.
    pub agent: Identity,
    /// The engines it follows.
    #[serde(rename = "engine")]
    pub engines: Vec<EngineConfig>,
    /// How often it looks.
    pub poll: Poll,
    /// Bounds on memory.
    pub limits: Limits,
    /// Cluster token and TLS.
    pub security: Security,
    /// Metrics and status port.
    pub ops: Ops,
    /// Logs and traces.
    pub telemetry: TelemetryConfig,
}

/// The `[agent]` section.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Identity {
    /// Stable id; empty: the host name and an id kept in `data_dir`.
    pub id: String,
    /// Host name that workers are registered under; empty: the machine's.
    pub host: String,
}

/// The `[poll]` section; all in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Poll {
    /// Between two looks at an engine's metrics and health.
    pub load_ms: u64,
    /// Between two discoveries of a running engine (adapters come and go).
    pub discovery_ms: u64,
    /// Between two comparisons with the index.
    pub audit_ms: u64,
    /// Between two checkpoints.
    pub checkpoint_ms: u64,
}

impl Default for Poll {
    fn default() -> Self {
        Self {
            load_ms: 500,
            discovery_ms: 10_000,
            audit_ms: 5_000,
            checkpoint_ms: 2_000,
        }
    }
}

/// The `[limits]` section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Longest event message in bytes; a longer one is skipped and counted.
    pub max_message_bytes: usize,
    /// Bytes of received, undecoded messages per source; beyond them reading waits and the engine's own queue fills.
    pub max_queued_bytes: usize,
    /// Longest checkpoint of one source in bytes; a larger mirror isn't checkpointed, and counted.
    pub max_checkpoint_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_message_bytes: 16 << 20,
            max_queued_bytes: 64 << 20,
            max_checkpoint_bytes: 4 << 30,
        }
    }
}

/// The `[ops]` section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Ops {
    /// Address of `/metrics`, `/live`, `/ready` and `/status`; port 0 lets the system choose.
    pub listen: SocketAddr,
}

impl Default for Ops {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            data_dir: PathBuf::from("cairn-agent"),
            index: vec!["http://127.0.0.1:7400".to_owned()],
            agent: Identity::default(),
            engines: Vec::new(),
            poll: Poll::default(),
            limits: Limits::default(),
            security: Security::default(),
            ops: Ops::default(),
            telemetry: TelemetryConfig::default(),
        }
    }
}

/// What is wrong with a configuration, and what to change.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A field has a value that can't work.
    #[error("{field}: {fault}")]
    Field {
        /// Which one, as written in the file.
        field: String,
        /// What is wrong and what to write.
        fault: String,
    },
    /// A rule on ports and tokens.
    #[error("[security]: {0}")]
    Security(#[from] SecurityError),
}

impl Config {
    /// A configuration with every setting at its default and a comment on each.
    #[must_use]
    pub fn commented_default() -> String {
        default_text::commented()
    }

    /// Checks what can be checked without opening anything.
    ///
    /// # Errors
    /// Names the first field that can't work, and the remedy.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.data_dir.as_os_str().is_empty() {
            return Err(field("data_dir", "is empty; name a directory that the agent may write"));
        }
        if self.index.is_empty() || self.index.len() > MAX_INDEX_NODES {
            return Err(field(
                "index",
                "needs 1 to 64 addresses such as \"http://127.0.0.1:7400\"",
            ));
        }
        for address in &self.index {
            let known = address.starts_with("http://") || address.starts_with("https://");
            if !known
                || url::Url::parse(address)
                    .ok()
                    .and_then(|u| u.port_or_known_default())
                    .is_none()
            {
                return Err(field("index", &format!("{address:?} is not http://HOST:PORT")));
            }
        }
        for (name, text) in [("agent.id", &self.agent.id), ("agent.host", &self.agent.host)] {
            if text.len() > 256 || text.chars().any(char::is_control) {
                return Err(field(name, "is longer than 256 bytes or holds control characters"));
            }
        }
        if self.engines.len() > MAX_ENGINES {
            return Err(field(
                "engine",
                &format!("lists more than {MAX_ENGINES} engines; run another agent"),
            ));
        }
        let mut seen = std::collections::BTreeSet::new();
        for (i, engine) in self.engines.iter().enumerate() {
            engine.validate(i)?;
            if !seen.insert(engine.url.trim_end_matches('/')) {
                return Err(field(
                    &format!("engine[{i}].url"),
                    &format!("{:?} is listed twice", engine.url),
                ));
            }
        }
        self.validate_bound_topics()?;
        self.validate_numbers()?;
        self.security.validate()?;
        self.security.check_bind(self.ops.listen)?;
        Ok(())
    }

    /// Engines that connect to one endpoint of ours are told apart by topic alone.
    fn validate_bound_topics(&self) -> Result<(), ConfigError> {
        let mut taken = std::collections::BTreeSet::new();
        for (i, engine) in self.engines.iter().enumerate() {
            let EventsConfig::At(at) = &engine.events else { continue };
            if at.bind && !taken.insert((at.endpoint.as_str(), at.topic.as_str())) {
                let fault = format!(
                    "another engine publishes to {} with the topic {:?} too; give each its own topic (vLLM: \"topic\" in \
                     --kv-events-config)",
                    at.endpoint, at.topic
                );
                return Err(field(&format!("engine[{i}].events.topic"), &fault));
            }
        }
        Ok(())
    }

    fn validate_numbers(&self) -> Result<(), ConfigError> {
        let Poll {
            load_ms,
            discovery_ms,
            audit_ms,
            checkpoint_ms,
        } = self.poll;
        for (name, value, low, high) in [
            ("poll.load_ms", load_ms, 50, 10_000),
            ("poll.discovery_ms", discovery_ms, 200, 3_600_000),
            ("poll.audit_ms", audit_ms, 100, 600_000),
            ("poll.checkpoint_ms", checkpoint_ms, 50, 600_000),
            (
                "limits.max_message_bytes",
                self.limits.max_message_bytes as u64,
                64 << 10,
                256 << 20,
            ),
            (
                "limits.max_queued_bytes",
                self.limits.max_queued_bytes as u64,
                64 << 10,
                4 << 30,
            ),
            (
                "limits.max_checkpoint_bytes",
                self.limits.max_checkpoint_bytes,
                1 << 20,
                64 << 30,
            ),
        ] {
            if !(low..=high).contains(&value) {
                return Err(field(name, &format!("is {value}; write {low} to {high}")));
            }
        }
        if self.limits.max_queued_bytes < self.limits.max_message_bytes {
            return Err(field(
                "limits.max_queued_bytes",
                "is below limits.max_message_bytes; raise it",
            ));
        }
        Ok(())
    }
}

/// A complaint about one field.
pub(crate) fn field(name: &str, fault: &str) -> ConfigError {
    ConfigError::Field {
        field: name.to_owned(),
        fault: fault.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str, names: &str) {
        let message = match toml::from_str::<Config>(text) {
            Ok(config) => config.validate().expect_err(text).to_string(),
            Err(error) => error.to_string(),
        };
        assert!(message.contains(names), "{text}: {message}");
    }

    #[test]
    fn the_commented_default_is_the_default() {
        let text = Config::commented_default();
        let config: Config = toml::from_str(&text).unwrap();
        assert_eq!(config, Config::default());
        config.validate().unwrap();
    }

    #[test]
    fn a_full_configuration_is_read() {
        let config: Config = toml::from_str(
            r#"
            data_dir = "/tmp/x"
            index = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
            [agent]
            id = "a"
            [[engine]]
            url = "http://127.0.0.1:8000"
            kind = "vllm"
            role = "prefill"
            pool = "p"
            events = { endpoint = "tcp://127.0.0.1:5557", replay_endpoint = "tcp://127.0.0.1:5558" }
            [[engine]]
            url = "http://127.0.0.1:8001"
            events = "auto"
            [[engine]]
            url = "http://127.0.0.1:8002"
            events = "off"
            "#,
        )
        .unwrap();
        config.validate().unwrap();
        assert!(matches!(&config.engines[0].events, EventsConfig::At(at) if !at.bind));
        assert_eq!(config.engines[1].events, EventsConfig::Auto);
        assert_eq!(config.engines[2].events, EventsConfig::Off);
    }

    #[test]
    fn what_cannot_work_is_named_with_its_field() {
        refused("index = []", "index");
        refused("index = [\"ftp://x\"]", "index");
        refused("colour = 1", "colour");
        refused("[[engine]]\nurl = \"ftp://x\"", "engine[0].url");
        refused(
            "[[engine]]\nurl = \"http://x:1\"\n[[engine]]\nurl = \"http://x:1/\"",
            "listed twice",
        );
        refused("[[engine]]\nurl = \"http://169.254.169.254\"", "link-local");
        refused(
            "[[engine]]\nurl = \"http://x:1\"\nblock_size = 0",
            "engine[0].block_size",
        );
        refused("[[engine]]\nurl = \"http://x:1\"\nevents = \"maybe\"", "events");
        refused(
            "[[engine]]\nurl = \"http://x:1\"\nevents = { endpoint = \"x\" }",
            "engine[0].events.endpoint",
        );
        refused(
            "[[engine]]\nurl = \"http://x:1\"\nevents = { endpoint = \"tcp://0.0.0.0:1\", bind = true }",
            "loopback",
        );
        refused("[poll]\nload_ms = 1", "poll.load_ms");
        refused("[ops]\nlisten = \"0.0.0.0:1\"", "security");
        let shared = "events = { endpoint = \"tcp://127.0.0.1:1\", bind = true, topic = \"t\" }";
        refused(
            &format!("[[engine]]\nurl = \"http://x:1\"\n{shared}\n[[engine]]\nurl = \"http://y:1\"\n{shared}"),
            "engine[1].events.topic",
        );
    }
}
