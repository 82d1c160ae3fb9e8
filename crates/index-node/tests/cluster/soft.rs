//! Loads and reservations reach every node's feed, one hop, and nothing of them enters the log.

use cairn_proto::v1::{self, feed_frame::Frame, soft_frame};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::harness::{Cluster, PATIENCE, channel};

fn router(n: u64) -> v1::SoftFrames {
    let workers = vec![v1::WorkerReservation {
        worker: 1,
        requests: 2,
        prefill_tokens: 3,
        decode_tokens: 4,
    }];
    let frame = v1::RouterFrame {
        router: "r1".to_owned(),
        boot: 1,
        n,
        workers,
        prefixes: vec![],
    };
    v1::SoftFrames {
        frames: vec![v1::SoftFrame {
            frame: Some(soft_frame::Frame::Router(frame)),
        }],
        relayed: false,
    }
}

async fn publisher(address: &str) -> mpsc::Sender<v1::SoftFrames> {
    let (sender, receiver) = mpsc::channel(8);
    let mut client = v1::soft_client::SoftClient::new(channel(address));
    tokio::spawn(async move { client.publish(ReceiverStream::new(receiver)).await });
    sender
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_published_at_one_node_comes_down_every_feed() {
    let cluster = Cluster::start(3).await;
    let before = cluster.place().await;
    let sender = publisher(&cluster.address(0)).await;
    let mut n = 0;
    for i in 0..3 {
        let mut client = v1::feed_client::FeedClient::new(channel(&cluster.address(i)));
        let mut stream = client.follow(v1::FollowRequest::default()).await.unwrap().into_inner();
        let begun = std::time::Instant::now();
        loop {
            assert!(begun.elapsed() < PATIENCE, "the frame never came");
            n += 1;
            sender.try_send(router(n)).ok();
            match stream.message().await.unwrap().unwrap().frame.unwrap() {
                Frame::Soft(soft) => {
                    let Some(soft_frame::Frame::Router(frame)) = &soft.frames[0].frame else {
                        panic!()
                    };
                    break assert_eq!((frame.router.as_str(), frame.workers[0].prefill_tokens), ("r1", 3));
                }
                Frame::Snapshot(_) | Frame::Entries(_) | Frame::Idle(_) => {}
            }
        }
    }
    // Only a new leader, which a busy machine may get, writes something of its own.
    let after = cluster.place().await;
    assert!(
        after == before || after.0 > before.0,
        "something of it entered the log: {before:?}, then {after:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_frames_end_the_stream_naming_the_field() {
    let cluster = Cluster::start(1).await;
    let mut client = v1::soft_client::SoftClient::new(channel(&cluster.address(0)));
    let load = v1::LoadReport {
        source: "s".to_owned(),
        kv_usage: 7.0,
        ..Default::default()
    };
    let frames = v1::SoftFrames {
        frames: vec![v1::SoftFrame {
            frame: Some(soft_frame::Frame::Load(load)),
        }],
        relayed: false,
    };
    let status = client.publish(tokio_stream::once(frames)).await.unwrap_err();
    assert!(status.message().contains("kv_usage"), "{status}");
}
