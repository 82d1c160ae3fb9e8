//! Who leads, as a value that streams and timers can wait on.

use std::sync::Arc;

use cairn_raft_store::{Consensus, ViewCursor};
use tokio::sync::watch;
use tonic::Status;

/// Metadata key that carries the leader's address with an UNAVAILABLE answer.
pub(crate) const LEADER_HINT: &str = "cairn-leader";

/// Who leads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Leadership {
    /// Of this view.
    pub(crate) term: u64,
    /// Whether this node leads.
    pub(crate) leads: bool,
    /// The leader's id and address, where known.
    pub(crate) leader: Option<(u64, String)>,
    /// Why this node has stopped taking part, where it has.
    pub(crate) stopped: Option<String>,
}

impl Leadership {
    /// The answer of a node that can't serve a call itself and has nobody to pass it to.
    pub(crate) fn unavailable(&self, why: &str) -> Status {
        let mut status = Status::unavailable(why);
        if let Some((_, address)) = &self.leader
            && let (false, Ok(address)) = (self.leads, address.parse())
        {
            status.metadata_mut().insert(LEADER_HINT, address);
        }
        status
    }
}

fn now(consensus: &Consensus) -> Leadership {
    let view = consensus.view();
    let address = view.leader_address().map(str::to_owned);
    Leadership {
        term: view.term,
        leads: view.leads,
        leader: view.leader.zip(address),
        stopped: view.stopped,
    }
}

/// Keeps the value up to date until the core ends.
pub(crate) fn follow(consensus: Consensus) -> watch::Receiver<Leadership> {
    let sender = Arc::new(watch::Sender::new(now(&consensus)));
    let receiver = sender.subscribe();
    tokio::spawn(async move {
        let mut cursor = ViewCursor::default();
        loop {
            let running = consensus.changed(&mut cursor).await;
            let latest = now(&consensus);
            sender.send_if_modified(|known| {
                let news = *known != latest;
                if news {
                    if known.leader != latest.leader {
                        tracing::info!(
                            term = latest.term,
                            leader = latest.leader.as_ref().map(|l| l.0),
                            "leader known"
                        );
                    }
                    *known = latest.clone();
                }
                news
            });
            if !running {
                sender.send_modify(|known| {
                    known.leads = false;
                    known.leader = None;
                    known
                        .stopped
                        .get_or_insert_with(|| "the consensus core has ended".to_owned());
                });
                return;
            }
        }
    });
    receiver
}
