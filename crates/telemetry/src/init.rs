//! Sets up logs and traces for one process.

use std::io::IsTerminal;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracerProvider};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing::{Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Filter, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use crate::{LogFormat, TelemetryConfig};

/// Spans kept while the collector is away; more are dropped and counted by the SDK.
const SPAN_QUEUE_MAX: usize = 8_192;
/// How often finished spans are sent.
const SPAN_EXPORT_INTERVAL: Duration = Duration::from_millis(500);

/// Telemetry that couldn't be set up.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// The log filter doesn't parse.
    #[error("telemetry.log: `{filter}` is not a log filter; use a level such as `info`, or `info,cairn_router=debug`")]
    Filter {
        /// As configured.
        filter: String,
        /// Why.
        #[source]
        source: tracing_subscriber::filter::ParseError,
    },
    /// The endpoint isn't one that spans can be sent to.
    #[error(
        "telemetry.otlp_endpoint: `{endpoint}` is not an http URL; give one such as http://127.0.0.1:4317 (spans are sent \
         without TLS: where a collector wants https, run one on this host in between)"
    )]
    Endpoint {
        /// As configured.
        endpoint: String,
    },
    /// The exporter can't be made.
    #[error("telemetry.otlp_endpoint: `{endpoint}` is not usable; give a URL such as http://127.0.0.1:4317")]
    Exporter {
        /// As configured.
        endpoint: String,
        /// Why.
        #[source]
        source: opentelemetry_otlp::ExporterBuildError,
    },
    /// A share outside 0 to 1.
    #[error("telemetry.sample_ratio: {0} is outside 0 to 1")]
    Ratio(f64),
    /// Another subscriber is installed in this process.
    #[error("telemetry is already set up in this process")]
    Twice(#[source] tracing_subscriber::util::TryInitError),
}

/// Keeps the exporter alive; flushes it when dropped.
#[must_use = "traces stop when the guard is dropped"]
pub struct Guard {
    provider: Option<SdkTracerProvider>,
}

impl Guard {
    /// Sends all finished spans now.
    pub fn flush(&self) {
        if let Some(provider) = &self.provider
            && let Err(error) = provider.force_flush()
        {
            tracing::debug!(%error, "spans were not flushed");
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(provider) = self.provider.take()
            && let Err(error) = provider.shutdown_with_timeout(Duration::from_secs(2))
        {
            tracing::debug!(%error, "the span exporter did not stop cleanly");
        }
    }
}

/// Installs logs (to standard error) and, where an endpoint is given, OTLP traces for service `service`.
///
/// Must be called inside a tokio runtime when an endpoint is given. `instance` tells processes of one role apart.
pub fn init(service: &str, instance: &str, config: &TelemetryConfig) -> Result<Guard, InitError> {
    if !(0.0..=1.0).contains(&config.sample_ratio) {
        return Err(InitError::Ratio(config.sample_ratio));
    }
    if !config.otlp_endpoint.is_empty() && !is_http_url(&config.otlp_endpoint) {
        return Err(InitError::Endpoint {
            endpoint: config.otlp_endpoint.clone(),
        });
    }
    let filter = EnvFilter::try_new(format!("openraft=off,{},cairn::trace=off", config.log)).map_err(|source| {
        InitError::Filter {
            filter: config.log.clone(),
            source,
        }
    })?;
    let fmt = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let fmt = match config.log_format {
        LogFormat::Text => fmt.boxed(),
        LogFormat::Json => tracing_subscriber::fmt::layer()
            .json()
            .with_writer(std::io::stderr)
            .boxed(),
    };
    let provider = match config.otlp_endpoint.as_str() {
        "" => None,
        endpoint => Some(provider(service, instance, endpoint, config.sample_ratio)?),
    };
    // Spans are traced whatever the log level says: sampling decides about traces, the filter about log lines.
    let otel = provider.as_ref().map(|provider| {
        tracing_opentelemetry::layer()
            .with_tracer(provider.tracer("cairn"))
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_filter(tracing_subscriber::filter::filter_fn(|meta| {
                meta.target().starts_with("cairn") && *meta.level() <= tracing::Level::INFO
            }))
    });
    tracing_subscriber::registry()
        .with(otel)
        .with(fmt.with_filter(EventsOf(filter)))
        .try_init()
        .map_err(InitError::Twice)?;
    Ok(Guard { provider })
}

/// Whether a text is an http URL with a host.
fn is_http_url(text: &str) -> bool {
    text.parse::<http::Uri>()
        .is_ok_and(|uri| uri.scheme_str() == Some("http") && uri.host().is_some_and(|host| !host.is_empty()))
}

/// Log lines are events alone: a span that only the log would see costs every request and says nothing there.
struct EventsOf(EnvFilter);

impl<S: Subscriber> Filter<S> for EventsOf {
    fn enabled(&self, meta: &Metadata<'_>, cx: &Context<'_, S>) -> bool {
        meta.is_event() && Filter::enabled(&self.0, meta, cx)
    }

    fn callsite_enabled(&self, meta: &'static Metadata<'static>) -> Interest {
        if meta.is_event() {
            Filter::<S>::callsite_enabled(&self.0, meta)
        } else {
            Interest::never()
        }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Filter::<S>::max_level_hint(&self.0)
    }
}

fn provider(service: &str, instance: &str, endpoint: &str, ratio: f64) -> Result<SdkTracerProvider, InitError> {
    let exporter = SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .with_timeout(Duration::from_secs(3))
        .build()
        .map_err(|source| InitError::Exporter {
            endpoint: endpoint.to_owned(),
            source,
        })?;
    let batch = BatchConfigBuilder::default()
        .with_max_queue_size(SPAN_QUEUE_MAX)
        .with_scheduled_delay(SPAN_EXPORT_INTERVAL)
        .build();
    Ok(SdkTracerProvider::builder()
        .with_span_processor(BatchSpanProcessor::builder(exporter).with_batch_config(batch).build())
        .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(ratio))))
        .with_resource(
            Resource::builder()
                .with_service_name(service.to_owned())
                .with_attribute(KeyValue::new("service.instance.id", instance.to_owned()))
                .build(),
        )
        .build())
}
