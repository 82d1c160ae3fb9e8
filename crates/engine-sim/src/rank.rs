//! One data-parallel rank in real time: a task that owns an engine model and its event publisher.

mod task;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use cairn_replay::engine_model::{Counters, Gauges, Micros, Output, Request, RequestId, SubmitError};
use tokio::sync::{mpsc, oneshot};

use crate::events::Publisher;
use crate::histogram::Histograms;
use crate::transfer::RemoteKv;

pub(crate) use task::{RankSetup, spawn};

/// Commands that wait for a rank's task; senders wait when it is full.
const COMMANDS_MAX: usize = 4_096;

/// What a rank's task is asked to do.
pub(crate) enum Command {
    /// Take a request.
    Submit(Box<Submission>),
    /// Drop a request whose client went away.
    Cancel(RequestId),
    /// A transfer for a request ended.
    TransferDone {
        /// Whose.
        id: RequestId,
        /// Whether the blocks are there.
        succeeded: bool,
    },
    /// A decode engine pulls held blocks; answers how many blocks there were.
    Pull {
        /// The prefill request.
        id: RequestId,
        /// `None` when nothing is held under that id.
        answer: oneshot::Sender<Option<()>>,
    },
    /// Empty the prefix cache.
    Reset {
        /// The host-memory tier too.
        external: bool,
        /// Preempt what runs first.
        preempt: bool,
        /// Whether it was done.
        answer: oneshot::Sender<bool>,
    },
    /// Stop or resume computing.
    Pause(bool),
    /// Stretch steps.
    Slow(f64),
    /// Change the event stream.
    Events(EventsCommand),
    /// Report the state.
    Snapshot(oneshot::Sender<Snapshot>),
}

/// Changes of the event stream.
pub(crate) enum EventsCommand {
    /// Close the live socket.
    Kill,
    /// Open it again on the old endpoint.
    Reopen,
    /// Empty the replay buffer.
    LoseReplay,
}

/// A request on its way in.
pub(crate) struct Submission {
    /// For the model.
    pub(crate) request: Request,
    /// Which of the client's choices it is.
    pub(crate) choice: u32,
    /// Where tokens go. Unbounded in form; at most one message a token of the answer.
    pub(crate) outputs: mpsc::UnboundedSender<(u32, Output)>,
    /// Where the KV comes from, for a decode leg.
    pub(crate) remote: Option<RemoteKv>,
    /// Whether it was taken.
    pub(crate) taken: oneshot::Sender<Result<(), SubmitError>>,
}

/// State of a rank, for metrics and tests.
#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot {
    pub(crate) counters: Counters,
    pub(crate) gauges: Gauges,
    pub(crate) histograms: Histograms,
    pub(crate) next_seq: u64,
    pub(crate) dropped_batches: u64,
}

/// Handle of a running rank.
#[derive(Clone)]
pub(crate) struct Rank {
    commands: mpsc::Sender<Command>,
    /// Requests inside, for choosing the least loaded rank.
    pub(crate) inside: Arc<AtomicUsize>,
    /// Where its events are.
    pub(crate) endpoint: Option<String>,
    /// Where its replay is.
    pub(crate) replay_endpoint: Option<String>,
}

/// The rank's lifetime ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the engine was restarted")]
pub(crate) struct Gone;

impl Rank {
    pub(crate) async fn send(&self, command: Command) -> Result<(), Gone> {
        self.commands.send(command).await.map_err(|_| Gone)
    }

    /// Asks for the state.
    pub(crate) async fn snapshot(&self) -> Result<Snapshot, Gone> {
        let (answer, reply) = oneshot::channel();
        self.send(Command::Snapshot(answer)).await?;
        reply.await.map_err(|_| Gone)
    }

    /// A guard that takes a request out again when it is dropped.
    pub(crate) fn guard(&self, id: RequestId) -> CancelOnDrop {
        self.inside.fetch_add(1, Ordering::Relaxed);
        CancelOnDrop {
            rank: self.clone(),
            id,
            finished: false,
        }
    }
}

/// Cancels its request unless it finished.
pub(crate) struct CancelOnDrop {
    rank: Rank,
    id: RequestId,
    finished: bool,
}

impl CancelOnDrop {
    /// The request ended by itself.
    pub(crate) fn finished(&mut self) {
        self.finished = true;
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.rank.inside.fetch_sub(1, Ordering::Relaxed);
        if self.finished {
            return;
        }
        if let Err(mpsc::error::TrySendError::Full(command)) = self.rank.commands.try_send(Command::Cancel(self.id)) {
            // A full queue must not leave the request running for nobody.
            let commands = self.rank.commands.clone();
            tokio::spawn(async move { commands.send(command).await });
        }
    }
}

/// Numbers requests across ranks and lifetimes of a process.
#[derive(Default)]
pub(crate) struct RequestIds(AtomicU64);

impl RequestIds {
    pub(crate) fn next(&self) -> RequestId {
        RequestId(self.0.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

/// Requests inside a rank with their clients.
#[derive(Default)]
struct Clients {
    waiting: HashMap<RequestId, Client>,
}

struct Client {
    choice: u32,
    outputs: mpsc::UnboundedSender<(u32, Output)>,
    remote: Option<RemoteKv>,
    arrived: Micros,
    last_token_at: Option<Micros>,
}

/// The publisher, absent while events are off.
type Events = Option<Publisher>;
