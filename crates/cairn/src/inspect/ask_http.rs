//! A small HTTP client for a router's operator endpoints.

use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

/// Longest wait for a router's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// Largest accepted answer.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Sends one request and reads the JSON answer; the error names the URL and what the router said.
pub async fn json(method: Method, url: &str, token: Option<&str>, body: Bytes) -> anyhow::Result<Value> {
    let connector = hyper_rustls_connector()?;
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build(connector);
    let mut request = Request::builder()
        .method(method)
        .uri(url)
        .header("content-type", "application/json");
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let request = request
        .body(Full::new(body))
        .with_context(|| format!("`{url}` is not a URL; use http://host:port"))?;
    let (status, text) = tokio::time::timeout(ANSWER_TIMEOUT, async {
        let response = client.request(request).await.with_context(|| format!("asking {url}"))?;
        let status = response.status();
        let bytes = Limited::new(response.into_body(), ANSWER_BYTES_MAX)
            .collect()
            .await
            .map_err(|error| anyhow::anyhow!("reading the answer of {url}: {error}"))?
            .to_bytes();
        anyhow::Ok((status, bytes))
    })
    .await
    .with_context(|| format!("{url} did not answer within {ANSWER_TIMEOUT:?}"))??;
    let value: Value = match serde_json::from_slice(&text) {
        Ok(value) => value,
        Err(_) if status != StatusCode::OK => {
            bail!("{url} answered {status}: {}", String::from_utf8_lossy(&text).trim())
        }
        Err(error) => {
            return Err(error).with_context(|| format!("{url} did not answer with JSON; is it a Cairn router?"));
        }
    };
    if status != StatusCode::OK {
        let message = value
            .pointer("/error/message")
            .and_then(Value::as_str)
            .map_or_else(|| value.to_string(), str::to_owned);
        bail!("{url} answered {status}: {message}");
    }
    Ok(value)
}

type Connector = hyper_rustls::HttpsConnector<hyper_util::client::legacy::connect::HttpConnector>;

fn hyper_rustls_connector() -> anyhow::Result<Connector> {
    let mut roots = rustls::RootCertStore::empty();
    if let Some(file) = std::env::var_os("CAIRN_TLS_CA_FILE") {
        let path = std::path::PathBuf::from(file);
        let pem = std::fs::read(&path).with_context(|| format!("reading CAIRN_TLS_CA_FILE {}", path.display()))?;
        for certificate in rustls_pki_types::pem::PemObject::pem_slice_iter(&pem) {
            let certificate: rustls_pki_types::CertificateDer<'static> =
                certificate.map_err(|error| anyhow::anyhow!("CAIRN_TLS_CA_FILE {}: {error:?}", path.display()))?;
            roots
                .add(certificate)
                .with_context(|| format!("CAIRN_TLS_CA_FILE {}", path.display()))?;
        }
    }
    let tls =
        rustls::ClientConfig::builder_with_provider(std::sync::Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .context("setting up TLS")?
            .with_root_certificates(roots)
            .with_no_client_auth();
    Ok(hyper_rustls::HttpsConnectorBuilder::new()
        .with_tls_config(tls)
        .https_or_http()
        .enable_http1()
        .build())
}
