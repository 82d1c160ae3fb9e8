//! Pools and workers as this router may use them: the replicated registry joined with the configured engines.
//!
//! A fleet is an immutable table that requests share; it is rebuilt when the registry, an engine's health or what an
//! engine serves changes, so that a request reads it without a lock.

use std::collections::HashMap;
use std::sync::Arc;

use cairn_blocks::BlockSize;
use cairn_index::{Confidence, LeaseState, Registry, Role, WorkerId, WorkerSpec};

use crate::config::Config;
use crate::engines::{Engine, Engines};

/// Ids of workers that only the configuration names start here; the registry counts up from 0.
const STATIC_IDS_FROM: u32 = 1 << 31;
/// Pool of engines whose model isn't known yet.
const UNKNOWN_POOL: &str = "";

/// All that requests can be sent to.
#[derive(Default)]
pub(crate) struct Fleet {
    /// Version of the registry that it was built from.
    pub registry_version: u64,
    /// Pools in the order of their names.
    pub pools: Vec<Arc<Pool>>,
    by_model: HashMap<String, ModelRef>,
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
    /// Policy that the configuration or the cluster names; empty for the router's.
    pub policy: String,
    /// Whether the registry knows it, so that its workers' blocks may be in the view.
    pub indexed: bool,
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
    /// Whether the index claims its blocks exactly.
    pub exact: bool,
    /// Why not, for operators.
    pub claim: &'static str,
    /// Name of its source.
    pub source: String,
}

impl Fleet {
    /// The pool and adapter that a model name means.
    pub(crate) fn model(&self, name: &str) -> Option<(&Arc<Pool>, Option<&str>)> {
        let found = self.by_model.get(name)?;
        Some((&self.pools[found.pool], found.adapter.as_deref()))
    }

    /// The only pool, for requests that name no model.
    pub(crate) fn only_pool(&self) -> Option<&Arc<Pool>> {
        match self.pools.as_slice() {
            [pool] => Some(pool),
            _ => None,
        }
    }

    /// All names that requests may use, sorted, with whether each is an adapter.
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

    /// Joins the registry with the configuration and with what engines say. `engines` gets every URL that is named.
    pub(crate) fn build(registry: &Registry, config: &Config, engines: &Engines, made: &mut Vec<Arc<Engine>>) -> Self {
        let mut pools: Vec<Pool> = Vec::new();
        for (name, pool) in &registry.pools {
            pools.push(Pool {
                name: name.clone(),
                models: pool.spec.models.clone(),
                block_size: pool.spec.block_size,
                max_model_len: pool.spec.max_model_len,
                model_root: pool.spec.model_root.clone(),
                policy: pool.policy.clone(),
                indexed: true,
                workers: Vec::new(),
            });
        }
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
            let claim = source.map_or("unregistered", |s| match s.lease {
                LeaseState::Live => confidence_label(s.confidence),
                LeaseState::Lapsed(_) => "lease_lapsed",
            });
            pool.workers.push(Worker {
                id: *id,
                engine,
                spec: Arc::new(worker.spec.clone()),
                draining: worker.draining,
                exact: claim == "exact",
                claim,
                source: source.map(|s| s.name.clone()).unwrap_or_default(),
            });
        }
        let mut next = STATIC_IDS_FROM;
        for (position, static_engine) in config.engine.iter().enumerate() {
            let id = STATIC_IDS_FROM + u32::try_from(position).unwrap_or(0) * 1_024;
            debug_assert!(id >= next, "ids of configured engines ascend");
            next = id;
            let Some(engine) = engine_of(&static_engine.url) else {
                continue;
            };
            if pools
                .iter()
                .any(|pool| pool.workers.iter().any(|w| w.engine.url == engine.url))
            {
                continue;
            }
            add_static(&mut pools, static_engine, &engine, id);
        }
        for pool in &mut pools {
            if let Some(own) = config.pool.iter().find(|own| own.name == pool.name) {
                pool.models.extend(own.aliases.iter().cloned());
                if !own.policy.is_empty() {
                    pool.policy.clone_from(&own.policy);
                }
            }
            pool.workers.sort_unstable_by_key(|worker| worker.id);
        }
        pools.sort_by(|a, b| a.name.cmp(&b.name));
        let mut fleet = Self {
            registry_version: registry.version,
            pools: pools.into_iter().map(Arc::new).collect(),
            ..Self::default()
        };
        fleet.name_models();
        fleet
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
            for worker in &pool.workers {
                let served = worker.engine.served();
                let told = served.iter().flat_map(|served| served.adapters.iter());
                for adapter in worker.spec.adapters.iter().chain(told) {
                    let to = ModelRef {
                        pool: position,
                        adapter: Some(adapter.clone()),
                    };
                    self.by_model.entry(adapter.clone()).or_insert(to);
                }
            }
        }
    }
}

/// Adds the ranks of a configured engine to the pool of the model that it serves.
fn add_static(pools: &mut Vec<Pool>, told: &crate::config::EngineConfig, engine: &Arc<Engine>, id: u32) {
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
            max_model_len: served.max_model_len,
            model_root: served.root.clone(),
            policy: String::new(),
            indexed: false,
            workers: Vec::new(),
        });
        pools.len() - 1
    });
    let pool = &mut pools[at];
    for model in &served.models {
        if !pool.models.contains(model) {
            pool.models.push(model.clone());
        }
    }
    for rank in 0..told.ranks {
        pool.workers.push(Worker {
            id: WorkerId(id + rank),
            engine: Arc::clone(engine),
            spec: Arc::new(WorkerSpec {
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
                adapters: served.adapters.clone(),
                bootstrap: None,
            }),
            draining: false,
            exact: false,
            claim: "not_indexed",
            source: String::new(),
        });
    }
}

/// Name of a claim, for operators.
fn confidence_label(confidence: Confidence) -> &'static str {
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
