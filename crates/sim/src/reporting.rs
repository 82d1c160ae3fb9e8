//! The agent's way to the index: registration, batches, answers.

use cairn_index::RegisterOutcome;
use cairn_ingest::{Effect, Registration, Source};

use crate::model::{Event, FromAgent, Life, ToAgent, ToNode};
use crate::world::{Link, World};

/// Leases are renewed this often.
const RENEW_US: u64 = 500_000;
/// Batches in one push.
const PUSH_BATCHES: usize = 8;

impl World {
    pub(crate) fn agent_register(&mut self, agent: usize, life: Life) {
        if !self.agent_hears(agent, life) {
            if self.agents[agent].up && self.agents[agent].life == life {
                self.after(100_000, Event::AgentRegister { agent, life });
            }
            return;
        }
        if self.agents[agent].registering.is_some() {
            return;
        }
        let place = &mut self.agents[agent];
        let Some(source) = place.source.as_ref() else { return };
        let resume = source.resume();
        place.registering = Some(self.now);
        let message = ToNode::Register {
            from: FromAgent {
                agent,
                life,
                conn: place.conn,
            },
            spec: Box::new(place.spec(&self.plan)),
            resume,
        };
        self.note("agent registers", &[agent as u64, resume.map_or(0, |i| i.0)]);
        self.tell_node(agent, message);
    }

    pub(crate) fn tell_node(&mut self, agent: usize, message: ToNode) {
        let (node, conn) = (self.agents[agent].node, self.agents[agent].conn);
        let event = Event::NodeReceive {
            node,
            message: Box::new(message),
        };
        self.send(Link::ToNode, agent, node, conn, event);
    }

    /// Carries out effects and sends what is due.
    pub(crate) fn agent_drive(&mut self, agent: usize) {
        let life = self.agents[agent].life;
        if !self.agent_hears(agent, life) {
            return;
        }
        loop {
            let place = &mut self.agents[agent];
            let Some(effect) = place.source.as_mut().and_then(Source::poll_effect) else {
                break;
            };
            match effect {
                Effect::RequestReplay { from } => {
                    let (conn, engine) = (place.events_conn, place.engine);
                    let event = Event::ReplayRequest {
                        agent,
                        life,
                        conn,
                        from,
                    };
                    self.send(Link::Replay, agent, engine, conn, event);
                }
                Effect::Reregister => {
                    self.note("agent begins anew", &[agent as u64]);
                    // Answers to what was sent for the old life don't concern the new one.
                    self.agents[agent].conn += 1;
                    self.agents[agent].ready = false;
                    self.agents[agent].registering = None;
                    self.agents[agent].waiting_since = None;
                    self.agents[agent].unanswered = 0;
                    self.agent_register(agent, life);
                }
                Effect::Stop { current } => {
                    // Another agent has it, or an own registration that came late: ask, and stand by while it is held.
                    self.note("agent is fenced", &[agent as u64, current.0]);
                    self.agents[agent].conn += 1;
                    self.agents[agent].ready = false;
                    self.agents[agent].registering = None;
                    self.agents[agent].waiting_since = None;
                    self.agents[agent].unanswered = 0;
                    self.after(300_000, Event::AgentRegister { agent, life });
                }
            }
        }
        self.agent_push(agent);
    }

    fn agent_push(&mut self, agent: usize) {
        let now = self.ms();
        let place = &mut self.agents[agent];
        let Some(source) = place.source.as_mut() else { return };
        let Some(registration) = source.registration().cloned() else {
            return;
        };
        if !place.ready {
            return;
        }
        loop {
            let mut batches = Vec::new();
            while batches.len() < PUSH_BATCHES {
                let Some(source) = self.agents[agent].source.as_mut() else {
                    return;
                };
                let Some(batch) = source.next_batch(now) else { break };
                batches.push(batch.clone());
            }
            let place = &mut self.agents[agent];
            let due = self.now - place.renewed_at >= RENEW_US;
            if batches.is_empty() && !due {
                return;
            }
            if due {
                place.renewed_at = self.now;
            }
            if !batches.is_empty() {
                place.waiting_since.get_or_insert(self.now);
                place.unanswered += batches.len() as u64;
            }
            let from = FromAgent {
                agent,
                life: place.life,
                conn: place.conn,
            };
            let renew = due.then_some((registration.source, registration.incarnation));
            let seqs: Vec<u64> = batches.iter().map(|b| b.seq.0).collect();
            let done = batches.len() < PUSH_BATCHES;
            self.note(
                "agent pushes",
                &[&[agent as u64, registration.incarnation.0], seqs.as_slice()].concat(),
            );
            self.tell_node(agent, ToNode::Push { from, batches, renew });
            if done {
                return;
            }
        }
    }

    pub(crate) fn agent_receive(&mut self, agent: usize, life: Life, conn: u64, message: ToAgent) {
        if !self.agent_hears(agent, life) || self.agents[agent].conn != conn {
            return;
        }
        match message {
            ToAgent::Registered(outcome) => self.agent_registered(agent, life, outcome),
            ToAgent::Acks(acks) => {
                let now = self.ms();
                for (source, incarnation, seq, outcome) in acks {
                    self.note("agent hears", &[agent as u64, incarnation.0, seq.0]);
                    self.check_ack(source, incarnation, seq, &outcome);
                    let place = &mut self.agents[agent];
                    place.unanswered = place.unanswered.saturating_sub(1);
                    place.waiting_since = (place.unanswered > 0).then_some(self.now);
                    if let Some(source) = place.source.as_mut() {
                        source.acked(now, incarnation, seq, &outcome);
                    }
                }
                self.agent_drive(agent);
            }
            ToAgent::Audit {
                seq,
                incarnation,
                holders,
            } => {
                let now = self.ms();
                let place = &mut self.agents[agent];
                if let Some(source) = place.source.as_mut()
                    && source.registration().is_some_and(|r| r.incarnation == incarnation)
                {
                    let outcome = source.audit(now, seq, &holders);
                    if outcome == cairn_ingest::AuditOutcome::Drift {
                        self.check_drift(agent);
                    }
                }
                self.agent_drive(agent);
            }
        }
    }

    fn agent_registered(&mut self, agent: usize, life: Life, outcome: RegisterOutcome) {
        self.agents[agent].registering = None;
        match outcome {
            RegisterOutcome::Registered {
                source,
                incarnation,
                worker,
                holders,
                seq,
                resumed,
            } => {
                self.note(
                    "agent is registered",
                    &[agent as u64, incarnation.0, seq.0, u64::from(resumed)],
                );
                let now = self.ms();
                let place = &mut self.agents[agent];
                let _ = worker;
                place.ready = true;
                if let Some(own) = place.source.as_mut() {
                    own.registered(
                        now,
                        Registration {
                            source,
                            incarnation,
                            holders,
                            seq,
                            resumed,
                        },
                    );
                }
                self.agent_drive(agent);
            }
            RegisterOutcome::HeldBy { .. } => {
                self.note("agent must wait", &[agent as u64]);
                let nodes = self.plan.nodes;
                self.agents[agent].node = (self.agents[agent].node + 1) % nodes;
                self.after(500_000, Event::AgentRegister { agent, life });
            }
            RegisterOutcome::Invalid { reason } => self.broken("INV-05", format!("agent {agent} is refused: {reason}")),
        }
    }
}
