//! The cluster token and the interceptors that send and ask for it.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

use super::{SecurityError, TOKEN_BYTES_MIN, read_file};

const SETTING: &str = "cluster_token_file";

/// Secret that every process of a cluster shares; never printed.
#[derive(Clone)]
pub struct Token(Arc<str>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// Reads a token file.
    ///
    /// # Errors
    /// [`SecurityError`] where it can't be read, is shorter than [`TOKEN_BYTES_MIN`] or isn't printable ASCII.
    pub fn from_file(path: &Path) -> Result<Self, SecurityError> {
        let problem = |problem: String| SecurityError::Content {
            setting: SETTING,
            path: path.to_owned(),
            problem,
        };
        let bytes = read_file(SETTING, path)?;
        let text = std::str::from_utf8(&bytes).map(str::trim).unwrap_or("\u{0}");
        if !text.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(problem(
                "holds white space or bytes that aren't printable ASCII; write hex digits".to_owned(),
            ));
        }
        if text.len() < TOKEN_BYTES_MIN {
            let len = text.len();
            return Err(problem(format!(
                "holds {len} characters; write at least {TOKEN_BYTES_MIN} random ones"
            )));
        }
        Ok(Self(text.into()))
    }

    /// Compares with what a caller sent in a time that depends on the lengths only.
    #[must_use]
    pub fn matches(&self, sent: &[u8]) -> bool {
        let expected = self.0.as_bytes();
        let mut difference = expected.len() ^ sent.len();
        for (i, byte) in sent.iter().enumerate() {
            difference |= usize::from(byte ^ expected[i % expected.len()]);
        }
        std::hint::black_box(difference) == 0
    }

    /// Whether an `authorization` header value is `Bearer` and this token.
    #[must_use]
    pub fn matches_header(&self, value: &[u8]) -> bool {
        match value.split_at_checked(7) {
            Some((scheme, token)) => scheme.eq_ignore_ascii_case(b"bearer ") && self.matches(token),
            None => false,
        }
    }

    /// The value of an `authorization` header, for clients that don't speak gRPC.
    #[must_use]
    pub fn header_value(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

/// Adds the cluster token to every call.
#[derive(Clone, Debug, Default)]
pub struct ClientAuth {
    header: Option<MetadataValue<Ascii>>,
}

impl ClientAuth {
    pub(super) fn new(token: Option<&Token>) -> Self {
        let header = token.and_then(|token| {
            let mut value: MetadataValue<Ascii> = token.header_value().parse().ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        Self { header }
    }
}

impl Interceptor for ClientAuth {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(header) = &self.header {
            request.metadata_mut().insert("authorization", header.clone());
        }
        Ok(request)
    }
}

/// Refuses calls without the cluster token.
#[derive(Clone, Debug, Default)]
pub struct ServerAuth {
    token: Option<Token>,
}

impl ServerAuth {
    pub(super) fn new(token: Option<Token>) -> Self {
        Self { token }
    }
}

impl Interceptor for ServerAuth {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let Some(token) = &self.token else {
            return Ok(request);
        };
        match request.metadata().get("authorization") {
            Some(value) if token.matches_header(value.as_bytes()) => Ok(request),
            Some(_) => Err(Status::unauthenticated(
                "wrong cluster token; give the cluster's own in cluster_token_file",
            )),
            None => Err(Status::unauthenticated(
                "this port asks for the cluster token; set cluster_token_file",
            )),
        }
    }
}
