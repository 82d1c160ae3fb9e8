//! Nodes that die and come back, leaders that change, leases that lapse.

use cairn_index::{Command, IndexState, LeaseState, LogIndex, SourceId, WorkerId, codec};

use crate::cluster::Asked;
use crate::model::{Event, Life};
use crate::plan::Bug;
use crate::world::World;

/// A source that isn't heard for this long lapses.
const LEASE_US: u64 = 3_000_000;
/// And goes for good after this long.
const GRACE_US: u64 = 30_000_000;

impl World {
    pub(crate) fn node_snapshot(&mut self, node: usize, life: Life) {
        let place = &mut self.cluster.nodes[node];
        if !place.up || place.life != life {
            return;
        }
        let mut bytes = Vec::new();
        if codec::encode_snapshot(&place.state, &mut bytes).is_ok() {
            place.snapshot = Some((place.state.applied().0, bytes));
        }
        self.after(2_500_000, Event::NodeSnapshot { node, life });
    }

    pub(crate) fn node_crash(&mut self, node: usize) {
        let place = &mut self.cluster.nodes[node];
        if !place.up {
            return;
        }
        place.up = false;
        place.life.0 += 1;
        place.applying = false;
        self.note("node dies", &[node as u64]);
        self.drop_followers(node);
        for agent in 0..self.agents.len() {
            if self.agents[agent].node == node && self.agents[agent].up {
                self.agent_lose_index(agent);
            }
        }
        self.maybe_elect();
    }

    /// Back from disk: its last snapshot, then the log behind it.
    pub(crate) fn node_revive(&mut self, node: usize, life: Life) {
        let place = &mut self.cluster.nodes[node];
        if place.life != life || place.up {
            return;
        }
        place.up = true;
        let mut state = IndexState::new();
        if let Some((index, bytes)) = &place.snapshot {
            match codec::decode_snapshot(bytes.as_slice()) {
                Ok(read) => state = read,
                Err(error) => {
                    let what = format!("snapshot at {index} can't be read: {error}");
                    return self.broken("INV-03", what);
                }
            }
            if self.plan.bug == Some(Bug::SnapshotClaimsMore) {
                let further = LogIndex(state.applied().0 + 1);
                state.skip_to(further);
            }
        }
        self.cluster.nodes[node].state = state;
        self.note(
            "node starts",
            &[node as u64, self.cluster.nodes[node].state.applied().0],
        );
        self.check_restored(node);
        self.after(50_000, Event::NodeIdle { node, life });
        self.after(2_000_000, Event::NodeSnapshot { node, life });
        self.start_applying(node);
        self.maybe_elect();
    }

    /// A leader that no quorum hears is replaced after a while.
    pub(crate) fn maybe_elect(&mut self) {
        let led = self.cluster.leader.is_some_and(|l| self.cluster.reachable(l));
        if !led && self.cluster.quorum() {
            let term = self.cluster.term;
            let span = self.rng.range(100_000, 500_000);
            self.after(span, Event::Elect { term });
        }
    }

    pub(crate) fn elect(&mut self, term: u64) {
        if term != self.cluster.term || !self.cluster.quorum() {
            return;
        }
        let able: Vec<usize> = (0..self.plan.nodes).filter(|n| self.cluster.reachable(*n)).collect();
        let to = able[self.rng.index(able.len())];
        self.change_leader(to);
    }

    /// A new term. Of what the old leader hadn't committed, a prefix may have reached a quorum.
    pub(crate) fn change_leader(&mut self, to: usize) {
        self.cluster.term += 1;
        self.cluster.leader = Some(to);
        let survive = self.rng.index(self.cluster.pending.len() + 1);
        let lost = self.cluster.pending.split_off(survive);
        let kept = std::mem::take(&mut self.cluster.pending);
        self.note(
            "leader changes",
            &[to as u64, self.cluster.term, kept.len() as u64, lost.len() as u64],
        );
        for pending in kept {
            self.append(&pending.command);
        }
        self.cluster.inbox.clear();
        self.cluster.flushing = false;
        self.cluster.leasing.clear();
        self.replay_log(to);
        let term = self.cluster.term;
        // Everyone gets a full period after an election.
        let now = self.now;
        let sources: Vec<SourceId> = self.cluster.truth.registry().sources.keys().copied().collect();
        self.cluster.heard = sources.into_iter().map(|s| (s, now)).collect();
        self.after(500_000, Event::LeaseCheck { term });
        self.check_acknowledged();
        // Streams through the old leader are broken; agents start over with what has no answer.
        for agent in 0..self.agents.len() {
            if self.agents[agent].up {
                self.agent_lose_index(agent);
            }
        }
    }

    pub(crate) fn lease_check(&mut self, term: u64) {
        if term != self.cluster.term {
            return;
        }
        self.after(500_000, Event::LeaseCheck { term });
        if self.cluster.leading().is_none() {
            return;
        }
        let registry = self.cluster.truth.registry();
        let quiet = |id: &SourceId| self.now - self.cluster.heard.get(id).copied().unwrap_or(self.now);
        let mut due = Vec::new();
        for (&source, found) in &registry.sources {
            let incarnation = found.incarnation;
            match found.lease {
                LeaseState::Live if quiet(&source) > LEASE_US => due.push(Command::LapseLease { source, incarnation }),
                LeaseState::Lapsed(_) if quiet(&source) > GRACE_US => {
                    due.push(Command::RemoveSource { source, incarnation });
                }
                LeaseState::Live | LeaseState::Lapsed(_) => {}
            }
        }
        for command in due {
            if let Command::LapseLease { source, .. } = &command
                && self.cluster.leasing.insert(*source, false).is_some()
            {
                continue;
            }
            self.note("lease lapses", &[]);
            self.propose(command, Asked::Nobody);
        }
    }

    pub(crate) fn set_draining(&mut self, worker: WorkerId, draining: bool) {
        if self.cluster.leading().is_some() {
            self.propose(Command::SetDraining { worker, draining }, Asked::Nobody);
        } else if !draining {
            self.after(500_000, Event::Undrain { worker });
        }
    }

    /// The operator takes a source away for good.
    pub(crate) fn remove_source(&mut self, name: &str) {
        if self.cluster.leading().is_none() {
            return;
        }
        let registry = self.cluster.truth.registry();
        let found = registry.sources.iter().find(|(_, s)| s.name == name);
        if let Some((&source, incarnation)) = found.map(|(id, s)| (id, s.incarnation)) {
            self.propose(Command::RemoveSource { source, incarnation }, Asked::Nobody);
        }
    }

    pub(crate) fn isolate(&mut self, node: usize) {
        self.cluster.nodes[node].alone = true;
        self.note("node is cut off", &[node as u64]);
        self.maybe_elect();
    }

    pub(crate) fn heal(&mut self, node: usize) {
        if self.cluster.nodes[node].alone {
            self.cluster.nodes[node].alone = false;
            self.note("node is back", &[node as u64]);
            self.start_applying(node);
            self.maybe_elect();
        }
    }
}
