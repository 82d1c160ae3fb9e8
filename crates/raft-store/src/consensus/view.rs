//! What a node knows of itself and its group, for status, forwarding and timers.

use std::collections::BTreeMap;

use openraft::ServerState;

use super::Consensus;
use crate::types::Peer;

/// A member as this node knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberView {
    /// Id.
    pub id: u64,
    /// Address and data directory.
    pub peer: Peer,
    /// Whether it votes.
    pub voter: bool,
}

/// A node's own view of the group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeView {
    /// This node.
    pub node: u64,
    /// Its term.
    pub term: u64,
    /// The leader, where known.
    pub leader: Option<u64>,
    /// Whether this node leads.
    pub leads: bool,
    /// `leader`, `follower`, `candidate` or `learner`.
    pub role: &'static str,
    /// Last applied entry, 0 for none.
    pub applied: u64,
    /// Last entry of the log, 0 for none.
    pub last_log: u64,
    /// Where the current snapshot stands, 0 for none.
    pub snapshot: u64,
    /// Where the log is cut, 0 where it is whole.
    pub purged: u64,
    /// The membership.
    pub members: Vec<MemberView>,
    /// While leading: how far each member is known to be.
    pub matched: BTreeMap<u64, u64>,
    /// Why the node has stopped, where it has.
    pub stopped: Option<String>,
}

impl NodeView {
    /// The leader's address.
    #[must_use]
    pub fn leader_address(&self) -> Option<&str> {
        let leader = self.leader?;
        self.member(leader).map(|member| member.peer.address.as_str())
    }

    /// A member by id.
    #[must_use]
    pub fn member(&self, id: u64) -> Option<&MemberView> {
        self.members.iter().find(|member| member.id == id)
    }
}

impl Consensus {
    /// The present view.
    #[must_use]
    pub fn view(&self) -> NodeView {
        let metrics = self.inner.raft.metrics();
        let metrics = metrics.borrow();
        let membership = metrics.membership_config.membership();
        let voters: Vec<u64> = membership.voter_ids().collect();
        let members = membership
            .nodes()
            .map(|(id, peer)| MemberView {
                id: *id,
                peer: peer.clone(),
                voter: voters.contains(id),
            })
            .collect();
        let index = |id: &Option<crate::types::LogId>| id.map_or(0, |id| id.index);
        let matched = metrics.replication.as_ref().map(|replication| {
            replication
                .iter()
                .map(|(id, matched)| (*id, matched.map_or(0, |matched| matched.index)))
                .collect()
        });
        NodeView {
            node: metrics.id,
            term: metrics.current_term,
            leader: metrics.current_leader,
            leads: metrics.state == ServerState::Leader && metrics.current_leader == Some(metrics.id),
            role: match metrics.state {
                ServerState::Leader => "leader",
                ServerState::Follower => "follower",
                ServerState::Candidate => "candidate",
                ServerState::Learner => "learner",
                ServerState::Shutdown => "stopped",
            },
            applied: index(&metrics.last_applied),
            last_log: metrics.last_log_index.unwrap_or(0),
            snapshot: index(&metrics.snapshot),
            purged: index(&metrics.purged),
            members,
            matched: matched.unwrap_or_default(),
            stopped: metrics.running_state.as_ref().err().map(ToString::to_string),
        }
    }

    /// Completes at the next change of anything in [`Consensus::view`] since `seen` was taken, or at once where there
    /// is news already; `false` once the core has ended.
    pub async fn changed(&self, seen: &mut ViewCursor) -> bool {
        let receiver = seen.receiver.get_or_insert_with(|| self.inner.raft.metrics());
        receiver.changed().await.is_ok()
    }
}

/// What a watcher has seen of the view.
#[derive(Default)]
pub struct ViewCursor {
    receiver: Option<tokio::sync::watch::Receiver<openraft::RaftMetrics<u64, Peer>>>,
}
