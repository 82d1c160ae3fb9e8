//! How long a step takes: a fixed part, prefilled tokens with attention over their context, and decoding sequences.

use serde::{Deserialize, Serialize};

use super::constants as c;

/// A moment or a span in microseconds of engine time; the origin is the driver's choice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Micros(pub u64);

impl Micros {
    /// The span of `seconds`, rounded to whole microseconds; negative and non-finite spans are zero.
    #[must_use]
    pub fn from_seconds(seconds: f64) -> Self {
        if seconds.is_finite() && seconds > 0.0 {
            Self((seconds * 1e6).round() as u64)
        } else {
            Self(0)
        }
    }

    /// In seconds.
    #[must_use]
    pub fn as_seconds(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// This moment moved later by `span`, saturating.
    #[must_use]
    pub fn plus(self, span: Micros) -> Self {
        Self(self.0.saturating_add(span.0))
    }

    /// The span from `earlier` to this moment, zero when `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Micros) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }
}

/// The costs of one engine, in seconds unless named otherwise.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timing {
    /// Fixed part of every step: weights read once, launches, scheduling.
    pub step_base_s: f64,
    /// Each prefilled token.
    pub prefill_token_s: f64,
    /// Each pair of a prefilled token and a token of its context; makes prefill quadratic.
    pub prefill_pair_s: f64,
    /// Each decoding sequence in a step.
    pub decode_sequence_s: f64,
    /// Each token of context that a decoding sequence reads.
    pub decode_context_s: f64,
    /// Start of a load from host memory.
    pub host_load_base_s: f64,
    /// Each token loaded from host memory.
    pub host_load_token_s: f64,
    /// Start of a transfer from another engine.
    pub transfer_base_s: f64,
    /// Each token transferred from another engine.
    pub transfer_token_s: f64,
    /// Start of a load from a store that engines share.
    #[serde(default = "shared_load_base_s")]
    pub shared_load_base_s: f64,
    /// Each token loaded from there.
    #[serde(default = "shared_load_token_s")]
    pub shared_load_token_s: f64,
}

/// Costs that were written down before there was a shared store: those of a 70B model.
fn shared_load_base_s() -> f64 {
    c::SHARED_LOAD_BASE_S
}

fn shared_load_token_s() -> f64 {
    c::LLAMA_70B_KV_BYTES / c::SHARED_BYTES_PER_S
}

impl Timing {
    /// Llama-3.1-8B on one H100, the default.
    #[must_use]
    pub fn llama_8b_h100() -> Self {
        let flops = c::H100_FLOPS * c::PREFILL_EFFICIENCY;
        let bytes = c::H100_BYTES_PER_S * c::DECODE_EFFICIENCY;
        Self {
            step_base_s: c::STEP_OVERHEAD_S + 2.0 * c::LLAMA_8B_PARAMETERS / bytes,
            prefill_token_s: 2.0 * c::LLAMA_8B_PARAMETERS / flops,
            prefill_pair_s: 4.0 * c::LLAMA_8B_LAYERS_X_HIDDEN / flops,
            decode_sequence_s: c::PER_SEQUENCE_S,
            decode_context_s: c::LLAMA_8B_KV_BYTES / bytes,
            host_load_base_s: c::HOST_LOAD_BASE_S,
            host_load_token_s: c::LLAMA_8B_KV_BYTES / c::HOST_LINK_BYTES_PER_S,
            transfer_base_s: c::TRANSFER_BASE_S,
            transfer_token_s: c::LLAMA_8B_KV_BYTES / c::TRANSFER_BYTES_PER_S,
            shared_load_base_s: c::SHARED_LOAD_BASE_S,
            shared_load_token_s: c::LLAMA_8B_KV_BYTES / c::SHARED_BYTES_PER_S,
        }
    }

    /// A 70B model on eight GPUs, with the reference model's prefill costs.
    #[must_use]
    pub fn llama_70b_8gpu() -> Self {
        let bytes = c::H100_BYTES_PER_S * c::DECODE_EFFICIENCY * c::REFERENCE_GPUS;
        Self {
            step_base_s: c::STEP_OVERHEAD_S + c::LLAMA_70B_WEIGHT_BYTES / bytes,
            prefill_token_s: c::REFERENCE_FLOPS_PER_TOKEN / c::REFERENCE_FLOPS,
            prefill_pair_s: c::REFERENCE_FLOPS_PER_PAIR / c::REFERENCE_FLOPS,
            decode_sequence_s: c::PER_SEQUENCE_S,
            decode_context_s: c::LLAMA_70B_KV_BYTES / bytes,
            host_load_base_s: c::HOST_LOAD_BASE_S,
            host_load_token_s: c::LLAMA_70B_KV_BYTES / c::HOST_LINK_BYTES_PER_S,
            transfer_base_s: c::TRANSFER_BASE_S,
            transfer_token_s: c::LLAMA_70B_KV_BYTES / c::TRANSFER_BYTES_PER_S,
            shared_load_base_s: shared_load_base_s(),
            shared_load_token_s: shared_load_token_s(),
        }
    }

    /// Everything takes no time: cache behaviour without waiting.
    #[must_use]
    pub fn instant() -> Self {
        Self {
            step_base_s: 0.0,
            prefill_token_s: 0.0,
            prefill_pair_s: 0.0,
            decode_sequence_s: 0.0,
            decode_context_s: 0.0,
            host_load_base_s: 0.0,
            host_load_token_s: 0.0,
            transfer_base_s: 0.0,
            transfer_token_s: 0.0,
            shared_load_base_s: 0.0,
            shared_load_token_s: 0.0,
        }
    }

    /// The costs of an engine that is `speed` times as fast in everything.
    #[must_use]
    pub fn faster(self, speed: f64) -> Self {
        Self {
            step_base_s: self.step_base_s / speed,
            prefill_token_s: self.prefill_token_s / speed,
            prefill_pair_s: self.prefill_pair_s / speed,
            decode_sequence_s: self.decode_sequence_s / speed,
            decode_context_s: self.decode_context_s / speed,
            host_load_base_s: self.host_load_base_s / speed,
            host_load_token_s: self.host_load_token_s / speed,
            transfer_base_s: self.transfer_base_s / speed,
            transfer_token_s: self.transfer_token_s / speed,
            shared_load_base_s: self.shared_load_base_s / speed,
            shared_load_token_s: self.shared_load_token_s / speed,
        }
    }

    /// Seconds that `tokens` prefilled on top of `context` cached tokens add to a step.
    #[must_use]
    pub fn prefill_s(&self, context: u64, tokens: u64) -> f64 {
        let (context, tokens) = (context as f64, tokens as f64);
        self.prefill_token_s * tokens + self.prefill_pair_s * tokens * (context + tokens / 2.0)
    }

    /// Seconds that one sequence with `context` tokens adds to a step by decoding.
    #[must_use]
    pub fn decode_s(&self, context: u64) -> f64 {
        self.decode_sequence_s + self.decode_context_s * context as f64
    }

    /// How long a load of `tokens` from host memory occupies the link.
    #[must_use]
    pub fn host_load(&self, tokens: u64) -> Micros {
        Micros::from_seconds(self.host_load_base_s + self.host_load_token_s * tokens as f64)
    }

    /// How long a transfer of `tokens` from another engine takes.
    #[must_use]
    pub fn transfer(&self, tokens: u64) -> Micros {
        Micros::from_seconds(self.transfer_base_s + self.transfer_token_s * tokens as f64)
    }

    /// How long a load of `tokens` from a store that engines share takes.
    #[must_use]
    pub fn shared_load(&self, tokens: u64) -> Micros {
        Micros::from_seconds(self.shared_load_base_s + self.shared_load_token_s * tokens as f64)
    }
}

impl Default for Timing {
    fn default() -> Self {
        Self::llama_8b_h100()
    }
}
