//! Three index nodes in this process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cairn_index_node::{Config, PeerConfig, Running, start, start_on};
use cairn_proto::security::{AuthChannel, Security};
use cairn_proto::{HeldPort, v1};
use tokio::net::TcpListener;

/// Everything that must happen happens within this, on a loaded machine too.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `check` gives a value.
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut check: impl FnMut() -> F) -> T {
    let begun = Instant::now();
    loop {
        if let Some(value) = check().await {
            return value;
        }
        assert!(begun.elapsed() < PATIENCE, "this never happened: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub fn channel(address: &str) -> AuthChannel {
    Security::default().load().unwrap().client_channel(address).unwrap()
}

pub fn admin(address: &str) -> v1::admin_client::AdminClient<AuthChannel> {
    v1::admin_client::AdminClient::new(channel(address))
}

pub struct Cluster {
    pub configs: Vec<Config>,
    pub nodes: Vec<Option<Running>>,
    pub directory: tempfile::TempDir,
    /// The nodes' ports stay theirs while they are down.
    ports: Vec<HeldPort>,
}

pub fn node_config(id: u64, listen: SocketAddr, data_dir: PathBuf) -> Config {
    Config {
        cluster: "test".to_owned(),
        node_id: id,
        listen,
        data_dir,
        free_disk_mib_min: 0,
        heartbeat_ms: 100,
        // Longer than a busy machine keeps a leader from being heard.
        election_ms: 2_000,
        ..Config::default()
    }
}

/// Nodes 1 and on, at these ports.
pub fn peers(ports: &[HeldPort]) -> Vec<PeerConfig> {
    let peer = |(id, port): (u64, &HeldPort)| PeerConfig {
        id,
        address: port.address().to_string(),
    };
    (1u64..).zip(ports).map(peer).collect()
}

impl Cluster {
    pub async fn start(size: usize) -> Self {
        Self::start_with(size, |_| {}).await
    }

    pub async fn start_with(size: usize, adjust: impl Fn(&mut Config)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let ports: Vec<HeldPort> = (0..size).map(|_| HeldPort::hold(0).unwrap()).collect();
        let peers = peers(&ports);
        let mut cluster = Self {
            configs: Vec::new(),
            nodes: Vec::new(),
            directory,
            ports: Vec::new(),
        };
        for (id, port) in (1u64..).zip(ports) {
            let mut config = node_config(id, port.address(), cluster.directory.path().join(format!("node-{id}")));
            config.peers.clone_from(&peers);
            adjust(&mut config);
            cluster.add(config, port).await;
        }
        cluster.leader().await;
        cluster
    }

    async fn add(&mut self, config: Config, port: HeldPort) {
        let listener = TcpListener::bind(port.address()).await.unwrap();
        self.nodes.push(Some(start_on(config.clone(), listener).await.unwrap()));
        self.configs.push(config);
        self.ports.push(port);
    }

    pub fn address(&self, i: usize) -> String {
        self.configs[i].listen.to_string()
    }

    pub fn running(&self) -> impl Iterator<Item = (usize, &Running)> {
        self.nodes
            .iter()
            .enumerate()
            .filter_map(|(i, node)| node.as_ref().map(|node| (i, node)))
    }

    /// Position of the leader, once it is ready.
    pub async fn leader(&self) -> usize {
        eventually("a leader is ready", || async {
            let leading = |(_, node): &(usize, &Running)| node.ready().is_ok() && node.member().role == "leader";
            self.running().find(leading).map(|(i, _)| i)
        })
        .await
    }

    pub async fn follower(&self) -> usize {
        let leader = self.leader().await;
        self.running().map(|(i, _)| i).find(|i| *i != leader).unwrap()
    }

    pub async fn stop(&mut self, i: usize) {
        if let Some(node) = self.nodes[i].take() {
            node.stop().await;
        }
    }

    pub async fn restart(&mut self, i: usize) {
        let config = self.configs[i].clone();
        self.nodes[i] = Some(
            eventually("the port and the data directory are free again", || async {
                start(config.clone()).await.ok()
            })
            .await,
        );
    }

    /// A fresh node that waits to be added.
    pub async fn joiner(&mut self, id: u64, directory: &str) -> usize {
        let port = HeldPort::hold(0).unwrap();
        let path = self.directory.path().join(directory);
        let config = Config {
            join: true,
            ..node_config(id, port.address(), path)
        };
        self.add(config, port).await;
        self.nodes.len() - 1
    }

    /// Term and applied index of all running nodes, once they agree.
    pub async fn place(&self) -> (u64, u64) {
        let applied = self.agree().await.0;
        let terms = self.running().map(|(_, node)| node.member().term);
        (terms.max().unwrap_or(0), applied)
    }

    /// Waits until every running node stands at the same place with the same digest (INV-01).
    pub async fn agree(&self) -> (u64, String) {
        eventually("all nodes agree", || async {
            let mut seen: Vec<(u64, String)> = self
                .running()
                .map(|(_, node)| node.member())
                .map(|m| (m.applied_index, m.digest))
                .collect();
            seen.dedup();
            (seen.len() == 1 && seen[0].0 > 0).then(|| seen.remove(0))
        })
        .await
    }
}
