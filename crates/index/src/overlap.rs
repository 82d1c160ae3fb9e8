//! What each worker can reuse of one prompt, from what the holders within its reach hold.

use std::cell::Cell;
use std::collections::BTreeMap;

use cairn_blocks::{BlockKey, BlockSize, Depth};

use crate::{HolderId, Reach, Registry, Residency, Tier, WorkerId};

/// One prompt.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// The pool that serves it.
    pub pool: &'a str,
    /// Keys of its full blocks, or of as many as are known.
    pub keys: &'a [BlockKey],
    /// Its length in tokens.
    pub prompt_tokens: u32,
    /// The pool's canonical block size, which the keys were made with.
    pub block_size: BlockSize,
}

/// Leading tokens of a prompt that one worker can reuse: first `gpu`, then `cpu` more, then `shared` more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Overlap {
    /// Tokens in the worker's own GPU cache.
    pub gpu: u32,
    /// Further tokens that one CPU holder within reach has.
    pub cpu: u32,
    /// Further tokens that one shared store within reach has.
    pub shared: u32,
}

impl Overlap {
    /// All reusable tokens.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.gpu + self.cpu + self.shared
    }
}

/// The overlap of one worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkerOverlap {
    /// Which worker.
    pub worker: WorkerId,
    /// What it can reuse.
    pub overlap: Overlap,
}

/// A holder as a worker reaches it.
#[derive(Clone, Copy, Debug)]
struct Reached {
    holder: HolderId,
    fetch_unit: u32,
}

/// The holders that one worker reaches, nearest tier first.
#[derive(Clone, Debug)]
struct WorkerReach {
    worker: WorkerId,
    gpu: Option<Reached>,
    cpu: Vec<Reached>,
    shared: Vec<Reached>,
}

/// Which holders each worker of each pool reaches; derived from the registry.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReachTables {
    pools: BTreeMap<String, Vec<WorkerReach>>,
}

thread_local! {
    /// Depths by holder, kept between queries so that a query allocates nothing.
    static DEPTHS: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
}

impl ReachTables {
    /// Derives the tables.
    pub(crate) fn new(registry: &Registry) -> Self {
        let mut by_host: BTreeMap<(&str, &str), Vec<HolderId>> = BTreeMap::new();
        let mut by_pool: BTreeMap<&str, Vec<HolderId>> = BTreeMap::new();
        for (&id, holder) in &registry.holders {
            let Some(worker) = registry
                .sources
                .get(&holder.source)
                .and_then(|s| registry.workers.get(&s.worker))
            else {
                continue;
            };
            match &holder.spec.reach {
                Reach::Worker => {}
                Reach::Host(host) => by_host
                    .entry((worker.pool.as_str(), host.as_str()))
                    .or_default()
                    .push(id),
                Reach::Pool => by_pool.entry(&worker.pool).or_default().push(id),
            }
        }
        let mut pools: BTreeMap<String, Vec<WorkerReach>> =
            registry.pools.keys().map(|name| (name.clone(), Vec::new())).collect();
        for (&id, worker) in &registry.workers {
            let own = registry.sources.get(&worker.source).map_or(&[][..], |s| &s.holders);
            let own = own
                .iter()
                .filter(|h| registry.holders.get(h).is_some_and(|h| h.spec.reach == Reach::Worker));
            let host = by_host.get(&(worker.pool.as_str(), worker.spec.host.as_str()));
            let pool = by_pool.get(worker.pool.as_str());
            let mut reach = WorkerReach {
                worker: id,
                gpu: None,
                cpu: Vec::new(),
                shared: Vec::new(),
            };
            for holder in own.chain(host.into_iter().flatten()).chain(pool.into_iter().flatten()) {
                let spec = &registry.holders[holder].spec;
                let reached = Reached {
                    holder: *holder,
                    fetch_unit: spec.fetch_unit,
                };
                match spec.tier {
                    Tier::Gpu => reach.gpu = Some(reached),
                    Tier::Cpu => reach.cpu.push(reached),
                    Tier::Shared => reach.shared.push(reached),
                }
            }
            if let Some(workers) = pools.get_mut(&worker.pool) {
                workers.push(reach);
            }
        }
        Self { pools }
    }

    /// See [`crate::IndexState::overlap`].
    pub(crate) fn overlap(&self, residency: &Residency, query: &Query<'_>, out: &mut Vec<WorkerOverlap>) {
        out.clear();
        let Some(workers) = self.pools.get(query.pool) else {
            return;
        };
        let prompt = Prompt::new(query);
        let mut depths = DEPTHS.take();
        residency.match_prefix(prompt.keys, &mut depths);
        for reach in workers {
            let gpu = reach.gpu.map_or(0, |gpu| {
                let depth = depths.get(gpu.holder.0 as usize).copied().unwrap_or(0);
                prompt.tokens(depth, gpu.fetch_unit)
            });
            let cpu = prompt.further(residency, &depths, &reach.cpu, gpu);
            let shared = prompt.further(residency, &depths, &reach.shared, gpu + cpu);
            out.push(WorkerOverlap {
                worker: reach.worker,
                overlap: Overlap { gpu, cpu, shared },
            });
        }
        DEPTHS.set(depths);
    }
}

/// What of a query counts: whole blocks inside the prompt, and never its last token, which engines always compute.
struct Prompt<'a> {
    keys: &'a [BlockKey],
    block_size: u32,
    tokens_max: u32,
}

impl<'a> Prompt<'a> {
    fn new(query: &Query<'a>) -> Self {
        let block_size = query.block_size.tokens();
        let full = (query.prompt_tokens / block_size) as usize;
        let keys = &query.keys[..query.keys.len().min(full)];
        Self {
            keys,
            block_size,
            tokens_max: query.prompt_tokens.saturating_sub(1),
        }
    }

    /// Tokens that a holder serves when it holds the first `depth` blocks.
    fn tokens(&self, depth: u32, fetch_unit: u32) -> u32 {
        if depth == 0 {
            return 0;
        }
        let tokens = (depth.min(self.keys.len() as u32) * self.block_size).min(self.tokens_max);
        tokens - tokens % fetch_unit
    }

    /// Most tokens beyond `have` that one of the holders serves by itself.
    fn further(&self, residency: &Residency, depths: &[u32], holders: &[Reached], have: u32) -> u32 {
        let mut best = have;
        for reached in holders {
            // A holder serves whole fetch units, so it needs the blocks of the unit that `have` ends in too.
            let from = (have - have % reached.fetch_unit) / self.block_size;
            let prefix = depths.get(reached.holder.0 as usize).copied().unwrap_or(0);
            let depth = if prefix >= from {
                prefix
            } else {
                residency.match_from(reached.holder, self.keys, Depth(from)).0
            };
            best = best.max(self.tokens(depth, reached.fetch_unit));
        }
        best - have
    }
}
