//! What counts as a hit, by tier and fetch unit.

#![allow(clippy::unwrap_used)]

#[path = "support/registrations.rs"]
mod support;

use cairn_blocks::{BlockKey, BlockSize, Depth};
use cairn_index::{HolderId, HolderSpec, IndexState, Op, Overlap, Query, Reach, Tier, WorkerId, WorkerOverlap};
use support::*;

fn overlaps(state: &IndexState, keys: &[BlockKey], prompt_tokens: u32) -> Vec<WorkerOverlap> {
    let mut out = vec![WorkerOverlap {
        worker: WorkerId(999),
        overlap: Overlap::default(),
    }];
    let query = Query {
        pool: "llama",
        keys,
        prompt_tokens,
        block_size: BlockSize::new(16).unwrap(),
    };
    state.overlap(&query, &mut out);
    out
}

fn one(state: &IndexState, keys: &[BlockKey], prompt_tokens: u32) -> (u32, u32, u32) {
    let overlap = overlaps(state, keys, prompt_tokens)[0].overlap;
    (overlap.gpu, overlap.cpu, overlap.shared)
}

fn units(gpu: u32, cpu: u32, shared: u32) -> Vec<HolderSpec> {
    vec![
        HolderSpec {
            tier: Tier::Gpu,
            fetch_unit: gpu,
            reach: Reach::Worker,
        },
        HolderSpec {
            tier: Tier::Cpu,
            fetch_unit: cpu,
            reach: Reach::Worker,
        },
        HolderSpec {
            tier: Tier::Shared,
            fetch_unit: shared,
            reach: Reach::Pool,
        },
    ]
}

fn state_with(units: Vec<HolderSpec>) -> (IndexState, Registered) {
    let mut state = IndexState::new();
    let mut spec = spec(1);
    spec.holders = units;
    let registered = register(&mut state, spec);
    (state, registered)
}

/// Blocks `held` of the chain 0..100, the others being named as ancestors only.
fn part(holder: HolderId, held: std::ops::Range<u64>) -> Op {
    Op::Store {
        holder,
        anchor: ROOT,
        anchor_depth: Depth(0),
        skip: held.start as u32,
        keys: keys(0..held.end),
    }
}

#[test]
fn a_hit_is_floored_to_the_fetch_unit_and_leaves_the_last_token() {
    // (fetch unit, blocks held, prompt tokens) -> tokens
    for (unit, held, prompt, expect) in [
        (64, 6, 200, 64), // 100 shared tokens: 6 whole blocks, one whole engine block
        (64, 8, 128, 64), // fully cached: the last token is computed, so its engine block is
        (64, 8, 129, 128),
        (16, 8, 128, 112),
        (16, 8, 129, 128),
        (16, 8, 100, 96), // never more than the request
        (16, 8, 96, 80),
        (16, 8, 15, 0),
        (16, 8, 1, 0),
        (16, 8, 0, 0),
        (1, 8, 128, 127), // a page size of one token reuses all but the last
        (48, 8, 129, 96),
        (1056, 8, 129, 0),
    ] {
        let (mut state, source) = state_with(units(unit, 16, 16));
        push(&mut state, &source, 1, vec![part(source.holders[0], 0..held)]);
        let got = one(&state, &keys(0..prompt / 16), prompt as u32);
        assert_eq!(got, (expect, 0, 0), "unit {unit}, {held} blocks, {prompt} tokens");
    }
}

#[test]
fn inv_07_an_overlap_is_a_prefix_and_never_exceeds_the_request() {
    let (mut state, source) = state_with(units(16, 16, 16));
    push(&mut state, &source, 1, vec![part(source.holders[0], 2..10)]);
    assert_eq!(
        one(&state, &keys(0..20), 321),
        (0, 0, 0),
        "a cache without the first block has no prefix"
    );
    push(&mut state, &source, 2, vec![part(source.holders[0], 0..2)]);
    assert_eq!(one(&state, &keys(0..20), 321), (160, 0, 0));
    // More keys than the prompt has blocks are not believed.
    assert_eq!(one(&state, &keys(0..20), 40), (32, 0, 0));
}

#[test]
fn a_cpu_copy_counts_from_where_the_gpu_ends_and_one_holder_must_have_it_alone() {
    let (mut state, source) = state_with(units(16, 16, 16));
    let [gpu, cpu, shared] = source.holders[..] else {
        panic!()
    };
    push(
        &mut state,
        &source,
        1,
        vec![part(gpu, 0..4), part(cpu, 4..9), part(shared, 9..12)],
    );
    assert_eq!(one(&state, &keys(0..20), 321), (64, 80, 48));
    // GPU blocks behind the first miss don't count.
    push(&mut state, &source, 2, vec![part(gpu, 6..30)]);
    assert_eq!(one(&state, &keys(0..20), 321), (64, 80, 48));
    // A hole in the CPU tier ends its stretch; the shared store doesn't reach back.
    push(
        &mut state,
        &source,
        3,
        vec![Op::Remove {
            holder: cpu,
            key: keys(6..7)[0],
            depth: Depth(7),
            count: 1,
        }],
    );
    assert_eq!(one(&state, &keys(0..20), 321), (64, 32, 0));
}

#[test]
fn a_tier_serves_whole_chunks_only() {
    let (mut state, source) = state_with(units(16, 64, 256));
    let [gpu, cpu, _] = source.holders[..] else { panic!() };
    // The chunk that the GPU's end lies in must be whole in the CPU tier.
    push(&mut state, &source, 1, vec![part(gpu, 0..6), part(cpu, 6..12)]);
    assert_eq!(one(&state, &keys(0..20), 321), (96, 0, 0));
    push(&mut state, &source, 2, vec![part(cpu, 4..6)]);
    assert_eq!(one(&state, &keys(0..20), 321), (96, 96, 0));
    push(&mut state, &source, 3, vec![part(cpu, 12..15)]);
    assert_eq!(one(&state, &keys(0..20), 321), (96, 96, 0));
}

#[test]
fn host_and_pool_holders_are_reached_by_the_right_workers() {
    let mut state = IndexState::new();
    let mut sources = Vec::new();
    for n in 0..4 {
        let mut spec = spec(n);
        spec.holders[1].reach = Reach::Host(spec.worker.host.clone());
        spec.holders.push(HolderSpec {
            tier: Tier::Shared,
            fetch_unit: 16,
            reach: Reach::Pool,
        });
        sources.push(register(&mut state, spec));
    }
    // Worker 0 and 1 share a host; the CPU copy of 0 is longer than 1's own.
    push(&mut state, &sources[0], 1, vec![part(sources[0].holders[1], 0..6)]);
    push(&mut state, &sources[1], 1, vec![part(sources[1].holders[1], 0..2)]);
    push(&mut state, &sources[3], 1, vec![part(sources[3].holders[2], 0..9)]);
    let got: Vec<_> = overlaps(&state, &keys(0..20), 321)
        .iter()
        .map(|o| (o.worker.0, o.overlap.gpu, o.overlap.cpu, o.overlap.shared))
        .collect();
    assert_eq!(got, [(0, 0, 96, 48), (1, 0, 96, 48), (2, 0, 0, 144), (3, 0, 0, 144)]);
}

#[test]
fn other_pools_are_not_seen() {
    let (mut state, source) = state_with(units(16, 16, 16));
    push(&mut state, &source, 1, vec![part(source.holders[0], 0..4)]);
    let keys = keys(0..4);
    let mut out = vec![WorkerOverlap {
        worker: WorkerId(999),
        overlap: Overlap::default(),
    }];
    let query = Query {
        pool: "other",
        keys: &keys,
        prompt_tokens: 64,
        block_size: BlockSize::new(16).unwrap(),
    };
    state.overlap(&query, &mut out);
    assert!(out.is_empty());
    assert_eq!(overlaps(&state, &[], 10).len(), 1);
}
