//! Against a real engine: needs a running vLLM with KV events, whose URL is in `CAIRN_VLLM_URL`.

use bytes::Bytes;
use cairn_agent::EngineConfig;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;

use crate::fake_index::FakeIndex;
use crate::{config, exact, until};

async fn post(url: &str, path: &str, body: serde_json::Value) -> serde_json::Value {
    let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    let request = Request::post(format!("{url}{path}"))
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))
        .unwrap();
    let response = client.request(request).await.unwrap();
    assert!(response.status().is_success(), "{path}: {}", response.status());
    let body = response.into_body().collect().await.unwrap().to_bytes();
    serde_json::from_slice(&body).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_real_vllm_is_followed_through_prompts_and_a_cache_reset() {
    let Ok(url) = std::env::var("CAIRN_VLLM_URL") else {
        use std::io::Write as _;
        // Past the capture of a passing test's output.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: a_real_vllm_is_followed_through_prompts_and_a_cache_reset: set CAIRN_VLLM_URL=http://HOST:PORT"
        );
        return;
    };
    let index = FakeIndex::start().await;
    let dir = tempfile::tempdir().unwrap();
    let running = cairn_agent::start(config(&index, vec![EngineConfig::at(&url)], dir.path()))
        .await
        .unwrap();
    until("ready", || running.ready().is_ok() && !running.sources().is_empty()).await;
    let engine = running.engines()[url.trim_end_matches('/')].clone();
    let source = format!("{}#0", url.trim_end_matches('/'));
    until("exact", || exact(&index, &source)).await;
    let (spec, _, _) = index.world.lock().registrations[0].clone();
    let unit = spec.worker.engine_block_size;
    eprintln!(
        "engine {engine:?}; block size {unit}, {} blocks",
        spec.worker.capacity_blocks
    );
    let prompt = |salt: u32| -> Vec<u32> { (0..1000).map(|i| (i * 7 + salt * 131) % 4000 + 10).collect() };
    let ask = async |salt: u32| {
        let body = serde_json::json!({"model": engine.models[0], "prompt": prompt(salt), "max_tokens": 1});
        post(&url, "/v1/completions", body).await;
    };
    let expected = 1000 / unit * unit;
    for salt in 1..=3 {
        ask(salt).await;
        until("the prompt's blocks", || {
            index.overlap(&engine.pool, &source, &prompt(salt)).gpu == expected
        })
        .await;
    }
    until("load", || {
        index
            .world
            .lock()
            .loads
            .get(&source)
            .is_some_and(|l| l.healthy && l.prefix_queries >= 3000)
    })
    .await;
    assert_eq!(running.sources()[&source].trouble, None);
    // vLLM announces the reset with its next step.
    post(&url, "/reset_prefix_cache", serde_json::json!({})).await;
    ask(9).await;
    until("the old prompts gone", || {
        index.overlap(&engine.pool, &source, &prompt(1)).gpu == 0
    })
    .await;
    until("the new one there", || {
        index.overlap(&engine.pool, &source, &prompt(9)).gpu == expected
    })
    .await;
    assert!(exact(&index, &source));
    running.stop().await;
}
