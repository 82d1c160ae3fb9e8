//! ZMTP 3.0 with bounded frames: the reading side of engines' event sockets.
//!
//! Engines publish over ZeroMQ. What an agent needs of its protocol is small (NULL handshake, subscribe, read
//! messages, ask a ROUTER for a replay), and it must stand hostile peers: a frame's claimed length is checked before
//! anything is allocated, every message is known by the connection it came over, and each loss of a connection is
//! seen at once, because an engine that restarts in silence must lose its credit within a second.

mod codec;
mod connection;
mod endpoint;
mod error;

pub use codec::{Decoder, Item, encode_command, encode_message};
pub use connection::{Connection, SocketType};
pub use endpoint::{Endpoint, InvalidEndpoint};
pub use error::ZmtpError;
