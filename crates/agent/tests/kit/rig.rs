//! One source and an index joined directly, and what they came to in words.

#![allow(dead_code)]

use std::fmt::Write;

use cairn_blocks::{BlockSize, ClusterSeed};
use cairn_index::{
    Command, HolderSpec, IndexState, LogIndex, Op, PoolSpec, Reach, RegisterOutcome, Reply, Role, SourceSpec, Tier,
    WorkerSpec,
};
use cairn_ingest::{Effect, EventBatch, Millis, Registration, ReplayEnd, Source, SourceConfig};

const SEED: ClusterSeed = ClusterSeed(1);
const TIERS: [Tier; 3] = [Tier::Gpu, Tier::Cpu, Tier::Shared];

pub struct Rig {
    index: IndexState,
    source: Source,
    spec: SourceSpec,
    now: Millis,
    at: u64,
    waiting_replays: usize,
    log: String,
}

impl Rig {
    pub fn new(size: u32) -> Self {
        let block_size = BlockSize::new(size).unwrap();
        let config = SourceConfig {
            seed: SEED,
            pool: "pool".into(),
            block_size,
            tiers: TIERS.to_vec(),
            capacity_blocks: 0,
            multimodal: false,
            replay: true,
            events: true,
        };
        let spec = SourceSpec {
            name: "http://engine:8000#0".into(),
            agent: "agent".into(),
            pool: PoolSpec {
                name: "pool".into(),
                models: vec!["model".into()],
                block_size,
                max_model_len: None,
                model_root: None,
            },
            worker: WorkerSpec {
                engine_url: "http://engine:8000".into(),
                rank: 0,
                ranks: 1,
                host: "host".into(),
                role: Role::Both,
                engine_kind: "vllm".into(),
                engine_block_size: 16,
                capacity_blocks: 0,
                max_num_seqs: 0,
                max_batched_tokens: 0,
                adapters: Vec::new(),
                bootstrap: None,
            },
            holders: TIERS
                .iter()
                .map(|t| HolderSpec {
                    tier: *t,
                    fetch_unit: 1,
                    reach: Reach::Worker,
                })
                .collect(),
        };
        let mut rig = Self {
            index: IndexState::new(),
            source: Source::new(config, Millis(0)),
            spec,
            now: Millis(0),
            at: 0,
            waiting_replays: 0,
            log: String::new(),
        };
        rig.apply(&Command::InitCluster {
            cluster: "test".into(),
            seed: SEED,
        });
        rig.register();
        rig
    }

    fn apply(&mut self, command: &Command) -> Reply {
        self.at += 1;
        self.index.apply(LogIndex(self.at), command)
    }

    fn register(&mut self) {
        let (spec, resume) = (self.spec.clone(), self.source.resume());
        match self.apply(&Command::RegisterSource { spec, resume }) {
            Reply::Register(RegisterOutcome::Registered {
                source,
                incarnation,
                holders,
                seq,
                resumed,
                ..
            }) => {
                self.source.registered(
                    self.now,
                    Registration {
                        source,
                        incarnation,
                        holders,
                        seq,
                        resumed,
                    },
                );
            }
            other => panic!("{other:?}"),
        }
    }

    pub fn connect(&mut self) {
        self.source.connected(self.now);
        self.settle();
    }

    /// Connects to an engine whose replay has nothing.
    pub fn fresh(&mut self) {
        self.connect();
        self.replay_ended();
    }

    pub fn live(&mut self, batch: EventBatch) {
        self.note(&batch, "live");
        self.source.live(self.now, batch);
        self.settle();
    }

    pub fn replayed(&mut self, batch: EventBatch) {
        self.note(&batch, "replayed");
        self.source.replayed(self.now, batch);
        self.settle();
    }

    fn note(&mut self, batch: &EventBatch, how: &str) {
        writeln!(
            self.log,
            "{how} seq={} events={} rank={:?} refused={:?}",
            batch.seq,
            batch.events.len(),
            batch.rank,
            batch.refused
        )
        .unwrap();
    }

    pub fn replay_ended(&mut self) {
        self.end(ReplayEnd::Complete);
    }

    /// Whatever was asked for and not answered fails.
    pub fn replay_failed(&mut self) {
        while self.waiting_replays > 0 {
            self.end(ReplayEnd::Failed);
            // The next try comes after a pause.
            self.now = self.now.after(250);
            self.source.tick(self.now);
            self.settle();
        }
    }

    fn end(&mut self, end: ReplayEnd) {
        self.waiting_replays = self.waiting_replays.saturating_sub(1);
        writeln!(self.log, "replay ended: {end:?}").unwrap();
        self.source.replay_ended(self.now, end);
        self.settle();
    }

    fn settle(&mut self) {
        loop {
            while let Some(effect) = self.source.poll_effect() {
                match effect {
                    Effect::RequestReplay { from } => {
                        self.waiting_replays += 1;
                        writeln!(self.log, "  asks for replay from {from}").unwrap();
                    }
                    Effect::Reregister => {
                        writeln!(self.log, "  new life").unwrap();
                        self.register();
                    }
                    Effect::Stop { .. } => panic!("fenced"),
                }
            }
            let Some(batch) = self.source.next_batch(self.now).cloned() else {
                return;
            };
            for op in &batch.ops {
                self.log_op(op);
            }
            let (incarnation, seq) = (batch.incarnation, batch.seq);
            let Reply::Batches(outcomes) = self.apply(&Command::Batches(vec![batch])) else {
                panic!("no answer")
            };
            self.source.acked(self.now, incarnation, seq, &outcomes[0]);
        }
    }

    fn log_op(&mut self, op: &Op) {
        match op {
            Op::Store {
                holder,
                anchor_depth,
                skip,
                keys,
                ..
            } => {
                let depth = anchor_depth.0 as usize + keys.len();
                writeln!(
                    self.log,
                    "  store holder={} skip={skip} depths {}..={depth}",
                    holder.0,
                    anchor_depth.0 + skip + 1
                )
            }
            Op::Remove {
                holder, depth, count, ..
            } => {
                writeln!(
                    self.log,
                    "  remove holder={} depths {}..={}",
                    holder.0,
                    depth.0 + 1 - count,
                    depth.0
                )
            }
            Op::Clear { holder } => writeln!(self.log, "  clear holder={}", holder.0),
            Op::Confidence(confidence) => writeln!(self.log, "  {confidence:?}"),
        }
        .unwrap();
    }

    /// What happened, and what is held at the end.
    pub fn summary(&self) -> String {
        let mut out = self.log.clone();
        let id = self.source.registration().unwrap().source;
        let audit = self.index.audit(id).unwrap();
        let told = self.source.told();
        for ((holder, digest), told) in audit.holders.iter().zip(told) {
            assert_eq!(*digest, told, "mirror and index differ");
            writeln!(
                out,
                "holder {} blocks={} digest={:016x}",
                holder.0, digest.blocks, digest.digest
            )
            .unwrap();
        }
        let stats = self.source.stats();
        writeln!(
            out,
            "engine blocks={:?} quarantined={} suspects={} restarts={} gaps={} lost={}",
            stats.held_blocks, stats.quarantined, stats.suspects, stats.restarts, stats.gaps, stats.lost_batches
        )
        .unwrap();
        let refused: Vec<_> = stats
            .refused
            .iter()
            .filter(|(_, n)| *n > 0)
            .map(|(r, n)| format!("{}={n}", r.as_str()))
            .collect();
        writeln!(
            out,
            "refused: {}",
            if refused.is_empty() {
                "nothing".into()
            } else {
                refused.join(" ")
            }
        )
        .unwrap();
        writeln!(out, "{:?}\n", self.source.confidence()).unwrap();
        out
    }
}
