//! What all requests of a router share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use arc_swap::ArcSwap;
use cairn_proto::v1;
use cairn_routing::{Micros, RetryBudget, Routing};
use dashmap::DashMap;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::alarms::Alarms;
use crate::body::{BodyGate, BodyLimits};
use crate::config::Config;
use crate::decisions::Decisions;
use crate::engines::Engines;
use crate::fleet::Fleet;
use crate::metrics::Metrics;
use crate::tenants::Tenants;
use crate::tokenize::PoolTokens;
use crate::upstream::Upstream;
use crate::view::View;

/// A router.
pub(crate) struct Router {
    /// As started with.
    pub config: Config,
    /// Its name in the cluster.
    pub name: String,
    /// Metrics.
    pub metrics: Metrics,
    /// The client to engines.
    pub upstream: Upstream,
    /// Every engine that is known.
    pub engines: Arc<Engines>,
    /// What requests can be sent to, now.
    pub fleet: ArcSwap<Fleet>,
    /// Wakes the task that rebuilds the fleet.
    pub fleet_changed: Arc<Notify>,
    /// The copy of the index.
    pub view: Arc<View>,
    /// The core that decides.
    pub routing: Mutex<Routing>,
    /// Second attempts.
    pub retries: Mutex<RetryBudget>,
    /// Tells requests that their answer should have begun by now.
    pub alarms: Alarms,
    /// Wakes the task that tells the other routers.
    pub reservations_changed: Notify,
    /// What engines in doubt reused, until the next frame takes it along.
    pub reused: Mutex<Vec<v1::Reused>>,
    /// Tokenizers by pool.
    pub tokens: DashMap<String, Arc<PoolTokens>>,
    /// Ids that engines gave where a tokenizer is missing.
    pub asked_engines: crate::ask_engine::Asked,
    /// Who may ask, and under which salt.
    pub tenants: Tenants,
    /// What operators show to be answered; `None` where loopback suffices.
    pub operator_token: Option<Vec<u8>>,
    /// The last decisions.
    pub decisions: Decisions,
    /// Memory of request bodies.
    pub bodies: BodyGate,
    /// Limits of one body.
    pub body_limits: BodyLimits,
    /// The zero of its clock.
    pub started: Instant,
    /// It takes no new requests.
    pub draining: AtomicBool,
    /// Requests between arrival and end.
    pub in_flight: InFlight,
}

impl Router {
    /// The router's monotonic clock.
    pub(crate) fn now(&self) -> Micros {
        self.at(Instant::now())
    }

    /// What that clock showed at `when`.
    pub(crate) fn at(&self, when: Instant) -> Micros {
        let since = when.saturating_duration_since(self.started);
        Micros(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
    }

    /// The tokenizer of a pool, found or not.
    pub(crate) fn tokens_of(&self, pool: &str) -> Arc<PoolTokens> {
        if let Some(found) = self.tokens.get(pool) {
            return Arc::clone(&found);
        }
        Arc::clone(&self.tokens.entry(pool.to_string()).or_default())
    }
}

/// Counts requests, and wakes who waits for the last one.
#[derive(Default)]
pub(crate) struct InFlight {
    count: AtomicUsize,
    idle: Notify,
}

/// One counted request.
pub(crate) struct InFlightGuard(Arc<Router>);

impl InFlight {
    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Ends once there are none.
    pub(crate) async fn idle(&self) {
        loop {
            let notified = self.idle.notified();
            tokio::pin!(notified);
            // Registers before the count is read, so that the last ending can't slip between.
            notified.as_mut().enable();
            if self.count() == 0 {
                return;
            }
            notified.await;
        }
    }
}

impl InFlightGuard {
    /// Counts one more.
    pub(crate) fn new(router: &Arc<Router>) -> Self {
        router.in_flight.count.fetch_add(1, Ordering::AcqRel);
        router.metrics.in_flight.inc();
        Self(Arc::clone(router))
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.metrics.in_flight.dec();
        if self.0.in_flight.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.in_flight.idle.notify_waiters();
        }
    }
}
