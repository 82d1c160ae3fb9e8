//! Copies of shared starts: made when waits have paid for them, on idle workers, and again from the record.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/fleet.rs"]
mod fleet;

use cairn_blocks::BlockKey;
use cairn_index::{Role, WorkerId};
use cairn_routing::{Ending, Micros, RequestFacts, Reuse, Routing, Ticket, WorkerFacts};
use fleet::{core, keys, request, whole, workers};

const START_BLOCKS: u64 = 80;
const PROMPT: u32 = 1_320;

/// A prompt of 1,280 shared tokens and a tail of its own.
fn prompt(own: u64) -> Vec<BlockKey> {
    let mut all = keys(7, START_BLOCKS);
    all.extend(keys(own + 1_000, 2));
    all
}

/// Sends requests of one start, `gap` apart, that worker 0 alone holds at first; a worker that computes it holds it then.
fn waits(facts: &[WorkerFacts], gap: Micros, requests: u64) -> (Vec<(WorkerId, u64)>, Routing) {
    let mut routing = core(1, facts);
    let mut holders = vec![WorkerId(0)];
    let mut seen = Vec::new();
    let mut running: Vec<(Micros, Ticket)> = Vec::new();
    let mut free = [Micros(0); 8];
    for i in 0..requests {
        let now = Micros(1_000_000 + i * gap.0);
        while let Some(at) = running.iter().position(|(end, _)| *end <= now) {
            let (end, mut ticket) = running.remove(at);
            routing.first_token(end, &mut ticket);
            routing.finish(end, ticket, Ending::Done { cached_tokens: None }, None);
        }
        let prompt = prompt(i);
        let facts = RequestFacts {
            keys: &prompt,
            ..request(PROMPT)
        };
        let held = holders.clone();
        let reuse = |w: WorkerId| Reuse {
            gpu: if held.contains(&w) { 1_280 } else { 0 },
            ..Reuse::default()
        };
        let choice = routing.decide(now, &facts, &reuse).unwrap();
        routing.record(now, &choice, &facts).verify().unwrap();
        let ticket = routing.reserve(now, &choice, &facts).unwrap();
        let worker = whole(&choice);
        let end = free[worker.0 as usize].max(now).plus(Micros(choice.terms.prefill_us));
        free[worker.0 as usize] = end;
        if !holders.contains(&worker) {
            holders.push(worker);
        }
        running.push((end, ticket));
        running.sort_by_key(|(end, _)| *end);
        seen.push((worker, choice.terms.paid_us));
    }
    (seen, routing)
}

#[test]
fn a_start_is_copied_to_an_idle_worker_once_waits_have_paid_for_it() {
    // 22 ms each and one every 20 ms: each waits a little longer than the one before.
    let (seen, _) = waits(&workers(2), Micros::from_ms(20), 60);
    let first = seen.iter().position(|(w, _)| w.0 == 1).unwrap();
    assert!((4..40).contains(&first), "{seen:?}");
    assert!(seen[first].1 > 0, "waits paid for it: {seen:?}");
    let paid = seen.iter().filter(|(_, paid)| *paid > 0).count();
    assert_eq!(paid, 1, "both have it now: {seen:?}");
}

#[test]
fn nobody_who_waits_no_longer_than_elsewhere_pays_for_copies() {
    let (seen, _) = waits(&workers(4), Micros::from_ms(100), 200);
    assert!(seen.iter().all(|(w, paid)| w.0 == 0 && *paid == 0), "{seen:?}");
}

#[test]
fn a_start_comes_to_all_workers() {
    let (seen, _) = waits(&workers(4), Micros::from_ms(6), 300);
    let copies: Vec<usize> = (1..4)
        .map(|w| seen.iter().position(|(worker, _)| worker.0 == w).unwrap())
        .collect();
    assert!(copies.iter().max().unwrap() < &150, "{copies:?}");
}

#[test]
fn workers_for_one_leg_of_a_split_are_sent_no_copies() {
    let mut facts = workers(2);
    facts[1].role = Role::Decode;
    let (seen, _) = waits(&facts, Micros::from_ms(20), 60);
    assert!(seen.iter().all(|(_, paid)| *paid == 0), "{seen:?}");
}
