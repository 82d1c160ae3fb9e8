//! What comes in from the engine: live messages and replay answers, decoded and handed to the core.

use cairn_ingest::{Millis, ReplayEnd, Source};

use super::{Plan, Surroundings};
use crate::config::Limits;
use crate::discovery::EventSource;
use crate::events::{Hubs, ReplayAnswer, ReplayClient, SocketEvent, Subscription, connect};
use crate::metrics::SourceLabel;
use crate::wire;

/// Something that came in.
pub(super) enum Arrival {
    /// From the event socket.
    Live(SocketEvent),
    /// From the replay socket.
    Replay(ReplayAnswer),
    /// A bound socket is (not) there.
    Bound(std::io::Result<Subscription>),
    /// The event socket's task ended.
    Ended,
}

impl Arrival {
    fn is_batch(&self) -> bool {
        matches!(
            self,
            Self::Live(SocketEvent::Message(_)) | Self::Replay(ReplayAnswer::Batch { .. })
        )
    }
}

pub(super) struct Inlet {
    events: Option<EventSource>,
    limits: Limits,
    hubs: Hubs,
    live: Option<Subscription>,
    binding: Option<tokio::task::JoinHandle<std::io::Result<Subscription>>>,
    bind_pause: Option<tokio::time::Instant>,
    replay: Option<ReplayClient>,
    connected: bool,
    trouble: Option<String>,
}

/// Between two tries to bind an endpoint that something else holds.
const BIND_PAUSE: std::time::Duration = std::time::Duration::from_secs(2);

impl Inlet {
    pub(super) fn new(plan: &Plan, around: &Surroundings) -> Self {
        Self {
            events: plan.events.clone(),
            limits: around.limits,
            hubs: around.hubs.clone(),
            live: None,
            binding: None,
            bind_pause: None,
            replay: None,
            connected: false,
            trouble: None,
        }
    }

    pub(super) fn connected(&self) -> bool {
        self.connected
    }

    pub(super) fn trouble(&self) -> Option<String> {
        self.trouble.clone()
    }

    /// Subscribes, where that hasn't happened yet.
    pub(super) fn open(&mut self) {
        let Some(events) = &self.events else { return };
        if self.replay.is_none() {
            self.replay = events
                .replay
                .clone()
                .map(|endpoint| ReplayClient::new(endpoint, self.limits));
        }
        if self.live.is_some() || self.binding.is_some() {
            return;
        }
        if !events.bind {
            self.live = Some(connect(events.endpoint.clone(), self.limits));
            return;
        }
        if self.bind_pause.is_some_and(|until| tokio::time::Instant::now() < until) {
            return;
        }
        let (hubs, endpoint, topic) = (self.hubs.clone(), events.endpoint.clone(), events.topic.clone());
        self.binding = Some(tokio::spawn(async move { hubs.subscribe(&endpoint, &topic).await }));
    }

    /// Asks the replay socket; says so at once where that can't be done.
    pub(super) fn ask_replay(&mut self, core: &mut Source, from: u64, now: Millis) {
        let asked = self.replay.as_ref().is_some_and(|replay| replay.ask(from));
        if !asked {
            core.replay_ended(now, ReplayEnd::Failed);
        }
    }

    /// The next thing that comes in; never ends while nothing is open.
    pub(super) async fn event(&mut self) -> Arrival {
        let Self {
            live, binding, replay, ..
        } = self;
        tokio::select! {
            // Replay answers come first: what they answer is older than what is live.
            biased;
            Some(answer) = async { match replay { Some(replay) => replay.next().await, None => std::future::pending().await } } => Arrival::Replay(answer),
            event = async { match live { Some(live) => live.next().await, None => std::future::pending().await } } => match event {
                Some(event) => Arrival::Live(event),
                None => Arrival::Ended,
            },
            bound = async { match binding { Some(binding) => binding.await, None => std::future::pending().await } } => {
                Arrival::Bound(bound.unwrap_or_else(|error| Err(std::io::Error::other(error))))
            }
        }
    }

    /// Hands `first` and whatever waits behind it to the core, at most `limit` in all; `true` where a batch was among
    /// them.
    pub(super) fn take(
        &mut self,
        core: &mut Source,
        first: Arrival,
        around: &Surroundings,
        label: &SourceLabel,
        limit: usize,
    ) -> bool {
        let now = around.clock.now();
        let mut batches = first.is_batch();
        self.take_one(core, first, around, label, now);
        for _ in 1..limit {
            let next = match self.replay.as_mut().and_then(ReplayClient::try_next) {
                Some(answer) => Arrival::Replay(answer),
                None => match self.live.as_mut().and_then(Subscription::try_next) {
                    Some(event) => Arrival::Live(event),
                    None => return batches,
                },
            };
            batches |= next.is_batch();
            self.take_one(core, next, around, label, now);
        }
        batches
    }

    fn take_one(
        &mut self,
        core: &mut Source,
        arrival: Arrival,
        around: &Surroundings,
        label: &SourceLabel,
        now: Millis,
    ) {
        match arrival {
            Arrival::Live(SocketEvent::Message(message)) => match wire::live_frames(&message.frames) {
                Ok(frames) => core.live(now, wire::decode(frames.seq, frames.payload)),
                Err(error) => {
                    self.trouble = Some(error.to_string());
                    around.metrics.skipped.get_or_create(label).inc();
                }
            },
            Arrival::Live(SocketEvent::Skipped(why)) | Arrival::Replay(ReplayAnswer::Skipped(why)) => {
                tracing::debug!(source = %label.source, why, "a message was skipped");
                around.metrics.skipped.get_or_create(label).inc();
            }
            Arrival::Live(SocketEvent::Connected) => {
                tracing::debug!(source = %label.source, "the event socket is connected");
                self.connected = true;
                self.trouble = None;
                core.connected(now);
            }
            Arrival::Live(SocketEvent::Lost(error)) => {
                tracing::debug!(source = %label.source, %error, "the event socket is away");
                self.connected = false;
                self.trouble = Some(format!("event socket: {error}"));
                core.disconnected(now);
            }
            Arrival::Replay(ReplayAnswer::Batch { seq, payload }) => core.replayed(now, wire::decode(seq, &payload)),
            Arrival::Replay(ReplayAnswer::Complete) => core.replay_ended(now, ReplayEnd::Complete),
            Arrival::Replay(ReplayAnswer::Failed(error)) => {
                tracing::debug!(source = %label.source, %error, "the replay socket did not answer");
                if self.trouble.is_none() {
                    self.trouble = Some(format!("replay socket: {error}"));
                }
                core.replay_ended(now, ReplayEnd::Failed);
            }
            Arrival::Bound(Ok(subscription)) => {
                self.binding = None;
                self.live = Some(subscription);
            }
            Arrival::Bound(Err(error)) => {
                self.binding = None;
                self.bind_pause = Some(tokio::time::Instant::now() + BIND_PAUSE);
                tracing::warn!(source = %label.source, %error, "the event endpoint can't be bound");
                self.trouble = Some(format!("the event endpoint can't be bound: {error}"));
            }
            Arrival::Ended => {
                self.live = None;
                self.connected = false;
                core.disconnected(now);
            }
        }
    }
}
