//! One bound socket per endpoint for engines that connect out; publishers are told apart by topic.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;

use super::{Outlet, SocketEvent, Subscription};
use crate::config::Limits;
use crate::zmtp::{Connection, Endpoint, Item, SocketType, ZmtpError};

/// Publishers connected to one endpoint at a time; a host's engines and ranks are far fewer.
const MAX_CONNECTIONS: usize = 1024;
/// Topics that one connection may speak on; engines use one.
const MAX_TOPICS_PER_CONNECTION: usize = 64;
/// Pause after a failed accept, so that a lack of file handles doesn't spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// All bound endpoints of an agent.
#[derive(Clone)]
pub struct Hubs {
    limits: Limits,
    open: Arc<tokio::sync::Mutex<HashMap<Endpoint, Weak<Hub>>>>,
    /// Messages whose topic no configured engine has.
    unrouted: Arc<AtomicU64>,
}

impl Hubs {
    /// No endpoint is bound yet.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            open: Arc::default(),
            unrouted: Arc::default(),
        }
    }

    /// Messages so far whose topic no configured engine has.
    #[must_use]
    pub fn unrouted(&self) -> u64 {
        self.unrouted.load(Ordering::Relaxed)
    }

    /// Follows the publisher that speaks on `topic` at `endpoint`, binding it first where nobody did.
    ///
    /// # Errors
    /// When the endpoint can't be bound.
    pub async fn subscribe(&self, endpoint: &Endpoint, topic: &str) -> io::Result<Subscription> {
        let mut open = self.open.lock().await;
        let hub = match open.get(endpoint).and_then(Weak::upgrade) {
            Some(hub) => hub,
            None => {
                let hub = Hub::bind(endpoint, self.limits, self.unrouted.clone()).await?;
                open.retain(|_, hub| hub.strong_count() > 0);
                open.insert(endpoint.clone(), Arc::downgrade(&hub));
                hub
            }
        };
        drop(open);
        let (outlet, events) = Outlet::new(self.limits.max_queued_bytes);
        let topic = Bytes::copy_from_slice(topic.as_bytes());
        // Whoever speaks next may have spoken before we listened.
        outlet.event(SocketEvent::Connected).await;
        hub.shared.routes.lock().insert(
            topic.clone(),
            Route {
                outlet,
                speaker: None,
                up: true,
            },
        );
        Ok(Subscription {
            events,
            _guard: Box::new(Leave { hub, topic }),
        })
    }
}

struct Leave {
    hub: Arc<Hub>,
    topic: Bytes,
}

impl Drop for Leave {
    fn drop(&mut self) {
        self.hub.shared.routes.lock().remove(&self.topic);
    }
}

struct Hub {
    shared: Arc<Shared>,
    _accepting: AbortOnDropHandle<()>,
}

struct Route {
    outlet: Outlet,
    /// The connection that spoke last on this topic.
    speaker: Option<u64>,
    up: bool,
}

struct Shared {
    routes: Mutex<HashMap<Bytes, Route>>,
    unrouted: Arc<AtomicU64>,
    max_message_bytes: usize,
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Hub {
    async fn bind(endpoint: &Endpoint, limits: Limits, unrouted: Arc<AtomicU64>) -> io::Result<Arc<Self>> {
        let listener = match endpoint {
            Endpoint::Tcp { host, port } => {
                let host = if host == "*" { "0.0.0.0" } else { host.as_str() };
                Listener::Tcp(TcpListener::bind((host, *port)).await?)
            }
            Endpoint::Ipc { path } => {
                // A socket file of an earlier life that nobody listens on stands in the way.
                if std::os::unix::net::UnixStream::connect(path).is_err() {
                    let _ = std::fs::remove_file(path);
                }
                Listener::Unix(UnixListener::bind(path)?)
            }
        };
        let shared = Arc::new(Shared {
            routes: Mutex::default(),
            unrouted,
            max_message_bytes: limits.max_message_bytes,
        });
        let accepting = AbortOnDropHandle::new(tokio::spawn(accept(listener, shared.clone())));
        Ok(Arc::new(Self {
            shared,
            _accepting: accepting,
        }))
    }
}

async fn accept(listener: Listener, shared: Arc<Shared>) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut tasks = tokio::task::JoinSet::new();
    let mut id = 0u64;
    loop {
        while tasks.try_join_next().is_some() {}
        let Ok(slot) = slots.clone().acquire_owned().await else {
            return;
        };
        id += 1;
        let shared = shared.clone();
        let max = shared.max_message_bytes;
        let accepted = match &listener {
            Listener::Tcp(tcp) => tcp.accept().await.map(|(stream, _)| {
                let _ = stream.set_nodelay(true);
                tasks.spawn(async move {
                    if let Ok(connection) = Connection::accept(stream, SocketType::Sub, max).await {
                        serve(connection, id, &shared).await;
                    }
                    drop(slot);
                });
            }),
            Listener::Unix(unix) => unix.accept().await.map(|(stream, _)| {
                tasks.spawn(async move {
                    if let Ok(connection) = Connection::accept(stream, SocketType::Sub, max).await {
                        serve(connection, id, &shared).await;
                    }
                    drop(slot);
                });
            }),
        };
        if let Err(error) = accepted {
            tracing::debug!(%error, "accepting a publisher failed");
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
    }
}

async fn serve(mut connection: Connection, id: u64, shared: &Shared) {
    if connection.subscribe(b"").await.is_err() {
        return;
    }
    shared.announce().await;
    let mut topics: Vec<Bytes> = Vec::new();
    let error = loop {
        let frames = match connection.next().await {
            Ok(Item::Message(frames)) => frames,
            Ok(Item::Oversized { .. }) => {
                // Its topic is gone with it; the missing seq tells its source.
                shared.unrouted.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            Ok(Item::Command(_)) => continue,
            Err(error) => break error,
        };
        let Some(topic) = frames.first().cloned() else { continue };
        let Some((outlet, changed)) = shared.route(&topic, id) else {
            shared.unrouted.fetch_add(1, Ordering::Relaxed);
            continue;
        };
        if changed {
            if topics.len() >= MAX_TOPICS_PER_CONNECTION {
                break ZmtpError::Malformed("one publisher speaks on too many topics");
            }
            if !topics.contains(&topic) {
                // Owned bytes, so that the message's buffer isn't pinned by its topic.
                topics.push(Bytes::copy_from_slice(&topic));
            }
            outlet.event(SocketEvent::Connected).await;
        }
        outlet.message(frames).await;
    };
    for topic in topics {
        if let Some(outlet) = shared.leave(&topic, id) {
            outlet.event(SocketEvent::Lost(ZmtpError::Malformed("closed"))).await;
        }
    }
    tracing::debug!(%error, "a publisher left");
}

impl Shared {
    /// Where messages of `topic` go, and whether another connection spoke before.
    fn route(&self, topic: &Bytes, id: u64) -> Option<(Outlet, bool)> {
        let mut routes = self.routes.lock();
        let route = routes.get_mut(topic)?;
        let changed = route.speaker != Some(id);
        route.speaker = Some(id);
        route.up = true;
        Some((route.outlet.clone(), changed))
    }

    fn leave(&self, topic: &Bytes, id: u64) -> Option<Outlet> {
        let mut routes = self.routes.lock();
        let route = routes.get_mut(topic).filter(|route| route.speaker == Some(id))?;
        route.speaker = None;
        route.up = false;
        Some(route.outlet.clone())
    }

    /// A publisher came: it may be any of those that are away.
    async fn announce(&self) {
        let outlets: Vec<Outlet> = {
            let mut routes = self.routes.lock();
            let away = routes.values_mut().filter(|route| !route.up);
            away.map(|route| {
                route.up = true;
                route.outlet.clone()
            })
            .collect()
        };
        for outlet in outlets {
            outlet.event(SocketEvent::Connected).await;
        }
    }
}
