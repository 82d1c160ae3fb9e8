//! Engines, clients and the router itself going away at every stage of a request.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cairn_index::Role;
use cairn_router::{Config, Running};
use http_body_util::BodyExt;

use super::client::{BOUND, get, metric, open, post, send, until};
use super::engine::{Engine, Mode};
use super::routing::{World, status, token_body, tokens};
use super::watch::Watch;
use super::{config, router};

pub const STREAM: &str = r#"{"model":"m","prompt":"hi","stream":true}"#;
pub const WHOLE: &str = r#"{"model":"m","prompt":"hi"}"#;

pub async fn nothing_is_reserved(router: &Running) {
    let deadline = tokio::time::Instant::now() + BOUND;
    loop {
        let status = status(router).await;
        if status["reservations"] == 0 && status["in_flight"] == 0 {
            return;
        }
        assert!(tokio::time::Instant::now() < deadline, "{status}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn load_is_zero_after_clients_left_at_every_stage_and_engines_are_told() {
    let engine = Engine::start("m").await;
    let router = router(config(&[&engine])).await;
    engine.set(Mode::Hang);
    let mut asks = Vec::new();
    for _ in 0..40 {
        let at = router.addr;
        asks.push(tokio::spawn(
            async move { open(at, post("/v1/completions", STREAM)).await },
        ));
    }
    until("requests at the engine", || engine.running.load(Ordering::SeqCst) == 40).await;
    assert_eq!(status(&router).await["reservations"], 40);
    let left = Watch::start();
    for ask in asks {
        ask.abort();
    }
    until("the engine's loss of its clients", || {
        engine.cancelled.load(Ordering::SeqCst) == 40
    })
    .await;
    left.within(Duration::from_secs(1), "engines are told");
    nothing_is_reserved(&router).await;

    engine.set(Mode::Hold { after: 2 });
    let mut streams = Vec::new();
    for _ in 0..40 {
        streams.push(open(router.addr, post("/v1/completions", STREAM)).await);
    }
    assert_eq!(status(&router).await["reservations"], 40);
    drop(streams);
    until("the engine's loss of its streams", || {
        engine.cancelled.load(Ordering::SeqCst) == 80
    })
    .await;
    nothing_is_reserved(&router).await;
    assert_eq!(
        metric(router.addr, "cairn_router_streams_ended_total{reason=\"client_gone\"}").await,
        40.0
    );
}

/// Every path with which a request comes, and a body for it.
const PATHS: [(&str, &str); 6] = [
    ("/v1/completions", WHOLE),
    ("/v1/completions", STREAM),
    (
        "/v1/chat/completions",
        r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#,
    ),
    (
        "/v1/chat/completions",
        r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}"#,
    ),
    ("/v1/embeddings", r#"{"model":"m","input":"hi"}"#),
    ("/invocations", WHOLE),
];

#[tokio::test]
async fn load_counts_on_every_path_so_no_engine_gets_all_of_them() {
    let engines = [
        Engine::start("m").await,
        Engine::start("m").await,
        Engine::start("m").await,
        Engine::start("m").await,
    ];
    let router = router(config(&engines.each_ref())).await;
    for engine in &engines {
        engine.set(Mode::Hang);
    }
    let running = || engines.iter().map(|e| e.running.load(Ordering::SeqCst)).sum::<usize>();
    for (path, body) in PATHS {
        let before = engines.each_ref().map(|engine| engine.seen().len());
        let mut asks = Vec::new();
        for _ in 0..40 {
            let at = router.addr;
            asks.push(tokio::spawn(async move { open(at, post(path, body)).await }));
        }
        until("requests at the engines", || running() == 40).await;
        let after = engines.each_ref().map(|engine| engine.seen().len());
        for (then, now) in before.iter().zip(&after) {
            assert!(now - then >= 5, "{path}: {before:?}, then {after:?}");
        }
        assert_eq!(status(&router).await["reservations"], 40, "{path}");
        for ask in asks {
            ask.abort();
        }
        until("the engines' loss of their clients", || running() == 0).await;
        nothing_is_reserved(&router).await;
    }
}

#[tokio::test]
async fn health_checks_and_registrations_leave_load_alone() {
    let world = World::start(2).await;
    let router = world.router().await;
    for engine in &world.engines {
        engine.set(Mode::Hold { after: 1 });
    }
    let mut streams = Vec::new();
    for _ in 0..20 {
        streams.push(open(router.addr, post("/v1/completions", STREAM)).await);
    }
    world.index.register(&Engine::start("m").await.url(), Role::Both, 0, 1);
    let checks = Instant::now();
    // Three check intervals pass.
    until("three checks", || checks.elapsed() > Duration::from_millis(350)).await;
    let own: u64 = status(&router).await["workers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|worker| worker["own_requests"].as_u64().unwrap())
        .sum();
    assert_eq!(own, 20);
    drop(streams);
    nothing_is_reserved(&router).await;
}

#[tokio::test]
async fn a_stream_cut_in_the_middle_ends_with_an_error_event_and_is_not_retried() {
    let engines = [Engine::start("m").await, Engine::start("m").await];
    let router = router(config(&[&engines[0], &engines[1]])).await;
    for engine in &engines {
        engine.set(Mode::Cut { after: 4 });
    }
    let answer = send(router.addr, post("/v1/completions", STREAM)).await;
    assert_eq!(answer.status, 200);
    let events: Vec<_> = answer.body.split("\n\n").filter(|e| !e.is_empty()).collect();
    assert_eq!(events.len(), 5, "{}", answer.body);
    let error: serde_json::Value = serde_json::from_str(events[4].strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "upstream_cut");
    assert_eq!(engines.iter().map(|e| e.seen().len()).sum::<usize>(), 1);
    assert_eq!(
        metric(router.addr, "cairn_router_streams_ended_total{reason=\"upstream_cut\"}").await,
        1.0
    );
    nothing_is_reserved(&router).await;
}

#[tokio::test]
async fn an_engine_that_dies_before_the_first_byte_costs_one_retry_elsewhere() {
    let engines = [Engine::start("m").await, Engine::start("m").await];
    let router = router(config(&[&engines[0], &engines[1]])).await;
    engines[0].set(Mode::Cut { after: 0 });
    for i in 0..10 {
        let body = if i % 2 == 0 { STREAM } else { WHOLE };
        let answer = send(router.addr, post("/v1/completions", body)).await;
        assert_eq!(answer.status, 200);
        assert!(
            answer.body.contains("[DONE]") || answer.body.contains("hello"),
            "{}",
            answer.body
        );
    }
    nothing_is_reserved(&router).await;
}

#[tokio::test]
async fn a_dead_affine_engine_is_asked_once_and_two_failures_end_it() {
    let world = World::start(3).await;
    let prompt = tokens(1, 2000);
    world.index.store(&world.workers[0], &prompt, "");
    let router = world.router().await;
    world.engines[0].kill();
    let asked = Watch::start();
    for _ in 0..10 {
        let answer = send(router.addr, post("/v1/completions", token_body(&prompt))).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    asked.within(Duration::from_secs(5), "ten answers");
    assert_eq!(world.counts().iter().sum::<usize>(), 10);
    world.engines[1].set(Mode::Cut { after: 0 });
    world.engines[2].set(Mode::Cut { after: 0 });
    let before: usize = world.counts().iter().sum();
    let answer = send(router.addr, post("/v1/completions", WHOLE)).await;
    assert_eq!(
        (answer.status.as_u16(), answer.error_code().as_str()),
        (502, "engine_failed")
    );
    assert!(
        world.counts().iter().sum::<usize>() - before <= 2,
        "at most two attempts a request"
    );
    nothing_is_reserved(&router).await;
}

#[tokio::test]
async fn push_back_goes_elsewhere_and_to_the_client_where_nobody_is_left() {
    let engines = [Engine::start("m").await, Engine::start("m").await];
    let router = router(config(&[&engines[0], &engines[1]])).await;
    engines[0].set(Mode::Status(503));
    for _ in 0..6 {
        assert_eq!(send(router.addr, post("/v1/completions", WHOLE)).await.status, 200);
    }
    engines[1].set(Mode::Status(429));
    let answer = send(router.addr, post("/v1/completions", WHOLE)).await;
    assert!(matches!(answer.status.as_u16(), 429 | 503), "{answer:?}");
    let health = status(&router).await;
    assert!(
        health["workers"]
            .as_array()
            .unwrap()
            .iter()
            .all(|w| w["health"] == "healthy")
    );
    nothing_is_reserved(&router).await;
}

#[tokio::test]
async fn an_engines_own_refusal_passes_unchanged() {
    let engine = Engine::start("m").await;
    let router = router(config(&[&engine])).await;
    for status in [400u16, 404, 422, 500] {
        engine.set(Mode::Status(status));
        let answer = send(router.addr, post("/v1/completions", WHOLE)).await;
        assert_eq!(
            (answer.status.as_u16(), answer.json()["error"]["message"].as_str()),
            (status, Some("told to"))
        );
    }
}

#[tokio::test]
async fn a_restarted_engine_gets_traffic_again() {
    let mut first = Engine::start("m").await;
    let second = Engine::start("m").await;
    let router = router(config(&[&first, &second])).await;
    let addr = first.addr;
    first.kill();
    for _ in 0..8 {
        assert_eq!(send(router.addr, post("/v1/completions", WHOLE)).await.status, 200);
    }
    first = Engine::start_at(addr.port(), "m").await;
    let deadline = tokio::time::Instant::now() + BOUND;
    while first.seen().is_empty() {
        assert!(
            tokio::time::Instant::now() < deadline,
            "the engine that came back gets nothing"
        );
        assert_eq!(send(router.addr, post("/v1/completions", WHOLE)).await.status, 200);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_drain_lets_streams_finish_and_says_so_at_once() {
    let engine = Engine::start("m").await;
    let router = router(Config {
        drain_grace_ms: 20_000,
        ..config(&[&engine])
    })
    .await;
    let at = router.addr;
    engine.set(Mode::Hold { after: 1 });
    let mut streams = Vec::new();
    for _ in 0..50 {
        streams.push(open(at, post("/v1/completions", STREAM)).await);
    }
    let stopping = tokio::spawn(router.stop());
    let deadline = tokio::time::Instant::now() + BOUND;
    while send(at, get("/ready")).await.status != 503 {
        assert!(tokio::time::Instant::now() < deadline);
    }
    assert_eq!(send(at, get("/live")).await.status, 200);
    let answer = send(at, post("/v1/completions", WHOLE)).await;
    assert_eq!(
        (answer.status.as_u16(), answer.error_code().as_str()),
        (503, "draining")
    );
    assert!(!stopping.is_finished());
    engine.release();
    for stream in streams {
        let body = tokio::time::timeout(BOUND, stream.into_body().collect())
            .await
            .unwrap()
            .unwrap()
            .to_bytes();
        assert!(body.ends_with(b"data: [DONE]\n\n"));
    }
    tokio::time::timeout(BOUND, stopping)
        .await
        .expect("the drain ends with the last stream")
        .unwrap();
}
