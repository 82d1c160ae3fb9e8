//! Default values, and the commented file that shows them.

use cairn_replay::engine_model::{CpuStorePolicy, constants};
use cairn_telemetry::TelemetryConfig;

use super::{AnswersConfig, CacheConfig, Config, EventsConfig, Profile, SchedulerConfig, TimingConfig, TransferConfig};
use crate::events::{HashForm, Wire};

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: ([127, 0, 0, 1], 8000).into(),
            model: "cairn-tiny".into(),
            tokenizer: None,
            max_model_len: 32_768,
            ranks: 1,
            seed: 0,
            cache: CacheConfig::default(),
            scheduler: SchedulerConfig::default(),
            timing: TimingConfig::default(),
            answers: AnswersConfig::default(),
            events: EventsConfig::default(),
            transfer: TransferConfig::default(),
            adapters: Vec::new(),
            security: cairn_proto::security::Security::default(),
            telemetry: TelemetryConfig::default(),
        }
    }
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            block_size: 16,
            gpu_blocks: 8_193,
            cpu_blocks: 0,
            cpu_store: CpuStorePolicy::OnStore,
            prefix_caching: true,
        }
    }
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            max_batched_tokens: 8_192,
            max_num_seqs: 256,
        }
    }
}

impl Default for TimingConfig {
    fn default() -> Self {
        Self {
            profile: Profile::default(),
            speed: 1.0,
            custom: None,
        }
    }
}

impl Default for AnswersConfig {
    fn default() -> Self {
        Self {
            tokens_min: 24,
            tokens_max: 96,
            prompt_tokens_details: true,
        }
    }
}

impl Default for EventsConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            wire: Wire::default(),
            hashes: HashForm::Int,
            endpoint: "tcp://127.0.0.1:0".into(),
            bind: true,
            replay_endpoint: "tcp://127.0.0.1:0".into(),
            buffer_steps: 10_000,
            topic: String::new(),
            self_describing: false,
        }
    }
}

impl Default for TransferConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            listen: ([127, 0, 0, 1], 0).into(),
            hold_s: constants::HELD_BLOCKS_EXPIRY_S,
        }
    }
}

/// The default file.
pub(super) fn commented() -> String {
    format!("{HEAD}\n{}", TelemetryConfig::COMMENTED)
}

const HEAD: &str = r#"# One simulated engine: vLLM-compatible endpoints and KV events over a simulated cache.

# Address of the OpenAI and control endpoints; port 0 takes a free one.
listen = "127.0.0.1:8000"
# Name that clients ask for.
model = "cairn-tiny"
# Folder with tokenizer.json and its companions; without it a small tokenizer is built in.
# tokenizer = "/models/llama"
# Longest prompt plus answer, in tokens.
max_model_len = 32768
# Data-parallel ranks, each with its own cache and event stream.
ranks = 1
# Seed of block hashes; 0 draws one for each lifetime, as engines do.
seed = 0
# Adapters present from the start.
adapters = [] # [{ name = "sql", path = "/adapters/sql" }]

[cache]
# Tokens in a block.
block_size = 16
# GPU blocks of each rank, one of which is the null block.
gpu_blocks = 8193
# Blocks of the host-memory tier; 0 for none.
cpu_blocks = 0
# When blocks go to the host-memory tier: "on-store", "on-second-use" or "on-eviction".
cpu_store = "on-store"
# Whether prefixes are reused.
prefix_caching = true

[scheduler]
# Tokens that one step computes at most.
max_batched_tokens = 8192
# Sequences in the running batch at most.
max_num_seqs = 256

[timing]
# "llama-8b-h100" or "llama-70b-8gpu".
profile = "llama-8b-h100"
# How much faster than that hardware; 0 answers at once.
speed = 1.0
# Own costs in seconds instead of the profile's:
# custom = { step_base_s = 0.008, prefill_token_s = 3.6e-5, prefill_pair_s = 1.2e-9, decode_sequence_s = 6e-6, decode_context_s = 5.2e-8, host_load_base_s = 0.001, host_load_token_s = 6.6e-6, transfer_base_s = 0.003, transfer_token_s = 3.3e-6 }

[answers]
# Natural answers have a length between these, fixed by the prompt.
tokens_min = 24
tokens_max = 96
# Report usage.prompt_tokens_details.cached_tokens.
prompt_tokens_details = true

[events]
# Whether KV events are published.
enabled = true
# Shape of events: "vllm-0.9", "vllm-0.10.2", "vllm-0.14", "vllm-0.17", "vllm-0.20", "vllm-0.22" .. "vllm-0.24",
# "vllm-0.26", "vllm-0.27", "vllm-0.29" .. "vllm-0.33", "sglang-0.5.23" or "dynamo-1.6.1".
wire = "vllm-0.32"
# Block hashes as "int" or "bytes" (32 of them).
hashes = "int"
# Where rank 0 publishes; rank r uses the port plus r, port 0 a free one each.
endpoint = "tcp://127.0.0.1:0"
# false: connect to that endpoint instead; the subscriber binds it.
bind = true
# Where rank 0 answers replay requests; empty where it answers none.
replay_endpoint = "tcp://127.0.0.1:0"
# Batches kept for replay.
buffer_steps = 10000
# First frame of every message.
topic = ""
# Whether host-memory events carry tokens instead of placeholders.
self_describing = false

[transfer]
# Whether kv_transfer_params are honoured.
enabled = true
# Side channel on which decode engines pull blocks.
listen = "127.0.0.1:0"
# Seconds for which blocks wait to be pulled.
hold_s = 480.0

[security]
# Needed beyond loopback: token, certificate and key.
# cluster_token_file = "/etc/cairn/token"
# tls_cert_file = "/etc/cairn/tls.crt"
# tls_key_file = "/etc/cairn/tls.key"
# tls_ca_file = "/etc/cairn/ca.crt"
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commented_file_is_the_default() {
        let read = Config::from_toml(&Config::commented_default()).expect("the printed default is valid");
        assert_eq!(read, Config::default());
    }
}
