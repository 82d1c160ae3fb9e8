//! One policy over one trace: engines, routers and the index's view in one heap of virtual time.

mod engines;
mod figures;
mod mirrors;
mod routers;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use cairn_routing::{PolicyConfig, PolicyError};

use crate::engine_model::{CacheEvent, Chain, InvalidModel, Micros, StepOutcome};
use crate::options::{InvalidOptions, Options, Scenario};
use crate::report::Run;
use crate::trace::Trace;
use engines::Fleet;
use figures::Served;
use routers::{Decided, Routers};

/// Why a replay wasn't run.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// Options outside their ranges.
    #[error(transparent)]
    Options(#[from] InvalidOptions),
    /// An engine of that shape can't exist.
    #[error(transparent)]
    Model(#[from] InvalidModel),
    /// No such policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
}

/// Runs one policy with one seed; `told` hears now and then how many requests have come.
pub fn run(
    trace: &Trace,
    policy: &PolicyConfig,
    seed: u64,
    options: &Options,
    told: &mut dyn FnMut(usize),
) -> Result<Run, ReplayError> {
    options.validate()?;
    let options = &options.for_trace(trace);
    options.validate()?;
    let longest = trace.rows.iter().map(|row| row.input + row.output).max().unwrap_or(2);
    let fleet = Fleet::new(options.model_config(longest), options.engines as usize)?;
    let routers = Routers::new(options, policy, seed)?;
    let mut world = World {
        trace,
        options,
        heap: BinaryHeap::new(),
        order: 0,
        now: Micros(0),
        fleet,
        routers,
        published: VecDeque::new(),
        served: vec![Served::default(); trace.rows.len()],
        left: trace.rows.len(),
        path: Vec::new(),
        changes: Vec::new(),
        batches: 0,
    };
    world.go(told);
    Ok(world.figures(policy, seed))
}

/// Something that happens at a moment.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    /// What an engine published is seen by the routers.
    Seen,
    /// The fleet changes.
    Change,
    /// A request comes.
    Arrival(usize),
    /// An engine has something to do.
    Wake(usize),
    /// A transfer to an engine, in one of its lifetimes, is over.
    Fetched(usize, u32, usize),
    /// Loads are read.
    Loads,
    /// Routers tell each other what they reserved.
    Frames,
}

/// Pause between two frames of a router.
const FRAME_PERIOD: Micros = Micros(50_000);
/// How often progress is told, in requests.
const TELL_EVERY: usize = 256;
/// Engines that a request is tried on before its client gets a 429.
const ATTEMPTS: usize = 3;
/// Where events get lost: one batch in so many, and no replay socket to ask for it again.
const LOST_ONE_IN: u64 = 100;

struct World<'a> {
    trace: &'a Trace,
    options: &'a Options,
    /// (moment, order, what): order makes equal moments repeatable.
    heap: BinaryHeap<Reverse<(Micros, u64, Event)>>,
    order: u64,
    now: Micros,
    fleet: Fleet,
    routers: Routers,
    /// Published, not yet seen: (moment, engine, lifetime, events).
    published: VecDeque<(Micros, usize, u32, Vec<CacheEvent>)>,
    served: Vec<Served>,
    left: usize,
    path: Vec<u32>,
    /// When the fleet changed.
    changes: Vec<Micros>,
    batches: u64,
}

impl World<'_> {
    fn at(&mut self, moment: Micros, event: Event) {
        self.order += 1;
        self.heap.push(Reverse((moment, self.order, event)));
    }

    fn go(&mut self, told: &mut dyn FnMut(usize)) {
        for engine in 0..self.fleet.len() {
            self.routers.add_worker(self.now, engine, self.fleet.config());
        }
        if let Some(first) = self.trace.rows.first() {
            self.at(first.at, Event::Arrival(0));
        }
        self.at(self.options.load_period, Event::Loads);
        if self.options.routers > 1 {
            self.at(FRAME_PERIOD, Event::Frames);
        }
        if self.options.scenario.changes_fleet()
            && let Some(last) = self.trace.rows.last()
        {
            self.at(Micros(last.at.0 / 2), Event::Change);
        }
        while self.left > 0 {
            let Some(Reverse((moment, _, event))) = self.heap.pop() else {
                return;
            };
            self.now = moment;
            if let Event::Arrival(index) = event
                && index % TELL_EVERY == 0
            {
                told(index);
            }
            self.happen(event);
        }
        told(self.trace.rows.len());
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Arrival(index) => {
                if let Some(next) = self.trace.rows.get(index + 1) {
                    self.at(next.at, Event::Arrival(index + 1));
                }
                self.arrive(index);
            }
            Event::Wake(engine) => {
                if self.fleet.woken(engine, self.now) {
                    let outcome = self.fleet.step(engine, self.now);
                    self.settle(engine, outcome);
                }
            }
            Event::Fetched(engine, life, index) => {
                if self.fleet.life(engine) == life {
                    let outcome = self.fleet.fetched(engine, self.now, index);
                    self.settle(engine, outcome);
                }
            }
            Event::Seen => self.see(),
            Event::Loads => {
                for engine in 0..self.fleet.len() {
                    self.routers.report_load(self.now, engine, self.fleet.gauges(engine));
                }
                self.at(self.now.plus(self.options.load_period), Event::Loads);
            }
            Event::Frames => {
                self.routers.exchange(self.now);
                self.at(self.now.plus(FRAME_PERIOD), Event::Frames);
            }
            Event::Change => self.change(),
        }
    }

    fn see(&mut self) {
        while self.published.front().is_some_and(|(at, ..)| *at <= self.now) {
            let Some((_, engine, life, events)) = self.published.pop_front() else {
                return;
            };
            self.batches += 1;
            let lost = self.options.scenario == Scenario::LostEvents && self.batches.is_multiple_of(LOST_ONE_IN);
            if self.fleet.life(engine) == life && !lost {
                self.routers.see(engine, &events);
            }
        }
    }

    fn arrive(&mut self, index: usize) {
        let trace = self.trace;
        let row = &trace.rows[index];
        trace.chains.path(row.last, &mut self.path);
        let mut hashes = Vec::with_capacity((row.input / self.options.block_size) as usize);
        trace.name_blocks(index, self.options.block_size, &self.path, &mut hashes);
        let mut tried = Vec::new();
        for _ in 0..ATTEMPTS {
            let Some(Decided { engine, fetch }) =
                self.routers.decide(self.now, index, trace, &self.path, &hashes, &tried)
            else {
                break;
            };
            let chain = Chain {
                tokens: row.input,
                hashes: std::mem::take(&mut hashes),
            };
            let remote = fetch.map_or(0, |(peer, tokens)| {
                // The peer sends what it really has.
                let held = self.fleet.held_blocks(peer, &chain.hashes) * self.options.block_size;
                tokens.min(held)
            });
            match self
                .fleet
                .submit(engine, self.now, index, chain, remote, self.options.answer(row))
            {
                Ok(outcome) => return self.settle(engine, outcome),
                Err((chain, outcome)) => {
                    self.routers.pushed_back(self.now, index);
                    tried.push(engine);
                    self.settle(engine, outcome);
                    hashes = chain.hashes;
                    self.served[index].retries += 1;
                }
            }
        }
        self.served[index].refused = true;
        self.left -= 1;
    }

    /// Takes what an engine gave, and wakes it again when it asks.
    fn settle(&mut self, engine: usize, outcome: StepOutcome) {
        for batch in outcome.batches {
            let seen = self.now.plus(self.options.index_lag);
            self.published
                .push_back((seen, engine, self.fleet.life(engine), batch.events));
            self.at(seen, Event::Seen);
        }
        for transfer in outcome.transfers {
            let life = self.fleet.life(engine);
            let at = transfer.at.plus(transfer.span).max(self.now);
            self.at(at, Event::Fetched(engine, life, transfer.id.0 as usize));
        }
        for output in outcome.outputs {
            let index = output.id.0 as usize;
            let Some(finish) = output.finish else {
                self.routers.first_token(self.now, index);
                continue;
            };
            self.routers.finish(self.now, index, &finish);
            let served = &mut self.served[index];
            if !served.done {
                self.left -= 1;
                served.take(engine, &finish, self.trace.rows[index].at);
            }
        }
        if let Some(at) = self.fleet.wake_at(engine, outcome.next_wakeup) {
            self.at(at, Event::Wake(engine));
        }
    }

    fn change(&mut self) {
        self.changes.push(self.now);
        let engines = self.options.engines as usize;
        match self.options.scenario {
            Scenario::Steady | Scenario::HotPrefix | Scenario::LostEvents | Scenario::Overload => {}
            Scenario::ScaleOut => {
                for _ in 0..(engines / 3).max(1) {
                    let engine = self.fleet.add();
                    self.routers.add_worker(self.now, engine, self.fleet.config());
                }
            }
            Scenario::ScaleIn => {
                for engine in (engines - (engines / 4).max(1)).max(1)..engines {
                    self.routers.drain(engine);
                }
            }
            Scenario::Restart => self.restart(0),
            Scenario::Cold => (0..engines).for_each(|engine| self.restart(engine)),
        }
    }

    /// An engine loses all it has; what was inside is sent again, as a retrying router does before the first byte.
    fn restart(&mut self, engine: usize) {
        self.routers.forget(engine);
        for index in self.fleet.restart(engine) {
            self.routers.lost(self.now, index);
            self.arrive(index);
        }
    }
}
