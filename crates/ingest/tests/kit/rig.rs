//! Sources and an index joined directly: every batch is applied and answered at once.

#![allow(dead_code)]

use cairn_blocks::{BlockSize, Chain, ClusterSeed, MediaSpan, Namespace, Token};
use cairn_index::{
    BatchOutcome, Command, Confidence, HolderSpec, IndexState, LogIndex, PoolSpec, Query, Reach, RegisterOutcome,
    Reply, Role, Seq, SourceSpec, Tier, WorkerId, WorkerOverlap, WorkerSpec,
};
use cairn_ingest::{
    AuditOutcome, Effect, EngineEvent, EngineHash, EventBatch, HolderAudit, Medium, Millis, Registration, Removed,
    Source, SourceConfig, Stored,
};

pub const SEED: ClusterSeed = ClusterSeed(7);
pub const POOL: &str = "pool";

pub struct Member {
    pub source: Source,
    pub worker: WorkerId,
    pub spec: SourceSpec,
    /// Replays that were asked for and not looked at yet.
    pub replays: Vec<u64>,
    pub stopped: bool,
}

pub struct Rig {
    pub index: IndexState,
    pub members: Vec<Member>,
    pub now: Millis,
    /// Keys that were sent, and batches.
    pub ops: usize,
    pub batches: usize,
    at: u64,
    block_size: BlockSize,
}

#[derive(Clone)]
pub struct Options {
    pub block_size: u32,
    pub tiers: Vec<Tier>,
    pub capacity: u64,
    pub multimodal: bool,
    pub replay: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            block_size: 16,
            tiers: vec![Tier::Gpu, Tier::Cpu],
            capacity: 0,
            multimodal: false,
            replay: true,
        }
    }
}

impl Rig {
    /// One engine that has just started, seen from its first message on.
    pub fn with_defaults() -> Self {
        let mut rig = Self::new(&Options::default());
        rig.fresh(0);
        rig
    }

    /// Refusals of the first engine's events for one reason.
    pub fn refused(&self, reason: cairn_ingest::RefusalReason) -> u64 {
        self.members[0].source.stats().refused.get(reason)
    }

    pub fn new(options: &Options) -> Self {
        let mut rig = Self {
            index: IndexState::new(),
            members: Vec::new(),
            now: Millis(1_000),
            ops: 0,
            batches: 0,
            at: 0,
            block_size: BlockSize::new(options.block_size).unwrap(),
        };
        rig.apply(&Command::InitCluster {
            cluster: "test".into(),
            seed: SEED,
        });
        rig.join(options);
        rig
    }

    pub fn join(&mut self, options: &Options) -> usize {
        let i = self.members.len();
        let config = config(options);
        let spec = spec(i, options);
        let source = Source::new(config, self.now);
        self.members.push(Member {
            source,
            worker: WorkerId(0),
            spec,
            replays: Vec::new(),
            stopped: false,
        });
        self.register(i);
        i
    }

    fn apply(&mut self, command: &Command) -> Reply {
        self.at += 1;
        self.index.apply(LogIndex(self.at), command)
    }

    pub fn register(&mut self, i: usize) {
        let resume = self.members[i].source.resume();
        let spec = self.members[i].spec.clone();
        match self.apply(&Command::RegisterSource { spec, resume }) {
            Reply::Register(RegisterOutcome::Registered {
                source,
                incarnation,
                worker,
                holders,
                seq,
                resumed,
            }) => {
                self.members[i].worker = worker;
                let registration = Registration {
                    source,
                    incarnation,
                    holders,
                    seq,
                    resumed,
                };
                self.members[i].source.registered(self.now, registration);
            }
            other => panic!("registration failed: {other:?}"),
        }
    }

    /// The first contact: connects and answers the replay with nothing.
    pub fn fresh(&mut self, i: usize) {
        self.members[i].source.connected(self.now);
        self.settle();
        self.members[i]
            .source
            .replay_ended(self.now, cairn_ingest::ReplayEnd::Complete);
        self.members[i].replays.clear();
        self.settle();
    }

    pub fn live(&mut self, i: usize, batch: EventBatch) {
        self.members[i].source.live(self.now, batch);
        self.settle();
    }

    pub fn replayed(&mut self, i: usize, batch: EventBatch) {
        self.members[i].source.replayed(self.now, batch);
        self.settle();
    }

    pub fn tick(&mut self, ms: u64) {
        self.now = self.now.after(ms);
        for i in 0..self.members.len() {
            self.members[i].source.tick(self.now);
        }
        self.settle();
    }

    /// Carries out effects and sends batches until nothing is left to do.
    pub fn settle(&mut self) {
        for i in 0..self.members.len() {
            loop {
                while let Some(effect) = self.members[i].source.poll_effect() {
                    match effect {
                        Effect::RequestReplay { from } => self.members[i].replays.push(from),
                        Effect::Reregister => self.register(i),
                        Effect::Stop { .. } => self.members[i].stopped = true,
                    }
                }
                let Some(batch) = self.members[i].source.next_batch(self.now).cloned() else {
                    break;
                };
                let (incarnation, seq) = (batch.incarnation, batch.seq);
                self.batches += 1;
                self.ops += batch.ops.len();
                let Reply::Batches(outcomes) = self.apply(&Command::Batches(vec![batch])) else {
                    panic!("no answer")
                };
                assert!(
                    matches!(&outcomes[0], BatchOutcome::Applied { unknown_anchors } if unknown_anchors.is_empty()),
                    "{outcomes:?}"
                );
                self.members[i].source.acked(self.now, incarnation, seq, &outcomes[0]);
            }
        }
    }

    pub fn overlap_in(
        &self,
        tokens: &[Token],
        adapter: &str,
        salt: &str,
        media: &[MediaSpan<'_>],
    ) -> Vec<WorkerOverlap> {
        let root = Namespace {
            seed: SEED,
            pool: POOL,
            block_size: self.block_size,
            adapter,
            salt,
        }
        .root();
        let chain = Chain::new(root, self.block_size, tokens, media);
        let mut out = Vec::new();
        // One token more than the blocks, so that the rule of the last token doesn't hide the last block.
        let query = Query {
            pool: POOL,
            keys: &chain.keys,
            prompt_tokens: tokens.len() as u32 + 1,
            block_size: self.block_size,
        };
        self.index.overlap(&query, &mut out);
        out
    }

    pub fn overlap(&self, tokens: &[Token]) -> Vec<WorkerOverlap> {
        self.overlap_in(tokens, "", "", &[])
    }

    /// GPU and CPU overlap of the first worker.
    pub fn hit(&self, tokens: &[Token]) -> (u32, u32) {
        self.hit_of(0, tokens)
    }

    pub fn hit_of(&self, i: usize, tokens: &[Token]) -> (u32, u32) {
        pick(&self.overlap(tokens), self.members[i].worker)
    }

    pub fn hit_in(&self, tokens: &[Token], adapter: &str, salt: &str) -> (u32, u32) {
        pick(&self.overlap_in(tokens, adapter, salt, &[]), self.members[0].worker)
    }

    pub fn audit(&mut self, i: usize) -> AuditOutcome {
        let id = self.members[i].source.registration().unwrap().source;
        let audit = self.index.audit(id).unwrap();
        let holders: Vec<_> = audit
            .holders
            .iter()
            .map(|(holder, d)| HolderAudit {
                holder: *holder,
                blocks: d.blocks,
                digest: d.digest,
            })
            .collect();
        self.members[i].source.audit(self.now, audit.seq, &holders)
    }

    pub fn claim(&self, i: usize) -> Confidence {
        let id = self.members[i].source.registration().unwrap().source;
        self.index.registry().sources[&id].confidence
    }

    pub fn seq(&self, i: usize) -> Seq {
        let id = self.members[i].source.registration().unwrap().source;
        self.index.registry().sources[&id].seq
    }
}

fn pick(all: &[WorkerOverlap], worker: WorkerId) -> (u32, u32) {
    all.iter()
        .find(|o| o.worker == worker)
        .map_or((0, 0), |o| (o.overlap.gpu, o.overlap.cpu))
}

pub fn config(options: &Options) -> SourceConfig {
    SourceConfig {
        seed: SEED,
        pool: POOL.into(),
        block_size: BlockSize::new(options.block_size).unwrap(),
        tiers: options.tiers.clone(),
        capacity_blocks: options.capacity,
        multimodal: options.multimodal,
        replay: options.replay,
        events: true,
    }
}

fn spec(i: usize, options: &Options) -> SourceSpec {
    SourceSpec {
        name: format!("http://engine-{i}:8000#0"),
        agent: "agent".into(),
        pool: PoolSpec {
            name: POOL.into(),
            models: vec!["model".into()],
            block_size: BlockSize::new(options.block_size).unwrap(),
            max_model_len: None,
            model_root: None,
        },
        worker: WorkerSpec {
            engine_url: format!("http://engine-{i}:8000"),
            rank: 0,
            ranks: 1,
            host: "host".into(),
            role: Role::Both,
            engine_kind: "vllm".into(),
            engine_block_size: options.block_size,
            capacity_blocks: options.capacity,
            max_num_seqs: 0,
            max_batched_tokens: 0,
            adapters: Vec::new(),
            bootstrap: None,
        },
        holders: options
            .tiers
            .iter()
            .map(|tier| HolderSpec {
                tier: *tier,
                fetch_unit: 1,
                reach: Reach::Worker,
            })
            .collect(),
    }
}

/// Makes batches with contents that differ by seq and life.
pub fn batch(seq: u64, events: Vec<EngineEvent>) -> EventBatch {
    batch_of_life(0, seq, events)
}

pub fn batch_of_life(life: u64, seq: u64, events: Vec<EngineEvent>) -> EventBatch {
    EventBatch {
        seq,
        content: life.wrapping_mul(1_000_003).wrapping_add(seq.wrapping_mul(31)) ^ 0xabcd,
        ts: (life * 1_000_000 + seq) as f64,
        rank: Some(0),
        events,
        refused: Vec::new(),
    }
}

/// `n` tokens that differ by `start`.
pub fn tokens(start: u32, n: u32) -> Vec<Token> {
    (start..start + n).collect()
}

pub fn hashes(list: &[u64]) -> Vec<EngineHash> {
    list.iter().map(|h| EngineHash(*h)).collect()
}

pub fn stored(list: &[u64], parent: Option<u64>, tokens: &[Token], block_size: u32) -> Stored {
    Stored {
        hashes: hashes(list),
        parent: parent.map(EngineHash),
        tokens: tokens.to_vec(),
        block_size,
        has_extra_keys: true,
        ..Stored::default()
    }
}

pub fn store(list: &[u64], parent: Option<u64>, tokens: &[Token], block_size: u32) -> EngineEvent {
    EngineEvent::Stored(stored(list, parent, tokens, block_size))
}

pub fn remove(list: &[u64]) -> EngineEvent {
    EngineEvent::Removed(Removed {
        hashes: hashes(list),
        ..Removed::default()
    })
}

pub fn remove_from(list: &[u64], medium: Medium) -> EngineEvent {
    EngineEvent::Removed(Removed {
        hashes: hashes(list),
        medium,
        ..Removed::default()
    })
}

/// A CPU event without tokens, as vLLM sends by default.
pub fn offload(list: &[u64]) -> EngineEvent {
    EngineEvent::Stored(Stored {
        hashes: hashes(list),
        medium: Medium::Cpu,
        ..Stored::default()
    })
}
