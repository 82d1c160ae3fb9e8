//! One policy over one trace: engines, routers and the index's view in one heap of virtual time.

mod engines;
mod routers;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use cairn_routing::{PolicyConfig, PolicyError};

use crate::engine_model::{CacheEvent, Finish, InvalidModel, Micros, StepOutcome};
use crate::options::{InvalidOptions, Model, Options, Scenario};
use crate::report::{Report, Run, Window, first_token, quantile};
use crate::trace::Trace;
use engines::Fleet;
use routers::Routers;

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

/// Replays a trace under every policy with every seed.
pub fn replay(trace: &Trace, policies: &[PolicyConfig], seeds: u64, options: &Options) -> Result<Report, ReplayError> {
    options.validate()?;
    let options = &options.with_block_size(trace.block);
    options.validate()?;
    let oracle_hit = trace.oracle_hit();
    let mut runs = Vec::new();
    for policy in policies {
        for seed in 1..=seeds.max(1) {
            runs.push(run(trace, policy, seed, options, oracle_hit)?);
        }
    }
    let mut report = Report {
        trace: trace.name.clone(),
        requests: trace.rows.len() as u64,
        oracle_hit,
        runs,
        verdict: String::new(),
    };
    report.verdict = report.judge();
    Ok(report)
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
    /// Loads are read.
    Loads,
    /// Routers tell each other what they reserved.
    Frames,
}

/// Pause between two frames of a router.
const FRAME_PERIOD: Micros = Micros(50_000);

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
    done: Vec<Option<(usize, Finish)>>,
    left: usize,
    unserved: u64,
}

fn run(trace: &Trace, policy: &PolicyConfig, seed: u64, options: &Options, oracle: f64) -> Result<Run, ReplayError> {
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
        done: vec![None; trace.rows.len()],
        left: trace.rows.len(),
        unserved: 0,
    };
    world.go();
    Ok(world.figures(policy, seed, oracle))
}

impl World<'_> {
    fn at(&mut self, moment: Micros, event: Event) {
        self.order += 1;
        self.heap.push(Reverse((moment, self.order, event)));
    }

    fn go(&mut self) {
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
        if self.options.scenario != Scenario::Steady
            && let Some(last) = self.trace.rows.last()
        {
            self.at(Micros(last.at.0 / 2), Event::Change);
        }
        while self.left > 0 {
            let Some(Reverse((moment, _, event))) = self.heap.pop() else {
                return;
            };
            self.now = moment;
            self.happen(event);
        }
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
            Event::Seen => {
                while self.published.front().is_some_and(|(at, ..)| *at <= self.now) {
                    if let Some((_, engine, life, events)) = self.published.pop_front()
                        && self.fleet.life(engine) == life
                    {
                        self.routers.see(engine, &events);
                    }
                }
            }
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

    fn arrive(&mut self, index: usize) {
        let row = &self.trace.rows[index];
        let prompt = self.trace.prompt(index);
        let output = match self.options.model {
            Model::Default => row.output,
            Model::Reference => 1,
        };
        let session = row.session.as_deref().unwrap_or_default();
        let Some(engine) = self
            .routers
            .decide(self.now, index, &prompt, output, session, self.fleet.config())
        else {
            self.unserved += 1;
            self.left -= 1;
            return;
        };
        let outcome = self.fleet.submit(engine, self.now, index, prompt, output);
        self.settle(engine, outcome);
    }

    /// Takes what an engine gave, and wakes it again when it asks.
    fn settle(&mut self, engine: usize, outcome: StepOutcome) {
        for batch in outcome.batches {
            let seen = self.now.plus(self.options.index_lag);
            self.published
                .push_back((seen, engine, self.fleet.life(engine), batch.events));
            self.at(seen, Event::Seen);
        }
        for output in outcome.outputs {
            let index = output.id.0 as usize;
            let Some(finish) = output.finish else {
                self.routers.first_token(self.now, index);
                continue;
            };
            self.routers.finish(self.now, index, &finish);
            if self.done[index].replace((engine, finish)).is_none() {
                self.left -= 1;
            }
        }
        if let Some(at) = self.fleet.wake_at(engine, outcome.next_wakeup) {
            self.at(at, Event::Wake(engine));
        }
    }

    fn change(&mut self) {
        let quarter = (self.options.engines as usize / 4).max(1);
        match self.options.scenario {
            Scenario::Steady => {}
            Scenario::ScaleOut => {
                for _ in 0..quarter {
                    let engine = self.fleet.add();
                    self.routers.add_worker(self.now, engine, self.fleet.config());
                }
            }
            Scenario::ScaleIn => {
                let first = self.fleet.len().saturating_sub(quarter).max(1);
                for engine in first..self.fleet.len() {
                    self.routers.drain(engine);
                }
            }
            Scenario::Restart => {
                self.routers.forget(0);
                // What was inside is sent again, as a retrying router does before the first byte.
                let lost = self.fleet.restart(0);
                for index in lost {
                    self.routers.lost(self.now, index);
                    self.arrive(index);
                }
            }
        }
    }

    fn figures(&self, policy: &PolicyConfig, seed: u64, oracle: f64) -> Run {
        let mut cached = 0u64;
        let mut requests = vec![0u64; self.fleet.len()];
        let mut work = vec![0u64; self.fleet.len()];
        let mut waits = Vec::with_capacity(self.done.len());
        let mut end = Micros(1);
        for (engine, finish) in self.done.iter().flatten() {
            cached += u64::from(finish.cached.total());
            requests[*engine] += 1;
            work[*engine] += u64::from(finish.prompt_tokens - finish.cached.total());
            let first = finish.first_token.unwrap_or(finish.arrived);
            end = end.max(first);
            waits.push(first.since(finish.arrived).as_seconds() * 1e3);
        }
        let served: u64 = requests.iter().sum();
        let mean_work = work.iter().sum::<u64>() as f64 / work.len().max(1) as f64;
        let prompt = self.trace.prompt_tokens().max(1) as f64;
        let hit = cached as f64 / prompt;
        Run {
            policy: policy.name().to_owned(),
            seed,
            hit,
            oracle_fraction: if oracle > 0.0 { hit / oracle } else { 1.0 },
            predicted_hit: self.routers.predicted as f64 / prompt,
            ttft_ms: first_token(waits),
            throughput_rps: served as f64 / end.as_seconds(),
            overflow: self.routers.overflow,
            unserved: self.unserved,
            request_share: requests
                .iter()
                .map(|count| *count as f64 / served.max(1) as f64)
                .collect(),
            work_max_over_mean: work.iter().max().copied().unwrap_or(0) as f64 / mean_work.max(f64::MIN_POSITIVE),
            preemptions: self.fleet.preemptions(),
            windows: self.windows(),
        }
    }

    fn windows(&self) -> Vec<Window> {
        let length = self.options.window.0.max(1);
        let mut windows: Vec<(u64, u64, u64, Vec<f64>)> = Vec::new();
        for (row, done) in self.trace.rows.iter().zip(&self.done) {
            let Some((_, finish)) = done else { continue };
            let at = (row.at.0 / length) as usize;
            if windows.len() <= at {
                windows.resize_with(at + 1, Default::default);
            }
            let window = &mut windows[at];
            window.0 += 1;
            window.1 += u64::from(finish.prompt_tokens);
            window.2 += u64::from(finish.cached.total());
            let first = finish.first_token.unwrap_or(finish.arrived);
            window.3.push(first.since(row.at).as_seconds() * 1e3);
        }
        let finished = windows
            .into_iter()
            .enumerate()
            .map(|(at, (requests, prompt, cached, mut waits))| {
                waits.sort_by(f64::total_cmp);
                Window {
                    at_s: at as f64 * self.options.window.as_seconds(),
                    requests,
                    hit: cached as f64 / prompt.max(1) as f64,
                    ttft_p90_ms: quantile(&waits, 0.9),
                }
            });
        finished.collect()
    }
}
