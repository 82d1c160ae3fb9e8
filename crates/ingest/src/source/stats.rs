//! Figures of a source.

use crate::RefusalCounts;

/// Figures for metrics.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct SourceStats {
    /// What was refused so far.
    pub refused: RefusalCounts,
    /// Messages applied.
    pub messages: u64,
    /// Events in them.
    pub events: u64,
    /// Lifetimes of the engine that ended.
    pub restarts: u64,
    /// Gaps that no replay could fill, and how many messages were lost in them.
    pub gaps: u64,
    /// Messages lost for good.
    pub lost_batches: u64,
    /// Replays asked for.
    pub replays: u64,
    /// Times that a sleeping engine's blocks were purged.
    pub purges: u64,
    /// Messages whose rank isn't the connection's.
    pub foreign_rank: u64,
    /// Audits that found a difference.
    pub drifts: u64,
    /// Engine blocks held, over all tiers.
    pub blocks: u64,
    /// The same by tier in the order of the holders.
    pub held_blocks: Vec<u64>,
    /// Blocks that are suspect after a gap.
    pub suspects: u64,
    /// Suspects confirmed, cut and dropped so far.
    pub suspects_confirmed: u64,
    /// Suspects that the engine's own figures refuted.
    pub suspects_cut: u64,
    /// Suspects that a turnover of the cache dropped.
    pub suspects_dropped: u64,
    /// Blocks that wait for a parent or for their tokens.
    pub quarantined: u64,
    /// Copies of outer tiers that a clear took away although the engine may still have them.
    pub cleared_outer: u64,
    /// Live messages that wait for a replay.
    pub buffered: u64,
    /// Changes not yet in a batch, at most.
    pub outbox: u64,
    /// Batches without an answer.
    pub unacked: u64,
    /// The engine's counter of the last message applied.
    pub engine_seq: Option<u64>,
    /// Batches sent more than once.
    pub resent: u64,
    /// Times that the window of unanswered batches was full.
    pub window_full: u64,
    /// Stores whose anchor the index didn't know.
    pub unknown_anchors: u64,
    /// Times that everything was told again.
    pub full_repairs: u64,
    /// Blocks left out because their way from the root doesn't fit a batch.
    pub unanchored: u64,
    /// Memory of the mirror.
    pub mirror_bytes: u64,
}
