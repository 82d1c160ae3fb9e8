//! The start of a step: running sequences first, then loads and new ones, all within one token budget.

use super::cpu_tier::Content;
use super::events::{CacheEvent, CachedTokens, Medium, StepOutcome, TransferStart};
use super::hash::EngineHash;
use super::request::{Phase, RequestId, Sequence};
use super::timing::Micros;
use super::{EngineModel, InFlight};

/// What a step will compute.
#[derive(Default)]
struct Plan {
    items: Vec<RequestId>,
    seconds: f64,
    budget: usize,
}

/// Whether a waiting request could go on.
enum Admission {
    /// It is in the batch.
    Scheduled,
    /// Its KV is being fetched.
    Loading,
    /// No room now.
    Blocked,
}

impl EngineModel {
    /// Starts a step at `start`; `false` when there is nothing to compute or publish.
    pub(super) fn begin(&mut self, start: Micros, out: &mut StepOutcome) -> bool {
        self.expire_held(start);
        self.finish_host_loads(start);
        let offloaded = match &mut self.cpu {
            Some(cpu) => cpu.apply_pending(&mut self.events) > 0,
            None => false,
        };
        let mut plan = Plan {
            budget: self.config.max_batched_tokens as usize,
            ..Plan::default()
        };
        if self.schedule_running(&mut plan) {
            self.schedule_waiting(start, &mut plan, out);
            while plan.items.is_empty() && self.running.is_empty() && self.reclaim_loaded() {
                self.schedule_waiting(start, &mut plan, out);
            }
        }
        if plan.items.is_empty() && !offloaded {
            return false;
        }
        let seconds = (self.config.timing.step_base_s + plan.seconds) * self.slowdown;
        let span = Micros::from_seconds(seconds);
        self.counters.busy_us += span.0;
        self.in_flight = Some(InFlight {
            ends: start.plus(span),
            items: plan.items,
        });
        true
    }

    /// Gives every running sequence its share; `false` when one had to be preempted, so that none is admitted.
    fn schedule_running(&mut self, plan: &mut Plan) -> bool {
        let mut undisturbed = true;
        let mut at = 0;
        while at < self.running.len() && plan.budget > 0 {
            let id = self.running[at];
            let Some(sequence) = self.sequences.get(&id.0) else {
                break;
            };
            let count = (sequence.len - sequence.computed).min(plan.budget);
            let needed = self.blocks_needed(sequence, count);
            while needed > self.pool.free() {
                undisturbed = false;
                let Some(victim) = self.running.last().copied() else {
                    break;
                };
                self.preempt(victim);
                if victim == id {
                    return false;
                }
            }
            self.allocate(id, needed);
            self.compute(id, count, plan);
            at += 1;
        }
        undisturbed
    }

    fn schedule_waiting(&mut self, start: Micros, plan: &mut Plan, out: &mut StepOutcome) {
        while plan.budget > 0 && self.running.len() < self.config.max_num_seqs as usize {
            let Some(id) = self.waiting.front().copied() else {
                return;
            };
            match self.admit(id, start, plan, out) {
                Admission::Scheduled => {
                    self.waiting.pop_front();
                    self.running.push(id);
                }
                Admission::Loading => {
                    self.waiting.pop_front();
                    self.loading.push(id);
                }
                Admission::Blocked => return,
            }
        }
    }

    /// Frees the youngest loaded request behind the queue's head, when what is loaded leaves no room for anyone to go
    /// on; `false` when there is none.
    fn reclaim_loaded(&mut self) -> bool {
        let is_loaded = |id: &RequestId| self.sequences.get(&id.0).is_some_and(|s| s.phase == Phase::Loaded);
        let Some(at) = self.waiting.iter().rposition(is_loaded).filter(|at| *at > 0) else {
            return false;
        };
        let Some(id) = self.waiting.get(at).copied() else {
            return false;
        };
        if let Some(sequence) = self.sequences.get_mut(&id.0) {
            let blocks = sequence.start_over();
            self.pool.release(blocks.into_iter().rev());
        }
        true
    }

    fn admit(&mut self, id: RequestId, start: Micros, plan: &mut Plan, out: &mut StepOutcome) -> Admission {
        let Some(sequence) = self.sequences.get(&id.0) else {
            return Admission::Blocked;
        };
        if sequence.arrived > start {
            return Admission::Blocked;
        }
        if sequence.phase == Phase::Waiting {
            let hits = self.gpu_hits(sequence);
            let external = self.external_tokens(sequence, hits);
            if external > 0 {
                return self.start_load(id, hits, external, start, out);
            }
            if !self.admit_with_hits(id, hits, plan.budget) {
                return Admission::Blocked;
            }
            let tokens = hits * self.config.block_size as usize;
            self.first_schedule(
                id,
                start,
                CachedTokens {
                    gpu: tokens as u32,
                    ..CachedTokens::default()
                },
            );
        }
        let Some(sequence) = self.sequences.get(&id.0) else {
            return Admission::Blocked;
        };
        let count = (sequence.len - sequence.computed).min(plan.budget);
        let needed = self.blocks_needed(sequence, count);
        if needed > self.pool.free() {
            return Admission::Blocked;
        }
        self.allocate(id, needed);
        self.compute(id, count, plan);
        if let Some(sequence) = self.sequences.get_mut(&id.0) {
            sequence.phase = Phase::Running;
        }
        Admission::Scheduled
    }

    /// Takes the hit blocks of a new request, where the rest of its next chunk fits as well.
    fn admit_with_hits(&mut self, id: RequestId, hits: usize, budget: usize) -> bool {
        let size = self.config.block_size as usize;
        let Some(sequence) = self.sequences.get(&id.0) else {
            return false;
        };
        let count = (sequence.len - hits * size).min(budget);
        let new = (hits * size + count).div_ceil(size) - hits;
        if !self.room_for(sequence, hits, new) {
            return false;
        }
        self.take_hits(id, hits);
        if let Some(sequence) = self.sequences.get_mut(&id.0) {
            sequence.computed = hits * size;
        }
        true
    }

    /// Leading blocks that the GPU holds; at least the last token is left to compute.
    fn gpu_hits(&self, sequence: &Sequence) -> usize {
        if !self.config.prefix_caching {
            return 0;
        }
        let most = (sequence.len - 1) / self.config.block_size as usize;
        sequence
            .hashes
            .iter()
            .take(most)
            .take_while(|hash| self.pool.lookup(**hash).is_some())
            .count()
    }

    /// Tokens past the GPU's hits that another engine or the host-memory tier offers.
    fn external_tokens(&self, sequence: &Sequence, hits: usize) -> usize {
        let size = self.config.block_size as usize;
        let offered = (sequence.remote_tokens as usize).min(sequence.prompt_len);
        if offered > hits * size {
            return offered - hits * size;
        }
        let Some(cpu) = &self.cpu else { return 0 };
        let most = (sequence.len - 1) / size;
        let run = sequence
            .hashes
            .iter()
            .take(most)
            .skip(hits)
            .take_while(|hash| cpu.contains(**hash));
        run.count() * size
    }

    fn start_load(
        &mut self,
        id: RequestId,
        hits: usize,
        external: usize,
        start: Micros,
        out: &mut StepOutcome,
    ) -> Admission {
        let size = self.config.block_size as usize;
        let Some(sequence) = self.sequences.get(&id.0) else {
            return Admission::Blocked;
        };
        let remote = sequence.remote_tokens > 0;
        let new = (hits * size + external).div_ceil(size) - hits;
        if !self.room_for(sequence, hits, new) {
            return Admission::Blocked;
        }
        self.take_hits(id, hits);
        self.allocate(id, new);
        let span = if remote {
            self.config.timing.transfer(external as u64)
        } else {
            self.config.timing.host_load(external as u64)
        };
        let span = Micros::from_seconds(span.as_seconds() * self.slowdown);
        let loaded = hits * size + external;
        let mut cached = CachedTokens {
            gpu: (hits * size) as u32,
            ..CachedTokens::default()
        };
        let phase = if remote {
            out.transfers.push(TransferStart {
                id,
                at: start,
                tokens: external as u32,
                span,
            });
            Phase::LoadingRemote
        } else {
            self.host_link_free = self.host_link_free.max(start).plus(span);
            Phase::LoadingHost(self.host_link_free)
        };
        let Some(sequence) = self.sequences.get_mut(&id.0) else {
            return Admission::Blocked;
        };
        sequence.phase = phase;
        sequence.loading = external;
        sequence.computed = loaded.min(sequence.len - 1);
        let brought = (sequence.computed - hits * size) as u32;
        if remote {
            cached.remote = brought;
        } else {
            cached.cpu = brought;
            let hashes: Vec<EngineHash> = sequence.hashes[hits..loaded / size].to_vec();
            if let Some(cpu) = &mut self.cpu {
                hashes.into_iter().for_each(|hash| cpu.pin(hash));
            }
        }
        self.first_schedule(id, start, cached);
        Admission::Loading
    }

    fn finish_host_loads(&mut self, now: Micros) {
        let done: Vec<RequestId> = self
            .loading
            .iter()
            .copied()
            .filter(|id| {
                self.sequences
                    .get(&id.0)
                    .is_some_and(|s| matches!(s.phase, Phase::LoadingHost(at) if at <= now))
            })
            .collect();
        self.loading.retain(|id| !done.contains(id));
        // The last one pushed to the front runs first: go backwards to keep the order of the queue.
        for id in done.into_iter().rev() {
            if let Some(sequence) = self.sequences.remove(&id.0) {
                self.unpin_loaded(&sequence);
                self.sequences.insert(id.0, sequence);
            }
            self.loaded(id);
        }
    }

    /// What was loaded is announced as stored on the GPU, and the request goes on.
    pub(super) fn loaded(&mut self, id: RequestId) {
        let size = self.config.block_size as usize;
        if let Some(sequence) = self.sequences.get_mut(&id.0) {
            sequence.phase = Phase::Loaded;
            sequence.remote_tokens = 0;
            let full = (sequence.cached_blocks * size + sequence.loading) / size;
            sequence.loading = 0;
            self.waiting.push_front(id);
            self.cache_up_to(id, full);
        }
    }

    /// Lets go of host-memory blocks that a load was reading.
    pub(super) fn unpin_loaded(&mut self, sequence: &Sequence) {
        let size = self.config.block_size as usize;
        let first = sequence.cached_blocks;
        let last = (first * size + sequence.loading) / size;
        if let Some(cpu) = &mut self.cpu
            && matches!(sequence.phase, Phase::LoadingHost(_))
        {
            sequence.hashes[first..last.min(sequence.hashes.len())]
                .iter()
                .for_each(|hash| cpu.unpin(*hash));
        }
    }

    fn first_schedule(&mut self, id: RequestId, start: Micros, cached: CachedTokens) {
        let Some(sequence) = self.sequences.get_mut(&id.0) else {
            return;
        };
        sequence.scheduled.get_or_insert(start);
        if sequence.cached.is_some() {
            return;
        }
        sequence.cached = Some(cached);
        let prompt = sequence.prompt_len as u64;
        self.counters.prompt_tokens += prompt;
        self.counters.prefix_queries += prompt;
        self.counters.prefix_hits += u64::from(cached.gpu);
        if self.cpu.is_some() || cached.remote > 0 {
            self.counters.external_queries += prompt - u64::from(cached.gpu);
        }
        self.counters.cpu_hits += u64::from(cached.cpu);
        self.counters.remote_hits += u64::from(cached.remote);
    }

    fn blocks_needed(&self, sequence: &Sequence, count: usize) -> usize {
        (sequence.computed + count)
            .div_ceil(self.config.block_size as usize)
            .saturating_sub(sequence.blocks.len())
    }

    /// Whether `new` blocks are free besides those of the hits that wait in the free queue.
    fn room_for(&self, sequence: &Sequence, hits: usize, new: usize) -> bool {
        let queued = sequence.hashes[..hits]
            .iter()
            .filter(|hash| self.pool.lookup(**hash).is_some_and(|id| self.pool.is_free(id)))
            .count();
        new + queued <= self.pool.free()
    }

    fn take_hits(&mut self, id: RequestId, hits: usize) {
        let Some(sequence) = self.sequences.get_mut(&id.0) else {
            return;
        };
        let size = self.config.block_size as usize;
        for (i, hash) in sequence.hashes[..hits].iter().enumerate() {
            let Some(block) = self.pool.lookup(*hash) else { continue };
            self.pool.touch(block);
            sequence.blocks.push(block);
            if let Some(cpu) = &mut self.cpu {
                let content = || Content {
                    hash: *hash,
                    parent: (i > 0).then(|| sequence.hashes[i - 1]),
                    tokens: sequence.spell(i, i + 1, size),
                    adapter: sequence.adapter.clone(),
                };
                cpu.gpu_hit(content, *hash);
            }
        }
        sequence.cached_blocks = hits;
    }

    /// Adds `needed` new blocks; the caller made sure that they are free.
    fn allocate(&mut self, id: RequestId, needed: usize) {
        let Some(sequence) = self.sequences.get_mut(&id.0) else {
            return;
        };
        for _ in 0..needed {
            let Some((block, evicted)) = self.pool.take(&mut self.events) else {
                return;
            };
            sequence.blocks.push(block);
            if let (Some(hash), Some(cpu)) = (evicted, &mut self.cpu)
                && self.pool.lookup(hash).is_none()
            {
                cpu.gpu_evicted(hash);
            }
        }
    }

    /// Puts `count` tokens of a sequence into the step and announces the blocks that they fill.
    fn compute(&mut self, id: RequestId, count: usize, plan: &mut Plan) {
        let Some(sequence) = self.sequences.get_mut(&id.0) else {
            return;
        };
        let context = sequence.computed as u64;
        let decoding = count == 1 && sequence.computed >= sequence.prompt_len;
        sequence.computed += count;
        let full = sequence.computed / self.config.block_size as usize;
        plan.items.push(id);
        plan.budget -= count;
        plan.seconds += if decoding {
            self.config.timing.decode_s(context)
        } else {
            self.counters.computed_tokens += count as u64;
            self.config.timing.prefill_s(context, count as u64)
        };
        self.cache_up_to(id, full);
    }

    /// Gives blocks their hashes up to the block numbered `full`, in one event.
    fn cache_up_to(&mut self, id: RequestId, full: usize) {
        let Some(sequence) = self.sequences.get_mut(&id.0) else {
            return;
        };
        let first = sequence.cached_blocks;
        let full = full.min(sequence.hashes.len());
        if !self.config.prefix_caching || full <= first {
            return;
        }
        let size = self.config.block_size as usize;
        for i in first..full {
            self.pool.cache(sequence.blocks[i], sequence.hashes[i]);
            if let Some(cpu) = &mut self.cpu {
                cpu.gpu_stored(Content {
                    hash: sequence.hashes[i],
                    parent: (i > 0).then(|| sequence.hashes[i - 1]),
                    tokens: sequence.spell(i, i + 1, size),
                    adapter: sequence.adapter.clone(),
                });
            }
        }
        sequence.cached_blocks = full;
        let tokens = if self.config.tokens_in_events {
            sequence.spell(first, full, size)
        } else {
            Vec::new()
        };
        self.events.push(CacheEvent::Stored {
            hashes: sequence.hashes[first..full].to_vec(),
            parent: (first > 0).then(|| sequence.hashes[first - 1]),
            tokens,
            medium: Medium::Gpu,
            adapter: sequence.adapter.clone(),
            salt: sequence.salt.clone(),
        });
    }

    /// Takes a running sequence's blocks away; it starts over from the front of the queue.
    pub(super) fn preempt(&mut self, id: RequestId) {
        self.running.retain(|other| *other != id);
        let Some(sequence) = self.sequences.get_mut(&id.0) else {
            return;
        };
        let blocks = sequence.start_over();
        self.pool.release(blocks.into_iter().rev());
        self.waiting.push_front(id);
        self.counters.preemptions += 1;
    }

    fn expire_held(&mut self, now: Micros) {
        while self.held.front().is_some_and(|held| held.until <= now) {
            if let Some(held) = self.held.pop_front() {
                self.pool.release(held.blocks.into_iter().rev());
                self.counters.holds_expired += 1;
            }
        }
    }
}
