//! Changes of the membership: a newcomer learns first and votes when it has caught up.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use openraft::ChangeMembers;
use openraft::error::{ClientWriteError, RaftError};

use super::{Consensus, NodeView};
use crate::types::Peer;

/// A learner this close to the leader's log counts as caught up.
const CAUGHT_UP_ENTRIES: u64 = 64;
/// How often its progress is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Why the membership stays as it was, or may have stayed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// Another node leads.
    #[error("this node isn't the leader")]
    NotLeader {
        /// The leader and its address, where known.
        leader: Option<(u64, String)>,
    },
    /// The request contradicts the membership.
    #[error("{0}")]
    Refused(String),
    /// Another change is on its way.
    #[error("another membership change is in progress; try again when it has ended")]
    InProgress,
    /// The newcomer didn't catch up in time; it stays a learner.
    #[error(
        "node {id} didn't catch up within {waited:?} and stays a learner; check that it runs and can be reached at its address, then add it again"
    )]
    TooSlow {
        /// The newcomer.
        id: u64,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The node has stopped, or its lead was lost meanwhile.
    #[error("the change may or may not have been made ({0}); look at the members and try again")]
    Unknown(String),
}

type WriteError = RaftError<u64, ClientWriteError<u64, Peer>>;

fn failed(error: WriteError) -> ChangeError {
    match error {
        RaftError::APIError(ClientWriteError::ForwardToLeader(forward)) => ChangeError::NotLeader {
            leader: forward.leader_id.zip(forward.leader_node.map(|peer| peer.address)),
        },
        RaftError::APIError(ClientWriteError::ChangeMembershipError(
            openraft::error::ChangeMembershipError::InProgress(_),
        )) => ChangeError::InProgress,
        RaftError::APIError(ClientWriteError::ChangeMembershipError(error)) => ChangeError::Refused(error.to_string()),
        RaftError::Fatal(error) => ChangeError::Unknown(error.to_string()),
    }
}

fn voters(view: &NodeView) -> BTreeSet<u64> {
    view.members
        .iter()
        .filter(|member| member.voter)
        .map(|member| member.id)
        .collect()
}

impl Consensus {
    fn leading(&self) -> Result<NodeView, ChangeError> {
        let view = self.view();
        if view.leads {
            return Ok(view);
        }
        let address = view.leader_address().map(str::to_owned);
        Err(ChangeError::NotLeader {
            leader: view.leader.zip(address),
        })
    }

    /// Adds a node as a learner, waits until it has caught up, and makes it a voter.
    ///
    /// # Errors
    /// [`ChangeError`]. An id that is a member already under another address or data directory is refused.
    pub async fn add_member(&self, id: u64, peer: Peer, patience: Duration) -> Result<(), ChangeError> {
        self.learn(id, peer, patience).await?;
        self.change(ChangeMembers::AddVoterIds(BTreeSet::from([id]))).await
    }

    /// Removes a node, voter or learner.
    ///
    /// # Errors
    /// [`ChangeError`]. The last voter isn't removed.
    pub async fn remove_member(&self, id: u64) -> Result<(), ChangeError> {
        let view = self.leading()?;
        let Some(member) = view.member(id) else {
            return Err(ChangeError::Refused(format!("node {id} isn't a member")));
        };
        if !member.voter {
            return self.change(ChangeMembers::RemoveNodes(BTreeSet::from([id]))).await;
        }
        if voters(&view) == BTreeSet::from([id]) {
            return Err(ChangeError::Refused(format!(
                "node {id} is the only voter; add another one first"
            )));
        }
        self.change(ChangeMembers::RemoveVoters(BTreeSet::from([id]))).await
    }

    /// Puts a new node in the place of an old one, in one joint change.
    ///
    /// # Errors
    /// [`ChangeError`].
    pub async fn replace_member(&self, old: u64, new: u64, peer: Peer, patience: Duration) -> Result<(), ChangeError> {
        let view = self.leading()?;
        let mut goal = voters(&view);
        if !goal.remove(&old) {
            return Err(ChangeError::Refused(format!("node {old} isn't a voter")));
        }
        if old == new {
            return Err(ChangeError::Refused("the new node needs a new id".to_owned()));
        }
        self.learn(new, peer, patience).await?;
        goal.insert(new);
        self.change(ChangeMembers::ReplaceAllVoters(goal)).await
    }

    async fn learn(&self, id: u64, peer: Peer, patience: Duration) -> Result<(), ChangeError> {
        let view = self.leading()?;
        match view.member(id) {
            Some(member) if member.peer != peer => {
                return Err(ChangeError::Refused(format!(
                    "id {id} belongs to the member at {} already; ids are never used again, give a new one",
                    member.peer.address
                )));
            }
            Some(member) if member.voter => return Ok(()),
            Some(_) => {}
            None => {
                self.change(ChangeMembers::AddNodes(BTreeMap::from([(id, peer)])))
                    .await?
            }
        }
        let begun = Instant::now();
        loop {
            let view = self.leading()?;
            let matched = view.matched.get(&id).copied().unwrap_or(0);
            if matched > 0 && matched + CAUGHT_UP_ENTRIES >= view.last_log {
                return Ok(());
            }
            if begun.elapsed() > patience {
                return Err(ChangeError::TooSlow { id, waited: patience });
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn change(&self, change: ChangeMembers<u64, Peer>) -> Result<(), ChangeError> {
        // Members that leave the voters leave altogether: nobody keeps sending to them.
        self.inner
            .raft
            .change_membership(change, false)
            .await
            .map(|_| ())
            .map_err(failed)
    }
}
