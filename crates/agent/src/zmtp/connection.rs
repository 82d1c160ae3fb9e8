//! One handshaken ZMTP connection, made or accepted.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

use super::codec::{Decoder, Item, encode_command, encode_message};
use super::{Endpoint, ZmtpError};

/// Connecting and shaking hands together; engines answer in milliseconds, even when a step holds their thread.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes asked of the socket at a time.
const READ_CHUNK: usize = 64 << 10;
const GREETING_BYTES: usize = 64;

/// Which kind of socket this side is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SocketType {
    /// Reads what a PUB socket publishes.
    Sub,
    /// Asks a ROUTER.
    Dealer,
}

impl SocketType {
    fn name(self) -> &'static str {
        match self {
            Self::Sub => "SUB",
            Self::Dealer => "DEALER",
        }
    }

    fn accepts(self, peer: &[u8]) -> bool {
        match self {
            Self::Sub => matches!(peer, b"PUB" | b"XPUB"),
            Self::Dealer => matches!(peer, b"ROUTER" | b"REP" | b"DEALER"),
        }
    }

    fn peer_name(self) -> &'static str {
        match self {
            Self::Sub => "PUB",
            Self::Dealer => "ROUTER",
        }
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Sync + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> Stream for T {}

/// A connection over which messages are read and written.
pub struct Connection {
    stream: Box<dyn Stream>,
    buffer: BytesMut,
    decoder: Decoder,
}

impl Connection {
    /// Connects to `endpoint` and shakes hands as `socket`.
    ///
    /// # Errors
    /// When nobody listens there, or who does isn't the matching ZMTP socket.
    pub async fn connect(endpoint: &Endpoint, socket: SocketType, max_message_bytes: usize) -> Result<Self, ZmtpError> {
        let connecting = async {
            let stream: Box<dyn Stream> = match endpoint {
                Endpoint::Tcp { host, port } => {
                    let stream = TcpStream::connect((host.as_str(), *port)).await?;
                    stream.set_nodelay(true)?;
                    Box::new(stream)
                }
                Endpoint::Ipc { path } => Box::new(UnixStream::connect(path).await?),
            };
            Self::shake_hands(stream, socket, max_message_bytes).await
        };
        timeout(HANDSHAKE_TIMEOUT, connecting).await.map_err(|_| timed_out())?
    }

    /// Shakes hands with a peer that connected to us.
    ///
    /// # Errors
    /// When the peer isn't the matching ZMTP socket.
    pub async fn accept<S>(stream: S, socket: SocketType, max_message_bytes: usize) -> Result<Self, ZmtpError>
    where
        S: AsyncRead + AsyncWrite + Send + Sync + Unpin + 'static,
    {
        let shaking = Self::shake_hands(Box::new(stream), socket, max_message_bytes);
        timeout(HANDSHAKE_TIMEOUT, shaking).await.map_err(|_| timed_out())?
    }

    async fn shake_hands(mut stream: Box<dyn Stream>, socket: SocketType, max: usize) -> Result<Self, ZmtpError> {
        let mut hello = BytesMut::new();
        hello.extend_from_slice(&greeting());
        stream.write_all(&hello).await?;
        let mut theirs = [0u8; GREETING_BYTES];
        stream.read_exact(&mut theirs[..1]).await.map_err(closed_early)?;
        if theirs[0] != 0xff {
            return Err(ZmtpError::NotZmtp(theirs[0]));
        }
        // An older peer sends only its version after the signature and then waits.
        stream.read_exact(&mut theirs[1..11]).await.map_err(closed_early)?;
        if theirs[10] < 3 {
            return Err(ZmtpError::OldPeer(theirs[10]));
        }
        stream.read_exact(&mut theirs[11..]).await.map_err(closed_early)?;
        let mechanism = theirs[12..32].split(|b| *b == 0).next().unwrap_or_default();
        if mechanism != b"NULL" {
            return Err(ZmtpError::Mechanism(String::from_utf8_lossy(mechanism).into_owned()));
        }
        let mut connection = Self {
            stream,
            buffer: BytesMut::with_capacity(READ_CHUNK),
            decoder: Decoder::new(max),
        };
        let mut ready = BytesMut::new();
        encode_command(&ready_body(socket), &mut ready);
        connection.stream.write_all(&ready).await?;
        match connection.read_item().await? {
            Item::Command(body) => check_ready(&body, socket)?,
            Item::Message(_) | Item::Oversized { .. } => return Err(ZmtpError::Malformed("a message before READY")),
        }
        Ok(connection)
    }

    /// Asks a PUB peer for every message whose topic starts with `prefix`.
    ///
    /// # Errors
    /// When the connection is lost.
    pub async fn subscribe(&mut self, prefix: &[u8]) -> Result<(), ZmtpError> {
        let mut body = Vec::with_capacity(prefix.len() + 1);
        body.push(1);
        body.extend_from_slice(prefix);
        self.send(&[&body]).await
    }

    /// Sends one message.
    ///
    /// # Errors
    /// When the connection is lost.
    pub async fn send(&mut self, frames: &[&[u8]]) -> Result<(), ZmtpError> {
        let mut bytes = BytesMut::new();
        encode_message(frames, &mut bytes);
        self.stream.write_all(&bytes).await?;
        Ok(())
    }

    /// The next message; answers heartbeats on the way. `Err` ends the connection.
    ///
    /// Cancelling it loses nothing.
    ///
    /// # Errors
    /// When the connection is lost or the peer breaks the protocol.
    pub async fn next(&mut self) -> Result<Item, ZmtpError> {
        loop {
            match self.read_item().await? {
                Item::Command(body) => self.answer(&body).await?,
                item @ (Item::Message(_) | Item::Oversized { .. }) => return Ok(item),
            }
        }
    }

    async fn read_item(&mut self) -> Result<Item, ZmtpError> {
        loop {
            if let Some(item) = self.decoder.decode(&mut self.buffer)? {
                return Ok(item);
            }
            self.buffer.reserve(READ_CHUNK);
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(ZmtpError::Closed);
            }
        }
    }

    async fn answer(&mut self, command: &Bytes) -> Result<(), ZmtpError> {
        // PING: name, two bytes of time to live, up to 16 bytes of context that PONG repeats.
        if let Some(rest) = command.strip_prefix(b"\x04PING") {
            let context = rest.get(2..).unwrap_or_default();
            let mut body = b"\x04PONG".to_vec();
            body.extend_from_slice(&context[..context.len().min(16)]);
            let mut bytes = BytesMut::new();
            encode_command(&body, &mut bytes);
            self.stream.write_all(&bytes).await?;
        }
        Ok(())
    }
}

fn timed_out() -> ZmtpError {
    ZmtpError::Timeout(u64::try_from(HANDSHAKE_TIMEOUT.as_millis()).unwrap_or(u64::MAX))
}

fn closed_early(error: std::io::Error) -> ZmtpError {
    if error.kind() == std::io::ErrorKind::UnexpectedEof {
        ZmtpError::Closed
    } else {
        ZmtpError::Io(error)
    }
}

fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0u8; GREETING_BYTES];
    bytes[0] = 0xff;
    bytes[9] = 0x7f;
    bytes[10] = 3;
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

fn ready_body(socket: SocketType) -> Vec<u8> {
    let mut body = b"\x05READY".to_vec();
    for (name, value) in [("Socket-Type", socket.name()), ("Identity", "")] {
        body.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
        body.extend_from_slice(name.as_bytes());
        body.extend_from_slice(&u32::try_from(value.len()).unwrap_or(u32::MAX).to_be_bytes());
        body.extend_from_slice(value.as_bytes());
    }
    body
}

fn check_ready(body: &[u8], socket: SocketType) -> Result<(), ZmtpError> {
    if let Some(reason) = body.strip_prefix(b"\x05ERROR") {
        let reason = reason.get(1..).unwrap_or_default();
        return Err(ZmtpError::Refused(
            String::from_utf8_lossy(&reason[..reason.len().min(200)]).into_owned(),
        ));
    }
    let mut rest = body
        .strip_prefix(b"\x05READY")
        .ok_or(ZmtpError::Malformed("expected READY"))?;
    while let Some((&name_len, after)) = rest.split_first() {
        let (name, after) = after
            .split_at_checked(name_len as usize)
            .ok_or(ZmtpError::Malformed("READY property"))?;
        let (len, after) = after
            .split_first_chunk::<4>()
            .ok_or(ZmtpError::Malformed("READY property"))?;
        let (value, after) = after
            .split_at_checked(u32::from_be_bytes(*len) as usize)
            .ok_or(ZmtpError::Malformed("READY property"))?;
        if name.eq_ignore_ascii_case(b"socket-type") {
            return if socket.accepts(value) {
                Ok(())
            } else {
                let found = String::from_utf8_lossy(&value[..value.len().min(20)]).into_owned();
                Err(ZmtpError::PeerType {
                    found,
                    expected: socket.peer_name(),
                })
            };
        }
        rest = after;
    }
    Err(ZmtpError::Malformed("READY names no socket type"))
}
