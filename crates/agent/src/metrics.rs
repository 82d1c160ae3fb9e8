//! Every metric of the agent: name, help, labels. Sources are bounded by the configuration; reasons are closed sets.

use std::sync::atomic::AtomicU64;

use cairn_ingest::RefusalReason;
use cairn_telemetry::SharedRegistry;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

/// Label of everything that belongs to one source.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct SourceLabel {
    /// Name of the source.
    pub source: String,
}

/// A source and why something was refused.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RefusalLabel {
    /// Name of the source.
    pub source: String,
    /// One of [`RefusalReason::ALL`].
    pub reason: &'static str,
}

/// An engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct EngineLabel {
    /// Base URL.
    pub engine: String,
}

/// How a checkpoint ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum CheckpointResult {
    /// On disk.
    Written,
    /// Larger than the bound.
    TooLarge,
    /// The disk refused.
    Failed,
}

/// Label of checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CheckpointLabel {
    /// How it ended.
    pub result: CheckpointResult,
}

type Counters<L> = Family<L, Counter>;
type Gauges<L> = Family<L, Gauge>;
type Ratios<L> = Family<L, Gauge<f64, AtomicU64>>;

/// The agent's metrics; cheap to clone.
#[derive(Clone, Default)]
pub struct Metrics {
    /// Messages taken from the engine, live and replayed.
    pub messages: Counters<SourceLabel>,
    /// Events in them.
    pub events: Counters<SourceLabel>,
    /// Events and messages refused, by reason.
    pub refused: Counters<RefusalLabel>,
    /// Messages skipped because no engine sends such frames.
    pub skipped: Counters<SourceLabel>,
    /// Gaps in the stream.
    pub gaps: Counters<SourceLabel>,
    /// Questions to the replay socket.
    pub replays: Counters<SourceLabel>,
    /// New lifetimes of the engine.
    pub restarts: Counters<SourceLabel>,
    /// Messages lost for good.
    pub lost: Counters<SourceLabel>,
    /// Messages that name another rank than their connection's.
    pub foreign_rank: Counters<SourceLabel>,
    /// Batches sent to the index more than once.
    pub resent: Counters<SourceLabel>,
    /// Times that the window of unacknowledged batches was full.
    pub window_full: Counters<SourceLabel>,
    /// Times that a sleeping engine's blocks were purged.
    pub purges: Counters<SourceLabel>,
    /// Suspects that the engine showed it still has.
    pub suspects_confirmed: Counters<SourceLabel>,
    /// Suspects that the engine showed it has no more.
    pub suspects_cut: Counters<SourceLabel>,
    /// Suspects that a turnover of the cache dropped.
    pub suspects_dropped: Counters<SourceLabel>,
    /// Blocks whose presence is in doubt.
    pub suspects: Gauges<SourceLabel>,
    /// Events that wait for their parent.
    pub quarantined: Gauges<SourceLabel>,
    /// Blocks in the mirror.
    pub mirror_blocks: Gauges<SourceLabel>,
    /// Bytes of the mirror.
    pub mirror_bytes: Gauges<SourceLabel>,
    /// Changes that haven't been put in a batch yet.
    pub outbox: Gauges<SourceLabel>,
    /// Batches sent and not acknowledged.
    pub unacked: Gauges<SourceLabel>,
    /// 1 while the index may call the source exact.
    pub exact: Gauges<SourceLabel>,
    /// 1 while the engine serves traffic and sends none of the events that it announces.
    pub silent: Gauges<SourceLabel>,
    /// 1 while this agent speaks for the source.
    pub registered: Gauges<SourceLabel>,
    /// Batches acknowledged by the index.
    pub acked: Counters<SourceLabel>,
    /// Comparisons with the index that found a difference.
    pub drift: Counters<SourceLabel>,
    /// Mirrors rebuilt because a checkpoint couldn't be used.
    pub checkpoint_refused: Counters<SourceLabel>,
    /// Checkpoints by result.
    pub checkpoints: Counters<CheckpointLabel>,
    /// 1 while the engine answers.
    pub engine_up: Gauges<EngineLabel>,
    /// 1 while the engine sleeps.
    pub engine_asleep: Gauges<EngineLabel>,
    /// Looks at an engine that failed.
    pub poll_failures: Counters<EngineLabel>,
    /// Share of KV blocks pinned by running sequences.
    pub kv_usage: Ratios<SourceLabel>,
    /// 1 while the stream to an index node is up.
    pub index_connected: Gauge,
    /// Streams to index nodes that broke.
    pub index_losses: Counter,
    /// Answers of the index that no source waited for, or that couldn't be read.
    pub index_stray: Counter,
    /// Messages on bound sockets whose topic no configured engine has.
    pub unrouted: Gauge,
}

impl Metrics {
    /// Makes all metrics and registers them.
    #[must_use]
    pub fn register(registry: &SharedRegistry) -> Self {
        let m = Self::default();
        registry.with(|r| {
            r.register(
                "cairn_agent_messages",
                "Event messages taken, live and replayed",
                m.messages.clone(),
            );
            r.register("cairn_agent_events", "KV events in those messages", m.events.clone());
            r.register("cairn_agent_refused", "Events and messages refused", m.refused.clone());
            r.register(
                "cairn_agent_skipped",
                "Messages skipped before decoding",
                m.skipped.clone(),
            );
            r.register("cairn_agent_gaps", "Gaps found in the event stream", m.gaps.clone());
            r.register(
                "cairn_agent_replays",
                "Questions to the replay socket",
                m.replays.clone(),
            );
            r.register(
                "cairn_agent_restarts",
                "New lifetimes of the engine",
                m.restarts.clone(),
            );
            r.register(
                "cairn_agent_suspects",
                "Blocks whose presence is in doubt",
                m.suspects.clone(),
            );
            r.register(
                "cairn_agent_quarantined",
                "Events that wait for their parent",
                m.quarantined.clone(),
            );
            r.register(
                "cairn_agent_mirror_blocks",
                "Blocks in the mirror",
                m.mirror_blocks.clone(),
            );
            r.register(
                "cairn_agent_mirror_bytes",
                "Memory of the mirror",
                m.mirror_bytes.clone(),
            );
            r.register(
                "cairn_agent_lost",
                "Batches lost that replay couldn't bring back",
                m.lost.clone(),
            );
            r.register(
                "cairn_agent_foreign_rank",
                "Messages that name another rank than their connection's",
                m.foreign_rank.clone(),
            );
            r.register(
                "cairn_agent_resent",
                "Batches sent to the index more than once",
                m.resent.clone(),
            );
            r.register(
                "cairn_agent_window_full",
                "Times that the window of unacknowledged batches was full",
                m.window_full.clone(),
            );
            r.register(
                "cairn_agent_purges",
                "Times that a sleeping engine's blocks were purged",
                m.purges.clone(),
            );
            r.register(
                "cairn_agent_suspects_confirmed",
                "Suspects that the engine still had",
                m.suspects_confirmed.clone(),
            );
            r.register(
                "cairn_agent_suspects_cut",
                "Suspects that the engine had no more",
                m.suspects_cut.clone(),
            );
            r.register(
                "cairn_agent_suspects_dropped",
                "Suspects that a turnover of the cache dropped",
                m.suspects_dropped.clone(),
            );
            r.register("cairn_agent_outbox", "Changes not yet in a batch", m.outbox.clone());
            r.register(
                "cairn_agent_unacked",
                "Batches sent and not acknowledged",
                m.unacked.clone(),
            );
            r.register("cairn_agent_exact", "1 while the source is exact", m.exact.clone());
            r.register(
                "cairn_agent_silent",
                "1 while announced events don't come",
                m.silent.clone(),
            );
            r.register(
                "cairn_agent_registered",
                "1 while this agent speaks for the source",
                m.registered.clone(),
            );
            r.register(
                "cairn_agent_acked",
                "Batches acknowledged by the index",
                m.acked.clone(),
            );
            r.register("cairn_agent_drift", "Audits that found a difference", m.drift.clone());
            r.register(
                "cairn_agent_checkpoint_refused",
                "Checkpoints that couldn't be used",
                m.checkpoint_refused.clone(),
            );
            r.register(
                "cairn_agent_checkpoints",
                "Checkpoints by result",
                m.checkpoints.clone(),
            );
            r.register(
                "cairn_agent_engine_up",
                "1 while the engine answers",
                m.engine_up.clone(),
            );
            r.register(
                "cairn_agent_engine_asleep",
                "1 while the engine sleeps",
                m.engine_asleep.clone(),
            );
            r.register(
                "cairn_agent_poll_failures",
                "Looks at an engine that failed",
                m.poll_failures.clone(),
            );
            r.register(
                "cairn_agent_kv_usage_ratio",
                "Share of KV blocks pinned",
                m.kv_usage.clone(),
            );
            r.register(
                "cairn_agent_index_connected",
                "1 while the index stream is up",
                m.index_connected.clone(),
            );
            r.register(
                "cairn_agent_index_losses",
                "Index streams that broke",
                m.index_losses.clone(),
            );
            r.register(
                "cairn_agent_index_stray",
                "Index answers that fit nothing",
                m.index_stray.clone(),
            );
            r.register(
                "cairn_agent_unrouted",
                "Messages on topics of no engine",
                m.unrouted.clone(),
            );
        });
        m
    }
}

/// Adds what a core's running total has grown by since it was last looked at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Growth(u64);

impl Growth {
    /// Moves `counter` on to `total`; a total that fell began anew.
    pub fn follow(&mut self, total: u64, counter: &Counter) {
        let grown = if total >= self.0 { total - self.0 } else { total };
        self.0 = total;
        if grown > 0 {
            counter.inc_by(grown);
        }
    }
}

/// Growth of every refusal reason.
#[derive(Clone, Debug, Default)]
pub struct RefusalGrowth([Growth; RefusalReason::ALL.len()]);

impl RefusalGrowth {
    /// Moves the counters of `source` on.
    pub fn follow(&mut self, source: &str, counts: &cairn_ingest::RefusalCounts, metrics: &Metrics) {
        for (growth, (reason, total)) in self.0.iter_mut().zip(counts.iter()) {
            if total != growth.0 {
                let label = RefusalLabel {
                    source: source.to_owned(),
                    reason: reason.as_str(),
                };
                growth.follow(total, &metrics.refused.get_or_create(&label));
            }
        }
    }
}
