//! Varints, keys and strings over any reader and writer.

use std::io::{self, Read, Write};

use cairn_blocks::BlockKey;

/// Why bytes are no command or snapshot of ours.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The reader failed.
    #[error("reading the stored index bytes failed")]
    Io(#[source] io::Error),
    /// They end too early.
    #[error("the stored index bytes end in the middle of {0}")]
    Truncated(&'static str),
    /// Bytes are left over.
    #[error("{0} bytes follow the end of the command")]
    Trailing(usize),
    /// Not our bytes at all.
    #[error("the stored bytes don't begin as an index snapshot does")]
    NoSnapshot,
    /// Written by another version.
    #[error("the {what} has version {found}, this build reads {known}; upgrade this node first")]
    Version {
        /// Command or snapshot.
        what: &'static str,
        /// As read.
        found: u64,
        /// As this build writes it.
        known: u64,
    },
    /// A tag that no version has.
    #[error("{what} has the unknown tag {tag}")]
    Tag {
        /// Which field.
        what: &'static str,
        /// As read.
        tag: u64,
    },
    /// A count or length beyond its bound.
    #[error("{what} is {found}, beyond the bound of {max}")]
    TooLong {
        /// Which field.
        what: &'static str,
        /// As read.
        found: u64,
        /// Largest allowed.
        max: u64,
    },
    /// A value that can't be.
    #[error("{0} is invalid")]
    Invalid(&'static str),
    /// The bytes changed since they were written.
    #[error("the snapshot's bytes sum up to {found:016x}, they were written with {written:016x}")]
    Checksum {
        /// Of what was read.
        found: u64,
        /// As written.
        written: u64,
    },
    /// The bytes were read, but aren't the state that was written.
    #[error("the snapshot's digest is {found:016x}, it was written as {written:016x}")]
    Digest {
        /// Of what was read.
        found: u64,
        /// As written.
        written: u64,
    },
}

/// Writes the primitive forms.
pub(crate) struct Out<'a, W: Write> {
    to: &'a mut W,
}

impl<'a, W: Write> Out<'a, W> {
    pub(crate) fn new(to: &'a mut W) -> Self {
        Self { to }
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.to.write_all(bytes)
    }

    pub(crate) fn byte(&mut self, byte: u8) -> io::Result<()> {
        self.to.write_all(&[byte])
    }

    pub(crate) fn number(&mut self, number: impl Into<u64>) -> io::Result<()> {
        let mut number: u64 = number.into();
        let mut buffer = [0u8; 10];
        let mut len = 0;
        loop {
            let low = (number & 0x7f) as u8;
            number >>= 7;
            buffer[len] = if number == 0 { low } else { low | 0x80 };
            len += 1;
            if number == 0 {
                return self.to.write_all(&buffer[..len]);
            }
        }
    }

    pub(crate) fn key(&mut self, key: BlockKey) -> io::Result<()> {
        self.to.write_all(&key.0.to_le_bytes())
    }

    pub(crate) fn keys(&mut self, keys: &[BlockKey]) -> io::Result<()> {
        let mut buffer = [0u8; KEYS_AT_ONCE * 8];
        for some in keys.chunks(KEYS_AT_ONCE) {
            for (slot, key) in buffer.chunks_exact_mut(8).zip(some) {
                slot.copy_from_slice(&key.0.to_le_bytes());
            }
            self.to.write_all(&buffer[..some.len() * 8])?;
        }
        Ok(())
    }

    pub(crate) fn text(&mut self, text: &str) -> io::Result<()> {
        self.number(text.len() as u64)?;
        self.to.write_all(text.as_bytes())
    }

    pub(crate) fn maybe_text(&mut self, text: Option<&str>) -> io::Result<()> {
        match text {
            Some(text) => {
                self.byte(1)?;
                self.text(text)
            }
            None => self.byte(0),
        }
    }
}

/// Keys copied through a stack buffer at a time.
const KEYS_AT_ONCE: usize = 64;

/// Reads the primitive forms.
pub(crate) struct In<R: Read> {
    from: R,
}

impl<R: Read> In<R> {
    pub(crate) fn new(from: R) -> Self {
        Self { from }
    }

    pub(crate) fn into_inner(self) -> R {
        self.from
    }

    pub(crate) fn fill(&mut self, buffer: &mut [u8], what: &'static str) -> Result<(), DecodeError> {
        self.from.read_exact(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => DecodeError::Truncated(what),
            _ => DecodeError::Io(error),
        })
    }

    pub(crate) fn byte(&mut self, what: &'static str) -> Result<u8, DecodeError> {
        let mut byte = [0u8];
        self.fill(&mut byte, what)?;
        Ok(byte[0])
    }

    pub(crate) fn flag(&mut self, what: &'static str) -> Result<bool, DecodeError> {
        match self.byte(what)? {
            0 => Ok(false),
            1 => Ok(true),
            tag => Err(DecodeError::Tag {
                what,
                tag: u64::from(tag),
            }),
        }
    }

    pub(crate) fn number(&mut self, what: &'static str) -> Result<u64, DecodeError> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte(what)?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return Err(DecodeError::Invalid(what));
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(DecodeError::Invalid(what))
    }

    pub(crate) fn small(&mut self, what: &'static str) -> Result<u32, DecodeError> {
        let found = self.number(what)?;
        u32::try_from(found).map_err(|_| DecodeError::TooLong {
            what,
            found,
            max: u64::from(u32::MAX),
        })
    }

    pub(crate) fn count(&mut self, what: &'static str, max: usize) -> Result<usize, DecodeError> {
        let found = self.number(what)?;
        match usize::try_from(found) {
            Ok(count) if count <= max => Ok(count),
            _ => Err(DecodeError::TooLong {
                what,
                found,
                max: max as u64,
            }),
        }
    }

    pub(crate) fn key(&mut self, what: &'static str) -> Result<BlockKey, DecodeError> {
        Ok(BlockKey(self.word(what)?))
    }

    pub(crate) fn word(&mut self, what: &'static str) -> Result<u64, DecodeError> {
        let mut bytes = [0u8; 8];
        self.fill(&mut bytes, what)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Reads `count` keys; memory grows only as bytes really arrive.
    pub(crate) fn keys(&mut self, count: usize, what: &'static str) -> Result<Vec<BlockKey>, DecodeError> {
        let mut keys = Vec::with_capacity(count.min(KEYS_AHEAD_MAX));
        self.each_key(count, what, |key| keys.push(key))?;
        Ok(keys)
    }

    /// Hands on `count` keys as they are read.
    pub(crate) fn each_key(
        &mut self,
        count: usize,
        what: &'static str,
        mut take: impl FnMut(BlockKey),
    ) -> Result<(), DecodeError> {
        let mut buffer = [0u8; KEYS_AT_ONCE * 8];
        let mut left = count;
        while left > 0 {
            let now = left.min(KEYS_AT_ONCE);
            self.fill(&mut buffer[..now * 8], what)?;
            for bytes in buffer[..now * 8].chunks_exact(8) {
                take(BlockKey(u64::from_le_bytes(bytes.try_into().expect("chunks of eight"))));
            }
            left -= now;
        }
        Ok(())
    }

    pub(crate) fn text(&mut self, what: &'static str, max: usize) -> Result<String, DecodeError> {
        let len = self.count(what, max)?;
        let mut bytes = vec![0u8; len];
        self.fill(&mut bytes, what)?;
        String::from_utf8(bytes).map_err(|_| DecodeError::Invalid(what))
    }

    pub(crate) fn maybe_text(&mut self, what: &'static str, max: usize) -> Result<Option<String>, DecodeError> {
        if self.flag(what)? {
            Ok(Some(self.text(what, max)?))
        } else {
            Ok(None)
        }
    }
}

/// Most keys that memory is reserved for before they arrive (64 KiB).
const KEYS_AHEAD_MAX: usize = 8192;
