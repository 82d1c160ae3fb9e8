//! Telemetry: traces over OTLP, Prometheus metrics and logs, set up once per process.
