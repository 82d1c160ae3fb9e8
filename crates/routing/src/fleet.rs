//! The workers that a router knows, with what it learned about each.

use std::collections::BTreeMap;

use cairn_index::{ByWorker, WorkerId};

use crate::breaker::Breaker;
use crate::drift::Drift;
use crate::ids::Slot;
use crate::ledger::{FRAME_LIFE, Ledger};
use crate::occupied::{Given, Occupied};
use crate::rates::{DEFAULT_SPEEDS, Rates};
use crate::{Micros, WorkerFacts};

/// A worker and what was learned about it.
#[derive(Debug)]
pub(crate) struct WorkerState {
    pub(crate) facts: WorkerFacts,
    pub(crate) rates: Rates,
    pub(crate) breaker: Breaker,
    pub(crate) drift: Drift,
    pub(crate) given: Given,
    /// Ordinal of the last decision that chose it.
    pub(crate) last_chosen: Option<u64>,
}

/// How often what a pool learned is handed to its workers.
const SHARE_EVERY: Micros = Micros::from_ms(100);

/// The first observations of a pool are handed on at once.
const EAGER_SHARES: u32 = 16;

/// Workers that serve one model, and what they showed together. Kept when the last of them goes: the next is like them.
#[derive(Debug, Default)]
struct Pool {
    /// In order of their workers' ids.
    slots: Vec<Slot>,
    occupied: Occupied,
    /// The prior of each of its workers.
    rates: Rates,
    shared_at: Micros,
    shares: u32,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Fleet {
    slots: Vec<Option<WorkerState>>,
    by_id: ByWorker<Slot>,
    pools: BTreeMap<String, Pool>,
    /// Slots whose worker is gone, and since when.
    retired: Vec<(Micros, Slot)>,
}

impl Fleet {
    pub(crate) fn slot(&self, worker: WorkerId) -> Option<Slot> {
        self.by_id.get(&worker).copied()
    }

    pub(crate) fn get(&self, slot: Slot) -> Option<&WorkerState> {
        self.slots.get(slot.at()).and_then(Option::as_ref)
    }

    pub(crate) fn get_mut(&mut self, slot: Slot) -> Option<&mut WorkerState> {
        self.slots.get_mut(slot.at()).and_then(Option::as_mut)
    }

    pub(crate) fn by_id(&self, worker: WorkerId) -> Option<&WorkerState> {
        self.get(self.slot(worker)?)
    }

    pub(crate) fn by_id_mut(&mut self, worker: WorkerId) -> Option<&mut WorkerState> {
        let slot = self.slot(worker)?;
        self.get_mut(slot)
    }

    /// Looks at every worker of a pool: has it prefills to do?
    pub(crate) fn observe_occupied(&mut self, now: Micros, pool: &str, ledger: &Ledger) {
        let Some(pool) = self.pools.get_mut(pool) else { return };
        let busy = pool.slots.iter().filter(|slot| ledger.load(now, **slot).waiting() > 0);
        pool.occupied.observe(now, busy.count() as u64, pool.slots.len() as u64);
    }

    /// Mean share of their time that a pool's workers had prefills to do.
    pub(crate) fn occupied(&self, pool: &str) -> u64 {
        self.pools.get(pool).map_or(0, |pool| pool.occupied.share())
    }

    /// Slots of a pool in order of their workers' ids.
    pub(crate) fn pool(&self, pool: &str) -> &[Slot] {
        self.pools.get(pool).map_or(&[], |pool| &pool.slots)
    }

    pub(crate) fn workers(&self) -> impl Iterator<Item = (Slot, &WorkerState)> {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(at, w)| w.as_ref().map(|w| (Slot(at as u32), w)))
    }

    /// Sets a worker's facts; its load, speeds and faults stay where it is known (a re-registration resets nothing).
    pub(crate) fn set(&mut self, now: Micros, mut facts: WorkerFacts, ledger: &mut Ledger) {
        facts.adapters.sort_unstable();
        let worker = facts.worker;
        if let Some(state) = self.by_id_mut(worker) {
            let moved = (state.facts.pool != facts.pool).then(|| state.facts.pool.clone());
            let pool = facts.pool.clone();
            state.facts = facts;
            if let (Some(old), Some(slot)) = (moved, self.slot(worker)) {
                self.unlist(&old, slot);
                self.list(&pool, worker, slot);
            }
            return;
        }
        let pool = facts.pool.clone();
        let prior = self.pools.get(&pool).map_or(DEFAULT_SPEEDS, |p| p.rates.speeds());
        let rates = Rates::from_prior(prior);
        let state = WorkerState {
            facts,
            rates,
            breaker: Breaker::default(),
            drift: Drift::default(),
            given: Given::default(),
            last_chosen: None,
        };
        let slot = self.free_slot(now, ledger);
        self.slots[slot.at()] = Some(state);
        self.by_id.insert(worker, slot);
        self.list(&pool, worker, slot);
    }

    /// A slot nobody uses: its worker went long enough ago for every other router's frame to have been replaced.
    fn free_slot(&mut self, now: Micros, ledger: &mut Ledger) -> Slot {
        let unused =
            |&(since, slot): &(Micros, Slot)| now.since(since).0 > 2 * FRAME_LIFE.0 && ledger.own_requests(slot) == 0;
        if let Some(at) = self.retired.iter().position(unused) {
            let (_, slot) = self.retired.swap_remove(at);
            ledger.reset(slot);
            return slot;
        }
        self.slots.push(None);
        Slot((self.slots.len() - 1) as u32)
    }

    fn list(&mut self, pool: &str, worker: WorkerId, slot: Slot) {
        let slots = &self.slots;
        let listed = &mut self.pools.entry(pool.to_owned()).or_default().slots;
        let at = listed.partition_point(|s| slots[s.at()].as_ref().is_some_and(|w| w.facts.worker < worker));
        listed.insert(at, slot);
    }

    fn unlist(&mut self, pool: &str, slot: Slot) {
        if let Some(pool) = self.pools.get_mut(pool) {
            pool.slots.retain(|s| *s != slot);
        }
    }

    /// Forgets a worker; its reservations still end one by one.
    pub(crate) fn remove(&mut self, now: Micros, worker: WorkerId) -> Option<Slot> {
        let slot = self.by_id.remove(&worker)?;
        if let Some(state) = self.slots[slot.at()].take() {
            self.unlist(&state.facts.pool, slot);
        }
        self.retired.push((now, slot));
        Some(slot)
    }

    /// A prefill that says something about the worker's speed, and about its pool's, which is the others' prior.
    pub(crate) fn observe_prefill(&mut self, now: Micros, slot: Slot, work: u64, time: Micros) {
        let Some(state) = self.slots.get_mut(slot.at()).and_then(Option::as_mut) else {
            return;
        };
        state.rates.observe_prefill(now, work, time);
        let Some(pool) = self.pools.get_mut(&state.facts.pool) else {
            return;
        };
        pool.rates.observe_prefill(now, work, time);
        if now.since(pool.shared_at) < SHARE_EVERY && pool.shares > EAGER_SHARES {
            return;
        }
        pool.shared_at = now;
        pool.shares = pool.shares.saturating_add(1);
        let speeds = pool.rates.speeds();
        for slot in &pool.slots {
            if let Some(other) = self.slots[slot.at()].as_mut() {
                other.rates.set_prior(speeds);
            }
        }
    }
}
