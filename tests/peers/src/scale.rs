//! Cairn's index alone at a thousand workers: long prompts, misses beside a digest of first keys, readers beside the writer.

use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bloomfilter::Bloom;
use cairn_blocks::{BlockKey, Depth};
use cairn_index::{HolderId, Residency, Stored};
use serde_json::{Value, json};

use crate::clock::{CpuClock, make_warm};
use crate::log::{mix, root};

const WORKERS: u32 = 1_000;
/// Prompts of 128,000 tokens.
const LONG_BLOCKS: u64 = 8_000;
/// Chains that only one worker holds, for each worker, and their length.
const OWN: (u64, u64) = (24, 128);
/// False answers that a digest would be made for.
const FALSE_RATE: f64 = 0.01;
/// How long readers and writer run.
const TOGETHER: Duration = Duration::from_millis(400);
/// Groups of workers, each with a Raft log and an index of its own, that one router follows.
const GROUPS: usize = 10;
/// Changes that are applied to them.
const SPREAD_CHANGES: u64 = 2_000_000;
/// Rounds of readers beside each kind of third thread: on two cores it is chance who shares a core with whom.
const ROUNDS: usize = 9;

fn key(chain: u64, block: u64) -> BlockKey {
    BlockKey(mix(chain << 20 ^ block).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
}

fn chain(chain: u64, blocks: u64) -> Vec<BlockKey> {
    (0..blocks).map(|block| key(chain, block)).collect()
}

fn store(residency: &mut Residency, worker: u32, keys: &[BlockKey]) {
    let stored = residency.store(HolderId(worker), root(), Depth(0), 0, keys);
    assert!(matches!(stored, Stored::Done { .. }), "{stored:?}");
}

/// Measures.
pub fn measure() -> Value {
    let mut residency = Residency::new();
    let long = chain(0, LONG_BLOCKS);
    let mut heads = vec![long[0]];
    for worker in 0..WORKERS {
        residency.add_holder(HolderId(worker));
        // Every worker holds the long prompt up to somewhere else.
        let held = 64 + (mix(u64::from(worker)) % (LONG_BLOCKS - 64)) as usize;
        store(&mut residency, worker, &long[..held]);
        for own in 0..OWN.0 {
            let keys = chain(1 + u64::from(worker) * OWN.0 + own, OWN.1);
            heads.push(keys[0]);
            store(&mut residency, worker, &keys);
        }
    }
    let mut out = Vec::new();
    let mut times: Vec<u64> = (0..400)
        .map(|_| {
            make_warm(&long);
            let start = Instant::now();
            residency.match_prefix(&long, &mut out);
            start.elapsed().as_nanos() as u64
        })
        .collect();
    times.sort_unstable();
    let groups = groups(&residency, &long);
    let [alone, elsewhere, beside] = readers(residency.clone(), &long);
    json!({
        "workers": WORKERS,
        "match_128k_p50_ns": times[times.len() / 2],
        "match_128k_p99_ns": times[times.len() * 99 / 100],
        "miss": misses(&residency, &heads),
        "groups": groups,
        "reads_per_s_alone": alone,
        "reads_per_s_beside_writer_elsewhere": elsewhere,
        "reads_per_s_beside_writer": beside,
    })
}

/// CPU of a question whose first block nobody holds: of the index's answer, and of asking a digest of all first keys.
fn misses(residency: &Residency, heads: &[BlockKey]) -> Value {
    let mut digest = Bloom::new_for_fp_rate_with_seed(heads.len(), FALSE_RATE, &[7; 32]).expect("the rate is sane");
    heads.iter().for_each(|head| digest.set(&head.0));
    assert!(
        heads.iter().all(|head| digest.check(&head.0)),
        "a digest has no false negatives"
    );
    let unknown: Vec<[BlockKey; 2]> = (0..20_000)
        .map(|n| [key(1 << 40 | n, 0), key(1 << 40 | n, 1)])
        .collect();
    let mut out = Vec::new();
    let clock = CpuClock::this_thread();
    let least = |run: &mut dyn FnMut(&[BlockKey; 2])| {
        let rounds = (0..5).map(|_| {
            let start = clock.ns();
            unknown.iter().for_each(&mut *run);
            clock.ns() - start
        });
        rounds.min().unwrap_or(0) as f64 / unknown.len() as f64
    };
    let index = least(&mut |keys| residency.match_prefix(keys, &mut out));
    let mut found = 0u32;
    let asked = least(&mut |keys| found += u32::from(digest.check(&keys[0].0)));
    json!({
        "index_ns": index,
        "digest_ns": asked,
        "digest_bytes": digest.as_slice().len(),
        "false_positives": f64::from(found) / (5.0 * unknown.len() as f64),
    })
}

/// Ten thousand workers in groups, as a router takes them: a question goes to every group's index, a change to one.
fn groups(residency: &Residency, long: &[BlockKey]) -> Value {
    let mut groups = vec![residency.clone(); GROUPS];
    let mut out = Vec::new();
    let mut times: Vec<u64> = (0..400)
        .map(|_| {
            make_warm(long);
            let start = Instant::now();
            groups.iter().for_each(|group| group.match_prefix(long, &mut out));
            start.elapsed().as_nanos() as u64
        })
        .collect();
    times.sort_unstable();
    let clock = CpuClock::this_thread();
    let (mut spent, mut changes, mut number) = (0, 0, 1u64 << 36);
    while changes < SPREAD_CHANGES {
        let keys = chain(number, 125);
        let worker = (mix(number) % u64::from(WORKERS)) as u32;
        let group = &mut groups[(number % GROUPS as u64) as usize];
        let start = clock.ns();
        store(group, worker, &keys);
        let removed = group.remove(HolderId(worker), keys[124], Depth(125), 125);
        spent += clock.ns() - start;
        assert_eq!(removed.blocks, 125, "what was stored goes again");
        changes += 250;
        number += 1;
    }
    json!({
        "groups": GROUPS,
        "workers": GROUPS as u64 * u64::from(WORKERS),
        "match_128k_p50_ns": times[times.len() / 2],
        "match_128k_p99_ns": times[times.len() * 99 / 100],
        "apply_cpu_ns_per_change": spent as f64 / changes as f64,
    })
}

/// What a third thread does beside two readers.
#[derive(Clone, Copy)]
enum Third {
    /// It waits.
    Waits,
    /// It changes another copy: the readers have as much of the processor as beside a writer, and share nothing with it.
    WritesElsewhere,
    /// It changes what they read.
    Writes,
}

/// Reads per second of two threads beside a third one of each kind, in the median of some rounds.
fn readers(residency: Residency, long: &[BlockKey]) -> [f64; 3] {
    let (elsewhere, shared) = (RwLock::new(residency.clone()), RwLock::new(residency));
    let mut written = 1u64 << 32;
    let mut taken = [const { Vec::new() }; 3];
    for _ in 0..ROUNDS {
        for (kind, taken) in [Third::Waits, Third::WritesElsewhere, Third::Writes]
            .into_iter()
            .zip(&mut taken)
        {
            let changed = match kind {
                Third::Waits => None,
                Third::WritesElsewhere => Some(&elsewhere),
                Third::Writes => Some(&shared),
            };
            taken.push(reads_per_s(&shared, changed, long, &mut written));
        }
    }
    taken.map(|mut rounds| {
        rounds.sort_unstable_by(f64::total_cmp);
        rounds[rounds.len() / 2]
    })
}

/// Reads per second of two threads, while short stores are applied to `changed` as soon as its lock is had.
fn reads_per_s(
    shared: &RwLock<Residency>,
    changed: Option<&RwLock<Residency>>,
    long: &[BlockKey],
    written: &mut u64,
) -> f64 {
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut out = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    shared
                        .read()
                        .expect("no thread panics")
                        .match_prefix(&long[..500], &mut out);
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let began = Instant::now();
        while began.elapsed() < TOGETHER {
            if let Some(changed) = changed {
                // 2,500 changes each 5 ms: 500,000 a second.
                let keys: Vec<Vec<BlockKey>> = (0..20).map(|i| chain(*written + i, 125)).collect();
                let mut residency = changed.write().expect("no thread panics");
                keys.iter()
                    .for_each(|keys| store(&mut residency, (*written % 1_000) as u32, keys));
                drop(residency);
                *written += 20;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        stop.store(true, Ordering::Relaxed);
    });
    reads.load(Ordering::Relaxed) as f64 / TOGETHER.as_secs_f64()
}
