//! Which engine version's events are imitated, and how versions differ.

use serde::{Deserialize, Serialize};

/// A version at which the shape of events changed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub enum Wire {
    /// Arrays: hashes, parent, tokens, block size, adapter id.
    #[serde(rename = "vllm-0.9")]
    Vllm0_9,
    /// Adds the medium.
    #[serde(rename = "vllm-0.10.2")]
    Vllm0_10_2,
    /// Adds the adapter's name.
    #[serde(rename = "vllm-0.14")]
    Vllm0_14,
    /// Adds extra keys.
    #[serde(rename = "vllm-0.17")]
    Vllm0_17,
    /// Adds the cache group.
    #[serde(rename = "vllm-0.20")]
    Vllm0_20,
    /// Adds the group's kind and window.
    #[serde(rename = "vllm-0.22")]
    Vllm0_22,
    /// As 0.22.
    #[serde(rename = "vllm-0.23")]
    Vllm0_23,
    /// Events become maps without default fields.
    #[serde(rename = "vllm-0.24")]
    Vllm0_24,
    /// Replay answers carry the topic frame.
    #[serde(rename = "vllm-0.26")]
    Vllm0_26,
    /// As 0.26 for GPU and CPU media.
    #[serde(rename = "vllm-0.27")]
    Vllm0_27,
    /// Adds ownership, absent by default.
    #[serde(rename = "vllm-0.29")]
    Vllm0_29,
    /// Adds the session, absent by default.
    #[serde(rename = "vllm-0.30")]
    Vllm0_30,
    /// Free ports and `/kv_event_sources`.
    #[serde(rename = "vllm-0.31")]
    Vllm0_31,
    /// As 0.31.
    #[default]
    #[serde(rename = "vllm-0.32")]
    Vllm0_32,
    /// Adds lookahead tokens, absent by default.
    #[serde(rename = "vllm-0.33")]
    Vllm0_33,
    /// SGLang: maps, signed hashes, the salt in a field of its own and not in the hash.
    #[serde(rename = "sglang-0.5.23")]
    Sglang0_5_23,
    /// Dynamo's mocker: vLLM's maps without adapter and medium.
    #[serde(rename = "dynamo-1.6.1")]
    Dynamo1_6_1,
}

impl Wire {
    /// Every version.
    pub const ALL: [Wire; 17] = [
        Wire::Vllm0_9,
        Wire::Vllm0_10_2,
        Wire::Vllm0_14,
        Wire::Vllm0_17,
        Wire::Vllm0_20,
        Wire::Vllm0_22,
        Wire::Vllm0_23,
        Wire::Vllm0_24,
        Wire::Vllm0_26,
        Wire::Vllm0_27,
        Wire::Vllm0_29,
        Wire::Vllm0_30,
        Wire::Vllm0_31,
        Wire::Vllm0_32,
        Wire::Vllm0_33,
        Wire::Sglang0_5_23,
        Wire::Dynamo1_6_1,
    ];

    /// Whether events are maps; arrays otherwise.
    #[must_use]
    pub fn is_map(self) -> bool {
        self >= Wire::Vllm0_24
    }

    /// Whether replay answers carry the topic frame.
    #[must_use]
    pub fn replay_has_topic(self) -> bool {
        (Wire::Vllm0_26..=Wire::Vllm0_33).contains(&self)
    }

    /// Whether the engine answers `/kv_event_sources`.
    #[must_use]
    pub fn has_event_sources(self) -> bool {
        (Wire::Vllm0_31..=Wire::Vllm0_33).contains(&self)
    }

    /// Whether this is SGLang.
    #[must_use]
    pub fn is_sglang(self) -> bool {
        self == Wire::Sglang0_5_23
    }

    /// What `/version` says.
    #[must_use]
    pub fn engine_version(self) -> &'static str {
        match self {
            Wire::Vllm0_9 => "0.9.2",
            Wire::Vllm0_10_2 => "0.10.2",
            Wire::Vllm0_14 => "0.14.1",
            Wire::Vllm0_17 => "0.17.1",
            Wire::Vllm0_20 => "0.20.2",
            Wire::Vllm0_22 => "0.22.1",
            Wire::Vllm0_23 => "0.23.0",
            Wire::Vllm0_24 => "0.24.0",
            Wire::Vllm0_26 => "0.26.0",
            Wire::Vllm0_27 => "0.27.0",
            Wire::Vllm0_29 => "0.29.0",
            Wire::Vllm0_30 => "0.30.0",
            Wire::Vllm0_31 => "0.31.0",
            Wire::Vllm0_32 => "0.32.0",
            Wire::Vllm0_33 => "0.33.0",
            Wire::Sglang0_5_23 => "0.5.23",
            Wire::Dynamo1_6_1 => "1.6.1",
        }
    }
}
