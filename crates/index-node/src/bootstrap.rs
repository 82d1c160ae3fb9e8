//! How a fresh node finds its place: it forms the cluster with the configured peers, or waits to be added.
//!
//! Membership names data directories, not ids alone: the first membership is made when every configured member has
//! answered once, by the one with the lowest id. A member that comes back with an emptied directory is told so instead
//! of voting twice.

use std::collections::BTreeMap;
use std::time::Duration;

use cairn_index::Command;
use cairn_proto::v1;
use cairn_raft_store::{Consensus, Peer};

use crate::config::{Config, bare_address};
use crate::node::Node;
use crate::peers::Peers;

/// Pause between rounds of asking.
const ROUND: Duration = Duration::from_millis(200);
/// A line is logged after this many rounds of waiting, and then as often.
const ROUNDS_PER_LINE: u32 = 150;

/// Why a fresh node must not start.
#[derive(Debug, Clone, thiserror::Error)]
pub enum BootstrapError {
    /// It was a member, and its data are gone.
    #[error(
        "node {node} is a member of the running cluster {cluster:?} and its data_dir is empty: its log is lost. Give it \
         a new node_id and join = true, then run `cairn members replace` for {node}"
    )]
    Emptied {
        /// This node.
        node: u64,
        /// The cluster.
        cluster: String,
    },
    /// The cluster runs without it.
    #[error(
        "cluster {cluster:?} runs already and node {node} isn't a member; set join = true and run `cairn members add`"
    )]
    NotAMember {
        /// This node.
        node: u64,
        /// The cluster.
        cluster: String,
    },
    /// A peer is somebody else.
    #[error("the peer at {address} is node {found} of cluster {cluster:?}; correct `peers` or `cluster`")]
    WrongPeer {
        /// Where.
        address: String,
        /// Its id.
        found: u64,
        /// Its cluster.
        cluster: String,
    },
    /// The core refuses.
    #[error("the first membership is refused: {0}")]
    Refused(String),
}

/// What one peer's answer means for a fresh node.
enum Answer {
    Silent,
    Fresh(Peer),
    /// It runs, and this node is a member of it, to be reached any moment.
    Member,
}

fn judge(
    config: &Config,
    own_store: u64,
    id: u64,
    address: &str,
    probe: v1::ProbeReply,
) -> Result<Answer, BootstrapError> {
    if probe.cluster != config.cluster || probe.node != id {
        let (address, found, cluster) = (address.to_owned(), probe.node, probe.cluster);
        return Err(BootstrapError::WrongPeer {
            address,
            found,
            cluster,
        });
    }
    if !probe.initialised {
        return Ok(Answer::Fresh(Peer {
            address: bare_address(address).to_owned(),
            store: probe.store,
        }));
    }
    let (node, cluster) = (config.node_id, probe.cluster);
    match probe.members.iter().find(|member| member.id == node) {
        Some(member) if member.store == own_store => Ok(Answer::Member),
        Some(_) => Err(BootstrapError::Emptied { node, cluster }),
        // A member that restarted a moment ago may not have read its membership yet.
        None if probe.members.is_empty() || config.join => Ok(Answer::Silent),
        None => Err(BootstrapError::NotAMember { node, cluster }),
    }
}

/// Brings a fresh node to its place; returns at once for one that has data.
pub(crate) async fn run(
    config: &Config,
    consensus: &Consensus,
    peers: &Peers,
    advertise: &str,
) -> Result<(), BootstrapError> {
    let own = Peer {
        address: advertise.to_owned(),
        store: consensus.identity().store,
    };
    let mut listed: BTreeMap<u64, String> = config
        .peers
        .iter()
        .map(|peer| (peer.id, bare_address(&peer.address).to_owned()))
        .collect();
    listed.insert(config.node_id, advertise.to_owned());
    let mut rounds = 0u32;
    while !consensus.is_initialised() {
        let others = listed.iter().filter(|(id, _)| **id != config.node_id);
        let asked = others.map(|(id, address)| async move {
            match peers.probe(address, &config.cluster).await {
                Ok(probe) => judge(config, own.store, *id, address, probe).map(|answer| (*id, answer)),
                Err(_) => Ok((*id, Answer::Silent)),
            }
        });
        let answers = futures::future::join_all(asked)
            .await
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?;
        let mut members = BTreeMap::from([(config.node_id, own.clone())]);
        let mut silent = Vec::new();
        for (id, answer) in answers {
            match answer {
                Answer::Fresh(peer) => {
                    members.insert(id, peer);
                }
                Answer::Silent => silent.push(id),
                Answer::Member => {}
            }
        }
        let lowest = listed.keys().next() == Some(&config.node_id);
        if !config.join && lowest && members.len() == listed.len() {
            consensus.initialise(members).await.map_err(BootstrapError::Refused)?;
            tracing::info!(
                members = listed.len(),
                cluster = config.cluster,
                "the cluster is formed"
            );
            return Ok(());
        }
        rounds += 1;
        if rounds.is_multiple_of(ROUNDS_PER_LINE) {
            let join = config.join;
            tracing::info!(?silent, join, "waiting to become a member");
        }
        tokio::time::sleep(ROUND).await;
    }
    Ok(())
}

/// While this node leads a cluster without a seed: names it once. Ends with the node.
pub(crate) async fn name_cluster(node: std::sync::Weak<Node>) {
    loop {
        let Some(node) = node.upgrade() else { return };
        let named = node.consensus.read(|state| state.registry().seed.is_some());
        if named {
            return;
        }
        if node.leader_now().leads {
            let seed = cairn_blocks::ClusterSeed(rand::random());
            let command = Command::InitCluster {
                cluster: node.config.cluster.clone(),
                seed,
            };
            if let Err(status) = node.commit(&command).await {
                tracing::debug!(message = status.message(), "the cluster isn't named yet");
            }
        }
        drop(node);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
