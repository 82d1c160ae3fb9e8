//! The fleet: engine cores with the moments at which they have to be woken.

use std::collections::BTreeSet;

use crate::engine_model::{
    Answer, Chain, EngineHash, EngineModel, Gauges, InvalidModel, Micros, ModelConfig, Request, RequestId, StepOutcome,
};

/// One leg of a request, or all of it.
pub(super) struct Leg {
    pub(super) chain: Chain,
    /// Leading tokens whose KV comes from elsewhere; 0 for none.
    pub(super) remote: u32,
    /// Tokens to generate.
    pub(super) output: u32,
    /// Whether the blocks are kept for another engine to pull.
    pub(super) hold: bool,
}

struct Engine {
    model: EngineModel,
    wake: Option<Micros>,
    life: u32,
    /// Requests inside, in order.
    inside: BTreeSet<usize>,
}

impl Engine {
    fn new(config: ModelConfig) -> Result<Self, InvalidModel> {
        Ok(Self {
            model: EngineModel::new(config)?,
            wake: None,
            life: 0,
            inside: BTreeSet::new(),
        })
    }
}

/// All engines that were ever part of the fleet.
pub(super) struct Fleet {
    config: ModelConfig,
    engines: Vec<Engine>,
    /// Preemptions and busy microseconds of lifetimes that ended.
    preempted: u64,
    busy_us: u64,
}

impl Fleet {
    pub(super) fn new(config: ModelConfig, count: usize) -> Result<Self, InvalidModel> {
        let engines = (0..count).map(|_| Engine::new(config));
        Ok(Self {
            config,
            engines: engines.collect::<Result<_, _>>()?,
            preempted: 0,
            busy_us: 0,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.engines.len()
    }

    pub(super) fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub(super) fn life(&self, engine: usize) -> u32 {
        self.engines[engine].life
    }

    pub(super) fn gauges(&self, engine: usize) -> Gauges {
        self.engines[engine].model.gauges()
    }

    pub(super) fn preemptions(&self) -> u64 {
        let present = self.engines.iter().map(|engine| engine.model.counters().preemptions);
        self.preempted + present.sum::<u64>()
    }

    /// Seconds that all engines together were busy.
    pub(super) fn busy_s(&self) -> f64 {
        let present = self.engines.iter().map(|engine| engine.model.counters().busy_us);
        (self.busy_us + present.sum::<u64>()) as f64 / 1e6
    }

    /// Leading blocks of a chain that an engine's GPU cache holds.
    pub(super) fn held_blocks(&self, engine: usize, hashes: &[EngineHash]) -> u32 {
        self.engines
            .get(engine)
            .map_or(0, |slot| slot.model.gpu_blocks_of(hashes) as u32)
    }

    /// A further engine, empty.
    pub(super) fn add(&mut self) -> usize {
        // The shape was checked when the fleet was made.
        if let Ok(engine) = Engine::new(self.config) {
            self.engines.push(engine);
        }
        self.engines.len() - 1
    }

    /// An engine loses everything; the requests that were inside.
    pub(super) fn restart(&mut self, engine: usize) -> BTreeSet<usize> {
        let slot = &mut self.engines[engine];
        self.preempted += slot.model.counters().preemptions;
        self.busy_us += slot.model.counters().busy_us;
        if let Ok(model) = EngineModel::new(self.config) {
            slot.model = model;
        }
        slot.life += 1;
        slot.wake = None;
        std::mem::take(&mut slot.inside)
    }

    /// Hands a request to an engine; gives it back where the engine's queue is full.
    pub(super) fn submit(
        &mut self,
        engine: usize,
        now: Micros,
        index: usize,
        leg: Leg,
    ) -> Result<StepOutcome, (Chain, StepOutcome)> {
        let slot = &mut self.engines[engine];
        let mut outcome = slot.model.step(now);
        let waiting = slot.model.gauges().waiting;
        if waiting >= self.config.waiting_max as usize {
            self.note(engine, &outcome);
            return Err((leg.chain, outcome));
        }
        let answer = Answer::Seeded {
            seed: index as u64,
            len: leg.output,
        };
        let mut request = Request::chained(RequestId(index as u64), leg.chain, answer);
        request.remote_tokens = leg.remote;
        request.hold = leg.hold;
        if slot.model.submit(now, request).is_ok() {
            slot.inside.insert(index);
        }
        join(&mut outcome, slot.model.step(now));
        self.note(engine, &outcome);
        Ok(outcome)
    }

    /// What a request waited for has been fetched.
    pub(super) fn fetched(&mut self, engine: usize, now: Micros, index: usize) -> StepOutcome {
        let slot = &mut self.engines[engine];
        let mut outcome = slot.model.step(now);
        if let Some(ended) = slot.model.transfer_done(now, RequestId(index as u64), true) {
            outcome.outputs.push(ended);
        }
        join(&mut outcome, slot.model.step(now));
        self.note(engine, &outcome);
        outcome
    }

    /// Gives back blocks that were kept for another engine.
    pub(super) fn release(&mut self, engine: usize, now: Micros, index: usize) -> StepOutcome {
        let slot = &mut self.engines[engine];
        let mut outcome = slot.model.step(now);
        slot.model.release_held(now, RequestId(index as u64));
        join(&mut outcome, slot.model.step(now));
        self.note(engine, &outcome);
        outcome
    }

    /// Lets an engine go on.
    pub(super) fn step(&mut self, engine: usize, now: Micros) -> StepOutcome {
        let outcome = self.engines[engine].model.step(now);
        self.note(engine, &outcome);
        outcome
    }

    fn note(&mut self, engine: usize, outcome: &StepOutcome) {
        for output in outcome.outputs.iter().filter(|output| output.finish.is_some()) {
            self.engines[engine].inside.remove(&(output.id.0 as usize));
        }
    }

    /// Whether a wake-up is the one that the engine waits for.
    pub(super) fn woken(&mut self, engine: usize, now: Micros) -> bool {
        let slot = &mut self.engines[engine];
        let due = slot.wake == Some(now);
        if due {
            slot.wake = None;
        }
        due
    }

    /// Remembers when an engine wants to go on; `None` when that moment is in the heap already.
    pub(super) fn wake_at(&mut self, engine: usize, at: Option<Micros>) -> Option<Micros> {
        let slot = &mut self.engines[engine];
        if slot.wake == at {
            return None;
        }
        slot.wake = at;
        at
    }
}

/// Adds what came later.
fn join(outcome: &mut StepOutcome, after: StepOutcome) {
    outcome.batches.extend(after.batches);
    outcome.outputs.extend(after.outputs);
    outcome.transfers.extend(after.transfers);
    outcome.next_wakeup = after.next_wakeup;
}
