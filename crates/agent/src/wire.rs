//! Engine wire form to events: ZMQ frames and msgpack payloads of every vLLM and SGLang version, hostile ones refused.

mod cursor;
mod event;

use cairn_ingest::{EventBatch, RefusalReason};
use xxhash_rust::xxh3::xxh3_64;

use cursor::{Cursor, Value};
use event::Budget;

/// A live message: `[topic, seq, payload]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LiveFrames<'a> {
    /// Topic, often empty.
    pub topic: &'a [u8],
    /// The engine's counter.
    pub seq: u64,
    /// The msgpack payload.
    pub payload: &'a [u8],
}

/// One answer of a replay socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplayFrames<'a> {
    /// A kept batch.
    Batch {
        /// The engine's counter.
        seq: u64,
        /// The msgpack payload.
        payload: &'a [u8],
    },
    /// No more follow.
    End,
}

/// Frames that no engine sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Wrong number of frames.
    #[error("{0} frames where an engine sends topic, seq and payload; is this endpoint a KV event publisher?")]
    Count(usize),
    /// The counter isn't 8 bytes.
    #[error("the seq frame has {0} bytes instead of 8; is this endpoint a KV event publisher?")]
    Seq(usize),
}

/// Splits a live message.
///
/// # Errors
/// [`FrameError`] where the frames aren't an engine's.
pub fn live_frames<F: AsRef<[u8]>>(frames: &[F]) -> Result<LiveFrames<'_>, FrameError> {
    match frames {
        [topic, seq, payload] => Ok(LiveFrames {
            topic: topic.as_ref(),
            seq: read_seq(seq.as_ref())?,
            payload: payload.as_ref(),
        }),
        [seq, payload] => Ok(LiveFrames {
            topic: &[],
            seq: read_seq(seq.as_ref())?,
            payload: payload.as_ref(),
        }),
        _ => Err(FrameError::Count(frames.len())),
    }
}

/// Splits one answer of a replay socket: with or without the empty delimiter, with or without the topic.
///
/// # Errors
/// [`FrameError`] where the frames aren't an engine's.
pub fn replay_frames<F: AsRef<[u8]>>(frames: &[F]) -> Result<ReplayFrames<'_>, FrameError> {
    let (seq, payload) = match frames {
        [.., seq, payload] if frames.len() <= 4 => (seq.as_ref(), payload.as_ref()),
        _ => return Err(FrameError::Count(frames.len())),
    };
    if payload.is_empty() && (seq.is_empty() || seq.len() == 8) {
        return Ok(ReplayFrames::End);
    }
    match read_seq(seq)? {
        END_SEQ => Ok(ReplayFrames::End),
        seq => Ok(ReplayFrames::Batch { seq, payload }),
    }
}

/// The frames that ask a replay socket for every batch from `from` on: an empty delimiter and the counter.
#[must_use]
pub fn replay_request(from: u64) -> [Vec<u8>; 2] {
    [Vec::new(), from.to_be_bytes().to_vec()]
}

/// The counter that marks the end of a replay: -1.
const END_SEQ: u64 = u64::MAX;

fn read_seq(frame: &[u8]) -> Result<u64, FrameError> {
    frame
        .try_into()
        .map(u64::from_be_bytes)
        .map_err(|_| FrameError::Seq(frame.len()))
}

/// Decodes one payload.
///
/// A bad event is refused alone and the others stay. A message that can't be read gives a batch without events that
/// says why, so that its seq still counts. Sizes, counts and depth are checked before anything is allocated.
#[must_use]
pub fn decode(seq: u64, payload: &[u8]) -> EventBatch {
    let mut batch = EventBatch {
        seq,
        content: xxh3_64(payload),
        ts: 0.0,
        rank: None,
        events: Vec::new(),
        refused: Vec::new(),
    };
    if payload.len() > MAX_PAYLOAD {
        batch.refused.push(RefusalReason::TooLarge);
    } else if let Err(reason) = read_batch(payload, &mut batch) {
        batch.refused.push(reason);
    }
    batch
}

/// Largest payload in bytes: four prompts of a million tokens, at 4 bytes each.
pub const MAX_PAYLOAD: usize = 16 << 20;
/// Most events in one message; a scheduler step frees and fills some thousands of blocks.
const MAX_EVENTS: usize = 1 << 16;

fn read_batch(payload: &[u8], batch: &mut EventBatch) -> Result<(), RefusalReason> {
    let mut cursor = Cursor::new(payload);
    match cursor.value()? {
        Value::Array(n) if n >= 2 => {
            batch.ts = timestamp(&mut cursor)?;
            read_events(&mut cursor, batch)?;
            if n >= 3 {
                batch.rank = rank(&mut cursor)?;
            }
        }
        Value::Map(n) => {
            let mut events = false;
            for _ in 0..n {
                match cursor.value()? {
                    Value::Text(b"ts") => batch.ts = timestamp(&mut cursor)?,
                    Value::Text(b"events") => {
                        read_events(&mut cursor, batch)?;
                        events = true;
                    }
                    Value::Text(b"data_parallel_rank" | b"attn_dp_rank") => batch.rank = rank(&mut cursor)?,
                    Value::Array(_) | Value::Map(_) => return Err(RefusalReason::NotABatch),
                    _ => cursor.skip()?,
                }
            }
            if !events {
                return Err(RefusalReason::NotABatch);
            }
        }
        _ => return Err(RefusalReason::NotABatch),
    }
    if cursor.is_at_end() {
        Ok(())
    } else {
        Err(RefusalReason::Malformed)
    }
}

fn timestamp(cursor: &mut Cursor<'_>) -> Result<f64, RefusalReason> {
    match cursor.value()? {
        Value::Float(ts) => Ok(ts),
        // Below 2^53 for the next 285 million years.
        Value::Unsigned(ts) => Ok(ts as f64),
        _ => Err(RefusalReason::NotABatch),
    }
}

fn rank(cursor: &mut Cursor<'_>) -> Result<Option<u32>, RefusalReason> {
    match cursor.value()? {
        Value::Unsigned(rank) => u32::try_from(rank).map(Some).map_err(|_| RefusalReason::BadField),
        Value::Nil => Ok(None),
        _ => Err(RefusalReason::BadField),
    }
}

fn read_events(cursor: &mut Cursor<'_>, batch: &mut EventBatch) -> Result<(), RefusalReason> {
    let Value::Array(n) = cursor.value()? else {
        return Err(RefusalReason::NotABatch);
    };
    if n > MAX_EVENTS {
        return Err(RefusalReason::TooLarge);
    }
    let mut budget = Budget::new();
    for _ in 0..n {
        let start = *cursor;
        match event::read(cursor, &mut budget) {
            Ok(event) => batch.events.push(event),
            Err(reason) => {
                batch.refused.push(reason);
                *cursor = start;
                cursor.resync()?;
            }
        }
    }
    Ok(())
}
