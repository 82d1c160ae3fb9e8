//! Reads msgpack values from borrowed bytes: no tree, no allocation, every length checked against what is there.

use cairn_ingest::RefusalReason;

/// Deepest nesting of a value; engines use 4.
const MAX_DEPTH: usize = 16;

/// A position in a msgpack message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// The first bytes of a value: a whole scalar, or a container whose elements follow.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Value<'a> {
    Nil,
    Bool,
    Unsigned(u64),
    /// Below zero.
    Negative(i64),
    Float(f64),
    Text(&'a [u8]),
    Bytes(&'a [u8]),
    Extension,
    /// This many values follow.
    Array(usize),
    /// This many pairs follow.
    Map(usize),
}

type Read<T> = Result<T, RefusalReason>;

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.left() == 0
    }

    fn take(&mut self, n: usize) -> Read<&'a [u8]> {
        if n > self.left() {
            return Err(RefusalReason::Malformed);
        }
        let taken = &self.bytes[self.at..self.at + n];
        self.at += n;
        Ok(taken)
    }

    fn take_array<const N: usize>(&mut self) -> Read<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| RefusalReason::Malformed)
    }

    /// A big-endian length of `N` bytes.
    fn length<const N: usize>(&mut self) -> Read<usize> {
        let bytes: [u8; N] = self.take_array()?;
        Ok(bytes.iter().fold(0usize, |n, b| n << 8 | usize::from(*b)))
    }

    /// A container of `n` values can't be shorter than `n` bytes: bigger claims are lies.
    fn counted(&self, n: usize, bytes_each: usize) -> Read<usize> {
        if n.saturating_mul(bytes_each) > self.left() {
            Err(RefusalReason::Malformed)
        } else {
            Ok(n)
        }
    }

    /// Reads the next scalar or container head.
    pub(super) fn value(&mut self) -> Read<Value<'a>> {
        let marker = self.take(1)?[0];
        Ok(match marker {
            0x00..=0x7f => Value::Unsigned(u64::from(marker)),
            0x80..=0x8f => Value::Map(self.counted(usize::from(marker & 0x0f), 2)?),
            0x90..=0x9f => Value::Array(self.counted(usize::from(marker & 0x0f), 1)?),
            0xa0..=0xbf => Value::Text(self.take(usize::from(marker & 0x1f))?),
            0xc0 => Value::Nil,
            0xc1 => return Err(RefusalReason::Malformed),
            0xc2 | 0xc3 => Value::Bool,
            0xc4 => {
                let n = self.length::<1>()?;
                Value::Bytes(self.take(n)?)
            }
            0xc5 => {
                let n = self.length::<2>()?;
                Value::Bytes(self.take(n)?)
            }
            0xc6 => {
                let n = self.length::<4>()?;
                Value::Bytes(self.take(n)?)
            }
            0xc7 => {
                let n = self.length::<1>()?;
                self.extension(n)?
            }
            0xc8 => {
                let n = self.length::<2>()?;
                self.extension(n)?
            }
            0xc9 => {
                let n = self.length::<4>()?;
                self.extension(n)?
            }
            0xca => Value::Float(f64::from(f32::from_be_bytes(self.take_array()?))),
            0xcb => Value::Float(f64::from_be_bytes(self.take_array()?)),
            0xcc => Value::Unsigned(u64::from(self.take_array::<1>()?[0])),
            0xcd => Value::Unsigned(u64::from(u16::from_be_bytes(self.take_array()?))),
            0xce => Value::Unsigned(u64::from(u32::from_be_bytes(self.take_array()?))),
            0xcf => Value::Unsigned(u64::from_be_bytes(self.take_array()?)),
            0xd0 => signed(i64::from(i8::from_be_bytes(self.take_array()?))),
            0xd1 => signed(i64::from(i16::from_be_bytes(self.take_array()?))),
            0xd2 => signed(i64::from(i32::from_be_bytes(self.take_array()?))),
            0xd3 => signed(i64::from_be_bytes(self.take_array()?)),
            0xd4..=0xd8 => self.extension(1 << (marker - 0xd4))?,
            0xd9 => {
                let n = self.length::<1>()?;
                Value::Text(self.take(n)?)
            }
            0xda => {
                let n = self.length::<2>()?;
                Value::Text(self.take(n)?)
            }
            0xdb => {
                let n = self.length::<4>()?;
                Value::Text(self.take(n)?)
            }
            0xdc => {
                let n = self.length::<2>()?;
                Value::Array(self.counted(n, 1)?)
            }
            0xdd => {
                let n = self.length::<4>()?;
                Value::Array(self.counted(n, 1)?)
            }
            0xde => {
                let n = self.length::<2>()?;
                Value::Map(self.counted(n, 2)?)
            }
            0xdf => {
                let n = self.length::<4>()?;
                Value::Map(self.counted(n, 2)?)
            }
            0xe0..=0xff => Value::Negative(i64::from(i8::from_be_bytes([marker]))),
        })
    }

    fn extension(&mut self, n: usize) -> Read<Value<'a>> {
        self.take(n + 1)?;
        Ok(Value::Extension)
    }

    /// Steps over one value, refusing deep nesting.
    pub(super) fn skip(&mut self) -> Read<()> {
        let mut open = [0usize; MAX_DEPTH];
        let mut depth = 0;
        loop {
            let inside = match self.value()? {
                Value::Array(n) => n,
                Value::Map(n) => 2 * n,
                Value::Nil
                | Value::Bool
                | Value::Unsigned(_)
                | Value::Negative(_)
                | Value::Float(_)
                | Value::Text(_)
                | Value::Bytes(_)
                | Value::Extension => 0,
            };
            if inside > 0 {
                if depth == MAX_DEPTH {
                    return Err(RefusalReason::TooDeep);
                }
                open[depth] = inside;
                depth += 1;
                continue;
            }
            loop {
                let Some(level) = depth.checked_sub(1) else {
                    return Ok(());
                };
                open[level] -= 1;
                if open[level] > 0 {
                    break;
                }
                depth = level;
            }
        }
    }

    /// Steps over one value of any depth in constant memory: finds the next event after a refused one.
    pub(super) fn resync(&mut self) -> Read<()> {
        let mut pending = 1usize;
        while pending > 0 {
            // Small integers and nil are one byte each, and what long lists are made of.
            let ahead = &self.bytes[self.at..];
            let run = ahead
                .iter()
                .take(pending)
                .take_while(|b| matches!(**b, 0..=0x7f | 0xc0 | 0xe0..))
                .count();
            self.at += run;
            pending -= run;
            if pending == 0 {
                break;
            }
            pending -= 1;
            pending += match self.value()? {
                Value::Array(n) => n,
                Value::Map(n) => 2 * n,
                Value::Nil
                | Value::Bool
                | Value::Unsigned(_)
                | Value::Negative(_)
                | Value::Float(_)
                | Value::Text(_)
                | Value::Bytes(_)
                | Value::Extension => 0,
            };
            if pending > self.left() {
                return Err(RefusalReason::Malformed);
            }
        }
        Ok(())
    }

    /// Reads `n` token ids, the bulk of every message.
    pub(super) fn tokens(&mut self, n: usize) -> Read<Vec<u32>> {
        let mut tokens = Vec::with_capacity(n);
        for _ in 0..n {
            let rest = &self.bytes[self.at..];
            let (token, used) = match rest {
                [t @ 0x00..=0x7f, ..] => (u32::from(*t), 1),
                [0xcd, a, b, ..] => (u32::from(u16::from_be_bytes([*a, *b])), 3),
                [0xce, a, b, c, d, ..] => (u32::from_be_bytes([*a, *b, *c, *d]), 5),
                _ => match self.value()? {
                    Value::Unsigned(t) => (u32::try_from(t).map_err(|_| RefusalReason::BadField)?, 0),
                    _ => return Err(RefusalReason::BadField),
                },
            };
            self.at += used;
            tokens.push(token);
        }
        Ok(tokens)
    }
}

fn signed(n: i64) -> Value<'static> {
    match u64::try_from(n) {
        Ok(n) => Value::Unsigned(n),
        Err(_) => Value::Negative(n),
    }
}
