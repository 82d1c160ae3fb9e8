//! Round trips of every conversion, and the refusals of hostile messages.
#![allow(clippy::unwrap_used, missing_docs)]

use cairn_blocks::{BlockKey, BlockSize, ClusterSeed, Depth};
use cairn_index::{
    Batch, BatchOutcome, Confidence, DegradedReason, HolderId, HolderSpec, Incarnation, Op, PoolSpec, Reach,
    RegisterOutcome, Role, Seq, SourceId, SourceSpec, Tier, WorkerId, WorkerSpec,
};
use cairn_proto::{BatchAnswer, RegisterAnswer, WireError, check_push, check_soft, limits, v1};

fn spec() -> SourceSpec {
    SourceSpec {
        name: "http://127.0.0.1:8000#1".to_owned(),
        agent: "host-a".to_owned(),
        pool: PoolSpec {
            name: "llama".to_owned(),
            models: vec!["llama".to_owned(), "alias".to_owned()],
            block_size: BlockSize::new(16).unwrap(),
            max_model_len: Some(8192),
            model_root: None,
        },
        worker: WorkerSpec {
            engine_url: "http://127.0.0.1:8000".to_owned(),
            rank: 1,
            ranks: 2,
            host: "a".to_owned(),
            role: Role::Prefill,
            engine_kind: "vllm".to_owned(),
            engine_block_size: 64,
            capacity_blocks: 1000,
            max_num_seqs: 8,
            max_batched_tokens: 2048,
            adapters: vec!["lora".to_owned()],
            bootstrap: Some("h:1".to_owned()),
        },
        holders: vec![
            HolderSpec {
                tier: Tier::Gpu,
                fetch_unit: 64,
                reach: Reach::Worker,
            },
            HolderSpec {
                tier: Tier::Cpu,
                fetch_unit: 64,
                reach: Reach::Host("a".to_owned()),
            },
            HolderSpec {
                tier: Tier::Shared,
                fetch_unit: 256,
                reach: Reach::Pool,
            },
        ],
    }
}

fn batch() -> Batch {
    let keys: Vec<BlockKey> = (0..5).map(BlockKey).collect();
    Batch {
        source: SourceId(3),
        incarnation: Incarnation(77),
        seq: Seq(9),
        ops: vec![
            Op::Store {
                holder: HolderId(1),
                anchor: BlockKey(42),
                anchor_depth: Depth(7),
                skip: 2,
                keys,
            },
            Op::Remove {
                holder: HolderId(1),
                key: BlockKey(u64::MAX),
                depth: Depth(4),
                count: 4,
            },
            Op::Clear { holder: HolderId(2) },
            Op::Confidence(Confidence::Exact),
            Op::Confidence(Confidence::Degraded(DegradedReason::Hybrid)),
        ],
    }
}

#[test]
fn a_registration_comes_back_as_it_was() {
    for resume in [None, Some(Incarnation(5))] {
        let message = v1::RegisterRequest::from((spec(), resume));
        assert_eq!(
            <(SourceSpec, Option<Incarnation>)>::try_from(message).unwrap(),
            (spec(), resume)
        );
    }
}

#[test]
fn a_batch_comes_back_as_it_was() {
    assert_eq!(Batch::try_from(v1::Batch::from(batch())).unwrap(), batch());
}

#[test]
fn answers_come_back_as_they_were() {
    let outcomes = [
        RegisterOutcome::Registered {
            source: SourceId(1),
            incarnation: Incarnation(2),
            worker: WorkerId(3),
            holders: vec![HolderId(4)],
            seq: Seq(5),
            resumed: true,
        },
        RegisterOutcome::HeldBy { agent: "b".to_owned() },
        RegisterOutcome::Invalid { reason: "r".to_owned() },
    ];
    for outcome in outcomes {
        let back = RegisterAnswer::try_from(v1::RegisterReply::from(RegisterAnswer {
            outcome: outcome.clone(),
            seed: ClusterSeed(9),
            lease_ms: 10,
        }));
        assert_eq!(back.unwrap().outcome, outcome);
    }
    for outcome in [
        BatchOutcome::Applied {
            unknown_anchors: vec![1, 4],
        },
        BatchOutcome::Duplicate,
        BatchOutcome::OutOfOrder { expected: Seq(3) },
        BatchOutcome::Fenced {
            current: Incarnation(8),
        },
        BatchOutcome::UnknownSource,
    ] {
        let answer = BatchAnswer {
            source: SourceId(1),
            incarnation: Incarnation(2),
            seq: Seq(3),
            outcome,
        };
        assert_eq!(
            BatchAnswer::try_from(v1::BatchAck::from(answer.clone())).unwrap(),
            answer
        );
    }
}

fn refused(change: impl FnOnce(&mut v1::RegisterRequest), field: &str) {
    let mut message = v1::RegisterRequest::from((spec(), None));
    change(&mut message);
    let error = <(SourceSpec, Option<Incarnation>)>::try_from(message)
        .unwrap_err()
        .to_string();
    assert!(error.contains(field), "{error} should name {field}");
}

#[test]
fn hostile_registrations_are_refused_naming_the_field() {
    refused(|m| m.spec = None, "spec");
    refused(|m| m.spec.as_mut().unwrap().name = String::new(), "spec.name");
    refused(
        |m| m.spec.as_mut().unwrap().name = "x".repeat(limits::NAME_BYTES_MAX + 1),
        "spec.name",
    );
    refused(|m| m.spec.as_mut().unwrap().agent = "a\nb".to_owned(), "spec.agent");
    refused(
        |m| m.spec.as_mut().unwrap().pool.as_mut().unwrap().block_size = 0,
        "pool.block_size",
    );
    refused(
        |m| m.spec.as_mut().unwrap().pool.as_mut().unwrap().models.clear(),
        "pool.models",
    );
    refused(
        |m| m.spec.as_mut().unwrap().worker.as_mut().unwrap().role = 9,
        "worker.role",
    );
    refused(
        |m| m.spec.as_mut().unwrap().worker.as_mut().unwrap().rank = 2,
        "worker.rank",
    );
    refused(
        |m| m.spec.as_mut().unwrap().worker.as_mut().unwrap().engine_url = "ftp://x".into(),
        "worker.engine_url",
    );
    refused(|m| m.spec.as_mut().unwrap().holders.clear(), "spec.holders");
    refused(|m| m.spec.as_mut().unwrap().holders[0].reach = None, "holder.reach");
    refused(
        |m| m.spec.as_mut().unwrap().holders[0].fetch_unit = 0,
        "holder.fetch_unit",
    );
    refused(
        |m| m.spec.as_mut().unwrap().holders = vec![v1::HolderSpec::default(); 17],
        "spec.holders",
    );
}

fn refused_batch(change: impl FnOnce(&mut v1::Batch), field: &str) {
    let mut message = v1::Batch::from(batch());
    change(&mut message);
    let error = Batch::try_from(message).unwrap_err().to_string();
    assert!(error.contains(field), "{error} should name {field}");
}

fn store(message: &mut v1::Batch) -> &mut v1::Store {
    match message.ops[0].op.as_mut().unwrap() {
        v1::op::Op::Store(store) => store,
        other => panic!("{other:?}"),
    }
}

#[test]
fn hostile_batches_are_refused_naming_the_field() {
    refused_batch(|m| m.group = 1, "batch.group");
    refused_batch(|m| m.seq = 0, "batch.seq");
    refused_batch(|m| store(m).keys.clear(), "store.keys");
    refused_batch(|m| store(m).skip = 5, "store.skip");
    refused_batch(|m| store(m).anchor_depth = u32::MAX, "store.anchor_depth");
    refused_batch(|m| store(m).keys = vec![0; limits::BATCH_KEYS_MAX + 1], "store.keys");
    refused_batch(
        |m| m.ops = vec![m.ops[1].clone(); limits::BATCH_OPS_MAX + 1],
        "batch.ops",
    );
    refused_batch(|m| m.ops[0].op = None, "op");
    refused_batch(|m| m.ops[3].op = Some(v1::op::Op::Confidence(99)), "confidence");
    let cut = |depth, count| {
        v1::op::Op::Remove(v1::Cut {
            holder: 0,
            key: 0,
            depth,
            count,
        })
    };
    refused_batch(|m| m.ops[1].op = Some(cut(3, 0)), "remove.count");
    refused_batch(|m| m.ops[1].op = Some(cut(3, 4)), "remove.count");
    refused_batch(|m| m.ops[1].op = Some(cut(u32::MAX, 1)), "remove.depth");
}

#[test]
fn pushes_and_soft_frames_are_bounded() {
    let push = v1::PushRequest {
        batches: vec![v1::Batch::default(); limits::PUSH_BATCHES_MAX + 1],
        renew: vec![],
    };
    assert!(matches!(
        check_push(&push).unwrap_err(),
        WireError::TooMany { field: "batches", .. }
    ));
    let soft = |frame| v1::SoftFrames {
        frames: vec![v1::SoftFrame { frame: Some(frame) }],
        relayed: false,
    };
    let load = v1::LoadReport {
        source: "s".to_owned(),
        kv_usage: f32::NAN,
        ..Default::default()
    };
    let error = check_soft(&soft(v1::soft_frame::Frame::Load(load))).unwrap_err();
    assert!(error.to_string().contains("kv_usage"));
    let prefix = v1::SpeculativePrefix {
        worker: 1,
        keys: vec![1],
        stride: 1,
        ttl_ms: 100,
        ..Default::default()
    };
    let router = v1::RouterFrame {
        router: "r".to_owned(),
        prefixes: vec![prefix],
        ..Default::default()
    };
    check_soft(&soft(v1::soft_frame::Frame::Router(router.clone()))).unwrap();
    let mut bad = router.clone();
    bad.prefixes[0].stride = 0;
    check_soft(&soft(v1::soft_frame::Frame::Router(bad))).unwrap_err();
    let mut bad = router;
    bad.prefixes[0].keys = vec![0; limits::PREFIX_KEYS_MAX + 1];
    check_soft(&soft(v1::soft_frame::Frame::Router(bad))).unwrap_err();
    check_soft(&v1::SoftFrames {
        frames: vec![v1::SoftFrame::default()],
        relayed: false,
    })
    .unwrap_err();
}
