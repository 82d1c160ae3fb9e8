//! Kinds of engines: discovery, ranks, sleep, silence, adapters, engines that come late.

use cairn_agent::{EngineConfig, EventsAt, EventsConfig};
use cairn_index::{Confidence, DegradedReason, Role};

use crate::fake_engine::{FakeEngine, Options};
use crate::fake_index::FakeIndex;
use crate::{PATIENCE, agent, config, exact, gpu, hashes, tokens, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn vllm_is_discovered_with_all_its_facts() {
    let index = FakeIndex::start().await;
    let engine = FakeEngine::start(Options {
        block_size: 32,
        topic: "kv@x".into(),
        ..Options::default()
    })
    .await;
    engine.answers.lock().adapters = vec!["lora-a".into()];
    let dir = tempfile::tempdir().unwrap();
    let _agent = agent(&index, &engine, dir.path()).await;
    let (spec, _, _) = index.world.lock().registrations[0].clone();
    assert_eq!(
        (spec.pool.name.as_str(), spec.pool.models.as_slice()),
        ("tiny", ["tiny".to_owned()].as_slice())
    );
    assert_eq!(
        (spec.pool.max_model_len, spec.pool.model_root.as_deref()),
        (Some(8192), Some("/models/tiny"))
    );
    let worker = &spec.worker;
    assert_eq!(
        (worker.engine_block_size, worker.capacity_blocks, worker.ranks),
        (32, 256, 1)
    );
    assert_eq!(
        (worker.engine_kind.as_str(), worker.host.as_str()),
        ("vllm", "test-host")
    );
    assert_eq!(worker.adapters, ["lora-a"]);
    // Another adapter is loaded while it runs: the same lifetime says so.
    engine.answers.lock().adapters.push("lora-b".into());
    until("the new adapter", || {
        let world = index.world.lock();
        world
            .state
            .registry()
            .workers
            .values()
            .any(|w| w.spec.adapters.len() == 2)
    })
    .await;
    assert!(
        index.world.lock().registrations.last().unwrap().2,
        "the lifetime goes on"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sglang_is_discovered_by_its_server_info() {
    for old_server_info in [false, true] {
        let index = FakeIndex::start().await;
        let options = Options {
            sglang: true,
            old_server_info,
            block_size: 1,
            ..Options::default()
        };
        let mut engine = FakeEngine::start(options).await;
        let dir = tempfile::tempdir().unwrap();
        let _agent = agent(&index, &engine, dir.path()).await;
        let (spec, _, _) = index.world.lock().registrations[0].clone();
        assert_eq!(
            (spec.worker.engine_kind.as_str(), spec.worker.role),
            ("sglang", Role::Prefill)
        );
        assert_eq!((spec.worker.engine_block_size, spec.worker.capacity_blocks), (1, 4096));
        assert_eq!(spec.worker.bootstrap.as_deref(), Some("127.0.0.1:8998"));
        // Pages of one token: sixteen make a block.
        let (source, names) = (engine.source(0), hashes(1, 40));
        engine
            .publish(0, vec![engine.stored(&names, None, &tokens(1, 3)[..40])])
            .await;
        until("two full blocks", || gpu(&index, &source) == 2).await;
        until("load by its names", || {
            index
                .world
                .lock()
                .loads
                .get(&source)
                .is_some_and(|load| load.kv_usage > 0.4 && load.healthy)
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_rank_is_a_worker_of_its_own_whatever_its_batches_say() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options {
        ranks: 3,
        ..Options::default()
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let running = agent(&index, &engine, dir.path()).await;
    until("three workers", || {
        index.world.lock().state.registry().workers.len() == 3
    })
    .await;
    // Rank 1's batches name rank 0.
    engine.named_rank = Some(0);
    engine
        .publish(1, vec![engine.stored(&hashes(1, 4), None, &tokens(1, 4))])
        .await;
    let sources: Vec<String> = (0..3).map(|rank| engine.source(rank)).collect();
    until("rank 1 alone", || {
        index.overlap("tiny", &sources[1], &tokens(1, 4)).gpu == 64
    })
    .await;
    assert_eq!(index.overlap("tiny", &sources[0], &tokens(1, 4)).gpu, 0);
    until("the foreign rank is counted", || {
        let page = running.registry().encode();
        page.lines()
            .any(|l| l.starts_with("cairn_agent_foreign_rank") && l.ends_with(" 1"))
    })
    .await;
    // A clear of one rank leaves the others, whichever it names.
    engine.named_rank = Some(7);
    engine
        .publish(2, vec![engine.stored(&hashes(2, 2), None, &tokens(2, 2))])
        .await;
    until("rank 2", || gpu(&index, &sources[2]) == 2).await;
    engine.named_rank = Some(2);
    engine.publish(1, vec![engine.cleared()]).await;
    until("rank 1 empty", || gpu(&index, &sources[1]) == 0).await;
    assert_eq!(gpu(&index, &sources[2]), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_of_a_configured_engine_are_found_at_port_plus_rank() {
    let index = FakeIndex::start().await;
    let options = Options {
        ranks: 2,
        sources_route: false,
        replay: false,
        adjacent_ports: true,
        ..Options::default()
    };
    let mut engine = FakeEngine::start(options).await;
    let first = engine.answers.lock().event_ports[0].0;
    let endpoint = format!("tcp://*:{first}");
    let mut configured = EngineConfig::at(&engine.url());
    configured.events = EventsConfig::At(EventsAt {
        endpoint,
        replay_endpoint: None,
        topic: String::new(),
        bind: false,
        allow_remote: false,
    });
    let dir = tempfile::tempdir().unwrap();
    let running = cairn_agent::start(config(&index, vec![configured], dir.path()))
        .await
        .unwrap();
    until("ready", || running.sources().len() == 2 && running.ready().is_ok()).await;
    until("connected", || running.sources().values().all(|s| s.connected)).await;
    let source = engine.source(1);
    engine
        .publish(1, vec![engine.stored(&hashes(1, 2), None, &tokens(1, 2))])
        .await;
    until("rank 1", || gpu(&index, &source) == 2).await;
    assert_eq!(gpu(&index, &engine.source(0)), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_says_nothing_of_events_is_a_worker_without_events() {
    let index = FakeIndex::start().await;
    let engine = FakeEngine::start(Options {
        sources_route: false,
        ..Options::default()
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let running = agent(&index, &engine, dir.path()).await;
    let claim = Some(Confidence::Degraded(DegradedReason::NoEvents));
    until("no events", || index.world.lock().claim(&engine.source(0)) == claim).await;
    let trouble = running.engines()[&engine.url()].trouble.clone().unwrap();
    assert!(
        trouble.contains("kv_event_sources") && trouble.contains("events = {"),
        "{trouble}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_comes_late_is_waited_for() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    engine.answers.lock().down = true;
    let dir = tempfile::tempdir().unwrap();
    let running = cairn_agent::start(config(&index, vec![EngineConfig::at(&engine.url())], dir.path()))
        .await
        .unwrap();
    until("two tries", || engine.answers.lock().requests.len() > 1).await;
    assert!(running.sources().is_empty());
    engine.answers.lock().down = false;
    let source = engine.source(0);
    until("registered", || {
        running.ready().is_ok() && !running.sources().is_empty()
    })
    .await;
    engine
        .publish(0, vec![engine.stored(&hashes(1, 1), None, &tokens(1, 1))])
        .await;
    until("its block", || gpu(&index, &source) == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_falls_asleep_loses_its_credit_within_a_poll() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let _agent = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    engine
        .publish(0, vec![engine.stored(&hashes(1, 5), None, &tokens(1, 5))])
        .await;
    until("five blocks", || gpu(&index, &source) == 5).await;
    engine.answers.lock().asleep = true;
    until("no credit", || gpu(&index, &source) == 0).await;
    until("the load says so", || index.world.lock().loads[&source].asleep).await;
    engine.answers.lock().asleep = false;
    engine
        .publish(0, vec![engine.stored(&hashes(2, 1), None, &tokens(2, 1))])
        .await;
    until("credit after waking", || {
        index.overlap("tiny", &source, &tokens(2, 1)).gpu == 16
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_serves_and_says_nothing_is_reported_as_silent() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options {
        ranks: 2,
        ..Options::default()
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let running = agent(&index, &engine, dir.path()).await;
    until("two sources", || running.sources().len() == 2).await;
    let claims = || [0, 1].map(|rank| index.world.lock().claim(&engine.source(rank)));
    until("both exact", || claims() == [Some(Confidence::Exact); 2]).await;
    let answers = engine.answers.clone();
    let traffic = tokio::spawn(async move {
        loop {
            answers.lock().queries.iter_mut().for_each(|q| *q += 160);
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    });
    let (first, second) = (engine.source(0), engine.source(1));
    let silent = Some(Confidence::Degraded(DegradedReason::Silent));
    let mut salt = 0;
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while index.world.lock().claim(&second) != silent {
        assert!(
            tokio::time::Instant::now() < deadline,
            "the silent rank was not reported"
        );
        salt += 1;
        engine
            .publish(
                0,
                vec![engine.stored(&hashes(salt, 1), None, &tokens(u32::try_from(salt).unwrap(), 1))],
            )
            .await;
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert!(exact(&index, &first), "the rank that speaks stays exact");
    traffic.abort();
    engine
        .publish(1, vec![engine.stored(&hashes(1, 1), None, &tokens(1, 1))])
        .await;
    until("exact once it speaks", || exact(&index, &second)).await;
}
