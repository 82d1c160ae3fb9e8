//! One policy over one trace: engines, routers and the index's view in one heap of virtual time.

mod engines;
mod fetch;
mod figures;
mod mirrors;
mod routers;
mod shared;
mod splits;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use cairn_routing::{PolicyConfig, PolicyError};

use crate::engine_model::hash::LookupMap;
use crate::engine_model::{CacheEvent, Chain, InvalidModel, Micros, Output, StepOutcome};
use crate::options::{InvalidOptions, Options, Scenario};
use crate::report::Run;
use crate::trace::Trace;
use engines::{Fleet, Leg};
use fetch::Fetching;
use figures::Served;
use routers::{Decided, Routers};
use shared::{Change, SharedStore};
use splits::{Split, Splits};

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
        shared: (options.shared_tokens > 0)
            .then(|| SharedStore::new(options.shared_tokens / u64::from(options.block_size))),
        splits: Splits::default(),
        fetching: LookupMap::default(),
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
    /// An engine has started: one that restarted, or a new one.
    Started(Option<usize>),
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

/// What the routers will see.
enum Told {
    /// Of an engine in one of its lifetimes.
    Engine(usize, u32, Vec<CacheEvent>),
    /// Of the shared store.
    Shared(Vec<Change>),
}

struct World<'a> {
    trace: &'a Trace,
    options: &'a Options,
    /// (moment, order, what): order makes equal moments repeatable.
    heap: BinaryHeap<Reverse<(Micros, u64, Event)>>,
    order: u64,
    now: Micros,
    fleet: Fleet,
    routers: Routers,
    shared: Option<SharedStore>,
    splits: Splits,
    /// What is being fetched, by request.
    fetching: LookupMap<u64, Fetching>,
    /// Published, not yet seen.
    published: VecDeque<(Micros, Told)>,
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
            let role = self.options.role(engine);
            self.routers.add_worker(self.now, engine, self.fleet.config(), role);
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
                    self.release(index);
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
            Event::Started(engine) => self.started(engine),
        }
    }

    fn see(&mut self) {
        while self.published.front().is_some_and(|(at, _)| *at <= self.now) {
            match self.published.pop_front() {
                None => return,
                Some((_, Told::Shared(changes))) => self.routers.see_shared(&changes),
                Some((_, Told::Engine(engine, life, events))) => {
                    self.batches += 1;
                    let lost =
                        self.options.scenario == Scenario::LostEvents && self.batches.is_multiple_of(LOST_ONE_IN);
                    if self.fleet.life(engine) == life && !lost {
                        self.routers.see(engine, &events);
                    }
                }
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
            let decided = self.routers.decide(self.now, index, trace, &self.path, &hashes, &tried);
            let Some(Decided { engine, decode, fetch }) = decided else {
                break;
            };
            let remote = self.begin_fetch(index, fetch, &hashes);
            let leg = Leg {
                chain: Chain {
                    tokens: row.input,
                    hashes: std::mem::take(&mut hashes),
                },
                remote,
                output: if decode.is_some() { 1 } else { self.options.answer(row) },
                hold: decode.is_some(),
            };
            if let Some(decode) = decode {
                let cached = None;
                let prefill = engine;
                self.splits.insert(
                    index as u64,
                    Split {
                        prefill,
                        decode,
                        cached,
                    },
                );
            }
            match self.fleet.submit(engine, self.now, index, leg) {
                Ok(outcome) => return self.settle(engine, outcome),
                Err((chain, outcome)) => {
                    self.splits.remove(&(index as u64));
                    self.routers.pushed_back(self.now, index, engine);
                    tried.push(engine);
                    self.settle(engine, outcome);
                    hashes = chain.hashes;
                    self.served[index].retries += 1;
                }
            }
        }
        self.refuse(index);
    }

    /// The client gets a 429, or a 503.
    fn refuse(&mut self, index: usize) {
        self.served[index].refused = true;
        self.left -= 1;
    }

    /// Takes what an engine gave, and wakes it again when it asks.
    fn settle(&mut self, engine: usize, outcome: StepOutcome) {
        let seen = self.now.plus(self.options.index_lag);
        let life = self.fleet.life(engine);
        for batch in outcome.batches {
            self.share(&batch.events, seen);
            self.published
                .push_back((seen, Told::Engine(engine, life, batch.events)));
            self.at(seen, Event::Seen);
        }
        for transfer in outcome.transfers {
            let index = transfer.id.0 as usize;
            let at = transfer.at.plus(self.fetch_span(index, &transfer)).max(self.now);
            self.at(at, Event::Fetched(engine, life, index));
        }
        for output in outcome.outputs {
            self.take(engine, output);
        }
        if let Some(at) = self.fleet.wake_at(engine, outcome.next_wakeup) {
            self.at(at, Event::Wake(engine));
        }
    }

    fn take(&mut self, engine: usize, output: Output) {
        let index = output.id.0 as usize;
        if self.is_prefill_leg(engine, index) {
            if let Some(finish) = output.finish {
                self.prefilled(index, &finish);
            }
            return;
        }
        let Some(finish) = output.finish else {
            self.routers.first_token(self.now, index);
            return;
        };
        self.fetching.remove(&(index as u64));
        let split = self.splits.remove(&(index as u64));
        let cached = split.and_then(|split| split.cached).unwrap_or(finish.cached);
        self.routers.finish(self.now, index, cached);
        let served = &mut self.served[index];
        if !served.done {
            self.left -= 1;
            served.take(engine, &finish, self.trace.rows[index].at);
            if let Some(split) = split {
                served.take_split(split.prefill, cached);
            }
        }
    }

    fn change(&mut self) {
        self.changes.push(self.now);
        let engines = self.options.engines as usize;
        match self.options.scenario {
            Scenario::Steady | Scenario::HotPrefix | Scenario::LostEvents | Scenario::Overload => {}
            Scenario::ScaleOut => {
                for _ in 0..(engines / 3).max(1) {
                    self.start(None);
                }
            }
            Scenario::ScaleIn => {
                for engine in (engines - (engines / 4).max(1)).max(1)..engines {
                    self.routers.drain(engine);
                }
            }
            Scenario::Restart => {
                self.routers.leave(0);
                self.restart(0);
                self.start(Some(0));
            }
            Scenario::Cold => (0..engines).for_each(|engine| self.restart(engine)),
        }
    }

    /// An engine's process is started; it serves later, or at once where that takes no time.
    fn start(&mut self, engine: Option<usize>) {
        let at = self.now.plus(self.options.engine_start());
        if at > self.now {
            self.at(at, Event::Started(engine));
        } else {
            self.started(engine);
        }
    }

    fn started(&mut self, engine: Option<usize>) {
        match engine {
            Some(engine) => self.routers.come_back(engine),
            None => {
                let engine = self.fleet.add();
                let role = self.options.role(engine);
                self.routers.add_worker(self.now, engine, self.fleet.config(), role);
            }
        }
        if self.changes.last() != Some(&self.now) {
            self.changes.push(self.now);
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
