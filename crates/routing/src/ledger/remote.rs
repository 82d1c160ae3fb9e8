//! Other routers' reservations: absolute figures, replaced as a whole, dead a second after the last frame.

use std::collections::BTreeMap;

use cairn_blocks::BlockKey;
use cairn_index::WorkerId;

use super::{LedgerCounters, Reserved};
use crate::Micros;
use crate::ids::{RouterName, Slot};

/// Entries of a router die this long after its last frame; frames come at least every 50 ms.
pub const FRAME_LIFE: Micros = Micros::from_ms(1_000);

/// Most other routers that are followed; a deployment has one per few thousand requests a second.
pub const MAX_REMOTE_ROUTERS: usize = 256;

/// Most workers that a frame may name.
pub const MAX_WORKERS_PER_FRAME: usize = 8_192;

/// One worker's part of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteReservation {
    /// Which worker.
    pub worker: WorkerId,
    /// Requests.
    pub requests: u32,
    /// Prefill work outstanding, in tokens at no context, without what is done of it.
    pub prefill_tokens: u64,
    /// Context tokens of running answers.
    pub decode_tokens: u64,
}

/// A prefix that was just routed to a worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SpeculativePrefix {
    /// Where to.
    pub worker: WorkerId,
    /// Every `stride`-th key of the prompt, the first at depth `stride * (first + 1)`.
    pub keys: Vec<BlockKey>,
    /// In blocks.
    pub stride: u32,
    /// Strides above `keys[0]` that the worker held already, left out; 0 where `keys[0]` is at depth `stride`.
    pub first: u32,
    /// How long it may be believed.
    pub ttl: Micros,
    /// Its request had its first token: the blocks exist, and no reservation of the sender waits for them.
    pub ready: bool,
}

/// Everything a router says about itself; replaces what it said before.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RouterFrame {
    /// Which router.
    pub router: RouterName,
    /// Its start; grows with each restart.
    pub boot: u64,
    /// Counts its frames.
    pub n: u64,
    /// Its reservations; workers without any are left out.
    pub workers: Vec<RemoteReservation>,
    /// Its speculative prefixes.
    pub prefixes: Vec<SpeculativePrefix>,
}

/// What became of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameOutcome {
    /// It replaced what was known of that router.
    Taken,
    /// It is older than what is known, or this router's own.
    Ignored,
    /// There are too many routers.
    Bounded,
}

#[derive(Debug)]
struct Remote {
    boot: u64,
    n: u64,
    heard: Micros,
    loads: Vec<(Slot, Reserved)>,
}

#[derive(Debug, Default)]
pub(super) struct Remotes {
    routers: BTreeMap<RouterName, Remote>,
    sums: Vec<Reserved>,
}

impl Remotes {
    pub(super) fn sum(&self, slot: Slot) -> Reserved {
        self.sums.get(slot.at()).copied().unwrap_or_default()
    }

    pub(super) fn take(
        &mut self,
        now: Micros,
        frame: &RouterFrame,
        slot_of: impl Fn(WorkerId) -> Option<Slot>,
        counters: &mut LedgerCounters,
    ) -> FrameOutcome {
        match self.routers.get(&frame.router) {
            Some(known) if (frame.boot, frame.n) <= (known.boot, known.n) => {
                counters.frames_ignored += 1;
                return FrameOutcome::Ignored;
            }
            None if self.routers.len() >= MAX_REMOTE_ROUTERS => {
                counters.frames_bounded += 1;
                return FrameOutcome::Bounded;
            }
            Some(_) | None => {}
        }
        self.drop_router(&frame.router);
        if frame.workers.len() > MAX_WORKERS_PER_FRAME {
            counters.frames_bounded += 1;
        }
        let mut loads: Vec<(Slot, Reserved)> = Vec::with_capacity(frame.workers.len().min(MAX_WORKERS_PER_FRAME));
        for entry in frame.workers.iter().take(MAX_WORKERS_PER_FRAME) {
            let Some(slot) = slot_of(entry.worker) else { continue };
            // Hostile figures can't overflow the sums: each is cut far above what an engine can hold.
            let load = Reserved {
                requests: entry.requests.min(1 << 20),
                waiting: if entry.prefill_tokens > 0 { 1 } else { 0 },
                prefill_tokens: entry.prefill_tokens.min(1 << 36),
                prefill_work: entry.prefill_tokens.min(1 << 36),
                decode_tokens: entry.decode_tokens.min(1 << 36),
            };
            loads.push((slot, load));
        }
        for &(slot, load) in &loads {
            if self.sums.len() <= slot.at() {
                self.sums.resize(slot.at() + 1, Reserved::default());
            }
            add(&mut self.sums[slot.at()], load);
        }
        let remote = Remote {
            boot: frame.boot,
            n: frame.n,
            heard: now,
            loads,
        };
        self.routers.insert(frame.router.clone(), remote);
        FrameOutcome::Taken
    }

    pub(super) fn expire(&mut self, now: Micros, counters: &mut LedgerCounters) {
        while let Some(name) = self
            .routers
            .iter()
            .find(|(_, r)| now.since(r.heard) > FRAME_LIFE)
            .map(|(name, _)| name.clone())
        {
            self.drop_router(&name);
            counters.frames_expired += 1;
        }
    }

    fn drop_router(&mut self, name: &RouterName) {
        let Some(gone) = self.routers.remove(name) else { return };
        for (slot, load) in gone.loads {
            subtract(&mut self.sums[slot.at()], load);
        }
    }
}

fn add(sum: &mut Reserved, load: Reserved) {
    sum.requests += load.requests;
    sum.waiting += load.waiting;
    sum.prefill_tokens += load.prefill_tokens;
    sum.prefill_work += load.prefill_work;
    sum.decode_tokens += load.decode_tokens;
}

fn subtract(sum: &mut Reserved, load: Reserved) {
    sum.requests -= load.requests;
    sum.waiting -= load.waiting;
    sum.prefill_tokens -= load.prefill_tokens;
    sum.prefill_work -= load.prefill_work;
    sum.decode_tokens -= load.decode_tokens;
}
