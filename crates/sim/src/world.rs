//! The world: its processes, its heap of events, and the loop that plays them.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use cairn_blocks::{BlockSize, ClusterSeed};

use crate::agents::Agent;
use crate::checks::{Ledgered, Violation};
use crate::cluster::Cluster;
use crate::engines::Engine;
use crate::model::{Event, Gone};
use crate::plan::Plan;
use crate::requests::Request;
use crate::rng::Rng;
use crate::routers::Router;
use crate::trace::Trace;

/// The cluster's seed.
pub(crate) const SEED: ClusterSeed = ClusterSeed(0x00c4_1412);
/// The pool.
pub(crate) const POOL: &str = "pool";
/// Canonical block size in tokens.
pub(crate) const BLOCK: BlockSize = BlockSize::DEFAULT;
/// Events that one run may take: a run that needs more is stuck in a loop.
const MAX_EVENTS: u64 = 4_000_000;

/// What one run came to.
#[derive(Clone, Debug)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// Its trace.
    pub trace: Trace,
    /// The first invariant that broke.
    pub violation: Option<Violation>,
    /// Events played.
    pub events: u64,
    /// Requests that came.
    pub requests: u64,
    /// Those that were answered in full.
    pub answered: u64,
    /// Those that were given up.
    pub failed: u64,
    /// Those that their clients aborted.
    pub aborted: u64,
    /// Entries in the log.
    pub log: u64,
    /// Faults that came.
    pub faults: u64,
    /// Prompt tokens that the committed view promised at the decision, of answered requests.
    pub predicted_tokens: u64,
    /// Prompt tokens that engines reused.
    pub cached_tokens: u64,
    /// How often each invariant was looked at.
    pub looked_at: BTreeMap<&'static str, u64>,
}

/// A prompt and its salt.
pub(crate) type Asked = (Rc<Vec<u32>>, Option<Rc<str>>);

/// See the module.
pub(crate) struct World {
    pub(crate) plan: Plan,
    pub(crate) rng: Rng,
    pub(crate) now: u64,
    heap: BTreeMap<(u64, u64), Event>,
    seq: u64,
    pub(crate) events: u64,
    pub(crate) trace: Trace,
    pub(crate) engines: Vec<Engine>,
    pub(crate) agents: Vec<Agent>,
    pub(crate) cluster: Cluster,
    pub(crate) routers: Vec<Router>,
    pub(crate) requests: Vec<Request>,
    /// Prompts with their salts that were ever asked, for probes.
    pub(crate) asked: Vec<Asked>,
    /// Salts that were ever sent to an engine.
    pub(crate) served: BTreeSet<(usize, String)>,
    pub(crate) gone: Vec<Gone>,
    /// Next delivery on an ordered connection, by its name.
    fifo: BTreeMap<(u8, usize, usize, u64), u64>,
    pub(crate) calm: bool,
    pub(crate) faults: u64,
    pub(crate) ledgered: Ledgered,
    pub(crate) violation: Option<Violation>,
}

/// Kinds of ordered connections.
#[derive(Clone, Copy)]
pub(crate) enum Link {
    Events = 0,
    Replay = 1,
    ToNode = 2,
    ToAgent = 3,
    Feed = 4,
    ToEngine = 5,
    FromEngine = 6,
}

impl World {
    fn new(plan: Plan) -> Self {
        let mut rng = Rng::new(plan.seed);
        let engines = (0..plan.engines).map(|i| Engine::new(&plan, i, &mut rng)).collect();
        let agents = (0..plan.engines).map(|i| Agent::new(&plan, i, 0)).collect();
        let cluster = Cluster::new(plan.nodes);
        let routers = (0..plan.routers).map(|i| Router::new(&plan, i, 1)).collect();
        let trace = Trace::new(plan.keep_trace);
        let mut world = Self {
            rng,
            now: 1_000_000,
            heap: BTreeMap::new(),
            seq: 0,
            events: 0,
            trace,
            engines,
            agents,
            cluster,
            routers,
            requests: Vec::new(),
            asked: Vec::new(),
            served: BTreeSet::new(),
            gone: Vec::new(),
            fifo: BTreeMap::new(),
            calm: false,
            faults: 0,
            ledgered: Ledgered::default(),
            violation: None,
            plan,
        };
        world.open();
        world
    }

    fn open(&mut self) {
        self.cluster_open();
        for agent in 0..self.agents.len() {
            self.agent_open(agent);
        }
        for router in 0..self.routers.len() {
            self.router_open(router);
        }
        self.after(300_000, Event::Arrive { request: 0 });
        if self.plan.fault_every_ms > 0 {
            self.after(500_000, Event::Fault);
        }
        self.after(self.plan.faults_end_ms * 1_000, Event::Calm);
        self.after(100_000, Event::Check);
    }

    /// Puts an event on the heap, `span` microseconds from now.
    pub(crate) fn after(&mut self, span: u64, event: Event) {
        self.seq += 1;
        self.heap.insert((self.now + span, self.seq), event);
    }

    /// A network delay.
    pub(crate) fn delay(&mut self) -> u64 {
        self.rng.range(50, self.plan.delay_us_max)
    }

    /// Sends over an ordered connection: it arrives after everything sent before on it.
    pub(crate) fn send(&mut self, link: Link, from: usize, to: usize, conn: u64, event: Event) {
        let due = self.now + self.delay();
        let last = self.fifo.entry((link as u8, from, to, conn)).or_insert(0);
        let due = due.max(*last + 1);
        *last = due;
        self.seq += 1;
        self.heap.insert((due, self.seq), event);
    }

    /// Writes down what happened.
    pub(crate) fn note(&mut self, what: &'static str, ids: &[u64]) {
        self.trace.note(self.now, what, ids);
    }

    /// Milliseconds for the ingest core.
    pub(crate) fn ms(&self) -> cairn_ingest::Millis {
        cairn_ingest::Millis(self.now / 1_000)
    }

    /// Microseconds for the routing core.
    pub(crate) fn us(&self) -> cairn_routing::Micros {
        cairn_routing::Micros(self.now)
    }

    fn play(&mut self) {
        let end = 1_000_000 + self.plan.end_ms * 1_000;
        while self.violation.is_none() {
            let Some(((due, _), event)) = self.heap.pop_first() else {
                break;
            };
            if due > end {
                break;
            }
            if self.events >= MAX_EVENTS {
                self.broken("INV-12", format!("{MAX_EVENTS} events and no end: something loops"));
                break;
            }
            self.events += 1;
            self.now = due;
            self.dispatch(event);
        }
        if self.violation.is_none() {
            self.check_at_the_end();
        }
    }

    fn dispatch(&mut self, event: Event) {
        match event {
            Event::EngineWake { engine, life } => self.engine_wake(engine, life),
            Event::EngineRevive { engine, life } => self.engine_revive(engine, life),
            Event::EngineReceive { engine, life, sent } => self.engine_receive(engine, life, sent),
            Event::EngineCancel { engine, life, id } => self.engine_cancel(engine, life, id),
            Event::LiveBatch {
                agent,
                life,
                conn,
                batch,
            } => self.agent_live(agent, life, conn, &batch),
            Event::ReplayRequest {
                agent,
                life,
                conn,
                from,
            } => self.engine_replay(agent, life, conn, from),
            Event::ReplayAnswer {
                agent,
                life,
                conn,
                answer,
            } => self.agent_replay(agent, life, conn, answer),
            Event::AgentRevive { agent, life } => self.agent_revive(agent, life),
            Event::AgentTick { agent, life } => self.agent_tick(agent, life),
            Event::AgentPoll { agent, life } => self.agent_poll(agent, life),
            Event::AgentConnect { agent, life } => self.agent_connect(agent, life),
            Event::AgentRegister { agent, life } => self.agent_register(agent, life),
            Event::AgentReceive {
                agent,
                life,
                conn,
                message,
            } => self.agent_receive(agent, life, conn, message),
            Event::NodeReceive { node, message } => self.node_receive(node, message),
            Event::LeaderReceive { term, message } => self.leader_receive(term, *message),
            Event::LeaderFlush { term } => self.leader_flush(term),
            Event::Commit { term, entry } => self.commit(term, entry),
            Event::NodeApply { node, life } => self.node_apply(node, life),
            Event::NodeRevive { node, life } => self.node_revive(node, life),
            Event::NodeIdle { node, life } => self.node_idle(node, life),
            Event::NodeSnapshot { node, life } => self.node_snapshot(node, life),
            Event::Elect { term } => self.elect(term),
            Event::LeaseCheck { term } => self.lease_check(term),
            Event::Heal { node } => self.heal(node),
            Event::RouterRevive { router, life } => self.router_revive(router, life),
            Event::RouterFollow { router, life } => self.router_follow(router, life),
            Event::RouterReceive {
                router,
                life,
                conn,
                frame,
                quorum_age_us,
            } => {
                self.router_receive(router, life, conn, frame, quorum_age_us);
            }
            Event::RouterTick { router, life } => self.router_tick(router, life),
            Event::SoftRouter { router, life, frame } => self.router_soft(router, life, &frame),
            Event::SoftLoad {
                router,
                life,
                source,
                report,
            } => self.router_load(router, life, source, &report),
            Event::Arrive { request } => self.arrive(request),
            Event::Abort { request } => self.abort(request),
            Event::RouterAnswer { sent, answer } => self.router_answer(&sent, answer),
            Event::Undrain { worker } => self.set_draining(worker, false),
            Event::Fault => self.fault(),
            Event::Calm => self.calm(),
            Event::Check => self.check(),
        }
    }

    fn report(self) -> Report {
        let count = |want: fn(&Request) -> bool| self.requests.iter().filter(|r| want(r)).count() as u64;
        Report {
            seed: self.plan.seed,
            violation: self.violation.clone(),
            events: self.events,
            requests: self.requests.len() as u64,
            answered: count(Request::answered),
            failed: count(Request::failed),
            aborted: count(Request::aborted),
            log: self.cluster.len(),
            faults: self.faults,
            predicted_tokens: self.ledgered.predicted_tokens,
            cached_tokens: self.ledgered.cached_tokens,
            looked_at: self.ledgered.looked_at.clone(),
            trace: self.trace,
        }
    }
}

/// Plays one plan to its end, or to the first invariant that breaks.
#[must_use]
pub fn run(plan: Plan) -> Report {
    let mut world = World::new(plan);
    world.play();
    world.report()
}
