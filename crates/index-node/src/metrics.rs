//! Metrics of an index node: names, units and help texts.

use std::sync::atomic::{AtomicI64, AtomicU64};

use cairn_telemetry::SharedRegistry;
use cairn_telemetry::metrics::LATENCY_SECONDS;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

/// Label `outcome` of a batch or `reason` of something counted; a closed set.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Reason {
    pub(crate) reason: &'static str,
}

type Counters = Family<Reason, Counter>;
type Level = Gauge<i64, AtomicI64>;

/// Everything that an index node counts.
#[derive(Clone)]
pub(crate) struct Metrics {
    pub(crate) batches: Counters,
    pub(crate) entries: Counter,
    pub(crate) entry_bytes: Counter,
    pub(crate) commit_seconds: Histogram,
    pub(crate) registrations: Counters,
    pub(crate) leases: Counters,
    pub(crate) forwarded: Counters,
    pub(crate) refused: Counters,
    pub(crate) followers: Level,
    pub(crate) follower_cuts: Counters,
    pub(crate) snapshots_sent: Counter,
    pub(crate) soft_frames: Counters,
    applied: Level,
    term: Level,
    leads: Level,
    quorum_age_ms: Level,
    log_bytes: Level,
    members: Level,
    sources: Level,
    blocks: Level,
    snapshot_stall_us: Level,
}

/// What the gauges are set to before each scrape.
#[derive(Clone, Copy, Default)]
pub(crate) struct Levels {
    pub(crate) applied: u64,
    pub(crate) term: u64,
    pub(crate) leads: bool,
    pub(crate) quorum_age_ms: u64,
    pub(crate) log_bytes: u64,
    pub(crate) members: usize,
    pub(crate) sources: usize,
    pub(crate) blocks: u64,
    pub(crate) snapshot_stall_us: u64,
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

impl Metrics {
    pub(crate) fn new(registry: &SharedRegistry) -> Self {
        let metrics = Self {
            batches: Counters::default(),
            entries: Counter::<u64, AtomicU64>::default(),
            entry_bytes: Counter::default(),
            commit_seconds: Histogram::new(LATENCY_SECONDS),
            registrations: Counters::default(),
            leases: Counters::default(),
            forwarded: Counters::default(),
            refused: Counters::default(),
            followers: Level::default(),
            follower_cuts: Counters::default(),
            snapshots_sent: Counter::default(),
            soft_frames: Counters::default(),
            applied: Level::default(),
            term: Level::default(),
            leads: Level::default(),
            quorum_age_ms: Level::default(),
            log_bytes: Level::default(),
            members: Level::default(),
            sources: Level::default(),
            blocks: Level::default(),
            snapshot_stall_us: Level::default(),
        };
        registry.with(|r| {
            let m = &metrics;
            r.register(
                "cairn_index_batches",
                "Batches answered by this node as leader, by outcome",
                m.batches.clone(),
            );
            r.register(
                "cairn_index_entries",
                "Log entries that this node proposed and saw committed",
                m.entries.clone(),
            );
            r.register(
                "cairn_index_entry_bytes",
                "Command bytes of those entries",
                m.entry_bytes.clone(),
            );
            r.register(
                "cairn_index_commit_seconds",
                "From proposal to applied here",
                m.commit_seconds.clone(),
            );
            r.register(
                "cairn_index_registrations",
                "Registrations answered, by outcome",
                m.registrations.clone(),
            );
            r.register(
                "cairn_index_leases",
                "Lease entries proposed, by kind",
                m.leases.clone(),
            );
            r.register(
                "cairn_index_forwarded",
                "Calls passed to the leader, by call",
                m.forwarded.clone(),
            );
            r.register("cairn_index_refused", "Calls refused, by reason", m.refused.clone());
            r.register(
                "cairn_index_followers",
                "Followers of the feed now",
                m.followers.clone(),
            );
            r.register(
                "cairn_index_follower_cuts",
                "Followers cut, by reason",
                m.follower_cuts.clone(),
            );
            r.register(
                "cairn_index_feed_snapshots",
                "Snapshots sent to followers",
                m.snapshots_sent.clone(),
            );
            r.register(
                "cairn_index_soft_frames",
                "Soft frames, by what became of them",
                m.soft_frames.clone(),
            );
            r.register("cairn_index_applied", "Last applied log index", m.applied.clone());
            r.register("cairn_index_term", "Raft term", m.term.clone());
            r.register("cairn_index_leads", "1 while this node leads", m.leads.clone());
            r.register(
                "cairn_index_quorum_age_ms",
                "Age of the last known quorum",
                m.quorum_age_ms.clone(),
            );
            r.register(
                "cairn_index_log_disk_bytes",
                "Bytes of the log on disk",
                m.log_bytes.clone(),
            );
            r.register("cairn_index_members", "Members of the group", m.members.clone());
            r.register("cairn_index_sources", "Registered sources", m.sources.clone());
            r.register(
                "cairn_index_blocks",
                "Blocks held, counted per holder",
                m.blocks.clone(),
            );
            r.register(
                "cairn_index_snapshot_stall_us",
                "Longest wait of writes for a snapshot",
                m.snapshot_stall_us.clone(),
            );
        });
        metrics
    }

    pub(crate) fn count(family: &Counters, reason: &'static str) {
        family.get_or_create(&Reason { reason }).inc();
    }

    pub(crate) fn set(&self, levels: Levels) {
        self.applied.set(signed(levels.applied));
        self.term.set(signed(levels.term));
        self.leads.set(i64::from(levels.leads));
        self.quorum_age_ms.set(signed(levels.quorum_age_ms));
        self.log_bytes.set(signed(levels.log_bytes));
        self.members.set(signed(levels.members as u64));
        self.sources.set(signed(levels.sources as u64));
        self.blocks.set(signed(levels.blocks));
        self.snapshot_stall_us.set(signed(levels.snapshot_stall_us));
    }
}
