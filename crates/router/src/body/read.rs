//! Bounded reading of request bodies: size, time and the memory of half-sent bodies all have limits.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of each body that need no permit, so that ordinary requests pass while large half-sent bodies wait;
/// bounded in sum by the number of connections.
const FREE_BYTES: usize = 64 * 1024;
/// Bytes of a refused body that are read and thrown away, so that a client that sends all before it listens hears why.
const DISCARDED_MAX: u64 = 256 << 20;
/// Longest time for that.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);
/// Granularity of the memory budget.
const UNIT: usize = 64 * 1024;

/// Limits of one body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimits {
    /// Largest accepted body in bytes.
    pub bytes_max: usize,
    /// Time for a whole body to arrive.
    pub timeout: Duration,
    /// The client sends only once it is told to go on: of a body that is refused it needn't send a byte.
    pub awaited: bool,
}

/// Bounds the memory of all bodies that are being read or wait for their engine.
#[derive(Clone, Debug)]
pub(crate) struct BodyGate {
    units: Arc<Semaphore>,
}

/// A whole body and its share of the memory budget.
#[derive(Debug)]
pub(crate) struct HeldBody {
    /// The bytes.
    pub bytes: Bytes,
    _permit: Option<OwnedSemaphorePermit>,
}

/// Why a body wasn't read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    /// Longer than allowed.
    #[error("the body is larger than {max} bytes; send less or raise `max_body_bytes`")]
    TooLarge {
        /// The limit.
        max: usize,
    },
    /// Didn't arrive in time.
    #[error("the body didn't arrive within {} ms", .after.as_millis())]
    Timeout {
        /// The limit.
        after: Duration,
    },
    /// The client went away or broke the protocol.
    #[error("the body ended early")]
    Cut(#[source] hyper::Error),
}

impl BodyGate {
    /// A budget of `bytes` in all.
    pub(crate) fn new(bytes: usize) -> Self {
        Self {
            units: Arc::new(Semaphore::new((bytes / UNIT).clamp(1, Semaphore::MAX_PERMITS))),
        }
    }

    /// Reads a body to its end within `limits`.
    pub(crate) async fn read(&self, mut body: Incoming, limits: BodyLimits) -> Result<HeldBody, ReadError> {
        let length = body.size_hint().lower();
        let result = if length > limits.bytes_max as u64 {
            Err(ReadError::TooLarge { max: limits.bytes_max })
        } else {
            match tokio::time::timeout(limits.timeout, self.collect(&mut body, limits.bytes_max)).await {
                Ok(result) => result,
                Err(_) => Err(ReadError::Timeout { after: limits.timeout }),
            }
        };
        if matches!(result, Err(ReadError::TooLarge { .. })) && length <= DISCARDED_MAX && !limits.awaited {
            // Whether it works or not, the client is told; nothing of it is kept.
            let _ = tokio::time::timeout(DISCARD_TIMEOUT, discard(&mut body)).await;
        }
        result
    }

    async fn collect(&self, body: &mut Incoming, max: usize) -> Result<HeldBody, ReadError> {
        let length = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        let mut permit: Option<OwnedSemaphorePermit> = None;
        let mut first: Option<Bytes> = None;
        let mut rest = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(ReadError::Cut)?.into_data() else {
                continue;
            };
            let size = first.as_ref().map_or(rest.len(), Bytes::len) + data.len();
            if size > max {
                return Err(ReadError::TooLarge { max });
            }
            self.cover(&mut permit, size).await;
            match first.take() {
                None if rest.is_empty() => first = Some(data),
                None => rest.extend_from_slice(&data),
                Some(head) => {
                    // At once for what the client announced, as far as no permit is needed for it.
                    rest.reserve(size.max(head.len() * 2).max(length.min(FREE_BYTES)));
                    rest.extend_from_slice(&head);
                    rest.extend_from_slice(&data);
                }
            }
        }
        Ok(HeldBody {
            bytes: first.unwrap_or_else(|| rest.freeze()),
            _permit: permit,
        })
    }

    /// Waits until the budget covers `size` bytes; the caller's timeout bounds the wait.
    async fn cover(&self, permit: &mut Option<OwnedSemaphorePermit>, size: usize) {
        let have = permit.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let want = size.saturating_sub(FREE_BYTES).div_ceil(UNIT);
        if want <= have {
            return;
        }
        let more = u32::try_from(want - have).unwrap_or(u32::MAX);
        // The semaphore is never closed.
        if let Ok(got) = Arc::clone(&self.units).acquire_many_owned(more).await {
            match permit {
                Some(held) => held.merge(got),
                None => *permit = Some(got),
            }
        }
    }
}

/// Reads the rest of a body without keeping it, up to a bound.
async fn discard(body: &mut Incoming) {
    let mut left = DISCARDED_MAX;
    while let Some(Ok(frame)) = body.frame().await {
        left = left.saturating_sub(frame.data_ref().map_or(0, |data| data.len() as u64));
        if left == 0 {
            return;
        }
    }
}
