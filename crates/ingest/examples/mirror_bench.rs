//! Nanoseconds a block from decoded events to ops, for the mirror alone and with the index applying them, one core.
//!
//! `cargo run --release -p cairn-ingest --example mirror_bench [-- BLOCKS]`

#![allow(clippy::print_stdout, missing_docs)]

use std::hint::black_box;
use std::time::Instant;

use cairn_blocks::{BlockSize, ClusterSeed};
use cairn_index::{
    BatchOutcome, Command, HolderSpec, IndexState, LogIndex, Op, PoolSpec, Reach, RegisterOutcome, Reply, Role,
    SourceSpec, Tier, WorkerSpec,
};
use cairn_ingest::{
    EngineEvent, EngineHash, EventBatch, Millis, Registration, Removed, ReplayEnd, Source, SourceConfig, Stored,
};

const SEED: ClusterSeed = ClusterSeed(1);
/// Blocks in one prompt: 4,096 tokens at 16.
const PROMPT: u64 = 256;

/// How the engine's blocks come.
#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    /// Engine block in tokens.
    size: u32,
    /// Blocks in one event.
    event: u64,
}

fn scramble(n: u64) -> u64 {
    let mut z = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 27)
}

/// Stores in prompts of `PROMPT` blocks; from the time the cache is full, each prompt first evicts an old one.
fn batches(load: Load, blocks: u64, capacity: u64) -> Vec<EventBatch> {
    let prompts = blocks / PROMPT;
    let mut out = Vec::new();
    let hash = |prompt: u64, i: u64| EngineHash(scramble(prompt * PROMPT + i));
    for prompt in 0..prompts {
        let mut events = Vec::new();
        if prompt >= capacity / PROMPT {
            let old = prompt - capacity / PROMPT;
            // One removal a block, tail first, as vLLM sends them.
            events.extend((0..PROMPT).rev().map(|i| {
                EngineEvent::Removed(Removed {
                    hashes: vec![hash(old, i)],
                    ..Removed::default()
                })
            }));
        }
        let mut at = 0;
        while at < PROMPT {
            let n = load.event.min(PROMPT - at);
            let tokens = (at * u64::from(load.size)..(at + n) * u64::from(load.size))
                .map(|t| (prompt * 7 + t) as u32)
                .collect();
            events.push(EngineEvent::Stored(Stored {
                hashes: (at..at + n).map(|i| hash(prompt, i)).collect(),
                parent: at.checked_sub(1).map(|i| hash(prompt, i)),
                tokens,
                block_size: load.size,
                ..Stored::default()
            }));
            at += n;
            if load.event < PROMPT {
                out.push(std::mem::take(&mut events));
            }
        }
        if !events.is_empty() {
            out.push(events);
        }
    }
    out.into_iter()
        .enumerate()
        .map(|(seq, events)| EventBatch {
            seq: seq as u64,
            content: seq as u64,
            ts: seq as f64,
            rank: None,
            events,
            refused: Vec::new(),
        })
        .collect()
}

/// Time on a core in nanoseconds where the system tells, so that a loaded machine doesn't count; else wall time.
fn cpu_ns(start: Instant) -> u128 {
    std::fs::read_to_string("/proc/thread-self/schedstat")
        .ok()
        .and_then(|text| text.split_whitespace().next()?.parse().ok())
        .unwrap_or_else(|| start.elapsed().as_nanos())
}

struct Bench {
    index: IndexState,
    at: u64,
    source: Source,
}

impl Bench {
    fn new() -> Self {
        let block_size = BlockSize::DEFAULT;
        let mut bench = Self {
            index: IndexState::new(),
            at: 0,
            source: Source::new(
                SourceConfig {
                    seed: SEED,
                    pool: "pool".into(),
                    block_size,
                    tiers: vec![Tier::Gpu],
                    capacity_blocks: 0,
                    multimodal: false,
                    replay: false,
                    events: true,
                },
                Millis(0),
            ),
        };
        bench.apply(&Command::InitCluster {
            cluster: "bench".into(),
            seed: SEED,
        });
        let spec = SourceSpec {
            name: "bench".into(),
            agent: "agent".into(),
            pool: PoolSpec {
                name: "pool".into(),
                models: vec!["model".into()],
                block_size,
                max_model_len: None,
                model_root: None,
            },
            worker: WorkerSpec {
                engine_url: "http://engine".into(),
                rank: 0,
                ranks: 1,
                host: "host".into(),
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
        };
        let Reply::Register(RegisterOutcome::Registered {
            source,
            incarnation,
            holders,
            seq,
            resumed,
            ..
        }) = bench.apply(&Command::RegisterSource { spec, resume: None })
        else {
            return bench;
        };
        bench.source.registered(
            Millis(0),
            Registration {
                source,
                incarnation,
                holders,
                seq,
                resumed,
            },
        );
        bench.source.connected(Millis(0));
        bench.source.replay_ended(Millis(0), ReplayEnd::Complete);
        bench
    }

    fn apply(&mut self, command: &Command) -> Reply {
        self.at += 1;
        self.index.apply(LogIndex(self.at), command)
    }

    /// Returns how many keys were stored and blocks removed by ops.
    fn run(&mut self, batches: Vec<EventBatch>, with_index: bool) -> u64 {
        let mut keys = 0;
        for batch in batches {
            self.source.live(Millis(1), batch);
            while let Some(batch) = self.source.next_batch(Millis(1)) {
                let (incarnation, seq) = (batch.incarnation, batch.seq);
                for op in &batch.ops {
                    keys += match op {
                        Op::Store { keys, .. } => keys.len() as u64,
                        Op::Remove { count, .. } => u64::from(*count),
                        Op::Clear { .. } | Op::Confidence(_) => 0,
                    };
                }
                let outcome = if with_index {
                    let command = Command::Batches(vec![batch.clone()]);
                    match self.apply(&command) {
                        Reply::Batches(mut outcomes) => outcomes.remove(0),
                        _ => BatchOutcome::UnknownSource,
                    }
                } else {
                    black_box(batch);
                    BatchOutcome::Applied {
                        unknown_anchors: Vec::new(),
                    }
                };
                self.source.acked(Millis(1), incarnation, seq, &outcome);
            }
        }
        keys
    }
}

fn main() {
    let blocks: u64 = std::env::args()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .unwrap_or(2_000_000);
    let capacity = blocks / 4;
    println!("{blocks} blocks stored, cache of {capacity}, the rest of the time each store evicts");
    for load in [
        Load {
            name: "16-token blocks, whole prompts",
            size: 16,
            event: PROMPT,
        },
        Load {
            name: "16-token blocks, chunks of 128",
            size: 16,
            event: 128,
        },
        Load {
            name: "16-token blocks, one an event",
            size: 16,
            event: 1,
        },
        Load {
            name: "64-token pages",
            size: 64,
            event: 64,
        },
    ] {
        for with_index in [false, true] {
            let batches = batches(load, blocks, capacity);
            let mut bench = Bench::new();
            let clock = Instant::now();
            let start = cpu_ns(clock);
            let keys = bench.run(batches, with_index);
            let took = cpu_ns(clock) - start;
            let stats = bench.source.stats();
            println!(
                "{:32} {:12} {:6.1} CPU ns a canonical block change ({keys}), mirror {:.1} B an engine block",
                load.name,
                if with_index { "with index" } else { "mirror alone" },
                took as f64 / keys as f64,
                stats.mirror_bytes as f64 / stats.blocks as f64,
            );
        }
    }
}
