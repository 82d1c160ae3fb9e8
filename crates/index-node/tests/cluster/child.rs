//! Index nodes as processes of their own, for faults that only a process can have.
//!
//! The test binary starts itself again: `child_node` does nothing unless told which configuration to run.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use cairn_index_node::{Config, start};
use cairn_proto::v1;

use crate::harness::{admin, eventually, node_config};

const VARIABLE: &str = "CAIRN_TEST_NODE_CONFIG";

/// Not a test of its own: the body of a child process.
#[test]
fn child_node() {
    let Ok(path) = std::env::var(VARIABLE) else { return };
    let config: Config = toml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut node = match start(config).await {
            Ok(node) => node,
            Err(error) => {
                eprintln!("START REFUSED: {error}");
                std::process::exit(3);
            }
        };
        let ended = node.wait().await.unwrap_err();
        eprintln!("NODE ENDED: {ended}");
        std::process::exit(4);
    });
}

pub struct ChildNode {
    pub config: Config,
    path: PathBuf,
    process: Option<Child>,
}

impl ChildNode {
    pub fn start(config: Config, directory: &std::path::Path) -> Self {
        let path = directory.join(format!("node-{}-{}.toml", config.node_id, config.listen.port()));
        std::fs::write(&path, toml::to_string(&config).unwrap()).unwrap();
        let mut node = Self {
            config,
            path,
            process: None,
        };
        node.restart();
        node
    }

    pub fn restart(&mut self) {
        assert!(self.process.is_none());
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child::child_node", "--nocapture", "--test-threads=1"])
            .env(VARIABLE, &self.path)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        self.process = Some(child);
    }

    pub fn address(&self) -> String {
        self.config.listen.to_string()
    }

    /// As `kill -9` does.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    pub fn signal(&self, signal: &str) {
        let id = self.process.as_ref().unwrap().id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    pub async fn status(&self) -> Option<v1::StatusReply> {
        let asked = tokio::time::timeout(Duration::from_secs(3), async {
            admin(&self.address()).status(v1::StatusRequest {}).await
        });
        Some(asked.await.ok()?.ok()?.into_inner())
    }
}

impl Drop for ChildNode {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Ports that were free a moment ago.
pub fn free_ports(n: usize) -> Vec<std::net::SocketAddr> {
    let held: Vec<std::net::TcpListener> = (0..n)
        .map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap())
        .collect();
    held.iter().map(|listener| listener.local_addr().unwrap()).collect()
}

/// Three nodes as processes.
pub async fn three(directory: &std::path::Path) -> Vec<ChildNode> {
    let addresses = free_ports(3);
    let peers: Vec<cairn_index_node::PeerConfig> = (1u64..)
        .zip(&addresses)
        .map(|(id, address)| cairn_index_node::PeerConfig {
            id,
            address: address.to_string(),
        })
        .collect();
    let nodes: Vec<ChildNode> = (1u64..)
        .zip(addresses)
        .map(|(id, address)| {
            let data = directory.join(format!("data-{id}"));
            let config = Config {
                peers: peers.clone(),
                lease_ms: 60_000,
                ..node_config(id, address, data)
            };
            ChildNode::start(config, directory)
        })
        .collect();
    leader(&nodes).await;
    nodes
}

/// Position of the leader as a majority sees it.
pub async fn leader(nodes: &[ChildNode]) -> usize {
    eventually("a leader is known", || async {
        for node in nodes {
            if let Some(status) = node.status().await {
                let leads = |m: &&v1::Member| m.role == "leader" && m.id == status.leader;
                if let Some(member) = status.members.iter().find(leads) {
                    return nodes.iter().position(|node| node.config.node_id == member.id);
                }
            }
        }
        None
    })
    .await
}

/// Waits until every member answers with one applied index and one digest.
pub async fn agree(nodes: &[ChildNode]) {
    eventually("all nodes agree", || async {
        let status = nodes[0].status().await?;
        let first = status.members.first()?;
        let same = |m: &v1::Member| m.applied_index == first.applied_index && m.digest == first.digest && m.term > 0;
        (status.members.len() == nodes.len() && status.members.iter().all(same)).then_some(())
    })
    .await;
}
