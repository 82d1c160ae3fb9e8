//! Telemetry: traces over OTLP, Prometheus metrics and logs, set up once per process.

mod config;
mod init;
pub mod metrics;
mod ops;
pub mod propagation;

pub use config::{LogFormat, TelemetryConfig};
pub use init::{Guard, InitError, init};
pub use metrics::SharedRegistry;
pub use ops::{Admits, OpsGuard, OpsServer, OpsState, serve_ops};
pub use propagation::TraceContext;
