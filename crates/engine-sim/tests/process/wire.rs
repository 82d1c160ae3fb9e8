//! Every wire version, byte for byte where payloads of the real engines are at hand, and as the decoder reads them.

use std::sync::Arc;

use cairn_agent::wire::decode;
use cairn_engine_sim::events::{Encoder, HashForm, Wire};
use cairn_ingest::{EngineEvent, Medium as Read};
use cairn_replay::engine_model::{CacheEvent, EngineHash, Medium};

fn stored(medium: Medium, parent: Option<EngineHash>) -> CacheEvent {
    CacheEvent::Stored {
        hashes: vec![EngineHash(0xf000_0000_0000_0001), EngineHash(2)],
        parent,
        tokens: vec![11, 12, 13, 14, 21, 22, 23, 24],
        medium,
        adapter: None,
        salt: Some(Arc::from("tenant-a")),
    }
}

fn batch() -> Vec<CacheEvent> {
    let removed = CacheEvent::Removed {
        hashes: vec![EngineHash(2)],
        medium: Medium::Gpu,
    };
    vec![CacheEvent::Cleared, stored(Medium::Gpu, None), removed]
}

#[test]
fn payloads_equal_those_of_the_real_engines_byte_for_byte() {
    let Ok(folder) = std::env::var("CAIRN_CAPTURES") else {
        use std::io::Write as _;
        // Past the capture of a passing test's output.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: payloads_equal_those_of_the_real_engines_byte_for_byte: set CAIRN_CAPTURES=<folder of captured frames>"
        );
        return;
    };
    let versions = [
        (Wire::Vllm0_9, "0.9.2"),
        (Wire::Vllm0_10_2, "0.10.2"),
        (Wire::Vllm0_14, "0.14.1"),
        (Wire::Vllm0_17, "0.17.1"),
        (Wire::Vllm0_20, "0.20.2"),
        (Wire::Vllm0_22, "0.22.1"),
        (Wire::Vllm0_23, "0.23.0"),
        (Wire::Vllm0_24, "0.24.0"),
        (Wire::Vllm0_26, "0.26.0"),
        (Wire::Vllm0_29, "0.29.0"),
        (Wire::Vllm0_30, "0.30.0"),
        (Wire::Vllm0_32, "0.32.0"),
        (Wire::Vllm0_33, "0.33.0"),
    ];
    for (wire, version) in versions {
        let captured = std::fs::read(format!("{folder}/legacy/{version}.int.msgpack")).unwrap();
        let ours = Encoder::new(wire, HashForm::Int, false, 4, 1).batch(1_700_000_000.5, &batch());
        assert_eq!(ours, captured, "{version}");
    }
}

#[test]
fn every_version_and_hash_form_is_read_as_what_happened() {
    for wire in Wire::ALL {
        for form in [HashForm::Int, HashForm::Bytes] {
            let mut encoder = Encoder::new(wire, form, true, 4, 3);
            let payload = encoder.batch(1.5, &batch());
            let read = decode(9, &payload);
            assert_eq!((read.refused.len(), read.rank, read.ts), (0, Some(3), 1.5), "{wire:?}");
            let [
                EngineEvent::Cleared,
                EngineEvent::Stored(stored),
                EngineEvent::Removed(removed),
            ] = &read.events[..]
            else {
                panic!("{wire:?}: {:?}", read.events)
            };
            assert_eq!(stored.tokens, [11, 12, 13, 14, 21, 22, 23, 24]);
            assert_eq!((stored.block_size, stored.parent, stored.medium), (4, None, Read::Gpu));
            assert_eq!(removed.hashes, stored.hashes[1..]);
            let salt_in_keys = wire >= Wire::Vllm0_17 && wire <= Wire::Vllm0_33;
            assert_eq!(stored.extra_keys.len(), usize::from(salt_in_keys), "{wire:?}");
            assert_eq!(stored.cache_salt.as_deref(), wire.is_sglang().then_some("tenant-a"));
        }
    }
}

#[test]
fn host_memory_events_have_placeholders_unless_they_describe_themselves() {
    for (describing, tokens) in [(false, 0), (true, 8)] {
        let mut encoder = Encoder::new(Wire::Vllm0_32, HashForm::Int, describing, 4, 0);
        let payload = encoder.batch(1.0, &[stored(Medium::Cpu, Some(EngineHash(5)))]);
        let read = decode(0, &payload);
        let [EngineEvent::Stored(stored)] = &read.events[..] else {
            panic!("{read:?}")
        };
        assert_eq!(
            (stored.tokens.len(), stored.medium, stored.has_extra_keys),
            (tokens, Read::Cpu, false)
        );
        assert_eq!(stored.parent.is_some(), describing);
    }
}

#[test]
fn sglang_merges_removals_and_names_equal_tokens_alike_in_every_namespace() {
    let mut encoder = Encoder::new(Wire::Sglang0_5_23, HashForm::Int, false, 2, 0);
    let store = |hash, salt: Option<&str>| CacheEvent::Stored {
        hashes: vec![EngineHash(hash)],
        parent: None,
        tokens: vec![1, 2],
        medium: Medium::Gpu,
        adapter: None,
        salt: salt.map(Arc::from),
    };
    let removed = |hash| CacheEvent::Removed {
        hashes: vec![EngineHash(hash)],
        medium: Medium::Gpu,
    };
    let payload = encoder.batch(1.0, &[store(10, None), store(20, Some("t")), removed(10), removed(20)]);
    let read = decode(0, &payload);
    let [
        EngineEvent::Stored(plain),
        EngineEvent::Stored(salted),
        EngineEvent::Removed(both),
    ] = &read.events[..]
    else {
        panic!("{read:?}")
    };
    assert_eq!(plain.hashes, salted.hashes);
    assert_eq!(both.hashes, [plain.hashes[0], plain.hashes[0]]);
}
