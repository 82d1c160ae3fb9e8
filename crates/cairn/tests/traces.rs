//! One trace per request, from the client's `traceparent` through router and engine, and from agent batch to Raft apply.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "support/otlp.rs"]
mod otlp;
mod support;

use std::process::{Child, Command, Stdio};

use otlp::{Received, Receiver};
use serde_json::Value;
use support::{Cluster, agent, chat, eventually, free_port, prose};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

fn ask(cluster: &Cluster, traceparent: Option<&str>, body: &Value) {
    let mut request = agent().post(format!("{}/v1/chat/completions", cluster.router(0)));
    if let Some(value) = traceparent {
        request = request.header("traceparent", value);
    }
    assert_eq!(request.send_json(body).unwrap().status(), 200);
}

#[test]
fn a_request_is_one_trace_below_the_callers_span() {
    let receiver = Receiver::start();
    let cluster = Cluster::up(&["--otlp", &receiver.endpoint, "--engines", "sim:2"]);
    let secret = "canary-5f1d-prompt";
    ask(
        &cluster,
        Some(&format!("00-{TRACE}-{CALLER}-01")),
        &chat(&format!("{secret} {}", prose(3, 400)), "hello", false),
    );
    let wanted = ["gateway.request", "tokenize", "overlap", "choose", "forward"];
    let spans = eventually("the request's spans arrive", || {
        let spans = receiver.spans(Some(TRACE));
        let has = |name: &str| spans.iter().any(|s| s.span.name == name);
        (wanted.iter().all(|name| has(name)) && spans.iter().any(|s| s.service == "cairn-engine")).then_some(spans)
    });
    let one = |name: &str| -> &Received {
        let found: Vec<&Received> = spans.iter().filter(|s| s.span.name == name).collect();
        assert_eq!(found.len(), 1, "{name}: {found:?}");
        found[0]
    };
    assert_eq!(one("gateway.request").parent(), CALLER);
    let forward = one("forward").id();
    let engine = spans.iter().find(|s| s.service == "cairn-engine").unwrap();
    assert_eq!(
        engine.parent(),
        forward,
        "the engine's span joins below the router's call"
    );
    let candidates = &one("choose").span.events;
    assert!(candidates.len() >= 2, "the candidates are events: {candidates:?}");
    let everything = format!("{:?}", receiver.spans(None));
    assert!(!everything.contains(secret), "prompt text reached a trace");
    cluster.end();
}

#[test]
fn an_unsampled_caller_is_honoured_and_a_malformed_one_gets_a_new_trace() {
    let receiver = Receiver::start();
    let cluster = Cluster::up(&[
        "--otlp",
        &receiver.endpoint,
        "--engines",
        "sim:1",
        "--index-nodes",
        "1",
        "--routers",
        "1",
    ]);
    let unsampled = "4bf92f3577b34da6a3ce929d0e0e4737";
    ask(
        &cluster,
        Some(&format!("00-{unsampled}-{CALLER}-00")),
        &chat("unsampled", "one", false),
    );
    ask(&cluster, Some("00-nonsense"), &chat("malformed", "two", false));
    let roots = eventually("the malformed one's trace arrives", || {
        let all = receiver.spans(None);
        let roots: Vec<Received> = all.into_iter().filter(|s| s.span.name == "gateway.request").collect();
        (!roots.is_empty()).then_some(roots)
    });
    assert_eq!(roots.len(), 1);
    assert_eq!(roots[0].parent(), "");
    assert!(
        receiver.spans(Some(unsampled)).is_empty(),
        "the caller asked not to be recorded"
    );
    cluster.end();
}

#[test]
fn raft_applies_link_to_the_agents_batches() {
    let receiver = Receiver::start();
    let cluster = Cluster::up(&[
        "--otlp",
        &receiver.endpoint,
        "--engines",
        "sim:1",
        "--index-nodes",
        "1",
        "--routers",
        "1",
    ]);
    ask(&cluster, None, &chat(&prose(9, 800), "one", false));
    let (batch, apply) = eventually("a batch and its apply", || {
        let all = receiver.spans(None);
        let batches: Vec<&Received> = all.iter().filter(|s| s.span.name == "ingest.batch").collect();
        let apply = all
            .iter()
            .find(|s| s.span.name == "raft.apply" && linked(s, &batches).is_some())?;
        Some((linked(apply, &batches)?.clone(), apply.clone()))
    });
    assert_eq!(batch.service, "cairn-agent");
    assert_eq!(apply.service, "cairn-index");
    cluster.end();
}

/// The batch span that `apply` is a child of or links to.
fn linked<'a>(apply: &Received, batches: &[&'a Received]) -> Option<&'a Received> {
    batches.iter().copied().find(|b| {
        apply.parent() == b.id()
            || apply
                .span
                .links
                .iter()
                .any(|l| l.span_id == b.span.span_id && l.trace_id == b.span.trace_id)
    })
}

/// A real Jaeger, ended when dropped.
struct Jaeger {
    child: Child,
    query: u16,
    otlp: u16,
    _config: tempfile::NamedTempFile,
}

const JAEGER_CONFIG: &str = "\
service:
  extensions: [jaeger_storage, jaeger_query]
  pipelines:
    traces: { receivers: [otlp], exporters: [jaeger_storage_exporter] }
  telemetry: { metrics: { level: none }, logs: { level: warn } }
extensions:
  jaeger_storage: { backends: { memory: { memory: { max_traces: 10000 } } } }
  jaeger_query:
    storage: { traces: memory }
    http: { endpoint: \"127.0.0.1:QUERY\" }
    grpc: { endpoint: \"127.0.0.1:GRPC\" }
receivers:
  otlp: { protocols: { grpc: { endpoint: \"127.0.0.1:OTLP\" } } }
exporters:
  jaeger_storage_exporter: { trace_storage: memory }
";

impl Jaeger {
    fn start(binary: &str) -> Self {
        let (query, grpc, otlp) = (free_port(), free_port(), free_port());
        let config = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
        let text = JAEGER_CONFIG
            .replace("QUERY", &query.to_string())
            .replace("GRPC", &grpc.to_string())
            .replace("OTLP", &otlp.to_string());
        std::fs::write(config.path(), text).unwrap();
        let child = Command::new(binary)
            .arg("--config")
            .arg(config.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|e| panic!("JAEGER_BIN={binary}: {e}"));
        let jaeger = Self {
            child,
            query,
            otlp,
            _config: config,
        };
        eventually("Jaeger answers", || {
            agent()
                .get(format!("http://127.0.0.1:{query}/api/services"))
                .call()
                .ok()
                .filter(|r| r.status() == 200)
        });
        jaeger
    }
}

impl Drop for Jaeger {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_real_jaeger_shows_the_request_as_one_trace() {
    let Ok(binary) = std::env::var("JAEGER_BIN") else {
        support::skipped(
            "a_real_jaeger_shows_the_request_as_one_trace",
            "JAEGER_BIN to a Jaeger v2 binary",
        );
        return;
    };
    let jaeger = Jaeger::start(&binary);
    let otlp = format!("http://127.0.0.1:{}", jaeger.otlp);
    let cluster = Cluster::up(&["--otlp", &otlp, "--engines", "sim:2", "--index-nodes", "1"]);
    ask(
        &cluster,
        Some(&format!("00-{TRACE}-{CALLER}-01")),
        &chat(&prose(5, 300), "hello", false),
    );
    let url = format!("http://127.0.0.1:{}/api/traces/{TRACE}", jaeger.query);
    let names = eventually("Jaeger has the whole trace", || {
        let text = agent().get(&url).call().ok()?.body_mut().read_to_string().ok()?;
        let trace: Value = serde_json::from_str(&text).ok()?;
        let spans = trace["data"][0]["spans"].as_array()?;
        let names: Vec<String> = spans
            .iter()
            .filter_map(|s| s["operationName"].as_str().map(str::to_owned))
            .collect();
        let services: Vec<&str> = trace["data"][0]["processes"]
            .as_object()?
            .values()
            .filter_map(|p| p["serviceName"].as_str())
            .collect();
        let whole = ["gateway.request", "choose", "forward"]
            .iter()
            .all(|n| names.iter().any(|m| m == n));
        (whole && services.contains(&"cairn-router") && services.contains(&"cairn-engine")).then_some(names)
    });
    assert!(names.iter().any(|n| n == "tokenize"), "{names:?}");
    cluster.end();
}
