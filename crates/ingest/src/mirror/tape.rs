//! What the index will be told next, written down as it happens: ops in order, neighbouring blocks in one.

use std::collections::VecDeque;

use cairn_blocks::{BlockKey, Depth};
use cairn_index::{Batch, Confidence, HolderId, Incarnation, Op, Seq, SourceId};

use super::node::{NONE, Node, Slot};

/// Keys in one batch: 32 KiB, half of what a log entry should have.
pub(crate) const MAX_KEYS: usize = 4 << 10;
/// Ops in one batch: removals of single blocks are about 20 bytes each.
pub(crate) const MAX_OPS: usize = 1 << 10;
/// Full batches that wait here while the index doesn't take them, beside what one event adds. What comes then is noted
/// block by block instead, where it coalesces: an index that is away costs no more than what is held.
const MAX_CLOSED: usize = 1;

/// A batch that is being made, and what is needed to tell parts of it again.
#[derive(Debug)]
pub(crate) struct Changes {
    /// Whose it is and its number are only known once it is complete.
    pub(crate) batch: Batch,
    /// One for each op: the last node of a store, by which it is told again, or [`NONE`].
    pub(crate) tails: Vec<Slot>,
    /// Keys in all its stores, and one for each removal.
    keys: usize,
}

impl Default for Changes {
    fn default() -> Self {
        Self {
            batch: Batch {
                source: SourceId(0),
                incarnation: Incarnation(0),
                seq: Seq(0),
                ops: Vec::new(),
            },
            tails: Vec::new(),
            keys: 0,
        }
    }
}

impl Changes {
    /// Ops whose buffers are kept: what a few steps of decoding change.
    const KEPT_OPS: usize = 16;

    /// Adds an op.
    pub(crate) fn push(&mut self, op: Op, tail: Slot) {
        self.batch.ops.push(op);
        self.tails.push(tail);
    }

    /// Adds what may be claimed: that all is exact once the rest is told, anything else before the rest.
    #[inline(never)]
    pub(crate) fn push_confidence(&mut self, confidence: Confidence) {
        let op = Op::Confidence(confidence);
        if confidence == Confidence::Exact {
            return self.push(op, NONE);
        }
        self.batch.ops.insert(0, op);
        self.tails.insert(0, NONE);
    }

    fn is_full(&self) -> bool {
        self.batch.ops.len() >= MAX_OPS || self.keys >= MAX_KEYS
    }

    /// Whether its buffers are small.
    fn is_small(&self) -> bool {
        self.batch.ops.capacity() <= Self::KEPT_OPS && self.tails.capacity() <= Self::KEPT_OPS
    }

    fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + self.batch.ops.capacity() * size_of::<Op>()
            + self.tails.capacity() * size_of::<Slot>()
            + self.keys * size_of::<BlockKey>()
    }
}

/// How the next change may join the last op.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Last {
    /// It can't.
    #[default]
    Other,
    /// A store of this tier, down to this node.
    Store { tier: usize, tail: Slot },
    /// A removal of this tier, from the deepest node up to below another one.
    Remove { tier: usize, deepest: Slot, above: Slot },
}

/// A run of new blocks, each the child of the one before.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) tier: usize,
    /// What the first hangs below, its key and its depth.
    pub(super) above: Slot,
    pub(super) anchor: BlockKey,
    pub(super) anchor_depth: Depth,
    pub(super) keys: Vec<BlockKey>,
    /// The last one.
    pub(super) tail: Slot,
}

/// Blocks that go, each the parent of the one before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Going {
    pub(super) tier: usize,
    /// The deepest, and the one above all of them.
    pub(super) slot: Slot,
    pub(super) parent: Slot,
    /// Key of the deepest, and tokens from the root to its end.
    pub(super) key: BlockKey,
    pub(super) end: u32,
    pub(super) count: u32,
    /// Tokens in a block.
    pub(super) size: u32,
}

impl Going {
    /// No block yet.
    pub(super) fn none(tier: usize, size: u32) -> Self {
        Self {
            tier,
            slot: NONE,
            parent: NONE,
            key: BlockKey(0),
            end: 0,
            count: 0,
            size,
        }
    }

    /// One block.
    #[inline]
    pub(super) fn one(slot: Slot, node: &Node, tier: usize, size: u32) -> Self {
        Self {
            tier,
            slot,
            parent: node.parent(),
            key: node.key(),
            end: node.end(),
            count: 1,
            size,
        }
    }

    fn depth(&self) -> Depth {
        Depth(self.end / self.size)
    }
}

/// Ops that aren't in a batch yet.
#[derive(Debug, Default)]
pub(crate) struct Tape {
    /// Whom ops are about, by tier; empty while nothing may be told.
    holders: Vec<HolderId>,
    closed: VecDeque<Box<Changes>>,
    open: Box<Changes>,
    last: Last,
    /// Room for the next changes, and for the keys of short stores.
    spare: Option<Box<Changes>>,
    spare_keys: Vec<Vec<BlockKey>>,
}

impl Tape {
    /// Keys whose buffer is kept.
    const KEPT_KEYS: usize = 64;

    /// From here on changes are about these holders.
    pub(crate) fn start(&mut self, holders: &[HolderId]) {
        self.holders = holders.to_vec();
    }

    /// Nothing may be told until the next start, and what wasn't told never will be.
    pub(crate) fn stop(&mut self) {
        self.holders.clear();
        self.discard();
    }

    /// Forgets what wasn't told.
    pub(crate) fn discard(&mut self) {
        self.closed = VecDeque::new();
        *self.open = Changes::default();
        self.last = Last::Other;
    }

    /// Whether the next event's changes of a tier may be written down.
    #[inline]
    pub(super) fn takes(&self, tier: usize) -> bool {
        tier < self.holders.len() && self.closed.len() < MAX_CLOSED
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.open.batch.ops.is_empty() && self.closed.is_empty()
    }

    /// Keys that wait.
    pub(crate) fn len(&self) -> usize {
        self.open.keys + self.closed.iter().map(|c| c.keys).sum::<usize>()
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        let changes = self.closed.iter().chain([&self.open]).chain(&self.spare);
        let keys: usize = self.spare_keys.iter().map(Vec::capacity).sum();
        changes.map(|c| c.memory_bytes()).sum::<usize>() + keys * size_of::<BlockKey>()
    }

    /// The next batch's changes, oldest first.
    pub(crate) fn take(&mut self) -> Option<Box<Changes>> {
        if let Some(changes) = self.closed.pop_front() {
            return Some(changes);
        }
        if self.open.batch.ops.is_empty() {
            return None;
        }
        Some(self.close())
    }

    /// Ends the open batch.
    fn close(&mut self) -> Box<Changes> {
        self.last = Last::Other;
        let next = self.spare.take().unwrap_or_default();
        std::mem::replace(&mut self.open, next)
    }

    /// Room for the keys of a run, and how many it may have.
    #[inline]
    pub(super) fn begin(&mut self, keys: usize) -> (Vec<BlockKey>, usize) {
        self.make_room();
        let room = MAX_KEYS - self.open.keys;
        let mut buffer = self.spare_keys.pop().unwrap_or_default();
        buffer.reserve(keys.min(room));
        (buffer, room)
    }

    #[inline]
    fn make_room(&mut self) {
        if self.open.is_full() {
            self.close_full();
        }
    }

    #[cold]
    fn close_full(&mut self) {
        let full = self.close();
        self.closed.push_back(full);
    }

    /// Adds a run that [`Tape::begin`] made room for; it may be empty.
    pub(super) fn store(&mut self, mut run: Run) {
        if run.keys.is_empty() {
            return self.keep(run.keys);
        }
        self.open.keys += run.keys.len();
        match self.store_before(run.tier, run.above, run.tail) {
            Some(keys) => {
                keys.extend_from_slice(&run.keys);
                run.keys.clear();
                self.keep(run.keys);
            }
            None => self.push_store(run),
        }
    }

    /// Adds one block.
    #[inline(always)]
    pub(super) fn store_one(
        &mut self,
        tier: usize,
        (above, anchor, anchor_depth): (Slot, BlockKey, Depth),
        (tail, key): (Slot, BlockKey),
    ) {
        self.make_room();
        self.open.keys += 1;
        if let Some(keys) = self.store_before(tier, above, tail) {
            return keys.push(key);
        }
        let mut keys = self.spare_keys.pop().unwrap_or_default();
        keys.push(key);
        self.push_store(Run {
            tier,
            above,
            anchor,
            anchor_depth,
            keys,
            tail,
        });
    }

    /// The keys of the last op where it is a store down to `above`; it goes on to `tail`.
    #[inline]
    fn store_before(&mut self, tier: usize, above: Slot, tail: Slot) -> Option<&mut Vec<BlockKey>> {
        if self.last != (Last::Store { tier, tail: above }) {
            return None;
        }
        self.last = Last::Store { tier, tail };
        *self.open.tails.last_mut()? = tail;
        match self.open.batch.ops.last_mut() {
            Some(Op::Store { keys, .. }) => Some(keys),
            Some(_) | None => None,
        }
    }

    #[inline]
    fn push_store(&mut self, run: Run) {
        self.last = Last::Store {
            tier: run.tier,
            tail: run.tail,
        };
        let op = Op::Store {
            holder: self.holders[run.tier],
            anchor: run.anchor,
            anchor_depth: run.anchor_depth,
            skip: 0,
            keys: run.keys,
        };
        self.open.push(op, run.tail);
    }

    /// Adds a removal: to the one before where they are neighbours; a block that was only just stored isn't told of
    /// at all.
    #[inline(always)]
    pub(super) fn remove(&mut self, going: &Going) {
        if self.last == Last::Other {
            self.push_removal(going, going.key, going.depth());
        } else {
            self.remove_after(*going);
        }
    }

    #[inline(never)]
    fn remove_after(&mut self, going: Going) {
        match &mut self.last {
            Last::Remove { tier, above, .. } if *above == going.slot && *tier == going.tier => {
                *above = going.parent;
                if let Some(Op::Remove { count, .. }) = self.open.batch.ops.last_mut() {
                    *count += going.count;
                }
            }
            Last::Remove { tier, deepest, .. } if *deepest == going.parent && *tier == going.tier => {
                *deepest = going.slot;
                if let Some(Op::Remove { key, depth, count, .. }) = self.open.batch.ops.last_mut() {
                    (*key, *depth) = (going.key, going.depth());
                    *count += going.count;
                }
            }
            Last::Store { tier, tail } if *tail == going.slot && *tier == going.tier => self.unstore(&going),
            Last::Remove { .. } | Last::Store { .. } | Last::Other => {
                self.push_removal(&going, going.key, going.depth());
            }
        }
    }

    #[inline(always)]
    fn push_removal(&mut self, going: &Going, key: BlockKey, depth: Depth) {
        self.make_room();
        self.open.keys += 1;
        self.last = Last::Remove {
            tier: going.tier,
            deepest: going.slot,
            above: going.parent,
        };
        let op = Op::Remove {
            holder: self.holders[going.tier],
            key,
            depth,
            count: going.count,
        };
        self.open.push(op, NONE);
    }

    /// The last blocks of the last store go again, and perhaps more above them.
    fn unstore(&mut self, going: &Going) {
        let (Some(Op::Store { keys, .. }), Some(tail)) = (self.open.batch.ops.last_mut(), self.open.tails.last_mut())
        else {
            return;
        };
        let stored = keys.len() as u32;
        if going.count < stored {
            keys.truncate((stored - going.count) as usize);
            self.open.keys -= going.count as usize;
            *tail = going.parent;
            self.last = Last::Store {
                tier: going.tier,
                tail: going.parent,
            };
            return;
        }
        self.open.keys -= stored as usize;
        self.last = Last::Other;
        self.open.tails.pop();
        if let Some(Op::Store {
            mut keys,
            anchor,
            anchor_depth,
            ..
        }) = self.open.batch.ops.pop()
        {
            keys.clear();
            self.keep(keys);
            if going.count > stored {
                // Nothing more can hang below the deepest one: what did is gone.
                let rest = Going {
                    slot: NONE,
                    count: going.count - stored,
                    ..*going
                };
                self.push_removal(&rest, anchor, anchor_depth);
            }
        }
    }

    /// Keeps an empty buffer of keys, where it is small: an agent has many sources.
    fn keep(&mut self, keys: Vec<BlockKey>) {
        if self.spare_keys.len() < Changes::KEPT_OPS && keys.capacity() <= Self::KEPT_KEYS {
            self.spare_keys.push(keys);
        }
    }

    /// Takes over the buffers of changes that nobody needs any more, where they are small.
    #[inline(never)]
    pub(crate) fn reuse(&mut self, mut changes: Box<Changes>) {
        if self.spare.is_some() || !changes.is_small() {
            return;
        }
        while let Some(op) = changes.batch.ops.pop() {
            if let Op::Store { mut keys, .. } = op {
                keys.clear();
                self.keep(keys);
            }
        }
        changes.tails.clear();
        changes.keys = 0;
        self.spare = Some(changes);
    }
}
