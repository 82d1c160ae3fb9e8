//! Measures a decision as the router makes it, from known tokens to a reservation, while a feed changes the view.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cairn_blocks::{BlockKey, BlockSize, Chain, ClusterSeed, Depth, Namespace, Token};
use cairn_index::{
    Batch, Command, Confidence, HolderId, HolderSpec, Incarnation, IndexState, LogIndex, Op, PoolSpec, Query, Reach,
    RegisterOutcome, Reply, Role, Seq, SourceId, SourceSpec, Tier, WorkerOverlap, WorkerSpec,
};
use cairn_routing::{Ending, Micros, RequestFacts, RouterName, Routing, RoutingConfig, WorkerFacts};
use parking_lot::RwLock;
use serde::Serialize;

const POOL: &str = "bench";
const SEED: ClusterSeed = ClusterSeed(1);
/// Prompts that requests are about; each worker holds the start of some of them.
const PROMPTS: usize = 32;
/// Prompts that one worker holds the start of.
const HELD: usize = 6;
/// Tokens that all prompts share: a system prompt.
const SHARED_TOKENS: usize = 2_048;
/// Time between two entries of the feed, as the leader's batcher makes them.
const ENTRY: Duration = Duration::from_millis(5);
/// Chains of the feed that each of its sources keeps.
const CHAINS_KEPT: u64 = 4;
/// Sources with changes in one entry.
const ENTRY_SOURCES: u64 = 8;
/// Between two decisions, so that both threads get their time.
const PAUSE: Duration = Duration::from_micros(200);
/// How long the feed may take until it is steady.
const PATIENCE: Duration = Duration::from_secs(30);
/// Requests in flight in the ledger.
const IN_FLIGHT: usize = 128;

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Length of the prompts.
    pub tokens: usize,
    /// Workers in the pool.
    pub workers: u32,
    /// Decisions.
    pub decisions: usize,
    /// Block changes per second that the feed brings meanwhile.
    pub feed_changes_per_s: f64,
}

/// What came out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Length of the prompts in tokens.
    pub tokens: usize,
    /// Workers in the pool.
    pub workers: u32,
    /// Keys, overlap, choice and reservation, median.
    pub p50_us: f64,
    /// The same, 99th percentile.
    pub p99_us: f64,
    /// Of these the keys of the prompt, median.
    pub keys_p50_us: f64,
    /// Of these the overlap of all workers, median.
    pub overlap_p50_us: f64,
    /// Block changes per second that were applied meanwhile.
    pub feed_changes_per_s: f64,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
#[error("the decision benchmark failed: {0}")]
pub struct BenchError(String);

/// Measures.
///
/// # Errors
/// [`BenchError`] where the benchmark's own state refuses what it is told.
pub fn run(options: Options) -> Result<Row, BenchError> {
    let prompts: Vec<Vec<Token>> = (0..PROMPTS as u32).map(|n| prompt(n, options.tokens)).collect();
    let (state, sources, at) = state(&options, &prompts)?;
    let mut routing = routing(&state)?;
    let state = Arc::new(RwLock::new(state));
    let feed = Feed {
        state: Arc::clone(&state),
        stop: Arc::default(),
        steady: Arc::default(),
        applied: Arc::default(),
    };
    let (stop, steady, applied) = (
        Arc::clone(&feed.stop),
        Arc::clone(&feed.steady),
        Arc::clone(&feed.applied),
    );
    let thread = std::thread::spawn(move || feed.run(&sources, at, options.feed_changes_per_s));
    let asked = Instant::now();
    while options.feed_changes_per_s > 0.0 && !steady.load(Ordering::Relaxed) && asked.elapsed() < PATIENCE {
        std::thread::sleep(ENTRY);
    }
    applied.store(0, Ordering::Relaxed);
    let began = Instant::now();
    let spans = decide_all(&options, &prompts, &state, &mut routing);
    stop.store(true, Ordering::Relaxed);
    let took = began.elapsed().as_secs_f64();
    thread
        .join()
        .map_err(|_| BenchError("the feed's thread failed".into()))?;
    let (keys, overlaps, all) = spans?;
    Ok(Row {
        tokens: options.tokens,
        workers: options.workers,
        p50_us: quantile(&all, 0.5),
        p99_us: quantile(&all, 0.99),
        keys_p50_us: quantile(&keys, 0.5),
        overlap_p50_us: quantile(&overlaps, 0.5),
        feed_changes_per_s: applied.load(Ordering::Relaxed) as f64 / took,
    })
}

fn quantile(times: &[Duration], q: f64) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let at = (sorted.len().saturating_sub(1) as f64 * q) as usize;
    sorted.get(at).map_or(0.0, |time| time.as_nanos() as f64 / 1e3)
}

fn prompt(n: u32, tokens: usize) -> Vec<Token> {
    let own = |i: usize| {
        if i < SHARED_TOKENS {
            i as u32
        } else {
            i as u32 ^ (n + 1) << 20
        }
    };
    (0..tokens).map(own).collect()
}

fn root() -> BlockKey {
    Namespace {
        seed: SEED,
        pool: POOL,
        block_size: BlockSize::DEFAULT,
        adapter: "",
        salt: "",
    }
    .root()
}

/// Where a source's changes go.
#[derive(Clone, Copy)]
struct Told {
    source: SourceId,
    incarnation: Incarnation,
    holder: HolderId,
}

/// An index in which every worker holds the start of some prompts.
fn state(options: &Options, prompts: &[Vec<Token>]) -> Result<(IndexState, Vec<Told>, LogIndex), BenchError> {
    let chains: Vec<Chain> = prompts
        .iter()
        .map(|tokens| Chain::new(root(), BlockSize::DEFAULT, tokens, &[]))
        .collect();
    let mut state = IndexState::new();
    let mut at = LogIndex(0);
    let mut next = || {
        at.0 += 1;
        at
    };
    let cluster = Command::InitCluster {
        cluster: POOL.into(),
        seed: SEED,
    };
    state.apply(next(), &cluster);
    let mut sources = Vec::new();
    for n in 0..options.workers {
        let resume = None;
        let spec = spec(n);
        let Reply::Register(RegisterOutcome::Registered {
            source,
            incarnation,
            holders,
            ..
        }) = state.apply(next(), &Command::RegisterSource { spec, resume })
        else {
            return Err(BenchError(format!("source {n} was refused")));
        };
        let holder = *holders
            .first()
            .ok_or_else(|| BenchError("a source without holder".into()))?;
        let mut ops = vec![Op::Confidence(Confidence::Exact)];
        for i in 0..HELD {
            let keys = &chains[(n as usize * 7 + i * 5) % PROMPTS].keys;
            let held = keys.len() * (i + 1) / HELD;
            ops.push(Op::Store {
                holder,
                anchor: root(),
                anchor_depth: Depth(0),
                skip: 0,
                keys: keys[..held].to_vec(),
            });
        }
        let seq = Seq(1);
        let batch = Batch {
            source,
            incarnation,
            seq,
            ops,
        };
        state.apply(next(), &Command::Batches(vec![batch]));
        sources.push(Told {
            source,
            incarnation,
            holder,
        });
    }
    Ok((state, sources, at))
}

fn spec(n: u32) -> SourceSpec {
    SourceSpec {
        name: format!("engine-{n}"),
        agent: "bench".into(),
        pool: PoolSpec {
            name: POOL.into(),
            models: vec![POOL.into()],
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

fn routing(state: &IndexState) -> Result<Routing, BenchError> {
    let config = RoutingConfig {
        router: RouterName(POOL.into()),
        boot: 1,
        seed: 1,
        identity_seed: 1,
        policies: Vec::new(),
    };
    let mut routing = Routing::new(config).map_err(|error| BenchError(error.to_string()))?;
    for worker in state.registry().workers.keys() {
        routing.set_worker(Micros(0), WorkerFacts::new(*worker, POOL));
    }
    Ok(routing)
}

type Spans = (Vec<Duration>, Vec<Duration>, Vec<Duration>);

/// Times of the keys, of the overlap, and of whole decisions.
fn decide_all(
    options: &Options,
    prompts: &[Vec<Token>],
    state: &RwLock<IndexState>,
    routing: &mut Routing,
) -> Result<Spans, BenchError> {
    let mut spans: Spans = Default::default();
    let mut chain = Chain::default();
    let mut overlaps: Vec<WorkerOverlap> = Vec::new();
    let mut held = std::collections::VecDeque::new();
    let prompt_tokens = options.tokens as u32;
    for n in 0..options.decisions {
        let now = Micros(n as u64 * 2_000);
        let tokens = &prompts[n % prompts.len()];
        let began = Instant::now();
        chain.extend(root(), BlockSize::DEFAULT, tokens, &[]);
        spans.0.push(began.elapsed());
        let query = Query {
            pool: POOL,
            keys: &chain.keys,
            prompt_tokens,
            block_size: BlockSize::DEFAULT,
        };
        let asked = Instant::now();
        state.read().overlap(&query, &mut overlaps);
        spans.1.push(asked.elapsed());
        let facts = RequestFacts {
            pool: POOL,
            prompt_tokens,
            block_tokens: 16,
            expected_output: 100,
            keys: &chain.keys,
            ..RequestFacts::default()
        };
        let choice = routing
            .decide(now, &facts, &overlaps)
            .map_err(|error| BenchError(format!("{error:?}")))?;
        let ticket = routing.reserve(now, &choice, &facts);
        spans.2.push(began.elapsed());
        held.extend(ticket);
        if held.len() > IN_FLIGHT
            && let Some(mut ticket) = held.pop_front()
        {
            routing.first_token(now, &mut ticket);
            let ending = Ending::Done { cached_tokens: Some(0) };
            routing.finish(now, ticket, ending, None);
        }
        std::thread::sleep(PAUSE);
    }
    Ok(spans)
}

/// A thread that applies committed entries.
struct Feed {
    state: Arc<RwLock<IndexState>>,
    stop: Arc<AtomicBool>,
    /// It has begun to remove as much as it stores.
    steady: Arc<AtomicBool>,
    applied: Arc<AtomicU64>,
}

impl Feed {
    /// Applies an entry every [`ENTRY`], in which some sources each store one chain and remove an old one.
    fn run(self, sources: &[Told], mut at: LogIndex, changes_per_s: f64) {
        let in_entry = ENTRY_SOURCES.min(sources.len() as u64).max(1);
        let blocks = (changes_per_s * ENTRY.as_secs_f64() / (2.0 * in_entry as f64)) as u64;
        let mut seqs = vec![1u64; sources.len()];
        // First until every source removes as much as it stores, as fast as it goes.
        let until_steady = sources.len() as u64 * (CHAINS_KEPT + 1) / in_entry + 1;
        let (mut due, mut turn, mut entries) = (Instant::now(), 0, 0);
        while blocks > 0 && !self.stop.load(Ordering::Relaxed) {
            let mut batches = Vec::new();
            let mut changes = 0;
            for _ in 0..in_entry {
                let (told, seq) = (sources[turn], &mut seqs[turn]);
                turn = (turn + 1) % sources.len();
                *seq += 1;
                let (ops, changed) = ops(told, *seq, blocks);
                changes += changed;
                batches.push(Batch {
                    source: told.source,
                    incarnation: told.incarnation,
                    seq: Seq(*seq),
                    ops,
                });
            }
            at.0 += 1;
            let command = Command::Batches(batches);
            self.state.write().apply(at, &command);
            entries += 1;
            if entries <= until_steady {
                due = Instant::now();
                continue;
            }
            self.steady.store(true, Ordering::Relaxed);
            self.applied.fetch_add(changes, Ordering::Relaxed);
            due += ENTRY;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    }
}

/// A chain stored and, once there are enough, the oldest removed; with the number of block changes.
fn ops(told: Told, seq: u64, blocks: u64) -> (Vec<Op>, u64) {
    let key = |seq: u64, block: u64| {
        let mut z = (u64::from(told.source.0) << 44) ^ (seq << 20) ^ block;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        BlockKey(z ^ (z >> 31))
    };
    let mut changes = blocks;
    let mut ops = Vec::with_capacity(2);
    if let Some(old) = seq.checked_sub(CHAINS_KEPT).filter(|old| *old > 1) {
        changes += blocks;
        ops.push(Op::Remove {
            holder: told.holder,
            key: key(old, blocks - 1),
            depth: Depth(blocks as u32),
            count: blocks as u32,
        });
    }
    ops.push(Op::Store {
        holder: told.holder,
        anchor: root(),
        anchor_depth: Depth(0),
        skip: 0,
        keys: (0..blocks).map(|block| key(seq, block)).collect(),
    });
    (ops, changes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions_are_made_while_the_feed_changes_the_view() {
        let options = Options {
            tokens: 8_000,
            workers: 8,
            decisions: 40,
            feed_changes_per_s: 100_000.0,
        };
        let row = run(options).unwrap();
        assert!(row.p50_us > 0.0 && row.p50_us <= row.p99_us, "{row:?}");
        assert!(row.feed_changes_per_s > 0.0, "{row:?}");
    }
}
