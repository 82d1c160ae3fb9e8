//! Where an event socket is: `tcp://host:port` or `ipc://path`, as engines write them.

use std::fmt;
use std::net::IpAddr;

/// An address of an event or replay socket.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Endpoint {
    /// Host (name, address, or `*` for every interface) and port.
    Tcp {
        /// As written, without brackets.
        host: String,
        /// Port; 0 lets the system choose when binding.
        port: u16,
    },
    /// A Unix socket.
    Ipc {
        /// Path of the socket file.
        path: String,
    },
}

/// A string that names no endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("endpoint {text:?} is not usable: {fault}; write tcp://HOST:PORT or ipc://PATH")]
pub struct InvalidEndpoint {
    /// What was given, cut to a readable length.
    pub text: String,
    /// What is wrong with it.
    pub fault: &'static str,
}

impl Endpoint {
    /// Reads an endpoint.
    ///
    /// # Errors
    /// When the scheme, the host or the port doesn't make one.
    pub fn parse(text: &str) -> Result<Self, InvalidEndpoint> {
        let fault = |fault| InvalidEndpoint {
            text: text.chars().take(200).collect(),
            fault,
        };
        if let Some(path) = text.strip_prefix("ipc://") {
            return if path.is_empty() {
                Err(fault("the path is empty"))
            } else {
                Ok(Self::Ipc { path: path.to_owned() })
            };
        }
        let rest = text
            .strip_prefix("tcp://")
            .ok_or_else(|| fault("the scheme is neither tcp nor ipc"))?;
        let (host, port) = rest.rsplit_once(':').ok_or_else(|| fault("the port is missing"))?;
        let port = if port == "*" {
            0
        } else {
            port.parse().map_err(|_| fault("the port is not 0 to 65535"))?
        };
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() || host.contains(['/', ' ']) {
            return Err(fault("the host is missing"));
        }
        Ok(Self::Tcp {
            host: host.to_owned(),
            port,
        })
    }

    /// Whether it names every interface, as binding sides write it.
    #[must_use]
    pub fn is_wildcard(&self) -> bool {
        match self {
            Self::Tcp { host, .. } => host == "*" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified()),
            Self::Ipc { .. } => false,
        }
    }

    /// What to connect to: a wildcard becomes `host`, the name that the engine's API is reached by.
    #[must_use]
    pub fn reached_by(&self, engine_host: &str) -> Self {
        match self {
            Self::Tcp { port, .. } if self.is_wildcard() => Self::Tcp {
                host: engine_host.to_owned(),
                port: *port,
            },
            Self::Tcp { .. } | Self::Ipc { .. } => self.clone(),
        }
    }

    /// The endpoint of a data-parallel rank: engines add the rank to the port.
    #[must_use]
    pub fn of_rank(&self, rank: u32) -> Option<Self> {
        match self {
            Self::Tcp { host, port } => {
                let port = u16::try_from(u32::from(*port) + rank).ok()?;
                Some(Self::Tcp {
                    host: host.clone(),
                    port,
                })
            }
            Self::Ipc { .. } => (rank == 0).then(|| self.clone()),
        }
    }

    /// Whether only this machine can reach a socket bound here.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        match self {
            Self::Tcp { host, .. } => host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback()),
            Self::Ipc { .. } => true,
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
            Self::Ipc { path } => write!(f, "ipc://{path}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_as_engines_write_them() {
        for (text, wildcard, shown) in [
            ("tcp://*:5557", true, "tcp://*:5557"),
            ("tcp://0.0.0.0:5557", true, "tcp://0.0.0.0:5557"),
            ("tcp://[::]:5557", true, "tcp://[::]:5557"),
            ("tcp://10.0.0.5:5557", false, "tcp://10.0.0.5:5557"),
            ("ipc:///run/kv.sock", false, "ipc:///run/kv.sock"),
        ] {
            let endpoint = Endpoint::parse(text).unwrap();
            assert_eq!(endpoint.is_wildcard(), wildcard, "{text}");
            assert_eq!(endpoint.to_string(), shown);
        }
        for text in ["", "udp://x:1", "tcp://x", "tcp://:1", "tcp://x:70000", "ipc://"] {
            assert!(Endpoint::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_rank_shifts_the_port_and_a_wildcard_takes_the_engines_host() {
        let endpoint = Endpoint::parse("tcp://*:5557").unwrap();
        assert_eq!(
            endpoint.reached_by("::1").of_rank(3).unwrap().to_string(),
            "tcp://[::1]:5560"
        );
        assert!(Endpoint::parse("tcp://*:65535").unwrap().of_rank(1).is_none());
        assert!(Endpoint::parse("ipc:///x").unwrap().of_rank(1).is_none());
    }
}
