//! Cairn's index by itself: the ops that agents send, applied to the residency.

use cairn_blocks::{BlockKey, Depth};
use cairn_index::{HolderId, READ_AHEAD, Removed, Residency, Stored};

use crate::contender::Contender;
use crate::log::{BlockId, Event, Log, NONE, root};

/// One op.
enum Op {
    Store {
        holder: u32,
        anchor: BlockKey,
        depth: u32,
        start: u32,
        len: u32,
    },
    Remove {
        holder: u32,
        key: BlockKey,
        depth: u32,
        count: u32,
    },
}

impl Op {
    /// The block that it needs found.
    fn block(&self) -> Option<(HolderId, BlockKey, Depth)> {
        match *self {
            Self::Store {
                holder, anchor, depth, ..
            } => (depth > 0).then_some((HolderId(holder), anchor, Depth(depth))),
            Self::Remove { holder, key, depth, .. } => Some((HolderId(holder), key, Depth(depth))),
        }
    }
}

/// Ops and the keys of their stores.
pub struct Ops {
    ops: Vec<Op>,
    keys: Vec<BlockKey>,
}

/// The residency.
pub struct Cairn {
    residency: Residency,
    depths: Vec<u32>,
}

impl Contender for Cairn {
    type Batch = Ops;
    type Query = Vec<BlockKey>;
    type Key = BlockKey;

    fn new(log: &Log) -> Self {
        let mut residency = Residency::new();
        for worker in 0..log.workers {
            residency.add_holder(HolderId(worker));
        }
        Self {
            residency,
            depths: Vec::with_capacity(log.workers as usize),
        }
    }

    fn prepare(&mut self, log: &Log, events: &[Event]) -> Ops {
        let mut out = Ops {
            ops: Vec::with_capacity(events.len()),
            keys: Vec::new(),
        };
        let blocks = &log.blocks;
        for event in events {
            match *event {
                Event::Store { worker, blocks: span } => {
                    let ids = log.span(span);
                    let first = ids[0] as usize;
                    let above = blocks.parent[first];
                    out.ops.push(Op::Store {
                        holder: worker,
                        anchor: if above == NONE {
                            root()
                        } else {
                            blocks.key[above as usize]
                        },
                        depth: blocks.depth[first],
                        start: out.keys.len() as u32,
                        len: ids.len() as u32,
                    });
                    out.keys.extend(ids.iter().map(|id| blocks.key[*id as usize]));
                }
                Event::Remove { worker, blocks: span } => removals(log, log.span(span), |key, depth, count| {
                    out.ops.push(Op::Remove {
                        holder: worker,
                        key,
                        depth,
                        count,
                    });
                }),
                Event::Match { .. } => {}
            }
        }
        out
    }

    fn ingest(&mut self, batch: &mut Ops) {
        for (at, op) in batch.ops.iter().enumerate() {
            // As the replicated state does with the ops of a batch.
            if at % READ_AHEAD == 0 && self.residency.reads_ahead() {
                let next = batch.ops[at..].iter().take(READ_AHEAD);
                self.residency.read_ahead(next.filter_map(Op::block));
            }
            match *op {
                Op::Store {
                    holder,
                    anchor,
                    depth,
                    start,
                    len,
                } => {
                    let keys = &batch.keys[start as usize..][..len as usize];
                    let stored = self.residency.store(HolderId(holder), anchor, Depth(depth), 0, keys);
                    assert_eq!(stored, Stored::Done { new_blocks: len });
                }
                Op::Remove {
                    holder,
                    key,
                    depth,
                    count,
                } => {
                    let removed = self.residency.remove(HolderId(holder), key, Depth(depth), count);
                    assert_eq!(removed, Removed { blocks: count });
                }
            }
        }
    }

    fn query(&self, log: &Log, prompt: &[BlockId]) -> Vec<BlockKey> {
        prompt.iter().map(|id| log.blocks.key[*id as usize]).collect()
    }

    fn keys(query: &Vec<BlockKey>) -> &[BlockKey] {
        query
    }

    fn find(&mut self, query: &mut Vec<BlockKey>) {
        self.residency.match_prefix(query, &mut self.depths);
    }

    fn answer(&self, out: &mut Vec<(u32, u32)>) {
        out.extend((0..).zip(self.depths.iter().copied()));
    }

    fn mapped_bytes(&self) -> usize {
        self.residency.mapped_bytes()
    }
}

/// Groups blocks that go, in order, into removals of a deepest key and how many above it go too.
fn removals(log: &Log, ids: &[BlockId], mut out: impl FnMut(BlockKey, u32, u32)) {
    let mut at = 0;
    while at < ids.len() {
        let deepest = ids[at] as usize;
        let mut count = 1;
        while ids
            .get(at + count)
            .is_some_and(|next| *next == log.blocks.parent[ids[at + count - 1] as usize])
        {
            count += 1;
        }
        // A block's depth as the index counts it includes the block.
        out(log.blocks.key[deepest], log.blocks.depth[deepest] + 1, count as u32);
        at += count;
    }
}
