//! Gaps, replays, duplicates, reordering and restarts of one engine's stream.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "kit/rig.rs"]
mod rig;

use cairn_blocks::{Chain, Namespace};
use cairn_index::{Confidence, DegradedReason};
use cairn_ingest::{AuditOutcome, EngineEvent, EventBatch, RefusalReason, ReplayEnd};
use rig::{Options, POOL, Rig, SEED, batch, batch_of_life, remove, store, tokens};

/// The `i`th of a stream in which each message stores one block below the one before.
fn link(i: u64) -> EventBatch {
    let parent = i.checked_sub(1).map(|p| p + 1);
    batch(i, vec![store(&[i + 1], parent, &tokens(i as u32 * 16, 16), 16)])
}

fn rig() -> Rig {
    let mut rig = Rig::new(&Options {
        capacity: 8,
        ..Options::default()
    });
    rig.fresh(0);
    rig
}

fn replays(rig: &mut Rig) -> Vec<u64> {
    std::mem::take(&mut rig.members[0].replays)
}

fn end(rig: &mut Rig, end: ReplayEnd) {
    let now = rig.now;
    rig.members[0].source.replay_ended(now, end);
    rig.settle();
}

fn reconnect(rig: &mut Rig) {
    let now = rig.now;
    rig.members[0].source.disconnected(now);
    rig.members[0].source.connected(now);
    rig.settle();
}

#[test]
fn a_gap_is_replayed_from_its_start_and_ends_equal_to_having_seen_everything() {
    let mut rig = rig();
    for i in [0, 1, 4] {
        rig.live(0, link(i));
    }
    assert_eq!(replays(&mut rig), [2]);
    assert_eq!(rig.claim(0), Confidence::Degraded(DegradedReason::Replaying));
    assert_eq!(
        rig.hit(&tokens(0, 80)),
        (32, 0),
        "what was known stays while the gap is repaired"
    );
    for i in [2, 3, 4] {
        rig.replayed(0, link(i));
    }
    end(&mut rig, ReplayEnd::Complete);
    assert_eq!(rig.hit(&tokens(0, 80)), (80, 0));
    assert_eq!(rig.claim(0), Confidence::Exact);
    assert_eq!(rig.members[0].source.stats().gaps, 0);
}

#[test]
fn a_message_that_was_lent_stays_with_the_caller_unless_it_must_wait() {
    let (mut lending, mut giving) = (rig(), rig());
    let now = lending.now;
    let mut lend = |i: u64| {
        let mut lent = link(i);
        lending.members[0].source.live_from(now, &mut lent);
        lending.settle();
        giving.live(0, link(i));
        assert_eq!(lending.members[0].source.stats(), giving.members[0].source.stats());
        assert_eq!(lending.members[0].source.told(), giving.members[0].source.told());
        lent
    };
    assert_eq!([lend(0), lend(1)], [link(0), link(1)], "each was the next");
    assert_eq!(lend(3), EventBatch::default(), "it waits for the one before");
    for rig in [&mut lending, &mut giving] {
        rig.replayed(0, link(2));
        end(rig, ReplayEnd::Complete);
        assert_eq!(rig.hit(&tokens(0, 64)), (64, 0));
    }
}

#[test]
fn live_messages_during_a_replay_wait_and_follow_in_order() {
    let mut rig = rig();
    rig.live(0, link(0));
    rig.live(0, link(3));
    rig.live(0, link(4));
    rig.replayed(0, link(1));
    rig.live(0, link(5));
    assert_eq!(rig.hit(&tokens(0, 96)), (32, 0));
    rig.replayed(0, link(2));
    assert_eq!(rig.hit(&tokens(0, 96)), (96, 0));
    rig.replayed(0, link(3));
    end(&mut rig, ReplayEnd::Complete);
    rig.live(0, link(6));
    assert_eq!(rig.hit(&tokens(0, 112)), (112, 0));
    assert_eq!(rig.members[0].source.stats().messages, 7);
}

#[test]
fn a_late_message_after_a_recovery_is_ignored_and_starts_none() {
    let mut rig = Rig::new(&Options::default());
    let now = rig.now;
    rig.members[0].source.connected(now);
    rig.settle();
    assert_eq!(replays(&mut rig), [0]);
    // What the engine still has begins long after its first message.
    rig.replayed(0, batch(1_000, vec![store(&[1], None, &tokens(0, 16), 16)]));
    end(&mut rig, ReplayEnd::Complete);
    rig.live(0, batch(1_001, vec![store(&[2], Some(1), &tokens(16, 16), 16)]));
    rig.live(0, batch(998, vec![remove(&[1])]));
    assert_eq!(replays(&mut rig), [0u64; 0]);
    assert_eq!(rig.hit(&tokens(0, 32)), (32, 0));
    let stats = rig.members[0].source.stats();
    assert_eq!((stats.restarts, stats.refused.get(RefusalReason::Duplicate)), (0, 1));
}

#[test]
fn one_reordered_old_message_is_not_a_restart() {
    let mut rig = rig();
    for i in 0..4 {
        rig.live(0, link(i));
    }
    rig.live(0, link(1));
    assert_eq!(rig.members[0].source.stats().restarts, 0);
    assert_eq!(rig.hit(&tokens(0, 64)), (64, 0));
}

#[test]
fn a_small_gap_moves_only_what_is_missing() {
    let mut rig = rig();
    for i in 0..50 {
        rig.live(0, link(i));
    }
    rig.live(0, link(53));
    assert_eq!(replays(&mut rig), [50]);
    let before = rig.hit(&tokens(0, 54 * 16));
    for i in 50..53 {
        rig.replayed(0, link(i));
        assert!(rig.hit(&tokens(0, 54 * 16)) >= before);
    }
    end(&mut rig, ReplayEnd::Complete);
    assert_eq!(rig.hit(&tokens(0, 54 * 16)), (54 * 16, 0));
    assert_eq!(rig.members[0].source.stats().messages, 54);
}

#[test]
fn a_lost_tail_is_found_by_asking_an_idle_engine_about_once_a_second() {
    let mut rig = rig();
    rig.live(0, link(0));
    rig.tick(500);
    assert_eq!(replays(&mut rig), [0u64; 0]);
    rig.tick(600);
    assert_eq!(replays(&mut rig), [1]);
    rig.replayed(0, link(1));
    end(&mut rig, ReplayEnd::Complete);
    assert_eq!(rig.hit(&tokens(0, 32)), (32, 0));
    assert_eq!(rig.claim(0), Confidence::Exact);
    rig.tick(1_000);
    assert_eq!(replays(&mut rig), [2]);
}

#[test]
fn after_a_reconnect_equal_bytes_mean_the_same_life() {
    let mut rig = rig();
    for i in 0..3 {
        rig.live(0, link(i));
    }
    reconnect(&mut rig);
    assert_eq!(replays(&mut rig), [2], "from the last applied, inclusive");
    rig.replayed(0, link(2));
    rig.replayed(0, link(3));
    end(&mut rig, ReplayEnd::Complete);
    assert_eq!(rig.hit(&tokens(0, 64)), (64, 0));
    assert_eq!(rig.members[0].source.stats().restarts, 0);
}

#[test]
fn an_engine_restarted_empty_loses_its_credit_at_the_reconnect() {
    let mut rig = rig();
    for i in 0..3 {
        rig.live(0, link(i));
    }
    let old = rig.members[0].source.resume();
    reconnect(&mut rig);
    end(&mut rig, ReplayEnd::Complete);
    assert_eq!(rig.hit(&tokens(0, 48)), (0, 0));
    assert_ne!(rig.members[0].source.resume(), old);
    assert_eq!(rig.members[0].source.stats().restarts, 1);
}

#[test]
fn another_process_start_time_is_a_new_life() {
    let mut rig = rig();
    let now = rig.now;
    rig.members[0].source.process_started(now, 100);
    rig.live(0, link(0));
    rig.members[0].source.process_started(now, 100);
    assert_eq!(rig.members[0].source.stats().restarts, 0);
    rig.members[0].source.process_started(now, 101);
    rig.settle();
    assert_eq!(rig.hit(&tokens(0, 16)), (0, 0));
    assert_eq!(replays(&mut rig), [0]);
    rig.replayed(0, batch_of_life(1, 0, vec![store(&[9], None, &tokens(0, 16), 16)]));
    end(&mut rig, ReplayEnd::Complete);
    assert_eq!(rig.hit(&tokens(0, 16)), (16, 0));
    assert_eq!(rig.members[0].source.stats().restarts, 1);
}

#[test]
fn the_first_message_of_a_new_life_ends_the_old_one() {
    let mut rig = rig();
    for i in 0..3 {
        rig.live(0, link(i));
    }
    rig.live(0, batch_of_life(1, 0, vec![store(&[77], None, &tokens(9_000, 16), 16)]));
    assert_eq!(rig.hit(&tokens(0, 48)), (0, 0));
    assert_eq!(replays(&mut rig), [0]);
    rig.replayed(0, batch_of_life(1, 0, vec![store(&[77], None, &tokens(9_000, 16), 16)]));
    end(&mut rig, ReplayEnd::Complete);
    assert_eq!(rig.hit(&tokens(9_000, 16)), (16, 0));
}

#[test]
fn copies_of_an_old_life_do_not_outlive_it() {
    let mut rig = rig();
    rig.live(0, link(0));
    rig.live(0, batch(1, vec![store(&[1], None, &tokens(0, 16), 16)]));
    let again = |seq, event: EngineEvent| batch_of_life(1, seq, vec![event]);
    rig.live(0, again(0, store(&[1], None, &tokens(0, 16), 16)));
    rig.replayed(0, again(0, store(&[1], None, &tokens(0, 16), 16)));
    end(&mut rig, ReplayEnd::Complete);
    assert_eq!(rig.hit(&tokens(0, 16)), (16, 0));
    rig.live(0, again(1, remove(&[1])));
    assert_eq!(rig.hit(&tokens(0, 16)), (0, 0));
}

#[test]
fn a_new_life_that_is_longer_than_the_old_one_is_told_by_its_content() {
    let mut rig = rig();
    for i in 0..3 {
        rig.live(0, link(i));
    }
    let new = |i: u64| {
        batch_of_life(
            1,
            i,
            vec![store(&[100 + i], None, &tokens(5_000 + i as u32 * 100, 16), 16)],
        )
    };
    reconnect(&mut rig);
    replays(&mut rig);
    rig.live(0, new(6));
    for i in 2..6 {
        rig.replayed(0, new(i));
    }
    assert_eq!(
        rig.hit(&tokens(0, 48)),
        (0, 0),
        "the old life's blocks are gone before the new one's come"
    );
    assert_eq!(replays(&mut rig), [0]);
    end(&mut rig, ReplayEnd::Complete);
    for i in 0..7 {
        rig.replayed(0, new(i));
    }
    end(&mut rig, ReplayEnd::Complete);
    for i in 0..7u32 {
        assert_eq!(rig.hit(&tokens(5_000 + i * 100, 16)), (16, 0), "{i}");
    }
    assert_eq!(rig.claim(0), Confidence::Exact);
    assert_eq!(rig.members[0].source.stats().restarts, 1);
}

#[test]
fn without_a_replay_socket_a_restart_shows_at_the_first_message() {
    let mut rig = Rig::new(&Options {
        replay: false,
        capacity: 8,
        ..Options::default()
    });
    let now = rig.now;
    rig.members[0].source.connected(now);
    for i in 0..3 {
        rig.live(0, link(i));
    }
    assert_eq!(rig.claim(0), Confidence::Exact);
    rig.live(0, batch_of_life(1, 0, vec![store(&[50], None, &tokens(800, 16), 16)]));
    assert_eq!((rig.hit(&tokens(0, 48)), rig.hit(&tokens(800, 16))), ((0, 0), (16, 0)));
    assert_eq!(rig.claim(0), Confidence::Exact);
}

/// Loses message 2 for good, with the old chain of two blocks held.
fn with_lost_batch() -> Rig {
    let mut rig = rig();
    rig.live(0, link(0));
    rig.live(0, link(1));
    rig.live(0, batch(3, vec![store(&[50], None, &tokens(900, 16), 16)]));
    rig.replayed(0, batch(3, vec![store(&[50], None, &tokens(900, 16), 16)]));
    end(&mut rig, ReplayEnd::Complete);
    rig
}

#[test]
fn an_unrepairable_gap_degrades_until_the_cache_has_turned_over() {
    let mut rig = with_lost_batch();
    let stats = rig.members[0].source.stats();
    assert_eq!((stats.gaps, stats.lost_batches, stats.suspects), (1, 1, 2));
    assert_eq!(rig.claim(0), Confidence::Degraded(DegradedReason::Gap));
    assert_eq!(
        (rig.hit(&tokens(0, 32)), rig.hit(&tokens(900, 16))),
        ((32, 0), (16, 0)),
        "served from what is known"
    );
    for i in 4..10u64 {
        rig.live(
            0,
            batch(i, vec![store(&[100 + i], None, &tokens(2_000 + i as u32 * 16, 16), 16)]),
        );
        assert_eq!(rig.claim(0), Confidence::Degraded(DegradedReason::Gap));
    }
    rig.live(0, batch(10, vec![store(&[110], None, &tokens(3_000, 16), 16)]));
    assert_eq!(rig.claim(0), Confidence::Exact);
    assert_eq!(rig.hit(&tokens(0, 32)), (0, 0));
    assert_eq!(rig.hit(&tokens(900, 16)), (16, 0), "stored after the gap");
    assert_eq!(rig.members[0].source.stats().suspects_dropped, 2);
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
}

fn keys(from: u32, n: u32) -> Vec<cairn_blocks::BlockKey> {
    let block_size = cairn_blocks::BlockSize::DEFAULT;
    let root = Namespace {
        seed: SEED,
        pool: POOL,
        block_size,
        adapter: "",
        salt: "",
    }
    .root();
    Chain::new(root, block_size, &tokens(from, n), &[]).keys
}

#[test]
fn what_the_engine_reused_confirms_or_cuts_suspects() {
    let mut rig = with_lost_batch();
    rig.members[0].source.cached_tokens(&keys(0, 48), 16);
    rig.settle();
    assert_eq!(rig.hit(&tokens(0, 32)), (16, 0));
    let stats = rig.members[0].source.stats();
    assert_eq!(
        (stats.suspects, stats.suspects_confirmed, stats.suspects_cut),
        (0, 1, 1)
    );
}

#[test]
fn a_fully_cached_prompt_does_not_cut_the_block_that_is_computed_anyway() {
    let mut rig = with_lost_batch();
    rig.members[0].source.cached_tokens(&keys(0, 32), 16);
    rig.settle();
    assert_eq!(rig.hit(&tokens(0, 32)), (32, 0));
}

#[test]
fn a_block_stored_below_a_suspect_confirms_the_chain_above() {
    let mut rig = with_lost_batch();
    rig.live(0, batch(4, vec![store(&[3], Some(2), &tokens(32, 16), 16)]));
    assert_eq!(rig.members[0].source.stats().suspects, 0);
    for i in 5..11u64 {
        rig.live(
            0,
            batch(i, vec![store(&[100 + i], None, &tokens(2_000 + i as u32 * 16, 16), 16)]),
        );
    }
    assert_eq!(rig.claim(0), Confidence::Exact);
    assert_eq!(rig.hit(&tokens(0, 48)), (48, 0));
}

#[test]
fn a_block_stored_below_a_dropped_suspect_brings_the_chain_back() {
    let mut rig = with_lost_batch();
    for i in 4..11u64 {
        rig.live(
            0,
            batch(i, vec![store(&[100 + i], None, &tokens(2_000 + i as u32 * 16, 16), 16)]),
        );
    }
    assert_eq!(rig.hit(&tokens(0, 32)), (0, 0));
    // The engine had it all along, and full hits say nothing.
    rig.live(0, batch(11, vec![store(&[3], Some(2), &tokens(32, 16), 16)]));
    assert_eq!(rig.hit(&tokens(0, 48)), (48, 0));
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
}

#[test]
fn a_clear_after_a_gap_makes_the_source_exact_at_once() {
    let mut rig = with_lost_batch();
    rig.live(0, batch(4, vec![EngineEvent::Cleared]));
    assert_eq!(rig.claim(0), Confidence::Exact);
    assert_eq!(rig.hit(&tokens(0, 32)), (0, 0));
}

/// Every replay fails until the session gives up.
fn fail_all(rig: &mut Rig) -> Vec<u64> {
    let mut asked = replays(rig);
    for _ in 0..8 {
        end(rig, ReplayEnd::Failed);
        rig.tick(250);
        asked.extend(replays(rig));
    }
    asked
}

#[test]
fn a_replay_that_fails_is_tried_again_and_then_given_up() {
    let mut rig = rig();
    rig.live(0, link(0));
    rig.live(0, link(2));
    assert_eq!(fail_all(&mut rig)[..4], [1, 1, 1, 1]);
    assert_eq!(rig.claim(0), Confidence::Degraded(DegradedReason::Gap));
    assert_eq!(
        rig.members[0].source.stats().quarantined,
        1,
        "its parent was in the lost message"
    );
    rig.live(0, link(3));
    assert_eq!(rig.members[0].source.stats().messages, 3);
}

#[test]
fn a_restart_shows_once_the_replay_socket_is_up_however_late() {
    let mut rig = rig();
    for i in 0..3 {
        rig.live(0, link(i));
    }
    reconnect(&mut rig);
    fail_all(&mut rig);
    assert_eq!(rig.claim(0), Confidence::Degraded(DegradedReason::Gap));
    replays(&mut rig);
    rig.tick(1_100);
    assert_eq!(replays(&mut rig), [2], "the idle poll goes on verifying");
    end(&mut rig, ReplayEnd::Complete);
    assert_eq!(rig.members[0].source.stats().restarts, 1);
    assert_eq!(rig.hit(&tokens(0, 48)), (0, 0));
}

#[test]
fn a_life_that_nobody_could_verify_before_it_went_on_stays_suspect() {
    let mut rig = rig();
    for i in 0..3 {
        rig.live(0, link(i));
    }
    reconnect(&mut rig);
    // Perhaps another engine by now: its next message has the seq that is expected.
    rig.live(
        0,
        batch_of_life(1, 3, vec![store(&[900], None, &tokens(7_000, 16), 16)]),
    );
    fail_all(&mut rig);
    assert_eq!(rig.hit(&tokens(7_000, 16)), (16, 0));
    rig.tick(1_100);
    end(&mut rig, ReplayEnd::Complete);
    assert_eq!(rig.claim(0), Confidence::Degraded(DegradedReason::Gap));
    assert_eq!(rig.members[0].source.stats().suspects, 3);
    for i in 4..12u64 {
        rig.live(
            0,
            batch_of_life(
                1,
                i,
                vec![store(&[900 + i], None, &tokens(7_000 + i as u32 * 16, 16), 16)],
            ),
        );
    }
    assert_eq!((rig.claim(0), rig.hit(&tokens(0, 48))), (Confidence::Exact, (0, 0)));
}

#[test]
fn a_replay_socket_that_comes_late_and_shows_the_same_life_takes_the_suspicion_off() {
    let mut rig = rig();
    for i in 0..3 {
        rig.live(0, link(i));
    }
    reconnect(&mut rig);
    fail_all(&mut rig);
    assert_eq!(rig.members[0].source.stats().suspects, 3);
    replays(&mut rig);
    rig.tick(1_100);
    for i in 2..5 {
        rig.replayed(0, link(i));
    }
    end(&mut rig, ReplayEnd::Complete);
    assert_eq!(rig.claim(0), Confidence::Exact);
    assert_eq!(rig.members[0].source.stats().suspects, 0);
    assert_eq!(rig.hit(&tokens(0, 80)), (80, 0));
}

#[test]
fn a_replay_without_any_answer_ends_by_itself() {
    let mut rig = rig();
    rig.live(0, link(0));
    rig.live(0, link(2));
    for _ in 0..16 {
        rig.tick(16_000);
    }
    assert_eq!(rig.claim(0), Confidence::Degraded(DegradedReason::Gap));
}

#[test]
fn the_buffer_of_live_messages_is_bounded() {
    let mut rig = rig();
    for i in 1..20_000u64 {
        rig.live(0, batch(i, Vec::new()));
    }
    let stats = rig.members[0].source.stats();
    assert!(stats.buffered <= 16 << 10);
    assert_eq!(stats.buffered + stats.refused.get(RefusalReason::BufferFull), 19_999);
    // What the replay brings fills even that.
    for i in 0..20_000u64 {
        rig.replayed(0, batch(i, Vec::new()));
    }
    end(&mut rig, ReplayEnd::Complete);
    assert_eq!(rig.claim(0), Confidence::Exact);
    assert_eq!(rig.members[0].source.stats().messages, 20_000);
}

#[test]
fn a_late_start_knows_that_it_does_not_know_what_was_before() {
    let mut rig = Rig::new(&Options {
        capacity: 4,
        ..Options::default()
    });
    let now = rig.now;
    rig.members[0].source.connected(now);
    rig.live(0, batch(700, vec![store(&[9], Some(8), &tokens(0, 16), 16)]));
    rig.replayed(0, batch(500, vec![store(&[5], None, &tokens(500, 16), 16)]));
    for i in 501..701 {
        rig.replayed(0, batch(i, Vec::new()));
    }
    end(&mut rig, ReplayEnd::Complete);
    assert_eq!(rig.claim(0), Confidence::Degraded(DegradedReason::Gap));
    assert_eq!(rig.hit(&tokens(500, 16)), (16, 0));
}

#[test]
fn a_block_that_waited_through_a_gap_counts_no_copy_that_may_be_gone() {
    let mut rig = rig();
    rig.live(0, batch(0, vec![store(&[2], Some(1), &tokens(16, 16), 16)]));
    // Its removal is in the message that is lost for good.
    rig.live(0, batch(2, Vec::new()));
    rig.replayed(0, batch(2, Vec::new()));
    end(&mut rig, ReplayEnd::Complete);
    rig.live(0, batch(3, vec![store(&[1, 2], None, &tokens(0, 32), 16)]));
    assert_eq!(rig.hit(&tokens(0, 32)), (32, 0));
    rig.live(0, batch(4, vec![remove(&[2])]));
    assert_eq!(rig.hit(&tokens(0, 32)), (16, 0));
}

#[test]
fn a_confirmed_suspect_has_one_copy_whatever_was_counted_before() {
    let mut rig = rig();
    let again = || store(&[1], None, &tokens(0, 16), 16);
    rig.live(0, batch(0, vec![again(), again()]));
    rig.live(0, batch(2, Vec::new()));
    rig.replayed(0, batch(2, Vec::new()));
    end(&mut rig, ReplayEnd::Complete);
    rig.live(0, batch(3, vec![store(&[2], Some(1), &tokens(16, 16), 16)]));
    rig.live(0, batch(4, vec![remove(&[2]), remove(&[1])]));
    assert_eq!(rig.hit(&tokens(0, 32)), (0, 0));
}
