//! The way out when a majority is lost for good: one node goes on alone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use openraft::storage::{RaftLogStorage, RaftLogStorageExt, RaftStateMachine};
use openraft::{CommittedLeaderId, EntryPayload};

use super::{OpenError, Options, open_storage};
use crate::machine::{AppliedEntry, Observer};
use crate::types::{Entry, LogId, Membership, Peer, Vote};

struct Nobody;

impl Observer for Nobody {
    fn applied(&self, _entry: &AppliedEntry<'_>) {}
    fn installed(&self, _index: u64, _digest: u64) {}
}

/// Rewrites a stopped node's membership to itself alone, keeping all of its log. Works on any node, a removed one too.
///
/// What only the lost majority had is lost; nodes that are still there must be emptied and added again.
///
/// # Errors
/// As [`super::Consensus::open`]; a directory without data is refused.
pub async fn recover_alone(options: Options, address: &str) -> Result<(), OpenError> {
    let opening = options.clone();
    let opened = tokio::task::spawn_blocking(move || open_storage(&opening, Arc::new(Nobody))).await;
    let (directory, mut log, mut machine) = opened.map_err(|error| OpenError::Core(error.to_string()))??;
    let state = log.get_log_state().await?;
    let (applied, _) = machine.applied_state().await?;
    let Some(last) = state.last_log_id.max(applied) else {
        return Err(OpenError::Settings(
            "the data directory is empty: there is nothing to recover".to_owned(),
        ));
    };
    let vote = log.read_vote().await?;
    let term = vote.map_or(0, |vote| vote.leader_id.term).max(last.leader_id.term) + 1;
    let peer = Peer {
        address: address.to_owned(),
        store: directory.identity().store,
    };
    let membership = Membership::new(
        vec![BTreeSet::from([options.node])],
        BTreeMap::from([(options.node, peer)]),
    );
    let log_id = LogId::new(CommittedLeaderId::new(term, options.node), last.index + 1);
    log.save_vote(&Vote::new(term, options.node)).await?;
    let entry = Entry {
        log_id,
        payload: EntryPayload::Membership(membership),
    };
    log.blocking_append([entry]).await?;
    Ok(())
}
