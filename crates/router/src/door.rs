//! The door: accepts connections, reads request heads, and hands each path to who answers it.

use std::convert::Infallible;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

use http::{Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::ask::Arrival;
use crate::bell::Bell;
use crate::body::Endpoint;
use crate::engines::Health;
use crate::error::ApiError;
use crate::fleet::{Pool, Worker};
use crate::lanes::Lanes;
use crate::metrics::{Reason, RequestLabels, status_class};
use crate::reply::{self, ReplyBody};
use crate::state::{InFlightGuard, Router};
use crate::{models, operator, walk};

/// How long a client may take to send a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failed accept (out of file descriptors), so that the loop doesn't spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How long a TLS handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// When connections are to end.
#[derive(Clone, Default)]
pub(crate) struct Closing {
    /// Ends idle connections and lets busy ones finish: the drain began.
    pub drain: CancellationToken,
    /// Ends the door itself and connections that came during the drain.
    pub end: CancellationToken,
    /// Every open connection.
    pub connections: TaskTracker,
}

/// Accepts connections until `closing.end`.
pub(crate) async fn accept(
    router: Arc<Router>,
    listener: TcpListener,
    tls: Option<Arc<rustls::ServerConfig>>,
    lanes: Arc<Lanes>,
    closing: Closing,
) {
    let slots = Arc::new(Semaphore::new(router.config.max_connections));
    let tls = tls.map(tokio_rustls::TlsAcceptor::from);
    loop {
        let slot = tokio::select! {
            slot = Arc::clone(&slots).acquire_owned() => slot,
            () = closing.end.cancelled() => return,
        };
        let Ok(slot) = slot else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = closing.end.cancelled() => return,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "accepting a connection failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Without it every second small write of a stream waits for the client's delayed acknowledgement, up to 40 ms.
        let _ = stream.set_nodelay(true);
        let router = Arc::clone(&router);
        let tls = tls.clone();
        let end = if router.draining.load(Ordering::Acquire) {
            closing.end.clone()
        } else {
            closing.drain.clone()
        };
        let Ok(stream) = stream.into_std() else { continue };
        let (lane, seat) = lanes.seat();
        let work = async move {
            // Registered with the lane's own reactor from here on.
            if let Ok(stream) = TcpStream::from_std(stream) {
                match tls {
                    None => serve(router, stream, peer, end).await,
                    Some(tls) => handshake(router, tls, stream, peer, end).await,
                }
            }
            drop((slot, seat));
        };
        closing.connections.spawn_on(work, lane);
    }
}

async fn handshake(
    router: Arc<Router>,
    tls: tokio_rustls::TlsAcceptor,
    stream: TcpStream,
    peer: SocketAddr,
    end: CancellationToken,
) {
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await {
        Ok(Ok(stream)) => serve(router, stream, peer, end).await,
        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
        Err(_) => tracing::debug!("a TLS handshake took too long"),
    }
}

async fn serve<S>(router: Arc<Router>, stream: S, peer: SocketAddr, end: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request| {
        let router = Arc::clone(&router);
        async move { Ok::<_, Infallible>(answer(router, request, peer).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    // All connections share the end: whoever looks at it takes its locks, so it is looked at only where it rings.
    let mut ended = pin!(end.cancelled());
    let bell = Bell::new();
    let rings = bell.waker();
    let served = poll_fn(|cx| match connection.as_mut().poll(cx) {
        Poll::Ready(served) => Poll::Ready(Some(served)),
        Poll::Pending => bell.poll(&rings, cx, |cx| ended.as_mut().poll(cx)).map(|()| None),
    })
    .await;
    let served = match served {
        Some(served) => served,
        None => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = served {
        tracing::trace!(%error, "a client's connection ended early");
    }
}

async fn answer(router: Arc<Router>, request: Request<Incoming>, peer: SocketAddr) -> Response<ReplyBody> {
    let arrived = Instant::now();
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    let door = match (path, &parts.method) {
        ("/v1/chat/completions", &Method::POST) => Some(Some(Endpoint::Chat)),
        ("/v1/completions", &Method::POST) => Some(Some(Endpoint::Completions)),
        ("/v1/embeddings", &Method::POST) => Some(Some(Endpoint::Embeddings)),
        ("/invocations", &Method::POST) => Some(None),
        _ => None,
    };
    let Some(endpoint) = door else {
        return aside(&router, &parts, body, peer).await;
    };
    if router.draining.load(Ordering::Acquire) {
        let error = ApiError::unavailable(
            "draining",
            "this router is shutting down; send the request to another one",
        );
        let mut response = refused(&router, endpoint, &error);
        response
            .headers_mut()
            .insert(header::CONNECTION, http::HeaderValue::from_static("close"));
        return response;
    }
    let guard = InFlightGuard::new(&router);
    let arrival = Arrival {
        at: arrived,
        endpoint,
        headers: parts.headers,
        peer,
        wants_ids: false,
    };
    match walk::request(&router, guard, arrival, body).await {
        Ok(response) => response,
        Err(error) => refused(&router, endpoint, &error),
    }
}

/// Counts and builds an error answer.
fn refused(router: &Router, endpoint: Option<Endpoint>, error: &ApiError) -> Response<ReplyBody> {
    let endpoint = endpoint.map_or("invocations", Endpoint::label);
    router
        .metrics
        .refused
        .get_or_create(&Reason { reason: error.code })
        .inc();
    let labels = RequestLabels {
        endpoint,
        status: status_class(error.status),
    };
    router.metrics.requests.inc(&labels);
    reply::error(error)
}

/// Everything but requests to engines.
async fn aside(
    router: &Arc<Router>,
    parts: &http::request::Parts,
    body: Incoming,
    peer: SocketAddr,
) -> Response<ReplyBody> {
    const TEXT: &str = "text/plain; charset=utf-8";
    let path = parts.uri.path();
    if path.starts_with("/cairn/") {
        return operator::answer(router, parts, body, peer).await;
    }
    let known = matches!(
        path,
        "/v1/chat/completions"
            | "/v1/completions"
            | "/v1/embeddings"
            | "/invocations"
            | "/v1/models"
            | "/live"
            | "/ready"
            | "/ping"
            | "/health"
            | "/metrics"
    );
    if known && parts.method != Method::GET && parts.method != Method::HEAD {
        let error = ApiError::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "invalid_request_error",
            "method_not_allowed",
            format!("{} isn't allowed on {path}", parts.method),
        );
        return reply::error(&error);
    }
    match path {
        "/v1/models" => models::list(router),
        "/live" => reply::own(StatusCode::OK, TEXT, "live\n"),
        "/ready" | "/ping" | "/health" => match ready(router) {
            Ok(()) => reply::own(StatusCode::OK, TEXT, "ready\n"),
            Err(why) => reply::own(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{why}\n")),
        },
        "/metrics" => operator::metrics(router, parts, peer),
        _ if known => reply::error(&ApiError::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "invalid_request_error",
            "method_not_allowed",
            format!("use POST on {path}"),
        )),
        _ => reply::error(&ApiError::new(
            StatusCode::NOT_FOUND,
            "invalid_request_error",
            "unknown_path",
            format!(
                "no such path: {path}; there are /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models, \
                 /invocations, /ping, /live, /ready and /metrics"
            ),
        )),
    }
}

/// Whether requests can be served, or why not.
pub(crate) fn ready(router: &Router) -> Result<(), String> {
    if router.draining.load(Ordering::Acquire) {
        return Err("draining".into());
    }
    let fleet = router.fleet.load();
    if fleet.workers().next().is_none() {
        return Err("no engine is known yet".into());
    }
    let serves = |(pool, worker): (&Arc<Pool>, &Worker)| pool.is_known() && worker.engine.health() == Health::Healthy;
    if !fleet.workers().any(serves) {
        return Err("no engine answers its checks and says what it serves".into());
    }
    Ok(())
}
