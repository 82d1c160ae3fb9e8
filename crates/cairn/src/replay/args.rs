//! Arguments of `cairn replay`, checked.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use cairn_replay::engine_model::{Micros, Timing};
use cairn_replay::trace::Trace;
use cairn_replay::{Model, Options, Scenario};
use cairn_routing::PolicyConfig;
use clap::{Args, ValueEnum};
use serde_json::{Map, Value};

use super::source;

/// Seeds at most: beyond, an interval gets no narrower that anyone would notice.
const SEEDS_MAX: u64 = 100;

/// Arguments of `cairn replay`.
#[derive(Args, Debug)]
pub struct ReplayArgs {
    /// Trace to replay: a file (Mooncake JSON lines, coding-agent sessions, Dynamo's request trace, Cairn's decisions, a
    /// table of lengths; .gz and .tar.gz as they are), or synthetic:longctx, :chat, :rag, :agent, :sagemaker-8k.
    #[arg(long, value_name = "FILE|synthetic:NAME", required_unless_present_any = ["show_model", "verify"])]
    pub trace: Option<String>,
    /// Policies, the one to judge first; parameters as in prefix:prefix_length=4096:concurrency_threshold=16.
    #[arg(long, value_name = "A,B,...", default_value = "kv,prefix,random")]
    policies: String,
    /// Engines at the start.
    #[arg(long, value_name = "N", default_value_t = 8)]
    engines: u32,
    /// KV tokens that each engine holds on its GPUs.
    #[arg(long, value_name = "TOKENS", default_value_t = 3_000_000)]
    capacity_tokens: u64,
    /// How much faster than recorded requests come.
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    speed: f64,
    /// Seeds of the policies' chance: intervals need two or more.
    #[arg(long, value_name = "K", default_value_t = 5)]
    pub seeds: u64,
    /// What happens meanwhile.
    #[arg(long, value_name = "NAME", default_value = "steady", value_parser = clap::builder::PossibleValuesParser::new(Scenario::NAMES))]
    scenario: String,
    /// Engines that only compute prompts; others then only decode, and blocks go over. Instead of --engines, with --decode.
    #[arg(long, value_name = "N", requires = "decode", conflicts_with_all = ["engines", "advise"], value_parser = clap::value_parser!(u32).range(1..))]
    prefill: Option<u32>,
    /// Engines that decode what others computed, or whole requests where that is better.
    #[arg(long, value_name = "M", requires = "prefill", value_parser = clap::value_parser!(u32).range(1..))]
    decode: Option<u32>,
    /// Engines can fetch blocks from each other.
    #[arg(long)]
    peer_fetch: bool,
    /// KV tokens in a store that every engine can read and that takes what any of them stores.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    shared_tokens: u64,
    /// Seconds from an engine's start to its first request, in scale-out and restart; 215 for the default model and 0 for
    /// the reference model where not given.
    #[arg(long, value_name = "S")]
    engine_start_s: Option<f64>,
    /// Which engine: `reference` is a fixed formula, comparable with published work; `default` batches and decodes.
    #[arg(long, value_enum, default_value_t = ModelName::Default)]
    model: ModelName,
    /// Print the models' constants with their sources, and nothing else.
    #[arg(long)]
    pub show_model: bool,
    /// Costs of the default engine, as `cairn calibrate --write` made them.
    #[arg(long, value_name = "FILE")]
    timing: Option<PathBuf>,
    /// Tokens in an engine block; the trace's own size where not given, with the default model within 16 to 128.
    #[arg(long, value_name = "TOKENS")]
    block_size: Option<u32>,
    /// Tokens that a hash_id of the trace stands for; found out where not given.
    #[arg(long, value_name = "TOKENS")]
    trace_block: Option<u32>,
    /// KV tokens in each engine's host-memory tier.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    cpu_tokens: u64,
    /// Routers, each with its own reservations.
    #[arg(long, value_name = "N", default_value_t = 1)]
    routers: u32,
    /// From an engine's event to the routers' view.
    #[arg(long, value_name = "MS", default_value_t = 50)]
    index_lag_ms: u64,
    /// Length of a reporting window.
    #[arg(long, value_name = "S", default_value_t = 60)]
    window_s: u64,
    /// Only the first requests of the trace.
    #[arg(long, value_name = "N")]
    requests: Option<NonZeroUsize>,
    /// Requests carry their session's name, as clients do that send a prefix-aware id or a prompt_cache_key.
    #[arg(long)]
    session_ids: bool,
    /// Find the best parameters of policies that have some, by a grid with the first seed; kv has none.
    #[arg(long)]
    pub tune: bool,
    /// Two policies side by side, figure by figure, with intervals; instead of --policies.
    #[arg(long, value_name = "A,B", conflicts_with = "policies")]
    pub compare: Option<String>,
    /// Say what limits this workload, and what more memory, an engine more or better parameters would bring.
    #[arg(long, conflicts_with_all = ["compare", "policies", "tune"])]
    pub advise: bool,
    /// Make recorded decisions again, and say whether every one comes out as it was: a file of JSON lines, or a router's
    /// answer.
    #[arg(long, value_name = "FILE")]
    pub verify: Option<PathBuf>,
    /// Also write a page with plots.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Runs at once; each runs on one core.
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ModelName {
    Default,
    Reference,
}

/// A policy as it was asked for.
pub struct Asked {
    pub label: String,
    pub config: PolicyConfig,
}

impl ReplayArgs {
    /// The trace.
    pub fn open(&self) -> anyhow::Result<Trace> {
        let source = self.trace.as_deref().context("--trace is missing")?;
        source::open(source, self.trace_block, self.requests, self.speed)
    }

    /// The fleet.
    pub fn options(&self) -> anyhow::Result<Options> {
        if !(1..=SEEDS_MAX).contains(&self.seeds) {
            bail!("--seeds is {}; give 1 to {SEEDS_MAX}", self.seeds);
        }
        if !self.speed.is_finite() || self.speed <= 0.0 {
            bail!("--speed is {}; give a number above 0", self.speed);
        }
        if self
            .engine_start_s
            .is_some_and(|seconds| !(0.0..=86_400.0).contains(&seconds))
        {
            bail!("--engine-start-s has to be 0 to 86400 seconds");
        }
        if self.trace_block.is_some_and(|size| !(1..=4_096).contains(&size)) {
            bail!("--trace-block has to be 1 to 4096 tokens");
        }
        let options = Options {
            engines: match (self.prefill, self.decode) {
                (Some(prefill), Some(decode)) => prefill.saturating_add(decode),
                (Some(_) | None, _) => self.engines,
            },
            prefill: self.prefill.unwrap_or(0),
            capacity_tokens: self.capacity_tokens,
            block_size: self.block_size.unwrap_or(0),
            model: match self.model {
                ModelName::Default => Model::Default,
                ModelName::Reference => Model::Reference,
            },
            timing: self.timing.as_deref().map(read_timing).transpose()?,
            cpu_tokens: self.cpu_tokens,
            routers: self.routers,
            index_lag: Micros(self.index_lag_ms.saturating_mul(1_000)),
            scenario: Scenario::by_name(&self.scenario).context("--scenario isn't known")?,
            window: Micros(self.window_s.max(1).saturating_mul(1_000_000)),
            peer_fetch: self.peer_fetch,
            shared_tokens: self.shared_tokens,
            engine_start: self.engine_start_s.map(Micros::from_seconds),
            session_ids: self.session_ids,
            ..Options::default()
        };
        options.validate()?;
        Ok(options)
    }

    /// The policies, each once.
    pub fn policies(&self) -> anyhow::Result<Vec<Asked>> {
        let mut asked: Vec<Asked> = Vec::new();
        let names = self.compare.as_ref().unwrap_or(&self.policies);
        for label in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            if asked.iter().any(|other| other.label == label) {
                bail!("--policies names {label} twice");
            }
            asked.push(Asked {
                label: label.to_owned(),
                config: policy(label)?,
            });
        }
        if self.compare.is_some() && asked.len() != 2 {
            bail!("--compare names {} policies; give two", asked.len());
        }
        if asked.is_empty() {
            bail!(
                "--policies names none; the known ones are {}",
                PolicyConfig::NAMES.join(", ")
            );
        }
        Ok(asked)
    }
}

fn read_timing(file: &Path) -> anyhow::Result<Timing> {
    let text = std::fs::read_to_string(file).with_context(|| format!("opening --timing {}", file.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("--timing {}: not what `cairn calibrate --write` makes", file.display()))
}

/// `name`, or `name:parameter=value:...`.
fn policy(label: &str) -> anyhow::Result<PolicyConfig> {
    let mut parts = label.split(':');
    let name = parts.next().unwrap_or_default();
    let default = PolicyConfig::by_name(name)?;
    let Value::Object(known) = serde_json::to_value(&default)? else {
        return Ok(default);
    };
    let mut fields: Map<String, Value> = known.clone();
    for part in parts {
        let (field, value) = part
            .split_once('=')
            .with_context(|| format!("--policies: {part:?} of {label} isn't parameter=value"))?;
        if field == "name" || !known.contains_key(field) {
            let own: Vec<&String> = known.keys().filter(|key| *key != "name").collect();
            bail!("--policies: {name} has no parameter {field:?}; it has {own:?}");
        }
        let value: u32 = value
            .parse()
            .with_context(|| format!("--policies: {field} of {label} has to be a whole number"))?;
        fields.insert(field.to_owned(), value.into());
    }
    let config: PolicyConfig = serde_json::from_value(Value::Object(fields))?;
    config.build()?;
    Ok(config)
}
