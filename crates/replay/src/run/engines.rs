//! The fleet: engine cores with the moments at which they have to be woken.

use std::collections::BTreeMap;

use cairn_blocks::Token;

use crate::engine_model::{
    Answer, EngineModel, Gauges, InvalidModel, Micros, ModelConfig, Request, RequestId, StepOutcome,
};

struct Engine {
    model: EngineModel,
    wake: Option<Micros>,
    life: u32,
    /// Requests inside, with what is needed to send them again; in order.
    inside: BTreeMap<usize, ()>,
}

/// All engines that were ever part of the fleet.
pub(super) struct Fleet {
    config: ModelConfig,
    engines: Vec<Engine>,
    /// Preemptions of lifetimes that ended.
    preempted: u64,
}

impl Fleet {
    pub(super) fn new(config: ModelConfig, count: usize) -> Result<Self, InvalidModel> {
        config.validate()?;
        let mut fleet = Self {
            config,
            engines: Vec::with_capacity(count),
            preempted: 0,
        };
        for _ in 0..count {
            let model = EngineModel::new(config)?;
            fleet.engines.push(Engine {
                model,
                wake: None,
                life: 0,
                inside: BTreeMap::new(),
            });
        }
        Ok(fleet)
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
        self.preempted
            + self
                .engines
                .iter()
                .map(|engine| engine.model.counters().preemptions)
                .sum::<u64>()
    }

    /// A further engine, empty.
    pub(super) fn add(&mut self) -> usize {
        if let Ok(model) = EngineModel::new(self.config) {
            self.engines.push(Engine {
                model,
                wake: None,
                life: 0,
                inside: BTreeMap::new(),
            });
        }
        self.engines.len() - 1
    }

    /// An engine loses everything; the requests that were inside.
    pub(super) fn restart(&mut self, engine: usize) -> Vec<usize> {
        let slot = &mut self.engines[engine];
        self.preempted += slot.model.counters().preemptions;
        if let Ok(model) = EngineModel::new(self.config) {
            slot.model = model;
        }
        slot.life += 1;
        slot.wake = None;
        std::mem::take(&mut slot.inside).into_keys().collect()
    }

    /// Hands a request to an engine.
    pub(super) fn submit(
        &mut self,
        engine: usize,
        now: Micros,
        index: usize,
        prompt: Vec<Token>,
        output: u32,
    ) -> StepOutcome {
        let slot = &mut self.engines[engine];
        let id = RequestId(index as u64);
        let mut outcome = slot.model.step(now);
        let request = Request::new(
            id,
            prompt,
            Answer::Seeded {
                seed: index as u64,
                len: output,
            },
        );
        if slot.model.submit(now, request).is_ok() {
            slot.inside.insert(index, ());
        }
        let after = slot.model.step(now);
        outcome.batches.extend(after.batches);
        outcome.outputs.extend(after.outputs);
        outcome.next_wakeup = after.next_wakeup;
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
