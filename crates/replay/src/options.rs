//! What a replay is asked to do.

use cairn_index::Role;
use serde::{Deserialize, Serialize};

use crate::engine_model::{CpuStorePolicy, CpuTierConfig, Micros, ModelConfig, Timing, constants};
use crate::trace::{Row, Trace};

/// Engines at most.
pub const ENGINES_MAX: u32 = 4_096;
/// Engine blocks where nothing is said: the trace's own size, within vLLM's on GPUs and the largest that it allows there.
const DEFAULT_BLOCK: (u32, u32) = (16, 128);
/// Routers at most.
pub const ROUTERS_MAX: u32 = 64;

/// Which engine the fleet is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Model {
    /// Chunked prefill with continuous batching, decode, and the paged cache.
    #[default]
    Default,
    /// One prefill after the other by a fixed formula, no decode: simple, and comparable with published work.
    Reference,
}

/// What happens while the trace runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scenario {
    /// Nothing.
    #[default]
    Steady,
    /// Every engine's cache is emptied in the middle of the trace; they serve on at once, since else nobody would.
    Cold,
    /// A third more engines (at least one) are started in the middle: 6 become 8.
    ScaleOut,
    /// A quarter fewer (at least one), drained from the middle on: 8 become 6.
    ScaleIn,
    /// One engine restarts empty in the middle, and is away until it has started.
    Restart,
    /// Two requests in five begin with one and the same prefix of 4,096 tokens.
    HotPrefix,
    /// One batch of events in a hundred is lost for good.
    LostEvents,
    /// Four times the rate, and engines that refuse what would wait behind 32 others.
    Overload,
}

impl Scenario {
    /// Every scenario's name.
    pub const NAMES: [&'static str; 8] = [
        "steady",
        "cold",
        "scale-out",
        "scale-in",
        "restart",
        "hot-prefix",
        "lost-events",
        "overload",
    ];

    /// By its name.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        Some(match name {
            "steady" => Self::Steady,
            "cold" => Self::Cold,
            "scale-out" => Self::ScaleOut,
            "scale-in" => Self::ScaleIn,
            "restart" => Self::Restart,
            "hot-prefix" => Self::HotPrefix,
            "lost-events" => Self::LostEvents,
            "overload" => Self::Overload,
            _ => return None,
        })
    }

    /// Whether engines come, go or restart in the middle.
    #[must_use]
    pub fn changes_fleet(self) -> bool {
        match self {
            Self::Cold | Self::ScaleOut | Self::ScaleIn | Self::Restart => true,
            Self::Steady | Self::HotPrefix | Self::LostEvents | Self::Overload => false,
        }
    }

    /// The trace as this scenario wants it.
    #[must_use]
    pub fn shape(self, trace: Trace) -> Trace {
        match self {
            Self::HotPrefix => trace.with_hot_prefix(HOT_PERCENT, HOT_TOKENS),
            Self::Overload => trace.faster(OVERLOAD),
            Self::Steady | Self::Cold | Self::ScaleOut | Self::ScaleIn | Self::Restart | Self::LostEvents => trace,
        }
    }
}

/// Requests with the hot prefix.
const HOT_PERCENT: u64 = 40;
/// Its length.
const HOT_TOKENS: u32 = 4_096;
/// How much faster an overload comes.
const OVERLOAD: f64 = 4.0;
/// Requests that wait in an engine of an overloaded fleet before it refuses: some seconds of work.
const OVERLOAD_WAITING: u32 = 32;

/// A fleet and how it is run.
#[derive(Clone, PartialEq, Debug)]
pub struct Options {
    /// Engines at the start.
    pub engines: u32,
    /// KV tokens that each engine's GPU cache holds.
    pub capacity_tokens: u64,
    /// Tokens in an engine block; 0 takes the engine's default of 16, or for the reference model the trace's own size.
    pub block_size: u32,
    /// Which engine.
    pub model: Model,
    /// Costs of the default model; where `None` those that the trace describes, or a 70B model on eight GPUs.
    pub timing: Option<Timing>,
    /// KV tokens in each engine's host-memory tier; 0 for none.
    pub cpu_tokens: u64,
    /// Routers, each with its own reservations; requests go round.
    pub routers: u32,
    /// From an engine's event to every router's view.
    pub index_lag: Micros,
    /// How often engines' load is read.
    pub load_period: Micros,
    /// From an engine's start to its first request; where `None` [`constants::ENGINE_START_S`] for the default model, and
    /// nothing for the reference model, whose published uses know none.
    pub engine_start: Option<Micros>,
    /// What happens to the fleet.
    pub scenario: Scenario,
    /// Length of a reporting window.
    pub window: Micros,
    /// Whether engines can fetch blocks from each other.
    pub peer_fetch: bool,
    /// KV tokens in a store that every engine can read and that takes what any of them stores; 0 for none.
    pub shared_tokens: u64,
    /// Engines that only compute prompts: the first of all. Where there are some, the rest only decode.
    pub prefill: u32,
    /// Whether requests carry their session's name, for policies that go by it.
    pub session_ids: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            engines: 8,
            capacity_tokens: 3_000_000,
            block_size: 0,
            model: Model::Default,
            timing: None,
            cpu_tokens: 0,
            routers: 1,
            index_lag: Micros(50_000),
            load_period: Micros(1_000_000),
            engine_start: None,
            scenario: Scenario::Steady,
            window: Micros(60_000_000),
            peer_fetch: false,
            shared_tokens: 0,
            prefill: 0,
            session_ids: false,
        }
    }
}

/// Options that can't work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}; give {range}")]
pub struct InvalidOptions {
    /// Which.
    pub field: &'static str,
    /// As given.
    pub value: u64,
    /// What is accepted.
    pub range: &'static str,
}

impl Options {
    /// Checks ranges.
    pub fn validate(&self) -> Result<(), InvalidOptions> {
        let check = |field, value: u64, low: u64, high: u64, range| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(InvalidOptions { field, value, range })
            }
        };
        check("engines", self.engines.into(), 1, ENGINES_MAX.into(), "1 to 4096")?;
        check("routers", self.routers.into(), 1, ROUTERS_MAX.into(), "1 to 64")?;
        check("block_size", self.block_size.into(), 0, 4_096, "1 to 4096 tokens, or 0")?;
        if self.prefill > 0 {
            let most = u64::from(self.engines) - 1;
            check(
                "prefill",
                self.prefill.into(),
                1,
                most,
                "engines for prefill and for decode",
            )?;
            if self.scenario.changes_fleet() {
                let field = "prefill";
                let (value, range) = (self.prefill.into(), "0 where the scenario changes the fleet");
                return Err(InvalidOptions { field, value, range });
            }
        }
        let least = u64::from(self.block_size.max(1));
        if self.shared_tokens > 0 {
            check(
                "shared_tokens",
                self.shared_tokens,
                least,
                u64::MAX,
                "one block or more, or 0",
            )?;
        }
        let most = u64::from(ModelConfig::BLOCKS_MAX - 1) * least;
        check(
            "capacity_tokens",
            self.capacity_tokens,
            least,
            most,
            "one block to 16 million blocks",
        )
    }

    /// These options with what they leave to the trace: the block size, and the costs of the engines it describes.
    #[must_use]
    pub fn for_trace(&self, trace: &Trace) -> Self {
        let block_size = match (self.block_size, self.model) {
            (0, Model::Default) => trace.block.clamp(DEFAULT_BLOCK.0, DEFAULT_BLOCK.1),
            (0, Model::Reference) => trace.block,
            (given, _) => given,
        };
        Self {
            block_size,
            timing: self.timing.or(trace.timing),
            ..self.clone()
        }
    }

    /// Costs of the default model.
    #[must_use]
    pub fn default_timing(&self) -> Timing {
        self.timing.unwrap_or_else(Timing::llama_70b_8gpu)
    }

    /// What an engine is for.
    #[must_use]
    pub fn role(&self, engine: usize) -> Role {
        match self.prefill as usize {
            0 => Role::Both,
            prefill if engine < prefill => Role::Prefill,
            _ => Role::Decode,
        }
    }

    /// From an engine's start to its first request.
    #[must_use]
    pub fn engine_start(&self) -> Micros {
        self.engine_start.unwrap_or(match self.model {
            Model::Default => Micros::from_seconds(constants::ENGINE_START_S),
            Model::Reference => Micros(0),
        })
    }

    /// Tokens of a row's answer that the model generates.
    #[must_use]
    pub fn answer(&self, row: &Row) -> u32 {
        match self.model {
            Model::Default => row.output,
            Model::Reference => 1,
        }
    }

    /// The engine core's shape, once the block size is known ([`Options::for_trace`]); `longest` is the trace's longest prompt plus answer.
    #[must_use]
    pub fn model_config(&self, longest: u32) -> ModelConfig {
        let usable = (self.capacity_tokens / u64::from(self.block_size)) as u32;
        // A prompt beyond the capacity still has to run somewhere: its engine is given room for it.
        let blocks = usable.max(longest.div_ceil(self.block_size)) + 1;
        let base = ModelConfig {
            block_size: self.block_size,
            gpu_blocks: blocks,
            max_model_len: longest.max(2),
            cpu: (self.cpu_tokens > 0).then(|| CpuTierConfig {
                blocks: (self.cpu_tokens / u64::from(self.block_size))
                    .try_into()
                    .unwrap_or(u32::MAX),
                store: CpuStorePolicy::default(),
            }),
            timing: self.default_timing(),
            waiting_max: match self.scenario {
                Scenario::Overload => OVERLOAD_WAITING,
                _ => constants::WAITING_MAX,
            },
            tokens_in_events: false,
            hash_seed: 1,
            ..ModelConfig::default()
        };
        match self.model {
            Model::Default => base,
            Model::Reference => ModelConfig {
                timing: reference_timing(),
                max_batched_tokens: 1 << 24,
                max_num_seqs: 1,
                ..base
            },
        }
    }
}

/// The reference model as costs of the engine core: one prefill a step, nothing else.
#[must_use]
pub fn reference_timing() -> Timing {
    Timing {
        step_base_s: constants::REFERENCE_BASE_S,
        prefill_token_s: constants::REFERENCE_FLOPS_PER_TOKEN / constants::REFERENCE_FLOPS,
        prefill_pair_s: constants::REFERENCE_FLOPS_PER_PAIR / constants::REFERENCE_FLOPS,
        decode_sequence_s: 0.0,
        decode_context_s: 0.0,
        host_load_base_s: 0.0,
        host_load_token_s: constants::LLAMA_70B_KV_BYTES / constants::HOST_LINK_BYTES_PER_S,
        transfer_base_s: 0.0,
        transfer_token_s: constants::LLAMA_70B_KV_BYTES / constants::HOST_LINK_BYTES_PER_S,
        shared_load_base_s: 0.0,
        shared_load_token_s: constants::LLAMA_70B_KV_BYTES / constants::HOST_LINK_BYTES_PER_S,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_model_is_its_published_formula() {
        let timing = reference_timing();
        let seconds = |cached: f64, new: f64| (1.4e11 * new + 2.62e6 * new * (cached + new / 2.0)) / 2e15 + 0.02;
        for (cached, new) in [(0, 8_000), (64_000, 512), (4_096, 1)] {
            let ours = timing.step_base_s + timing.prefill_s(cached, new);
            assert!((ours - seconds(cached as f64, new as f64)).abs() < 1e-9);
        }
    }

    #[test]
    fn host_memory_holds_the_tokens_asked_for_whatever_the_block_size() {
        for block_size in [16, 128, 512] {
            let options = Options {
                block_size,
                cpu_tokens: 1_024_000,
                ..Options::default()
            };
            let blocks = options.model_config(1_000).cpu.map(|cpu| cpu.blocks);
            assert_eq!(blocks, Some(1_024_000 / block_size));
        }
        assert_eq!(
            Options {
                block_size: 16,
                ..Options::default()
            }
            .model_config(1_000)
            .cpu,
            None
        );
    }

    #[test]
    fn impossible_options_name_their_field() {
        let options = Options {
            engines: 0,
            ..Options::default()
        };
        assert_eq!(options.validate().unwrap_err().field, "engines");
        assert!(Options::default().validate().is_ok());
    }
}
