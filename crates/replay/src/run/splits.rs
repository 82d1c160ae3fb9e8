//! Requests served by two engines: one computes the prompt and keeps its blocks, the other pulls them and answers.

use super::{ATTEMPTS, World};
use crate::engine_model::hash::LookupMap;
use crate::engine_model::{CachedTokens, Chain, Finish};
use crate::run::engines::Leg;

/// Both engines of a request, and what is known of its first leg.
#[derive(Clone, Copy, Debug)]
pub(super) struct Split {
    pub(super) prefill: usize,
    pub(super) decode: usize,
    /// What the prefill engine reused, once it is done.
    pub(super) cached: Option<CachedTokens>,
}

/// Splits under way by request.
pub(super) type Splits = LookupMap<u64, Split>;

impl World<'_> {
    /// Whether what an engine says of a request is about its first leg.
    pub(super) fn is_prefill_leg(&self, engine: usize, index: usize) -> bool {
        let split = self.splits.get(&(index as u64));
        split.is_some_and(|split| split.cached.is_none() && split.prefill == engine)
    }

    /// The prefill engine is done: the decode engine takes the request and pulls its blocks.
    pub(super) fn prefilled(&mut self, index: usize, finish: &Finish) {
        let Some(split) = self.splits.get_mut(&(index as u64)) else {
            return;
        };
        split.cached = Some(finish.cached);
        let decode = split.decode;
        self.routers.prefill_done(self.now, index);
        let row = &self.trace.rows[index];
        let (path, mut hashes) = (&mut self.path, Vec::new());
        self.trace.chains.path(row.last, path);
        self.trace
            .name_blocks(index, self.options.block_size, path, &mut hashes);
        let leg = Leg {
            chain: Chain {
                tokens: row.input,
                hashes,
            },
            remote: row.input,
            output: self.options.answer(row),
            hold: false,
        };
        match self.fleet.submit(decode, self.now, index, leg) {
            Ok(outcome) => self.settle(decode, outcome),
            Err((_, outcome)) => {
                self.settle(decode, outcome);
                self.release(index);
                self.splits.remove(&(index as u64));
                self.routers.pushed_back(self.now, index, decode);
                self.served[index].retries += 1;
                if usize::from(self.served[index].retries) < ATTEMPTS {
                    self.arrive(index);
                } else {
                    self.refuse(index);
                }
            }
        }
    }

    /// The decode engine has pulled what the prefill engine kept.
    pub(super) fn release(&mut self, index: usize) {
        let split = self.splits.get(&(index as u64)).copied();
        if let Some(split) = split.filter(|split| split.cached.is_some()) {
            let outcome = self.fleet.release(split.prefill, self.now, index);
            self.settle(split.prefill, outcome);
        }
    }
}
