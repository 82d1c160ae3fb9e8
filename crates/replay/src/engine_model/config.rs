//! Shape of one simulated engine core: cache sizes, scheduler limits, tiers and timing.

use serde::{Deserialize, Serialize};

use super::timing::Timing;

/// When blocks are copied to the host-memory tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CpuStorePolicy {
    /// Every block, as soon as it is full on the GPU.
    #[default]
    OnStore,
    /// A block that is used a second time.
    OnSecondUse,
    /// A block whose last GPU copy is evicted.
    OnEviction,
}

/// The host-memory tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuTierConfig {
    /// Blocks that fit.
    pub blocks: u32,
    /// When blocks are copied there.
    #[serde(default)]
    pub store: CpuStorePolicy,
}

/// Shape of one engine core (one data-parallel rank).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ModelConfig {
    /// Tokens in an engine block.
    pub block_size: u32,
    /// Physical GPU blocks, one of which is the null block.
    pub gpu_blocks: u32,
    /// Longest prompt plus answer, in tokens.
    pub max_model_len: u32,
    /// Tokens that one step computes at most.
    pub max_batched_tokens: u32,
    /// Sequences in the running batch at most.
    pub max_num_seqs: u32,
    /// Requests that may wait; past it submission is refused.
    pub waiting_max: u32,
    /// Whether prefixes are reused at all.
    pub prefix_caching: bool,
    /// Host-memory tier, where there is one.
    pub cpu: Option<CpuTierConfig>,
    /// Costs.
    pub timing: Timing,
    /// Whether stored events carry their tokens; replay, which keys blocks itself, saves the copies.
    pub tokens_in_events: bool,
    /// Seed of the engine's own block hashes; real engines draw one for each process.
    pub hash_seed: u64,
    /// Seconds for which blocks are held for a decode engine.
    pub hold_s: f64,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            block_size: 16,
            gpu_blocks: 8_193,
            max_model_len: 32_768,
            max_batched_tokens: 8_192,
            max_num_seqs: 256,
            waiting_max: super::constants::WAITING_MAX,
            prefix_caching: true,
            cpu: None,
            timing: Timing::default(),
            tokens_in_events: true,
            hash_seed: 0,
            hold_s: super::constants::HELD_BLOCKS_EXPIRY_S,
        }
    }
}

/// A model shape that can't work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidModel {
    /// A size is outside its range.
    #[error("{field} is {value}; give {range}")]
    OutOfRange {
        /// Which.
        field: &'static str,
        /// The value given.
        value: u64,
        /// The accepted values in words.
        range: &'static str,
    },
    /// One request of the longest length wouldn't fit, so it would wait for ever.
    #[error(
        "max_model_len {max_model_len} needs {needed} blocks of {block_size} tokens but the cache has {usable} usable ones; raise gpu_blocks or lower max_model_len"
    )]
    CacheTooSmall {
        /// Longest request in tokens.
        max_model_len: u32,
        /// Blocks that it needs.
        needed: u32,
        /// Tokens in a block.
        block_size: u32,
        /// Blocks that can hold content.
        usable: u32,
    },
}

impl ModelConfig {
    /// Largest accepted number of blocks: 2^24 blocks of bookkeeping take about half a gigabyte.
    pub const BLOCKS_MAX: u32 = 1 << 24;

    /// Checks ranges and that the longest request fits.
    pub fn validate(&self) -> Result<(), InvalidModel> {
        let ranges: [(&'static str, u64, u64, u64, &'static str); 5] = [
            ("block_size", self.block_size.into(), 1, 4096, "1 to 4096 tokens"),
            (
                "gpu_blocks",
                self.gpu_blocks.into(),
                2,
                Self::BLOCKS_MAX.into(),
                "2 to 16777216 blocks",
            ),
            (
                "max_batched_tokens",
                self.max_batched_tokens.into(),
                1,
                1 << 24,
                "1 to 16777216 tokens",
            ),
            (
                "max_num_seqs",
                self.max_num_seqs.into(),
                1,
                1 << 20,
                "1 to 1048576 sequences",
            ),
            (
                "cpu.blocks",
                self.cpu.map_or(1, |c| c.blocks.into()),
                1,
                Self::BLOCKS_MAX.into(),
                "1 to 16777216 blocks, or no tier",
            ),
        ];
        for (field, value, low, high, range) in ranges {
            if value < low || value > high {
                return Err(InvalidModel::OutOfRange { field, value, range });
            }
        }
        if self.max_model_len < 2 {
            let value = self.max_model_len.into();
            return Err(InvalidModel::OutOfRange {
                field: "max_model_len",
                value,
                range: "2 tokens or more",
            });
        }
        let needed = self.max_model_len.div_ceil(self.block_size);
        let usable = self.gpu_blocks - 1;
        if needed > usable {
            let (max_model_len, block_size) = (self.max_model_len, self.block_size);
            return Err(InvalidModel::CacheTooSmall {
                max_model_len,
                needed,
                block_size,
                usable,
            });
        }
        Ok(())
    }
}
