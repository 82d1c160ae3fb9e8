//! Connects to one publisher and connects again, quickly, whenever it is lost.

use std::time::Duration;

use tokio_util::task::AbortOnDropHandle;

use super::{Outlet, SocketEvent, Subscription};
use crate::clock::Backoff;
use crate::config::Limits;
use crate::zmtp::{Connection, Endpoint, Item, SocketType};

/// A restarted engine must be seen within a second, so the longest wait is well below.
const RECONNECT_FIRST: Duration = Duration::from_millis(20);
const RECONNECT_LAST: Duration = Duration::from_millis(400);

/// Follows the publisher at `endpoint` for as long as the subscription lives.
#[must_use]
pub fn connect(endpoint: Endpoint, limits: Limits) -> Subscription {
    let (outlet, events) = Outlet::new(limits.max_queued_bytes);
    let task = AbortOnDropHandle::new(tokio::spawn(follow(endpoint, limits.max_message_bytes, outlet)));
    Subscription {
        events,
        _guard: Box::new(task),
    }
}

async fn follow(endpoint: Endpoint, max_message_bytes: usize, outlet: Outlet) {
    let mut backoff = Backoff::new(RECONNECT_FIRST, RECONNECT_LAST);
    let mut told = false;
    loop {
        let error = match Connection::connect(&endpoint, SocketType::Sub, max_message_bytes).await {
            Ok(mut connection) => match connection.subscribe(b"").await {
                Ok(()) => {
                    backoff.reset();
                    told = false;
                    match read(&mut connection, &outlet).await {
                        Some(error) => error,
                        None => return,
                    }
                }
                Err(error) => error,
            },
            Err(error) => error,
        };
        // A publisher that stays away is told once, not at every try.
        if !told && !outlet.event(SocketEvent::Lost(error)).await {
            return;
        }
        told = true;
        tokio::time::sleep(backoff.delay()).await;
    }
}

/// Reads until the connection or the source is gone; the error is the connection's.
async fn read(connection: &mut Connection, outlet: &Outlet) -> Option<crate::zmtp::ZmtpError> {
    if !outlet.event(SocketEvent::Connected).await {
        return None;
    }
    loop {
        let alive = match connection.next().await {
            Ok(Item::Message(frames)) => outlet.message(frames).await,
            Ok(Item::Oversized { .. }) => outlet.event(SocketEvent::Skipped("oversized")).await,
            Ok(Item::Command(_)) => true,
            Err(error) => return Some(error),
        };
        if !alive {
            return None;
        }
    }
}
