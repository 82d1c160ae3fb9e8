//! SMG's indexes: `kv-index`'s chain index, with results into a reused buffer or a map, and `smg-radix-tree`.

use kv_index::{ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock};
use radix_tree::{Config, HolderId, Overlap, OverlapScratch, RadixTree};

use crate::contender::Contender;
use crate::log::{BlockId, Event, Log, NONE};

/// Events with the engine's and the content hash of each block.
pub enum Change<Block, Name> {
    /// Blocks below another.
    Store {
        worker: u32,
        parent: Option<Name>,
        blocks: Vec<Block>,
    },
    /// Blocks that went.
    Remove { worker: u32, names: Vec<Name> },
}

fn changes<Block, Name>(
    log: &Log,
    events: &[Event],
    block: impl Fn(u64, u64) -> Block,
    name: impl Fn(u64) -> Name,
) -> Vec<Change<Block, Name>> {
    let engine = |id: BlockId| log.blocks.engine[id as usize];
    let change = |event: &Event| match *event {
        Event::Store { worker, blocks } => {
            let ids = log.span(blocks);
            let above = log.blocks.parent[ids[0] as usize];
            Some(Change::Store {
                worker,
                parent: (above != NONE).then(|| name(engine(above))),
                blocks: ids
                    .iter()
                    .map(|id| block(engine(*id), log.blocks.content(*id)))
                    .collect(),
            })
        }
        Event::Remove { worker, blocks } => Some(Change::Remove {
            worker,
            names: log.span(blocks).iter().map(|id| name(engine(*id))).collect(),
        }),
        Event::Match { .. } => None,
    };
    events.iter().filter_map(change).collect()
}

/// `kv-index`; `MAP` asks through `find_matches`, which makes a map for each answer.
pub struct Chain<const MAP: bool> {
    index: ChainIndex,
    /// Id and block map of each worker.
    workers: Vec<(u32, ChainBlockMap)>,
    found: Vec<(u32, u32)>,
    refused: u64,
}

impl<const MAP: bool> Contender for Chain<MAP> {
    type Batch = Vec<Change<StoredBlock, SequenceHash>>;
    type Query = Vec<ContentHash>;
    type Key = ContentHash;

    fn new(log: &Log) -> Self {
        let index = ChainIndex::with_max_workers(log.workers as usize);
        let workers = (0..log.workers).map(|w| {
            let id = index
                .intern_worker(&w.to_string())
                .expect("the index is made for that many workers");
            assert_eq!(id, w, "ids are handed out in order");
            (id, ChainBlockMap::new())
        });
        Self {
            workers: workers.collect(),
            index,
            found: Vec::with_capacity(log.workers as usize),
            refused: 0,
        }
    }

    fn prepare(&mut self, log: &Log, events: &[Event]) -> Self::Batch {
        let block = |engine, content| StoredBlock {
            seq_hash: SequenceHash(engine),
            content_hash: ContentHash(content),
        };
        changes(log, events, block, SequenceHash)
    }

    fn ingest(&mut self, batch: &mut Self::Batch) {
        for change in batch {
            match change {
                Change::Store { worker, parent, blocks } => {
                    let (id, map) = &mut self.workers[*worker as usize];
                    let applied = self.index.apply_stored(*id, blocks, *parent, map);
                    self.refused += u64::from(applied.is_err());
                }
                Change::Remove { worker, names } => {
                    let (id, map) = &mut self.workers[*worker as usize];
                    self.index.apply_removed(*id, names, map);
                }
            }
        }
    }

    fn query(&self, log: &Log, prompt: &[BlockId]) -> Vec<ContentHash> {
        prompt.iter().map(|id| ContentHash(log.blocks.content(*id))).collect()
    }

    fn keys(query: &Vec<ContentHash>) -> &[ContentHash] {
        query
    }

    fn find(&mut self, query: &mut Vec<ContentHash>) {
        self.found.clear();
        if MAP {
            let scores = self.index.find_matches(query, false);
            self.found.extend(std::hint::black_box(scores).scores);
        } else {
            let found = &mut self.found;
            self.index
                .score_into(query, |hash| hash.0, false, |worker, score| found.push((worker, score)));
        }
    }

    fn answer(&self, out: &mut Vec<(u32, u32)>) {
        out.extend_from_slice(&self.found);
    }

    fn refused(&self) -> u64 {
        self.refused
    }
}

/// `smg-radix-tree`.
pub struct Radix {
    tree: RadixTree,
    holders: Vec<HolderId>,
    scratch: OverlapScratch,
    found: Vec<Overlap>,
    refused: u64,
}

impl Contender for Radix {
    type Batch = Vec<Change<(u64, u64), u64>>;
    type Query = Vec<u64>;
    type Key = u64;

    fn new(log: &Log) -> Self {
        let mut tree = RadixTree::new(Config::default());
        let holders = (0..log.workers).map(|w| tree.create_holder(&w.to_string())).collect();
        Self {
            tree,
            holders,
            scratch: OverlapScratch::default(),
            found: Vec::with_capacity(log.workers as usize),
            refused: 0,
        }
    }

    fn prepare(&mut self, log: &Log, events: &[Event]) -> Self::Batch {
        changes(log, events, |engine, content| (engine, content), |engine| engine)
    }

    fn ingest(&mut self, batch: &mut Self::Batch) {
        for change in batch {
            match change {
                Change::Store { worker, parent, blocks } => {
                    let holder = self.holders[*worker as usize];
                    let stored = self.tree.store(holder, *parent, blocks);
                    self.refused += u64::from(stored.is_err());
                }
                Change::Remove { worker, names } => {
                    self.tree.remove(self.holders[*worker as usize], names);
                }
            }
        }
    }

    fn query(&self, log: &Log, prompt: &[BlockId]) -> Vec<u64> {
        prompt.iter().map(|id| log.blocks.content(*id)).collect()
    }

    fn keys(query: &Vec<u64>) -> &[u64] {
        query
    }

    fn find(&mut self, query: &mut Vec<u64>) {
        self.tree.overlap(query, &mut self.scratch, &mut self.found);
    }

    fn answer(&self, out: &mut Vec<(u32, u32)>) {
        out.extend(self.found.iter().map(|o| (o.holder.parts().0, o.depth)));
    }

    fn refused(&self) -> u64 {
        self.refused
    }
}
