//! Payloads of every engine version decode; hostile ones are refused quickly and in little memory.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "kit/payload.rs"]
mod payload;
#[path = "../../../tests/watch.rs"]
mod watch;

use std::time::Duration;

use cairn_agent::wire::{FrameError, MAX_PAYLOAD, ReplayFrames, decode, live_frames, replay_frames, replay_request};
use cairn_ingest::{EngineEvent, EngineHash, ExtraValue, Medium, RefusalReason, SpecKind, Stored};
use payload::{Value, bytes, map, pack, positional, text};
use watch::Watch;

fn one(event: Value) -> EngineEvent {
    let batch = decode(7, &payload::batch(vec![event]));
    assert_eq!(batch.refused, []);
    batch.events.into_iter().next().unwrap()
}

fn stored(event: Value) -> Stored {
    match one(event) {
        EngineEvent::Stored(stored) => stored,
        other => panic!("{other:?}"),
    }
}

fn ints(list: &[u64]) -> Value {
    Value::Array(list.iter().map(|n| Value::Unsigned(*n)).collect())
}

/// The fields after the tag as vLLM 0.23 sends them.
fn all_positions() -> Vec<Value> {
    vec![
        ints(&[0xf000_0000_0000_0001, 2]),
        Value::Unsigned(9),
        ints(&[11, 300, 70_000, 1, 2, 3, 4, 5]),
        Value::Unsigned(4),
        Value::Unsigned(3),
        text("GPU"),
        text("adapter"),
        Value::Array(vec![Value::Array(vec![text("adapter"), text("salt")]), Value::Nil]),
        Value::Unsigned(1),
        text("sliding_window"),
        Value::Unsigned(128),
    ]
}

#[test]
fn positional_stores_of_every_length_decode() {
    // vLLM 0.9 sends five fields; later versions add one to three at a time.
    for (fields, medium, adapter, group, kind) in [
        (5, false, false, false, false),
        (6, true, false, false, false),
        (7, true, true, false, false),
        (8, true, true, false, false),
        (9, true, true, true, false),
        (11, true, true, true, true),
    ] {
        let stored = stored(positional("BlockStored", &all_positions()[..fields]));
        assert_eq!(stored.hashes, [EngineHash(0xf000_0000_0000_0001), EngineHash(2)]);
        assert_eq!(stored.parent, Some(EngineHash(9)));
        assert_eq!(stored.tokens, [11, 300, 70_000, 1, 2, 3, 4, 5]);
        assert_eq!(
            (stored.block_size, stored.lora_id, stored.medium),
            (4, Some(3), Medium::Gpu)
        );
        assert_eq!(medium && adapter, fields >= 7);
        assert_eq!(stored.adapter.as_deref(), adapter.then_some("adapter"));
        assert_eq!(stored.group, group.then_some(1));
        assert_eq!(stored.spec_kind, if kind { SpecKind::Window } else { SpecKind::Unsaid });
        assert_eq!(stored.has_extra_keys, fields >= 8);
        assert_eq!(stored.extra_keys.len(), usize::from(fields >= 8));
    }
}

#[test]
fn positional_removals_and_clears_decode() {
    for fields in 1..=3 {
        let event = one(positional(
            "BlockRemoved",
            &[ints(&[4, 5]), text("CPU"), Value::Unsigned(2)][..fields],
        ));
        let EngineEvent::Removed(removed) = event else {
            panic!("{event:?}")
        };
        assert_eq!(removed.hashes, [EngineHash(4), EngineHash(5)]);
        assert_eq!(removed.medium, if fields >= 2 { Medium::Cpu } else { Medium::Gpu });
        assert_eq!(removed.group, (fields >= 3).then_some(2));
    }
    assert_eq!(one(positional("AllBlocksCleared", &[])), EngineEvent::Cleared);
}

#[test]
fn maps_decode_with_fields_in_any_order_and_unknown_ones() {
    let event = map(&[
        ("block_size", Value::Unsigned(2)),
        (
            "future",
            Value::Map(vec![(text("a"), Value::Array(vec![Value::Nil, Value::Float(1.5)]))]),
        ),
        ("token_ids", ints(&[1, 2])),
        ("lookahead_token_ids", ints(&[3])),
        ("type", text("BlockStored")),
        ("locality", text("LOCAL")),
        ("block_hashes", Value::Array(vec![bytes(&[7; 32])])),
        ("kv_cache_spec_kind", text("mla_attention")),
        ("remaining_copy_counts", ints(&[3])),
    ]);
    let stored = stored(event);
    assert_eq!(stored.hashes, [EngineHash::from_bytes(&[7; 32])]);
    assert_eq!(
        (stored.parent, stored.medium, stored.spec_kind),
        (None, Medium::Gpu, SpecKind::Full)
    );
    assert_eq!(stored.remaining_copies, Some(vec![3]));
}

#[test]
fn sglang_maps_decode_with_signed_hashes_and_a_salt_field() {
    let stored = stored(map(&[
        ("type", text("BlockStored")),
        (
            "block_hashes",
            Value::Array(vec![Value::Signed(-7_118_152_853_857_507_680)]),
        ),
        ("parent_block_hash", Value::Signed(-3)),
        ("token_ids", ints(&[100, 101])),
        ("block_size", Value::Unsigned(2)),
        ("lora_id", Value::Nil),
        ("medium", text("CPU_PINNED")),
        ("cache_salt", text("tenant-a")),
        ("lora_name", text("x")),
    ]));
    assert_eq!(stored.hashes, [EngineHash::from_signed(-7_118_152_853_857_507_680)]);
    assert_eq!(stored.parent, Some(EngineHash::from_signed(-3)));
    assert_eq!(
        (stored.medium, stored.cache_salt.as_deref()),
        (Medium::Cpu, Some("tenant-a"))
    );
}

#[test]
fn a_mocker_event_with_few_fields_decodes() {
    let stored = stored(map(&[
        ("type", text("BlockStored")),
        ("block_hashes", ints(&[5])),
        ("parent_block_hash", Value::Nil),
        ("token_ids", ints(&[1])),
        ("block_size", Value::Unsigned(1)),
        ("group_idx", Value::Unsigned(0)),
    ]));
    assert_eq!(
        (stored.group, stored.adapter, stored.has_extra_keys),
        (Some(0), None, false)
    );
}

#[test]
fn extra_keys_keep_texts_numbers_tuples_and_raw_bytes_apart() {
    let keys = Value::Array(vec![
        Value::Nil,
        Value::Array(vec![
            text("a"),
            Value::Unsigned(9),
            Value::Array(vec![text("image"), Value::Unsigned(4)]),
            bytes(b"embedding"),
        ]),
    ]);
    let stored = stored(map(&[
        ("type", text("BlockStored")),
        ("block_hashes", ints(&[1])),
        ("extra_keys", keys),
    ]));
    let extra = &stored.extra_keys[0];
    assert_eq!(extra.block, 1);
    assert_eq!(
        extra.values[..3],
        [
            ExtraValue::Bare("a".into()),
            ExtraValue::Bare("9".into()),
            ExtraValue::Tuple("image".into())
        ]
    );
    assert!(matches!(&extra.values[3], ExtraValue::Tuple(t) if t.starts_with("bytes:")));
}

#[test]
fn one_bad_event_is_refused_alone() {
    let good = |hash| positional("BlockRemoved", &[ints(&[hash])]);
    for (bad, reason) in [
        (positional("BlockMoved", &[ints(&[1])]), RefusalReason::UnknownTag),
        (map(&[("type", text("Heartbeat"))]), RefusalReason::UnknownTag),
        (map(&[("block_hashes", ints(&[1]))]), RefusalReason::MissingField),
        (positional("BlockRemoved", &[]), RefusalReason::MissingField),
        (positional("BlockRemoved", &[text("x")]), RefusalReason::BadField),
        (
            positional("BlockRemoved", &[Value::Array(vec![Value::Float(0.5)])]),
            RefusalReason::BadField,
        ),
        (
            positional("BlockRemoved", &[ints(&[1]), text("TAPE")]),
            RefusalReason::UnknownMedium,
        ),
        (
            positional("BlockStored", &[ints(&[1]), Value::Nil, ints(&[1 << 40])]),
            RefusalReason::BadField,
        ),
        (
            positional(
                "BlockStored",
                &[ints(&[1]), Value::Nil, Value::Array(vec![Value::Signed(-1)])],
            ),
            RefusalReason::BadField,
        ),
        (Value::Unsigned(3), RefusalReason::BadField),
        (Value::Array(Vec::new()), RefusalReason::MissingField),
        (
            map(&[
                ("type", text("BlockRemoved")),
                ("block_hashes", ints(&[1])),
                ("deep", payload::nested(60)),
            ]),
            RefusalReason::TooDeep,
        ),
    ] {
        let batch = decode(0, &payload::batch(vec![good(1), bad.clone(), good(2)]));
        assert_eq!(batch.events.len(), 2, "{bad:?}");
        assert_eq!(batch.refused, [reason], "{bad:?}");
    }
}

#[test]
fn a_message_that_is_no_batch_says_so_and_keeps_its_seq() {
    for bad in [
        Value::Unsigned(1),
        Value::Array(vec![Value::Float(1.0)]),
        text("hello"),
        Value::Nil,
    ] {
        let batch = decode(42, &pack(&bad));
        assert_eq!(
            (batch.seq, batch.refused.as_slice()),
            (42, &[RefusalReason::NotABatch][..]),
            "{bad:?}"
        );
    }
    assert_eq!(decode(0, &[]).refused, [RefusalReason::Malformed]);
    // A pickled tuple.
    assert!(
        !decode(0, b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00(K\x01K\x02t\x94.")
            .refused
            .is_empty()
    );
}

#[test]
fn a_batch_without_rank_or_as_a_map_decodes() {
    let events = Value::Array(vec![positional("AllBlocksCleared", &[])]);
    let short = decode(0, &pack(&Value::Array(vec![Value::Float(3.5), events.clone()])));
    assert_eq!((short.ts, short.rank, short.events.len()), (3.5, None, 1));
    let map = decode(
        0,
        &pack(&map(&[
            ("ts", Value::Float(3.5)),
            ("events", events),
            ("data_parallel_rank", Value::Unsigned(2)),
        ])),
    );
    assert_eq!((map.ts, map.rank, map.events.len()), (3.5, Some(2), 1));
}

#[test]
fn equal_bytes_have_equal_content_and_others_have_not() {
    let payload = payload::batch(vec![positional("AllBlocksCleared", &[])]);
    assert_eq!(decode(1, &payload).content, decode(9, &payload).content);
    assert_ne!(
        decode(1, &payload).content,
        decode(1, &payload[..payload.len() - 1]).content
    );
}

#[test]
fn frames_split_with_and_without_topic_and_delimiter() {
    let seq = 5u64.to_be_bytes();
    let live: [&[u8]; 3] = [b"kv@host@model", &seq, b"payload"];
    assert_eq!(live_frames(&live).unwrap().seq, 5);
    assert_eq!(live_frames(&live[..1]), Err(FrameError::Count(1)));
    assert_eq!(live_frames(&[b"" as &[u8], b"123", b""]), Err(FrameError::Seq(3)));
    let batch = Ok(ReplayFrames::Batch {
        seq: 5,
        payload: b"payload",
    });
    assert_eq!(
        replay_frames(&[b"" as &[u8], &seq, b"payload"]),
        batch,
        "vLLM before 0.26"
    );
    assert_eq!(
        replay_frames(&[b"" as &[u8], b"topic", &seq, b"payload"]),
        batch,
        "vLLM since 0.26"
    );
    assert_eq!(
        replay_frames(&[b"topic" as &[u8], &seq, b"payload"]),
        batch,
        "a REQ socket"
    );
    assert_eq!(replay_frames(&[&seq as &[u8], b"payload"]), batch);
    let end = [0xff; 8];
    for marker in [
        vec![b"" as &[u8], b"", &end, b""],
        vec![b"" as &[u8], &end, b""],
        vec![&end as &[u8], b""],
        vec![b"" as &[u8], b"", b"", b""],
    ] {
        assert_eq!(replay_frames(&marker), Ok(ReplayFrames::End), "{marker:?}");
    }
    assert!(replay_frames(&[b"x" as &[u8]]).is_err());
    assert!(replay_frames(&[b"" as &[u8]; 9]).is_err());
    assert_eq!(replay_request(258), [vec![], vec![0, 0, 0, 0, 0, 0, 1, 2]]);
}

/// Peak memory of this process in KiB, where the system tells.
fn peak_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[test]
fn bombs_are_refused_within_50_ms_and_64_mib() {
    let claim = |head: &[u8]| {
        let mut payload = vec![0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91];
        payload.extend_from_slice(head);
        payload
    };
    let mut deep = claim(&[0x93, 0xac]);
    deep.extend_from_slice(b"BlockRemoved");
    deep.extend(std::iter::repeat_n(0x91, 10_000));
    let mut many = claim(&[0x92, 0xac]);
    many.extend_from_slice(b"BlockRemoved\xdd");
    many.extend_from_slice(&10_000_000u32.to_be_bytes());
    many.resize(many.len() + 10_000_000, 1);
    let mut wide = many.clone();
    wide.truncate(1_000);
    let huge = vec![0x92; MAX_PAYLOAD + 1];
    let bombs: [(&str, Vec<u8>); 9] = [
        ("depth 10,000", deep),
        ("10 M hashes", many),
        ("10 M hashes claimed", wide),
        ("array of 4 G", claim(&[0xdd, 0xff, 0xff, 0xff, 0xff])),
        ("map of 4 G", claim(&[0xdf, 0xff, 0xff, 0xff, 0xff])),
        ("text of 4 GiB", claim(&[0xdb, 0xff, 0xff, 0xff, 0xff])),
        ("bytes of 4 GiB", claim(&[0xc6, 0xff, 0xff, 0xff, 0xff])),
        (
            "4 G events",
            vec![0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0xdd, 0xff, 0xff, 0xff, 0xff],
        ),
        ("above the bound", huge),
    ];
    let before = peak_kib();
    for (name, bomb) in &bombs {
        let started = Watch::start();
        let batch = decode(0, bomb);
        started.within(Duration::from_millis(50), name);
        assert!(batch.events.is_empty(), "{name}");
        assert!(!batch.refused.is_empty(), "{name}");
    }
    if let (Some(before), Some(after)) = (before, peak_kib()) {
        assert!(after - before < 64 << 10, "{} KiB more", after - before);
    }
}

#[test]
fn no_damaged_message_panics() {
    let stored = positional("BlockStored", &all_positions());
    let removed = map(&[("type", text("BlockRemoved")), ("block_hashes", ints(&[1, 2, 3]))]);
    let good = payload::batch(vec![stored, removed, positional("AllBlocksCleared", &[])]);
    let mut state = 1u64;
    for round in 0..20_000 {
        let mut bad = good.clone();
        for _ in 0..=round % 4 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let at = (state >> 33) as usize % bad.len();
            bad[at] = (state >> 20) as u8;
        }
        bad.truncate(bad.len() - (round % 7));
        let batch = decode(0, &bad);
        assert!(batch.events.len() + batch.refused.len() <= bad.len());
    }
}
