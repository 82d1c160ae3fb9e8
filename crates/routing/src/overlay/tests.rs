use proptest::prelude::*;

use super::*;
use crate::SpeculativePrefix;
use cairn_index::WorkerId;

const LIMITS: OverlayLimits = OverlayLimits {
    entries: 64,
    keys: 4_096,
};

fn ms(ms: u64) -> Micros {
    Micros::from_ms(ms)
}

/// A chain whose first `shared` keys are those of family `family`, the rest its own.
fn chain(family: u64, own: u64, shared: usize, len: usize) -> Vec<BlockKey> {
    (0..len)
        .map(|at| {
            BlockKey(crate::draw::pair(
                if at < shared { family } else { own << 32 | family },
                at as u64,
            ))
        })
        .collect()
}

fn promised(overlay: &mut Overlay, keys: &[BlockKey], slot: Slot, committed: u32) -> u32 {
    let mut promises = Promises::default();
    overlay.look_up(keys, |s| if s == slot { committed } else { 0 }, &mut promises);
    promises.blocks(slot)
}

#[test]
fn a_promise_covers_the_shared_part_down_to_a_stride() {
    let mut overlay = Overlay::new(LIMITS);
    overlay.insert(Slot(3), &chain(1, 1, 100, 120), 0, ms(1_000)).unwrap();
    assert_eq!(promised(&mut overlay, &chain(1, 1, 100, 120), Slot(3), 0), 120);
    assert_eq!(promised(&mut overlay, &chain(1, 2, 100, 120), Slot(3), 0), 96);
    assert_eq!(promised(&mut overlay, &chain(1, 2, 100, 120), Slot(2), 0), 0);
    assert_eq!(promised(&mut overlay, &chain(2, 2, 100, 120), Slot(3), 0), 0);
}

#[test]
fn a_promise_below_held_blocks_counts_only_where_they_are_still_held() {
    let mut overlay = Overlay::new(LIMITS);
    let keys = chain(1, 1, 200, 200);
    overlay.insert(Slot(0), &keys, 100, ms(1_000)).unwrap();
    assert_eq!(promised(&mut overlay, &keys, Slot(0), 100), 200);
    assert_eq!(
        promised(&mut overlay, &keys, Slot(0), 40),
        0,
        "the blocks above were evicted"
    );
}

#[test]
fn failure_removal_confirmation_and_time_end_a_promise() {
    let mut overlay = Overlay::new(LIMITS);
    let keys = chain(1, 1, 64, 64);
    let id = overlay.insert(Slot(0), &keys, 0, ms(1_000)).unwrap();
    overlay.withdraw(id);
    overlay.withdraw(id);
    assert_eq!(promised(&mut overlay, &keys, Slot(0), 0), 0);
    assert_eq!(overlay.counters().withdrawn, 1);

    overlay.insert(Slot(0), &keys, 0, ms(1_000)).unwrap();
    overlay.withdraw_worker(Slot(0));
    assert_eq!(promised(&mut overlay, &keys, Slot(0), 0), 0);

    overlay.insert(Slot(0), &keys, 0, ms(1_000)).unwrap();
    assert_eq!(promised(&mut overlay, &keys, Slot(0), 64), 0, "the view has all of it");
    assert_eq!(overlay.counters().confirmed, 1);

    let id = overlay.insert(Slot(0), &keys, 0, ms(1_000)).unwrap();
    overlay.set_expiry(id, ms(2_000));
    overlay.expire(ms(1_999));
    assert_eq!(promised(&mut overlay, &keys, Slot(0), 0), 64);
    overlay.expire(ms(2_000));
    assert_eq!(promised(&mut overlay, &keys, Slot(0), 0), 0);
    assert!(overlay.by_key.is_empty() && overlay.keys == 0 && overlay.by_expiry.is_empty());
}

#[test]
fn entries_and_keys_stay_within_their_bounds_and_the_first_to_expire_goes() {
    let mut overlay = Overlay::new(LIMITS);
    for i in 0..1_000u64 {
        overlay.insert(Slot(0), &chain(i, i, 800, 800), 0, ms(1_000 + i));
        assert!(overlay.by_expiry.len() <= 64 && overlay.keys <= 4_096);
    }
    assert_eq!(promised(&mut overlay, &chain(999, 999, 800, 800), Slot(0), 0), 800);
    assert_eq!(promised(&mut overlay, &chain(0, 0, 800, 800), Slot(0), 0), 0);
    assert!(overlay.counters().bounded > 900);
}

fn said(worker: u32, keys: &[BlockKey], first: u32) -> SpeculativePrefix {
    let keys = keys
        .iter()
        .copied()
        .skip(((first + 1) * STRIDE - 1) as usize)
        .step_by(STRIDE as usize)
        .collect();
    SpeculativePrefix {
        worker: WorkerId(worker),
        keys,
        stride: STRIDE,
        first,
        ttl: ms(500),
        ready: false,
    }
}

#[test]
fn another_routers_promises_are_replaced_as_a_whole() {
    let mut overlay = Overlay::new(LIMITS);
    let name = RouterName("r2".to_owned());
    let (a, b) = (chain(1, 1, 80, 80), chain(2, 2, 80, 80));
    let first = said(0, &a, 0);
    overlay.replace_router(ms(0), &name, [(Slot(0), &first)].into_iter());
    overlay.replace_router(ms(50), &name, [(Slot(0), &first)].into_iter());
    assert_eq!(overlay.counters().inserted, 1, "a repeated promise is kept as it is");
    overlay.expire(ms(540));
    assert_eq!(promised(&mut overlay, &a, Slot(0), 0), 80, "and lives on");
    let second = said(1, &b, 0);
    overlay.replace_router(ms(100), &name, [(Slot(1), &second)].into_iter());
    assert_eq!(promised(&mut overlay, &a, Slot(0), 0), 0);
    assert_eq!(promised(&mut overlay, &b, Slot(1), 0), 80);
    overlay.replace_router(ms(100), &name, [].into_iter());
    assert!(overlay.by_expiry.is_empty() && overlay.by_router.is_empty());
}

#[test]
fn blocks_that_two_routers_send_to_one_worker_are_reserved_twice_and_computed_once() {
    let mut overlay = Overlay::new(LIMITS);
    let name = RouterName("r2".to_owned());
    let (mine, other) = (chain(1, 1, 80, 88), chain(1, 2, 80, 88));
    let own = overlay.insert(Slot(0), &mine, 0, ms(1_000)).unwrap();
    assert_eq!(overlay.doubled_blocks(Slot(0)), 0);
    let theirs = said(0, &other, 0);
    overlay.replace_router(ms(0), &name, [(Slot(0), &theirs)].into_iter());
    assert_eq!(overlay.doubled_blocks(Slot(0)), 80);
    overlay.set_ready(own, ms(2_000));
    assert_eq!(
        overlay.doubled_blocks(Slot(0)),
        80,
        "what the other waits for is there already"
    );
    let done = SpeculativePrefix {
        ready: true,
        ..said(0, &other, 0)
    };
    overlay.replace_router(ms(0), &name, [(Slot(0), &done)].into_iter());
    assert_eq!(overlay.doubled_blocks(Slot(0)), 0, "nobody waits any more");
    overlay.withdraw(own);
    overlay.replace_router(ms(0), &name, [].into_iter());
    assert_eq!(overlay.doubled_blocks(Slot(0)), 0);
    let elsewhere = said(1, &mine, 0);
    overlay.insert(Slot(0), &mine, 0, ms(1_000)).unwrap();
    overlay.replace_router(ms(0), &name, [(Slot(1), &elsewhere)].into_iter());
    assert_eq!(
        (overlay.doubled_blocks(Slot(0)), overlay.doubled_blocks(Slot(1))),
        (0, 0)
    );
}

#[test]
fn a_promise_with_another_stride_or_hostile_fields_is_refused_or_bounded() {
    let mut overlay = Overlay::new(LIMITS);
    let name = RouterName("r2".to_owned());
    let keys = chain(1, 1, 8_000, 100_000);
    let odd = SpeculativePrefix {
        stride: 3,
        ..said(0, &keys, 0)
    };
    let none = SpeculativePrefix {
        keys: Vec::new(),
        ..said(0, &keys, 0)
    };
    let far = SpeculativePrefix {
        first: u32::MAX,
        ttl: Micros(u64::MAX),
        ..said(0, &keys[..800], 0)
    };
    overlay.replace_router(
        ms(0),
        &name,
        [(Slot(0), &odd), (Slot(0), &none), (Slot(0), &far)].into_iter(),
    );
    // Keys count at the depth where the request has them, whatever a frame says.
    assert_eq!(promised(&mut overlay, &keys, Slot(0), 0), 800);
    overlay.expire(MAX_LIFE);
    assert!(overlay.by_expiry.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    /// What is promised equals a plain walk over all entries, and nothing remains once all are gone.
    #[test]
    fn promises_equal_a_plain_walk(
        steps in prop::collection::vec((0..4u8, 0..3u32, 0..3u64, 0..4u64, 8..90usize, 0..40u32, 0..2_000u64), 1..60)
    ) {
        let mut overlay = Overlay::new(OverlayLimits { entries: 10_000, keys: 1_000_000 });
        let mut plain: Vec<(OverlayId, Slot, Vec<BlockKey>, u32, u64)> = Vec::new();
        let mut now = 0;
        for (what, slot, family, own, len, have, time) in steps {
            let keys = chain(family, own, 40, len);
            match what {
                0 | 1 => {
                    let have = have / STRIDE * STRIDE;
                    if let Some(id) = overlay.insert(Slot(slot), &keys, have, ms(now + time)) {
                        plain.push((id, Slot(slot), keys.clone(), have, now + time));
                    }
                }
                2 if !plain.is_empty() => {
                    let (id, ..) = plain.swap_remove(len % plain.len());
                    overlay.withdraw(id);
                }
                _ => {
                    now += time / 4;
                    overlay.expire(ms(now));
                    plain.retain(|p| p.4 > now);
                }
            }
            let asked = chain(family, own ^ 1, 40, 90);
            let mut promises = Promises::default();
            overlay.look_up(&asked, |_| 0, &mut promises);
            for slot in 0..3 {
                let mut covered = 0;
                let ends = |p: &Vec<BlockKey>, depth: usize| p.len() >= depth && p[depth - 1] == asked[depth - 1];
                for depth in (STRIDE..=90).step_by(STRIDE as usize) {
                    let some = plain.iter().any(|(_, s, keys, have, _)| {
                        *s == Slot(slot) && *have < depth && ends(keys, depth as usize)
                    });
                    if some && covered + STRIDE >= depth {
                        covered = depth;
                    }
                }
                prop_assert_eq!(promises.blocks(Slot(slot)), covered);
            }
        }
        for (id, ..) in plain {
            overlay.withdraw(id);
        }
        prop_assert!(overlay.by_key.is_empty() && overlay.keys == 0 && overlay.by_expiry.is_empty());
        prop_assert!(overlay.doubled.iter().all(|n| *n == 0));
    }
}
