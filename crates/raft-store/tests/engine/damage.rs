//! Torn and flipped bytes at the end of the log.

use std::path::Path;

use cairn_raft_store::{LogEngine, Record, SledEngine};

use crate::{append, open};

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
