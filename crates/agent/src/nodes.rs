//! The index nodes that an agent knows: one is used at a time, the next one when it fails.

use std::sync::atomic::{AtomicUsize, Ordering};

use cairn_proto::limits::MESSAGE_BYTES_MAX;
use cairn_proto::security::{AuthChannel, Credentials, SecurityError};
use cairn_proto::v1::ingest_client::IngestClient;
use cairn_proto::v1::soft_client::SoftClient;
use parking_lot::RwLock;
use tonic::Status;

/// Metadata with the address of the node to ask instead, where a node knows it.
const LEADER_HINT: &str = "cairn-leader";
/// Nodes that are remembered, configured and hinted at.
const MAX_NODES: usize = 128;

struct Node {
    address: String,
    channel: AuthChannel,
}

/// The nodes; shared by everything that talks to the index.
pub struct IndexNodes {
    credentials: Credentials,
    nodes: RwLock<Vec<Node>>,
    current: AtomicUsize,
}

/// A node in use, and what it was when it was taken.
#[derive(Clone)]
pub struct Chosen {
    /// Its position; hand it back to [`IndexNodes::failed`].
    pub position: usize,
    /// Its address.
    pub address: String,
    channel: AuthChannel,
}

impl IndexNodes {
    /// Prepares a lazily connected channel to each address.
    ///
    /// # Errors
    /// When an address may not be called, or TLS can't be set up.
    pub fn new(addresses: &[String], credentials: Credentials) -> Result<Self, SecurityError> {
        let nodes = addresses
            .iter()
            .map(|address| {
                Ok(Node {
                    address: address.clone(),
                    channel: credentials.client_channel(address)?,
                })
            })
            .collect::<Result<Vec<_>, SecurityError>>()?;
        Ok(Self {
            credentials,
            nodes: RwLock::new(nodes),
            current: AtomicUsize::new(0),
        })
    }

    /// The node in use.
    #[must_use]
    pub fn current(&self) -> Chosen {
        let nodes = self.nodes.read();
        let position = self.current.load(Ordering::Relaxed) % nodes.len();
        let node = &nodes[position];
        Chosen {
            position,
            address: node.address.clone(),
            channel: node.channel.clone(),
        }
    }

    /// A call to `chosen` failed: whoever asks next gets the node that it named, or the next one.
    pub fn failed(&self, chosen: &Chosen, status: &Status) {
        let hint = status
            .metadata()
            .get(LEADER_HINT)
            .and_then(|hint| hint.to_str().ok())
            .filter(|h| !h.is_empty());
        let next = hint.and_then(|hint| self.position_of(hint));
        let count = self.nodes.read().len();
        let next = next.unwrap_or((chosen.position + 1) % count);
        // Another task may have moved on already.
        let _ = self
            .current
            .compare_exchange(chosen.position, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn position_of(&self, address: &str) -> Option<usize> {
        let bare = |a: &str| {
            a.trim_start_matches("https://")
                .trim_start_matches("http://")
                .trim_end_matches('/')
                .to_owned()
        };
        let known = |nodes: &[Node]| nodes.iter().position(|n| bare(&n.address) == bare(address));
        if let Some(position) = known(&self.nodes.read()) {
            return Some(position);
        }
        let channel = self.credentials.client_channel(address).ok()?;
        let mut nodes = self.nodes.write();
        if let Some(position) = known(&nodes) {
            return Some(position);
        }
        if nodes.len() >= MAX_NODES {
            return None;
        }
        nodes.push(Node {
            address: address.to_owned(),
            channel,
        });
        Some(nodes.len() - 1)
    }
}

impl Chosen {
    /// Client of its ingest service.
    #[must_use]
    pub fn ingest(&self) -> IngestClient<AuthChannel> {
        IngestClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// Client of its soft-state service.
    #[must_use]
    pub fn soft(&self) -> SoftClient<AuthChannel> {
        SoftClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_failure_moves_on_once_and_a_hint_is_followed() {
        let addresses = ["http://127.0.0.1:1".to_owned(), "http://127.0.0.1:2".to_owned()];
        let nodes = IndexNodes::new(&addresses, Credentials::default()).unwrap();
        let first = nodes.current();
        nodes.failed(&first, &Status::unavailable("x"));
        nodes.failed(&first, &Status::unavailable("x"));
        assert_eq!(nodes.current().position, 1);
        let mut hint = Status::unavailable("x");
        hint.metadata_mut().insert(LEADER_HINT, "127.0.0.1:3".parse().unwrap());
        nodes.failed(&nodes.current(), &hint);
        assert_eq!(nodes.current().address, "127.0.0.1:3");
        assert!(IndexNodes::new(&["http://10.0.0.1:2".to_owned()], Credentials::default()).is_err());
    }
}
