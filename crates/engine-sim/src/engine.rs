//! The process as its endpoints see it: one lifetime of ranks at a time, adapters, and switches for failures.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use cairn_proto::security::Credentials;
use cairn_replay::engine_model::InvalidModel;
use cairn_tokens::ModelTokens;
use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;

use crate::answer::Answers;
use crate::config::{ADAPTERS_MAX, AdapterConfig, Config};
use crate::events::{Encoder, Losses, Publisher, PublisherSetup};
use crate::rank::{self, Command, Rank, RankSetup, RequestIds};

/// One lifetime of the engine: what a restart replaces.
pub(crate) struct Life {
    pub(crate) ranks: Vec<Rank>,
    /// Identity on the side channel.
    pub(crate) engine_id: String,
    /// Unix seconds.
    pub(crate) started: f64,
    until: CancellationToken,
}

/// Why a lifetime can't begin.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LifeError {
    #[error("the event socket: {0}")]
    Events(String),
    #[error(transparent)]
    Model(#[from] InvalidModel),
}

/// How much of the engine stands still.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Hang {
    /// Nothing.
    None = 0,
    /// Computing; every endpoint still answers what needs no computing.
    Core = 1,
    /// Everything: connections are taken and never answered.
    All = 2,
}

/// Switches for failures.
#[derive(Default)]
pub(crate) struct Faults {
    /// Requests still to refuse with 503; negative until told otherwise.
    pub(crate) unavailable: AtomicI64,
    /// Streams still to cut; negative until told otherwise.
    pub(crate) cut_streams: AtomicI64,
    /// Chunks of a stream before its cut.
    pub(crate) cut_after: AtomicUsize,
    /// Connections are closed without an answer, as while a process is down.
    pub(crate) down: AtomicBool,
    hang: AtomicU8,
}

impl Faults {
    pub(crate) fn hang(&self) -> Hang {
        match self.hang.load(Ordering::Relaxed) {
            0 => Hang::None,
            1 => Hang::Core,
            _ => Hang::All,
        }
    }

    pub(crate) fn set_hang(&self, hang: Hang) {
        self.hang.store(hang as u8, Ordering::Relaxed);
    }

    /// Uses up one of a switch's counts; whether the fault happens.
    pub(crate) fn takes_one(counter: &AtomicI64) -> bool {
        let take = |left: i64| (left > 0).then(|| left - 1);
        match counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => true,
            Err(left) => left < 0,
        }
    }
}

/// Everything that endpoints share.
pub(crate) struct Engine {
    pub(crate) config: Config,
    pub(crate) credentials: Credentials,
    pub(crate) tokens: Arc<ModelTokens>,
    pub(crate) answers: Answers,
    pub(crate) ids: RequestIds,
    pub(crate) faults: Faults,
    pub(crate) losses: Vec<Arc<Losses>>,
    pub(crate) sleeping: AtomicBool,
    /// Requests being served.
    pub(crate) load: AtomicUsize,
    pub(crate) side_channel: Option<SocketAddr>,
    /// Unix seconds at which the process began.
    pub(crate) created: u64,
    adapters: RwLock<Vec<AdapterConfig>>,
    life: RwLock<Arc<Life>>,
    restarting: tokio::sync::Mutex<()>,
}

impl Engine {
    /// Begins the first lifetime.
    pub(crate) async fn new(
        config: Config,
        credentials: Credentials,
        tokens: Arc<ModelTokens>,
        answers: Answers,
        side_channel: Option<SocketAddr>,
    ) -> Result<Self, LifeError> {
        let losses: Vec<Arc<Losses>> = (0..config.ranks).map(|_| Arc::default()).collect();
        let life = begin(&config, &losses, None).await?;
        Ok(Self {
            adapters: RwLock::new(config.adapters.clone()),
            life: RwLock::new(Arc::new(life)),
            faults: Faults::default(),
            ids: RequestIds::default(),
            sleeping: AtomicBool::new(false),
            load: AtomicUsize::new(0),
            created: unix_seconds() as u64,
            restarting: tokio::sync::Mutex::default(),
            losses,
            config,
            credentials,
            tokens,
            answers,
            side_channel,
        })
    }

    /// The present lifetime.
    pub(crate) fn life(&self) -> Arc<Life> {
        self.life.read().clone()
    }

    /// Ends everything.
    pub(crate) fn stop(&self) {
        self.life().until.cancel();
    }

    /// Kills the present lifetime with all its requests and begins an empty one on the same ports.
    pub(crate) async fn restart(&self, down: std::time::Duration) -> Result<(), LifeError> {
        let _one_at_a_time = self.restarting.lock().await;
        let old = self.life();
        self.faults.down.store(true, Ordering::Relaxed);
        old.until.cancel();
        tokio::time::sleep(down).await;
        let begun = begin(&self.config, &self.losses, Some(&old)).await;
        self.faults.down.store(false, Ordering::Relaxed);
        self.sleeping.store(false, Ordering::Relaxed);
        self.faults.set_hang(Hang::None);
        *self.life.write() = Arc::new(begun?);
        *self.adapters.write() = self.config.adapters.clone();
        Ok(())
    }

    /// Sends a command to every rank of the present lifetime.
    pub(crate) async fn tell_all(&self, command: impl Fn() -> Command) {
        for rank in &self.life().ranks {
            // A rank that is gone was replaced by a restart, which has its own defaults.
            let _ = rank.send(command()).await;
        }
    }

    /// Loaded adapters.
    pub(crate) fn adapters(&self) -> Vec<AdapterConfig> {
        self.adapters.read().clone()
    }

    /// Whether an adapter is loaded.
    pub(crate) fn has_adapter(&self, name: &str) -> bool {
        self.adapters.read().iter().any(|adapter| adapter.name == name)
    }

    /// Loads an adapter; the error says why not.
    pub(crate) fn load_adapter(&self, adapter: AdapterConfig) -> Result<(), String> {
        let mut adapters = self.adapters.write();
        if adapter.name == self.config.model || adapters.iter().any(|known| known.name == adapter.name) {
            return Err(format!("the adapter `{}` is already loaded", adapter.name));
        }
        if adapters.len() >= ADAPTERS_MAX {
            return Err(format!("{ADAPTERS_MAX} adapters are loaded already; unload one first"));
        }
        adapters.push(adapter);
        Ok(())
    }

    /// Unloads an adapter; `false` when it isn't loaded.
    pub(crate) fn unload_adapter(&self, name: &str) -> bool {
        let mut adapters = self.adapters.write();
        let before = adapters.len();
        adapters.retain(|adapter| adapter.name != name);
        adapters.len() < before
    }
}

async fn begin(config: &Config, losses: &[Arc<Losses>], before: Option<&Life>) -> Result<Life, LifeError> {
    let until = CancellationToken::new();
    let seed = if config.seed == 0 { rand::random() } else { config.seed };
    let mut ranks = Vec::with_capacity(config.ranks as usize);
    for (number, losses) in losses.iter().enumerate() {
        let old = before.and_then(|life| life.ranks.get(number));
        let events = if config.events.enabled {
            let events = &config.events;
            let endpoint = old.and_then(|rank| rank.endpoint.clone());
            let replay = old.and_then(|rank| rank.replay_endpoint.clone());
            let wants_replay = !events.replay_endpoint.is_empty();
            let encoder = Encoder::new(
                events.wire,
                events.hashes,
                events.self_describing,
                config.cache.block_size,
                number as u32,
            );
            let setup = PublisherSetup {
                endpoint: endpoint.unwrap_or_else(|| of_rank(&events.endpoint, number as u16)),
                replay_endpoint: wants_replay
                    .then(|| replay.unwrap_or_else(|| of_rank(&events.replay_endpoint, number as u16))),
                encoder,
                losses: losses.clone(),
            };
            Some(Publisher::open(events, setup).await.map_err(LifeError::Events)?)
        } else {
            None
        };
        ranks.push(rank::spawn(RankSetup {
            model: config.model_config(seed),
            speed: config.timing.speed,
            events,
            bind_events: config.events.bind,
            losses: losses.clone(),
            until: until.clone(),
        })?);
    }
    let engine_id = uuid::Uuid::new_v4().to_string();
    Ok(Life {
        ranks,
        engine_id,
        started: unix_seconds(),
        until,
    })
}

/// Rank r's endpoint: the port plus r, or a free port where none is named.
fn of_rank(endpoint: &str, rank: u16) -> String {
    match endpoint
        .rsplit_once(':')
        .and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)))
    {
        Some((host, port)) if port != 0 => format!("{host}:{}", port.saturating_add(rank)),
        Some(_) | None => endpoint.to_owned(),
    }
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}
