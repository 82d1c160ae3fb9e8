//! Connections that wait for the next request to their engine.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::connection::Connection;
use super::origin::{ByOrigin, Origin};

/// Idle connections are closed before uvicorn, the engines' server, closes them itself after 5 s.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// How often they are looked through.
pub(super) const EXPIRE_EVERY: Duration = Duration::from_secs(2);
/// Idle connections kept per engine; an engine runs a few hundred sequences at once.
const IDLE_PER_ENGINE_MAX: usize = 512;

struct Idle {
    connection: Connection,
    since: Instant,
}

/// The idle connections of one lane, by engine; the one used last is at the end.
#[derive(Default)]
pub(super) struct Kept {
    idle: Mutex<ByOrigin<Vec<Idle>>>,
}

impl Kept {
    /// An open connection to `origin`, where one waits.
    pub(super) fn take(&self, origin: &Origin) -> Option<Connection> {
        loop {
            let mut idle = self.idle.lock().get_mut(origin)?.pop()?;
            if idle.since.elapsed() < IDLE_TIMEOUT && idle.connection.rests() {
                return Some(idle.connection);
            }
        }
    }

    /// Keeps a connection that has nothing to do.
    pub(super) fn put(&self, origin: &Origin, connection: Connection) {
        let idle = Idle {
            connection,
            since: Instant::now(),
        };
        let mut all = self.idle.lock();
        match all.get_mut(origin) {
            Some(list) if list.len() >= IDLE_PER_ENGINE_MAX => {}
            Some(list) => list.push(idle),
            None => {
                all.insert(origin.clone(), vec![idle]);
            }
        }
    }

    /// Closes those that have waited too long.
    pub(super) fn expire(&self) {
        self.idle.lock().retain(|_, list| {
            list.retain(|idle| idle.since.elapsed() < IDLE_TIMEOUT);
            !list.is_empty()
        });
    }
}
