//! Frames to messages and back, without I/O; nothing is allocated for a claim that isn't backed by bytes.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::ZmtpError;

/// A message has a topic, a seq and a payload; replay adds an empty delimiter. Twice that is room enough.
pub const MAX_FRAMES_PER_MESSAGE: usize = 8;
/// Commands are names and small properties.
pub const MAX_COMMAND_BYTES: usize = 4096;
/// An oversized frame of up to this many bytes is skipped; a longer one ends the connection.
pub const MAX_SKIPPED_BYTES: u64 = 256 << 20;

const FLAG_MORE: u8 = 1;
const FLAG_LONG: u8 = 2;
const FLAG_COMMAND: u8 = 4;

/// One thing that a peer sent.
#[derive(Debug, PartialEq, Eq)]
pub enum Item {
    /// A whole message, frame by frame.
    Message(Vec<Bytes>),
    /// A protocol command's body.
    Command(Bytes),
    /// A message that was too large and has been skipped without being kept.
    Oversized {
        /// Its size in bytes as far as it was read.
        bytes: u64,
    },
}

#[derive(Clone, Copy, Debug)]
enum State {
    Header,
    Body { flags: u8, length: usize },
    Skip { flags: u8, left: u64 },
}

/// Decodes one connection's bytes after the greeting.
#[derive(Debug)]
pub struct Decoder {
    max_message_bytes: usize,
    state: State,
    frames: Vec<Bytes>,
    message_bytes: u64,
    oversized: bool,
}

impl Decoder {
    /// A decoder that keeps messages of at most `max_message_bytes`.
    #[must_use]
    pub fn new(max_message_bytes: usize) -> Self {
        Self {
            max_message_bytes,
            state: State::Header,
            frames: Vec::new(),
            message_bytes: 0,
            oversized: false,
        }
    }

    /// Takes the next item off `buffer`, or nothing if more bytes are needed.
    ///
    /// # Errors
    /// When the peer breaks the protocol; the connection can't go on.
    pub fn decode(&mut self, buffer: &mut BytesMut) -> Result<Option<Item>, ZmtpError> {
        loop {
            match self.state {
                State::Header => match Self::header(buffer)? {
                    Some((flags, length)) => self.begin_frame(flags, length)?,
                    None => return Ok(None),
                },
                State::Body { flags, length } => {
                    if buffer.len() < length {
                        return Ok(None);
                    }
                    let body = buffer.split_to(length).freeze();
                    self.state = State::Header;
                    if flags & FLAG_COMMAND != 0 {
                        return Ok(Some(Item::Command(body)));
                    }
                    self.frames.push(body);
                    if let Some(item) = self.end_frame(flags) {
                        return Ok(Some(item));
                    }
                }
                State::Skip { flags, left } => {
                    let step = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
                    buffer.advance(step);
                    let left = left - step as u64;
                    if left > 0 {
                        self.state = State::Skip { flags, left };
                        return Ok(None);
                    }
                    self.state = State::Header;
                    if let Some(item) = self.end_frame(flags) {
                        return Ok(Some(item));
                    }
                }
            }
        }
    }

    fn header(buffer: &mut BytesMut) -> Result<Option<(u8, u64)>, ZmtpError> {
        let Some(&flags) = buffer.first() else { return Ok(None) };
        if flags & !(FLAG_MORE | FLAG_LONG | FLAG_COMMAND) != 0 {
            return Err(ZmtpError::Malformed("reserved frame flags are set"));
        }
        let header = if flags & FLAG_LONG != 0 { 9 } else { 2 };
        if buffer.len() < header {
            return Ok(None);
        }
        buffer.advance(1);
        let length = if flags & FLAG_LONG != 0 {
            buffer.get_u64()
        } else {
            u64::from(buffer.get_u8())
        };
        Ok(Some((flags, length)))
    }

    fn begin_frame(&mut self, flags: u8, length: u64) -> Result<(), ZmtpError> {
        if flags & FLAG_COMMAND != 0 {
            let short = usize::try_from(length).ok().filter(|l| *l <= MAX_COMMAND_BYTES);
            let length = short.ok_or(ZmtpError::Malformed("a command of more than 4 KiB"))?;
            self.state = State::Body { flags, length };
            return Ok(());
        }
        self.message_bytes = self.message_bytes.saturating_add(length);
        if self.message_bytes > MAX_SKIPPED_BYTES {
            return Err(ZmtpError::FrameTooLong {
                claimed: length,
                limit: MAX_SKIPPED_BYTES,
            });
        }
        let fits = self.message_bytes <= self.max_message_bytes as u64 && self.frames.len() < MAX_FRAMES_PER_MESSAGE;
        if self.oversized || !fits {
            self.oversized = true;
            self.frames.clear();
            self.state = State::Skip { flags, left: length };
        } else {
            let length = usize::try_from(length).map_err(|_| ZmtpError::Malformed("length out of range"))?;
            self.state = State::Body { flags, length };
        }
        Ok(())
    }

    fn end_frame(&mut self, flags: u8) -> Option<Item> {
        if flags & FLAG_MORE != 0 {
            return None;
        }
        let bytes = std::mem::take(&mut self.message_bytes);
        if std::mem::take(&mut self.oversized) {
            return Some(Item::Oversized { bytes });
        }
        Some(Item::Message(std::mem::take(&mut self.frames)))
    }
}

/// Appends a message of `frames`.
pub fn encode_message(frames: &[&[u8]], out: &mut BytesMut) {
    for (i, frame) in frames.iter().enumerate() {
        let more = if i + 1 < frames.len() { FLAG_MORE } else { 0 };
        encode_frame(more, frame, out);
    }
}

/// Appends a command frame.
pub fn encode_command(body: &[u8], out: &mut BytesMut) {
    encode_frame(FLAG_COMMAND, body, out);
}

fn encode_frame(flags: u8, body: &[u8], out: &mut BytesMut) {
    if let Ok(short) = u8::try_from(body.len()) {
        out.put_u8(flags);
        out.put_u8(short);
    } else {
        out.put_u8(flags | FLAG_LONG);
        out.put_u64(body.len() as u64);
    }
    out.put_slice(body);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode_all(decoder: &mut Decoder, bytes: &[u8], step: usize) -> Result<Vec<Item>, ZmtpError> {
        let mut buffer = BytesMut::new();
        let mut items = Vec::new();
        for chunk in bytes.chunks(step) {
            buffer.extend_from_slice(chunk);
            while let Some(item) = decoder.decode(&mut buffer)? {
                items.push(item);
            }
        }
        Ok(items)
    }

    #[test]
    fn messages_survive_any_split_of_the_bytes() {
        let mut bytes = BytesMut::new();
        encode_message(&[b"topic", &[0; 8], &[7; 300]], &mut bytes);
        encode_command(b"\x04PING\0\0", &mut bytes);
        encode_message(&[b""], &mut bytes);
        for step in [1, 2, 3, 7, 64, 1000] {
            let items = decode_all(&mut Decoder::new(1024), &bytes, step).unwrap();
            assert_eq!(items.len(), 3);
            assert!(matches!(&items[0], Item::Message(f) if f.len() == 3 && f[2].len() == 300));
            assert!(matches!(&items[1], Item::Command(c) if c.starts_with(b"\x04PING")));
            assert!(matches!(&items[2], Item::Message(f) if f.len() == 1 && f[0].is_empty()));
        }
    }

    #[test]
    fn an_oversized_message_is_skipped_and_the_next_one_is_read() {
        let mut bytes = BytesMut::new();
        encode_message(&[b"t", &[1; 5000], b"tail"], &mut bytes);
        encode_message(&[b"t", b"ok"], &mut bytes);
        let items = decode_all(&mut Decoder::new(1024), &bytes, 100).unwrap();
        assert_eq!(items[0], Item::Oversized { bytes: 5005 });
        assert!(matches!(&items[1], Item::Message(f) if f[1].as_ref() == b"ok"));
    }

    #[test]
    fn a_claim_of_four_gibibytes_ends_the_connection_without_allocating() {
        let mut buffer = BytesMut::from(&[2u8, 0, 0, 0, 1, 0, 0, 0, 0][..]);
        let error = Decoder::new(1024).decode(&mut buffer).unwrap_err();
        assert!(matches!(error, ZmtpError::FrameTooLong { .. }));
        assert!(buffer.capacity() < 4096);
    }

    #[test]
    fn endless_small_frames_of_one_message_are_not_kept() {
        let mut bytes = BytesMut::new();
        let frames: Vec<&[u8]> = vec![b"x"; 100];
        encode_message(&frames, &mut bytes);
        let items = decode_all(&mut Decoder::new(1 << 20), &bytes, 50).unwrap();
        assert_eq!(items, vec![Item::Oversized { bytes: 100 }]);
    }

    #[test]
    fn reserved_flags_are_refused() {
        let mut buffer = BytesMut::from(&[0x80u8, 0][..]);
        assert!(matches!(
            Decoder::new(10).decode(&mut buffer),
            Err(ZmtpError::Malformed(_))
        ));
    }
}
