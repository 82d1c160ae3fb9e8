//! The life of a routed request: reserved at the decision, observed at its first token, released once at its end.

use cairn_index::WorkerId;

use super::{Routing, ViewState};
use crate::ledger::{Demand, ReservationId};
use crate::overlay::OverlayId;
use crate::{Choice, KeySource, Micros, Plan, RequestFacts, Slot};

/// How long a promise lives after its request's first token: by then the blocks exist, and the view shows them within
/// some hundred milliseconds.
pub const CONFIRM_LIFE: Micros = Micros::from_ms(2_000);

/// Least life of a promise while its prefill is under way.
const PROMISE_LEAST: Micros = Micros::from_ms(2_000);

/// Most: a prefill that takes longer than this has probably been lost.
const PROMISE_MOST: Micros = Micros::from_ms(60_000);

/// How long a guess about a worker without events is believed.
const GUESS_LIFE: Micros = Micros::from_ms(600_000);

/// A reserved request. Not `Clone`: it is given back to [`Routing::finish`] exactly once (INV-13).
#[derive(Debug)]
#[must_use = "a ticket that isn't given back to `finish` counts as load for ever"]
pub struct Ticket {
    plan: Plan,
    prefill: ReservationId,
    decode: Option<ReservationId>,
    promise: Option<OverlayId>,
    guess: Option<OverlayId>,
    predicted: u32,
    prompt_tokens: u32,
    prefill_done: Option<Micros>,
    /// Whether the worker's cache can be compared with the prediction.
    comparable: bool,
    answered: bool,
}

impl Ticket {
    /// Who serves it.
    #[must_use]
    pub fn plan(&self) -> Plan {
        self.plan
    }

    /// Tokens that the committed view promised.
    #[must_use]
    pub fn predicted(&self) -> u32 {
        self.predicted
    }
}

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// The whole answer was sent; the engine's `cached_tokens` where it said so.
    Done {
        /// From its usage.
        cached_tokens: Option<u32>,
    },
    /// The client went away, or the router cancelled it.
    Cancelled,
    /// The engine failed: refused, cut, timed out, or answered 5xx.
    Fault,
    /// The engine asked to be left alone (503, 429).
    PushedBack {
        /// For how long, where it said so.
        after: Option<Micros>,
    },
    /// The engine refused the request itself (4xx): the worker is fine.
    Refused,
}

impl Routing {
    /// Reserves the last decision for its request; `None` at the bound on reservations, or where the worker just went.
    pub fn reserve(&mut self, now: Micros, choice: &Choice, request: &RequestFacts<'_>) -> Option<Ticket> {
        let slot = self.fleet.slot(choice.prefill_worker())?;
        let terms = &choice.terms;
        let context = request.prompt_tokens.saturating_add(request.expected_output / 2);
        let split = match choice.plan {
            Plan::Whole { .. } => None,
            Plan::Split { decode, .. } => Some(self.fleet.slot(decode)?),
        };
        let demand = Demand {
            new_tokens: terms.new_tokens,
            new_work: terms.new_work,
            context_tokens: if split.is_some() { 0 } else { context },
        };
        let prefill = self.ledger.reserve(now, slot, demand)?;
        let decode = match split {
            None => None,
            Some(to) => {
                let demand = Demand {
                    new_tokens: 0,
                    new_work: 0,
                    context_tokens: context,
                };
                let Some(id) = self.ledger.reserve(now, to, demand) else {
                    self.ledger.release(now, prefill);
                    return None;
                };
                Some(id)
            }
        };
        // A decaying mean over about 16 requests.
        self.typical_work = (self.typical_work * 15 + terms.new_work) / 16;
        for to in [Some(slot), split].into_iter().flatten() {
            if let Some(state) = self.fleet.get_mut(to) {
                state.breaker.on_sent(now);
            }
        }
        if let Some(state) = self.fleet.get_mut(slot) {
            state.given.add(now, terms.new_work);
        }
        let state = self.fleet.get(slot)?;
        let approximate = state.facts.is_approximate();
        let text = request.key_source == KeySource::Text;
        let block = request.block_tokens.max(1);
        let expected = choice.terms.ttft().0.saturating_mul(2);
        let expires = now.plus(Micros(expected.clamp(PROMISE_LEAST.0, PROMISE_MOST.0)));
        let have = (choice.predicted.gpu.max(choice.speculative_tokens)) / block;
        let promise = if text {
            None
        } else {
            self.speculative.insert(slot, request.keys, have, expires)
        };
        let guess = (text || approximate || self.view != ViewState::Current)
            .then(|| self.approximate.insert(slot, request.keys, 0, now.plus(GUESS_LIFE)))
            .flatten();
        Some(Ticket {
            plan: choice.plan,
            prefill,
            decode,
            promise,
            guess,
            predicted: choice.predicted.tokens(),
            prompt_tokens: request.prompt_tokens,
            prefill_done: None,
            comparable: !text && choice.speculative_tokens <= choice.predicted.tokens(),
            answered: false,
        })
    }

    /// The prefill leg of a split answered; its KV is ready to be moved.
    pub fn prefill_done(&mut self, now: Micros, ticket: &mut Ticket) {
        if ticket.decode.is_none() || ticket.prefill_done.is_some() {
            return;
        }
        ticket.prefill_done = Some(now);
        self.on_prefill(now, ticket.prefill);
        self.ledger.release(now, ticket.prefill);
        self.success(ticket.plan_prefill());
        self.confirm_soon(now, ticket);
    }

    /// The first token (or the whole answer, where it isn't streamed and came at once) is here.
    pub fn first_token(&mut self, now: Micros, ticket: &mut Ticket) {
        if ticket.answered {
            return;
        }
        ticket.answered = true;
        match (ticket.decode, ticket.plan) {
            (Some(decode), Plan::Split { prefill, decode: to }) => {
                self.prefill_done(now, ticket);
                self.ledger.first_token(now, decode);
                if let (Some(done), Some(state)) = (ticket.prefill_done, self.fleet.by_id_mut(to)) {
                    state.rates.observe_transfer(now, ticket.prompt_tokens, now.since(done));
                }
                self.pairs.observe(now, prefill, to, true);
                self.success(to);
            }
            (_, Plan::Whole { .. } | Plan::Split { .. }) => {
                self.on_prefill(now, ticket.prefill);
                self.success(ticket.plan_prefill());
                self.confirm_soon(now, ticket);
            }
        }
    }

    /// The first token should be there by the choice's estimate, but an answer that isn't streamed doesn't show it: the
    /// request stops counting as a waiting prefill, and nothing is learned from it.
    pub fn assume_first_token(&mut self, now: Micros, ticket: &mut Ticket) {
        if ticket.answered {
            return;
        }
        ticket.answered = true;
        if ticket.prefill_done.is_none() {
            self.ledger.assume_first_token(now, ticket.prefill);
            self.confirm_soon(now, ticket);
        }
        if let Some(decode) = ticket.decode {
            self.ledger.assume_first_token(now, decode);
        }
    }

    fn success(&mut self, worker: WorkerId) {
        if let Some(state) = self.fleet.by_id_mut(worker) {
            state.breaker.on_success();
        }
    }

    fn on_prefill(&mut self, now: Micros, id: ReservationId) {
        let Some(seen) = self.ledger.first_token(now, id) else {
            return;
        };
        if seen.alone && seen.demand.new_work > 0 {
            self.fleet
                .observe_prefill(now, seen.slot, seen.demand.new_work, seen.service);
        }
    }

    fn confirm_soon(&mut self, now: Micros, ticket: &Ticket) {
        if let Some(promise) = ticket.promise {
            self.speculative.set_ready(promise, now.plus(CONFIRM_LIFE));
        }
    }

    /// A transfer between the legs of a split failed, before [`Routing::finish`] says how the request ended.
    pub fn transfer_failed(&mut self, now: Micros, ticket: &Ticket) {
        if let Plan::Split { prefill, decode } = ticket.plan {
            self.pairs.observe(now, prefill, decode, false);
        }
    }

    /// Ends a request, however it ended; `blamed` is the worker that `Fault` and `PushedBack` mean (the answering one
    /// where `None`).
    pub fn finish(&mut self, now: Micros, ticket: Ticket, ending: Ending, blamed: Option<WorkerId>) {
        let (first, answering) = match ticket.plan {
            Plan::Whole { worker } => (worker, worker),
            Plan::Split { prefill, decode } => (prefill, decode),
        };
        let slot = self.ledger.slot_of(ticket.prefill);
        if ticket.prefill_done.is_none() {
            self.release(now, ticket.prefill);
        }
        if let Some(decode) = ticket.decode {
            self.release(now, decode);
        }
        let failed = !ticket.answered && ticket.prefill_done.is_none() && !matches!(ending, Ending::Done { .. });
        if failed {
            for (overlay, id) in [
                (&mut self.speculative, ticket.promise),
                (&mut self.approximate, ticket.guess),
            ] {
                if let Some(id) = id {
                    overlay.withdraw(id);
                }
            }
        }
        let state = self.fleet.by_id_mut(blamed.unwrap_or(answering));
        match (ending, state) {
            (Ending::Done { cached_tokens }, _) => {
                self.success(answering);
                self.audit(slot, first, &ticket, cached_tokens);
            }
            (Ending::Refused, Some(state)) => state.breaker.on_success(),
            (Ending::Cancelled, Some(state)) => state.breaker.on_neutral(),
            (Ending::Fault, Some(state)) => {
                state.breaker.on_fault(now);
            }
            (Ending::PushedBack { after }, Some(state)) => state.breaker.on_push_back(now, after),
            (Ending::Refused | Ending::Cancelled | Ending::Fault | Ending::PushedBack { .. }, None) => {}
        }
    }

    fn release(&mut self, now: Micros, id: ReservationId) {
        let Some(ended) = self.ledger.release(now, id) else {
            return;
        };
        if let (Some(time), Some(state)) = (ended.decode, self.fleet.get_mut(ended.slot)) {
            state.rates.observe_service(now, time);
        }
    }

    fn audit(&mut self, slot: Option<Slot>, worker: WorkerId, ticket: &Ticket, cached: Option<u32>) {
        let Some(cached) = cached.filter(|_| ticket.comparable) else {
            return;
        };
        // After a removal the slot may be another worker's.
        if slot.is_some() && slot != self.fleet.slot(worker) {
            return;
        }
        if let Some(state) = self.fleet.by_id_mut(worker) {
            state.drift.observe(ticket.predicted, cached);
        }
    }
}

impl Ticket {
    fn plan_prefill(&self) -> WorkerId {
        match self.plan {
            Plan::Whole { worker } => worker,
            Plan::Split { prefill, .. } => prefill,
        }
    }
}
