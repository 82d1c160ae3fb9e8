//! What every log engine must do, on the sled engine: conformance, kill -9, damaged bytes, full disk.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;

use cairn_raft_store::{EngineError, LogEngine, Record, SledEngine, VALUE_BYTES_MAX};

const CHILD: &str = "CAIRN_TEST_ENGINE_DIR";

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

/// Not a test of its own: the body of a child that writes until it is killed, and reports what is durable.
#[test]
fn child_writer() {
    let Ok(dir) = std::env::var(CHILD) else { return };
    let engine = open(Path::new(&dir));
    let mut next = match engine.bounds().unwrap() {
        Some((_, last)) => last + 1,
        None => 1,
    };
    let mut epoch = engine
        .get("epoch")
        .unwrap()
        .map_or(0, |e| u64::from_le_bytes(e.as_ref().try_into().unwrap()));
    let say = |line: String| {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{line}").unwrap();
        out.flush().unwrap();
    };
    for turn in 0u64.. {
        let group: Vec<Record> = (next..next + 1 + turn % 4).map(|i| record(i, epoch)).collect();
        next += group.len() as u64;
        append(&engine, &group).unwrap();
        say(format!("A {} {epoch}", next - 1));
        if turn % 5 == 4 && next > 10 {
            // What a new leader does to entries that were never committed.
            epoch += 1;
            put(&engine, "epoch", &epoch.to_le_bytes()).unwrap();
            say(format!("T {}", next - 3));
            engine.truncate(next - 3).unwrap();
            next -= 3;
        }
        if turn % 9 == 8 && next > 40 {
            engine.purge(next - 30, "purged", &(next - 30).to_le_bytes()).unwrap();
        }
    }
}

/// What the child said is durable: last index, and the epoch of each record that was acknowledged.
#[derive(Default)]
struct Truth {
    epochs: std::collections::BTreeMap<u64, u64>,
}

impl Truth {
    fn hear(&mut self, line: &str, last_heard: &mut u64) {
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            ["A", last, epoch] => {
                let (last, epoch) = (last.parse().unwrap(), epoch.parse().unwrap());
                for index in *last_heard + 1..=last {
                    self.epochs.insert(index, epoch);
                }
                *last_heard = last;
            }
            ["T", from] => {
                let from: u64 = from.parse().unwrap();
                self.epochs.retain(|index, _| *index < from);
                *last_heard = from - 1;
            }
            _ => {}
        }
    }

    fn check(&self, dir: &Path) -> u64 {
        let engine = open(dir);
        let Some((first, last)) = engine.bounds().unwrap() else {
            assert!(self.epochs.is_empty());
            return 0;
        };
        for (index, epoch) in self.epochs.range(first..) {
            let found = engine.read(*index, index + 1, usize::MAX).unwrap();
            assert_eq!(
                found.len(),
                1,
                "acknowledged record {index} is lost; the log has {first}..={last}"
            );
            let found_epoch = u64::from_le_bytes(found[0].value[8..16].try_into().unwrap());
            assert!(found_epoch >= *epoch, "record {index} went back to an older life");
            assert_eq!(found[0], record(*index, found_epoch));
        }
        let purged = engine
            .get("purged")
            .unwrap()
            .map_or(0, |p| u64::from_le_bytes(p.as_ref().try_into().unwrap()));
        assert!(first <= purged + 1, "records {}..{first} are missing", purged + 1);
        last
    }
}

#[test]
fn kill_9_loses_nothing_that_was_acknowledged_and_every_start_succeeds() {
    let rounds: u64 = std::env::var("CAIRN_CRASH_ROUNDS").map_or(20, |rounds| rounds.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let mut truth = Truth::default();
    let mut last = 0;
    for round in 0..rounds {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_writer", "--nocapture", "--test-threads=1"])
            .env(CHILD, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // Killed after another number of acknowledgements each time, in the middle of what comes next.
        let mut heard = 0;
        while heard < 3 + round % 17 {
            let line = lines.next().expect("the child writes until it is killed").unwrap();
            heard += u64::from(line.starts_with('A'));
            truth.hear(&line, &mut last);
        }
        child.kill().unwrap();
        for line in lines.map_while(Result::ok) {
            truth.hear(&line, &mut last);
        }
        child.wait().unwrap();
        last = truth.check(dir.path());
        // What came after the last acknowledgement counts from now on as it was found.
        truth.epochs.retain(|index, _| *index <= last);
    }
}

/// A small database, closed cleanly, with the length of its file's used part.
fn small(dir: &Path) -> u64 {
    let engine = open(dir);
    for i in 1..=12 {
        append(
            &engine,
            &[Record {
                index: i,
                value: vec![i as u8; 300].into(),
            }],
        )
        .unwrap();
    }
    drop(engine);
    let bytes = std::fs::read(dir.join("db")).unwrap();
    bytes.iter().rposition(|b| *b != 0).unwrap() as u64 + 1
}

/// Opens a damaged copy: either a clean prefix of the records is there, or the refusal names damage.
fn opens_with_a_prefix_or_refuses(dir: &Path, what: &str) -> Option<u64> {
    match SledEngine::open(dir, 0) {
        Ok(engine) => {
            let last = engine.bounds().unwrap().map_or(0, |(first, last)| {
                assert_eq!(first, 1, "{what}");
                last
            });
            for found in engine.read(1, last + 1, usize::MAX).unwrap() {
                assert_eq!(found.value, vec![found.index as u8; 300], "{what}");
            }
            Some(last)
        }
        Err(error) => {
            let message = error.to_string();
            assert!(
                message.contains("damaged") && message.contains("new id"),
                "{what}: {message}"
            );
            None
        }
    }
}

#[test]
fn torn_and_flipped_bytes_at_the_end_give_a_clean_prefix_or_a_clear_refusal() {
    let step: u64 = std::env::var("CAIRN_TORN_STEP").map_or(211, |step| step.parse().unwrap());
    let whole = tempfile::tempdir().unwrap();
    let end = small(whole.path());
    let bytes = std::fs::read(whole.path().join("db")).unwrap();
    let mut opened = 0;
    for offset in (end.saturating_sub(4096)..end).step_by(usize::try_from(step).unwrap()) {
        for torn in [true, false] {
            let copy = tempfile::tempdir().unwrap();
            for name in ["conf", "db"] {
                std::fs::copy(whole.path().join(name), copy.path().join(name)).unwrap();
            }
            let mut damaged = bytes.clone();
            let at = usize::try_from(offset).unwrap();
            if torn {
                damaged[at..].fill(0);
            } else {
                damaged[at] ^= 0x40;
            }
            std::fs::write(copy.path().join("db"), damaged).unwrap();
            let what = format!("{} at {offset} of {end}", if torn { "torn" } else { "flipped" });
            opened += u64::from(opens_with_a_prefix_or_refuses(copy.path(), &what).is_some());
        }
    }
    assert!(opened > 0, "a torn tail alone is no reason to refuse");
}

#[test]
fn a_store_that_never_was_one_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("blobs")).unwrap();
    std::fs::write(dir.path().join("blobs/5"), b"x").unwrap();
    let message = SledEngine::open(dir.path(), 0).err().unwrap().to_string();
    assert!(message.contains("blobs/"), "{message}");
}
