//! Bad input at the HTTP door: a clear error that names the fault, and nobody else hurt.

use std::time::Duration;

use cairn_router::Config;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::client::{BOUND, get, post, send};
use super::engine::Engine;
use super::routing::World;
use super::watch::Watch;
use super::{config, router};

#[tokio::test]
async fn broken_bodies_get_400_with_the_place_of_the_fault_every_time() {
    let engine = Engine::start("m").await;
    let router = router(config(&[&engine])).await;
    let cases: [(&[u8], &str, &str); 9] = [
        (b"{\"model\":\"m\",\"prompt\":\"x\"", "invalid_json", "byte 25"),
        (b"[]", "invalid_json", "byte 0"),
        (b"", "invalid_json", "byte 0"),
        (
            b"{\"model\":\"m\",\"prompt\":\"\\ud83e x\"}",
            "lone_surrogate",
            "byte 23",
        ),
        (b"{\"model\":\"m\",\"prompt\":\"\xff\"}", "invalid_utf8", "byte 23"),
        (b"{\"model\":\"m\"}", "invalid_value", "prompt"),
        (b"{\"model\":7,\"prompt\":\"x\"}", "invalid_value", "model"),
        (b"{\"model\":\"m\",\"prompt\":{}}", "invalid_value", "prompt"),
        (
            b"{\"model\":\"nope\",\"prompt\":\"x\"}",
            "model_not_found",
            "/v1/models",
        ),
    ];
    for (body, code, says) in cases {
        for _ in 0..2 {
            let answer = send(router.addr, post("/v1/completions", body.to_vec())).await;
            let expect = if code == "model_not_found" { 404 } else { 400 };
            assert_eq!(
                (answer.status.as_u16(), answer.error_code().as_str()),
                (expect, code),
                "{answer:?}"
            );
            let error = &answer.json()["error"];
            assert!(error["message"].as_str().unwrap().contains(says), "{error}");
            assert_eq!(error["type"], "invalid_request_error");
        }
    }
    let deep = format!("{{\"model\":\"m\",\"prompt\":{}", "[".repeat(100_000));
    assert_eq!(
        send(router.addr, post("/v1/completions", deep)).await.error_code(),
        "invalid_json"
    );
    assert!(engine.seen().is_empty());
}

#[tokio::test]
async fn bodies_are_bounded_in_size_and_large_ones_pass() {
    let engine = Engine::start("m").await;
    let config = Config {
        max_body_bytes: 6 << 20,
        body_memory_bytes: 64 << 20,
        ..config(&[&engine])
    };
    let router = router(config).await;
    for (size, expect) in [(100, 200), (128 << 10, 200), (5_000_000, 200), ((6 << 20) + 1, 413)] {
        let frame = r#"{"model":"m","prompt":""}"#.len();
        let body = format!(r#"{{"model":"m","prompt":"{}"}}"#, "x".repeat(size - frame));
        assert_eq!(body.len(), size);
        let answer = send(router.addr, post("/v1/completions", body)).await;
        assert_eq!(answer.status.as_u16(), expect, "{size}: {answer:?}");
    }
    assert_eq!(engine.seen().len(), 3);
}

#[tokio::test]
async fn a_client_that_asks_before_it_sends_too_much_is_refused_at_once() {
    let engine = Engine::start("m").await;
    let config = Config {
        max_body_bytes: 1 << 20,
        body_memory_bytes: 2 << 20,
        ..config(&[&engine])
    };
    let router = router(config).await;
    let mut stream = TcpStream::connect(router.addr).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: r\r\nexpect: 100-continue\r\ncontent-length: 2000000\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = [0; 64];
    let read = tokio::time::timeout(BOUND, stream.read(&mut answer));
    let length = read.await.expect("no body is waited for").unwrap();
    let answer = String::from_utf8_lossy(&answer[..length]).into_owned();
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
}

#[tokio::test]
async fn half_sent_bodies_time_out_hold_little_memory_and_hurt_nobody() {
    let engine = Engine::start("m").await;
    let config = Config {
        body_timeout_ms: 3_000,
        max_body_bytes: 1 << 20,
        body_memory_bytes: 2 << 20,
        ..config(&[&engine])
    };
    let router = router(config).await;
    let mut stalled = Vec::new();
    for _ in 0..50 {
        let mut stream = TcpStream::connect(router.addr).await.unwrap();
        let head = "POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: 1000000\r\n\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        stalled.push(tokio::spawn(async move {
            // The router reads no further than its budget allows, so this may stall as well.
            let _ = tokio::time::timeout(Duration::from_millis(200), stream.write_all(&vec![b' '; 400_000])).await;
            let mut answer = Vec::new();
            let _ = tokio::time::timeout(BOUND, stream.read_to_end(&mut answer)).await;
            String::from_utf8_lossy(&answer).into_owned()
        }));
    }
    let answer = send(router.addr, post("/v1/completions", r#"{"model":"m","prompt":"hi"}"#)).await;
    assert_eq!(answer.status, 200);
    assert!(
        !stalled.iter().any(tokio::task::JoinHandle::is_finished),
        "an honest request waited until a stalled one was given up"
    );
    let mut timed_out = 0;
    for stream in stalled {
        timed_out += usize::from(stream.await.unwrap().starts_with("HTTP/1.1 408"));
    }
    assert!(timed_out >= 45, "{timed_out} of 50 were told 408");
}

#[tokio::test]
async fn a_prompt_longer_than_the_model_is_refused_with_both_lengths_before_any_engine_is_asked() {
    let world = World::start(1).await;
    let router = world.router().await;
    let ids: Vec<u32> = (0..5000).map(|i| i % 4000).collect();
    let text = "several words of a prompt that is too long ".repeat(1000);
    for stream in [false, true] {
        let bodies = [
            serde_json::json!({"model": "m", "prompt": ids, "stream": stream}),
            serde_json::json!({"model": "m", "prompt": text, "stream": stream}),
            serde_json::json!({"model": "m", "messages": [{"role": "user", "content": text}], "stream": stream}),
        ];
        for body in bodies {
            let path = if body.get("messages").is_some() {
                "/v1/chat/completions"
            } else {
                "/v1/completions"
            };
            let answer = send(router.addr, post(path, body.to_string())).await;
            assert_eq!(answer.status, 400, "{answer:?}");
            assert_eq!(answer.error_code(), "context_length_exceeded");
            let message = answer.json()["error"]["message"].as_str().unwrap().to_string();
            let numbers = message
                .split(|c: char| !c.is_ascii_digit())
                .filter(|n| !n.is_empty())
                .count();
            assert!(message.contains("4096") && numbers >= 2, "{message}");
        }
    }
    assert_eq!(world.counts(), [0]);
}

#[tokio::test]
async fn a_prompt_of_16_mib_costs_little_and_others_go_on() {
    let world = World::start(1).await;
    let router = world.router().await;
    let words = "word after word ".repeat(1 << 20);
    let body = serde_json::json!({"model": "m", "messages": [{"role": "user", "content": words}]}).to_string();
    let at = router.addr;
    let sent = Watch::start();
    let huge = tokio::spawn(async move { send(at, post("/v1/chat/completions", body)).await });
    for _ in 0..5 {
        assert_eq!(
            send(at, post("/v1/completions", r#"{"model":"m","prompt":"hi"}"#))
                .await
                .status,
            200
        );
    }
    let answer = huge.await.unwrap();
    sent.within(Duration::from_secs(3), "the refusal");
    assert_eq!(
        (answer.status.as_u16(), answer.error_code().as_str()),
        (400, "context_length_exceeded")
    );
}

#[tokio::test]
async fn unknown_paths_and_methods_are_told_what_there_is() {
    let engine = Engine::start("m").await;
    let router = router(config(&[&engine])).await;
    let answer = send(router.addr, get("/v1/nothing")).await;
    assert_eq!(
        (answer.status.as_u16(), answer.error_code().as_str()),
        (404, "unknown_path")
    );
    assert!(answer.body.contains("/v1/chat/completions"));
    let answer = send(router.addr, get("/v1/completions")).await;
    assert_eq!(
        (answer.status.as_u16(), answer.error_code().as_str()),
        (405, "method_not_allowed")
    );
    let answer = send(router.addr, post("/v1/models", "{}")).await;
    assert_eq!(answer.status, 405);
}

#[tokio::test]
async fn operator_paths_want_the_operators_token_where_there_is_one() {
    let engine = Engine::start("m").await;
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "a-long-operator-token\n").unwrap();
    let router = router(Config {
        operator_token_file: token.display().to_string(),
        ..config(&[&engine])
    })
    .await;
    for path in ["/cairn/status", "/cairn/decisions", "/metrics"] {
        assert_eq!(send(router.addr, get(path)).await.status, 401, "{path}");
        let mut request = get(path);
        request
            .headers_mut()
            .insert("authorization", "Bearer a-long-operator-token".parse().unwrap());
        assert_eq!(send(router.addr, request).await.status, 200, "{path}");
    }
    let mut request = post("/v1/completions", r#"{"model":"m","prompt":"hi"}"#);
    request.headers_mut().insert("x-cairn-debug", "1".parse().unwrap());
    let answer = send(router.addr, request).await;
    assert!(!answer.headers.keys().any(|name| name.as_str().starts_with("x-cairn-")));
}

#[tokio::test]
async fn a_router_refuses_to_listen_to_other_hosts_without_token_and_tls() {
    let config = Config {
        listen: "0.0.0.0:0".into(),
        ..Config::default()
    };
    let error = cairn_router::start(config).await.err().expect("a refusal").to_string();
    assert!(
        error.contains("cluster_token_file") && error.contains("127.0.0.1"),
        "{error}"
    );
}

#[tokio::test]
async fn sagemakers_doors_dispatch_by_the_bodys_shape() {
    let engine = Engine::start("m").await;
    let router = router(config(&[&engine])).await;
    assert_eq!(send(router.addr, get("/ping")).await.status, 200);
    for (body, path) in [
        (
            r#"{"messages":[{"role":"user","content":"hi"}]}"#,
            "/v1/chat/completions",
        ),
        (r#"{"model":"m","prompt":"hi"}"#, "/v1/completions"),
        (r#"{"model":"m","input":"hi"}"#, "/v1/embeddings"),
    ] {
        assert_eq!(send(router.addr, post("/invocations", body)).await.status, 200);
        assert_eq!(engine.seen().last().unwrap().path, path);
    }
    let answer = send(router.addr, post("/invocations", r#"{"model":"m"}"#)).await;
    assert_eq!(
        (answer.status.as_u16(), answer.error_code().as_str()),
        (400, "unknown_shape")
    );
    let mut request = post("/invocations", r#"{"model":"m","prompt":"hi"}"#);
    request
        .headers_mut()
        .insert("x-amzn-sagemaker-prefix-aware-id", "x".repeat(65).parse().unwrap());
    assert_eq!(send(router.addr, request).await.error_code(), "invalid_affinity");
}
