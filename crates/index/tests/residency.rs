//! The residency against the plain model: same changes, same answers.
//!
//! A case is a list of steps, each five numbers that are read against the state they meet, so that any part of a case
//! is a case too. A difference is shrunk and kept as a file in `tests/cases`, which the last test replays.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use cairn_blocks::{BlockKey, Depth};
use cairn_index::oracle::Oracle;
use cairn_index::{HolderId, Residency};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

type Step = [u32; 5];

const HOLDERS: u32 = 5;
const ROOTS: [u64; 2] = [0x1111, 0x2222];
/// Kinds of steps; see [`World::step`].
const KINDS: u32 = 16;

/// Both implementations and the keys made so far.
struct World {
    real: Residency,
    model: Oracle,
    /// Parent and depth of every key that was made.
    made: HashMap<BlockKey, (BlockKey, u32)>,
}

fn child(parent: BlockKey, branch: u64) -> BlockKey {
    let mut z = parent.0.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(branch + 1);
    z = (z ^ (z >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    BlockKey(z ^ (z >> 32))
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            real: Residency::new(),
            model: Oracle::new(),
            made: HashMap::new(),
        };
        for holder in 0..HOLDERS - 1 {
            world.real.add_holder(HolderId(holder));
            world.model.add_holder(HolderId(holder));
        }
        world
    }

    /// A stretch of `len` keys below `anchor`; `shape` says where it branches off the main line.
    fn grow(&mut self, anchor: BlockKey, depth: u32, len: u32, shape: u32) -> Vec<BlockKey> {
        let mut rng = SmallRng::seed_from_u64(u64::from(shape % 97));
        let branch_at = rng.random_range(0..len * 2);
        let mut parent = anchor;
        (0..len)
            .map(|i| {
                let branch = if i == branch_at { u64::from(shape % 3) } else { 0 };
                let key = child(parent, branch);
                self.made.insert(key, (parent, depth + i + 1));
                parent = key;
                key
            })
            .collect()
    }

    /// The chain that ends in `key`, first block first.
    fn chain(&self, key: BlockKey) -> Vec<BlockKey> {
        let mut chain = Vec::new();
        let mut next = key;
        while let Some(&(parent, _)) = self.made.get(&next) {
            chain.push(next);
            next = parent;
        }
        chain.reverse();
        chain
    }

    fn held(&self, holder: HolderId, at: u32) -> Option<(BlockKey, u32)> {
        let count = self.model.holder_blocks(holder) as usize;
        let key = self.model.held(holder).nth(at as usize % count.max(1))?;
        Some((key, self.made[&key].1))
    }

    fn store(&mut self, holder: HolderId, anchor: BlockKey, depth: u32, skip: u32, keys: &[BlockKey]) -> Check {
        let real = self.real.store(holder, anchor, Depth(depth), skip, keys);
        let model = self.model.store(holder, anchor, Depth(depth), skip, keys);
        same("store", real, model)
    }

    fn remove(&mut self, holder: HolderId, key: BlockKey, depth: u32, count: u32) -> Check {
        let real = self.real.remove(holder, key, Depth(depth), count);
        let model = self.model.remove(holder, key, Depth(depth), count);
        same("remove", real, model)
    }

    fn step(&mut self, [kind, who, a, b, c]: Step) -> Check {
        let holder = HolderId(who % HOLDERS);
        let root = BlockKey(ROOTS[(c % 7 == 0) as usize]);
        match kind % KINDS {
            // A chain from its root.
            0 | 1 => {
                let keys = self.grow(root, 0, 1 + a % 50, b);
                self.store(holder, root, 0, 0, &keys)?;
            }
            // With ancestors that it doesn't hold.
            2 => {
                let keys = self.grow(root, 0, 1 + a % 50, b);
                self.store(holder, root, 0, c % 40, &keys)?;
            }
            // Below a block that it holds.
            3..=5 => {
                if let Some((anchor, depth)) = self.held(holder, a) {
                    let len = if c.is_multiple_of(3) { 1 } else { 1 + c % 40 };
                    let keys = self.grow(anchor, depth, len, b);
                    let skip = if c % 5 == 0 { b % 8 } else { 0 };
                    self.store(holder, anchor, depth, skip, &keys)?;
                }
            }
            // Below a block that another holds.
            6 => {
                let other = HolderId(c % HOLDERS);
                if let Some((anchor, depth)) = self.held(other, a) {
                    let keys = self.grow(anchor, depth, 1 + b % 20, b);
                    let real = self
                        .real
                        .store_beside(holder, &[other], anchor, Depth(depth), c % 4, &keys);
                    let model = self
                        .model
                        .store_beside(holder, &[other], anchor, Depth(depth), c % 4, &keys);
                    same("store beside", real, model)?;
                }
            }
            // From the middle or the end of a chain.
            7 | 8 => {
                if let Some((key, depth)) = self.held(holder, a) {
                    self.remove(holder, key, depth, 1 + b % if c % 2 == 0 { 2 } else { 70 })?;
                }
            }
            // From the end, block by block or in stretches.
            9..=11 => {
                if let Some((key, _)) = self.held(holder, a) {
                    let chain = self.chain(key);
                    let mut keys = self.grow(key, chain.len() as u32, 30, b);
                    keys.splice(0..0, chain);
                    let mut reached = self.model.match_from(holder, &keys, Depth(0)).0;
                    for _ in 0..c % 20 {
                        let Some(last) = reached.checked_sub(1) else { break };
                        let count = 1 + b % 3;
                        self.remove(holder, keys[last as usize], reached, count)?;
                        reached = reached.saturating_sub(count);
                    }
                }
            }
            // What can't be.
            12 => {
                let key = child(BlockKey(u64::from(a)), 9);
                self.made.insert(key, (BlockKey(u64::from(a)), 1));
                self.store(holder, key, 1 + b % 9, 0, &[child(key, 1)])?;
                self.remove(holder, key, 1 + b % 9, 1 + c % 9)?;
                if let Some((key, depth)) = self.held(holder, a) {
                    self.remove(holder, key, depth + 1, 1)?;
                    self.store(holder, key, depth + 1, 0, &[child(key, 5)])?;
                    self.remove(HolderId(77), key, depth, 1)?;
                }
            }
            13 if c % 8 == 0 => {
                self.real.clear(holder);
                self.model.clear(holder);
            }
            13 if c % 8 == 1 => {
                self.real.remove_holder(holder);
                self.model.remove_holder(holder);
            }
            13 => {
                self.real.add_holder(holder);
                self.model.add_holder(holder);
            }
            _ => self.compare_matches(holder, a, b, c)?,
        }
        same(
            "held blocks",
            self.real.holder_blocks(holder),
            self.model.holder_blocks(holder),
        )?;
        // The model adds its digest up each time.
        if c.is_multiple_of(8) {
            self.compare(holder)
        } else {
            Ok(())
        }
    }

    fn compare(&self, holder: HolderId) -> Check {
        same(
            "digest",
            self.real.holder_digest(holder),
            self.model.holder_digest(holder),
        )?;
        same("known blocks", self.real.known_blocks(), self.model.known_blocks())
    }

    fn compare_matches(&mut self, holder: HolderId, a: u32, b: u32, c: u32) -> Check {
        let mut keys = match self.held(HolderId(c % HOLDERS), a) {
            Some((key, _)) => self.chain(key),
            None => Vec::new(),
        };
        // Cut somewhere, then another way on.
        keys.truncate(
            keys.len()
                - if c.is_multiple_of(3) {
                    (b as usize % 40).min(keys.len())
                } else {
                    0
                },
        );
        let anchor = keys.last().copied().unwrap_or(BlockKey(ROOTS[0]));
        let more = self.grow(anchor, keys.len() as u32, 1 + b % 30, b);
        keys.extend(more);
        let (mut real, mut model) = (vec![7], vec![8]);
        self.real.match_prefix(&keys, &mut real);
        self.model.match_prefix(&keys, &mut model);
        same("matches", &real, &model)?;
        for from in [0, 1, b % 20, b % 60] {
            let real = self.real.match_from(holder, &keys, Depth(from));
            let model = self.model.match_from(holder, &keys, Depth(from));
            same("match from", real, model)?;
        }
        Ok(())
    }

    fn compare_all(&mut self) -> Check {
        for holder in (0..HOLDERS).map(HolderId) {
            self.compare(holder)?;
            let held: Vec<BlockKey> = self.model.held(holder).collect();
            for key in held {
                let chain = self.chain(key);
                let depth = chain.len() as u32;
                let real = self.real.match_from(holder, &chain, Depth(depth - 1));
                same("a held block", real, Depth(depth))?;
            }
        }
        Ok(())
    }
}

type Check = Result<(), String>;

fn same<T: PartialEq + std::fmt::Debug>(what: &str, real: T, model: T) -> Check {
    if real == model {
        Ok(())
    } else {
        Err(format!("{what}: {real:?}, the model says {model:?}"))
    }
}

fn run(steps: &[Step]) -> Check {
    let mut world = World::new();
    for (i, &step) in steps.iter().enumerate() {
        world.step(step).map_err(|e| format!("step {i} {step:?}: {e}"))?;
    }
    world.compare_all()?;
    for holder in (0..HOLDERS).map(HolderId) {
        world.real.remove_holder(holder);
        world.model.remove_holder(holder);
    }
    // No residue.
    same("blocks left", world.real.known_blocks(), 0)?;
    same("runs left", world.real.run_count(), 0)?;
    same("shares left", world.real.share_count(), 0)?;
    same("weight left", world.real.weight(), 0)
}

/// Like [`run`], with panics as differences.
fn outcome(steps: &[Step]) -> Check {
    std::panic::catch_unwind(|| run(steps)).unwrap_or_else(|_| Err("panicked".into()))
}

fn cases() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/cases")
}

/// Leaves steps out as long as the case still fails, then keeps it.
fn shrink_and_keep(mut steps: Vec<Step>) -> String {
    let mut size = steps.len() / 2;
    while size > 0 {
        let mut at = 0;
        while at < steps.len() {
            let mut fewer = steps.clone();
            fewer.drain(at..(at + size).min(steps.len()));
            if outcome(&fewer).is_err() {
                steps = fewer
            } else {
                at += size
            }
        }
        size /= 2;
    }
    let mut text = String::new();
    for step in &steps {
        writeln!(text, "{} {} {} {} {}", step[0], step[1], step[2], step[3], step[4]).unwrap();
    }
    let mut name = 0u64;
    text.bytes()
        .for_each(|b| name = name.wrapping_mul(0x100_0000_01b3) ^ u64::from(b));
    let path = cases().join(format!("residency-{name:016x}.txt"));
    std::fs::write(&path, &text).unwrap();
    format!("{}: {} steps\n{text}{:?}", path.display(), steps.len(), outcome(&steps))
}

#[test]
fn a_million_random_changes_leave_what_the_model_says() {
    const STEPS: usize = 2_000;
    let worlds: u64 = std::env::var("CAIRN_FUZZ_WORLDS").map_or(500, |n| n.parse().unwrap());
    let first: u64 = std::env::var("CAIRN_FUZZ_SEED").map_or(0, |n| n.parse().unwrap());
    for seed in first..first + worlds {
        let mut rng = SmallRng::seed_from_u64(seed);
        // Some worlds mostly grow, some mostly shrink, some concern one holder.
        let (holders, kinds) = (rng.random_range(1..=HOLDERS), rng.random_range(0..3));
        let steps: Vec<Step> = (0..STEPS)
            .map(|_| {
                let kind = match kinds {
                    0 => rng.random_range(0..KINDS),
                    1 => rng.random_range(3..12),
                    _ => [0, 3, 7, 9, 9, 14, 6, 2][rng.random_range(0..8)],
                };
                [
                    kind,
                    rng.random_range(0..holders),
                    rng.random(),
                    rng.random(),
                    rng.random(),
                ]
            })
            .collect();
        if let Err(difference) = outcome(&steps) {
            panic!("seed {seed}: {difference}\n{}", shrink_and_keep(steps));
        }
    }
}

/// What engines that evict at random do: the table of all keys is made on the way, in steps, and outgrown.
#[test]
fn removals_at_random_leave_what_the_model_says() {
    let mut rng = SmallRng::seed_from_u64(11);
    let mut world = World::new();
    let (mut with_table, mut turns) = (false, 0);
    for round in 0..9_000u32 {
        // More and more chains, then none for a while, then hardly any removal at random, then many again.
        let kind = match round / 1_000 {
            0 | 3 | 4 | 7 => 0,
            1 | 2 | 5 => [7, 7, 7, 3, 14][round as usize % 5],
            6 => [9, 3][round as usize % 2],
            _ => [7, 0, 14][round as usize % 3],
        };
        // Removals of one or two blocks, and nothing is compared at each step but the counts.
        let step = [kind, rng.random(), rng.random(), rng.random(), rng.random::<u32>() | 1];
        world.step(step).unwrap();
        if round % 500 == 0 {
            (0..HOLDERS).for_each(|holder| world.compare(HolderId(holder)).unwrap());
        }
        turns += u32::from(world.real.reads_ahead() != with_table);
        with_table = world.real.reads_ahead();
    }
    world.compare_all().unwrap();
    for holder in (0..HOLDERS).map(HolderId) {
        world.real.remove_holder(holder);
    }
    assert_eq!(world.real.known_blocks(), 0);
    assert!(turns > 2, "the table came or went {turns} times");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn short_histories_leave_what_the_model_says(
        steps in prop::collection::vec(prop::array::uniform5(0u32..400), 0..60)
    ) {
        prop_assert_eq!(run(&steps), Ok(()));
    }
}

#[test]
fn kept_cases_stay_right() {
    for entry in std::fs::read_dir(cases()).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let steps: Vec<Step> = text
            .lines()
            .filter(|line| !line.starts_with('#'))
            .map(|line| {
                let numbers: Vec<u32> = line.split(' ').map(|n| n.parse().unwrap()).collect();
                numbers.try_into().unwrap()
            })
            .collect();
        assert_eq!(run(&steps), Ok(()), "{}", path.display());
    }
}
