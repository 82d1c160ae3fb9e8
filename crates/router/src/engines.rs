//! What this router itself knows of each engine: whether it answers, whether it pushes back, what it serves.
//!
//! Eligibility follows these checks, not the index: an engine may be well while its agent is gone, and the reverse.
//! Breakers and push-back belong to `cairn-routing`; a refused connection is a failed check.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use dashmap::DashMap;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use parking_lot::Mutex;
use rand::Rng;
use serde::Deserialize;
use tokio::sync::Notify;

use crate::upstream::{Origin, Upstream};

/// Failed checks in a row after which an engine isn't asked any more.
const FAILED_CHECKS_MAX: u32 = 2;
/// Longest time a check may take.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);
/// What an engine serves is read again after this many checks.
const MODELS_EVERY_CHECKS: u64 = 10;
/// Largest accepted answer to `/v1/models`.
const MODELS_BYTES_MAX: usize = 1 << 20;

/// Whether an engine answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Health {
    /// Not checked yet; requests may be tried.
    Unknown = 0,
    /// Its last check passed.
    Healthy = 1,
    /// It failed checks in a row or refused a connection.
    Unhealthy = 2,
}

/// One engine process.
pub(crate) struct Engine {
    /// Base URL without a trailing slash.
    pub url: String,
    /// Where connections to it lead.
    pub origin: Origin,
    health: AtomicU8,
    failed_checks: AtomicU32,
    /// Wakes the check loop after a fault.
    recheck: Notify,
    models: Mutex<Option<Arc<Served>>>,
}

/// What an engine says it serves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Served {
    /// Names of the base model, first its own.
    pub models: Vec<String>,
    /// Names of loaded adapters.
    pub adapters: Vec<String>,
    /// Folder of the model.
    pub root: Option<String>,
    /// Longest prompt plus answer.
    pub max_model_len: Option<u32>,
}

impl Engine {
    /// An engine that wasn't checked yet; `None` where `url` isn't a base URL.
    pub(crate) fn new(url: &str) -> Option<Self> {
        let trimmed = url.trim_end_matches('/');
        let uri: http::Uri = trimmed.parse().ok()?;
        let parts = uri.into_parts();
        Some(Self {
            url: trimmed.to_string(),
            origin: Origin::new(parts.scheme?, parts.authority?)?,
            health: AtomicU8::new(Health::Unknown as u8),
            failed_checks: AtomicU32::new(0),
            recheck: Notify::new(),
            models: Mutex::new(None),
        })
    }

    /// What the checks say.
    pub(crate) fn health(&self) -> Health {
        match self.health.load(Ordering::Acquire) {
            1 => Health::Healthy,
            2 => Health::Unhealthy,
            _ => Health::Unknown,
        }
    }

    /// A live request was refused a connection: nobody listens there, so it isn't asked again before a check passes.
    pub(crate) fn refused(&self) {
        self.health.store(Health::Unhealthy as u8, Ordering::Release);
        self.recheck.notify_one();
    }

    /// A live request's connection broke: it is checked at once.
    pub(crate) fn broke(&self) {
        self.recheck.notify_one();
    }

    /// What it serves, once known.
    pub(crate) fn served(&self) -> Option<Arc<Served>> {
        self.models.lock().clone()
    }

    fn checked(&self, passed: bool) -> bool {
        let before = self.health();
        if passed {
            self.failed_checks.store(0, Ordering::Relaxed);
            self.health.store(Health::Healthy as u8, Ordering::Release);
        } else if self.failed_checks.fetch_add(1, Ordering::Relaxed) + 1 >= FAILED_CHECKS_MAX {
            self.health.store(Health::Unhealthy as u8, Ordering::Release);
        }
        before != self.health()
    }
}

/// All engines that are known, by URL; state outlives changes of the fleet.
#[derive(Default)]
pub(crate) struct Engines {
    by_url: DashMap<String, Arc<Engine>>,
}

impl Engines {
    /// The engine at `url`, which is made where it wasn't known; true where it is new.
    pub(crate) fn get(&self, url: &str) -> Option<(Arc<Engine>, bool)> {
        let url = url.trim_end_matches('/');
        if let Some(found) = self.by_url.get(url) {
            return Some((Arc::clone(&found), false));
        }
        let made = Arc::new(Engine::new(url)?);
        self.by_url.insert(url.to_string(), Arc::clone(&made));
        Some((made, true))
    }

    /// Forgets engines that `keep` doesn't name; their check loops end.
    pub(crate) fn retain(&self, keep: impl Fn(&str) -> bool) {
        self.by_url.retain(|url, _| keep(url));
    }

    /// Whether `engine` is still known.
    fn knows(&self, engine: &Arc<Engine>) -> bool {
        self.by_url
            .get(&engine.url)
            .is_some_and(|found| Arc::ptr_eq(&found, engine))
    }
}

/// Checks one engine until it is forgotten; `changed` is called when its health or what it serves changes.
pub(crate) async fn check_loop(
    engines: Arc<Engines>,
    engine: Arc<Engine>,
    upstream: Upstream,
    interval: Duration,
    changed: Arc<Notify>,
) {
    let mut round: u64 = 0;
    while engines.knows(&engine) {
        let passed = check(&engine, &upstream).await;
        let mut news = engine.checked(passed);
        if passed && round.is_multiple_of(MODELS_EVERY_CHECKS) {
            news |= read_models(&engine, &upstream).await;
        }
        round += u64::from(passed);
        if news {
            changed.notify_one();
        }
        // Spread so that routers and engines don't fall into step.
        let pause = interval.mul_f64(rand::rng().random_range(0.85..1.15));
        let _ = tokio::time::timeout(pause, engine.recheck.notified()).await;
    }
}

fn get(path: &'static str) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::default());
    *request.method_mut() = Method::GET;
    *request.uri_mut() = http::Uri::from_static(path);
    request
}

async fn check(engine: &Engine, upstream: &Upstream) -> bool {
    let answer = tokio::time::timeout(CHECK_TIMEOUT, async {
        let response = upstream.send(&engine.origin, get("/health")).await.ok()?;
        let status = response.status();
        // The body is read so that the connection can be used again.
        Limited::new(response.into_body(), MODELS_BYTES_MAX)
            .collect()
            .await
            .ok()?;
        Some(status)
    });
    matches!(answer.await, Ok(Some(StatusCode::OK)))
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ModelCard>,
}

#[derive(Deserialize)]
struct ModelCard {
    id: String,
    #[serde(default)]
    root: Option<String>,
    #[serde(default)]
    parent: Option<String>,
    #[serde(default)]
    max_model_len: Option<u32>,
}

/// Reads `/v1/models`; true where it says something new.
async fn read_models(engine: &Engine, upstream: &Upstream) -> bool {
    let answer = tokio::time::timeout(CHECK_TIMEOUT, async {
        let response = upstream.send(&engine.origin, get("/v1/models")).await.ok()?;
        if response.status() != StatusCode::OK {
            return None;
        }
        Some(
            Limited::new(response.into_body(), MODELS_BYTES_MAX)
                .collect()
                .await
                .ok()?
                .to_bytes(),
        )
    });
    let Ok(Some(bytes)) = answer.await else { return false };
    let Ok(list) = serde_json::from_slice::<ModelList>(&bytes) else {
        tracing::debug!(engine = engine.url, "the list of models can't be read");
        return false;
    };
    let mut served = Served::default();
    for card in list.data {
        if card.parent.is_some() {
            served.adapters.push(card.id);
        } else {
            served.root = served.root.or(card.root);
            served.max_model_len = served.max_model_len.or(card.max_model_len);
            served.models.push(card.id);
        }
    }
    let served = Arc::new(served);
    let mut known = engine.models.lock();
    let news = known.as_ref() != Some(&served);
    *known = Some(served);
    news
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_connection_takes_an_engine_out_until_a_check_passes() {
        let engine = Engine::new("http://127.0.0.1:1/").unwrap();
        assert_eq!(engine.health(), Health::Unknown);
        engine.refused();
        assert_eq!(engine.health(), Health::Unhealthy);
        engine.checked(true);
        assert_eq!(engine.health(), Health::Healthy);
    }

    #[test]
    fn one_failed_check_is_forgiven_and_two_are_not() {
        let engine = Engine::new("http://127.0.0.1:1").unwrap();
        engine.checked(true);
        engine.checked(false);
        assert_eq!(engine.health(), Health::Healthy);
        engine.checked(false);
        assert_eq!(engine.health(), Health::Unhealthy);
    }
}
