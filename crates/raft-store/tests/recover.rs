//! When a majority is lost for good, one node goes on alone.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use cairn_blocks::ClusterSeed;
use cairn_index::{Command, codec};
use cairn_raft_store::{
    AppliedEntry, ChunkReceiver, Consensus, Observer, Options, Peer, PeerFuture, PeerTransport, TransportError,
    recover_alone,
};

struct Nobody;

impl Observer for Nobody {
    fn applied(&self, _entry: &AppliedEntry<'_>) {}
    fn installed(&self, _index: u64, _digest: u64) {}
}

impl PeerTransport for Nobody {
    fn append(&self, _peer: &Peer, _payload: Bytes, _timeout: Duration) -> PeerFuture {
        Box::pin(async { Err(TransportError::Unreachable("nobody is there".to_owned())) })
    }
    fn vote(&self, _peer: &Peer, _payload: Bytes, _timeout: Duration) -> PeerFuture {
        Box::pin(async { Err(TransportError::Unreachable("nobody is there".to_owned())) })
    }
    fn snapshot(&self, _peer: &Peer, _chunks: ChunkReceiver) -> PeerFuture {
        Box::pin(async { Err(TransportError::Unreachable("nobody is there".to_owned())) })
    }
}

fn options(dir: &std::path::Path) -> Options {
    Options {
        heartbeat: Duration::from_millis(50),
        election: Duration::from_millis(200),
        free_bytes_min: 0,
        ..Options::new(dir.to_owned(), "c", 1, 11)
    }
}

async fn open(dir: &std::path::Path) -> Consensus {
    Consensus::open(options(dir), Arc::new(Nobody), Arc::new(Nobody))
        .await
        .unwrap()
}

async fn until(what: &str, check: impl Fn() -> bool) {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < Duration::from_secs(30), "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn peer(store: u64) -> Peer {
    Peer {
        address: "127.0.0.1:1".to_owned(),
        store,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_left_alone_goes_on_with_all_it_had() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path();
    assert!(
        recover_alone(options(dir), "127.0.0.1:1").await.is_err(),
        "nothing to recover"
    );
    let node = open(dir).await;
    node.initialise(BTreeMap::from([(1, peer(11))])).await.unwrap();
    until("it leads", || node.view().leads).await;
    let command = Command::InitCluster {
        cluster: "c".to_owned(),
        seed: ClusterSeed(5),
    };
    let bytes = Bytes::from(codec::encode_command(&command));
    node.propose(bytes.clone()).await.unwrap().wait().await.unwrap();
    node.snapshot().await.unwrap();
    until("the snapshot is there", || node.view().snapshot > 0).await;
    // Another member is named and never answers.
    let added = node.add_member(2, peer(22), Duration::from_millis(100)).await;
    assert!(added.is_err());
    assert!(node.close().await);

    recover_alone(options(dir), "127.0.0.1:1").await.unwrap();
    let node = open(dir).await;
    until("it leads alone", || node.view().leads).await;
    assert_eq!(node.view().members.len(), 1);
    assert_eq!(node.read(|state| state.registry().seed), Some(ClusterSeed(5)));
    node.propose(bytes).await.unwrap().wait().await.unwrap();
    assert!(node.quorum_age_ms() < 5_000);
    assert!(node.close().await);
}
