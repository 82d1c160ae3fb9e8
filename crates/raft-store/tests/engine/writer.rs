//! A child that writes to a log until it is killed, and what it said was durable.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use cairn_raft_store::{LogEngine, Record, SledEngine};

use crate::{append, open, put, record};

/// Tells the child where to write.
pub(crate) const CHILD: &str = "CAIRN_TEST_ENGINE_DIR";

/// Starts a child over a directory, with these variables.
pub(crate) fn spawn(dir: &Path, variables: &[(&str, String)]) -> (Child, Lines<BufReader<ChildStdout>>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "writer::child_writer", "--nocapture", "--test-threads=1"])
        .env(CHILD, dir)
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines)
}

/// Not a test of its own: the body of a child that writes until it is killed, and reports what is durable.
#[test]
fn child_writer() {
    let Ok(dir) = std::env::var(CHILD) else { return };
    #[cfg(target_os = "linux")]
    crate::power_shim::start_as_told(Path::new(&dir));
    let say = |line: String| {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{line}").unwrap();
        out.flush().unwrap();
    };
    // The harness has begun a line of its own.
    say(String::new());
    let engine = match SledEngine::open(Path::new(&dir), 0) {
        Ok(engine) => engine,
        Err(error) => return say(format!("E {error}")),
    };
    let mut next = match engine.bounds().unwrap() {
        Some((_, last)) => last + 1,
        None => 1,
    };
    let mut epoch = engine
        .get("epoch")
        .unwrap()
        .map_or(0, |e| u64::from_le_bytes(e.as_ref().try_into().unwrap()));
    for turn in 0u64.. {
        let group: Vec<Record> = (next..next + 1 + turn % 4).map(|i| record(i, epoch)).collect();
        next += group.len() as u64;
        if let Err(error) = append(&engine, &group) {
            return say(format!("E {error}"));
        }
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

/// What the child said is durable.
#[derive(Default)]
pub(crate) struct Truth {
    /// The epoch of each record that was acknowledged.
    epochs: BTreeMap<u64, u64>,
    /// The last record heard of.
    last: u64,
}

impl Truth {
    /// Takes one line of the child's; whether it acknowledges records.
    pub(crate) fn hear(&mut self, line: &str) -> bool {
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            ["A", last, epoch] => {
                let (last, epoch) = (last.parse().unwrap(), epoch.parse().unwrap());
                for index in self.last + 1..=last {
                    self.epochs.insert(index, epoch);
                }
                self.last = last;
                true
            }
            ["T", from] => {
                let from: u64 = from.parse().unwrap();
                self.epochs.retain(|index, _| *index < from);
                self.last = from - 1;
                false
            }
            _ => false,
        }
    }

    /// Opens the log and finds everything that was acknowledged; what came after it counts from now on as it was found.
    pub(crate) fn check(&mut self, dir: &Path) {
        let engine = open(dir);
        let Some((first, last)) = engine.bounds().unwrap() else {
            assert!(
                self.epochs.is_empty(),
                "acknowledged records are lost, the log is empty"
            );
            self.last = 0;
            return;
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
        let lost = self.epochs.range(last + 1..).next();
        assert_eq!(lost, None, "the log ends at {last}");
        self.last = last;
    }
}
