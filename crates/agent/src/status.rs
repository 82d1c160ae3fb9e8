//! What `/status` says, as JSON.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;

/// One engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EngineStatus {
    /// Family, empty until discovered.
    pub kind: String,
    /// Whether it answers.
    pub up: bool,
    /// Whether it sleeps.
    pub asleep: bool,
    /// Pool that it serves.
    pub pool: String,
    /// Model names.
    pub models: Vec<String>,
    /// Ranks.
    pub ranks: u32,
    /// The last trouble, for people.
    pub trouble: Option<String>,
}

/// One source.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SourceStatus {
    /// `unregistered`, `registered`, `held`, `refused` or `fenced`.
    pub state: &'static str,
    /// The index's id of it.
    pub source: Option<u32>,
    /// Its lifetime.
    pub incarnation: Option<u64>,
    /// Whether its stream is gap-free.
    pub exact: bool,
    /// Why not.
    pub reason: Option<&'static str>,
    /// Whether the event socket is connected.
    pub connected: bool,
    /// Where its events come from.
    pub events: Option<String>,
    /// Last applied engine seq. This and the two below are told as they change, everything else several times a second.
    pub engine_seq: Option<u64>,
    /// Changes that are in no batch yet, at most.
    pub outbox: u64,
    /// Seq of the last batch made in its lifetime: once a view has applied it, with an empty outbox, it has everything.
    pub batch_seq: Option<u64>,
    /// Blocks in the mirror.
    pub blocks: u64,
    /// Batches not yet acknowledged.
    pub unacked: u64,
    /// The last trouble, for people.
    pub trouble: Option<String>,
}

#[derive(Default, Serialize)]
struct Board {
    agent: String,
    host: String,
    index_node: String,
    index_connected: bool,
    engines: BTreeMap<String, EngineStatus>,
    sources: BTreeMap<String, SourceStatus>,
}

/// Where tasks write what they see; cheap to clone.
#[derive(Clone, Default)]
pub struct StatusBoard(Arc<Mutex<Board>>);

impl StatusBoard {
    /// An empty board of this agent.
    #[must_use]
    pub fn new(agent: &str, host: &str) -> Self {
        let board = Board {
            agent: agent.to_owned(),
            host: host.to_owned(),
            ..Board::default()
        };
        Self(Arc::new(Mutex::new(board)))
    }

    /// Changes an engine's entry.
    pub fn engine(&self, url: &str, change: impl FnOnce(&mut EngineStatus)) {
        change(self.0.lock().engines.entry(url.to_owned()).or_default());
    }

    /// Changes a source's entry.
    pub fn source(&self, name: &str, change: impl FnOnce(&mut SourceStatus)) {
        change(self.0.lock().sources.entry(name.to_owned()).or_default());
    }

    /// A source is gone.
    pub fn drop_source(&self, name: &str) {
        self.0.lock().sources.remove(name);
    }

    /// All sources now.
    #[must_use]
    pub fn sources(&self) -> BTreeMap<String, SourceStatus> {
        self.0.lock().sources.clone()
    }

    /// All engines now.
    #[must_use]
    pub fn engines(&self) -> BTreeMap<String, EngineStatus> {
        self.0.lock().engines.clone()
    }

    /// As JSON, with the state of the stream to the index.
    #[must_use]
    pub fn json(&self, index_node: String, index_connected: bool) -> String {
        let mut board = self.0.lock();
        board.index_node = index_node;
        board.index_connected = index_connected;
        serde_json::to_string(&*board).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))
    }

    /// Whether the agent does its work, else why not.
    ///
    /// # Errors
    /// Names the first thing that is missing.
    pub fn ready(&self, index_connected: bool) -> Result<(), String> {
        if !index_connected {
            return Err("no index node answers".to_owned());
        }
        let board = self.0.lock();
        match board.sources.iter().find(|(_, source)| source.state != "registered") {
            Some((name, source)) => Err(format!("source {name} is {}", source.state)),
            None => Ok(()),
        }
    }
}
