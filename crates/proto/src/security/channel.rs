//! gRPC channels and servers with the cluster's credentials, time limits and message bounds.

use std::time::Duration;

use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Server, ServerTlsConfig};

use super::{ClientAuth, Credentials, SecurityError, rule};

/// How long a connection may take to come up.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// A quiet connection is probed this often and given up after [`KEEPALIVE_TIMEOUT`], so that a dead host is noticed.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(3);
/// Flow-control windows: a snapshot chunk fits several times, and a stalled reader holds no more than this.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 8 << 20;
/// Streams that one connection may have open.
const STREAMS_PER_CONNECTION_MAX: u32 = 1024;

/// A channel that sends the cluster token with every call.
pub type AuthChannel = InterceptedService<Channel, ClientAuth>;

impl Credentials {
    /// The endpoint of a peer: `host:port`, or a URL whose scheme is replaced by what [`super::Security`] says.
    ///
    /// # Errors
    /// [`SecurityError::Address`], [`SecurityError::OpenCall`], [`SecurityError::Tls`].
    pub fn endpoint(&self, address: &str) -> Result<Endpoint, SecurityError> {
        let bare = address
            .strip_prefix("http://")
            .or_else(|| address.strip_prefix("https://"))
            .unwrap_or(address);
        let bare = bare.trim_end_matches('/');
        let problem = |problem: String| SecurityError::Address {
            address: address.to_owned(),
            problem,
        };
        let authority: tonic::codegen::http::uri::Authority = bare
            .parse()
            .map_err(|error: tonic::codegen::http::uri::InvalidUri| problem(error.to_string()))?;
        if authority.port_u16().is_none_or(|port| port == 0) {
            return Err(problem("the port is missing or 0".to_owned()));
        }
        rule::check_call(self, authority.host())?;
        let scheme = if self.authorities.is_some() { "https" } else { "http" };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{bare}"))
            .map_err(|error| problem(error.to_string()))?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
            .keep_alive_timeout(KEEPALIVE_TIMEOUT)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
        let Some(authorities) = &self.authorities else {
            return Ok(endpoint);
        };
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authorities));
        endpoint
            .tls_config(tls)
            .map_err(|error| SecurityError::Tls(error.to_string()))
    }

    /// A channel to a peer that connects at the first call and again after each break.
    ///
    /// # Errors
    /// As [`Credentials::endpoint`]. Must be called inside a tokio runtime.
    pub fn client_channel(&self, address: &str) -> Result<AuthChannel, SecurityError> {
        Ok(InterceptedService::new(
            self.endpoint(address)?.connect_lazy(),
            self.client_auth(),
        ))
    }

    /// A gRPC server builder with TLS where configured, TCP_NODELAY and keepalive.
    ///
    /// Services on it still need [`Credentials::server_auth`].
    ///
    /// # Errors
    /// [`SecurityError::Tls`].
    pub fn server_builder(&self) -> Result<Server, SecurityError> {
        let server = Server::builder()
            .tcp_nodelay(true)
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
        let Some(pair) = self.server_pem() else {
            return Ok(server);
        };
        let tls = ServerTlsConfig::new().identity(pair.identity());
        server
            .tls_config(tls)
            .map_err(|error| SecurityError::Tls(error.to_string()))
    }
}
