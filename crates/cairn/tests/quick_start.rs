//! The README's first command answers, routes a shared start to the worker that holds it, and says why.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::time::Duration;

use serde_json::Value;
use support::{Cluster, chat, eventually, get, post, prose, stream};

#[test]
fn the_first_command_answers_and_reuses_a_shared_start() {
    let cluster = Cluster::up(&[]);
    assert!(
        cluster.up_after < Duration::from_secs(30),
        "up after {:?}",
        cluster.up_after
    );
    let chat_url = format!("{}/v1/chat/completions", cluster.router(0));
    let start = prose(1, 2_600);

    let (status, first) = post(&chat_url, &chat(&start, "one", false));
    assert_eq!(status, 200, "{first}");
    let tokens = first["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(tokens >= 4_000, "the start has {tokens} tokens");

    // The stored blocks travel engine, agent, index, router; then the second request finds them.
    let body = chat(&start, "two", false);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), body.to_string()).unwrap();
    let explain = [
        "explain",
        "--router",
        &cluster.router(1),
        "--json",
        "--body",
        file.path().to_str().unwrap(),
    ];
    let explained = eventually("the other router sees the blocks", Duration::from_secs(5), || {
        let decision = support::ask(&explain);
        credited(&decision).is_some().then_some(decision)
    });
    let (holder, gpu_tokens) = credited(&explained).unwrap();
    assert!(gpu_tokens >= 4_000 - 64, "{explained}");
    assert_eq!(explained["chosen"], holder, "{explained}");
    assert!(!explained["reason"].as_str().unwrap().is_empty());
    for key in ["pool", "tokens", "policy"] {
        assert!(!explained[key].is_null(), "{key} is missing: {explained}");
    }
    for candidate in explained["candidates"].as_array().unwrap() {
        for key in [
            "worker",
            "eligible",
            "why_not",
            "gpu_tokens",
            "cpu_tokens",
            "shared_tokens",
            "queue_ms",
            "prefill_ms",
            "fetch_ms",
            "cost_ms",
        ] {
            assert!(candidate.get(key).is_some(), "{key} is missing: {candidate}");
        }
    }

    let (_, second) = post(&chat_url, &body);
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap_or(0);
    assert!(cached >= 4_000 - 64, "only {cached} tokens were cached: {second}");
    let last = support::ask(&["explain", "--router", &cluster.router(0), "--last", "--json"]);
    assert_eq!(last["chosen"], holder, "{last}");

    let events = stream(&chat_url, &chat(&start, "three", true));
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    assert!(events.len() > 3, "{events:?}");

    let status = cluster.status();
    assert_eq!(status["members"].as_array().unwrap().len(), 3);
    let workers = status["workers"].as_array().unwrap();
    assert_eq!(workers.len(), 4);
    assert!(workers.iter().all(|w| w["exact"] == true), "{status}");
    let (code, models) = get(&format!("{}/v1/models", cluster.router(0)));
    assert_eq!(code, 200);
    assert!(models.contains("cairn-demo"), "{models}");
    cluster.end();
}

/// The worker with the most GPU tokens, if any has some.
fn credited(decision: &Value) -> Option<(Value, u64)> {
    let candidates = decision["candidates"].as_array()?;
    let best = candidates
        .iter()
        .max_by_key(|c| c["gpu_tokens"].as_u64().unwrap_or(0))?;
    let tokens = best["gpu_tokens"].as_u64()?;
    (tokens > 0).then(|| (best["worker"].clone(), tokens))
}
