//! A registry that a process shares between its rooms, and bucket edges that several of them use.

use std::sync::Arc;

use parking_lot::Mutex;
pub use prometheus_client;
use prometheus_client::registry::Registry;

/// Latency bucket edges in seconds, from a tenth of a millisecond to two minutes.
pub const LATENCY_SECONDS: [f64; 18] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 45.0, 120.0,
];

/// The process's metrics; cheap to clone.
#[derive(Clone, Default)]
pub struct SharedRegistry(Arc<Mutex<Registry>>);

impl SharedRegistry {
    /// An empty registry.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers metrics.
    pub fn with<T>(&self, register: impl FnOnce(&mut Registry) -> T) -> T {
        register(&mut self.0.lock())
    }

    /// All metrics in the OpenMetrics text format.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut text = String::with_capacity(16 << 10);
        prometheus_client::encoding::text::encode(&mut text, &self.0.lock())
            .expect("writing to a string does not fail");
        text
    }
}
