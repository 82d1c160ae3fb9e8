//! What all requests of a router share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use arc_swap::ArcSwap;
use tokio::sync::Notify;

use crate::body::{BodyGate, BodyLimits};
use crate::config::Config;
use crate::engines::Engines;
use crate::fleet::Fleet;
use crate::metrics::Metrics;
use crate::retry::RetryBudget;
use crate::upstream::Upstream;

/// A router.
pub(crate) struct Router {
    /// As started with.
    pub config: Config,
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
    /// Memory of request bodies.
    pub bodies: BodyGate,
    /// Limits of one body.
    pub body_limits: BodyLimits,
    /// Second attempts.
    pub retries: RetryBudget,
    /// When it started; the zero of its clock.
    pub started: Instant,
    /// It takes no new requests.
    pub draining: AtomicBool,
    /// Requests between arrival and end.
    pub in_flight: InFlight,
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
