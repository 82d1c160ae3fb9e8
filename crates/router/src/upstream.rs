//! Connections to engines, kept for each lane, and driven by whoever waits for an answer.
//!
//! An answer's frames come to the client's connection without a task in between: it polls the answer's body, and that the
//! engine's connection. A stream of many small chunks costs one waking for each of them.

mod answer;
mod connection;
mod kept;
mod origin;
#[cfg(test)]
mod tests;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{Request, Response, Uri, header};
use http_body_util::Full;
use hyper::service::Service;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::service::TowerToHyperService;

use crate::lanes;

pub(crate) use answer::{Answer, AnswerCut};
use connection::{Connection, NoAnswer};
use kept::Kept;
pub(crate) use origin::Origin;

type Connector = hyper_rustls::HttpsConnector<HttpConnector>;

/// Sends requests to engines over kept connections. Every lane keeps its own, and lane 0 those of all other threads.
#[derive(Clone)]
pub(crate) struct Upstream {
    connector: TowerToHyperService<Connector>,
    lanes: Arc<[Arc<Kept>]>,
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
        Ok(Self {
            connector: TowerToHyperService::new(connector),
            lanes: (0..=lanes).map(|_| Arc::default()).collect(),
        })
    }

    /// Sends one request, whose target is a path, to an engine; dropping the future cancels it, and so does dropping the answer before its end.
    pub(crate) async fn send(
        &self,
        origin: &Origin,
        mut request: Request<Full<Bytes>>,
    ) -> Result<Response<Answer>, UpstreamFault> {
        request.headers_mut().insert(header::HOST, origin.host().clone());
        let kept = &self.lanes[lanes::current()];
        while let Some(connection) = kept.take(origin) {
            match pin!(connection.exchange(request)).await {
                Ok((response, connection)) => return Ok(answered(response, connection, kept, origin.clone())),
                // The engine had closed it, as it may at any time; of the request nothing was written.
                Err(NoAnswer::Unsent(unsent)) => request = *unsent,
                Err(NoAnswer::Cut(reason)) => return Err(UpstreamFault::Cut(reason)),
            }
        }
        // Boxed, since few requests need it.
        let connection = Box::pin(self.connect(origin)).await?;
        match connection.exchange(request).await {
            Ok((response, connection)) => Ok(answered(response, connection, kept, origin.clone())),
            Err(NoAnswer::Unsent(_)) => Err(UpstreamFault::Cut("the connection was closed at once".into())),
            Err(NoAnswer::Cut(reason)) => Err(UpstreamFault::Cut(reason)),
        }
    }

    async fn connect(&self, origin: &Origin) -> Result<Connection, UpstreamFault> {
        let uri = Uri::builder()
            .scheme(origin.scheme().clone())
            .authority(origin.authority().clone())
            .path_and_query(PathAndQuery::from_static("/"))
            .build()
            .map_err(|error| UpstreamFault::Connect(error.to_string()))?;
        let io = self.connector.call(uri).await;
        let io = io.map_err(|error| UpstreamFault::Connect(chain(&*error)))?;
        let opened = Connection::open(io).await;
        opened.map_err(|error| UpstreamFault::Connect(chain(&error)))
    }

    /// Closes connections that wait too long, for as long as the router lives: nobody polls them.
    pub(crate) async fn expire(self) {
        loop {
            tokio::time::sleep(kept::EXPIRE_EVERY).await;
            for kept in &*self.lanes {
                kept.expire();
            }
        }
    }
}

fn answered(
    response: Response<hyper::body::Incoming>,
    by: Connection,
    kept: &Arc<Kept>,
    at: Origin,
) -> Response<Answer> {
    response.map(|body| Answer::new(body, by, Arc::clone(kept), at))
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
