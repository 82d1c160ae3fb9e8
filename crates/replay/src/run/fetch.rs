//! What a request fetches from a peer or the shared store, and how long that takes.

use super::routers::Fetch;
use super::shared::Change;
use super::{Event, Told, World};
use crate::engine_model::{CacheEvent, EngineHash, Micros, TransferStart};

/// A fetch that was asked for; the engine says how much of it it needs.
#[derive(Clone, Copy)]
pub(super) struct Fetching {
    /// Leading tokens that are to come from elsewhere, but for what the engine has.
    end: u32,
    /// Those of them that a peer holds; the rest comes from the shared store.
    peer_end: u32,
}

impl World<'_> {
    /// Leading tokens that will come from elsewhere: what the peer and the store really have.
    pub(super) fn begin_fetch(&mut self, index: usize, fetch: Fetch, hashes: &[EngineHash]) -> u32 {
        let block = self.options.block_size;
        let peer_end = fetch.peer.map_or(0, |(peer, tokens)| {
            tokens.min(self.fleet.held_blocks(peer, hashes) * block)
        });
        let shared_end = self.shared.as_mut().map_or(0, |store| {
            store.look_up(hashes);
            fetch.shared.min(store.held(hashes) * block)
        });
        let end = peer_end.max(shared_end);
        if end > 0 {
            self.fetching.insert(index as u64, Fetching { end, peer_end });
        }
        end
    }

    /// How long a transfer takes that an engine starts.
    pub(super) fn fetch_span(&mut self, index: usize, transfer: &TransferStart) -> Micros {
        let timing = &self.fleet.config().timing;
        // A decode engine that pulls from its prefill engine fetches nothing else.
        let pulls = self
            .splits
            .get(&(index as u64))
            .is_some_and(|split| split.cached.is_some());
        match self.fetching.remove(&(index as u64)) {
            Some(Fetching { end, peer_end }) if !pulls => {
                let had = end.saturating_sub(transfer.tokens);
                let of_peer = peer_end.saturating_sub(had);
                let of_store = transfer.tokens - of_peer.min(transfer.tokens);
                let peer = if of_peer > 0 {
                    timing.transfer(of_peer.into())
                } else {
                    Micros(0)
                };
                let store = if of_store > 0 {
                    timing.shared_load(of_store.into())
                } else {
                    Micros(0)
                };
                peer.plus(store)
            }
            Some(_) | None => transfer.span,
        }
    }

    /// The shared store takes what an engine stored.
    pub(super) fn share(&mut self, events: &[CacheEvent], seen: Micros) {
        let Some(store) = &mut self.shared else { return };
        let mut changes: Vec<Change> = Vec::new();
        for event in events {
            match event {
                CacheEvent::Stored { hashes, parent, .. } => store.store(*parent, hashes, &mut changes),
                CacheEvent::Removed { .. } | CacheEvent::Cleared => {}
            }
        }
        if !changes.is_empty() {
            self.published.push_back((seen, Told::Shared(changes)));
            self.at(seen, Event::Seen);
        }
    }
}
