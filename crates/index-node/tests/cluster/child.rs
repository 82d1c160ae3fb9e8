//! Index nodes as processes of their own, for faults that only a process can have.

use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

use cairn_index_node::Config;
use cairn_proto::{HeldPort, v1};

use crate::harness::{admin, eventually, node_config, peers};
use crate::process;

pub struct ChildNode {
    pub config: Config,
    path: PathBuf,
    process: Option<Child>,
    /// Its own while it is down.
    _port: HeldPort,
}

impl ChildNode {
    pub fn start(config: Config, port: HeldPort, directory: &std::path::Path) -> Self {
        let path = directory.join(format!("node-{}-{}.toml", config.node_id, config.listen.port()));
        let mut node = Self {
            config,
            path,
            process: None,
            _port: port,
        };
        node.restart();
        node
    }

    pub fn restart(&mut self) {
        assert!(self.process.is_none());
        self.process = Some(process::spawn(&self.config, &self.path).unwrap());
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

/// Three nodes as processes.
pub async fn three(directory: &std::path::Path) -> Vec<ChildNode> {
    let ports: Vec<HeldPort> = (0..3).map(|_| HeldPort::hold(0).unwrap()).collect();
    let peers = peers(&ports);
    let nodes: Vec<ChildNode> = (1u64..)
        .zip(ports)
        .map(|(id, port)| {
            let data = directory.join(format!("data-{id}"));
            let config = Config {
                peers: peers.clone(),
                lease_ms: 60_000,
                ..node_config(id, port.address(), data)
            };
            ChildNode::start(config, port, directory)
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
