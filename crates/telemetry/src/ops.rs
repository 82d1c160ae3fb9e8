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
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls;

use crate::SharedRegistry;

/// Connections served at once; scrapers and probes need few.
const CONNECTIONS_MAX: usize = 64;
/// How long a client may take to send its request head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// Judges the value of an `authorization` header.
pub type Admits = Box<dyn Fn(&[u8]) -> bool + Send + Sync>;

/// How a port beyond loopback is guarded.
pub struct OpsGuard {
    /// Certificate and key.
    pub tls: Arc<rustls::ServerConfig>,
    /// Whether the value of an `authorization` header lets its sender in.
    pub admits: Admits,
}

impl From<(Arc<rustls::ServerConfig>, Admits)> for OpsGuard {
    fn from((tls, admits): (Arc<rustls::ServerConfig>, Admits)) -> Self {
        Self { tls, admits }
    }
}

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

/// Serves the operators' port on `addr`. With `guard` it speaks TLS, and all but `/live` and `/ready`, which probes ask, wants
/// the token.
pub async fn serve_ops(addr: SocketAddr, state: OpsState, guard: Option<OpsGuard>) -> io::Result<OpsServer> {
    let listener = TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    let task = tokio::spawn(accept(listener, Arc::new(state), guard.map(Arc::new)));
    Ok(OpsServer { addr, task })
}

async fn accept(listener: TcpListener, state: Arc<OpsState>, guard: Option<Arc<OpsGuard>>) {
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
        let (state, guard) = (state.clone(), guard.clone());
        tokio::spawn(async move {
            match guard {
                None => serve(stream, state, None).await,
                Some(guard) => {
                    let acceptor = TlsAcceptor::from(guard.tls.clone());
                    match tokio::time::timeout(HEAD_TIMEOUT, acceptor.accept(stream)).await {
                        Ok(Ok(stream)) => serve(stream, state, Some(guard)).await,
                        Ok(Err(error)) => tracing::trace!(%error, "a TLS handshake on the operators' port failed"),
                        Err(_) => tracing::trace!("a TLS handshake on the operators' port took too long"),
                    }
                }
            }
            drop(slot);
        });
    }
}

async fn serve<S>(stream: S, state: Arc<OpsState>, guard: Option<Arc<OpsGuard>>)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let service = service_fn(move |request| {
        let response = answer(&state, guard.as_deref(), &request);
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
}

fn admitted(guard: Option<&OpsGuard>, request: &Request<Incoming>) -> bool {
    let Some(guard) = guard else { return true };
    if matches!(request.uri().path(), "/live" | "/ready") {
        return true;
    }
    let sent = request.headers().get(header::AUTHORIZATION);
    sent.is_some_and(|value| (guard.admits)(value.as_bytes()))
}

fn answer(state: &OpsState, guard: Option<&OpsGuard>, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    const TEXT: &str = "text/plain; charset=utf-8";
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return reply(StatusCode::METHOD_NOT_ALLOWED, TEXT, "use GET\n".into());
    }
    if !admitted(guard, request) {
        let how = "send the cluster token as `Authorization: Bearer TOKEN`\n";
        return reply(StatusCode::UNAUTHORIZED, TEXT, how.into());
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
