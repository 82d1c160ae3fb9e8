//! Ports on loopback that stay one's own while nobody listens there.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use tokio::net::TcpSocket;

/// A port on loopback that the system gives to nobody else while this is held, whether or not its owner listens there.
///
/// Whoever is told the number may listen there, end, and listen there again; in between, connections are refused as
/// usual. A socket that is bound and never listens does this on Linux: it keeps the port from being picked as a free one
/// and from whoever doesn't ask to share it, and listeners (tokio's, hyper's, Go's) do ask. Other systems refuse the
/// listener as well: there the port was merely free a moment ago.
#[derive(Debug)]
pub struct HeldPort {
    address: SocketAddr,
    _socket: Option<TcpSocket>,
}

impl HeldPort {
    /// Holds `port`, or any free one where it is 0.
    ///
    /// # Errors
    /// Where somebody listens there already, or no port is free.
    pub fn hold(port: u16) -> io::Result<Self> {
        let socket = TcpSocket::new_v4()?;
        socket.set_reuseaddr(true)?;
        socket.bind((Ipv4Addr::LOCALHOST, port).into())?;
        Ok(Self {
            address: socket.local_addr()?,
            _socket: cfg!(target_os = "linux").then_some(socket),
        })
    }

    /// Its number.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Where its owner listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::{TcpListener, TcpStream};

    use super::HeldPort;

    #[test]
    fn a_held_port_is_listened_at_again_and_again_and_given_to_nobody_else() {
        let held = HeldPort::hold(0).unwrap();
        for _ in 0..2 {
            assert!(TcpStream::connect(held.address()).is_err(), "nobody listens");
            let listener = TcpListener::bind(held.address()).unwrap();
            assert!(TcpStream::connect(held.address()).is_ok());
            assert!(HeldPort::hold(held.port()).is_err(), "somebody listens");
            drop(listener);
        }
        if cfg!(target_os = "linux") {
            let others: Vec<_> = (0..200).map(|_| HeldPort::hold(0).unwrap()).collect();
            let ports: BTreeSet<u16> = others.iter().chain([&held]).map(HeldPort::port).collect();
            assert_eq!(ports.len(), 201);
        }
    }
}
