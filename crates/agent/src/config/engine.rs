//! The `[[engine]]` section.

use std::path::PathBuf;

use cairn_blocks::BlockSize;
use cairn_index::Role;
use cairn_proto::security::names_link_local;
use serde::{Deserialize, Serialize};

use super::{ConfigError, field};
use crate::page::MAX_RANKS;
use crate::zmtp::Endpoint;

/// One engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineConfig {
    /// Base URL of its HTTP API.
    pub url: String,
    /// Family; `auto` asks the engine.
    #[serde(default)]
    pub kind: KindConfig,
    /// Pool that it serves; empty: its model's name.
    #[serde(default)]
    pub pool: String,
    /// Which part of a request it serves.
    #[serde(default)]
    pub role: RoleConfig,
    /// Where its events come from.
    #[serde(default)]
    pub events: EventsConfig,
    /// Canonical block size of the pool in tokens.
    #[serde(default = "canonical")]
    pub block_size: u32,
    /// The engine's own block size in tokens, where it doesn't say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_block_size: Option<u32>,
    /// Data-parallel ranks, where the engine doesn't say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<u32>,
    /// Whether prompts may hold images or other media.
    #[serde(default)]
    pub multimodal: bool,
    /// File with the API key that the engine asks for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_file: Option<PathBuf>,
    /// PEM file with the authority of an https engine's certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_file: Option<PathBuf>,
    /// SGLang bootstrap address (`host:port`) of a prefill engine, where the engine doesn't say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap: Option<String>,
    /// Accept an engine at a link-local address.
    #[serde(default)]
    pub allow_link_local: bool,
}

fn canonical() -> u32 {
    BlockSize::DEFAULT.tokens()
}

/// Engine family as configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KindConfig {
    /// Ask the engine.
    #[default]
    Auto,
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
}

/// Role as configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RoleConfig {
    /// What the engine says, else `both`.
    #[default]
    Auto,
    /// Whole requests.
    Both,
    /// Prompts only.
    Prefill,
    /// Continuations only.
    Decode,
}

impl RoleConfig {
    /// The role to register, given what the engine says of itself.
    #[must_use]
    pub fn resolve(self, says_prefill: Option<bool>) -> Role {
        match (self, says_prefill) {
            (Self::Prefill, _) | (Self::Auto, Some(true)) => Role::Prefill,
            (Self::Decode, _) | (Self::Auto, Some(false)) => Role::Decode,
            (Self::Both, _) | (Self::Auto, None) => Role::Both,
        }
    }
}

/// Where events come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EventsConfig {
    /// The engine says.
    #[default]
    Auto,
    /// None are read: the worker is served in approximate mode.
    Off,
    /// From here.
    At(EventsAt),
}

/// A configured event socket, of rank 0; further ranks add their number to the ports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventsAt {
    /// Where the engine publishes, or where this agent listens if `bind`.
    pub endpoint: String,
    /// The engine's replay socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay_endpoint: Option<String>,
    /// The publisher's topic; tells engines apart that connect to one endpoint.
    #[serde(default)]
    pub topic: String,
    /// The engine connects out and this agent binds.
    #[serde(default)]
    pub bind: bool,
    /// Listen beyond loopback although event sockets know no authentication.
    #[serde(default)]
    pub allow_remote: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "events must be \"auto\", \"off\" or { endpoint = \"tcp://HOST:PORT\", ... }"
)]
enum EventsText {
    Word(EventsWord),
    At(EventsAt),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum EventsWord {
    Auto,
    Off,
}

impl Serialize for EventsConfig {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => EventsWord::Auto.serialize(serializer),
            Self::Off => EventsWord::Off.serialize(serializer),
            Self::At(at) => at.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for EventsConfig {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match EventsText::deserialize(deserializer)? {
            EventsText::Word(EventsWord::Auto) => Self::Auto,
            EventsText::Word(EventsWord::Off) => Self::Off,
            EventsText::At(at) => Self::At(at),
        })
    }
}

impl EngineConfig {
    /// An engine at `url` with everything else found out.
    #[must_use]
    pub fn at(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            kind: KindConfig::Auto,
            pool: String::new(),
            role: RoleConfig::Auto,
            events: EventsConfig::Auto,
            block_size: canonical(),
            engine_block_size: None,
            ranks: None,
            multimodal: false,
            api_key_file: None,
            ca_file: None,
            bootstrap: None,
            allow_link_local: false,
        }
    }

    /// Checks the `i`-th engine.
    pub(super) fn validate(&self, i: usize) -> Result<(), ConfigError> {
        let name = |part: &str| format!("engine[{i}].{part}");
        let url = url::Url::parse(&self.url).map_err(|e| {
            field(
                &name("url"),
                &format!("{:?} is not a URL ({e}); write http://HOST:PORT", self.url),
            )
        })?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(field(
                &name("url"),
                &format!("{:?} is neither http nor https", self.url),
            ));
        }
        if url.scheme() == "https" && self.ca_file.is_none() {
            return Err(field(
                &name("ca_file"),
                "is needed for an https engine; name the PEM file of its authority",
            ));
        }
        if !self.allow_link_local && url.host_str().is_some_and(names_link_local) {
            return Err(field(
                &name("url"),
                "is a link-local or metadata address; set allow_link_local = true if an engine really is there",
            ));
        }
        if let Err(error) = BlockSize::new(self.block_size) {
            return Err(field(&name("block_size"), &error.to_string()));
        }
        if self.engine_block_size.is_some_and(|size| BlockSize::new(size).is_err()) {
            return Err(field(&name("engine_block_size"), "is outside 1..=4096 tokens"));
        }
        if self.ranks.is_some_and(|ranks| ranks == 0 || ranks > MAX_RANKS) {
            return Err(field(&name("ranks"), &format!("is outside 1..={MAX_RANKS}")));
        }
        match &self.events {
            EventsConfig::At(at) => at.validate(&name("events")),
            EventsConfig::Auto | EventsConfig::Off => Ok(()),
        }
    }
}

impl EventsAt {
    fn validate(&self, name: &str) -> Result<(), ConfigError> {
        let endpoint =
            Endpoint::parse(&self.endpoint).map_err(|e| field(&format!("{name}.endpoint"), &e.to_string()))?;
        if let Some(replay) = &self.replay_endpoint {
            Endpoint::parse(replay).map_err(|e| field(&format!("{name}.replay_endpoint"), &e.to_string()))?;
        }
        if self.topic.len() > 1024 {
            return Err(field(&format!("{name}.topic"), "is longer than 1024 bytes"));
        }
        if self.bind && !self.allow_remote && !endpoint.is_loopback() {
            return Err(field(
                &format!("{name}.endpoint"),
                "listens beyond loopback, where event sockets know no authentication; bind 127.0.0.1, or set \
                 allow_remote = true if the network is yours alone",
            ));
        }
        Ok(())
    }
}
