//! Spans of batches, as a collector receives them.

use std::sync::Arc;

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use parking_lot::Mutex;
use tonic::{Request, Response, Status};

use crate::fake_engine::{FakeEngine, Options};
use crate::fake_index::FakeIndex;
use crate::{agent, gpu, hashes, tokens, until};

/// Name, trace id and attribute keys of a span.
type Span = (String, String, Vec<String>);

#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<Span>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let spans = request
            .into_inner()
            .resource_spans
            .into_iter()
            .flat_map(|r| r.scope_spans)
            .flat_map(|s| s.spans);
        for span in spans {
            let id = span.trace_id.iter().map(|b| format!("{b:02x}")).collect();
            let keys = span.attributes.into_iter().map(|a| a.key).collect();
            self.0.lock().push((span.name, id, keys));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sampled_batch_carries_the_trace_of_its_span() {
    let collector = Collector::default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let serving = tonic::transport::Server::builder()
        .add_service(TraceServiceServer::new(collector.clone()))
        .serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener));
    tokio::spawn(async move { serving.await.unwrap() });
    let telemetry = cairn_telemetry::TelemetryConfig {
        otlp_endpoint: endpoint,
        log: "error".into(),
        ..cairn_telemetry::TelemetryConfig::default()
    };
    let guard = cairn_telemetry::init("cairn-agent", "test", &telemetry).unwrap();
    let index = FakeIndex::start().await;
    let mut engine = FakeEngine::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let _agent = agent(&index, &engine, dir.path()).await;
    let source = engine.source(0);
    engine
        .publish(0, vec![engine.stored(&hashes(1, 2), None, &tokens(1, 2))])
        .await;
    until("two blocks", || gpu(&index, &source) == 2).await;
    let parent = index
        .world
        .lock()
        .batches
        .iter()
        .map(|(_, parent, _)| parent.clone())
        .find(|p| !p.is_empty());
    let parent = parent.expect("the first batch is sampled");
    let trace = parent.split('-').nth(1).unwrap().to_owned();
    guard.flush();
    let found = || {
        collector
            .0
            .lock()
            .iter()
            .find(|(name, id, _)| name == "ingest.batch" && *id == trace)
            .cloned()
    };
    until("its span", || found().is_some()).await;
    let (_, _, keys) = found().unwrap();
    for key in ["source", "seq", "ops", "outcome"] {
        assert!(keys.iter().any(|k| k == key), "{key} in {keys:?}");
    }
}
