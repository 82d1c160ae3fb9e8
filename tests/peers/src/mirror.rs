//! Cairn's agent mirror and index together, from engine events with tokens to answers, on one core.

use cairn_blocks::{BlockKey, BlockSize};
use cairn_index::{
    BatchOutcome, HolderId, Incarnation, Op, READ_AHEAD, Residency, Seq, SourceId, Stored as Outcome, Tier,
};
use cairn_ingest::{
    EngineEvent, EngineHash, EventBatch, Millis, Registration, Removed, ReplayEnd, Source, SourceConfig, Stored,
};

use crate::contender::Contender;
use crate::log::{BLOCK_TOKENS, BlockId, Event, Log, NONE, POOL, SEED, tokens};

/// Whatever the time is.
pub const NOW: Millis = Millis(1);

/// A mirror for each worker, and one index.
pub struct Mirrored {
    /// By worker.
    pub sources: Vec<Source>,
    seqs: Vec<u64>,
    residency: Residency,
    depths: Vec<u32>,
}

impl Mirrored {
    /// With sources that can ask for what they missed, or can't.
    pub fn with_replay(log: &Log, replay: bool) -> Self {
        let mut residency = Residency::new();
        let sources = (0..log.workers).map(|worker| {
            residency.add_holder(HolderId(worker));
            source(worker, log.capacity, replay)
        });
        Self {
            sources: sources.collect(),
            seqs: vec![0; log.workers as usize],
            residency,
            depths: Vec::with_capacity(log.workers as usize),
        }
    }

    /// Applies what a worker's source has to tell, as the index does.
    pub fn tell(&mut self, worker: u32) {
        let source = &mut self.sources[worker as usize];
        while let Some(batch) = source.next_batch(NOW) {
            let (incarnation, seq) = (batch.incarnation, batch.seq);
            for (at, op) in batch.ops.iter().enumerate() {
                // As the replicated state does.
                if at % READ_AHEAD == 0 {
                    self.residency.approach(&batch.ops[at..]);
                }
                apply(&mut self.residency, op);
            }
            let outcome = BatchOutcome::Applied {
                unknown_anchors: Vec::new(),
            };
            source.acked(NOW, incarnation, seq, &outcome);
        }
    }
}

impl Contender for Mirrored {
    type Batch = Vec<(u32, EventBatch)>;
    type Query = Vec<BlockKey>;
    type Key = BlockKey;

    fn new(log: &Log) -> Self {
        Self::with_replay(log, false)
    }

    fn prepare(&mut self, log: &Log, events: &[Event]) -> Self::Batch {
        let mut out: Self::Batch = Vec::with_capacity(events.len());
        let engine = |id: BlockId| EngineHash(log.blocks.engine[id as usize]);
        for event in events {
            let (worker, event) = match *event {
                Event::Store { worker, blocks } => {
                    let ids = log.span(blocks);
                    let above = log.blocks.parent[ids[0] as usize];
                    let stored = Stored {
                        hashes: ids.iter().map(|id| engine(*id)).collect(),
                        parent: (above != NONE).then(|| engine(above)),
                        tokens: ids
                            .iter()
                            .flat_map(|id| tokens(log.blocks.word[*id as usize]))
                            .collect(),
                        block_size: BLOCK_TOKENS as u32,
                        ..Stored::default()
                    };
                    (worker, EngineEvent::Stored(stored))
                }
                Event::Remove { worker, blocks } => {
                    let removed = Removed {
                        hashes: log.span(blocks).iter().map(|id| engine(*id)).collect(),
                        ..Removed::default()
                    };
                    (worker, EngineEvent::Removed(removed))
                }
                Event::Match { .. } => continue,
            };
            // What one scheduler step evicts and stores is one message.
            match out.last_mut() {
                Some((last, batch)) if *last == worker && matches!(batch.events[..], [EngineEvent::Removed(_)]) => {
                    batch.events.push(event);
                }
                _ => {
                    let seq = &mut self.seqs[worker as usize];
                    let batch = EventBatch {
                        seq: *seq,
                        content: *seq,
                        ts: *seq as f64,
                        rank: None,
                        events: vec![event],
                        refused: Vec::new(),
                    };
                    *seq += 1;
                    out.push((worker, batch));
                }
            }
        }
        out
    }

    fn ingest(&mut self, batch: &mut Self::Batch) {
        for (worker, batch) in batch {
            // As agents do: a message that came is told at once.
            self.sources[*worker as usize].live_from(NOW, batch);
            self.tell(*worker);
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

fn apply(residency: &mut Residency, op: &Op) {
    match op {
        Op::Store {
            holder,
            anchor,
            anchor_depth,
            skip,
            keys,
        } => {
            let stored = residency.store(*holder, *anchor, *anchor_depth, *skip, keys);
            assert!(
                matches!(stored, Outcome::Done { .. }),
                "the mirror told of a block without its way there: {stored:?}"
            );
        }
        Op::Remove {
            holder,
            key,
            depth,
            count,
        } => {
            residency.remove(*holder, *key, *depth, *count);
        }
        Op::Clear { holder } => residency.clear(*holder),
        Op::Confidence(_) => {}
    }
}

fn source(worker: u32, capacity: u32, replay: bool) -> Source {
    let config = SourceConfig {
        seed: SEED,
        pool: POOL.into(),
        block_size: BlockSize::DEFAULT,
        tiers: vec![Tier::Gpu],
        capacity_blocks: u64::from(capacity),
        multimodal: false,
        replay,
        events: true,
    };
    let mut source = Source::new(config, NOW);
    let registration = Registration {
        source: SourceId(worker),
        incarnation: Incarnation(1),
        holders: vec![HolderId(worker)],
        seq: Seq(0),
        resumed: false,
    };
    source.registered(NOW, registration);
    source.connected(NOW);
    source.replay_ended(NOW, ReplayEnd::Complete);
    source
}
