//! Routers over one view of the index: the routing core that also runs in live routers.

use std::collections::BTreeMap;

use cairn_blocks::BlockKey;
use cairn_index::{Role, WorkerId};
use cairn_routing::{
    Choice, Ending, LoadReport, Plan, PolicyConfig, PolicyError, Reason, RequestFacts, Reuse, RouterFrame, RouterName,
    Routing, RoutingConfig, Ticket, WorkerFacts,
};

use super::mirrors::Mirrors;
use super::shared::Change;
use crate::engine_model::hash::LookupMap;
use crate::engine_model::{CacheEvent, CachedTokens, EngineHash, Gauges, Medium, Micros, ModelConfig};
use crate::options::{Model, Options};
use crate::trace::Trace;

const POOL: &str = "replay";
/// Bytes of text in a token: about right for English under a large vocabulary.
const BYTES_PER_TOKEN: u32 = 4;
/// What a router expects of an answer whose length the client doesn't bound, as live routers do.
const EXPECTED_OUTPUT: u32 = 256;

/// Where a request goes.
pub(super) struct Decided {
    /// Computes the prompt.
    pub(super) engine: usize,
    /// Answers, where that is another one.
    pub(super) decode: Option<usize>,
    pub(super) fetch: Fetch,
}

/// From where blocks are to be fetched.
#[derive(Clone, Copy, Default)]
pub(super) struct Fetch {
    /// A peer, and up to which token.
    pub(super) peer: Option<(usize, u32)>,
    /// Up to which token from the shared store; 0 for nothing.
    pub(super) shared: u32,
}

/// Routers and what they see.
pub(super) struct Routers {
    routers: Vec<Routing>,
    mirrors: Mirrors,
    tickets: LookupMap<u64, (usize, Ticket)>,
    reuse: Vec<(WorkerId, Reuse)>,
    keys: Vec<BlockKey>,
    prefix: Vec<u8>,
    /// Bytes of the prompt's start that the policy looks at.
    prefix_bytes: usize,
    /// Whether requests carry their session's name.
    sessions: bool,
    peer_fetch: bool,
    may_split: bool,
    one_at_a_time: bool,
    /// Tokens in an engine block.
    block: u32,
    pub(super) predicted: u64,
    pub(super) reasons: BTreeMap<&'static str, u64>,
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
        let mut mirrors = Mirrors::new();
        if options.shared_tokens > 0 {
            mirrors.add_shared();
        }
        Ok(Self {
            routers: routers.collect::<Result<_, PolicyError>>()?,
            mirrors,
            tickets: LookupMap::default(),
            reuse: Vec::new(),
            keys: Vec::new(),
            prefix: Vec::new(),
            prefix_bytes: match policy {
                PolicyConfig::Prefix { prefix_length, .. } | PolicyConfig::Chwbl { prefix_length, .. } => {
                    *prefix_length as usize
                }
                PolicyConfig::Kv
                | PolicyConfig::Random
                | PolicyConfig::RoundRobin
                | PolicyConfig::LeastRequests
                | PolicyConfig::LeastTokens
                | PolicyConfig::Session
                | PolicyConfig::MaxHit
                | PolicyConfig::Lmetric
                | PolicyConfig::Sticky { .. } => 0,
            },
            sessions: options.session_ids || matches!(policy, PolicyConfig::Session),
            peer_fetch: options.peer_fetch,
            may_split: options.prefill > 0,
            one_at_a_time: options.model == Model::Reference,
            block: options.block_size,
            predicted: 0,
            reasons: BTreeMap::new(),
        })
    }

    /// A new engine is known to every router.
    pub(super) fn add_worker(&mut self, now: Micros, engine: usize, config: &ModelConfig, role: Role) {
        self.mirrors.add(engine);
        let mut facts = WorkerFacts::new(worker(engine), POOL);
        facts.role = role;
        // The reference model has no batch, so its limit is nothing that a router would know of.
        facts.max_num_seqs = if self.one_at_a_time { 0 } else { config.max_num_seqs };
        facts.capacity_tokens = u64::from(config.gpu_blocks - 1) * u64::from(config.block_size);
        facts.max_model_len = 0;
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

    /// An engine is away: routers' checks of it fail.
    pub(super) fn leave(&mut self, engine: usize) {
        self.set_healthy(engine, false);
    }

    /// It is there again.
    pub(super) fn come_back(&mut self, engine: usize) {
        self.set_healthy(engine, true);
    }

    fn set_healthy(&mut self, engine: usize, healthy: bool) {
        for router in &mut self.routers {
            router.update_worker(worker(engine), |facts| facts.healthy = healthy);
        }
    }

    /// An engine restarted: all that was known of its cache goes.
    pub(super) fn forget(&mut self, engine: usize) {
        self.mirrors.forget(engine);
        for router in &mut self.routers {
            router.forget_cache(worker(engine));
        }
    }

    /// Takes an engine's events into the view.
    pub(super) fn see(&mut self, engine: usize, events: &[CacheEvent]) {
        if self.mirrors.see(engine, events) {
            for router in &mut self.routers {
                router.forget_cache(worker(engine));
            }
        }
    }

    /// Takes what the shared store tells into the view.
    pub(super) fn see_shared(&mut self, changes: &[Change]) {
        self.mirrors.see_shared(changes);
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
        trace: &Trace,
        path: &[u32],
        hashes: &[EngineHash],
        tried: &[usize],
    ) -> Option<Decided> {
        let row = &trace.rows[index];
        let block = self.block;
        self.keys.clear();
        self.keys.extend(hashes.iter().map(|hash| BlockKey(hash.0)));
        self.write_prefix(trace, index, path);
        let excluded: Vec<WorkerId> = tried.iter().map(|engine| worker(*engine)).collect();
        let sources = self.find_reuse(row.input, block);
        let session = if self.sessions { trace.session(row) } else { "" };
        let facts = RequestFacts {
            pool: POOL,
            prompt_tokens: row.input,
            block_tokens: block,
            keys: &self.keys,
            affinity: session.as_bytes(),
            prefix: &self.prefix,
            expected_output: EXPECTED_OUTPUT,
            excluded: &excluded,
            may_split: self.may_split,
            ..RequestFacts::default()
        };
        let at = index % self.routers.len();
        let router = &mut self.routers[at];
        let choice = router.decide(time(now), &facts, &self.reuse).ok()?;
        let ticket = router.reserve(time(now), &choice, &facts)?;
        let engine = choice.prefill_worker().0 as usize;
        let decode = match choice.plan {
            Plan::Whole { .. } => None,
            Plan::Split { decode, .. } => Some(decode.0 as usize),
        };
        let fetch = fetch_of(&choice, &sources, engine);
        self.predicted += u64::from(if fetch.peer.is_some() || fetch.shared > 0 {
            choice.predicted.tokens()
        } else {
            choice.predicted.gpu + choice.predicted.cpu
        });
        *self.reasons.entry(choice.reason.as_str()).or_default() += 1;
        self.tickets.insert(index as u64, (at, ticket));
        Some(Decided { engine, decode, fetch })
    }

    /// Requests that went past their affine worker because of its load.
    pub(super) fn overflow(&self) -> u64 {
        self.reasons.get(Reason::Overflow.as_str()).copied().unwrap_or(0)
    }

    /// What each engine could reuse; gives who holds the longest start and how much of it, and what the shared store holds.
    fn find_reuse(&mut self, prompt: u32, size: u32) -> Fetch {
        self.mirrors.find(&self.keys);
        let most = (prompt - 1) / size * size;
        let shared = (self.mirrors.shared_depth() * size).min(most);
        self.reuse.clear();
        let mut best: Option<(usize, u32)> = None;
        for engine in 0..self.mirrors.engines() {
            let gpu = (self.mirrors.depth(engine, Medium::Gpu) * size).min(most);
            let cpu = (self.mirrors.depth(engine, Medium::Cpu) * size)
                .min(most)
                .saturating_sub(gpu);
            if gpu > best.map_or(0, |(_, tokens)| tokens) {
                best = Some((engine, gpu));
            }
            let reuse = Reuse {
                gpu,
                cpu,
                ..Reuse::default()
            };
            self.reuse.push((worker(engine), reuse));
        }
        let peer = best.filter(|_| self.peer_fetch);
        let longest = peer.map_or(0, |(_, tokens)| tokens);
        for (_, reuse) in &mut self.reuse {
            reuse.peer = longest.saturating_sub(reuse.gpu + reuse.cpu);
            reuse.shared = shared.saturating_sub(reuse.gpu + reuse.cpu + reuse.peer);
        }
        Fetch { peer, shared }
    }

    /// Text that stands for the prompt's start, as far as the policy looks: equal blocks read alike.
    fn write_prefix(&mut self, trace: &Trace, index: usize, path: &[u32]) {
        self.prefix.clear();
        let row = &trace.rows[index];
        let length = self.prefix_bytes.min((row.input * BYTES_PER_TOKEN) as usize);
        let step = (trace.block * BYTES_PER_TOKEN) as usize;
        let own = u64::MAX - index as u64;
        let mut blocks = path.iter().map(|number| u64::from(*number));
        while self.prefix.len() < length {
            let name = blocks.next().unwrap_or(own).to_le_bytes();
            let end = (self.prefix.len() + step).min(length);
            self.prefix.extend(name.iter().cycle().take(end - self.prefix.len()));
        }
    }

    /// The first leg of a split is done.
    pub(super) fn prefill_done(&mut self, now: Micros, index: usize) {
        if let Some((router, ticket)) = self.tickets.get_mut(&(index as u64)) {
            self.routers[*router].prefill_done(time(now), ticket);
        }
    }

    /// A request's first token came.
    pub(super) fn first_token(&mut self, now: Micros, index: usize) {
        if let Some((router, ticket)) = self.tickets.get_mut(&(index as u64)) {
            self.routers[*router].first_token(time(now), ticket);
        }
    }

    /// A request ended.
    pub(super) fn finish(&mut self, now: Micros, index: usize, cached: CachedTokens) {
        let Some((router, mut ticket)) = self.tickets.remove(&(index as u64)) else {
            return;
        };
        let router = &mut self.routers[router];
        router.first_token(time(now), &mut ticket);
        let ending = Ending::Done {
            cached_tokens: Some(cached.total()),
        };
        router.finish(time(now), ticket, ending, None);
    }

    /// A request was lost with its engine.
    pub(super) fn lost(&mut self, now: Micros, index: usize) {
        if let Some((router, ticket)) = self.tickets.remove(&(index as u64)) {
            let (Plan::Whole { worker } | Plan::Split { prefill: worker, .. }) = ticket.plan();
            self.routers[router].finish(time(now), ticket, Ending::Fault, Some(worker));
        }
    }

    /// An engine didn't take a request: its queue is full.
    pub(super) fn pushed_back(&mut self, now: Micros, index: usize, engine: usize) {
        if let Some((router, ticket)) = self.tickets.remove(&(index as u64)) {
            let ending = Ending::PushedBack { after: None };
            self.routers[router].finish(time(now), ticket, ending, Some(worker(engine)));
        }
    }
}

/// What a choice fetches, of what could be had.
fn fetch_of(choice: &Choice, sources: &Fetch, engine: usize) -> Fetch {
    if choice.terms.fetch_us == 0 {
        return Fetch::default();
    }
    let peer = sources.peer.filter(|(peer, _)| *peer != engine);
    Fetch {
        peer: peer.filter(|_| choice.predicted.peer > 0),
        shared: if choice.predicted.shared > 0 { sources.shared } else { 0 },
    }
}
