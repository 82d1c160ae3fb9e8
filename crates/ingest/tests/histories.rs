//! Random engine histories end in the index as a plain model of the engine's cache says, whatever the network did.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "kit/engine.rs"]
mod engine;
#[path = "kit/rig.rs"]
mod rig;

use std::collections::VecDeque;

use cairn_index::Confidence;
use cairn_ingest::{AuditOutcome, EventBatch, ReplayEnd, Source};
use engine::{Engine, Offload, Rng, prompt};
use rig::{Options, Rig, config};

const SHAPES: [(u32, u32); 9] = [
    (16, 16),
    (16, 16),
    (64, 16),
    (1, 16),
    (16, 32),
    (24, 16),
    (128, 16),
    (4, 16),
    (48, 32),
];

struct World {
    rng: Rng,
    engine: Engine,
    rig: Rig,
    canonical: u32,
    /// Answers of the replay socket on their way; `None` is the end marker.
    answers: VecDeque<Option<EventBatch>>,
    /// The last checkpoint, often older than what the index has.
    saved: Option<Vec<u8>>,
    delivered: u32,
}

impl World {
    fn new(seed: u64, offload: Offload) -> Self {
        let mut rng = Rng(seed);
        let (block_size, canonical) = SHAPES[rng.below(SHAPES.len() as u64) as usize];
        let room = 1_500 / block_size as usize;
        let engine = Engine::new(block_size, room, room * 2, offload);
        let options = Options {
            block_size: canonical,
            capacity: room as u64,
            ..Options::default()
        };
        let rig = Rig::new(&options);
        Self {
            rng,
            engine,
            rig,
            canonical,
            answers: VecDeque::new(),
            saved: None,
            delivered: 0,
        }
    }

    /// The engine does something; its message, if it has one.
    fn step(&mut self) -> Option<EventBatch> {
        match self.rng.below(100) {
            0..=84 => {
                let prompt = prompt(&mut self.rng, 420);
                self.engine.serve(&prompt, &mut self.rng)
            }
            85..=98 => self.engine.evict_any(&mut self.rng),
            _ => self.engine.clear(),
        }
    }

    /// A live message, of which the index hears at once or only with a later one.
    fn deliver(&mut self, batch: EventBatch) {
        self.delivered += 1;
        if self.delivered.is_multiple_of(3) {
            let now = self.rig.now;
            self.rig.members[0].source.live(now, batch);
        } else {
            self.rig.live(0, batch);
        }
    }

    /// Answers of the engine to what was asked since.
    fn ask(&mut self) {
        for from in std::mem::take(&mut self.rig.members[0].replays) {
            let kept = self.engine.log.iter().filter(|b| b.seq >= from).cloned().map(Some);
            self.answers.extend(kept);
            self.answers.push_back(None);
        }
    }

    fn answer(&mut self) -> bool {
        self.ask();
        let Some(answer) = self.answers.pop_front() else {
            return false;
        };
        match answer {
            Some(batch) => self.rig.replayed(0, batch),
            None => {
                let now = self.rig.now;
                self.rig.members[0].source.replay_ended(now, ReplayEnd::Complete);
                self.rig.settle();
            }
        }
        true
    }

    fn reconnect(&mut self) {
        self.answers.clear();
        self.rig.members[0].replays.clear();
        let now = self.rig.now;
        self.rig.members[0].source.disconnected(now);
        self.rig.members[0].source.connected(now);
        self.rig.settle();
    }

    fn compare(&mut self, seed: u64) {
        self.rig.settle();
        for _ in 0..10 {
            let prompt = prompt(&mut self.rng, 420);
            let truth = self.engine.truth(&prompt, self.canonical);
            let hit = self.rig.hit(&prompt);
            let shape = (self.engine.block_size, self.canonical);
            assert_eq!(hit.0, truth.0, "seed {seed}, {} tokens, {shape:?}", prompt.len());
            if shape.0.is_multiple_of(shape.1) || shape.1.is_multiple_of(shape.0) {
                assert_eq!(hit.1, truth.1, "seed {seed}, {} tokens, {shape:?}", prompt.len());
            } else {
                // Where engine blocks lie across canonical ones, a block below a half-held one isn't claimed.
                assert!(hit.1 <= truth.1, "seed {seed}, {} tokens, {shape:?}", prompt.len());
            }
        }
        assert_eq!(self.rig.audit(0), AuditOutcome::Equal, "seed {seed}");
        assert_eq!(self.rig.members[0].source.stats().unanchored, 0, "seed {seed}");
    }
}

fn undisturbed(offload: Offload, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let mut world = World::new(seed, offload);
        world.rig.fresh(0);
        for i in 0..60 {
            if let Some(batch) = world.step() {
                world.deliver(batch);
            }
            if i % 20 == 0 {
                world.compare(seed);
            }
        }
        world.compare(seed);
        assert_eq!(world.rig.claim(0), Confidence::Exact, "seed {seed}");
    }
}

#[test]
fn gpu_histories_equal_the_plain_model() {
    undisturbed(Offload::None, 0..27);
}

#[test]
fn two_tier_histories_with_bare_events_equal_the_plain_model() {
    undisturbed(Offload::Bare, 1_000..1_027);
}

#[test]
fn two_tier_histories_with_described_events_equal_the_plain_model() {
    undisturbed(Offload::Described, 2_000..2_027);
}

#[test]
fn loss_reordering_duplicates_reconnects_and_restarts_end_equal_to_having_seen_everything() {
    for seed in 3_000..3_072 {
        let offload = [Offload::None, Offload::Bare, Offload::Described][seed as usize % 3];
        let mut world = World::new(seed, offload);
        world.reconnect();
        for _ in 0..120 {
            match world.rng.below(100) {
                // Lost on the way.
                0..=14 => drop(world.step()),
                // A duplicate, or an old one late.
                15..=22 => {
                    if let Some(batch) = world.engine.log.iter().rev().nth(world.rng.below(4) as usize).cloned() {
                        world.rig.live(0, batch);
                    }
                }
                23..=27 => world.reconnect(),
                28..=29 => {
                    world.engine.restart();
                    for _ in 0..world.rng.below(12) {
                        world.step();
                    }
                    world.reconnect();
                }
                30..=55 => {
                    world.answer();
                }
                56..=60 => world.rig.tick(1_100),
                61..=62 => world.saved = Some(world.rig.members[0].source.checkpoint()),
                63..=64 => world.restart_agent(),
                _ => {
                    if let Some(batch) = world.step() {
                        world.deliver(batch);
                    }
                }
            }
        }
        world.quiet();
        world.compare(seed);
        assert_eq!(world.rig.claim(0), Confidence::Exact, "seed {seed}");
    }
}

impl World {
    /// No more events: idle polls find a lost tail.
    fn quiet(&mut self) {
        for _ in 0..6 {
            while self.answer() {}
            self.rig.tick(1_100);
        }
        while self.answer() {}
    }

    /// The agent process ends, with or without a last checkpoint, and comes back.
    fn restart_agent(&mut self) {
        let last = self.saved.take().filter(|_| self.rng.chance(50));
        let bytes = last.unwrap_or_else(|| self.rig.members[0].source.checkpoint());
        let config = self.rig.members[0].source.config().clone();
        let now = self.rig.now;
        self.rig.members[0].source = Source::restore(config, now, &bytes).unwrap();
        self.rig.register(0);
        self.reconnect();
    }
}

#[test]
fn gaps_that_cannot_be_replayed_never_leave_credit_beyond_one_turnover() {
    for seed in 4_000..4_020 {
        let mut world = World::new(seed, Offload::None);
        world.rig.members[0].source = Source::new(
            cairn_ingest::SourceConfig {
                replay: false,
                ..config(&Options {
                    block_size: world.canonical,
                    capacity: world.engine.capacity as u64,
                    ..Options::default()
                })
            },
            world.rig.now,
        );
        world.rig.register(0);
        let now = world.rig.now;
        world.rig.members[0].source.connected(now);
        for _ in 0..40 {
            if let Some(batch) = world.step() {
                world.rig.live(0, batch);
            }
        }
        for _ in 0..30 {
            world.step();
        }
        let mut stored = 0;
        while stored <= world.engine.capacity {
            if let Some(batch) = world.step() {
                stored += batch
                    .events
                    .iter()
                    .map(|e| {
                        if let cairn_ingest::EngineEvent::Stored(s) = e {
                            s.hashes.len()
                        } else {
                            0
                        }
                    })
                    .sum::<usize>();
                world.rig.live(0, batch);
            }
        }
        assert_eq!(world.rig.claim(0), Confidence::Exact, "seed {seed}");
        for _ in 0..50 {
            let prompt = prompt(&mut world.rng, 420);
            let (claimed, real) = (world.rig.hit(&prompt).0, world.engine.truth(&prompt, world.canonical).0);
            assert!(claimed <= real, "seed {seed}: {claimed} claimed, {real} held");
        }
        assert_eq!(world.rig.audit(0), AuditOutcome::Equal, "seed {seed}");
    }
}
