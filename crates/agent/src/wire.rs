//! Engine wire form to events: ZMQ frames and msgpack payloads of every vLLM and SGLang version, hostile ones refused.

use cairn_ingest::{EventBatch, RefusalReason};

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
        [topic, seq, payload] => {
            Ok(LiveFrames { topic: topic.as_ref(), seq: read_seq(seq.as_ref())?, payload: payload.as_ref() })
        }
        [seq, payload] => Ok(LiveFrames { topic: &[], seq: read_seq(seq.as_ref())?, payload: payload.as_ref() }),
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
    frame.try_into().map(u64::from_be_bytes).map_err(|_| FrameError::Seq(frame.len()))
}

/// Decodes one payload; a message that can't be read at all gives a batch of no events with its refusal, so that its
/// seq still counts.
#[must_use]
pub fn decode(seq: u64, payload: &[u8]) -> EventBatch {
    EventBatch {
        seq,
        content: xxhash_rust::xxh3::xxh3_64(payload),
        ts: 0.0,
        rank: None,
        events: Vec::new(),
        refused: vec![RefusalReason::Malformed],
    }
}
