//! The workers that a router knows, with what it learned about each.

use std::collections::{BTreeMap, HashMap};

use cairn_index::WorkerId;

use crate::breaker::Breaker;
use crate::drift::Drift;
use crate::ids::Slot;
use crate::ledger::{FRAME_LIFE, Ledger};
use crate::occupied::Occupied;
use crate::rates::{DEFAULT_SPEEDS, Rates};
use crate::{Micros, WorkerFacts};

/// A worker and what was learned about it.
#[derive(Debug)]
pub(crate) struct WorkerState {
    pub(crate) facts: WorkerFacts,
    pub(crate) rates: Rates,
    pub(crate) breaker: Breaker,
    pub(crate) drift: Drift,
    pub(crate) occupied: Occupied,
    /// Ordinal of the last decision that chose it.
    pub(crate) last_chosen: Option<u64>,
}

/// How often what a pool learned is handed to its workers.
const SHARE_EVERY: Micros = Micros::from_ms(100);

/// The first observations of a pool are handed on at once.
const EAGER_SHARES: u32 = 16;

/// What a pool's workers showed together.
#[derive(Debug, Default)]
struct PoolRates {
    rates: Rates,
    shared_at: Micros,
    shares: u32,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Fleet {
    slots: Vec<Option<WorkerState>>,
    by_id: HashMap<WorkerId, Slot>,
    /// Slots in order of their workers' ids.
    pools: BTreeMap<String, Vec<Slot>>,
    /// Slots whose worker is gone, and since when.
    retired: Vec<(Micros, Slot)>,
    /// What a pool's workers showed, as prior for a new one.
    pool_rates: BTreeMap<String, PoolRates>,
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
        for slot in self.pools.get(pool).into_iter().flatten() {
            if let Some(state) = self.slots[slot.at()].as_mut() {
                state.occupied.observe(now, ledger.load(now, *slot).waiting() > 0);
            }
        }
    }

    /// Mean share of their time that a pool's workers had prefills to do.
    pub(crate) fn occupied(&self, pool: &str) -> u64 {
        let slots = self.pool(pool);
        let sum: u64 = slots
            .iter()
            .filter_map(|slot| self.get(*slot))
            .map(|state| state.occupied.share())
            .sum();
        sum / (slots.len() as u64).max(1)
    }

    /// Slots of a pool in order of their workers' ids.
    pub(crate) fn pool(&self, pool: &str) -> &[Slot] {
        self.pools.get(pool).map_or(&[], Vec::as_slice)
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
        let prior = self.pool_rates.get(&pool).map_or(DEFAULT_SPEEDS, |p| p.rates.speeds());
        let rates = Rates::from_prior(prior);
        let state = WorkerState {
            facts,
            rates,
            breaker: Breaker::default(),
            drift: Drift::default(),
            occupied: Occupied::default(),
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
        let listed = self.pools.entry(pool.to_owned()).or_default();
        let at = listed.partition_point(|s| slots[s.at()].as_ref().is_some_and(|w| w.facts.worker < worker));
        listed.insert(at, slot);
    }

    fn unlist(&mut self, pool: &str, slot: Slot) {
        if let Some(listed) = self.pools.get_mut(pool) {
            listed.retain(|s| *s != slot);
            if listed.is_empty() {
                self.pools.remove(pool);
            }
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
        let pool = state.facts.pool.clone();
        let pool = pool.as_str();
        if !self.pool_rates.contains_key(pool) {
            self.pool_rates.insert(pool.to_owned(), PoolRates::default());
        }
        let Some(learned) = self.pool_rates.get_mut(pool) else {
            return;
        };
        learned.rates.observe_prefill(now, work, time);
        if now.since(learned.shared_at) < SHARE_EVERY && learned.shares > EAGER_SHARES {
            return;
        }
        learned.shared_at = now;
        learned.shares = learned.shares.saturating_add(1);
        let speeds = learned.rates.speeds();
        for slot in self.pools.get(pool).into_iter().flatten() {
            // The list borrows another field than the slots.
            if let Some(other) = self.slots[slot.at()].as_mut() {
                other.rates.set_prior(speeds);
            }
        }
    }
}
