//! One source's task: feeds the ingest core with messages and time, and carries out what it decides.

mod inlet;
mod lifetime;
mod outlet;

use std::sync::Arc;
use std::time::Duration;

use cairn_blocks::BlockSize;
use cairn_index::{BatchOutcome, Confidence, DegradedReason, SourceSpec, Tier};
use cairn_ingest::{AuditOutcome, Effect, Source, SourceConfig};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::checkpoint::CheckpointFile;
use crate::clock::Clock;
use crate::config::{Limits, Poll};
use crate::discovery::EventSource;
use crate::events::Hubs;
use crate::metrics::{Metrics, SourceLabel};
use crate::status::StatusBoard;
use crate::uplink::{Answer, StreamState, Uplink};

use inlet::Inlet;
use lifetime::{Asked, Lifetime, Word};
use outlet::Outlet;

/// How often the core looks at its own clocks.
const TICK: Duration = Duration::from_millis(100);
/// Metrics and status follow at every so many ticks.
const PUBLISH_TICKS: u32 = 3;
/// Messages taken in one go before batches and effects are looked at.
const MESSAGES_AT_ONCE: usize = 256;
/// A source that stays silent or degraded is logged this often.
const REMINDER: Duration = Duration::from_secs(60);

/// What makes a source: it changes only with a new task.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Unique name.
    pub name: String,
    /// Pool.
    pub pool: String,
    /// Canonical block size.
    pub block_size: BlockSize,
    /// Tiers in the order of the registration's holders.
    pub tiers: Vec<Tier>,
    /// Engine blocks; 0 unknown.
    pub capacity_blocks: u64,
    /// Whether prompts may hold media.
    pub multimodal: bool,
    /// Where its events come from.
    pub events: Option<EventSource>,
}

/// What the engine's task sees and the source needs.
#[derive(Clone, Debug)]
pub struct EngineView {
    /// What to register; adapters come and go.
    pub spec: Arc<SourceSpec>,
    /// Process start, in a form that can only be compared.
    pub start: Option<u64>,
    /// The engine sleeps.
    pub asleep: bool,
    /// Prompt tokens computed since the engine started.
    pub computed_tokens: u64,
}

/// What every source of an agent shares.
#[derive(Clone)]
pub struct Surroundings {
    /// Monotonic time.
    pub clock: Clock,
    /// Bounds.
    pub limits: Limits,
    /// Intervals.
    pub poll: Poll,
    /// The index.
    pub uplink: Uplink,
    /// Bound event sockets.
    pub hubs: Hubs,
    /// Metrics.
    pub metrics: Metrics,
    /// Status page.
    pub board: StatusBoard,
    /// Directory of checkpoints.
    pub checkpoints: std::path::PathBuf,
    /// Share of batches that get a span, 0 to 1.
    pub sample_ratio: f64,
}

/// Runs a source until it is cancelled; its last act is a checkpoint.
pub async fn run(plan: Plan, view: watch::Receiver<EngineView>, around: Surroundings, stop: CancellationToken) {
    SourceTask::new(plan, view, around).run(stop).await;
}

struct SourceTask {
    plan: Plan,
    around: Surroundings,
    view: watch::Receiver<EngineView>,
    label: SourceLabel,
    /// The core; `None` until the cluster's seed is known.
    core: Option<Source>,
    inlet: Inlet,
    outlet: Outlet,
    lifetime: Lifetime,
    checkpoint: CheckpointFile,
    /// Something happened since the last checkpoint.
    dirty: bool,
    next_checkpoint: Instant,
    reminded: Option<(DegradedReason, Instant)>,
    ticks: u32,
    /// Process start of the engine whose blocks the core holds.
    started: Option<u64>,
    /// What the status says of how far it is.
    told: Progress,
}

/// How far a source is: its last applied message, changes in no batch yet, the last batch made.
type Progress = (Option<u64>, u64, Option<u64>);

impl SourceTask {
    fn new(plan: Plan, view: watch::Receiver<EngineView>, around: Surroundings) -> Self {
        let depends = format!(
            "{} {} {:?} {}",
            plan.pool,
            plan.block_size.tokens(),
            plan.tiers,
            plan.multimodal
        );
        let checkpoint = CheckpointFile::new(
            &around.checkpoints,
            &plan.name,
            &depends,
            around.limits.max_checkpoint_bytes,
        );
        let label = SourceLabel {
            source: plan.name.clone(),
        };
        Self {
            inlet: Inlet::new(&plan, &around),
            outlet: Outlet::new(&around),
            lifetime: Lifetime::new(around.uplink.clone()),
            next_checkpoint: Instant::now() + Duration::from_millis(around.poll.checkpoint_ms),
            core: None,
            dirty: false,
            reminded: None,
            ticks: 0,
            started: None,
            told: (None, 0, None),
            plan,
            around,
            view,
            label,
            checkpoint,
        }
    }

    async fn run(mut self, stop: CancellationToken) {
        self.restore();
        let mut stream = self.around.uplink.state();
        stream.mark_changed();
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.look_at_engine();
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                event = self.inlet.event() => {
                    if let Some(core) = &mut self.core {
                        let batches = self.inlet.take(core, event, &self.around, &self.label, MESSAGES_AT_ONCE);
                        // An idle engine is asked for its tail every second; that alone is nothing to write down.
                        self.dirty |= batches;
                    }
                }
                word = self.lifetime.event() => match word {
                    Word::Registration(asked) => self.take_registration(asked),
                    Word::Answer(answer) => self.take_answer(answer),
                },
                changed = self.view.changed() => {
                    if changed.is_err() {
                        break;
                    }
                    self.look_at_engine();
                }
                changed = stream.changed() => {
                    if changed.is_err() {
                        break;
                    }
                    let state = *stream.borrow_and_update();
                    self.stream_changed(state);
                }
                _ = ticks.tick() => {
                    let now = self.around.clock.now();
                    if let Some(core) = &mut self.core {
                        core.tick(now);
                    }
                    self.ticks = self.ticks.wrapping_add(1);
                    if self.ticks.is_multiple_of(PUBLISH_TICKS) {
                        self.publish();
                    }
                    self.checkpoint_if_due().await;
                }
            }
            self.pump();
            self.tell_progress();
        }
        self.write_checkpoint().await;
        self.label_zero();
    }

    /// Carries out the core's effects, sends its batches, keeps registered.
    fn pump(&mut self) {
        let now = self.around.clock.now();
        if let Some(core) = &mut self.core {
            while let Some(effect) = core.poll_effect() {
                match effect {
                    Effect::RequestReplay { from } => {
                        self.around.metrics.replays.get_or_create(&self.label).inc();
                        self.inlet.ask_replay(core, from, now);
                    }
                    Effect::Reregister => {
                        tracing::info!(source = %self.plan.name, "the engine began a new life; its old blocks go");
                        self.lifetime.begin_anew();
                    }
                    Effect::Stop { current } => {
                        tracing::warn!(
                            source = %self.plan.name, incarnation = current.0,
                            "another agent speaks for this source now; this one stops reporting it"
                        );
                        self.lifetime.fenced();
                    }
                }
            }
            if self.lifetime.is_registered() {
                self.dirty |= self.outlet.send(core, now);
            }
        }
        let spec = self.view.borrow().spec.clone();
        let resume = self.core.as_ref().and_then(Source::resume);
        self.lifetime.register_if_needed(&spec, resume);
        // Messages are only useful to a core; on a first start the cluster's seed comes with the registration.
        if self.core.is_some() {
            self.inlet.open();
        }
    }

    fn stream_changed(&mut self, state: StreamState) {
        if self.lifetime.stream_changed(state)
            && let Some(core) = &mut self.core
        {
            core.push_stream_lost();
        }
        self.outlet.stream = self.lifetime.stream();
    }

    fn take_registration(&mut self, answer: Option<Asked>) {
        let Some((registration, seed)) = self.lifetime.take(&self.plan.name, answer) else {
            return;
        };
        let now = self.around.clock.now();
        tracing::info!(
            source = %self.plan.name, id = registration.source.0, incarnation = registration.incarnation.0,
            resumed = registration.resumed, "speaking for the source"
        );
        if self.core.as_ref().is_some_and(|core| core.config().seed != seed) {
            tracing::warn!(source = %self.plan.name, "the index belongs to another cluster than before; starting afresh");
            self.core = None;
            self.inlet = Inlet::new(&self.plan, &self.around);
        }
        let config = self.config(seed);
        let core = self.core.get_or_insert_with(|| Source::new(config, now));
        core.set_rank(self.view.borrow().spec.worker.rank);
        core.registered(now, registration);
        self.dirty = true;
        self.look_at_engine();
    }

    fn take_answer(&mut self, first: Answer) {
        let now = self.around.clock.now();
        let Some(core) = &mut self.core else { return };
        let mut next = Some(first);
        while let Some(answer) = next {
            match answer {
                Answer::Ack {
                    incarnation,
                    seq,
                    outcome,
                } => {
                    self.outlet.acked(incarnation, seq, outcome_name(&outcome));
                    self.around.metrics.acked.get_or_create(&self.label).inc();
                    core.acked(now, incarnation, seq, &outcome);
                    self.dirty = true;
                }
                Answer::Reused { keys, tokens } => {
                    core.cached_tokens(&keys, tokens);
                    self.dirty = true;
                }
                Answer::Audit {
                    incarnation,
                    seq,
                    holders,
                } => {
                    if self
                        .lifetime
                        .state()
                        .1
                        .is_some_and(|(_, present)| present == incarnation)
                        && core.audit(now, seq, &holders) == AuditOutcome::Drift
                    {
                        tracing::warn!(source = %self.plan.name, "the index differs from the mirror; sending it again");
                        self.around.metrics.drift.get_or_create(&self.label).inc();
                    }
                }
            }
            next = self.lifetime.try_answer();
        }
    }

    fn look_at_engine(&mut self) {
        let now = self.around.clock.now();
        let view = self.view.borrow_and_update().clone();
        if let Some(core) = &mut self.core {
            if let Some(start) = view.start {
                core.process_started(now, start);
                self.started = Some(start);
            }
            core.asleep(now, view.asleep);
            core.served(now, view.computed_tokens);
        }
        if self.lifetime.describe(&view.spec)
            && let Some(core) = &mut self.core
        {
            core.push_stream_lost();
        }
    }

    fn config(&self, seed: cairn_blocks::ClusterSeed) -> SourceConfig {
        SourceConfig {
            seed,
            pool: self.plan.pool.clone(),
            block_size: self.plan.block_size,
            tiers: self.plan.tiers.clone(),
            capacity_blocks: self.plan.capacity_blocks,
            multimodal: self.plan.multimodal,
            replay: self.plan.events.as_ref().is_some_and(|events| events.replay.is_some()),
            events: self.plan.events.is_some(),
        }
    }

    fn restore(&mut self) {
        let read = match self.checkpoint.read() {
            Ok(None) => return,
            Ok(Some(read)) => read,
            Err(error) => {
                tracing::warn!(source = %self.plan.name, %error, "starting without a checkpoint");
                self.around.metrics.checkpoint_refused.get_or_create(&self.label).inc();
                return;
            }
        };
        match Source::restore(self.config(read.seed), self.around.clock.now(), &read.body) {
            Ok(mut core) => {
                core.set_rank(self.view.borrow().spec.worker.rank);
                // The engine may have restarted while no agent looked.
                if let Some(start) = read.start {
                    core.process_started(self.around.clock.now(), start);
                }
                self.core = Some(core);
            }
            Err(error) => {
                tracing::warn!(source = %self.plan.name, %error, "starting without a checkpoint");
                self.around.metrics.checkpoint_refused.get_or_create(&self.label).inc();
                self.checkpoint.remove();
            }
        }
    }

    async fn checkpoint_if_due(&mut self) {
        if self.dirty && Instant::now() >= self.next_checkpoint {
            self.write_checkpoint().await;
        }
    }

    async fn write_checkpoint(&mut self) {
        use crate::metrics::{CheckpointLabel, CheckpointResult};
        let Some(core) = &self.core else { return };
        let began = Instant::now();
        let body = core.checkpoint();
        let (file, seed, start) = (self.checkpoint.clone(), core.config().seed, self.started);
        let written = tokio::task::spawn_blocking(move || file.write(seed, start, &body)).await;
        let result = match written {
            Ok(Ok(true)) => CheckpointResult::Written,
            Ok(Ok(false)) => CheckpointResult::TooLarge,
            Ok(Err(error)) => {
                tracing::warn!(source = %self.plan.name, %error, "a checkpoint could not be written");
                CheckpointResult::Failed
            }
            Err(_) => CheckpointResult::Failed,
        };
        self.around
            .metrics
            .checkpoints
            .get_or_create(&CheckpointLabel { result })
            .inc();
        self.dirty = false;
        // A large mirror takes at most a twentieth of the time.
        let pause = Duration::from_millis(self.around.poll.checkpoint_ms).max(began.elapsed() * 20);
        self.next_checkpoint = Instant::now() + pause;
    }

    /// Metrics, status and the reminder in the log.
    fn publish(&mut self) {
        let (state, registered) = self.lifetime.state();
        self.around
            .metrics
            .registered
            .get_or_create(&self.label)
            .set(i64::from(registered.is_some()));
        let stats = self.core.as_ref().map(Source::stats).unwrap_or_default();
        let reason = match self.core.as_ref().map(Source::confidence) {
            Some(Confidence::Exact) => None,
            Some(Confidence::Degraded(reason)) => Some(reason),
            None => Some(DegradedReason::Replaying),
        };
        self.outlet.publish(&stats, reason, &self.label, &self.around);
        let trouble = self.lifetime.trouble().or_else(|| self.inlet.trouble());
        let connected = self.inlet.connected();
        self.around.board.source(&self.plan.name, |status| {
            status.state = state;
            status.source = registered.map(|(source, _)| source.0);
            status.incarnation = registered.map(|(_, incarnation)| incarnation.0);
            status.exact = reason.is_none();
            status.reason = reason.map(reason_name);
            status.connected = connected;
            status.blocks = stats.blocks;
            status.unacked = stats.unacked;
            status.trouble = trouble;
        });
        if self.core.is_some() {
            self.remind(reason);
        }
    }

    /// Whoever compares an engine with a view must know at once that more is on its way.
    fn tell_progress(&mut self) {
        let Some(core) = &self.core else { return };
        let (engine_seq, outbox) = core.progress();
        let present = self.lifetime.state().1.map(|(_, incarnation)| incarnation);
        let made = self
            .outlet
            .made
            .filter(|(incarnation, _)| Some(*incarnation) == present);
        let progress = (engine_seq, outbox, made.map(|(_, seq)| seq.0));
        if progress != self.told {
            self.told = progress;
            self.around.board.source(&self.plan.name, |status| {
                (status.engine_seq, status.outbox, status.batch_seq) = progress;
            });
        }
    }

    fn remind(&mut self, reason: Option<DegradedReason>) {
        let Some(reason) = reason else {
            if self.reminded.take().is_some() {
                tracing::info!(source = %self.plan.name, "exact again");
            }
            return;
        };
        // A replay takes moments; only what lasts is worth a line.
        let due = match self.reminded {
            Some((last, at)) => last != reason || at.elapsed() >= REMINDER,
            None => reason != DegradedReason::Replaying,
        };
        if due {
            tracing::warn!(source = %self.plan.name, reason = reason_name(reason), "the worker is degraded");
            self.reminded = Some((reason, Instant::now()));
        }
    }

    fn label_zero(&self) {
        self.around.metrics.registered.get_or_create(&self.label).set(0);
        self.around.board.drop_source(&self.plan.name);
    }
}

fn outcome_name(outcome: &BatchOutcome) -> &'static str {
    match outcome {
        BatchOutcome::Applied { .. } => "applied",
        BatchOutcome::Duplicate => "duplicate",
        BatchOutcome::OutOfOrder { .. } => "out_of_order",
        BatchOutcome::Fenced { .. } => "fenced",
        BatchOutcome::UnknownSource => "unknown_source",
    }
}

/// As metrics and status name it.
fn reason_name(reason: DegradedReason) -> &'static str {
    match reason {
        DegradedReason::Gap => "gap",
        DegradedReason::Replaying => "replaying",
        DegradedReason::Hybrid => "hybrid",
        DegradedReason::Silent => "silent",
        DegradedReason::NoEvents => "no_events",
        DegradedReason::Mismatch => "mismatch",
        DegradedReason::LeaseLapsed => "lease_lapsed",
        DegradedReason::Bounded => "bounded",
    }
}
