//! Cairn's index alone, over a long time and at size: memory after many times its contents came and went, and a hundred
//! million memberships in one process.

use std::collections::VecDeque;

use cairn_blocks::{BlockKey, Depth};
use cairn_index::{HolderId, Residency, Stored};
use serde_json::{Value, json};

use crate::allocator::{live, resident};
use crate::clock::CpuClock;
use crate::log::{mix, root};
use crate::measure::trim;

/// Blocks that are held at any time, and that pass through.
const LIVE: u64 = 200_000;
const PASSED: u64 = 20_000_000;
/// Workers that hold them.
const CHURN_WORKERS: u64 = 64;
/// Workers of the large index, its memberships, and how many of a hundred chains have a second holder: 1.3 a block.
const WORKERS: u64 = 1_000;
const MEMBERSHIPS: u64 = 100_000_000;
const SECOND_OF_100: u64 = 30;

/// Length of a chain: 16 to 240 blocks, 128 on average.
fn length(chain: u64) -> u64 {
    16 + mix(chain ^ 0x5bd1) % 225
}

fn keys(chain: u64, out: &mut Vec<BlockKey>) {
    out.clear();
    out.extend((0..length(chain)).map(|block| BlockKey(mix(chain << 20 ^ block ^ 1 << 60))));
}

fn store(residency: &mut Residency, worker: u64, keys: &[BlockKey]) -> u64 {
    match residency.store(HolderId(worker as u32), root(), Depth(0), 0, keys) {
        Stored::Done { new_blocks } => u64::from(new_blocks),
        other => panic!("a chain from its root was refused: {other:?}"),
    }
}

/// Takes a chain away from its tail: the last third block by block, the rest at once.
fn remove(residency: &mut Residency, worker: u64, keys: &[BlockKey]) -> u64 {
    let holder = HolderId(worker as u32);
    let mut gone = 0;
    let (len, rest) = (keys.len() as u32, keys.len() as u32 * 2 / 3);
    for depth in (rest + 1..=len).rev() {
        gone += u64::from(
            residency
                .remove(holder, keys[depth as usize - 1], Depth(depth), 1)
                .blocks,
        );
    }
    gone + u64::from(
        residency
            .remove(holder, keys[rest as usize - 1], Depth(rest), rest)
            .blocks,
    )
}

/// Memory at first, and after a hundred turnovers.
pub fn churn() -> Value {
    trim();
    let (resident_before, live_before) = (resident(), live());
    let mut residency = Residency::new();
    (0..CHURN_WORKERS).for_each(|worker| residency.add_holder(HolderId(worker as u32)));
    let now = |residency: &Residency| {
        trim();
        let bytes = live() - live_before + residency.mapped_bytes() as i64;
        (bytes, resident() - resident_before)
    };
    let mut held: VecDeque<(u64, u64)> = VecDeque::with_capacity(1 << 14);
    let (mut blocks, mut passed, mut spent, mut start) = (0, 0, 0, None);
    let mut buffer = Vec::with_capacity(256);
    let clock = CpuClock::this_thread();
    let mut chain = 0u64;
    while passed < PASSED {
        // Not always the oldest goes: what comes and goes is of mixed age and size.
        while blocks >= LIVE {
            start.get_or_insert_with(|| now(&residency));
            let at = (mix(chain) % 64) as usize % held.len();
            let (old, worker) = held.swap_remove_front(at).expect("something is held");
            keys(old, &mut buffer);
            let from = clock.ns();
            blocks -= remove(&mut residency, worker, &buffer);
            spent += clock.ns() - from;
        }
        keys(chain, &mut buffer);
        let worker = mix(chain ^ 7) % CHURN_WORKERS;
        let from = clock.ns();
        blocks += store(&mut residency, worker, &buffer);
        spent += clock.ns() - from;
        passed += buffer.len() as u64;
        held.push_back((chain, worker));
        chain += 1;
    }
    let (first, last) = (start.unwrap_or_default(), now(&residency));
    json!({
        "live": LIVE,
        "passed": passed,
        "bytes_at_first": first.0,
        "bytes_at_last": last.0,
        "rss_at_first": first.1,
        "rss_at_last": last.1,
        "rss_ratio": last.1 as f64 / first.1.max(1) as f64,
        "cpu_ns_per_change_with_clock": spent as f64 / (2 * passed - LIVE) as f64,
    })
}

/// A hundred million memberships: memory once they are there, at its peak, and after a tenth of them was exchanged.
pub fn huge() -> Value {
    trim();
    let (resident_before, live_before) = (resident(), live());
    let mut residency = Residency::new();
    (0..WORKERS).for_each(|worker| residency.add_holder(HolderId(worker as u32)));
    let mut buffer = Vec::with_capacity(256);
    let clock = CpuClock::this_thread();
    let began = clock.ns();
    let holders = |chain: u64| {
        let first = mix(chain ^ 3) % WORKERS;
        let more = u64::from(mix(chain ^ 5) % 100 < SECOND_OF_100);
        (0..=more).map(move |i| (first + 1 + i * 7) % WORKERS)
    };
    let (mut memberships, mut chain, mut peak) = (0, 0u64, 0);
    while memberships < MEMBERSHIPS {
        keys(chain, &mut buffer);
        for worker in holders(chain) {
            memberships += store(&mut residency, worker, &buffer);
        }
        chain += 1;
        if chain.is_multiple_of(1 << 12) {
            peak = peak.max(resident() - resident_before);
        }
    }
    let filled = clock.ns() - began;
    let chains = chain;
    let full = resident() - resident_before;
    for old in 0..chains / 10 {
        keys(old, &mut buffer);
        for worker in holders(old) {
            memberships -= remove(&mut residency, worker, &buffer);
        }
        keys(chains + old, &mut buffer);
        for worker in holders(chains + old) {
            memberships += store(&mut residency, worker, &buffer);
        }
        if old.is_multiple_of(1 << 12) {
            peak = peak.max(resident() - resident_before);
        }
    }
    trim();
    let bytes = live() - live_before + residency.mapped_bytes() as i64;
    let steady = resident() - resident_before;
    json!({
        "workers": WORKERS,
        "memberships": memberships,
        "blocks": residency.known_blocks(),
        "runs": residency.run_count(),
        "cpu_s_to_fill": filled as f64 / 1e9,
        "bytes": bytes,
        "rss_when_full": full,
        "rss_steady": steady,
        "rss_peak": peak.max(steady),
        "gib_steady": steady as f64 / f64::from(1 << 30),
    })
}
