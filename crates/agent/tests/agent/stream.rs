//! The event stream: order, gaps, lost tails, topics, shapes.

use cairn_agent::{EngineConfig, EventsAt, EventsConfig};
use cairn_index::{Confidence, DegradedReason};
use cairn_proto::HeldPort;

use crate::fake_engine::{FakeEngine, Options, Shape};
use crate::fake_index::FakeIndex;
use crate::{agent, config, exact, gpu, hashes, tokens, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stored_and_removed_blocks_reach_the_index() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let _agent = agent(&index, &engine, dir.path()).await;
    let (prompt, names, source) = (tokens(1, 4), hashes(1, 4), engine.source(0));
    engine
        .publish(0, vec![engine.stored(&names[..2], None, &prompt[..32])])
        .await;
    engine
        .publish(0, vec![engine.stored(&names[2..], Some(names[1]), &prompt[32..])])
        .await;
    until("four blocks", || index.overlap("tiny", &source, &prompt).gpu == 64).await;
    engine.publish(0, vec![engine.removed(&names[3..])]).await;
    until("three blocks", || index.overlap("tiny", &source, &prompt).gpu == 48).await;
    until("exact", || exact(&index, &source)).await;
    engine.publish(0, vec![engine.cleared()]).await;
    until("nothing", || gpu(&index, &source) == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_published_before_the_agent_came_is_replayed() {
    let index = FakeIndex::start().await;
    for (shape, replay_topic) in [(Shape::Maps, true), (Shape::Arrays, false)] {
        let mut engine = FakeEngine::start(Options {
            shape,
            replay_topic,
            ..Options::default()
        })
        .await;
        let (prompt, names, source) = (tokens(2, 3), hashes(2, 3), engine.source(0));
        for i in 0..3usize {
            let parent = i.checked_sub(1).map(|p| names[p]);
            engine.lose(
                0,
                vec![engine.stored(&names[i..=i], parent, &prompt[i * 16..(i + 1) * 16])],
            );
        }
        let dir = tempfile::tempdir().unwrap();
        let agent = agent(&index, &engine, dir.path()).await;
        until("the replayed blocks", || {
            index.overlap("tiny", &source, &prompt).gpu == 48
        })
        .await;
        until("exact", || exact(&index, &source)).await;
        agent.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gap_is_repaired_by_replay_from_where_it_began() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let _agent = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    for i in 0..6u32 {
        let stored = engine.stored(&hashes(u64::from(i), 2), None, &tokens(i, 2));
        // seq 2 and 3 are lost on the way.
        if (2..4).contains(&i) {
            engine.lose(0, vec![stored]);
        } else {
            engine.publish(0, vec![stored]).await;
        }
        if i == 1 {
            until("the first two", || gpu(&index, &source) == 4).await;
            until("exact", || exact(&index, &source)).await;
        }
    }
    until("all six", || gpu(&index, &source) == 12).await;
    until("exact again", || exact(&index, &source)).await;
    // The question begins at the gap, so that a few lost batches don't move ten thousand.
    assert!(engine.replays(0).contains(&2), "{:?}", engine.replays(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_lost_batches_are_repaired() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let _agent = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    engine
        .publish(0, vec![engine.stored(&hashes(0, 1), None, &tokens(0, 1))])
        .await;
    until("the first", || gpu(&index, &source) == 1).await;
    for i in 1..=500u32 {
        let mut events = vec![engine.stored(&hashes(u64::from(i), 2), None, &tokens(i, 2))];
        // Half of them removes what the last one stored: stale credit if it stays lost.
        if i % 2 == 0 {
            let gone = hashes(u64::from(i - 1), 2);
            events.push(engine.removed(&[gone[1]]));
            events.push(engine.removed(&[gone[0]]));
        }
        engine.lose(0, events);
    }
    engine
        .publish(0, vec![engine.stored(&hashes(501, 1), None, &tokens(501, 1))])
        .await;
    until("the survivors alone", || gpu(&index, &source) == 1 + 500 + 1).await;
    assert_eq!(index.overlap("tiny", &source, &tokens(1, 2)).gpu, 0);
    assert_eq!(index.overlap("tiny", &source, &tokens(500, 2)).gpu, 32);
    until("exact", || exact(&index, &source)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_tail_is_found_by_the_idle_poll() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let _agent = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    engine
        .publish(0, vec![engine.stored(&hashes(1, 2), None, &tokens(1, 2))])
        .await;
    until("two blocks", || gpu(&index, &source) == 2).await;
    engine.lose(0, vec![engine.removed(&[hashes(1, 2)[1]])]);
    until("the removal that was never published", || gpu(&index, &source) == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_an_unrepairable_gap_new_events_count_and_one_turnover_makes_it_exact() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options {
        kept: 4,
        ..Options::default()
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let _agent = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    engine
        .publish(0, vec![engine.stored(&hashes(1, 2), None, &tokens(1, 2))])
        .await;
    until("two blocks", || gpu(&index, &source) == 2).await;
    for i in 2..30u32 {
        engine.lose(0, vec![engine.stored(&hashes(u64::from(i), 1), None, &tokens(i, 1))]);
    }
    engine
        .publish(0, vec![engine.stored(&hashes(50, 2), None, &tokens(50, 2))])
        .await;
    until("the new event", || {
        index.overlap("tiny", &source, &tokens(50, 2)).gpu == 32
    })
    .await;
    let gap = Some(Confidence::Degraded(DegradedReason::Gap));
    until("degraded", || index.world.lock().claim(&source) == gap).await;
    // The engine's 256 blocks are all stored anew; the old ones must be gone by then.
    for i in 100..360u32 {
        engine
            .publish(0, vec![engine.stored(&hashes(u64::from(i), 1), None, &tokens(i, 1))])
            .await;
    }
    until("exact again", || exact(&index, &source)).await;
    assert_eq!(index.overlap("tiny", &source, &tokens(1, 2)).gpu, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_binding_connector_tells_publishers_apart_by_topic() {
    let index = FakeIndex::start().await;
    let held = HeldPort::hold(0).unwrap();
    let port = held.port();
    let endpoint = format!("tcp://127.0.0.1:{port}");
    let dir = tempfile::tempdir().unwrap();
    let mut engines = Vec::new();
    let mut configs = Vec::new();
    // The engines' sockets connect, so the agent must listen first; their ports don't matter to it.
    let placeholder = zeromq_listener(port).await;
    for name in ["kv@engine-a", "kv@engine-b"] {
        let options = Options {
            topic: name.into(),
            connect_to: Some(endpoint.clone()),
            ..Options::default()
        };
        let engine = FakeEngine::start(options).await;
        let mut config = EngineConfig::at(&engine.url());
        config.events = EventsConfig::At(EventsAt {
            endpoint: endpoint.clone(),
            replay_endpoint: engine.endpoints(0).1,
            topic: name.into(),
            bind: true,
            allow_remote: false,
        });
        engines.push(engine);
        configs.push(config);
    }
    drop(placeholder);
    let running = cairn_agent::start(config(&index, configs, dir.path())).await.unwrap();
    until("ready", || running.ready().is_ok() && running.sources().len() == 2).await;
    for (i, engine) in engines.iter_mut().enumerate() {
        let salt = u32::try_from(i).unwrap() + 1;
        // Published until the engine's socket has found the agent.
        let event = engine.stored(&hashes(u64::from(salt), 2), None, &tokens(salt, 2));
        engine.publish(0, vec![event]).await;
    }
    let (a, b) = (engines[0].source(0), engines[1].source(0));
    until("each its own", || {
        index.overlap("tiny", &a, &tokens(1, 2)).gpu == 32 && index.overlap("tiny", &b, &tokens(2, 2)).gpu == 32
    })
    .await;
    assert_eq!(index.overlap("tiny", &a, &tokens(2, 2)).gpu, 0);
    assert_eq!(index.overlap("tiny", &b, &tokens(1, 2)).gpu, 0);
}

/// Something that a connecting PUB socket can shake hands with until the agent takes the port over.
async fn zeromq_listener(port: u16) -> zeromq::SubSocket {
    use zeromq::Socket;
    let mut socket = zeromq::SubSocket::new();
    socket.bind(&format!("tcp://127.0.0.1:{port}")).await.unwrap();
    socket
}
