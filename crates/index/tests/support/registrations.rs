//! Registrations and batches for the tests of the state machine.

#![allow(dead_code, clippy::unwrap_used, missing_docs)]

use cairn_blocks::{BlockKey, BlockSize, Depth};
use cairn_index::{
    Batch, BatchOutcome, Command, HolderId, HolderSpec, Incarnation, IndexState, LogIndex, Op, PoolSpec, Reach,
    RegisterOutcome, Reply, Role, Seq, SourceId, SourceSpec, Tier, WorkerId, WorkerSpec,
};

pub fn spec(n: u32) -> SourceSpec {
    SourceSpec {
        name: format!("http://10.0.0.{n}:8000#0"),
        agent: format!("agent-{n}"),
        pool: PoolSpec {
            name: "llama".into(),
            models: vec!["llama".into()],
            block_size: BlockSize::new(16).unwrap(),
            max_model_len: Some(32_768),
            model_root: None,
        },
        worker: WorkerSpec {
            engine_url: format!("http://10.0.0.{n}:8000"),
            rank: 0,
            ranks: 1,
            host: format!("host-{}", n / 2),
            role: Role::Both,
            engine_kind: "vllm".into(),
            engine_block_size: 16,
            capacity_blocks: 1024,
            max_num_seqs: 8,
            max_batched_tokens: 2048,
            adapters: vec![],
            bootstrap: None,
        },
        holders: vec![
            HolderSpec {
                tier: Tier::Gpu,
                fetch_unit: 16,
                reach: Reach::Worker,
            },
            HolderSpec {
                tier: Tier::Cpu,
                fetch_unit: 16,
                reach: Reach::Worker,
            },
        ],
    }
}

/// What a registration gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Registered {
    pub source: SourceId,
    pub incarnation: Incarnation,
    pub worker: WorkerId,
    pub holders: Vec<HolderId>,
    pub seq: Seq,
    pub resumed: bool,
}

pub fn outcome(state: &mut IndexState, spec: SourceSpec, resume: Option<Incarnation>) -> RegisterOutcome {
    let at = LogIndex(state.applied().0 + 1);
    match state.apply(at, &Command::RegisterSource { spec, resume }) {
        Reply::Register(outcome) => outcome,
        other => panic!("{other:?}"),
    }
}

pub fn register(state: &mut IndexState, spec: SourceSpec) -> Registered {
    registered(outcome(state, spec, None))
}

pub fn registered(outcome: RegisterOutcome) -> Registered {
    match outcome {
        RegisterOutcome::Registered {
            source,
            incarnation,
            worker,
            holders,
            seq,
            resumed,
        } => Registered {
            source,
            incarnation,
            worker,
            holders,
            seq,
            resumed,
        },
        other => panic!("{other:?}"),
    }
}

pub fn push(state: &mut IndexState, of: &Registered, seq: u64, ops: Vec<Op>) -> BatchOutcome {
    let at = LogIndex(state.applied().0 + 1);
    let batch = Batch {
        source: of.source,
        incarnation: of.incarnation,
        seq: Seq(seq),
        ops,
    };
    match state.apply(at, &Command::Batches(vec![batch])) {
        Reply::Batches(mut outcomes) => outcomes.pop().unwrap(),
        other => panic!("{other:?}"),
    }
}

pub fn keys(range: std::ops::Range<u64>) -> Vec<BlockKey> {
    range.map(|i| BlockKey(i.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect()
}

pub const ROOT: BlockKey = BlockKey(1);

pub fn store(holder: HolderId, keys: &[BlockKey]) -> Op {
    Op::Store {
        holder,
        anchor: ROOT,
        anchor_depth: Depth(0),
        skip: 0,
        keys: keys.to_vec(),
    }
}

pub const APPLIED: BatchOutcome = BatchOutcome::Applied {
    unknown_anchors: Vec::new(),
};
