//! Hostile and broken input on event sockets and at start.

use bytes::Bytes;
use cairn_agent::{EngineConfig, StartError};
use tokio::io::AsyncWriteExt;

use crate::fake_engine::{FakeEngine, Options};
use crate::fake_index::FakeIndex;
use crate::{agent, config, exact, gpu, hashes, tokens, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_between_good_batches_is_counted_and_skipped() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let running = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    engine
        .publish(0, vec![engine.stored(&hashes(1, 1), None, &tokens(1, 1))])
        .await;
    until("one block", || gpu(&index, &source) == 1).await;
    engine.send_raw(0, vec![Bytes::from_static(b"only one frame")]).await;
    engine
        .send_raw(0, vec![Bytes::new(), Bytes::from_static(b"short"), Bytes::new()])
        .await;
    engine.send_raw(0, vec![Bytes::new(); 20]).await;
    // One malformed event beside a good one: the good one counts.
    let unknown = rmpv::Value::Map(vec![("type".into(), "BlockTeleported".into())]);
    engine
        .publish(0, vec![unknown, engine.stored(&hashes(2, 1), None, &tokens(2, 1))])
        .await;
    until("two blocks", || gpu(&index, &source) == 2).await;
    until("counted", || {
        let page = running.registry().encode();
        page.contains("reason=\"unknown_tag\"")
            && page.contains(&format!("cairn_agent_skipped_total{{source=\"{source}\"}} 3"))
    })
    .await;
    until("exact", || exact(&index, &source)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publisher_that_claims_huge_frames_is_dropped_without_memory() {
    let index = FakeIndex::start().await;
    let engine = FakeEngine::start(Options {
        sources_route: false,
        replay: false,
        ..Options::default()
    })
    .await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let hostile = tokio::spawn(async move {
        for _ in 0..3 {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut greeting = [0u8; 64];
            (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
            greeting[12..16].copy_from_slice(b"NULL");
            let mut bytes = greeting.to_vec();
            bytes.extend_from_slice(b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB");
            // A frame of 2^62 bytes.
            bytes.extend_from_slice(&[2, 0x40, 0, 0, 0, 0, 0, 0, 0]);
            stream.write_all(&bytes).await.unwrap();
        }
    });
    let mut configured = EngineConfig::at(&engine.url());
    configured.events = cairn_agent::EventsConfig::At(cairn_agent::EventsAt {
        endpoint: format!("tcp://{address}"),
        replay_endpoint: None,
        topic: String::new(),
        bind: false,
        allow_remote: false,
    });
    let dir = tempfile::tempdir().unwrap();
    let running = cairn_agent::start(config(&index, vec![configured], dir.path()))
        .await
        .unwrap();
    until("three connections dropped", || hostile.is_finished()).await;
    hostile.await.unwrap();
    let source = engine.source(0);
    until("the trouble named", || {
        let trouble = running
            .sources()
            .get(&source)
            .and_then(|s| s.trouble.clone())
            .unwrap_or_default();
        trouble.contains("claims") || trouble.contains("connection")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_http_port_given_as_event_port_is_named() {
    let index = FakeIndex::start().await;
    let engine = FakeEngine::start(Options {
        sources_route: false,
        replay: false,
        ..Options::default()
    })
    .await;
    let mut configured = EngineConfig::at(&engine.url());
    configured.events = cairn_agent::EventsConfig::At(cairn_agent::EventsAt {
        endpoint: format!("tcp://{}", engine.http),
        replay_endpoint: None,
        topic: String::new(),
        bind: false,
        allow_remote: false,
    });
    let dir = tempfile::tempdir().unwrap();
    let running = cairn_agent::start(config(&index, vec![configured], dir.path()))
        .await
        .unwrap();
    let source = engine.source(0);
    until("the trouble named", || {
        let trouble = running
            .sources()
            .get(&source)
            .and_then(|s| s.trouble.clone())
            .unwrap_or_default();
        trouble.contains("does not speak ZMTP") || trouble.contains("closed the connection")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn starts_that_cannot_work_are_refused_with_the_remedy() {
    let index = FakeIndex::start().await;
    let dir = tempfile::tempdir().unwrap();
    let none = cairn_agent::start(config(&index, Vec::new(), dir.path())).await;
    assert!(none.err().unwrap().to_string().contains("[[engine]]"));
    let engines = || vec![EngineConfig::at("http://127.0.0.1:1")];
    let first = cairn_agent::start(config(&index, engines(), dir.path())).await.unwrap();
    let again = cairn_agent::start(config(&index, engines(), dir.path())).await;
    assert!(again.err().unwrap().to_string().contains("own data_dir"));
    let other = tempfile::tempdir().unwrap();
    let mut taken = config(&index, engines(), other.path());
    taken.ops.listen = first.ops;
    assert!(matches!(
        cairn_agent::start(taken).await.err().unwrap(),
        StartError::Listen { .. }
    ));
    let mut open = config(&index, engines(), other.path());
    open.ops.listen = "0.0.0.0:0".parse().unwrap();
    assert!(
        cairn_agent::start(open)
            .await
            .err()
            .unwrap()
            .to_string()
            .contains("security")
    );
    let mut keyless = config(&index, engines(), other.path());
    keyless.engines[0].api_key_file = Some("/nonexistent/key".into());
    assert!(
        cairn_agent::start(keyless)
            .await
            .err()
            .unwrap()
            .to_string()
            .contains("/nonexistent/key")
    );
    let mut remote = config(&index, engines(), other.path());
    remote.index = vec!["http://10.1.2.3:7400".into()];
    assert!(
        cairn_agent::start(remote)
            .await
            .err()
            .unwrap()
            .to_string()
            .contains("cluster_token_file")
    );
    first.stop().await;
}
