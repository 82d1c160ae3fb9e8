//! Messages of engines' event sockets, in bounded memory: sockets that we connect, and sockets that engines connect to.

mod hub;
mod replay;
mod subscriber;

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::zmtp::ZmtpError;

pub use hub::Hubs;
pub use replay::{ReplayAnswer, ReplayClient};
pub use subscriber::connect;

/// Messages between a socket and its source beside the bound on bytes.
const QUEUE_MESSAGES: usize = 4096;
/// Bytes are counted in units of this, so that a 32-bit count is enough.
const BUDGET_UNIT: usize = 1024;

/// What an event socket tells its source.
#[derive(Debug)]
pub enum SocketEvent {
    /// The publisher is (again) there; messages may have been missed before.
    Connected,
    /// One message.
    Message(RawMessage),
    /// A message that is too large, or that no engine sends, was skipped.
    Skipped(&'static str),
    /// The publisher is gone, or not there yet.
    Lost(ZmtpError),
}

/// One undecoded message and the room that it takes.
#[derive(Debug)]
pub struct RawMessage {
    /// Its frames.
    pub frames: Vec<Bytes>,
    _room: OwnedSemaphorePermit,
}

/// The receiving end of one publisher; dropping it ends the subscription.
pub struct Subscription {
    events: mpsc::Receiver<SocketEvent>,
    // Held for what its drop does.
    _guard: Box<dyn Send + Sync>,
}

impl Subscription {
    /// The next event; `None` once the socket's task has ended.
    pub async fn next(&mut self) -> Option<SocketEvent> {
        self.events.recv().await
    }

    /// The next event if there is one already.
    pub fn try_next(&mut self) -> Option<SocketEvent> {
        self.events.try_recv().ok()
    }
}

/// The sending end towards one source.
#[derive(Clone)]
struct Outlet {
    events: mpsc::Sender<SocketEvent>,
    room: Arc<Semaphore>,
    capacity: u32,
}

impl Outlet {
    fn new(max_queued_bytes: usize) -> (Self, mpsc::Receiver<SocketEvent>) {
        let (events, receiver) = mpsc::channel(QUEUE_MESSAGES);
        let capacity = u32::try_from(max_queued_bytes / BUDGET_UNIT).unwrap_or(u32::MAX).max(1);
        let room = Arc::new(Semaphore::new(capacity as usize));
        (Self { events, room, capacity }, receiver)
    }

    /// Hands a message on, waiting for room; `false` once the source is gone.
    async fn message(&self, frames: Vec<Bytes>) -> bool {
        let bytes: usize = frames.iter().map(Bytes::len).sum();
        let units = u32::try_from(bytes / BUDGET_UNIT + 1)
            .unwrap_or(u32::MAX)
            .min(self.capacity);
        match self.room.clone().acquire_many_owned(units).await {
            Ok(room) => {
                self.event(SocketEvent::Message(RawMessage { frames, _room: room }))
                    .await
            }
            Err(_) => false,
        }
    }

    async fn event(&self, event: SocketEvent) -> bool {
        self.events.send(event).await.is_ok()
    }
}
