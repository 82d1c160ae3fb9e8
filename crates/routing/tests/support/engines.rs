//! Engines in virtual time for the tests of this crate: first come first served, default speeds, a cache without bound.
#![allow(clippy::unwrap_used, missing_docs, dead_code)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cairn_blocks::BlockKey;
use cairn_index::WorkerId;
use cairn_routing::{Choice, Ending, FrameOutcome, Micros, RequestFacts, Reuse, Routing, Ticket, WorkerFacts, cost};

use crate::fleet::{named, request, whole};

/// A prompt on its way through an engine.
struct Job {
    router: usize,
    ticket: Option<Ticket>,
    keys: Vec<BlockKey>,
    prompt_tokens: u32,
    decode: Micros,
}

#[derive(Default)]
struct Engine {
    queue: VecDeque<Job>,
    /// Blocks, and since when every view shows them.
    cache: BTreeMap<BlockKey, Micros>,
    busy: bool,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Prefilled { worker: u32 },
    Ended { at: usize },
    Frames,
}

/// Routers in front of engines; every router sees every view change [`World::LAG`] after it happened.
pub struct World {
    pub routers: Vec<Routing>,
    engines: BTreeMap<u32, Engine>,
    events: BTreeSet<(Micros, u64, Event)>,
    seq: u64,
    pub now: Micros,
    ending: Vec<Option<(usize, Ticket, u32)>>,
    /// Prefills of at least half of their prompt, by worker.
    pub cold: BTreeMap<u32, u32>,
    pub computed_tokens: u64,
    pub busy_us: BTreeMap<u32, u64>,
    pub prompt_tokens: u64,
    pub hit_tokens: u64,
    pub ttft: Vec<Micros>,
    pub last_choice: Option<Choice>,
}

impl World {
    pub const LAG: Micros = Micros::from_ms(30);

    pub fn new(routers: usize, workers: &[WorkerFacts]) -> Self {
        let routers = (0..routers)
            .map(|r| named(&format!("r{r}"), 100 + r as u64, workers))
            .collect();
        let mut world = Self {
            routers,
            engines: workers.iter().map(|w| (w.worker.0, Engine::default())).collect(),
            events: BTreeSet::new(),
            seq: 0,
            now: Micros(0),
            ending: Vec::new(),
            cold: BTreeMap::new(),
            computed_tokens: 0,
            busy_us: BTreeMap::new(),
            prompt_tokens: 0,
            hit_tokens: 0,
            ttft: Vec::new(),
            last_choice: None,
        };
        world.at(Micros::from_ms(10), Event::Frames);
        world
    }

    fn at(&mut self, when: Micros, event: Event) {
        self.seq += 1;
        self.events.insert((when, self.seq, event));
    }

    fn held(&self, worker: u32, keys: &[BlockKey], at: Micros) -> u32 {
        let cache = &self.engines[&worker].cache;
        keys.iter()
            .take_while(|k| cache.get(*k).is_some_and(|since| *since <= at))
            .count() as u32
    }

    /// Sends a request through a router now; its answer takes `decode` after its first token.
    pub fn send(&mut self, router: usize, keys: &[BlockKey], prompt_tokens: u32, decode: Micros) -> WorkerId {
        self.send_as(
            router,
            &RequestFacts {
                keys,
                ..request(prompt_tokens)
            },
            decode,
        )
    }

    pub fn send_as(&mut self, router: usize, request: &RequestFacts<'_>, decode: Micros) -> WorkerId {
        let now = self.now;
        let overlaps: Vec<(WorkerId, Reuse)> = self
            .engines
            .keys()
            .map(|w| {
                let gpu = (self.held(*w, request.keys, now) * 16).min(request.prompt_tokens - 1) / 16 * 16;
                (
                    WorkerId(*w),
                    Reuse {
                        gpu,
                        ..Reuse::default()
                    },
                )
            })
            .collect();
        let routing = &mut self.routers[router];
        let choice = routing.decide(now, request, &overlaps).unwrap();
        let ticket = routing.reserve(now, &choice, request).unwrap();
        self.last_choice = Some(choice);
        let worker = whole(&choice);
        let keys = request.keys.to_vec();
        let job = Job {
            router,
            ticket: Some(ticket),
            keys,
            prompt_tokens: request.prompt_tokens,
            decode,
        };
        self.engines.get_mut(&worker.0).unwrap().queue.push_back(job);
        self.start(worker.0);
        worker
    }

    fn start(&mut self, worker: u32) {
        let engine = &self.engines[&worker];
        let Some(job) = engine.queue.front().filter(|_| !engine.busy) else {
            return;
        };
        let cached = (self.held(worker, &job.keys, Micros(u64::MAX)) * 16).min(job.prompt_tokens - 1);
        let new = job.prompt_tokens - cached;
        self.prompt_tokens += u64::from(job.prompt_tokens);
        self.computed_tokens += u64::from(new);
        self.hit_tokens += u64::from(cached);
        if new * 2 >= job.prompt_tokens {
            *self.cold.entry(worker).or_default() += 1;
        }
        let span = Micros(20_000 + cost::work(new, cached) * 70);
        *self.busy_us.entry(worker).or_default() += span.0;
        self.engines.get_mut(&worker).unwrap().busy = true;
        self.at(self.now.plus(span), Event::Prefilled { worker });
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Prefilled { worker } => {
                let now = self.now;
                let engine = self.engines.get_mut(&worker).unwrap();
                let mut job = engine.queue.pop_front().unwrap();
                engine.busy = false;
                for key in &job.keys {
                    engine.cache.entry(*key).or_insert(now.plus(Self::LAG));
                }
                let mut ticket = job.ticket.take().unwrap();
                self.routers[job.router].first_token(now, &mut ticket);
                self.ending.push(Some((job.router, ticket, 0)));
                self.at(
                    now.plus(job.decode),
                    Event::Ended {
                        at: self.ending.len() - 1,
                    },
                );
                self.start(worker);
            }
            Event::Ended { at } => {
                let (router, ticket, _) = self.ending[at].take().unwrap();
                self.routers[router].finish(self.now, ticket, Ending::Done { cached_tokens: None }, None);
            }
            Event::Frames => {
                self.exchange();
                self.at(self.now.plus(Micros::from_ms(50)), Event::Frames);
            }
        }
    }

    /// Every router hears every other's frame.
    pub fn exchange(&mut self) {
        let now = self.now;
        let frames: Vec<_> = self.routers.iter_mut().map(|r| r.frame(now)).collect();
        for (i, frame) in frames.iter().enumerate() {
            for (j, routing) in self.routers.iter_mut().enumerate() {
                let outcome = routing.on_router_frame(now, frame);
                assert_eq!(outcome == FrameOutcome::Taken, i != j);
            }
        }
    }

    /// Lets time pass.
    pub fn run(&mut self, span: Micros) {
        let end = self.now.plus(span);
        while let Some((when, _, _)) = self.events.first() {
            if *when > end {
                break;
            }
            let (when, _, event) = self.events.pop_first().unwrap();
            self.now = when;
            self.handle(event);
        }
        self.now = end;
    }
}
