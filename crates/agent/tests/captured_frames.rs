//! Frames captured from real engines end in the states written down in `golden/`.
//!
//! The captures aren't part of this repository: `CAIRN_CAPTURES` names their folder. `CAIRN_BLESS=1` rewrites the states.

#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

#[path = "kit/payload.rs"]
mod payload;
#[path = "kit/rig.rs"]
mod rig;

use std::fmt::Write;
use std::path::{Path, PathBuf};

use cairn_agent::wire::{ReplayFrames, decode, live_frames, replay_frames};
use payload::{Value, map, positional, text};
use rig::Rig;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
/// Canonical block sizes that every file is read with.
const SIZES: [u32; 3] = [16, 4, 32];

fn captures(test: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("CAIRN_CAPTURES").map(PathBuf::from);
    if folder.is_none() {
        use std::io::Write as _;
        // Past the capture of a passing test's output.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: {test}: set CAIRN_CAPTURES=<folder of captured frames>"
        );
    }
    folder
}

/// One received message.
struct Record {
    replay: bool,
    frames: Vec<Vec<u8>>,
}

fn records(path: &Path) -> Vec<Record> {
    let bytes = std::fs::read(path).unwrap();
    let mut rest = bytes.as_slice();
    let take = |rest: &mut &[u8], n: usize| {
        let (taken, after) = rest.split_at(n);
        *rest = after;
        taken.to_vec()
    };
    let number = |rest: &mut &[u8]| u32::from_le_bytes(take(rest, 4).try_into().unwrap()) as usize;
    let mut records = Vec::new();
    while !rest.is_empty() {
        let replay = take(&mut rest, 1)[0] == 1;
        take(&mut rest, 8);
        let frames = (0..number(&mut rest))
            .map(|_| {
                let n = number(&mut rest);
                take(&mut rest, n)
            })
            .collect();
        records.push(Record { replay, frames });
    }
    records
}

fn state(records: &[Record], size: u32) -> String {
    let mut rig = Rig::new(size);
    if !records.iter().any(|r| r.replay) {
        rig.fresh();
    } else {
        rig.connect();
    }
    for record in records {
        if record.replay {
            match replay_frames(&record.frames).unwrap() {
                ReplayFrames::Batch { seq, payload } => rig.replayed(decode(seq, payload)),
                ReplayFrames::End => rig.replay_ended(),
            }
        } else {
            let live = live_frames(&record.frames).unwrap();
            rig.live(decode(live.seq, live.payload));
        }
    }
    rig.replay_failed();
    rig.summary()
}

fn check(name: &str, found: &str) {
    let path = Path::new(GOLDEN).join(format!("{name}.txt"));
    if std::env::var_os("CAIRN_BLESS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, found).unwrap();
        return;
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert!(expected == found, "{name} differs from its golden state:\n{found}");
}

#[test]
fn every_captured_file_ends_in_its_golden_state() {
    let Some(folder) = captures("every_captured_file_ends_in_its_golden_state") else {
        return;
    };
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.retain(|p| p.extension().is_some_and(|e| e == "bin"));
    files.sort();
    assert!(!files.is_empty(), "no .bin file in CAIRN_CAPTURES");
    for file in files {
        let records = records(&file);
        let mut all = String::new();
        for size in SIZES {
            writeln!(all, "canonical block size {size}").unwrap();
            all += &state(&records, size);
        }
        check(&file.file_stem().unwrap().to_string_lossy(), &all);
    }
}

#[test]
fn every_legacy_payload_ends_in_its_golden_state() {
    let Some(folder) = captures("every_legacy_payload_ends_in_its_golden_state") else {
        return;
    };
    let mut files: Vec<_> = std::fs::read_dir(folder.join("legacy"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    files.sort();
    assert!(files.len() >= 26, "{} payloads", files.len());
    let mut all = String::new();
    for file in files {
        let batch = decode(0, &std::fs::read(&file).unwrap());
        assert_eq!(batch.refused, [], "{}", file.display());
        writeln!(all, "{}", file.file_stem().unwrap().to_string_lossy()).unwrap();
        let mut rig = Rig::new(4);
        rig.fresh();
        rig.live(batch);
        all += &rig.summary();
    }
    check("legacy", &all);
}

#[test]
fn all_legacy_payloads_in_one_stream_decode() {
    let Some(folder) = captures("all_legacy_payloads_in_one_stream_decode") else {
        return;
    };
    let mut files: Vec<_> = std::fs::read_dir(folder.join("legacy"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    files.sort();
    let mut rig = Rig::new(4);
    rig.fresh();
    for (seq, file) in files.iter().enumerate() {
        rig.live(decode(seq as u64, &std::fs::read(file).unwrap()));
    }
    check("legacy-in-one-stream", &rig.summary());
}

fn ints(list: &[u64]) -> Value {
    Value::Array(list.iter().map(|n| Value::Unsigned(*n)).collect())
}

fn run(from: u64, n: u64) -> Value {
    ints(&(from..from + n).collect::<Vec<_>>())
}

#[test]
fn one_stream_mixing_every_shape_ends_in_its_golden_state() {
    let four = Value::Unsigned(4);
    let stored = |name: &str, extra: &[(&str, Value)]| {
        let mut fields = vec![("type", text("BlockStored")), ("block_size", four.clone())];
        fields.extend(extra.iter().map(|(k, v)| (*k, v.clone())));
        fields.push(("session_id", text(name)));
        map(&fields)
    };
    let payloads = [
        // vLLM 0.9, then 0.23 below it.
        payload::batch_at(
            1.0,
            vec![positional(
                "BlockStored",
                &[ints(&[1, 2]), Value::Nil, run(10, 8), four.clone(), Value::Nil],
            )],
        ),
        payload::batch_at(
            2.0,
            vec![positional(
                "BlockStored",
                &[
                    ints(&[3]),
                    Value::Unsigned(2),
                    run(18, 4),
                    four.clone(),
                    Value::Nil,
                    text("GPU"),
                    Value::Nil,
                    Value::Array(vec![Value::Nil]),
                    Value::Unsigned(0),
                    text("full_attention"),
                    Value::Nil,
                ],
            )],
        ),
        // A map of vLLM 0.32 with byte hashes and a salt, and a clear-text removal of old and new kind.
        payload::batch_at(
            3.0,
            vec![
                stored(
                    "a",
                    &[
                        (
                            "block_hashes",
                            Value::Array(vec![payload::bytes(&[1; 32]), payload::bytes(&[2; 32])]),
                        ),
                        ("token_ids", run(10, 8)),
                        (
                            "extra_keys",
                            Value::Array(vec![Value::Array(vec![text("salt")]), Value::Nil]),
                        ),
                        ("medium", text("GPU")),
                    ],
                ),
                positional("BlockRemoved", &[ints(&[3])]),
                map(&[("type", text("SomethingNew")), ("block_hashes", ints(&[1]))]),
            ],
        ),
        // SGLang: signed hashes, a salt field, a removal of many.
        payload::batch_at(
            4.0,
            vec![
                stored(
                    "b",
                    &[
                        ("block_hashes", Value::Array(vec![Value::Signed(-5), Value::Signed(-6)])),
                        ("token_ids", run(40, 8)),
                        ("cache_salt", text("salt")),
                    ],
                ),
                map(&[
                    ("type", text("BlockRemoved")),
                    (
                        "block_hashes",
                        Value::Array(vec![Value::Signed(-6), Value::Unsigned(2)]),
                    ),
                    ("medium", text("GPU")),
                ]),
            ],
        ),
        // The CPU tier, placeholder and described, child before parent.
        payload::batch_at(
            5.0,
            vec![
                map(&[
                    ("type", text("BlockStored")),
                    ("block_hashes", Value::Array(vec![payload::bytes(&[2; 32])])),
                    ("token_ids", ints(&[])),
                    ("block_size", Value::Unsigned(0)),
                    ("medium", text("CPU")),
                ]),
                stored(
                    "c",
                    &[
                        ("block_hashes", Value::Array(vec![payload::bytes(&[1; 32])])),
                        ("token_ids", run(10, 4)),
                        ("medium", text("CPU")),
                    ],
                ),
            ],
        ),
    ];
    let mut rig = Rig::new(4);
    rig.fresh();
    for (seq, payload) in payloads.iter().enumerate() {
        rig.live(decode(seq as u64, payload));
    }
    check("mixed-shapes", &rig.summary());
}
