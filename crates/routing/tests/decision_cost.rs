//! What a decision costs: `choose` over 64 workers, reservation included.
#![allow(clippy::unwrap_used, missing_docs, clippy::print_stdout)]

#[path = "support/fleet.rs"]
mod fleet;

use std::time::Instant;

use cairn_index::{Overlap, WorkerId, WorkerOverlap};
use cairn_routing::{Ending, Micros, RequestFacts};
use fleet::{core, keys, request, workers};

fn measure(n: u32) -> (f64, f64) {
    let mut routing = core(1, &workers(n));
    let prompts: Vec<_> = (0..64).map(|i| keys(1 + i % 16, 500)).collect();
    let overlaps: Vec<_> = (0..n)
        .map(|w| WorkerOverlap {
            worker: WorkerId(w),
            overlap: Overlap {
                gpu: w % 7 * 160,
                cpu: 0,
                shared: 0,
            },
        })
        .collect();
    let mut held = std::collections::VecDeque::new();
    let mut spans = Vec::new();
    for i in 0..4_000u64 {
        let now = Micros(i * 2_000);
        let facts = RequestFacts {
            keys: &prompts[i as usize % 64],
            ..request(8_010)
        };
        let from = Instant::now();
        let choice = routing.decide(now, &facts, &overlaps).unwrap();
        let ticket = routing.reserve(now, &choice, &facts).unwrap();
        spans.push(from.elapsed().as_nanos() as f64 / 1_000.0);
        held.push_back(ticket);
        if held.len() > 128 {
            let mut ticket = held.pop_front().unwrap();
            routing.first_token(now, &mut ticket);
            routing.finish(now, ticket, Ending::Done { cached_tokens: Some(0) }, None);
        }
    }
    spans.sort_by(f64::total_cmp);
    (spans[spans.len() / 2], spans[spans.len() * 99 / 100])
}

#[test]
fn a_decision_over_64_workers_takes_microseconds() {
    for n in [8, 64, 1_000] {
        let (p50, p99) = measure(n);
        println!("{n} workers: p50 {p50:.1} us, p99 {p99:.1} us");
        // Generous: the machine may be busy; the figure is printed for those who look.
        assert!(n > 64 || p50 < 100.0, "{p50} us");
    }
}
