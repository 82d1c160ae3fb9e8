//! The load ledger: what this router has reserved, what other routers say they have, and what engines report beyond both.
//!
//! The three sources never share a field. Own reservations are objects that end exactly once (INV-13); another router's
//! figures are absolute and replaced as a whole; an engine's report only adds what no reservation explains.

mod remote;
mod report;

use cairn_index::WorkerId;

pub use remote::{
    FRAME_LIFE, FrameOutcome, MAX_REMOTE_ROUTERS, MAX_WORKERS_PER_FRAME, RemoteReservation, RouterFrame,
    SpeculativePrefix,
};
pub use report::{LoadReport, REPORT_LIFE};

use crate::Micros;
use crate::ids::Slot;
use remote::Remotes;
use report::Reported;

/// Most reservations one router holds at once; far beyond what a process can proxy, so that a leak shows as a refusal.
pub const MAX_RESERVATIONS: usize = 1 << 20;

/// Names one reservation; the generation makes a stale id harmless.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ReservationId {
    index: u32,
    generation: u32,
}

/// What a request will take from a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Demand {
    /// Prompt tokens that the worker computes.
    pub new_tokens: u32,
    /// The same as work (see [`crate::cost::work`]).
    pub new_work: u64,
    /// Context tokens that its answer holds.
    pub context_tokens: u32,
}

/// Sums of reservations of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Reserved {
    /// Requests.
    pub requests: u32,
    /// Those that wait for their first token.
    pub waiting: u32,
    /// Prompt tokens still to be computed.
    pub prefill_tokens: u64,
    /// The same as work.
    pub prefill_work: u64,
    /// Context tokens of running answers.
    pub decode_tokens: u64,
}

/// The load of one worker, source by source.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Load {
    /// This router's reservations.
    pub own: Reserved,
    /// All other routers' reservations.
    pub others: Reserved,
    /// Running requests in the engine's report that no reservation explains.
    pub unexplained_running: u32,
    /// Waiting requests in the engine's report that no reservation explains.
    pub unexplained_waiting: u32,
    /// KV use that the engine reports, in 1/1024 of its capacity.
    pub kv_usage: u32,
    /// How old the engine's report is; `None` where there is none that counts.
    pub report_age: Option<Micros>,
    /// How long the oldest prefill of this router has been at the head of the worker's queue.
    pub head_age: Micros,
    /// Work of that prefill.
    pub head_work: u64,
}

impl Load {
    /// Requests on the worker, whoever sent them.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.own.requests + self.others.requests + self.unexplained_running + self.unexplained_waiting
    }

    /// Those that wait for their first token.
    #[must_use]
    pub fn waiting(&self) -> u32 {
        self.own.waiting + self.others.waiting + self.unexplained_waiting
    }
}

/// How often a bound or a rule of the ledger was hit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LedgerCounters {
    /// Reservations refused at [`MAX_RESERVATIONS`].
    pub refused: u64,
    /// Releases of a reservation that had ended.
    pub released_twice: u64,
    /// Frames that were older than what is known, or the router's own.
    pub frames_ignored: u64,
    /// Frames beyond [`MAX_REMOTE_ROUTERS`], or entries beyond [`MAX_WORKERS_PER_FRAME`].
    pub frames_bounded: u64,
    /// Routers whose entries died for want of frames.
    pub frames_expired: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Prefill,
    Decode,
}

#[derive(Clone, Copy, Debug)]
struct Reservation {
    slot: Slot,
    demand: Demand,
    stage: Stage,
    since: Micros,
    /// Neighbours in the worker's list of waiting prefills.
    older: Option<u32>,
    newer: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    generation: u32,
    /// `None` while free.
    live: Option<Reservation>,
}

#[derive(Clone, Debug, Default)]
struct WorkerLoad {
    own: Reserved,
    /// Oldest and newest reservation that waits for its first token.
    oldest: Option<u32>,
    newest: Option<u32>,
    /// When the worker last finished a prefill of ours.
    last_first_token: Option<Micros>,
    reported: Reported,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Ledger {
    workers: Vec<WorkerLoad>,
    entries: Vec<Entry>,
    free: Vec<u32>,
    live: usize,
    remotes: Remotes,
    counters: LedgerCounters,
}

/// What was observed when the first token of a reservation came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FirstToken {
    /// Where.
    pub(crate) slot: Slot,
    /// From the later of the reservation and the worker's previous first token: its own service time.
    pub service: Micros,
    /// From the reservation.
    pub ttft: Micros,
    /// What was reserved.
    pub demand: Demand,
    /// Whether only this router's requests were waiting there, so that `service` says something about the worker.
    pub alone: bool,
}

/// What was observed when a reservation ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ended {
    pub(crate) slot: Slot,
    /// From the first token to the end; `None` where there was no first token.
    pub decode: Option<Micros>,
}

impl Ledger {
    /// Counts of bounds and rules hit.
    #[must_use]
    pub fn counters(&self) -> LedgerCounters {
        self.counters
    }

    /// Reservations that haven't ended.
    #[must_use]
    pub fn live(&self) -> usize {
        self.live
    }

    fn worker_mut(&mut self, slot: Slot) -> &mut WorkerLoad {
        if self.workers.len() <= slot.at() {
            self.workers.resize_with(slot.at() + 1, WorkerLoad::default);
        }
        &mut self.workers[slot.at()]
    }

    /// Forgets the engine's report and history of a slot that gets a new worker; it must hold no reservation.
    pub(crate) fn reset(&mut self, slot: Slot) {
        let worker = self.worker_mut(slot);
        debug_assert_eq!(
            worker.own.requests, 0,
            "a slot is reused only when all reservations have ended"
        );
        *worker = WorkerLoad::default();
    }

    /// Own requests in flight on a worker.
    pub(crate) fn own_requests(&self, slot: Slot) -> u32 {
        self.workers.get(slot.at()).map_or(0, |w| w.own.requests)
    }

    /// Counts a request from now on; `None` at [`MAX_RESERVATIONS`].
    pub(crate) fn reserve(&mut self, now: Micros, slot: Slot, demand: Demand) -> Option<ReservationId> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.entries.len() < MAX_RESERVATIONS => {
                self.entries.push(Entry {
                    generation: 0,
                    live: None,
                });
                (self.entries.len() - 1) as u32
            }
            None => {
                self.counters.refused += 1;
                return None;
            }
        };
        let worker = self.worker_mut(slot);
        let own = &mut worker.own;
        own.requests += 1;
        own.waiting += 1;
        own.prefill_tokens += u64::from(demand.new_tokens);
        own.prefill_work += demand.new_work;
        let older = worker.newest.replace(index);
        worker.oldest.get_or_insert(index);
        let now_in_flight = worker.own.requests;
        worker.reported.on_in_flight(now, now_in_flight);
        if let Some(older) = older {
            self.live_mut(older).newer = Some(index);
        }
        let entry = &mut self.entries[index as usize];
        entry.live = Some(Reservation {
            slot,
            demand,
            stage: Stage::Prefill,
            since: now,
            older,
            newer: None,
        });
        self.live += 1;
        Some(ReservationId {
            index,
            generation: entry.generation,
        })
    }

    fn live_mut(&mut self, index: u32) -> &mut Reservation {
        self.entries[index as usize]
            .live
            .as_mut()
            .expect("a listed reservation is live")
    }

    fn find(&self, id: ReservationId) -> Option<Reservation> {
        self.entries
            .get(id.index as usize)
            .filter(|e| e.generation == id.generation)
            .and_then(|e| e.live)
    }

    /// The worker of a live reservation.
    pub(crate) fn slot_of(&self, id: ReservationId) -> Option<Slot> {
        self.find(id).map(|r| r.slot)
    }

    /// The prefill is done: its tokens stop counting as queued and start counting as context.
    ///
    /// `None` where the reservation has ended or had its first token.
    pub fn first_token(&mut self, now: Micros, id: ReservationId) -> Option<FirstToken> {
        let found = self.find(id).filter(|r| r.stage == Stage::Prefill)?;
        let alone = self.others(found.slot).waiting == 0 && self.worker_mut(found.slot).reported.waiting_beyond() == 0;
        let worker = &mut self.workers[found.slot.at()];
        let busy_since = worker
            .last_first_token
            .map_or(found.since, |last| last.max(found.since));
        worker.last_first_token = Some(now);
        self.start_decode(now, id.index, found);
        Some(FirstToken {
            slot: found.slot,
            service: now.since(busy_since),
            ttft: now.since(found.since),
            demand: found.demand,
            alone,
        })
    }

    /// Like [`Ledger::first_token`] where nobody saw the first token: the stage changes, and nothing is learned.
    pub fn assume_first_token(&mut self, now: Micros, id: ReservationId) {
        let Some(found) = self.find(id).filter(|r| r.stage == Stage::Prefill) else {
            return;
        };
        self.start_decode(now, id.index, found);
    }

    fn start_decode(&mut self, now: Micros, index: u32, found: Reservation) {
        self.unlink(index, found);
        let own = &mut self.workers[found.slot.at()].own;
        own.waiting -= 1;
        own.prefill_tokens -= u64::from(found.demand.new_tokens);
        own.prefill_work -= found.demand.new_work;
        own.decode_tokens += u64::from(found.demand.context_tokens);
        let entry = self.live_mut(index);
        entry.stage = Stage::Decode;
        entry.since = now;
    }

    /// Ends a reservation; `None`, and counted, where it had ended before.
    pub fn release(&mut self, now: Micros, id: ReservationId) -> Option<Ended> {
        let Some(found) = self.find(id) else {
            self.counters.released_twice += 1;
            return None;
        };
        if found.stage == Stage::Prefill {
            self.unlink(id.index, found);
        }
        let worker = &mut self.workers[found.slot.at()];
        let own = &mut worker.own;
        own.requests -= 1;
        match found.stage {
            Stage::Prefill => {
                own.waiting -= 1;
                own.prefill_tokens -= u64::from(found.demand.new_tokens);
                own.prefill_work -= found.demand.new_work;
            }
            Stage::Decode => own.decode_tokens -= u64::from(found.demand.context_tokens),
        }
        let in_flight = own.requests;
        worker.reported.on_in_flight(now, in_flight);
        let entry = &mut self.entries[id.index as usize];
        entry.live = None;
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(id.index);
        self.live -= 1;
        Some(Ended {
            slot: found.slot,
            decode: (found.stage == Stage::Decode).then(|| now.since(found.since)),
        })
    }

    /// Takes a reservation out of its worker's list of waiting prefills.
    fn unlink(&mut self, index: u32, found: Reservation) {
        match found.older {
            Some(older) => self.live_mut(older).newer = found.newer,
            None => self.workers[found.slot.at()].oldest = found.newer,
        }
        match found.newer {
            Some(newer) => self.live_mut(newer).older = found.older,
            None => self.workers[found.slot.at()].newest = found.older,
        }
        let entry = self.live_mut(index);
        entry.older = None;
        entry.newer = None;
    }

    /// Takes an engine's own report.
    pub(crate) fn on_report(&mut self, now: Micros, slot: Slot, report: &LoadReport) {
        let others = self.others(slot).requests;
        self.worker_mut(slot).reported.take(now, report, others);
    }

    /// Takes another router's frame.
    pub(crate) fn on_frame(
        &mut self,
        now: Micros,
        frame: &RouterFrame,
        slot_of: impl Fn(WorkerId) -> Option<Slot>,
    ) -> FrameOutcome {
        self.remotes.take(now, frame, slot_of, &mut self.counters)
    }

    /// Drops what other routers and engines said too long ago.
    pub(crate) fn expire(&mut self, now: Micros) {
        self.remotes.expire(now, &mut self.counters);
    }

    fn others(&self, slot: Slot) -> Reserved {
        self.remotes.sum(slot)
    }

    /// The load of one worker.
    pub(crate) fn load(&self, now: Micros, slot: Slot) -> Load {
        let others = self.others(slot);
        let Some(worker) = self.workers.get(slot.at()) else {
            return Load {
                others,
                ..Load::default()
            };
        };
        let head = worker.oldest.and_then(|index| self.entries[index as usize].live);
        let (head_age, head_work) = head.map_or((Micros(0), 0), |r| {
            let since = worker.last_first_token.map_or(r.since, |last| last.max(r.since));
            (now.since(since), r.demand.new_work)
        });
        let fresh = worker.reported.fresh(now);
        Load {
            own: worker.own,
            others,
            unexplained_running: fresh.map_or(0, |r| r.running_beyond),
            unexplained_waiting: fresh.map_or(0, |r| r.waiting_beyond),
            kv_usage: fresh.map_or(0, |r| r.kv_usage),
            report_age: fresh.map(|r| now.since(r.read_at)),
            head_age,
            head_work,
        }
    }

    /// Own reservations of every worker that has any.
    pub(crate) fn own(&self) -> impl Iterator<Item = (Slot, Reserved)> + '_ {
        let busy = self.workers.iter().enumerate().filter(|(_, w)| w.own.requests > 0);
        busy.map(|(at, w)| (Slot(at as u32), w.own))
    }
}

#[cfg(test)]
#[path = "ledger/tests.rs"]
mod tests;
