//! Configuration of one simulated engine process.

mod default;

use std::net::SocketAddr;
use std::path::PathBuf;

use cairn_proto::security::{Security, SecurityError};
use cairn_replay::engine_model::{CpuStorePolicy, CpuTierConfig, InvalidModel, ModelConfig, Timing};
use cairn_telemetry::TelemetryConfig;
use serde::{Deserialize, Serialize};

use crate::events::{HashForm, Wire};

/// Data-parallel ranks at most; vLLM deployments use up to 64 in one process group.
pub const RANKS_MAX: u32 = 64;
/// Adapters at most.
pub const ADAPTERS_MAX: usize = 1024;

/// Name of the built-in tokenizer in place of a model's folder.
const EMBEDDED_ROOT: &str = "cairn:embedded";

/// What the event and transfer sockets may listen on: they speak the engines' own protocols, which know neither TLS nor tokens.
const UNPROTECTED: &str = "a loopback address: these sockets have no protection";

/// Everything that a simulated engine is started with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Address of the OpenAI and control endpoints.
    pub listen: SocketAddr,
    /// Name that clients ask for.
    pub model: String,
    /// Folder with `tokenizer.json` and its companions; empty for the small tokenizer built in.
    pub tokenizer: Option<PathBuf>,
    /// Longest prompt plus answer in tokens.
    pub max_model_len: u32,
    /// Data-parallel ranks, each with its own cache and event stream.
    pub ranks: u32,
    /// Seed of hashes; 0 draws one for each lifetime, as engines do.
    pub seed: u64,
    /// The cache.
    pub cache: CacheConfig,
    /// The scheduler.
    pub scheduler: SchedulerConfig,
    /// How long things take.
    pub timing: TimingConfig,
    /// What is answered.
    pub answers: AnswersConfig,
    /// KV events.
    pub events: EventsConfig,
    /// Prefill/decode transfers.
    pub transfer: TransferConfig,
    /// Adapters present from the start.
    pub adapters: Vec<AdapterConfig>,
    /// Token and TLS.
    pub security: Security,
    /// Logs and traces.
    pub telemetry: TelemetryConfig,
}

/// The cache of each rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CacheConfig {
    /// Tokens in a block.
    pub block_size: u32,
    /// GPU blocks, one of which is the null block.
    pub gpu_blocks: u32,
    /// Blocks of the host-memory tier; 0 for none.
    pub cpu_blocks: u32,
    /// When blocks are copied to the host-memory tier.
    pub cpu_store: CpuStorePolicy,
    /// Whether prefixes are reused.
    pub prefix_caching: bool,
}

/// Limits of the scheduler.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SchedulerConfig {
    /// Tokens that one step computes at most.
    pub max_batched_tokens: u32,
    /// Sequences in the running batch at most.
    pub max_num_seqs: u32,
}

/// Hardware that is imitated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// Llama-3.1-8B on one H100.
    #[default]
    #[serde(rename = "llama-8b-h100")]
    Llama8bH100,
    /// A 70B model on eight GPUs.
    #[serde(rename = "llama-70b-8gpu")]
    Llama70b8gpu,
}

/// How long things take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TimingConfig {
    /// Hardware that is imitated.
    pub profile: Profile,
    /// How much faster than that hardware; 0 answers at once.
    pub speed: f64,
    /// Own costs instead of the profile's.
    pub custom: Option<Timing>,
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AnswersConfig {
    /// Shortest natural answer in tokens.
    pub tokens_min: u32,
    /// Longest natural answer in tokens.
    pub tokens_max: u32,
    /// Report `usage.prompt_tokens_details`.
    pub prompt_tokens_details: bool,
}

/// KV events.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EventsConfig {
    /// Whether events are published.
    pub enabled: bool,
    /// Version whose shape the events have.
    pub wire: Wire,
    /// `int` or `bytes`.
    pub hashes: HashForm,
    /// Where rank 0 publishes; rank r uses the port plus r, port 0 a free one each.
    pub endpoint: String,
    /// Whether that endpoint is bound; otherwise the publisher connects to it and the subscriber binds.
    pub bind: bool,
    /// Where rank 0 answers replay requests; empty where it answers none.
    pub replay_endpoint: String,
    /// Batches kept for replay.
    pub buffer_steps: usize,
    /// First frame of every message.
    pub topic: String,
    /// Whether host-memory events carry tokens; otherwise they have placeholders, as engines do by default.
    pub self_describing: bool,
}

/// Prefill/decode transfers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TransferConfig {
    /// Whether `kv_transfer_params` are honoured.
    pub enabled: bool,
    /// Side channel on which decode engines pull.
    pub listen: SocketAddr,
    /// Seconds for which a prefill engine keeps blocks that nobody pulls.
    pub hold_s: f64,
}

/// One adapter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterConfig {
    /// Name that clients ask for.
    pub name: String,
    /// Where its weights would be.
    #[serde(default)]
    pub path: String,
}

/// A configuration that can't work.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not TOML, or an unknown or mistyped field.
    #[error("the configuration isn't valid: {0}; `cairn engine --print-config` prints every field")]
    Parse(#[from] Box<toml::de::Error>),
    /// A field outside its range.
    #[error("{field} is {value}; give {range}")]
    Field {
        /// Which.
        field: &'static str,
        /// As given.
        value: String,
        /// What is accepted.
        range: &'static str,
    },
    /// Cache and scheduler don't fit together.
    #[error("[cache] or [scheduler]: {0}")]
    Model(#[from] InvalidModel),
    /// Ports beyond loopback, or half a TLS setting.
    #[error(transparent)]
    Security(#[from] SecurityError),
}

impl Config {
    /// Reads TOML; every field has a default.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text).map_err(Box::new)?;
        config.validate()?;
        Ok(config)
    }

    /// The defaults as commented TOML.
    #[must_use]
    pub fn commented_default() -> String {
        default::commented()
    }

    /// Checks ranges, ports and that the longest request fits the cache.
    pub fn validate(&self) -> Result<(), ConfigError> {
        fn field(field: &'static str, value: impl ToString, range: &'static str) -> ConfigError {
            ConfigError::Field {
                field,
                value: value.to_string(),
                range,
            }
        }
        if self.model.is_empty() || self.model.len() > 256 {
            return Err(field("model", &self.model, "a name of 1 to 256 bytes"));
        }
        if !(1..=RANKS_MAX).contains(&self.ranks) {
            return Err(field("ranks", self.ranks, "1 to 64"));
        }
        if self.adapters.len() > ADAPTERS_MAX {
            return Err(field("adapters", self.adapters.len(), "at most 1024 adapters"));
        }
        let speed = self.timing.speed;
        if !speed.is_finite() || !(0.0..=1e6).contains(&speed) {
            return Err(field("timing.speed", speed, "0 (at once) or a factor up to 1000000"));
        }
        let (low, high) = (self.answers.tokens_min, self.answers.tokens_max);
        if low == 0 || low > high || high > 1 << 20 {
            return Err(field(
                "answers.tokens_min",
                low,
                "1 up to answers.tokens_max, itself at most 1048576",
            ));
        }
        if !(1..=1_000_000).contains(&self.events.buffer_steps) {
            return Err(field(
                "events.buffer_steps",
                self.events.buffer_steps,
                "1 to 1000000 batches",
            ));
        }
        if self.events.topic.len() > 1024 {
            return Err(field("events.topic", self.events.topic.len(), "at most 1024 bytes"));
        }
        if !self.transfer.hold_s.is_finite() || self.transfer.hold_s <= 0.0 {
            return Err(field(
                "transfer.hold_s",
                self.transfer.hold_s,
                "a positive number of seconds",
            ));
        }
        self.security.validate()?;
        self.security.check_bind(self.listen)?;
        if self.transfer.enabled && !self.transfer.listen.ip().is_loopback() {
            return Err(field("transfer.listen", self.transfer.listen, UNPROTECTED));
        }
        if self.events.enabled {
            self.check_endpoint("events.endpoint", &self.events.endpoint, self.events.bind)?;
            if !self.events.replay_endpoint.is_empty() {
                self.check_endpoint("events.replay_endpoint", &self.events.replay_endpoint, true)?;
            }
        }
        self.model_config(1).validate()?;
        Ok(())
    }

    fn check_endpoint(&self, name: &'static str, endpoint: &str, bind: bool) -> Result<(), ConfigError> {
        let range = "tcp://ADDRESS:PORT, such as tcp://127.0.0.1:5557 (port 0 for a free one where it is bound)";
        let bad = || ConfigError::Field {
            field: name,
            value: endpoint.to_owned(),
            range,
        };
        let rest = endpoint.strip_prefix("tcp://").ok_or_else(bad)?;
        let (host, port) = rest.rsplit_once(':').ok_or_else(bad)?;
        let port: u16 = port.parse().map_err(|_| bad())?;
        if bind {
            let host = if host == "*" { "0.0.0.0" } else { host };
            let ip = host.trim_matches(['[', ']']).parse().map_err(|_| bad())?;
            if !SocketAddr::new(ip, port).ip().is_loopback() {
                return Err(ConfigError::Field {
                    field: name,
                    value: endpoint.to_owned(),
                    range: UNPROTECTED,
                });
            }
        } else if port == 0 || host.is_empty() {
            return Err(bad());
        }
        Ok(())
    }

    /// Where the model's files are, as engines name it; routers load the built-in tokenizer by its own name.
    #[must_use]
    pub fn model_root(&self) -> String {
        self.tokenizer
            .as_ref()
            .map_or_else(|| EMBEDDED_ROOT.into(), |path| path.display().to_string())
    }

    /// The engine model's shape, for one rank.
    #[must_use]
    pub fn model_config(&self, hash_seed: u64) -> ModelConfig {
        let timing = match (self.timing.speed == 0.0, self.timing.custom, self.timing.profile) {
            (true, _, _) => Timing::instant(),
            (false, Some(custom), _) => custom,
            (false, None, Profile::Llama8bH100) => Timing::llama_8b_h100(),
            (false, None, Profile::Llama70b8gpu) => Timing::llama_70b_8gpu(),
        };
        ModelConfig {
            block_size: self.cache.block_size,
            gpu_blocks: self.cache.gpu_blocks,
            max_model_len: self.max_model_len,
            max_batched_tokens: self.scheduler.max_batched_tokens,
            max_num_seqs: self.scheduler.max_num_seqs,
            waiting_max: cairn_replay::engine_model::constants::WAITING_MAX,
            prefix_caching: self.cache.prefix_caching,
            cpu: (self.cache.cpu_blocks > 0).then_some(CpuTierConfig {
                blocks: self.cache.cpu_blocks,
                store: self.cache.cpu_store,
            }),
            timing,
            tokens_in_events: true,
            hash_seed,
            hold_s: self.transfer.hold_s,
        }
    }
}
