//! The routing core of one router: facts and observations in, decisions and reservations out.

use std::collections::BTreeMap;

use cairn_index::{Role, WorkerId};

use crate::breaker::BreakerState;
use crate::choice::{Scratch, choose, last_resort};
use crate::cost::{self, Inputs, NEVER_CHOSEN};
use crate::decision::{AvoidedPair, RECORD_VERSION};
use crate::fleet::{Fleet, WorkerState};
use crate::ids::Slot;
use crate::ledger::Ledger;
use crate::overlay::{Overlay, OverlayLimits, Promises};
use crate::pairs::PairHealth;
use crate::policy::{Candidate, Policy, PolicyConfig, PolicyError};
use crate::starts::{Known, Starts};
use crate::{
    Choice, ChoiceError, DecisionRecord, Drift, FrameOutcome, KeySource, LedgerCounters, Load, LoadReport, Micros,
    Plan, RequestFacts, Reuse, ReuseOf, RouterFrame, RouterName, Speeds, WhyNot, WorkerFacts, draw,
};

mod copies;
mod frames;
mod lifecycle;

pub use frames::{MAX_FRAME_KEYS, MAX_FRAME_PREFIXES};
pub use lifecycle::{CONFIRM_LIFE, Ending, Ticket};

/// Prefixes on their way: a few seconds' worth at thousands of requests a second.
const SPECULATIVE: OverlayLimits = OverlayLimits {
    entries: 8_192,
    keys: 262_144,
};

/// Prefixes sent to workers whose events don't come: minutes' worth.
const APPROXIMATE: OverlayLimits = OverlayLimits {
    entries: 16_384,
    keys: 1_048_576,
};

/// Work of a request that an engine reports as waiting and nobody reserved, before this router saw any of its own.
const TYPICAL_WORK: u64 = 512;

/// How well the router's view of the index is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ViewState {
    /// The feed is up to date.
    #[default]
    Current,
    /// The feed is away; the last view still serves, with what this router sent since.
    Last,
    /// There is no view.
    Absent,
}

/// What a routing core needs to start.
#[derive(Clone, Debug)]
pub struct RoutingConfig {
    /// This router.
    pub router: RouterName,
    /// Its start; grows with each restart.
    pub boot: u64,
    /// Seed of its chance.
    pub seed: u64,
    /// Seed that all routers of a cluster share, so that they agree where an identity belongs.
    pub identity_seed: u64,
    /// Policies with other parameters than the defaults.
    pub policies: Vec<PolicyConfig>,
}

/// See the module. One per router process, behind whatever lock its shell likes.
#[derive(Debug)]
pub struct Routing {
    config: RoutingConfig,
    fleet: Fleet,
    ledger: Ledger,
    speculative: Overlay,
    approximate: Overlay,
    pairs: PairHealth,
    policies: BTreeMap<&'static str, Box<dyn Policy>>,
    pool_policies: BTreeMap<String, PolicyConfig>,
    pool_built: BTreeMap<String, Box<dyn Policy>>,
    view: ViewState,
    ordinal: u64,
    frame_n: u64,
    typical_work: u64,
    scratch: Scratch,
    candidates: Vec<Candidate>,
    promises: Promises,
    guesses: Promises,
    starts: Starts,
    /// Known starts of the request that is being decided.
    known: Vec<Known>,
    /// Blocks of it that some worker can reuse; 0 where nobody has its start yet.
    reach: u32,
}

impl Routing {
    /// Makes a core that knows no worker yet.
    pub fn new(config: RoutingConfig) -> Result<Self, PolicyError> {
        let mut policies: BTreeMap<&'static str, Box<dyn Policy>> = BTreeMap::new();
        for name in PolicyConfig::NAMES {
            policies.insert(name, PolicyConfig::by_name(name)?.build()?);
        }
        for other in &config.policies {
            policies.insert(other.name(), other.build()?);
        }
        Ok(Self {
            config,
            fleet: Fleet::default(),
            ledger: Ledger::default(),
            speculative: Overlay::new(SPECULATIVE),
            approximate: Overlay::new(APPROXIMATE),
            pairs: PairHealth::default(),
            policies,
            pool_policies: BTreeMap::new(),
            pool_built: BTreeMap::new(),
            view: ViewState::Current,
            ordinal: 0,
            frame_n: 0,
            typical_work: TYPICAL_WORK,
            scratch: Scratch::default(),
            candidates: Vec::new(),
            promises: Promises::default(),
            guesses: Promises::default(),
            starts: Starts::default(),
            known: Vec::new(),
            reach: 0,
        })
    }

    /// Sets what is known about a worker. Never touches its load.
    pub fn set_worker(&mut self, now: Micros, facts: WorkerFacts) {
        self.fleet.set(now, facts, &mut self.ledger);
    }

    /// Changes a worker's facts in place; `false` where it isn't known.
    pub fn update_worker(&mut self, worker: WorkerId, change: impl FnOnce(&mut WorkerFacts)) -> bool {
        let Some(state) = self.fleet.by_id_mut(worker) else {
            return false;
        };
        let (id, pool) = (state.facts.worker, state.facts.pool.clone());
        change(&mut state.facts);
        state.facts.adapters.sort_unstable();
        // Id and pool are identity: those go through `set_worker`.
        state.facts.worker = id;
        state.facts.pool = pool;
        true
    }

    /// Forgets a worker; requests on it still end one by one.
    pub fn remove_worker(&mut self, now: Micros, worker: WorkerId) {
        if let Some(slot) = self.fleet.remove(now, worker) {
            self.speculative.withdraw_worker(slot);
            self.approximate.withdraw_worker(slot);
            self.pairs.remove(worker);
        }
    }

    /// The worker's cache is empty (restart, reset, sleep): nothing that was promised or guessed holds.
    pub fn forget_cache(&mut self, worker: WorkerId) {
        if let Some(slot) = self.fleet.slot(worker) {
            self.speculative.withdraw_worker(slot);
            self.approximate.withdraw_worker(slot);
            if let Some(state) = self.fleet.get_mut(slot) {
                state.drift = Drift::default();
            }
        }
    }

    /// Facts of a worker.
    #[must_use]
    pub fn worker(&self, worker: WorkerId) -> Option<&WorkerFacts> {
        self.fleet.by_id(worker).map(|w| &w.facts)
    }

    /// All workers.
    pub fn workers(&self) -> impl Iterator<Item = &WorkerFacts> {
        self.fleet.workers().map(|(_, w)| &w.facts)
    }

    /// Load of a worker, source by source.
    #[must_use]
    pub fn load(&self, now: Micros, worker: WorkerId) -> Load {
        self.fleet
            .slot(worker)
            .map(|slot| self.ledger.load(now, slot))
            .unwrap_or_default()
    }

    /// Learned speeds of a worker.
    #[must_use]
    pub fn speeds(&self, worker: WorkerId) -> Option<Speeds> {
        self.fleet.by_id(worker).map(|w| w.rates.speeds())
    }

    /// Prediction audit of a worker.
    #[must_use]
    pub fn drift(&self, worker: WorkerId) -> Option<Drift> {
        self.fleet.by_id(worker).map(|w| w.drift)
    }

    /// Breaker of a worker.
    #[must_use]
    pub fn breaker(&self, now: Micros, worker: WorkerId) -> Option<BreakerState> {
        self.fleet.by_id(worker).map(|w| w.breaker.state(now))
    }

    /// Reservations that haven't ended.
    #[must_use]
    pub fn reservations(&self) -> usize {
        self.ledger.live()
    }

    /// Counts of the ledger's bounds and rules.
    #[must_use]
    pub fn ledger_counters(&self) -> LedgerCounters {
        self.ledger.counters()
    }

    /// Says how well the view is kept.
    pub fn set_view(&mut self, view: ViewState) {
        self.view = view;
    }

    /// Sets a pool's policy; `None` for Cairn's default.
    pub fn set_pool_policy(&mut self, pool: &str, policy: Option<PolicyConfig>) -> Result<(), PolicyError> {
        match policy {
            None => {
                self.pool_policies.remove(pool);
                self.pool_built.remove(pool);
            }
            Some(config) => {
                self.pool_built.insert(pool.to_owned(), config.build()?);
                self.pool_policies.insert(pool.to_owned(), config);
            }
        }
        Ok(())
    }

    /// Takes an engine's own load report.
    pub fn on_load_report(&mut self, now: Micros, worker: WorkerId, report: &LoadReport) {
        if let Some(slot) = self.fleet.slot(worker) {
            self.ledger.on_report(now, slot, report);
        }
    }

    /// Takes another router's frame.
    pub fn on_router_frame(&mut self, now: Micros, frame: &RouterFrame) -> FrameOutcome {
        frames::take(self, now, frame)
    }

    /// What this router says about itself now, for the others.
    pub fn frame(&mut self, now: Micros) -> RouterFrame {
        frames::make(self, now)
    }

    /// Decides without reserving anything or counting the decision.
    pub fn explain(
        &mut self,
        now: Micros,
        request: &RequestFacts<'_>,
        reuse: &(impl ReuseOf + ?Sized),
    ) -> Result<(Choice, DecisionRecord), ChoiceError> {
        let choice = self.decide_as(now, request, reuse, self.ordinal)?;
        Ok((choice, self.record(now, &choice, request)))
    }

    /// Decides; the candidates stay readable through [`Routing::candidates`] and [`Routing::record`] until the next call.
    pub fn decide(
        &mut self,
        now: Micros,
        request: &RequestFacts<'_>,
        reuse: &(impl ReuseOf + ?Sized),
    ) -> Result<Choice, ChoiceError> {
        let ordinal = self.ordinal;
        self.ordinal += 1;
        self.fleet.observe_occupied(now, request.pool, &self.ledger);
        let choice = self.decide_as(now, request, reuse, ordinal)?;
        self.settle_copies(&choice, request);
        for worker in [choice.prefill_worker(), choice.answering_worker()] {
            if let Some(state) = self.fleet.by_id_mut(worker) {
                state.last_chosen = Some(ordinal);
            }
        }
        Ok(choice)
    }

    /// Candidates of the last decision, sorted by worker.
    #[must_use]
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    fn decide_as(
        &mut self,
        now: Micros,
        request: &RequestFacts<'_>,
        reuse: &(impl ReuseOf + ?Sized),
        ordinal: u64,
    ) -> Result<Choice, ChoiceError> {
        self.ledger.expire(now);
        self.speculative.expire(now);
        self.approximate.expire(now);
        self.fill_candidates(now, request, reuse, ordinal);
        let draw = draw::pair(self.config.seed, ordinal);
        let policy = policy_of(&self.policies, &self.pool_built, request);
        let identity = policy.identity(request, self.config.identity_seed);
        let pairs = &self.pairs;
        let made = choose(
            policy,
            &self.candidates,
            ordinal,
            draw,
            identity,
            request.may_split,
            |p, d| pairs.avoided(now, p, d),
            &mut self.scratch,
        )?;
        let computing = match made.plan {
            Plan::Whole { worker } => worker,
            Plan::Split { prefill, .. } => prefill,
        };
        let at = self.candidates.binary_search_by_key(&computing, |c| c.worker);
        let inputs = at.map(|at| self.candidates[at].inputs).ok();
        Ok(Choice {
            plan: made.plan,
            runner_up: made.runner_up,
            reason: made.reason,
            predicted: inputs.map_or_else(Reuse::default, |i| Reuse {
                gpu: i.gpu_tokens,
                cpu: i.cpu_tokens,
                shared: i.shared_tokens,
                peer: i.peer_tokens,
            }),
            speculative_tokens: inputs.map_or(0, |i| i.speculative_tokens),
            terms: made.terms,
            ordinal,
            draw,
        })
    }

    fn fill_candidates(
        &mut self,
        now: Micros,
        request: &RequestFacts<'_>,
        reuse: &(impl ReuseOf + ?Sized),
        ordinal: u64,
    ) {
        let block = request.block_tokens.max(1);
        let text = request.key_source == KeySource::Text;
        let fleet = &self.fleet;
        let slots = fleet.pool(request.pool);
        let reuse_of = |slot: Slot| {
            let worker = fleet.get(slot).map(|w| w.facts.worker);
            if text {
                Reuse::default()
            } else {
                worker.map_or_else(Reuse::default, |w| reuse.reuse(w))
            }
        };
        self.speculative
            .look_up(request.keys, |slot| reuse_of(slot).gpu / block, &mut self.promises);
        self.approximate.look_up(request.keys, |_| 0, &mut self.guesses);
        let any_fresh = slots.iter().any(|s| self.ledger.load(now, *s).report_age.is_some());
        let promised = self.promises.most() * block;
        // Half of the prompt is on its way, and nobody has that half yet: a burst of one cold prefix.
        let half = request.prompt_tokens / 2;
        let cold = promised > half && slots.iter().all(|slot| promised >= reuse_of(*slot).gpu + half);
        let occupied = fleet.occupied(request.pool);
        let price_percent = cost::price_percent(occupied, cold);
        self.candidates.clear();
        for &slot in slots {
            let Some(state) = fleet.get(slot) else { continue };
            let load = self.ledger.load(now, slot);
            let mut held = reuse_of(slot);
            if text || self.view != ViewState::Current || state.facts.is_approximate() {
                held.gpu = held.gpu.max(self.guesses.blocks(slot) * block);
            }
            let inputs = Inputs {
                prompt_tokens: request.prompt_tokens,
                expected_output: request.expected_output,
                gpu_tokens: held.gpu,
                cpu_tokens: held.cpu,
                shared_tokens: held.shared,
                peer_tokens: held.peer,
                speculative_tokens: self.promises.blocks(slot) * block,
                trust: state.drift.trust(),
                in_flight: load.in_flight(),
                waiting: load.waiting(),
                queued_work: (load.own.prefill_work + load.others.prefill_work)
                    .saturating_sub(u64::from(self.speculative.doubled_blocks(slot)) * u64::from(block))
                    + u64::from(load.unexplained_waiting) * self.typical_work,
                head_done_us: head_done(state, &load),
                context_tokens: load.own.decode_tokens + load.others.decode_tokens,
                max_num_seqs: state.facts.max_num_seqs,
                capacity_tokens: state.facts.capacity_tokens,
                kv_usage: load.kv_usage,
                stale: any_fresh && load.report_age.is_none(),
                since_chosen: state.last_chosen.map_or(NEVER_CHOSEN, |last| {
                    ordinal.saturating_sub(last).min(u64::from(NEVER_CHOSEN - 1)) as u32
                }),
                recent_work: state.given.work(now),
                price_percent,
                paid_us: 0,
                speeds: state.rates.speeds(),
            };
            self.candidates.push(candidate(now, state, request, &load, inputs));
        }
        self.offer_copies(request, cold);
    }

    /// The last decision with all its inputs.
    #[must_use]
    pub fn record(&self, now: Micros, choice: &Choice, request: &RequestFacts<'_>) -> DecisionRecord {
        let policy = policy_of(&self.policies, &self.pool_built, request);
        let (chosen, decode) = match choice.plan {
            Plan::Whole { worker } => (worker, None),
            Plan::Split { prefill, decode } => (prefill, Some(decode)),
        };
        let mut avoided = Vec::new();
        for p in self.candidates.iter().filter(|c| request.may_split && c.prefill_leg) {
            for d in self.candidates.iter().filter(|c| c.decode_leg) {
                if self.pairs.avoided(now, p.worker, d.worker) {
                    avoided.push(AvoidedPair {
                        prefill: p.worker,
                        decode: d.worker,
                    });
                }
            }
        }
        DecisionRecord {
            version: RECORD_VERSION,
            at_us: now,
            pool: request.pool.to_owned(),
            policy: policy.config(),
            ordinal: choice.ordinal,
            draw: choice.draw,
            identity: policy.identity(request, self.config.identity_seed),
            prompt_tokens: request.prompt_tokens,
            key_source: request.key_source,
            priority: request.priority,
            may_split: request.may_split,
            avoided,
            candidates: self.candidates.clone(),
            chosen,
            decode,
            runner_up: choice.runner_up,
            reason: choice.reason,
        }
    }

    /// What another policy would have chosen of the last decision's candidates; nothing is sent or counted.
    pub fn shadow(&mut self, now: Micros, choice: &Choice, request: &RequestFacts<'_>, policy: &str) -> Option<Plan> {
        let policy = self.policies.get(policy)?;
        let identity = policy.identity(request, self.config.identity_seed);
        let pairs = &self.pairs;
        let avoided = |p, d| pairs.avoided(now, p, d);
        let (ordinal, draw, split) = (choice.ordinal, choice.draw, request.may_split);
        choose(
            &**policy,
            &self.candidates,
            ordinal,
            draw,
            identity,
            split,
            avoided,
            &mut self.scratch,
        )
        .ok()
        .map(|made| made.plan)
    }
}

/// The request's policy if it is known, else the pool's, else the default.
fn policy_of<'a>(
    policies: &'a BTreeMap<&'static str, Box<dyn Policy>>,
    pools: &'a BTreeMap<String, Box<dyn Policy>>,
    request: &RequestFacts<'_>,
) -> &'a dyn Policy {
    if let Some(policy) = request.policy.and_then(|name| policies.get(name)) {
        return &**policy;
    }
    pools
        .get(request.pool)
        .map_or_else(|| &*policies["kv"], |policy| &**policy)
}

/// How much of the head of the queue is done: the time it has had, and no more than it should take.
fn head_done(state: &WorkerState, load: &Load) -> u64 {
    if load.own.waiting == 0 {
        return 0;
    }
    let speeds = state.rates.speeds();
    let expected = u64::from(speeds.prefill_start_us) + load.head_work * u64::from(speeds.prefill_ns_per_token) / 1_000;
    load.head_age.0.min(expected)
}

fn candidate(now: Micros, state: &WorkerState, request: &RequestFacts<'_>, load: &Load, inputs: Inputs) -> Candidate {
    let facts = &state.facts;
    let against = against(now, state, request, load);
    let whole = match facts.role {
        Role::Both => true,
        Role::Decode => facts.decode_serves_whole,
        Role::Prefill => false,
    };
    let usable = against.is_none();
    Candidate {
        worker: facts.worker,
        why_not: match against {
            Some(why) if whole || !last_resort(why) => Some(why),
            None if whole => None,
            Some(_) | None => Some(WhyNot::Role),
        },
        prefill_leg: usable && facts.role == Role::Prefill,
        decode_leg: usable && facts.role == Role::Decode,
        terms: inputs.terms(),
        inputs,
    }
}

/// What speaks against a worker, whatever its role.
fn against(now: Micros, state: &WorkerState, request: &RequestFacts<'_>, load: &Load) -> Option<WhyNot> {
    let facts = &state.facts;
    if !facts.healthy {
        return Some(WhyNot::Unhealthy);
    }
    if facts.asleep {
        return Some(WhyNot::Asleep);
    }
    if facts.draining {
        return Some(WhyNot::Draining);
    }
    if request.excluded.contains(&facts.worker) {
        return Some(WhyNot::Excluded);
    }
    if !request.adapter.is_empty()
        && facts
            .adapters
            .binary_search_by(|a| a.as_str().cmp(request.adapter))
            .is_err()
    {
        return Some(WhyNot::AdapterMissing);
    }
    if facts.max_model_len > 0 && request.prompt_tokens >= facts.max_model_len {
        return Some(WhyNot::TooLong);
    }
    match state.breaker.state(now) {
        BreakerState::Open => return Some(WhyNot::BreakerOpen),
        BreakerState::Paused => return Some(WhyNot::Backpressure),
        BreakerState::Closed | BreakerState::Trial => {}
    }
    (facts.max_in_flight > 0 && load.in_flight() >= facts.max_in_flight).then_some(WhyNot::AtLimit)
}
