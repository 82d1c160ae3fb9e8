//! Routers: a view kept by the feed, and the routing core that decides over it.

use std::collections::BTreeMap;
use std::rc::Rc;

use cairn_blocks::{BlockKey, Chain, Namespace};
use cairn_index::{IndexState, LogIndex, Query, WorkerId, WorkerOverlap, codec};
use cairn_routing::{
    Ending, LoadReport, Micros, Plan as Choice, RequestFacts, RetryBudget, RouterFrame, RouterName, Routing,
    RoutingConfig, Ticket, ViewState, WorkerFacts,
};

use crate::agents::{engine_url, source_name};
use crate::model::{Answer, Event, FeedFrame, Life, Sent};
use crate::plan::{Bug, Plan};
use crate::requests::Stage;
use crate::world::{BLOCK, Link, POOL, SEED, World};

/// Own checks of the engines, frames to other routers.
const TICK_US: u64 = 50_000;
/// A node that says nothing for this long, or whose quorum is older, is left.
const STALE_US: u64 = 1_000_000;
/// A request that finds no worker waits this long before it asks again, at most [`WAITS`] times.
const WAIT_US: u64 = 200_000;
/// See [`WAIT_US`].
const WAITS: u32 = 30;

/// One router process, or the place where it runs.
pub(crate) struct Router {
    pub(crate) life: Life,
    pub(crate) up: bool,
    pub(crate) view: IndexState,
    /// Registry version that the routing core was told.
    told: u64,
    pub(crate) routing: Routing,
    pub(crate) budget: RetryBudget,
    pub(crate) following: Option<usize>,
    pub(crate) feed_conn: u64,
    /// What its node has sent it.
    pub(crate) fed: u64,
    heard_at: u64,
    pub(crate) quorum_age_us: u64,
    /// Requests on their way, by request.
    pub(crate) tickets: BTreeMap<usize, Ticket>,
    overlaps: Vec<WorkerOverlap>,
    chain: Chain,
}

fn routing(seed: u64, router: usize, boot: u64) -> Routing {
    let config = RoutingConfig {
        router: RouterName(format!("router-{router}")),
        boot,
        seed: seed ^ (router as u64) << 40 ^ boot,
        identity_seed: SEED.0,
        policies: Vec::new(),
    };
    Routing::new(config).expect("the default policies are valid")
}

impl Router {
    pub(crate) fn new(plan: &Plan, router: usize, boot: u64) -> Self {
        Self {
            life: Life(boot),
            up: true,
            view: IndexState::new(),
            told: u64::MAX,
            routing: routing(plan.seed, router, boot),
            budget: RetryBudget::default(),
            following: None,
            feed_conn: boot << 32,
            fed: 0,
            heard_at: 0,
            quorum_age_us: 0,
            tickets: BTreeMap::new(),
            overlaps: Vec::new(),
            chain: Chain::default(),
        }
    }
}

impl World {
    pub(crate) fn router_open(&mut self, router: usize) {
        let life = self.routers[router].life;
        self.after(1_000, Event::RouterFollow { router, life });
        self.after(TICK_US, Event::RouterTick { router, life });
    }

    /// `kill -9`: its requests are cut, and what it knew is gone.
    pub(crate) fn router_crash(&mut self, router: usize) {
        if !self.routers[router].up {
            return;
        }
        let boot = self.routers[router].life.0 + 1;
        let cut: Vec<usize> = self.routers[router].tickets.keys().copied().collect();
        let mut fresh = Router::new(&self.plan, router, boot);
        fresh.up = false;
        self.routers[router] = fresh;
        self.note("router dies", &[router as u64, cut.len() as u64]);
        for request in cut {
            self.cut_by_router(request);
        }
    }

    pub(crate) fn router_revive(&mut self, router: usize, life: Life) {
        if self.routers[router].life == life && !self.routers[router].up {
            self.routers[router].up = true;
            self.note("router starts", &[router as u64]);
            self.router_open(router);
        }
    }

    pub(crate) fn router_unfollow(&mut self, router: usize) {
        let place = &mut self.routers[router];
        place.following = None;
        place.feed_conn += 1;
        let life = place.life;
        let soon = self.rng.range(5_000, 100_000);
        self.after(soon, Event::RouterFollow { router, life });
    }

    pub(crate) fn router_follow(&mut self, router: usize, life: Life) {
        let place = &self.routers[router];
        if !place.up || place.life != life || place.following.is_some() {
            return;
        }
        let node = self.rng.index(self.plan.nodes);
        if !self.cluster.nodes[node].up {
            self.after(50_000, Event::RouterFollow { router, life });
            return;
        }
        let place = &mut self.routers[router];
        place.following = Some(node);
        place.heard_at = self.now;
        place.fed = place.view.applied().0;
        self.note("router follows", &[router as u64, node as u64]);
        self.feed(node, router, 0);
    }

    pub(crate) fn router_receive(&mut self, router: usize, life: Life, conn: u64, frame: FeedFrame, age: u64) {
        let place = &mut self.routers[router];
        if !place.up || place.life != life || place.feed_conn != conn {
            return;
        }
        place.heard_at = self.now;
        place.quorum_age_us = age;
        match frame {
            FeedFrame::Idle => {
                if age > STALE_US {
                    self.note("router leaves a stale node", &[router as u64]);
                    self.router_unfollow(router);
                }
                return;
            }
            FeedFrame::Snapshot { index, bytes } => match codec::decode_snapshot(bytes.as_slice()) {
                Ok(state) => {
                    if state.applied().0 != index || index < place.view.applied().0 {
                        return self.broken("INV-02", format!("router {router}: a snapshot goes back to {index}"));
                    }
                    place.view = state;
                }
                Err(error) => return self.broken("INV-03", format!("router {router}: snapshot: {error}")),
            },
            FeedFrame::Entries(entries) => {
                for (at, bytes) in entries {
                    let place = &mut self.routers[router];
                    if at != place.view.applied().0 + 1 {
                        let what = format!("router {router}: entry {at} after {:?}", place.view.applied());
                        return self.broken("INV-02", what);
                    }
                    if self.plan.bug == Some(Bug::ViewSkipsEntry) && at.is_multiple_of(101) {
                        place.view.skip_to(LogIndex(at));
                        continue;
                    }
                    match codec::decode_command(&bytes) {
                        Ok(command) => {
                            place.view.apply(LogIndex(at), &command);
                        }
                        Err(error) => return self.broken("INV-02", format!("router {router}: entry {at}: {error}")),
                    }
                }
            }
        }
        self.check_view(router);
        self.tell_routing(router);
    }

    /// Hands workers of the view to the routing core.
    fn tell_routing(&mut self, router: usize) {
        let now = self.us();
        let place = &mut self.routers[router];
        let registry = place.view.registry();
        if registry.version == place.told {
            return;
        }
        place.told = registry.version;
        let known: Vec<WorkerId> = place.routing.workers().map(|w| w.worker).collect();
        for worker in known {
            if !registry.workers.contains_key(&worker) {
                place.routing.remove_worker(now, worker);
            }
        }
        for (&id, worker) in &registry.workers {
            let healthy = place.routing.worker(id).is_none_or(|w| w.healthy);
            let mut facts = WorkerFacts::new(id, &worker.pool);
            facts.healthy = healthy;
            facts.draining = worker.draining;
            facts.confidence = registry
                .sources
                .get(&worker.source)
                .map_or(facts.confidence, cairn_index::Source::claim);
            facts.max_num_seqs = worker.spec.max_num_seqs;
            facts.capacity_tokens = worker.spec.capacity_blocks * u64::from(worker.spec.engine_block_size);
            facts.max_model_len = 640;
            place.routing.set_worker(now, facts);
        }
    }

    pub(crate) fn router_tick(&mut self, router: usize, life: Life) {
        if !self.routers[router].up || self.routers[router].life != life {
            return;
        }
        self.after(TICK_US, Event::RouterTick { router, life });
        let now = self.us();
        for engine in 0..self.engines.len() {
            let up = self.engines[engine].up;
            if let Some(worker) = self.view_worker(router, engine) {
                let was = self.routers[router].routing.worker(worker).is_some_and(|w| w.healthy);
                self.routers[router].routing.update_worker(worker, |w| w.healthy = up);
                if was && !up {
                    self.routers[router].routing.forget_cache(worker);
                }
            }
        }
        let place = &mut self.routers[router];
        let quiet = self.now - place.heard_at > STALE_US;
        place.routing.set_view(if quiet || place.quorum_age_us > STALE_US {
            ViewState::Last
        } else {
            ViewState::Current
        });
        let frame = Rc::new(place.routing.frame(now));
        if quiet && place.following.is_some() {
            self.router_unfollow(router);
        }
        self.check_frame(router, &frame);
        for other in 0..self.routers.len() {
            if other != router && (self.calm || !self.rng.percent(self.plan.soft_loss_percent)) {
                let (life, delay) = (self.routers[other].life, self.delay());
                self.after(
                    delay,
                    Event::SoftRouter {
                        router: other,
                        life,
                        frame: Rc::clone(&frame),
                    },
                );
            }
        }
    }

    pub(crate) fn router_soft(&mut self, router: usize, life: Life, frame: &RouterFrame) {
        let now = self.us();
        let place = &mut self.routers[router];
        if place.up && place.life == life {
            place.routing.on_router_frame(now, frame);
        }
    }

    pub(crate) fn spread_load(&mut self, engine: usize, report: LoadReport) {
        for router in 0..self.routers.len() {
            if self.calm || !self.rng.percent(self.plan.soft_loss_percent) {
                let (life, delay) = (self.routers[router].life, self.delay());
                let report = LoadReport {
                    age: Micros(delay),
                    ..report
                };
                self.after(
                    delay,
                    Event::SoftLoad {
                        router,
                        life,
                        source: engine,
                        report,
                    },
                );
            }
        }
    }

    pub(crate) fn router_load(&mut self, router: usize, life: Life, engine: usize, report: &LoadReport) {
        if !self.routers[router].up || self.routers[router].life != life {
            return;
        }
        let now = self.us();
        if let Some(worker) = self.view_worker(router, engine) {
            self.routers[router].routing.on_load_report(now, worker, report);
        }
    }

    fn view_worker(&self, router: usize, engine: usize) -> Option<WorkerId> {
        let registry = self.routers[router].view.registry();
        let name = source_name(engine);
        registry.sources.values().find(|s| s.name == name).map(|s| s.worker)
    }

    fn engine_of(&self, router: usize, worker: WorkerId) -> Option<usize> {
        let url = &self.routers[router]
            .view
            .registry()
            .workers
            .get(&worker)?
            .spec
            .engine_url;
        (0..self.engines.len()).find(|e| engine_url(*e) == *url)
    }

    /// Routes a request that its router has just got, or gets again after a failure.
    pub(crate) fn route(&mut self, request: usize) {
        let router = self.requests[request].router;
        let now = self.us();
        let asked = &self.requests[request];
        let (prompt, salt, excluded) = (Rc::clone(&asked.prompt), asked.salt.clone(), asked.excluded.clone());
        let salted = self.plan.bug != Some(Bug::SaltIgnored);
        let root = Namespace {
            seed: SEED,
            pool: POOL,
            block_size: BLOCK,
            adapter: "",
            salt: salt.as_deref().filter(|_| salted).unwrap_or(""),
        }
        .root();
        let place = &mut self.routers[router];
        place.chain.extend(root, BLOCK, &prompt, &[]);
        let prompt_tokens = prompt.len() as u32;
        let query = Query {
            pool: POOL,
            keys: &place.chain.keys,
            prompt_tokens,
            block_size: BLOCK,
        };
        let mut overlaps = std::mem::take(&mut place.overlaps);
        place.view.overlap(&query, &mut overlaps);
        if self.plan.bug == Some(Bug::OverlapExceedsPrompt) {
            for overlap in overlaps.iter_mut().filter(|o| o.overlap.gpu > 0) {
                overlap.overlap.gpu = prompt_tokens;
            }
        }
        self.check_overlaps(request, &overlaps);
        let keys = std::mem::take(&mut self.routers[router].chain.keys);
        let chosen = self.decide_and_reserve(router, request, &keys, &overlaps, &excluded, now);
        let place = &mut self.routers[router];
        place.chain.keys = keys;
        place.overlaps = overlaps;
        let Some((worker, predicted)) = chosen else {
            return self.wait_for_worker(request);
        };
        let Some(engine) = self.engine_of(router, worker) else {
            return self.broken(
                "INV-06",
                format!("router {router} chose worker {} which its view lacks", worker.0),
            );
        };
        let salt = self.requests[request].salt.as_deref().unwrap_or("").to_owned();
        self.check_tenancy(engine, &salt, predicted);
        self.served.insert((engine, salt));
        let asked = &mut self.requests[request];
        asked.attempt += 1;
        asked.engine = engine;
        asked.worker = Some(worker);
        asked.predicted = predicted;
        asked.stage = Stage::Sent;
        let attempt = asked.attempt;
        self.note(
            "router sends",
            &[router as u64, request as u64, engine as u64, u64::from(predicted)],
        );
        let life = self.engines[engine].life;
        let sent = Sent {
            request,
            attempt,
            router,
            router_life: self.routers[router].life,
        };
        let event = Event::EngineReceive { engine, life, sent };
        self.send(Link::ToEngine, router, engine, request as u64, event);
    }

    fn decide_and_reserve(
        &mut self,
        router: usize,
        request: usize,
        keys: &[BlockKey],
        overlaps: &Vec<WorkerOverlap>,
        excluded: &[WorkerId],
        now: Micros,
    ) -> Option<(WorkerId, u32)> {
        let asked = &self.requests[request];
        let place = &mut self.routers[router];
        let all: Vec<WorkerId> = place.routing.workers().map(|w| w.worker).collect();
        let stale = self.plan.bug == Some(Bug::StaleViewRefuses) && self.now - place.heard_at > 200_000;
        let facts = RequestFacts {
            pool: POOL,
            prompt_tokens: asked.prompt.len() as u32,
            block_tokens: BLOCK.tokens(),
            keys,
            expected_output: asked.answer,
            excluded: if stale { &all } else { excluded },
            ..RequestFacts::default()
        };
        let decided = place.routing.decide(now, &facts, overlaps);
        let choice = match decided {
            Ok(choice) => choice,
            Err(_) => {
                self.check_refusal(router, excluded);
                return None;
            }
        };
        let Choice::Whole { worker } = choice.plan else {
            return None;
        };
        let record = (self.rng.percent(5)).then(|| place.routing.record(now, &choice, &facts));
        let ticket = place.routing.reserve(now, &choice, &facts)?;
        place.tickets.insert(request, ticket);
        self.check_decision(router, &choice, record.as_ref());
        Some((worker, choice.predicted.tokens()))
    }

    /// Nobody can take it now: it waits in the router for a while.
    fn wait_for_worker(&mut self, request: usize) {
        let asked = &mut self.requests[request];
        asked.waits += 1;
        asked.stage = Stage::Waiting;
        // Everyone was tried: the next round starts afresh.
        asked.excluded.clear();
        if asked.waits > WAITS {
            asked.stage = Stage::Failed;
            return;
        }
        self.after(WAIT_US, Event::Arrive { request });
    }

    pub(crate) fn router_answer(&mut self, sent: &Sent, answer: Answer) {
        let Sent {
            request,
            attempt,
            router,
            router_life,
        } = *sent;
        let place = &self.routers[router];
        let asked = &self.requests[request];
        if !place.up || place.life != router_life || asked.attempt != attempt || asked.router != router {
            return;
        }
        let now = self.us();
        match answer {
            Answer::Token => {
                self.requests[request].stage = Stage::Streaming;
                let place = &mut self.routers[router];
                if let Some(ticket) = place.tickets.get_mut(&request) {
                    place.routing.first_token(now, ticket);
                }
            }
            Answer::Done { cached_tokens } => {
                self.note("request is answered", &[request as u64, u64::from(cached_tokens)]);
                self.give_back(
                    request,
                    Ending::Done {
                        cached_tokens: Some(cached_tokens),
                    },
                );
                let asked = &mut self.requests[request];
                asked.stage = Stage::Answered;
                self.ledgered.predicted_tokens += u64::from(asked.predicted);
                self.ledgered.cached_tokens += u64::from(cached_tokens);
            }
            Answer::Failed | Answer::PushedBack => {
                let ending = if answer == Answer::Failed {
                    Ending::Fault
                } else {
                    Ending::PushedBack { after: None }
                };
                self.give_back(request, ending);
                self.retry(request, now);
            }
        }
    }

    /// Elsewhere, before the first byte and within the budget.
    fn retry(&mut self, request: usize, now: Micros) {
        let router = self.requests[request].router;
        let streaming = self.requests[request].stage == Stage::Streaming;
        let attempts = self.requests[request].attempts_here();
        if streaming || !self.routers[router].budget.try_retry(now, attempts) {
            self.requests[request].stage = Stage::Failed;
            self.note("request fails", &[request as u64]);
            return;
        }
        let asked = &mut self.requests[request];
        if let Some(worker) = asked.worker {
            asked.excluded.push(worker);
        }
        self.route(request);
    }

    /// Ends the reservation of a request.
    pub(crate) fn give_back(&mut self, request: usize, ending: Ending) {
        let now = self.us();
        let router = self.requests[request].router;
        let place = &mut self.routers[router];
        if self.plan.bug == Some(Bug::AbortLeaks) && ending == Ending::Cancelled {
            place.tickets.remove(&request);
            return;
        }
        if let Some(ticket) = place.tickets.remove(&request) {
            place.routing.finish(now, ticket, ending, None);
        }
        if self.plan.bug == Some(Bug::DoubleRelease)
            && request.is_multiple_of(7)
            && let Some((&twin, _)) = place.tickets.first_key_value()
            && let Some(ticket) = place.tickets.remove(&twin)
        {
            place.routing.finish(now, ticket, ending, None);
        }
    }
}
