//! The invariants, by id, and where each is looked at.

use std::collections::BTreeMap;
use std::fmt;

use cairn_blocks::{Chain, Namespace};
use cairn_index::{
    BatchOutcome, Command, Confidence, DegradedReason, Incarnation, LeaseState, Query, Reply, Seq, SourceId, WorkerId,
    WorkerOverlap,
};
use cairn_routing::{Choice, DecisionRecord, MAX_FRAME_KEYS, MAX_FRAME_PREFIXES, RouterFrame};

use crate::agents::{engine_url, registered};
use crate::engines::block_size;
use crate::model::{Event, Gone};
use crate::requests::Request;
use crate::world::{BLOCK, POOL, SEED, World};

/// The world is looked at this often.
const CHECK_US: u64 = 250_000;
/// Prompts that are probed on each look.
const PROBES: usize = 4;
/// Batches without an answer that an agent may have.
const UNACKED_MAX: u64 = 16;
/// Blocks that an agent may keep aside.
const QUARANTINE_MAX: u64 = 16 << 10;
/// Entries that the leader may hold without a quorum.
const PENDING_MAX: usize = 4_200;

/// An invariant that didn't hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// Which one.
    pub invariant: &'static str,
    /// When, in microseconds.
    pub at: u64,
    /// What was seen.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} at {:.3} ms: {}",
            self.invariant,
            self.at as f64 / 1_000.0,
            self.what
        )
    }
}

/// What the checks remember.
#[derive(Debug, Default)]
pub(crate) struct Ledgered {
    pub(crate) predicted_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) looked_at: BTreeMap<&'static str, u64>,
    /// Highest acknowledged batch.
    acked: BTreeMap<(SourceId, Incarnation), Seq>,
    /// Highest committed batch.
    committed: BTreeMap<(SourceId, Incarnation), Seq>,
    /// Applied index of each router's view, by its life.
    views: BTreeMap<(usize, u64), u64>,
}

impl World {
    pub(crate) fn broken(&mut self, invariant: &'static str, what: String) {
        if self.violation.is_none() {
            self.violation = Some(Violation {
                invariant,
                at: self.now,
                what,
            });
        }
    }

    fn look(&mut self, invariant: &'static str) {
        *self.ledgered.looked_at.entry(invariant).or_default() += 1;
    }

    /// INV-01: a replica at an applied index has the digest that every other had there.
    pub(crate) fn check_replica(&mut self, node: usize, at: u64) {
        self.look("INV-01");
        let digest = self.cluster.nodes[node].state.digest();
        if self.cluster.digest_at(at) != Some(digest) {
            self.broken(
                "INV-01",
                format!(
                    "node {node} at entry {at}: {digest:?}, not {:?}",
                    self.cluster.digest_at(at)
                ),
            );
        }
    }

    /// INV-03: what a snapshot holds is what the log up to it gives.
    pub(crate) fn check_restored(&mut self, node: usize) {
        self.look("INV-03");
        let state = &self.cluster.nodes[node].state;
        let (at, digest) = (state.applied().0, state.digest());
        if self.cluster.digest_at(at) != Some(digest) {
            self.broken(
                "INV-03",
                format!("node {node}: its snapshot at {at} isn't the log's state there"),
            );
        }
    }

    /// INV-02: a view equals the index at its applied index, and never goes back.
    pub(crate) fn check_view(&mut self, router: usize) {
        self.look("INV-02");
        let place = &self.routers[router];
        let (at, digest) = (place.view.applied().0, place.view.digest());
        let last = self.ledgered.views.insert((router, place.life.0), at);
        if self.cluster.digest_at(at) != Some(digest) {
            self.broken(
                "INV-02",
                format!("router {router}'s view at entry {at} isn't the index's state there"),
            );
        } else if last.is_some_and(|last| at < last) {
            self.broken("INV-02", format!("router {router}'s view went back to {at}"));
        }
    }

    /// INV-05: of one lifetime batches apply one by one, and only of the present one.
    pub(crate) fn check_entry(
        &mut self,
        command: &Command,
        reply: &Reply,
        before: &BTreeMap<SourceId, (Incarnation, Seq)>,
    ) {
        let (Command::Batches(batches), Reply::Batches(outcomes)) = (command, reply) else {
            return;
        };
        let mut at = before.clone();
        for (batch, outcome) in batches.iter().zip(outcomes) {
            self.look("INV-05");
            if !matches!(outcome, BatchOutcome::Applied { .. }) {
                continue;
            }
            let Some((incarnation, seq)) = at.get_mut(&batch.source) else {
                self.broken(
                    "INV-05",
                    format!("a batch of unknown source {} applied", batch.source.0),
                );
                continue;
            };
            if *incarnation != batch.incarnation || batch.seq.0 != seq.0 + 1 {
                let what = format!(
                    "source {}: batch {} of lifetime {} applied after {} of {}",
                    batch.source.0, batch.seq.0, batch.incarnation.0, seq.0, incarnation.0
                );
                self.broken("INV-05", what);
                continue;
            }
            *seq = batch.seq;
            self.ledgered
                .committed
                .insert((batch.source, batch.incarnation), batch.seq);
        }
    }

    /// INV-04: nothing is acknowledged that isn't in the log.
    pub(crate) fn check_ack(&mut self, source: SourceId, incarnation: Incarnation, seq: Seq, outcome: &BatchOutcome) {
        if !matches!(outcome, BatchOutcome::Applied { .. } | BatchOutcome::Duplicate) {
            return;
        }
        self.look("INV-04");
        let key = (source, incarnation);
        let acked = self.ledgered.acked.entry(key).or_default();
        *acked = (*acked).max(seq);
    }

    /// INV-04: what was acknowledged is still there, after an election and at the end.
    pub(crate) fn check_acknowledged(&mut self) {
        self.look("INV-04");
        let lost = self.ledgered.acked.iter().find_map(|(key, acked)| {
            let there = self.ledgered.committed.get(key).copied().unwrap_or_default();
            (there < *acked).then_some((*key, *acked, there))
        });
        if let Some(((source, incarnation), acked, there)) = lost {
            let what = format!(
                "source {} lifetime {}: batch {} was acknowledged, the log ends at {}",
                source.0, incarnation.0, acked.0, there.0
            );
            self.broken("INV-04", what);
        }
    }

    /// INV-06: nothing of a removed worker is left.
    pub(crate) fn check_gone(&mut self, gone: &Gone) {
        self.look("INV-06");
        let state = &self.cluster.truth;
        let registry = state.registry();
        let left = registry.sources.contains_key(&gone.source) || registry.workers.contains_key(&gone.worker);
        // Holder ids are used again, but hardly by the very entry that removed them.
        let blocks: u64 = gone.holders.iter().map(|h| state.residency().holder_blocks(*h)).sum();
        let listed = gone
            .holders
            .iter()
            .any(|h| registry.holders.get(h).is_some_and(|h| h.source == gone.source));
        if left || listed || blocks > 0 {
            self.broken(
                "INV-06",
                format!("worker {} was removed, and {blocks} blocks are left", gone.worker.0),
            );
        }
    }

    /// INV-07: an overlap is whole blocks, and less than the prompt.
    pub(crate) fn check_overlaps(&mut self, request: usize, overlaps: &[WorkerOverlap]) {
        self.look("INV-07");
        let prompt = self.requests[request].prompt.len() as u32;
        let unit = block_size(&self.plan);
        let wrong = overlaps.iter().find(|o| {
            let all = o.overlap.gpu + o.overlap.cpu + o.overlap.shared;
            // The cap at the last token may cut a block; nothing else may.
            all >= prompt || (!o.overlap.gpu.is_multiple_of(unit) && all + 1 != prompt)
        });
        if let Some(wrong) = wrong.copied() {
            self.broken("INV-07", format!("a prompt of {prompt} tokens overlaps {wrong:?}"));
        }
    }

    /// INV-14: an engine that was never sent a tenant's requests holds nothing for it.
    pub(crate) fn check_tenancy(&mut self, engine: usize, salt: &str, predicted: u32) {
        self.look("INV-14");
        if predicted > 0 && !self.served.contains(&(engine, salt.to_owned())) {
            self.broken(
                "INV-14",
                format!("engine {engine} never saw this tenant, {predicted} tokens are credited"),
            );
        }
    }

    /// INV-10: a refusal means that nobody could have taken it.
    pub(crate) fn check_refusal(&mut self, router: usize, excluded: &[WorkerId]) {
        self.look("INV-10");
        let able = |w: &&cairn_routing::WorkerFacts| {
            w.pool == POOL && w.healthy && !w.draining && !w.asleep && !excluded.contains(&w.worker)
        };
        let worker = self.routers[router].routing.workers().find(able).map(|w| w.worker);
        if let Some(worker) = worker {
            self.broken(
                "INV-10",
                format!("router {router} refused although worker {} is well", worker.0),
            );
        }
    }

    /// INV-10 and INV-11, and that the decision comes out again from its record.
    pub(crate) fn check_decision(&mut self, router: usize, choice: &Choice, record: Option<&DecisionRecord>) {
        self.look("INV-10");
        self.look("INV-11");
        let routing = &self.routers[router].routing;
        let worse = routing.candidates().iter().find_map(|c| {
            let mut more = c.inputs;
            more.gpu_tokens += 64;
            let rounding = u64::from(c.inputs.speeds.prefill_ns_per_token) * 2 / 1_000 + 4;
            (more.terms().cost().0 > c.terms.cost().0 + rounding).then_some(c.worker)
        });
        let chosen = choice.prefill_worker();
        let well = routing
            .worker(chosen)
            .is_some_and(|w| w.healthy && !w.draining && w.pool == POOL);
        if let Some(worker) = worse {
            self.broken("INV-11", format!("64 tokens more make worker {} look worse", worker.0));
        } else if !well {
            self.broken(
                "INV-10",
                format!("worker {} was chosen although it can't serve", chosen.0),
            );
        } else if let Some(Err(error)) = record.map(DecisionRecord::verify) {
            self.broken("INV-10", format!("a decision doesn't come out again: {error}"));
        }
    }

    /// INV-12: a frame between routers is bounded.
    pub(crate) fn check_frame(&mut self, router: usize, frame: &RouterFrame) {
        self.look("INV-12");
        let keys: usize = frame.prefixes.iter().map(|p| p.keys.len()).sum();
        if frame.prefixes.len() > MAX_FRAME_PREFIXES || keys > MAX_FRAME_KEYS {
            self.broken("INV-12", format!("router {router} sends {keys} keys in one frame"));
        }
    }

    /// An audit found that index and mirror differ although no batch is under way: something was lost unseen.
    pub(crate) fn check_drift(&mut self, agent: usize) {
        self.broken("INV-08", format!("agent {agent}'s audit differs from the index"));
    }

    /// Everything that can be looked at at any time.
    pub(crate) fn check(&mut self) {
        self.after(CHECK_US, Event::Check);
        self.check_reservations();
        self.check_queues();
        self.check_acknowledged();
        self.check_claims();
    }

    /// INV-13: each request that is on its way is reserved once, and nothing else is.
    fn check_reservations(&mut self) {
        self.look("INV-13");
        for router in 0..self.routers.len() {
            let on_their_way = |r: &&Request| r.reserved() && r.router == router;
            let expected = if self.routers[router].up {
                self.requests.iter().filter(on_their_way).count()
            } else {
                0
            };
            let routing = &self.routers[router].routing;
            let (reserved, twice) = (routing.reservations(), routing.ledger_counters().released_twice);
            if reserved != expected || twice > 0 {
                let what =
                    format!("router {router}: {expected} requests, {reserved} reservations, {twice} released twice");
                return self.broken("INV-13", what);
            }
        }
    }

    /// INV-12: queues are within their limits.
    fn check_queues(&mut self) {
        self.look("INV-12");
        let pending = self.cluster.pending();
        if pending > PENDING_MAX {
            self.broken("INV-12", format!("{pending} entries wait for a quorum"));
        }
        for agent in 0..self.agents.len() {
            let Some(stats) = self.agents[agent].source.as_ref().map(cairn_ingest::Source::stats) else {
                continue;
            };
            if stats.unacked > UNACKED_MAX || stats.quarantined > QUARANTINE_MAX {
                let what = format!(
                    "agent {agent}: {} unanswered, {} kept aside",
                    stats.unacked, stats.quarantined
                );
                return self.broken("INV-12", what);
            }
        }
    }

    /// INV-08: once an exact source's window is empty, the index claims what its engine holds, no more and no less.
    fn check_claims(&mut self) {
        for agent in 0..self.agents.len() {
            self.remember_gaps(agent);
            if let Some((worker, engine)) = self.settled(agent) {
                self.look("INV-08");
                for _ in 0..PROBES {
                    if !self.asked.is_empty() {
                        let at = self.rng.index(self.asked.len());
                        self.probe(worker, engine, at);
                    }
                }
            }
        }
    }

    /// Events of this life of the engine were lost for good: after that, what was stored meanwhile and stays in use is
    /// never told again, so that less may be known than is held, though never more.
    pub(crate) fn remember_gaps(&mut self, agent: usize) {
        let place = &self.agents[agent];
        let gaps = place.source.as_ref().map_or(0, |s| s.stats().gaps);
        if gaps > place.gaps_seen {
            let engine = place.engine;
            self.engines[engine].gapped = true;
        }
        self.agents[agent].gaps_seen = gaps;
    }

    /// The worker and engine of an agent with nothing under way, whose source is exact.
    fn settled(&self, agent: usize) -> Option<(WorkerId, usize)> {
        let place = &self.agents[agent];
        let engine = &self.engines[place.engine];
        if !place.subscribed() || self.now < place.paused_until || !engine.up || !engine.idle() {
            return None;
        }
        let source = place.source.as_ref()?;
        let (id, incarnation) = registered(place)?;
        let stats = source.stats();
        let all_seen = stats.engine_seq.map_or(0, |s| s + 1) == engine.seq;
        let quiet = stats.unacked == 0 && stats.outbox == 0 && stats.quarantined == 0 && stats.buffered == 0;
        let found = self.cluster.truth.registry().sources.get(&id)?;
        let exact = found.incarnation == incarnation
            && found.confidence == Confidence::Exact
            && found.lease == LeaseState::Live
            && source.confidence() == Confidence::Exact;
        (all_seen && quiet && exact).then_some((found.worker, place.engine))
    }

    fn probe(&mut self, worker: WorkerId, engine: usize, at: usize) {
        self.look("INV-09");
        let (prompt, salt) = self.asked[at].clone();
        let seed = SEED;
        let root = Namespace {
            seed,
            pool: POOL,
            block_size: BLOCK,
            adapter: "",
            salt: salt.as_deref().unwrap_or(""),
        };
        let salted = self.plan.bug != Some(crate::plan::Bug::SaltIgnored);
        let root = if salted {
            root.root()
        } else {
            Namespace { salt: "", ..root }.root()
        };
        let chain = Chain::new(root, BLOCK, &prompt, &[]);
        let mut overlaps = Vec::new();
        // One token more than there is, so that the rule of the last token doesn't hide the last block.
        let query = Query {
            pool: POOL,
            keys: &chain.keys,
            prompt_tokens: prompt.len() as u32 + 1,
            block_size: BLOCK,
        };
        self.cluster.truth.overlap(&query, &mut overlaps);
        let claimed = overlaps
            .iter()
            .find(|o| o.worker == worker)
            .map_or(0, |o| o.overlap.gpu);
        let held = self.engines[engine].model.gpu_prefix(&prompt, None, salt.as_deref()) as u32;
        if claimed > held {
            let what = format!(
                "worker {} (engine {engine}): {claimed} tokens claimed, {held} held",
                worker.0
            );
            self.broken("INV-08", what);
        } else if claimed == 0 && held > 0 && !self.engines[engine].gapped {
            let what = format!(
                "worker {} (engine {engine}): the first key counts as unheld, yet {held} tokens are held",
                worker.0
            );
            self.broken("INV-09", what);
        } else if claimed < held && !self.engines[engine].gapped {
            let what = format!(
                "worker {} (engine {engine}): {held} tokens held, {claimed} known, yet exact",
                worker.0
            );
            self.broken("INV-08", what);
        }
    }

    /// When all has healed and traffic has ended: everyone agrees, nothing is left over, every prompt is probed.
    pub(crate) fn check_at_the_end(&mut self) {
        let end = self.cluster.len();
        self.let_replicas_finish();
        for node in 0..self.plan.nodes {
            let state = &self.cluster.nodes[node].state;
            if state.applied().0 != end {
                self.broken(
                    "INV-01",
                    format!(
                        "node {node} is at entry {} of {end}",
                        self.cluster.nodes[node].state.applied().0
                    ),
                );
            }
        }
        for router in 0..self.plan.routers {
            let at = self.routers[router].view.applied().0;
            // The last entries may be on their way.
            if at + 64 < end {
                self.broken("INV-02", format!("router {router}'s view is at entry {at} of {end}"));
            }
        }
        let unfinished = self.requests.iter().filter(|r| r.reserved()).count();
        if unfinished > 0 {
            let engines: Vec<_> = self
                .engines
                .iter()
                .map(|e| (e.up, e.jobs.len(), e.model.gauges()))
                .collect();
            self.broken("INV-13", format!("{unfinished} requests never ended: {engines:?}"));
        }
        self.check_reservations();
        self.check_acknowledged();
        for engine in 0..self.engines.len() {
            self.check_engine_at_the_end(engine);
        }
        for agent in 0..self.agents.len() {
            self.remember_gaps(agent);
            if let Some((worker, engine)) = self.settled(agent) {
                for at in 0..self.asked.len() {
                    self.probe(worker, engine, at);
                }
            }
        }
    }

    /// Every engine is spoken for, and its source exact or degraded for a reason that may last.
    fn check_engine_at_the_end(&mut self, engine: usize) {
        let url = engine_url(engine);
        let Some(worker) = self.worker_of(&url) else {
            return self.broken("INV-04", format!("engine {engine} is up and no source speaks for it"));
        };
        let registry = self.cluster.truth.registry();
        let Some(source) = registry
            .workers
            .get(&worker)
            .and_then(|w| registry.sources.get(&w.source))
        else {
            return self.broken("INV-06", format!("worker {} has no source", worker.0));
        };
        let lasting = match source.claim() {
            Confidence::Exact => true,
            // Until one turnover of the cache, which quiet traffic may not bring.
            Confidence::Degraded(DegradedReason::Gap) => true,
            // An engine that ended its requests without a new block looks silent.
            Confidence::Degraded(DegradedReason::Silent) => true,
            Confidence::Degraded(
                DegradedReason::Replaying
                | DegradedReason::Hybrid
                | DegradedReason::NoEvents
                | DegradedReason::Mismatch
                | DegradedReason::LeaseLapsed
                | DegradedReason::Bounded,
            ) => false,
        };
        if !lasting {
            self.broken(
                "INV-04",
                format!("engine {engine}: its source ends as {:?}", source.claim()),
            );
        }
    }
}
