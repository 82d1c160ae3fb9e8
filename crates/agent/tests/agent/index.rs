//! The index side: fail-over, leases, second agents, audit, load.

use cairn_agent::EngineConfig;
use cairn_index::Op;
use cairn_proto::HeldPort;

use crate::fake_engine::{FakeEngine, Options};
use crate::fake_index::{FakeIndex, count_ops};
use crate::{agent, config, exact, gpu, hashes, tokens, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_agent_is_refused_until_the_lease_lapses_and_then_fences_the_first() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let first = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    engine
        .publish(0, vec![engine.stored(&hashes(1, 2), None, &tokens(1, 2))])
        .await;
    until("two blocks", || gpu(&index, &source) == 2).await;
    let second = cairn_agent::start(config(&index, vec![EngineConfig::at(&engine.url())], other.path()))
        .await
        .unwrap();
    until("the second to be refused", || {
        second.sources().get(&source).is_some_and(|s| s.state == "held")
    })
    .await;
    assert!(second.ready().unwrap_err().contains("held"));
    // The first is cut off for longer than its lease.
    index.world.lock().ignore_renewals = true;
    index.lapse(&source);
    until("the second to take over", || second.ready().is_ok()).await;
    engine
        .publish(0, vec![engine.stored(&hashes(2, 2), None, &tokens(2, 2))])
        .await;
    until("the first to stop", || {
        first.sources().get(&source).is_some_and(|s| s.state == "fenced")
    })
    .await;
    until("all of it from the second", || gpu(&index, &source) == 4).await;
    assert_ne!(first.agent_id, second.agent_id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_stream_loses_nothing_and_repeats_nothing() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let running = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    for round in 0..5u32 {
        for i in 0..40u32 {
            let salt = round * 100 + i + 1;
            engine
                .publish(
                    0,
                    vec![engine.stored(&hashes(u64::from(salt), 1), None, &tokens(salt, 1))],
                )
                .await;
        }
        index.cut_streams();
    }
    until("two hundred blocks", || gpu(&index, &source) == 200).await;
    until("all acknowledged", || running.sources()[&source].unacked == 0).await;
    until("exact", || exact(&index, &source)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unacknowledged_batches_are_sent_again_on_the_next_stream() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let running = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    until("exact", || exact(&index, &source)).await;
    index.world.lock().swallow_acks = true;
    for salt in 1..20u32 {
        engine
            .publish(
                0,
                vec![engine.stored(&hashes(u64::from(salt), 1), None, &tokens(salt, 1))],
            )
            .await;
    }
    until("some applied", || gpu(&index, &source) > 0).await;
    index.world.lock().swallow_acks = false;
    index.cut_streams();
    until("all applied once", || gpu(&index, &source) == 19).await;
    until("all acknowledged", || running.sources()[&source].unacked == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_index_node_takes_over() {
    let index = FakeIndex::start().await;
    let second = index.beside().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&index, vec![EngineConfig::at(&engine.url())], dir.path());
    let nobody = HeldPort::hold(0).unwrap();
    config.index = vec![format!("http://{}", nobody.address()), index.url(), second.url()];
    let running = cairn_agent::start(config).await.unwrap();
    until("ready past a dead node", || {
        running.ready().is_ok() && !running.sources().is_empty()
    })
    .await;
    let (source, world) = (engine.source(0), index.world.clone());
    engine
        .publish(0, vec![engine.stored(&hashes(1, 2), None, &tokens(1, 2))])
        .await;
    until("two blocks", || gpu(&second, &source) == 2).await;
    drop(index);
    engine
        .publish(0, vec![engine.stored(&hashes(2, 2), None, &tokens(2, 2))])
        .await;
    until("two more through the other node", || gpu(&second, &source) == 4).await;
    assert!(
        world
            .lock()
            .registrations
            .iter()
            .skip(1)
            .all(|(_, _, resumed)| *resumed),
        "no lifetime was lost"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_index_that_comes_late_gets_everything() {
    let mut engine = FakeEngine::start(Options::default()).await;
    let index = FakeIndex::start().await;
    index.world.lock().refuse_push = true;
    let dir = tempfile::tempdir().unwrap();
    let running = cairn_agent::start(config(&index, vec![EngineConfig::at(&engine.url())], dir.path()))
        .await
        .unwrap();
    until("the engine to be found", || !running.sources().is_empty()).await;
    assert!(running.ready().is_err());
    engine
        .publish(0, vec![engine.stored(&hashes(1, 2), None, &tokens(1, 2))])
        .await;
    index.world.lock().refuse_push = false;
    let source = engine.source(0);
    until("two blocks", || gpu(&index, &source) == 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_renewed_and_a_lapse_is_healed() {
    let index = FakeIndex::start().await;
    let engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let _agent = agent(&index, &engine, dir.path()).await;
    let (id, _) = index.world.lock().source(&engine.source(0)).unwrap();
    let renewals = || index.world.lock().renewals.get(&id).copied().unwrap_or(0);
    until("three renewals", || renewals() >= 3).await;
    index.lapse(&engine.source(0));
    let live = || index.world.lock().state.registry().sources[&id].lease == cairn_index::LeaseState::Live;
    until("the lease to live again", live).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_audit_finds_drift_and_the_mirror_repairs_it() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let running = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    engine
        .publish(0, vec![engine.stored(&hashes(1, 4), None, &tokens(1, 4))])
        .await;
    until("four blocks", || gpu(&index, &source) == 4).await;
    until("acknowledged", || running.sources()[&source].unacked == 0).await;
    index.world.lock().corrupt_next = true;
    engine
        .publish(0, vec![engine.stored(&hashes(2, 3), None, &tokens(2, 3))])
        .await;
    until("the fault", || !index.world.lock().corrupt_next).await;
    until("the repair", || gpu(&index, &source) == 7).await;
    until("exact", || exact(&index, &source)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn load_is_published_by_rank_and_never_through_the_log() {
    let index = FakeIndex::start().await;
    let engine = FakeEngine::start(Options {
        ranks: 2,
        ..Options::default()
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let _agent = agent(&index, &engine, dir.path()).await;
    {
        let mut answers = engine.answers.lock();
        (answers.running, answers.waiting) = (7, 2);
        answers.queries = vec![1000, 2000];
        answers.hits = vec![1000, 1500];
    }
    until("both ranks' load", || {
        let world = index.world.lock();
        [0, 1].iter().all(|rank| {
            world.loads.get(&engine.source(*rank)).is_some_and(|load| {
                load.running == 7
                    && load.waiting == 2
                    && load.healthy
                    && load.prefix_queries == 1000 * (*rank as u64 + 1)
            })
        })
    })
    .await;
    let log = index.world.lock().log;
    engine.answers.lock().unhealthy = true;
    until("unhealthy", || !index.world.lock().loads[&engine.source(0)].healthy).await;
    engine.answers.lock().unhealthy = false;
    until("healthy", || index.world.lock().loads[&engine.source(0)].healthy).await;
    assert_eq!(index.world.lock().log, log, "load never enters the log");
    index.cut_streams();
    engine.answers.lock().running = 9;
    until("load on the next stream", || {
        index.world.lock().loads[&engine.source(1)].running == 9
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stores_and_removals_that_cancel_out_need_not_leave_the_host() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let _agent = agent(&index, &engine, dir.path()).await;
    let (source, names) = (engine.source(0), hashes(9, 1));
    let stored = engine.stored(&names, None, &tokens(9, 1));
    engine
        .publish(
            0,
            vec![
                stored.clone(),
                engine.removed(&names),
                stored.clone(),
                engine.removed(&names),
            ],
        )
        .await;
    engine
        .publish(0, vec![engine.stored(&hashes(10, 1), None, &tokens(10, 1))])
        .await;
    until("the one that stays", || gpu(&index, &source) == 1).await;
    assert!(count_ops(&index.world.lock(), |op| matches!(op, Op::Remove { .. })) == 0);
}
