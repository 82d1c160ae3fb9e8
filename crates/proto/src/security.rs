//! The cluster token and TLS from files, the same for every port of every role.
//!
//! Beyond loopback a port is opened, and a peer is called, only with both: [`Security::check_bind`] and
//! [`Credentials::client_channel`] refuse otherwise and say what to give.

mod auth;
mod channel;
mod link_local;
mod rule;
mod tls;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use auth::{ClientAuth, ServerAuth, Token};
pub use channel::AuthChannel;
pub use link_local::{is_link_local, names_link_local};
pub use tls::{Admits, PemPair};

/// Shortest accepted cluster token in bytes: 16 random bytes can't be guessed online.
pub const TOKEN_BYTES_MIN: usize = 16;
/// Largest token, certificate or key file in bytes.
pub const FILE_BYTES_MAX: u64 = 1 << 20;

/// The `[security]` section of every role's configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Security {
    /// File with the cluster token, the same on every host; trailing white space is ignored.
    pub cluster_token_file: Option<PathBuf>,
    /// PEM certificate chain of this host's server ports.
    pub tls_cert_file: Option<PathBuf>,
    /// PEM private key of that certificate.
    pub tls_key_file: Option<PathBuf>,
    /// PEM certificates of the authorities that peers' certificates are checked against.
    pub tls_ca_file: Option<PathBuf>,
}

/// Why a port isn't opened, a peer isn't called or a file isn't taken.
#[derive(Debug, thiserror::Error)]
pub enum SecurityError {
    /// A port beyond loopback without token and TLS.
    #[error(
        "refusing to listen on {address}, which other hosts can reach, without {missing}; set them under [security], \
         or listen on 127.0.0.1"
    )]
    OpenPort {
        /// The address asked for.
        address: String,
        /// Which settings are missing.
        missing: String,
    },
    /// A peer beyond loopback without token and TLS.
    #[error(
        "refusing to call {address} over an unprotected connection without {missing}; set them under [security], or \
         use a loopback address"
    )]
    OpenCall {
        /// The peer's address.
        address: String,
        /// Which settings are missing.
        missing: String,
    },
    /// One of certificate and key without the other.
    #[error("[security] has {given} without {missing}; give both or neither")]
    HalfTls {
        /// The setting that is there.
        given: &'static str,
        /// The setting that isn't.
        missing: &'static str,
    },
    /// A file can't be read.
    #[error("[security] {setting}: can't read {}; check the path and its permissions", path.display())]
    Read {
        /// The setting that names it.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file holds something else than it should.
    #[error("[security] {setting}: {} {problem}", path.display())]
    Content {
        /// The setting that names it.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong and what to give; never the content.
        problem: String,
    },
    /// An address that can't be called.
    #[error("`{address}` isn't an address to call ({problem}); give host:port")]
    Address {
        /// As given.
        address: String,
        /// What is wrong.
        problem: String,
    },
    /// TLS can't be set up.
    #[error("TLS can't be set up from the [security] files: {0}")]
    Tls(String),
}

impl Security {
    /// Refuses an address beyond loopback unless token, certificate and key are given.
    ///
    /// # Errors
    /// [`SecurityError::OpenPort`] naming what to set.
    pub fn check_bind(&self, address: std::net::SocketAddr) -> Result<(), SecurityError> {
        rule::check_bind(self, address)
    }

    /// Checks that settings belong together, without reading the files.
    ///
    /// # Errors
    /// [`SecurityError::HalfTls`].
    pub fn validate(&self) -> Result<(), SecurityError> {
        match (&self.tls_cert_file, &self.tls_key_file) {
            (Some(_), None) => Err(SecurityError::HalfTls {
                given: "tls_cert_file",
                missing: "tls_key_file",
            }),
            (None, Some(_)) => Err(SecurityError::HalfTls {
                given: "tls_key_file",
                missing: "tls_cert_file",
            }),
            (Some(_), Some(_)) | (None, None) => Ok(()),
        }
    }

    /// Reads the files.
    ///
    /// # Errors
    /// [`SecurityError`] naming the setting, the file and what is wrong with it.
    pub fn load(&self) -> Result<Credentials, SecurityError> {
        self.validate()?;
        let token = match &self.cluster_token_file {
            Some(path) => Some(Token::from_file(path)?),
            None => None,
        };
        let server = match (&self.tls_cert_file, &self.tls_key_file) {
            (Some(cert), Some(key)) => Some(PemPair::from_files(cert, key)?),
            (Some(_), None) | (None, Some(_)) | (None, None) => None,
        };
        let authorities = match &self.tls_ca_file {
            Some(path) => Some(tls::authorities(path)?),
            None => None,
        };
        Ok(Credentials {
            token,
            server,
            authorities,
        })
    }
}

/// What [`Security`] names, read into memory; cheap enough to clone per connection.
#[derive(Clone, Debug, Default)]
pub struct Credentials {
    token: Option<Token>,
    server: Option<PemPair>,
    authorities: Option<Vec<u8>>,
}

impl Credentials {
    /// The cluster token, where one is set.
    #[must_use]
    pub fn token(&self) -> Option<&Token> {
        self.token.as_ref()
    }

    /// Certificate and key of server ports, where TLS is on.
    #[must_use]
    pub fn server_pem(&self) -> Option<&PemPair> {
        self.server.as_ref()
    }

    /// Interceptor that adds the token to calls.
    #[must_use]
    pub fn client_auth(&self) -> ClientAuth {
        ClientAuth::new(self.token.as_ref())
    }

    /// Interceptor that refuses calls without the token; lets all pass where none is set.
    #[must_use]
    pub fn server_auth(&self) -> ServerAuth {
        ServerAuth::new(self.token.clone())
    }
}

/// Reads a bounded file named by a setting.
fn read_file(setting: &'static str, path: &Path) -> Result<Vec<u8>, SecurityError> {
    let failed = |source| SecurityError::Read {
        setting,
        path: path.to_owned(),
        source,
    };
    let len = std::fs::metadata(path).map_err(failed)?.len();
    if len > FILE_BYTES_MAX {
        let problem = format!("is {len} bytes long and {FILE_BYTES_MAX} are allowed");
        return Err(SecurityError::Content {
            setting,
            path: path.to_owned(),
            problem,
        });
    }
    std::fs::read(path).map_err(failed)
}
