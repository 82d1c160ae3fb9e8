use proptest::prelude::*;

use super::*;
use crate::ids::RouterName;

const A: Slot = Slot(0);
const B: Slot = Slot(1);

fn ms(ms: u64) -> Micros {
    Micros::from_ms(ms)
}

fn demand(tokens: u32) -> Demand {
    Demand {
        new_tokens: tokens,
        new_work: u64::from(tokens),
        context_tokens: tokens + 10,
    }
}

fn frame(name: &str, boot: u64, n: u64, loads: &[(u32, u32, u64)]) -> RouterFrame {
    let workers = loads
        .iter()
        .map(|&(worker, requests, prefill_tokens)| RemoteReservation {
            worker: WorkerId(worker),
            requests,
            prefill_tokens,
            decode_tokens: 7 * u64::from(requests),
        });
    RouterFrame {
        router: RouterName(name.to_owned()),
        boot,
        n,
        workers: workers.collect(),
        prefixes: Vec::new(),
    }
}

fn slot_of(worker: WorkerId) -> Option<Slot> {
    (worker.0 < 8).then_some(Slot(worker.0))
}

#[test]
fn a_request_counts_as_prefill_then_as_context_then_not_at_all() {
    let mut ledger = Ledger::default();
    let id = ledger.reserve(ms(0), A, demand(100)).unwrap();
    let own = ledger.load(ms(1), A).own;
    assert_eq!(
        (own.requests, own.waiting, own.prefill_tokens, own.decode_tokens),
        (1, 1, 100, 0)
    );
    let seen = ledger.first_token(ms(50), id).unwrap();
    assert_eq!((seen.ttft, seen.service, seen.alone), (ms(50), ms(50), true));
    let own = ledger.load(ms(51), A).own;
    assert_eq!(
        (own.requests, own.waiting, own.prefill_tokens, own.decode_tokens),
        (1, 0, 0, 110)
    );
    assert_eq!(ledger.release(ms(80), id).unwrap().decode, Some(ms(30)));
    assert_eq!(ledger.load(ms(81), A).own, Reserved::default());
}

#[test]
fn a_second_release_changes_nothing_and_is_counted() {
    let mut ledger = Ledger::default();
    let id = ledger.reserve(ms(0), A, demand(100)).unwrap();
    assert!(ledger.release(ms(1), id).is_some());
    let other = ledger.reserve(ms(2), A, demand(30)).unwrap();
    assert!(ledger.release(ms(3), id).is_none());
    assert!(ledger.first_token(ms(3), id).is_none());
    assert_eq!(ledger.counters().released_twice, 1);
    assert_eq!(ledger.load(ms(4), A).own.prefill_tokens, 30);
    assert!(ledger.release(ms(5), other).is_some());
    assert_eq!(ledger.live(), 0);
}

#[test]
fn service_time_leaves_out_the_wait_for_earlier_prefills() {
    let mut ledger = Ledger::default();
    let first = ledger.reserve(ms(0), A, demand(1_000)).unwrap();
    let second = ledger.reserve(ms(10), A, demand(1_000)).unwrap();
    assert_eq!(ledger.first_token(ms(100), first).unwrap().service, ms(100));
    let seen = ledger.first_token(ms(220), second).unwrap();
    assert_eq!((seen.service, seen.ttft), (ms(120), ms(210)));
}

#[test]
fn a_report_adds_only_what_no_reservation_explains() {
    let mut ledger = Ledger::default();
    let ids: Vec<_> = (0..5)
        .map(|_| ledger.reserve(ms(1_000), A, demand(10)).unwrap())
        .collect();
    ledger.on_frame(ms(1_000), &frame("other", 1, 1, &[(0, 2, 50)]), slot_of);
    let report = LoadReport {
        running: 8,
        waiting: 3,
        kv_usage: 0.5,
        age: ms(20),
    };
    ledger.on_report(ms(1_200), A, &report);
    let load = ledger.load(ms(1_200), A);
    assert_eq!((load.own.requests, load.others.requests), (5, 2));
    assert_eq!((load.unexplained_running, load.unexplained_waiting), (1, 3));
    assert_eq!(load.in_flight(), 11);
    assert_eq!(load.kv_usage, 512);
    // They end; a report that was read before still finds them explained.
    for id in ids {
        ledger.release(ms(1_300), id);
    }
    ledger.on_report(
        ms(1_350),
        A,
        &LoadReport {
            running: 7,
            waiting: 0,
            kv_usage: 0.5,
            age: ms(100),
        },
    );
    assert_eq!(ledger.load(ms(1_350), A).in_flight(), 2);
}

#[test]
fn a_stale_report_says_nothing_and_reservations_go_on_counting() {
    let mut ledger = Ledger::default();
    ledger.reserve(ms(0), A, demand(10)).unwrap();
    ledger.on_report(
        ms(10),
        A,
        &LoadReport {
            running: 9,
            waiting: 9,
            kv_usage: 0.9,
            age: ms(0),
        },
    );
    assert_eq!(ledger.load(ms(11), A).in_flight(), 18);
    let later = ledger.load(ms(3_011), A);
    assert_eq!((later.in_flight(), later.report_age, later.kv_usage), (1, None, 0));
}

#[test]
fn a_report_with_absurd_figures_is_cut_to_sense() {
    let mut ledger = Ledger::default();
    for usage in [f32::NAN, f32::INFINITY, -3.0, 1e30] {
        ledger.on_report(
            ms(10),
            A,
            &LoadReport {
                running: 0,
                waiting: 0,
                kv_usage: usage,
                age: ms(0),
            },
        );
        assert!(ledger.load(ms(10), A).kv_usage <= 1024);
    }
}

#[test]
fn another_routers_frame_replaces_the_last_and_dies_a_second_after_it() {
    let mut ledger = Ledger::default();
    assert_eq!(
        ledger.on_frame(ms(0), &frame("r", 1, 1, &[(0, 3, 300), (1, 1, 10)]), slot_of),
        FrameOutcome::Taken
    );
    assert_eq!(
        ledger.on_frame(ms(50), &frame("r", 1, 2, &[(0, 1, 20)]), slot_of),
        FrameOutcome::Taken
    );
    assert_eq!(ledger.load(ms(50), A).others.requests, 1);
    assert_eq!(ledger.load(ms(50), B).others, Reserved::default());
    // Late, repeated and foreign boots of the past are ignored.
    assert_eq!(
        ledger.on_frame(ms(60), &frame("r", 1, 1, &[(0, 9, 9)]), slot_of),
        FrameOutcome::Ignored
    );
    assert_eq!(
        ledger.on_frame(ms(60), &frame("r", 1, 2, &[(0, 9, 9)]), slot_of),
        FrameOutcome::Ignored
    );
    assert_eq!(
        ledger.on_frame(ms(60), &frame("r", 0, 99, &[(0, 9, 9)]), slot_of),
        FrameOutcome::Ignored
    );
    // A restarted router starts at nothing.
    assert_eq!(
        ledger.on_frame(ms(70), &frame("r", 2, 1, &[]), slot_of),
        FrameOutcome::Taken
    );
    assert_eq!(ledger.load(ms(70), A).others, Reserved::default());
    ledger.on_frame(ms(80), &frame("r", 2, 2, &[(0, 4, 40)]), slot_of);
    ledger.expire(ms(1_080));
    assert_eq!(ledger.load(ms(1_080), A).others.requests, 4);
    ledger.expire(ms(1_081));
    assert_eq!(ledger.load(ms(1_081), A).others, Reserved::default());
}

#[test]
fn routers_and_frames_beyond_their_bounds_are_counted() {
    let mut ledger = Ledger::default();
    for i in 0..MAX_REMOTE_ROUTERS {
        assert_eq!(
            ledger.on_frame(ms(0), &frame(&format!("r{i}"), 1, 1, &[]), slot_of),
            FrameOutcome::Taken
        );
    }
    assert_eq!(
        ledger.on_frame(ms(0), &frame("one more", 1, 1, &[]), slot_of),
        FrameOutcome::Bounded
    );
    let huge: Vec<_> = (0..MAX_WORKERS_PER_FRAME + 1)
        .map(|_| (0, u32::MAX, u64::MAX))
        .collect();
    ledger.on_frame(ms(1), &frame("r0", 1, 2, &huge[..100]), slot_of);
    ledger.on_frame(ms(2), &frame("r0", 1, 3, &[]), slot_of);
    assert_eq!(ledger.load(ms(2), A).others, Reserved::default());
    assert_eq!(ledger.counters().frames_bounded, 1);
}

/// What may happen to a ledger.
#[derive(Clone, Debug)]
enum Step {
    Reserve {
        worker: u32,
        tokens: u32,
    },
    FirstToken {
        nth: usize,
    },
    Release {
        nth: usize,
    },
    ReleaseAgain {
        nth: usize,
    },
    Report {
        worker: u32,
        running: u32,
        waiting: u32,
        age_ms: u64,
    },
    Frame {
        router: u8,
        boot: u64,
        n: u64,
        loads: Vec<(u32, u32, u64)>,
    },
    Wait {
        ms: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..4u32, 0..5_000u32).prop_map(|(worker, tokens)| Step::Reserve { worker, tokens }),
        3 => any::<usize>().prop_map(|nth| Step::FirstToken { nth }),
        3 => any::<usize>().prop_map(|nth| Step::Release { nth }),
        1 => any::<usize>().prop_map(|nth| Step::ReleaseAgain { nth }),
        2 => (0..4u32, 0..20u32, 0..20u32, 0..500u64)
            .prop_map(|(worker, running, waiting, age_ms)| Step::Report { worker, running, waiting, age_ms }),
        2 => (0..3u8, 0..3u64, 0..20u64, prop::collection::vec((0..6u32, 0..9u32, 0..999u64), 0..5))
            .prop_map(|(router, boot, n, loads)| Step::Frame { router, boot, n, loads }),
        1 => (1..1_500u64).prop_map(|ms| Step::Wait { ms }),
    ]
}

/// Boot, number, time of arrival, loads.
type PlainFrame = (u64, u64, u64, Vec<(u32, u32, u64)>);

/// The same figures kept the plain way: a list of requests, and the last accepted frame of each router.
#[derive(Default)]
struct Plain {
    live: Vec<(ReservationId, u32, u32, bool)>,
    dead: Vec<ReservationId>,
    frames: std::collections::BTreeMap<u8, PlainFrame>,
}

impl Plain {
    fn own(&self, worker: u32) -> Reserved {
        let mut sum = Reserved::default();
        for &(_, _, tokens, first) in self.live.iter().filter(|r| r.1 == worker) {
            sum.requests += 1;
            if first {
                sum.decode_tokens += u64::from(tokens) + 10;
            } else {
                sum.waiting += 1;
                sum.prefill_tokens += u64::from(tokens);
                sum.prefill_work += u64::from(tokens);
            }
        }
        sum
    }

    fn others(&self, worker: u32) -> u32 {
        let loads = self.frames.values().flat_map(|f| f.3.iter());
        loads.filter(|l| l.0 == worker).map(|l| l.1).sum()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// INV-13, R1, R2, R8, R9: whatever happens in whatever order, load is the sum of what lives and is never negative.
    #[test]
    fn load_is_always_the_sum_of_live_reservations_and_ends_at_zero(steps in prop::collection::vec(step(), 1..120)) {
        let mut ledger = Ledger::default();
        let mut plain = Plain::default();
        let mut now = 1_000u64;
        for step in steps {
            match step {
                Step::Reserve { worker, tokens } => {
                    let id = ledger.reserve(ms(now), Slot(worker), demand(tokens)).unwrap();
                    plain.live.push((id, worker, tokens, false));
                }
                Step::FirstToken { nth } if !plain.live.is_empty() => {
                    let at = nth % plain.live.len();
                    let expect = !plain.live[at].3;
                    prop_assert_eq!(ledger.first_token(ms(now), plain.live[at].0).is_some(), expect);
                    plain.live[at].3 = true;
                }
                Step::Release { nth } if !plain.live.is_empty() => {
                    let at = nth % plain.live.len();
                    let gone = plain.live.swap_remove(at);
                    prop_assert!(ledger.release(ms(now), gone.0).is_some());
                    plain.dead.push(gone.0);
                }
                Step::ReleaseAgain { nth } if !plain.dead.is_empty() => {
                    prop_assert!(ledger.release(ms(now), plain.dead[nth % plain.dead.len()]).is_none());
                }
                Step::Report { worker, running, waiting, age_ms } => {
                    let report = LoadReport { running, waiting, kv_usage: 0.1, age: ms(age_ms) };
                    ledger.on_report(ms(now), Slot(worker), &report);
                }
                Step::Frame { router, boot, n, loads } => {
                    let outcome = ledger.on_frame(ms(now), &frame(&router.to_string(), boot, n, &loads), slot_of);
                    let newer = plain.frames.get(&router).is_none_or(|f| (boot, n) > (f.0, f.1));
                    prop_assert_eq!(outcome == FrameOutcome::Taken, newer);
                    if newer {
                        plain.frames.insert(router, (boot, n, now, loads));
                    }
                }
                Step::Wait { ms: span } => {
                    now += span;
                    ledger.expire(ms(now));
                    plain.frames.retain(|_, f| now - f.2 <= 1_000);
                }
                Step::FirstToken { .. } | Step::Release { .. } | Step::ReleaseAgain { .. } => {}
            }
            prop_assert_eq!(ledger.live(), plain.live.len());
            for worker in 0..4 {
                let load = ledger.load(ms(now), Slot(worker));
                prop_assert_eq!(load.own, plain.own(worker));
                prop_assert_eq!(load.others.requests, plain.others(worker));
                prop_assert!(load.in_flight() >= load.own.requests + load.others.requests);
            }
        }
        for (id, ..) in plain.live.drain(..) {
            ledger.release(ms(now), id);
        }
        ledger.expire(ms(now + 10_000));
        for worker in 0..4 {
            prop_assert_eq!(ledger.load(ms(now + 10_000), Slot(worker)), Load { ..Load::default() });
        }
    }
}
