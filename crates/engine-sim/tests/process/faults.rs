//! Switches that make the engine fail on purpose, and clients that go away.

use cairn_agent::wire::{ReplayFrames, replay_frames};
use cairn_engine_sim::{Running, start};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::{call, complete, eventually, get, instant, post, replay};

async fn switch(engine: &Running, name: &str, body: Value) {
    let (status, answer) = post(engine, &format!("/sim/{name}"), &body).await;
    assert_eq!(status, 200, "{answer}");
}

async fn state(engine: &Running) -> Value {
    serde_json::from_str(&get(engine, "/sim/state").await.1).unwrap()
}

async fn replayed(engine: &Running) -> Vec<u64> {
    let answers = replay(engine.events()[0].replay.as_ref().unwrap(), 0).await;
    let batches = answers
        .iter()
        .filter_map(|answer| match replay_frames(answer).unwrap() {
            ReplayFrames::Batch { seq, .. } => Some(seq),
            ReplayFrames::End => None,
        });
    batches.collect()
}

#[tokio::test]
async fn a_restart_is_a_new_empty_lifetime_on_the_same_ports() {
    let mut config = instant();
    config.seed = 0;
    let engine = start(config).await.unwrap();
    complete(&engine, 1, 40).await;
    assert_eq!(complete(&engine, 1, 40).await, 32);
    let (before, endpoints) = (state(&engine).await, engine.events());
    switch(&engine, "restart", json!({})).await;
    let after = state(&engine).await;
    assert_ne!(before["engine_id"], after["engine_id"]);
    assert!(after["started"].as_f64() > before["started"].as_f64());
    assert_eq!(
        (after["ranks"][0]["next_seq"].as_u64(), engine.events()),
        (Some(0), endpoints)
    );
    assert_eq!(replayed(&engine).await, Vec::<u64>::new());
    assert_eq!(complete(&engine, 1, 40).await, 0);
    assert_eq!(replayed(&engine).await, [0]);
    engine.stop().await;
}

#[tokio::test]
async fn dropped_batches_leave_a_gap_that_replay_fills_unless_told_otherwise() {
    let engine = start(instant()).await.unwrap();
    switch(&engine, "drop_events", json!({"batches": 2})).await;
    for seed in 0..3 {
        complete(&engine, seed, 40).await;
    }
    assert_eq!(replayed(&engine).await, [0, 1, 2]);
    switch(&engine, "drop_events", json!({"batches": null, "from_replay": true})).await;
    complete(&engine, 3, 40).await;
    switch(&engine, "clear", json!({})).await;
    complete(&engine, 4, 40).await;
    assert_eq!(replayed(&engine).await, [0, 1, 2, 4]);
    assert_eq!(state(&engine).await["ranks"][0]["dropped_batches"], 3);
    switch(&engine, "lose_replay", json!({})).await;
    eventually("the loss", || async {
        replayed(&engine).await.is_empty().then_some(())
    })
    .await;
    engine.stop().await;
}

#[tokio::test]
async fn unavailable_cut_and_bad_switches() {
    let engine = start(instant()).await.unwrap();
    switch(&engine, "unavailable", json!({"requests": 2})).await;
    let body = json!({"prompt": "a", "max_tokens": 8});
    assert_eq!(post(&engine, "/v1/completions", &body).await.0, 503);
    assert_eq!(get(&engine, "/health").await.0, 503);
    assert_eq!(post(&engine, "/v1/completions", &body).await.0, 200);
    switch(&engine, "cut_streams", json!({"after_chunks": 2})).await;
    let stream = json!({"prompt": "a", "max_tokens": 8, "stream": true}).to_string();
    let (_, cut) = call(engine.http, "POST", "/v1/completions", "", &stream).await;
    assert!(cut.matches("data: ").count() <= 2 && !cut.contains("[DONE]"));
    let (_, whole) = call(engine.http, "POST", "/v1/completions", "", &stream).await;
    assert!(whole.ends_with("data: [DONE]\n\n"));
    assert_eq!(post(&engine, "/sim/nonsense", &json!({})).await.0, 404);
    assert_eq!(post(&engine, "/sim/slow", &json!({"factor": -1})).await.0, 400);
    engine.stop().await;
}

#[tokio::test]
async fn a_hung_core_answers_health_but_no_request_until_it_is_cleared() {
    let engine = start(instant()).await.unwrap();
    switch(&engine, "hang", json!({"what": "core"})).await;
    assert_eq!(get(&engine, "/health").await.0, 200);
    let body = json!({"prompt": "a", "max_tokens": 2});
    let mut waiting = Box::pin(post(&engine, "/v1/completions", &body));
    let inside = eventually("the request waits", || async {
        (state(&engine).await["ranks"][0]["waiting"] == 1).then_some(())
    });
    tokio::select! {
        biased;
        _ = &mut waiting => panic!("a hung engine answered"),
        () = inside => {}
    }
    switch(&engine, "clear", json!({})).await;
    assert_eq!(waiting.as_mut().await.0, 200);
    drop(waiting);
    engine.stop().await;
}

#[tokio::test]
async fn a_reset_is_silent_until_the_next_step_and_sleep_empties_the_cache() {
    let engine = start(instant()).await.unwrap();
    complete(&engine, 1, 40).await;
    let (status, done) = post(&engine, "/reset_prefix_cache", &json!({})).await;
    assert_eq!((status, done["success"].as_bool()), (200, Some(true)));
    assert_eq!(replayed(&engine).await, [0]);
    assert_eq!(complete(&engine, 1, 40).await, 0);
    assert_eq!(post(&engine, "/sleep", &json!({})).await.0, 200);
    assert!(get(&engine, "/is_sleeping").await.1.contains("true"));
    assert!(
        get(&engine, "/metrics")
            .await
            .1
            .contains("sleep_state=\"weights_offloaded\"} 1")
    );
    assert_eq!(post(&engine, "/wake_up", &json!({})).await.0, 200);
    assert_eq!(complete(&engine, 1, 40).await, 0);
    engine.stop().await;
}

#[tokio::test]
async fn a_client_that_goes_away_takes_its_request_out() {
    let mut config = instant();
    config.timing.speed = 1.0;
    let engine = start(config).await.unwrap();
    let body = json!({"prompt": "a", "max_tokens": 20_000, "ignore_eos": true, "stream": true}).to_string();
    let mut stream = TcpStream::connect(engine.http).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: e\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut first = [0u8; 16];
    stream.read_exact(&mut first).await.unwrap();
    assert_eq!(state(&engine).await["ranks"][0]["running"], 1);
    drop(stream);
    eventually("the abort", || async {
        let state = state(&engine).await;
        (state["ranks"][0]["aborted"] == 1 && state["ranks"][0]["running"] == 0).then_some(())
    })
    .await;
    engine.stop().await;
}
