//! Registrations: who may speak for a source, what begins a lifetime, and what is refused as contradictory.

use crate::{
    Confidence, DegradedReason, Holder, HolderId, Incarnation, IndexState, LeaseState, LogIndex, Pool, PoolSpec, Reach,
    RegisterOutcome, Reply, Seq, Source, SourceId, SourceSpec, Tier, Worker, WorkerId,
};

/// Longest name (source, agent, pool, host, model, adapter, policy) in bytes; URLs and model paths stay well below.
pub const NAME_BYTES_MAX: usize = 1024;
/// Most caches that one source may fill: three tiers on a handful of stores.
pub const HOLDERS_PER_SOURCE_MAX: usize = 8;
/// Most model names and aliases of a pool.
pub const MODELS_MAX: usize = 256;
/// Most adapters of a worker.
pub const ADAPTERS_MAX: usize = 4096;
/// Most sources in one group; beyond 10,000 workers an index is sharded.
pub const SOURCES_MAX: usize = 65_536;
/// Most pools in one group.
pub const POOLS_MAX: usize = 4_096;
/// Most data-parallel ranks of one engine.
pub const RANKS_MAX: u32 = 65_536;
/// Largest engine block or fetch unit in tokens: a whole context of a million tokens.
pub const UNIT_TOKENS_MAX: u32 = 1 << 20;

impl IndexState {
    /// Begins or resumes a lifetime.
    pub(crate) fn register(&mut self, at: LogIndex, spec: &SourceSpec, resume: Option<Incarnation>) -> RegisterOutcome {
        if let Err(reason) = check(spec).and_then(|()| self.check_against_state(spec)) {
            self.counters.invalid_registrations += 1;
            return RegisterOutcome::Invalid { reason };
        }
        let present = self.source_named(&spec.name);
        let of_worker = self.worker_at(&spec.worker.engine_url, spec.worker.rank);
        for id in [present, of_worker.map(|(_, source)| source)].into_iter().flatten() {
            let other = &self.registry.sources[&id];
            if other.agent != spec.agent && other.lease == LeaseState::Live {
                self.counters.held_registrations += 1;
                return RegisterOutcome::HeldBy {
                    agent: other.agent.clone(),
                };
            }
        }
        let outcome = match present {
            Some(id) if self.can_resume(id, spec, resume) => self.resume(id, spec),
            Some(_) | None => self.begin(at, spec, present, of_worker),
        };
        self.registry_changed();
        outcome
    }

    /// Takes a source away with its worker, its caches and all that lies in them.
    pub(crate) fn remove_source(&mut self, source: SourceId, incarnation: Incarnation) -> Reply {
        match self.registry.sources.get(&source) {
            Some(found) if found.incarnation == incarnation => {
                let worker = found.worker;
                self.drop_source(source);
                self.drop_worker(worker);
                self.registry_changed();
                Reply::Done
            }
            Some(_) | None => Reply::Unknown,
        }
    }

    fn source_named(&self, name: &str) -> Option<SourceId> {
        self.registry
            .sources
            .iter()
            .find(|(_, s)| s.name == name)
            .map(|(&id, _)| id)
    }

    fn worker_at(&self, engine_url: &str, rank: u32) -> Option<(WorkerId, SourceId)> {
        let found = self
            .registry
            .workers
            .iter()
            .find(|(_, w)| w.spec.rank == rank && w.spec.engine_url == engine_url);
        found.map(|(&id, w)| (id, w.source))
    }

    /// What of a registration contradicts pools that others use.
    fn check_against_state(&self, spec: &SourceSpec) -> Result<(), String> {
        let Some(pool) = self.registry.pools.get(&spec.pool.name) else {
            if self.registry.pools.len() >= POOLS_MAX {
                return Err(format!(
                    "there are {POOLS_MAX} pools already; remove the sources of unused ones"
                ));
            }
            return self.check_source_count(spec);
        };
        let others = self.registry.workers.values().any(|w| {
            w.pool == spec.pool.name && (w.spec.engine_url != spec.worker.engine_url || w.spec.rank != spec.worker.rank)
        });
        if others && pool.spec.block_size != spec.pool.block_size {
            return Err(format!(
                "pool {:?} has block size {}, but this source was registered with {}; configure {} for it, or give it \
                 a pool of its own",
                spec.pool.name,
                pool.spec.block_size.tokens(),
                spec.pool.block_size.tokens(),
                pool.spec.block_size.tokens(),
            ));
        }
        self.check_source_count(spec)
    }

    fn check_source_count(&self, spec: &SourceSpec) -> Result<(), String> {
        if self.registry.sources.len() >= SOURCES_MAX && self.source_named(&spec.name).is_none() {
            return Err(format!(
                "there are {SOURCES_MAX} sources already; remove those that are gone"
            ));
        }
        Ok(())
    }

    fn can_resume(&self, id: SourceId, spec: &SourceSpec, resume: Option<Incarnation>) -> bool {
        let source = &self.registry.sources[&id];
        let worker = &self.registry.workers[&source.worker];
        resume == Some(source.incarnation)
            && source.agent == spec.agent
            && worker.pool == spec.pool.name
            && self.registry.pools[&worker.pool].spec.block_size == spec.pool.block_size
            && worker.spec.engine_url == spec.worker.engine_url
            && worker.spec.rank == spec.worker.rank
            && source.holders.len() == spec.holders.len()
            && source
                .holders
                .iter()
                .zip(&spec.holders)
                .all(|(h, s)| self.registry.holders[h].spec == *s)
    }

    /// The agent came back with the mirror of the present lifetime: blocks stay.
    fn resume(&mut self, id: SourceId, spec: &SourceSpec) -> RegisterOutcome {
        self.widen_pool(&spec.pool);
        let source = self.registry.sources.get_mut(&id).expect("the caller looked it up");
        source.lease = LeaseState::Live;
        let worker = self
            .registry
            .workers
            .get_mut(&source.worker)
            .expect("a source has a worker");
        worker.spec = spec.worker.clone();
        RegisterOutcome::Registered {
            source: id,
            incarnation: source.incarnation,
            worker: source.worker,
            holders: source.holders.clone(),
            seq: source.seq,
            resumed: true,
        }
    }

    /// A new lifetime: whatever an older one left goes first.
    fn begin(
        &mut self,
        at: LogIndex,
        spec: &SourceSpec,
        present: Option<SourceId>,
        of_worker: Option<(WorkerId, SourceId)>,
    ) -> RegisterOutcome {
        let old_worker = present.map(|id| self.registry.sources[&id].worker);
        // Both the source of that name and the one that spoke for that worker end here.
        for id in [present, of_worker.map(|(_, source)| source)].into_iter().flatten() {
            self.drop_source(id);
        }
        let worker = match of_worker.map(|(id, _)| id).or(old_worker) {
            Some(id) => id,
            None => {
                let id = WorkerId(self.next_worker);
                self.next_worker += 1;
                id
            }
        };
        let mut draining = false;
        for id in [old_worker, Some(worker)].into_iter().flatten() {
            draining |= self.drop_worker(id).is_some_and(|old| id == worker && old.draining);
        }
        self.widen_pool(&spec.pool);
        let source = present.unwrap_or_else(|| {
            let id = SourceId(self.next_source);
            self.next_source += 1;
            id
        });
        let holders: Vec<HolderId> = spec
            .holders
            .iter()
            .map(|spec| {
                let id = self.free_holder();
                self.registry.holders.insert(
                    id,
                    Holder {
                        spec: spec.clone(),
                        source,
                    },
                );
                self.residency.add_holder(id);
                id
            })
            .collect();
        let new_worker = Worker {
            spec: spec.worker.clone(),
            pool: spec.pool.name.clone(),
            source,
            draining,
        };
        self.registry.workers.insert(worker, new_worker);
        let incarnation = Incarnation(at.0);
        self.registry.sources.insert(
            source,
            Source {
                name: spec.name.clone(),
                agent: spec.agent.clone(),
                incarnation,
                seq: Seq(0),
                worker,
                holders: holders.clone(),
                confidence: Confidence::Degraded(DegradedReason::Replaying),
                lease: LeaseState::Live,
            },
        );
        RegisterOutcome::Registered {
            source,
            incarnation,
            worker,
            holders,
            seq: Seq(0),
            resumed: false,
        }
    }

    fn drop_source(&mut self, id: SourceId) {
        let Some(source) = self.registry.sources.remove(&id) else {
            return;
        };
        for holder in source.holders {
            self.registry.holders.remove(&holder);
            self.residency.remove_holder(holder);
        }
    }

    /// The smallest id that no holder has: ids stay dense.
    fn free_holder(&self) -> HolderId {
        let mut id = 0;
        for used in self.registry.holders.keys() {
            if used.0 != id {
                break;
            }
            id += 1;
        }
        HolderId(id)
    }

    /// Takes a worker away, and its pool if neither another worker nor an operator's policy needs it.
    fn drop_worker(&mut self, id: WorkerId) -> Option<Worker> {
        let worker = self.registry.workers.remove(&id)?;
        let pool = self.registry.pools.get(&worker.pool)?;
        if pool.policy.is_empty() && !self.registry.workers.values().any(|other| other.pool == worker.pool) {
            self.registry.pools.remove(&worker.pool);
        }
        Some(worker)
    }

    fn widen_pool(&mut self, spec: &PoolSpec) {
        let Some(pool) = self.registry.pools.get_mut(&spec.name) else {
            self.registry.pools.insert(
                spec.name.clone(),
                Pool {
                    spec: spec.clone(),
                    policy: String::new(),
                },
            );
            return;
        };
        // Another block size can only come here where no other worker uses the pool.
        pool.spec.block_size = spec.block_size;
        for model in &spec.models {
            if !pool.spec.models.contains(model) && pool.spec.models.len() < MODELS_MAX {
                pool.spec.models.push(model.clone());
            }
        }
        if spec.max_model_len.is_some() {
            // Engines of one pool may be started with different limits; the shortest is safe for all.
            let shortest = pool.spec.max_model_len.into_iter().chain(spec.max_model_len).min();
            pool.spec.max_model_len = shortest;
        }
        if pool.spec.model_root.is_none() {
            pool.spec.model_root.clone_from(&spec.model_root);
        }
    }
}

/// What of a registration contradicts itself or a bound.
fn check(spec: &SourceSpec) -> Result<(), String> {
    let worker = &spec.worker;
    let required = [
        ("the source's name", &spec.name),
        ("the agent's id", &spec.agent),
        ("the pool's name", &spec.pool.name),
        ("the engine's URL", &worker.engine_url),
    ];
    for (what, value) in required {
        if value.is_empty() {
            return Err(format!("{what} is empty; give it one"));
        }
    }
    let bounded = required.into_iter().map(|(what, value)| (what, value.as_str()));
    let more = [
        ("the host's name", worker.host.as_str()),
        ("the engine's kind", worker.engine_kind.as_str()),
    ];
    let optional = [
        ("the model's directory", spec.pool.model_root.as_deref()),
        ("the bootstrap address", worker.bootstrap.as_deref()),
    ];
    let optional = optional
        .into_iter()
        .filter_map(|(what, value)| value.map(|v| (what, v)));
    let models = spec.pool.models.iter().map(|m| ("a model's name", m.as_str()));
    let adapters = worker.adapters.iter().map(|a| ("an adapter's name", a.as_str()));
    let hosts = spec.holders.iter().filter_map(|h| match &h.reach {
        Reach::Host(host) => Some(("the host of a cache", host.as_str())),
        Reach::Worker | Reach::Pool => None,
    });
    for (what, value) in bounded
        .chain(more)
        .chain(optional)
        .chain(models)
        .chain(adapters)
        .chain(hosts)
    {
        if value.len() > NAME_BYTES_MAX {
            return Err(format!(
                "{what} has {} bytes; shorten it to {NAME_BYTES_MAX}",
                value.len()
            ));
        }
    }
    check_counts(spec)?;
    check_holders(spec)
}

fn check_counts(spec: &SourceSpec) -> Result<(), String> {
    let worker = &spec.worker;
    if spec.pool.models.is_empty() || spec.pool.models.iter().any(String::is_empty) {
        return Err("the pool has no model name, or an empty one; give what requests put into `model`".into());
    }
    if spec.pool.models.len() > MODELS_MAX {
        return Err(format!(
            "the pool has {} model names; {MODELS_MAX} are allowed",
            spec.pool.models.len()
        ));
    }
    if worker.adapters.len() > ADAPTERS_MAX {
        return Err(format!(
            "the worker has {} adapters; {ADAPTERS_MAX} are allowed",
            worker.adapters.len()
        ));
    }
    if worker.ranks == 0 || worker.ranks > RANKS_MAX || worker.rank >= worker.ranks {
        return Err(format!(
            "rank {} of {} is not possible; ranks count from 0 to the engine's data-parallel size minus 1",
            worker.rank, worker.ranks
        ));
    }
    if worker.engine_block_size == 0 || worker.engine_block_size > UNIT_TOKENS_MAX {
        return Err(format!(
            "the engine's block size {} is outside 1..={UNIT_TOKENS_MAX} tokens; give the engine's own `block_size`",
            worker.engine_block_size
        ));
    }
    Ok(())
}

fn check_holders(spec: &SourceSpec) -> Result<(), String> {
    if spec.holders.is_empty() || spec.holders.len() > HOLDERS_PER_SOURCE_MAX {
        return Err(format!(
            "the source names {} caches; it needs 1 to {HOLDERS_PER_SOURCE_MAX}, first the GPU's",
            spec.holders.len()
        ));
    }
    for (i, holder) in spec.holders.iter().enumerate() {
        if holder.fetch_unit == 0 || holder.fetch_unit > UNIT_TOKENS_MAX {
            return Err(format!(
                "the fetch unit {} of a cache is outside 1..={UNIT_TOKENS_MAX} tokens; give the engine's block or the \
                 tier's chunk",
                holder.fetch_unit
            ));
        }
        if holder.tier == Tier::Gpu && holder.reach != Reach::Worker {
            return Err(
                "a GPU cache is reachable by its own worker only; register other reaches as cpu or shared".into(),
            );
        }
        if spec.holders[..i].iter().any(|other| other.tier == holder.tier) {
            return Err(format!(
                "two caches of tier {:?} are named; a source fills one of each tier",
                holder.tier
            ));
        }
    }
    Ok(())
}
