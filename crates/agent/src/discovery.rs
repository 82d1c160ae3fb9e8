//! Finds out what an engine is: family, models, block size, ranks and where each rank publishes its events.

mod sglang;
mod vllm;

use serde_json::Value;

use crate::config::{EngineConfig, EventsConfig, KindConfig};
use crate::engine_http::{EngineHttp, EngineHttpError};
use crate::page::{MAX_RANKS, Page};
use crate::zmtp::{Endpoint, InvalidEndpoint};

/// Model and adapter names of one engine that are kept.
const MAX_MODELS: usize = 1024;
/// What an engine block holds where nothing says so: vLLM's default on GPUs.
const ASSUMED_BLOCK_SIZE: u32 = 16;

/// Engine family.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EngineKind {
    /// vLLM and what speaks like it.
    Vllm,
    /// SGLang.
    Sglang,
}

impl EngineKind {
    /// As registrations name it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
        }
    }
}

/// Where one rank publishes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EventSource {
    /// The publisher's endpoint, or ours where `bind`.
    pub endpoint: Endpoint,
    /// Its replay socket.
    pub replay: Option<Endpoint>,
    /// Topic that tells publishers apart on a bound endpoint.
    pub topic: String,
    /// The engine connects to us.
    pub bind: bool,
}

/// All that discovery learns.
#[derive(Clone, PartialEq, Debug)]
pub struct EngineFacts {
    /// Family.
    pub kind: EngineKind,
    /// Names of the base model; the first is the engine's own.
    pub models: Vec<String>,
    /// Loaded adapters.
    pub adapters: Vec<String>,
    /// Model directory as the engine names it.
    pub model_root: Option<String>,
    /// Longest prompt plus answer in tokens.
    pub max_model_len: Option<u32>,
    /// Engine block (or page) size in tokens.
    pub block_size: u32,
    /// GPU blocks of that size per rank; 0 unknown.
    pub capacity_blocks: u64,
    /// Sequences at once; 0 unknown.
    pub max_num_seqs: u32,
    /// Prompt tokens per step; 0 unknown.
    pub max_batched_tokens: u32,
    /// SGLang's bootstrap address of a prefill engine.
    pub bootstrap: Option<String>,
    /// What the engine says about its own role, where it does.
    pub says_prefill: Option<bool>,
    /// One entry per rank; `None` where the rank publishes nothing that could be found.
    pub events: Vec<Option<EventSource>>,
    /// Why events are missing, for people.
    pub events_note: Option<String>,
    /// Process start in Unix seconds.
    pub start_time: Option<f64>,
}

/// Why discovery failed; it is tried again.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// The engine didn't answer.
    #[error("{engine}: {source}")]
    Http {
        /// Base URL.
        engine: String,
        /// The cause.
        source: EngineHttpError,
    },
    /// It answered something that can't be used.
    #[error("{engine}: {fault}")]
    Unusable {
        /// Base URL.
        engine: String,
        /// What is wrong and what to do.
        fault: String,
    },
    /// An endpoint that it names can't be used.
    #[error("{engine}: {source}")]
    Endpoint {
        /// Base URL.
        engine: String,
        /// The cause.
        source: InvalidEndpoint,
    },
}

/// Asks the engine everything.
///
/// # Errors
/// When it is down or unusable; worth trying again later.
pub async fn discover(http: &EngineHttp, config: &EngineConfig) -> Result<EngineFacts, DiscoveryError> {
    let asked = |source| DiscoveryError::Http {
        engine: http.base().to_owned(),
        source,
    };
    let listing = http.json("/v1/models").await.map_err(asked)?;
    let page = match Page::fetch(http).await {
        Ok(page) => page,
        Err(error) if error.is_absent() => Page::default(),
        Err(error) => return Err(asked(error)),
    };
    let models = Models::read(&listing);
    if models.base.is_empty() {
        return Err(DiscoveryError::Unusable {
            engine: http.base().to_owned(),
            fault: "GET /v1/models names no model; is this an OpenAI-compatible engine that has finished loading?"
                .to_owned(),
        });
    }
    let kind = match config.kind {
        KindConfig::Vllm => EngineKind::Vllm,
        KindConfig::Sglang => EngineKind::Sglang,
        KindConfig::Auto if models.owner == "sglang" || page.family == Some("sglang") => EngineKind::Sglang,
        KindConfig::Auto => EngineKind::Vllm,
    };
    let mut facts = EngineFacts {
        kind,
        models: models.base,
        adapters: models.adapters,
        model_root: models.root,
        max_model_len: models.max_model_len,
        block_size: page.ranks.values().find_map(|r| r.block_size).unwrap_or(0),
        capacity_blocks: page.ranks.values().find_map(|r| r.blocks).unwrap_or(0),
        max_num_seqs: 0,
        max_batched_tokens: 0,
        bootstrap: None,
        says_prefill: None,
        events: Vec::new(),
        events_note: None,
        start_time: page.start_time,
    };
    let ranks_seen = u32::try_from(page.ranks.len()).unwrap_or(1).clamp(1, MAX_RANKS);
    match kind {
        EngineKind::Vllm => vllm::complete(http, config, ranks_seen, &mut facts).await?,
        EngineKind::Sglang => sglang::complete(http, config, ranks_seen, &mut facts).await?,
    }
    if let Some(size) = config.engine_block_size {
        facts.block_size = size;
    }
    if facts.block_size == 0 {
        facts.block_size = ASSUMED_BLOCK_SIZE;
    }
    Ok(facts)
}

/// What `/v1/models` says.
struct Models {
    base: Vec<String>,
    adapters: Vec<String>,
    root: Option<String>,
    max_model_len: Option<u32>,
    owner: String,
}

impl Models {
    fn read(listing: &Value) -> Self {
        let mut models = Self {
            base: Vec::new(),
            adapters: Vec::new(),
            root: None,
            max_model_len: None,
            owner: String::new(),
        };
        let entries = listing
            .get("data")
            .and_then(Value::as_array)
            .map(Vec::as_slice)
            .unwrap_or_default();
        for entry in entries.iter().take(MAX_MODELS) {
            let Some(id) = entry
                .get("id")
                .and_then(Value::as_str)
                .filter(|id| !id.is_empty() && id.len() <= 512)
            else {
                continue;
            };
            if entry.get("parent").is_some_and(Value::is_string) {
                models.adapters.push(id.to_owned());
                continue;
            }
            if models.base.is_empty() {
                models.root = entry.get("root").and_then(Value::as_str).map(str::to_owned);
                models.max_model_len = entry
                    .get("max_model_len")
                    .and_then(Value::as_u64)
                    .and_then(|n| n.try_into().ok());
                models.owner = entry
                    .get("owned_by")
                    .and_then(Value::as_str)
                    .unwrap_or_default()
                    .to_owned();
            }
            models.base.push(id.to_owned());
        }
        models
    }
}

/// Sources of every rank from endpoints for rank 0: engines add the rank to both ports.
fn by_rank(
    http: &EngineHttp,
    ranks: u32,
    endpoint: &str,
    replay: Option<&str>,
    topic: &str,
    bind: bool,
) -> Result<Vec<Option<EventSource>>, DiscoveryError> {
    let parsed = |text: &str| {
        Endpoint::parse(text).map_err(|source| DiscoveryError::Endpoint {
            engine: http.base().to_owned(),
            source,
        })
    };
    let endpoint = parsed(endpoint)?;
    let replay = replay.filter(|r| !r.is_empty()).map(parsed).transpose()?;
    (0..ranks)
        .map(|rank| {
            let past_end = || DiscoveryError::Unusable {
                engine: http.base().to_owned(),
                fault: format!("rank {rank} has no port: {endpoint} plus the rank is past 65535, or a rank needs tcp"),
            };
            let own = endpoint.of_rank(rank).ok_or_else(past_end)?;
            let endpoint = if bind { own } else { own.reached_by(http.host()) };
            let replay = match &replay {
                Some(replay) => Some(replay.of_rank(rank).ok_or_else(past_end)?.reached_by(http.host())),
                None => None,
            };
            Ok(Some(EventSource {
                endpoint,
                replay,
                topic: topic.to_owned(),
                bind,
            }))
        })
        .collect()
}

/// Sources from the configuration, where it names them.
fn configured(
    http: &EngineHttp,
    config: &EngineConfig,
    ranks: u32,
) -> Result<Option<Vec<Option<EventSource>>>, DiscoveryError> {
    match &config.events {
        EventsConfig::Auto => Ok(None),
        EventsConfig::Off => Ok(Some(vec![None; ranks as usize])),
        EventsConfig::At(at) => by_rank(
            http,
            ranks,
            &at.endpoint,
            at.replay_endpoint.as_deref(),
            &at.topic,
            at.bind,
        )
        .map(Some),
    }
}
