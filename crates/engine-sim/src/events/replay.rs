//! The last batches of one rank, and the socket that answers for them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use zeromq::{RouterSocket, SocketRecv, SocketSend, ZmqMessage};

/// A peer that takes no reply for this long loses the rest of its answer.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// The sequence number that ends an answer: all ones.
const END: [u8; 8] = [0xff; 8];

/// The last batches with their sequence numbers.
#[derive(Clone)]
pub struct ReplayBuffer {
    batches: Arc<Mutex<VecDeque<(u64, Bytes)>>>,
    capacity: usize,
}

impl ReplayBuffer {
    /// A buffer of `capacity` batches.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self {
            batches: Arc::default(),
            capacity,
        }
    }

    /// Keeps a batch; the oldest goes when the buffer is full.
    pub fn push(&self, seq: u64, payload: Bytes) {
        let mut batches = self.batches.lock();
        if batches.len() >= self.capacity {
            batches.pop_front();
        }
        batches.push_back((seq, payload));
    }

    /// Batches from `seq` on, oldest first.
    #[must_use]
    pub fn since(&self, seq: u64) -> Vec<(u64, Bytes)> {
        self.batches
            .lock()
            .iter()
            .filter(|(at, _)| *at >= seq)
            .cloned()
            .collect()
    }

    /// Forgets everything, as an engine does whose buffer rolled over.
    pub fn clear(&self) {
        self.batches.lock().clear();
    }
}

/// Answers requests until the socket is dropped with its task.
///
/// A request is `[peer, empty, seq]`; the answer is one message for each batch and an end marker. `topic` is present
/// in the versions whose answers carry it.
pub(super) async fn serve(mut socket: RouterSocket, buffer: ReplayBuffer, topic: Option<Bytes>) {
    while let Ok(request) = socket.recv().await {
        let frames = request.into_vec();
        let [peer, between @ .., seq] = frames.as_slice() else {
            continue;
        };
        let Ok(seq) = <[u8; 8]>::try_from(seq.as_ref()) else {
            tracing::debug!("a replay request without an 8-byte sequence number was ignored");
            continue;
        };
        // A DEALER may leave the delimiter out; answers mirror what was asked.
        let delimiter = between.first().cloned();
        let head = |tail: Vec<Bytes>| {
            let frames = [Some(peer.clone()), delimiter.clone()]
                .into_iter()
                .flatten()
                .chain(tail);
            ZmqMessage::try_from(frames.collect::<Vec<_>>()).ok()
        };
        let batches = buffer.since(u64::from_be_bytes(seq)).into_iter();
        let batches =
            batches.map(|(seq, payload)| (Bytes::copy_from_slice(&seq.to_be_bytes()), topic.clone(), payload));
        let end = (
            Bytes::from_static(&END),
            topic.as_ref().map(|_| Bytes::new()),
            Bytes::new(),
        );
        for (seq, topic, payload) in batches.chain([end]) {
            let Some(message) = head([topic, Some(seq), Some(payload)].into_iter().flatten().collect()) else {
                break;
            };
            match tokio::time::timeout(REPLY_TIMEOUT, socket.send(message)).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => break,
            }
        }
    }
}
