//! Starts and stops a router.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use cairn_index::Registry;
use cairn_telemetry::{OpsServer, OpsState, SharedRegistry, serve_ops};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::body::{BodyGate, BodyLimits};
use crate::config::{Config, ConfigError};
use crate::door::{self, Closing};
use crate::engines::{self, Engine, Engines};
use crate::fleet::Fleet;
use crate::metrics::Metrics;
use crate::retry::RetryBudget;
use crate::state::{InFlight, Router};
use crate::upstream::Upstream;

/// Connections get this long to close after the drain.
const CLOSE_TIME: Duration = Duration::from_secs(1);
/// The fleet is rebuilt at most this often.
const FLEET_PAUSE: Duration = Duration::from_millis(20);

/// Why a router didn't start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A field can't work.
    #[error("configuration: {0}")]
    Config(#[from] ConfigError),
    /// Security settings don't allow the address or can't be read.
    #[error(transparent)]
    Security(#[from] cairn_proto::security::SecurityError),
    /// A port can't be opened.
    #[error("can't listen on {address}; is it in use?")]
    Bind {
        /// Which.
        address: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// TLS can't be set up.
    #[error("TLS to engines can't be set up")]
    Tls(#[from] rustls::Error),
    /// A file can't be used.
    #[error("{field}: {problem}")]
    File {
        /// The field that names it.
        field: String,
        /// What is wrong and what to do.
        problem: String,
    },
}

/// A running router.
pub struct Running {
    /// Where clients connect.
    pub addr: SocketAddr,
    /// The operators' port, where one was asked for.
    pub ops_addr: Option<SocketAddr>,
    router: Arc<Router>,
    closing: Closing,
    tasks: JoinSet<()>,
    _ops: Option<OpsServer>,
}

/// Starts a router.
///
/// # Errors
/// [`StartError`] naming what to change.
pub async fn start(config: Config) -> Result<Running, StartError> {
    config.validate()?;
    let address: SocketAddr = config.listen.parse().map_err(|_| ConfigError {
        field: "listen".into(),
        problem: "is no address".into(),
    })?;
    config.security.check_bind(address)?;
    let credentials = config.security.load()?;
    let listener = TcpListener::bind(address).await.map_err(|source| StartError::Bind {
        address: config.listen.clone(),
        source,
    })?;
    let addr = listener.local_addr().map_err(|source| StartError::Bind {
        address: config.listen.clone(),
        source,
    })?;
    let upstream = Upstream::new(
        Duration::from_millis(config.connect_timeout_ms),
        rustls::RootCertStore::empty(),
    )?;
    let router = Arc::new(Router {
        metrics: Metrics::new(),
        upstream,
        engines: Arc::new(Engines::default()),
        fleet: ArcSwap::from_pointee(Fleet::default()),
        fleet_changed: Arc::new(Notify::new()),
        bodies: BodyGate::new(config.body_memory_bytes),
        body_limits: BodyLimits {
            bytes_max: config.max_body_bytes,
            timeout: config.body_timeout(),
        },
        retries: RetryBudget::default(),
        started: Instant::now(),
        draining: AtomicBool::new(false),
        in_flight: InFlight::default(),
        config,
    });
    let ops = open_ops(&router).await?;
    let mut tasks = JoinSet::new();
    rebuild(&router, &Registry::default(), &mut tasks);
    let closing = Closing::default();
    let tls = credentials.rustls_server_config(&[b"http/1.1"])?;
    tasks.spawn(door::accept(Arc::clone(&router), listener, tls, closing.clone()));
    tasks.spawn(keep_fleet(Arc::clone(&router)));
    Ok(Running {
        addr,
        ops_addr: ops.as_ref().map(|ops| ops.addr),
        router,
        closing,
        tasks,
        _ops: ops,
    })
}

async fn open_ops(router: &Arc<Router>) -> Result<Option<OpsServer>, StartError> {
    if router.config.ops_listen.is_empty() {
        return Ok(None);
    }
    let address: SocketAddr = router.config.ops_listen.parse().map_err(|_| ConfigError {
        field: "ops_listen".into(),
        problem: "is no address".into(),
    })?;
    router.config.security.check_bind(address)?;
    let registry: SharedRegistry = router.metrics.registry.clone();
    let for_ready = Arc::clone(router);
    let state = OpsState {
        registry,
        ready: Box::new(move || door::ready(&for_ready)),
        status: None,
        before_scrape: None,
    };
    let ops = serve_ops(address, state).await.map_err(|source| StartError::Bind {
        address: router.config.ops_listen.clone(),
        source,
    })?;
    Ok(Some(ops))
}

/// Rebuilds the fleet and starts the checks of engines that are new in it.
fn rebuild(router: &Arc<Router>, registry: &Registry, tasks: &mut JoinSet<()>) {
    let mut made: Vec<Arc<Engine>> = Vec::new();
    let fleet = Fleet::build(registry, &router.config, &router.engines, &mut made);
    router
        .engines
        .retain(|url| fleet.workers().any(|(_, worker)| worker.engine.url == url));
    router.fleet.store(Arc::new(fleet));
    for engine in made {
        tasks.spawn(engines::check_loop(
            Arc::clone(&router.engines),
            engine,
            router.upstream.clone(),
            Duration::from_millis(router.config.check_interval_ms),
            Arc::clone(&router.fleet_changed),
        ));
    }
}

/// Rebuilds the fleet when something that it is made of changes.
async fn keep_fleet(router: Arc<Router>) {
    let mut checks = JoinSet::new();
    loop {
        router.fleet_changed.notified().await;
        while checks.try_join_next().is_some() {}
        rebuild(&router, &Registry::default(), &mut checks);
        tokio::time::sleep(FLEET_PAUSE).await;
    }
}

impl Running {
    /// Stops taking requests, lets running ones finish within the configured grace, and ends.
    pub async fn stop(self) {
        let grace = Duration::from_millis(self.router.config.drain_grace_ms);
        self.stop_within(grace).await;
    }

    /// Like [`Running::stop`] with another grace: `/ready` fails at once, `/live` answers until the end.
    pub async fn stop_within(mut self, grace: Duration) {
        self.router.draining.store(true, Ordering::Release);
        self.closing.drain.cancel();
        if tokio::time::timeout(grace, self.router.in_flight.idle()).await.is_err() {
            tracing::warn!(
                left = self.router.in_flight.count(),
                "streams were cut at the end of the drain's grace"
            );
        }
        self.closing.end.cancel();
        self.closing.connections.close();
        let _ = tokio::time::timeout(CLOSE_TIME, self.closing.connections.wait()).await;
        self.tasks.shutdown().await;
    }

    /// Ends when the router can't go on.
    pub async fn wait(&mut self) {
        self.tasks.join_next().await;
    }
}
