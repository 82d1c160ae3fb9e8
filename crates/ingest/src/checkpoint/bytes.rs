//! Little-endian fields, written and read back with every length checked.

use super::CheckpointError;

type Read<T> = Result<T, CheckpointError>;

#[derive(Debug, Default)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    pub(super) fn u8(&mut self, n: u8) {
        self.0.push(n);
    }

    pub(super) fn u32(&mut self, n: u32) {
        self.0.extend_from_slice(&n.to_le_bytes());
    }

    pub(super) fn u64(&mut self, n: u64) {
        self.0.extend_from_slice(&n.to_le_bytes());
    }

    pub(super) fn option(&mut self, n: Option<u64>) {
        self.u8(u8::from(n.is_some()));
        self.u64(n.unwrap_or(0));
    }

    pub(super) fn text(&mut self, text: &str) {
        self.u32(text.len() as u32);
        self.0.extend_from_slice(text.as_bytes());
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

#[derive(Debug)]
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Read<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(CheckpointError::Length)?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(super) fn u8(&mut self, _what: &'static str) -> Read<u8> {
        Ok(self.array::<1>()?[0])
    }

    pub(super) fn u32(&mut self, _what: &'static str) -> Read<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self, _what: &'static str) -> Read<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(super) fn flag(&mut self, what: &'static str) -> Read<bool> {
        match self.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(CheckpointError::Invalid(what)),
        }
    }

    pub(super) fn option(&mut self, what: &'static str) -> Read<Option<u64>> {
        let some = self.flag(what)?;
        let n = self.u64(what)?;
        Ok(some.then_some(n))
    }

    /// A count of things of at least `bytes_each`, so that a lie can't make anyone allocate.
    pub(super) fn count(&mut self, what: &'static str, bytes_each: usize) -> Read<usize> {
        let n = self.u32(what)? as usize;
        if n.saturating_mul(bytes_each) > self.0.len() {
            Err(CheckpointError::Invalid(what))
        } else {
            Ok(n)
        }
    }

    pub(super) fn text(&mut self, what: &'static str) -> Read<&'a str> {
        let n = self.count(what, 1)?;
        let (text, rest) = self.0.split_at(n);
        self.0 = rest;
        std::str::from_utf8(text).map_err(|_| CheckpointError::Invalid(what))
    }

    pub(super) fn end(&self) -> Read<()> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(CheckpointError::Invalid("end"))
        }
    }
}
