//! What a step gives back: cache events as an engine publishes them, tokens, and requests to its driver.

use std::sync::Arc;

use cairn_blocks::Token;

use super::hash::EngineHash;
use super::pool::BlockId;
use super::request::RequestId;
use super::timing::Micros;

/// Where a copy of a block lies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Medium {
    /// The worker's GPU cache.
    Gpu,
    /// The worker's own host-memory tier.
    Cpu,
}

/// One change of a worker's cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CacheEvent {
    /// Full blocks that follow each other were stored.
    Stored {
        /// Their hashes, first block first.
        hashes: Vec<EngineHash>,
        /// Hash of the block before the first; `None` at a chain's start.
        parent: Option<EngineHash>,
        /// Tokens of all blocks; empty when the model is configured without them.
        tokens: Vec<Token>,
        /// Where they lie.
        medium: Medium,
        /// Adapter that they were computed with.
        adapter: Option<Arc<str>>,
        /// Cache salt of the request, wherever in the chain the blocks are.
        salt: Option<Arc<str>>,
    },
    /// One physical copy of each block went.
    Removed {
        /// Hashes in the order of removal.
        hashes: Vec<EngineHash>,
        /// Where they lay.
        medium: Medium,
    },
    /// Everything went; engines name no medium.
    Cleared,
}

/// Events of one step, published together when the step ends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EventBatch {
    /// End of the step.
    pub at: Micros,
    /// In the order in which they happened.
    pub events: Vec<CacheEvent>,
}

/// Why a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinishReason {
    /// The answer was complete.
    Stop,
    /// The answer was cut at its length limit.
    Length,
    /// KV blocks that the request depended on couldn't be transferred.
    TransferFailed,
}

/// Prompt tokens that weren't computed, by where their KV came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CachedTokens {
    /// Hit in the GPU cache.
    pub gpu: u32,
    /// Loaded from the host-memory tier.
    pub cpu: u32,
    /// Transferred from another engine.
    pub remote: u32,
}

impl CachedTokens {
    /// Their sum.
    #[must_use]
    pub fn total(self) -> u32 {
        self.gpu + self.cpu + self.remote
    }
}

/// Accounts of a request that ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// Prompt tokens, all of them.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub output_tokens: u32,
    /// Prompt tokens that weren't computed when the request was first scheduled.
    pub cached: CachedTokens,
    /// When it was submitted.
    pub arrived: Micros,
    /// When it was first scheduled.
    pub scheduled: Micros,
    /// When its first token was there.
    pub first_token: Option<Micros>,
    /// How often it was preempted.
    pub preemptions: u32,
    /// Blocks kept for a decode engine, in prompt order; empty unless the request asked to hold them.
    pub held: Vec<BlockId>,
}

/// One token, or the end, of one request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Output {
    /// Whose.
    pub id: RequestId,
    /// End of the step that gave it.
    pub at: Micros,
    /// The token; `None` for requests that generate nothing or failed.
    pub token: Option<Token>,
    /// Present on the last output.
    pub finish: Option<Finish>,
}

/// A transfer that the driver has to carry out and answer with `transfer_done`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TransferStart {
    /// For whom.
    pub id: RequestId,
    /// When its blocks were allocated.
    pub at: Micros,
    /// Tokens to transfer.
    pub tokens: u32,
    /// How long the model says that the data takes.
    pub span: Micros,
}

/// What happened up to the moment that the driver named.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StepOutcome {
    /// One batch for each completed step that had events.
    pub batches: Vec<EventBatch>,
    /// Tokens and endings, in order.
    pub outputs: Vec<Output>,
    /// Transfers to start.
    pub transfers: Vec<TransferStart>,
    /// When to call `step` next at the latest; `None` while nothing is in the engine.
    pub next_wakeup: Option<Micros>,
}
