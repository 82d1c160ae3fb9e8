//! Agents: the ingest core between one engine's sockets and the index.

use cairn_index::{HolderSpec, Incarnation, PoolSpec, Reach, Role, SourceId, SourceSpec, Tier, WorkerSpec};
use cairn_ingest::{EventBatch, ReplayEnd, Source, SourceConfig};
use cairn_routing::{LoadReport, Micros};

use crate::engines::block_size;
use crate::model::{Event, FromAgent, Life, Replay, ToNode};
use crate::plan::Plan;
use crate::world::{BLOCK, POOL, SEED, World};

/// A batch or registration without an answer for this long means that the connection is dead.
const ANSWER_TIMEOUT_US: u64 = 1_500_000;

/// One agent process, or the place where it runs.
pub(crate) struct Agent {
    pub(crate) engine: usize,
    /// Its id in registrations.
    pub(crate) name: String,
    pub(crate) life: Life,
    pub(crate) up: bool,
    /// It hangs until then: hears nothing, says nothing, knows nothing of it.
    pub(crate) paused_until: u64,
    pub(crate) source: Option<Source>,
    pub(crate) checkpoint: Option<Vec<u8>>,
    pub(crate) events_conn: u64,
    pub(crate) events_up: bool,
    pub(crate) node: usize,
    pub(crate) conn: u64,
    /// This process has an answer to its registration over the present connection: before that nothing is sent.
    pub(crate) ready: bool,
    pub(crate) registering: Option<u64>,
    pub(crate) waiting_since: Option<u64>,
    pub(crate) unanswered: u64,
    pub(crate) renewed_at: u64,
    audited_at: u64,
    loads: u64,
    /// Gaps that its source had counted when it was last looked at.
    pub(crate) gaps_seen: u64,
}

/// Tiers of a source in the order of its holders.
pub(crate) fn tiers(plan: &Plan) -> Vec<Tier> {
    if plan.cpu_blocks > 0 {
        vec![Tier::Gpu, Tier::Cpu]
    } else {
        vec![Tier::Gpu]
    }
}

/// Name of an engine's source.
pub(crate) fn source_name(engine: usize) -> String {
    format!("http://engine-{engine}:8000#0")
}

/// Name of an engine.
pub(crate) fn engine_url(engine: usize) -> String {
    format!("http://engine-{engine}:8000")
}

impl Agent {
    pub(crate) fn new(plan: &Plan, engine: usize, turn: u64) -> Self {
        Self {
            engine,
            name: format!("agent-{engine}-{turn}"),
            life: Life(1),
            up: true,
            paused_until: 0,
            source: None,
            checkpoint: None,
            events_conn: 0,
            events_up: false,
            node: engine % plan.nodes,
            conn: 0,
            ready: false,
            registering: None,
            waiting_since: None,
            unanswered: 0,
            renewed_at: 0,
            audited_at: 0,
            loads: 0,
            gaps_seen: 0,
        }
    }

    /// Live messages reach it.
    pub(crate) fn subscribed(&self) -> bool {
        self.up && self.events_up
    }

    fn config(plan: &Plan) -> SourceConfig {
        SourceConfig {
            seed: SEED,
            pool: POOL.to_owned(),
            block_size: BLOCK,
            tiers: tiers(plan),
            capacity_blocks: u64::from(plan.gpu_blocks),
            multimodal: false,
            replay: plan.replay,
            events: true,
        }
    }

    pub(crate) fn spec(&self, plan: &Plan) -> SourceSpec {
        let size = block_size(plan);
        SourceSpec {
            name: source_name(self.engine),
            agent: self.name.clone(),
            pool: PoolSpec {
                name: POOL.to_owned(),
                models: vec!["model".to_owned()],
                block_size: BLOCK,
                max_model_len: Some(640),
                model_root: None,
            },
            worker: WorkerSpec {
                engine_url: engine_url(self.engine),
                rank: 0,
                ranks: 1,
                host: format!("host-{}", self.engine),
                role: Role::Both,
                engine_kind: "vllm".to_owned(),
                engine_block_size: size,
                capacity_blocks: u64::from(plan.gpu_blocks),
                max_num_seqs: 16,
                max_batched_tokens: 512,
                adapters: Vec::new(),
                bootstrap: None,
            },
            holders: tiers(plan)
                .into_iter()
                .map(|tier| HolderSpec {
                    tier,
                    fetch_unit: size,
                    reach: Reach::Worker,
                })
                .collect(),
        }
    }
}

impl World {
    /// Starts the process: what is due again and again, and the first registration.
    pub(crate) fn agent_open(&mut self, agent: usize) {
        let now = self.ms();
        let config = Agent::config(&self.plan);
        let place = &mut self.agents[agent];
        let life = place.life;
        let restored = place
            .checkpoint
            .as_ref()
            .map(|bytes| Source::restore(config.clone(), now, bytes));
        place.source = Some(match restored {
            Some(Ok(source)) => source,
            Some(Err(_)) | None => Source::new(config, now),
        });
        let (a, b, c) = (
            self.rng.range(0, 100_000),
            self.rng.range(0, 200_000),
            self.rng.range(0, 100_000),
        );
        self.after(a, Event::AgentTick { agent, life });
        self.after(b, Event::AgentPoll { agent, life });
        self.after(c, Event::AgentConnect { agent, life });
        self.after(c / 2, Event::AgentRegister { agent, life });
    }

    /// Whether an event of this life may be handled now.
    pub(crate) fn agent_hears(&self, agent: usize, life: Life) -> bool {
        let place = &self.agents[agent];
        place.up && place.life == life && self.now >= place.paused_until
    }

    pub(crate) fn agent_crash(&mut self, agent: usize) {
        self.remember_gaps(agent);
        self.agents[agent].gaps_seen = 0;
        let place = &mut self.agents[agent];
        place.up = false;
        place.life.0 += 1;
        place.conn += 1;
        place.events_conn += 1;
        place.events_up = false;
        place.source = None;
        place.ready = false;
        place.registering = None;
        place.waiting_since = None;
        self.note("agent dies", &[agent as u64]);
    }

    pub(crate) fn agent_revive(&mut self, agent: usize, life: Life) {
        if self.agents[agent].life == life && !self.agents[agent].up {
            self.agents[agent].up = true;
            self.note("agent starts", &[agent as u64]);
            self.agent_open(agent);
        }
    }

    /// The subscription is cut; the agent sees it and connects again.
    pub(crate) fn agent_lose_events(&mut self, agent: usize) {
        let now = self.ms();
        let place = &mut self.agents[agent];
        if !place.events_up {
            return;
        }
        place.events_up = false;
        place.events_conn += 1;
        let life = place.life;
        if let Some(source) = place.source.as_mut() {
            source.disconnected(now);
        }
        let soon = self.rng.range(20_000, 200_000);
        self.after(soon, Event::AgentConnect { agent, life });
    }

    pub(crate) fn agent_connect(&mut self, agent: usize, life: Life) {
        if self.agents[agent].life != life || !self.agents[agent].up || self.agents[agent].events_up {
            return;
        }
        let engine = self.agents[agent].engine;
        if !self.engines[engine].up || self.now < self.agents[agent].paused_until {
            self.after(150_000, Event::AgentConnect { agent, life });
            return;
        }
        let (now, start) = (self.ms(), self.engines[engine].start);
        let place = &mut self.agents[agent];
        place.events_up = true;
        place.events_conn += 1;
        if let Some(source) = place.source.as_mut() {
            source.process_started(now, start);
            source.connected(now);
        }
        self.note("agent subscribes", &[agent as u64, start]);
        self.agent_drive(agent);
    }

    pub(crate) fn agent_live(&mut self, agent: usize, life: Life, conn: u64, batch: &EventBatch) {
        // What arrives while it hangs is lost as in an overfull queue.
        if !self.agent_hears(agent, life) || self.agents[agent].events_conn != conn {
            return;
        }
        let now = self.ms();
        if let Some(source) = self.agents[agent].source.as_mut() {
            source.live(now, batch.clone());
        }
        self.agent_drive(agent);
    }

    pub(crate) fn agent_replay(&mut self, agent: usize, life: Life, conn: u64, answer: Replay) {
        if !self.agent_hears(agent, life) || self.agents[agent].events_conn != conn {
            return;
        }
        let now = self.ms();
        if let Some(source) = self.agents[agent].source.as_mut() {
            match answer {
                Replay::Batch(batch) => source.replayed(now, batch.as_ref().clone()),
                Replay::End => source.replay_ended(now, ReplayEnd::Complete),
                Replay::Failed => source.replay_ended(now, ReplayEnd::Failed),
            }
        }
        self.agent_drive(agent);
    }

    pub(crate) fn agent_tick(&mut self, agent: usize, life: Life) {
        if self.agents[agent].life != life || !self.agents[agent].up {
            return;
        }
        self.after(100_000, Event::AgentTick { agent, life });
        if !self.agent_hears(agent, life) {
            return;
        }
        let now = self.ms();
        let place = &mut self.agents[agent];
        if let Some(source) = place.source.as_mut() {
            source.tick(now);
        }
        let late = |since: Option<u64>| since.is_some_and(|at| self.now - at > ANSWER_TIMEOUT_US);
        if late(place.waiting_since) || late(place.registering) {
            self.agent_lose_index(agent);
        }
        self.agent_drive(agent);
    }

    /// The connection to its node broke: another node, and what has no answer is sent again.
    pub(crate) fn agent_lose_index(&mut self, agent: usize) {
        let nodes = self.plan.nodes;
        let place = &mut self.agents[agent];
        place.conn += 1;
        place.node = (place.node + 1) % nodes;
        place.ready = false;
        place.registering = None;
        place.waiting_since = None;
        place.unanswered = 0;
        if let Some(source) = place.source.as_mut() {
            source.push_stream_lost();
        }
        let life = place.life;
        self.note("agent loses the index", &[agent as u64]);
        let soon = self.rng.range(10_000, 150_000);
        self.after(soon, Event::AgentRegister { agent, life });
    }

    /// Metrics of the engine, a checkpoint, an audit, and the load report for routers.
    pub(crate) fn agent_poll(&mut self, agent: usize, life: Life) {
        if self.agents[agent].life != life || !self.agents[agent].up {
            return;
        }
        self.after(400_000, Event::AgentPoll { agent, life });
        if !self.agent_hears(agent, life) {
            return;
        }
        let (now, engine) = (self.ms(), self.agents[agent].engine);
        let place = &self.engines[engine];
        if place.up {
            let (start, computed, gauges) = (place.start, place.computed, place.model.gauges());
            if let Some(source) = self.agents[agent].source.as_mut() {
                source.process_started(now, start);
                source.served(now, computed);
            }
            self.agents[agent].loads += 1;
            let report = LoadReport {
                running: gauges.running as u32,
                waiting: gauges.waiting as u32,
                kv_usage: gauges.kv_usage as f32,
                age: Micros(0),
            };
            self.spread_load(engine, report);
        }
        if self.rng.percent(50) {
            let place = &mut self.agents[agent];
            place.checkpoint = place.source.as_ref().map(Source::checkpoint);
        }
        self.agent_drive(agent);
        self.agent_audit(agent, life);
    }

    pub(crate) fn agent_audit(&mut self, agent: usize, life: Life) {
        let place = &mut self.agents[agent];
        let Some((source, incarnation)) = registered(place) else {
            return;
        };
        if self.now - place.audited_at < 2_000_000 || !place.ready {
            return;
        }
        place.audited_at = self.now;
        let from = FromAgent {
            agent,
            life,
            conn: place.conn,
        };
        self.tell_node(
            agent,
            ToNode::Audit {
                from,
                source,
                incarnation,
            },
        );
    }
}

/// Source and lifetime of an agent that is registered.
pub(crate) fn registered(agent: &Agent) -> Option<(SourceId, Incarnation)> {
    agent.source.as_ref()?.registration().map(|r| (r.source, r.incarnation))
}
