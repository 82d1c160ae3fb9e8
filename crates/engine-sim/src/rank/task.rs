//! The task of one rank: waits for commands or the model's next moment, and never polls.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use cairn_replay::engine_model::{EngineModel, InvalidModel, Micros, ModelConfig, Output, StepOutcome, TransferStart};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{COMMANDS_MAX, Client, Clients, Command, Events, EventsCommand, Rank, Snapshot, Submission};
use crate::events::{Losses, Publisher};
use crate::histogram::Histograms;
use crate::transfer;

/// Commands applied between two steps of the model at most, so that a flood of them can't stop time.
const COMMANDS_PER_TURN: usize = 256;

/// What a rank is started with.
pub(crate) struct RankSetup {
    pub(crate) model: ModelConfig,
    /// Model time for each unit of real time; 0 answers at once.
    pub(crate) speed: f64,
    pub(crate) events: Option<Publisher>,
    /// Whether a killed live socket is bound or connected again.
    pub(crate) bind_events: bool,
    pub(crate) losses: Arc<Losses>,
    pub(crate) until: CancellationToken,
}

/// Starts a rank's task.
pub(crate) fn spawn(setup: RankSetup) -> Result<Rank, InvalidModel> {
    let (commands, queue) = mpsc::channel(COMMANDS_MAX);
    let task = Task {
        model: EngineModel::new(setup.model)?,
        pace: if setup.speed > 0.0 { setup.speed } else { 1.0 },
        started: Instant::now(),
        paused: None,
        skipped: Duration::ZERO,
        bind_events: setup.bind_events,
        losses: setup.losses,
        clients: Clients::default(),
        histograms: Histograms::default(),
        commands: commands.downgrade(),
        wakeup: None,
        events: setup.events,
    };
    let rank = Rank {
        commands,
        inside: Arc::new(AtomicUsize::new(0)),
        endpoint: task.events.as_ref().map(|events| events.endpoint().to_owned()),
        replay_endpoint: task
            .events
            .as_ref()
            .and_then(|events| events.replay_endpoint().map(str::to_owned)),
    };
    tokio::spawn(task.run(queue, setup.until));
    Ok(rank)
}

struct Task {
    model: EngineModel,
    pace: f64,
    started: Instant,
    paused: Option<Instant>,
    /// Real time during which the model stood still.
    skipped: Duration,
    events: Events,
    bind_events: bool,
    losses: Arc<Losses>,
    clients: Clients,
    histograms: Histograms,
    commands: mpsc::WeakSender<Command>,
    wakeup: Option<Micros>,
}

impl Task {
    async fn run(mut self, mut queue: mpsc::Receiver<Command>, until: CancellationToken) {
        loop {
            let wake = self.wakeup.filter(|_| self.paused.is_none()).map(|at| self.real(at));
            let first = tokio::select! {
                () = until.cancelled() => return,
                command = queue.recv() => match command {
                    Some(command) => Some(command),
                    None => return,
                },
                () = sleep_until(wake), if wake.is_some() => None,
            };
            self.advance();
            if let Some(command) = first {
                self.apply(command).await;
                for _ in 0..COMMANDS_PER_TURN {
                    let Ok(command) = queue.try_recv() else { break };
                    self.apply(command).await;
                }
                self.advance();
            }
            if self.wakeup.is_some_and(|at| at <= self.now()) {
                tokio::task::yield_now().await;
            }
        }
    }

    /// The present in model time.
    fn now(&self) -> Micros {
        let until = self.paused.unwrap_or_else(Instant::now);
        let real = until.duration_since(self.started).saturating_sub(self.skipped);
        Micros::from_seconds(real.as_secs_f64() * self.pace)
    }

    fn real(&self, at: Micros) -> Instant {
        // A microsecond later, so that rounding never wakes the task just before the moment.
        self.started + self.skipped + Duration::from_secs_f64(at.as_seconds() / self.pace) + Duration::from_micros(1)
    }

    /// Lets the model catch up with real time.
    fn advance(&mut self) {
        if self.paused.is_some() {
            return;
        }
        let outcome = self.model.step(self.now());
        self.wakeup = outcome.next_wakeup;
        self.dispatch(outcome);
    }

    fn dispatch(&mut self, outcome: StepOutcome) {
        if let Some(events) = &mut self.events {
            for batch in &outcome.batches {
                events.publish(&batch.events);
            }
        }
        for transfer in outcome.transfers {
            self.start_transfer(transfer);
        }
        for output in outcome.outputs {
            self.deliver(output);
        }
    }

    fn deliver(&mut self, output: Output) {
        let Some(client) = self.clients.waiting.get_mut(&output.id) else {
            return;
        };
        if let Some(remote) = client.remote.take() {
            // Everything was here already: the prefill engine may free its blocks all the same.
            tokio::spawn(async move {
                if let Err(error) = transfer::pull(&remote, Duration::ZERO).await {
                    tracing::debug!(%error, "a prefill engine was not told that its blocks are not needed");
                }
            });
        }
        if output.token.is_some() {
            match client.last_token_at {
                Some(last) => self
                    .histograms
                    .inter_token
                    .observe(output.at.since(last).as_seconds() / self.pace),
                None => self
                    .histograms
                    .first_token
                    .observe(output.at.since(client.arrived).as_seconds() / self.pace),
            }
            client.last_token_at = Some(output.at);
        }
        if let Some(finish) = &output.finish {
            let span = |until: Micros| until.since(finish.arrived).as_seconds() / self.pace;
            self.histograms.queue.observe(span(finish.scheduled));
            self.histograms.request.observe(span(output.at));
        }
        let (id, choice, last) = (output.id, client.choice, output.finish.is_some());
        // A client that went away cancels through its guard.
        let _ = client.outputs.send((choice, output));
        if last {
            self.clients.waiting.remove(&id);
        }
    }

    fn start_transfer(&mut self, start: TransferStart) {
        let remote = self
            .clients
            .waiting
            .get_mut(&start.id)
            .and_then(|client| client.remote.take());
        let Some(commands) = self.commands.upgrade() else {
            return;
        };
        let span = Duration::from_secs_f64(start.span.as_seconds() / self.pace);
        tokio::spawn(async move {
            let succeeded = match remote {
                Some(remote) => match transfer::pull(&remote, span).await {
                    Ok(()) => true,
                    Err(error) => {
                        tracing::warn!(%error, "blocks of a prefill engine could not be pulled");
                        false
                    }
                },
                None => false,
            };
            // The rank may be gone by now; then there is nobody to tell.
            let _ = commands
                .send(Command::TransferDone {
                    id: start.id,
                    succeeded,
                })
                .await;
        });
    }

    async fn apply(&mut self, command: Command) {
        match command {
            Command::Submit(submission) => self.submit(*submission),
            Command::Cancel(id) => {
                self.clients.waiting.remove(&id);
                self.model.cancel(self.now(), id);
            }
            Command::TransferDone { id, succeeded } => {
                if let Some(output) = self.model.transfer_done(self.now(), id, succeeded) {
                    self.deliver(output);
                }
            }
            Command::Pull { id, answer } => {
                let released = self.model.release_held(self.now(), id);
                let _ = answer.send(released.then_some(()));
            }
            Command::Reset {
                external,
                preempt,
                answer,
            } => {
                if preempt {
                    self.model.preempt_running();
                }
                let _ = answer.send(self.model.reset_prefix_cache(external));
            }
            Command::Pause(pause) => self.pause(pause),
            Command::Slow(factor) => self.model.set_slowdown(factor),
            Command::Events(change) => self.change_events(change).await,
            Command::Snapshot(answer) => {
                let _ = answer.send(Snapshot {
                    counters: self.model.counters(),
                    gauges: self.model.gauges(),
                    histograms: self.histograms.clone(),
                    next_seq: self.events.as_ref().map_or(0, Publisher::next_seq),
                    dropped_batches: self.losses.dropped.load(Ordering::Relaxed),
                });
            }
        }
    }

    fn submit(&mut self, submission: Submission) {
        let Submission {
            request,
            choice,
            outputs,
            remote,
            taken,
        } = submission;
        let (id, arrived) = (request.id, self.now());
        let result = self.model.submit(arrived, request);
        if result.is_ok() {
            self.clients.waiting.insert(
                id,
                Client {
                    choice,
                    outputs,
                    remote,
                    arrived,
                    last_token_at: None,
                },
            );
        }
        let _ = taken.send(result);
    }

    fn pause(&mut self, pause: bool) {
        match (pause, self.paused) {
            (true, None) => self.paused = Some(Instant::now()),
            (false, Some(since)) => {
                self.skipped += since.elapsed();
                self.paused = None;
            }
            (true, Some(_)) | (false, None) => {}
        }
    }

    async fn change_events(&mut self, change: EventsCommand) {
        let Some(events) = &mut self.events else { return };
        match change {
            EventsCommand::Kill => events.kill_live(),
            EventsCommand::LoseReplay => events.buffer().clear(),
            EventsCommand::Reopen => {
                if let Err(error) = events.reopen_live(self.bind_events).await {
                    tracing::warn!(error, "the event socket could not be opened again");
                }
            }
        }
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
