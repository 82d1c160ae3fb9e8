//! Asks an engine's replay socket for kept batches, one question at a time.

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use crate::config::Limits;
use crate::wire::{self, ReplayFrames};
use crate::zmtp::{Connection, Endpoint, Item, SocketType, ZmtpError};

/// Engines answer between steps; a silent socket for this long will not answer any more.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Answers between the socket and the source. An engine's ROUTER drops what its own queue can't hold, so the socket is
/// read as fast as the source takes it and this is deep: all that engines keep.
const QUEUE_ANSWERS: usize = 10_000;
/// One question is answered with at most this many batches before it is cut: ten times what engines keep.
const MAX_ANSWERS: usize = 100_000;
/// Questions that wait; a source asks one at a time.
const QUEUE_QUESTIONS: usize = 4;

/// What came of a question.
#[derive(Debug)]
pub enum ReplayAnswer {
    /// One kept batch, undecoded.
    Batch {
        /// The engine's counter.
        seq: u64,
        /// Its payload.
        payload: Bytes,
    },
    /// A frame that no engine sends.
    Skipped(&'static str),
    /// The end marker came.
    Complete,
    /// It won't come.
    Failed(ZmtpError),
}

/// The client of one replay socket; ends when dropped.
pub struct ReplayClient {
    questions: mpsc::Sender<u64>,
    answers: mpsc::Receiver<ReplayAnswer>,
    _task: AbortOnDropHandle<()>,
}

impl ReplayClient {
    /// A client for the socket at `endpoint`; it connects at the first question.
    #[must_use]
    pub fn new(endpoint: Endpoint, limits: Limits) -> Self {
        let (questions, asked) = mpsc::channel(QUEUE_QUESTIONS);
        let (given, answers) = mpsc::channel(QUEUE_ANSWERS);
        let task = AbortOnDropHandle::new(tokio::spawn(serve(endpoint, limits.max_message_bytes, asked, given)));
        Self {
            questions,
            answers,
            _task: task,
        }
    }

    /// Asks for every kept batch from `from` on; `false` where too many questions wait.
    #[must_use]
    pub fn ask(&self, from: u64) -> bool {
        self.questions.try_send(from).is_ok()
    }

    /// The next answer.
    pub async fn next(&mut self) -> Option<ReplayAnswer> {
        self.answers.recv().await
    }

    /// The next answer if there is one already.
    pub fn try_next(&mut self) -> Option<ReplayAnswer> {
        self.answers.try_recv().ok()
    }
}

async fn serve(
    endpoint: Endpoint,
    max_message_bytes: usize,
    mut asked: mpsc::Receiver<u64>,
    given: mpsc::Sender<ReplayAnswer>,
) {
    let mut connection: Option<Connection> = None;
    while let Some(from) = asked.recv().await {
        let kept = connection.is_some();
        let mut end = answer(&endpoint, max_message_bytes, &mut connection, from, &given).await;
        // A kept connection may have died since the last question; a fresh one says whether the engine is there.
        if kept && matches!(end, Err(ref error) if is_lost(error)) {
            connection = None;
            end = answer(&endpoint, max_message_bytes, &mut connection, from, &given).await;
        }
        let last = match end {
            Ok(()) => ReplayAnswer::Complete,
            Err(error) => {
                // What it may still send belongs to no later question.
                connection = None;
                ReplayAnswer::Failed(error)
            }
        };
        if given.send(last).await.is_err() {
            return;
        }
    }
}

fn is_lost(error: &ZmtpError) -> bool {
    matches!(error, ZmtpError::Io(_) | ZmtpError::Closed)
}

async fn answer(
    endpoint: &Endpoint,
    max_message_bytes: usize,
    slot: &mut Option<Connection>,
    from: u64,
    given: &mpsc::Sender<ReplayAnswer>,
) -> Result<(), ZmtpError> {
    let connection = match slot {
        Some(connection) => connection,
        None => slot.insert(Connection::connect(endpoint, SocketType::Dealer, max_message_bytes).await?),
    };
    let question = wire::replay_request(from);
    let frames: Vec<&[u8]> = question.iter().map(Vec::as_slice).collect();
    connection.send(&frames).await?;
    for _ in 0..MAX_ANSWERS {
        let item = timeout(ANSWER_TIMEOUT, connection.next())
            .await
            .map_err(|_| ZmtpError::Timeout(u64::try_from(ANSWER_TIMEOUT.as_millis()).unwrap_or(u64::MAX)))??;
        let answer = match &item {
            Item::Message(frames) => match wire::replay_frames(frames) {
                Ok(ReplayFrames::End) => return Ok(()),
                Ok(ReplayFrames::Batch { seq, .. }) => {
                    // The payload is the last frame; its bytes are shared, not copied.
                    ReplayAnswer::Batch {
                        seq,
                        payload: frames.last().cloned().unwrap_or_default(),
                    }
                }
                Err(_) => ReplayAnswer::Skipped("frames"),
            },
            Item::Oversized { .. } => ReplayAnswer::Skipped("oversized"),
            Item::Command(_) => continue,
        };
        if given.send(answer).await.is_err() {
            return Err(ZmtpError::Closed);
        }
    }
    Err(ZmtpError::Malformed("a replay without end"))
}
