//! The router's configuration: every field with its default, its meaning, and what is wrong when it is.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use cairn_index::Role;
use cairn_telemetry::TelemetryConfig;
use serde::{Deserialize, Serialize};

use crate::lanes::LANES_MAX;

/// What a router is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Where clients connect.
    pub listen: String,
    /// Operators' port; empty for none (the operator paths are on `listen` too).
    pub ops_listen: String,
    /// Name of this router in reservations and logs; empty for one made at start.
    pub name: String,
    /// Name of the cluster whose feed is followed; empty accepts any.
    pub cluster: String,
    /// Addresses of index nodes, `http://host:port` or `host:port`; empty routes over `[[engine]]` alone.
    pub index: Vec<String>,
    /// Engines that are served even where no index names them.
    pub engine: Vec<EngineConfig>,
    /// What is set for single pools.
    pub pool: Vec<PoolConfig>,
    /// Tenants; without any, `cache_salt` is used as clients send it.
    pub tenant: Vec<TenantConfig>,
    /// Folder with the tokenizer of pools that name none under `[[pool]]`; empty to look for it.
    pub tokenizer: String,
    /// Policy of pools for which neither `[[pool]]` nor the cluster names one.
    pub policy: String,
    /// Policy that decides beside: what it would have done is recorded, nothing is sent; empty for none.
    pub shadow: String,
    /// Whether `x-cairn-policy` may choose the policy of a request.
    pub allow_policy_header: bool,
    /// Folder for what outlives a restart (the last known engines); empty for none.
    pub data_dir: String,
    /// File with the operators' token; without it operator paths answer loopback clients alone.
    pub operator_token_file: String,
    /// Whether `x-cairn-debug: 1` with the operators' token adds decision headers to answers.
    pub decision_headers: bool,
    /// Largest request body in bytes.
    pub max_body_bytes: usize,
    /// Bytes of all bodies that are being received or wait for an engine.
    pub body_memory_bytes: usize,
    /// Time in ms for a body to arrive.
    pub body_timeout_ms: u64,
    /// Connections served at once; further ones wait to be accepted.
    pub max_connections: usize,
    /// Threads that serve connections, each with connections of its own; 0 for one per core.
    pub lanes: usize,
    /// Time in ms to connect to an engine.
    pub connect_timeout_ms: u64,
    /// Interval in ms of engine checks.
    pub check_interval_ms: u64,
    /// Time in ms of tokenizing before a request is routed by what is known by then, for any text.
    pub tokenize_budget_ms: u64,
    /// Further time in µs for each KiB of text.
    pub tokenize_budget_us_per_kib: u64,
    /// Whether a request may be split between prefill and decode engines.
    pub split: bool,
    /// How long streams may go on after the router was told to stop, in ms.
    pub drain_grace_ms: u64,
    /// Token and certificates between hosts.
    pub security: cairn_proto::security::Security,
    /// Traces and logs.
    pub telemetry: TelemetryConfig,
}

/// One engine of `[[engine]]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineConfig {
    /// Base URL, `http://host:port`.
    pub url: String,
    /// `both`, `prefill` or `decode`.
    #[serde(default = "both")]
    pub role: String,
    /// Data-parallel ranks.
    #[serde(default = "one")]
    pub ranks: u32,
    /// Pool that it belongs to; by default the name of the model that it serves.
    #[serde(default)]
    pub pool: String,
    /// Allows a link-local or metadata address.
    #[serde(default)]
    pub allow_link_local: bool,
}

fn both() -> String {
    "both".into()
}

fn one() -> u32 {
    1
}

impl EngineConfig {
    /// The role as the registry names it.
    #[must_use]
    pub fn parsed_role(&self) -> Option<Role> {
        match self.role.as_str() {
            "both" => Some(Role::Both),
            "prefill" => Some(Role::Prefill),
            "decode" => Some(Role::Decode),
            _ => None,
        }
    }
}

/// What is set for one pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PoolConfig {
    /// The pool's name.
    pub name: String,
    /// Folder with `tokenizer.json` and `tokenizer_config.json`; empty to look for it.
    pub tokenizer: String,
    /// Policy; empty for the cluster's or the router's.
    pub policy: String,
    /// File with the chat template that its engines were started with (vLLM's `--chat-template`); empty for the model's.
    pub chat_template: String,
    /// Whether its engines take a chat template from a request (vLLM's `--trust-request-chat-template`).
    pub trust_request_chat_template: bool,
    /// Template variables of its engines for every request (vLLM's `--default-chat-template-kwargs`).
    pub default_chat_template_kwargs: serde_json::Map<String, serde_json::Value>,
    /// Options of the policy.
    pub options: std::collections::BTreeMap<String, toml::Value>,
}

/// A tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// Name in metrics and logs.
    pub name: String,
    /// File with the key that its clients send as `Authorization: Bearer`.
    pub api_key_file: PathBuf,
    /// File with the secret that its salts are derived with; by default derived from the key.
    #[serde(default)]
    pub secret_file: Option<PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8080".into(),
            ops_listen: String::new(),
            name: String::new(),
            cluster: String::new(),
            index: Vec::new(),
            engine: Vec::new(),
            pool: Vec::new(),
            tenant: Vec::new(),
            tokenizer: String::new(),
            policy: "kv".into(),
            shadow: String::new(),
            allow_policy_header: false,
            data_dir: String::new(),
            operator_token_file: String::new(),
            decision_headers: true,
            max_body_bytes: 64 << 20,
            body_memory_bytes: 512 << 20,
            body_timeout_ms: 30_000,
            max_connections: 8_192,
            lanes: 0,
            connect_timeout_ms: 1_000,
            check_interval_ms: 1_000,
            tokenize_budget_ms: 50,
            tokenize_budget_us_per_kib: 400,
            split: true,
            drain_grace_ms: 30_000,
            security: cairn_proto::security::Security::default(),
            telemetry: TelemetryConfig::default(),
        }
    }
}

/// A field with a value that can't work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct ConfigError {
    /// Which field.
    pub field: String,
    /// What is wrong and what to write instead.
    pub problem: String,
}

impl ConfigError {
    pub(crate) fn new(field: &str, problem: String) -> Self {
        Self {
            field: field.into(),
            problem,
        }
    }
}

impl Config {
    /// Every field with its default, as commented TOML.
    #[must_use]
    pub fn commented_default() -> String {
        format!("{COMMENTED}\n{}\n{}", SECURITY_COMMENTED, TelemetryConfig::COMMENTED)
    }

    /// Checks what can be checked without touching the network.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let wrong = |field: &str, problem: String| {
            Err(ConfigError {
                field: field.into(),
                problem,
            })
        };
        if self.listen.parse::<SocketAddr>().is_err() {
            return wrong(
                "listen",
                format!("{:?} is no address; write one such as \"127.0.0.1:8080\"", self.listen),
            );
        }
        if !self.ops_listen.is_empty() && self.ops_listen.parse::<SocketAddr>().is_err() {
            return wrong(
                "ops_listen",
                format!("{:?} is no address; write one or leave it empty", self.ops_listen),
            );
        }
        for (field, name) in [("policy", &self.policy), ("shadow", &self.shadow)] {
            if let Err(error) = cairn_routing::PolicyConfig::by_name(name) {
                return wrong(field, error.to_string());
            }
        }
        for (i, index) in self.index.iter().enumerate() {
            let with_scheme = if index.contains("://") {
                index.clone()
            } else {
                format!("http://{index}")
            };
            check_url(&format!("index[{i}]"), &with_scheme)?;
        }
        for (i, engine) in self.engine.iter().enumerate() {
            check_url(&format!("engine[{i}].url"), &engine.url)?;
            let host = url::Url::parse(&engine.url).ok();
            let host = host.as_ref().and_then(url::Url::host_str);
            if !engine.allow_link_local && host.is_some_and(cairn_proto::security::names_link_local) {
                let problem =
                    "is a link-local or metadata address; set allow_link_local = true if an engine really is there";
                return wrong(&format!("engine[{i}].url"), problem.into());
            }
            if engine.parsed_role().is_none() {
                return wrong(
                    &format!("engine[{i}].role"),
                    format!(
                        "{:?} is no role; write \"both\", \"prefill\" or \"decode\"",
                        engine.role
                    ),
                );
            }
            if engine.ranks == 0 || engine.ranks > RANKS_MAX {
                return wrong(&format!("engine[{i}].ranks"), format!("must be 1..={RANKS_MAX}"));
            }
            if self.engine[..i].iter().any(|other| other.url == engine.url) {
                return wrong(
                    &format!("engine[{i}].url"),
                    format!("{} is listed twice; remove one", engine.url),
                );
            }
        }
        for (i, pool) in self.pool.iter().enumerate() {
            if pool.name.is_empty() {
                return wrong(&format!("pool[{i}].name"), "is missing; name the pool it is for".into());
            }
            if let Err(error) = cairn_routing::PolicyConfig::by_name(&pool.policy) {
                return wrong(&format!("pool[{i}].policy"), error.to_string());
            }
        }
        for (field, value, least) in [
            ("max_body_bytes", self.max_body_bytes as u64, 1_024),
            (
                "body_memory_bytes",
                self.body_memory_bytes as u64,
                self.max_body_bytes as u64,
            ),
            ("body_timeout_ms", self.body_timeout_ms, 1),
            ("max_connections", self.max_connections as u64, 1),
            ("connect_timeout_ms", self.connect_timeout_ms, 1),
            ("check_interval_ms", self.check_interval_ms, 50),
        ] {
            if value < least {
                return wrong(field, format!("{value} is too small; at least {least}"));
            }
        }
        if self.lanes > LANES_MAX {
            return wrong(
                "lanes",
                format!("{} is too many; at most {LANES_MAX}, or 0 for one per core", self.lanes),
            );
        }
        Ok(())
    }

    pub(crate) fn body_timeout(&self) -> Duration {
        Duration::from_millis(self.body_timeout_ms)
    }
}

/// More ranks than any engine has.
const RANKS_MAX: u32 = 1_024;

fn check_url(field: &str, text: &str) -> Result<(), ConfigError> {
    let fine = url::Url::parse(text)
        .is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.host().is_some() && url.username().is_empty());
    if fine {
        return Ok(());
    }
    Err(ConfigError {
        field: field.into(),
        problem: format!("{text:?} is no base URL; write one such as \"http://127.0.0.1:8000\""),
    })
}

const SECURITY_COMMENTED: &str = "\
[security]
# Needed to listen beyond loopback.
# cluster_token_file = \"/etc/cairn/token\"
# tls_cert_file = \"/etc/cairn/tls.crt\"
# tls_key_file = \"/etc/cairn/tls.key\"
# tls_ca_file = \"/etc/cairn/ca.crt\"
";

const COMMENTED: &str = r#"# Where clients connect.
listen = "127.0.0.1:8080"
# Operators' port with /metrics, /live and /ready; empty for none (`listen` answers these paths too).
ops_listen = ""
# Name of this router in reservations and logs; empty for one made at start.
name = ""
# Name of the cluster whose feed is followed; empty accepts any.
cluster = ""
# Index nodes; empty routes over [[engine]] alone.
index = []                      # ["http://127.0.0.1:7400"]
# Folder with the tokenizer of pools that name none under [[pool]]; empty to look for it.
tokenizer = ""
# Policy of pools for which neither [[pool]] nor the cluster names one.
policy = "kv"
# Policy that decides beside: what it would have done is recorded, nothing is sent; empty for none.
shadow = ""
# Whether the header x-cairn-policy may choose the policy of a request.
allow_policy_header = false
# Folder for what outlives a restart (the last known engines); empty for none.
data_dir = ""
# File with the operators' token; without it operator paths answer loopback clients alone.
operator_token_file = ""
# Whether `x-cairn-debug: 1` with the operators' token adds decision headers to answers.
decision_headers = true
# Largest request body in bytes, and of all bodies being received or waiting for an engine.
max_body_bytes = 67108864
body_memory_bytes = 536870912
# Time in ms for a body to arrive.
body_timeout_ms = 30000
# Connections served at once; further ones wait to be accepted.
max_connections = 8192
# Threads that serve connections, each with connections of its own to clients and engines; 0 for one per core.
lanes = 0
# Time in ms to connect to an engine, and the interval in ms of engine checks.
connect_timeout_ms = 1000
check_interval_ms = 1000
# Time for tokenizing before a request is routed by what is known by then: in ms, and further µs for each KiB of text.
tokenize_budget_ms = 50
tokenize_budget_us_per_kib = 400
# Whether a request may be split between prefill and decode engines.
split = true
# How long streams may go on after the router was told to stop, in ms.
drain_grace_ms = 30000

# Engines that are served even where no index names them.
# [[engine]]
# url = "http://127.0.0.1:8000"
# role = "both"                 # or "prefill", "decode"
# ranks = 1
# pool = ""                     # by default the model's name
# allow_link_local = false

# What is set for one pool.
# [[pool]]
# name = "my-model"
# tokenizer = "/models/my-model"
# policy = "kv"
# How its engines were started, where that isn't by default: vLLM's --chat-template (a file), --trust-request-chat-template
# and --default-chat-template-kwargs. They decide a chat's tokens.
# chat_template = "/etc/cairn/my-model.jinja"
# trust_request_chat_template = false
# default_chat_template_kwargs = { enable_thinking = false }

# Tenants: their clients' cache_salt is replaced by one that no other tenant can make.
# [[tenant]]
# name = "team-a"
# api_key_file = "/etc/cairn/team-a.key"
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_printed_default_is_the_default() {
        let parsed: Config = toml::from_str(&Config::commented_default()).unwrap();
        assert_eq!(parsed, Config::default());
        parsed.validate().unwrap();
    }

    #[test]
    fn faults_name_the_field_and_the_remedy() {
        let check = |text: &str, field: &str| {
            let error = toml::from_str::<Config>(text).unwrap().validate().unwrap_err();
            assert_eq!(error.field, field, "{error}");
        };
        check("listen = \"nowhere\"", "listen");
        check("index = [\"nowhere at all\"]", "index[0]");
        check("[[engine]]\nurl = \"http://a\"\nrole = \"x\"", "engine[0].role");
        check(
            "[[engine]]\nurl = \"http://a:1\"\n[[engine]]\nurl = \"http://a:1\"",
            "engine[1].url",
        );
        for url in [
            "http://169.254.169.254",
            "http://[fe80::1]:8000",
            "http://metadata.google.internal.",
        ] {
            check(&format!("[[engine]]\nurl = \"{url}\""), "engine[0].url");
        }
        check("policy = \"fastest\"", "policy");
        check("[[pool]]\nname = \"p\"\npolicy = \"bogus\"", "pool[0].policy");
        check("max_body_bytes = 3", "max_body_bytes");
        check("body_memory_bytes = 3", "body_memory_bytes");
        assert!(
            toml::from_str::<Config>("lisen = 1")
                .unwrap_err()
                .to_string()
                .contains("lisen")
        );
    }
}
