//! Mistakes that are built in on purpose: each must be seen by the invariant that it breaks.
#![allow(missing_docs, clippy::unwrap_used)]

use cairn_sim::{Bug, Plan, run};

/// Seeds within which a mistake must show.
const WITHIN: u64 = 400;

/// Invariants under which a mistake may be found: the one that it breaks, or one that its consequence breaks first.
fn expected(bug: Bug) -> &'static [&'static str] {
    match bug {
        Bug::NodeSkipsCommand => &["INV-01"],
        Bug::ViewSkipsEntry => &["INV-02"],
        Bug::SnapshotClaimsMore => &["INV-03"],
        Bug::AckBeforeCommit => &["INV-04"],
        Bug::NoFencing => &["INV-05"],
        Bug::RemovalForgotten => &["INV-06"],
        Bug::OverlapExceedsPrompt => &["INV-07"],
        Bug::RestartUnnoticed => &["INV-08"],
        Bug::StaleViewRefuses => &["INV-10"],
        Bug::AbortLeaks | Bug::DoubleRelease => &["INV-13"],
        Bug::SaltIgnored => &["INV-14", "INV-08"],
    }
}

fn is_caught(bug: Bug) {
    for seed in 1..=WITHIN {
        if let Some(violation) = run(Plan::from_seed(seed).with_bug(bug)).violation {
            assert!(
                expected(bug).contains(&violation.invariant),
                "{bug:?} at seed {seed}: {violation}"
            );
            return;
        }
    }
    panic!("{bug:?} went unseen for {WITHIN} seeds");
}

#[test]
fn a_node_that_leaves_out_a_command_is_caught() {
    is_caught(Bug::NodeSkipsCommand);
}

#[test]
fn a_view_that_loses_an_entry_is_caught() {
    is_caught(Bug::ViewSkipsEntry);
}

#[test]
fn a_snapshot_that_claims_more_than_it_holds_is_caught() {
    is_caught(Bug::SnapshotClaimsMore);
}

#[test]
fn a_leader_that_acknowledges_too_early_is_caught() {
    is_caught(Bug::AckBeforeCommit);
}

#[test]
fn skipped_fencing_is_caught() {
    is_caught(Bug::NoFencing);
}

#[test]
fn a_removal_that_leaves_blocks_is_caught() {
    is_caught(Bug::RemovalForgotten);
}

#[test]
fn an_overlap_longer_than_the_prompt_is_caught() {
    is_caught(Bug::OverlapExceedsPrompt);
}

#[test]
fn an_unnoticed_restart_is_caught() {
    is_caught(Bug::RestartUnnoticed);
}

#[test]
fn a_refusal_while_workers_are_well_is_caught() {
    is_caught(Bug::StaleViewRefuses);
}

#[test]
fn a_leak_on_abort_is_caught() {
    is_caught(Bug::AbortLeaks);
}

#[test]
fn a_double_release_is_caught() {
    is_caught(Bug::DoubleRelease);
}

#[test]
fn an_ignored_salt_is_caught() {
    is_caught(Bug::SaltIgnored);
}

#[test]
fn every_mistake_has_its_test() {
    let here = include_str!("mistakes.rs");
    for bug in Bug::ALL {
        assert!(here.contains(&format!("is_caught(Bug::{bug:?})")), "{bug:?}");
    }
}
