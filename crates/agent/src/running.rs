//! Starts and stops an agent.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cairn_proto::security::{Credentials, SecurityError};
use cairn_telemetry::{OpsGuard, OpsServer, OpsState, SharedRegistry, serve_ops};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::config::{Config, ConfigError, field};
use crate::engine::{self, Reporter};
use crate::engine_http::{EngineHttp, EngineHttpError};
use crate::events::Hubs;
use crate::identity::{DataDir, DataDirError, host_name};
use crate::metrics::Metrics;
use crate::nodes::IndexNodes;
use crate::soft::SoftPublisher;
use crate::source::Surroundings;
use crate::status::{EngineStatus, SourceStatus, StatusBoard};
use crate::uplink::Uplink;

/// Why an agent didn't start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration can't work.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// The data directory can't be used.
    #[error("{0}")]
    DataDir(#[from] DataDirError),
    /// Token, certificates or an address are unfit.
    #[error("{0}")]
    Security(#[from] SecurityError),
    /// An engine's URL or files are unfit.
    #[error("{0}")]
    Engine(#[from] EngineHttpError),
    /// The operators' port can't be opened.
    #[error("cannot listen on {address} (ops.listen): {source}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// The cause.
        source: std::io::Error,
    },
}

/// A running agent; dropping it without [`Running::stop`] leaves its last seconds out of the checkpoints.
pub struct Running {
    /// Where `/metrics`, `/live`, `/ready` and `/status` are.
    pub ops: SocketAddr,
    /// Id that the agent registers under.
    pub agent_id: String,
    registry: SharedRegistry,
    board: StatusBoard,
    stop: CancellationToken,
    engines: JoinSet<()>,
    uplink: Uplink,
    _ops: OpsServer,
    _data_dir: DataDir,
}

/// Starts an agent; engines and index nodes may come later.
///
/// # Errors
/// When the configuration, the data directory, a file or the operators' port can't be used.
pub fn start(config: Config) -> Pin<Box<dyn Future<Output = Result<Running, StartError>> + Send>> {
    // Boxed here, so that the whole role is compiled in this crate and not once more in each binary that starts it.
    Box::pin(open(config))
}

async fn open(config: Config) -> Result<Running, StartError> {
    config.validate()?;
    if config.engines.is_empty() {
        return Err(field(
            "engine",
            "none is named, so there is nothing to follow; add an [[engine]] with url = \"http://127.0.0.1:8000\"",
        )
        .into());
    }
    let credentials = config.security.load()?;
    let clients = config
        .engines
        .iter()
        .map(|engine| EngineHttp::new(&engine.url, engine.api_key_file.as_deref(), engine.ca_file.as_deref()))
        .collect::<Result<Vec<_>, _>>()?;
    let host = host_name(&config.agent);
    let data_dir = DataDir::open(&config.data_dir)?;
    let agent_id = data_dir.agent_id(&config.agent, &host)?;
    let registry = SharedRegistry::new();
    let metrics = Metrics::register(&registry);
    let board = StatusBoard::new(&agent_id, &host);
    let nodes = Arc::new(IndexNodes::new(&config.index, credentials.clone())?);
    let uplink = Uplink::start(
        nodes.clone(),
        metrics.clone(),
        Duration::from_millis(config.poll.audit_ms),
    );
    let ops = open_ops(config.ops.listen, &credentials, &registry, &board, &uplink).await?;
    let around = Surroundings {
        clock: Clock::start(),
        limits: config.limits,
        poll: config.poll,
        uplink: uplink.clone(),
        hubs: Hubs::new(config.limits),
        metrics,
        board: board.clone(),
        checkpoints: data_dir.checkpoints(),
        sample_ratio: config.telemetry.sample_ratio,
    };
    let boot = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_millis();
    let reporter = Reporter {
        agent: agent_id.clone(),
        host,
        boot: u64::try_from(boot).unwrap_or(u64::MAX),
        soft: SoftPublisher::start(nodes),
    };
    let stop = CancellationToken::new();
    let mut engines = JoinSet::new();
    for (engine, http) in config.engines.into_iter().zip(clients) {
        engines.spawn(engine::run(
            engine,
            http,
            around.clone(),
            reporter.clone(),
            stop.clone(),
        ));
    }
    tracing::info!(agent = %agent_id, ops = %ops.addr, "the agent runs");
    Ok(Running {
        ops: ops.addr,
        agent_id,
        registry,
        board,
        stop,
        engines,
        uplink,
        _ops: ops,
        _data_dir: data_dir,
    })
}

async fn open_ops(
    address: SocketAddr,
    credentials: &Credentials,
    registry: &SharedRegistry,
    board: &StatusBoard,
    uplink: &Uplink,
) -> Result<OpsServer, StartError> {
    let (ready_board, ready_uplink) = (board.clone(), uplink.state());
    let (status_board, status_uplink) = (board.clone(), uplink.clone());
    let state = OpsState {
        registry: registry.clone(),
        ready: Box::new(move || ready_board.ready(ready_uplink.borrow().up)),
        status: Some(Box::new(move || {
            let up = status_uplink.state().borrow().up;
            status_board.json(status_uplink.node(), up)
        })),
        before_scrape: None,
    };
    let guard = credentials.operators_guard(address)?.map(OpsGuard::from);
    serve_ops(address, state, guard)
        .await
        .map_err(|source| StartError::Listen { address, source })
}

impl Running {
    /// The agent's metrics.
    #[must_use]
    pub fn registry(&self) -> &SharedRegistry {
        &self.registry
    }

    /// Its sources by name.
    #[must_use]
    pub fn sources(&self) -> BTreeMap<String, SourceStatus> {
        self.board.sources()
    }

    /// Its engines by URL.
    #[must_use]
    pub fn engines(&self) -> BTreeMap<String, EngineStatus> {
        self.board.engines()
    }

    /// Whether the index answers and every source is registered.
    ///
    /// # Errors
    /// Says what is missing.
    pub fn ready(&self) -> Result<(), String> {
        self.board.ready(self.uplink.state().borrow().up)
    }

    /// Ends when an engine's task broke, which nothing but a fault in the agent brings about.
    pub async fn wait(&mut self) {
        while let Some(ended) = self.engines.join_next().await {
            if let Err(error) = ended {
                tracing::error!(%error, "an engine's task broke");
                return;
            }
        }
        std::future::pending().await
    }

    /// Stops following, writes the last checkpoints and closes everything.
    pub async fn stop(mut self) {
        self.stop.cancel();
        while self.engines.join_next().await.is_some() {}
    }
}
