//! The engines' HTTP API as the agent asks it: short GETs with a deadline and a bound on every answer.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::Value;

/// A busy engine's API thread may be held for a step or two.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest JSON answer; `/server_info` with every flag is some tens of KiB.
const MAX_JSON_BYTES: usize = 4 << 20;
/// Longest metrics page; a large engine's is about 1 MiB.
const MAX_PAGE_BYTES: usize = 32 << 20;
/// Engines behind uvicorn drop idle connections after 5 s.
const POOL_IDLE: Duration = Duration::from_secs(4);

/// Why an engine didn't answer as hoped.
#[derive(Debug, thiserror::Error)]
pub enum EngineHttpError {
    /// The URL can't be used.
    #[error("engine URL {url:?} is not usable: {fault}")]
    Url {
        /// As given.
        url: String,
        /// What is wrong with it.
        fault: String,
    },
    /// A file named in the configuration can't be used.
    #[error("cannot use {path}: {fault}")]
    File {
        /// Which file.
        path: String,
        /// What is wrong with it.
        fault: String,
    },
    /// Nobody answered.
    #[error("GET {path}: {source}")]
    Connect {
        /// Path that was asked.
        path: String,
        /// The client's cause.
        source: hyper_util::client::legacy::Error,
    },
    /// The answer broke off.
    #[error("GET {path}: the answer broke off: {source}")]
    Body {
        /// Path that was asked.
        path: String,
        /// The cause.
        source: hyper::Error,
    },
    /// It took too long.
    #[error("GET {path}: no answer within {ms} ms")]
    Timeout {
        /// Path that was asked.
        path: String,
        /// The deadline.
        ms: u64,
    },
    /// Another status than 200.
    #[error("GET {path}: HTTP {status}")]
    Status {
        /// Path that was asked.
        path: String,
        /// What came.
        status: StatusCode,
    },
    /// Longer than any engine's answer.
    #[error("GET {path}: the answer is longer than {limit} bytes")]
    TooLong {
        /// Path that was asked.
        path: String,
        /// The bound.
        limit: usize,
    },
    /// Not JSON.
    #[error("GET {path}: not JSON: {source}")]
    Json {
        /// Path that was asked.
        path: String,
        /// The parser's cause.
        source: serde_json::Error,
    },
}

impl EngineHttpError {
    /// The path isn't there (an older engine, or a switched-off feature).
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Status { status, .. } if matches!(status.as_u16(), 403 | 404 | 405 | 501))
    }
}

/// A client for one engine.
#[derive(Clone)]
pub struct EngineHttp {
    client: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
    base: String,
    host: String,
    authorization: Option<HeaderValue>,
}

impl EngineHttp {
    /// A client for the engine at `url`; its key and the CA of its certificate come from files.
    ///
    /// # Errors
    /// When the URL or a file can't be used.
    pub fn new(url: &str, api_key_file: Option<&Path>, ca_file: Option<&Path>) -> Result<Self, EngineHttpError> {
        let base = url.trim_end_matches('/').to_owned();
        let bad = |fault: &str| EngineHttpError::Url {
            url: base.clone(),
            fault: fault.to_owned(),
        };
        let uri: Uri = base.parse().map_err(|e: http::uri::InvalidUri| bad(&e.to_string()))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err(bad("the scheme is neither http nor https"));
        }
        let host = uri
            .host()
            .filter(|h| !h.is_empty())
            .ok_or_else(|| bad("the host is missing"))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let authorization = api_key_file.map(read_key).transpose()?;
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_connect_timeout(Some(REQUEST_TIMEOUT));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls(ca_file)?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(http);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(POOL_IDLE)
            .pool_max_idle_per_host(2)
            .build(connector);
        Ok(Self {
            client,
            base,
            host,
            authorization,
        })
    }

    /// Base URL without a trailing slash.
    #[must_use]
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Host of the URL, without brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Asks for a JSON answer.
    ///
    /// # Errors
    /// When the engine doesn't answer 200 with JSON in time and in bounds.
    pub async fn json(&self, path: &str) -> Result<Value, EngineHttpError> {
        let mut bytes = Vec::new();
        self.get(path, MAX_JSON_BYTES, &mut |chunk| bytes.extend_from_slice(chunk))
            .await?;
        serde_json::from_slice(&bytes).map_err(|source| EngineHttpError::Json {
            path: path.to_owned(),
            source,
        })
    }

    /// Asks for a page and hands it out as it arrives.
    ///
    /// # Errors
    /// When the engine doesn't answer 200 in time and in bounds.
    pub async fn page(&self, path: &str, take: &mut (impl FnMut(&[u8]) + Send)) -> Result<(), EngineHttpError> {
        self.get(path, MAX_PAGE_BYTES, take).await
    }

    /// Asks for a path whose status alone matters.
    ///
    /// # Errors
    /// When the engine doesn't answer 200 in time.
    pub async fn probe(&self, path: &str) -> Result<(), EngineHttpError> {
        self.get(path, MAX_JSON_BYTES, &mut |_| ()).await
    }

    async fn get(
        &self,
        path: &str,
        limit: usize,
        take: &mut (impl FnMut(&[u8]) + Send),
    ) -> Result<(), EngineHttpError> {
        let ms = u64::try_from(REQUEST_TIMEOUT.as_millis()).unwrap_or(u64::MAX);
        tokio::time::timeout(REQUEST_TIMEOUT, self.get_unhurried(path, limit, take))
            .await
            .map_err(|_| EngineHttpError::Timeout {
                path: path.to_owned(),
                ms,
            })?
    }

    async fn get_unhurried(
        &self,
        path: &str,
        limit: usize,
        take: &mut (impl FnMut(&[u8]) + Send),
    ) -> Result<(), EngineHttpError> {
        let mut builder = Request::get(format!("{}{path}", self.base));
        if let Some(authorization) = &self.authorization {
            builder = builder.header(header::AUTHORIZATION, authorization);
        }
        let request = builder.body(Empty::new()).map_err(|e| EngineHttpError::Url {
            url: self.base.clone(),
            fault: e.to_string(),
        })?;
        let response = self
            .client
            .request(request)
            .await
            .map_err(|source| EngineHttpError::Connect {
                path: path.to_owned(),
                source,
            })?;
        if response.status() != StatusCode::OK {
            return Err(EngineHttpError::Status {
                path: path.to_owned(),
                status: response.status(),
            });
        }
        let mut body: Incoming = response.into_body();
        let mut seen = 0usize;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|source| EngineHttpError::Body {
                path: path.to_owned(),
                source,
            })?;
            let Ok(data) = frame.into_data() else { continue };
            seen += data.len();
            if seen > limit {
                return Err(EngineHttpError::TooLong {
                    path: path.to_owned(),
                    limit,
                });
            }
            take(&data);
        }
        Ok(())
    }
}

fn read_key(path: &Path) -> Result<HeaderValue, EngineHttpError> {
    let file = |fault: String| EngineHttpError::File {
        path: path.display().to_string(),
        fault,
    };
    let key = std::fs::read_to_string(path).map_err(|e| file(e.to_string()))?;
    let mut value = HeaderValue::from_str(&format!("Bearer {}", key.trim()))
        .map_err(|_| file("the key holds characters that a header cannot carry".to_owned()))?;
    value.set_sensitive(true);
    Ok(value)
}

fn tls(ca_file: Option<&Path>) -> Result<rustls::ClientConfig, EngineHttpError> {
    let mut roots = rustls::RootCertStore::empty();
    if let Some(path) = ca_file {
        let file = |fault: String| EngineHttpError::File {
            path: path.display().to_string(),
            fault,
        };
        for certificate in CertificateDer::pem_file_iter(path).map_err(|e| file(e.to_string()))? {
            let certificate = certificate.map_err(|e| file(e.to_string()))?;
            roots.add(certificate).map_err(|e| file(e.to_string()))?;
        }
    }
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| EngineHttpError::File {
            path: "TLS".to_owned(),
            fault: e.to_string(),
        })?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(config)
}
