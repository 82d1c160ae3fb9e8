//! The event stream: live, replayed, bound or connected, by rank.

use cairn_agent::wire::{ReplayFrames, decode, live_frames, replay_frames};
use cairn_engine_sim::events::Wire;
use cairn_engine_sim::start;
use cairn_ingest::EngineEvent;
use zeromq::{Socket, SubSocket};

use crate::client::{complete, eventually, instant, next, replay, subscribe};

#[tokio::test]
async fn stores_arrive_live_numbered_from_zero_and_are_replayed_with_an_end_marker() {
    for (wire, frames) in [(Wire::Vllm0_23, 3), (Wire::Vllm0_32, 4), (Wire::Sglang0_5_23, 3)] {
        let mut config = instant();
        config.events.wire = wire;
        config.events.topic = "kv@test".into();
        let engine = start(config).await.unwrap();
        let mut live = subscribe(&engine, 0).await;
        // A subscription takes effect when the publisher has read it: repeat until one is heard.
        let mut seed = 0;
        let first = loop {
            seed += 1;
            complete(&engine, seed, 40).await;
            let heard = tokio::time::timeout(std::time::Duration::from_millis(50), next(&mut live)).await;
            if let Ok(frames) = heard {
                break frames;
            }
        };
        let heard = live_frames(&first).unwrap();
        assert_eq!(heard.topic, b"kv@test");
        let batch = decode(heard.seq, heard.payload);
        assert!(matches!(&batch.events[..], [EngineEvent::Stored(stored)] if stored.hashes.len() == 2));
        let answers = replay(engine.events()[0].replay.as_ref().unwrap(), 0).await;
        let (end, batches) = answers.split_last().unwrap();
        assert_eq!(replay_frames(end).unwrap(), ReplayFrames::End);
        for (seq, answer) in batches.iter().enumerate() {
            assert_eq!(answer.len(), frames);
            let ReplayFrames::Batch { seq: given, payload } = replay_frames(answer).unwrap() else {
                panic!("no batch")
            };
            assert_eq!(given, seq as u64);
            if given == heard.seq {
                assert_eq!(payload, heard.payload, "replayed bytes equal live bytes");
            }
        }
        assert_eq!(batches.len() as u32, seed);
        engine.stop().await;
    }
}

#[tokio::test]
async fn replay_keeps_the_last_batches_only() {
    let mut config = instant();
    config.events.buffer_steps = 3;
    let engine = start(config).await.unwrap();
    for seed in 0..6 {
        complete(&engine, seed, 40).await;
    }
    let answers = replay(engine.events()[0].replay.as_ref().unwrap(), 1).await;
    let seqs: Vec<u64> = answers
        .iter()
        .filter_map(|answer| match replay_frames(answer).unwrap() {
            ReplayFrames::Batch { seq, .. } => Some(seq),
            ReplayFrames::End => None,
        })
        .collect();
    assert_eq!(seqs, [3, 4, 5]);
    engine.stop().await;
}

#[tokio::test]
async fn a_publisher_that_connects_is_heard_by_a_subscriber_that_binds() {
    let mut socket = SubSocket::new();
    let endpoint = socket.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    socket.subscribe("").await.unwrap();
    let mut config = instant();
    config.events.bind = false;
    config.events.endpoint = endpoint;
    let engine = start(config).await.unwrap();
    let mut seed = 0;
    let frames = loop {
        seed += 1;
        complete(&engine, seed, 40).await;
        if let Ok(frames) = tokio::time::timeout(std::time::Duration::from_millis(50), next(&mut socket)).await {
            break frames;
        }
    };
    assert!(!decode(0, live_frames(&frames).unwrap().payload).events.is_empty());
    engine.stop().await;
}

#[tokio::test]
async fn each_rank_has_its_own_cache_sockets_and_number() {
    let mut config = instant();
    config.ranks = 2;
    let engine = start(config).await.unwrap();
    assert_ne!(engine.events()[0].live, engine.events()[1].live);
    let body = serde_json::json!({"prompt": vec![5; 40], "max_tokens": 1}).to_string();
    let (status, _) = crate::client::call(
        engine.http,
        "POST",
        "/v1/completions",
        "x-data-parallel-rank: 1\r\n",
        &body,
    )
    .await;
    assert_eq!(status, 200);
    let (one, other) = (&engine.events()[1].replay, &engine.events()[0].replay);
    let answers = eventually("the batch", || async {
        let answers = replay(one.as_ref().unwrap(), 0).await;
        (answers.len() == 2).then_some(answers)
    })
    .await;
    let ReplayFrames::Batch { payload, .. } = replay_frames(&answers[0]).unwrap() else {
        panic!("no batch")
    };
    assert_eq!(decode(0, payload).rank, Some(1));
    assert_eq!(replay(other.as_ref().unwrap(), 0).await.len(), 1);
    engine.stop().await;
}
