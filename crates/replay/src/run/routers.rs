//! Routers over one view of the index: the routing core that also runs in live routers.

use std::collections::BTreeMap;

use cairn_blocks::{BlockKey, Depth, Token};
use cairn_index::{HolderId, Overlap, Residency, Stored, WorkerId, WorkerOverlap};
use cairn_routing::{
    Ending, LoadReport, PolicyConfig, PolicyError, Reason, RequestFacts, RouterFrame, RouterName, Routing,
    RoutingConfig, Ticket, WorkerFacts,
};

use crate::engine_model::hash::LookupMap;
use crate::engine_model::{CacheEvent, EngineHash, Finish, Gauges, Medium, Micros, ModelConfig, hash};
use crate::options::Options;

const POOL: &str = "replay";
/// Bytes of a prompt's start that the `prefix` policy may look at: its longest parameter.
const PREFIX_BYTES: usize = 65_536;

/// What the agent of one engine remembers of its blocks.
#[derive(Default)]
struct Mirror {
    /// Depth and copies of each block.
    blocks: LookupMap<EngineHash, (u32, u32)>,
}

/// Routers and what they see.
pub(super) struct Routers {
    routers: Vec<Routing>,
    view: Residency,
    mirrors: Vec<Mirror>,
    /// Root that all chains hang under: engines of a replay name blocks alike.
    root: EngineHash,
    tickets: BTreeMap<usize, (usize, Ticket)>,
    depths: Vec<u32>,
    overlaps: Vec<WorkerOverlap>,
    keys: Vec<BlockKey>,
    prefix: Vec<u8>,
    /// Whether the policy looks at the prompt's text, which stands for four bytes a token here.
    looks_at_prefix: bool,
    pub(super) predicted: u64,
    pub(super) overflow: u64,
}

fn time(at: Micros) -> cairn_routing::Micros {
    cairn_routing::Micros(at.0)
}

fn worker(engine: usize) -> WorkerId {
    WorkerId(engine as u32)
}

impl Routers {
    pub(super) fn new(options: &Options, policy: &PolicyConfig, seed: u64) -> Result<Self, PolicyError> {
        let routers = (0..options.routers).map(|number| {
            let mut routing = Routing::new(RoutingConfig {
                router: RouterName(format!("router-{number}")),
                boot: 1,
                seed: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(number),
                identity_seed: seed,
                policies: Vec::new(),
            })?;
            routing.set_pool_policy(POOL, Some(policy.clone()))?;
            Ok(routing)
        });
        Ok(Self {
            routers: routers.collect::<Result<_, PolicyError>>()?,
            view: Residency::new(),
            mirrors: Vec::new(),
            root: hash::root(1),
            tickets: BTreeMap::new(),
            depths: Vec::new(),
            overlaps: Vec::new(),
            keys: Vec::new(),
            prefix: Vec::new(),
            looks_at_prefix: matches!(policy, PolicyConfig::Prefix { .. } | PolicyConfig::Chwbl { .. }),
            predicted: 0,
            overflow: 0,
        })
    }

    /// A new engine is known to every router.
    pub(super) fn add_worker(&mut self, now: Micros, engine: usize, config: &ModelConfig) {
        // GPU and host memory of an engine are two holders.
        self.view.add_holder(holder(engine, Medium::Gpu));
        self.view.add_holder(holder(engine, Medium::Cpu));
        self.mirrors
            .resize_with(self.mirrors.len().max(2 * (engine + 1)), Mirror::default);
        let mut facts = WorkerFacts::new(worker(engine), POOL);
        facts.max_num_seqs = config.max_num_seqs;
        facts.capacity_tokens = u64::from(config.gpu_blocks - 1) * u64::from(config.block_size);
        facts.max_model_len = config.max_model_len;
        for router in &mut self.routers {
            router.set_worker(time(now), facts.clone());
        }
    }

    /// An engine gets no further requests.
    pub(super) fn drain(&mut self, engine: usize) {
        for router in &mut self.routers {
            router.update_worker(worker(engine), |facts| facts.draining = true);
        }
    }

    /// An engine restarted: all that was known of its cache goes.
    pub(super) fn forget(&mut self, engine: usize) {
        for medium in [Medium::Gpu, Medium::Cpu] {
            self.view.clear(holder(engine, medium));
            self.mirrors[holder(engine, medium).0 as usize].blocks = LookupMap::default();
        }
        for router in &mut self.routers {
            router.forget_cache(worker(engine));
        }
    }

    /// Takes an engine's events into the view.
    pub(super) fn see(&mut self, engine: usize, events: &[CacheEvent]) {
        for event in events {
            match event {
                CacheEvent::Stored {
                    hashes, parent, medium, ..
                } => self.stored(engine, *medium, *parent, hashes),
                CacheEvent::Removed { hashes, medium } => self.removed(engine, *medium, hashes),
                CacheEvent::Cleared => self.forget(engine),
            }
        }
    }

    fn stored(&mut self, engine: usize, medium: Medium, parent: Option<EngineHash>, hashes: &[EngineHash]) {
        let place = holder(engine, medium);
        let depth = match parent {
            None => 0,
            Some(parent) => {
                let known = |medium| {
                    self.mirrors[holder(engine, medium).0 as usize]
                        .blocks
                        .get(&parent)
                        .map(|b| b.0)
                };
                match known(medium).or_else(|| known(Medium::Gpu)) {
                    Some(depth) => depth,
                    None => return,
                }
            }
        };
        let mirror = &mut self.mirrors[place.0 as usize];
        let mut fresh = Vec::with_capacity(hashes.len());
        for (at, hash) in hashes.iter().enumerate() {
            let entry = mirror.blocks.entry(*hash).or_insert((depth + at as u32 + 1, 0));
            entry.1 += 1;
            if entry.1 == 1 {
                fresh.push(BlockKey(hash.0));
            }
        }
        if fresh.len() < hashes.len() && !fresh.is_empty() {
            // A copy among new ones: tell the whole stretch, which the view takes as it is.
            fresh = hashes.iter().map(|hash| BlockKey(hash.0)).collect();
        }
        if fresh.is_empty() {
            return;
        }
        let anchor = BlockKey(parent.unwrap_or(self.root).0);
        let beside = [holder(engine, Medium::Gpu)];
        let told = self.view.store_beside(place, &beside, anchor, Depth(depth), 0, &fresh);
        debug_assert!(
            !matches!(told, Stored::UnknownHolder),
            "holders are added with their engines"
        );
    }

    fn removed(&mut self, engine: usize, medium: Medium, hashes: &[EngineHash]) {
        let place = holder(engine, medium);
        for hash in hashes {
            let mirror = &mut self.mirrors[place.0 as usize];
            let Some(entry) = mirror.blocks.get_mut(hash) else {
                continue;
            };
            entry.1 -= 1;
            let (depth, copies) = *entry;
            if copies == 0 {
                mirror.blocks.remove(hash);
                self.view.remove(place, BlockKey(hash.0), Depth(depth), 1);
            }
        }
    }

    /// Tells every router an engine's load.
    pub(super) fn report_load(&mut self, now: Micros, engine: usize, gauges: Gauges) {
        let report = LoadReport {
            running: gauges.running as u32,
            waiting: (gauges.waiting + gauges.loading) as u32,
            kv_usage: gauges.kv_usage as f32,
            age: cairn_routing::Micros(0),
        };
        for router in &mut self.routers {
            router.on_load_report(time(now), worker(engine), &report);
        }
    }

    /// Routers tell each other what they reserved.
    pub(super) fn exchange(&mut self, now: Micros) {
        let frames: Vec<RouterFrame> = self.routers.iter_mut().map(|router| router.frame(time(now))).collect();
        for (at, router) in self.routers.iter_mut().enumerate() {
            for (from, frame) in frames.iter().enumerate() {
                if from != at {
                    router.on_router_frame(time(now), frame);
                }
            }
        }
    }

    /// Decides for one request and reserves; `None` when no worker can take it.
    pub(super) fn decide(
        &mut self,
        now: Micros,
        index: usize,
        prompt: &[Token],
        output: u32,
        session: &str,
        config: &ModelConfig,
    ) -> Option<usize> {
        let size = config.block_size as usize;
        self.keys.clear();
        let mut parent = self.root;
        for block in prompt.chunks_exact(size) {
            parent = hash::next(parent, block, None, None);
            self.keys.push(BlockKey(parent.0));
        }
        self.prefix.clear();
        if self.looks_at_prefix {
            for token in prompt.iter().take(PREFIX_BYTES / 4) {
                self.prefix.extend_from_slice(&token.to_le_bytes());
            }
        }
        self.overlap(prompt.len() as u32, size as u32);
        let facts = RequestFacts {
            pool: POOL,
            prompt_tokens: prompt.len() as u32,
            block_tokens: size as u32,
            keys: &self.keys,
            affinity: session.as_bytes(),
            prefix: &self.prefix,
            expected_output: output,
            ..RequestFacts::default()
        };
        let at = index % self.routers.len();
        let router = &mut self.routers[at];
        let choice = router.decide(time(now), &facts, &self.overlaps).ok()?;
        let ticket = router.reserve(time(now), &choice, &facts)?;
        self.predicted += u64::from(choice.predicted.tokens());
        self.overflow += u64::from(choice.reason == Reason::Overflow);
        self.tickets.insert(index, (at, ticket));
        Some(choice.prefill_worker().0 as usize)
    }

    fn overlap(&mut self, prompt: u32, size: u32) {
        self.view.match_prefix(&self.keys, &mut self.depths);
        let most = (prompt - 1) / size * size;
        self.overlaps.clear();
        for engine in 0..self.mirrors.len() / 2 {
            let depth = |medium| self.depths.get(holder(engine, medium).0 as usize).copied().unwrap_or(0);
            let gpu = (depth(Medium::Gpu) * size).min(most);
            let cpu = (depth(Medium::Cpu) * size).min(most).saturating_sub(gpu);
            self.overlaps.push(WorkerOverlap {
                worker: worker(engine),
                overlap: Overlap { gpu, cpu, shared: 0 },
            });
        }
    }

    /// A request's first token came.
    pub(super) fn first_token(&mut self, now: Micros, index: usize) {
        if let Some((router, ticket)) = self.tickets.get_mut(&index) {
            self.routers[*router].first_token(time(now), ticket);
        }
    }

    /// A request ended.
    pub(super) fn finish(&mut self, now: Micros, index: usize, finish: &Finish) {
        let Some((router, mut ticket)) = self.tickets.remove(&index) else {
            return;
        };
        let router = &mut self.routers[router];
        router.first_token(time(now), &mut ticket);
        router.finish(
            time(now),
            ticket,
            Ending::Done {
                cached_tokens: Some(finish.cached.total()),
            },
            None,
        );
    }

    /// A request was lost with its engine.
    pub(super) fn lost(&mut self, now: Micros, index: usize) {
        if let Some((router, ticket)) = self.tickets.remove(&index) {
            let blamed = ticket.plan();
            let blamed = match blamed {
                cairn_routing::Plan::Whole { worker } => worker,
                cairn_routing::Plan::Split { prefill, .. } => prefill,
            };
            self.routers[router].finish(time(now), ticket, Ending::Fault, Some(blamed));
        }
    }
}

/// The holder of one medium of one engine.
fn holder(engine: usize, medium: Medium) -> HolderId {
    HolderId(match medium {
        Medium::Gpu => 2 * engine as u32,
        Medium::Cpu => 2 * engine as u32 + 1,
    })
}
