//! What the agents of a trace's engines would tell the index: the trace's prompts in caches of engines, whose events go
//! through a mirror each, as they do in an agent.

use std::fs::File;
use std::path::Path;

use anyhow::Context;
use cairn_blocks::{BlockSize, ClusterSeed, Token};
use cairn_index::{BatchOutcome, HolderId, Incarnation, Op, Seq, SourceId, Tier};
use cairn_index_node::bench::Told;
use cairn_ingest::{EngineEvent, EventBatch, Millis, Registration, Removed, ReplayEnd, Source, SourceConfig, Stored};
use cairn_replay::engine_model::{BlockPool, CacheEvent, EngineHash};
use cairn_replay::trace;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// Engines, and the blocks of each one's cache: of the benchmark beside peers.
const ENGINES: usize = 64;
const CAPACITY: u32 = 16_384;
/// Tokens of one block, whatever the trace's own blocks stand for.
const BLOCK_TOKENS: u32 = 16;
/// Blocks of one prefill step: 8,192 tokens.
const STEP: usize = 512;
/// Of ten requests this many go where most of their prompt is, the others anywhere, as load balancing does.
const AFFINE: f64 = 0.7;
/// Tells an answer's blocks from a prompt's.
const ANSWER: u64 = 0x5bd1_e995_9e37_79b9;

/// Whatever the time is.
const NOW: Millis = Millis(1);

/// Reads a trace and gives what each engine's agent tells, batch by batch.
pub(super) fn told(path: &Path) -> anyhow::Result<Told> {
    let file = File::open(path).with_context(|| format!("opening the trace {}", path.display()))?;
    let name = path.display().to_string();
    let trace = trace::read(&name, file, None).with_context(|| format!("reading the trace {name}"))?;
    let mut rng = SmallRng::seed_from_u64(7);
    let mut engines: Vec<Engine> = (0..ENGINES).map(|_| Engine::new()).collect();
    let (mut path, mut chain) = (Vec::new(), Vec::new());
    for (index, row) in trace.rows.iter().enumerate() {
        trace.chains.path(row.last, &mut path);
        trace.name_blocks(index, BLOCK_TOKENS, &path, &mut chain);
        let prompt = chain.len();
        let answer = u64::from(row.output / BLOCK_TOKENS);
        chain.extend((0..answer).map(|i| EngineHash(answer_name(index as u64, i))));
        // A prompt longer than a cache isn't taken by its engine.
        if prompt == 0 || chain.len() > CAPACITY as usize {
            continue;
        }
        let first = rng.random_range(0..ENGINES);
        let at = if rng.random_bool(AFFINE) {
            let order = (0..ENGINES).map(|i| (i + first) % ENGINES);
            order.max_by_key(|at| engines[*at].held(&chain)).unwrap_or(first)
        } else {
            first
        };
        engines[at].serve(&chain, prompt);
    }
    Ok(engines.into_iter().map(|engine| engine.told).collect())
}

/// Name of the answer's block `i` to a request: nobody else has it.
fn answer_name(request: u64, i: u64) -> u64 {
    ((request + 1).wrapping_mul(ANSWER) ^ i)
        .wrapping_mul(0xbf58_476d_1ce4_e5b9)
        .rotate_left(29)
}

/// One engine's cache, and its agent's mirror.
struct Engine {
    pool: BlockPool,
    source: Source,
    messages: u64,
    told: Vec<Vec<Op>>,
}

impl Engine {
    fn new() -> Self {
        let mut source = Source::new(
            SourceConfig {
                seed: ClusterSeed(7),
                pool: "trace".into(),
                block_size: BlockSize::DEFAULT,
                tiers: vec![Tier::Gpu],
                capacity_blocks: u64::from(CAPACITY),
                multimodal: false,
                replay: false,
                events: true,
            },
            NOW,
        );
        let registration = Registration {
            source: SourceId(0),
            incarnation: Incarnation(1),
            holders: vec![HolderId(0)],
            seq: Seq(0),
            resumed: false,
        };
        source.registered(NOW, registration);
        source.connected(NOW);
        source.replay_ended(NOW, ReplayEnd::Complete);
        Self {
            pool: BlockPool::new(CAPACITY + 1),
            source,
            messages: 0,
            told: Vec::new(),
        }
    }

    /// Leading blocks of a chain that its cache holds.
    fn held(&self, chain: &[EngineHash]) -> usize {
        chain
            .iter()
            .take_while(|hash| self.pool.lookup(**hash).is_some())
            .count()
    }

    /// Computes what isn't cached: the prompt in steps, then the answer block by block; each step is one message.
    fn serve(&mut self, chain: &[EngineHash], prompt: usize) {
        let mut at = self.held(chain);
        let mut used = Vec::with_capacity(chain.len());
        for hash in &chain[..at] {
            if let Some(block) = self.pool.lookup(*hash) {
                self.pool.touch(block);
                used.push(block);
            }
        }
        while at < chain.len() {
            let end = if at < prompt { (at + STEP).min(prompt) } else { at + 1 };
            let mut gone = Vec::new();
            for hash in &chain[at..end] {
                // The chain fits, and nothing else is in use.
                let Some((block, _)) = self.pool.take(&mut gone) else {
                    break;
                };
                self.pool.cache(block, *hash);
                used.push(block);
            }
            let parent = at.checked_sub(1).map(|above| chain[above]);
            self.publish(gone, parent, &chain[at..end]);
            at = end;
        }
        // The tail is the first to go.
        self.pool.release(used.into_iter().rev());
    }

    /// One step's message, through the mirror into batches.
    fn publish(&mut self, gone: Vec<CacheEvent>, parent: Option<EngineHash>, stored: &[EngineHash]) {
        let name = |hash: &EngineHash| cairn_ingest::EngineHash(hash.0);
        let hashes = gone.iter().flat_map(|event| match event {
            CacheEvent::Removed { hashes, .. } => hashes.as_slice(),
            CacheEvent::Stored { .. } | CacheEvent::Cleared => &[],
        });
        let removed = EngineEvent::Removed(Removed {
            hashes: hashes.map(name).collect(),
            ..Removed::default()
        });
        let stored = EngineEvent::Stored(Stored {
            hashes: stored.iter().map(name).collect(),
            parent: parent.as_ref().map(name),
            tokens: stored.iter().flat_map(tokens).collect(),
            block_size: BLOCK_TOKENS,
            ..Stored::default()
        });
        let events = if gone.is_empty() {
            vec![stored]
        } else {
            vec![removed, stored]
        };
        let message = EventBatch {
            seq: self.messages,
            content: self.messages,
            ts: self.messages as f64,
            rank: None,
            events,
            refused: Vec::new(),
        };
        self.messages += 1;
        self.source.live(NOW, message);
        while let Some(batch) = self.source.next_batch(NOW) {
            let (incarnation, seq) = (batch.incarnation, batch.seq);
            self.told.push(batch.ops.clone());
            let outcome = BatchOutcome::Applied {
                unknown_anchors: Vec::new(),
            };
            self.source.acked(NOW, incarnation, seq, &outcome);
        }
    }
}

/// Tokens that only this block has.
fn tokens(hash: &EngineHash) -> [Token; BLOCK_TOKENS as usize] {
    std::array::from_fn(|i| (hash.0.rotate_left(i as u32 * 4) as Token) & 0x1_ffff)
}
