//! What `--print-config` prints.

use cairn_telemetry::TelemetryConfig;

const HEAD: &str = r#"# Cairn agent: follows the engines of this host and reports their KV blocks and load to the index.

# Where the agent keeps its id and its checkpoints (one file per engine rank).
data_dir = "cairn-agent"

# Index nodes; any one serves, the others are for fail-over.
index = ["http://127.0.0.1:7400"]

[agent]
# Stable id; empty: the host name and an id kept in data_dir.
id = ""
# Host name that workers are registered under; empty: the machine's.
host = ""

# One section per engine. Only the URL is needed where the engine answers for the rest.
# [[engine]]
# url = "http://127.0.0.1:8000"
# kind = "auto"                # auto | vllm | sglang
# pool = ""                    # empty: the model's name
# role = "auto"                # auto (what the engine says, else both) | both | prefill | decode
# events = "auto"              # auto | off | { endpoint = "tcp://127.0.0.1:5557", replay_endpoint = "tcp://127.0.0.1:5558" }
#                              # engines that connect out: { endpoint = "tcp://127.0.0.1:5557", bind = true, topic = "kv@engine-1" }
# block_size = 16              # canonical block size of the pool, in tokens
# engine_block_size = 16       # only where the engine doesn't say
# ranks = 1                    # only where the engine doesn't say
# multimodal = false           # prompts may hold images
# api_key_file = "/etc/cairn/engine-key"
# ca_file = "/etc/cairn/engine-ca.pem"     # needed for https
# bootstrap = "10.0.0.5:8998"  # SGLang prefill engines, only where the engine doesn't say
# allow_link_local = false

[poll]
# Milliseconds between two looks at an engine's metrics and health.
load_ms = 500
# Between two discoveries of a running engine (adapters come and go).
discovery_ms = 10000
# Between two comparisons with the index.
audit_ms = 5000
# Between two checkpoints.
checkpoint_ms = 2000

[limits]
# Longest event message in bytes; a longer one is skipped and counted.
max_message_bytes = 16777216
# Bytes of received, undecoded messages per engine rank.
max_queued_bytes = 67108864
# Longest checkpoint of one engine rank in bytes.
max_checkpoint_bytes = 4294967296

[security]
# Needed as soon as an address is beyond loopback.
# cluster_token_file = "/etc/cairn/token"
# tls_cert_file = "/etc/cairn/tls.pem"
# tls_key_file = "/etc/cairn/tls.key"
# tls_ca_file = "/etc/cairn/ca.pem"

[ops]
# /metrics, /live, /ready and /status; port 0 lets the system choose.
listen = "127.0.0.1:0"

"#;

pub(super) fn commented() -> String {
    format!("{HEAD}{}", TelemetryConfig::COMMENTED)
}
