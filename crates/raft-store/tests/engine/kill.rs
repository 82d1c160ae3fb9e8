//! kill -9 at any moment.

use crate::writer::{Truth, spawn};

#[test]
fn kill_9_loses_nothing_that_was_acknowledged_and_every_start_succeeds() {
    let rounds: u64 = std::env::var("CAIRN_CRASH_ROUNDS").map_or(20, |rounds| rounds.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let mut truth = Truth::default();
    for round in 0..rounds {
        let (mut child, mut lines) = spawn(dir.path(), &[]);
        // Killed after another number of acknowledgements each time, in the middle of what comes next.
        let mut heard = 0;
        while heard < 3 + round % 17 {
            let line = lines.next().expect("the child writes until it is killed").unwrap();
            heard += u64::from(truth.hear(&line));
        }
        child.kill().unwrap();
        for line in lines.map_while(Result::ok) {
            truth.hear(&line);
        }
        child.wait().unwrap();
        truth.check(dir.path());
    }
}
