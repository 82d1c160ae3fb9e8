//! Copies of shared starts: who waited for want of one, and where the next request makes one.

use super::Routing;
use crate::cost::{self, Inputs};
use crate::policy::Candidate;
use crate::starts::DISPLACED_PERCENT;
use crate::{Choice, RequestFacts};

/// Copies that waits are kept for at most: what waits longer in one go was waiting for something else too.
const KEPT_COPIES: u64 = 2;

/// Leading tokens that a candidate doesn't compute.
fn reused(c: &Candidate) -> u32 {
    c.inputs.prompt_tokens - c.terms.new_tokens
}

/// What a copy of `start` tokens costs where `have` of them are, with what it displaces.
fn price_us(inputs: &Inputs, start: u32, have: u32) -> u64 {
    let work = cost::work(start - have, have);
    work * u64::from(inputs.speeds.prefill_ns_per_token) / 1_000 * DISPLACED_PERCENT / 100
}

/// Workers for one leg of a split are chosen in pairs, whose waits these aren't.
fn serves_both(c: &Candidate) -> bool {
    !c.prefill_leg && !c.decode_leg
}

impl Routing {
    /// Tells idle candidates which start of the prompt those that waited for a copy have paid for.
    pub(super) fn offer_copies(&mut self, request: &RequestFacts<'_>, cold: bool) {
        self.known.clear();
        self.reach = 0;
        if cold {
            // Nobody has the start yet: who waits for its first copy waits for no other.
            return;
        }
        let block = request.block_tokens.max(1);
        let can = |c: &&Candidate| c.why_not.is_none() || c.prefill_leg;
        self.reach = self.candidates.iter().filter(can).map(reused).max().unwrap_or(0) / block;
        self.starts.look_up(request.keys, self.reach, &mut self.known);
        if self.known.iter().all(|k| k.waited_us == 0) {
            return;
        }
        for c in &mut self.candidates {
            if c.why_not.is_some() || !serves_both(c) || c.inputs.waiting > 0 {
                continue;
            }
            let have = reused(c);
            let paid = self.known.iter().rev().find(|k| {
                let start = k.blocks * block;
                start > have && k.waited_us >= price_us(&c.inputs, start, have)
            });
            if let Some(paid) = paid {
                c.inputs.paid_us = price_us(&c.inputs, paid.blocks * block, have);
                c.terms = c.inputs.terms();
            }
        }
    }

    /// Books what the decision's request waits for want of a copy, or pays for the copy that it makes.
    pub(super) fn settle_copies(&mut self, choice: &Choice, request: &RequestFacts<'_>) {
        let block = request.block_tokens.max(1);
        let worker = choice.prefill_worker();
        let at = self.candidates.binary_search_by_key(&worker, |c| c.worker);
        let Some(chosen) = at.ok().map(|at| &self.candidates[at]).filter(|c| serves_both(c)) else {
            return;
        };
        let has = reused(chosen);
        // Of the idlest the one with the least of the prompt: those that wait elsewhere do so because nothing starts there.
        let others = self.candidates.iter().filter(|c| c.why_not.is_none() && serves_both(c));
        let idlest = others.min_by_key(|c| (c.terms.queue_us, reused(c)));
        if let Some(idlest) = idlest.filter(|c| c.terms.queue_us < chosen.terms.queue_us) {
            let lacks = reused(idlest);
            for known in &self.known {
                let start = known.blocks * block;
                if start > lacks && start <= has {
                    let excess = chosen.terms.queue_us - idlest.terms.queue_us;
                    let most = KEPT_COPIES * price_us(&idlest.inputs, start, lacks);
                    self.starts.waited(*known, excess, most);
                }
            }
        }
        if chosen.inputs.paid_us > 0 {
            for known in self.known.iter().filter(|k| k.blocks * block > has) {
                let price = price_us(&chosen.inputs, known.blocks * block, has);
                if known.waited_us >= price {
                    self.starts.pay(*known, price);
                }
            }
        }
        if self.reach > 0 {
            self.starts.note(request.keys, self.reach, &self.known);
        }
    }
}
