//! Hands soft frames of this node's own clients to every other node, one hop.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use cairn_proto::v1::{SoftFrame, SoftFrames};
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;

use crate::metrics::Metrics;
use crate::node::Node;
use crate::peers::Peers;
use crate::soft::Group;

/// How often the membership is compared with the running relays.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Frames of this long go in one message.
const GATHER: Duration = Duration::from_millis(5);
/// Frames of one message.
const FRAMES_MAX: usize = 1_024;
/// Messages on the way to one node.
const AHEAD: usize = 16;
/// A broken relay is tried again after this.
const PAUSE: Duration = Duration::from_millis(300);

/// Keeps one relay for each other member; ends with the node.
pub(crate) async fn run(node: Weak<Node>) {
    let mut relays: HashMap<String, JoinHandle<()>> = HashMap::new();
    loop {
        let Some(node) = node.upgrade() else { break };
        if node.stopping.is_cancelled() {
            break;
        }
        node.soft.expire();
        node.snapshots.expire().await;
        let view = node.consensus.view();
        let others: Vec<String> = view
            .members
            .iter()
            .filter(|member| member.id != view.node)
            .map(|member| member.peer.address.clone())
            .collect();
        relays.retain(|address, task| {
            let stays = others.contains(address);
            if !stays {
                task.abort();
            }
            stays
        });
        for address in others {
            relays.entry(address.clone()).or_insert_with(|| {
                tokio::spawn(relay(
                    node.peers.clone(),
                    address,
                    node.soft.relayed(),
                    node.metrics.clone(),
                ))
            });
        }
        let stopping = node.stopping.clone();
        drop(node);
        tokio::select! {
            () = stopping.cancelled() => break,
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
    }
    for task in relays.into_values() {
        task.abort();
    }
}

async fn relay(peers: Peers, address: String, mut frames: broadcast::Receiver<Group>, metrics: Metrics) {
    let mut reachable = true;
    loop {
        let Ok(mut client) = peers.soft(&address) else { return };
        let (sender, receiver) = mpsc::channel(AHEAD);
        let mut call = Box::pin(async move { client.publish(ReceiverStream::new(receiver)).await });
        let ended = loop {
            tokio::select! {
                result = &mut call => break result.map(|_| ()),
                group = gather(&mut frames, &metrics) => match group {
                    Some(frames) => {
                        // A node that doesn't take them in time misses frames; the next ones repair that.
                        for part in frames.chunks(FRAMES_MAX) {
                            let part = SoftFrames { frames: part.to_vec(), relayed: true };
                            if sender.try_send(part).is_err() {
                                Metrics::count(&metrics.soft_frames, "relay_full");
                            }
                        }
                    }
                    None => return,
                },
            }
        };
        if let (Err(status), true) = (&ended, reachable) {
            tracing::info!(
                address,
                message = status.message(),
                "this node takes no soft state; it is tried again until it does"
            );
        }
        reachable = ended.is_ok();
        tokio::time::sleep(PAUSE).await;
        // What came meanwhile is old by now.
        frames = frames.resubscribe();
    }
}

/// The next frames, gathered for a moment; `None` once the hub is gone.
async fn gather(frames: &mut broadcast::Receiver<Group>, metrics: &Metrics) -> Option<Vec<SoftFrame>> {
    let first: Group = loop {
        match frames.recv().await {
            Ok(group) => break group,
            Err(RecvError::Lagged(_)) => Metrics::count(&metrics.soft_frames, "relay_lagged"),
            Err(RecvError::Closed) => return None,
        }
    };
    let mut all: Vec<SoftFrame> = Arc::unwrap_or_clone(first);
    let closes = tokio::time::Instant::now() + GATHER;
    while all.len() < FRAMES_MAX {
        match tokio::time::timeout_at(closes, frames.recv()).await {
            Ok(Ok(group)) => all.extend(group.iter().cloned()),
            Ok(Err(_)) | Err(_) => break,
        }
    }
    Some(all)
}
