//! Pools and workers as this router may use them: the replicated registry joined with the configured engines.
//!
//! A fleet is an immutable table that requests share; it is rebuilt when the registry, an engine's health or what an
//! engine serves changes, so that a request reads it without a lock.

use std::collections::HashMap;
use std::sync::Arc;

use cairn_blocks::{BlockSize, ClusterSeed};
use cairn_index::{ByWorker, Confidence, DegradedReason, Registry, Role, Source, WorkerId, WorkerSpec};

use crate::config::{Config, EngineConfig};
use crate::engines::{Engine, Engines};

/// Ids of workers that only the configuration names start here; the registry counts up from 0.
const STATIC_IDS_FROM: u32 = 1 << 31;
/// Ids set apart for the ranks of each configured engine.
const STATIC_IDS_PER_ENGINE: u32 = 1_024;
/// Pool of engines whose model isn't known yet.
const UNKNOWN_POOL: &str = "";

/// All that requests can be sent to.
pub(crate) struct Fleet {
    /// The cluster's seed of block keys.
    pub seed: ClusterSeed,
    /// Pools in the order of their names.
    pub pools: Vec<Arc<Pool>>,
    by_model: HashMap<String, ModelRef>,
    by_source: HashMap<String, WorkerId>,
    by_worker: ByWorker<(usize, usize)>,
}

/// What a model name means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ModelRef {
    /// Position of the pool.
    pub pool: usize,
    /// Adapter, where the name is one.
    pub adapter: Option<String>,
}

/// Workers that serve one model.
pub(crate) struct Pool {
    /// Its name, part of every block key.
    pub name: String,
    /// Names that requests may use, first the engine's own.
    pub models: Vec<String>,
    /// Canonical block size.
    pub block_size: BlockSize,
    /// Longest prompt plus answer in tokens.
    pub max_model_len: Option<u32>,
    /// Folder of the model as engines name it.
    pub model_root: Option<String>,
    /// Policy that the cluster names; empty for none.
    pub policy: String,
    /// Its workers in the order of their ids.
    pub workers: Vec<Worker>,
}

/// One engine rank.
#[derive(Clone)]
pub(crate) struct Worker {
    /// Its id; static ones lie above the registry's.
    pub id: WorkerId,
    /// Its process.
    pub engine: Arc<Engine>,
    /// As registered, or as configured.
    pub spec: Arc<WorkerSpec>,
    /// Takes no new requests.
    pub draining: bool,
    /// What the index may claim about its blocks.
    pub confidence: Confidence,
    /// Name of its source, empty where there is none.
    pub source: String,
    /// Lifetime of its source, 0 where there is none.
    pub incarnation: u64,
    /// Its adapters, as registered and as its engine says, sorted.
    pub adapters: Vec<String>,
}

impl Worker {
    /// Name for people: the engine's URL and the rank.
    pub(crate) fn name(&self) -> String {
        format!("{}#{}", self.engine.url, self.spec.rank)
    }
}

impl Pool {
    /// Whether it is known what its engines serve.
    pub(crate) fn is_known(&self) -> bool {
        self.name != UNKNOWN_POOL
    }
}

impl Default for Fleet {
    fn default() -> Self {
        Self {
            seed: ClusterSeed(0),
            pools: Vec::new(),
            by_model: HashMap::new(),
            by_source: HashMap::new(),
            by_worker: ByWorker::default(),
        }
    }
}

impl Fleet {
    /// The pool and adapter that a model name means.
    pub(crate) fn model(&self, name: &str) -> Option<(&Arc<Pool>, Option<&str>)> {
        let found = self.by_model.get(name)?;
        Some((&self.pools[found.pool], found.adapter.as_deref()))
    }

    /// The worker that a source reports.
    pub(crate) fn by_source(&self, source: &str) -> Option<WorkerId> {
        self.by_source.get(source).copied()
    }

    /// A worker by its id, with its pool.
    pub(crate) fn worker(&self, id: WorkerId) -> Option<(&Arc<Pool>, &Worker)> {
        let &(pool, worker) = self.by_worker.get(&id)?;
        let pool = &self.pools[pool];
        Some((pool, &pool.workers[worker]))
    }

    /// Whether some engine hasn't said yet what it serves.
    pub(crate) fn has_unknown(&self) -> bool {
        self.pools.iter().any(|pool| !pool.is_known())
    }

    /// The only pool, for requests that name no model.
    pub(crate) fn only_pool(&self) -> Option<&Arc<Pool>> {
        match self.pools.as_slice() {
            [pool] => Some(pool),
            _ => None,
        }
    }

    /// All names that requests may use, sorted.
    pub(crate) fn names(&self) -> Vec<(&str, &ModelRef)> {
        let mut names: Vec<_> = self.by_model.iter().map(|(name, to)| (name.as_str(), to)).collect();
        names.sort_unstable_by_key(|(name, _)| *name);
        names
    }

    /// All workers.
    pub(crate) fn workers(&self) -> impl Iterator<Item = (&Arc<Pool>, &Worker)> {
        self.pools
            .iter()
            .flat_map(|pool| pool.workers.iter().map(move |worker| (pool, worker)))
    }

    /// Joins the registry with the configuration and with what engines say; engines that weren't known go to `made`.
    pub(crate) fn build(registry: &Registry, config: &Config, engines: &Engines, made: &mut Vec<Arc<Engine>>) -> Self {
        let mut pools = registered_pools(registry);
        let mut engine_of = |url: &str| {
            let (engine, new) = engines.get(url)?;
            if new {
                made.push(Arc::clone(&engine));
            }
            Some(engine)
        };
        for (id, worker) in &registry.workers {
            let Some(engine) = engine_of(&worker.spec.engine_url) else {
                continue;
            };
            let Some(pool) = pools.iter_mut().find(|pool| pool.name == worker.pool) else {
                continue;
            };
            let source = registry.sources.get(&worker.source);
            pool.workers.push(Worker {
                id: *id,
                adapters: adapters_of(&worker.spec.adapters, &engine),
                engine,
                spec: Arc::new(worker.spec.clone()),
                draining: worker.draining,
                confidence: source.map_or(Confidence::Degraded(DegradedReason::NoEvents), Source::claim),
                source: source.map(|s| s.name.clone()).unwrap_or_default(),
                incarnation: source.map_or(0, |s| s.incarnation.0),
            });
        }
        for (position, told) in (0u32..).zip(&config.engine) {
            let Some(engine) = engine_of(&told.url) else { continue };
            if pools
                .iter()
                .any(|pool| pool.workers.iter().any(|w| w.engine.url == engine.url))
            {
                continue;
            }
            add_static(
                &mut pools,
                told,
                &engine,
                STATIC_IDS_FROM + position * STATIC_IDS_PER_ENGINE,
            );
        }
        for pool in &mut pools {
            pool.workers.sort_unstable_by_key(|worker| worker.id);
            for served in pool.workers.iter().filter_map(|worker| worker.engine.served()) {
                pool.max_model_len = pool.max_model_len.or(served.max_model_len);
                pool.model_root = pool.model_root.take().or_else(|| served.root.clone());
            }
        }
        pools.sort_by(|a, b| a.name.cmp(&b.name));
        let mut fleet = Self {
            seed: registry.seed.unwrap_or(ClusterSeed(0)),
            pools: pools.into_iter().map(Arc::new).collect(),
            ..Self::default()
        };
        fleet.name_models();
        fleet.name_workers();
        fleet
    }

    fn name_workers(&mut self) {
        for (at, pool) in self.pools.iter().enumerate() {
            for (position, worker) in pool.workers.iter().enumerate() {
                self.by_worker.insert(worker.id, (at, position));
                if !worker.source.is_empty() {
                    self.by_source.insert(worker.source.clone(), worker.id);
                }
            }
        }
    }

    /// Base names win over adapters, earlier pools over later ones.
    fn name_models(&mut self) {
        for (position, pool) in self.pools.iter().enumerate() {
            let own = std::iter::once(&pool.name).filter(|name| name.as_str() != UNKNOWN_POOL);
            for name in pool.models.iter().chain(own) {
                let to = ModelRef {
                    pool: position,
                    adapter: None,
                };
                self.by_model.entry(name.clone()).or_insert(to);
            }
        }
        for (position, pool) in self.pools.iter().enumerate() {
            for adapter in pool.workers.iter().flat_map(|worker| &worker.adapters) {
                let to = ModelRef {
                    pool: position,
                    adapter: Some(adapter.clone()),
                };
                self.by_model.entry(adapter.clone()).or_insert(to);
            }
        }
    }
}

fn registered_pools(registry: &Registry) -> Vec<Pool> {
    let pool = |(name, pool): (&String, &cairn_index::Pool)| Pool {
        name: name.clone(),
        models: pool.spec.models.clone(),
        block_size: pool.spec.block_size,
        max_model_len: pool.spec.max_model_len,
        model_root: pool.spec.model_root.clone(),
        policy: pool.policy.clone(),
        workers: Vec::new(),
    };
    registry.pools.iter().map(pool).collect()
}

/// Adds the ranks of a configured engine to the pool of the model that it serves.
fn add_static(pools: &mut Vec<Pool>, told: &EngineConfig, engine: &Arc<Engine>, id: u32) {
    let served = engine.served().unwrap_or_default();
    let name = match (told.pool.as_str(), served.models.first()) {
        ("", Some(model)) => model.clone(),
        ("", None) => UNKNOWN_POOL.to_string(),
        (pool, _) => pool.to_string(),
    };
    let at = pools
        .iter()
        .position(|pool| pool.name == name || (told.pool.is_empty() && pool.models.contains(&name)));
    let at = at.unwrap_or_else(|| {
        pools.push(Pool {
            name,
            models: Vec::new(),
            block_size: BlockSize::DEFAULT,
            max_model_len: None,
            model_root: None,
            policy: String::new(),
            workers: Vec::new(),
        });
        pools.len() - 1
    });
    let pool = &mut pools[at];
    pool.max_model_len = pool.max_model_len.or(served.max_model_len);
    pool.model_root = pool.model_root.take().or_else(|| served.root.clone());
    for model in &served.models {
        if !pool.models.contains(model) {
            pool.models.push(model.clone());
        }
    }
    for rank in 0..told.ranks {
        pool.workers.push(Worker {
            id: WorkerId(id + rank),
            engine: Arc::clone(engine),
            spec: Arc::new(static_spec(told, engine, rank)),
            draining: false,
            confidence: Confidence::Degraded(DegradedReason::NoEvents),
            source: String::new(),
            incarnation: 0,
            adapters: adapters_of(&[], engine),
        });
    }
}

fn static_spec(told: &EngineConfig, engine: &Engine, rank: u32) -> WorkerSpec {
    WorkerSpec {
        engine_url: engine.url.clone(),
        rank,
        ranks: told.ranks,
        host: String::new(),
        role: told.parsed_role().unwrap_or(Role::Both),
        engine_kind: "vllm".into(),
        engine_block_size: BlockSize::DEFAULT.tokens(),
        capacity_blocks: 0,
        max_num_seqs: 0,
        max_batched_tokens: 0,
        adapters: Vec::new(),
        bootstrap: None,
    }
}

/// Adapters as registered and as the engine says now.
fn adapters_of(registered: &[String], engine: &Engine) -> Vec<String> {
    let mut all = registered.to_vec();
    if let Some(served) = engine.served() {
        all.extend(served.adapters.iter().cloned());
    }
    all.sort_unstable();
    all.dedup();
    all
}

/// Name of a claim, for operators.
pub(crate) fn claim_label(confidence: Confidence) -> &'static str {
    use cairn_index::DegradedReason as R;
    match confidence {
        Confidence::Exact => "exact",
        Confidence::Degraded(reason) => match reason {
            R::Gap => "gap",
            R::Replaying => "replaying",
            R::Hybrid => "hybrid",
            R::Silent => "silent",
            R::NoEvents => "no_events",
            R::Mismatch => "mismatch",
            R::LeaseLapsed => "lease_lapsed",
            R::Bounded => "bounded",
        },
    }
}
