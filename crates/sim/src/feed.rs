//! The feed from index nodes to routers: snapshot, then entries, then a heartbeat.

use std::rc::Rc;

use cairn_index::codec;

use crate::cluster::SNAPSHOT_BEHIND;
use crate::model::{Event, FeedFrame, Life};
use crate::world::{Link, World};

/// A heartbeat comes this often.
const IDLE_US: u64 = 250_000;

impl World {
    /// Entries that a node has just applied go to everyone who follows it.
    pub(crate) fn feed_entries(&mut self, node: usize, from: u64) {
        for router in 0..self.routers.len() {
            let place = &self.routers[router];
            if place.up && place.following == Some(node) {
                self.feed(node, router, from.min(place.fed));
            }
        }
    }

    /// Sends a router what it lacks of a node's state.
    pub(crate) fn feed(&mut self, node: usize, router: usize, _since: u64) {
        let place = &self.cluster.nodes[node];
        let applied = place.state.applied().0;
        let fed = self.routers[router].fed;
        if applied <= fed {
            return;
        }
        let frame = if fed == 0 || applied - fed > SNAPSHOT_BEHIND {
            let mut bytes = Vec::new();
            if codec::encode_snapshot(&place.state, &mut bytes).is_err() {
                return;
            }
            FeedFrame::Snapshot {
                index: applied,
                bytes: Rc::new(bytes),
            }
        } else {
            let entries = (fed..applied).map(|at| (at + 1, Rc::clone(&self.cluster.log[at as usize])));
            FeedFrame::Entries(entries.collect())
        };
        self.routers[router].fed = applied;
        self.feed_frame(node, router, frame);
    }

    fn feed_frame(&mut self, node: usize, router: usize, frame: FeedFrame) {
        let place = &self.routers[router];
        let (life, conn) = (place.life, place.feed_conn);
        let quorum_age_us = self.now - self.cluster.nodes[node].quorum_at;
        let event = Event::RouterReceive {
            router,
            life,
            conn,
            frame,
            quorum_age_us,
        };
        self.send(Link::Feed, node, router, conn, event);
    }

    pub(crate) fn node_idle(&mut self, node: usize, life: Life) {
        let place = &self.cluster.nodes[node];
        if !place.up || place.life != life {
            return;
        }
        if !place.alone && self.cluster.leader.is_some() {
            self.cluster.nodes[node].quorum_at = self.now;
        }
        for router in 0..self.routers.len() {
            if self.routers[router].up && self.routers[router].following == Some(node) {
                self.feed_frame(node, router, FeedFrame::Idle);
            }
        }
        self.after(IDLE_US, Event::NodeIdle { node, life });
    }

    /// A node is gone: its followers see their streams end.
    pub(crate) fn drop_followers(&mut self, node: usize) {
        for router in 0..self.routers.len() {
            if self.routers[router].following == Some(node) {
                self.router_unfollow(router);
            }
        }
    }
}
