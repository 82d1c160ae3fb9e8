//! What goes wrong on the way: aborts, re-registrations, lost reports, failing transfers, wrong predictions.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/fleet.rs"]
mod fleet;

use cairn_index::{Confidence, DegradedReason, Role, WorkerId};
use cairn_routing::{
    BreakerState, Ending, KeySource, LoadReport, Micros, Plan, Reason, RequestFacts, Reuse, ViewState, WhyNot,
    WorkerFacts,
};
use fleet::{POOL, core, keys, request, whole, workers};

const NONE: fn(WorkerId) -> Reuse = |_| Reuse::default();

fn ms(ms: u64) -> Micros {
    Micros::from_ms(ms)
}

#[test]
fn a_thousand_aborts_at_every_stage_leave_no_load() {
    // R1, R9
    let mut routing = core(1, &workers(4));
    let prompt = keys(1, 40);
    let mut queued = Vec::new();
    for i in 0..1_000u64 {
        let request = RequestFacts {
            keys: &prompt,
            ..request(700)
        };
        let choice = routing.decide(ms(i), &request, &NONE).unwrap();
        let mut ticket = routing.reserve(ms(i), &choice, &request).unwrap();
        match i % 5 {
            0 => routing.finish(ms(i), ticket, Ending::Cancelled, None),
            1 => {
                routing.first_token(ms(i + 1), &mut ticket);
                routing.finish(ms(i + 2), ticket, Ending::Cancelled, None);
            }
            2 => queued.push(ticket),
            3 => {
                routing.first_token(ms(i + 1), &mut ticket);
                routing.first_token(ms(i + 2), &mut ticket);
                routing.finish(ms(i + 2), ticket, Ending::Fault, None);
                for w in 0..4 {
                    routing.set_worker(ms(i), WorkerFacts::new(WorkerId(w), POOL));
                }
            }
            _ => routing.finish(ms(i), ticket, Ending::Done { cached_tokens: Some(0) }, None),
        }
    }
    assert_eq!(routing.reservations(), 200);
    for ticket in queued {
        routing.finish(ms(2_000), ticket, Ending::Cancelled, None);
    }
    assert_eq!(routing.reservations(), 0);
    for w in 0..4 {
        assert_eq!(routing.load(ms(2_000), WorkerId(w)).in_flight(), 0);
    }
    assert_eq!(routing.ledger_counters().released_twice, 0);
}

#[test]
fn health_checks_and_registrations_keep_the_load() {
    // R2
    let mut routing = core(1, &workers(1));
    for _ in 0..20 {
        let choice = routing.decide(ms(0), &request(100), &NONE).unwrap();
        fleet::keep(routing.reserve(ms(0), &choice, &request(100)).unwrap());
    }
    for cycle in 1..=3 {
        routing.update_worker(WorkerId(0), |f| f.healthy = false);
        routing.update_worker(WorkerId(0), |f| f.healthy = true);
        routing.set_worker(ms(cycle * 1_000), WorkerFacts::new(WorkerId(0), POOL));
        assert_eq!(routing.load(ms(cycle * 1_000), WorkerId(0)).own.requests, 20);
    }
}

#[test]
fn load_that_expires_under_requests_in_flight_never_goes_below_zero() {
    // R8: reports and frames expire, reservations don't; the worker that lost them doesn't win everything.
    let mut routing = core(1, &workers(4));
    let mut held = Vec::new();
    for _ in 0..20 {
        let choice = routing.decide(ms(0), &request(100), &NONE).unwrap();
        held.push((whole(&choice), routing.reserve(ms(0), &choice, &request(100)).unwrap()));
    }
    routing.on_load_report(
        ms(1),
        WorkerId(2),
        &LoadReport {
            running: 5,
            waiting: 0,
            kv_usage: 0.1,
            age: ms(0),
        },
    );
    for (worker, ticket) in held {
        routing.finish(ms(60_000), ticket, Ending::Cancelled, None);
        assert!(routing.load(ms(60_000), worker).in_flight() < 20);
    }
    let mut share = [0u32; 4];
    for i in 0..100 {
        share[whole(&routing.decide(ms(60_001 + i), &request(100), &NONE).unwrap()).0 as usize] += 1;
    }
    assert_eq!(share, [25; 4]);
}

#[test]
fn one_worker_with_a_stale_report_is_weighed_down_alone_and_all_stale_go_on_by_own_counts() {
    // R23
    let mut routing = core(1, &workers(4));
    let report = LoadReport {
        running: 0,
        waiting: 0,
        kv_usage: 0.0,
        age: ms(0),
    };
    for w in 0..4 {
        routing.on_load_report(ms(0), WorkerId(w), &report);
    }
    for w in 1..4 {
        routing.on_load_report(ms(10_000), WorkerId(w), &report);
    }
    for _ in 0..9 {
        let choice = routing.decide(ms(10_001), &request(100), &NONE).unwrap();
        assert_ne!(whole(&choice), WorkerId(0));
    }
    let mut share = [0u32; 4];
    for i in 0..40 {
        let choice = routing.decide(ms(60_000 + i), &request(100), &NONE).unwrap();
        fleet::keep(routing.reserve(ms(60_000 + i), &choice, &request(100)).unwrap());
        share[whole(&choice).0 as usize] += 1;
    }
    assert_eq!(share, [10; 4]);
}

#[test]
fn a_worker_whose_engine_reports_full_memory_is_passed_over() {
    // R28: what counts is what the engine pins, not what was sent.
    let mut fleet = workers(2);
    for facts in &mut fleet {
        facts.capacity_tokens = 100_000;
    }
    let mut routing = core(1, &fleet);
    for (w, kv_usage) in [(0, 0.995), (1, 0.4)] {
        routing.on_load_report(
            ms(0),
            WorkerId(w),
            &LoadReport {
                running: 10,
                waiting: 0,
                kv_usage,
                age: ms(0),
            },
        );
    }
    for _ in 0..5 {
        assert_eq!(
            whole(&routing.decide(ms(1), &request(4_000), &NONE).unwrap()),
            WorkerId(1)
        );
    }
}

#[test]
fn a_shortfall_of_cached_tokens_is_corrected_within_twenty_requests() {
    // R16
    let mut routing = core(1, &workers(2));
    let reuse = |w: WorkerId| Reuse {
        gpu: if w.0 == 0 { 992 } else { 720 },
        ..Reuse::default()
    };
    let mut moved = None;
    for i in 0..40u64 {
        let now = ms(i * 5_000);
        let choice = routing.decide(now, &request(1_000), &reuse).unwrap();
        if whole(&choice) == WorkerId(1) {
            moved.get_or_insert(i);
            continue;
        }
        let mut ticket = routing.reserve(now, &choice, &request(1_000)).unwrap();
        assert_eq!(ticket.predicted(), 992);
        routing.first_token(now.plus(ms(30)), &mut ticket);
        routing.finish(
            now.plus(ms(40)),
            ticket,
            Ending::Done {
                cached_tokens: Some(400),
            },
            None,
        );
    }
    assert!(moved.is_some_and(|i| i <= 20), "{moved:?}");
    let drift = routing.drift(WorkerId(0)).unwrap();
    assert!(drift.over_tokens > 0 && drift.compared > 0);
}

#[test]
fn three_faults_send_requests_elsewhere_and_push_back_only_pauses() {
    let mut routing = core(1, &workers(2));
    let only_first = RequestFacts {
        excluded: &[WorkerId(1)],
        ..request(100)
    };
    for i in 0..3 {
        let choice = routing.decide(ms(i), &only_first, &NONE).unwrap();
        let ticket = routing.reserve(ms(i), &choice, &only_first).unwrap();
        routing.finish(ms(i), ticket, Ending::Fault, None);
    }
    assert_eq!(routing.breaker(ms(3), WorkerId(0)), Some(BreakerState::Open));
    for i in 0..10 {
        assert_eq!(
            whole(&routing.decide(ms(10 + i), &request(100), &NONE).unwrap()),
            WorkerId(1)
        );
    }
    assert_eq!(routing.candidates()[0].why_not, Some(WhyNot::BreakerOpen));
    let only_second = RequestFacts {
        excluded: &[WorkerId(0)],
        ..request(100)
    };
    let choice = routing.decide(ms(5_000), &only_second, &NONE).unwrap();
    let ticket = routing.reserve(ms(5_000), &choice, &only_second).unwrap();
    routing.finish(ms(5_000), ticket, Ending::PushedBack { after: Some(ms(2_000)) }, None);
    assert_eq!(routing.breaker(ms(6_999), WorkerId(1)), Some(BreakerState::Paused));
    assert_eq!(routing.breaker(ms(7_000), WorkerId(1)), Some(BreakerState::Closed));
}

#[test]
fn a_removed_worker_leaves_nothing_and_its_requests_end_quietly() {
    // INV-06, INV-13
    let mut routing = core(1, &workers(2));
    let prompt = keys(4, 100);
    let facts = RequestFacts {
        keys: &prompt,
        ..request(1_610)
    };
    let choice = routing.decide(ms(0), &facts, &NONE).unwrap();
    let ticket = routing.reserve(ms(0), &choice, &facts).unwrap();
    let gone = whole(&choice);
    routing.remove_worker(ms(1), gone);
    assert_eq!(routing.load(ms(1), gone).in_flight(), 0);
    routing.set_worker(ms(10_000), WorkerFacts::new(WorkerId(9), POOL));
    routing.finish(ms(10_001), ticket, Ending::Done { cached_tokens: Some(0) }, None);
    assert_eq!(routing.load(ms(10_001), WorkerId(9)).in_flight(), 0);
    assert_eq!(routing.reservations(), 0);
    let next = routing.decide(ms(10_002), &facts, &NONE).unwrap();
    assert_eq!(next.speculative_tokens, 0);
}

#[test]
fn without_events_or_view_a_worker_is_credited_with_what_was_sent_to_it() {
    for (confidence, view) in [
        (Confidence::Degraded(DegradedReason::NoEvents), ViewState::Current),
        (Confidence::Degraded(DegradedReason::Silent), ViewState::Current),
        (Confidence::Exact, ViewState::Absent),
    ] {
        let mut fleet = workers(4);
        for facts in &mut fleet {
            facts.confidence = confidence;
        }
        let mut routing = core(1, &fleet);
        routing.set_view(view);
        let prompt = keys(4, 100);
        let facts = RequestFacts {
            keys: &prompt,
            ..request(1_610)
        };
        let first = routing.decide(ms(0), &facts, &NONE).unwrap();
        let mut ticket = routing.reserve(ms(0), &first, &facts).unwrap();
        routing.first_token(ms(200), &mut ticket);
        routing.finish(ms(300), ticket, Ending::Done { cached_tokens: Some(0) }, None);
        for i in 1..20 {
            let again = routing.decide(ms(i * 20_000), &facts, &NONE).unwrap();
            assert_eq!(again.plan, first.plan);
            assert_eq!(again.predicted.gpu, 96 * 16);
        }
    }
}

#[test]
fn without_a_tokenizer_equal_text_still_meets_its_cache() {
    let mut routing = core(1, &workers(4));
    let place = |routing: &mut cairn_routing::Routing, now: Micros, text: &str| {
        let mut keys = Vec::new();
        cairn_routing::text_keys(5, text.as_bytes(), &mut keys);
        let tokens = (text.len() / 4) as u32;
        let facts = RequestFacts {
            keys: &keys,
            key_source: KeySource::Text,
            ..request(tokens)
        };
        // Whatever the index says about other keys doesn't count.
        let choice = routing
            .decide(now, &facts, &|_: WorkerId| Reuse {
                gpu: 4_000,
                ..Reuse::default()
            })
            .unwrap();
        let mut ticket = routing.reserve(now, &choice, &facts).unwrap();
        routing.first_token(now.plus(ms(100)), &mut ticket);
        routing.finish(now.plus(ms(200)), ticket, Ending::Done { cached_tokens: None }, None);
        (whole(&choice), choice.predicted.gpu)
    };
    let system = "you are a helpful assistant who answers in verse; ".repeat(80);
    let (home, nothing) = place(&mut routing, ms(0), &format!("{system}first"));
    assert_eq!(nothing, 0);
    for i in 1..10 {
        let (there, reused) = place(&mut routing, ms(i * 1_000), &format!("{system}question {i}"));
        assert_eq!(there, home);
        assert!(reused >= 800, "{reused}");
    }
}

fn split_fleet() -> Vec<WorkerFacts> {
    let mut fleet = workers(4);
    for facts in &mut fleet {
        facts.role = if facts.worker.0 < 2 {
            Role::Prefill
        } else {
            Role::Decode
        };
    }
    fleet
}

fn splittable<'a>(tokens: u32) -> RequestFacts<'a> {
    RequestFacts {
        may_split: true,
        ..request(tokens)
    }
}

#[test]
fn a_split_is_made_only_when_it_pays() {
    let mut routing = core(1, &split_fleet());
    // A short prompt on idle decode workers: moving it would cost more than computing it there.
    let short = routing.decide(ms(0), &splittable(64), &NONE).unwrap();
    assert!(
        matches!(short.plan, Plan::Whole { worker } if worker.0 >= 2),
        "{short:?}"
    );
    // Decode workers that stream lose more than a long prompt's transfer takes.
    for _ in 0..40 {
        let choice = routing.decide(ms(0), &request(200), &NONE).unwrap();
        let mut ticket = routing.reserve(ms(0), &choice, &request(200)).unwrap();
        routing.first_token(ms(1), &mut ticket);
        fleet::keep(ticket);
    }
    let long = routing.decide(ms(2), &splittable(16_000), &NONE).unwrap();
    assert!(
        matches!(long.plan, Plan::Split { prefill, decode } if prefill.0 < 2 && decode.0 >= 2),
        "{long:?}"
    );
    assert_eq!(long.reason, Reason::Split);
    // The same prompt, held by a decode worker but for its tail: computed where it lies.
    let held = |w: WorkerId| Reuse {
        gpu: if w.0 == 3 { 15_984 } else { 0 },
        ..Reuse::default()
    };
    let warm = routing.decide(ms(3), &splittable(16_000), &held).unwrap();
    assert_eq!(warm.plan, Plan::Whole { worker: WorkerId(3) });
    let record = routing.record(ms(3), &warm, &splittable(16_000));
    assert_eq!(record.verify(), Ok(()));
}

#[test]
fn both_legs_of_a_split_are_reserved_and_released_together_however_it_ends() {
    let mut fleet = split_fleet();
    for facts in &mut fleet {
        facts.decode_serves_whole = false;
    }
    for ending in [
        Ending::Done { cached_tokens: Some(0) },
        Ending::Cancelled,
        Ending::Fault,
        Ending::PushedBack { after: None },
        Ending::Refused,
    ] {
        for stage in 0..3 {
            let mut routing = core(1, &fleet);
            let facts = splittable(4_000);
            let choice = routing.decide(ms(0), &facts, &NONE).unwrap();
            let Plan::Split { prefill, decode } = choice.plan else {
                panic!("only a split is possible")
            };
            let mut ticket = routing.reserve(ms(0), &choice, &facts).unwrap();
            let load = |routing: &cairn_routing::Routing| {
                (
                    routing.load(ms(0), prefill).in_flight(),
                    routing.load(ms(0), decode).in_flight(),
                )
            };
            assert_eq!(load(&routing), (1, 1));
            if stage > 0 {
                routing.prefill_done(ms(1), &mut ticket);
                assert_eq!(load(&routing), (0, 1));
            }
            if stage > 1 {
                routing.first_token(ms(2), &mut ticket);
            }
            routing.finish(ms(3), ticket, ending, Some(decode));
            assert_eq!(load(&routing), (0, 0), "{ending:?} at {stage}");
            assert_eq!(routing.ledger_counters().released_twice, 0);
        }
    }
}

#[test]
fn a_pair_whose_transfers_fail_is_avoided_then_tried_again() {
    // P11
    let mut fleet = split_fleet();
    fleet.truncate(3);
    let mut routing = core(1, &fleet);
    for _ in 0..40 {
        let choice = routing.decide(ms(0), &request(200), &NONE).unwrap();
        let mut ticket = routing.reserve(ms(0), &choice, &request(200)).unwrap();
        routing.first_token(ms(1), &mut ticket);
        fleet::keep(ticket);
    }
    let facts = splittable(16_000);
    let mut avoided = std::collections::BTreeSet::new();
    let mut whole_at = None;
    for i in 0..20u64 {
        let now = ms(10 + i * 250);
        let choice = routing.decide(now, &facts, &NONE).unwrap();
        let Plan::Split { prefill, .. } = choice.plan else {
            whole_at = Some(now);
            break;
        };
        avoided.insert(prefill);
        let ticket = routing.reserve(now, &choice, &facts).unwrap();
        routing.transfer_failed(now, &ticket);
        routing.finish(now, ticket, Ending::Cancelled, None);
    }
    assert_eq!(avoided.len(), 2, "both prefill workers were tried");
    let at = whole_at.expect("in the end the decode worker serves it whole");
    let record = {
        let c = routing.decide(at, &facts, &NONE).unwrap();
        routing.record(at, &c, &facts)
    };
    assert_eq!(record.avoided.len(), 2);
    assert_eq!(record.verify(), Ok(()));
    let later = routing.decide(at.plus(ms(31_000)), &facts, &NONE).unwrap();
    assert!(
        matches!(later.plan, Plan::Split { .. }),
        "and the pairs are tried again: {later:?}"
    );
}

#[test]
fn a_whole_answer_stops_counting_as_a_waiting_prefill_when_its_first_token_is_due() {
    let mut routing = core(1, &workers(1));
    let before = routing.speeds(WorkerId(0)).unwrap();
    let choice = routing.decide(ms(0), &request(4_000), &NONE).unwrap();
    let mut ticket = routing.reserve(ms(0), &choice, &request(4_000)).unwrap();
    let due = Micros(0).plus(choice.terms.ttft());
    routing.assume_first_token(due, &mut ticket);
    let load = routing.load(due, WorkerId(0));
    assert_eq!((load.own.requests, load.own.waiting, load.own.prefill_work), (1, 0, 0));
    assert!(load.own.decode_tokens > 0);
    routing.first_token(due.plus(ms(9_000)), &mut ticket);
    assert_eq!(
        routing.speeds(WorkerId(0)).unwrap(),
        before,
        "nothing was seen, so nothing is learned"
    );
    routing.finish(due.plus(ms(9_000)), ticket, Ending::Done { cached_tokens: None }, None);
    assert_eq!(routing.load(due.plus(ms(9_000)), WorkerId(0)).in_flight(), 0);
}

#[test]
fn adapters_length_and_roles_decide_who_is_asked() {
    let mut fleet = workers(3);
    fleet[0].adapters = vec!["b".to_owned(), "a".to_owned()];
    fleet[1].max_model_len = 1_000;
    fleet[2].role = Role::Prefill;
    fleet[2].adapters = vec!["a".to_owned()];
    let mut routing = core(1, &fleet);
    let adapter = RequestFacts {
        adapter: "a",
        ..request(2_000)
    };
    assert_eq!(whole(&routing.decide(ms(0), &adapter, &NONE).unwrap()), WorkerId(0));
    let why: Vec<_> = routing.candidates().iter().map(|c| c.why_not).collect();
    assert_eq!(why, [None, Some(WhyNot::AdapterMissing), Some(WhyNot::Role)]);
    assert_eq!(
        whole(&routing.decide(ms(0), &request(2_000), &NONE).unwrap()),
        WorkerId(0)
    );
    assert_eq!(routing.candidates()[1].why_not, Some(WhyNot::TooLong));
}
