//! The index cluster: an ordered log with a leader that changes, and replicas that apply it at their own pace.
//!
//! What Raft promises is modelled by what it may do: the leader's entries commit when a quorum can be reached; when the
//! leader goes, a prefix of its uncommitted entries may survive without an answer, and the rest is lost.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use cairn_index::{
    Batch, BatchOutcome, Command, Incarnation, IndexState, LeaseState, LogIndex, Reply, Seq, SourceId, StateDigest,
    WorkerId, codec,
};
use cairn_ingest::HolderAudit;

use crate::model::{Event, FromAgent, Gone, Life, ToAgent, ToNode};
use crate::plan::Bug;
use crate::world::{Link, POOL, SEED, World};

/// The leader makes one entry of what came in this time.
const FLUSH_US: u64 = 5_000;
/// Entries that wait for a quorum, at most; beyond it, messages are turned away.
const PENDING_MAX: usize = 4_096;
/// A follower that lacks more entries than this gets a snapshot.
pub(crate) const SNAPSHOT_BEHIND: u64 = 400;

/// Who asked for an entry.
#[derive(Clone, Debug)]
pub(crate) enum Asked {
    Register(FromAgent),
    Batches(Vec<FromAgent>),
    Nobody,
}

#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub(crate) id: u64,
    pub(crate) command: Command,
    pub(crate) asked: Asked,
}

/// One index node.
pub(crate) struct Node {
    pub(crate) life: Life,
    pub(crate) up: bool,
    /// Cut off from the other nodes, not from agents and routers.
    pub(crate) alone: bool,
    pub(crate) state: IndexState,
    pub(crate) snapshot: Option<(u64, Vec<u8>)>,
    pub(crate) applying: bool,
    /// When it last knew of a quorum.
    pub(crate) quorum_at: u64,
}

/// See the module.
pub(crate) struct Cluster {
    pub(crate) nodes: Vec<Node>,
    /// Committed commands as stored; entry 1 comes first.
    pub(crate) log: Vec<Rc<Vec<u8>>>,
    /// Digest after each entry, as the first replica that got there had it.
    pub(crate) digests: Vec<StateDigest>,
    /// The state after the last entry: the first replica.
    pub(crate) truth: IndexState,
    pub(crate) leader: Option<usize>,
    pub(crate) term: u64,
    pub(crate) pending: VecDeque<Pending>,
    next_entry: u64,
    pub(crate) inbox: Vec<(Batch, FromAgent)>,
    pub(crate) flushing: bool,
    pub(crate) heard: BTreeMap<SourceId, u64>,
    /// Commands under way for a lease, so that they aren't proposed twice.
    pub(crate) leasing: BTreeMap<SourceId, bool>,
}

impl Cluster {
    pub(crate) fn new(nodes: usize) -> Self {
        let node = || Node {
            life: Life(1),
            up: true,
            alone: false,
            state: IndexState::new(),
            snapshot: None,
            applying: false,
            quorum_at: 0,
        };
        Self {
            nodes: (0..nodes).map(|_| node()).collect(),
            log: Vec::new(),
            digests: Vec::new(),
            truth: IndexState::new(),
            leader: Some(0),
            term: 1,
            pending: VecDeque::new(),
            next_entry: 0,
            inbox: Vec::new(),
            flushing: false,
            heard: BTreeMap::new(),
            leasing: BTreeMap::new(),
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.log.len() as u64
    }

    pub(crate) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Digest after an entry; entry 0 is the empty state.
    pub(crate) fn digest_at(&self, index: u64) -> Option<StateDigest> {
        if index == 0 {
            return Some(IndexState::new().digest());
        }
        self.digests.get(index as usize - 1).copied()
    }

    pub(crate) fn reachable(&self, node: usize) -> bool {
        self.nodes[node].up && !self.nodes[node].alone
    }

    pub(crate) fn quorum(&self) -> bool {
        let there = (0..self.nodes.len()).filter(|n| self.reachable(*n)).count();
        there * 2 > self.nodes.len()
    }

    /// The leader, while a quorum hears it.
    pub(crate) fn leading(&self) -> Option<usize> {
        self.leader.filter(|l| self.reachable(*l) && self.quorum())
    }
}

impl World {
    pub(crate) fn cluster_open(&mut self) {
        self.propose(
            Command::InitCluster {
                cluster: "sim".to_owned(),
                seed: SEED,
            },
            Asked::Nobody,
        );
        self.after(500_000, Event::LeaseCheck { term: 1 });
        for node in 0..self.plan.nodes {
            self.cluster.nodes[node].quorum_at = self.now;
            self.after(100_000 + node as u64, Event::NodeIdle { node, life: Life(1) });
            self.after(
                1_500_000 + node as u64 * 777_000,
                Event::NodeSnapshot { node, life: Life(1) },
            );
        }
    }

    /// A node hears an agent: it answers what it can, and passes the rest to the leader.
    pub(crate) fn node_receive(&mut self, node: usize, message: Box<ToNode>) {
        if !self.cluster.nodes[node].up {
            return;
        }
        let Some(leader) = self.cluster.leading() else { return };
        if node != leader && self.cluster.nodes[node].alone {
            return;
        }
        let term = self.cluster.term;
        if node == leader {
            return self.leader_receive(term, *message);
        }
        // Forwarding keeps the order of one agent's connection.
        let conn = match &*message {
            ToNode::Register { from, .. } | ToNode::Push { from, .. } | ToNode::Audit { from, .. } => {
                (from.agent as u64) << 32 | from.conn
            }
        };
        self.send(
            Link::ToNode,
            100 + node,
            leader,
            conn,
            Event::LeaderReceive { term, message },
        );
    }

    pub(crate) fn leader_receive(&mut self, term: u64, message: ToNode) {
        if term != self.cluster.term || self.cluster.leading().is_none() {
            return;
        }
        if self.cluster.pending.len() >= PENDING_MAX {
            self.note("leader is full", &[]);
            return;
        }
        match message {
            ToNode::Register { from, spec, resume } => {
                // What came before it on the same connection is decided before it.
                self.flush();
                self.propose(Command::RegisterSource { spec: *spec, resume }, Asked::Register(from));
            }
            ToNode::Push { from, batches, renew } => {
                if let Some((source, incarnation)) = renew {
                    self.renew(source, incarnation);
                }
                for batch in batches {
                    if self.plan.bug == Some(Bug::AckBeforeCommit) {
                        let outcome = BatchOutcome::Applied {
                            unknown_anchors: Vec::new(),
                        };
                        let acks = vec![(batch.source, batch.incarnation, batch.seq, outcome)];
                        self.tell_agent(from, ToAgent::Acks(acks));
                    }
                    self.cluster.inbox.push((batch, from));
                }
                if !self.cluster.flushing && !self.cluster.inbox.is_empty() {
                    self.cluster.flushing = true;
                    self.after(FLUSH_US, Event::LeaderFlush { term });
                }
            }
            ToNode::Audit {
                from,
                source,
                incarnation,
            } => {
                let leader = self.cluster.leader.unwrap_or(0);
                let Some(found) = self.cluster.nodes[leader].state.audit(source) else {
                    return;
                };
                if found.incarnation != incarnation {
                    return;
                }
                let audit = |(holder, digest): &(cairn_index::HolderId, cairn_index::HolderDigest)| HolderAudit {
                    holder: *holder,
                    blocks: digest.blocks,
                    digest: digest.digest,
                };
                let holders = found.holders.iter().map(audit).collect();
                self.tell_agent(
                    from,
                    ToAgent::Audit {
                        seq: found.seq,
                        incarnation,
                        holders,
                    },
                );
            }
        }
    }

    fn tell_agent(&mut self, from: FromAgent, message: ToAgent) {
        let FromAgent { agent, life, conn } = from;
        let event = Event::AgentReceive {
            agent,
            life,
            conn,
            message,
        };
        self.send(Link::ToAgent, 0, agent, conn, event);
    }

    fn renew(&mut self, source: SourceId, incarnation: Incarnation) {
        let known = self.cluster.truth.registry().sources.get(&source);
        let Some(found) = known.filter(|s| s.incarnation == incarnation) else {
            return;
        };
        let lapsed = found.lease != LeaseState::Live;
        self.cluster.heard.insert(source, self.now);
        if lapsed && self.cluster.leasing.insert(source, true).is_none() {
            self.propose(Command::RestoreLease { source, incarnation }, Asked::Nobody);
        }
    }

    pub(crate) fn leader_flush(&mut self, term: u64) {
        if term == self.cluster.term {
            self.flush();
        }
    }

    fn flush(&mut self) {
        self.cluster.flushing = false;
        let inbox = std::mem::take(&mut self.cluster.inbox);
        if inbox.is_empty() {
            return;
        }
        let (batches, asked) = inbox.into_iter().unzip();
        self.propose(Command::Batches(batches), Asked::Batches(asked));
    }

    pub(crate) fn propose(&mut self, command: Command, asked: Asked) {
        let id = self.cluster.next_entry;
        self.cluster.next_entry += 1;
        self.cluster.pending.push_back(Pending { id, command, asked });
        let term = self.cluster.term;
        let span = self.rng.range(2_000, 15_000);
        self.after(span, Event::Commit { term, entry: id });
    }

    /// An entry has reached a quorum: it and all before it are committed.
    pub(crate) fn commit(&mut self, term: u64, entry: u64) {
        if term != self.cluster.term || !self.cluster.pending.iter().any(|p| p.id == entry) {
            return;
        }
        if self.cluster.leading().is_none() {
            self.after(20_000, Event::Commit { term, entry });
            return;
        }
        while self.cluster.pending.front().is_some_and(|p| p.id <= entry) {
            let Some(pending) = self.cluster.pending.pop_front() else {
                return;
            };
            let reply = self.append(&pending.command);
            self.answer(pending, reply);
        }
    }

    /// Puts a command into the log for good; the first replica applies it at once.
    pub(crate) fn append(&mut self, command: &Command) -> Reply {
        let unfenced = (self.plan.bug == Some(Bug::NoFencing))
            .then(|| self.without_fencing(command))
            .flatten();
        let forgotten = match command {
            Command::RemoveSource { source, incarnation } if self.plan.bug == Some(Bug::RemovalForgotten) => {
                Some(Command::LapseLease {
                    source: *source,
                    incarnation: *incarnation,
                })
            }
            _ => None,
        };
        let stored = unfenced.or(forgotten);
        let stored = stored.as_ref().unwrap_or(command);
        let bytes = codec::encode_command(stored);
        self.cluster.log.push(Rc::new(bytes));
        let index = LogIndex(self.cluster.log.len() as u64);
        let gone = self.about_to_go(command);
        let before = self.lifetimes(command);
        let reply = self.cluster.truth.apply(index, stored);
        let digest = self.cluster.truth.digest();
        self.cluster.digests.push(digest);
        self.note("entry is committed", &[index.0, digest.0]);
        self.check_entry(command, &reply, &before);
        if let Some(gone) = gone {
            self.check_gone(&gone);
            self.gone.push(gone);
        }
        for node in 0..self.cluster.nodes.len() {
            self.start_applying(node);
        }
        reply
    }

    /// The mistake of [`Bug::NoFencing`]: old lifetimes' batches pass as the present one's.
    fn without_fencing(&self, command: &Command) -> Option<Command> {
        let Command::Batches(batches) = command else {
            return None;
        };
        let registry = self.cluster.truth.registry();
        let mut next: BTreeMap<SourceId, Seq> = BTreeMap::new();
        let passed = batches.iter().map(|batch| {
            let mut batch = batch.clone();
            if let Some(source) = registry.sources.get(&batch.source)
                && batch.incarnation < source.incarnation
            {
                let seq = next.entry(batch.source).or_insert(source.seq);
                seq.0 += 1;
                batch.seq = *seq;
                batch.incarnation = source.incarnation;
            }
            batch
        });
        Some(Command::Batches(passed.collect()))
    }

    /// Present lifetimes and positions of the sources that a command's batches name.
    fn lifetimes(&self, command: &Command) -> BTreeMap<SourceId, (Incarnation, Seq)> {
        let Command::Batches(batches) = command else {
            return BTreeMap::new();
        };
        let registry = self.cluster.truth.registry();
        let of = |b: &Batch| {
            registry
                .sources
                .get(&b.source)
                .map(|s| (b.source, (s.incarnation, s.seq)))
        };
        batches.iter().filter_map(of).collect()
    }

    fn about_to_go(&self, command: &Command) -> Option<Gone> {
        let Command::RemoveSource { source, incarnation } = command else {
            return None;
        };
        let found = self
            .cluster
            .truth
            .registry()
            .sources
            .get(source)
            .filter(|s| s.incarnation == *incarnation)?;
        Some(Gone {
            worker: found.worker,
            source: *source,
            holders: found.holders.clone(),
        })
    }

    fn answer(&mut self, pending: Pending, reply: Reply) {
        match (pending.asked, reply, pending.command) {
            (Asked::Register(from), Reply::Register(outcome), _) => {
                if let cairn_index::RegisterOutcome::Registered { source, .. } = &outcome {
                    self.cluster.heard.insert(*source, self.now);
                    self.cluster.leasing.remove(source);
                }
                self.tell_agent(from, ToAgent::Registered(outcome));
            }
            (Asked::Batches(from), Reply::Batches(outcomes), Command::Batches(batches)) => {
                if self.plan.bug == Some(Bug::AckBeforeCommit) {
                    return;
                }
                for ((from, outcome), batch) in from.into_iter().zip(outcomes).zip(batches) {
                    let acks = vec![(batch.source, batch.incarnation, batch.seq, outcome)];
                    self.tell_agent(from, ToAgent::Acks(acks));
                }
            }
            (Asked::Nobody, _, Command::LapseLease { source, .. } | Command::RestoreLease { source, .. }) => {
                self.cluster.leasing.remove(&source);
            }
            (Asked::Register(_) | Asked::Batches(_) | Asked::Nobody, _, _) => {}
        }
    }

    pub(crate) fn start_applying(&mut self, node: usize) {
        let place = &mut self.cluster.nodes[node];
        if place.up && !place.applying {
            place.applying = true;
            let life = place.life;
            let leads = self.cluster.leader == Some(node);
            let span = if leads { 1 } else { self.rng.range(100, 30_000) };
            self.after(span, Event::NodeApply { node, life });
        }
    }

    /// A replica catches up with the log, unless it is cut off.
    pub(crate) fn node_apply(&mut self, node: usize, life: Life) {
        let place = &mut self.cluster.nodes[node];
        if !place.up || place.life != life {
            return;
        }
        place.applying = false;
        if place.alone {
            return;
        }
        let from = place.state.applied().0;
        self.replay_log(node);
        self.feed_entries(node, from);
    }

    /// At the end: the last entries are given the time to arrive.
    pub(crate) fn let_replicas_finish(&mut self) {
        for node in 0..self.cluster.nodes.len() {
            if self.cluster.nodes[node].up && !self.cluster.nodes[node].alone {
                self.replay_log(node);
            }
        }
    }

    pub(crate) fn replay_log(&mut self, node: usize) {
        let mut at = self.cluster.nodes[node].state.applied().0;
        while at < self.cluster.log.len() as u64 {
            let bytes = Rc::clone(&self.cluster.log[at as usize]);
            at += 1;
            let place = &mut self.cluster.nodes[node];
            let skipped = self.plan.bug == Some(Bug::NodeSkipsCommand) && node == 1 && at.is_multiple_of(97);
            if skipped {
                place.state.skip_to(LogIndex(at));
            } else {
                match codec::decode_command(&bytes) {
                    Ok(command) => {
                        place.state.apply(LogIndex(at), &command);
                    }
                    Err(error) => return self.broken("INV-03", format!("entry {at} can't be read back: {error}")),
                }
            }
            self.check_replica(node, at);
        }
        self.cluster.nodes[node].quorum_at = self.now;
    }

    /// The pool's workers by their engines, as the last entry left it.
    pub(crate) fn worker_of(&self, url: &str) -> Option<WorkerId> {
        let registry = self.cluster.truth.registry();
        registry
            .workers
            .iter()
            .find(|(_, w)| w.spec.engine_url == url && w.pool == POOL)
            .map(|(id, _)| *id)
    }
}
