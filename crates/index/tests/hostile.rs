//! Keys that no chain gives and snapshots that nobody wrote: answers may be of no use, but nothing panics or leaks.

#![allow(clippy::unwrap_used)]

#[path = "support/registrations.rs"]
mod support;

use cairn_blocks::{BlockKey, Depth};
use cairn_index::codec::{decode_snapshot, encode_snapshot};
use cairn_index::{HolderId, IndexState, Op, Residency};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use support::*;

const HOLDERS: u32 = 3;

fn random_keys(rng: &mut SmallRng, universe: u64, most: usize) -> Vec<BlockKey> {
    (0..rng.random_range(0..most))
        .map(|_| BlockKey(rng.random_range(0..universe)))
        .collect()
}

#[test]
fn keys_that_repeat_and_contradict_themselves_never_panic_nor_leave_residue() {
    for seed in 0..400 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let universe = [3, 12, 60, 400][seed as usize % 4];
        let mut residency = Residency::new();
        (0..HOLDERS).for_each(|h| residency.add_holder(HolderId(h)));
        let mut out = Vec::new();
        for _ in 0..500 {
            let holder = HolderId(rng.random_range(0..HOLDERS + 1));
            let key = BlockKey(rng.random_range(0..universe));
            let depth = Depth(rng.random_range(0..40));
            match rng.random_range(0..12) {
                0..=4 => {
                    let keys = random_keys(&mut rng, universe, 50);
                    let skip = rng.random_range(0..4);
                    residency.store_beside(holder, &[HolderId(1)], key, depth, skip, &keys);
                }
                5 => {
                    let keys = random_keys(&mut rng, universe, 50);
                    residency.store(holder, BlockKey(7), Depth(0), 0, &keys);
                }
                6..=9 => {
                    residency.remove(holder, key, depth, rng.random_range(0..30));
                }
                10 if rng.random_bool(0.1) => residency.clear(holder),
                _ => {
                    let keys = random_keys(&mut rng, universe, 60);
                    residency.match_prefix(&keys, &mut out);
                    assert!(out.iter().all(|&depth| depth as usize <= keys.len()));
                    assert!(residency.match_from(holder, &keys, depth).0 as usize <= keys.len().max(depth.0 as usize));
                }
            }
        }
        (0..HOLDERS).for_each(|h| residency.remove_holder(HolderId(h)));
        assert_eq!(
            (residency.known_blocks(), residency.run_count(), residency.weight()),
            (0, 0, 0),
            "seed {seed}"
        );
    }
}

#[test]
fn replicas_agree_on_contradictory_keys_too() {
    for seed in 0..200 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut state = IndexState::new();
        let of = register(&mut state, spec(1));
        let mut seq = 0;
        let mut step = |state: &mut IndexState, copies: &mut Vec<IndexState>| {
            seq += 1;
            let holder = of.holders[rng.random_range(0..2)];
            let anchor_depth = Depth(if rng.random_bool(0.5) {
                0
            } else {
                rng.random_range(0..9)
            });
            let (anchor, keys) = (BlockKey(rng.random_range(0..9)), random_keys(&mut rng, 30, 20));
            let key = BlockKey(rng.random_range(0..30));
            let depth = Depth(rng.random_range(0..20));
            let ops = vec![
                Op::Store {
                    holder,
                    anchor,
                    anchor_depth,
                    skip: rng.random_range(0..3),
                    keys,
                },
                Op::Remove {
                    holder,
                    key,
                    depth,
                    count: rng.random_range(0..9),
                },
            ];
            let outcome = push(state, &of, seq, ops.clone());
            for copy in copies {
                assert_eq!(push(copy, &of, seq, ops.clone()), outcome);
                assert_eq!(copy.digest(), state.digest());
            }
        };
        (0..100).for_each(|_| step(&mut state, &mut Vec::new()));
        let mut bytes = Vec::new();
        encode_snapshot(&state, &mut bytes).unwrap();
        let mut copies = vec![state.clone(), decode_snapshot(&bytes[..]).unwrap()];
        (0..100).for_each(|_| step(&mut state, &mut copies));
    }
}

#[test]
fn damaged_snapshots_with_a_right_checksum_are_errors_or_whole_states() {
    let mut state = IndexState::new();
    for n in 0..3 {
        let of = register(&mut state, spec(n));
        let ops = vec![
            store(of.holders[0], &keys(0..40)),
            store(of.holders[1], &keys(0..70)),
            Op::Remove {
                holder: of.holders[1],
                key: keys(30..31)[0],
                depth: Depth(31),
                count: 5,
            },
            Op::Remove {
                holder: of.holders[1],
                key: keys(9..10)[0],
                depth: Depth(10),
                count: 3,
            },
            Op::Store {
                holder: of.holders[0],
                anchor: keys(19..20)[0],
                anchor_depth: Depth(20),
                skip: 3,
                keys: keys(u64::from(n) * 100 + 500..u64::from(n) * 100 + 530),
            },
        ];
        push(&mut state, &of, 1, ops);
    }
    let mut bytes = Vec::new();
    encode_snapshot(&state, &mut bytes).unwrap();
    let body = bytes.len() - 8;
    let mut rng = SmallRng::seed_from_u64(1);
    for _ in 0..30_000 {
        let mut damaged = bytes.clone();
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..body);
            damaged[at] = if rng.random_bool(0.5) {
                rng.random()
            } else {
                damaged[at] ^ (1 << rng.random_range(0..8))
            };
        }
        let sum = xxhash_rust::xxh3::xxh3_64(&damaged[..body]);
        damaged[body..].copy_from_slice(&sum.to_le_bytes());
        if let Ok(mut read) = decode_snapshot(&damaged[..]) {
            let sources: Vec<_> = read
                .registry()
                .sources
                .iter()
                .map(|(&id, s)| (id, s.incarnation))
                .collect();
            for (source, incarnation) in sources {
                let at = cairn_index::LogIndex(read.applied().0.wrapping_add(1));
                read.apply(at, &cairn_index::Command::RemoveSource { source, incarnation });
            }
            assert_eq!((read.residency().known_blocks(), read.residency().weight()), (0, 0));
        }
    }
}
