//! What can go wrong between two ZMTP peers.

use std::io;

/// A connection that can't be used (any more).
#[derive(Debug, thiserror::Error)]
pub enum ZmtpError {
    /// The socket failed or the peer closed it.
    #[error("connection lost: {0}")]
    Io(#[from] io::Error),
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer doesn't speak ZMTP.
    #[error("the peer does not speak ZMTP (first byte {0:#04x}); is this the event port of an engine?")]
    NotZmtp(u8),
    /// The peer is older than ZMTP 3.
    #[error("the peer speaks ZMTP {0}, this agent needs 3 or newer (ZeroMQ 4)")]
    OldPeer(u8),
    /// The peer wants authentication that engines don't offer.
    #[error("the peer wants the security mechanism {0:?}; configure the engine's event socket without one (NULL)")]
    Mechanism(String),
    /// The peer is another kind of socket.
    #[error("the peer is a {found} socket, expected {expected}; are the event and the replay endpoint swapped?")]
    PeerType {
        /// What it says it is.
        found: String,
        /// What works here.
        expected: &'static str,
    },
    /// The peer refused the handshake.
    #[error("the peer refused the connection: {0}")]
    Refused(String),
    /// Bytes that no peer in order sends.
    #[error("malformed ZMTP: {0}")]
    Malformed(&'static str),
    /// A frame claims more bytes than are worth skipping.
    #[error("a frame claims {claimed} bytes, more than the {limit} that are skipped at most")]
    FrameTooLong {
        /// Claimed length in bytes.
        claimed: u64,
        /// The bound in bytes.
        limit: u64,
    },
    /// The handshake or an answer took too long.
    #[error("no answer within {0} ms")]
    Timeout(u64),
}
