//! Prefill and decode on two engines.

use std::time::Duration;

use cairn_engine_sim::{Running, start};
use serde_json::{Value, json};

use crate::client::{call, get, instant, post};
use crate::watch::Watch;

fn leg(params: Value) -> Value {
    json!({"prompt": (0..100).collect::<Vec<u32>>(), "max_tokens": 8, "kv_transfer_params": params})
}

async fn prefill(engine: &Running) -> Value {
    let mut body = leg(
        json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null}),
    );
    body["max_tokens"] = json!(1);
    let (status, answer) = post(engine, "/v1/completions", &body).await;
    assert_eq!(status, 200, "{answer}");
    answer["kv_transfer_params"].clone()
}

#[tokio::test]
async fn a_decode_engine_pulls_the_blocks_and_answers_as_one_engine_does() {
    let (p, d) = (start(instant()).await.unwrap(), start(instant()).await.unwrap());
    let params = prefill(&p).await;
    assert_eq!(params["remote_block_ids"][0].as_array().unwrap().len(), 7);
    assert_eq!(
        (
            params["do_remote_prefill"].as_bool(),
            params["remote_num_tokens"].as_u64()
        ),
        (Some(true), Some(100))
    );
    let (status, split) = post(&d, "/v1/completions", &leg(params.clone())).await;
    assert_eq!(status, 200, "{split}");
    assert_eq!(split["usage"]["prompt_tokens_details"]["cached_tokens"], 99);
    let (_, whole) = post(&p, "/v1/completions", &leg(Value::Null)).await;
    assert_eq!(split["choices"][0]["text"], whole["choices"][0]["text"]);
    let (_, state) = get(&p, "/sim/state").await;
    assert_eq!(serde_json::from_str::<Value>(&state).unwrap()["ranks"][0]["held"], 0);
    let (_, page) = get(&d, "/metrics").await;
    assert!(page.contains("source=\"external_kv_transfer\"} 99"), "{page}");
    // The blocks are gone from the prefill engine's hold: a second pull of another decode engine fails cleanly.
    let other = start(instant()).await.unwrap();
    let (status, error) = post(&other, "/v1/completions", &leg(params)).await;
    assert_eq!((status, error["error"]["code"].as_u64()), (500, Some(500)));
    for engine in [p, d, other] {
        engine.stop().await;
    }
}

#[tokio::test]
async fn a_restarted_or_dead_prefill_engine_fails_the_decode_leg_within_a_second() {
    let (p, d) = (start(instant()).await.unwrap(), start(instant()).await.unwrap());
    let before = prefill(&p).await;
    assert_eq!(post(&p, "/sim/restart", &json!({})).await.0, 200);
    let asked = Watch::start();
    assert_eq!(post(&d, "/v1/completions", &leg(before)).await.0, 500);
    asked.within(Duration::from_secs(1), "the failure");
    let last = prefill(&p).await;
    p.stop().await;
    let asked = Watch::start();
    assert_eq!(post(&d, "/v1/completions", &leg(last.clone())).await.0, 500);
    asked.within(Duration::from_secs(1), "the failure");
    let mut streamed = leg(last);
    streamed["stream"] = json!(true);
    let (_, text) = call(d.http, "POST", "/v1/completions", "", &streamed.to_string()).await;
    assert!(
        text.contains("\"code\":500") && text.ends_with("data: [DONE]\n\n"),
        "{text}"
    );
    d.stop().await;
}

#[tokio::test]
async fn incomplete_transfer_fields_are_refused() {
    let engine = start(instant()).await.unwrap();
    let (status, error) = post(&engine, "/v1/completions", &leg(json!({"do_remote_prefill": true}))).await;
    assert_eq!(status, 400);
    assert!(error["error"]["message"].as_str().unwrap().contains("remote_port"));
    engine.stop().await;
}
