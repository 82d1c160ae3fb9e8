//! The HTTP listener: one task a connection, bounded in number, bodies bounded in size and time.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::{self, Call, Died};
use crate::engine::{Engine, Hang};
use crate::http::{ApiError, Reply};

/// Connections at once; further ones wait in the listener's backlog.
const CONNECTIONS_MAX: usize = 16_384;
/// Largest body in bytes: a million tokens as JSON text.
const BODY_BYTES_MAX: usize = 32 << 20;
/// A body that isn't there after this long is given up.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// A connection that sends no request head for this long is closed.
const HEAD_TIMEOUT: Duration = Duration::from_secs(75);

/// Serves until told to stop; connections finish what they are doing.
pub(crate) async fn serve(
    engine: Arc<Engine>,
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    until: CancellationToken,
    tasks: TaskTracker,
) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else {
            return;
        };
        let accepted = tokio::select! {
            () = until.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, usually: wait for connections to end rather than spin.
                tracing::debug!(%error, "a connection was not accepted");
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
        };
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY was refused");
        }
        let (engine, until, tls) = (engine.clone(), until.clone(), tls.clone());
        tasks.spawn(async move {
            match tls {
                None => connection(engine, stream, peer, until).await,
                Some(tls) => match tokio::time::timeout(HEAD_TIMEOUT, tls.accept(stream)).await {
                    Ok(Ok(stream)) => connection(engine, stream, peer, until).await,
                    Ok(Err(_)) | Err(_) => tracing::debug!("a TLS handshake failed"),
                },
            }
            drop(slot);
        });
    }
}

async fn connection<S>(engine: Arc<Engine>, stream: S, peer: SocketAddr, until: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request| {
        let engine = engine.clone();
        async move { handle(&engine, request, peer).await }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = until.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

async fn handle(engine: &Arc<Engine>, request: Request<Incoming>, peer: SocketAddr) -> Result<Reply, Died> {
    let control = request.uri().path().starts_with("/sim/");
    if engine.faults.down.load(Ordering::Relaxed) && !control {
        return Err(Died);
    }
    if engine.faults.hang() == Hang::All && !control {
        std::future::pending::<()>().await;
    }
    let (head, body) = request.into_parts();
    let body = match read(body).await {
        Ok(body) => body,
        Err(error) => return Ok(error.into_reply()),
    };
    let call = Call {
        method: head.method,
        path: head.uri.path().to_owned(),
        query: head.uri.query().unwrap_or_default().to_owned(),
        headers: head.headers,
        body,
        peer: peer.ip(),
    };
    api::answer(engine, call).await
}

async fn read(body: Incoming) -> Result<Bytes, ApiError> {
    let collected = tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, BODY_BYTES_MAX).collect()).await;
    match collected {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ApiError::status(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("the body is larger than {BODY_BYTES_MAX} bytes; shorten the prompt"),
        )),
        Ok(Err(_)) => Err(ApiError::bad("the body ended early")),
        Err(_) => Err(ApiError::status(
            StatusCode::REQUEST_TIMEOUT,
            "the body did not arrive in time",
        )),
    }
}
