//! Counters and gauges of one engine core, as its metrics show them.

/// Counters since the core's start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Steps completed.
    pub steps: u64,
    /// Microseconds spent in steps.
    pub busy_us: u64,
    /// Prompt tokens of requests that were scheduled.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generation_tokens: u64,
    /// Prefill tokens really computed, recomputation after preemption included.
    pub computed_tokens: u64,
    /// Tokens asked of the GPU prefix cache.
    pub prefix_queries: u64,
    /// Tokens found there.
    pub prefix_hits: u64,
    /// Tokens asked of tiers and other engines after the GPU's miss.
    pub external_queries: u64,
    /// Tokens that came from the host-memory tier.
    pub cpu_hits: u64,
    /// Tokens that came from other engines.
    pub remote_hits: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Blocks copied to the host-memory tier.
    pub cpu_stored_blocks: u64,
    /// Blocks that the host-memory tier dropped for others.
    pub cpu_evicted_blocks: u64,
    /// Transfers that failed.
    pub transfers_failed: u64,
    /// Held block sets that no decode engine pulled in time.
    pub holds_expired: u64,
    /// Requests refused because the waiting queue was full.
    pub refused_full: u64,
    /// Requests that ended by their answer's end.
    pub finished_stop: u64,
    /// Requests that ended at their length limit.
    pub finished_length: u64,
    /// Requests that were cancelled.
    pub finished_abort: u64,
}

/// The state of one engine core right now.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Gauges {
    /// Requests in the running batch.
    pub running: usize,
    /// Requests that wait for room.
    pub waiting: usize,
    /// Requests that wait for a load or transfer.
    pub loading: usize,
    /// Share of usable blocks that are referenced.
    pub kv_usage: f64,
    /// Blocks that can be hit, counting copies.
    pub cached_blocks: usize,
    /// Blocks in the host-memory tier.
    pub cpu_blocks: usize,
    /// Block sets held for decode engines.
    pub held: usize,
}
