//! The nodes under test.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cairn_proto::HeldPort;

use super::node::Node;
use super::{BenchError, LOOK_EVERY, Options, PATIENCE, Shared, failed, gauge};
use crate::{Config, PeerConfig};

/// A follower that is this many entries behind is level: what the leader has on its way to it.
const LEVEL_ENTRIES: u64 = 16;
/// Silence before an election: a busy machine keeps nodes waiting that share its cores with the load.
const ELECTION_MS: u64 = 5_000;
/// Longer than any pause between phases: nothing pushes then, and a lapse would be measured as a change.
const LEASE_MS: u32 = 300_000;

/// The nodes, of which one leads all the time.
pub(super) struct Cluster {
    nodes: Vec<Node>,
    leader: usize,
}

impl Cluster {
    pub(super) async fn start(options: &Options) -> Result<Self, BenchError> {
        let hold = || HeldPort::hold(0).map_err(failed);
        let ports: Vec<[HeldPort; 2]> = (0..options.nodes)
            .map(|_| Ok([hold()?, hold()?]))
            .collect::<Result<_, BenchError>>()?;
        let peers: Vec<PeerConfig> = (1u64..)
            .zip(&ports)
            .map(|(id, [grpc, _])| PeerConfig {
                id,
                address: grpc.address().to_string(),
            })
            .collect();
        let nodes = (1u64..).zip(ports).map(|(id, ports)| {
            let config = Config {
                cluster: "bench".to_owned(),
                node_id: id,
                listen: ports[0].address(),
                ops_listen: Some(ports[1].address()),
                data_dir: options.dir.join(format!("node-{id}")),
                peers: peers.clone(),
                election_ms: ELECTION_MS,
                lease_ms: LEASE_MS,
                ..Config::default()
            };
            Node::start(config, options.start, ports)
        });
        let mut cluster = Self {
            nodes: nodes.collect::<Result<_, _>>()?,
            leader: 0,
        };
        cluster.leader = cluster.find_leader().await?;
        for node in &cluster.nodes {
            node.ready().await?;
        }
        Ok(cluster)
    }

    async fn find_leader(&self) -> Result<usize, BenchError> {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            for (at, node) in self.nodes.iter().enumerate() {
                if node.stand().await.is_some_and(|stand| stand.leads) {
                    return Ok(at);
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Err(failed("no leader was found"))
    }

    pub(super) fn leader_address(&self) -> SocketAddr {
        self.nodes[self.leader].address()
    }

    /// A node that isn't the leader, where there is one, and never the one that goes away.
    pub(super) fn followed_address(&self) -> SocketAddr {
        self.nodes[(self.leader + 1) % self.nodes.len()].address()
    }

    /// Blocks that the leader knows to be held.
    pub(super) async fn memberships(&self) -> Result<u64, BenchError> {
        self.nodes[self.leader].metric("cairn_index_blocks").await
    }

    /// CPU that all nodes' processes have had.
    pub(super) fn cpu(&self) -> Duration {
        self.nodes.iter().filter_map(Node::pid).map(gauge::cpu_of).sum()
    }

    /// Waits until every node and the view have applied all that the leader has, and compares what they have.
    pub(super) async fn level(&self, shared: &Shared) -> Result<(), BenchError> {
        let begun = Instant::now();
        let mut found = Vec::new();
        while begun.elapsed() < PATIENCE {
            found.clear();
            for node in &self.nodes {
                found.extend(node.stand().await.map(|stand| (stand.applied, stand.digest)));
            }
            found.push((
                shared.view_at.load(Ordering::Acquire),
                shared.view_digest.load(Ordering::Acquire),
            ));
            let (applied, digest) = found[0];
            if found.len() > self.nodes.len() && found.iter().all(|each| each.0 == applied) {
                if found.iter().all(|each| each.1 == digest) {
                    return Ok(());
                }
                // The view's two words are read one after the other: look again before saying so.
                if begun.elapsed() > Duration::from_secs(5) {
                    return Err(failed(format!("the copies differ at one place: {found:?}")));
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Err(failed(format!("the nodes and the view didn't become level: {found:?}")))
    }

    /// A snapshot of every node, one after the other: longest duration in seconds, and most growth of a node's memory.
    pub(super) async fn snapshots(&self) -> Result<(f64, f64), BenchError> {
        let (mut longest, mut ratio) = (0f64, 1f64);
        for node in &self.nodes {
            let Some(pid) = node.pid() else { continue };
            let begun = Instant::now();
            let (taken, grown) = gauge::growth(pid, node.snapshot()).await;
            taken?;
            longest = longest.max(begun.elapsed().as_secs_f64());
            ratio = ratio.max(grown);
        }
        Ok((longest, ratio))
    }

    pub(super) async fn snapshot_stall_ms_max(&self) -> Result<f64, BenchError> {
        let mut longest = 0;
        for node in &self.nodes {
            longest = longest.max(node.metric("cairn_index_snapshot_stall_us").await?);
        }
        Ok(longest as f64 / 1e3)
    }

    /// Kills a follower for a while: how long its start on its data took, and how long until it was level with the leader.
    pub(super) async fn leave_and_return(&mut self, away: Duration) -> Result<(Duration, Duration), BenchError> {
        let gone = (self.leader + 2) % self.nodes.len();
        self.nodes[gone].kill();
        tokio::time::sleep(away).await;
        let begun = Instant::now();
        self.nodes[gone].go_on()?;
        let (back, leader) = (&self.nodes[gone], &self.nodes[self.leader]);
        let mut restored = None;
        while begun.elapsed() < PATIENCE {
            if let (Some(at), Some(leads)) = (back.stand().await, leader.stand().await) {
                let restored = *restored.get_or_insert_with(|| begun.elapsed());
                if at.applied + LEVEL_ENTRIES >= leads.applied {
                    return Ok((restored, begun.elapsed()));
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Err(failed("the follower that was away didn't catch up"))
    }
}
