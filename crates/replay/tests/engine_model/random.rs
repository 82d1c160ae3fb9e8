//! Random traffic: one history for one seed, events that mirror the cache, and a naive pool that agrees.

use std::collections::{HashMap, VecDeque};

use cairn_replay::engine_model::{
    CacheEvent, CpuStorePolicy, CpuTierConfig, EngineHash, EngineModel, Medium, Micros, ModelConfig, RequestId,
    StepOutcome,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::{hashes_of, prompt, request, run, small};

/// Random traffic with shared prefixes; every outcome in order.
fn random_traffic(seed: u64, config: ModelConfig, punctual: bool) -> (Vec<StepOutcome>, EngineModel) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut model = EngineModel::new(config).unwrap();
    let mut outcomes = Vec::new();
    let mut now = Micros(0);
    let mut wakeup = None;
    for id in 0..300u64 {
        let mut tokens = prompt(rng.random_range(0..4), rng.random_range(0..120));
        tokens.extend(prompt(rng.random_range(10..14), rng.random_range(1..60)));
        outcomes.push(model.step(now));
        tokens.truncate(config.max_model_len as usize - 30);
        let mut request = request(id, tokens, rng.random_range(0..30));
        request.hold = rng.random_range(0..20) == 0;
        model.submit(now, request).unwrap();
        if rng.random_range(0..10) == 0 {
            model.cancel(now, RequestId(rng.random_range(0..=id)));
        }
        let out = model.step(now);
        wakeup = out.next_wakeup;
        outcomes.push(out);
        let next = now.plus(Micros(rng.random_range(0..40_000)));
        while punctual && let Some(at) = wakeup.filter(|at| *at < next) {
            let out = model.step(at);
            wakeup = out.next_wakeup;
            outcomes.push(out);
        }
        now = next;
    }
    while let Some(at) = wakeup {
        let out = model.step(at.max(now));
        wakeup = out.next_wakeup;
        outcomes.push(out);
    }
    (outcomes, model)
}

fn tight() -> ModelConfig {
    let mut config = small(40, 16);
    config.max_batched_tokens = 96;
    config.max_num_seqs = 6;
    config.hold_s = 0.05;
    config.cpu = Some(CpuTierConfig {
        blocks: 30,
        store: CpuStorePolicy::OnStore,
    });
    config
}

#[test]
fn one_seed_gives_one_history() {
    for seed in 0..5 {
        assert_eq!(
            random_traffic(seed, tight(), true).0,
            random_traffic(seed, tight(), true).0
        );
    }
}

#[test]
fn a_late_driver_sees_the_steps_of_a_punctual_one() {
    let flat = |outcomes: Vec<StepOutcome>| {
        let (mut batches, mut outputs) = (Vec::new(), Vec::new());
        for out in outcomes {
            batches.extend(out.batches);
            outputs.extend(out.outputs);
        }
        (batches, outputs)
    };
    let mut config = tight();
    // A hold's expiry and a late cancel act when the driver calls: leave both rooms apart.
    config.hold_s = 1e6;
    for seed in 0..5 {
        let (punctual, _) = random_traffic(seed, config, true);
        let (late, _) = random_traffic(seed, config, false);
        assert_eq!(flat(punctual), flat(late), "seed {seed}");
    }
}

#[test]
fn counting_events_mirrors_the_cache_and_every_request_ends_once() {
    for seed in 0..30 {
        let mut config = tight();
        if seed % 3 == 0 {
            (config.gpu_blocks, config.max_num_seqs) = (20 + seed as u32, 16);
            config.max_model_len = (config.gpu_blocks - 1) * config.block_size;
            config.cpu = Some(CpuTierConfig {
                blocks: 285,
                store: CpuStorePolicy::OnStore,
            });
        }
        let (outcomes, model) = random_traffic(seed, config, true);
        let mut copies: HashMap<(Medium, EngineHash), i64> = HashMap::new();
        let mut ended: HashMap<RequestId, u32> = HashMap::new();
        for out in outcomes {
            for event in out.batches.iter().flat_map(|batch| &batch.events) {
                match event {
                    CacheEvent::Stored {
                        hashes, medium, tokens, ..
                    } => {
                        assert_eq!(tokens.len(), hashes.len() * 16);
                        hashes
                            .iter()
                            .for_each(|hash| *copies.entry((*medium, *hash)).or_default() += 1);
                    }
                    CacheEvent::Removed { hashes, medium } => hashes.iter().for_each(|hash| {
                        let count = copies.entry((*medium, *hash)).or_default();
                        *count -= 1;
                        assert!(*count >= 0, "a copy was removed that was never stored");
                    }),
                    CacheEvent::Cleared => copies.clear(),
                }
            }
            for output in out.outputs {
                if let Some(finish) = output.finish {
                    *ended.entry(output.id).or_default() += 1;
                    assert!(finish.cached.total() < finish.prompt_tokens);
                }
            }
        }
        let count = |medium| {
            copies
                .iter()
                .filter(|((m, _), _)| *m == medium)
                .map(|(_, n)| *n)
                .sum::<i64>()
        };
        assert_eq!(count(Medium::Gpu), model.gauges().cached_blocks as i64, "seed {seed}");
        assert_eq!(count(Medium::Cpu), model.gauges().cpu_blocks as i64, "seed {seed}");
        assert!(ended.values().all(|times| *times == 1));
        let counters = model.counters();
        let all = counters.finished_stop + counters.finished_length + counters.finished_abort;
        assert_eq!((all, model.gauges().kv_usage, model.gauges().held), (300, 0.0, 0));
    }
}

/// The block pool as a plain list: block 0 left out, the free list in order, a map of copies.
struct Naive {
    size: usize,
    free: VecDeque<usize>,
    holds: Vec<Option<EngineHash>>,
    copies: HashMap<EngineHash, Vec<usize>>,
}

impl Naive {
    fn new(config: &ModelConfig) -> Self {
        let blocks = config.gpu_blocks as usize;
        Self {
            size: config.block_size as usize,
            free: (1..blocks).collect(),
            holds: vec![None; blocks],
            copies: HashMap::new(),
        }
    }

    /// One request alone in the engine: hit tokens, and events in order as (stored, hash).
    fn request(&mut self, config: &ModelConfig, tokens: &[u32], answer: usize) -> (usize, Vec<(bool, EngineHash)>) {
        let mut all = tokens.to_vec();
        let seeded = (0..answer).map(|_| 0u32);
        all.extend(seeded);
        let hashes = hashes_of(config, tokens);
        let most = (tokens.len() - 1) / self.size;
        let mut blocks: Vec<usize> = Vec::new();
        for hash in hashes.iter().take(most) {
            let Some(copies) = self.copies.get(hash) else { break };
            blocks.push(copies[0]);
            self.free.retain(|block| *block != copies[0]);
        }
        let hit = blocks.len();
        let mut events = Vec::new();
        // The last token generated is never computed, so it needs no block.
        let needed = (tokens.len() + answer - 1).div_ceil(self.size);
        let of_prompt = tokens.len().div_ceil(self.size);
        for at in hit..needed {
            if at == of_prompt {
                self.store(&hashes, hit, &blocks, &mut events);
            }
            let block = self.free.pop_front().unwrap();
            if let Some(hash) = self.holds[block].take() {
                let copies = self.copies.get_mut(&hash).unwrap();
                copies.retain(|copy| *copy != block);
                if copies.is_empty() {
                    self.copies.remove(&hash);
                }
                events.push((false, hash));
            }
            blocks.push(block);
        }
        if needed <= of_prompt {
            self.store(&hashes, hit, &blocks, &mut events);
        }
        let (cached, others): (Vec<usize>, Vec<usize>) =
            blocks.iter().rev().partition(|block| self.holds[**block].is_some());
        self.free.extend(cached);
        others.into_iter().rev().for_each(|block| self.free.push_front(block));
        (hit * self.size, events)
    }

    fn store(&mut self, hashes: &[EngineHash], hit: usize, blocks: &[usize], events: &mut Vec<(bool, EngineHash)>) {
        for (hash, block) in hashes.iter().zip(blocks).skip(hit) {
            self.holds[*block] = Some(*hash);
            self.copies.entry(*hash).or_default().push(*block);
            events.push((true, *hash));
        }
    }
}

#[test]
fn one_request_at_a_time_agrees_with_a_naive_pool() {
    for seed in 0..30 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let config = ModelConfig {
            max_batched_tokens: 4_096,
            ..small(rng.random_range(20..60), 4)
        };
        let mut model = EngineModel::new(config).unwrap();
        let mut naive = Naive::new(&config);
        let mut now = Micros(0);
        for id in 0..200 {
            let mut tokens = prompt(rng.random_range(0..3), rng.random_range(0..30));
            tokens.extend(prompt(rng.random_range(10..14), rng.random_range(1..30)));
            // Answers too short to fill a block of generated tokens, whose contents the naive pool doesn't know.
            let answer = (4 - tokens.len() % 4).min(3);
            let (hit, expected) = naive.request(&config, &tokens, answer);
            let (out, finish, later) = run(&mut model, now, request(id, tokens, answer as u32));
            let mut events = Vec::new();
            for event in out.batches.iter().flat_map(|batch| &batch.events) {
                match event {
                    CacheEvent::Stored { hashes, .. } => events.extend(hashes.iter().map(|hash| (true, *hash))),
                    CacheEvent::Removed { hashes, .. } => events.extend(hashes.iter().map(|hash| (false, *hash))),
                    CacheEvent::Cleared => unreachable!("nothing was reset"),
                }
            }
            assert_eq!(
                (finish.cached.gpu as usize, events),
                (hit, expected),
                "seed {seed}, request {id}"
            );
            now = later;
        }
    }
}
