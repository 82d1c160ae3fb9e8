//! Starts and stops a router.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use cairn_proto::security::Credentials;
use cairn_routing::{RetryBudget, RouterName, Routing, RoutingConfig, ViewState};
use cairn_telemetry::{OpsGuard, OpsServer, OpsState, SharedRegistry, serve_ops};
use dashmap::DashMap;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::alarms::Alarms;
use crate::body::{BodyGate, BodyLimits};
use crate::config::{Config, ConfigError};
use crate::decisions::Decisions;
use crate::door::{self, Closing};
use crate::engines::Engines;
use crate::fleet::Fleet;
use crate::lanes::Lanes;
use crate::metrics::Metrics;
use crate::state::{InFlight, Router};
use crate::tenants::Tenants;
use crate::upstream::Upstream;
use crate::view::{Follower, SoftSink, View};
use crate::{lanes, operator, registry, samples, soft};

/// Shortest accepted operators' token: 16 random bytes can't be guessed online.
const OPERATOR_TOKEN_BYTES_MIN: usize = 16;
/// Connections get this long to close after the drain.
const CLOSE_TIME: Duration = Duration::from_secs(1);

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
    /// The system gives no threads for the lanes.
    #[error("can't start the lanes; lower `lanes` or raise the process's limits of threads and open files")]
    Lanes(#[source] std::io::Error),
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
    /// Kept here, so that they outlive the door: connections send their last bytes after it has closed.
    _lanes: Arc<Lanes>,
    _ops: Option<OpsServer>,
}

/// Starts a router.
///
/// # Errors
/// [`StartError`] naming what to change.
pub fn start(config: Config) -> Pin<Box<dyn Future<Output = Result<Running, StartError>> + Send>> {
    // Boxed here, so that the whole role is compiled in this crate and not once more in each binary that starts it.
    Box::pin(open(config))
}

async fn open(config: Config) -> Result<Running, StartError> {
    config.validate()?;
    let address: SocketAddr = config
        .listen
        .parse()
        .map_err(|_| ConfigError::new("listen", "is no address".to_string()))?;
    config.security.check_bind(address)?;
    let credentials = config.security.load()?;
    let tls = credentials.rustls_server_config(&[b"http/1.1"])?;
    let listener = TcpListener::bind(address).await.map_err(|source| StartError::Bind {
        address: config.listen.clone(),
        source,
    })?;
    let addr = listener.local_addr().map_err(|source| StartError::Bind {
        address: config.listen.clone(),
        source,
    })?;
    check_sources(&config)?;
    let fallback = registry::load(&config.data_dir).map_err(|problem| StartError::File {
        field: "data_dir".into(),
        problem,
    })?;
    let router = Arc::new(build(config)?);
    let ops = open_ops(&router, &credentials).await?;
    let mut tasks = JoinSet::new();
    let closing = Closing::default();
    let lanes = Arc::new(Lanes::start(lanes::count(router.config.lanes)).map_err(StartError::Lanes)?);
    let door = door::accept(Arc::clone(&router), listener, tls, Arc::clone(&lanes), closing.clone());
    tasks.spawn(door);
    tasks.spawn(registry::keep(Arc::clone(&router), fallback));
    let ringing = Arc::clone(&router);
    tasks.spawn(async move { ringing.alarms.ring().await });
    tasks.spawn(router.upstream.clone().expire());
    tasks.spawn(samples::compare(Arc::clone(&router)));
    if !router.config.index.is_empty() {
        let follower = Follower {
            view: Arc::clone(&router.view),
            nodes: router.config.index.clone(),
            credentials: credentials.clone(),
            name: router.name.clone(),
            cluster: router.config.cluster.clone(),
            sink: Arc::clone(&router) as Arc<dyn SoftSink>,
            metrics: router.metrics.clone(),
        };
        tasks.spawn(follower.run());
        tasks.spawn(soft::publish(Arc::clone(&router), credentials));
    }
    tracing::info!(%addr, router = router.name, "the router is listening");
    Ok(Running {
        addr,
        ops_addr: ops.as_ref().map(|ops| ops.addr),
        router,
        closing,
        tasks,
        _lanes: lanes,
        _ops: ops,
    })
}

/// Refuses what would start and then never serve: no engines from anywhere, or a tokenizer that isn't there.
fn check_sources(config: &Config) -> Result<(), ConfigError> {
    if config.index.is_empty() && config.engine.is_empty() {
        let problem = "names no node, and there is no [[engine]]; write one such as index = [\"http://127.0.0.1:7400\"], or \
                       list engines";
        return Err(ConfigError::new("index", problem.to_string()));
    }
    let of_pools = config.pool.iter().enumerate();
    let of_pools = of_pools.map(|(i, pool)| (format!("pool[{i}].tokenizer"), &pool.tokenizer));
    for (field, folder) in std::iter::once(("tokenizer".to_string(), &config.tokenizer)).chain(of_pools) {
        if !folder.is_empty() && !std::path::Path::new(folder).exists() {
            let problem = format!("{folder:?} doesn't exist; name the folder with the model's tokenizer.json");
            return Err(ConfigError::new(&field, problem));
        }
    }
    for (i, pool) in config.pool.iter().enumerate() {
        if !pool.chat_template.is_empty() && !std::path::Path::new(&pool.chat_template).is_file() {
            let problem = format!(
                "{:?} is no file; name the one that the engines' --chat-template names",
                pool.chat_template
            );
            return Err(ConfigError::new(&format!("pool[{i}].chat_template"), problem));
        }
    }
    Ok(())
}

/// Makes what requests share.
fn build(config: Config) -> Result<Router, StartError> {
    let name = if config.name.is_empty() {
        format!("router-{}", uuid::Uuid::new_v4().simple())
    } else {
        config.name.clone()
    };
    let boot = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_millis());
    let routing = Routing::new(RoutingConfig {
        router: RouterName(name.clone()),
        boot: u64::try_from(boot).unwrap_or(u64::MAX),
        seed: rand::random(),
        identity_seed: identity_seed(&config.cluster),
        policies: Vec::new(),
    });
    let mut routing = routing.map_err(|error| ConfigError::new("policy", error.to_string()))?;
    routing.set_view(ViewState::Absent);
    let tenants = Tenants::load(&config.tenant).map_err(|error| StartError::File {
        field: "tenant".into(),
        problem: error.to_string(),
    })?;
    let operator_token = match config.operator_token_file.as_str() {
        "" => None,
        path => Some(read_token(path)?),
    };
    let fleet_changed = Arc::new(Notify::new());
    Ok(Router {
        name,
        metrics: Metrics::new(),
        upstream: Upstream::new(
            lanes::count(config.lanes),
            Duration::from_millis(config.connect_timeout_ms),
            roots(&config)?,
        )?,
        engines: Arc::new(Engines::default()),
        fleet: ArcSwap::from_pointee(Fleet::default()),
        view: Arc::new(View::new(Arc::clone(&fleet_changed))),
        fleet_changed,
        routing: Mutex::new(routing),
        retries: Mutex::new(RetryBudget::default()),
        alarms: Alarms::default(),
        reservations_changed: Notify::new(),
        reused: Mutex::default(),
        tokens: DashMap::new(),
        asked_engines: crate::ask_engine::Asked::default(),
        tenants,
        operator_token,
        decisions: Decisions::default(),
        bodies: BodyGate::new(config.body_memory_bytes),
        body_limits: BodyLimits {
            bytes_max: config.max_body_bytes,
            timeout: config.body_timeout(),
            awaited: false,
        },
        started: Instant::now(),
        draining: AtomicBool::new(false),
        in_flight: InFlight::default(),
        config,
    })
}

/// Equal for all routers of a cluster, so that they agree where an identity belongs.
fn identity_seed(cluster: &str) -> u64 {
    cluster.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn read_token(path: &str) -> Result<Vec<u8>, StartError> {
    let wrong = |problem: String| StartError::File {
        field: "operator_token_file".into(),
        problem,
    };
    let text = std::fs::read(path).map_err(|e| wrong(format!("can't read {path}: {e}")))?;
    let token = text.trim_ascii();
    if token.len() < OPERATOR_TOKEN_BYTES_MIN {
        return Err(wrong(format!(
            "{path} holds {} bytes; give at least {OPERATOR_TOKEN_BYTES_MIN}",
            token.len()
        )));
    }
    Ok(token.to_vec())
}

/// Authorities that `https` engines are checked against.
fn roots(config: &Config) -> Result<rustls::RootCertStore, StartError> {
    use rustls::pki_types::pem::PemObject;
    let mut roots = rustls::RootCertStore::empty();
    let Some(path) = &config.security.tls_ca_file else {
        return Ok(roots);
    };
    let wrong = |problem: String| StartError::File {
        field: "security.tls_ca_file".into(),
        problem,
    };
    let pem = std::fs::read(path).map_err(|e| wrong(format!("can't read {}: {e}", path.display())))?;
    for certificate in rustls::pki_types::CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|e| wrong(format!("{} is no PEM file: {e}", path.display())))?;
        roots
            .add(certificate)
            .map_err(|e| wrong(format!("{}: {e}", path.display())))?;
    }
    Ok(roots)
}

async fn open_ops(router: &Arc<Router>, credentials: &Credentials) -> Result<Option<OpsServer>, StartError> {
    if router.config.ops_listen.is_empty() {
        return Ok(None);
    }
    let address: SocketAddr = router
        .config
        .ops_listen
        .parse()
        .map_err(|_| ConfigError::new("ops_listen", "is no address".to_string()))?;
    router.config.security.check_bind(address)?;
    let registry: SharedRegistry = router.metrics.registry.clone();
    let for_ready = Arc::clone(router);
    let (for_status, for_scrape) = (Arc::clone(router), Arc::clone(router));
    let state = OpsState {
        registry,
        ready: Box::new(move || door::ready(&for_ready)),
        status: Some(Box::new(move || operator::status(&for_status).to_string())),
        before_scrape: Some(Box::new(move || operator::refresh(&for_scrape))),
    };
    let guard = credentials.operators_guard(address)?.map(OpsGuard::from);
    let ops = serve_ops(address, state, guard)
        .await
        .map_err(|source| StartError::Bind {
            address: router.config.ops_listen.clone(),
            source,
        })?;
    Ok(Some(ops))
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
