//! The operators' port of a process: `/metrics`, `/live`, `/ready` and what the role adds.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use crate::SharedRegistry;

/// Connections served at once; scrapers and probes need few.
const CONNECTIONS_MAX: usize = 64;
/// How long a client may take to send its request head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// What the port answers from.
pub struct OpsState {
    /// The process's metrics.
    pub registry: SharedRegistry,
    /// `Ok` when the role can do its work; else why not.
    pub ready: Box<dyn Fn() -> Result<(), String> + Send + Sync>,
    /// JSON for `/status`, where the role has one.
    pub status: Option<Box<dyn Fn() -> String + Send + Sync>>,
    /// Called before each scrape, to refresh gauges.
    pub before_scrape: Option<Box<dyn Fn() + Send + Sync>>,
}

/// A running operators' port; it closes when dropped.
pub struct OpsServer {
    /// Where it listens.
    pub addr: SocketAddr,
    task: JoinHandle<()>,
}

impl Drop for OpsServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Serves the operators' port on `addr`.
pub async fn serve_ops(addr: SocketAddr, state: OpsState) -> io::Result<OpsServer> {
    let listener = TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    let task = tokio::spawn(accept(listener, Arc::new(state)));
    Ok(OpsServer { addr, task })
}

async fn accept(listener: TcpListener, state: Arc<OpsState>) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "accepting on the operators' port failed");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let state = state.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let response = answer(&state, &request);
                async move { Ok::<_, Infallible>(response) }
            });
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIMEOUT)
                .serve_connection(TokioIo::new(stream), service)
                .await;
            if let Err(error) = served {
                tracing::trace!(%error, "a connection to the operators' port ended badly");
            }
            drop(slot);
        });
    }
}

fn answer(state: &OpsState, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    const TEXT: &str = "text/plain; charset=utf-8";
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return reply(StatusCode::METHOD_NOT_ALLOWED, TEXT, "use GET\n".into());
    }
    match request.uri().path() {
        "/metrics" => {
            if let Some(refresh) = &state.before_scrape {
                refresh();
            }
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            reply(StatusCode::OK, kind, state.registry.encode())
        }
        "/live" => reply(StatusCode::OK, TEXT, "live\n".into()),
        "/ready" => match (state.ready)() {
            Ok(()) => reply(StatusCode::OK, TEXT, "ready\n".into()),
            Err(why) => reply(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{why}\n")),
        },
        "/status" if state.status.is_some() => {
            let body = state.status.as_ref().map_or_else(String::new, |status| status());
            reply(StatusCode::OK, "application/json", body)
        }
        _ => reply(
            StatusCode::NOT_FOUND,
            TEXT,
            "try /metrics, /live, /ready or /status\n".into(),
        ),
    }
}

fn reply(status: StatusCode, kind: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}
