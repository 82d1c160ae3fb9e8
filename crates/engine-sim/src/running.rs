//! Starting and stopping the process.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use cairn_proto::security::SecurityError;
use cairn_tokens::{EncodeError, LoadError, LoadOptions, ModelTokens};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::answer::Answers;
use crate::config::{Config, ConfigError};
use crate::engine::{Engine, LifeError};
use crate::{server, transfer};

/// How long a stop waits for streams to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Why the engine didn't start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration can't work.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A token or TLS file can't be used.
    #[error(transparent)]
    Security(#[from] SecurityError),
    /// An address can't be listened on.
    #[error("can't listen on {address}: {source}; choose another {field} or stop what uses it")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The configuration field.
        field: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The tokenizer can't be loaded.
    #[error("the tokenizer: {0}")]
    Tokenizer(#[from] LoadError),
    /// The tokenizer can't encode the answers' words.
    #[error("the tokenizer can't encode plain words: {0}; choose another tokenizer")]
    Answers(#[from] EncodeError),
    /// An event socket can't be opened, or the cache's shape is impossible.
    #[error("{0}; choose another events.endpoint or stop what uses it")]
    Events(String),
}

/// Where one rank's events are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventEndpoints {
    /// The live stream, as bound, or as connected to.
    pub live: String,
    /// The replay socket.
    pub replay: Option<String>,
}

/// A started engine.
pub struct Running {
    /// Where it answers HTTP.
    pub http: SocketAddr,
    /// Where decode engines pull blocks, while transfers are on.
    pub side_channel: Option<SocketAddr>,
    engine: Arc<Engine>,
    until: CancellationToken,
    tasks: TaskTracker,
}

/// Starts an engine.
pub fn start(config: Config) -> Pin<Box<dyn Future<Output = Result<Running, StartError>> + Send>> {
    // Boxed here, so that the whole role is compiled in this crate and not once more in each binary that starts it.
    Box::pin(open(config))
}

async fn open(config: Config) -> Result<Running, StartError> {
    config.validate()?;
    let credentials = config.security.load()?;
    let tls = credentials.rustls_server_config(&[b"http/1.1"])?.map(TlsAcceptor::from);
    let folder = config.tokenizer.clone();
    let load = move || match folder {
        Some(folder) => ModelTokens::load(&folder, LoadOptions::default()),
        None => ModelTokens::embedded(),
    };
    let tokens = tokio::task::spawn_blocking(load)
        .await
        .map_err(|error| StartError::Events(format!("loading the tokenizer was cut short: {error}")))??;
    let answers = Answers::new(&tokens, config.answers.tokens_min, config.answers.tokens_max)?;
    let listener = listen(config.listen, "listen").await?;
    let side = match config.transfer.enabled {
        true => Some(listen(config.transfer.listen, "transfer.listen").await?),
        false => None,
    };
    let http = local(&listener, config.listen, "listen")?;
    let side_channel = match &side {
        Some(side) => Some(local(side, config.transfer.listen, "transfer.listen")?),
        None => None,
    };
    let engine = match Engine::new(config, credentials, Arc::new(tokens), answers, side_channel).await {
        Ok(engine) => Arc::new(engine),
        Err(LifeError::Events(error)) => return Err(StartError::Events(error)),
        Err(LifeError::Model(error)) => return Err(ConfigError::Model(error).into()),
    };
    let (until, tasks) = (CancellationToken::new(), TaskTracker::new());
    tasks.spawn(server::serve(
        engine.clone(),
        listener,
        tls,
        until.clone(),
        tasks.clone(),
    ));
    if let Some(side) = side {
        tasks.spawn(transfer::serve(engine.clone(), side, until.clone()));
    }
    tracing::info!(%http, model = engine.config.model, "the simulated engine is ready");
    Ok(Running {
        http,
        side_channel,
        engine,
        until,
        tasks,
    })
}

async fn listen(address: SocketAddr, field: &'static str) -> Result<TcpListener, StartError> {
    TcpListener::bind(address)
        .await
        .map_err(|source| StartError::Listen { address, field, source })
}

fn local(listener: &TcpListener, address: SocketAddr, field: &'static str) -> Result<SocketAddr, StartError> {
    listener
        .local_addr()
        .map_err(|source| StartError::Listen { address, field, source })
}

impl Running {
    /// Where the ranks' events are, in the order of ranks; empty while events are off.
    #[must_use]
    pub fn events(&self) -> Vec<EventEndpoints> {
        let life = self.engine.life();
        let endpoints = life.ranks.iter().filter_map(|rank| {
            Some(EventEndpoints {
                live: rank.endpoint.clone()?,
                replay: rank.replay_endpoint.clone(),
            })
        });
        endpoints.collect()
    }

    /// Waits until the engine is told to stop; it doesn't end by itself.
    pub async fn wait(&mut self) {
        self.until.cancelled().await;
    }

    /// Lets requests end for a moment, then stops.
    pub async fn stop(self) {
        self.until.cancel();
        self.tasks.close();
        if tokio::time::timeout(STOP_TIMEOUT, self.tasks.wait()).await.is_err() {
            tracing::info!("streams were still open when the engine stopped");
        }
        self.engine.stop();
    }
}
