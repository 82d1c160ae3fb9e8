//! Measures the residency alone: nanoseconds a block change, match latency, bytes a membership, wrong answers.
//!
//! `cargo run --release -p cairn-index --example ingest_bench -- [--workers N] [--capacity N] [--trace NAME] [--random]
//! [--check]`. Traces come from the folder that `CAIRN_DATA` names (Mooncake-shaped JSON lines, gzipped); without it a
//! synthetic conversation trace is used. Every worker is an LRU cache of 16-token blocks, evicted tail first; `--random`
//! evicts random blocks instead; `--check` compares every match with the plain model, which takes minutes.

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use cairn_blocks::{BlockKey, BlockSize, Depth};
use cairn_index::codec::{decode_command, decode_snapshot, encode_command, encode_snapshot};
use cairn_index::oracle::Oracle;
use cairn_index::{
    Batch, Command, HolderId, HolderSpec, Incarnation, IndexState, LogIndex, Op, PoolSpec, Reach, Removed, Residency,
    Role, Seq, SourceId, SourceSpec, Stored, Tier, WorkerSpec,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

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

enum Event {
    Store {
        holder: u32,
        anchor: BlockKey,
        depth: u32,
        keys: Vec<BlockKey>,
    },
    Remove {
        holder: u32,
        key: BlockKey,
        depth: u32,
        count: u32,
    },
    /// A request asks for its prefix.
    Match { keys: Vec<BlockKey> },
}

struct Request {
    prompt: Vec<BlockKey>,
    answer: u32,
}

const ROOT: BlockKey = BlockKey(0xa5a5);
const BLOCK: usize = 16;

fn key(parent: BlockKey, word: u64) -> BlockKey {
    let mut z = parent.0.rotate_left(23) ^ word.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    BlockKey(z ^ (z >> 31))
}

/// Requests of a Mooncake-shaped trace, in 16-token blocks.
fn trace(path: &std::path::Path, limit: usize, per_id: usize) -> Vec<Request> {
    let file = std::fs::File::open(path).unwrap();
    let lines = BufReader::new(flate2::read::GzDecoder::new(file)).lines();
    lines
        .take(limit)
        .map(|line| {
            let row: serde_json::Value = serde_json::from_str(&line.unwrap()).unwrap();
            let blocks = row["input_length"].as_u64().unwrap() as usize / BLOCK;
            let mut parent = ROOT;
            let ids = row["hash_ids"].as_array().unwrap();
            let words = ids.iter().flat_map(|id| {
                let id = id.as_u64().unwrap();
                (0..per_id as u64).map(move |sub| id * per_id as u64 + sub)
            });
            let prompt = words
                .take(blocks)
                .map(|word| {
                    parent = key(parent, word);
                    parent
                })
                .collect();
            Request {
                prompt,
                answer: row["output_length"].as_u64().unwrap() as u32 / BLOCK as u32,
            }
        })
        .collect()
}

/// Conversations below a few system prompts.
fn synthetic(rng: &mut SmallRng, count: usize) -> Vec<Request> {
    let mut open: Vec<Vec<BlockKey>> = Vec::new();
    (0..count)
        .map(|n| {
            let fresh = open.len() < 50 || rng.random_bool(0.4);
            let mut prompt = if fresh {
                let mut parent = key(ROOT, rng.random_range(0..8));
                (0..30)
                    .map(|i| {
                        parent = key(parent, i);
                        parent
                    })
                    .collect()
            } else {
                let at = rng.random_range(0..open.len());
                open.swap_remove(at)
            };
            let mut parent = *prompt.last().unwrap();
            for i in 0..rng.random_range(40..900) {
                parent = key(parent, (n * 1000 + i) as u64);
                prompt.push(parent);
            }
            if prompt.len() < 6_000 {
                open.push(prompt.clone());
            }
            Request {
                prompt,
                answer: rng.random_range(2..50),
            }
        })
        .collect()
}

/// One worker's cache.
#[derive(Default)]
struct Cache {
    /// Last use and depth of each block.
    blocks: HashMap<BlockKey, (u64, u32, BlockKey)>,
    by_use: BTreeMap<u64, BlockKey>,
    keys: Vec<BlockKey>,
}

struct Simulation {
    caches: Vec<Cache>,
    capacity: usize,
    random: bool,
    clock: u64,
    events: Vec<Event>,
    changes: u64,
}

impl Simulation {
    fn request(&mut self, rng: &mut SmallRng, n: usize, request: &Request) {
        let mut chain = request.prompt.clone();
        if chain.is_empty() {
            return;
        }
        self.events.push(Event::Match { keys: chain.clone() });
        // Most requests go where their prefix is, some elsewhere, as load balancing does.
        let hit = |cache: &Cache| chain.iter().take_while(|k| cache.blocks.contains_key(k)).count();
        let worker = if rng.random_bool(0.7) {
            let start = rng.random_range(0..self.caches.len());
            let order = (0..self.caches.len()).map(|i| (i + start) % self.caches.len());
            order.max_by_key(|&w| hit(&self.caches[w])).unwrap()
        } else {
            rng.random_range(0..self.caches.len())
        };
        let held = hit(&self.caches[worker]);
        let prompt = chain.len();
        let mut parent = *chain.last().unwrap();
        for i in 0..request.answer {
            parent = key(parent, 1 << 40 | (n as u64) << 16 | u64::from(i));
            chain.push(parent);
        }
        chain.truncate(self.capacity);
        let prompt = prompt.min(chain.len());
        // The prompt in chunks of 8,192 tokens, then the answer block by block.
        let mut at = held;
        while at < chain.len() {
            let end = if at < prompt {
                (at + 8192 / BLOCK).min(prompt)
            } else {
                at + 1
            };
            let missing = chain[at..end]
                .iter()
                .filter(|k| !self.caches[worker].blocks.contains_key(k))
                .count();
            self.make_room(rng, worker, missing, &chain);
            self.store_missing(worker, &chain, at, end);
            at = end;
        }
        // The tail is the first to go.
        let cache = &mut self.caches[worker];
        for &key in chain.iter().rev() {
            self.clock += 1;
            if let Some(entry) = cache.blocks.get_mut(&key) {
                cache.by_use.remove(&entry.0);
                entry.0 = self.clock;
                cache.by_use.insert(self.clock, key);
            }
        }
    }

    /// Stores the stretches of `chain[start..end]` that the cache lacks.
    fn store_missing(&mut self, worker: usize, chain: &[BlockKey], start: usize, end: usize) {
        let mut at = start;
        while at < end {
            let cache = &mut self.caches[worker];
            let to = (at..end).find(|&i| cache.blocks.contains_key(&chain[i])).unwrap_or(end);
            if to == at {
                at += 1;
                continue;
            }
            let anchor = if at == 0 { ROOT } else { chain[at - 1] };
            let keys = chain[at..to].to_vec();
            self.changes += keys.len() as u64;
            self.events.push(Event::Store {
                holder: worker as u32,
                anchor,
                depth: at as u32,
                keys,
            });
            for depth in at..to {
                let parent = if depth == 0 { ROOT } else { chain[depth - 1] };
                // In use: not in `by_use` until the request ends.
                cache.blocks.insert(chain[depth], (u64::MAX, depth as u32 + 1, parent));
                if self.random {
                    cache.keys.push(chain[depth]);
                }
            }
            at = to;
        }
    }

    fn make_room(&mut self, rng: &mut SmallRng, worker: usize, blocks: usize, keep: &[BlockKey]) {
        let cache = &mut self.caches[worker];
        let mut pending: Option<(BlockKey, u32, u32, BlockKey)> = None;
        let kept: std::collections::HashSet<BlockKey> = if self.random {
            keep.iter().copied().collect()
        } else {
            Default::default()
        };
        if !self.random {
            // What the request uses isn't evicted.
            for key in keep {
                if let Some(entry) = cache.blocks.get_mut(key)
                    && entry.0 != u64::MAX
                {
                    cache.by_use.remove(&entry.0);
                    entry.0 = u64::MAX;
                }
            }
        }
        while cache.blocks.len() + blocks > self.capacity {
            let key = if self.random {
                let at = rng.random_range(0..cache.keys.len());
                if kept.contains(&cache.keys[at]) {
                    continue;
                }
                cache.keys.swap_remove(at)
            } else {
                let Some((_, key)) = cache.by_use.pop_first() else {
                    break;
                };
                key
            };
            let (used, depth, parent) = cache.blocks.remove(&key).unwrap();
            cache.by_use.remove(&used);
            self.changes += 1;
            match &mut pending {
                Some((_, _, count, next)) if *next == key => {
                    *count += 1;
                    *next = parent;
                }
                _ => {
                    if let Some((key, depth, count, _)) = pending.replace((key, depth, 1, parent)) {
                        self.events.push(Event::Remove {
                            holder: worker as u32,
                            key,
                            depth,
                            count,
                        });
                    }
                }
            }
        }
        if let Some((key, depth, count, _)) = pending {
            self.events.push(Event::Remove {
                holder: worker as u32,
                key,
                depth,
                count,
            });
        }
    }
}

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
fn cpu_ns() -> u64 {
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
    let mut simulation = Simulation {
        caches: (0..workers).map(|_| Cache::default()).collect(),
        capacity,
        random: flag("--random"),
        clock: 0,
        events: Vec::new(),
        changes: 0,
    };
    for (n, request) in requests.iter().enumerate() {
        simulation.request(&mut rng, n, request);
    }
    let memberships: usize = simulation.caches.iter().map(|c| c.blocks.len()).sum();
    simulation.caches.clear();
    let Simulation { events, changes, .. } = simulation;
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
        snapshot(&events, workers);
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

/// Time and size of a snapshot of the same events, applied as batches.
fn snapshot(events: &[Event], workers: usize) {
    let mut state = IndexState::new();
    let mut commands = Vec::new();
    for n in 0..workers as u32 {
        commands.push(Command::RegisterSource {
            spec: spec(n),
            resume: None,
        });
    }
    let mut seqs = vec![0u64; workers];
    let mut batches = Vec::new();
    for event in events {
        let (holder, op) = match event {
            Event::Store {
                holder,
                anchor,
                depth,
                keys,
            } => {
                let (anchor, anchor_depth) = (*anchor, Depth(*depth));
                (
                    holder,
                    Op::Store {
                        holder: HolderId(*holder),
                        anchor,
                        anchor_depth,
                        skip: 0,
                        keys: keys.clone(),
                    },
                )
            }
            Event::Remove {
                holder,
                key,
                depth,
                count,
            } => (
                holder,
                Op::Remove {
                    holder: HolderId(*holder),
                    key: *key,
                    depth: Depth(*depth),
                    count: *count,
                },
            ),
            Event::Match { .. } => continue,
        };
        seqs[*holder as usize] += 1;
        let incarnation = Incarnation(u64::from(*holder) + 1);
        let (source, seq) = (SourceId(*holder), Seq(seqs[*holder as usize]));
        batches.push(Batch {
            source,
            incarnation,
            seq,
            ops: vec![op],
        });
        if batches.len() == 500 {
            commands.push(Command::Batches(std::mem::take(&mut batches)));
        }
    }
    commands.push(Command::Batches(batches));
    let encoded: Vec<Vec<u8>> = commands.iter().map(encode_command).collect();
    let bytes: usize = encoded.iter().map(Vec::len).sum();
    drop(commands);
    let start = cpu_ns();
    for (at, bytes) in (1..).zip(&encoded) {
        state.apply(LogIndex(at), &decode_command(bytes).unwrap());
    }
    let spent = cpu_ns() - start;
    let counters = state.counters();
    let changes = counters.stored_blocks + counters.removed_blocks;
    println!(
        "as commands: {:.2} B and {:.1} ns a block change, decoded and applied; {counters:?}",
        bytes as f64 / changes as f64,
        spent as f64 / changes as f64
    );
    let start = cpu_ns();
    let mut bytes = Vec::new();
    encode_snapshot(&state, &mut bytes).unwrap();
    let written = cpu_ns() - start;
    let start = cpu_ns();
    let read = decode_snapshot(&bytes[..]).unwrap();
    println!(
        "snapshot: {:.1} MB, written in {:.1} ms, read in {:.1} ms; digest in {:.1} us",
        bytes.len() as f64 / 1e6,
        written as f64 / 1e6,
        (cpu_ns() - start) as f64 / 1e6,
        {
            let start = cpu_ns();
            assert_eq!(read.digest(), state.digest());
            (cpu_ns() - start) as f64 / 2e3
        }
    );
}

fn spec(n: u32) -> SourceSpec {
    SourceSpec {
        name: format!("engine-{n}"),
        agent: "bench".into(),
        pool: PoolSpec {
            name: "bench".into(),
            models: vec!["bench".into()],
            block_size: BlockSize::DEFAULT,
            max_model_len: None,
            model_root: None,
        },
        worker: WorkerSpec {
            engine_url: format!("http://engine-{n}"),
            rank: 0,
            ranks: 1,
            host: String::new(),
            role: Role::Both,
            engine_kind: "vllm".into(),
            engine_block_size: 16,
            capacity_blocks: 0,
            max_num_seqs: 0,
            max_batched_tokens: 0,
            adapters: Vec::new(),
            bootstrap: None,
        },
        holders: vec![HolderSpec {
            tier: Tier::Gpu,
            fetch_unit: 16,
            reach: Reach::Worker,
        }],
    }
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
