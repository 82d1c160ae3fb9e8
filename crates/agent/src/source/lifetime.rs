//! Registration of one source: begun, resumed, refused, fenced.

use std::sync::Arc;
use std::time::Duration;

use cairn_index::{HolderId, Incarnation, RegisterOutcome, Seq, SourceId, SourceSpec};
use cairn_ingest::Registration;
use cairn_proto::RegisterAnswer;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::clock::Backoff;
use crate::uplink::{Answer, CallError, Place, StreamState, Uplink};

const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LAST: Duration = Duration::from_secs(2);
/// Another agent speaks for the source: its lease may lapse any second.
const RETRY_HELD: Duration = Duration::from_millis(500);
/// Another agent took over: it has all of its lease before this one asks.
const RETRY_FENCED: Duration = Duration::from_secs(5);
/// The registration contradicts the pool: only an operator or a restarted engine changes that.
const RETRY_INVALID: Duration = Duration::from_secs(10);

/// What the index said.
pub(super) enum Word {
    /// To a registration; `None` where its task broke.
    Registration(Option<Asked>),
    /// To a batch or an audit.
    Answer(Answer),
}

pub(super) type Asked = Result<RegisterAnswer, CallError>;

enum Phase {
    /// Not registered; asks again at this time.
    Idle(Instant),
    Asking(JoinHandle<Asked>),
    Registered,
}

pub(super) struct Lifetime {
    uplink: Uplink,
    phase: Phase,
    backoff: Backoff,
    stream: StreamState,
    /// Present registration, also kept through a broken stream.
    registered: Option<(SourceId, Incarnation)>,
    place: Option<(Place, mpsc::Receiver<Answer>)>,
    /// The next registration begins a new lifetime.
    anew: bool,
    described: Option<Arc<SourceSpec>>,
    state: &'static str,
    trouble: Option<String>,
}

impl Lifetime {
    pub(super) fn new(uplink: Uplink) -> Self {
        Self {
            uplink,
            phase: Phase::Idle(Instant::now()),
            backoff: Backoff::new(RETRY_FIRST, RETRY_LAST),
            stream: StreamState::default(),
            registered: None,
            place: None,
            anew: false,
            described: None,
            state: "unregistered",
            trouble: None,
        }
    }

    pub(super) fn is_registered(&self) -> bool {
        matches!(self.phase, Phase::Registered)
    }

    pub(super) fn state(&self) -> (&'static str, Option<(SourceId, Incarnation)>) {
        (self.state, self.registered.filter(|_| self.is_registered()))
    }

    pub(super) fn trouble(&self) -> Option<String> {
        self.trouble.clone()
    }

    /// The stream's number that batches are made for.
    pub(super) fn stream(&self) -> u64 {
        self.stream.number
    }

    /// The engine began a new life.
    pub(super) fn begin_anew(&mut self) {
        self.anew = true;
        self.ask_again();
    }

    /// Another agent took over: this one is silent, and stands by in case that one's lease lapses.
    pub(super) fn fenced(&mut self) {
        self.begin_anew();
        self.phase = Phase::Idle(Instant::now() + RETRY_FENCED);
        self.state = "fenced";
        self.trouble = Some("another agent speaks for this source".to_owned());
    }

    /// The description changed: the index is told by a resumed registration. `true` where answers to batches under
    /// way won't be heard any more.
    pub(super) fn describe(&mut self, spec: &Arc<SourceSpec>) -> bool {
        let changed = self.is_registered() && self.described.as_ref().is_some_and(|old| old != spec);
        if changed {
            self.ask_again();
        }
        changed
    }

    /// The stream broke or came up; `true` where unacknowledged batches must be sent again.
    pub(super) fn stream_changed(&mut self, stream: StreamState) -> bool {
        let fresh = stream.number != self.stream.number || !stream.up;
        self.stream = stream;
        if fresh && self.is_registered() {
            // A new node may not know this lifetime; the answer says what it applied.
            self.ask_again();
        }
        fresh
    }

    fn ask_again(&mut self) {
        if let Phase::Asking(asking) = &self.phase {
            asking.abort();
        }
        // The index may begin a new lifetime before we hear of it, and then says that the old one is fenced: by us.
        self.place = None;
        self.phase = Phase::Idle(Instant::now());
        self.state = "unregistered";
    }

    /// Registers, where the stream is up and the time has come.
    pub(super) fn register_if_needed(&mut self, spec: &Arc<SourceSpec>, resume: Option<Incarnation>) {
        let Phase::Idle(at) = &self.phase else { return };
        if !self.stream.up || Instant::now() < *at {
            return;
        }
        let resume = resume.filter(|_| !self.anew);
        let (uplink, spec) = (self.uplink.clone(), spec.clone());
        self.described = Some(spec.clone());
        self.phase = Phase::Asking(tokio::spawn(
            async move { uplink.register((*spec).clone(), resume).await },
        ));
    }

    /// What the index says next; never comes while nothing is asked and nothing registered.
    pub(super) async fn event(&mut self) -> Word {
        let Self { phase, place, .. } = self;
        tokio::select! {
            asked = async {
                match phase {
                    Phase::Asking(asking) => asking.await.ok(),
                    Phase::Idle(_) | Phase::Registered => std::future::pending().await,
                }
            } => Word::Registration(asked),
            Some(answer) = async {
                match place {
                    Some((_, answers)) => answers.recv().await,
                    None => std::future::pending().await,
                }
            } => Word::Answer(answer),
        }
    }

    /// An answer that is there already.
    pub(super) fn try_answer(&mut self) -> Option<Answer> {
        self.place.as_mut()?.1.try_recv().ok()
    }

    /// Takes the index's answer in; what the core must be told, and the cluster's seed.
    pub(super) fn take(
        &mut self,
        name: &str,
        asked: Option<Asked>,
    ) -> Option<(Registration, cairn_blocks::ClusterSeed)> {
        let answer = match asked {
            Some(Ok(answer)) => answer,
            None => {
                self.phase = Phase::Idle(Instant::now() + self.backoff.delay());
                return None;
            }
            Some(Err(error)) => {
                tracing::debug!(source = name, %error, "the registration failed");
                self.trouble = Some(error.to_string());
                self.phase = Phase::Idle(Instant::now() + self.backoff.delay());
                return None;
            }
        };
        let seed = answer.seed;
        match answer.outcome {
            RegisterOutcome::Registered {
                source,
                incarnation,
                holders,
                seq,
                resumed,
                ..
            } => Some((self.accepted(source, incarnation, holders, seq, resumed), seed)),
            RegisterOutcome::HeldBy { agent } => {
                if self.state != "held" {
                    tracing::warn!(source = name, %agent, "another agent speaks for this source; waiting for its lease to end");
                }
                self.state = "held";
                self.trouble = Some(format!("agent {agent} speaks for this source"));
                self.phase = Phase::Idle(Instant::now() + RETRY_HELD);
                None
            }
            RegisterOutcome::Invalid { reason } => {
                if self.trouble.as_deref() != Some(reason.as_str()) {
                    tracing::error!(source = name, %reason, "the index refuses this source");
                }
                self.state = "refused";
                self.trouble = Some(reason);
                self.phase = Phase::Idle(Instant::now() + RETRY_INVALID);
                None
            }
        }
    }

    fn accepted(
        &mut self,
        source: SourceId,
        incarnation: Incarnation,
        holders: Vec<HolderId>,
        seq: Seq,
        resumed: bool,
    ) -> Registration {
        self.backoff.reset();
        self.anew = false;
        self.trouble = None;
        self.state = "registered";
        self.phase = Phase::Registered;
        if self.registered != Some((source, incarnation)) || self.place.is_none() {
            // The old place goes first, so that its drop can't take the new one away.
            self.place = None;
            self.place = Some(self.uplink.speak_for(source, incarnation));
        }
        self.registered = Some((source, incarnation));
        Registration {
            source,
            incarnation,
            holders,
            seq,
            resumed,
        }
    }
}
