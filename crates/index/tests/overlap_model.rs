//! Overlaps of a whole state, over random lifetimes, tiers and reaches, against the plain model's.

#![allow(clippy::unwrap_used)]

#[path = "support/registrations.rs"]
mod support;

use std::collections::BTreeMap;

use cairn_blocks::{BlockKey, BlockSize, Depth};
use cairn_index::oracle::Oracle;
use cairn_index::{
    BatchOutcome, Command, HolderId, HolderSpec, IndexState, LogIndex, Op, Overlap, Query, Reach, Reply, SourceSpec,
    Stored, Tier, WorkerId,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use support::*;

const UNITS: [u32; 5] = [1, 16, 48, 64, 100];

fn random_spec(rng: &mut SmallRng) -> SourceSpec {
    let mut spec = spec(rng.random_range(0..6));
    spec.holders.clear();
    for tier in [Tier::Gpu, Tier::Cpu, Tier::Shared] {
        if tier != Tier::Gpu && rng.random_bool(0.4) {
            continue;
        }
        let reach = match (tier, rng.random_range(0..3)) {
            (Tier::Gpu, _) | (_, 0) => Reach::Worker,
            (_, 1) => Reach::Host(spec.worker.host.clone()),
            _ => Reach::Pool,
        };
        spec.holders.push(HolderSpec {
            tier,
            fetch_unit: UNITS[rng.random_range(0..UNITS.len())],
            reach,
        });
    }
    spec
}

/// The block at `depth` of one of a few chains that share their first 12 blocks.
fn key(line: u64, depth: u64) -> BlockKey {
    let line = if depth <= 12 { 0 } else { line };
    keys(line * 1000 + depth..line * 1000 + depth + 1)[0]
}

fn chain(line: u64, range: std::ops::RangeInclusive<u64>) -> Vec<BlockKey> {
    range.map(|depth| key(line, depth)).collect()
}

fn random_op(rng: &mut SmallRng, holder: HolderId) -> Op {
    let line = rng.random_range(0..4);
    match rng.random_range(0..10) {
        0..=4 => {
            let skip = if rng.random_bool(0.3) {
                rng.random_range(0..20)
            } else {
                0
            };
            let keys = chain(line, 1..=rng.random_range(1..40));
            Op::Store {
                holder,
                anchor: ROOT,
                anchor_depth: Depth(0),
                skip,
                keys,
            }
        }
        5 => {
            let depth = rng.random_range(1..30);
            let keys = chain(line, depth + 1..=depth + rng.random_range(1..10));
            Op::Store {
                holder,
                anchor: key(line, depth),
                anchor_depth: Depth(depth as u32),
                skip: 0,
                keys,
            }
        }
        6..=8 => {
            let depth = rng.random_range(1..40);
            let count = rng.random_range(1..12);
            Op::Remove {
                holder,
                key: key(line, depth),
                depth: Depth(depth as u32),
                count,
            }
        }
        _ => Op::Clear { holder },
    }
}

/// Applies to the model what the state applied.
fn mirror(model: &mut Oracle, of: &Registered, ops: &[Op]) -> Vec<u32> {
    let mut unknown = Vec::new();
    for (at, op) in (0..).zip(ops) {
        match op {
            Op::Store {
                holder,
                anchor,
                anchor_depth,
                skip,
                keys,
            } => {
                let stored = model.store_beside(*holder, &of.holders, *anchor, *anchor_depth, *skip, keys);
                if stored == Stored::UnknownAnchor {
                    unknown.push(at);
                }
            }
            Op::Remove {
                holder,
                key,
                depth,
                count,
            } => {
                model.remove(*holder, *key, *depth, *count);
            }
            Op::Clear { holder } => model.clear(*holder),
            Op::Confidence(_) => {}
        }
    }
    unknown
}

/// The definition, word for word: GPU prefix, then one CPU holder, then one shared holder.
fn expected(state: &IndexState, model: &Oracle, worker: WorkerId, keys: &[BlockKey], prompt: u32) -> Overlap {
    let registry = state.registry();
    let keys = &keys[..keys.len().min(prompt as usize / 16)];
    let best = |tier: Tier, have: u32| {
        let mut best = have;
        for (id, holder) in &registry.holders {
            let owner = registry.sources[&holder.source].worker;
            let (me, it) = (&registry.workers[&worker], &registry.workers[&owner]);
            let reached = match &holder.spec.reach {
                Reach::Worker => owner == worker,
                Reach::Host(host) => me.spec.host == *host && me.pool == it.pool,
                Reach::Pool => me.pool == it.pool,
            };
            if holder.spec.tier == tier && reached {
                let unit = holder.spec.fetch_unit;
                let from = have / unit * unit / 16;
                let depth = model.match_from(*id, keys, Depth(from)).0;
                best = best.max((depth * 16).min(prompt.saturating_sub(1)) / unit * unit);
            }
        }
        best - have
    };
    let gpu = best(Tier::Gpu, 0);
    let cpu = best(Tier::Cpu, gpu);
    Overlap {
        gpu,
        cpu,
        shared: best(Tier::Shared, gpu + cpu),
    }
}

#[test]
fn overlaps_are_the_models_over_restarts_tiers_and_reaches() {
    for seed in 0..150 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let (mut state, mut model) = (IndexState::new(), Oracle::new());
        let mut sources: BTreeMap<u32, (Registered, u64)> = BTreeMap::new();
        let mut out = Vec::new();
        for _ in 0..250 {
            match rng.random_range(0..20) {
                0 => {
                    let of = register(&mut state, random_spec(&mut rng));
                    if let Some((old, _)) = sources.remove(&of.source.0) {
                        old.holders.iter().for_each(|&h| model.remove_holder(h));
                    }
                    of.holders.iter().for_each(|&h| model.add_holder(h));
                    sources.insert(of.source.0, (of, 0));
                }
                1 if sources.len() > 1 => {
                    let (&id, _) = sources.iter().nth(rng.random_range(0..sources.len())).unwrap();
                    let (of, _) = sources.remove(&id).unwrap();
                    let at = LogIndex(state.applied().0 + 1);
                    let (source, incarnation) = (of.source, of.incarnation);
                    assert_eq!(
                        state.apply(at, &Command::RemoveSource { source, incarnation }),
                        Reply::Done
                    );
                    of.holders.iter().for_each(|&h| model.remove_holder(h));
                }
                _ if !sources.is_empty() => {
                    let at = rng.random_range(0..sources.len());
                    let (_, (of, seq)) = sources.iter_mut().nth(at).unwrap();
                    *seq += 1;
                    let holder = of.holders[rng.random_range(0..of.holders.len())];
                    let ops: Vec<Op> = (0..4).map(|_| random_op(&mut rng, holder)).collect();
                    let unknown_anchors = mirror(&mut model, of, &ops);
                    assert_eq!(
                        push(&mut state, of, *seq, ops),
                        BatchOutcome::Applied { unknown_anchors }
                    );
                }
                _ => {}
            }
            let keys = chain(rng.random_range(0..4), 1..=rng.random_range(1..45));
            let prompt = (keys.len() as u32 * 16 + rng.random_range(0..16)) * rng.random_range(1..3) / 2;
            let query = Query {
                pool: "llama",
                keys: &keys,
                prompt_tokens: prompt,
                block_size: BlockSize::new(16).unwrap(),
            };
            state.overlap(&query, &mut out);
            assert_eq!(out.len(), state.registry().workers.len());
            for got in &out {
                let expect = expected(&state, &model, got.worker, &keys, prompt);
                assert_eq!(got.overlap, expect, "seed {seed}, {:?}, {prompt} tokens", got.worker);
                assert!(got.overlap.total() < prompt.max(1), "INV-07");
            }
            for &holder in state.registry().holders.keys() {
                assert_eq!(state.residency().holder_digest(holder), model.holder_digest(holder));
            }
        }
    }
}
