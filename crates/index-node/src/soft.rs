//! Soft state: loads of engines and reservations of routers, kept for newcomers and handed to every follower.
//!
//! Frames are absolute and versioned (boot, n): a lost one is repaired by the next, an old one changes nothing. Nothing
//! of it enters the log; entries expire by themselves.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cairn_proto::v1::soft_frame::Frame;
use cairn_proto::v1::{Reused, SoftFrame, SoftFrames};
use parking_lot::Mutex;
use tokio::sync::broadcast;

/// A router's reservations die this long after its last frame.
const ROUTER_LIFE: Duration = Duration::from_secs(1);
/// An engine's report dies this long after the last one; agents send one every second or oftener.
const LOAD_LIFE: Duration = Duration::from_secs(10);
/// Most senders of each kind.
const LOADS_MAX: usize = 65_536;
const ROUTERS_MAX: usize = 1_024;
/// Groups of frames that a slow reader may be behind before it misses some.
const BACKLOG: usize = 1_024;

/// A group of frames as it came.
pub(crate) type Group = Arc<Vec<SoftFrame>>;

#[derive(Clone)]
struct Kept {
    version: (u64, u64),
    at: Instant,
    frame: SoftFrame,
}

#[derive(Default)]
struct Table {
    loads: HashMap<String, Kept>,
    routers: HashMap<String, Kept>,
}

/// What became of a group of frames.
#[derive(Default, Debug, PartialEq, Eq, Clone, Copy)]
pub(crate) struct Taken {
    pub(crate) fresh: usize,
    pub(crate) old: usize,
    pub(crate) full: usize,
}

/// The table and its readers.
pub(crate) struct SoftHub {
    table: Mutex<Table>,
    feed: broadcast::Sender<Group>,
    /// Frames of this node's own clients, for the other nodes.
    relay: broadcast::Sender<Group>,
    /// What engines reused, for the agents whose streams end here.
    reused: broadcast::Sender<Arc<Reused>>,
}

impl Default for SoftHub {
    fn default() -> Self {
        Self {
            table: Mutex::default(),
            feed: broadcast::Sender::new(BACKLOG),
            relay: broadcast::Sender::new(BACKLOG),
            reused: broadcast::Sender::new(BACKLOG),
        }
    }
}

impl SoftHub {
    /// Takes checked frames: the fresh ones go to every follower and, unless they were relayed, to the other nodes.
    pub(crate) fn publish(&self, frames: SoftFrames) -> Taken {
        let now = Instant::now();
        let mut taken = Taken::default();
        let mut fresh = Vec::with_capacity(frames.frames.len());
        let mut passing = Vec::new();
        {
            let mut table = self.table.lock();
            for frame in frames.frames {
                if let Some(Frame::Reused(reused)) = &frame.frame {
                    // Nobody listens where no agent's stream ends.
                    let _ = self.reused.send(Arc::new(reused.clone()));
                    passing.push(frame);
                    continue;
                }
                match table.keep(&frame, now) {
                    Kind::Fresh => fresh.push(frame),
                    Kind::Old => taken.old += 1,
                    Kind::Full => taken.full += 1,
                }
            }
        }
        taken.fresh = fresh.len() + passing.len();
        if !frames.relayed && taken.fresh > 0 {
            let group = fresh.iter().chain(&passing).cloned().collect();
            let _ = self.relay.send(Arc::new(group));
        }
        if !fresh.is_empty() {
            let _ = self.feed.send(Arc::new(fresh));
        }
        taken
    }

    /// What is known now, and everything from here on.
    pub(crate) fn follow(&self) -> (Vec<SoftFrame>, broadcast::Receiver<Group>) {
        let table = self.table.lock();
        let receiver = self.feed.subscribe();
        let frames = table
            .loads
            .values()
            .chain(table.routers.values())
            .map(|kept| kept.frame.clone())
            .collect();
        (frames, receiver)
    }

    /// Frames of this node's own clients from here on.
    pub(crate) fn relayed(&self) -> broadcast::Receiver<Group> {
        self.relay.subscribe()
    }

    /// What engines reused, from here on.
    pub(crate) fn reused(&self) -> broadcast::Receiver<Arc<Reused>> {
        self.reused.subscribe()
    }

    /// Forgets who is silent.
    pub(crate) fn expire(&self) {
        let now = Instant::now();
        let mut table = self.table.lock();
        table.loads.retain(|_, kept| now.duration_since(kept.at) < LOAD_LIFE);
        table
            .routers
            .retain(|_, kept| now.duration_since(kept.at) < ROUTER_LIFE);
    }
}

enum Kind {
    Fresh,
    Old,
    Full,
}

impl Table {
    fn keep(&mut self, frame: &SoftFrame, now: Instant) -> Kind {
        let (map, max, name, version) = match &frame.frame {
            Some(Frame::Load(load)) => (&mut self.loads, LOADS_MAX, &load.source, (load.boot, load.n)),
            Some(Frame::Router(router)) => (&mut self.routers, ROUTERS_MAX, &router.router, (router.boot, router.n)),
            Some(Frame::Reused(_)) | None => return Kind::Old,
        };
        if let Some(kept) = map.get_mut(name) {
            if version <= kept.version {
                return Kind::Old;
            }
            *kept = Kept {
                version,
                at: now,
                frame: frame.clone(),
            };
            return Kind::Fresh;
        }
        if map.len() >= max {
            return Kind::Full;
        }
        map.insert(
            name.clone(),
            Kept {
                version,
                at: now,
                frame: frame.clone(),
            },
        );
        Kind::Fresh
    }
}

#[cfg(test)]
mod tests {
    use cairn_proto::v1::{LoadReport, RouterFrame};

    use super::*;

    fn load(source: &str, boot: u64, n: u64) -> SoftFrame {
        let report = LoadReport {
            source: source.to_owned(),
            boot,
            n,
            ..LoadReport::default()
        };
        SoftFrame {
            frame: Some(Frame::Load(report)),
        }
    }

    fn router(boot: u64, n: u64) -> SoftFrame {
        let frame = RouterFrame {
            router: "r".to_owned(),
            boot,
            n,
            ..RouterFrame::default()
        };
        SoftFrame {
            frame: Some(Frame::Router(frame)),
        }
    }

    fn publish(hub: &SoftHub, frames: Vec<SoftFrame>, relayed: bool) -> Taken {
        hub.publish(SoftFrames { frames, relayed })
    }

    #[test]
    fn only_newer_frames_change_anything_and_a_new_boot_begins_anew() {
        let hub = SoftHub::default();
        let fresh = |n| Taken {
            fresh: n,
            ..Taken::default()
        };
        assert_eq!(publish(&hub, vec![load("a", 1, 5), router(1, 1)], false), fresh(2));
        assert_eq!(
            publish(&hub, vec![load("a", 1, 5), load("a", 1, 4), router(1, 1)], false).old,
            3
        );
        assert_eq!(publish(&hub, vec![load("a", 1, 6), router(2, 0)], false), fresh(2));
        assert_eq!(
            publish(&hub, vec![router(1, 9)], false).old,
            1,
            "a frame of an earlier boot is old"
        );
        assert_eq!(hub.follow().0.len(), 2);
    }

    #[test]
    fn frames_of_own_clients_are_relayed_once_and_relayed_ones_are_not() {
        let hub = SoftHub::default();
        let (mut relay, (_, mut feed)) = (hub.relayed(), hub.follow());
        publish(&hub, vec![load("a", 1, 1)], false);
        publish(&hub, vec![load("b", 1, 1)], true);
        assert_eq!(feed.len(), 2);
        assert_eq!(relay.try_recv().unwrap()[0], load("a", 1, 1));
        assert!(relay.try_recv().is_err());
        assert_eq!(feed.try_recv().unwrap()[0], load("a", 1, 1));
    }

    #[test]
    fn what_an_engine_reused_goes_to_agents_and_other_nodes_and_is_never_kept() {
        let hub = SoftHub::default();
        let (mut relay, (_, mut feed), mut agents) = (hub.relayed(), hub.follow(), hub.reused());
        let reused = Reused {
            worker: 3,
            keys: vec![1, 2],
            tokens: 16,
            ..Reused::default()
        };
        let frame = SoftFrame {
            frame: Some(Frame::Reused(reused.clone())),
        };
        assert_eq!(publish(&hub, vec![frame.clone()], false).fresh, 1);
        assert_eq!(*agents.try_recv().unwrap(), reused);
        assert_eq!(relay.try_recv().unwrap()[0], frame);
        publish(&hub, vec![frame], true);
        assert!(agents.try_recv().is_ok() && relay.try_recv().is_err());
        assert!(feed.try_recv().is_err(), "routers don't need it");
        assert!(hub.follow().0.is_empty());
    }

    #[test]
    fn silent_routers_are_forgotten() {
        let hub = SoftHub::default();
        publish(&hub, vec![router(1, 1), load("a", 1, 1)], false);
        let back = |kept: &mut Kept, by| kept.at = kept.at.checked_sub(by).unwrap();
        back(hub.table.lock().routers.get_mut("r").unwrap(), ROUTER_LIFE);
        hub.expire();
        assert_eq!(hub.follow().0, vec![load("a", 1, 1)]);
        back(hub.table.lock().loads.get_mut("a").unwrap(), LOAD_LIFE);
        hub.expire();
        assert!(hub.follow().0.is_empty());
    }
}
