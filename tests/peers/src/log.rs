//! One event log for everyone: what engines stored and removed, what requests asked, and the right answers.

use cairn_blocks::{BlockKey, BlockSize, ClusterSeed, Namespace, Token, next_key};
use kv_index::{ContentHash, SequenceHash, chain_prefix_hash};

/// Tokens in a block.
pub const BLOCK_TOKENS: usize = 16;
/// Seed of the benchmark's cluster.
pub const SEED: ClusterSeed = ClusterSeed(7);
/// Name of the benchmark's pool.
pub const POOL: &str = "bench";
/// No block above.
pub const NONE: u32 = u32::MAX;

/// A block by its place in [`Blocks`].
pub type BlockId = u32;

/// A stretch of [`Log::ids`].
#[derive(Clone, Copy)]
pub struct Span {
    start: u32,
    len: u32,
}

/// What happens next.
pub enum Event {
    /// A worker now holds a stretch of one chain, in chain order.
    Store {
        /// Who.
        worker: u32,
        /// Which blocks.
        blocks: Span,
    },
    /// A worker holds blocks no longer, in the order of their eviction.
    Remove {
        /// Who.
        worker: u32,
        /// Which blocks.
        blocks: Span,
    },
    /// A request asks who holds how much of its prompt.
    Match {
        /// The prompt.
        blocks: Span,
        /// [`checksum`] of the right answer.
        right: u64,
        /// Blocks that the best worker has.
        best: u32,
    },
}

/// Everything about blocks, by id.
#[derive(Default)]
pub struct Blocks {
    /// The block above, or [`NONE`].
    pub parent: Vec<BlockId>,
    /// Blocks above.
    pub depth: Vec<u32>,
    /// What its tokens are made from.
    pub word: Vec<u64>,
    /// The engine's name of it, which fixes its history.
    pub engine: Vec<u64>,
    /// Cairn's key of it.
    pub key: Vec<BlockKey>,
}

impl Blocks {
    /// Adds a block.
    pub fn push(&mut self, parent: BlockId, word: u64) -> BlockId {
        let id = self.parent.len() as BlockId;
        // The engine names blocks by the chain of content hashes that Dynamo's positional index computes for itself; to
        // all others the names are opaque.
        let (depth, engine, key_above) = if parent == NONE {
            (0, content(word), root())
        } else {
            let at = parent as usize;
            let engine = chain_prefix_hash(SequenceHash(self.engine[at]), ContentHash(content(word)));
            (self.depth[at] + 1, engine.0, self.key[at])
        };
        self.parent.push(parent);
        self.depth.push(depth);
        self.word.push(word);
        self.engine.push(engine);
        self.key.push(next_key(key_above, &tokens(word), &[]));
        id
    }

    /// What names a block's tokens alone, wherever they come: the peers' "local" or "content" hash.
    pub fn content(&self, id: BlockId) -> u64 {
        content(self.word[id as usize])
    }
}

/// A block's tokens.
pub fn tokens(word: u64) -> [Token; BLOCK_TOKENS] {
    let mut out = [0; BLOCK_TOKENS];
    let mut at = word;
    for pair in out.chunks_exact_mut(2) {
        at = mix(at.wrapping_add(0x9e37_79b9_7f4a_7c15));
        pair[0] = (at >> 40) as Token;
        pair[1] = (at & 0x1_ffff) as Token;
    }
    out
}

/// A name of a block's tokens.
pub fn content(word: u64) -> u64 {
    mix(word ^ 0x5851_f42d_4c95_7f2d)
}

/// The root of the benchmark's chains.
pub fn root() -> BlockKey {
    Namespace {
        seed: SEED,
        pool: POOL,
        block_size: BlockSize::DEFAULT,
        adapter: "",
        salt: "",
    }
    .root()
}

/// Spreads a word's bits.
pub fn mix(word: u64) -> u64 {
    let mut z = word;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// One number for a whole answer, whatever its order: workers with nothing don't count.
pub fn checksum(answer: impl IntoIterator<Item = (u32, u32)>) -> u64 {
    answer
        .into_iter()
        .filter(|(_, depth)| *depth > 0)
        .map(|(worker, depth)| mix(u64::from(worker) << 32 | u64::from(depth)))
        .fold(0, u64::wrapping_add)
}

/// A whole workload.
#[derive(Default)]
pub struct Log {
    /// Caches.
    pub workers: u32,
    /// Blocks in each.
    pub capacity: u32,
    /// Every block that occurs.
    pub blocks: Blocks,
    /// What the events' spans lead to.
    pub ids: Vec<BlockId>,
    /// In order.
    pub events: Vec<Event>,
    /// Blocks stored and removed.
    pub changes: u64,
    /// Blocks in all caches at the end, counted once for each cache.
    pub memberships: u64,
}

impl Log {
    /// The blocks of a span.
    pub fn span(&self, span: Span) -> &[BlockId] {
        &self.ids[span.start as usize..][..span.len as usize]
    }

    /// Keeps ids and returns where they are.
    pub fn keep(&mut self, ids: &[BlockId]) -> Span {
        let start = u32::try_from(self.ids.len()).expect("a workload has fewer than four billion blocks");
        self.ids.extend_from_slice(ids);
        Span {
            start,
            len: ids.len() as u32,
        }
    }
}
