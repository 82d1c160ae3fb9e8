//! Configuration of an index node.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use cairn_proto::security::{Security, SecurityError};
use cairn_telemetry::TelemetryConfig;
use serde::{Deserialize, Serialize};

/// Most members that a configuration may name.
const PEERS_MAX: usize = 15;
/// Longest name of a cluster in bytes.
const CLUSTER_BYTES_MAX: usize = 128;

/// One member of the first membership.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerConfig {
    /// Its node id.
    pub id: u64,
    /// Where other nodes reach it: `host:port`.
    pub address: String,
}

/// Configuration of an index node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Name of the cluster; a data directory belongs to one for ever.
    pub cluster: String,
    /// Id of this node; from 1, never used again once its data are gone.
    pub node_id: u64,
    /// gRPC address of agents, routers, tools and other index nodes.
    pub listen: SocketAddr,
    /// Where others reach `listen`, `host:port`; empty: this node's own entry in `peers`, else the address bound.
    pub advertise: String,
    /// Where log and snapshots lie.
    pub data_dir: PathBuf,
    /// Address of `/metrics`, `/live` and `/ready`; none where absent.
    pub ops_listen: Option<SocketAddr>,
    /// All members of a new cluster, this node too; empty for a cluster of one. Without meaning after the first start.
    pub peers: Vec<PeerConfig>,
    /// A fresh node waits to be added to a running cluster instead of forming one.
    pub join: bool,
    /// An agent silent for this long loses its lease, in milliseconds.
    pub lease_ms: u32,
    /// Blocks of a lapsed source go this much later, in milliseconds.
    pub lease_grace_ms: u32,
    /// Longest time that the leader gathers batches into one log entry, in milliseconds.
    pub batch_window_ms: u64,
    /// How often the leader is heard, in milliseconds.
    pub heartbeat_ms: u64,
    /// Silence of the leader after which an election begins, in milliseconds; drawn between this and twice it.
    pub election_ms: u64,
    /// Log younger than this stays after a snapshot, in seconds.
    pub keep_log_s: u64,
    /// Log beyond this goes after a snapshot however young it is, in MiB.
    pub keep_log_mib_max: u64,
    /// A snapshot is made after this much log, in MiB.
    pub snapshot_after_mib: u64,
    /// A start with less free disk space is refused, in MiB.
    pub free_disk_mib_min: u64,
    /// Cluster token and TLS.
    pub security: Security,
    /// Traces and logs.
    pub telemetry: TelemetryConfig,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cluster: "cairn".to_owned(),
            node_id: 1,
            listen: SocketAddr::from(([127, 0, 0, 1], 7400)),
            advertise: String::new(),
            data_dir: PathBuf::from("cairn-index-data"),
            ops_listen: None,
            peers: Vec::new(),
            join: false,
            lease_ms: 10_000,
            lease_grace_ms: 60_000,
            batch_window_ms: 5,
            heartbeat_ms: 200,
            election_ms: 1_000,
            keep_log_s: 90,
            keep_log_mib_max: 1_024,
            snapshot_after_mib: 256,
            free_disk_mib_min: 64,
            security: Security::default(),
            telemetry: TelemetryConfig::default(),
        }
    }
}

/// What is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A value that can't work.
    #[error("`{field}`: {problem}")]
    Invalid {
        /// The setting.
        field: &'static str,
        /// What is wrong and what to do.
        problem: String,
    },
    /// The security settings, or an address that needs them.
    #[error(transparent)]
    Security(#[from] SecurityError),
}

fn invalid(field: &'static str, problem: impl Into<String>) -> ConfigError {
    ConfigError::Invalid {
        field,
        problem: problem.into(),
    }
}

/// An address without scheme and trailing slash.
pub(crate) fn bare_address(address: &str) -> &str {
    let bare = address
        .strip_prefix("http://")
        .or_else(|| address.strip_prefix("https://"))
        .unwrap_or(address);
    bare.trim_end_matches('/')
}

fn check_address(field: &'static str, address: &str) -> Result<(), ConfigError> {
    match bare_address(address).rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port != 0) => Ok(()),
        Some(_) | None => Err(invalid(
            field,
            format!("`{address}` isn't host:port with a port from 1 to 65535"),
        )),
    }
}

impl Config {
    /// Checks everything that can be checked without touching disk or network.
    ///
    /// # Errors
    /// [`ConfigError`], naming the setting and the remedy.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.cluster.is_empty() || self.cluster.len() > CLUSTER_BYTES_MAX {
            return Err(invalid(
                "cluster",
                format!("give a name of 1 to {CLUSTER_BYTES_MAX} bytes"),
            ));
        }
        if self.cluster.chars().any(char::is_control) {
            return Err(invalid("cluster", "control characters aren't allowed"));
        }
        if self.node_id == 0 {
            return Err(invalid("node_id", "0 means nobody; ids begin at 1"));
        }
        if self.data_dir.as_os_str().is_empty() {
            return Err(invalid("data_dir", "give a directory"));
        }
        self.check_peers()?;
        self.check_times()?;
        self.security.validate()?;
        self.security.check_bind(self.listen)?;
        if let Some(ops) = self.ops_listen {
            self.security.check_bind(ops)?;
        }
        Ok(())
    }

    fn check_peers(&self) -> Result<(), ConfigError> {
        if self.peers.len() > PEERS_MAX {
            return Err(invalid(
                "peers",
                format!("{} members; at most {PEERS_MAX} are allowed", self.peers.len()),
            ));
        }
        let mut by_id = BTreeMap::new();
        let mut by_address = BTreeMap::new();
        for peer in &self.peers {
            if peer.id == 0 {
                return Err(invalid("peers", "an id is 0; ids begin at 1"));
            }
            check_address("peers", &peer.address)?;
            if let Some(other) = by_id.insert(peer.id, &peer.address) {
                return Err(invalid(
                    "peers",
                    format!(
                        "id {} is given twice, for {other} and for {}; every node needs its own",
                        peer.id, peer.address
                    ),
                ));
            }
            if let Some(other) = by_address.insert(bare_address(&peer.address), peer.id) {
                return Err(invalid(
                    "peers",
                    format!(
                        "address {} is given twice, for ids {other} and {}; correct one",
                        peer.address, peer.id
                    ),
                ));
            }
        }
        if !self.peers.is_empty() && !self.join && !by_id.contains_key(&self.node_id) {
            let problem = format!(
                "node_id {} isn't among them; list every member of the new cluster, this one too, or set join = true to \
                 be added to a running one",
                self.node_id
            );
            return Err(invalid("peers", problem));
        }
        if !self.advertise.is_empty() {
            check_address("advertise", &self.advertise)?;
            let listed = by_id.get(&self.node_id).map(|address| bare_address(address));
            if listed.is_some_and(|listed| listed != bare_address(&self.advertise)) && !self.join {
                let problem = format!("`{}` isn't this node's address in peers; give the same", self.advertise);
                return Err(invalid("advertise", problem));
            }
        }
        Ok(())
    }

    fn check_times(&self) -> Result<(), ConfigError> {
        if self.lease_ms < 500 {
            return Err(invalid(
                "lease_ms",
                format!("{}; at least 500, or leases lapse between renewals", self.lease_ms),
            ));
        }
        if self.heartbeat_ms < 20 || self.heartbeat_ms > 250 {
            return Err(invalid(
                "heartbeat_ms",
                format!("{}; give 20 to 250", self.heartbeat_ms),
            ));
        }
        if self.election_ms < self.heartbeat_ms * 3 {
            let problem = format!(
                "{}; give at least three times heartbeat_ms ({})",
                self.election_ms, self.heartbeat_ms
            );
            return Err(invalid("election_ms", problem));
        }
        if self.batch_window_ms > 1_000 {
            return Err(invalid(
                "batch_window_ms",
                format!("{}; give 0 to 1000", self.batch_window_ms),
            ));
        }
        if self.keep_log_s < 60 {
            return Err(invalid(
                "keep_log_s",
                format!("{}; keep at least 60 seconds of log", self.keep_log_s),
            ));
        }
        if self.snapshot_after_mib == 0 || self.keep_log_mib_max == 0 {
            return Err(invalid(
                "snapshot_after_mib",
                "give at least 1 here and in keep_log_mib_max",
            ));
        }
        Ok(())
    }

    /// A configuration file with every setting at its default, explained.
    #[must_use]
    pub fn commented_default() -> String {
        format!("{COMMENTED}\n{}", TelemetryConfig::COMMENTED)
    }
}

const COMMENTED: &str = r#"# Name of the cluster; a data directory belongs to one for ever.
cluster = "cairn"
# Id of this node, from 1; never used again once its data are gone.
node_id = 1
# gRPC address of agents, routers, tools and other index nodes. Beyond loopback [security] must be complete.
listen = "127.0.0.1:7400"
# Where others reach it, host:port; empty: this node's own entry in peers, else the address bound.
advertise = ""
# Where log and snapshots lie.
data_dir = "cairn-index-data"
# Address of /metrics, /live and /ready; remove the sign to open it.
# ops_listen = "127.0.0.1:7401"
# A fresh node waits to be added (`cairn members add`) instead of forming a cluster.
join = false
# An agent silent for this long loses its lease; its blocks go lease_grace_ms later.
lease_ms = 10000
lease_grace_ms = 60000
# Longest time that the leader gathers batches into one log entry.
batch_window_ms = 5
# How often the leader is heard, and after how much silence an election begins (drawn between this and twice it).
heartbeat_ms = 200
election_ms = 1000
# A snapshot is made after this much log; log younger than keep_log_s stays behind it, up to keep_log_mib_max.
snapshot_after_mib = 256
keep_log_s = 90
keep_log_mib_max = 1024
# A start with less free disk space is refused.
free_disk_mib_min = 64

# All members of a new cluster, this node too; none for a cluster of one. Without meaning after the first start.
# [[peers]]
# id = 1
# address = "127.0.0.1:7400"

[security]
# The same token on every host (at least 16 printable characters), and TLS from PEM files.
# cluster_token_file = "/etc/cairn/token"
# tls_cert_file = "/etc/cairn/tls.crt"
# tls_key_file = "/etc/cairn/tls.key"
# tls_ca_file = "/etc/cairn/ca.crt"
"#;

#[cfg(test)]
mod tests {
    use super::*;

    fn three() -> Config {
        let peers = (1..=3)
            .map(|id| PeerConfig {
                id,
                address: format!("127.0.0.1:740{id}"),
            })
            .collect();
        Config {
            peers,
            ..Config::default()
        }
    }

    fn refused(change: impl FnOnce(&mut Config), words: &[&str]) {
        let mut config = three();
        change(&mut config);
        let message = config.validate().unwrap_err().to_string();
        for word in words {
            assert!(message.contains(word), "{message} should say {word}");
        }
    }

    #[test]
    fn the_commented_default_is_the_default() {
        let parsed: Config = toml::from_str(&Config::commented_default()).unwrap();
        assert_eq!(parsed, Config::default());
        parsed.validate().unwrap();
        three().validate().unwrap();
    }

    #[test]
    fn contradictions_are_refused_naming_the_setting_and_the_remedy() {
        refused(|c| c.node_id = 0, &["node_id", "1"]);
        refused(|c| c.cluster.clear(), &["cluster"]);
        refused(
            |c| c.peers[2].id = 2,
            &["peers", "id 2", "twice", "127.0.0.1:7402", "127.0.0.1:7403"],
        );
        refused(
            |c| c.peers[2].address = "http://127.0.0.1:7401/".to_owned(),
            &["peers", "twice", "1", "3"],
        );
        refused(|c| c.peers[1].address = "host".to_owned(), &["peers", "host:port"]);
        refused(|c| c.node_id = 9, &["peers", "9", "join"]);
        refused(|c| c.advertise = "10.0.0.1:7401".to_owned(), &["advertise"]);
        refused(
            |c| c.listen = "0.0.0.0:7400".parse().unwrap(),
            &["cluster_token_file", "tls_cert_file"],
        );
        refused(
            |c| c.ops_listen = Some("0.0.0.0:1".parse().unwrap()),
            &["cluster_token_file"],
        );
        refused(|c| c.lease_ms = 1, &["lease_ms"]);
        refused(|c| c.election_ms = 300, &["election_ms", "heartbeat_ms"]);
        refused(|c| c.keep_log_s = 5, &["keep_log_s", "60"]);
    }

    #[test]
    fn an_unknown_setting_is_refused() {
        let error = toml::from_str::<Config>("node = 3").unwrap_err().to_string();
        assert!(error.contains("node_id"), "{error}");
    }
}
