//! What goes wrong, and how it heals.

use crate::agents::Agent;
use crate::agents::{engine_url, source_name};
use crate::model::Event;
use crate::world::World;

impl World {
    /// One fault, and the next one's time.
    pub(crate) fn fault(&mut self) {
        if self.calm {
            return;
        }
        let next = self.rng.range(10_000, self.plan.fault_every_ms * 2_000);
        self.after(next, Event::Fault);
        self.faults += 1;
        let engine = self.rng.index(self.engines.len());
        let agent = self.rng.index(self.agents.len());
        let node = self.rng.index(self.plan.nodes);
        let router = self.rng.index(self.plan.routers);
        match self.rng.range(0, 15) {
            0 | 1 => self.restart_engine(engine),
            2 => self.engine_reset_cache(engine),
            3 => self.restart_agent(agent),
            4 => self.restart_agent_from_nothing(agent),
            5 => self.hang_agent(agent),
            6 => self.take_over(agent),
            7 => self.cut_events(agent),
            8 => self.restart_node(node),
            9 => self.another_leader(),
            10 => self.split_node(node),
            11 => self.restart_router(router),
            12 => self.cut_feed(router),
            13 => self.drain(engine),
            _ => self.retire_engine(engine),
        }
    }

    fn restart_engine(&mut self, engine: usize) {
        if !self.engines[engine].up {
            return;
        }
        self.engine_crash(engine);
        let (life, span) = (self.engines[engine].life, self.rng.range(50_000, 1_500_000));
        self.after(span, Event::EngineRevive { engine, life });
    }

    fn restart_agent(&mut self, agent: usize) {
        if !self.agents[agent].up {
            return;
        }
        self.agent_crash(agent);
        let (life, span) = (self.agents[agent].life, self.rng.range(20_000, 2_500_000));
        self.after(span, Event::AgentRevive { agent, life });
    }

    fn restart_agent_from_nothing(&mut self, agent: usize) {
        self.agents[agent].checkpoint = None;
        self.restart_agent(agent);
    }

    /// It stands still while the world goes on, and then speaks again as if nothing had been.
    fn hang_agent(&mut self, agent: usize) {
        let span = self.rng.range(200_000, 6_000_000);
        self.agents[agent].paused_until = self.now + span;
        self.note("agent hangs", &[agent as u64, span]);
    }

    /// Another agent process takes the engine, while the first one hangs and may come back.
    fn take_over(&mut self, agent: usize) {
        let engine = self.agents[agent].engine;
        let living = self.agents.iter().filter(|a| a.engine == engine).count();
        if living > 1 || self.agents.len() > 12 || !self.agents[agent].up {
            return;
        }
        self.agents[agent].paused_until = self.now + self.rng.range(3_600_000, 8_000_000);
        let turn = self.agents.len() as u64;
        let next = Agent::new(&self.plan, engine, turn);
        self.agents.push(next);
        self.note("another agent comes", &[engine as u64, turn]);
        self.agent_open(self.agents.len() - 1);
    }

    fn cut_events(&mut self, agent: usize) {
        if self.agents[agent].up {
            self.note("events are cut", &[agent as u64]);
            self.agent_lose_events(agent);
        }
    }

    fn restart_node(&mut self, node: usize) {
        if !self.cluster.nodes[node].up {
            return;
        }
        self.node_crash(node);
        let (life, span) = (self.cluster.nodes[node].life, self.rng.range(50_000, 2_000_000));
        self.after(span, Event::NodeRevive { node, life });
        if self.rng.percent(10) {
            for other in 0..self.plan.nodes {
                if self.cluster.nodes[other].up {
                    self.node_crash(other);
                    let (life, span) = (self.cluster.nodes[other].life, self.rng.range(50_000, 1_000_000));
                    self.after(span, Event::NodeRevive { node: other, life });
                }
            }
        }
    }

    fn another_leader(&mut self) {
        let able: Vec<usize> = (0..self.plan.nodes)
            .filter(|n| self.cluster.nodes[*n].up && !self.cluster.nodes[*n].alone)
            .collect();
        if able.len() * 2 > self.plan.nodes {
            let to = able[self.rng.index(able.len())];
            self.change_leader(to);
        }
    }

    fn split_node(&mut self, node: usize) {
        self.isolate(node);
        let span = self.rng.range(100_000, 2_500_000);
        self.after(span, Event::Heal { node });
    }

    fn restart_router(&mut self, router: usize) {
        if !self.routers[router].up {
            return;
        }
        self.router_crash(router);
        let (life, span) = (self.routers[router].life, self.rng.range(20_000, 1_000_000));
        self.after(span, Event::RouterRevive { router, life });
    }

    fn cut_feed(&mut self, router: usize) {
        if self.routers[router].following.is_some() {
            self.note("feed is cut", &[router as u64]);
            self.router_unfollow(router);
        }
    }

    fn drain(&mut self, engine: usize) {
        if let Some(worker) = self.worker_of(&engine_url(engine)) {
            self.note("worker drains", &[u64::from(worker.0)]);
            self.set_draining(worker, true);
            let span = self.rng.range(300_000, 2_000_000);
            self.after(span, Event::Undrain { worker });
        }
    }

    /// An engine goes for good, with its agents; later another one starts at its address.
    fn retire_engine(&mut self, engine: usize) {
        let others = (0..self.engines.len())
            .filter(|e| *e != engine && self.engines[*e].up)
            .count();
        if others == 0 || !self.engines[engine].up {
            return;
        }
        self.note("engine is retired", &[engine as u64]);
        self.engine_crash(engine);
        for agent in 0..self.agents.len() {
            if self.agents[agent].engine == engine && self.agents[agent].up {
                self.agents[agent].checkpoint = None;
                self.agent_crash(agent);
                let (life, span) = (self.agents[agent].life, self.rng.range(1_000_000, 3_000_000));
                self.after(span, Event::AgentRevive { agent, life });
            }
        }
        self.remove_source(&source_name(engine));
        let (life, span) = (self.engines[engine].life, self.rng.range(500_000, 3_000_000));
        self.after(span, Event::EngineRevive { engine, life });
    }

    /// From here on everything is well: what is down comes back, what is cut heals, nothing is lost any more.
    pub(crate) fn calm(&mut self) {
        self.calm = true;
        self.note("calm", &[]);
        for node in 0..self.plan.nodes {
            self.after(100_000, Event::Heal { node });
            let life = self.cluster.nodes[node].life;
            self.after(200_000, Event::NodeRevive { node, life });
        }
        for engine in 0..self.engines.len() {
            let life = self.engines[engine].life;
            self.after(100_000, Event::EngineRevive { engine, life });
        }
        for agent in 0..self.agents.len() {
            let life = self.agents[agent].life;
            self.after(150_000, Event::AgentRevive { agent, life });
            let resumed = self.now + 50_000;
            let place = &mut self.agents[agent];
            place.paused_until = place.paused_until.min(resumed);
        }
        for router in 0..self.plan.routers {
            let life = self.routers[router].life;
            self.after(100_000, Event::RouterRevive { router, life });
        }
        let workers: Vec<_> = self.cluster.truth.registry().workers.keys().copied().collect();
        for worker in workers {
            self.after(1_000_000, Event::Undrain { worker });
        }
    }
}
