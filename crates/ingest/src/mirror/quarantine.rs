//! Blocks whose place isn't known yet: below an unknown parent, or announced without tokens before their chain.

use std::collections::VecDeque;

use cairn_blocks::Token;

use super::node::TIERS;
use crate::EngineHash;
use crate::fixed_hash::FixedMap;

/// Most blocks kept: what one long prompt of 16-token blocks has at 256 k tokens.
const MAX_BLOCKS: usize = 16 << 10;
/// Most tokens kept, 8 MiB.
const MAX_TOKENS: usize = 2 << 20;

/// One block that waits.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    /// The block above; `None` where only the hash is known.
    pub(crate) parent: Option<EngineHash>,
    pub(crate) tokens: Box<[Token]>,
    pub(crate) identities: Vec<Box<str>>,
    pub(crate) copies: [u32; TIERS],
    /// Distinguishes it from an earlier block of this hash in the queue.
    ticket: u64,
}

/// Waiting blocks, oldest given up first.
#[derive(Debug, Default)]
pub(crate) struct Quarantine {
    blocks: FixedMap<EngineHash, Waiting>,
    below: FixedMap<EngineHash, Vec<EngineHash>>,
    order: VecDeque<(EngineHash, u64)>,
    tokens: usize,
    tickets: u64,
}

impl Quarantine {
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Adds a copy of a block, with what is known of its place. Returns how many old blocks were given up for it.
    pub(crate) fn add(
        &mut self,
        hash: EngineHash,
        tier: usize,
        copies: u32,
        parent: Option<EngineHash>,
        tokens: &[Token],
        identities: &[&str],
    ) -> u64 {
        if let Some(waiting) = self.blocks.get_mut(&hash) {
            waiting.copies[tier] = waiting.copies[tier].saturating_add(copies);
            if waiting.parent.is_some() || parent.is_none() {
                return 0;
            }
            // Known by hash alone until now: the place is new.
            let copies = waiting.copies;
            self.take(hash);
            self.insert(hash, parent, tokens, identities, copies);
        } else {
            let mut all = [0; TIERS];
            all[tier] = copies;
            self.insert(hash, parent, tokens, identities, all);
        }
        self.shrink()
    }

    fn insert(
        &mut self,
        hash: EngineHash,
        parent: Option<EngineHash>,
        tokens: &[Token],
        identities: &[&str],
        copies: [u32; TIERS],
    ) {
        self.tickets += 1;
        self.tokens += tokens.len();
        let identities = identities.iter().map(|i| Box::from(*i)).collect();
        self.blocks.insert(
            hash,
            Waiting {
                parent,
                tokens: tokens.into(),
                identities,
                copies,
                ticket: self.tickets,
            },
        );
        self.order.push_back((hash, self.tickets));
        if let Some(parent) = parent {
            self.below.entry(parent).or_default().push(hash);
        }
    }

    fn shrink(&mut self) -> u64 {
        let mut given_up = 0;
        while self.blocks.len() > MAX_BLOCKS || self.tokens > MAX_TOKENS {
            let Some((hash, ticket)) = self.order.pop_front() else {
                break;
            };
            if self.blocks.get(&hash).is_some_and(|w| w.ticket == ticket) {
                self.take(hash);
                given_up += 1;
            }
        }
        // Entries of blocks that left early make up at most half of the queue.
        if self.order.len() > 2 * self.blocks.len() + 64 {
            let blocks = &self.blocks;
            self.order
                .retain(|(hash, ticket)| blocks.get(hash).is_some_and(|w| w.ticket == *ticket));
        }
        given_up
    }

    /// Takes one copy away. Returns whether the block was waiting.
    pub(crate) fn remove(&mut self, hash: EngineHash, tier: usize) -> bool {
        let Some(waiting) = self.blocks.get_mut(&hash).filter(|w| w.copies[tier] > 0) else {
            return false;
        };
        waiting.copies[tier] -= 1;
        if waiting.copies == [0; TIERS] {
            self.take(hash);
        }
        true
    }

    /// Takes out a block whose place is known now.
    pub(crate) fn take(&mut self, hash: EngineHash) -> Option<Waiting> {
        let waiting = self.blocks.remove(&hash)?;
        self.tokens -= waiting.tokens.len();
        if let Some(parent) = waiting.parent
            && let Some(siblings) = self.below.get_mut(&parent)
        {
            siblings.retain(|s| *s != hash);
            if siblings.is_empty() {
                self.below.remove(&parent);
            }
        }
        Some(waiting)
    }

    /// Blocks that wait for this parent.
    pub(crate) fn below(&self, parent: EngineHash) -> Vec<EngineHash> {
        self.below.get(&parent).cloned().unwrap_or_default()
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}
