//! An OTLP receiver inside the test: keeps every span that it is sent.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::trace::v1::Span;
use tonic::{Request, Response, Status};

/// A span and the service that sent it.
#[derive(Clone, Debug)]
pub struct Received {
    pub service: String,
    pub span: Span,
}

impl Received {
    pub fn trace_id(&self) -> String {
        hex(&self.span.trace_id)
    }

    pub fn id(&self) -> String {
        hex(&self.span.span_id)
    }

    pub fn parent(&self) -> String {
        hex(&self.span.parent_span_id)
    }

    pub fn attribute(&self, key: &str) -> Option<String> {
        let value = self
            .span
            .attributes
            .iter()
            .find(|a| a.key == key)?
            .value
            .as_ref()?
            .value
            .as_ref()?;
        Some(match value {
            Any::StringValue(text) => text.clone(),
            Any::IntValue(n) => n.to_string(),
            Any::DoubleValue(x) => x.to_string(),
            Any::BoolValue(b) => b.to_string(),
            other => format!("{other:?}"),
        })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[derive(Clone, Default)]
struct Keeper(Arc<Mutex<Vec<Received>>>);

#[tonic::async_trait]
impl TraceService for Keeper {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut kept = self.0.lock().unwrap();
        for resource in request.into_inner().resource_spans {
            let service = resource
                .resource
                .iter()
                .flat_map(|r| &r.attributes)
                .find(|a| a.key == "service.name")
                .and_then(|a| match a.value.as_ref()?.value.as_ref()? {
                    Any::StringValue(name) => Some(name.clone()),
                    _ => None,
                })
                .unwrap_or_default();
            for span in resource.scope_spans.into_iter().flat_map(|s| s.spans) {
                kept.push(Received {
                    service: service.clone(),
                    span,
                });
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A running receiver; it ends with the test's process.
pub struct Receiver {
    pub endpoint: String,
    kept: Arc<Mutex<Vec<Received>>>,
}

impl Receiver {
    pub fn start() -> Self {
        let keeper = Keeper::default();
        let kept = keeper.0.clone();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                tell.send(listener.local_addr().unwrap()).unwrap();
                let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
                tonic::transport::Server::builder()
                    .add_service(TraceServiceServer::new(keeper))
                    .serve_with_incoming(incoming)
                    .await
                    .unwrap();
            });
        });
        Self {
            endpoint: format!("http://{}", told.recv().unwrap()),
            kept,
        }
    }

    /// All spans so far of one trace, or of all.
    pub fn spans(&self, trace: Option<&str>) -> Vec<Received> {
        let kept = self.kept.lock().unwrap();
        kept.iter()
            .filter(|s| trace.is_none_or(|t| s.trace_id() == t))
            .cloned()
            .collect()
    }
}
