//! Frames between routers: what this one says, and what the others said.

use super::Routing;
use crate::overlay::STRIDE;
use crate::{FrameOutcome, Micros, RemoteReservation, RouterFrame, SpeculativePrefix};

/// Youngest prefixes that a frame names; more than a router sends in the second or two that one lives, in bursts.
pub const MAX_FRAME_PREFIXES: usize = 128;

/// Most keys in all prefixes of a frame: 64 KiB on the wire every 50 ms at the worst.
pub const MAX_FRAME_KEYS: usize = 8_192;

pub(super) fn take(routing: &mut Routing, now: Micros, frame: &RouterFrame) -> FrameOutcome {
    if frame.router == routing.config.router {
        return FrameOutcome::Ignored;
    }
    let fleet = &routing.fleet;
    let outcome = routing.ledger.on_frame(now, frame, |worker| fleet.slot(worker));
    if outcome == FrameOutcome::Taken {
        let known = frame.prefixes.iter().take(MAX_FRAME_PREFIXES);
        let slotted = known.filter_map(|p| fleet.slot(p.worker).map(|slot| (slot, p)));
        routing.speculative.replace_router(now, &frame.router, slotted);
    }
    outcome
}

pub(super) fn make(routing: &mut Routing, now: Micros) -> RouterFrame {
    routing.speculative.expire(now);
    routing.frame_n += 1;
    let id_of = |slot| routing.fleet.get(slot).map(|w| w.facts.worker);
    let workers = routing.ledger.own().filter_map(|(slot, own)| {
        let state = routing.fleet.get(slot)?;
        let done_us = super::head_done(state, &routing.ledger.load(now, slot));
        let done = done_us * 1_000 / u64::from(state.rates.speeds().prefill_ns_per_token.max(1));
        Some(RemoteReservation {
            worker: id_of(slot)?,
            requests: own.requests,
            // Whoever has anything to prefill says so, however little is left.
            prefill_tokens: own.prefill_work.saturating_sub(done).max(u64::from(own.waiting)),
            decode_tokens: own.decode_tokens,
        })
    });
    let prefixes = routing
        .speculative
        .own(MAX_FRAME_PREFIXES)
        .filter_map(|(slot, keys, said)| {
            let worker = id_of(slot)?;
            Some(SpeculativePrefix {
                worker,
                keys: keys.to_vec(),
                stride: STRIDE,
                first: said.first,
                ttl: said.expires.since(now),
                ready: said.ready,
            })
        });
    RouterFrame {
        router: routing.config.router.clone(),
        boot: routing.config.boot,
        n: routing.frame_n,
        workers: workers.collect(),
        prefixes: prefixes.collect(),
    }
}
