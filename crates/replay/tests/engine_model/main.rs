//! The engine core against what real engines were seen to do, and against a naive block pool.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

mod random;

use std::sync::Arc;

use cairn_replay::engine_model::{
    Answer, CacheEvent, CpuStorePolicy, CpuTierConfig, EngineHash, EngineModel, Finish, FinishReason, InvalidModel,
    Medium, Micros, ModelConfig, Request, RequestId, StepOutcome, SubmitError, Timing, hash,
};

fn small(gpu_blocks: u32, block_size: u32) -> ModelConfig {
    ModelConfig {
        block_size,
        gpu_blocks,
        max_model_len: (gpu_blocks - 1) * block_size,
        max_batched_tokens: 2_048,
        ..ModelConfig::default()
    }
}

fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| seed * 10_000 + i).collect()
}

fn request(id: u64, tokens: Vec<u32>, answer: u32) -> Request {
    Request::new(RequestId(id), tokens, Answer::Seeded { seed: id, len: answer })
}

/// Steps until nothing is left to do; the outcomes together.
fn drain(model: &mut EngineModel, mut now: Micros) -> (StepOutcome, Micros) {
    let mut all = StepOutcome::default();
    loop {
        let out = model.step(now);
        all.batches.extend(out.batches);
        all.outputs.extend(out.outputs);
        all.transfers.extend(out.transfers);
        match out.next_wakeup {
            Some(at) => now = at,
            None => return (all, now),
        }
    }
}

fn run(model: &mut EngineModel, now: Micros, request: Request) -> (StepOutcome, Finish, Micros) {
    model.submit(now, request).unwrap();
    let (out, now) = drain(model, now);
    let finish = out.outputs.iter().find_map(|output| output.finish.clone()).unwrap();
    (out, finish, now)
}

fn stored(out: &StepOutcome) -> Vec<(Option<EngineHash>, Vec<EngineHash>)> {
    let events = out.batches.iter().flat_map(|batch| &batch.events);
    events
        .filter_map(|event| match event {
            CacheEvent::Stored { hashes, parent, .. } => Some((*parent, hashes.clone())),
            CacheEvent::Removed { .. } | CacheEvent::Cleared => None,
        })
        .collect()
}

fn removed(out: &StepOutcome) -> Vec<EngineHash> {
    let events = out.batches.iter().flat_map(|batch| &batch.events);
    events
        .filter_map(|event| match event {
            CacheEvent::Removed { hashes, .. } => Some(hashes.clone()),
            CacheEvent::Stored { .. } | CacheEvent::Cleared => None,
        })
        .flatten()
        .collect()
}

fn hashes_of(config: &ModelConfig, tokens: &[u32]) -> Vec<EngineHash> {
    let mut parent = hash::root(config.hash_seed);
    let blocks = tokens.chunks_exact(config.block_size as usize);
    blocks
        .map(|block| {
            parent = hash::next(parent, block, None, None);
            parent
        })
        .collect()
}

#[test]
fn the_last_block_of_the_oldest_prompt_is_evicted_first_and_before_the_store() {
    // As captured from vLLM 0.32 with 31 usable blocks of 32: four prompts of nine blocks.
    let config = small(32, 32);
    let mut model = EngineModel::new(config).unwrap();
    let mut now = Micros(0);
    for seed in 0..3 {
        let (out, _, later) = run(&mut model, now, request(u64::from(seed), prompt(seed, 288), 1));
        assert_eq!(removed(&out), []);
        now = later;
    }
    let (out, _, _) = run(&mut model, now, request(3, prompt(3, 288), 1));
    let first = hashes_of(&config, &prompt(0, 288));
    assert_eq!(removed(&out), [first[8], first[7], first[6], first[5], first[4]]);
    assert_eq!(out.batches.len(), 1);
    assert!(matches!(out.batches[0].events[..5], [CacheEvent::Removed { .. }, ..]));
    assert!(matches!(&out.batches[0].events[5], CacheEvent::Stored { hashes, .. } if hashes.len() == 9));
}

/// vLLM 0.32: `BlockPool.free_blocks` puts blocks without a hash at the free queue's head, all others at its tail.
#[test]
fn blocks_that_nobody_can_hit_are_taken_before_cached_ones() {
    let mut model = EngineModel::new(small(10, 16)).unwrap();
    // Nine usable blocks. A prompt of two full ones and a rest leaves one without content: eight are left for the next two
    // requests, one of them used twice over, and nothing has to go.
    let (_, _, now) = run(&mut model, Micros(0), request(1, prompt(1, 40), 1));
    let (out, _, now) = run(&mut model, now, request(2, prompt(2, 56), 1));
    assert_eq!(removed(&out), []);
    let (out, _, now) = run(&mut model, now, request(3, prompt(3, 56), 1));
    assert_eq!((removed(&out), model.gauges().cached_blocks), (vec![], 8));
    // The ninth is taken first again, then the oldest of the cached.
    let (out, _, _) = run(&mut model, now, request(4, prompt(4, 20), 1));
    let oldest = hashes_of(model.config(), &prompt(1, 40))[1];
    assert_eq!((removed(&out), model.gauges().cached_blocks), (vec![oldest], 8));
}

#[test]
fn a_full_hit_of_whole_blocks_computes_and_stores_its_last_block_again() {
    let mut model = EngineModel::new(small(64, 16)).unwrap();
    let (_, _, now) = run(&mut model, Micros(0), request(1, prompt(1, 64), 1));
    let (out, finish, now) = run(&mut model, now, request(2, prompt(1, 64), 1));
    assert_eq!(finish.cached.gpu, 48);
    let hashes = hashes_of(model.config(), &prompt(1, 64));
    assert_eq!(stored(&out), [(Some(hashes[2]), vec![hashes[3]])]);
    // One token more, and the fourth block is a hit: nothing to announce but what follows.
    let (out, finish, _) = run(&mut model, now, request(3, prompt(1, 65), 1));
    assert_eq!((finish.cached.gpu, stored(&out)), (64, vec![]));
    assert_eq!(model.gauges().cached_blocks, 5);
}

#[test]
fn long_prompts_are_stored_chunk_by_chunk_below_their_parents() {
    let mut config = small(400, 16);
    config.max_batched_tokens = 1_000;
    let mut model = EngineModel::new(config).unwrap();
    let (out, _, _) = run(&mut model, Micros(0), request(1, prompt(1, 2_500), 20));
    let hashes = hashes_of(&config, &prompt(1, 2_500));
    let stores = stored(&out);
    assert_eq!(stores[0], (None, hashes[..62].to_vec()));
    assert_eq!(stores[1], (Some(hashes[61]), hashes[62..125].to_vec()));
    assert_eq!(stores[2], (Some(hashes[124]), hashes[125..156].to_vec()));
    // Generated tokens fill blocks as well.
    assert_eq!(stores[3].0, Some(hashes[155]));
    assert_eq!(stores.len(), 4);
}

#[test]
fn adapters_and_salts_separate_equal_tokens() {
    let mut model = EngineModel::new(small(64, 16)).unwrap();
    let mut now = Micros(0);
    let variants: [(Option<&str>, Option<&str>); 4] = [
        (None, None),
        (Some("sql"), None),
        (None, Some("t1")),
        (Some("sql"), Some("t1")),
    ];
    for (id, (adapter, salt)) in variants.into_iter().chain(variants).enumerate() {
        let mut request = request(id as u64, prompt(1, 40), 1);
        request.adapter = adapter.map(Arc::from);
        request.salt = salt.map(Arc::from);
        let (_, finish, later) = run(&mut model, now, request);
        assert_eq!(finish.cached.gpu, if id < 4 { 0 } else { 32 }, "{adapter:?} {salt:?}");
        now = later;
    }
}

#[test]
fn a_full_cache_preempts_the_youngest_which_still_finishes() {
    let mut config = small(9, 16);
    config.prefix_caching = false;
    let mut model = EngineModel::new(config).unwrap();
    for id in 0..2 {
        model.submit(Micros(0), request(id, prompt(id as u32, 60), 60)).unwrap();
    }
    let (out, _) = drain(&mut model, Micros(0));
    let finishes: Vec<&Finish> = out.outputs.iter().filter_map(|output| output.finish.as_ref()).collect();
    assert_eq!(finishes.len(), 2);
    assert_eq!((finishes[0].preemptions, finishes[1].preemptions > 0), (0, true));
    assert_eq!((finishes[0].output_tokens, finishes[1].output_tokens), (60, 60));
    assert_eq!(model.gauges().kv_usage, 0.0);
}

#[test]
fn a_reset_is_refused_in_use_and_published_with_the_next_step_only() {
    let mut model = EngineModel::new(small(64, 16)).unwrap();
    model.submit(Micros(0), request(1, prompt(1, 64), 4)).unwrap();
    model.step(Micros(0));
    assert!(!model.reset_prefix_cache(false));
    let (_, now) = drain(&mut model, Micros(0));
    assert!(model.reset_prefix_cache(false));
    assert_eq!(model.step(now).batches, []);
    let (out, finish, _) = run(&mut model, now, request(2, prompt(1, 64), 1));
    assert_eq!(finish.cached.gpu, 0);
    assert_eq!(out.batches[0].events[0], CacheEvent::Cleared);
}

#[test]
fn host_memory_serves_what_the_gpu_evicted_and_announces_it_a_step_later() {
    let mut config = small(17, 16);
    config.cpu = Some(CpuTierConfig {
        blocks: 64,
        store: CpuStorePolicy::OnStore,
    });
    let mut model = EngineModel::new(config).unwrap();
    let (out, _, now) = run(&mut model, Micros(0), request(1, prompt(1, 160), 2));
    let media = |out: &StepOutcome| -> Vec<Vec<(Medium, usize)>> {
        let of = |event: &CacheEvent| match event {
            CacheEvent::Stored { medium, hashes, .. } => Some((*medium, hashes.len())),
            CacheEvent::Removed { .. } | CacheEvent::Cleared => None,
        };
        out.batches
            .iter()
            .map(|batch| batch.events.iter().filter_map(of).collect())
            .collect()
    };
    assert_eq!(media(&out), [vec![(Medium::Gpu, 10)], vec![(Medium::Cpu, 1); 10]]);
    let (_, _, now) = run(&mut model, now, request(2, prompt(2, 250), 1));
    let (out, finish, _) = run(&mut model, now, request(3, prompt(1, 160), 1));
    assert_eq!((finish.cached.gpu, finish.cached.cpu), (0, 144));
    assert_eq!(
        media(&out)[0],
        [(Medium::Gpu, 9), (Medium::Gpu, 1)],
        "loaded blocks are ordinary stores"
    );
    let waited = finish.first_token.unwrap().since(finish.arrived);
    assert!(waited >= config.timing.host_load(144), "the load takes its time");
}

#[test]
fn storing_late_writes_far_less_than_storing_everything() {
    let written = |store| {
        let mut config = small(33, 16);
        config.cpu = Some(CpuTierConfig { blocks: 512, store });
        let mut model = EngineModel::new(config).unwrap();
        let mut now = Micros(0);
        for id in 0..200u32 {
            // Every tenth prompt comes again; the others are seen once.
            let seed = if id % 10 == 0 { 7 } else { 100 + id };
            now = run(&mut model, now, request(u64::from(id), prompt(seed, 256), 1)).2;
        }
        (
            model.counters().cpu_stored_blocks,
            model.counters().prefix_hits + model.counters().cpu_hits,
        )
    };
    let (all, hits_all) = written(CpuStorePolicy::OnStore);
    let (second, hits_second) = written(CpuStorePolicy::OnSecondUse);
    assert!(second * 10 <= all, "{second} of {all} blocks written");
    assert!(
        hits_second * 10 >= hits_all * 9,
        "{hits_second} of {hits_all} tokens hit"
    );
    let (eviction, _) = written(CpuStorePolicy::OnEviction);
    assert!(eviction <= all);
}

#[test]
fn a_prefill_leg_holds_its_blocks_until_they_are_pulled_or_expire() {
    let mut config = small(64, 16);
    config.hold_s = 2.0;
    let mut model = EngineModel::new(config).unwrap();
    let mut leg = request(1, prompt(1, 100), 1);
    leg.hold = true;
    model.submit(Micros(0), leg.clone()).unwrap();
    let now = model.step(Micros(0)).next_wakeup.unwrap();
    let out = model.step(now);
    assert_eq!(out.outputs[0].finish.as_ref().unwrap().held.len(), 7);
    assert!(model.holds(RequestId(1)) && model.gauges().kv_usage > 0.0);
    assert!(model.release_held(now, RequestId(1)) && !model.release_held(now, RequestId(1)));
    assert_eq!(model.gauges().kv_usage, 0.0);
    leg.id = RequestId(2);
    model.submit(now, leg).unwrap();
    let (_, end) = drain(&mut model, now);
    assert!(end >= now.plus(Micros(2_000_000)));
    assert_eq!((model.gauges().held, model.counters().holds_expired), (0, 1));
}

#[test]
fn a_decode_leg_computes_its_last_token_only_and_announces_pulled_blocks() {
    let mut model = EngineModel::new(small(64, 16)).unwrap();
    let mut leg = request(1, prompt(1, 100), 3);
    leg.remote_tokens = 100;
    model.submit(Micros(0), leg.clone()).unwrap();
    let out = model.step(Micros(0));
    assert_eq!(
        (out.transfers.len(), out.transfers[0].tokens, out.next_wakeup),
        (1, 100, None)
    );
    let pulled = Micros(5_000);
    assert_eq!(model.transfer_done(pulled, RequestId(1), true), None);
    let (out, now) = drain(&mut model, pulled);
    assert_eq!(stored(&out)[0].1.len(), 6);
    let finish = out.outputs.last().unwrap().finish.clone().unwrap();
    assert_eq!((finish.cached.remote, finish.output_tokens), (99, 3));
    assert!(finish.first_token.unwrap() > pulled);
    assert_eq!(model.counters().computed_tokens, 1);
    // A dead prefill engine: the request ends, and nothing stays behind.
    leg.id = RequestId(2);
    leg.prompt = prompt(2, 100);
    model.submit(now, leg).unwrap();
    model.step(now);
    let ended = model.transfer_done(now, RequestId(2), false).unwrap();
    assert_eq!(ended.finish.unwrap().reason, FinishReason::TransferFailed);
    assert_eq!(model.gauges().kv_usage, 0.0);
}

#[test]
fn impossible_shapes_and_requests_are_refused() {
    let mut config = small(64, 16);
    config.max_model_len = 63 * 16 + 1;
    assert!(matches!(
        EngineModel::new(config).map(|_| ()),
        Err(InvalidModel::CacheTooSmall { needed: 64, .. })
    ));
    config.block_size = 0;
    assert!(matches!(
        EngineModel::new(config).map(|_| ()),
        Err(InvalidModel::OutOfRange {
            field: "block_size",
            ..
        })
    ));
    let mut model = EngineModel::new(small(4, 16)).unwrap();
    assert_eq!(
        model.submit(Micros(0), request(1, vec![], 1)),
        Err(SubmitError::EmptyPrompt)
    );
    assert!(matches!(
        model.submit(Micros(0), request(1, vec![1; 48], 1)),
        Err(SubmitError::TooLong { .. })
    ));
    model.submit(Micros(0), request(1, vec![1; 8], 1)).unwrap();
    assert_eq!(
        model.submit(Micros(0), request(1, vec![1; 8], 1)),
        Err(SubmitError::DuplicateId(1))
    );
}

#[test]
fn prefill_cost_grows_with_context_and_batches_share_the_base() {
    let timing = Timing::llama_8b_h100();
    let mut config = small(4_000, 16);
    config.max_batched_tokens = 65_536;
    let alone = |len: usize| {
        let mut model = EngineModel::new(config).unwrap();
        run(&mut model, Micros(0), request(1, prompt(1, len), 1))
            .1
            .first_token
            .unwrap()
    };
    let expected = Micros::from_seconds(timing.step_base_s + timing.prefill_s(0, 4_000));
    assert_eq!(alone(4_000), expected);
    assert!(alone(8_000).0 > 2 * alone(4_000).0 - Micros::from_seconds(timing.step_base_s).0);
    let mut model = EngineModel::new(config).unwrap();
    for id in 0..2 {
        model
            .submit(Micros(0), request(id, prompt(id as u32, 4_000), 1))
            .unwrap();
    }
    let (out, _) = drain(&mut model, Micros(0));
    assert_eq!(out.outputs[0].at, out.outputs[1].at);
    assert!(out.outputs[0].at.0 < 2 * alone(4_000).0);
}
