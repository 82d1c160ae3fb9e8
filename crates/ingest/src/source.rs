//! One stream of an engine rank, from decoded messages to batches for the index.

mod stats;
mod terms;

use std::collections::VecDeque;

use cairn_blocks::BlockKey;
use cairn_index::{Batch, BatchOutcome, Confidence, DegradedReason, HolderDigest, HolderId, Incarnation, Seq};

use crate::mirror::{Mirror, MirrorConfig};
use crate::outbox::{Answer, Outbox};
use crate::session::{Session, Step};
use crate::{EngineEvent, EventBatch, Millis};

pub use stats::SourceStats;
pub use terms::{AuditOutcome, Effect, HolderAudit, Registration, ReplayEnd, SourceConfig};

/// Computed prompt tokens without any event that make a rank silent.
const SILENT_TOKENS: u64 = 1_024;
/// For this long.
const SILENT_MS: u64 = 10_000;
/// A turnover of a cache of unknown size, in engine blocks, where it is seen to hold fewer.
const MIN_TURNOVER: u64 = 1_024;
/// Full repairs after audits are at least this far apart.
const REPAIR_INTERVAL_MS: u64 = 10_000;
/// Effects that wait for the shell: more means that it doesn't listen.
const MAX_EFFECTS: usize = 64;

/// What is unknown until the cache has turned over once: counts of GPU stores at which everything from before is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Unknown {
    /// After an unrepairable gap.
    pub(crate) gap_ends: Option<u64>,
    /// After blocks were left out for want of room.
    pub(crate) bound_ends: Option<u64>,
}

/// One stream of an engine rank.
#[derive(Debug)]
pub struct Source {
    pub(crate) config: SourceConfig,
    pub(crate) session: Session,
    pub(crate) mirror: Mirror,
    pub(crate) outbox: Outbox,
    pub(crate) unknown: Unknown,
    /// The connection's rank, where it is known.
    rank: Option<u32>,
    /// The gap is one only because no replay answered.
    tentative_gap: bool,
    asleep: bool,
    silent: bool,
    /// Computed tokens when they began to grow without events, and since when.
    quiet_from: Option<(Millis, u64)>,
    repaired_at: Option<Millis>,
    effects: VecDeque<Effect>,
    counts: SourceStats,
    /// Room for the session's steps.
    steps: Vec<Step>,
}

impl Source {
    /// A source that knows nothing yet.
    #[must_use]
    pub fn new(config: SourceConfig, now: Millis) -> Self {
        let mirror = Mirror::new(mirror_config(&config));
        let session = Session::new(config.replay, now);
        Self::from_parts(config, session, mirror, Outbox::default(), Unknown::default())
    }

    pub(crate) fn from_parts(
        config: SourceConfig,
        session: Session,
        mirror: Mirror,
        outbox: Outbox,
        unknown: Unknown,
    ) -> Self {
        Self {
            config,
            session,
            mirror,
            outbox,
            unknown,
            rank: None,
            tentative_gap: false,
            asleep: false,
            silent: false,
            quiet_from: None,
            repaired_at: None,
            effects: VecDeque::new(),
            counts: SourceStats::default(),
            steps: Vec::new(),
        }
    }

    /// As made.
    #[must_use]
    pub fn config(&self) -> &SourceConfig {
        &self.config
    }

    /// Sets the capacity once the engine's metrics have told it.
    pub fn set_capacity(&mut self, blocks: u64) {
        self.config.capacity_blocks = blocks;
        self.mirror.set_capacity(blocks);
    }

    /// Sets the connection's rank; messages that name another one are counted, and taken all the same.
    pub fn set_rank(&mut self, rank: u32) {
        self.rank = Some(rank);
    }

    /// Sets how many engine blocks the mirror keeps at most; more are left out, and the source says so.
    pub fn set_max_blocks(&mut self, blocks: usize) {
        self.mirror.set_max_nodes(blocks);
    }

    /// The lifetime to ask for in the registration: `None` for a new one.
    #[must_use]
    pub fn resume(&self) -> Option<Incarnation> {
        self.outbox.registration().map(|r| r.incarnation)
    }

    /// The present registration.
    #[must_use]
    pub fn registration(&self) -> Option<&Registration> {
        self.outbox.registration()
    }

    /// The index accepted a registration.
    pub fn registered(&mut self, _now: Millis, registration: Registration) {
        self.outbox.registered(registration, &mut self.mirror);
    }

    /// The subscription is (again) up.
    pub fn connected(&mut self, now: Millis) {
        self.session.connected(now);
        self.follow(now);
    }

    /// The subscription is down.
    pub fn disconnected(&mut self, _now: Millis) {
        self.session.disconnected();
    }

    /// A live message came.
    pub fn live(&mut self, now: Millis, mut batch: EventBatch) {
        self.live_from(now, &mut batch);
    }

    /// A live message came, whose buffers the caller may use again: it is taken away only where it isn't the next one.
    pub fn live_from(&mut self, now: Millis, batch: &mut EventBatch) {
        if self.session.takes_next(now, batch) {
            self.apply(batch);
        } else {
            self.live_out_of_turn(now, batch);
        }
    }

    #[inline(never)]
    fn live_out_of_turn(&mut self, now: Millis, batch: &mut EventBatch) {
        self.session.live(now, std::mem::take(batch));
        self.follow(now);
    }

    /// An answer of the replay socket came.
    pub fn replayed(&mut self, now: Millis, batch: EventBatch) {
        self.session.replayed(now, batch);
        self.follow(now);
    }

    /// A replay came to its end.
    pub fn replay_ended(&mut self, now: Millis, end: ReplayEnd) {
        self.session.replay_ended(now, end);
        self.follow(now);
    }

    /// The engine's process start time, in any unit: only compared.
    pub fn process_started(&mut self, now: Millis, start: u64) {
        self.session.process_started(now, start);
        self.follow(now);
    }

    /// Whether the engine sleeps: its cache is gone then, whether or not it said so.
    pub fn asleep(&mut self, _now: Millis, asleep: bool) {
        self.asleep = asleep;
        self.purge_if_asleep();
    }

    /// Prompt tokens that the engine has computed (not found in its cache) since its start: when they grow and no event
    /// comes, the rank is silent.
    pub fn served(&mut self, now: Millis, computed_tokens: u64) {
        let (since, from) = *self.quiet_from.get_or_insert((now, computed_tokens));
        if computed_tokens <= from {
            self.quiet_from = Some((now, computed_tokens));
        } else if computed_tokens - from >= SILENT_TOKENS && now.since(since) >= SILENT_MS {
            self.silent = true;
        }
    }

    /// What the engine said it reused of a prompt with these block keys, in tokens: confirms or cuts suspects.
    pub fn cached_tokens(&mut self, keys: &[BlockKey], cached: u32) {
        self.mirror.observe_cached(keys, cached);
    }

    /// Call about every 100 ms.
    pub fn tick(&mut self, now: Millis) {
        self.session.tick(now);
        self.follow(now);
        self.purge_if_asleep();
    }

    /// What the shell must do, in order.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// The next batch to send, oldest first; `None` when nothing changed, the window is full, or no registration
    /// stands. Each is returned once, and again after a refusal or a lost connection.
    pub fn next_batch(&mut self, _now: Millis) -> Option<&Batch> {
        let confidence = self.confidence();
        self.outbox.next_batch(&mut self.mirror, confidence)
    }

    /// The index answered for a batch.
    pub fn acked(&mut self, _now: Millis, incarnation: Incarnation, seq: Seq, outcome: &BatchOutcome) {
        match self.outbox.acked(incarnation, seq, outcome, &mut self.mirror) {
            Answer::Done => {}
            Answer::Reregister => {
                self.outbox.reset(&mut self.mirror);
                self.push_effect(Effect::Reregister);
            }
            Answer::Fenced(current) => self.push_effect(Effect::Stop { current }),
        }
    }

    /// The stream to the index broke: what has no answer is sent again after the next registration.
    pub fn push_stream_lost(&mut self) {
        self.outbox.connection_lost();
    }

    /// Compares the index's figures, taken after it applied `seq`, with what it was told; repairs a difference.
    pub fn audit(&mut self, now: Millis, seq: Seq, holders: &[HolderAudit]) -> AuditOutcome {
        if self.outbox.registration().is_none() || self.outbox.in_flight() > 0 || seq != self.outbox.built() {
            return AuditOutcome::InFlight;
        }
        let told = |holder: HolderId| {
            self.outbox
                .holders()
                .iter()
                .position(|h| *h == holder)
                .map(|tier| self.mirror.told[tier])
        };
        if !self.mirror.tape.is_empty() {
            return AuditOutcome::InFlight;
        }
        let pending = self.mirror.clear_first.contains(&true);
        let equal = holders
            .iter()
            .all(|h| told(h.holder).is_some_and(|d| d.blocks == h.blocks && d.digest == h.digest));
        if equal {
            return AuditOutcome::Equal;
        }
        if pending {
            return AuditOutcome::InFlight;
        }
        self.counts.drifts += 1;
        if self.repaired_at.is_none_or(|at| now.since(at) >= REPAIR_INTERVAL_MS) {
            self.repaired_at = Some(now);
            self.outbox.repair(&mut self.mirror);
        }
        AuditOutcome::Drift
    }

    /// What the index may claim about the source now.
    #[must_use]
    pub fn confidence(&self) -> Confidence {
        let reason = if !self.config.events {
            DegradedReason::NoEvents
        } else if self.silent {
            DegradedReason::Silent
        } else if self.session.is_replaying() || self.session.is_away() {
            DegradedReason::Replaying
        } else if self.unknown.gap_ends.is_some() {
            DegradedReason::Gap
        } else if self.unknown.bound_ends.is_some() {
            DegradedReason::Bounded
        } else if self.mirror.is_hybrid() {
            DegradedReason::Hybrid
        } else {
            return Confidence::Exact;
        };
        Confidence::Degraded(reason)
    }

    /// Blocks and digest told to the index, by tier in the order of the holders.
    #[must_use]
    pub fn told(&self) -> Vec<HolderDigest> {
        self.mirror.told[..self.config.tiers.len().min(self.mirror.told.len())].to_vec()
    }

    /// How far it is: the last applied message of the engine, and an upper bound of the changes that no batch has yet.
    #[must_use]
    pub fn progress(&self) -> (Option<u64>, u64) {
        (self.session.cursor().0.checked_sub(1), self.mirror.backlog() as u64)
    }

    /// Figures for metrics.
    #[must_use]
    pub fn stats(&self) -> SourceStats {
        let mirror = &self.mirror.stats;
        let mut stats = self.counts.clone();
        for (reason, n) in mirror.refused.iter() {
            stats.refused.add_many(reason, n);
        }
        stats.held_blocks = (0..self.config.tiers.len())
            .map(|tier| self.mirror.held(tier))
            .collect();
        stats.blocks = stats.held_blocks.iter().sum();
        stats.engine_seq = self.session.cursor().0.checked_sub(1);
        stats.suspects = self.mirror.suspects();
        stats.suspects_confirmed = mirror.suspects_confirmed;
        stats.suspects_cut = mirror.suspects_cut;
        stats.suspects_dropped = mirror.suspects_dropped;
        stats.quarantined = self.mirror.waiting() as u64;
        stats.cleared_outer = mirror.cleared_outer;
        stats.buffered = self.session.buffered() as u64;
        // What an earlier process hadn't told is lost: all that is held waits to be told again, and be it nothing.
        let again = if self.outbox.lost_some() {
            stats.blocks.max(1)
        } else {
            0
        };
        stats.outbox = self.mirror.backlog() as u64 + again;
        stats.unacked = self.outbox.in_flight() as u64;
        stats.resent = self.outbox.resent;
        stats.window_full = self.outbox.window_full;
        stats.unknown_anchors = self.outbox.unknown_anchors;
        stats.full_repairs = self.outbox.full_repairs;
        stats.unanchored = mirror.unanchored;
        stats.mirror_bytes = self.mirror.memory_bytes() as u64;
        stats
    }

    /// Carries out what the session found.
    fn follow(&mut self, _now: Millis) {
        let mut steps = std::mem::take(&mut self.steps);
        self.session.take_steps(&mut steps);
        for step in steps.drain(..) {
            match step {
                Step::Apply(batch) => self.apply(&batch),
                Step::NewLife => {
                    self.counts.restarts += 1;
                    self.mirror.restart();
                    self.outbox.reset(&mut self.mirror);
                    self.unknown = Unknown::default();
                    self.quiet_from = None;
                    self.push_effect(Effect::Reregister);
                }
                Step::NoGap => self.forgive_gap(),
                Step::Gap { firm: false, .. } => {
                    // A gap that is known of stays one.
                    if self.unknown.gap_ends.is_none() {
                        self.tentative_gap = true;
                        self.begin_gap(false);
                    }
                }
                Step::Gap { lost, firm: true } => {
                    self.tentative_gap = false;
                    self.counts.gaps += 1;
                    self.counts.lost_batches += lost;
                    self.begin_gap(true);
                }
                Step::RequestReplay { from } => {
                    self.counts.replays += 1;
                    self.push_effect(Effect::RequestReplay { from });
                }
                Step::Refused(reason) => self.counts.refused.add(reason),
            }
        }
        self.steps = steps;
    }

    fn apply(&mut self, batch: &EventBatch) {
        self.counts.messages += 1;
        self.counts.events += batch.events.len() as u64;
        if matches!((batch.rank, self.rank), (Some(named), Some(own)) if named != own) {
            self.counts.foreign_rank += 1;
        }
        self.silent = false;
        self.quiet_from = None;
        for reason in &batch.refused {
            self.counts.refused.add(*reason);
        }
        self.mirror.approach(&batch.events);
        for event in &batch.events {
            self.mirror.apply(event);
            if *event == EngineEvent::Cleared {
                // Nothing from before is left, so nothing is unknown.
                self.unknown = Unknown::default();
            }
        }
        self.turn_over();
    }

    /// Ends what a whole turnover of the cache ends.
    fn turn_over(&mut self) {
        let stores = self.mirror.gpu_stores;
        if self.unknown.gap_ends.is_some_and(|end| stores >= end) {
            self.mirror.drop_suspects();
            self.unknown.gap_ends = None;
            self.tentative_gap = false;
        }
        if std::mem::take(&mut self.mirror.full) {
            self.unknown.bound_ends = Some(stores.saturating_add(self.turnover()));
        } else if self.unknown.bound_ends.is_some_and(|end| stores >= end) {
            self.unknown.bound_ends = None;
        }
    }

    /// Stores after which nothing of the present cache is left.
    fn turnover(&self) -> u64 {
        match self.config.capacity_blocks {
            0 => self.mirror.held(0).max(MIN_TURNOVER),
            known => known,
        }
    }

    /// Nothing was lost after all.
    fn forgive_gap(&mut self) {
        if std::mem::take(&mut self.tentative_gap) {
            self.mirror.trust_all();
            self.unknown.gap_ends = None;
        }
    }

    fn begin_gap(&mut self, firm: bool) {
        self.mirror.suspect_all(firm);
        self.unknown.gap_ends = Some(self.mirror.gpu_stores.saturating_add(self.turnover()));
    }

    fn purge_if_asleep(&mut self) {
        if self.asleep && (0..self.config.tiers.len()).any(|tier| self.mirror.held(tier) > 0) {
            self.counts.purges += 1;
            self.mirror.clear();
            self.unknown = Unknown::default();
        }
    }

    #[inline(never)]
    fn push_effect(&mut self, effect: Effect) {
        if self.effects.back() != Some(&effect) && self.effects.len() < MAX_EFFECTS {
            self.effects.push_back(effect);
        }
    }
}

pub(crate) fn mirror_config(config: &SourceConfig) -> MirrorConfig {
    MirrorConfig {
        seed: config.seed,
        pool: config.pool.clone(),
        block_size: config.block_size,
        tiers: config.tiers.clone(),
        multimodal: config.multimodal,
        max_nodes: SourceConfig::MAX_BLOCKS,
        capacity: config.capacity_blocks,
    }
}
