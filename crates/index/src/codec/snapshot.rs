//! The whole state as bytes.

use std::io::{self, Read, Write};

use xxhash_rust::xxh3::Xxh3;

use super::registry::{put_registry, registry};
use super::wire::{DecodeError, In, Out};
use crate::{IndexState, LogIndex, Residency};

/// Version of the bytes of a snapshot.
pub const SNAPSHOT_VERSION: u32 = 1;
/// How every snapshot begins.
const MAGIC: &[u8; 8] = b"CAIRNIDX";

/// Writes the whole state; buffer `to`, since small pieces are written.
pub fn encode_snapshot<W: Write>(state: &IndexState, to: &mut W) -> io::Result<()> {
    let mut hashing = Hashing {
        inner: &mut *to,
        hasher: Xxh3::new(),
    };
    let mut out = Out::new(&mut hashing);
    out.bytes(MAGIC)?;
    out.number(SNAPSHOT_VERSION)?;
    out.number(state.applied.0)?;
    put_registry(&mut out, state, true)?;
    state.residency.put(&mut out)?;
    out.bytes(&state.digest().0.to_le_bytes())?;
    let sum = hashing.hasher.digest();
    to.write_all(&sum.to_le_bytes())
}

/// Reads a state as [`encode_snapshot`] wrote it, checks its bytes and its digest; buffer `from`.
pub fn decode_snapshot<R: Read>(from: R) -> Result<IndexState, DecodeError> {
    let mut input = In::new(Hashing {
        inner: from,
        hasher: Xxh3::new(),
    });
    let mut magic = [0u8; 8];
    input.fill(&mut magic, "a snapshot")?;
    if magic != *MAGIC {
        return Err(DecodeError::NoSnapshot);
    }
    let version = input.number("a snapshot")?;
    if version != u64::from(SNAPSHOT_VERSION) {
        let known = u64::from(SNAPSHOT_VERSION);
        return Err(DecodeError::Version {
            what: "snapshot",
            found: version,
            known,
        });
    }
    let applied = LogIndex(input.number("the applied index")?);
    let (registry, next_source, next_worker) = registry(&mut input)?;
    let residency = Residency::read(&mut input, registry.holders.keys().copied())?;
    let state = IndexState::restored(registry, residency, applied, next_source, next_worker);
    let written = input.word("the snapshot's digest")?;
    let found = state.digest().0;
    if found != written {
        return Err(DecodeError::Digest { found, written });
    }
    let Hashing { inner, hasher } = input.into_inner();
    let found = hasher.digest();
    let written = In::new(inner).word("the snapshot's checksum")?;
    if found == written {
        Ok(state)
    } else {
        Err(DecodeError::Checksum { found, written })
    }
}

/// Hashes what passes through.
struct Hashing<T> {
    inner: T,
    hasher: Xxh3,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(bytes)?;
        self.hasher.update(&bytes[..read]);
        Ok(read)
    }
}
