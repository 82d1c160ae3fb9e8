//! Restarts of engines and of the agent itself.

use crate::fake_engine::{FakeEngine, Options};
use crate::fake_index::FakeIndex;
use crate::{agent, exact, gpu, hashes, tokens, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_restart_drops_the_old_credit_before_any_traffic() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let _agent = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    engine
        .publish(0, vec![engine.stored(&hashes(1, 10), None, &tokens(1, 10))])
        .await;
    until("ten blocks", || gpu(&index, &source) == 10).await;
    engine.restart().await;
    // No traffic to it: nothing is published.
    until("the old credit to go", || gpu(&index, &source) == 0).await;
    until("exact", || exact(&index, &source)).await;
    // Its new life counts on its own: what the old one held doesn't outlive a store and a removal.
    let names = hashes(1, 10);
    engine
        .publish(0, vec![engine.stored(&names, None, &tokens(1, 10))])
        .await;
    until("its own ten", || gpu(&index, &source) == 10).await;
    engine.publish(0, vec![engine.removed(&names)]).await;
    until("none", || gpu(&index, &source) == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_life_with_more_batches_than_the_old_one_is_no_gap() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let _agent = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    for i in 0..3u32 {
        engine
            .publish(0, vec![engine.stored(&hashes(u64::from(i), 2), None, &tokens(i, 2))])
            .await;
    }
    until("six blocks", || gpu(&index, &source) == 6).await;
    // Only the stream tells: the metrics say the same process start as before.
    engine.restart_sockets().await;
    for i in 10..20u32 {
        engine.lose(0, vec![engine.stored(&hashes(u64::from(i), 1), None, &tokens(i, 1))]);
    }
    until("the new life's blocks alone", || gpu(&index, &source) == 10).await;
    assert_eq!(index.overlap("tiny", &source, &tokens(0, 2)).gpu, 0);
    assert_eq!(index.overlap("tiny", &source, &tokens(10, 1)).gpu, 16);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_restart_that_only_the_stream_shows_drops_the_old_credit() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let _agent = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    engine
        .publish(0, vec![engine.stored(&hashes(1, 4), None, &tokens(1, 4))])
        .await;
    until("four blocks", || gpu(&index, &source) == 4).await;
    engine.restart_sockets().await;
    until("the old credit to go", || gpu(&index, &source) == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_comes_up_with_other_event_ports_is_followed_there() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let _agent = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    engine
        .publish(0, vec![engine.stored(&hashes(1, 4), None, &tokens(1, 4))])
        .await;
    until("four blocks", || gpu(&index, &source) == 4).await;
    engine.restart_elsewhere().await;
    until("the old credit to go", || gpu(&index, &source) == 0).await;
    engine
        .publish(0, vec![engine.stored(&hashes(2, 3), None, &tokens(2, 3))])
        .await;
    until("three blocks", || gpu(&index, &source) == 3).await;
    until("exact", || exact(&index, &source)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_restart_that_no_agent_saw_is_told_by_its_process_start() {
    let index = FakeIndex::start().await;
    // Without a replay socket nothing but the process start can tell.
    let mut engine = FakeEngine::start(Options {
        replay: false,
        ..Options::default()
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let first = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    until("connected", || first.sources()[&source].connected).await;
    engine
        .publish(0, vec![engine.stored(&hashes(1, 4), None, &tokens(1, 4))])
        .await;
    until("four blocks", || gpu(&index, &source) == 4).await;
    first.stop().await;
    engine.restart().await;
    let _second = agent(&index, &engine, dir.path()).await;
    until("the old credit to go", || gpu(&index, &source) == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_connection_of_a_living_engine_is_no_restart() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let _agent = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    engine
        .publish(0, vec![engine.stored(&hashes(1, 3), None, &tokens(1, 3))])
        .await;
    until("three blocks", || gpu(&index, &source) == 3).await;
    let before = index.world.lock().source(&source);
    engine.cut_events(0).await;
    engine.lose(0, vec![engine.stored(&hashes(2, 2), None, &tokens(2, 2))]);
    until("what was missed meanwhile", || gpu(&index, &source) == 5).await;
    assert_eq!(index.world.lock().source(&source), before, "the lifetime goes on");
    until("exact", || exact(&index, &source)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_restart_resumes_and_the_engine_sends_nothing_again() {
    let index = FakeIndex::start().await;
    // The engine keeps only its last two batches: what came before can't be had again.
    let mut engine = FakeEngine::start(Options {
        kept: 2,
        ..Options::default()
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let first = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    for i in 0..20u32 {
        engine
            .publish(0, vec![engine.stored(&hashes(u64::from(i), 2), None, &tokens(i, 2))])
            .await;
    }
    until("forty blocks", || gpu(&index, &source) == 40).await;
    until("acknowledged", || first.sources()[&source].unacked == 0).await;
    first.stop().await;
    let before = index.world.lock().source(&source);
    engine.lose(0, vec![engine.removed(&[hashes(0, 2)[1]])]);
    let _second = agent(&index, &engine, dir.path()).await;
    until("what happened meanwhile", || gpu(&index, &source) == 39).await;
    until("exact", || exact(&index, &source)).await;
    assert_eq!(index.world.lock().source(&source), before, "the lifetime goes on");
    assert!(index.world.lock().registrations.last().unwrap().2, "it was resumed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_killed_with_a_stale_checkpoint_loses_no_acknowledged_batch() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let (dir, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let first = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    for i in 0..5u32 {
        engine
            .publish(0, vec![engine.stored(&hashes(u64::from(i), 2), None, &tokens(i, 2))])
            .await;
    }
    until("ten blocks", || gpu(&index, &source) == 10).await;
    until("a checkpoint", || {
        std::fs::read_dir(dir.path().join("checkpoints")).unwrap().count() > 0
    })
    .await;
    // What a crash would leave: the checkpoint of now, and an index that goes on.
    copy_dir(dir.path(), copy.path());
    for i in 5..10u32 {
        engine
            .publish(0, vec![engine.stored(&hashes(u64::from(i), 2), None, &tokens(i, 2))])
            .await;
    }
    engine.publish(0, vec![engine.removed(&[hashes(2, 2)[1]])]).await;
    until("nineteen blocks", || gpu(&index, &source) == 19).await;
    drop(first);
    let _second = agent(&index, &engine, copy.path()).await;
    engine
        .publish(0, vec![engine.stored(&hashes(11, 1), None, &tokens(11, 1))])
        .await;
    until("twenty blocks", || gpu(&index, &source) == 20).await;
    until("exact", || exact(&index, &source)).await;
    for i in 0..10u32 {
        let kept = if i == 2 { 16 } else { 32 };
        assert_eq!(index.overlap("tiny", &source, &tokens(i, 2)).gpu, kept, "prompt {i}");
    }
}

fn copy_dir(from: &std::path::Path, to: &std::path::Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_checkpoint_is_not_used() {
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let first = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    engine
        .publish(0, vec![engine.stored(&hashes(1, 4), None, &tokens(1, 4))])
        .await;
    until("four blocks", || gpu(&index, &source) == 4).await;
    first.stop().await;
    for entry in std::fs::read_dir(dir.path().join("checkpoints")).unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 0x55;
        std::fs::write(&path, bytes).unwrap();
    }
    let _second = agent(&index, &engine, dir.path()).await;
    until("four blocks by replay", || gpu(&index, &source) == 4).await;
    until("exact", || exact(&index, &source)).await;
}
