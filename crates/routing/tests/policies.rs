//! One suite for every policy: what any of them must do, whatever else it does.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/fleet.rs"]
mod fleet;

use cairn_index::WorkerId;
use cairn_routing::{
    ChoiceError, Ending, Micros, Plan, PolicyConfig, PolicyError, Reason, RequestFacts, Reuse, WhyNot,
};
use fleet::{POOL, core, request, whole, workers};

const NONE: fn(WorkerId) -> Reuse = |_| Reuse::default();

fn each(check: impl Fn(&'static str)) {
    for name in PolicyConfig::NAMES {
        check(name);
    }
}

fn facts<'a>(policy: &'a str, prefix: &'a [u8]) -> RequestFacts<'a> {
    RequestFacts {
        policy: Some(policy),
        prefix,
        ..request(800)
    }
}

#[test]
fn a_healthy_eligible_worker_always_gets_the_request() {
    // INV-10
    each(|policy| {
        for alive in 0..4u32 {
            let mut routing = core(1, &workers(4));
            for w in (0..4).filter(|w| *w != alive) {
                match w % 3 {
                    0 => routing.update_worker(WorkerId(w), |f| f.healthy = false),
                    1 => routing.update_worker(WorkerId(w), |f| f.draining = true),
                    _ => routing.update_worker(WorkerId(w), |f| f.asleep = true),
                };
            }
            let choice = routing.decide(Micros(0), &facts(policy, b"some text"), &NONE).unwrap();
            assert_eq!(whole(&choice), WorkerId(alive), "{policy}");
            assert_eq!(choice.reason, Reason::Only, "{policy}");
        }
    });
}

#[test]
fn broken_paused_and_full_workers_are_a_last_resort_and_not_a_refusal() {
    // INV-10
    each(|policy| {
        let mut routing = core(1, &workers(2));
        for _ in 0..40 {
            let request = facts(policy, b"t");
            let choice = routing.decide(Micros(0), &request, &NONE).unwrap();
            let ticket = routing.reserve(Micros(0), &choice, &request).unwrap();
            routing.finish(Micros(0), ticket, Ending::Fault, None);
        }
        let choice = routing.decide(Micros(1), &facts(policy, b"t"), &NONE).unwrap();
        assert_eq!(choice.reason, Reason::LastResort, "{policy}");
    });
}

#[test]
fn a_worker_that_was_tried_is_not_chosen_again() {
    // R12: a dead affine node, three healthy ones; the second attempt goes elsewhere.
    each(|policy| {
        let mut routing = core(3, &workers(4));
        for i in 0..50u32 {
            let text = format!("prompt {i}");
            let first = whole(
                &routing
                    .decide(Micros(0), &facts(policy, text.as_bytes()), &NONE)
                    .unwrap(),
            );
            let excluded = [first];
            let again = RequestFacts {
                excluded: &excluded,
                ..facts(policy, text.as_bytes())
            };
            assert_ne!(
                whole(&routing.decide(Micros(0), &again, &NONE).unwrap()),
                first,
                "{policy}"
            );
        }
    });
}

#[test]
fn without_an_eligible_worker_the_error_names_the_reason() {
    each(|policy| {
        let mut routing = core(1, &workers(3));
        let wanting = RequestFacts {
            adapter: "absent",
            ..facts(policy, b"")
        };
        let refused = routing.decide(Micros(0), &wanting, &NONE).unwrap_err();
        assert_eq!(
            refused,
            ChoiceError::NoneEligible {
                workers: 3,
                most: WhyNot::AdapterMissing
            },
            "{policy}"
        );
        let other = RequestFacts {
            pool: "nowhere",
            ..facts(policy, b"")
        };
        assert_eq!(
            routing.decide(Micros(0), &other, &NONE).unwrap_err(),
            ChoiceError::EmptyPool
        );
    });
}

#[test]
fn equal_requests_on_idle_workers_are_spread_evenly() {
    // R4. Affinity policies get a different prompt each time: equal ones belong together there.
    each(|policy| {
        let by_hash = matches!(policy, "random" | "session" | "prefix" | "chwbl");
        let n = if by_hash { 1_000u32 } else { 100 };
        for seed in 1..=5 {
            let mut routing = core(seed, &workers(4));
            let mut share = [0u32; 4];
            for i in 0..n {
                let now = Micros::from_ms(u64::from(i) * 2_000);
                let text = format!("prompt {seed} {i}");
                let request = RequestFacts {
                    affinity: text.as_bytes(),
                    ..facts(policy, text.as_bytes())
                };
                let request = if policy == "prefix" {
                    RequestFacts {
                        affinity: b"",
                        ..request
                    }
                } else {
                    request
                };
                let choice = routing.decide(now, &request, &NONE).unwrap();
                let mut ticket = routing.reserve(now, &choice, &request).unwrap();
                let at = now.plus(choice.terms.ttft());
                routing.first_token(at, &mut ticket);
                routing.finish(at, ticket, Ending::Done { cached_tokens: Some(0) }, None);
                share[whole(&choice).0 as usize] += 1;
            }
            let (low, high) = (n / 4 * 4 / 5, n / 4 * 6 / 5);
            assert!(
                share.iter().all(|s| (low..=high).contains(s)),
                "{policy} seed {seed}: {share:?}"
            );
        }
    });
}

#[test]
fn equal_requests_at_once_are_spread_evenly_by_every_policy_that_sees_load() {
    // R4
    each(|policy| {
        if matches!(
            policy,
            "random" | "session" | "prefix" | "max-hit" | "chwbl" | "round-robin"
        ) {
            return;
        }
        let mut routing = core(9, &workers(4));
        let mut tickets = Vec::new();
        let mut share = [0u32; 4];
        for _ in 0..100 {
            let request = facts(policy, b"");
            let choice = routing.decide(Micros(0), &request, &NONE).unwrap();
            tickets.push(routing.reserve(Micros(0), &choice, &request).unwrap());
            share[whole(&choice).0 as usize] += 1;
        }
        assert!(share.iter().all(|s| (20..=30).contains(s)), "{policy}: {share:?}");
        for ticket in tickets {
            routing.finish(Micros(1), ticket, Ending::Cancelled, None);
        }
        assert_eq!(routing.reservations(), 0);
    });
}

#[test]
fn one_seed_gives_one_sequence_and_another_seed_another() {
    each(|policy| {
        let run = |seed: u64| {
            let mut routing = core(seed, &workers(6));
            let mut chosen = Vec::new();
            for i in 0..60u32 {
                let text = format!("p{}", i % 7);
                let request = facts(policy, text.as_bytes());
                let choice = routing.decide(Micros(u64::from(i)), &request, &NONE).unwrap();
                chosen.push(whole(&choice).0);
            }
            chosen
        };
        assert_eq!(run(5), run(5), "{policy}");
        let by_rule = matches!(policy, "round-robin" | "prefix" | "chwbl");
        assert!(by_rule || run(5) != run(6), "{policy}");
    });
}

#[test]
fn every_decision_is_made_again_bit_by_bit_from_its_record() {
    each(|policy| {
        let mut routing = core(2, &workers(5));
        let keys = fleet::keys(1, 50);
        for i in 0..40u64 {
            let text = format!("prompt {}", i % 3);
            let request = RequestFacts {
                keys: &keys,
                ..facts(policy, text.as_bytes())
            };
            let reuse = |w: WorkerId| Reuse {
                gpu: 16 * w.0 * (i as u32 % 5),
                cpu: 32,
                ..Reuse::default()
            };
            let choice = routing.decide(Micros::from_ms(i * 7), &request, &reuse).unwrap();
            let record = routing.record(Micros::from_ms(i * 7), &choice, &request);
            let text = serde_json::to_string(&record).unwrap();
            let read: cairn_routing::DecisionRecord = serde_json::from_str(&text).unwrap();
            assert_eq!(read, record);
            assert_eq!(read.verify(), Ok(()), "{policy}");
            let mut forged = read.clone();
            forged.chosen = WorkerId(
                forged
                    .candidates
                    .iter()
                    .find(|c| c.worker != record.chosen)
                    .unwrap()
                    .worker
                    .0,
            );
            assert!(forged.verify().is_err(), "{policy}");
            let mut forged = read;
            forged.candidates[0].terms.queue_us += 1;
            assert!(forged.verify().is_err(), "{policy}");
            let mut ticket = routing.reserve(Micros::from_ms(i * 7), &choice, &request).unwrap();
            if i % 2 == 0 {
                routing.first_token(Micros::from_ms(i * 7 + 5), &mut ticket);
                routing.finish(
                    Micros::from_ms(i * 7 + 6),
                    ticket,
                    Ending::Done { cached_tokens: Some(8) },
                    None,
                );
            } else {
                fleet::keep(ticket);
            }
        }
    });
}

#[test]
fn policies_are_found_by_name_and_bad_parameters_are_named() {
    each(|policy| {
        let config = PolicyConfig::by_name(policy).unwrap();
        assert_eq!(config.name(), policy);
        assert_eq!(config.build().unwrap().config(), config);
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<PolicyConfig>(&text).unwrap(), config);
    });
    let unknown = PolicyConfig::by_name("fastest").unwrap_err();
    assert_eq!(unknown, PolicyError::UnknownName("fastest".to_owned()));
    assert!(unknown.to_string().contains("least-requests"));
    for (length, threshold) in [(1_023, 16), (65_537, 16), (4_096, 0), (4_096, 1_025)] {
        let config = PolicyConfig::Prefix {
            prefix_length: length,
            concurrency_threshold: threshold,
        };
        assert!(config.build().unwrap_err().to_string().contains("give"));
    }
}

#[test]
fn prefix_keeps_equal_starts_together_overflows_at_its_threshold_and_remaps_only_its_share() {
    let config = PolicyConfig::Prefix {
        prefix_length: 1_024,
        concurrency_threshold: 3,
    };
    let place = |n: u32, text: &str| {
        let mut routing = core(1, &workers(n));
        routing.set_pool_policy(POOL, Some(config.clone())).unwrap();
        let request = RequestFacts {
            prefix: text.as_bytes(),
            ..request(800)
        };
        whole(&routing.decide(Micros(0), &request, &NONE).unwrap())
    };
    let start = "s".repeat(1_024);
    assert_eq!(place(8, &format!("{start} one")), place(8, &format!("{start} another")));
    let moved = (0..1_000)
        .filter(|i| place(8, &format!("prompt {i}")) != place(7, &format!("prompt {i}")))
        .count();
    assert!(
        (85..=165).contains(&moved),
        "an eighth moves when one of eight workers goes: {moved}"
    );

    let mut routing = core(1, &workers(4));
    routing.set_pool_policy(POOL, Some(config.clone())).unwrap();
    let request = RequestFacts {
        prefix: start.as_bytes(),
        ..request(800)
    };
    let mut chosen = Vec::new();
    let mut held = Vec::new();
    for _ in 0..12 {
        let choice = routing.decide(Micros(0), &request, &NONE).unwrap();
        held.push(routing.reserve(Micros(0), &choice, &request).unwrap());
        chosen.push((whole(&choice), choice.reason));
    }
    let affine = chosen[0].0;
    assert!(chosen[..3].iter().all(|c| *c == (affine, Reason::Affinity)));
    assert!(chosen[3..].iter().all(|c| c.1 == Reason::Overflow));
    let others = chosen[3..].iter().filter(|c| c.0 != affine).count();
    assert_eq!(others, 9, "the least loaded are the others until all have three");
}

#[test]
fn a_prefix_aware_id_steers_where_the_text_would_go_elsewhere() {
    let mut routing = core(1, &workers(8));
    let at = |routing: &mut cairn_routing::Routing, id: &str, text: &str| {
        let request = RequestFacts {
            affinity: id.as_bytes(),
            ..facts("prefix", text.as_bytes())
        };
        whole(&routing.decide(Micros(0), &request, &NONE).unwrap())
    };
    let home = at(&mut routing, "tenant-7", "a");
    for i in 0..20 {
        assert_eq!(at(&mut routing, "tenant-7", &format!("text {i}")), home);
    }
}

#[test]
fn chwbl_keeps_every_worker_within_its_bound() {
    let mut routing = core(1, &workers(5));
    let mut load = [0u32; 5];
    for i in 0..200u32 {
        let request = facts("chwbl", b"always the same prompt");
        let choice = routing.decide(Micros(0), &request, &NONE).unwrap();
        fleet::keep(routing.reserve(Micros(0), &choice, &request).unwrap());
        load[whole(&choice).0 as usize] += 1;
        let bound = (f64::from(i + 1) * 1.25 / 5.0).ceil() as u32;
        assert!(load.iter().all(|l| *l <= bound), "{load:?} above {bound}");
    }
}

#[test]
fn a_shadow_policy_says_what_it_would_have_done_and_changes_nothing() {
    let mut routing = core(1, &workers(4));
    let request = facts("kv", b"text");
    let reuse = |w: WorkerId| Reuse {
        gpu: if w.0 == 2 { 512 } else { 0 },
        ..Reuse::default()
    };
    let choice = routing.decide(Micros(0), &request, &reuse).unwrap();
    assert_eq!(whole(&choice), WorkerId(2));
    let record = routing.record(Micros(0), &choice, &request);
    let shadow = routing.shadow(Micros(0), &choice, &request, "round-robin").unwrap();
    assert_eq!(shadow, Plan::Whole { worker: WorkerId(0) });
    assert_eq!(routing.record(Micros(0), &choice, &request), record);
    assert!(routing.shadow(Micros(0), &choice, &request, "nothing").is_none());
}
