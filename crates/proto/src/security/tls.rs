//! Certificates and keys: read, checked at start, handed to tonic and rustls.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::{Credentials, SecurityError, read_file};

/// A certificate chain and its key in PEM; the key is never printed.
#[derive(Clone)]
pub struct PemPair {
    cert: Arc<[u8]>,
    key: Arc<[u8]>,
}

impl fmt::Debug for PemPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PemPair(..)")
    }
}

impl PemPair {
    pub(super) fn from_files(cert: &Path, key: &Path) -> Result<Self, SecurityError> {
        let pair = Self {
            cert: read_file("tls_cert_file", cert)?.into(),
            key: read_file("tls_key_file", key)?.into(),
        };
        let problem = |setting, path: &Path, problem: &str| SecurityError::Content {
            setting,
            path: path.to_owned(),
            problem: problem.to_owned(),
        };
        if certificates(&pair.cert).is_none() {
            return Err(problem("tls_cert_file", cert, "holds no PEM certificate"));
        }
        if PrivateKeyDer::from_pem_slice(&pair.key).is_err() {
            return Err(problem("tls_key_file", key, "holds no PEM private key"));
        }
        pair.rustls_config(&[])?;
        Ok(pair)
    }

    /// A rustls server configuration for ports that don't speak gRPC.
    ///
    /// # Errors
    /// [`SecurityError::Tls`] where key and certificate don't belong together.
    pub fn rustls_config(&self, alpn: &[&[u8]]) -> Result<Arc<rustls::ServerConfig>, SecurityError> {
        let failed = |error: &dyn fmt::Display| SecurityError::Tls(error.to_string());
        let chain = certificates(&self.cert).ok_or_else(|| failed(&"no certificate"))?;
        let key = PrivateKeyDer::from_pem_slice(&self.key).map_err(|error| failed(&error))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| failed(&error))?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(|error| failed(&error))?;
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        Ok(Arc::new(config))
    }

    pub(super) fn identity(&self) -> tonic::transport::Identity {
        tonic::transport::Identity::from_pem(&self.cert, &self.key)
    }
}

fn certificates(pem: &[u8]) -> Option<Vec<CertificateDer<'static>>> {
    let chain: Vec<_> = CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().ok()?;
    (!chain.is_empty()).then_some(chain)
}

pub(super) fn authorities(path: &Path) -> Result<Vec<u8>, SecurityError> {
    let pem = read_file("tls_ca_file", path)?;
    if certificates(&pem).is_none() {
        let problem = "holds no PEM certificate".to_owned();
        return Err(SecurityError::Content {
            setting: "tls_ca_file",
            path: path.to_owned(),
            problem,
        });
    }
    Ok(pem)
}

/// Judges the value of an `authorization` header.
pub type Admits = Box<dyn Fn(&[u8]) -> bool + Send + Sync>;

impl Credentials {
    /// A rustls server configuration for ports that don't speak gRPC; `None` where TLS is off.
    ///
    /// # Errors
    /// [`SecurityError::Tls`].
    pub fn rustls_server_config(&self, alpn: &[&[u8]]) -> Result<Option<Arc<rustls::ServerConfig>>, SecurityError> {
        self.server_pem().map(|pair| pair.rustls_config(alpn)).transpose()
    }

    /// What guards an HTTP port for operators on `address`: TLS, and who is let in by an `authorization` header with the
    /// token, beyond loopback; nothing on it.
    ///
    /// # Errors
    /// [`SecurityError::OpenPort`] beyond loopback without both, [`SecurityError::Tls`].
    pub fn operators_guard(
        &self,
        address: std::net::SocketAddr,
    ) -> Result<Option<(Arc<rustls::ServerConfig>, Admits)>, SecurityError> {
        if address.ip().is_loopback() {
            return Ok(None);
        }
        match (self.rustls_server_config(&[b"http/1.1"])?, self.token()) {
            (Some(tls), Some(token)) => {
                let token = token.clone();
                Ok(Some((tls, Box::new(move |sent| token.matches_header(sent)))))
            }
            (_, _) => Err(SecurityError::OpenPort {
                address: address.to_string(),
                missing: "cluster_token_file, tls_cert_file and tls_key_file".to_owned(),
            }),
        }
    }
}
