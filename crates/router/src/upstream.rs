//! The pooled HTTP clients to engines, one for each lane.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use crate::lanes;

/// Idle connections are closed before uvicorn, the engines' server, closes them itself after 5 s.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// Idle connections kept per engine; an engine runs a few hundred sequences at once.
const IDLE_PER_ENGINE_MAX: usize = 512;

type Connector = hyper_rustls::HttpsConnector<HttpConnector>;

/// Sends requests to engines over kept connections. Every lane keeps its own, and lane 0 those of all other threads.
#[derive(Clone)]
pub(crate) struct Upstream {
    clients: Arc<[Client<Connector, Full<Bytes>>]>,
}

/// Why an engine gave no answer.
#[derive(Debug)]
pub(crate) enum UpstreamFault {
    /// It couldn't be reached; nothing was sent.
    Connect(String),
    /// The connection ended before the answer began.
    Cut(String),
}

impl UpstreamFault {
    /// What happened, for logs.
    pub(crate) fn reason(&self) -> &str {
        match self {
            Self::Connect(reason) | Self::Cut(reason) => reason,
        }
    }

    /// Label in metrics.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::Cut(_) => "cut",
        }
    }
}

impl Upstream {
    /// Clients for `lanes` lanes that trust `roots` for `https` engines.
    pub(crate) fn new(
        lanes: usize,
        connect_timeout: Duration,
        roots: rustls::RootCertStore,
    ) -> Result<Self, rustls::Error> {
        let mut http = HttpConnector::new();
        http.set_nodelay(true);
        http.enforce_http(false);
        http.set_connect_timeout(Some(connect_timeout));
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = hyper_rustls::HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_or_http()
            .enable_http1()
            .wrap_connector(http);
        let client = || {
            Client::builder(TokioExecutor::new())
                .pool_idle_timeout(IDLE_TIMEOUT)
                .pool_timer(TokioTimer::new())
                .pool_max_idle_per_host(IDLE_PER_ENGINE_MAX)
                .http1_preserve_header_case(false)
                .build(connector.clone())
        };
        Ok(Self {
            clients: (0..=lanes).map(|_| client()).collect(),
        })
    }

    /// Sends one request; dropping the future cancels it.
    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, UpstreamFault> {
        self.clients[lanes::current()].request(request).await.map_err(|error| {
            if error.is_connect() {
                UpstreamFault::Connect(chain(&error))
            } else {
                UpstreamFault::Cut(chain(&error))
            }
        })
    }
}

/// An error with its causes on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}
