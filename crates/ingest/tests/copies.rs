//! How many copies there are, in which tier, and what is bounded: counted exactly over whatever engines say.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "kit/rig.rs"]
mod rig;

use cairn_index::{Confidence, DegradedReason, Tier};
use cairn_ingest::{AuditOutcome, EngineEvent, Medium, RefusalReason, Removed, Stored};
use rig::{Options, Rig, batch, hashes, offload, remove, remove_from, store, stored, tokens};

#[test]
fn copies_are_counted_and_only_the_last_removal_takes_the_block() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 32);
    rig.live(
        0,
        batch(
            0,
            vec![
                store(&[1, 2], None, &prompt, 16),
                store(&[2], Some(1), &prompt[16..], 16),
            ],
        ),
    );
    rig.live(0, batch(1, vec![remove(&[2])]));
    assert_eq!(rig.hit(&prompt), (32, 0));
    rig.live(0, batch(2, vec![remove(&[2])]));
    assert_eq!(rig.hit(&prompt), (16, 0));
}

#[test]
fn hundreds_of_copies_are_counted_exactly() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 16);
    for i in 0..600 {
        rig.live(0, batch(i, vec![store(&[1], None, &prompt, 16)]));
    }
    for i in 600..1_199 {
        rig.live(0, batch(i, vec![remove(&[1])]));
    }
    assert_eq!(rig.hit(&prompt), (16, 0));
    rig.live(0, batch(1_199, vec![remove(&[1])]));
    assert_eq!(rig.hit(&prompt), (0, 0));
}

#[test]
fn the_engines_own_copy_count_wins() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 32);
    let again = Stored {
        remaining_copies: Some(vec![1, 1]),
        ..stored(&[1, 2], None, &prompt, 16)
    };
    rig.live(
        0,
        batch(0, vec![store(&[1, 2], None, &prompt, 16), EngineEvent::Stored(again)]),
    );
    rig.live(0, batch(1, vec![remove(&[2])]));
    assert_eq!(rig.hit(&prompt), (16, 0));
    let kept = Removed {
        hashes: hashes(&[1]),
        remaining_copies: Some(vec![2]),
        ..Removed::default()
    };
    rig.live(0, batch(2, vec![EngineEvent::Removed(kept)]));
    assert_eq!(rig.hit(&prompt), (16, 0));
}

#[test]
fn a_cpu_copy_outlives_the_gpus_and_the_reverse() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 64);
    rig.live(
        0,
        batch(0, vec![store(&[1, 2, 3, 4], None, &prompt, 16), offload(&[3, 1, 4, 2])]),
    );
    rig.live(0, batch(1, vec![remove(&[4, 3])]));
    assert_eq!(rig.hit(&prompt), (32, 32));
    rig.live(0, batch(2, vec![remove_from(&[4], Medium::Cpu)]));
    assert_eq!(rig.hit(&prompt), (32, 16));
    rig.live(0, batch(3, vec![remove(&[2, 1]), remove_from(&[1], Medium::Cpu)]));
    assert_eq!(rig.hit(&prompt), (0, 0));
    rig.live(0, batch(4, vec![store(&[1], None, &prompt[..16], 16)]));
    assert_eq!(rig.hit(&prompt), (16, 32), "what is below the hole stayed");
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
}

#[test]
fn a_cpu_copy_announced_before_or_after_its_gpu_block_resolves_by_hash() {
    let mut rig = Rig::with_defaults();
    let (a, b) = (tokens(0, 32), tokens(100, 32));
    rig.live(0, batch(0, vec![offload(&[2, 1])]));
    assert_eq!(rig.refused(RefusalReason::Unresolved), 2);
    rig.live(0, batch(1, vec![store(&[1, 2], None, &a, 16), remove(&[2, 1])]));
    assert_eq!(rig.hit(&a), (0, 32));
    // The GPU's block was stored and evicted before the copy was announced.
    rig.live(0, batch(2, vec![store(&[5, 6], None, &b, 16)]));
    rig.live(0, batch(3, vec![remove(&[6, 5])]));
    assert_eq!(rig.hit(&b), (0, 0));
    rig.live(0, batch(4, vec![offload(&[5, 6])]));
    assert_eq!(rig.hit(&b), (0, 32));
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
}

#[test]
fn events_of_a_tier_without_holder_are_counted_and_left_out() {
    let mut rig = Rig::new(&Options {
        tiers: vec![Tier::Gpu],
        ..Options::default()
    });
    rig.fresh(0);
    let prompt = tokens(0, 16);
    rig.live(
        0,
        batch(0, vec![store(&[1], None, &prompt, 16), offload(&[1]), remove(&[1])]),
    );
    assert_eq!(rig.hit(&prompt), (0, 0));
    assert_eq!(rig.refused(RefusalReason::NoHolder), 1);
}

#[test]
fn memory_follows_what_is_held_not_what_was_ever_stored() {
    let mut rig = Rig::new(&Options {
        tiers: vec![Tier::Gpu],
        ..Options::default()
    });
    rig.fresh(0);
    let shared = tokens(0, 512);
    let system: Vec<u64> = (1..=32).collect();
    rig.live(0, batch(0, vec![store(&system, None, &shared, 16)]));
    let mut peak = 0;
    let mut steady = 0;
    for i in 1..=400u64 {
        let list: Vec<u64> = (0..500).map(|j| i << 20 | j).collect();
        let mut events = vec![store(&list, Some(32), &tokens(i as u32 * 10_000, 8_000), 16)];
        if i > 4 {
            let old: Vec<u64> = (0..500).rev().map(|j| (i - 4) << 20 | j).collect();
            events.push(remove(&old));
        }
        rig.live(0, batch(i, events));
        let bytes = rig.members[0].source.stats().mirror_bytes;
        if i == 20 {
            steady = bytes;
        }
        peak = peak.max(bytes);
    }
    assert!(peak <= steady * 3 / 2, "{peak} against {steady}");
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
}

#[test]
fn a_full_mirror_leaves_blocks_out_and_says_so() {
    let mut rig = Rig::with_defaults();
    rig.members[0].source.set_max_blocks(10);
    let prompt = tokens(0, 320);
    rig.live(
        0,
        batch(0, vec![store(&(1..=20).collect::<Vec<_>>(), None, &prompt, 16)]),
    );
    assert_eq!(rig.hit(&prompt).0, 144, "nine blocks and the root");
    assert_eq!(rig.claim(0), Confidence::Degraded(DegradedReason::Bounded));
    assert_eq!(rig.refused(RefusalReason::MirrorFull), 1);
    // Once everything of that time is gone, nothing is missing.
    rig.members[0].source.set_max_blocks(1_000);
    let list: Vec<u64> = (100..120).collect();
    rig.live(
        0,
        batch(
            1,
            vec![
                remove(&[9, 8, 7, 6, 5, 4, 3, 2, 1]),
                store(&list, None, &tokens(5_000, 320), 16),
            ],
        ),
    );
    assert_eq!(rig.claim(0), Confidence::Degraded(DegradedReason::Bounded));
    for i in 2..54 {
        rig.live(
            0,
            batch(i, vec![remove(&list), store(&list, None, &tokens(5_000, 320), 16)]),
        );
    }
    assert_eq!(rig.claim(0), Confidence::Exact);
}

#[test]
fn cleared_empties_every_tier_of_that_rank_and_no_other() {
    let mut rig = Rig::with_defaults();
    let other = rig.join(&Options::default());
    rig.fresh(other);
    let prompt = tokens(0, 64);
    for i in [0, other] {
        rig.live(
            i,
            batch(0, vec![store(&[1, 2, 3, 4], None, &prompt, 16), offload(&[4, 3, 2, 1])]),
        );
    }
    rig.live(0, batch(1, vec![remove(&[4, 3])]));
    assert_eq!(rig.hit_of(0, &prompt), (32, 32));
    rig.live(0, batch(2, vec![EngineEvent::Cleared]));
    assert_eq!(rig.hit_of(0, &prompt), (0, 0));
    assert_eq!(rig.hit_of(other, &prompt), (64, 0));
    assert_eq!(rig.members[0].source.stats().cleared_outer, 4);
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
}

#[test]
fn a_sleeping_engine_is_purged_although_its_clear_never_came() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 64);
    rig.live(
        0,
        batch(0, vec![store(&[1, 2, 3, 4], None, &prompt, 16), offload(&[1])]),
    );
    let now = rig.now;
    rig.members[0].source.asleep(now, true);
    rig.settle();
    assert_eq!(rig.hit(&prompt), (0, 0));
    rig.members[0].source.asleep(now, false);
    rig.live(0, batch(1, vec![store(&[1, 2], None, &prompt[..32], 16)]));
    assert_eq!(rig.hit(&prompt), (32, 0));
    assert_eq!(rig.members[0].source.stats().purges, 1);
}

#[test]
fn a_batch_sent_ten_times_changes_nothing_after_the_first() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 64);
    let one = batch(0, vec![store(&[1, 2, 3, 4], None, &prompt, 16)]);
    rig.live(0, one.clone());
    let (ops, bytes) = (rig.ops, rig.members[0].source.stats().mirror_bytes);
    for _ in 0..9 {
        rig.live(0, one.clone());
    }
    assert_eq!((rig.ops, rig.members[0].source.stats().mirror_bytes), (ops, bytes));
    rig.live(0, batch(1, vec![remove(&[4])]));
    assert_eq!(rig.hit(&prompt), (48, 0), "one copy was counted");
    assert_eq!(rig.refused(RefusalReason::Duplicate), 9);
}

#[test]
fn a_removal_takes_what_is_known_and_passes_over_what_is_not() {
    let mut rig = Rig::with_defaults();
    let (a, b) = (tokens(0, 16), tokens(100, 16));
    rig.live(0, batch(0, vec![store(&[1], None, &a, 16), store(&[3], None, &b, 16)]));
    rig.live(0, batch(1, vec![remove(&[1, 99, 3])]));
    assert_eq!((rig.hit(&a), rig.hit(&b)), ((0, 0), (0, 0)));
    assert_eq!(rig.refused(RefusalReason::UnknownHash), 1);
}

#[test]
fn the_quarantine_is_bounded_and_counts_what_it_gives_up() {
    let mut rig = Rig::with_defaults();
    for i in 0..20u64 {
        let list: Vec<u64> = (0..1_000).map(|j| 1_000_000 + i * 1_000 + j).collect();
        rig.live(0, batch(i, vec![store(&list, Some(7_000 + i), &tokens(0, 16_000), 16)]));
    }
    assert!(rig.members[0].source.stats().quarantined <= 16 << 10);
    assert!(rig.refused(RefusalReason::QuarantineFull) >= 3_000);
}
