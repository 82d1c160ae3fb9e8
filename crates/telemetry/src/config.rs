//! The `[telemetry]` section that every role's configuration has.

use serde::{Deserialize, Serialize};

/// How log lines look.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Where traces and logs go.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TelemetryConfig {
    /// OTLP/gRPC endpoint for traces, such as `http://127.0.0.1:4317`; empty for none.
    pub otlp_endpoint: String,
    /// Share of new traces that are sampled, 0 to 1; a caller's own sampling flag always wins.
    pub sample_ratio: f64,
    /// Log filter, such as `info` or `info,cairn_router=debug`.
    pub log: String,
    /// Text or JSON.
    pub log_format: LogFormat,
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self {
            otlp_endpoint: String::new(),
            sample_ratio: 1.0,
            log: "info".into(),
            log_format: LogFormat::Text,
        }
    }
}

impl TelemetryConfig {
    /// The section as commented TOML.
    pub const COMMENTED: &str = "\
[telemetry]
# OTLP/gRPC endpoint for traces, such as \"http://127.0.0.1:4317\"; empty sends none.
otlp_endpoint = \"\"
# Share of new traces that are sampled, 0 to 1; a caller's own sampling flag always wins.
sample_ratio = 1.0
# Log filter: error, warn, info, debug, trace, or per module (\"info,cairn_router=debug\").
log = \"info\"
# \"text\" or \"json\"; logs go to standard error.
log_format = \"text\"
";
}
