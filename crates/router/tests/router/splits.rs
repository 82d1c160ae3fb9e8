//! Requests in two legs: prefill and decode engines that work, fail and go away.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cairn_index::Role;

use super::client::{get, open, post, send, until};
use super::engine::{Engine, Mode, Seen};
use super::faults::{STREAM, WHOLE, nothing_is_reserved};
use super::index::Index;
use super::routing::{World, tokens};

/// A pool of two prefill and two decode workers.
async fn split_world() -> World {
    let index = Index::start().await;
    let mut engines = Vec::new();
    let mut workers = Vec::new();
    for role in [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode] {
        let engine = Engine::start("m").await;
        workers.push(index.register_as(&engine.url(), role, 0, 1, |worker| {
            if role == Role::Decode {
                // Decode engines of this kind take nothing whole, so every request is split, whatever speeds were seen.
                worker.engine_kind = "sglang".into();
            }
        }));
        engines.push(engine);
    }
    World {
        index,
        engines,
        workers,
    }
}

/// A long prompt.
fn long_body(stream: bool) -> String {
    serde_json::json!({"model": "m", "prompt": tokens(33, 3500), "stream": stream, "max_tokens": 50}).to_string()
}

#[tokio::test]
async fn a_split_request_passes_the_prefills_object_to_the_decode_leg() {
    let world = split_world().await;
    let router = world.router().await;
    let answer = send(router.addr, post("/v1/completions", long_body(true))).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.body.ends_with("data: [DONE]\n\n"));
    let long = |seen: &Seen| seen.body.len() > 5_000;
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

#[tokio::test]
async fn a_decode_engine_that_fails_before_the_first_token_costs_a_new_pair_and_not_the_request() {
    let world = split_world().await;
    let router = world.router().await;
    // One decode engine no longer knows what the prefill engine offers, as after a restart of either.
    world.engines[2].set(Mode::Status(500));
    let tried = || {
        let legs = world.engines[2].seen();
        legs.iter().filter(|leg| leg.body.contains("remote_engine_id")).count()
    };
    let mut sent = 0;
    while tried() == 0 {
        sent += 1;
        assert!(sent <= 20, "the failing engine was never asked to decode");
        let answer = send(router.addr, post("/v1/completions", long_body(true))).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert!(answer.body.ends_with("data: [DONE]\n\n"));
    }
    assert_eq!(tried(), 1, "the request went elsewhere at once");
    nothing_is_reserved(&router).await;
}

#[tokio::test]
async fn a_prefill_engine_that_dies_over_a_prompt_costs_a_new_pair_and_not_the_request() {
    let world = split_world().await;
    let router = world.router().await;
    for engine in &world.engines[..2] {
        engine.set(Mode::Hang);
    }
    let at = router.addr;
    let ask = tokio::spawn(async move { send(at, post("/v1/completions", long_body(true))).await });
    let busy = || {
        let running = |engine: &Engine| engine.running.load(Ordering::SeqCst) == 1;
        world.engines[..2].iter().position(running)
    };
    until("the prefill", || busy().is_some()).await;
    let dies = busy().unwrap();
    let other = &world.engines[1 - dies];
    other.set(Mode::Answer { chunks: 3 });
    world.engines[dies].kill();
    let answer = ask.await.unwrap();
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.body.ends_with("data: [DONE]\n\n"));
    let legs = other.seen();
    assert!(
        legs.iter().any(|leg| leg.body.contains("do_remote_decode")),
        "the other prefill engine computed the prompt"
    );
    nothing_is_reserved(&router).await;
}

#[tokio::test]
async fn a_prefill_engine_with_too_much_to_do_is_left_out_of_the_next_try_and_not_the_decode_engine() {
    for bootstrap in [None, Some("10.0.0.7:8765".to_owned())] {
        let index = Index::start().await;
        let (mut engines, mut workers) = (Vec::new(), Vec::new());
        // With one decode engine alone, leaving that out would leave nobody.
        for role in [Role::Prefill, Role::Prefill, Role::Decode] {
            let engine = Engine::start("m").await;
            workers.push(index.register_as(&engine.url(), role, 0, 1, |worker| {
                worker.engine_kind = "sglang".into();
                worker.bootstrap = bootstrap.clone().filter(|_| role == Role::Prefill);
            }));
            engines.push(engine);
        }
        let world = World {
            index,
            engines,
            workers,
        };
        let router = world.router().await;
        let asked = |engine: &Engine| {
            let legs = engine.seen();
            legs.iter().filter(|leg| leg.path == "/v1/completions").count()
        };
        assert_eq!(
            send(router.addr, post("/v1/completions", long_body(true))).await.status,
            200
        );
        let prefills = &world.engines[..2];
        let busy = prefills.iter().position(|engine| asked(engine) == 1).unwrap();
        // The prompt is there, so the next equal request goes there too.
        prefills[busy].set(Mode::Status(if bootstrap.is_some() { 429 } else { 503 }));
        if bootstrap.is_some() {
            // Both legs are sent at once; this one waits for the blocks, as a real one does.
            world.engines[2].set(Mode::Hang);
        }
        let at = router.addr;
        let ask = tokio::spawn(async move { send(at, post("/v1/completions", long_body(true))).await });
        until("the refusal", || asked(&prefills[busy]) == 2).await;
        until("the next try", || asked(&prefills[1 - busy]) == 1).await;
        if bootstrap.is_some() {
            ask.abort();
        } else {
            let answer = ask.await.unwrap();
            assert_eq!(answer.status, 200, "{answer:?}");
            assert!(answer.body.ends_with("data: [DONE]\n\n"));
        }
        nothing_is_reserved(&router).await;
        assert_eq!(asked(&prefills[busy]), 2, "it was left alone");
    }
}
