//! Batches on their way to the index, and what an agent's restart keeps.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "kit/rig.rs"]
mod rig;

use cairn_index::{Batch, BatchOutcome, Command, Confidence, Incarnation, LogIndex, Op, Reply, Seq};
use cairn_ingest::{AuditOutcome, CheckpointError, Effect, EngineEvent, Source};
use rig::{Options, Rig, batch, offload, remove, store, tokens};

/// A store of `n` blocks as one chain of its own.
fn chain(i: u64, n: u32) -> EngineEvent {
    let list: Vec<u64> = (0..u64::from(n)).map(|j| i << 32 | j).collect();
    store(&list, None, &tokens(i as u32 * 100_000, n * 16), 16)
}

fn drop_chain(i: u64, n: u32) -> EngineEvent {
    let list: Vec<u64> = (0..u64::from(n)).rev().map(|j| i << 32 | j).collect();
    remove(&list)
}

fn take(rig: &mut Rig) -> Vec<Batch> {
    let now = rig.now;
    std::iter::from_fn(|| rig.members[0].source.next_batch(now).cloned()).collect()
}

fn ack(rig: &mut Rig, batch: &Batch, outcome: &BatchOutcome) {
    let now = rig.now;
    rig.members[0].source.acked(now, batch.incarnation, batch.seq, outcome);
}

fn applied() -> BatchOutcome {
    BatchOutcome::Applied {
        unknown_anchors: Vec::new(),
    }
}

fn feed(rig: &mut Rig, seq: u64, events: Vec<EngineEvent>) {
    let now = rig.now;
    rig.members[0].source.live(now, batch(seq, events));
}

#[test]
fn neighbouring_blocks_leave_in_one_op() {
    let mut rig = Rig::with_defaults();
    feed(&mut rig, 0, vec![chain(1, 100)]);
    feed(
        &mut rig,
        1,
        vec![store(&[9_000], Some(1 << 32 | 99), &tokens(7, 16), 16)],
    );
    let batches = take(&mut rig);
    let [one] = batches.as_slice() else {
        panic!("{} batches", batches.len())
    };
    let [Op::Store { skip: 0, keys, .. }] = one.ops.as_slice() else {
        panic!("{:?}", one.ops.len())
    };
    assert_eq!(keys.len(), 101);
    ack(&mut rig, one, &applied());
    feed(&mut rig, 2, vec![remove(&[9_000]), drop_chain(1, 100)]);
    let batches = take(&mut rig);
    assert!(
        matches!(batches[0].ops.as_slice(), [Op::Remove { count: 101, .. }]),
        "{:?}",
        batches[0].ops.len()
    );
}

#[test]
fn what_cancels_out_does_not_leave() {
    let mut rig = Rig::with_defaults();
    feed(&mut rig, 0, vec![chain(1, 50), drop_chain(1, 50)]);
    assert_eq!(take(&mut rig), []);
    assert_eq!(rig.members[0].source.stats().blocks, 0);
}

#[test]
fn of_a_chain_that_lost_its_tail_before_it_left_only_the_rest_leaves() {
    let mut rig = Rig::with_defaults();
    feed(&mut rig, 0, vec![chain(1, 50)]);
    let tail: Vec<u64> = (30..50).rev().map(|j| 1 << 32 | j).collect();
    feed(&mut rig, 1, vec![remove(&tail)]);
    let batches = take(&mut rig);
    let [Op::Store { keys, .. }] = batches[0].ops.as_slice() else {
        panic!("{:?}", batches[0].ops)
    };
    assert_eq!(keys.len(), 30);
    // A tail that didn't leave and one that did go in one removal of what left.
    ack(&mut rig, &batches[0], &applied());
    let below = store(&[77, 78], Some(1 << 32 | 29), &tokens(5, 32), 16);
    let gone = remove(&[78, 77, 1 << 32 | 29, 1 << 32 | 28, 1 << 32 | 27]);
    feed(&mut rig, 2, vec![below, gone]);
    let batches = take(&mut rig);
    let [Op::Remove { depth, count: 3, .. }] = batches[0].ops.as_slice() else {
        panic!("{:?}", batches[0].ops)
    };
    assert_eq!(depth.0, 30);
}

#[test]
fn a_chain_that_goes_from_its_head_leaves_in_one_op() {
    let mut rig = Rig::with_defaults();
    rig.live(0, batch(0, vec![chain(1, 100)]));
    let list: Vec<u64> = (0..100).map(|j| 1 << 32 | j).collect();
    let now = rig.now;
    rig.members[0].source.live(now, batch(1, vec![remove(&list)]));
    let batches = take(&mut rig);
    assert!(
        matches!(batches[0].ops.as_slice(), [Op::Remove { count: 100, .. }]),
        "{:?}",
        batches[0].ops.len()
    );
}

#[test]
fn a_block_below_one_that_just_went_waits_for_it() {
    let mut rig = Rig::new(&Options {
        tiers: vec![cairn_index::Tier::Gpu],
        ..Options::default()
    });
    rig.fresh(0);
    let prompt = tokens(0, 48);
    rig.live(0, batch(0, vec![store(&[1, 2], None, &prompt[..32], 16)]));
    let below = store(&[3], Some(2), &prompt[32..], 16);
    rig.live(0, batch(1, vec![remove(&[2]), below]));
    assert_eq!(rig.hit(&prompt), (16, 0));
    assert_eq!(rig.members[0].source.stats().quarantined, 1);
    rig.live(0, batch(2, vec![store(&[2], Some(1), &prompt[16..32], 16)]));
    assert_eq!(rig.hit(&prompt), (48, 0));
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
}

#[test]
fn a_clear_takes_what_the_index_has_although_its_removal_never_left() {
    let mut rig = Rig::with_defaults();
    rig.live(0, batch(0, vec![chain(1, 20)]));
    feed(&mut rig, 1, vec![drop_chain(1, 20), EngineEvent::Cleared, chain(2, 5)]);
    rig.settle();
    assert_eq!(rig.hit(&tokens(100_000, 320)), (0, 0));
    assert_eq!(rig.hit(&tokens(200_000, 80)), (80, 0));
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
}

#[test]
fn a_chain_longer_than_a_batch_leaves_in_order_and_whole() {
    let mut rig = Rig::with_defaults();
    feed(&mut rig, 0, vec![chain(1, 10_000)]);
    let batches = take(&mut rig);
    let mut depth = 0;
    for op in batches.iter().flat_map(|b| &b.ops) {
        if let Op::Store { anchor_depth, keys, .. } = op {
            assert_eq!(anchor_depth.0, depth);
            assert!(keys.len() <= 4_096);
            depth += keys.len() as u32;
        }
    }
    assert_eq!(depth, 10_000);
    batches.iter().for_each(|b| ack(&mut rig, b, &applied()));
    // The rest of a chain whose start was told is found again where the index lost it.
    feed(
        &mut rig,
        1,
        vec![store(&[9], Some(1 << 32 | 9_999), &tokens(7, 16), 16)],
    );
    let last = take(&mut rig);
    let lost = BatchOutcome::Applied {
        unknown_anchors: vec![0],
    };
    ack(&mut rig, &last[0], &lost);
    let again: usize = take(&mut rig)
        .iter()
        .flat_map(|b| &b.ops)
        .map(|op| if let Op::Store { keys, .. } = op { keys.len() } else { 0 })
        .sum();
    assert_eq!(again, 10_001);
}

#[test]
fn unanswered_batches_are_bounded_and_changes_coalesce_meanwhile() {
    let mut rig = Rig::with_defaults();
    for i in 0..200 {
        feed(&mut rig, i, vec![chain(i, 1_000)]);
        if i >= 100 {
            feed_later(&mut rig, i);
        }
    }
    let batches = take(&mut rig);
    assert_eq!(batches.len(), 16);
    assert!(
        batches
            .iter()
            .enumerate()
            .all(|(i, b)| b.seq == Seq(batches[0].seq.0 + i as u64))
    );
    for batch in &batches {
        let keys: usize = batch
            .ops
            .iter()
            .map(|op| if let Op::Store { keys, .. } = op { keys.len() } else { 1 })
            .sum();
        assert!(keys <= 4_096, "{keys}");
        ack(&mut rig, batch, &applied());
    }
    assert!(rig.members[0].source.stats().window_full > 0);
    assert!(!take(&mut rig).is_empty());
}

fn feed_later(rig: &mut Rig, _i: u64) {
    assert!(rig.members[0].source.stats().unacked <= 16);
}

#[test]
fn an_index_that_is_away_for_long_costs_no_more_than_what_is_held() {
    let mut rig = Rig::with_defaults();
    for i in 0..2_000u64 {
        let mut events = vec![chain(i, 100)];
        if i >= 10 {
            events.push(drop_chain(i - 10, 100));
        }
        feed(&mut rig, i, events);
    }
    let stats = rig.members[0].source.stats();
    assert_eq!(stats.blocks, 1_000);
    assert!(stats.outbox < 14_000, "{}", stats.outbox);
    assert!(stats.mirror_bytes < 2 << 20, "{}", stats.mirror_bytes);
    rig.settle();
    assert_eq!(rig.hit(&tokens(1_999 * 100_000, 1_600)), (1_600, 0));
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
}

#[test]
fn a_refused_order_is_sent_again_from_the_expected_seq() {
    let mut rig = Rig::with_defaults();
    for i in 0..3 {
        feed(&mut rig, i, vec![chain(i, 4_000)]);
    }
    let batches = take(&mut rig);
    assert!(batches.len() >= 3);
    let third = batches[2].seq;
    ack(
        &mut rig,
        &batches[1],
        &BatchOutcome::OutOfOrder {
            expected: batches[1].seq,
        },
    );
    let again = take(&mut rig);
    assert_eq!(again[0].seq, batches[1].seq, "the first was applied");
    assert_eq!(again[1].seq, third);
    assert_eq!(again[0], batches[1], "the same bytes");
}

#[test]
fn an_order_that_cannot_be_met_begins_a_new_lifetime() {
    let mut rig = Rig::with_defaults();
    feed(&mut rig, 0, vec![chain(0, 4)]);
    let batches = take(&mut rig);
    ack(&mut rig, &batches[0], &BatchOutcome::OutOfOrder { expected: Seq(900) });
    assert_eq!(rig.members[0].source.poll_effect(), Some(Effect::Reregister));
    rig.register(0);
    rig.settle();
    assert_eq!(rig.hit(&tokens(0, 64)), (64, 0), "told again from the mirror");
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
}

#[test]
fn a_fenced_source_stops() {
    let mut rig = Rig::with_defaults();
    feed(&mut rig, 0, vec![chain(0, 4)]);
    let batches = take(&mut rig);
    ack(
        &mut rig,
        &batches[0],
        &BatchOutcome::Fenced {
            current: Incarnation(99),
        },
    );
    assert_eq!(
        rig.members[0].source.poll_effect(),
        Some(Effect::Stop {
            current: Incarnation(99)
        })
    );
    feed(&mut rig, 1, vec![chain(1, 4)]);
    assert_eq!(take(&mut rig), []);
}

#[test]
fn a_lost_connection_sends_what_has_no_answer_again() {
    let mut rig = Rig::with_defaults();
    for i in 0..2 {
        feed(&mut rig, i, vec![chain(i, 4_000)]);
    }
    let batches = take(&mut rig);
    ack(&mut rig, &batches[0], &applied());
    rig.members[0].source.push_stream_lost();
    let again = take(&mut rig);
    assert_eq!(again, batches[1..]);
}

#[test]
fn an_anchor_that_the_index_does_not_know_is_told_again_from_the_root() {
    let mut rig = Rig::with_defaults();
    feed(&mut rig, 0, vec![chain(1, 8)]);
    let first = take(&mut rig);
    ack(&mut rig, &first[0], &applied());
    let below = store(&[77, 78], Some(1 << 32 | 7), &tokens(5, 32), 16);
    feed(&mut rig, 1, vec![below]);
    let second = take(&mut rig);
    ack(
        &mut rig,
        &second[0],
        &BatchOutcome::Applied {
            unknown_anchors: vec![0],
        },
    );
    let again = take(&mut rig);
    let Some(Op::Store {
        anchor_depth,
        keys,
        skip: 0,
        ..
    }) = again[0].ops.first()
    else {
        panic!("no store")
    };
    assert_eq!((anchor_depth.0, keys.len()), (0, 10));
    assert_eq!(rig.members[0].source.stats().unknown_anchors, 1);
}

#[test]
fn a_block_below_a_hole_names_its_way_from_what_the_index_knows() {
    let mut rig = Rig::with_defaults();
    let all = tokens(0, 96);
    rig.live(0, batch(0, vec![store(&[1, 2, 3, 4, 5], None, &all[..80], 16)]));
    rig.live(0, batch(1, vec![remove(&[2])]));
    rig.live(0, batch(2, vec![remove(&[1, 3, 4])]));
    // Four is not held any more, but the engine computes below it.
    rig.live(0, batch(3, vec![store(&[6], Some(5), &all[80..], 16)]));
    assert_eq!(rig.hit(&all), (0, 0));
    rig.live(0, batch(4, vec![store(&[1, 2, 3, 4], None, &all[..64], 16)]));
    assert_eq!(rig.hit(&all), (96, 0));
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
}

#[test]
fn drift_found_by_an_audit_repairs_itself_from_the_mirror() {
    let mut rig = Rig::with_defaults();
    rig.live(0, batch(0, vec![chain(1, 40), offload(&[1 << 32])]));
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
    // Somebody else's mistake: the index loses the source's blocks.
    let registration = rig.members[0].source.registration().unwrap().clone();
    let seq = rig.seq(0);
    let stray = Batch {
        source: registration.source,
        incarnation: registration.incarnation,
        seq: Seq(seq.0 + 1),
        ops: vec![Op::Clear {
            holder: registration.holders[0],
        }],
    };
    let mut index = rig.index;
    let at = LogIndex(index.applied().0 + 1);
    assert!(matches!(
        index.apply(at, &Command::Batches(vec![stray])),
        Reply::Batches(_)
    ));
    let audit = index.audit(registration.source).unwrap();
    rig.index = index;
    let holders: Vec<_> = audit
        .holders
        .iter()
        .map(|(h, d)| cairn_ingest::HolderAudit {
            holder: *h,
            blocks: d.blocks,
            digest: d.digest,
        })
        .collect();
    let now = rig.now;
    assert_eq!(rig.members[0].source.audit(now, seq, &holders), AuditOutcome::Drift);
    assert_eq!(rig.members[0].source.stats().full_repairs, 1);
    let batches = take(&mut rig);
    assert!(matches!(batches[0].ops[0], Op::Clear { .. }));
    assert_eq!(rig.members[0].source.audit(now, seq, &holders), AuditOutcome::InFlight);
}

#[test]
fn a_source_says_exact_only_after_everything_was_told() {
    let mut rig = Rig::new(&Options::default());
    feed(&mut rig, 0, vec![chain(0, 6_000)]);
    let now = rig.now;
    rig.members[0].source.replayed(now, batch(0, vec![chain(0, 6_000)]));
    rig.members[0]
        .source
        .replay_ended(now, cairn_ingest::ReplayEnd::Complete);
    let batches = take(&mut rig);
    assert!(batches.len() >= 2);
    let exact = |b: &Batch| b.ops.contains(&Op::Confidence(Confidence::Exact));
    assert!(batches[..batches.len() - 1].iter().all(|b| !exact(b)));
    assert!(exact(batches.last().unwrap()));
}

#[test]
fn an_agent_restart_is_not_an_engine_restart() {
    for (block_size, engine) in [(16, 16), (16, 64), (16, 1), (32, 16), (16, 24)] {
        let options = Options {
            block_size,
            ..Options::default()
        };
        let mut rig = Rig::new(&options);
        rig.fresh(0);
        let prompt = tokens(0, 384);
        let list: Vec<u64> = (1..=u64::from(384 / engine)).collect();
        rig.live(
            0,
            batch(
                0,
                vec![
                    store(&list[..list.len() / 2], None, &prompt[..192], engine),
                    offload(&[1]),
                ],
            ),
        );
        let bytes = rig.members[0].source.checkpoint();
        let before = rig.members[0].source.resume();
        rig.members[0].source = Source::restore(rig::config(&options), rig.now, &bytes).unwrap();
        let ops = rig.ops;
        rig.register(0);
        let now = rig.now;
        rig.members[0].source.connected(now);
        rig.settle();
        assert_eq!(
            rig.members[0].replays.pop(),
            Some(0),
            "from the last applied, inclusive"
        );
        rig.replayed(0, batch(0, Vec::new()));
        rig.members[0]
            .source
            .replay_ended(now, cairn_ingest::ReplayEnd::Complete);
        rig.settle();
        assert_eq!(rig.members[0].source.resume(), before);
        assert!(rig.ops - ops <= 2, "only its confidence is told");
        // Children still find their parent, its tokens and its keys.
        let half = list.len() / 2;
        let more = store(&list[half..], Some(list[half - 1]), &prompt[192..], engine);
        rig.live(0, batch(1, vec![more]));
        assert_eq!(
            rig.hit(&prompt).0,
            384 / block_size * block_size,
            "{engine} into {block_size}"
        );
        assert_eq!(rig.audit(0), AuditOutcome::Equal);
        rig.live(0, batch(2, vec![remove(&[2])]));
        assert_eq!(rig.hit(&prompt).0, engine / block_size * block_size);
        assert_eq!(rig.audit(0), AuditOutcome::Equal);
    }
}

#[test]
fn a_checkpoint_that_is_older_than_the_index_ends_in_a_full_repair() {
    let options = Options::default();
    let mut rig = Rig::with_defaults();
    rig.live(0, batch(0, vec![chain(1, 10)]));
    let bytes = rig.members[0].source.checkpoint();
    rig.live(0, batch(1, vec![chain(2, 10), drop_chain(1, 10)]));
    rig.members[0].source = Source::restore(rig::config(&options), rig.now, &bytes).unwrap();
    rig.register(0);
    let now = rig.now;
    rig.members[0].source.connected(now);
    rig.settle();
    rig.replayed(0, batch(0, Vec::new()));
    rig.replayed(0, batch(1, vec![chain(2, 10), drop_chain(1, 10)]));
    rig.members[0]
        .source
        .replay_ended(now, cairn_ingest::ReplayEnd::Complete);
    rig.settle();
    assert_eq!(rig.hit(&tokens(200_000, 160)), (160, 0));
    assert_eq!(rig.hit(&tokens(100_000, 160)), (0, 0));
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
    assert_eq!(rig.members[0].source.stats().full_repairs, 1);
}

#[test]
fn a_checkpoint_of_what_no_batch_has_yet_ends_in_a_full_repair() {
    let options = Options::default();
    let mut rig = Rig::with_defaults();
    rig.live(0, batch(0, vec![chain(1, 10)]));
    feed(&mut rig, 1, vec![chain(2, 10), drop_chain(1, 10)]);
    let bytes = rig.members[0].source.checkpoint();
    rig.members[0].source = Source::restore(rig::config(&options), rig.now, &bytes).unwrap();
    let waits = |rig: &Rig| rig.members[0].source.stats().outbox;
    assert_eq!(waits(&rig), 10, "nobody may take it for told");
    rig.register(0);
    rig.settle();
    assert_eq!(waits(&rig), 0);
    assert_eq!(rig.hit(&tokens(200_000, 160)), (160, 0));
    assert_eq!(rig.hit(&tokens(100_000, 160)), (0, 0));
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
    assert_eq!(rig.members[0].source.stats().full_repairs, 1);
}

#[test]
fn a_damaged_checkpoint_is_refused_with_its_reason() {
    let options = Options::default();
    let mut rig = Rig::with_defaults();
    rig.live(
        0,
        batch(0, vec![store(&[1, 2, 3], None, &tokens(0, 12), 4), chain(2, 10)]),
    );
    let good = rig.members[0].source.checkpoint();
    let config = rig::config(&options);
    let restore = |bytes: &[u8]| Source::restore(config.clone(), rig.now, bytes).map(|_| ());
    assert_eq!(restore(&good), Ok(()));
    assert_eq!(restore(b"hello"), Err(CheckpointError::NotOne));
    assert_eq!(restore(&[]), Err(CheckpointError::NotOne));
    for cut in 0..good.len() {
        assert!(restore(&good[..cut]).is_err(), "cut at {cut}");
    }
    for at in 0..good.len() {
        let mut flipped = good.clone();
        flipped[at] ^= 0x10;
        assert!(restore(&flipped).is_err(), "flipped at {at}");
    }
    let mut other = config.clone();
    other.pool = "another".into();
    let error = Source::restore(other, rig.now, &good).map(|_| ()).unwrap_err();
    assert!(matches!(error, CheckpointError::Other("pool")), "{error}");
}

#[test]
fn a_checkpoint_holds_no_salt_and_no_tokens_of_full_blocks() {
    let mut rig = Rig::with_defaults();
    let mut salted = rig::stored(&[1, 2], None, &tokens(0x0a0b_0c00, 32), 16);
    salted.cache_salt = Some("canary-salt".into());
    salted.adapter = Some("canary-adapter".into());
    rig.live(0, batch(0, vec![EngineEvent::Stored(salted)]));
    let bytes = rig.members[0].source.checkpoint();
    let has = |needle: &[u8]| bytes.windows(needle.len()).any(|w| w == needle);
    assert!(!has(b"canary"));
    assert!(!has(&0x0a0b_0c01u32.to_le_bytes()));
    assert!(!format!("{:?}", rig.members[0].source).contains("canary"));
}
