//! Engines: the replay engine model behind a publisher of events, a replay socket and a request port.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use cairn_ingest::{EngineEvent, EngineHash, EventBatch, Medium, Removed, Stored};
use cairn_replay::engine_model::{
    Answer as Generated, CacheEvent, CpuTierConfig, EngineModel, Medium as ModelMedium, Micros, ModelConfig,
    Request as EngineRequest, RequestId, StepOutcome, Timing,
};

use crate::model::{Answer, Event, Life, Replay, Sent};
use crate::plan::{Bug, Plan};
use crate::rng::Rng;
use crate::world::{Link, World};

/// Requests in an engine from which on it answers 503.
const BUSY: usize = 48;

/// One engine process, or the place where it runs.
pub(crate) struct Engine {
    pub(crate) life: Life,
    pub(crate) up: bool,
    /// Taken away for good, until it is brought back as a new one.
    pub(crate) removed: bool,
    pub(crate) model: EngineModel,
    /// Next message.
    pub(crate) seq: u64,
    kept: VecDeque<Rc<EventBatch>>,
    /// Start time of the process, as its metrics tell it.
    pub(crate) start: u64,
    pub(crate) jobs: BTreeMap<u64, Sent>,
    next_id: u64,
    /// Prompt tokens computed since its start.
    pub(crate) computed: u64,
    /// Some agent lost events of this life for good.
    pub(crate) gapped: bool,
}

fn model(plan: &Plan, engine: usize, rng: &mut Rng) -> EngineModel {
    let config = ModelConfig {
        block_size: block_size(plan),
        gpu_blocks: plan.gpu_blocks,
        max_model_len: 640,
        max_batched_tokens: 512,
        max_num_seqs: 16,
        waiting_max: 100_000,
        prefix_caching: true,
        cpu: (plan.cpu_blocks > 0).then_some(CpuTierConfig {
            blocks: plan.cpu_blocks,
            ..CPU
        }),
        timing: Timing::llama_8b_h100(),
        tokens_in_events: true,
        hash_seed: rng.next() ^ engine as u64,
        hold_s: 5.0,
    };
    EngineModel::new(config).expect("a plan's sizes make a valid model")
}

const CPU: CpuTierConfig = CpuTierConfig {
    blocks: 0,
    store: cairn_replay::engine_model::CpuStorePolicy::OnStore,
};

/// Block size of every engine of a plan: the canonical one, or twice as much.
pub(crate) fn block_size(plan: &Plan) -> u32 {
    if plan.seed % 4 == 3 { 32 } else { 16 }
}

impl Engine {
    pub(crate) fn new(plan: &Plan, index: usize, rng: &mut Rng) -> Self {
        Self {
            life: Life(1),
            up: true,
            removed: false,
            model: model(plan, index, rng),
            seq: 0,
            kept: VecDeque::new(),
            start: 1,
            jobs: BTreeMap::new(),
            next_id: 0,
            computed: 0,
            gapped: false,
        }
    }

    /// Nothing runs and no event waits to be published.
    pub(crate) fn idle(&self) -> bool {
        let gauges = self.model.gauges();
        gauges.running + gauges.waiting + gauges.loading + gauges.held == 0 && !self.model.has_untold_events()
    }
}

fn convert(event: CacheEvent, block_size: u32) -> EngineEvent {
    let hashes = |list: Vec<cairn_replay::engine_model::EngineHash>| list.iter().map(|h| EngineHash(h.0)).collect();
    match event {
        CacheEvent::Stored {
            hashes: list,
            parent,
            tokens,
            medium,
            adapter,
            salt,
        } => {
            let gpu = medium == ModelMedium::Gpu;
            EngineEvent::Stored(Stored {
                hashes: hashes(list),
                parent: parent.map(|h| EngineHash(h.0)),
                // Engines leave tokens and salt out of the events of outer tiers.
                tokens: if gpu { tokens } else { Vec::new() },
                block_size: if gpu { block_size } else { 0 },
                medium: if gpu { Medium::Gpu } else { Medium::Cpu },
                adapter: adapter.map(|a| a.as_ref().into()),
                cache_salt: salt.filter(|_| gpu).map(|s| s.as_ref().into()),
                ..Stored::default()
            })
        }
        CacheEvent::Removed { hashes: list, medium } => EngineEvent::Removed(Removed {
            hashes: hashes(list),
            medium: if medium == ModelMedium::Gpu {
                Medium::Gpu
            } else {
                Medium::Cpu
            },
            ..Removed::default()
        }),
        CacheEvent::Cleared => EngineEvent::Cleared,
    }
}

impl World {
    pub(crate) fn engine_wake(&mut self, engine: usize, life: Life) {
        if self.engines[engine].life == life && self.engines[engine].up {
            self.engine_pump(engine);
        }
    }

    /// Lets the model come up to now, publishes and answers.
    pub(crate) fn engine_pump(&mut self, engine: usize) {
        let out: StepOutcome = self.engines[engine].model.step(Micros(self.now));
        for batch in out.batches {
            self.publish(engine, batch.events);
        }
        for output in out.outputs {
            let id = output.id.0;
            let Some(sent) = self.engines[engine].jobs.get(&id).cloned() else {
                continue;
            };
            if output.token.is_some() {
                self.engine_answer(engine, &sent, Answer::Token);
            }
            if let Some(finish) = output.finish {
                self.engines[engine].jobs.remove(&id);
                self.engines[engine].computed += u64::from(finish.prompt_tokens - finish.cached.total());
                let cached_tokens = finish.cached.total();
                self.engine_answer(engine, &sent, Answer::Done { cached_tokens });
            }
        }
        if let Some(at) = out.next_wakeup {
            let life = self.engines[engine].life;
            self.after(at.0.saturating_sub(self.now).max(1), Event::EngineWake { engine, life });
        }
    }

    fn engine_answer(&mut self, engine: usize, sent: &Sent, answer: Answer) {
        let event = Event::RouterAnswer {
            sent: sent.clone(),
            answer,
        };
        self.send(
            Link::FromEngine,
            engine,
            sent.router,
            u64::from(sent.attempt) << 32 | sent.request as u64,
            event,
        );
    }

    fn publish(&mut self, engine: usize, events: Vec<CacheEvent>) {
        let size = block_size(&self.plan);
        let salted = self.plan.bug != Some(Bug::SaltIgnored);
        let place = &mut self.engines[engine];
        let seq = place.seq;
        place.seq += 1;
        let mut events: Vec<EngineEvent> = events.into_iter().map(|e| convert(e, size)).collect();
        if !salted {
            for event in &mut events {
                if let EngineEvent::Stored(stored) = event {
                    stored.cache_salt = None;
                }
            }
        }
        let batch = Rc::new(EventBatch {
            seq,
            content: self.now.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seq,
            ts: self.now as f64 / 1e6,
            rank: None,
            events,
            refused: Vec::new(),
        });
        place.kept.push_back(Rc::clone(&batch));
        while place.kept.len() > self.plan.replay_kept {
            place.kept.pop_front();
        }
        self.note("engine publishes", &[engine as u64, seq, batch.events.len() as u64]);
        for agent in 0..self.agents.len() {
            if self.agents[agent].engine != engine || !self.agents[agent].subscribed() {
                continue;
            }
            if !self.calm && self.rng.percent(self.plan.event_loss_percent) {
                self.note("event lost", &[agent as u64, seq]);
                continue;
            }
            self.deliver(agent, Rc::clone(&batch));
            if !self.calm && self.rng.percent(1) {
                // A late copy of an old message: no restart, no harm.
                let kept = &self.engines[engine].kept;
                let old = Rc::clone(&kept[self.rng.index(kept.len())]);
                self.deliver(agent, old);
            }
        }
    }

    fn deliver(&mut self, agent: usize, batch: Rc<EventBatch>) {
        let to = &self.agents[agent];
        let (life, conn, engine) = (to.life, to.events_conn, to.engine);
        self.send(
            Link::Events,
            engine,
            agent,
            conn,
            Event::LiveBatch {
                agent,
                life,
                conn,
                batch,
            },
        );
    }

    /// The replay socket: everything from `from` on that is still kept, then the end marker.
    pub(crate) fn engine_replay(&mut self, agent: usize, life: Life, conn: u64, from: u64) {
        let engine = self.agents[agent].engine;
        let answer = |answer| Event::ReplayAnswer {
            agent,
            life,
            conn,
            answer,
        };
        if !self.engines[engine].up {
            self.after(50_000, answer(Replay::Failed));
            return;
        }
        let batches: Vec<_> = self.engines[engine]
            .kept
            .iter()
            .filter(|b| b.seq >= from)
            .cloned()
            .collect();
        self.note("engine replays", &[engine as u64, from, batches.len() as u64]);
        for batch in batches {
            self.send(Link::Replay, engine, agent, conn, answer(Replay::Batch(batch)));
        }
        self.send(Link::Replay, engine, agent, conn, answer(Replay::End));
    }

    pub(crate) fn engine_receive(&mut self, engine: usize, life: Life, sent: Sent) {
        if !self.engines[engine].up || self.engines[engine].life != life {
            self.engine_answer(engine, &sent, Answer::Failed);
            return;
        }
        if self.engines[engine].jobs.len() >= BUSY {
            self.engine_answer(engine, &sent, Answer::PushedBack);
            return;
        }
        let request = &self.requests[sent.request];
        let place = &mut self.engines[engine];
        let id = place.next_id;
        place.next_id += 1;
        let answer = Generated::Seeded {
            seed: id,
            len: request.answer,
        };
        let mut job = EngineRequest::new(RequestId(id), request.prompt.as_ref().clone(), answer);
        job.salt = request.salt.as_deref().map(Arc::from);
        if place.model.submit(Micros(self.now), job).is_err() {
            self.engine_answer(engine, &sent, Answer::PushedBack);
            return;
        }
        self.note(
            "engine takes",
            &[engine as u64, sent.request as u64, u64::from(sent.attempt)],
        );
        self.engines[engine].jobs.insert(id, sent);
        self.engine_pump(engine);
    }

    /// The router hung up on a request.
    pub(crate) fn hang_up(&mut self, engine: usize, request: usize, attempt: u32) {
        let place = &self.engines[engine];
        let found = place
            .jobs
            .iter()
            .find(|(_, s)| s.request == request && s.attempt == attempt)
            .map(|(id, _)| *id);
        if let Some(id) = found {
            let (life, delay) = (place.life, self.delay());
            self.after(delay, Event::EngineCancel { engine, life, id });
        }
    }

    pub(crate) fn engine_cancel(&mut self, engine: usize, life: Life, id: u64) {
        if self.engines[engine].life != life || !self.engines[engine].up {
            return;
        }
        self.engine_pump(engine);
        self.engines[engine].jobs.remove(&id);
        self.engines[engine].model.cancel(Micros(self.now), RequestId(id));
        self.engine_pump(engine);
    }

    /// The process dies; every request on it fails.
    pub(crate) fn engine_crash(&mut self, engine: usize) {
        let place = &mut self.engines[engine];
        if !place.up {
            return;
        }
        place.up = false;
        place.life.0 += 1;
        let jobs: Vec<Sent> = std::mem::take(&mut place.jobs).into_values().collect();
        self.note("engine dies", &[engine as u64]);
        for sent in jobs {
            self.engine_answer(engine, &sent, Answer::Failed);
        }
        if self.plan.bug != Some(Bug::RestartUnnoticed) {
            for agent in 0..self.agents.len() {
                if self.agents[agent].engine == engine {
                    self.agent_lose_events(agent);
                }
            }
        }
    }

    /// A new process with an empty cache, new hashes, and a counter that starts at 0.
    pub(crate) fn engine_revive(&mut self, engine: usize, life: Life) {
        if self.engines[engine].life != life || self.engines[engine].up || self.engines[engine].removed {
            return;
        }
        let fresh = model(&self.plan, engine, &mut self.rng);
        let unnoticed = self.plan.bug == Some(Bug::RestartUnnoticed);
        let place = &mut self.engines[engine];
        place.model = fresh;
        place.up = true;
        place.computed = 0;
        place.gapped = false;
        if !unnoticed {
            place.seq = 0;
            place.kept.clear();
            place.start = self.now;
        }
        self.note("engine starts", &[engine as u64]);
    }

    pub(crate) fn engine_reset_cache(&mut self, engine: usize) {
        if !self.engines[engine].up {
            return;
        }
        self.engine_pump(engine);
        if self.engines[engine].model.reset_prefix_cache(false) {
            self.note("engine resets its cache", &[engine as u64]);
            self.engine_pump(engine);
        }
    }
}
