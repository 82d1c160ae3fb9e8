//! One trace per request over all legs, and nothing secret anywhere.

use std::io::Write;
use std::sync::{Arc, LazyLock};

use cairn_router::Config;
use parking_lot::Mutex;

use super::client::{get, post, send};
use super::engine::{Engine, Mode};
use super::{config, router};

static LOGS: LazyLock<Arc<Mutex<Vec<u8>>>> = LazyLock::new(Arc::default);

struct Sink;

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOGS.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_callers_trace_goes_on_and_a_malformed_one_is_replaced() {
    let engine = Engine::start("m").await;
    let router = router(config(&[&engine])).await;
    let ask = async |traceparent: Option<&str>| {
        let mut request = post("/v1/completions", r#"{"model":"m","prompt":"hi"}"#);
        if let Some(value) = traceparent {
            request.headers_mut().insert("traceparent", value.parse().unwrap());
        }
        assert_eq!(send(router.addr, request).await.status, 200);
        engine.seen().last().unwrap().headers["traceparent"]
            .to_str()
            .unwrap()
            .to_string()
    };
    let caller = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let sent = ask(Some(caller)).await;
    assert_eq!(&sent[..36], &caller[..36]);
    assert!(sent.ends_with("-01"), "the caller's sampling is kept");
    let unsampled = ask(Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00")).await;
    assert!(unsampled.ends_with("-00"));
    for bad in [
        None,
        Some("00-zzz"),
        Some("00-00000000000000000000000000000000-00f067aa0ba902b7-01"),
    ] {
        let sent = ask(bad).await;
        assert_eq!(sent.len(), 55);
        assert_ne!(&sent[3..35], "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_ne!(&sent[3..35], "00000000000000000000000000000000");
    }
}

#[tokio::test]
async fn no_secret_or_text_of_a_request_reaches_logs_metrics_or_records() {
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(|| Sink)
        .finish();
    // The process-wide subscriber: tasks of the router run on threads of their own runtime.
    let _ = tracing::subscriber::set_global_default(subscriber);
    let engines = [Engine::start("m").await, Engine::start("m").await];
    let router = router(Config {
        allow_policy_header: true,
        ..config(&[&engines[0], &engines[1]])
    })
    .await;
    let canary = "cAnArY-9f3b";
    let ask = async |body: String| {
        let mut request = post("/v1/chat/completions", body);
        request
            .headers_mut()
            .insert("authorization", format!("Bearer key-{canary}").parse().unwrap());
        send(router.addr, request).await.status.as_u16()
    };
    let body = |stream: bool| {
        serde_json::json!({
            "model": "m", "stream": stream, "cache_salt": format!("salt-{canary}"),
            "messages": [{"role": "user", "content": format!("prompt {canary}")}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": format!("tool {canary}")}}}],
        })
        .to_string()
    };
    assert_eq!(ask(body(false)).await, 200);
    assert_eq!(ask(body(true)).await, 200);
    engines[0].set(Mode::Cut { after: 0 });
    engines[1].set(Mode::Cut { after: 0 });
    assert_eq!(ask(body(true)).await, 502);
    engines[0].set(Mode::Cut { after: 2 });
    engines[1].set(Mode::Cut { after: 2 });
    ask(body(true)).await;
    engines[0].set(Mode::Status(400));
    engines[1].set(Mode::Status(400));
    ask(body(true)).await;
    assert_eq!(ask(format!("{{\"model\":\"m\",\"messages\":[\"{canary}\"")).await, 400);
    assert_eq!(ask(format!("{{\"model\":\"x-{canary}\",\"messages\":[]}}")).await, 404);
    for path in ["/metrics", "/cairn/status", "/cairn/decisions?limit=100"] {
        let answer = send(router.addr, get(path)).await;
        assert_eq!(answer.status, 200);
        assert!(!answer.body.contains(canary), "{path} tells a secret");
    }
    let logs = String::from_utf8_lossy(&LOGS.lock()).into_owned();
    assert!(logs.contains("gateway.request"), "the test sees the router's own spans");
    let told = logs
        .lines()
        .find(|line| line.contains(canary))
        .map(|line| line.replace(canary, "<canary>"));
    assert_eq!(told, None, "a log line tells a secret");
}
