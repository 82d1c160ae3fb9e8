//! What every log engine must do, on the sled engine: conformance, kill -9, power cuts, damaged bytes, full disk.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

mod damage;
mod kill;
#[cfg(target_os = "linux")]
mod power;
#[cfg(target_os = "linux")]
mod power_disk;
#[cfg(target_os = "linux")]
mod power_shim;
mod writer;

use std::path::Path;
use std::sync::mpsc::channel;

use cairn_raft_store::{EngineError, LogEngine, Record, SledEngine, VALUE_BYTES_MAX};

/// The bytes of record `index` of an epoch: sizes mixed, content checkable.
fn record(index: u64, epoch: u64) -> Record {
    let len = match index % 7 {
        0 => 64 << 10,
        1..=3 => 200,
        4 => 1,
        5 => 9_000,
        _ => 200 << 10,
    };
    let mut value = vec![(index % 251) as u8; len + 16];
    value[..8].copy_from_slice(&index.to_le_bytes());
    value[8..16].copy_from_slice(&epoch.to_le_bytes());
    Record {
        index,
        value: value.into(),
    }
}

fn append(engine: &SledEngine, records: &[Record]) -> Result<(), EngineError> {
    let (sender, receiver) = channel();
    engine.append(records, Box::new(move |result| sender.send(result).unwrap()));
    receiver.recv().unwrap()
}

fn put(engine: &SledEngine, name: &str, value: &[u8]) -> Result<(), EngineError> {
    let (sender, receiver) = channel();
    engine.put(name, value, Box::new(move |result| sender.send(result).unwrap()));
    receiver.recv().unwrap()
}

fn open(dir: &Path) -> SledEngine {
    SledEngine::open(dir, 0).unwrap()
}

fn indexes(engine: &SledEngine, from: u64, to: u64, bytes: usize) -> Vec<u64> {
    engine
        .read(from, to, bytes)
        .unwrap()
        .iter()
        .map(|record| record.index)
        .collect()
}

#[test]
fn records_are_read_back_in_order_cut_at_both_ends_and_kept_over_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(dir.path());
    assert_eq!(engine.bounds().unwrap(), None);
    let all: Vec<Record> = (1..=30).map(|i| record(i, 0)).collect();
    append(&engine, &all[..10]).unwrap();
    append(&engine, &all[10..]).unwrap();
    assert_eq!(engine.bounds().unwrap(), Some((1, 30)));
    assert_eq!(engine.read(3, 9, usize::MAX).unwrap(), all[2..8]);
    assert_eq!(indexes(&engine, 6, 31, 1), vec![6], "at least one comes, however large");
    assert!(indexes(&engine, 9, 9, 1).is_empty() && indexes(&engine, 31, 99, 1).is_empty());
    engine.truncate(25).unwrap();
    append(&engine, &[record(25, 1)]).unwrap();
    engine.purge(4, "purged", b"4").unwrap();
    put(&engine, "vote", b"7").unwrap();
    drop(engine);
    let engine = open(dir.path());
    assert_eq!(engine.bounds().unwrap(), Some((5, 25)));
    assert_eq!(
        engine.read(24, 26, usize::MAX).unwrap(),
        vec![record(24, 0), record(25, 1)]
    );
    assert_eq!(engine.get("purged").unwrap().unwrap(), b"4".as_slice());
    assert_eq!(engine.get("vote").unwrap().unwrap(), b"7".as_slice());
    assert_eq!(engine.get("nothing").unwrap(), None);
    engine.purge(100, "purged", b"100").unwrap();
    assert_eq!(engine.bounds().unwrap(), None);
    append(&engine, &[record(101, 0)]).unwrap();
    assert_eq!(engine.bounds().unwrap(), Some((101, 101)));
}

#[test]
fn values_that_would_leave_the_log_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(dir.path());
    let fits = Record {
        index: 1,
        value: vec![1; VALUE_BYTES_MAX].into(),
    };
    append(&engine, &[fits]).unwrap();
    let large = Record {
        index: 2,
        value: vec![1; VALUE_BYTES_MAX + 1].into(),
    };
    assert!(matches!(append(&engine, &[large]), Err(EngineError::TooLarge { .. })));
    assert_eq!(std::fs::read_dir(dir.path().join("blobs")).unwrap().count(), 0);
}

#[test]
fn a_store_that_never_was_one_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("blobs")).unwrap();
    std::fs::write(dir.path().join("blobs/5"), b"x").unwrap();
    let message = SledEngine::open(dir.path(), 0).err().unwrap().to_string();
    assert!(message.contains("blobs/"), "{message}");
}
