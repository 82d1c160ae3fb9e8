//! OpenAI endpoints, errors, models and metrics.

use cairn_engine_sim::start;
use serde_json::{Value, json};

use crate::client::{call, get, instant, post};

fn chat(text: &str) -> Value {
    json!({"model": "cairn-tiny", "messages": [{"role": "user", "content": text}]})
}

fn stream_events(body: &str) -> Vec<Value> {
    let lines: Vec<&str> = body.split("\n\n").filter(|line| !line.is_empty()).collect();
    assert_eq!(lines.last(), Some(&"data: [DONE]"));
    lines[..lines.len() - 1]
        .iter()
        .map(|line| serde_json::from_str(&line["data: ".len()..]).unwrap())
        .collect()
}

#[tokio::test]
async fn the_same_chat_is_answered_alike_on_every_engine_and_cached_the_second_time() {
    let (a, b) = (start(instant()).await.unwrap(), start(instant()).await.unwrap());
    let body = chat(&"a long shared beginning ".repeat(40));
    let (status, first) = post(&a, "/v1/chat/completions", &body).await;
    assert_eq!(status, 200, "{first}");
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let (_, second) = post(&a, "/v1/chat/completions", &body).await;
    let (_, elsewhere) = post(&b, "/v1/chat/completions", &body).await;
    let prompt = second["usage"]["prompt_tokens"].as_u64().unwrap();
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap();
    assert_eq!(cached, (prompt - 1) / 16 * 16);
    let text = |answer: &Value| answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert_eq!(text(&first), text(&second));
    assert_eq!(text(&first), text(&elsewhere));
    assert!(!text(&first).is_empty());
    a.stop().await;
    b.stop().await;
}

#[tokio::test]
async fn a_stream_gives_the_text_of_the_whole_answer_and_ends_with_usage_and_done() {
    let engine = start(instant()).await.unwrap();
    let mut body = chat("tell me about the hill");
    let (_, whole) = post(&engine, "/v1/chat/completions", &body).await;
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let (status, text) = call(engine.http, "POST", "/v1/chat/completions", "", &body.to_string()).await;
    assert_eq!(status, 200);
    let events = stream_events(&text);
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let joined: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(joined, whole["choices"][0]["message"]["content"]);
    let usage = events.last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
    let ends: Vec<&Value> = events
        .iter()
        .filter(|event| event["choices"][0]["finish_reason"] == "stop")
        .collect();
    assert_eq!(ends.len(), 1);
    engine.stop().await;
}

#[tokio::test]
async fn text_completions_take_strings_ids_and_lists_with_several_answers_each() {
    let engine = start(instant()).await.unwrap();
    let one = json!({"model": "cairn-tiny", "prompt": "the river", "max_tokens": 5, "return_token_ids": true});
    let (_, text) = post(&engine, "/v1/completions", &one).await;
    assert_eq!(text["choices"][0]["finish_reason"], "length");
    assert_eq!(text["choices"][0]["token_ids"].as_array().unwrap().len(), 5);
    let ids = &text["choices"][0]["prompt_token_ids"];
    let (_, by_ids) = post(&engine, "/v1/completions", &json!({"prompt": ids, "max_tokens": 5})).await;
    assert_eq!(by_ids["choices"][0]["text"], text["choices"][0]["text"]);
    let many = json!({"prompt": ["the river", ids, "another"], "n": 2, "max_tokens": 3, "echo": true});
    let (_, many) = post(&engine, "/v1/completions", &many).await;
    assert_eq!(many["choices"].as_array().unwrap().len(), 6);
    assert!(many["choices"][5]["text"].as_str().unwrap().starts_with("another"));
    assert_eq!(many["usage"]["completion_tokens"], 18);
    engine.stop().await;
}

#[tokio::test]
async fn bad_requests_get_an_error_in_the_engines_shape_that_names_the_fault() {
    let mut config = instant();
    config.max_model_len = 256;
    let engine = start(config).await.unwrap();
    let long = json!({"prompt": vec![5; 300]});
    let cases: Vec<(&str, String, u16, &str)> = vec![
        ("/v1/completions", "{".into(), 400, "not valid JSON"),
        ("/v1/completions", "[]".into(), 400, "JSON object"),
        ("/v1/completions", "{\"prompt\": \"\\ud83e\"}".into(), 400, "JSON"),
        (
            "/v1/completions",
            json!({"model": "other", "prompt": "x"}).to_string(),
            404,
            "other",
        ),
        (
            "/v1/completions",
            json!({"model": "cairn-tiny"}).to_string(),
            400,
            "prompt",
        ),
        ("/v1/completions", json!({"prompt": [1, -2]}).to_string(), 400, "item 1"),
        (
            "/v1/completions",
            json!({"prompt": "x", "max_tokens": 0}).to_string(),
            400,
            "max_tokens",
        ),
        (
            "/v1/completions",
            json!({"prompt": "x", "temperature": "hot"}).to_string(),
            400,
            "temperature",
        ),
        ("/v1/completions", long.to_string(), 400, "256"),
        (
            "/v1/chat/completions",
            json!({"messages": 3}).to_string(),
            400,
            "messages",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [], "stream_options": {}}).to_string(),
            400,
            "stream_options",
        ),
    ];
    for (path, body, expected, names) in cases {
        let (status, answer) = call(engine.http, "POST", path, "", &body).await;
        assert_eq!(status, expected, "{path} {body}: {answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["error"]["code"], expected);
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(names), "{message} should name {names}");
    }
    assert_eq!(get(&engine, "/nothing").await.0, 404);
    assert_eq!(get(&engine, "/v1/completions").await.0, 405);
    engine.stop().await;
}

#[tokio::test]
async fn tokenize_gives_the_ids_that_generation_computes_with() {
    let engine = start(instant()).await.unwrap();
    let mut body = chat("count these");
    let (_, tokens) = post(&engine, "/tokenize", &body).await;
    body["return_token_ids"] = json!(true);
    let (_, answer) = post(&engine, "/v1/chat/completions", &body).await;
    assert_eq!(tokens["tokens"], answer["prompt_token_ids"]);
    assert_eq!(tokens["count"], answer["usage"]["prompt_tokens"]);
    let (_, text) = post(&engine, "/detokenize", &json!({"tokens": tokens["tokens"]})).await;
    assert!(text["prompt"].as_str().unwrap().contains("count these"));
    engine.stop().await;
}

#[tokio::test]
async fn metrics_models_and_control_endpoints_answer() {
    let mut config = instant();
    config.ranks = 2;
    let engine = start(config).await.unwrap();
    for path in ["/health", "/ping", "/version", "/load", "/is_sleeping"] {
        assert_eq!(get(&engine, path).await.0, 200, "{path}");
    }
    let (status, _) = call(
        engine.http,
        "POST",
        "/v1/completions",
        "x-data-parallel-rank: 1\r\n",
        "{\"prompt\":\"a\"}",
    )
    .await;
    assert_eq!(status, 200);
    let (status, _) = call(
        engine.http,
        "POST",
        "/v1/completions",
        "x-data-parallel-rank: 2\r\n",
        "{\"prompt\":\"a\"}",
    )
    .await;
    assert_eq!(status, 400);
    let (_, page) = get(&engine, "/metrics").await;
    for line in [
        "vllm:num_requests_running{engine=\"0\",model_name=\"cairn-tiny\"} 0",
        "vllm:num_requests_waiting{engine=\"1\",model_name=\"cairn-tiny\"} 0",
        "vllm:generation_tokens_total{engine=\"1\",model_name=\"cairn-tiny\"} 16",
        "vllm:time_to_first_token_seconds_count{engine=\"1\",model_name=\"cairn-tiny\"} 1",
        "num_gpu_blocks=\"8193\"",
        "process_start_time_seconds ",
    ] {
        assert!(page.contains(line), "{line} in\n{page}");
    }
    let (_, sources) = get(&engine, "/kv_event_sources").await;
    let sources: Value = serde_json::from_str(&sources).unwrap();
    assert_eq!(sources["1"]["endpoint"], engine.events()[1].live);
    let load = json!({"lora_name": "sql", "lora_path": "/adapters/sql"});
    assert_eq!(post(&engine, "/v1/load_lora_adapter", &load).await.0, 200);
    let (_, models) = get(&engine, "/v1/models").await;
    let models: Value = serde_json::from_str(&models).unwrap();
    assert_eq!(models["data"][0]["max_model_len"], 32_768);
    assert_eq!(models["data"][1]["parent"], "cairn-tiny");
    assert_eq!(
        post(&engine, "/v1/completions", &json!({"model": "sql", "prompt": "a"}))
            .await
            .0,
        200
    );
    assert_eq!(post(&engine, "/v1/unload_lora_adapter", &load).await.0, 200);
    assert_eq!(
        post(&engine, "/v1/completions", &json!({"model": "sql", "prompt": "a"}))
            .await
            .0,
        404
    );
    let (status, embedding) = post(&engine, "/v1/embeddings", &json!({"input": ["a", "b"]})).await;
    assert_eq!((status, embedding["data"].as_array().unwrap().len()), (200, 2));
    engine.stop().await;
}
