//! Turns what changed into ops: neighbouring blocks go in one op, changes that cancelled out in none.

use cairn_blocks::{BlockKey, Depth};
use cairn_index::{HolderId, Op};

use super::Mirror;
use super::node::{DIRTY, NONE, ROOT, SENT, Slot, TIERS, TOLD_ANYWHERE};
use super::tape::{Changes, MAX_KEYS, MAX_OPS};

/// Longest walk up to something that the index knows: a chain of a million tokens at 16 a block.
const MAX_PATH: usize = 1 << 16;
/// Keys that room is made for at first, where so many changes wait.
const FIRST_KEYS: usize = 63;

/// What the next entry of the list of changes asks for.
enum Next {
    Store,
    Remove,
    Nothing,
}

impl Mirror {
    /// Whether anything waits to be told.
    #[inline]
    pub(crate) fn has_changes(&self) -> bool {
        !self.tape.is_empty() || !self.dirty.is_empty() || self.clear_first != [false; TIERS]
    }

    /// What the next batch tells: first what was written down as it happened, then what was only noted.
    #[inline]
    pub(crate) fn next_changes(&mut self, holders: &[HolderId]) -> Box<Changes> {
        match self.tape.take() {
            Some(changes) => changes,
            None => self.drain(holders, MAX_OPS, MAX_KEYS),
        }
    }

    /// Takes changes of up to about `max_keys` keys and `max_ops` ops out of the list, in order.
    #[inline(never)]
    fn drain(&mut self, holders: &[HolderId], max_ops: usize, max_keys: usize) -> Box<Changes> {
        let mut changes: Box<Changes> = Box::default();
        for (tier, holder) in holders.iter().enumerate().take(TIERS) {
            if std::mem::take(&mut self.clear_first[tier]) {
                changes.push(Op::Clear { holder: *holder }, NONE);
            }
        }
        let mut keys_left = max_keys;
        let most = changes.batch.ops.len().saturating_add(max_ops);
        while changes.batch.ops.len() < most {
            let Some(entry) = self.dirty.pop_front() else { break };
            let (slot, tier) = split(entry);
            self.arena.get_mut(slot).set(DIRTY << tier, false);
            let Some(&holder) = holders.get(tier) else { continue };
            match self.next(slot, tier) {
                Next::Nothing => {
                    if self.arena.get(slot).is_idle() {
                        self.release(slot);
                    }
                }
                Next::Remove => {
                    if let Some(op) = self.remove_run(slot, tier, holder) {
                        changes.push(op, NONE);
                        keys_left = keys_left.saturating_sub(1);
                    }
                }
                Next::Store => {
                    let full_batch = keys_left == max_keys;
                    match self.store_run(slot, tier, holder, keys_left) {
                        Run::Done(op, end, keys) => {
                            changes.push(op, end);
                            keys_left = keys_left.saturating_sub(keys);
                        }
                        Run::TooLong if full_batch => self.stats.unanchored += 1,
                        Run::TooLong => {
                            self.arena.get_mut(slot).set(DIRTY << tier, true);
                            self.dirty.push_front(entry);
                            break;
                        }
                    }
                }
            }
            if keys_left == 0 {
                break;
            }
        }
        self.swept = self.swept.min(self.dirty.len());
        changes
    }

    #[inline]
    fn next(&self, slot: Slot, tier: usize) -> Next {
        match (self.is_effective(slot, tier), self.arena.get(slot).has(SENT << tier)) {
            (true, false) => Next::Store,
            (false, true) => Next::Remove,
            (true, true) | (false, false) => Next::Nothing,
        }
    }

    #[inline]
    pub(super) fn depth(&self, slot: Slot) -> u32 {
        self.arena.get(slot).end() / self.config.block_size.tokens()
    }

    /// The nearest node above that completes a block, or the root.
    #[inline]
    fn key_parent(&self, slot: Slot) -> Slot {
        let mut at = self.arena.get(slot).parent();
        if self.mixed {
            while !self.arena.get(at).has(ROOT) && self.owned(at) == 0 {
                at = self.arena.get(at).parent();
            }
        }
        at
    }

    /// Removes `slot`, and its neighbours in the list that go too, upwards or downwards. `None` where other nodes still
    /// have all its keys.
    fn remove_run(&mut self, slot: Slot, tier: usize, holder: HolderId) -> Option<Op> {
        if !self.mixed {
            return Some(self.remove_run_plain(slot, tier, holder));
        }
        let (mut top, mut deepest) = (slot, slot);
        let (mut key, mut depth) = (self.arena.get(slot).key(), self.depth(slot));
        let mut gone = vec![slot];
        let mut count = self.untell(slot, tier);
        let mut open_above = count == self.owned(slot);
        while count > 0
            && let Some((next, next_tier)) = self.dirty.front().map(|e| split(*e))
        {
            if next_tier != tier || !matches!(self.next(next, tier), Next::Remove) {
                break;
            }
            if open_above && self.key_parent(top) == next {
                top = next;
                let above = self.untell(next, tier);
                count += above;
                open_above = above == self.owned(next);
            } else if self.key_parent(next) == deepest && self.is_sole_teller(next, tier) {
                deepest = next;
                (key, depth) = (self.arena.get(next).key(), self.depth(next));
                count += self.untell(next, tier);
            } else {
                break;
            }
            self.dirty.pop_front();
            self.arena.get_mut(next).set(DIRTY << tier, false);
            gone.push(next);
        }
        for slot in gone {
            // One of the earlier ones may have taken it along.
            if self.arena.live(slot).is_some_and(|n| n.is_idle()) {
                self.release(slot);
            }
        }
        (count > 0).then_some(Op::Remove {
            holder,
            key,
            depth: Depth(depth),
            count,
        })
    }

    /// Like [`Mirror::remove_run`] where every node is one block.
    fn remove_run_plain(&mut self, slot: Slot, tier: usize, holder: HolderId) -> Op {
        let (mut key, mut depth) = (self.arena.get(slot).key(), self.depth(slot));
        let (mut deepest, mut above) = (slot, self.arena.get(slot).parent());
        let mut count = 0;
        let mut next = slot;
        loop {
            let node = self.arena.get_mut(next);
            node.set((SENT | DIRTY) << tier, false);
            self.told[tier].remove(node.key());
            count += 1;
            if node.is_idle() {
                self.release(next);
            }
            let Some((candidate, next_tier)) = self.dirty.front().map(|e| split(*e)) else {
                break;
            };
            let node = self.arena.get(candidate);
            if next_tier != tier || !node.has(SENT << tier) || node.is_held(tier) {
                break;
            }
            if candidate == above {
                above = node.parent();
            } else if node.parent() == deepest {
                deepest = candidate;
                (key, depth) = (node.key(), self.depth(candidate));
            } else {
                break;
            }
            self.dirty.pop_front();
            next = candidate;
        }
        Op::Remove {
            holder,
            key,
            depth: Depth(depth),
            count,
        }
    }

    /// Takes a node out of what is told; returns how many of its keys, the deepest ones, are told by no other node.
    #[inline]
    fn untell(&mut self, slot: Slot, tier: usize) -> u32 {
        self.arena.get_mut(slot).set(SENT << tier, false);
        if !self.mixed {
            self.told[tier].remove(self.arena.get(slot).key());
            return 1;
        }
        let mut keys = Vec::new();
        self.push_keys(slot, &mut keys);
        let mut gone = 0;
        for key in keys {
            let Some(tellers) = self.tellers.get_mut(&key.0) else {
                continue;
            };
            tellers[tier] -= 1;
            if tellers[tier] == 0 {
                if *tellers == [0; TIERS] {
                    self.tellers.remove(&key.0);
                }
                self.told[tier].remove(key);
                gone += 1;
            }
        }
        gone
    }

    /// Whether no other node tells any key of this one.
    #[inline]
    fn is_sole_teller(&self, slot: Slot, tier: usize) -> bool {
        if !self.mixed {
            return true;
        }
        let mut keys = Vec::new();
        self.push_keys(slot, &mut keys);
        keys.iter()
            .all(|k| self.tellers.get(&k.0).is_some_and(|t| t[tier] == 1))
    }

    /// Counts keys in that are told in a tier.
    #[inline]
    pub(super) fn count_told(&mut self, keys: &[BlockKey], tier: usize) {
        if !self.mixed {
            return self.told[tier].add_all(keys);
        }
        for key in keys {
            let tellers = self.tellers.entry(key.0).or_default();
            tellers[tier] += 1;
            if tellers[tier] == 1 {
                self.told[tier].add(*key);
            }
        }
    }

    /// Stores `slot` with what must go above it, and its neighbours in the list below.
    fn store_run(&mut self, slot: Slot, tier: usize, holder: HolderId, max_keys: usize) -> Run {
        if !self.mixed && max_keys > 0 {
            let above = self.arena.get(self.arena.get(slot).parent());
            if above.has(ROOT | SENT << tier) {
                let (anchor, depth) = (above.key(), Depth(self.depth(self.arena.get(slot).parent())));
                return self.store_run_plain(slot, tier, (holder, anchor, depth), max_keys);
            }
        }
        // Bottom up: the run itself, then what only names the way to something that the index knows.
        let mut path = vec![slot];
        let mut in_run = 1;
        let mut at = self.key_parent(slot);
        loop {
            let node = self.arena.get(at);
            if node.has(ROOT) {
                break;
            }
            if in_run == path.len() && matches!(self.next(at, tier), Next::Store) {
                in_run += 1;
            } else if node.flags & TOLD_ANYWHERE != 0 {
                break;
            }
            path.push(at);
            if path.len() > MAX_PATH {
                return Run::TooLong;
            }
            at = self.key_parent(at);
        }
        let (anchor, anchor_depth) = (self.arena.get(at).key(), Depth(self.depth(at)));
        let mut keys: Vec<BlockKey> = Vec::with_capacity(path.len());
        let mut skip = 0;
        let mut tail = None;
        for (i, node) in path.iter().enumerate().rev() {
            if keys.len() + self.owned(*node) as usize > max_keys {
                break;
            }
            self.push_keys(*node, &mut keys);
            if i >= in_run {
                skip = keys.len();
            } else {
                self.tell(*node, tier);
                tail = Some(*node);
            }
        }
        let Some(mut end) = tail else { return Run::TooLong };
        if end != slot {
            // The rest of the way down comes next.
            if !self.arena.get(slot).has(DIRTY << tier) {
                self.arena.get_mut(slot).set(DIRTY << tier, true);
                self.dirty.push_front(slot | (tier as u32) << 30);
            }
        } else {
            self.extend_down(&mut end, tier, max_keys, &mut keys);
        }
        let count = keys.len();
        let op = Op::Store {
            holder,
            anchor,
            anchor_depth,
            skip: skip as u32,
            keys,
        };
        Run::Done(op, end, count)
    }

    /// Like [`Mirror::store_run`] where every node is one block and the index knows the one above.
    fn store_run_plain(
        &mut self,
        slot: Slot,
        tier: usize,
        (holder, anchor, anchor_depth): (HolderId, BlockKey, Depth),
        max_keys: usize,
    ) -> Run {
        let mut keys = Vec::with_capacity(self.dirty.len().min(max_keys - 1).min(FIRST_KEYS) + 1);
        let mut end = slot;
        loop {
            let node = self.arena.get_mut(end);
            node.set(SENT << tier, true);
            node.set(DIRTY << tier, false);
            keys.push(node.key());
            let Some((next, next_tier)) = self.dirty.front().map(|e| split(*e)) else {
                break;
            };
            let node = self.arena.get(next);
            let follows = next_tier == tier && node.parent() == end && node.is_held(tier) && !node.has(SENT << tier);
            if !follows || keys.len() >= max_keys {
                break;
            }
            self.dirty.pop_front();
            end = next;
        }
        self.told[tier].add_all(&keys);
        let count = keys.len();
        let op = Op::Store {
            holder,
            anchor,
            anchor_depth,
            skip: 0,
            keys,
        };
        Run::Done(op, end, count)
    }

    fn extend_down(&mut self, end: &mut Slot, tier: usize, max_keys: usize, keys: &mut Vec<BlockKey>) {
        while let Some((next, next_tier)) = self.dirty.front().map(|e| split(*e)) {
            if next_tier != tier
                || self.key_parent(next) != *end
                || !matches!(self.next(next, tier), Next::Store)
                || keys.len() + self.owned(next) as usize > max_keys
            {
                return;
            }
            self.dirty.pop_front();
            self.arena.get_mut(next).set(DIRTY << tier, false);
            self.push_keys(next, keys);
            self.tell(next, tier);
            *end = next;
        }
    }

    #[inline]
    fn tell(&mut self, slot: Slot, tier: usize) {
        self.arena.get_mut(slot).set(SENT << tier, true);
        if self.mixed {
            let mut keys = Vec::new();
            self.push_keys(slot, &mut keys);
            self.count_told(&keys, tier);
        } else {
            self.told[tier].add(self.arena.get(slot).key());
        }
    }

    /// The index didn't know the anchor of a store that ended in `tail` with `last`: the whole chain is told again from
    /// its root.
    pub(crate) fn tell_again(&mut self, tail: Slot, last: BlockKey) {
        if self.arena.live(tail).is_none_or(|n| n.key() != last) {
            return;
        }
        let mut path = Vec::new();
        let mut at = tail;
        while !self.arena.get(at).has(ROOT) {
            path.push(at);
            at = self.arena.get(at).parent();
        }
        // Top down, so that the chain goes in one run.
        for slot in path.into_iter().rev() {
            for tier in 0..self.config.tiers.len() {
                if self.arena.get(slot).has(SENT << tier) {
                    self.untell(slot, tier);
                    self.mark(slot, tier);
                }
            }
        }
    }
}

/// How a store run ended.
enum Run {
    /// An op, its last node and its number of keys.
    Done(Op, Slot, usize),
    /// Its first block doesn't fit.
    TooLong,
}

fn split(entry: u32) -> (Slot, usize) {
    (entry & ((1 << 30) - 1), (entry >> 30) as usize)
}
