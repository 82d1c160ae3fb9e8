//! A small HTTP client for a router's operator endpoints.

use std::path::{Path, PathBuf};
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

/// Sends one request and reads the JSON answer; the error names the URL and what the router said. The authority of an https
/// router is read from the file that `CAIRN_TLS_CA_FILE` names.
pub async fn json(method: Method, url: &str, token: Option<&str>, body: Bytes) -> anyhow::Result<Value> {
    let tls_ca = std::env::var_os("CAIRN_TLS_CA_FILE").map(PathBuf::from);
    json_from(method, url, token, tls_ca.as_deref(), body).await
}

/// Like [`json`], with the file of the authority.
pub async fn json_from(
    method: Method,
    url: &str,
    token: Option<&str>,
    tls_ca: Option<&Path>,
    body: Bytes,
) -> anyhow::Result<Value> {
    let connector = hyper_rustls_connector(tls_ca)?;
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
        let response = client.request(request).await.map_err(|error| {
            let check = what_to_check(url, error.is_connect());
            anyhow::Error::new(error).context(format!("asking {url} failed: {check}"))
        })?;
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

/// What an answer that didn't come may mean.
fn what_to_check(url: &str, connecting: bool) -> &'static str {
    match (url.starts_with("https:"), connecting) {
        (true, true) => "does a router with TLS listen there, and did --tls-ca name the CA of its certificate?",
        (false, true) => "does a router listen there?",
        (_, false) => {
            "is that the HTTP address of a router? (One with TLS is asked at https://; an index node's own port speaks \
             gRPC: ask it with `cairn status --index`.)"
        }
    }
}

type Connector = hyper_rustls::HttpsConnector<hyper_util::client::legacy::connect::HttpConnector>;

fn hyper_rustls_connector(tls_ca: Option<&Path>) -> anyhow::Result<Connector> {
    let mut roots = rustls::RootCertStore::empty();
    if let Some(path) = tls_ca {
        let pem = std::fs::read(path).with_context(|| format!("reading the CA certificate {}", path.display()))?;
        for certificate in rustls_pki_types::pem::PemObject::pem_slice_iter(&pem) {
            let certificate: rustls_pki_types::CertificateDer<'static> =
                certificate.map_err(|error| anyhow::anyhow!("the CA certificate {}: {error:?}", path.display()))?;
            roots
                .add(certificate)
                .with_context(|| format!("the CA certificate {}", path.display()))?;
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
