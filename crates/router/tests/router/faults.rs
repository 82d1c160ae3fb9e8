//! Engines, clients and the router itself going away at every stage of a request.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cairn_index::Role;
use cairn_router::{Config, Running};
use http_body_util::BodyExt;

use super::client::{BOUND, get, metric, open, post, send, until};
use super::engine::{Engine, Mode};
use super::index::Index;
use super::routing::{World, status, token_body, tokens};
use super::{config, router};

const STREAM: &str = r#"{"model":"m","prompt":"hi","stream":true}"#;
const WHOLE: &str = r#"{"model":"m","prompt":"hi"}"#;

async fn nothing_is_reserved(router: &Running) {
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
    let left = Instant::now();
    for ask in asks {
        ask.abort();
    }
    until("the engine's loss of its clients", || {
        engine.cancelled.load(Ordering::SeqCst) == 40
    })
    .await;
    assert!(
        left.elapsed() < Duration::from_secs(1),
        "engines were told after {:?}",
        left.elapsed()
    );
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
    let started = Instant::now();
    for _ in 0..10 {
        let answer = send(router.addr, post("/v1/completions", token_body(&prompt))).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    assert!(started.elapsed() < Duration::from_secs(5));
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
    first = Engine::start_at(addr, "m").await;
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

/// A pool of two prefill and two decode workers.
async fn split_world() -> World {
    let index = Index::start().await;
    let mut engines = Vec::new();
    let mut workers = Vec::new();
    for role in [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode] {
        let engine = Engine::start("m").await;
        workers.push(index.register(&engine.url(), role, 0, 1));
        engines.push(engine);
    }
    World {
        index,
        engines,
        workers,
    }
}

/// A prompt whose prefill outweighs a transfer.
fn long_body(stream: bool) -> String {
    serde_json::json!({"model": "m", "prompt": tokens(33, 3500), "stream": stream, "max_tokens": 50}).to_string()
}

#[tokio::test]
async fn a_split_request_passes_the_prefills_object_to_the_decode_leg() {
    let world = split_world().await;
    for engine in &world.engines[2..] {
        // Busy decode workers make a split pay.
        engine.set(Mode::Hold { after: 1 });
    }
    let router = world.router().await;
    let mut held = Vec::new();
    for _ in 0..24 {
        held.push(open(router.addr, post("/v1/completions", STREAM)).await);
    }
    for engine in &world.engines[2..] {
        engine.set(Mode::Answer { chunks: 3 });
    }
    let answer = send(router.addr, post("/v1/completions", long_body(true))).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.body.ends_with("data: [DONE]\n\n"));
    let long = |seen: &super::engine::Seen| seen.body.len() > 5_000;
    let prefill: Vec<_> = world.engines[..2].iter().flat_map(Engine::seen).filter(long).collect();
    assert_eq!(
        prefill.len(),
        1,
        "one prefill leg: {}",
        send(router.addr, get("/cairn/decisions?limit=1")).await.body
    );
    let sent: serde_json::Value = serde_json::from_str(&prefill[0].body).unwrap();
    assert_eq!((&sent["max_tokens"], &sent["stream"]), (&1.into(), &false.into()));
    assert_eq!(sent["kv_transfer_params"]["do_remote_decode"], true);
    let decode = world.engines[2..]
        .iter()
        .flat_map(Engine::seen)
        .find(|seen| long(seen) && seen.body.contains("remote_engine_id"));
    let decode: serde_json::Value = serde_json::from_str(&decode.unwrap().body).unwrap();
    assert_eq!(decode["kv_transfer_params"]["remote_engine_id"], "p1");
    assert_eq!(decode["max_tokens"], 50);

    // A client that leaves while the prompt is computed ends the prefill within a second.
    for engine in &world.engines[..2] {
        engine.set(Mode::Hang);
    }
    let at = router.addr;
    let ask = tokio::spawn(async move { open(at, post("/v1/completions", long_body(true))).await });
    until("the prefill", || {
        world.engines[..2].iter().any(|e| e.running.load(Ordering::SeqCst) == 1)
    })
    .await;
    let left = Instant::now();
    ask.abort();
    until("its end", || {
        world.engines[..2].iter().all(|e| e.running.load(Ordering::SeqCst) == 0)
    })
    .await;
    assert!(left.elapsed() < Duration::from_secs(1));

    // A prefill that fails costs one retry with a new pair.
    world.engines[0].set(Mode::Status(500));
    world.engines[1].set(Mode::Status(500));
    let before = world.counts();
    let answer = send(router.addr, post("/v1/completions", long_body(false))).await;
    let tried = world.counts()[..2].iter().sum::<usize>() - before[..2].iter().sum::<usize>();
    assert!(tried <= 2, "{tried} prefills were tried");
    assert!(
        answer.status == 200 || answer.error_code() == "engine_failed",
        "{answer:?}"
    );
    drop(held);
    nothing_is_reserved(&router).await;
}

#[tokio::test]
async fn both_legs_of_sglang_meet_in_one_room_and_end_together() {
    let index = Index::start().await;
    let (mut engines, mut workers) = (Vec::new(), Vec::new());
    for role in [Role::Prefill, Role::Decode] {
        let engine = Engine::start("m").await;
        // SGLang's decode engines refuse whole requests, so every request is split.
        workers.push(index.register_as(&engine.url(), role, 0, 1, |worker| {
            worker.engine_kind = "sglang".into();
            worker.bootstrap = (role == Role::Prefill).then(|| "10.0.0.7:8765".to_owned());
        }));
        engines.push(engine);
    }
    let world = World {
        index,
        engines,
        workers,
    };
    let (prefill, decode) = (&world.engines[0], &world.engines[1]);
    let router = world.router().await;
    let answer = send(router.addr, post("/v1/completions", STREAM)).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.body.ends_with("data: [DONE]\n\n"));
    let leg = |engine: &Engine| {
        let seen = engine.seen().into_iter().find(|seen| seen.path == "/v1/completions");
        serde_json::from_str::<serde_json::Value>(&seen.expect("a leg went there").body).unwrap()
    };
    let (one, other) = (leg(prefill), leg(decode));
    assert_eq!(
        (&one["bootstrap_host"], &one["bootstrap_port"]),
        (&"10.0.0.7".into(), &8765.into())
    );
    for field in ["bootstrap_host", "bootstrap_port", "bootstrap_room", "prompt"] {
        assert_eq!(one[field], other[field], "{field}");
    }
    assert!(one["bootstrap_room"].as_i64().is_some_and(|room| room >= 0));

    // Whoever ends first ends both: the decode engine that fails, and the client that leaves.
    let running = |engine: &Engine| engine.running.load(Ordering::SeqCst);
    prefill.set(Mode::Hang);
    decode.set(Mode::Status(400));
    let answer = send(router.addr, post("/v1/completions", WHOLE)).await;
    assert_eq!(answer.status, 400, "{answer:?}");
    let ended = Instant::now();
    until("the prefill leg's end", || running(prefill) == 0).await;
    assert!(ended.elapsed() < Duration::from_secs(1), "{:?}", ended.elapsed());

    decode.set(Mode::Hang);
    let at = router.addr;
    let ask = tokio::spawn(async move { open(at, post("/v1/completions", STREAM)).await });
    until("both legs", || (running(prefill), running(decode)) == (1, 1)).await;
    let left = Instant::now();
    ask.abort();
    until("their end", || (running(prefill), running(decode)) == (0, 0)).await;
    assert!(left.elapsed() < Duration::from_secs(1), "{:?}", left.elapsed());
    nothing_is_reserved(&router).await;
}
