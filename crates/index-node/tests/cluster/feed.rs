//! Followers of the feed: snapshot, entries, resumption, cuts.

use std::time::{Duration, Instant};

use cairn_index::{IndexState, LogIndex, codec};
use cairn_proto::v1::{self, feed_frame::Frame};
use tonic::Streaming;

use crate::agent::Agent;
use crate::harness::{Cluster, PATIENCE, channel};
use crate::watch::Watch;

/// A view as routers build it.
#[derive(Default)]
struct View {
    state: IndexState,
    snapshot: Vec<u8>,
    snapshots: usize,
    soft: Vec<v1::SoftFrame>,
}

async fn follow(address: &str, applied_index: u64, digest: u64) -> Streaming<v1::FeedFrame> {
    let mut client = v1::feed_client::FeedClient::new(channel(address));
    let request = v1::FollowRequest {
        follower: "test".to_owned(),
        applied_index,
        digest,
        ..Default::default()
    };
    client.follow(request).await.unwrap().into_inner()
}

impl View {
    fn take(&mut self, frame: v1::FeedFrame) {
        match frame.frame.unwrap() {
            Frame::Snapshot(chunk) => {
                self.snapshot.extend_from_slice(&chunk.data);
                if chunk.last {
                    self.state = codec::decode_snapshot(self.snapshot.as_slice()).unwrap();
                    assert_eq!(self.state.digest().0, chunk.digest);
                    assert_eq!(self.state.applied().0, chunk.snapshot_index);
                    self.snapshot.clear();
                    self.snapshots += 1;
                }
            }
            Frame::Entries(entries) => {
                for entry in entries.entries {
                    assert!(entry.index > self.state.applied().0, "a view never goes back");
                    self.state
                        .apply(LogIndex(entry.index), &codec::decode_command(&entry.command).unwrap());
                }
                self.state.skip_to(LogIndex(frame.applied_index));
            }
            Frame::Soft(soft) => self.soft.extend(soft.frames),
            Frame::Idle(_) => self.state.skip_to(LogIndex(frame.applied_index)),
        }
    }

    async fn reach(&mut self, stream: &mut Streaming<v1::FeedFrame>, index: u64) {
        let begun = Instant::now();
        while self.state.applied().0 < index {
            assert!(begun.elapsed() < PATIENCE);
            self.take(stream.message().await.unwrap().unwrap());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_view_of_any_node_equals_the_index_and_resumes_without_a_snapshot() {
    let cluster = Cluster::start(3).await;
    let all: Vec<String> = (0..3).map(|i| cluster.address(i)).collect();
    let mut agent = Agent::register(all.clone(), "a").await;
    agent.push_until(10, 8).await;
    let mut views = Vec::new();
    for address in &all {
        views.push((View::default(), follow(address, 0, 0).await));
    }
    agent.push_until(30, 8).await;
    let (index, digest) = cluster.agree().await;
    for (view, stream) in &mut views {
        view.reach(stream, index).await;
        assert_eq!(format!("{:016x}", view.state.digest().0), digest, "INV-02");
        assert_eq!(view.snapshots, 1);
    }
    // Another node, from where the view stands: entries only.
    let (mut view, _) = views.remove(0);
    let mut stream = follow(&all[1], view.state.applied().0, view.state.digest().0).await;
    agent.push_until(40, 8).await;
    let (index, digest) = cluster.agree().await;
    view.reach(&mut stream, index).await;
    assert_eq!((view.snapshots, format!("{:016x}", view.state.digest().0)), (1, digest));
    // A view that claims something else gets a snapshot.
    let mut stream = follow(&all[1], view.state.applied().0, view.state.digest().0 ^ 1).await;
    let mut other = View::default();
    other.reach(&mut stream, index).await;
    assert_eq!(other.snapshots, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quiet_feed_says_every_quarter_second_that_it_lives_and_how_old_its_quorum_is() {
    let cluster = Cluster::start(3).await;
    for i in 0..3 {
        let mut stream = follow(&cluster.address(i), 0, 0).await;
        // Nothing is written, so every frame but the first is a sign of life; a busy machine may delay some.
        let (mut signs, mut fresh) = (0, 0);
        let mut last = Watch::start();
        while signs < 12 || fresh < 6 {
            let frame = tokio::time::timeout(PATIENCE, stream.message()).await;
            let frame = frame.expect("a sign of life").unwrap().unwrap();
            if signs > 1 {
                last.within(Duration::from_millis(800), "a sign of life");
            }
            last = Watch::start();
            signs += 1;
            fresh += u32::from(frame.quorum_age_ms < 1_000);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_cluster_is_refused() {
    let cluster = Cluster::start(1).await;
    let mut client = v1::feed_client::FeedClient::new(channel(&cluster.address(0)));
    let request = v1::FollowRequest {
        cluster: "other".to_owned(),
        ..Default::default()
    };
    let status = client.follow(request).await.unwrap_err();
    assert!(
        status.message().contains("\"test\"") && status.message().contains("\"other\""),
        "{status}"
    );
    let overlap = v1::OverlapRequest {
        pool: "nopool".to_owned(),
        ..Default::default()
    };
    assert_eq!(client.overlap(overlap).await.unwrap_err().code(), tonic::Code::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_that_takes_nothing_holds_nobody_up() {
    let cluster = Cluster::start(1).await;
    let address = cluster.address(0);
    let mut agent = Agent::register(vec![address.clone()], "a").await;
    let stalled = follow(&address, 0, 0).await;
    // More than its connection can hold: 15 MiB of changes.
    agent.push_until(240, 8_000).await;
    let mut view = View::default();
    let mut stream = follow(&address, 0, 0).await;
    let (index, digest) = cluster.agree().await;
    view.reach(&mut stream, index).await;
    assert_eq!(format!("{:016x}", view.state.digest().0), digest);
    drop(stalled);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopping_node_tells_its_followers() {
    let mut cluster = Cluster::start(1).await;
    let mut stream = follow(&cluster.address(0), 0, 0).await;
    stream.message().await.unwrap().unwrap();
    let asked = Watch::start();
    cluster.stop(0).await;
    asked.within(Duration::from_secs(3), "a stop that open streams don't hold up");
    loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ended without a word"),
            Err(status) => break assert!(status.message().contains("stopping"), "{status}"),
        }
    }
}
