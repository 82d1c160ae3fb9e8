//! What a client sees of a router when all is well, and when its own request isn't.

use super::client::{get, post, send};
use super::engine::{Engine, Mode};
use super::routing::{World, tokens};
use super::{config, router};

#[tokio::test]
async fn a_whole_answer_and_a_stream_pass_unchanged() {
    let engine = Engine::start("m").await;
    let router = router(config(&[&engine])).await;
    let body = r#"{"model":"m",  "prompt":"hi", "n": 2, "unknown": {"x": [1]}}"#;
    let answer = send(router.addr, post("/v1/completions", body)).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json()["choices"][0]["text"], "hello");
    assert_eq!(engine.seen()[0].body, body);

    engine.set(Mode::Answer { chunks: 4 });
    let body = r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}"#;
    let answer = send(router.addr, post("/v1/chat/completions", body)).await;
    assert_eq!(answer.headers["content-type"], "text/event-stream; charset=utf-8");
    let events: Vec<_> = answer.body.split("\n\n").filter(|e| !e.is_empty()).collect();
    assert_eq!(events.len(), 5, "{}", answer.body);
    assert_eq!(events[4], "data: [DONE]");
    assert!(
        engine.seen()[1].body.contains("include_usage"),
        "usage is asked for, and taken out again"
    );
    router.stop().await;
}

#[tokio::test]
async fn models_are_listed_and_unknown_ones_refused() {
    let engine = Engine::start("m").await;
    engine.state.lock().models.push(("adapter-1".into(), Some("m".into())));
    let router = router(config(&[&engine])).await;
    let list = send(router.addr, get("/v1/models")).await.json();
    let names: Vec<_> = list["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m["id"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["adapter-1", "m"]);
    let answer = send(router.addr, post("/v1/completions", r#"{"model":"x","prompt":"hi"}"#)).await;
    assert_eq!(
        (answer.status.as_u16(), answer.error_code().as_str()),
        (404, "model_not_found")
    );
    let answer = send(
        router.addr,
        post("/v1/completions", r#"{"model":"adapter-1","prompt":"hi"}"#),
    )
    .await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn every_name_of_a_model_meets_the_same_blocks_and_comes_back_in_the_answer() {
    let world = World::start(2).await;
    let prompt = tokens(1, 640);
    world.index.store(&world.workers[1], &prompt, "");
    let router = world.router().await;
    let names = ["m", "alias/of-m"];
    let body = |name: &str| serde_json::json!({"model": name, "prompt": prompt}).to_string();
    for name in names {
        let told = send(router.addr, post("/cairn/explain", body(name))).await.json();
        let credits: Vec<_> = told["candidates"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| row["gpu_tokens"].as_u64().unwrap())
            .collect();
        assert_eq!(credits, [0, 624], "{name}");
    }
    for name in names {
        let answer = send(router.addr, post("/v1/completions", body(name))).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(answer.json()["model"], name);
    }
    assert_eq!(world.counts(), [0, 2]);
}
