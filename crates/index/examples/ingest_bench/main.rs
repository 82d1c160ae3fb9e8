//! Measures the residency alone: nanoseconds a block change, match latency, bytes a membership, wrong answers.
//!
//! `cargo run --release -p cairn-index --example ingest_bench -- [--workers N] [--capacity N] [--trace NAME] [--random]
//! [--check]`. Traces come from the folder that `CAIRN_DATA` names (Mooncake-shaped JSON lines, gzipped); without it a
//! synthetic conversation trace is used. Every worker is an LRU cache of 16-token blocks, evicted tail first; `--random`
//! evicts random blocks instead; `--check` compares every match with the plain model, which takes minutes.

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

mod commands;
mod workload;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use cairn_blocks::{BlockKey, Depth};
use cairn_index::oracle::Oracle;
use cairn_index::{HolderId, Removed, Residency, Stored};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use workload::{Event, Simulation, synthetic, trace};

/// Bytes that are allocated now.
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[expect(unsafe_code, reason = "a global allocator can't be written without")]
// SAFETY: all calls go to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn apply(residency: &mut Residency, event: &Event) {
    match event {
        Event::Store {
            holder,
            anchor,
            depth,
            keys,
        } => {
            let stored = residency.store(HolderId(*holder), *anchor, Depth(*depth), 0, keys);
            assert!(
                matches!(stored, Stored::Done { new_blocks } if new_blocks as usize == keys.len()),
                "{stored:?}"
            );
        }
        Event::Remove {
            holder,
            key,
            depth,
            count,
        } => {
            let removed = residency.remove(HolderId(*holder), *key, Depth(*depth), *count);
            assert_eq!(removed, Removed { blocks: *count });
        }
        Event::Match { .. } => {}
    }
}

/// CPU time of this thread in nanoseconds.
pub(crate) fn cpu_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split(' ').next().unwrap().parse().unwrap()
}

fn option(name: &str, default: usize) -> usize {
    let args: Vec<String> = std::env::args().collect();
    args.iter()
        .position(|a| a == name)
        .map_or(default, |i| args[i + 1].parse().unwrap())
}

fn flag(name: &str) -> bool {
    std::env::args().any(|a| a == name)
}

fn main() {
    let (workers, capacity) = (option("--workers", 64), option("--capacity", 16_384));
    let mut rng = SmallRng::seed_from_u64(7);
    let name = std::env::args()
        .skip_while(|a| a != "--trace")
        .nth(1)
        .unwrap_or("mooncake_conversation".into());
    let requests = match std::env::var("CAIRN_DATA") {
        Ok(folder) => {
            let per_id = if name.contains("b16") { 1 } else { 32 };
            trace(
                &std::path::Path::new(&folder).join(format!("{name}.jsonl.gz")),
                option("--rows", usize::MAX),
                per_id,
            )
        }
        Err(_) => synthetic(&mut rng, option("--rows", 12_000)),
    };
    let mut simulation = Simulation::new(workers, capacity, flag("--random"));
    for (n, request) in requests.iter().enumerate() {
        simulation.request(&mut rng, n, request);
    }
    let memberships = simulation.memberships();
    let (events, changes) = simulation.finish();
    let singles = events
        .iter()
        .filter(|e| matches!(e, Event::Store { keys, .. } if keys.len() == 1))
        .count();
    let stores = events.iter().filter(|e| matches!(e, Event::Store { .. })).count();
    let removals = events.iter().filter(|e| matches!(e, Event::Remove { .. })).count();
    println!(
        "{} requests, {changes} block changes in {stores} stores ({singles} of one block) and {removals} removals, \
         {memberships} memberships at the end",
        requests.len()
    );

    for round in 0..option("--rounds", 3) {
        let before = ALLOCATED.load(Ordering::Relaxed);
        let mut residency = Residency::new();
        (0..workers as u32).for_each(|h| residency.add_holder(HolderId(h)));
        let start = cpu_ns();
        events.iter().for_each(|event| apply(&mut residency, event));
        let spent = cpu_ns() - start;
        let heap = ALLOCATED.load(Ordering::Relaxed) - before;
        println!(
            "round {round}: {:.1} ns a block change; {} blocks, {} runs, {} shares; {:.2} B a membership ({:.2} on the heap)",
            spent as f64 / changes as f64,
            residency.known_blocks(),
            residency.run_count(),
            residency.share_count(),
            residency.memory_bytes() as f64 / memberships as f64,
            heap as f64 / memberships as f64,
        );
        if round == 0 {
            matches(&mut residency, &events, workers);
        }
    }
    if flag("--snapshot") {
        commands::snapshot(&events, workers);
    }
    if flag("--check") {
        check(&events, workers);
    }
}

fn matches(residency: &mut Residency, events: &[Event], workers: usize) {
    let queries: Vec<&Vec<BlockKey>> = events
        .iter()
        .rev()
        .filter_map(|e| {
            if let Event::Match { keys } = e {
                Some(keys)
            } else {
                None
            }
        })
        .collect();
    let mut out = Vec::with_capacity(workers);
    let mut times = Vec::new();
    let mut overhead = u64::MAX;
    for _ in 0..1000 {
        let start = Instant::now();
        overhead = overhead.min(start.elapsed().as_nanos() as u64);
    }
    let (mut blocks, mut deepest) = (0u64, 0u64);
    for _ in 1..option("--match-rounds", 1) {
        for keys in queries.iter().take(4_000) {
            residency.match_prefix(keys, &mut out);
        }
    }
    for keys in queries.iter().take(4_000) {
        // Warm, as the router has just computed them.
        std::hint::black_box(keys.iter().fold(0, |sum, k| sum ^ k.0));
        let start = Instant::now();
        residency.match_prefix(keys, &mut out);
        times.push((start.elapsed().as_nanos() as u64).saturating_sub(overhead));
        blocks += keys.len() as u64;
        deepest += u64::from(out.iter().copied().max().unwrap_or(0));
    }
    times.sort_unstable();
    let at = |q: f64| times[((times.len() - 1) as f64 * q) as usize];
    println!(
        "match of {} blocks on average ({} found): p50 {} ns, p90 {} ns, p99 {} ns (clock {overhead} ns taken off)",
        blocks / times.len() as u64,
        deepest / times.len() as u64,
        at(0.5),
        at(0.9),
        at(0.99)
    );
}

fn check(events: &[Event], workers: usize) {
    let mut residency = Residency::new();
    let mut model = Oracle::new();
    for holder in (0..workers as u32).map(HolderId) {
        residency.add_holder(holder);
        model.add_holder(holder);
    }
    let (mut real, mut expected, mut wrong, mut compared) = (Vec::new(), Vec::new(), 0, 0);
    for event in events {
        match event {
            Event::Store {
                holder,
                anchor,
                depth,
                keys,
            } => {
                model.store(HolderId(*holder), *anchor, Depth(*depth), 0, keys);
            }
            Event::Remove {
                holder,
                key,
                depth,
                count,
            } => {
                model.remove(HolderId(*holder), *key, Depth(*depth), *count);
            }
            Event::Match { keys } => {
                residency.match_prefix(keys, &mut real);
                model.match_prefix(keys, &mut expected);
                compared += 1;
                wrong += usize::from(real != expected);
            }
        }
        apply(&mut residency, event);
    }
    println!(
        "{wrong} of {compared} matches wrong; known blocks equal: {}",
        residency.known_blocks() == model.known_blocks()
    );
}
