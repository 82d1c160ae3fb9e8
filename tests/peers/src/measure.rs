//! The two passes over a log: how fast an index takes it and what it weighs, and how fast and right it answers.

use std::time::Instant;

use serde_json::{Value, json};

use crate::allocator::{live, resident};
use crate::clock::{CpuClock, make_cold, make_warm, wall_overhead_ns};
use crate::contender::Contender;
use crate::log::{Event, Log, checksum};

/// Events between two readings of the CPU clock.
const BATCH: usize = 1_024;
/// Queries that are asked in a row for the CPU time of one.
const IN_A_ROW: usize = 1_000;

/// Ingests the whole log.
pub fn ingest<C: Contender>(log: &Log) -> Value {
    trim();
    let (live_before, resident_before) = (live(), resident());
    let mut index = C::new(log);
    let mut spent = 0;
    for events in log.events.chunks(BATCH) {
        let mut batch = index.prepare(log, events);
        let clock = index.clock();
        let start = clock.ns();
        index.ingest(&mut batch);
        spent += clock.ns() - start;
    }
    let bytes = live() - live_before + index.mapped_bytes() as i64;
    trim();
    let rss = resident() - resident_before;
    json!({
        "ingest_cpu_ns_per_block": spent as f64 / log.changes as f64,
        "bytes_per_membership": bytes as f64 / log.memberships as f64,
        "rss_bytes": rss.max(0),
        "refused": index.refused(),
    })
}

/// Gives freed memory back, so that what counts as resident is what the index needs.
pub fn trim() {
    // SAFETY: only frees what nobody uses.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Both passes in one, for indexes that aren't close to the best: their ingest is timed between the answers.
pub fn together<C: Contender>(log: &Log) -> Value {
    play::<C>(log, true)
}

/// Plays the log and compares every answer; those of its second half, when caches are full, are timed.
pub fn answers<C: Contender>(log: &Log) -> Value {
    play::<C>(log, false)
}

fn play<C: Contender>(log: &Log, with_ingest: bool) -> Value {
    let overhead = wall_overhead_ns();
    trim();
    let (live_before, resident_before) = (live(), resident());
    let mut spent = 0;
    let mut index = C::new(log);
    let (mut warm, mut cold) = (Vec::new(), Vec::new());
    let (mut wrong, mut matches, mut best_sum, mut pending) = (0u64, 0u64, 0u64, 0);
    let mut answer = Vec::new();
    for (at, event) in log.events.iter().enumerate() {
        let Event::Match { blocks, right, best } = event else {
            continue;
        };
        if pending < at {
            let mut batch = index.prepare(log, &log.events[pending..at]);
            let clock = index.clock();
            let start = clock.ns();
            index.ingest(&mut batch);
            spent += clock.ns() - start;
        }
        pending = at + 1;
        let mut query = index.query(log, log.span(*blocks));
        let timed = at > log.events.len() / 2;
        let is_cold = timed && matches % 2 == 1 && make_cold(C::keys(&query));
        if !is_cold {
            make_warm(C::keys(&query));
        }
        let start = Instant::now();
        index.find(&mut query);
        let took = (start.elapsed().as_nanos() as u64).saturating_sub(overhead);
        if timed {
            if is_cold { &mut cold } else { &mut warm }.push(took);
        }
        answer.clear();
        index.answer(&mut answer);
        wrong += u64::from(checksum(answer.iter().copied()) != *right);
        best_sum += u64::from(*best);
        matches += 1;
    }
    let bytes = live() - live_before + index.mapped_bytes() as i64;
    trim();
    let rss = resident() - resident_before;
    let mut figures = json!({
        "match_p50_ns": quantile(&mut warm, 0.5),
        "match_p99_ns": quantile(&mut warm, 0.99),
        "match_cold_p50_ns": quantile(&mut cold, 0.5),
        "match_cold_p99_ns": quantile(&mut cold, 0.99),
        "match_cpu_ns": in_a_row(&mut index, log),
        "overlap_blocks_mean": best_sum as f64 / matches.max(1) as f64,
        "wrong": wrong,
        "matches": matches,
    });
    if with_ingest {
        figures["ingest_cpu_ns_per_block"] = json!(spent as f64 / log.changes as f64);
        figures["bytes_per_membership"] = json!(bytes as f64 / log.memberships as f64);
        figures["rss_bytes"] = json!(rss.max(0));
        figures["refused"] = json!(index.refused());
    }
    figures
}

/// CPU nanoseconds of a match when the last queries of the log are asked one after the other.
fn in_a_row<C: Contender>(index: &mut C, log: &Log) -> f64 {
    let last = log.events.iter().rev().filter_map(|event| match event {
        Event::Match { blocks, .. } => Some(*blocks),
        Event::Store { .. } | Event::Remove { .. } => None,
    });
    let mut queries: Vec<C::Query> = last
        .take(IN_A_ROW)
        .map(|span| index.query(log, log.span(span)))
        .collect();
    let clock = CpuClock::this_thread();
    let start = clock.ns();
    for query in &mut queries {
        index.find(query);
    }
    (clock.ns() - start) as f64 / queries.len().max(1) as f64
}

fn quantile(times: &mut [u64], q: f64) -> Option<u64> {
    times.sort_unstable();
    let last = times.len().checked_sub(1)?;
    Some(times[(last as f64 * q) as usize])
}

/// What it costs to derive names from tokens: Cairn's keys, and the peers' content hashes.
pub fn derivation(log: &Log) -> Value {
    use cairn_blocks::next_key;
    let prompt: Vec<[u32; crate::log::BLOCK_TOKENS]> = log
        .blocks
        .word
        .iter()
        .take(4_096)
        .map(|word| crate::log::tokens(*word))
        .collect();
    let clock = CpuClock::this_thread();
    let per_block = |run: &mut dyn FnMut()| {
        let least = (0..15).map(|_| {
            let start = clock.ns();
            run();
            clock.ns() - start
        });
        least.min().unwrap_or(0) as f64 / prompt.len().max(1) as f64
    };
    let keys = per_block(&mut || {
        let last = prompt
            .iter()
            .fold(crate::log::root(), |above, tokens| next_key(above, tokens, &[]));
        std::hint::black_box(last);
    });
    let contents = per_block(&mut || {
        let sum = prompt
            .iter()
            .fold(0, |sum, tokens| sum ^ kv_index::compute_content_hash(tokens).0);
        std::hint::black_box(sum);
    });
    json!({ "cairn_key_ns_per_block": keys, "content_hash_ns_per_block": contents })
}
