//! Bursts and herds: cold prefixes are computed once or twice, and routers see each other's load.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/engines.rs"]
mod engines;
#[path = "support/fleet.rs"]
mod fleet;

use std::collections::BTreeMap;

use cairn_routing::{Micros, RequestFacts};
use engines::World;
use fleet::{keys, request, workers};

/// A prompt of 8,000 shared tokens and a tail of its own.
fn burst_prompt(prefix: u64, own: u64) -> Vec<cairn_blocks::BlockKey> {
    let mut all = keys(prefix, 500);
    all.extend(keys(own.wrapping_mul(31) + 1_000_000, 4));
    all
}

/// Sends a burst of 16 over the routers, `gap` apart, and counts the prefills that paid for the prefix.
fn cold_prefills(routers: usize, gap: Micros, prefix: u64) -> BTreeMap<u32, u32> {
    let mut world = World::new(routers, &workers(4));
    world.run(Micros::from_ms(500 + prefix % 50));
    for i in 0..16u64 {
        world.send(
            i as usize % routers,
            &burst_prompt(prefix, prefix * 100 + i),
            8_064,
            Micros::from_ms(2_000),
        );
        world.run(gap);
    }
    world.run(Micros::from_ms(60_000));
    assert!(world.routers.iter().all(|r| r.reservations() == 0));
    world.cold
}

#[test]
fn a_burst_of_one_cold_prefix_is_computed_at_most_twice_through_one_router_or_two() {
    // M7
    for prefix in 1..=20 {
        for gap in [0, 1, 5, 20, 100] {
            for routers in [1, 2] {
                let cold = cold_prefills(routers, Micros::from_ms(gap), prefix);
                let paid: u32 = cold.values().sum();
                assert!(
                    paid <= 2,
                    "prefix {prefix}, {gap} ms apart, {routers} routers: {cold:?}"
                );
            }
        }
    }
}

#[test]
fn a_burst_of_different_cold_prompts_is_spread_over_all_workers() {
    let mut world = World::new(1, &workers(4));
    let mut share = BTreeMap::<u32, u32>::new();
    for i in 0..16 {
        let prompt = keys(5_000 + i, 500);
        *share
            .entry(world.send(0, &prompt, 8_010, Micros::from_ms(500)).0)
            .or_default() += 1;
    }
    assert_eq!(share.values().copied().collect::<Vec<_>>(), [4, 4, 4, 4]);
}

#[test]
fn the_next_request_through_another_router_goes_to_the_idle_engine() {
    // M6: three long streams through A occupy three of four engines; B must find the fourth.
    let mut right = 0;
    for round in 0..20u64 {
        let mut world = World::new(2, &workers(4));
        world.run(Micros::from_ms(100 + round));
        let busy: Vec<_> = (0..3)
            .map(|i| world.send(0, &keys(round * 100 + i, 10), 170, Micros::from_ms(60_000)))
            .collect();
        world.run(Micros::from_ms(2_000));
        let next = world.send(1, &keys(round * 100 + 50, 10), 170, Micros::from_ms(10));
        right += u32::from(!busy.contains(&next));
    }
    assert!(right >= 18, "{right} of 20");
}

#[test]
fn two_routers_do_not_herd_onto_the_worker_that_both_see_idle() {
    let mut world = World::new(2, &workers(8));
    let mut share = BTreeMap::<u32, u32>::new();
    for i in 0..400u64 {
        let worker = world.send(i as usize % 2, &keys(9_000 + i, 60), 970, Micros::from_ms(1_000));
        *share.entry(worker.0).or_default() += 1;
        world.run(Micros::from_ms(13));
    }
    let most = *share.values().max().unwrap();
    assert!(share.len() == 8 && most <= 60, "mean is 50: {share:?}");
}

#[test]
fn a_restarted_worker_does_not_draw_all_new_prefixes() {
    // R1: share of new prefixes of a just restarted worker at most 2/N.
    let mut world = World::new(1, &workers(8));
    for i in 0..200u64 {
        world.send(0, &keys(i % 20, 100), 1_610, Micros::from_ms(500));
        world.run(Micros::from_ms(40));
    }
    world.routers[0].forget_cache(cairn_index::WorkerId(3));
    let mut to_restarted = 0;
    for i in 0..200u64 {
        let worker = world.send(0, &keys(70_000 + i, 100), 1_610, Micros::from_ms(500));
        to_restarted += u32::from(worker.0 == 3);
        world.run(Micros::from_ms(40));
    }
    assert!(to_restarted <= 50, "{to_restarted} of 200 over 8 workers");
}

#[test]
fn a_failed_request_takes_its_promise_along() {
    let mut world = World::new(1, &workers(4));
    let prompt = keys(1, 500);
    let facts = RequestFacts {
        keys: &prompt,
        ..request(8_010)
    };
    let routing = &mut world.routers[0];
    let nothing = |_| cairn_routing::Reuse::default();
    let first = routing.decide(Micros(0), &facts, &nothing).unwrap();
    let ticket = routing.reserve(Micros(0), &first, &facts).unwrap();
    let second = routing.decide(Micros(0), &facts, &nothing).unwrap();
    assert_eq!(second.plan, first.plan);
    assert_eq!(second.speculative_tokens, 496 * 16);
    routing.finish(Micros(1), ticket, cairn_routing::Ending::Fault, None);
    let third = routing.decide(Micros(2), &facts, &nothing).unwrap();
    assert_eq!(third.speculative_tokens, 0);
    assert_ne!(third.plan, first.plan, "the others waited longer for a request");
}

#[test]
fn a_hot_prefix_does_not_pin_one_engine_while_others_idle() {
    // R6's kind: 40 % of traffic on one prefix at high load; work stays even.
    let mut world = World::new(1, &workers(8));
    let hot = keys(1, 250);
    for i in 0..3_000u64 {
        let mut prompt = if i % 5 < 2 { hot.clone() } else { keys(100 + i, 250) };
        prompt.extend(keys(1_000_000 + i, 30));
        world.send(0, &prompt, 4_490, Micros::from_ms(1_000));
        world.run(Micros::from_ms(35));
    }
    let busy: Vec<f64> = world.busy_us.values().map(|us| *us as f64).collect();
    let mean = busy.iter().sum::<f64>() / 8.0;
    assert!(busy.len() == 8 && busy.iter().all(|b| *b <= 1.2 * mean), "{busy:?}");
    let hit = world.hit_tokens as f64 / world.prompt_tokens as f64;
    assert!(hit >= 0.98 * 0.4 * 4_000.0 / 4_490.0, "{hit}");
}
