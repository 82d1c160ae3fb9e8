//! A request as the engine sees it, and its state while it is inside.

use std::sync::Arc;

use cairn_blocks::Token;

use super::events::{CachedTokens, FinishReason};
use super::hash::{self, EngineHash};
use super::pool::BlockId;
use super::timing::Micros;

/// Identity that the driver gives a request; unique among those inside one engine.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RequestId(pub u64);

/// What the engine will generate; known in advance, since the model has no weights.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// These tokens.
    Tokens(Arc<[Token]>),
    /// As many tokens as named, drawn from a seed and unlike any tokenizer's ids.
    Seeded {
        /// Seed of the tokens.
        seed: u64,
        /// How many.
        len: u32,
    },
}

impl Answer {
    /// Tokens in the answer.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Answer::Tokens(tokens) => tokens.len(),
            Answer::Seeded { len, .. } => *len as usize,
        }
    }

    /// Whether nothing is generated, as for embeddings.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn token(&self, index: usize) -> Token {
        match self {
            Answer::Tokens(tokens) => tokens[index],
            Answer::Seeded { seed, .. } => {
                let mut x = seed.wrapping_add((index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
                x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                (x >> 33) as u32 | 0x8000_0000
            }
        }
    }
}

/// A prompt of which only length and blocks are known, as a trace has it: equal names mean equal content and history.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chain {
    /// Prompt tokens; at least one.
    pub tokens: u32,
    /// One name for each full block.
    pub hashes: Vec<EngineHash>,
}

/// One request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Its identity.
    pub id: RequestId,
    /// Its prompt; at least one token, or none where `chain` stands for it.
    pub prompt: Vec<Token>,
    /// The prompt by its blocks' names, where its tokens aren't known.
    pub chain: Option<Chain>,
    /// What will be generated.
    pub answer: Answer,
    /// Why the answer ends where it does.
    pub ends_by: FinishReason,
    /// Adapter to compute with.
    pub adapter: Option<Arc<str>>,
    /// Cache salt.
    pub salt: Option<Arc<str>>,
    /// Leading prompt tokens whose KV another engine offers; 0 for none.
    pub remote_tokens: u32,
    /// Keep the blocks after the end, for a decode engine to pull.
    pub hold: bool,
}

impl Request {
    /// A plain request without adapter, salt or transfer.
    #[must_use]
    pub fn new(id: RequestId, prompt: Vec<Token>, answer: Answer) -> Self {
        Self {
            id,
            prompt,
            chain: None,
            answer,
            ends_by: FinishReason::Stop,
            adapter: None,
            salt: None,
            remote_tokens: 0,
            hold: false,
        }
    }

    /// A plain request whose prompt is known by its blocks' names only; for models that publish no tokens.
    #[must_use]
    pub fn chained(id: RequestId, chain: Chain, answer: Answer) -> Self {
        Self {
            chain: Some(chain),
            ..Self::new(id, Vec::new(), answer)
        }
    }

    /// Prompt tokens.
    #[must_use]
    pub fn prompt_len(&self) -> usize {
        self.chain
            .as_ref()
            .map_or(self.prompt.len(), |chain| chain.tokens as usize)
    }
}

/// Where a request inside the engine is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    /// In the waiting queue, nothing allocated.
    Waiting,
    /// Blocks allocated; KV comes from host memory until this moment.
    LoadingHost(Micros),
    /// Blocks allocated; KV comes from another engine until the driver says so.
    LoadingRemote,
    /// Loaded, back in the waiting queue with its blocks.
    Loaded,
    /// In the running batch.
    Running,
}

/// State of one request.
pub(crate) struct Sequence {
    pub(crate) id: RequestId,
    /// Prompt and what was generated so far; empty where the prompt is known by its blocks' names only.
    pub(crate) tokens: Vec<Token>,
    /// Prompt tokens and those generated so far.
    pub(crate) len: usize,
    pub(crate) prompt_len: usize,
    /// Whether `tokens` is kept.
    pub(crate) spelled: bool,
    pub(crate) answer: Answer,
    pub(crate) ends_by: FinishReason,
    pub(crate) adapter: Option<Arc<str>>,
    pub(crate) salt: Option<Arc<str>>,
    pub(crate) remote_tokens: u32,
    pub(crate) hold: bool,
    pub(crate) phase: Phase,
    /// One hash for each full block of `tokens`.
    pub(crate) hashes: Vec<EngineHash>,
    pub(crate) blocks: Vec<BlockId>,
    /// Leading blocks that carry their hash in the pool.
    pub(crate) cached_blocks: usize,
    /// Tokens whose KV exists or is being computed.
    pub(crate) computed: usize,
    /// Tokens that the load in progress brings, and the blocks hit on the GPU before it.
    pub(crate) loading: usize,
    pub(crate) cached: Option<CachedTokens>,
    pub(crate) arrived: Micros,
    pub(crate) scheduled: Option<Micros>,
    pub(crate) first_token: Option<Micros>,
    pub(crate) preemptions: u32,
}

impl Sequence {
    pub(crate) fn new(request: Request, now: Micros, root: EngineHash, block_size: usize) -> Self {
        let prompt_len = request.prompt_len();
        let spelled = request.chain.is_none();
        let mut hashes = request.chain.map_or_else(Vec::new, |chain| chain.hashes);
        hashes.truncate(prompt_len / block_size);
        let mut sequence = Self {
            id: request.id,
            prompt_len,
            len: prompt_len,
            spelled,
            tokens: request.prompt,
            answer: request.answer,
            ends_by: request.ends_by,
            adapter: request.adapter,
            salt: request.salt,
            remote_tokens: request.remote_tokens,
            hold: request.hold,
            phase: Phase::Waiting,
            hashes,
            blocks: Vec::new(),
            cached_blocks: 0,
            computed: 0,
            loading: 0,
            cached: None,
            arrived: now,
            scheduled: None,
            first_token: None,
            preemptions: 0,
        };
        sequence.hash_full_blocks(root, block_size);
        sequence
    }

    /// Hashes the blocks that have become full.
    pub(crate) fn hash_full_blocks(&mut self, root: EngineHash, block_size: usize) {
        while (self.hashes.len() + 1) * block_size <= self.len {
            let start = self.hashes.len() * block_size;
            let parent = self.hashes.last().copied().unwrap_or(root);
            let salt = if start == 0 { self.salt.as_deref() } else { None };
            let own = [self.id.0 as u32, (self.id.0 >> 32) as u32, start as u32];
            // Nobody else's prompt names a block that holds generated tokens of a prompt that isn't spelled out.
            let block = if self.spelled {
                &self.tokens[start..start + block_size]
            } else {
                &own[..]
            };
            self.hashes
                .push(hash::next(parent, block, self.adapter.as_deref(), salt));
        }
    }

    pub(crate) fn output_len(&self) -> usize {
        self.len - self.prompt_len
    }

    /// Appends the answer's next token, where one is left.
    pub(crate) fn generate(&mut self) -> Option<Token> {
        let index = self.output_len();
        (index < self.answer.len()).then(|| {
            let token = self.answer.token(index);
            self.len += 1;
            if self.spelled {
                self.tokens.push(token);
            }
            token
        })
    }

    /// Tokens of the blocks from `first` up to `end`; none where they aren't kept.
    pub(crate) fn spell(&self, first: usize, end: usize, block_size: usize) -> Vec<Token> {
        self.tokens
            .get(first * block_size..end * block_size)
            .map_or_else(Vec::new, <[Token]>::to_vec)
    }

    /// Back to the waiting queue with nothing computed; returns the blocks to release.
    pub(crate) fn start_over(&mut self) -> Vec<BlockId> {
        self.computed = 0;
        self.cached_blocks = 0;
        self.preemptions += 1;
        self.phase = Phase::Waiting;
        std::mem::take(&mut self.blocks)
    }
}
