//! The replicated state: registry and residency, changed by one command at a time in log order.

use std::sync::OnceLock;

use crate::digest::scramble;
use crate::overlap::ReachTables;
use crate::{
    Batch, BatchOutcome, Command, Confidence, DegradedReason, HolderDigest, HolderId, Incarnation, LeaseState,
    LogIndex, Op, Query, READ_AHEAD, Registry, Reply, Residency, Seq, SourceId, Stored, WorkerId, WorkerOverlap,
};

/// Digest of everything in an [`IndexState`] but its place in the log.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct StateDigest(pub u64);

/// What one source has told, for comparison with its agent's mirror.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SourceAudit {
    /// Its present lifetime.
    pub incarnation: Incarnation,
    /// Last applied batch.
    pub seq: Seq,
    /// What each of its holders holds, in the order of the registration.
    pub holders: Vec<(HolderId, HolderDigest)>,
}

/// What was applied and what was turned away since this state was made or read; not replicated, not in the digest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Batches applied.
    pub batches: u64,
    /// Batches that had been applied before.
    pub duplicates: u64,
    /// Batches with others missing before them.
    pub out_of_order: u64,
    /// Batches of an older lifetime.
    pub fenced: u64,
    /// Blocks that a holder came to hold.
    pub stored_blocks: u64,
    /// Blocks that a holder no longer holds by a removal.
    pub removed_blocks: u64,
    /// Stores whose anchor wasn't held.
    pub unknown_anchors: u64,
    /// Stores of a key that is known elsewhere.
    pub refused_stores: u64,
    /// Stores beyond a bound.
    pub full_stores: u64,
    /// Changes that name a cache of another source.
    pub foreign_holders: u64,
    /// Registrations refused because another agent's lease lives.
    pub held_registrations: u64,
    /// Registrations refused as contradictory.
    pub invalid_registrations: u64,
}

/// The index as a deterministic state machine.
#[derive(Clone, Debug, Default)]
pub struct IndexState {
    pub(crate) registry: Registry,
    pub(crate) residency: Residency,
    pub(crate) applied: LogIndex,
    pub(crate) next_source: u32,
    pub(crate) next_worker: u32,
    /// Digest of the registry without what every batch changes; worked out when asked for after a change.
    registry_digest: OnceLock<u64>,
    /// Which holders each worker reaches; as above.
    reach: OnceLock<ReachTables>,
    pub(crate) counters: Counters,
}

impl IndexState {
    /// The state before the first command.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A state as a snapshot holds it.
    pub(crate) fn restored(
        registry: Registry,
        residency: Residency,
        applied: LogIndex,
        next_source: u32,
        next_worker: u32,
    ) -> Self {
        Self {
            registry,
            residency,
            applied,
            next_source,
            next_worker,
            ..Self::default()
        }
    }

    /// Applies the command at its place in the log. Calls come in log order, without repeats.
    pub fn apply(&mut self, at: LogIndex, command: &Command) -> Reply {
        self.applied = at;
        match command {
            Command::InitCluster { cluster, seed } => {
                if self.registry.seed.is_none() {
                    self.registry.seed = Some(*seed);
                    self.registry.cluster.clone_from(cluster);
                    self.registry_changed();
                }
                Reply::Done
            }
            Command::RegisterSource { spec, resume } => Reply::Register(self.register(at, spec, *resume)),
            Command::Batches(batches) => Reply::Batches(batches.iter().map(|b| self.apply_batch(b)).collect()),
            Command::LapseLease { source, incarnation } => {
                self.set_lease(*source, *incarnation, LeaseState::Lapsed(at))
            }
            Command::RestoreLease { source, incarnation } => self.set_lease(*source, *incarnation, LeaseState::Live),
            Command::RemoveSource { source, incarnation } => self.remove_source(*source, *incarnation),
            Command::SetDraining { worker, draining } => self.set_draining(*worker, *draining),
            Command::SetPolicy { pool, policy } => self.set_policy(pool, policy),
        }
    }

    /// Moves the applied index over log entries that hold no command (blank and membership entries).
    pub fn skip_to(&mut self, at: LogIndex) {
        self.applied = self.applied.max(at);
    }

    /// Pools, workers, holders and sources.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Who holds which block.
    #[must_use]
    pub fn residency(&self) -> &Residency {
        &self.residency
    }

    /// Where the log has been applied to.
    #[must_use]
    pub fn applied(&self) -> LogIndex {
        self.applied
    }

    /// What was applied and turned away by this copy.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Digest of registry, positions and holders: equal on every copy at the same applied index (INV-01).
    ///
    /// Costs a few nanoseconds for each source and holder.
    #[must_use]
    pub fn digest(&self) -> StateDigest {
        let mut digest = *self.registry_digest.get_or_init(|| crate::codec::registry_digest(self));
        for (id, source) in &self.registry.sources {
            digest = scramble(digest ^ u64::from(id.0));
            digest = scramble(digest ^ source.incarnation.0);
            digest = scramble(digest ^ source.seq.0);
        }
        for id in self.registry.holders.keys() {
            let holder = self.residency.holder_digest(*id);
            digest = scramble(digest ^ u64::from(id.0));
            digest = scramble(digest ^ holder.blocks);
            digest = scramble(digest ^ holder.digest);
        }
        StateDigest(digest)
    }

    /// What each worker of the pool can reuse of the prompt; workers in ascending order, those with nothing too.
    ///
    /// `out` is emptied first, and stays empty where there is no such pool.
    pub fn overlap(&self, query: &Query<'_>, out: &mut Vec<WorkerOverlap>) {
        let reach = self.reach.get_or_init(|| ReachTables::new(&self.registry));
        reach.overlap(&self.residency, query, out);
    }

    /// What the index holds of one source, for comparison with its agent's mirror.
    #[must_use]
    pub fn audit(&self, source: SourceId) -> Option<SourceAudit> {
        let source = self.registry.sources.get(&source)?;
        let holders = source
            .holders
            .iter()
            .map(|&h| (h, self.residency.holder_digest(h)))
            .collect();
        Some(SourceAudit {
            incarnation: source.incarnation,
            seq: source.seq,
            holders,
        })
    }

    /// Forgets what is derived from the registry, after a change to anything but positions.
    pub(crate) fn registry_changed(&mut self) {
        self.registry.version += 1;
        self.registry_digest = OnceLock::new();
        self.reach = OnceLock::new();
    }

    fn set_lease(&mut self, source: SourceId, incarnation: Incarnation, lease: LeaseState) -> Reply {
        match self.registry.sources.get_mut(&source) {
            Some(found) if found.incarnation == incarnation => {
                let was_live = found.lease == LeaseState::Live;
                if was_live != (lease == LeaseState::Live) {
                    found.lease = lease;
                    self.registry_changed();
                }
                Reply::Done
            }
            Some(_) | None => Reply::Unknown,
        }
    }

    fn set_draining(&mut self, worker: WorkerId, draining: bool) -> Reply {
        let Some(found) = self.registry.workers.get_mut(&worker) else {
            return Reply::Unknown;
        };
        if found.draining != draining {
            found.draining = draining;
            self.registry_changed();
        }
        Reply::Done
    }

    fn set_policy(&mut self, pool: &str, policy: &str) -> Reply {
        if policy.len() > crate::register::NAME_BYTES_MAX {
            return Reply::Unknown;
        }
        let Some(found) = self.registry.pools.get_mut(pool) else {
            return Reply::Unknown;
        };
        if found.policy != policy {
            policy.clone_into(&mut found.policy);
            self.registry_changed();
        }
        Reply::Done
    }

    fn apply_batch(&mut self, batch: &Batch) -> BatchOutcome {
        let Some(source) = self.registry.sources.get_mut(&batch.source) else {
            return BatchOutcome::UnknownSource;
        };
        if batch.incarnation != source.incarnation {
            self.counters.fenced += 1;
            return BatchOutcome::Fenced {
                current: source.incarnation,
            };
        }
        if batch.seq <= source.seq {
            self.counters.duplicates += 1;
            return BatchOutcome::Duplicate;
        }
        let expected = Seq(source.seq.0.saturating_add(1));
        if batch.seq != expected {
            self.counters.out_of_order += 1;
            return BatchOutcome::OutOfOrder { expected };
        }
        source.seq = batch.seq;
        self.counters.batches += 1;
        let mut unknown_anchors = Vec::new();
        let mut confidence = source.confidence;
        let mut full = false;
        for (position, op) in (0u32..).zip(&batch.ops) {
            let at = position as usize;
            if at.is_multiple_of(READ_AHEAD) {
                self.residency.approach(&batch.ops[at..]);
            }
            match op {
                Op::Store {
                    holder,
                    anchor,
                    anchor_depth,
                    skip,
                    keys,
                } if source.holders.contains(holder) => {
                    let stored =
                        self.residency
                            .store_beside(*holder, &source.holders, *anchor, *anchor_depth, *skip, keys);
                    match stored {
                        Stored::Done { new_blocks } => self.counters.stored_blocks += u64::from(new_blocks),
                        Stored::UnknownAnchor => {
                            self.counters.unknown_anchors += 1;
                            unknown_anchors.push(position);
                        }
                        Stored::Refused => self.counters.refused_stores += 1,
                        Stored::Full => {
                            self.counters.full_stores += 1;
                            full = true;
                        }
                        Stored::UnknownHolder => self.counters.foreign_holders += 1,
                    }
                }
                Op::Remove {
                    holder,
                    key,
                    depth,
                    count,
                } if source.holders.contains(holder) => {
                    let removed = self.residency.remove(*holder, *key, *depth, *count);
                    self.counters.removed_blocks += u64::from(removed.blocks);
                }
                Op::Clear { holder } if source.holders.contains(holder) => self.residency.clear(*holder),
                Op::Store { .. } | Op::Remove { .. } | Op::Clear { .. } => self.counters.foreign_holders += 1,
                Op::Confidence(said) => confidence = *said,
            }
        }
        if full {
            confidence = Confidence::Degraded(DegradedReason::Bounded);
        }
        if confidence != source.confidence {
            source.confidence = confidence;
            self.registry_changed();
        }
        BatchOutcome::Applied { unknown_anchors }
    }
}

impl crate::Source {
    /// What may be claimed about this source now: its own word while its agent is heard.
    #[must_use]
    pub fn claim(&self) -> Confidence {
        match self.lease {
            LeaseState::Live => self.confidence,
            LeaseState::Lapsed(_) => Confidence::Degraded(DegradedReason::LeaseLapsed),
        }
    }
}
