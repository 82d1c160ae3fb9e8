//! The README's first command answers, routes a shared start to the worker that holds it, and says why.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{Cluster, PATIENCE, chat, eventually, get, post, prose, stream};

#[test]
fn the_first_command_answers_and_reuses_a_shared_start() {
    let cluster = Cluster::up(&[]);
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
    let explained = eventually("the other router sees the blocks", || {
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
    for candidate in last["candidates"].as_array().unwrap() {
        let zero = candidate["gpu_tokens"] == 0 && candidate["cpu_tokens"] == 0;
        assert_eq!(zero, candidate["why_zero"][0]["why"].is_string(), "{candidate}");
    }

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
    operators_commands_reach_every_router(&cluster);
    cluster.end();
}

fn operators_commands_reach_every_router(cluster: &Cluster) {
    let index = cluster.index();
    let members = support::ask(&["members", "--json", "--index", &index]);
    let mut ids: Vec<u64> = members
        .as_array()
        .unwrap()
        .iter()
        .map(|member| member["id"].as_u64().unwrap())
        .collect();
    ids.sort_unstable();
    assert_eq!(ids, [1, 2, 3], "{members}");
    let said = support::refusal(&["members", "--index", &index, "remove", "9"]);
    assert!(said.contains("node 9"), "{said}");

    let engine = cluster.engine(1);
    for (undo, draining) in [(None, true), (Some("--undo"), false)] {
        let mut drain = vec!["drain", engine.as_str(), "--json", "--index", index.as_str()];
        drain.extend(undo);
        let told = support::ask(&drain);
        assert_eq!(told["draining"], draining, "{told}");
        assert_eq!(told["workers"].as_array().unwrap().len(), 1, "{told}");
        on_every_router(cluster, "the engine's drain or its end", |seen| {
            let workers = seen["workers"].as_array()?;
            let worker = workers.iter().find(|w| w["engine_url"] == engine)?;
            (worker["draining"] == draining).then_some(())
        });
    }

    let pool = cluster.status()["workers"][0]["pool"].as_str().unwrap().to_owned();
    for (policy, used) in [("round-robin", "round-robin"), ("default", "kv")] {
        let told = support::ask(&["policy", &pool, policy, "--json", "--index", &index]);
        assert_eq!(told["pool"], pool);
        assert_eq!(told["policy"], policy);
        on_every_router(cluster, "the pool's policy", |seen| {
            let found = seen["pools"].as_array()?.iter().find(|p| p["pool"] == pool)?;
            (found["policy"] == used).then_some(())
        });
    }
}

/// Waits until every router's own status passes.
fn on_every_router(cluster: &Cluster, what: &str, passes: impl Fn(&Value) -> Option<()>) {
    for i in 0..2 {
        let url = format!("{}/cairn/status", cluster.router(i));
        eventually(what, || {
            let seen: Value = serde_json::from_str(&get(&url).1).ok()?;
            passes(&seen)
        });
    }
}

#[test]
fn a_signal_lets_streams_finish_and_a_data_directory_serves_one_cluster() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().to_str().unwrap();
    let small = [
        "--engines",
        "sim:1",
        "--index-nodes",
        "1",
        "--routers",
        "1",
        "--data",
        data,
    ];
    let cluster = Cluster::up(&small);
    let configured = || std::fs::read_to_string(folder.path().join("config/router-1.toml")).unwrap();
    let before = configured();
    let said = support::refusal(&[&["up", "--port", "0"], &small[..]].concat());
    assert!(said.contains("another `cairn up`") && said.contains("--data"), "{said}");
    assert_eq!(before, configured(), "the refused cluster wrote its own ports");

    let url = format!("{}/v1/completions", cluster.router(0));
    let body = serde_json::json!({
        "model": "cairn-demo", "prompt": "on", "stream": true, "max_tokens": 150, "ignore_eos": true
    });
    let (begun, first) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut lines = support::open_stream(&url, &body);
        begun.send(lines.next().is_some()).unwrap();
        lines.last()
    });
    assert!(first.recv_timeout(PATIENCE).unwrap());
    cluster.end();
    assert_eq!(reader.join().unwrap().as_deref(), Some("[DONE]"));
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
