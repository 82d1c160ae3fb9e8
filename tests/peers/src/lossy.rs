//! The agent mirror and index where one message in a hundred is lost on its way, and is asked for again.

use std::collections::VecDeque;

use cairn_blocks::BlockKey;
use cairn_ingest::{Effect, EventBatch, ReplayEnd};

use crate::contender::Contender;
use crate::log::{BlockId, Event, Log, mix};
use crate::mirror::{Mirrored, NOW};

/// One message in so many is lost.
const LOST_OF: u64 = 100;
/// Time after which an idle source asks whether it missed the last message.
const IDLE_MS: u64 = 2_000;

/// Mirrors and index, and what was lost of each worker's stream and not asked for yet.
pub struct Lossy {
    inner: Mirrored,
    lost: Vec<VecDeque<EventBatch>>,
    sent: u64,
    now: u64,
}

impl Lossy {
    /// Does what the source asks for: replays what was lost.
    fn serve(&mut self, worker: u32) {
        let now = NOW.after(self.now);
        // Ends: a replay brings everything that is missing, so that one request follows another only while some is.
        while let Some(effect) = self.inner.sources[worker as usize].poll_effect() {
            let Effect::RequestReplay { from } = effect else {
                panic!("the source asked for {effect:?}, which a lost message is no reason for");
            };
            let source = &mut self.inner.sources[worker as usize];
            for batch in self.lost[worker as usize].drain(..) {
                assert!(batch.seq >= from, "a lost message was taken for applied");
                source.replayed(now, batch);
            }
            source.replay_ended(now, ReplayEnd::Complete);
        }
        self.inner.tell(worker);
    }
}

impl Contender for Lossy {
    type Batch = Vec<(u32, EventBatch)>;
    type Query = Vec<BlockKey>;
    type Key = BlockKey;

    fn new(log: &Log) -> Self {
        let mut lossy = Self {
            inner: Mirrored::with_replay(log, true),
            lost: (0..log.workers).map(|_| VecDeque::new()).collect(),
            sent: 0,
            now: 0,
        };
        (0..log.workers).for_each(|worker| lossy.serve(worker));
        lossy
    }

    fn prepare(&mut self, log: &Log, events: &[Event]) -> Self::Batch {
        self.inner.prepare(log, events)
    }

    fn ingest(&mut self, batch: &mut Self::Batch) {
        let mut quiet = Vec::new();
        for (worker, batch) in batch.drain(..) {
            self.sent += 1;
            if mix(self.sent).is_multiple_of(LOST_OF) {
                self.lost[worker as usize].push_back(batch);
                quiet.push(worker);
            } else {
                self.inner.sources[worker as usize].live(NOW.after(self.now), batch);
                self.serve(worker);
            }
        }
        // A lost tail shows no gap: the idle poll finds it.
        if !quiet.is_empty() {
            self.now += IDLE_MS;
        }
        for worker in quiet {
            self.inner.sources[worker as usize].tick(NOW.after(self.now));
            self.serve(worker);
        }
    }

    fn query(&self, log: &Log, prompt: &[BlockId]) -> Vec<BlockKey> {
        self.inner.query(log, prompt)
    }

    fn keys(query: &Vec<BlockKey>) -> &[BlockKey] {
        query
    }

    fn find(&mut self, query: &mut Vec<BlockKey>) {
        self.inner.find(query);
    }

    fn answer(&self, out: &mut Vec<(u32, u32)>) {
        self.inner.answer(out);
    }

    fn mapped_bytes(&self) -> usize {
        self.inner.mapped_bytes()
    }
}
