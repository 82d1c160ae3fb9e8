//! Starting and stopping an index node.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use cairn_proto::security::{Credentials, SecurityError};
use cairn_proto::v1;
use cairn_raft_store::{Consensus, OpenError, Options, Retention};
use cairn_telemetry::{OpsGuard, OpsServer, OpsState, SharedRegistry, serve_ops};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::TcpIncoming;

use crate::batcher::Batcher;
use crate::bootstrap::{self, BootstrapError};
use crate::config::{Config, ConfigError, bare_address};
use crate::feed_log::FeedLog;
use crate::feed_snapshot::FeedSnapshots;
use crate::leadership;
use crate::leases::{self, Leases};
use crate::metrics::Metrics;
use crate::node::Node;
use crate::peers::Peers;
use crate::service;
use crate::soft::SoftHub;
use crate::soft_relay;

/// How long open streams may take to end at a stop.
const STOP_PATIENCE: Duration = Duration::from_secs(3);
const MIB: u64 = 1 << 20;

/// Why an index node didn't start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A security file.
    #[error(transparent)]
    Security(#[from] SecurityError),
    /// The address is taken or not this host's.
    #[error("can't listen on {address}; stop what uses it or change `{field}`")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The setting.
        field: &'static str,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// Data directory, log or snapshot.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The node has no place in its cluster.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// The gRPC server ended.
    #[error("the gRPC server ended: {0}")]
    Server(String),
    /// The consensus core ended.
    #[error("the node can't go on: {0}")]
    Core(String),
}

/// A running index node.
pub struct Running {
    /// Where gRPC is served.
    pub address: SocketAddr,
    /// Where `/metrics`, `/live` and `/ready` are served.
    pub ops_address: Option<SocketAddr>,
    node: Arc<Node>,
    stopping: CancellationToken,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
    fatal: watch::Receiver<Option<String>>,
    _ops: Option<OpsServer>,
}

/// Starts an index node; it serves when this returns, and becomes ready once a leader is known.
///
/// # Errors
/// [`StartError`], naming cause and remedy.
pub fn start(config: Config) -> Pin<Box<dyn Future<Output = Result<Running, StartError>> + Send>> {
    // Boxed here, so that the whole role is compiled in this crate and not once more in each binary that starts it.
    Box::pin(open(config))
}

async fn open(config: Config) -> Result<Running, StartError> {
    config.validate()?;
    let address = config.listen;
    let bound = TcpListener::bind(address).await;
    let listener = bound.map_err(|source| StartError::Bind {
        address,
        field: "listen",
        source,
    })?;
    start_on(config, listener).await
}

/// Makes a stopped node the only member of its cluster, with all that it has; for a quorum that is lost for good.
///
/// # Errors
/// [`StartError`], naming cause and remedy.
pub async fn recover(config: Config) -> Result<(), StartError> {
    config.validate()?;
    let advertise = advertised(&config, config.listen);
    cairn_raft_store::recover_alone(options(&config), &advertise).await?;
    Ok(())
}

/// Like [`start`], on a listener that is bound already.
///
/// # Errors
/// As [`start`].
pub async fn start_on(mut config: Config, listener: TcpListener) -> Result<Running, StartError> {
    config.validate()?;
    let credentials = Arc::new(config.security.load()?);
    let unknown = |source| StartError::Bind {
        address: config.listen,
        field: "listen",
        source,
    };
    let address = listener.local_addr().map_err(unknown)?;
    let advertise = advertised(&config, address);
    config.advertise.clone_from(&advertise);

    let registry = SharedRegistry::new();
    let metrics = Metrics::new(&registry);
    let peers = Peers::new(credentials.clone());
    let feed = Arc::new(FeedLog::default());
    let consensus = Consensus::open(options(&config), Arc::new(peers.clone()), feed.clone()).await?;
    let leadership = leadership::follow(consensus.clone());
    let stopping = CancellationToken::new();
    let window = Duration::from_millis(config.batch_window_ms);
    let node = Arc::new(Node {
        batcher: Batcher::start(consensus.clone(), window, metrics.clone()),
        consensus,
        leadership,
        peers,
        feed,
        snapshots: FeedSnapshots::default(),
        soft: Arc::new(SoftHub::default()),
        leases: Leases::default(),
        metrics,
        stopping: stopping.clone(),
        config,
    });
    let server = credentials.server_builder()?;
    let router = service::router(server, node.clone(), &credentials);
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let stopped = stopping.clone().cancelled_owned();
    let server = tokio::spawn(router.serve_with_incoming_shutdown(incoming, stopped));

    let (fatal_sender, fatal) = watch::channel(None);
    tokio::spawn(watch_core(node.clone(), fatal_sender.clone()));
    tokio::spawn(leases::run(Arc::downgrade(&node)));
    tokio::spawn(soft_relay::run(Arc::downgrade(&node)));
    tokio::spawn(bootstrap::name_cluster(Arc::downgrade(&node)));
    tokio::spawn(find_place(node.clone(), advertise, fatal_sender));

    let ops = match node.config.ops_listen {
        Some(ops) => Some(serve(ops, registry, &node, &credentials).await?),
        None => None,
    };
    tracing::info!(node = node.config.node_id, cluster = node.config.cluster, %address, "index node started");
    let ops_address = ops.as_ref().map(|ops| ops.addr);
    Ok(Running {
        address,
        ops_address,
        node,
        stopping,
        server,
        fatal,
        _ops: ops,
    })
}

fn advertised(config: &Config, bound: SocketAddr) -> String {
    let listed = config.peers.iter().find(|peer| peer.id == config.node_id);
    match (config.advertise.as_str(), listed) {
        ("", Some(peer)) => bare_address(&peer.address).to_owned(),
        ("", None) => bound.to_string(),
        (given, _) => bare_address(given).to_owned(),
    }
}

fn options(config: &Config) -> Options {
    let store = rand::random::<u64>();
    Options {
        heartbeat: Duration::from_millis(config.heartbeat_ms),
        election: Duration::from_millis(config.election_ms),
        retention: Retention {
            snapshot_after_bytes: config.snapshot_after_mib * MIB,
            keep_log_for: Duration::from_secs(config.keep_log_s),
            keep_log_bytes_max: config.keep_log_mib_max * MIB,
            ..Retention::default()
        },
        free_bytes_min: config.free_disk_mib_min * MIB,
        ..Options::new(config.data_dir.clone(), &config.cluster, config.node_id, store)
    }
}

async fn serve(
    ops: SocketAddr,
    registry: SharedRegistry,
    node: &Arc<Node>,
    credentials: &Credentials,
) -> Result<OpsServer, StartError> {
    let guard = credentials.operators_guard(ops)?.map(OpsGuard::from);
    let (ready, scraped) = (Arc::downgrade(node), Arc::downgrade(node));
    let state = OpsState {
        registry,
        ready: Box::new(move || match ready.upgrade() {
            Some(node) => node.ready(),
            None => Err("stopped".to_owned()),
        }),
        status: None,
        before_scrape: Some(Box::new(move || {
            if let Some(node) = scraped.upgrade() {
                node.refresh_metrics();
            }
        })),
    };
    serve_ops(ops, state, guard).await.map_err(|source| StartError::Bind {
        address: ops,
        field: "ops_listen",
        source,
    })
}

async fn find_place(node: Arc<Node>, advertise: String, fatal: watch::Sender<Option<String>>) {
    let placed = tokio::select! {
        () = node.stopping.cancelled() => return,
        placed = bootstrap::run(&node.config, &node.consensus, &node.peers, &advertise) => placed,
    };
    if let Err(error) = placed {
        tracing::error!(%error, "this node can't take its place");
        fatal.send_replace(Some(error.to_string()));
    }
}

/// Reports the end of the consensus core, unless the node is being stopped.
async fn watch_core(node: Arc<Node>, fatal: watch::Sender<Option<String>>) {
    let mut leadership = node.leadership.clone();
    let stopped = async {
        match leadership.wait_for(|now| now.stopped.is_some()).await {
            Ok(now) => now.stopped.clone().unwrap_or_default(),
            Err(_) => "the consensus core has ended".to_owned(),
        }
    };
    tokio::select! {
        () = node.stopping.cancelled() => {}
        why = stopped => {
            tracing::error!(why, "the consensus core has ended");
            fatal.send_replace(Some(why));
        }
    }
}

impl Running {
    /// Ends only when the node can't go on.
    ///
    /// # Errors
    /// Always: why.
    pub async fn wait(&mut self) -> Result<(), StartError> {
        tokio::select! {
            ended = &mut self.server => {
                let why = match ended {
                    Ok(Ok(())) => "it was stopped".to_owned(),
                    Ok(Err(error)) => error.to_string(),
                    Err(error) => error.to_string(),
                };
                Err(StartError::Server(why))
            }
            fatal = self.fatal.wait_for(Option::is_some) => {
                let why = fatal.map(|why| why.clone().unwrap_or_default());
                Err(StartError::Core(why.unwrap_or_else(|_| "its watcher has ended".to_owned())))
            }
        }
    }

    /// Whether the node can serve agents and routers now, and why not.
    ///
    /// # Errors
    /// The reason.
    pub fn ready(&self) -> Result<(), String> {
        self.node.ready()
    }

    /// This node's own word about itself.
    #[must_use]
    pub fn member(&self) -> v1::Member {
        self.node.own_member()
    }

    /// Ends streams, leaves the group until it is started again, closes the store.
    pub async fn stop(mut self) {
        self.stopping.cancel();
        if tokio::time::timeout(STOP_PATIENCE, &mut self.server).await.is_err() {
            self.server.abort();
        }
        let consensus = self.node.consensus.clone();
        drop(self);
        if !consensus.close().await {
            tracing::warn!("something still holds the store; its directory is free once this process ends");
        }
    }
}
