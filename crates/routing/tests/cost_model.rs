//! Properties of the cost model and of the `kv` policy.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/fleet.rs"]
mod fleet;

use cairn_index::WorkerId;
use cairn_routing::{DEFAULT_SPEEDS, Inputs, Micros, Reuse, Speeds};
use fleet::{core, request, whole, workers};
use proptest::prelude::*;

fn inputs() -> impl Strategy<Value = Inputs> {
    let reuse = (0..20_000u32, 0..20_000u32, 0..20_000u32, 0..20_000u32, 0..20_000u32);
    let load = (0..50u32, 0..50u32, 0..200_000u64, 0..2_000_000u64, 0..400_000u64);
    let limits = (0..64u32, 0..2_000_000u64, 0..1_025u32, any::<bool>(), 0..1_025u32);
    let speeds = (
        100..100_000u32,
        100..1_000_000u32,
        1..200_000u32,
        1..200_000u32,
        1..200_000u32,
    );
    (1..40_000u32, reuse, load, limits, speeds).prop_map(|(prompt, r, l, m, s)| Inputs {
        prompt_tokens: prompt,
        expected_output: 128,
        gpu_tokens: r.0,
        cpu_tokens: r.1,
        shared_tokens: r.2,
        peer_tokens: r.3,
        speculative_tokens: if r.4 % 3 == 0 { r.4 } else { 0 },
        trust: m.4,
        in_flight: l.0 + l.1,
        waiting: l.1,
        queued_work: l.2,
        head_done_us: l.3,
        context_tokens: l.4,
        max_num_seqs: m.0,
        capacity_tokens: m.1,
        kv_usage: m.2,
        stale: m.3,
        since_chosen: 1,
        recent_work: 0,
        price_percent: 100,
        paid_us: if r.4 % 5 == 0 { u64::from(r.3) * 10 } else { 0 },
        speeds: Speeds {
            prefill_start_us: s.0,
            prefill_ns_per_token: s.1,
            cpu_ns_per_token: s.2,
            shared_ns_per_token: s.3,
            transfer_start_us: 5_000,
            transfer_ns_per_token: s.4,
            service_us: 1_000_000,
        },
    })
}

/// Work is counted in whole tokens: one token computed, and its price, and a microsecond for each term.
fn rounding(i: &Inputs) -> u64 {
    u64::from(i.speeds.prefill_ns_per_token) * 2 / 1_000 + 4
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// INV-11: at equal load, more overlap in any tier never costs more (but for the rounding of one token).
    #[test]
    fn more_overlap_never_costs_more_at_equal_load(i in inputs(), tier in 0..5, more in 1..20_000u32) {
        let mut better = i;
        let tokens = match tier {
            0 => &mut better.gpu_tokens,
            1 => &mut better.cpu_tokens,
            2 => &mut better.shared_tokens,
            3 => &mut better.peer_tokens,
            _ => &mut better.speculative_tokens,
        };
        *tokens += more;
        prop_assert!(better.terms().cost().0 <= i.terms().cost().0 + rounding(&i), "{:?}\n{:?}", i.terms(), better.terms());
    }

    /// INV-11: and a token in a nearer tier is worth at least as much.
    #[test]
    fn a_nearer_tier_is_never_worth_less(i in inputs(), moved in 1..5_000u32) {
        let mut slow = i;
        slow.speeds.shared_ns_per_token = slow.speeds.cpu_ns_per_token.max(slow.speeds.shared_ns_per_token);
        let moved = moved.min(slow.shared_tokens);
        let mut near = slow;
        near.shared_tokens -= moved;
        near.cpu_tokens += moved;
        prop_assert!(near.terms().cost().0 <= slow.terms().cost().0 + rounding(&i));
        let moved = moved.min(near.cpu_tokens);
        let mut nearer = near;
        nearer.cpu_tokens -= moved;
        nearer.gpu_tokens += moved;
        prop_assert!(nearer.terms().cost().0 <= near.terms().cost().0 + rounding(&i));
    }

    /// More load of any kind never makes a worker look better.
    #[test]
    fn more_load_never_costs_less(i in inputs(), kind in 0..5, more in 1..1_000u32) {
        let mut busier = i;
        match kind {
            0 => busier.in_flight += more,
            1 => busier.queued_work += u64::from(more),
            2 => { busier.waiting += more; busier.in_flight += more; }
            3 => busier.kv_usage = (busier.kv_usage + more).min(1_024),
            _ => busier.context_tokens += u64::from(more),
        }
        prop_assert!(busier.terms().cost() >= i.terms().cost());
    }

    /// INV-07: no more is reused than the prompt has, and the last token is always computed.
    #[test]
    fn reuse_never_exceeds_the_prompt(i in inputs()) {
        let terms = i.terms();
        prop_assert!(terms.new_tokens >= 1 && terms.new_tokens <= i.prompt_tokens);
    }
}

#[test]
fn a_cpu_copy_attracts_where_no_gpu_holds_the_prefix_and_not_where_one_does() {
    let mut routing = core(1, &workers(3));
    let cpu_only = |w: WorkerId| Reuse {
        cpu: if w.0 == 1 { 4_000 } else { 0 },
        ..Reuse::default()
    };
    let choice = routing.decide(Micros(0), &request(4_100), &cpu_only).unwrap();
    assert_eq!(whole(&choice), WorkerId(1));
    assert!(choice.terms.fetch_us > 0 && choice.terms.new_tokens == 100);
    let gpu_too = |w: WorkerId| Reuse {
        gpu: if w.0 == 2 { 4_000 } else { 0 },
        cpu: if w.0 == 1 { 4_000 } else { 0 },
        ..Reuse::default()
    };
    assert_eq!(
        whole(&routing.decide(Micros(0), &request(4_100), &gpu_too).unwrap()),
        WorkerId(2)
    );
}

#[test]
fn a_fetch_that_is_slower_than_computing_is_not_planned() {
    let slow = Speeds {
        shared_ns_per_token: 10_000_000,
        ..DEFAULT_SPEEDS
    };
    let base = Inputs {
        prompt_tokens: 200,
        expected_output: 10,
        gpu_tokens: 0,
        cpu_tokens: 0,
        shared_tokens: 8,
        peer_tokens: 0,
        speculative_tokens: 0,
        trust: 1_024,
        in_flight: 0,
        waiting: 0,
        queued_work: 0,
        head_done_us: 0,
        context_tokens: 0,
        max_num_seqs: 0,
        capacity_tokens: 0,
        kv_usage: 0,
        stale: false,
        since_chosen: 0,
        recent_work: 0,
        price_percent: 100,
        paid_us: 0,
        speeds: slow,
    };
    assert_eq!(base.terms().fetch_us, 0);
    assert_eq!(base.terms().new_tokens, 200);
}
