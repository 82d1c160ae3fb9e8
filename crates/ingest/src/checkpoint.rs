//! A source on disk: mirror and cursor, so that an agent's restart isn't an engine's restart.
//!
//! Layout, little-endian: magic, version, length of the body, CRC-32 of the body, body. No token of a full block, no
//! salt and no adapter name is in it: namespaces are known by their root keys, blocks by theirs. Only the tokens of a
//! canonical block that isn't full yet are.

mod bytes;
mod parts;

use crate::{Millis, Source, SourceConfig};
use bytes::{Reader, Writer};

const MAGIC: [u8; 8] = *b"CAIRNCKP";
const VERSION: u32 = 2;
const HEADER: usize = 8 + 4 + 8 + 4;
/// Largest checkpoint that is read: the largest mirror at 64 bytes a block.
const MAX_BODY: usize = 1 << 30;

/// Why a checkpoint isn't used; the source then starts as new.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// It isn't one.
    #[error("not a checkpoint of a source: remove the file, or check that the agent's data directory is its own")]
    NotOne,
    /// Another version wrote it.
    #[error("checkpoint version {0}, but this agent reads {VERSION}: remove the file to start this source afresh")]
    Version(u32),
    /// It ends early, or is larger than any mirror.
    #[error("the checkpoint's length doesn't fit its header: it was cut, remove the file to start this source afresh")]
    Length,
    /// Its bytes changed.
    #[error("the checkpoint's checksum is wrong: the file is damaged, remove it to start this source afresh")]
    Checksum,
    /// A field contradicts the others.
    #[error("the checkpoint contradicts itself at {0}: remove the file to start this source afresh")]
    Invalid(&'static str),
    /// It was made for other keys.
    #[error("the checkpoint was made with another {0}: its block keys don't fit, the source starts afresh")]
    Other(&'static str),
}

impl Source {
    /// Writes down what is needed to go on after a restart of the agent.
    #[must_use]
    pub fn checkpoint(&self) -> Vec<u8> {
        let mut body = Writer::default();
        parts::write_identity(&mut body, &self.config);
        parts::write_session(&mut body, &self.session);
        parts::write_outbox(&mut body, &self.outbox, self.outbox.is_behind(&self.mirror));
        parts::write_unknown(&mut body, self.unknown);
        parts::write_mirror(&mut body, &self.mirror);
        let body = body.into_bytes();
        let mut out = Vec::with_capacity(HEADER + body.len());
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&(body.len() as u64).to_le_bytes());
        out.extend_from_slice(&crc32fast::hash(&body).to_le_bytes());
        out.extend_from_slice(&body);
        out
    }

    /// Goes on from a checkpoint.
    ///
    /// # Errors
    /// [`CheckpointError`] where the bytes can't be used: the source must then start as new.
    pub fn restore(config: SourceConfig, now: Millis, bytes: &[u8]) -> Result<Self, CheckpointError> {
        let mut header = Reader::new(bytes);
        if header.array::<8>().map_err(|_| CheckpointError::NotOne)? != MAGIC {
            return Err(CheckpointError::NotOne);
        }
        let version = header.u32("version")?;
        if version != VERSION {
            return Err(CheckpointError::Version(version));
        }
        let length = header.u64("length")?;
        let crc = header.u32("checksum")?;
        let body = &bytes[HEADER..];
        if body.len() > MAX_BODY || body.len() as u64 != length {
            return Err(CheckpointError::Length);
        }
        if crc32fast::hash(body) != crc {
            return Err(CheckpointError::Checksum);
        }
        let mut body = Reader::new(body);
        parts::check_identity(&mut body, &config)?;
        let session = parts::read_session(&mut body, config.replay, now)?;
        let outbox = parts::read_outbox(&mut body)?;
        let unknown = parts::read_unknown(&mut body)?;
        let mirror = parts::read_mirror(&mut body, &config)?;
        body.end()?;
        Ok(Self::from_parts(config, session, mirror, outbox, unknown))
    }
}
