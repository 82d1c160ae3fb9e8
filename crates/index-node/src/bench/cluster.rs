//! The nodes under test.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::net::TcpListener;

use super::{BenchError, Options, PATIENCE, Shared, failed, gauge};
use crate::{Config, PeerConfig, Running, start_on};

/// Pause between two looks at the nodes.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// A follower that is this many entries behind is level: what the leader has on its way to it.
const LEVEL_ENTRIES: u64 = 16;
/// Silence before an election: a busy machine keeps nodes waiting that share its cores with the load.
const ELECTION_MS: u64 = 5_000;
/// Longer than any pause between phases: nothing pushes then, and a lapse would be measured as a change.
const LEASE_MS: u32 = 300_000;

/// The nodes, of which one leads all the time.
pub(super) struct Cluster {
    nodes: Vec<Option<Running>>,
    configs: Vec<Config>,
    addresses: Vec<SocketAddr>,
    leader: usize,
}

impl Cluster {
    pub(super) async fn start(options: &Options) -> Result<Self, BenchError> {
        let (mut listeners, mut peers, mut addresses) = (Vec::new(), Vec::new(), Vec::new());
        for id in 1..=options.nodes as u64 {
            let listener = TcpListener::bind("127.0.0.1:0").await.map_err(failed)?;
            let address = listener.local_addr().map_err(failed)?;
            peers.push(PeerConfig {
                id,
                address: address.to_string(),
            });
            addresses.push(address);
            listeners.push(listener);
        }
        let (mut nodes, mut configs) = (Vec::new(), Vec::new());
        for (peer, listener) in peers.iter().zip(listeners) {
            let config = Config {
                cluster: "bench".to_owned(),
                node_id: peer.id,
                data_dir: options.dir.join(format!("node-{}", peer.id)),
                peers: peers.clone(),
                election_ms: ELECTION_MS,
                lease_ms: LEASE_MS,
                ..Config::default()
            };
            configs.push(config.clone());
            nodes.push(Some(start_on(config, listener).await.map_err(failed)?));
        }
        let mut cluster = Self {
            nodes,
            configs,
            addresses,
            leader: 0,
        };
        cluster.leader = cluster.find_leader().await?;
        Ok(cluster)
    }

    async fn find_leader(&self) -> Result<usize, BenchError> {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            let leads = |node: &Option<Running>| {
                node.as_ref()
                    .is_some_and(|n| n.ready().is_ok() && n.member().role == "leader")
            };
            if let Some(leader) = self.nodes.iter().position(leads) {
                return Ok(leader);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Err(failed("no leader was found"))
    }

    pub(super) fn leader_address(&self) -> SocketAddr {
        self.addresses[self.leader]
    }

    /// A node that isn't the leader, where there is one, and never the one that goes away.
    pub(super) fn followed_address(&self) -> SocketAddr {
        self.addresses[(self.leader + 1) % self.addresses.len()]
    }

    /// Blocks that the leader knows to be held.
    pub(super) fn memberships(&self) -> u64 {
        self.nodes[self.leader].as_ref().map_or(0, Running::held_blocks)
    }

    fn all(&self) -> impl Iterator<Item = &Running> {
        self.nodes.iter().flatten()
    }

    /// Waits until every node and the view have applied all that the leader has, and compares what they have.
    pub(super) async fn level(&self, shared: &Shared) -> Result<(), BenchError> {
        let begun = Instant::now();
        let mut found = Vec::new();
        while begun.elapsed() < PATIENCE {
            found = self.all().map(Running::applied_digest).collect();
            found.push((
                shared.view_at.load(Ordering::Acquire),
                shared.view_digest.load(Ordering::Acquire),
            ));
            let (applied, digest) = found[0];
            if found.iter().all(|each| each.0 == applied) {
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

    /// A snapshot of every node, one after the other: longest duration in seconds, and growth of memory against one
    /// node's share of this process, which holds a copy for each node and one for the view.
    pub(super) async fn snapshots(&self) -> Result<(f64, f64), BenchError> {
        let (mut longest, mut ratio) = (0f64, 1f64);
        for node in self.all() {
            let taking = async {
                let before = node.snapshot_index();
                let begun = Instant::now();
                node.snapshot().await.map_err(failed)?;
                while node.snapshot_index() == before {
                    if begun.elapsed() > PATIENCE {
                        return Err(failed("a snapshot didn't end"));
                    }
                    tokio::time::sleep(LOOK_EVERY).await;
                }
                Ok(begun.elapsed().as_secs_f64())
            };
            let (taken, grown) = gauge::growth(taking).await;
            longest = longest.max(taken?);
            ratio = ratio.max(1.0 + (grown - 1.0) * (self.nodes.len() + 1) as f64);
        }
        Ok((longest, ratio))
    }

    pub(super) fn snapshot_stall_ms_max(&self) -> f64 {
        let longest = self.all().map(Running::snapshot_stall_us_max).max().unwrap_or(0);
        longest as f64 / 1e3
    }

    /// Stops a follower for a while: how long opening its data took, and how long until it was level with the leader.
    pub(super) async fn leave_and_return(&mut self, away: Duration) -> Result<(Duration, Duration), BenchError> {
        let gone = (self.leader + 2) % self.nodes.len();
        if let Some(node) = self.nodes[gone].take() {
            node.stop().await;
        }
        tokio::time::sleep(away).await;
        let listener = TcpListener::bind(self.addresses[gone]).await.map_err(failed)?;
        let begun = Instant::now();
        let node = start_on(self.configs[gone].clone(), listener).await.map_err(failed)?;
        let restored = begun.elapsed();
        self.nodes[gone] = Some(node);
        let applied = |at: usize| self.nodes[at].as_ref().map_or(0, |node| node.applied_digest().0);
        while begun.elapsed() < PATIENCE {
            if applied(gone) + LEVEL_ENTRIES >= applied(self.leader) {
                return Ok((restored, begun.elapsed()));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Err(failed("the follower that was away didn't catch up"))
    }

    pub(super) async fn stop(self) {
        for node in self.nodes.into_iter().flatten() {
            node.stop().await;
        }
    }
}
