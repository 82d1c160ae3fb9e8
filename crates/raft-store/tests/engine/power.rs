//! The power goes at any moment, and the disk fills up.

use std::panic::AssertUnwindSafe;
use std::path::Path;

use cairn_raft_store::SledEngine;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::power_disk::{Disk, Loss};
use crate::power_shim::{JOURNAL, ROOM};
use crate::writer::{Truth, spawn};

/// A child writes until it has acknowledged `until` times and is killed; gives the disk with what was synced of it.
fn write_and_cut(dir: &Path, truth: &mut Truth, mut disk: Disk, until: u64) -> Disk {
    let place = tempfile::tempdir().unwrap();
    let journal = place.path().join("journal");
    let (mut child, mut lines) = spawn(dir, &[(JOURNAL, journal.display().to_string())]);
    let mut heard = 0;
    while heard < until {
        let line = lines.next().expect("the child writes until it is killed").unwrap();
        heard += u64::from(truth.hear(&line));
    }
    child.kill().unwrap();
    for line in lines.map_while(Result::ok) {
        truth.hear(&line);
    }
    child.wait().unwrap();
    disk.replay(&std::fs::read(&journal).unwrap_or_default());
    disk
}

#[test]
fn a_power_cut_loses_nothing_that_was_acknowledged_and_every_start_succeeds() {
    let rounds: u64 = std::env::var("CAIRN_POWER_ROUNDS").map_or(10, |rounds| rounds.parse().unwrap());
    let seed: u64 = std::env::var("CAIRN_POWER_SEED").map_or(7, |seed| seed.parse().unwrap());
    let mut dir = tempfile::tempdir().unwrap();
    let mut truth = Truth::default();
    let mut unsynced = 0;
    for round in 0..rounds {
        let mut rng = SmallRng::seed_from_u64(seed << 32 | round);
        // The first rounds end early, while the store is being made.
        let until = rng.random_range(0..3 + 2 * (round % 20));
        let disk = write_and_cut(dir.path(), &mut truth, Disk::of(dir.path()), until);
        unsynced += disk.unsynced();
        let loss = [Loss::Everything, Loss::Writes, Loss::Sectors][usize::try_from(round % 3).unwrap()];
        let left = tempfile::tempdir().unwrap();
        disk.cut(&mut rng, loss, left.path());
        eprintln!("round {round}: {until} acknowledgements, then {loss:?} of what wasn't synced is lost");
        truth.check(left.path());
        dir = left;
    }
    assert!(unsynced > 0, "the shim saw no write that wasn't synced: it isn't bound");
}

#[test]
fn a_disk_that_lies_about_syncs_is_found_out() {
    let (dir, left) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut truth = Truth::default();
    let mut disk = Disk::of(dir.path());
    disk.lies = true;
    let disk = write_and_cut(dir.path(), &mut truth, disk, 5);
    disk.cut(&mut SmallRng::seed_from_u64(1), Loss::Everything, left.path());
    let checked = std::panic::catch_unwind(AssertUnwindSafe(|| truth.check(left.path())));
    assert!(checked.is_err(), "acknowledged records were lost and nobody noticed");
}

#[test]
fn a_full_disk_is_named_and_what_was_acknowledged_before_is_there_once_it_has_room() {
    let mut truth = Truth::default();
    let dir = tempfile::tempdir().unwrap();
    for room in [3_000_000u32, 0, 700_000] {
        let (mut child, lines) = spawn(dir.path(), &[(ROOM, room.to_string())]);
        let mut said = Vec::new();
        for line in lines.map_while(Result::ok) {
            truth.hear(&line);
            said.extend(line.strip_prefix("E ").map(str::to_owned));
        }
        assert!(child.wait().unwrap().success(), "{said:?}");
        let words = said.concat();
        let place = dir.path().display().to_string();
        assert!(
            words.contains("full") && words.contains(&place),
            "{room} bytes of room: {words:?}"
        );
        truth.check(dir.path());
    }
    SledEngine::open(dir.path(), 0).unwrap();
}
