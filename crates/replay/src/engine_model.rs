//! The simulated engine core: paged cache, scheduler and timing of one data-parallel rank, without I/O or clock.
//!
//! The same core answers for replay (virtual time) and for the simulated engine process (real time). The driver owns
//! time: it calls [`EngineModel::step`] with the present moment, then submits, cancels or answers transfers, then calls
//! `step` once more, and again at the moment that the outcome names. Steps run back to back from the moment their work was there, however late the
//! driver calls. Equal calls give equal outcomes on every machine.
//!
//! What it follows of real engines: hashes chained over parent, tokens and extra keys with a process seed; a free
//! queue whose head is evicted first and to which a request's blocks are given back last block first; copies of equal
//! blocks stored and removed one by one; at least the last token computed even on a full hit; preemption of the
//! youngest when the cache is full; chunked prefill in one batch with decodes; events published when a step ends.

mod complete;
mod config;
pub mod constants;
mod cpu_tier;
mod events;
pub mod hash;
mod pool;
mod request;
mod schedule;
mod stats;
mod timing;

use std::collections::VecDeque;

pub use config::{CpuStorePolicy, CpuTierConfig, InvalidModel, ModelConfig};
pub use events::{
    CacheEvent, CachedTokens, EventBatch, Finish, FinishReason, Medium, Output, StepOutcome, TransferStart,
};
pub use hash::EngineHash;
pub use pool::{BlockId, BlockPool};
pub use request::{Answer, Chain, Request, RequestId};
pub use stats::{Counters, Gauges};
pub use timing::{Micros, Timing};

use cpu_tier::CpuTier;
use hash::LookupMap;
use request::{Phase, Sequence};

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// Prompt and answer are longer than the model allows.
    #[error("{prompt} prompt tokens and {answer} tokens of answer exceed the model's length of {max_model_len}")]
    TooLong {
        /// Prompt tokens.
        prompt: usize,
        /// Answer tokens.
        answer: usize,
        /// The limit.
        max_model_len: u32,
    },
    /// Nothing to compute.
    #[error("the prompt has no tokens; give at least one")]
    EmptyPrompt,
    /// The driver used an id twice.
    #[error("request id {0} is already in the engine")]
    DuplicateId(u64),
    /// The waiting queue is full.
    #[error("{0} requests wait already; try another engine or later")]
    QueueFull(u32),
}

/// Blocks that outlive their request for a decode engine to pull.
struct Held {
    id: RequestId,
    blocks: Vec<BlockId>,
    until: Micros,
}

/// The step that is being computed.
struct InFlight {
    ends: Micros,
    items: Vec<RequestId>,
}

/// One engine core; see the module's text for how to drive it.
pub struct EngineModel {
    config: ModelConfig,
    root: EngineHash,
    pool: BlockPool,
    cpu: Option<CpuTier>,
    sequences: LookupMap<u64, Sequence>,
    waiting: VecDeque<RequestId>,
    running: Vec<RequestId>,
    loading: Vec<RequestId>,
    held: VecDeque<Held>,
    in_flight: Option<InFlight>,
    /// Events since the last publication.
    events: Vec<CacheEvent>,
    counters: Counters,
    slowdown: f64,
    clock: Micros,
    host_link_free: Micros,
}

impl EngineModel {
    /// An empty engine core.
    pub fn new(config: ModelConfig) -> Result<Self, InvalidModel> {
        config.validate()?;
        Ok(Self {
            root: hash::root(config.hash_seed),
            pool: BlockPool::new(config.gpu_blocks),
            cpu: config.cpu.map(CpuTier::new),
            config,
            sequences: LookupMap::default(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            loading: Vec::new(),
            held: VecDeque::new(),
            in_flight: None,
            events: Vec::new(),
            counters: Counters::default(),
            slowdown: 1.0,
            clock: Micros(0),
            host_link_free: Micros(0),
        })
    }

    /// The shape that the core was made with.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Takes a request that arrives at `now`; call [`EngineModel::step`] afterwards.
    pub fn submit(&mut self, now: Micros, request: Request) -> Result<(), SubmitError> {
        let (prompt, answer) = (request.prompt_len(), request.answer.len());
        if prompt == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if prompt + answer > self.config.max_model_len as usize {
            return Err(SubmitError::TooLong {
                prompt,
                answer,
                max_model_len: self.config.max_model_len,
            });
        }
        if self.sequences.contains_key(&request.id.0) {
            return Err(SubmitError::DuplicateId(request.id.0));
        }
        if self.waiting.len() >= self.config.waiting_max as usize {
            self.counters.refused_full += 1;
            return Err(SubmitError::QueueFull(self.config.waiting_max));
        }
        let id = request.id;
        let sequence = Sequence::new(request, now, self.root, self.config.block_size as usize);
        self.sequences.insert(id.0, sequence);
        self.waiting.push_back(id);
        Ok(())
    }

    /// Ends a request early, or gives up its held blocks; `false` when it isn't in the engine.
    pub fn cancel(&mut self, now: Micros, id: RequestId) -> bool {
        self.idle_until(now);
        let Some(sequence) = self.sequences.remove(&id.0) else {
            return self.release_held(now, id);
        };
        match sequence.phase {
            Phase::Waiting | Phase::Loaded => self.waiting.retain(|other| *other != id),
            Phase::Running => self.running.retain(|other| *other != id),
            Phase::LoadingHost(_) | Phase::LoadingRemote => {
                self.loading.retain(|other| *other != id);
                self.unpin_loaded(&sequence);
            }
        }
        self.pool.release(sequence.blocks.iter().rev().copied());
        self.counters.finished_abort += 1;
        true
    }

    /// Gives back blocks held for a decode engine, after it pulled them; `false` when none are held under `id`.
    pub fn release_held(&mut self, now: Micros, id: RequestId) -> bool {
        self.idle_until(now);
        let Some(at) = self.held.iter().position(|held| held.id == id) else {
            return false;
        };
        if let Some(held) = self.held.remove(at) {
            self.pool.release(held.blocks.iter().rev().copied());
        }
        true
    }

    /// Whether blocks are held under `id`.
    #[must_use]
    pub fn holds(&self, id: RequestId) -> bool {
        self.held.iter().any(|held| held.id == id)
    }

    /// Reports how a transfer that the model asked for ended; call [`EngineModel::step`] afterwards.
    ///
    /// Returns the ending output of a request whose transfer failed. Unknown ids (cancelled meanwhile) are ignored.
    pub fn transfer_done(&mut self, now: Micros, id: RequestId, succeeded: bool) -> Option<Output> {
        let sequence = self.sequences.get(&id.0)?;
        if sequence.phase != Phase::LoadingRemote {
            return None;
        }
        self.idle_until(now);
        self.loading.retain(|other| *other != id);
        if succeeded {
            self.loaded(id);
            return None;
        }
        self.counters.transfers_failed += 1;
        let sequence = self.sequences.remove(&id.0)?;
        self.pool.release(sequence.blocks.iter().rev().copied());
        Some(self.ended(sequence, now, None, FinishReason::TransferFailed, Vec::new()))
    }

    /// Empties the prefix cache; the event goes out with the next step. `false` while blocks are in use.
    ///
    /// With `external` the host-memory tier is dropped too, without an event of its own.
    pub fn reset_prefix_cache(&mut self, external: bool) -> bool {
        if !self.pool.reset() {
            return false;
        }
        self.events.push(CacheEvent::Cleared);
        if let Some(cpu) = &mut self.cpu {
            if external {
                cpu.clear();
            } else {
                cpu.forget_gpu();
            }
        }
        true
    }

    /// Preempts everything that runs, so that a reset finds no block in use.
    pub fn preempt_running(&mut self) {
        while let Some(id) = self.running.last().copied() {
            self.preempt(id);
        }
    }

    /// Stretches every later step by `factor`; 1 is normal.
    pub fn set_slowdown(&mut self, factor: f64) {
        self.slowdown = if factor.is_finite() { factor.max(0.0) } else { 1.0 };
    }

    /// Completes what ended by `now` and starts what can start.
    pub fn step(&mut self, now: Micros) -> StepOutcome {
        let mut out = StepOutcome::default();
        for _ in 0..constants::STEPS_PER_CALL_MAX {
            if let Some(step) = &self.in_flight {
                if step.ends > now {
                    out.next_wakeup = Some(step.ends);
                    return out;
                }
                self.complete(&mut out);
            }
            let Some(start) = self.next_start() else {
                out.next_wakeup = None;
                return out;
            };
            if start > now {
                out.next_wakeup = Some(start);
                return out;
            }
            self.clock = start;
            if !self.begin(start, &mut out) {
                let Some(later) = self.next_change(start) else {
                    out.next_wakeup = None;
                    return out;
                };
                if later > now {
                    out.next_wakeup = Some(later);
                    return out;
                }
                self.clock = later;
            }
        }
        out.next_wakeup = Some(now);
        out
    }

    /// Counters since the start.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let mut counters = self.counters;
        if let Some(cpu) = &self.cpu {
            counters.cpu_stored_blocks = cpu.stored;
            counters.cpu_evicted_blocks = cpu.evicted;
        }
        counters
    }

    /// The present state.
    #[must_use]
    pub fn gauges(&self) -> Gauges {
        Gauges {
            running: self.running.len(),
            waiting: self.waiting.len(),
            loading: self.loading.len(),
            kv_usage: 1.0 - self.pool.free() as f64 / self.pool.usable() as f64,
            cached_blocks: self.pool.cached_copies(),
            cpu_blocks: self.cpu.as_ref().map_or(0, CpuTier::len),
            held: self.held.len(),
        }
    }

    /// Whether the cache has changed since the last batch of events: engines publish when a step ends, so what a step in
    /// flight evicted, or one whose requests were all aborted, isn't told before the next one does.
    #[must_use]
    pub fn has_untold_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Leading tokens of a prompt that the GPU cache would serve now, before the cap at its last token.
    #[must_use]
    pub fn gpu_prefix(&self, prompt: &[cairn_blocks::Token], adapter: Option<&str>, salt: Option<&str>) -> usize {
        let size = self.config.block_size as usize;
        let mut parent = self.root;
        let mut blocks = 0;
        for block in prompt.chunks_exact(size) {
            parent = hash::next(parent, block, adapter, if blocks == 0 { salt } else { None });
            if self.pool.lookup(parent).is_none() {
                break;
            }
            blocks += 1;
        }
        blocks * size
    }

    /// Leading blocks of a chain that the GPU cache holds now.
    #[must_use]
    pub fn gpu_blocks_of(&self, hashes: &[EngineHash]) -> usize {
        hashes
            .iter()
            .take_while(|hash| self.pool.lookup(**hash).is_some())
            .count()
    }

    /// Nothing was computed up to `now`, so what the driver does at `now` can't start a step before it.
    fn idle_until(&mut self, now: Micros) {
        if self.in_flight.is_none() {
            self.clock = self.clock.max(now);
        }
    }

    /// When a step could start: at once where sequences run, else with the next arrival, load or expiry.
    fn next_start(&self) -> Option<Micros> {
        let pending = self.cpu.as_ref().is_some_and(CpuTier::has_pending);
        if !self.running.is_empty() || pending {
            return Some(self.clock);
        }
        let arrival = self
            .waiting
            .front()
            .and_then(|id| self.sequences.get(&id.0))
            .map(|s| s.arrived);
        let earliest = [arrival, self.next_load(), self.held.front().map(|held| held.until)];
        earliest.into_iter().flatten().min().map(|at| at.max(self.clock))
    }

    /// The next moment after `start` at which what couldn't be scheduled then might be.
    fn next_change(&self, start: Micros) -> Option<Micros> {
        let arrival = self
            .waiting
            .front()
            .and_then(|id| self.sequences.get(&id.0))
            .map(|s| s.arrived);
        let later = [arrival, self.next_load(), self.held.front().map(|held| held.until)];
        later.into_iter().flatten().filter(|at| *at > start).min()
    }

    fn next_load(&self) -> Option<Micros> {
        let times = self
            .loading
            .iter()
            .filter_map(|id| match self.sequences.get(&id.0)?.phase {
                Phase::LoadingHost(at) => Some(at),
                Phase::Waiting | Phase::LoadingRemote | Phase::Loaded | Phase::Running => None,
            });
        times.min()
    }
}
