//! Stored bytes: what is written is read back, and hostile bytes give errors.

#![allow(clippy::unwrap_used)]

#[path = "support/registrations.rs"]
mod support;

use cairn_blocks::{BlockKey, ClusterSeed, Depth};
use cairn_index::codec::{DecodeError, decode_command, decode_snapshot, encode_command, encode_snapshot};
use cairn_index::{
    Batch, Command, Confidence, DegradedReason, HolderId, Incarnation, IndexState, LogIndex, Op, Seq, SourceId,
    WorkerId,
};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use support::*;

fn any_op() -> impl Strategy<Value = Op> {
    let keys = prop::collection::vec(any::<u64>().prop_map(BlockKey), 1..200);
    prop_oneof![
        (any::<u32>(), any::<u64>(), any::<u32>(), any::<u32>(), keys).prop_map(
            |(holder, anchor, depth, skip, keys)| Op::Store {
                holder: HolderId(holder),
                anchor: BlockKey(anchor),
                anchor_depth: Depth(depth),
                skip,
                keys
            }
        ),
        (any::<u32>(), any::<u64>(), any::<u32>(), any::<u32>()).prop_map(|(holder, key, depth, count)| Op::Remove {
            holder: HolderId(holder),
            key: BlockKey(key),
            depth: Depth(depth),
            count
        }),
        any::<u32>().prop_map(|holder| Op::Clear {
            holder: HolderId(holder)
        }),
        prop::sample::select(vec![
            Confidence::Exact,
            Confidence::Degraded(DegradedReason::Gap),
            Confidence::Degraded(DegradedReason::Replaying),
            Confidence::Degraded(DegradedReason::Hybrid),
            Confidence::Degraded(DegradedReason::Silent),
            Confidence::Degraded(DegradedReason::NoEvents),
            Confidence::Degraded(DegradedReason::Mismatch),
            Confidence::Degraded(DegradedReason::LeaseLapsed),
            Confidence::Degraded(DegradedReason::Bounded),
        ])
        .prop_map(Op::Confidence),
    ]
}

fn any_command() -> impl Strategy<Value = Command> {
    let batch = (
        any::<u32>(),
        any::<u64>(),
        any::<u64>(),
        prop::collection::vec(any_op(), 0..6),
    )
        .prop_map(|(source, incarnation, seq, ops)| Batch {
            source: SourceId(source),
            incarnation: Incarnation(incarnation),
            seq: Seq(seq),
            ops,
        });
    let life = || (any::<u32>(), any::<u64>()).prop_map(|(s, i)| (SourceId(s), Incarnation(i)));
    prop_oneof![
        ("[a-z]{0,9}", any::<u64>()).prop_map(|(cluster, seed)| Command::InitCluster {
            cluster,
            seed: ClusterSeed(seed)
        }),
        (0u32..9, any::<Option<u64>>(), "\\PC{0,20}").prop_map(|(n, resume, text)| {
            let mut spec = spec(n);
            spec.pool.model_root = Some(text.clone());
            spec.worker.bootstrap = Some(text.clone());
            spec.worker.adapters = vec![text, "b".into()];
            Command::RegisterSource {
                spec,
                resume: resume.map(Incarnation),
            }
        }),
        prop::collection::vec(batch, 0..5).prop_map(Command::Batches),
        life().prop_map(|(source, incarnation)| Command::LapseLease { source, incarnation }),
        life().prop_map(|(source, incarnation)| Command::RestoreLease { source, incarnation }),
        life().prop_map(|(source, incarnation)| Command::RemoveSource { source, incarnation }),
        (any::<u32>(), any::<bool>()).prop_map(|(worker, draining)| Command::SetDraining {
            worker: WorkerId(worker),
            draining
        }),
        ("[a-z]{0,9}", "[a-z]{0,9}").prop_map(|(pool, policy)| Command::SetPolicy { pool, policy }),
    ]
}

proptest! {
    #[test]
    fn a_command_is_read_back_as_written(command in any_command()) {
        prop_assert_eq!(decode_command(&encode_command(&command)).unwrap(), command);
    }

    #[test]
    fn damaged_commands_are_errors_or_other_commands(
        command in any_command(),
        damage in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = encode_command(&command);
        for (at, value) in damage {
            *at.get_mut(&mut bytes) = value;
        }
        let _ = decode_command(&bytes);
        let shorter = &bytes[..cut.index(bytes.len())];
        let _ = decode_command(shorter);
    }

    #[test]
    fn noise_is_an_error_or_a_command(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = decode_command(&bytes);
        let _ = decode_snapshot(&bytes[..]);
    }
}

#[test]
fn every_cut_of_a_command_is_an_error() {
    let command = Command::RegisterSource {
        spec: spec(1),
        resume: Some(Incarnation(4)),
    };
    let bytes = encode_command(&command);
    for end in 0..bytes.len() {
        assert!(decode_command(&bytes[..end]).is_err(), "{end}");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert!(matches!(decode_command(&longer), Err(DecodeError::Trailing(1))));
}

#[test]
fn announced_lengths_are_not_believed() {
    // A store that announces more keys than any command may have, and one with fewer than it announces.
    let head = [1u8, 2, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for length in [&[0xff, 0xff, 0xff, 0xff, 0x0f][..], &[0xff, 0xff, 0x3f]] {
        let mut bytes = head.to_vec();
        bytes.extend_from_slice(length);
        assert!(matches!(
            decode_command(&bytes),
            Err(DecodeError::TooLong { .. } | DecodeError::Truncated(_))
        ));
    }
    assert!(matches!(
        decode_command(&[9, 0]),
        Err(DecodeError::Version { found: 9, .. })
    ));
    assert!(matches!(
        decode_command(&[1, 99]),
        Err(DecodeError::Tag { tag: 99, .. })
    ));
}

/// Random commands that mostly fit the state.
fn history(seed: u64, len: usize) -> Vec<Command> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut shadow = IndexState::new();
    let mut commands = vec![Command::InitCluster {
        cluster: "c".into(),
        seed: ClusterSeed(seed),
    }];
    let mut sources: Vec<(Registered, u64, u32)> = Vec::new();
    shadow.apply(LogIndex(1), &commands[0]);
    while commands.len() < len {
        let command = match rng.random_range(0..30) {
            0 => Command::RegisterSource {
                spec: spec(rng.random_range(0..6)),
                resume: None,
            },
            1 if !sources.is_empty() => {
                let of = &sources[rng.random_range(0..sources.len())].0;
                Command::LapseLease {
                    source: of.source,
                    incarnation: of.incarnation,
                }
            }
            2 if !sources.is_empty() && rng.random_bool(0.3) => {
                let of = &sources[rng.random_range(0..sources.len())].0;
                Command::RemoveSource {
                    source: of.source,
                    incarnation: of.incarnation,
                }
            }
            _ if !sources.is_empty() => {
                let at = rng.random_range(0..sources.len());
                let (of, seq, _) = &mut sources[at];
                *seq += 1;
                let ops = (0..rng.random_range(0..4)).map(|_| random_op(&mut rng, of)).collect();
                let (source, incarnation, seq) = (of.source, of.incarnation, Seq(*seq));
                Command::Batches(vec![Batch {
                    source,
                    incarnation,
                    seq,
                    ops,
                }])
            }
            _ => continue,
        };
        let reply = shadow.apply(LogIndex(commands.len() as u64 + 1), &command);
        if let (Command::RegisterSource { spec, .. }, cairn_index::Reply::Register(outcome)) = (&command, reply) {
            let of = registered(outcome);
            sources.retain(|(other, _, _)| other.source != of.source);
            sources.push((of, 0, spec.worker.rank));
        }
        commands.push(command);
    }
    commands
}

fn random_op(rng: &mut SmallRng, of: &Registered) -> Op {
    let holder = of.holders[rng.random_range(0..of.holders.len())];
    let line = rng.random_range(0..6u64) * 1000;
    let key = |depth: u64| {
        if depth <= 20 {
            keys(depth..depth + 1)[0]
        } else {
            keys(line + depth..line + depth + 1)[0]
        }
    };
    match rng.random_range(0..10) {
        0..=3 => {
            let skip = if rng.random_bool(0.2) {
                rng.random_range(0..30)
            } else {
                0
            };
            let keys = (1..rng.random_range(2..70)).map(key).collect();
            Op::Store {
                holder,
                anchor: ROOT,
                anchor_depth: Depth(0),
                skip,
                keys,
            }
        }
        4 => {
            let depth = rng.random_range(1..60);
            let keys = (depth + 1..depth + 20).map(key).collect();
            Op::Store {
                holder,
                anchor: key(depth),
                anchor_depth: Depth(depth as u32),
                skip: 0,
                keys,
            }
        }
        5..=8 => {
            let depth = rng.random_range(1..70u64);
            Op::Remove {
                holder,
                key: key(depth),
                depth: Depth(depth as u32),
                count: rng.random_range(1..30),
            }
        }
        _ if rng.random_bool(0.2) => Op::Clear { holder },
        _ => Op::Confidence(Confidence::Exact),
    }
}

fn replay(mut state: IndexState, commands: &[Command], from: usize) -> IndexState {
    for (i, command) in commands.iter().enumerate().skip(from) {
        state.apply(LogIndex(i as u64 + 1), command);
    }
    state
}

fn snapshot(state: &IndexState) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_snapshot(state, &mut bytes).unwrap();
    bytes
}

#[test]
fn inv_01_equal_logs_give_equal_digests_and_replies() {
    for seed in 0..8 {
        let commands = history(seed, 400);
        let (mut a, mut b) = (IndexState::new(), IndexState::new());
        for (i, command) in commands.iter().enumerate() {
            let at = LogIndex(i as u64 + 1);
            let decoded = decode_command(&encode_command(command)).unwrap();
            assert_eq!(a.apply(at, command), b.apply(at, &decoded));
            assert_eq!(a.digest(), b.digest());
        }
    }
}

#[test]
fn inv_03_a_snapshot_and_the_rest_equal_the_whole_log() {
    for seed in 0..12 {
        let commands = history(seed, 300);
        let whole = replay(IndexState::new(), &commands, 0);
        for cut in [0, 1, 20, 77, 150, 299, 300] {
            let part = replay(IndexState::new(), &commands[..cut], 0);
            let bytes = snapshot(&part);
            let restored = decode_snapshot(&bytes[..]).unwrap();
            assert_eq!((restored.applied(), restored.digest()), (part.applied(), part.digest()));
            assert_eq!(restored.registry(), part.registry());
            assert_eq!(restored.residency().weight(), part.residency().weight());
            let mut both = (part, restored);
            for (i, command) in commands.iter().enumerate().skip(cut) {
                let at = LogIndex(i as u64 + 1);
                assert_eq!(
                    both.0.apply(at, command),
                    both.1.apply(at, command),
                    "seed {seed}, cut {cut}, entry {i}"
                );
            }
            assert_eq!(both.1.digest(), whole.digest());
            assert_eq!(both.1.residency().known_blocks(), whole.residency().known_blocks());
            assert_eq!(both.1.residency().weight(), whole.residency().weight());
        }
    }
}

#[test]
fn every_cut_and_flip_of_a_snapshot_is_an_error() {
    let state = replay(IndexState::new(), &history(3, 120), 0);
    let bytes = snapshot(&state);
    for end in (0..bytes.len()).step_by(7) {
        assert!(decode_snapshot(&bytes[..end]).is_err(), "cut at {end}");
    }
    let mut rng = SmallRng::seed_from_u64(5);
    for _ in 0..4_000 {
        let mut damaged = bytes.clone();
        let at = rng.random_range(0..damaged.len());
        damaged[at] ^= 1 << rng.random_range(0..8);
        assert!(decode_snapshot(&damaged[..]).is_err(), "flip at {at}");
    }
}

#[test]
fn a_snapshot_says_whose_bytes_it_is() {
    assert!(matches!(
        decode_snapshot(&b"something else"[..]),
        Err(DecodeError::NoSnapshot)
    ));
    let mut bytes = snapshot(&IndexState::new());
    bytes[8] = 99;
    assert!(matches!(
        decode_snapshot(&bytes[..]),
        Err(DecodeError::Version { found: 99, .. })
    ));
}
