//! What goes through the replicated log, and what applying it answers.

use cairn_blocks::ClusterSeed;

use crate::{Batch, HolderId, Incarnation, Seq, SourceId, SourceSpec, WorkerId};

/// One replicated command.
#[expect(
    clippy::large_enum_variant,
    reason = "registrations are rare, and a command is never kept in numbers"
)]
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Command {
    /// Names the cluster and fixes its seed; the first one wins.
    InitCluster {
        /// Cluster name.
        cluster: String,
        /// Seed of its block keys.
        seed: ClusterSeed,
    },
    /// A source begins a lifetime, or its agent resumes one.
    RegisterSource {
        /// What it is.
        spec: SourceSpec,
        /// The lifetime that a restarted agent still has the mirror of.
        resume: Option<Incarnation>,
    },
    /// Block changes of any number of sources, grouped by the leader.
    Batches(Vec<Batch>),
    /// The agent of a source wasn't heard for a full lease.
    LapseLease {
        /// Which source.
        source: SourceId,
        /// In which lifetime.
        incarnation: Incarnation,
    },
    /// The agent of a lapsed source is heard again.
    RestoreLease {
        /// Which source.
        source: SourceId,
        /// In which lifetime.
        incarnation: Incarnation,
    },
    /// The source is gone: its worker, holders and blocks leave without residue.
    RemoveSource {
        /// Which source.
        source: SourceId,
        /// In which lifetime.
        incarnation: Incarnation,
    },
    /// A worker stops or starts taking new requests.
    SetDraining {
        /// Which worker.
        worker: WorkerId,
        /// Whether it drains.
        draining: bool,
    },
    /// Sets a pool's default policy; empty for Cairn's default.
    SetPolicy {
        /// Which pool.
        pool: String,
        /// A policy's name.
        policy: String,
    },
}

/// What applying one command answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    /// Nothing to say.
    Done,
    /// Answer to [`Command::RegisterSource`].
    Register(RegisterOutcome),
    /// Answer to [`Command::Batches`], one for each batch in order.
    Batches(Vec<BatchOutcome>),
    /// What the command names isn't there (any more).
    Unknown,
}

/// How a registration ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RegisterOutcome {
    /// The source may report.
    Registered {
        /// Its id.
        source: SourceId,
        /// Its lifetime; the one asked for where `resumed`.
        incarnation: Incarnation,
        /// Its worker.
        worker: WorkerId,
        /// Its caches in the order of the registration.
        holders: Vec<HolderId>,
        /// Last applied batch of that lifetime.
        seq: Seq,
        /// Whether the old lifetime and its blocks go on.
        resumed: bool,
    },
    /// Another agent speaks for this source and its lease lives.
    HeldBy {
        /// That agent.
        agent: String,
    },
    /// The registration contradicts the pool or itself.
    Invalid {
        /// What is wrong and what to change.
        reason: String,
    },
}

/// How one batch ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BatchOutcome {
    /// Applied; these ops (by position) named an anchor that the index doesn't know and did nothing.
    Applied {
        /// Positions in `ops` to be sent again from the root.
        unknown_anchors: Vec<u32>,
    },
    /// Applied before; nothing was done.
    Duplicate,
    /// Batches are missing in between; send again from here.
    OutOfOrder {
        /// The next seq that applies.
        expected: Seq,
    },
    /// A newer lifetime exists; this sender must stop.
    Fenced {
        /// The present lifetime.
        current: Incarnation,
    },
    /// No such source.
    UnknownSource,
}
