//! What the shapes of engines' events make of the index, case by case as met in the field: parents, groups, adapters, salts,
//! images, block sizes. Copies and tiers are counted in `copies`.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "kit/rig.rs"]
mod rig;

use cairn_blocks::MediaSpan;
use cairn_index::{Confidence, DegradedReason};
use cairn_ingest::{
    AuditOutcome, BlockExtra, EngineEvent, ExtraValue, Medium, RefusalReason, Removed, ReplayEnd, SpecKind, Stored,
};
use rig::{Options, Rig, batch, hashes, remove, store, stored, tokens};

#[test]
fn blocks_under_an_unknown_parent_are_kept_aside_and_never_attached_to_the_root() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 64);
    rig.live(
        0,
        batch(
            0,
            vec![
                store(&[3], Some(2), &prompt[32..48], 16),
                store(&[4], Some(3), &prompt[48..], 16),
            ],
        ),
    );
    assert_eq!(rig.hit(&prompt), (0, 0));
    assert_eq!(rig.hit(&prompt[32..]), (0, 0), "not a chain of its own");
    assert_eq!(rig.refused(RefusalReason::UnknownParent), 2);
    assert_eq!(rig.members[0].source.stats().quarantined, 2);
    rig.live(0, batch(1, vec![store(&[1, 2], None, &prompt[..32], 16)]));
    assert_eq!(rig.hit(&prompt), (64, 0));
    assert_eq!(rig.members[0].source.stats().quarantined, 0);
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
}

#[test]
fn a_block_removed_while_it_waits_for_its_parent_does_not_come_back() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 48);
    rig.live(
        0,
        batch(0, vec![store(&[2, 3], Some(1), &prompt[16..], 16), remove(&[3])]),
    );
    rig.live(0, batch(1, vec![store(&[1], None, &prompt[..16], 16)]));
    assert_eq!(rig.hit(&prompt), (32, 0));
}

#[test]
fn a_hash_twice_in_one_store_refuses_that_event_alone() {
    let mut rig = Rig::with_defaults();
    let (a, b) = (tokens(0, 32), tokens(100, 48));
    rig.live(0, batch(0, vec![store(&[1, 2], None, &a, 16)]));
    rig.live(
        0,
        batch(
            1,
            vec![store(&[5, 6, 5], None, &b, 16), store(&[7], None, &b[..16], 16)],
        ),
    );
    assert_eq!(rig.refused(RefusalReason::DuplicateHash), 1);
    assert_eq!((rig.hit(&a), rig.hit(&b)), ((32, 0), (16, 0)));
    let many: Vec<u64> = (0..999).chain([17]).collect();
    rig.live(0, batch(2, vec![store(&many, None, &tokens(9_000, 16_000), 16)]));
    assert_eq!(rig.refused(RefusalReason::DuplicateHash), 2);
    assert_eq!(rig.hit(&tokens(9_000, 16_000)), (0, 0));
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
}

#[test]
fn tokens_that_do_not_fit_the_hashes_refuse_the_event() {
    let mut rig = Rig::with_defaults();
    rig.live(0, batch(0, vec![store(&[1], None, &tokens(0, 3_840), 768)]));
    assert_eq!(rig.refused(RefusalReason::Shape), 1);
    assert_eq!(rig.hit(&tokens(0, 3_840)), (0, 0));
}

fn grouped(list: &[u64], tokens: &[u32], size: u32, group: u32, kind: SpecKind) -> EngineEvent {
    EngineEvent::Stored(Stored {
        group: Some(group),
        spec_kind: kind,
        ..stored(list, None, tokens, size)
    })
}

#[test]
fn only_the_full_attention_group_gives_credit() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 512);
    rig.live(
        0,
        batch(
            0,
            vec![
                grouped(&[11, 12, 13, 14], &prompt[..256], 64, 1, SpecKind::Window),
                grouped(&[21], &prompt[..4], 4, 3, SpecKind::Other),
                grouped(&[1, 2], &prompt, 256, 0, SpecKind::Full),
                grouped(&[31, 32], &prompt[..128], 64, 2, SpecKind::Window),
            ],
        ),
    );
    assert_eq!(rig.hit(&prompt), (512, 0));
    assert_eq!(
        rig.members[0].source.confidence(),
        Confidence::Degraded(DegradedReason::Hybrid)
    );
    let removal = |hash, group| {
        EngineEvent::Removed(Removed {
            hashes: hashes(&[hash]),
            group: Some(group),
            ..Removed::default()
        })
    };
    // The window group has the same hashes as the full-attention group.
    rig.live(0, batch(1, vec![removal(2, 1), removal(1, 2)]));
    assert_eq!(rig.hit(&prompt), (512, 0));
    rig.live(0, batch(2, vec![removal(2, 0)]));
    assert_eq!(rig.hit(&prompt), (256, 0));
}

#[test]
fn a_removal_without_group_removes_on_engines_without_groups() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 32);
    rig.live(0, batch(0, vec![store(&[1, 2], None, &prompt, 16), remove(&[2])]));
    assert_eq!(rig.hit(&prompt), (16, 0));
}

#[test]
fn an_unnamed_window_group_that_came_first_gives_way_to_the_full_one() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 64);
    rig.live(
        0,
        batch(0, vec![grouped(&[1, 2], &prompt[..32], 16, 0, SpecKind::Unsaid)]),
    );
    rig.live(0, batch(1, vec![grouped(&[3, 4], &prompt, 16, 0, SpecKind::Unsaid)]));
    assert_eq!(
        rig.hit(&prompt),
        (0, 0),
        "a group that leaves hashes out gives no positions"
    );
    rig.live(
        0,
        batch(2, vec![grouped(&[1, 2, 3, 4], &prompt, 16, 1, SpecKind::Unsaid)]),
    );
    assert_eq!(rig.hit(&prompt), (64, 0));
}

fn with_extra(mut stored: Stored, extra: &[(u32, &[&str])]) -> Stored {
    stored.extra_keys = extra
        .iter()
        .map(|(block, values)| BlockExtra {
            block: *block,
            values: values.iter().map(|v| ExtraValue::Bare((*v).into())).collect(),
        })
        .collect();
    stored
}

#[test]
fn an_adapter_matches_under_its_name_and_nowhere_else() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 32);
    let one = Stored {
        adapter: Some("adapter-116".into()),
        ..stored(&[1, 2], None, &prompt, 16)
    };
    let one = with_extra(one, &[(0, &["adapter-116"]), (1, &["adapter-116"])]);
    rig.live(0, batch(0, vec![EngineEvent::Stored(one)]));
    assert_eq!(rig.hit_in(&prompt, "adapter-116", ""), (32, 0));
    assert_eq!(rig.hit_in(&prompt, "", ""), (0, 0));
    assert_eq!(rig.hit_in(&prompt, "adapter-117", ""), (0, 0));
}

#[test]
fn an_adapter_that_is_known_by_number_only_never_matches_the_base_model() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 32);
    let one = Stored {
        lora_id: Some(4),
        ..stored(&[1, 2], None, &prompt, 16)
    };
    rig.live(0, batch(0, vec![EngineEvent::Stored(one)]));
    assert_eq!(rig.hit(&prompt), (0, 0));
}

#[test]
fn different_images_do_not_match_and_the_text_before_them_does() {
    let mut rig = Rig::new(&Options {
        multimodal: true,
        ..Options::default()
    });
    rig.fresh(0);
    let prompt = tokens(0, 48);
    let one = with_extra(
        stored(&[1, 2, 3], None, &prompt, 16),
        &[(1, &["uuid-A"]), (2, &["uuid-A"])],
    );
    rig.live(0, batch(0, vec![EngineEvent::Stored(one)]));
    let hit = |identity| {
        let media = [MediaSpan {
            start: 20,
            len: 20,
            identity: Some(identity),
        }];
        rig.overlap_in(&prompt, "", "", &media)[0].overlap.gpu
    };
    assert_eq!(hit("uuid-A"), 48);
    assert_eq!(hit("uuid-B"), 16);
}

#[test]
fn an_image_at_the_start_is_told_from_a_salt() {
    let mut rig = Rig::new(&Options {
        multimodal: true,
        ..Options::default()
    });
    rig.fresh(0);
    let prompt = tokens(0, 32);
    let image = "9f".repeat(32);
    let one = with_extra(stored(&[1, 2], None, &prompt, 16), &[(0, &[&image, "tenant-a"])]);
    rig.live(0, batch(0, vec![EngineEvent::Stored(one)]));
    let two = with_extra(stored(&[3, 4], None, &prompt, 16), &[(0, &[&image])]);
    rig.live(0, batch(1, vec![EngineEvent::Stored(two)]));
    let media = [MediaSpan {
        start: 2,
        len: 10,
        identity: Some(&image),
    }];
    assert_eq!(rig.overlap_in(&prompt, "", "tenant-a", &media)[0].overlap.gpu, 32);
    assert_eq!(rig.overlap_in(&prompt, "", "", &media)[0].overlap.gpu, 32);
    assert_eq!(rig.overlap_in(&prompt, "", "tenant-b", &media)[0].overlap.gpu, 0);
    assert_eq!(rig.hit(&prompt), (0, 0));
}

#[test]
fn a_salted_prompt_matches_its_own_salt_only_even_under_equal_hashes() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 32);
    let salted = |salt: &str| {
        EngineEvent::Stored(Stored {
            cache_salt: Some(salt.into()),
            ..stored(&[1, 2], None, &prompt, 16)
        })
    };
    rig.live(0, batch(0, vec![salted("a"), salted("b")]));
    assert_eq!(
        (rig.hit_in(&prompt, "", "a"), rig.hit_in(&prompt, "", "b")),
        ((32, 0), (32, 0))
    );
    assert_eq!((rig.hit(&prompt), rig.hit_in(&prompt, "", "c")), ((0, 0), (0, 0)));
    // A child says by its salt below which of the two it hangs.
    let more = tokens(0, 48);
    let child = Stored {
        cache_salt: Some("b".into()),
        ..stored(&[3], Some(2), &more[32..], 16)
    };
    rig.live(0, batch(1, vec![EngineEvent::Stored(child)]));
    assert_eq!(
        (rig.hit_in(&more, "", "a"), rig.hit_in(&more, "", "b")),
        ((32, 0), (48, 0))
    );
    let removed = Removed {
        hashes: hashes(&[2]),
        cache_salt: Some("a".into()),
        ..Removed::default()
    };
    rig.live(0, batch(2, vec![EngineEvent::Removed(removed)]));
    assert_eq!(
        (rig.hit_in(&prompt, "", "a"), rig.hit_in(&prompt, "", "b")),
        ((16, 0), (32, 0))
    );
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
}

#[test]
fn a_salt_in_the_first_blocks_extra_keys_separates_vllm_tenants() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 32);
    let one = with_extra(stored(&[1, 2], None, &prompt, 16), &[(0, &["tenant-a"])]);
    rig.live(0, batch(0, vec![EngineEvent::Stored(one)]));
    assert_eq!(rig.hit_in(&prompt, "", "tenant-a"), (32, 0));
    assert_eq!(rig.hit(&prompt), (0, 0));
    // The CPU tier's events don't say the salt.
    let cpu = Stored {
        medium: Medium::Cpu,
        has_extra_keys: false,
        ..stored(&[2], Some(1), &prompt[16..], 16)
    };
    let start = Stored {
        medium: Medium::Cpu,
        has_extra_keys: false,
        ..stored(&[1], None, &prompt[..16], 16)
    };
    rig.live(
        0,
        batch(
            1,
            vec![EngineEvent::Stored(cpu), EngineEvent::Stored(start), remove(&[2, 1])],
        ),
    );
    assert_eq!(rig.hit_in(&prompt, "", "tenant-a"), (0, 32));
    assert_eq!(rig.hit(&prompt), (0, 0));
}

#[test]
fn a_cpu_chain_that_was_never_seen_on_the_gpu_is_not_taken_for_an_unsalted_one() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 32);
    let start = Stored {
        medium: Medium::Cpu,
        has_extra_keys: false,
        ..stored(&[1, 2], None, &prompt, 16)
    };
    rig.live(0, batch(0, vec![EngineEvent::Stored(start)]));
    assert_eq!(rig.hit(&prompt), (0, 0));
    assert_eq!(rig.refused(RefusalReason::Unresolved), 1);
    rig.live(
        0,
        batch(
            1,
            vec![EngineEvent::Stored(with_extra(
                stored(&[1, 2], None, &prompt, 16),
                &[(0, &["s"])],
            ))],
        ),
    );
    rig.live(0, batch(2, vec![remove(&[2, 1])]));
    assert_eq!((rig.hit_in(&prompt, "", "s"), rig.hit(&prompt)), ((0, 32), (0, 0)));
}

#[test]
fn equal_tokens_under_different_engine_hashes_match_on_both_engines() {
    let mut rig = Rig::with_defaults();
    let other = rig.join(&Options::default());
    rig.fresh(other);
    let prompt = tokens(0, 32);
    rig.live(0, batch(0, vec![store(&[1, 2], None, &prompt, 16)]));
    rig.live(other, batch(0, vec![store(&[901, 902], None, &prompt, 16)]));
    assert_eq!((rig.hit_of(0, &prompt), rig.hit_of(other, &prompt)), ((32, 0), (32, 0)));
}

#[test]
fn two_chains_under_one_hash_get_no_credit_beyond_their_own_tokens() {
    let mut rig = Rig::with_defaults();
    let (a, b) = (tokens(0, 48), [tokens(0, 16), tokens(500, 32)].concat());
    rig.live(0, batch(0, vec![store(&[1, 2], None, &a[..32], 16)]));
    rig.live(0, batch(1, vec![store(&[2], Some(1), &b[16..32], 16)]));
    assert_eq!(rig.refused(RefusalReason::Collision), 1);
    // Below which of the two this one hangs can't be known.
    rig.live(0, batch(2, vec![store(&[3], Some(2), &a[32..], 16)]));
    assert_eq!(rig.refused(RefusalReason::AmbiguousParent), 1);
    assert_eq!((rig.hit(&a), rig.hit(&b)), ((32, 0), (32, 0)));
    rig.live(0, batch(3, vec![remove(&[2])]));
    assert_eq!(
        (rig.hit(&a), rig.hit(&b)),
        ((16, 0), (16, 0)),
        "neither may be claimed now"
    );
    assert_eq!(rig.refused(RefusalReason::AmbiguousRemoval), 1);
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
}

#[test]
fn engines_with_other_block_sizes_match_in_their_own_units() {
    let mut rig = Rig::with_defaults();
    let large = rig.join(&Options::default());
    rig.fresh(large);
    let prompt = tokens(0, 300);
    rig.live(
        0,
        batch(0, vec![store(&(1..=18).collect::<Vec<_>>(), None, &prompt[..288], 16)]),
    );
    rig.live(large, batch(0, vec![store(&[1, 2, 3, 4], None, &prompt[..256], 64)]));
    assert_eq!(
        (rig.hit_of(0, &prompt), rig.hit_of(large, &prompt)),
        ((288, 0), (256, 0))
    );
    rig.live(0, batch(1, vec![remove(&[5])]));
    rig.live(large, batch(1, vec![remove(&[2])]));
    assert_eq!((rig.hit_of(0, &prompt), rig.hit_of(large, &prompt)), ((64, 0), (64, 0)));
    rig.live(large, batch(2, vec![store(&[2], Some(1), &prompt[64..128], 64)]));
    assert_eq!(
        rig.hit_of(large, &prompt),
        (256, 0),
        "the blocks above the hole were still there"
    );
    assert_eq!(
        (rig.audit(0), rig.audit(large)),
        (AuditOutcome::Equal, AuditOutcome::Equal)
    );
}

#[test]
fn pages_of_one_token_fill_a_block_when_all_have_come() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 40);
    for i in 0..40u64 {
        let parent = i.checked_sub(1).map(|p| p + 1);
        rig.live(
            0,
            batch(i, vec![store(&[i + 1], parent, &prompt[i as usize..=i as usize], 1)]),
        );
        assert_eq!(rig.hit(&prompt), (((i as u32 + 1) / 16) * 16, 0));
    }
    // A branch inside the third block doesn't mix with the first.
    let branch = [&prompt[..36], &tokens(900, 12)[..]].concat();
    rig.live(
        0,
        batch(
            40,
            vec![store(&(101..113).collect::<Vec<_>>(), Some(36), &branch[36..], 1)],
        ),
    );
    assert_eq!((rig.hit(&branch), rig.hit(&prompt)), ((48, 0), (32, 0)));
    // One page in the middle takes its block from all that pass through it.
    rig.live(0, batch(41, vec![remove(&[34])]));
    assert_eq!(rig.hit(&branch), (32, 0));
    rig.live(0, batch(42, vec![store(&[34], Some(33), &prompt[33..34], 1)]));
    assert_eq!(rig.hit(&branch), (48, 0));
    rig.live(0, batch(43, vec![remove(&[1])]));
    assert_eq!(rig.hit(&branch), (0, 0));
    assert_eq!(rig.audit(0), AuditOutcome::Equal);
}

#[test]
fn engine_blocks_smaller_than_or_across_canonical_blocks_fill_them() {
    for (engine, canonical) in [(16u32, 32u32), (24, 16), (64, 48), (8, 32), (128, 16), (16, 128)] {
        let mut rig = Rig::new(&Options {
            block_size: canonical,
            ..Options::default()
        });
        rig.fresh(0);
        let prompt = tokens(0, 384);
        for i in 0..384 / engine {
            let parent = i.checked_sub(1).map(|p| u64::from(p) + 1);
            let part = &prompt[(i * engine) as usize..((i + 1) * engine) as usize];
            rig.live(
                0,
                batch(u64::from(i), vec![store(&[u64::from(i) + 1], parent, part, engine)]),
            );
            let full = (i + 1) * engine / canonical * canonical;
            assert_eq!(rig.hit(&prompt), (full, 0), "{engine} into {canonical}");
        }
        assert_eq!(rig.audit(0), AuditOutcome::Equal);
        let last = u64::from(384 / engine);
        rig.live(0, batch(last, vec![remove(&[last / 2 + 1])]));
        let left = (last / 2) as u32 * engine / canonical * canonical;
        assert_eq!(rig.hit(&prompt), (left, 0), "{engine} into {canonical}");
        assert_eq!(rig.audit(0), AuditOutcome::Equal);
    }
}

#[test]
fn a_rank_that_serves_and_sends_no_events_is_called_silent_within_ten_seconds() {
    let mut rig = Rig::with_defaults();
    let speaking = rig.join(&Options::default());
    rig.fresh(speaking);
    for second in 0..=11u64 {
        rig.tick(1_000);
        let now = rig.now;
        for i in [0, speaking] {
            rig.members[i].source.served(now, second * 500);
            // The idle poll finds nothing new.
            rig.members[i].source.replay_ended(now, ReplayEnd::Complete);
        }
        rig.live(
            speaking,
            batch(
                second,
                vec![store(&[second], None, &tokens(second as u32 * 100, 16), 16)],
            ),
        );
    }
    assert_eq!(
        rig.members[0].source.confidence(),
        Confidence::Degraded(DegradedReason::Silent)
    );
    assert_eq!(rig.claim(0), Confidence::Degraded(DegradedReason::Silent));
    assert_eq!(rig.claim(speaking), Confidence::Exact);
    rig.live(0, batch(0, vec![store(&[1], None, &tokens(0, 16), 16)]));
    assert_eq!(rig.claim(0), Confidence::Exact);
}

#[test]
fn an_idle_rank_is_not_silent() {
    let mut rig = Rig::with_defaults();
    for _ in 0..30 {
        rig.tick(1_000);
        let now = rig.now;
        rig.members[0].source.served(now, 70_000);
        rig.members[0].source.replay_ended(now, ReplayEnd::Complete);
    }
    assert_eq!(rig.claim(0), Confidence::Exact);
}

#[test]
fn the_owner_is_the_connection_whatever_rank_a_batch_names() {
    let mut rig = Rig::with_defaults();
    let prompt = tokens(0, 32);
    let mut one = batch(0, vec![store(&[1, 2], None, &prompt, 16)]);
    one.rank = Some(3);
    rig.live(0, one);
    assert_eq!(rig.hit_of(0, &prompt), (32, 0));
}
